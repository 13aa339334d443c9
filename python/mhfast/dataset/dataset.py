"""`Dataset`: samples, labels and further information about them in one frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import checks, sample_checks
from .._arguments.runs import NO_RUNS, RunAxis
from .._arguments.values import Array, describe, read_only, same_fields
from . import groups
from .groups import Groups, GroupsLike
from .words import Tokens

Seed: TypeAlias = int | np.random.Generator
Seeds: TypeAlias = Sequence[Seed] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Dataset:
    """n samples of T tokens in dimension d with their targets.

    The arrays are kept as read-only views of the memory that was given, and copied only if they
    are not C-contiguous, aligned and in native byte order, or do not hold zeros as padding. Do not
    write to that memory while the data set is in use.

    Every array may have a leading run axis of one common length R: R data sets side by side, which
    share the arrays without it.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64, or Tokens
        The tokens. Beyond `lengths` the data set holds zeros. For `Tokens` the array X is computed
        when it is first used.
    y : array, real or integer
        Targets for the model and the loss: labels -1 and 1 or, for the squared loss, real targets,
        of the shape of the model's outputs, (n,) or (n, q, p); integer classes (n, q) for the
        cross-entropy.
    query : array (n, q, d), optional
        The query side of each sample; it overrides the `query` of a model.
    lengths : integers (n,), optional
        The number of tokens of each sample, from 0 to T. Tokens beyond are not seen; in
        self-attention their rows have output 0 and do not enter the loss of a layer.
    weight : array (n,), or (n, q) for the rows of a layer, optional
        Finite weights w >= 0 with a positive sum: losses are Σ w ℓ / Σ w, see `value_and_grad`.
        None means ones. For a layer an array (n, q) belongs to the rows, even if it could be R = n
        runs.
    token_groups, sample_groups : integers (n, T) and (n,), or pairs (integers, names), optional
        The group of each token and of each sample, counted from 0, for quantities recorded in
        training. The names default to "0", "1", ...
    truth : mapping, optional
        What a generator knows about the population, such as its class tokens or teacher. With a run
        axis in X, y or query, all arrays and models in it have one too.
    generator : callable (n, *, seed, **changes) -> Dataset, optional
        What `sample` calls. It must be picklable if the data set is pickled. For data with a run
        axis it may have a method ``run(r)`` that returns the generator of one run.

    Raises
    ------
    TypeError
        If an array has the wrong kind of entries.
    ValueError
        If a shape or a value does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X = np.random.default_rng(0).standard_normal((20, 5, 9))
    >>> data = mh.Dataset(X, np.sign(X[:, 0, 0]), lengths=[5] * 19 + [3])
    >>> data.n, data.tokens, data.dim, data.runs, data.dtype.name
    (20, 5, 9, None, 'float64')
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> model.attention(data)[-1, 0, 0].round(3)  # padding is not seen
    array([0.333, 0.333, 0.333, 0.   , 0.   ])
    """

    X: Array
    y: npt.NDArray[Any]
    query: Array | None = None
    lengths: npt.NDArray[np.int64] | None = None
    weight: Array | None = None
    token_groups: Groups | None = None
    sample_groups: Groups | None = None
    truth: Any = None  # a mapping where there is one
    generator: Callable[..., Dataset] | None = field(default=None, compare=False, repr=False)
    words: Tokens | None = field(default=None, init=False, compare=False, repr=False)
    """X as words of a dictionary, if it was given as `Tokens`."""

    def __init__(
        self,
        X: npt.ArrayLike | Tokens,
        y: npt.ArrayLike,
        *,
        query: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        weight: npt.ArrayLike | None = None,
        token_groups: GroupsLike | None = None,
        sample_groups: GroupsLike | None = None,
        truth: Mapping[str, Any] | None = None,
        generator: Callable[..., Dataset] | None = None,
    ) -> None:
        given = X if isinstance(X, Tokens) else checks.real(X, "X")
        checks.shape(given, "X", "n T d", (None, None, None), runs=True)
        if given.size == 0:
            raise ValueError(
                f"X: expected at least one sample, token and feature, got shape {given.shape}"
            )
        if truth is not None and not isinstance(truth, Mapping):
            raise TypeError(f"truth: expected a mapping, got {type(truth).__name__}")
        n, tokens, dim = given.shape[-3:]
        if query is not None:
            query = checks.real(query, "query", given.dtype, "X")
            checks.shape(query, "query", "n q d", (n, None, dim), runs=True)
        if lengths is not None:
            lengths = sample_checks.lengths(lengths, n, tokens)
        if weight is not None:
            weight = sample_checks.nonnegative(weight, given.dtype)
            sample_checks.check_samples(weight, "weight", n, 3)
        arrays = {"y": _targets(y, n), "query": query, "lengths": lengths, "weight": weight}
        words = given if isinstance(given, Tokens) else None
        if not isinstance(given, Tokens):
            arrays["X"] = given if lengths is None else sample_checks.padded(given, lengths)
        vars(self).update(
            {name: None if a is None else read_only(a) for name, a in arrays.items()},
            token_groups=groups.validated(token_groups, "token_groups", "n T", (n, tokens)),
            sample_groups=groups.validated(sample_groups, "sample_groups", "n", (n,)),
            truth=None if truth is None else dict(truth),
            generator=generator,
            words=words,
        )
        self._runs  # noqa: B018  (checks that the run axes agree)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Compute the array X of `Tokens`, once."""
            words = vars(self).get("words")
            if name != "X" or words is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            X = np.asarray(words)
            if self.lengths is not None:
                X = read_only(sample_checks.padded(X, self.lengths))
            vars(self)["X"] = X
            return X

    @property
    def _given(self) -> Array | Tokens:
        """X as it was given."""
        return self.X if self.words is None else self.words

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self._given.shape[-3])

    @property
    def tokens(self) -> int:
        """The number T of tokens of a sample."""
        return int(self._given.shape[-2])

    @property
    def dim(self) -> int:
        """The dimension d of a token."""
        return int(self._given.shape[-1])

    @property
    def runs(self) -> int | None:
        """The length R of the run axis, None if no array has one."""
        return self._runs.length or None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of X, float32 or float64."""
        return self._given.dtype

    def sample(self, n: int, *, seed: Seed | Seeds, **changes: Any) -> Dataset:
        """Draw `n` new samples of the same population.

        Parameters
        ----------
        n : int
            The number of samples.
        seed : int or numpy.random.Generator
            The same seed gives the same samples. With a run axis, one for all runs or a sequence
            of one for each.
        **changes
            Arguments of the generator to change, such as `flip=0.0` for clean labels.

        Returns
        -------
        Dataset
            X (n, T, d), with a run axis if this data set has one.

        Raises
        ------
        TypeError
            If `n`, a seed or a change is of the wrong kind, or there is no such argument.
        ValueError
            If the data set was not made by a generator of `mhfast.data`, or a value is out of
            range.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> data.sample(7, seed=1).X.shape
        (7, 5, 9)
        """
        if self.generator is None:
            raise ValueError(
                "sample: expected a Dataset made by a generator of mhfast.data, "
                "got one without a generator"
            )
        return self.generator(checks.count(n, "n"), seed=seed, **changes)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: slice | npt.ArrayLike) -> Dataset:
        """Select samples, as `subset` does; ``data[3:4]`` is one of them."""
        return self.subset(index)

    # Otherwise Python and NumPy would take a data set for a sequence of its samples.
    __iter__ = None

    def subset(self, index: slice | npt.ArrayLike) -> Dataset:
        """Select samples.

        Parameters
        ----------
        index : slice, bool array (n,) or integers
            A slice makes no copy. The same samples are selected in every run.

        Returns
        -------
        Dataset
            The samples in the order of the index; `truth` and generator stay.

        Raises
        ------
        IndexError
            If the index is out of range or does not select along one axis.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> data.subset(data.y == 1).n + data.subset(data.y == -1).n
        20
        """
        rows = index if isinstance(index, slice) else np.asarray(index)
        try:
            if np.ndim(np.arange(self.n)[rows]) != 1:
                raise IndexError("it must run along one axis")
        except IndexError as error:
            raise IndexError(f"index: cannot select from {self.n} samples: {error}") from None
        return self._selected(
            lambda a, has_runs: a[:, rows] if has_runs else a[rows],
            lambda words: words._samples(rows),
        )

    def merged(self) -> Dataset:
        """Merge identical samples into one each, whose weight is the sum of theirs.

        Loss, gradients, accuracy, margin and means of attention are those of all samples, up to
        rounding, at the cost of the different ones; of short sequences of few words there are few.
        Training on all samples goes the same way, and training in batches draws others.

        Returns
        -------
        Dataset
            The different samples, each where it comes first, with `weight`; the data set itself if
            no two are identical. Samples are identical if their tokens (within `lengths`), targets,
            query rows, lengths and groups are, in every run. `truth` and generator stay.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> ids = np.random.default_rng(0).integers(2, size=(1000, 4))
        >>> data = mh.Dataset(mh.Tokens(ids, np.eye(2)), np.where(ids[:, 0] == 1, 1, -1))
        >>> few = data.merged()
        >>> few.n, float(few.weight.sum())
        (16, 1000.0)
        """
        return self._merged(self.n - 1)[0]

    def _merged(self, most: int, *, probe: int = 0) -> tuple[Dataset, npt.NDArray[np.int32] | None]:
        """Merge identical samples if at most `most` are different.

        Parameters
        ----------
        most : int
        probe : int
            How many samples to look at first: none are merged if these are all different.

        Returns
        -------
        few : Dataset
            As of `merged`; the data set itself if none are merged.
        places : integers (n,) or None
            Which of those in `few` each sample is.
        """
        found = _core.distinct_rows(list(self._arrays_of_samples()), most=most, probe=probe)
        if found is None:
            return self, None
        places, first = found
        weight = np.ones(self.n) if self.weight is None else self.weight
        of_samples = np.moveaxis(weight, 1, 0) if self._run_axes.get("weight") else weight
        total = np.zeros((len(first), *of_samples.shape[1:]))
        np.add.at(total, places, of_samples)
        if self._run_axes.get("weight"):
            total = np.moveaxis(total, 0, 1)
        part = self.subset(first)
        return part._with(weight=total.astype(self.dtype)), places

    def _in_words(self, most: int, *, probe: int) -> Dataset:
        """Return the data set with X as `Tokens`, if it has at most `most` different tokens.

        Otherwise, or if X has a run axis or `probe` tokens are all different, this is the data set
        itself.
        """
        if self.words is not None or self._run_axes["X"]:
            return self
        tokens = self.X.reshape(-1, self.dim)
        found = _core.distinct_rows([tokens], most=most, probe=probe)
        if found is None:
            return self
        ids, first = found
        return self._with(X=Tokens(ids.reshape(self.n, -1), tokens[first]))

    def _with(self, **changes: Any) -> Dataset:
        """Return the data set with other fields; `Tokens` stay what they are, unless X is given."""
        return dataclasses.replace(self, **{"X": self._given, **changes})

    def _arrays_of_samples(self) -> Iterator[npt.NDArray[Any]]:
        """Yield each array but weight, its samples first, of all its runs together."""
        for name, has_runs in self._run_axes.items():
            if name == "weight":
                continue
            if name == "X" and self.words is not None:
                array: npt.NDArray[Any] = self.words.ids
                if self.lengths is not None:
                    seen = np.arange(self.tokens) < self.lengths[..., None]
                    array = np.where(seen, array, 0)
                has_runs = array.ndim == 3
            else:
                value = getattr(self, name)
                array = value.index if isinstance(value, Groups) else value
            yield np.ascontiguousarray(np.moveaxis(array, 1, 0) if has_runs else array)

    def run(self, r: int) -> Dataset:
        """Return the data set of one run; `truth` and generator become those of the run.

        Parameters
        ----------
        r : int
            The number of the run, from -R to R - 1.

        Returns
        -------
        Dataset
            Without a run axis.

        Raises
        ------
        TypeError
            If the data set has no run axis, or `r` is not an integer.
        IndexError
            If there is no such run.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=[0, 1, 2])
        >>> data.X.shape, data.run(2).X.shape
        ((3, 20, 5, 9), (20, 5, 9))
        """
        if self.runs is None:
            raise TypeError("run: expected a Dataset with a run axis, got one without")
        r = checks.integer(r, "r")
        checks.run_index(r, self.runs)
        part = self._selected(
            lambda a, has_runs: a[r] if has_runs else a,
            lambda words: words[r] if words.ndim == 4 else words,
        )
        truth = self.truth
        if truth is not None:
            truth = _of_run(truth, r, self.runs)
        of_run = getattr(self.generator, "run", None)
        generator = self.generator if of_run is None else of_run(r)
        return part._with(truth=truth, generator=generator)

    @cached_property
    def _run_axes(self) -> dict[str, bool]:
        """Return for each array that is present whether it has a run axis."""
        y, weight, n = self.y, self.weight, self.n
        has = {"X": self._given.ndim == 4, "y": sample_checks.targets_have_runs(y, n)}
        if self.query is not None:
            has["query"] = self.query.ndim == 4
        if self.lengths is not None:
            has["lengths"] = self.lengths.ndim == 2
        if weight is not None:
            of_rows = y.ndim - has["y"] > 1 and weight.shape[0] == n
            has["weight"] = weight.ndim == 3 or (weight.ndim == 2 and not of_rows)
        if self.token_groups is not None:
            has["token_groups"] = self.token_groups.index.ndim == 3
        if self.sample_groups is not None:
            has["sample_groups"] = self.sample_groups.index.ndim == 2
        return has

    @cached_property
    def _runs(self) -> RunAxis:
        runs = NO_RUNS
        for name, has_runs in self._run_axes.items():
            if has_runs:
                value = self._given if name == "X" else getattr(self, name)
                array = value.index if isinstance(value, Groups) else value
                runs = runs.meet(name, array.shape, 0)
        return runs

    def _selected(
        self,
        select: Callable[[npt.NDArray[Any], bool], npt.NDArray[Any]],
        of_words: Callable[[Tokens], Tokens],
    ) -> Dataset:
        """Apply `select` to each array, with the information whether it has a run axis."""
        changes: dict[str, Any] = {}
        for name, has_runs in self._run_axes.items():
            if name == "X" and self.words is not None:
                changes[name] = of_words(self.words)
                continue
            value = getattr(self, name)
            if isinstance(value, Groups):
                changes[name] = Groups(select(value.index, has_runs), value.names)
            else:
                changes[name] = select(value, has_runs)
        return dataclasses.replace(self, **changes)

    def __getstate__(self) -> dict[str, Any]:
        arguments = (f.name for f in dataclasses.fields(self) if f.init and f.name != "X")
        return {"X": self._given, **{name: getattr(self, name) for name in arguments}}

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
    lengths: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
) -> Dataset:
    """Return `X` itself if it is a Dataset, else a Dataset of the arrays.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64, or Dataset
        With a Dataset, all other arguments must be None.
    y : array, optional
        Targets, as for `Dataset`.
    query : array (n, q, d), optional
    lengths : integers (n,), optional
    weight : array (n,) or (n, q), optional
        As for `Dataset`.

    Returns
    -------
    Dataset

    Raises
    ------
    TypeError
        If X is a Dataset and another argument is given too, X is an array and y is missing, or an
        array has the wrong kind of entries.
    ValueError
        If a shape or a value does not fit.

    Examples
    --------
    >>> import mhfast as mh
    >>> import numpy as np
    >>> mh.as_dataset(np.ones((4, 5, 9)), np.array([1, -1, 1, -1])).n
    4
    """
    if isinstance(X, Dataset):
        no_second_source(y=y, query=query, lengths=lengths, weight=weight)
        return X
    if y is None:
        raise TypeError("y: expected labels with the array X, got None")
    return Dataset(X, y, query=query, lengths=lengths, weight=weight)


def no_second_source(**arrays: object) -> None:
    """Raise TypeError if a Dataset comes with one of its arrays as an argument of its own."""
    for name, value in arrays.items():
        if value is not None:
            raise TypeError(f"{name}: expected None with a Dataset, which holds its own")


def _targets(y: npt.ArrayLike, n: int) -> npt.NDArray[Any]:
    array = checks.as_array(y, "y")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"y: expected a real or integer dtype, got {array.dtype.name}")
    sample_checks.check_samples(array, "y", n, 4)
    return checks.ready(array)


def _of_run(value: Any, r: int, runs: int) -> Any:
    """Return `truth` for one run, selected from arrays and models with a run axis."""
    if isinstance(value, Mapping):
        return {name: _of_run(part, r, runs) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return value[r] if value.shape[:1] == (runs,) else value
    return value[r] if getattr(value, "runs", None) == runs else value
