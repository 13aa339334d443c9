"""What constraints say about the entries of a parameter: which are fixed, and which stay equal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse

from .._arguments.values import Array

Parts: TypeAlias = tuple[Any, ...]
"""Names, bool arrays and int64 arrays, which hold at once."""
Labels: TypeAlias = npt.NDArray[np.int64]
CoreConstraint: TypeAlias = tuple[Labels, Labels, Labels, bool] | None
"""Fixed entries; those of groups, and where these end; whether groups are of several heads."""

FIXED = -1
"""The label of entries that keep their values."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The entries of a parameter of one run: those that are fixed, and groups of equal ones.

    Attributes
    ----------
    shape : tuple of int
        Of the parameter, without the run axis.
    labels : int64 array (entries,)
        -1 for fixed entries, equal numbers for entries that stay equal.
    of_names : bool
        Whether names alone say so: the subspace is then one of whole matrices, rows or heads.
    """

    shape: tuple[int, ...]
    labels: Labels
    of_names: bool

    @cached_property
    def fixed(self) -> Labels:
        """The fixed entries, in their order."""
        return np.flatnonzero(self.labels == FIXED)

    @cached_property
    def _sorted(self) -> tuple[Labels, Labels]:
        """The trained entries, those of a label together, and how many there are of each label."""
        order = np.argsort(self.labels, kind="stable")[len(self.fixed) :]
        return order, np.unique(self.labels[order], return_counts=True)[1]

    @cached_property
    def groups(self) -> tuple[Labels, Labels]:
        """The entries of groups of at least two, one group after the other, and where each ends."""
        order, counts = self._sorted
        several = counts > 1
        return order[np.repeat(several, counts)], np.cumsum(counts[several])

    @cached_property
    def _first(self) -> Labels:
        """The place, among the entries of `groups`, of the first one of the group of each."""
        ends = self.groups[1]
        counts = np.diff(ends, prepend=0)
        return np.repeat(ends - counts, counts)

    @property
    def is_trivial(self) -> bool:
        """Whether every entry is trained on its own."""
        return not len(self.fixed) and not len(self.groups[1])

    @cached_property
    def by_head(self) -> Labels:
        """The labels with an axis of heads; a prompt has one."""
        heads = self.shape[0] if len(self.shape) == 3 else 1
        return self.labels.reshape(heads, -1)

    @cached_property
    def over_heads(self) -> bool:
        """Whether entries of several heads are tied."""
        heads = self.groups[0] // self.by_head.shape[1]
        return bool(np.any(heads != heads[self._first]))

    @property
    def is_uneven(self) -> bool:
        """Whether heads with tied entries may have gradients of different norms."""
        return self.over_heads and bool(np.any(self.by_head != self.by_head[:1]))

    @property
    def core(self) -> CoreConstraint:
        """The partition in the form that the core expects."""
        return None if self.is_trivial else (self.fixed, *self.groups, self.over_heads)

    def means(self, array: Array) -> npt.NDArray[np.float64]:
        """Return (..., labels), the means of the groups of an array with any leading axes."""
        order, counts = self._sorted
        flat = array.reshape(-1, len(self.labels))[:, order].astype(np.float64)
        starts = np.cumsum(counts) - counts
        return np.add.reduceat(flat, starts, axis=1) / counts if len(starts) else flat

    def spread(self, means: npt.NDArray[np.float64], like: Array) -> Array:
        """Return a copy of `like` whose groups have these values, of its dtype."""
        order, counts = self._sorted
        result = like.reshape(-1, len(self.labels)).copy()
        result[:, order] = np.repeat(means, counts, axis=1)
        return result.reshape(like.shape)

    def project(self, gradient: Array) -> Array:
        """Return the orthogonal projection: 0 at fixed entries, means over groups."""
        return self.spread(self.means(gradient), np.zeros_like(gradient))

    @property
    def sizes(self) -> Labels:
        """The number of entries of each group, of those with one entry too."""
        return self._sorted[1]

    def unequal(self, array: Array) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the places of two tied entries that differ, with those of a run axis, or None."""
        members, first = self.groups[0], self._first
        flat = array.reshape(-1, len(self.labels))[:, members]
        wrong = np.argwhere(flat != flat[:, first])
        if not len(wrong):
            return None
        run, at = wrong[0]
        base = run * len(self.labels)
        one, two = (
            tuple(int(i) for i in np.unravel_index(base + members[k], array.shape))
            for k in (first[at], at)
        )
        return one, two


def partition(parts: Parts, shape: tuple[int, ...]) -> Partition:
    """Return what parts say together about the entries of a parameter of this shape."""
    size = math.prod(shape)
    entries = np.arange(size)
    fixed = np.zeros(size, bool)
    heads, tails = [], []
    for part in parts:
        labels = _labels(part, shape).ravel()
        fixed |= labels == FIXED
        trained = entries[labels != FIXED]
        heads.append(trained)
        tails.append(labels[trained])
    if len(parts) == 1:
        merged = np.full(size, FIXED)
        merged[heads[0]] = tails[0]
    else:
        rows, columns = np.concatenate(heads), np.concatenate(tails)
        links = scipy.sparse.coo_array((np.ones(len(rows), bool), (rows, columns)), (size, size))
        merged = scipy.sparse.csgraph.connected_components(links, directed=False)[1]
        merged = merged.astype(np.int64)
        merged[np.isin(merged, merged[fixed])] = FIXED
    return Partition(shape, merged, all(isinstance(part, str) for part in parts))


def _labels(part: Any, shape: tuple[int, ...]) -> Labels:
    """Return, of this shape, -1 for fixed entries and the first that each other is tied to."""
    entries = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    if not isinstance(part, str):
        if part.dtype == bool:
            return np.where(part, entries, FIXED)
        _, first, inverse = np.unique(part, return_index=True, return_inverse=True)
        return np.where(part == FIXED, FIXED, first[inverse.reshape(shape)])
    if part == "symmetric":
        return np.minimum(entries, np.swapaxes(entries, -1, -2))
    equal = entries[:1] if part == "heads" else entries[..., :1, :]
    return np.broadcast_to(equal, shape)
