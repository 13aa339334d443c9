"""`learn_layer_by_queries`: from a sum to the heads at one δ, to all δ, to a verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from ..._arguments import checks as _checks
from ...models import Layer
from ..examples import Float64
from ..result import Certificate
from .fitting import Fit, identified, variances
from .oracle import Ask, Oracle, Pairs, Rows, as_oracle, on_grid
from .probing import (
    LINEAR,
    NOISY_REPEATS,
    REPEATS,
    Sum,
    measured_noise,
    sum_of_values,
    token_size,
)
from .result import QueryLearning
from .search import IDENTIFIED, ROWS, Search
from .signs import signs

NOISY_POLISH = 64.0
"""Rows of the last fits of a noisy oracle, over the least number, by default."""

APART = 2.0
"""Norm of the differences of tokens in the last fits, over that of typical tokens."""

LARGER = (5.0, 25.0)
"""Sizes of tokens, over that first found, that are tried next."""

HELD_OUT = 24
"""Inputs of different tokens for the verdict."""

SHARP = 1e-10
"""Largest unit of rounding of an oracle that counts as float64."""

EXACT = 1e-8
SINGLE = 3.6e-6
"""Held-out residuals of a layer that is learnt, float64 and float32 oracles."""

NOISE_LEFT = 1.25
"""Held-out residual over the noise, at most."""


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
    """Learn a layer F(X) = Σ_h softmax(X W_h Xᵀ) X V_h from chosen inputs.

    Parameters
    ----------
    oracle : callable or Layer
        A function of float64 tokens (n, T, d) to outputs (n, T, p) of float32 or float64, each
        input independently.  A Layer is evaluated in its own dtype.
    d, T : int
        Dimension and number of tokens.
    heads : int
        The number of heads H.
    bias : bool
        Whether scores and outputs may have biases: softmax(X W_h Xᵀ + 1 (X w_h)ᵀ), and + β.  The
        layer is then one of tokens (x, 1), of dimension d + 1.
    noise : float, optional
        Standard deviation of the noise on every output.  None means that it is measured by asking
        for the outputs of some inputs twice.
    queries : int, optional
        Approximate number of all inputs to ask if there is noise: more give smaller errors.
        None means 64 times the rows that could determine the heads.  Without noise as many as
        needed are asked.
    seed : int

    Returns
    -------
    QueryLearning
        `.layer`, `.learnt`, `.verdict`, `.queries` and more.  A layer is *learnt* only if it
        predicts the outputs of held-out inputs of another kind, to 1e-8 relative (float32: 3.6e-6)
        or to the noise, and if no other layer near it gives the same answers.

    Raises
    ------
    TypeError
        The oracle cannot be called or returns no real numbers; an argument is of the wrong kind.
    ValueError
        Outputs are not of shape (n, T, p) or not finite; a setting is out of range.

    Notes
    -----
    Inputs of two tokens x and x - δ, repeated, make an output a sum of H hyperbolic tangents.  At
    one δ the heads are found from differences of outputs by a tensor decomposition, then fitted;
    from there δ is moved to every direction of a basis.  The documentation has the formulas.

    Examples
    --------
    >>> import mhfast as mh
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
    given_noise: float | None
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
        """Learn as much as can be learnt."""
        with self.oracle.part("noise"):
            again = measured_noise(self.oracle, self.rng)
            self.noise = again if self.given_noise is None else self.given_noise
        if self.oracle.tokens == 1:
            self.learn_sum()
            self.layer = self.idle_layer()
            self.missing = "with T = 1 attention has no effect: only the sum of V is determined"
            return
        with self.oracle.part("size"):
            size, effect = token_size(self.oracle, self.noise, self.rng)
        self.size = size or 1.0
        total = self.learn_sum(effect)
        if total.misfit > total.allowed:
            self.missing = (
                f"outputs of equal tokens are not linear in the token (misfit {total.misfit:.2g}, "
                f"wanted <= {total.allowed:.2g})"
                + ("" if self.bias else "; bias=True if there are biases")
            )
            return
        if size is None:
            self.layer = self.idle_layer()
            self.identified = 1.0 if self.heads == 1 else 0.0
            if self.heads > 1:
                self.missing = (
                    f"attention has no effect: W or V is 0, there is no sign of {self.heads} heads"
                )
            return
        pairs = Pairs(self.oracle, self.size, total.values, total.offset, self.bias, self.noise)
        with self.oracle.part("heads"):
            search, delta, fit = self.first_heads(pairs)
        if fit is None:
            return
        with self.oracle.part("directions"):
            deltas, every = search.spread(delta, fit)
        if len(every) < self.oracle.dim:
            self.missing = f"the heads were lost on the way to direction {len(every)} of the tokens"
            return
        W, V = _solve(deltas, [fit for _, fit in every])
        if self.noise > 0.0 or self.oracle.rounding > SHARP:
            with self.oracle.part("polish"):
                W, V, every = self.polish(search, W, V)
        self.identified = min(identified(rows, fit) for rows, fit in every)
        self.layer = self.whole(W, V)

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
        return self.whole(np.zeros((1, d + self.bias, d)), self.sum.values[None])

    def whole(self, W: Float64, V: Float64) -> Layer:
        """Return a layer; with biases one of tokens (x, 1) whose V share β."""
        if not self.bias or self.sum is None:
            return Layer(W, V)
        W = np.concatenate([W, np.zeros((*W.shape[:2], 1))], axis=2)
        shared = np.broadcast_to(self.sum.offset / len(V), (len(V), 1, V.shape[2]))
        return Layer(W, np.concatenate([V, shared], axis=1))

    def first_heads(self, pairs: Pairs) -> tuple[Search, Float64, Fit | None]:
        """Find the heads at one δ: as many as were requested, or as few as suffice.

        If one head is much sharper than others, these have an effect at larger tokens only.
        """
        tries = [(self.heads, 1.0), *((self.heads, factor) for factor in LARGER)]
        for heads, factor in (*tries, *((fewer, 1.0) for fewer in range(self.heads - 1, 0, -1))):
            self.size = factor * pairs.size
            search = Search(replace(pairs, size=self.size), self.rng)
            delta = self.rng.standard_normal(self.oracle.dim)
            delta = search.pairs.grid(self.size * delta / np.linalg.norm(delta))
            found = search.heads_at(delta, heads)
            if found is not None:
                fit, self.method = found
                if heads < self.heads:
                    beyond = " beyond the noise" if self.noise > 0.0 else ""
                    self.missing = (
                        f"the outputs are those of {heads} heads, not {self.heads}: others have no "
                        f"effect of their own{beyond}, as V = 0, W = 0 or the W of another"
                    )
                return search, delta, self.signed(search.pairs, delta, fit)
        self.missing = (
            f"no {self.heads} heads or fewer give the outputs of inputs of two tokens: there are "
            f"more heads, or it is not such a layer"
        )
        return search, delta, None

    def signed(self, pairs: Pairs, delta: Float64, fit: Fit) -> Fit | None:
        """Choose the signs of the heads if outputs of pairs do not determine them."""
        if self.oracle.tokens > 2:
            return fit
        chosen, reason = signs(
            fit.C, delta @ pairs.values, self.oracle.rounding, noisy=self.noise > 0.0
        )
        if chosen is None:
            self.missing = reason
            return None
        return replace(fit, A=fit.A * chosen[:, None], C=fit.C * chosen[:, None])

    def polish(
        self, search: Search, W: Float64, V: Float64
    ) -> tuple[Float64, Float64, list[tuple[Rows, Fit]]]:
        """Fit again at orthogonal δ, where errors are not amplified, from new queries."""
        d, heads = self.oracle.dim, len(W)
        count = search.inputs_for(heads, NOISY_POLISH if self.noise > 0.0 else ROWS)
        if self.budget is not None and self.noise > 0.0:
            left = self.budget - self.oracle.queries - HELD_OUT - REPEATS
            count = max(2 * left // (3 * d + self.bias), search.inputs_for(heads, ROWS))
        if self.noise > 0.0:
            self.sum = sum_of_values(
                self.oracle, self.size, self.bias, self.noise, -(-count // 2), 0.0, self.rng
            )
            pairs = replace(search.pairs, values=self.sum.values, offset=self.sum.offset)
            search = replace(search, pairs=pairs)
        deltas = np.linalg.qr(self.rng.standard_normal((d, d)))[0]
        deltas = search.pairs.grid(APART * self.size * deltas)
        every, of_W, of_V = [], 0.0, 0.0
        for delta in deltas:
            A = np.hstack([W[:, :d] @ delta, W[:, d:] @ delta])
            rows = search.rows(delta, A, count)
            fit, _ = search.fit(rows, A)
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
        exact = EXACT if self.oracle.rounding < SHARP else SINGLE
        beyond = float(np.sqrt(max(0.0, 1.0 - share**2)))
        return residual, float(np.hypot(exact, NOISE_LEFT * share)), beyond


def _solve(deltas: Float64, fits: list[Fit]) -> tuple[Float64, Float64]:
    """Return W (H, d or d + 1, d) and V (H, d, p) of a_h = W_h δᵀ and c_h = δ V_h at a basis."""
    A, C = np.stack([fit.A for fit in fits]), np.stack([fit.C for fit in fits])
    W = np.linalg.solve(deltas, A.reshape(len(A), -1)).reshape(A.shape)
    V = np.linalg.solve(deltas, C.reshape(len(C), -1)).reshape(C.shape)
    return (
        np.ascontiguousarray(W.transpose(1, 2, 0), np.float64),
        np.ascontiguousarray(V.transpose(1, 0, 2), np.float64),
    )
