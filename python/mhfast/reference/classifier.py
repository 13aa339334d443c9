"""Outputs, attention, losses and gradients of the multi-head attention classifier.

    Φ(X_i) = H^(-1/2) Σ_h ⟨U_h, A_ih X_i⟩,   A_ih = softmax_row(scale · Z_i W_h X_iᵀ)

Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
Attention" (TMLR 2024).  Letters: n samples, T tokens, q query rows, d token dimension, H heads.

Products are written with `einsum`, whose loops treat every token alike: equal tokens get equal
scores to the last bit, which a blocked matrix product does not promise and which the gradients of
saturated attention over repeated tokens need.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
Query: TypeAlias = ArrayLike | None

LOSSES = ("logistic", "exponential", "linear", "squared")


def double(values: ArrayLike) -> Array:
    """Return the values as a float64 array."""
    return np.asarray(values, dtype=np.float64)


def queries(X: ArrayLike, query: Query = None) -> Array:
    """Query rows Z (n,q,d) of tokens X (n,T,d).

    `query` None: every token asks, Z = X.  An integer: that token of each sample asks, q = 1,
    negative numbers count from the end.  An array (n,q,d): those rows ask.
    """
    if query is None:
        return double(X)
    if isinstance(query, int | np.integer):
        return double(X)[:, [int(query)]]
    return double(query)


def logits(X: ArrayLike, W: ArrayLike, query: Query = None, scale: float = 1.0) -> Array:
    """Scores scale · Z_i W_h X_iᵀ, (n,H,q,T), of X (n,T,d) and W (H,d,d)."""
    ZW = np.einsum("nqd,hde->nhqe", queries(X, query), double(W))
    scores: Array = scale * np.einsum("nhqe,nte->nhqt", ZW, double(X))
    return scores


def attention(X: ArrayLike, W: ArrayLike, query: Query = None, scale: float = 1.0) -> Array:
    """Attention weights A (n,H,q,T): the softmax over the last axis of `logits`."""
    S = logits(X, W, query, scale)
    E = np.exp(S - S.max(axis=-1, keepdims=True))
    A: Array = E / E.sum(axis=-1, keepdims=True)
    return A


def readout(X: ArrayLike, U: ArrayLike) -> Array:
    """Contribution of each key, C_ih = U_h X_iᵀ, (n,H,q,T), of X (n,T,d) and U (H,q,d)."""
    C: Array = np.einsum("hqd,ntd->nhqt", double(U), double(X))
    return C


def outputs(
    X: ArrayLike, W: ArrayLike, U: ArrayLike, query: Query = None, scale: float = 1.0
) -> Array:
    """Φ (n,) of X (n,T,d), W (H,d,d), U (H,q,d): H^(-1/2) Σ_h,row,t A_t C_t."""
    A = attention(X, W, query, scale)
    phi: Array = (A * readout(X, U)).sum(axis=(1, 2, 3)) / np.sqrt(A.shape[1])
    return phi


def loss_terms(phi: ArrayLike, y: ArrayLike, loss: str = "logistic") -> tuple[Array, Array, Array]:
    """Loss ℓ_i, its derivative r_i = ∂ℓ_i/∂Φ_i, and log|r_i|, each (n,).

    With the margin m = y Φ, y = ±1:

        logistic      log(1 + exp(-m))       r = -y / (1 + exp(m))
        exponential   exp(-m)                r = -y exp(-m)
        linear        -m                     r = -y
        squared       (Φ - y)², y real       r = 2 (Φ - y)

    log|r_i| stays finite where r_i itself underflows.

    Raises
    ------
    ValueError
        For an unknown loss.
    """
    phi, y = double(phi), double(y)
    m = y * phi
    if loss == "logistic":
        small = np.exp(-np.abs(m))
        value = np.log1p(small) + np.maximum(-m, 0.0)
        slope = -y * np.where(m > 0, small, 1.0) / (1.0 + small)
        return value, slope, -np.log1p(small) - np.maximum(m, 0.0)
    if loss == "exponential":
        with np.errstate(over="ignore"):
            return np.exp(-m), -y * np.exp(-m), -m
    if loss == "linear":
        return -m, -y, np.zeros_like(m)
    if loss == "squared":
        with np.errstate(divide="ignore"):
            return (phi - y) ** 2, 2.0 * (phi - y), np.log(2.0 * np.abs(phi - y))
    raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {loss!r}")


def shares(n: int, weight: ArrayLike | None) -> Array:
    """Share w_i / Σ w of each sample in the loss, (n,); equal shares for `weight` None."""
    w = np.ones(n) if weight is None else double(weight)
    total: float = w.sum()
    return w / total


def centre(A: Array, C: Array) -> tuple[Array, Any]:
    """c_s - Σ_t A_t c_t with c = C - C_m, m the row's largest weight; and m, shape (...,1)."""
    m = A.argmax(axis=-1)[..., None]
    c = C - np.take_along_axis(C, m, axis=-1)
    return c - (A * c).sum(axis=-1, keepdims=True), m


def score_gradient(weights: Array, centred: Array, m: Any) -> Array:
    """D_s = weights_s · centred_s for s ≠ m and D_m = -Σ_{s≠m} D_s, so that rows sum to zero."""
    D = weights * centred
    np.put_along_axis(D, m, 0.0, axis=-1)
    np.put_along_axis(D, m, -D.sum(axis=-1, keepdims=True), axis=-1)
    return D


def value_and_grad(
    X: ArrayLike,
    y: ArrayLike,
    W: ArrayLike,
    U: ArrayLike,
    query: Query = None,
    scale: float = 1.0,
    loss: str = "logistic",
    weight: ArrayLike | None = None,
) -> tuple[float, Array, Array]:
    """Loss Σ w_i ℓ_i / Σ w and its gradients in W (H,d,d) and U (H,q,d).

    With r_i the derivative of the loss and g_i = r_i w_i / Σ w,

        ∂L/∂U_h = H^(-1/2) Σ_i g_i A_ih X_i
        ∂L/∂W_h = H^(-1/2) Σ_i g_i scale · Z_iᵀ D_ih X_i,   D = A∘(C - rowsum(A∘C)),  C = U Xᵀ.

    D is computed centred: with m the largest weight of a row, c_s = C_s - C_m, p = Σ_s A_s c_s,
    D_s = A_s (c_s - p) for s ≠ m and D_m = -Σ_{s≠m} D_s.  In exact arithmetic this is D; in
    floating point it keeps its relative accuracy when one weight is nearly one, where the
    textbook formula subtracts nearly equal numbers.
    """
    A, C = attention(X, W, query, scale), readout(X, U)
    D = score_gradient(A, *centre(A, C))
    return _assemble(X, y, A, C, D, query, scale, loss, weight)


def textbook_value_and_grad(
    X: ArrayLike,
    y: ArrayLike,
    W: ArrayLike,
    U: ArrayLike,
    query: Query = None,
    scale: float = 1.0,
    loss: str = "logistic",
    weight: ArrayLike | None = None,
) -> tuple[float, Array, Array]:
    """As `value_and_grad` with D = A∘(C - rowsum(A∘C)) taken literally, for comparison."""
    A, C = attention(X, W, query, scale), readout(X, U)
    D = A * (C - (A * C).sum(axis=-1, keepdims=True))
    return _assemble(X, y, A, C, D, query, scale, loss, weight)


def _assemble(
    X: ArrayLike,
    y: ArrayLike,
    A: Array,
    C: Array,
    D: Array,
    query: Query,
    scale: float,
    loss: str,
    weight: ArrayLike | None,
) -> tuple[float, Array, Array]:
    n, H = A.shape[:2]
    phi = (A * C).sum(axis=(1, 2, 3)) / np.sqrt(H)
    value, slope, _ = loss_terms(phi, y, loss)
    share = shares(n, weight)
    g = share * slope / np.sqrt(H)
    gU = np.einsum("nhqt,nte->hqe", g[:, None, None, None] * A, double(X))
    DX = np.einsum("nhqt,nte->nhqe", g[:, None, None, None] * D, double(X))
    gW = scale * np.einsum("nqd,nhqe->hde", queries(X, query), DX)
    return float((share * value).sum()), gW, gU
