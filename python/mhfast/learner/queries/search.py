"""Heads at one δ, and from there at others: the queries for a fit, and whether it is right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..examples import Float64
from .fitting import Fit, determined, fit_heads, identified
from .oracle import Pairs, Rows
from .starts import starts

ROWS = 2.0
"""Rows of a fit, over the least number that can determine it."""

NOISY_ROWS = 16.0
"""The same for a noisy oracle, while only a start is wanted."""

SPREAD = 2.5
"""Standard deviation of the scores of heads at the queries that are made for them."""

AWAY = 2.0
"""Norm of queries at right angles to the heads, over that of typical tokens."""

RIDGE = 0.02
"""Weight of moves, relative to typical tokens, against errors of the scores, relative to theirs."""

FIRST_RADII = (0.02, 2.0)
"""Norms of queries, over that of typical tokens, while no head is known."""

NEAR = (0.25, 0.06, 0.015, 0.015, 0.004, 0.004, 0.001, 0.001)
"""Steps from the first δ towards a basis vector, over its norm: smaller ones if one fails, and
then, since heads are linear in δ, the first again."""

DOUBTFUL = 1e6
"""Effect of a head over rounding, and inverse condition, above which one head less is not tried."""

BETWEEN = 1e3
"""Residual half-way between two fits, over that of a fit: their errors are not of rounding only."""

IDENTIFIED = 1e-11
"""Least condition of the normal matrices: a hundred times their rounding at 1000 unknowns."""


@dataclass(frozen=True, eq=False)
class Search:
    """Looks for heads by asking pairs of tokens.

    Attributes
    ----------
    pairs : Pairs
    rng : numpy.random.Generator
    """

    pairs: Pairs
    rng: np.random.Generator

    def inputs_for(self, heads: int, over: float) -> int:
        """Return how many inputs give `over` times the rows that determine the heads at one δ.

        A row determines at most min(H, p) numbers of A, and H rows are used for C.
        """
        p, d = self.pairs.values.shape[1], self.pairs.oracle.dim
        least = heads + heads * (d + self.pairs.bias) / min(heads, p)
        return int(np.ceil(0.5 * over * least)) + 1

    @property
    def over(self) -> float:
        """Rows of a fit that finds heads, over the least number."""
        return NOISY_ROWS if self.pairs.noise > 0.0 else ROWS

    def rows(self, delta: Float64, A: Float64, count: int) -> Rows:
        """Ask inputs of one δ whose scores at heads A are neither flat nor saturated.

        Alternately the query x or the query x - δ is moved along the a_h, as little as possible, to
        have random scores of standard deviation 2.5; the other query is left unchanged.
        """
        d = len(delta)
        q = self.rng.standard_normal((count, d)) * AWAY * self.pairs.size / np.sqrt(d)
        wanted = self.rng.standard_normal((count, len(A))) * SPREAD - A[:, d:].sum(axis=1)
        a = A[:, :d]
        gram = a @ a.T + RIDGE * (SPREAD / self.pairs.size) ** 2 * np.eye(len(A))
        q += np.linalg.solve(gram, (wanted - q @ a.T).T).T @ a
        q[np.arange(count) % 4 > 1] += delta
        return self.pairs.rows(self.pairs.grid(q), delta)

    def first_rows(self, delta: Float64, count: int) -> Rows:
        """Ask inputs of one δ of which no head is known: near 0 and far."""
        q = self.rng.standard_normal((count, len(delta)))
        q *= self.pairs.size * np.geomspace(*FIRST_RADII, count)[:, None] / np.sqrt(len(delta))
        q[np.arange(count) % 4 > 1] += delta
        return self.pairs.rows(self.pairs.grid(q), delta)

    def fit(self, rows: Rows, A: Float64, steps: int = 60) -> tuple[Fit, bool]:
        """Fit, and return whether the residual is noise or rounding."""
        limit = self.pairs.limit(rows.scale)
        fit = fit_heads(rows, A, steps=steps, rounding=limit if self.pairs.noise == 0.0 else 0.0)
        return fit, fit.residual <= limit

    def heads_at(self, delta: Float64, heads: int) -> tuple[Fit, str] | None:
        """Find that many heads at one δ, all determined; also return how they were found."""
        rows = self.first_rows(delta, self.inputs_for(heads, 2.0 * self.over))
        for method, A in starts(self.pairs, delta, heads, self.rng):
            fit, good = self.fit(rows, A)
            if not good:
                continue
            again = self.rows(delta, fit.A, self.inputs_for(heads, self.over))
            fit, good = self.fit(again, fit.A)
            if not good:
                continue
            if identified(again, fit) < IDENTIFIED or self.too_many(again, fit):
                return None
            return fit, method
        return None

    def too_many(self, rows: Rows, fit: Fit) -> bool:
        """Whether one head less gives the same outputs, which is tried where it is possible."""
        effects = np.linalg.norm(fit.C, axis=1) / np.sqrt(fit.C.shape[1])
        limit = self.pairs.limit(rows.scale)
        if effects.min() <= limit:
            return True
        small = DOUBTFUL * (limit if self.pairs.noise == 0.0 else 0.0)
        if len(fit.A) == 1 or (effects.min() > small and identified(rows, fit) > 1.0 / DOUBTFUL):
            return False
        return any(self.fit(rows, np.delete(fit.A, h, axis=0))[1] for h in range(len(fit.A)))

    def spread(self, delta: Float64, first: Fit) -> tuple[Float64, list[tuple[Rows, Fit]]]:
        """Follow the heads from one δ towards every vector of a basis, as far as it goes.

        Returns
        -------
        tuple of (array (k, d), list of (Rows, Fit))
            k different δ, d of them unless the heads were lost.
        """
        d = len(delta)
        deltas, found, begin = [], [], 0
        for j in range(d):
            towards = np.zeros(d)
            towards[j] = np.copysign(self.pairs.size, delta[j])  # so that the δ are a basis
            one, begin = self.follow(delta, first, towards, begin)
            if one is None:
                break
            deltas.append(one[0])
            found.append(one[1:])
        return np.array(deltas).reshape(-1, d), found

    def follow(
        self, delta: Float64, first: Fit, towards: Float64, begin: int
    ) -> tuple[tuple[Float64, Rows, Fit] | None, int]:
        """Fit the heads at a δ some way from the first, by smaller steps if need be.

        `begin` is the number of the step that worked for another direction, and is returned for
        the next one: steps that fail cost the most.
        """
        for number in (*range(begin, len(NEAR)), *range(begin)):
            near = NEAR[number]
            one = self.step(delta, first, delta + self.pairs.grid(near * towards), first.A)
            if one is None:
                continue
            if near < NEAR[0]:
                A = first.A + NEAR[0] / near * (one[2].A - first.A)
                far = self.step(delta, first, delta + self.pairs.grid(NEAR[0] * towards), A)
                one = one if far is None else far
            return one, number
        return None, begin

    def step(
        self, delta: Float64, first: Fit, other: Float64, A: Float64
    ) -> tuple[Float64, Rows, Fit] | None:
        """Fit the heads at another δ; None if they do not give the outputs, or are not the same."""
        count = self.inputs_for(len(A), self.over)
        rows = self.rows(other, A, count)
        fit, good = self.fit(rows, A)
        if good and not determined(rows, fit.A):
            rows = self.rows(other, fit.A, count)
            fit, good = self.fit(rows, fit.A)
        if good and self.between(delta, other, first, fit):
            return other, rows, fit
        return None

    def between(self, one: Float64, other: Float64, first: Fit, second: Fit) -> bool:
        """Whether heads at two δ are the same: those of the middle are then the means.

        They are not if the fit has exchanged heads or turned a sign.
        """
        A, C = 0.5 * (first.A + second.A), 0.5 * (first.C + second.C)
        rows = self.rows(0.5 * (one + other), A, 2)
        residual = rows.Y - np.tanh(0.5 * (rows.Q @ A.T + rows.b[:, None])) @ C
        factor = BETWEEN if self.pairs.noise == 0.0 else 2.0
        return bool(np.sqrt(np.mean(residual**2)) <= factor * self.pairs.limit(rows.scale))
