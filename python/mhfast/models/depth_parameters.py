"""Names of the parameters of a `Stack`, such as "0.W", that of its first layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._arguments.checks import Wrt
from .._arguments.values import Array
from . import problem as arguments

if TYPE_CHECKING:
    from .depth import Stack


def wrt(stack: Stack, names: Wrt, *, inputs: bool = False) -> tuple[str, ...]:
    """Return the names of what to differentiate by, in their order; None means all parameters.

    "W" stands for that of every layer.

    Parameters
    ----------
    inputs : bool
        Whether X may be among the names, where it is not words.

    Raises
    ------
    TypeError
        If `names` is neither a name nor a sequence of names.
    ValueError
        If a name is not one of the stack's.
    """
    of_tokens = ("X",) if inputs and stack.embedding is None else ()
    known = (*stack.parameters, *of_tokens)
    if names is None:
        return tuple(stack.parameters)
    short = {own for j, own in map(of_layer, stack.parameters) if j >= 0}
    expected = f"{', '.join(known)}, or of every layer {', '.join(sorted(short))}"
    asked = arguments.names_from(names, (*known, *short), expected)
    return tuple(name for name in known if name in asked or of_layer(name)[1] in asked)


def of_layer(name: str) -> tuple[int, str]:
    """Return the layer of a parameter of a stack and its name there; -1 where it has no layer."""
    layer, _, own = name.rpartition(".")
    return int(layer) if layer else -1, own


def by_layer(arrays: Mapping[str, Array]) -> dict[int, dict[str, Array]]:
    """Return arrays by the layer, and the name there, of the parameters of a stack's layers."""
    found: dict[int, dict[str, Array]] = {}
    for name, array in arrays.items():
        j, own = of_layer(name)
        if j >= 0:
            found.setdefault(j, {})[own] = array
    return found
