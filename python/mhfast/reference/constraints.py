"""Constraints on parameters: subspaces of entries that are equal or do not change.

A constraint on a parameter is a name, a bool array (True: trained), an integer array of the
parameter's shape (-1: fixed, equal numbers: tied), or a tuple of these, all of which hold.

| name        | what is equal                          |
|-------------|----------------------------------------|
| "symmetric" | entries [h, i, j] and [h, j, i]        |
| "heads"     | entries [h, i, j] of all h             |
| "rows"      | entries [h, i, j] of all i             |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import Array
from .normalized import Scaled


def labels(constraint: Any, shape: tuple[int, ...]) -> Any:
    """Integers of this shape: -1 for entries that are fixed, equal ones for those that are tied.

    An entry that is tied to a fixed one is fixed.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> mh.reference.labels("symmetric", (1, 2, 2)).tolist()
    [[[0, 1], [1, 3]]]
    >>> upper = np.array([[[True, True], [False, True]]])
    >>> mh.reference.labels(("symmetric", upper), (1, 2, 2)).tolist()
    [[[0, -1], [-1, 3]]]
    """
    parts = constraint if isinstance(constraint, tuple) else (constraint,)
    found = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    fixed = np.zeros(shape, bool)
    for part in parts:
        numbers = _numbers(part, found.shape)
        fixed |= numbers == -1
        for number in np.unique(numbers[numbers != -1]):
            together = np.unique(found[numbers == number])
            found[np.isin(found, together)] = together[0]
    found[np.isin(found, found[fixed])] = -1
    return found


def _numbers(part: Any, shape: tuple[int, ...]) -> Any:
    entries = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if isinstance(part, str):
        if part == "symmetric":
            return np.minimum(entries, np.swapaxes(entries, -1, -2))
        return np.broadcast_to(entries[:1] if part == "heads" else entries[..., :1, :], shape)
    part = np.asarray(part)
    return np.where(part, entries, -1) if part.dtype == bool else part


def project(constraint: Any, array: Array) -> Array:
    """Orthogonal projection: 0 at fixed entries, the mean of tied ones in their place.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> mh.reference.project("symmetric", np.array([[[1.0, 2.0], [4.0, 8.0]]])).tolist()
    [[[1.0, 3.0], [3.0, 8.0]]]
    """
    found = labels(constraint, array.shape)
    result = np.zeros_like(array)
    for label in np.unique(found[found >= 0]):
        result[found == label] = array[found == label].mean()
    return result


def project_scaled(constraint: Any, gradient: Scaled, shape: tuple[int, ...]) -> Scaled:
    """`project` of a gradient whose heads have exponents, which tied heads get in common."""
    mantissa, log = gradient
    found = labels(constraint, shape).reshape(len(log), -1)
    if any(np.isin(found[h], found[:h])[found[h] >= 0].any() for h in range(len(log))):
        largest = log.max()
        mantissa = mantissa * np.exp(log - largest).reshape(-1, *(1,) * (mantissa.ndim - 1))
        log = np.full_like(log, largest)
    return Scaled(project(constraint, mantissa.reshape(shape)).reshape(mantissa.shape), log)
