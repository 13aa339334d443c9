"""`Dataset`: samples with labels and what else is known about them, in one frozen record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _checks
from ._values import Array, describe, read_only, same_fields

Seed: TypeAlias = int | np.random.Generator


@dataclass(frozen=True, eq=False, repr=False)
class Groups:
    """A partition of tokens or samples.

    Parameters
    ----------
    index : int64 array (n, T) for tokens, (n,) for samples
        The group of each, in 0 ... len(names) - 1.
    names : tuple of str
        One name a group.
    """

    index: npt.NDArray[np.int64]
    names: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __repr__ = describe


GroupsLike: TypeAlias = Groups | npt.ArrayLike | tuple[npt.ArrayLike, Sequence[str]]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Dataset:
    """n samples of T tokens in dimension d with their labels.

    The arrays are kept as read-only views of the memory that was given, and copied only if they
    are not C-contiguous, aligned and in native byte order. Do not write to that memory while the
    data set is in use.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64
        The tokens.
    y : array (n,), real or integer
        Labels -1 and 1, or real targets for the squared loss.
    query : array (n, q, d), optional
        The query side of each sample; it overrides the `query` of a model.
    weight : array (n,), optional
        Finite weights w >= 0 with a positive sum: losses are Σ w ℓ / Σ w. None means ones.
    token_groups, sample_groups : integers (n, T) and (n,), or pairs (integers, names), optional
        The group of each token and of each sample, 0 first, for summaries recorded in training.
        The names default to "0", "1", ...
    truth : mapping, optional
        What a generator knows about the population, such as its class tokens or teacher.
    generator : callable (n, *, seed, **changes) -> Dataset, optional
        What `sample` calls. It must pickle if the data set is to.

    Raises
    ------
    TypeError
        If an array has the wrong kind of entries.
    ValueError
        If a shape or a value does not fit.
    """

    X: Array
    y: npt.NDArray[Any]
    query: Array | None = None
    weight: Array | None = None
    token_groups: Groups | None = None
    sample_groups: Groups | None = None
    truth: Mapping[str, Any] | None = None
    generator: Callable[..., Dataset] | None = field(default=None, compare=False)

    def __init__(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        *,
        query: npt.ArrayLike | None = None,
        weight: npt.ArrayLike | None = None,
        token_groups: GroupsLike | None = None,
        sample_groups: GroupsLike | None = None,
        truth: Mapping[str, Any] | None = None,
        generator: Callable[..., Dataset] | None = None,
    ) -> None:
        X = _checks.real(X, "X")
        _checks.shape(X, "X", "n T d", (None, None, None))
        if X.size == 0:
            raise ValueError(
                f"X: expected at least one sample, token and feature, got shape {X.shape}"
            )
        if truth is not None and not isinstance(truth, Mapping):
            raise TypeError(f"truth: expected a mapping, got {type(truth).__name__}")
        n, tokens, dim = X.shape
        vars(self).update(
            X=read_only(X),
            y=read_only(_targets(y, n)),
            query=None if query is None else read_only(_query(query, n, dim, X.dtype)),
            weight=None if weight is None else read_only(_checks.weights(weight, n, X.dtype)),
            token_groups=_groups(token_groups, "token_groups", "n T", (n, tokens)),
            sample_groups=_groups(sample_groups, "sample_groups", "n", (n,)),
            truth=None if truth is None else dict(truth),
            generator=generator,
        )

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.X)

    @property
    def tokens(self) -> int:
        """The number T of tokens of a sample."""
        return int(self.X.shape[1])

    @property
    def dim(self) -> int:
        """The dimension d of a token."""
        return int(self.X.shape[2])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of X, float32 or float64."""
        return self.X.dtype

    def sample(self, n: int, *, seed: Seed, **changes: Any) -> Dataset:
        """Draw `n` new samples of the same population.

        Parameters
        ----------
        n : int
            The number of samples.
        seed : int or numpy.random.Generator
            The same seed gives the same samples.
        **changes
            Arguments of the generator to change, such as `flip=0.0` for clean labels.

        Raises
        ------
        ValueError
            If the data set was not made by a generator of `mhfast.data`.
        """
        if self.generator is None:
            raise ValueError(
                "sample: expected a Dataset made by a generator of mhfast.data, "
                "got one without a generator"
            )
        return self.generator(_checks.count(n, "n"), seed=seed, **changes)

    def subset(self, index: slice | npt.ArrayLike) -> Dataset:
        """Select samples by a slice (without a copy), a mask or integers.

        Raises
        ------
        IndexError
            If the index is out of range or does not select along one axis.
        """
        rows = index if isinstance(index, slice) else np.asarray(index)
        try:
            if np.ndim(np.arange(self.n)[rows]) != 1:
                raise IndexError("it must run along one axis")
        except IndexError as error:
            raise IndexError(f"index: cannot select from {self.n} samples: {error}") from None
        return dataclasses.replace(
            self,
            X=self.X[rows],
            y=self.y[rows],
            query=None if self.query is None else self.query[rows],
            weight=None if self.weight is None else self.weight[rows],
            token_groups=_take(self.token_groups, rows),
            sample_groups=_take(self.sample_groups, rows),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __repr__ = describe


def as_dataset(
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    query: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
) -> Dataset:
    """Return `X` itself if it is a Dataset, else the Dataset of the arrays.

    Raises
    ------
    TypeError
        If X is a Dataset and another argument is given too, or X is an array and y is missing.
    """
    if isinstance(X, Dataset):
        no_second_source(y, query, weight)
        return X
    if y is None:
        raise TypeError("y: expected labels beside the array X, got None")
    return Dataset(X, y, query=query, weight=weight)


def no_second_source(y: object, query: object, weight: object) -> None:
    """Raise TypeError if a Dataset comes with one of its arrays as an argument of its own."""
    for name, value in (("y", y), ("query", query), ("weight", weight)):
        if value is not None:
            raise TypeError(f"{name}: expected None beside a Dataset, which holds its own")


def _targets(y: npt.ArrayLike, n: int) -> npt.NDArray[Any]:
    array = _checks.as_array(y, "y")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"y: expected a real or integer dtype, got {array.dtype.name}")
    _checks.shape(array, "y", "n", (n,))
    return _checks.ready(array)


def _query(query: npt.ArrayLike, n: int, dim: int, dtype: np.dtype[Any]) -> Array:
    array = _checks.real(query, "query", dtype, "X")
    _checks.shape(array, "query", "n q d", (n, None, dim))
    return array


def _groups(
    groups: GroupsLike | None, name: str, letters: str, lengths: tuple[int, ...]
) -> Groups | None:
    if groups is None:
        return None
    index, names = _split(groups, name)
    array = _checks.as_array(index, name)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype.name}")
    _checks.shape(array, name, letters, lengths)
    array = _checks.ready(array.astype(np.int64, copy=False))
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
    raise TypeError(f"{name}: expected integers or a pair (integers, names), got another tuple")


def _take(groups: Groups | None, rows: slice | npt.NDArray[Any]) -> Groups | None:
    return None if groups is None else Groups(groups.index[rows], groups.names)
