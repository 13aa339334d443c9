"""Instances that the tests of the reference share, and their gradients in extended precision."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np

from mhfast import reference


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


def saturated(gap: float) -> dict[str, Any]:
    """Two samples, three heads, one external query row; each head's smallest logit gap is `gap`."""
    instance = problem(seed=3, n=2, T=4, d=5, H=3, q=1)
    query = np.random.default_rng(4).standard_normal((2, 1, 5))
    A = reference.attention(instance["X"], instance["W"], query)
    ordered = np.sort(np.log(A), axis=-1)
    smallest = (ordered[..., -1] - ordered[..., -2]).min(axis=(0, 2))
    return instance | {"W": instance["W"] * (gap / smallest)[:, None, None], "query": query}


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
