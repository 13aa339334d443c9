"""`learn_layer_by_queries`: from a sum to the heads at one δ, to all δ, to a verdict."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np

from ..._arguments import checks as _checks
from ...models import Layer
from ..examples import Float64
from ..result import Certificate
from .fitting import Fit, fit_heads, identified, told, variances
from .oracle import Ask, Oracle, Pairs, Rows, as_oracle, on_grid
from .probing import (
    LINEAR,
    NOISY_REPEATS,
    REPEATS,
    Sum,
    measured_noise,
    pairs_of,
    sum_of_values,
    token_size,
)
from .result import QueryLearning
from .starts import starts

ROWS = 2.0
"""Rows of a fit, over the least number that can determine it."""

NOISY_ROWS = 16.0
"""The same for a noisy oracle, while only a start is wanted."""

NOISY_POLISH = 64.0
"""The same for a noisy oracle at last, unless the caller says how much may be asked."""

SPREAD = 2.5
"""Standard deviation of the scores of heads at the queries that are made for them."""

AWAY = 2.0
"""Norm of queries at right angles to the heads, over that of typical tokens."""

APART = 2.0
"""Norm of the differences of tokens in the last fits, likewise."""

RIDGE = 0.02
"""Damping of the moves that give queries their scores: heads that are almost alike."""

FIRST_RADII = (0.02, 2.0)
"""Norms of queries, over that of typical tokens, while no head is known."""

NEAR = (0.25, 0.06, 0.015, 0.004)
"""Steps from the first δ towards a basis vector, over its norm: smaller ones where one fails, and
from there, heads being linear in δ, the first again."""

HELD_OUT = 32
"""Inputs of different tokens for the verdict."""

EXACT = 1e-8
SINGLE = 3.6e-6
"""Held-out residuals of a layer that is learnt, float64 and float32 oracles."""

NOISE_LEFT = 1.25
"""Held-out residual over the noise, at most."""

IDENTIFIED = 1e-9
"""Condition of the normal matrices, at least."""

TOLD_APART = 1e-6
NOISY_SIGNS = 0.1
"""Misfits of a choice of signs, relative, that are as good as none, without and with noise."""

MOST_SIGNS = 14
"""Heads up to which all choices of signs are tried."""


def learn_layer_by_queries(
    oracle: Layer | Ask,
    *,
    d: int,
    T: int,
    heads: int,
    bias: bool = False,
    noise: float | None = None,
    queries: int | None = None,
    seed: int = 0,
) -> QueryLearning:
    """Learn a layer F(X) = Σ_h softmax(X W_h Xᵀ) X V_h from inputs of one's own choice.

    Parameters
    ----------
    oracle : callable or Layer
        A function of float64 tokens (n, T, d) to outputs (n, T, p) of float32 or float64, each
        input for itself.  A Layer is asked in its own dtype.
    d, T : int
        Dimension and number of tokens.
    heads : int
        The number of heads H.
    bias : bool
        Whether scores and outputs may have biases: F(X) = Σ_h softmax(X W_h Xᵀ + 1 X w_h) X V_h + β.
        The layer is then one of tokens (x, 1), of dimension d + 1.
    noise : float, optional
        Standard deviation of the noise on every output.  None means that it is measured by asking
        some inputs twice.
    queries : int, optional
        About how many inputs to ask altogether where there is noise: more give smaller errors.  None
        means 8 outputs for every unknown.  Without noise what is needed is asked.
    seed : int

    Returns
    -------
    QueryLearning
        `.layer`, `.learnt`, `.verdict`, `.queries` and more.  A layer is *learnt* only if it
        predicts inputs of other kind that were held out, to 1e-8 relative (float32: 3.6e-6) or to
        the noise, and if no other layer near it gives the same answers.

    Raises
    ------
    TypeError
        The oracle cannot be called or returns no real numbers; a number is of another kind.
    ValueError
        Outputs are not of shape (n, T, p) or not finite; a setting is out of range.

    Notes
    -----
    Inputs of two tokens x and x - δ, repeated, make an output a sum of H hyperbolic tangents.  At
    one δ the heads are found from differences of outputs by a tensor decomposition, then fitted;
    from there δ moves to every direction of a basis.  The documentation has the formulas.

    Examples
    --------
    >>> secret = mh.Layer.gaussian(3, 8, 8, std=0.3, seed=0)
    >>> result = mh.learn_layer_by_queries(secret, d=8, T=2, heads=3)
    >>> result.learnt, result.queries < 4 * 3 * 8**2
    (True, True)
    """
    begin = time.perf_counter()
    d, T = _checks.count(d, "d"), _checks.count(T, "T")
    heads = _checks.count(heads, "heads")
    if noise is not None:
        noise = _checks.finite(noise, "noise")
        if noise < 0.0:
            raise ValueError(f"noise: expected a standard deviation of at least 0, got {noise}")
    if queries is not None:
        queries = _checks.count(queries, "queries")
    if _checks.integer(seed, "seed") < 0:
        raise ValueError(f"seed: expected an integer of at least 0, got {seed}")
    asked = as_oracle(oracle, T, d)
    learner = _Learner(asked, heads, bool(bias), noise, queries, np.random.default_rng(seed))
    learner.run()
    return learner.result(time.perf_counter() - begin)


@dataclass
class _Learner:
    """The state of learning: what was found so far."""

    oracle: Oracle
    heads: int
    bias: bool
    told_noise: float | None
    budget: int | None
    rng: np.random.Generator
    noise: float = 0.0
    size: float = 1.0
    layer: Layer | None = None
    method: str | None = None
    missing: str | None = None
    identified: float | None = None
    standard_error: float | None = None
    sum: Sum | None = None

    def run(self) -> None:
        """Learn as much as there is to learn."""
        with self.oracle.part("noise"):
            again = measured_noise(self.oracle, self.rng)
            self.noise = again if self.told_noise is None else self.told_noise
        if self.oracle.tokens == 1:
            self.learn_sum()
            self.layer = self.idle_layer()
            self.missing = "with T = 1 attention is idle: of the heads there is only the sum of V"
            return
        with self.oracle.part("size"):
            size, effect = token_size(self.oracle, self.noise, self.rng)
        self.size = size or 1.0
        total = self.learn_sum(effect)
        if total.misfit > total.allowed:
            self.missing = (
                f"outputs of equal tokens are not linear in the token (misfit {total.misfit:.2g}"
                f", wanted <= {total.allowed:.2g}){'' if self.bias else '; bias=True if there are biases'}"
            )
            return
        if size is None:
            self.layer = self.idle_layer()
            self.identified = 1.0 if self.heads == 1 else 0.0
            if self.heads > 1:
                self.missing = f"attention has no effect: all W are 0, or V, and not {self.heads} heads"
            return
        pairs = pairs_of(self.oracle, self.size, total, self.bias, self.noise)
        with self.oracle.part("heads"):
            delta, fit = self.first_heads(pairs)
        if fit is None:
            return
        with self.oracle.part("directions"):
            deltas, every = self.spread(pairs, delta, fit)
        if deltas is None:
            return
        W, V = _solve(deltas, [fit for _, fit in every])
        if self.noise > 0.0 or self.oracle.rounding > 1e-10:
            with self.oracle.part("polish"):
                W, V, every = self.polish(pairs, W, V)
        self.identified = min(identified(rows, fit) for rows, fit in every)
        self.layer = self.whole(W, V, pairs.offset)

    def learn_sum(self, effect: float = 0.0) -> Sum:
        """Learn the sum of the values."""
        repeats = NOISY_REPEATS if self.noise > 0.0 else 1
        with self.oracle.part("sum"):
            self.sum = sum_of_values(
                self.oracle, self.size, self.bias, self.noise, repeats, effect, self.rng
            )
        return self.sum

    def idle_layer(self) -> Layer:
        """Return the layer of one head with W = 0."""
        assert self.sum is not None
        d = self.oracle.dim
        return self.whole(np.zeros((1, d + self.bias, d)), self.sum.values[None], self.sum.offset)

    def whole(self, W: Float64, V: Float64, offset: Float64) -> Layer:
        """Return a layer; with biases one of tokens (x, 1) whose V share β."""
        if not self.bias:
            return Layer(W, V)
        W = np.concatenate([W, np.zeros((*W.shape[:2], 1))], axis=2)
        shared = np.broadcast_to(offset / len(V), (len(V), 1, V.shape[2]))
        return Layer(W, np.concatenate([V, shared], axis=1))

    def inputs_for(self, heads: int, over: float) -> int:
        """Return how many inputs give `over` times the rows that determine the heads at one δ.

        A row tells A at most min(H, p) numbers, and H rows go to C.
        """
        p, d = self.oracle.out_dim or 1, self.oracle.dim
        least = heads + heads * (d + self.bias) / min(heads, p)
        return int(np.ceil(0.5 * over * least)) + 1

    def rows(self, pairs: Pairs, delta: Float64, A: Float64, count: int) -> Rows:
        """Ask inputs of one δ whose scores at heads A are neither flat nor saturated.

        By turns the query x or the query x - δ is moved along the a_h, as little as possible, to
        have random scores of standard deviation 2.5; the other query is left as it comes.
        """
        d = len(delta)
        lengths = np.maximum(np.linalg.norm(A[:, :d], axis=1), 1.0 / self.size)
        units = A[:, :d] / lengths[:, None]
        q = self.rng.standard_normal((count, d)) * AWAY * self.size / np.sqrt(d)
        wanted = self.rng.standard_normal((count, len(A))) * SPREAD
        wanted -= A[:, d:].sum(axis=1)
        gram = units @ units.T + RIDGE * np.eye(len(A))
        q += np.linalg.solve(gram, (wanted / lengths - q @ units.T).T).T @ units
        q[1::2] += delta
        return pairs.rows(pairs.grid(q), delta)

    def first_rows(self, pairs: Pairs, delta: Float64, count: int) -> Rows:
        """Ask inputs of one δ of which no head is known: near 0 and far."""
        q = self.rng.standard_normal((count, len(delta)))
        q *= pairs.size * np.geomspace(*FIRST_RADII, count)[:, None] / np.sqrt(len(delta))
        q[1::2] += delta
        return pairs.rows(pairs.grid(q), delta)

    @property
    def over(self) -> float:
        """Rows of a fit that finds heads, over the least number."""
        return NOISY_ROWS if self.noise > 0.0 else ROWS

    def fit(self, pairs: Pairs, rows: Rows, A: Float64, steps: int = 60) -> tuple[Fit, bool]:
        """Fit, and tell whether what is left is noise or rounding."""
        limit = pairs.limit(rows.scale)
        fit = fit_heads(rows, A, steps=steps, rounding=limit if self.noise == 0.0 else 0.0)
        return fit, fit.residual <= limit

    def first_heads(self, pairs: Pairs) -> tuple[Float64, Fit | None]:
        """Find the heads at one δ: as many as were asked for, or as few as suffice."""
        d = self.oracle.dim
        delta = self.rng.standard_normal(d)
        delta = pairs.grid(self.size * delta / np.linalg.norm(delta))
        for heads in range(self.heads, 0, -1):
            fit = self.heads_at(pairs, delta, heads)
            if fit is not None:
                if heads < self.heads:
                    beyond = " beyond the noise" if self.noise > 0.0 else ""
                    self.missing = (
                        f"the outputs are those of {heads} heads, not {self.heads}: others have no "
                        f"effect of their own{beyond}, as V = 0, W = 0 or the W of another"
                    )
                return delta, self.signed(pairs, delta, fit)
        self.missing = (
            f"no {self.heads} heads or fewer give the outputs of inputs of two tokens: there are "
            f"more heads, or it is no such layer"
        )
        return delta, None

    def heads_at(self, pairs: Pairs, delta: Float64, heads: int) -> Fit | None:
        """Find so many heads at one δ, all of them determined."""
        rows = self.first_rows(pairs, delta, self.inputs_for(heads, 2.0 * self.over))
        for method, A in starts(pairs, delta, heads, self.rng):
            fit, good = self.fit(pairs, rows, A)
            if not good:
                continue
            again = self.rows(pairs, delta, fit.A, self.inputs_for(heads, self.over))
            fit, good = self.fit(pairs, again, fit.A)
            if not good:
                continue
            if identified(again, fit) < IDENTIFIED or self.idle(pairs, again, fit):
                return None
            self.method = method
            return fit
        return None

    def idle(self, pairs: Pairs, rows: Rows, fit: Fit) -> bool:
        """Whether some head has no effect beyond noise and rounding."""
        p = fit.C.shape[1]
        return bool(np.linalg.norm(fit.C, axis=1).min() / np.sqrt(p) < pairs.limit(rows.scale))

    def signed(self, pairs: Pairs, delta: Float64, fit: Fit) -> Fit | None:
        """Choose the signs of the heads, which with T = 2 only the sum of the values tells.

        tanh is odd: (a_h, c_h) and (-a_h, -c_h) have the same y, and Σ_h c_h = δ S.
        """
        if self.oracle.tokens > 2:
            return fit
        target = delta @ pairs.values
        H = len(fit.C)
        if H > MOST_SIGNS:
            least = np.linalg.lstsq(fit.C.T, target, rcond=None)[0]
            choices = np.sign(least)[None]
        else:
            choices = np.array(list(itertools.product((1.0, -1.0), repeat=H)))
        misfits = np.linalg.norm(choices @ fit.C - target, axis=1)
        misfits /= float(np.linalg.norm(fit.C)) + 1e-300
        order = np.argsort(misfits, kind="stable")
        limit = NOISY_SIGNS if self.noise > 0.0 else max(TOLD_APART, 1e3 * self.oracle.rounding)
        if misfits[order[0]] > limit:
            self.missing = (
                "with T = 2 the signs of the heads show in the sum of the values only, and no signs "
                "give it: there are heads of W = 0 besides"
                + (", or hidden by noise" if self.noise > 0.0 else "")
            )
            return None
        if len(order) > 1 and misfits[order[1]] <= max(limit, 3.0 * misfits[order[0]]):
            self.missing = (
                "with T = 2 (W, V) and (-W, -V) of some heads give the same outputs, as their V add "
                "up to 0"
            )
            return None
        sign = choices[order[0]][:, None]
        return replace(fit, A=fit.A * sign, C=fit.C * sign)

    def spread(
        self, pairs: Pairs, delta: Float64, first: Fit
    ) -> tuple[Float64 | None, list[tuple[Rows, Fit]]]:
        """Follow the heads from one δ towards every vector of a basis."""
        d = self.oracle.dim
        deltas, found = np.empty((d, d)), []
        for j in range(d):
            towards = np.zeros(d)
            towards[j] = np.copysign(self.size, delta[j])  # so that the δ are a basis
            one = self.follow(pairs, delta, first, towards)
            if one is None:
                self.missing = f"the heads could not be followed to direction {j} of the tokens"
                return None, []
            deltas[j] = one[0]
            found.append(one[1:])
        return deltas, found

    def follow(
        self, pairs: Pairs, delta: Float64, first: Fit, towards: Float64
    ) -> tuple[Float64, Rows, Fit] | None:
        """Fit the heads at a δ some way from the first, by smaller steps if need be."""
        for near in NEAR:
            one = self.step(pairs, delta, first, delta + pairs.grid(near * towards), first.A)
            if one is None:
                continue
            if near < NEAR[0]:
                A = first.A + NEAR[0] / near * (one[2].A - first.A)
                far = self.step(pairs, delta, first, delta + pairs.grid(NEAR[0] * towards), A)
                one = one if far is None else far
            return one
        return None

    def step(
        self, pairs: Pairs, delta: Float64, first: Fit, other: Float64, A: Float64
    ) -> tuple[Float64, Rows, Fit] | None:
        """Fit the heads at another δ; None if they do not give the outputs, or are not the same."""
        count = self.inputs_for(len(A), self.over)
        rows = self.rows(pairs, other, A, count)
        fit, good = self.fit(pairs, rows, A)
        if good and not told(rows, fit.A):
            rows = self.rows(pairs, other, fit.A, count)
            fit, good = self.fit(pairs, rows, fit.A)
        if good and self.between(pairs, delta, other, first, fit):
            return other, rows, fit
        return None

    def between(
        self, pairs: Pairs, one: Float64, other: Float64, first: Fit, second: Fit
    ) -> bool:
        """Whether heads at two δ are the same: those of the middle are then the means.

        They are not if the fit has exchanged heads or turned a sign.
        """
        A, C = 0.5 * (first.A + second.A), 0.5 * (first.C + second.C)
        rows = self.rows(pairs, 0.5 * (one + other), A, 2)
        residual = rows.Y - np.tanh(0.5 * (rows.Q @ A.T + rows.b[:, None])) @ C
        allowed = 1e3 * pairs.limit(rows.scale) if self.noise == 0.0 else 2.0 * pairs.limit(0.0)
        return bool(np.sqrt(np.mean(residual**2)) <= allowed)

    def polish(
        self, pairs: Pairs, W: Float64, V: Float64
    ) -> tuple[Float64, Float64, list[tuple[Rows, Fit]]]:
        """Fit again at δ at right angles, where errors are not enlarged, from new queries."""
        d, heads = self.oracle.dim, len(W)
        over = NOISY_POLISH if self.noise > 0.0 else ROWS
        count = self.inputs_for(heads, over)
        if self.budget is not None and self.noise > 0.0:
            left = self.budget - self.oracle.queries - HELD_OUT - REPEATS
            count = max(2 * left // (3 * d + self.bias), self.inputs_for(heads, ROWS))
        if self.noise > 0.0:
            total = sum_of_values(
                self.oracle, self.size, self.bias, self.noise, -(-count // 2), 0.0, self.rng
            )
            pairs = pairs_of(self.oracle, self.size, total, self.bias, self.noise)
            self.sum = total
        deltas = np.linalg.qr(self.rng.standard_normal((d, d)))[0]
        deltas = pairs.grid(APART * self.size * deltas)
        every, of_W, of_V = [], 0.0, 0.0
        for delta in deltas:
            A = np.hstack([W[:, :d] @ delta, W[:, d:] @ delta])
            rows = self.rows(pairs, delta, A, count)
            fit, _ = self.fit(pairs, rows, A)
            every.append((rows, fit))
            if self.noise > 0.0:
                parts = variances(rows, fit)
                of_W, of_V = of_W + parts[0], of_V + parts[1]
        W, V = _solve(deltas, [fit for _, fit in every])
        if self.noise > 0.0:
            size = APART * self.size * np.sqrt(float(np.sum(W**2) + np.sum(V**2)))
            self.standard_error = float(2.0 * self.noise / size * np.sqrt(of_W + of_V))
        return W, V, every

    def result(self, seconds: float) -> QueryLearning:
        """Return what was learnt, judged on inputs of another kind."""
        certificates = []
        held_out = None
        if self.sum is not None:
            certificates.append(
                Certificate("equal tokens", self.sum.misfit, self.sum.allowed, decisive=True)
            )
        if self.layer is not None:
            with self.oracle.part("held out"):
                held_out, limit, beyond = self.judge(self.layer)
            certificates.append(Certificate("held-out residual", held_out, limit, decisive=True))
            if self.noise > 0.0:
                certificates.append(
                    Certificate("outputs beyond noise", beyond, 0.5, above=True, decisive=True)
                )
            assert self.sum is not None
            V = self.layer.V[:, : self.oracle.dim]
            gap = float(np.linalg.norm(V.sum(axis=0) - self.sum.values)) / (
                float(np.linalg.norm(V)) + 1e-300
            )
            certificates.append(Certificate("sum of values", gap, max(limit, 10.0 * LINEAR)))
        if self.identified is not None:
            certificates.append(
                Certificate("identified", self.identified, IDENTIFIED, above=True, decisive=True)
            )
        learnt = (
            self.missing is None
            and self.layer is not None
            and all(c.holds for c in certificates if c.decisive)
        )
        return QueryLearning(
            layer=self.layer,
            learnt=learnt,
            heads=self.heads if self.layer is None else self.layer.heads,
            held_out=held_out,
            certificates=tuple(certificates),
            queries=self.oracle.queries,
            asked=dict(self.oracle.asked),
            noise=self.noise,
            standard_error=self.standard_error,
            size=self.size,
            method=self.method,
            seconds=seconds,
            missing=self.missing,
        )

    def judge(self, layer: Layer) -> tuple[float, float, float]:
        """Return the held-out residual, its limit, and the share of outputs beyond noise."""
        d, T = self.oracle.dim, self.oracle.tokens
        X = self.rng.standard_normal((HELD_OUT, T, d)) * self.size / np.sqrt(d)
        X = on_grid(X, self.size / np.sqrt(d))
        Y = self.oracle(X)
        if self.bias:
            X = np.concatenate([X, np.ones((HELD_OUT, T, 1))], axis=2)
        scale = float(np.sqrt(np.mean(Y**2))) + 1e-300
        residual = float(np.sqrt(np.mean((layer(X) - Y) ** 2))) / scale
        share = self.noise / scale
        exact = EXACT if self.oracle.rounding < 1e-10 else SINGLE
        beyond = float(np.sqrt(max(0.0, 1.0 - share**2)))
        return residual, float(np.hypot(exact, NOISE_LEFT * share)), beyond


def _solve(deltas: Float64, fits: list[Fit]) -> tuple[Float64, Float64]:
    """Return W (H, d or d + 1, d) and V (H, d, p) of a_h = W_h δᵀ and c_h = δ V_h at a basis."""
    A, C = np.stack([fit.A for fit in fits]), np.stack([fit.C for fit in fits])
    W = np.linalg.solve(deltas, A.reshape(len(A), -1)).reshape(A.shape)
    V = np.linalg.solve(deltas, C.reshape(len(C), -1)).reshape(C.shape)
    return W.transpose(1, 2, 0), V.transpose(1, 0, 2)
