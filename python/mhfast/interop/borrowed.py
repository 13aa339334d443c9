"""Models that borrow the memory of another library's arrays for one call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from .._arguments import checks
from .._arguments.values import Array
from ..models.problem import borrowing, of_arrays


def borrowed(kind: Any, arrays: Mapping[str, Array], query: int | None, *settings: Any) -> Any:
    """Make a model of parameters by name, whose memory must not change while it is used.

    What does not depend on the entries is checked once for all calls of these shapes.

    Parameters
    ----------
    kind : type
        `Classifier` or `Layer`.
    arrays : dict of arrays
        W, U or V, and perhaps the prompt.
    query : int, optional
        The token that asks, if one does.
    settings
        `scale`, `causal`, `attention` and `normalize`.
    """
    ready = {name: checks.ready(array) for name, array in arrays.items()}
    shapes = tuple([(name, array.shape, array.dtype.char) for name, array in ready.items()])
    return borrowing(_checked(kind, shapes, query, *settings), ready)


@lru_cache(maxsize=64)
def _checked(
    kind: Any, shapes: tuple[tuple[str, Any, Any], ...], query: int | None, *settings: Any
) -> Any:
    """Return a model of zeros."""
    zeros = {name: np.zeros(shape, char) for name, shape, char in shapes}
    for array in zeros.values():
        array.flags.writeable = False  # then the model keeps the pages, which nothing touches
    names = ("scale", "causal", "attention", "normalize")
    return of_arrays(kind, zeros, query=query, **dict(zip(names, settings, strict=True)))
