"""Certified rows and the facts they yield about all heads (first half of phase 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import checks
from .._arguments.values import frozen
from ..config import threads
from .examples import Examples, Float64, Int64
from .sums import ROUNDING, SumEstimate

BACKGROUND = 20_000
"""The number of facts from random rows that those of certified rows are compared with."""

DEPENDENT = 1e-9
"""Ratio of smallest to largest singular value of the differences of tokens below which they are
dependent."""


@dataclass(frozen=True, eq=False)
class Facts:
    """Linear facts about the key-query matrices.

    Fact k states for every head that ⟨x_a (x_b - x_c)ᵀ, W_h⟩ = value_k, up to tolerance_k, where
    x_a is the query and x_b, x_c are two tokens of a certified row.

    Attributes
    ----------
    X : array (m, T, d)
        The samples of the certified rows.
    rows, first, second : int arrays (k,)
        a as sample * T + query, b and c.
    value, tolerance : arrays (k,)
        The logit difference log(p_b / p_c) and the certificate: its error to first order if the
        residual of the row is due to heads that attend differently.
    background : array (d², d²)
        Second moment of x_a ⊗ (x_b - x_c) over random rows.
    residual_quantiles : array (101,)
        Percentiles of the residuals of all rows, relative to the outputs.
    seen : int
        The number of facts that could be read, certified or not.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> errors = abs(facts.of(truth.W) - facts.value)  # of each head, in each fact
    >>> bool((errors <= facts.tolerance).mean() > 0.3)  # tolerances are estimates
    True
    >>> facts.certified_rows <= len(facts.value)
    True
    """

    X: Float64
    rows: Int64
    first: Int64
    second: Int64
    value: Float64
    tolerance: Float64
    background: Float64
    residual_quantiles: Float64
    seen: int

    def __len__(self) -> int:
        return len(self.value)

    @property
    def certified_rows(self) -> int:
        """The number of different rows that the facts come from."""
        return len(np.unique(self.rows))

    def of(self, directions: Float64) -> Float64:
        """Compute ⟨x_a (x_b - x_c)ᵀ, D⟩ of every fact for given directions D.

        Parameters
        ----------
        directions : float64 array (..., d, d)

        Returns
        -------
        float64 array (..., k)
            For each direction, one number per fact.

        Raises
        ------
        ValueError
            The last two axes are not (d, d).
        """
        T, d = self.X.shape[1:]
        if np.shape(directions)[-2:] != (d, d):
            raise ValueError(
                f"directions: expected shape (..., d, d) = (..., {d}, {d}), "
                f"got {np.shape(directions)}"
            )
        sample, query = np.divmod(self.rows, T)
        x = self.X[sample, query]
        difference = self.X[sample, self.first] - self.X[sample, self.second]
        return np.asarray(np.einsum("kf,...fg,kg->...k", x, directions, difference, optimize=True))

    def moment(self, weight: Float64, num_threads: int | None = None) -> Float64:
        """Compute the weighted second moment of (x_a ⊗ (x_b - x_c), value).

        Parameters
        ----------
        weight : array (k,)
            One weight per fact.
        num_threads : int, optional
            Threads for this call, in place of the default.

        Returns
        -------
        float64 array (d² + 1, d² + 1)

        Raises
        ------
        TypeError
            If `num_threads` is not an integer.
        ValueError
            If it is below 1.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> data = mh.data.boolean_layer(500, 2, 4, 1, seed=0)
        >>> examples = mh.learner.as_examples(data.X, data.y)
        >>> facts = mh.learner.certify(examples, mh.learner.crude_sum(examples))
        >>> moment = facts.moment(np.ones(len(facts.value)))
        >>> moment.shape, bool(np.isclose(moment[-1, -1], np.sum(facts.value**2)))
        ((17, 17), True)
        """
        weight = np.ascontiguousarray(weight, dtype=np.float64)
        return _core.fact_moment(
            self.X, self.rows, self.first, self.second, self.value, weight, threads(num_threads)
        )


def certify(
    examples: Examples,
    estimate: SumEstimate,
    *,
    count: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
) -> Facts:
    """Find the rows in which all heads attend alike, and read the facts they certify.

    Each row is approximated by the average of tokens that is nearest to its output. Let r be the
    residual and p the weights. Heads whose weights differ from p by δ leave a residual of the order
    of δ, and change log(p_b / p_c) by δ_b / p_b - δ_c / p_c. The facts with the smallest r (1 / p_b
    + 1 / p_c) are therefore kept, in each row those relative to its largest weight.

    Parameters
    ----------
    examples : Examples
    estimate : SumEstimate
        Of the sum of the value matrices.
    count : int, optional
        Facts to keep; None means 16 d², or a tenth of those available.
    seed : int
        Chooses the rows of the background.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    Facts
        Sorted by tolerance.  There are none if no row has two distinct tokens.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If a number is out of range.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", certified rows; the order by r and p
    is ours.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> len(facts.value), facts.certified_rows <= 400  # a row can certify several
    (400, True)
    """
    checks.instance(examples, Examples, "examples")
    checks.instance(estimate, SumEstimate, "estimate")
    T, d = examples.tokens, examples.dim
    if count is None:
        count = min(16 * d * d, max(d * d, examples.rows * (T - 1) // 10))
    count = checks.count(count, "count")
    kept, seen = _SmallestTolerances(count, d), 0
    residuals = []
    for begin, X, Y in examples.portions():
        weights, residual = _core.fit_rows(
            X, Y, None, estimate.V_sum, estimate.support, threads(num_threads)
        )
        residuals.append(residual / examples.scale)
        seen += kept.take(X, weights, residuals[-1], begin * T)
    rows, first, second, value, tolerance = kept.sorted()
    certified_X, _, listed = examples.gather(rows)
    return Facts(
        X=frozen(certified_X),
        rows=frozen(listed),
        first=frozen(first),
        second=frozen(second),
        value=frozen(value),
        tolerance=frozen(np.maximum(tolerance, max(examples.noise_floor, ROUNDING))),
        background=frozen(_background(examples, seed, num_threads)),
        residual_quantiles=frozen(np.quantile(np.concatenate(residuals), np.linspace(0, 1, 101))),
        seen=seen,
    )


class _SmallestTolerances:
    """The facts of smallest tolerance seen so far, with each matrix x ⊗ (x_b - x_c) only once.

    Otherwise repeated inputs would fill it with the same few facts.
    """

    def __init__(self, count: int, dim: int) -> None:
        self._count = count
        self._held: list[tuple[npt.NDArray[Any], ...]] = []
        self._size = 0
        self._limit = np.inf
        self._probe = np.random.default_rng(0).standard_normal((2, dim))

    def take(self, X: Float64, weights: Float64, residual: Float64, first_row: int) -> int:
        """Consider the facts of some rows; return how many there are."""
        row = np.arange(len(weights))
        top = weights.argmax(axis=1)
        taking_part = weights > 0.0
        taking_part[row, top] = False
        at, key = np.nonzero(taking_part)
        first = top[at]
        share = weights[at, key]
        # Differences due to rounding are no reason to prefer one row to another.
        left = np.maximum(residual[at], ROUNDING)
        tolerance = left * (1.0 / weights[at, first] + 1.0 / share)
        near = np.flatnonzero(tolerance < self._limit)
        near, mark = self._informative(
            X, at, first, key, near[np.argsort(tolerance[near], kind="stable")]
        )
        value = np.log(weights[at[near], first[near]] / share[near])
        self._held.append(
            (first_row + at[near], first[near], key[near], value, tolerance[near], mark)
        )
        self._size += len(near)
        if self._size > 4 * self._count:
            self._held = [self._distinct()]
            self._size = len(self._held[0][0])
            if self._size == self._count:
                self._limit = float(self._held[0][4][-1])
        return len(at)

    def sorted(self) -> tuple[Int64, Int64, Int64, Float64, Float64]:
        """Return rows, first, second, value and tolerance of the best, best first."""
        rows, first, second, value, tolerance, _ = self._distinct()
        return rows, first, second, value, tolerance

    def _informative(
        self, X: Float64, at: Int64, first: Int64, key: Int64, ordered: Int64
    ) -> tuple[Int64, npt.NDArray[np.float32]]:
        """Return the first of these facts whose samples have affinely independent tokens.

        For dependent tokens the weights are not unique. Also return a key for each fact, the same
        for equal matrices up to sign.
        """
        kept, marks = [ordered[:0]], [np.zeros(0, np.float32)]
        for begin in range(0, len(ordered), 4 * self._count):
            some = ordered[begin : begin + 4 * self._count]
            sample, query = np.divmod(at[some], X.shape[1])
            samples, which = np.unique(sample, return_inverse=True)
            ok = _independent(X[samples])[which]
            some, sample, query = some[ok], sample[ok], query[ok]
            x, difference = X[sample, query], X[sample, first[some]] - X[sample, key[some]]
            kept.append(some)
            marks.append(
                np.abs((x @ self._probe[0]) * (difference @ self._probe[1])).astype(np.float32)
            )
            if len(np.unique(np.concatenate(marks))) >= self._count:
                break
        return np.concatenate(kept), np.concatenate(marks)

    def _distinct(self) -> tuple[npt.NDArray[Any], ...]:
        columns = [np.concatenate(column) for column in zip(*self._held, strict=True)]
        order = np.argsort(columns[4], kind="stable")
        earliest = np.sort(np.unique(columns[5][order], return_index=True)[1])
        order = order[earliest[: self._count]]
        return tuple(column[order] for column in columns)


def _independent(X: Float64) -> npt.NDArray[np.bool_]:
    """Return whether the tokens of each sample (n, T, d) are affinely independent.

    More than d + 1 tokens never are; for them return whether they are all distinct.
    """
    T, d = X.shape[1:]
    if d + 1 < T:
        first, second = np.triu_indices(T, 1)
        return np.asarray((X[:, first] != X[:, second]).any(axis=2).all(axis=1))
    sizes = np.linalg.svd(X[:, 1:] - X[:, :1], compute_uv=False)
    return np.asarray(sizes[:, -1] > DEPENDENT * sizes[:, 0])


def _background(examples: Examples, seed: int, num_threads: int | None) -> Float64:
    rng = np.random.default_rng(seed)
    T = examples.tokens
    X = examples.part(np.sort(rng.integers(examples.n, size=BACKGROUND)))[0]
    rows = np.arange(BACKGROUND) * T + rng.integers(T, size=BACKGROUND)
    first = rng.integers(T, size=BACKGROUND)
    second = (first + rng.integers(1, T, size=BACKGROUND)) % T
    moment = _core.fact_moment(
        X,
        rows,
        first,
        second,
        np.zeros(BACKGROUND),
        np.full(BACKGROUND, 1.0 / BACKGROUND),
        threads(num_threads),
    )
    return moment[:-1, :-1]
