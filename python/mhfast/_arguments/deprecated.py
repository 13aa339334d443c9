"""Names and ways of calling that are replaced: they work for one minor version, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def keyword_only(name: str, position: int) -> Callable[[F], F]:
    """Let the keyword-only argument ``name`` still be given by position, with a warning.

    Parameters
    ----------
    name : str
        The argument.
    position : int
        The number of arguments that were before it.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if len(arguments) == position + 1 and name not in keywords:
                warnings.warn(
                    f"{function.__name__}: {name} is given by keyword, {name}=...; giving it by "
                    "position ends with version 0.3",
                    DeprecationWarning,
                    stacklevel=2,
                )
                keywords[name] = arguments[-1]
                arguments = arguments[:-1]
            return function(*arguments, **keywords)

        return cast(F, call)

    return decorate
