"""`Groups`: a partition of the tokens or the samples of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import describe, read_only, same_fields


@dataclass(frozen=True, eq=False, repr=False)
class Groups:
    """A partition of tokens or samples.

    Parameters
    ----------
    index : int64 array (n, T) for tokens, (n,) for samples
        The group of each, in 0 ... len(names) - 1. It may have a leading run axis.
    names : tuple of str
        One name per group.
    """

    index: npt.NDArray[np.int64]
    names: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __repr__ = describe


GroupsLike: TypeAlias = Groups | npt.ArrayLike | tuple[npt.ArrayLike, Sequence[str]]


def validated(
    groups: GroupsLike | None, name: str, letters: str, lengths: tuple[int, ...]
) -> Groups | None:
    """Return the groups of the argument `name`, checked and in the form that a data set stores.

    Raises
    ------
    TypeError
        If they are neither integers nor a pair of integers and names.
    ValueError
        If a shape does not fit, or a group has no name.
    """
    if groups is None:
        return None
    index, names = _split(groups, name)
    array = checks.as_array(index, name)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype.name}")
    checks.shape(array, name, letters, lengths, runs=True)
    array = checks.ready(array.astype(np.int64, copy=False))
    low, high = int(array.min()), int(array.max())
    if names is None:
        names = tuple(map(str, range(high + 1)))
    if low < 0 or high >= len(names):
        raise ValueError(
            f"{name}: expected groups in [0, {len(names)}), got {low if low < 0 else high}"
        )
    return Groups(read_only(array), names)


def _split(groups: GroupsLike, name: str) -> tuple[npt.ArrayLike, tuple[str, ...] | None]:
    if isinstance(groups, Groups):
        return groups.index, groups.names
    if not isinstance(groups, tuple):
        return groups, None
    if len(groups) == 2 and not isinstance(groups[1], str):
        index, names = groups[0], tuple(groups[1])
        if all(isinstance(text, str) for text in names):
            return index, names
    raise TypeError(f"{name}: expected integers or a pair (integers, names), got {groups!r:.80}")
