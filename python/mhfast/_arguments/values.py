"""Common to frozen dataclasses of arrays: read-only storage, comparison and a short repr."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.floating[Any]]
Optional: TypeAlias = Array | Any
"""An array or None. It is Any to a type checker, because callers know which it is."""

Value: TypeAlias = float | npt.NDArray[np.float64]  # an array (R,) where there is a run axis
Scalar: TypeAlias = Any  # a float, or a float64 array (R,) where there is a run axis
Entries = TypeVar("Entries", bound=np.generic)


def read_only(array: npt.NDArray[Entries]) -> npt.NDArray[Entries]:
    """Return a read-only view of `array`; its owner can still write to the memory."""
    view = array.view()
    view.flags.writeable = False
    return view


def frozen(array: npt.NDArray[Entries]) -> npt.NDArray[Entries]:
    """Return `array` read-only, copied only if its memory is writable elsewhere."""
    owner: object = array
    while isinstance(owner, np.ndarray) and not owner.flags.writeable:
        owner = owner.base
    if owner is not None:
        array = array.copy()
        array.flags.writeable = False
    return array


def same(a: object, b: object) -> bool:
    """Return whether two values are equal, down to dtype, shape and every entry of their arrays.

    NaN equals NaN: a copy of what holds one is equal.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


def same_fields(a: Any, b: Any) -> bool:
    """Compare two dataclasses that hold arrays: by class, then by every field that compares."""
    return type(a) is type(b) and all(
        same(getattr(a, field.name), getattr(b, field.name))
        for field in dataclasses.fields(a)
        if field.compare
    )


def field_values(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without cached values; this is what is pickled."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def describe(record: Any, always: tuple[str, ...] = ()) -> str:
    """Return a one-line repr of a dataclass, with the dtype and shape of its arrays.

    What is None or False is left out, unless its name is in `always`, and fields that say so.
    """
    fields = dataclasses.fields(record)
    given = [(field.name, getattr(record, field.name)) for field in fields if field.repr]
    kept = (
        (name, value)
        for name, value in given
        if name in always or (value is not None and value is not False)
    )
    parts = (f"{name}={shown(value)}" for name, value in kept)
    return f"{type(record).__name__}({', '.join(parts)})"


def shown(value: object) -> str:
    """Return a short repr: of an array dtype and shape, of a mapping its names."""
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} {value.shape}>"
    if isinstance(value, Mapping):
        return f"<{', '.join(map(str, value))}>"
    return repr(value)
