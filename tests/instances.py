"""Instances that the tests of the reference share, and their gradients in extended precision."""

from __future__ import annotations

from typing import Any, NamedTuple

import mpmath
import numpy as np
from lists import kind_of_targets, targets, within_domain

import mhfast as mh

# No two axes of one length: n, T, d, H, p, q, r, R.
SAMPLES, TOKENS, DIM, HEADS, OUTPUTS, ROWS, RANK, RUNS = 6, 3, 8, 7, 4, 2, 5, 9

# Relative to the largest entry; the promise for results against the float64 reference.
TOLERANCE = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 3e-6}


class Case(NamedTuple):
    """What `value_and_grad` is called with: a model, X (n,T,d), y and options."""

    model: mh.Classifier | mh.Layer
    X: Any
    y: Any
    options: dict[str, Any]

    def seen(self) -> dict[str, Any]:
        """The options that matter to outputs and attention."""
        return {name: self.options[name] for name in ("query", "lengths") if name in self.options}

    def names(self) -> list[str]:
        """All that the value can be differentiated by."""
        external = "query" in self.options or isinstance(self.model.query, np.ndarray)
        return [*self.model.parameters, "X", *(["query"] if external else [])]

    def value_and_grad(self, **changes: Any) -> Any:
        return mh.value_and_grad(self.model, self.X, self.y, **(self.options | changes))

    def run(self, r: int) -> Case:
        """The case of one run, of a case whose arrays have run axes where they may."""
        axes = {"query": 3, "lengths": 1, "weight": 1}
        model = self.model if self.model.runs is None else self.model[r]
        base = 1 if isinstance(model, mh.Classifier) else 3
        if kind_of_targets(self.options["loss"]) == "classes":
            base = 2

        def part(value: Any, own: int) -> Any:
            return value[r] if np.ndim(value) > own else value

        options = {
            name: part(value, axes[name]) if name in axes else value
            for name, value in self.options.items()
        }
        return Case(model, part(self.X, 3), part(self.y, base), options)


def case(
    kind: type[mh.Classifier | mh.Layer] = mh.Classifier,
    *,
    loss: Any = "logistic",
    query: Any = None,
    factors: str = "",
    value_rank: int | None = None,
    identities: str = "",
    prompt: bool = False,
    causal: bool = False,
    lengths: bool = False,
    weight: str = "",
    runs: tuple[str, ...] = (),
    scale: float = 1.0,
    attention: Any = "softmax",
    normalize: bool | None = None,
    dtype: Any = np.float64,
    seed: int = 0,
) -> Case:
    """Draw a model and data for it.

    `query` is None, an integer, "own" (the model has an external one) or "given" (the call has);
    `factors` "", "low rank" or "tied"; `value_rank` that of a layer's factored V; `identities`
    holds W, V of a layer or both; `weight` "", "samples" or "rows"; `runs` names the arrays that
    have a run axis.
    """
    rng = np.random.default_rng(seed)

    def lead(name: str) -> tuple[int, ...]:
        return (RUNS,) if name in runs else ()

    def draw(name: str, *shape: int) -> Any:
        return rng.standard_normal(lead(name) + shape).astype(dtype)

    q = TOKENS if query is None else 1 if isinstance(query, int) else ROWS
    arrays: dict[str, Any] = {}
    if factors:
        Q = draw("Q", HEADS, DIM, RANK) / RANK
        K = draw("K", HEADS, DIM, RANK) / RANK
        arrays["W"] = mh.LowRank(Q, None if factors == "tied" else K)
    else:
        arrays["W"] = None if "W" in identities else draw("W", HEADS, DIM, DIM) / DIM
    if prompt:
        q = ROWS
        arrays["prompt"] = draw("prompt", q, DIM)
    options: dict[str, Any] = {"loss": loss}
    if query in ("own", "given"):
        (arrays if query == "own" else options)["query"] = draw("query", SAMPLES, q, DIM)
    elif query is not None:
        arrays["query"] = query
    if kind is mh.Classifier:
        arrays["U"] = draw("U", HEADS, q, DIM) / 2
        shape: tuple[int, ...] = (SAMPLES,)
    else:
        p = DIM if "V" in identities else OUTPUTS
        arrays["V"] = None if "V" in identities else draw("V", HEADS, DIM, OUTPUTS) / 4
        if value_rank is not None:
            A, B = draw("A", HEADS, DIM, value_rank) / 2, draw("B", HEADS, value_rank, OUTPUTS) / 2
            arrays["V"] = mh.ValueOutput(A, B)
        shape = (SAMPLES, q, p)
    y = targets(loss, lead("y") + shape, rng, dtype, shape[-1])
    if lengths:
        ends = np.array([3, 1, 0, 2, 3, 2])
        options["lengths"] = ends
        if "lengths" in runs:
            options["lengths"] = np.stack([np.roll(ends, r) for r in range(RUNS)])
    if weight:
        rows = (SAMPLES,) if weight == "samples" else (SAMPLES, q)
        drawn = rng.random(lead("weight") + rows)
        options["weight"] = (drawn * (drawn > 0.25)).astype(dtype)
    settings = {"attention": attention, "normalize": normalize}
    model = kind(**arrays, scale=scale, causal=causal, **settings)
    model, X = within_domain(loss, model, draw("X", SAMPLES, TOKENS, DIM))
    return Case(model, X, y, options)


def problem(
    seed: int = 0, n: int = 6, T: int = 3, d: int = 5, H: int = 7, q: int | None = None
) -> dict[str, Any]:
    """A random instance with attention that is neither uniform nor saturated."""
    rng = np.random.default_rng(seed)
    return {
        "X": rng.standard_normal((n, T, d)),
        "y": np.where(np.arange(n) % 3 == 0, 1.0, -1.0),
        "W": rng.standard_normal((H, d, d)) / d,
        "U": rng.standard_normal((H, T if q is None else q, d)),
    }


def relative(a: Any, b: Any) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def exact_gradients(
    X: Any, y: Any, W: Any, U: Any, query: Any, digits: int
) -> tuple[list[Any], list[Any]]:
    """Logistic gradients by the textbook formula in `digits` decimal digits, as mpmath numbers."""
    n, d, H, q = len(X), X.shape[2], len(W), query.shape[1]
    with mpmath.workdps(digits):
        mpf = mpmath.mpf
        big = {
            name: np.vectorize(mpf, otypes=[object])(a)
            for name, a in (("X", X), ("y", y), ("W", W), ("U", U), ("Z", query))
        }
        gW = np.full((H, d, d), mpf(0))
        gU = np.full((H, q, d), mpf(0))
        root = mpmath.sqrt(mpf(H))
        for i in range(n):
            x, z = big["X"][i], big["Z"][i]
            C = [big["U"][h] @ x.T for h in range(H)]
            A = [np.vectorize(mpmath.exp, otypes=[object])(z @ big["W"][h] @ x.T) for h in range(H)]
            A = [a / a.sum(axis=1, keepdims=True) for a in A]
            phi = sum((a * c).sum() for a, c in zip(A, C, strict=True)) / root
            g = -big["y"][i] / (1 + mpmath.exp(big["y"][i] * phi)) / n / root
            for h in range(H):
                D = A[h] * (C[h] - (A[h] * C[h]).sum(axis=1, keepdims=True))
                gU[h] += g * (A[h] @ x)
                gW[h] += g * (z.T @ D @ x)
        return gW, gU


def to_float(values: Any) -> Any:
    return np.vectorize(float, otypes=[float])(values)
