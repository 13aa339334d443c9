"""Losses of outputs: value, derivative and curvature, stable at any margin; weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .model import Array, Inputs, double

LOSSES = ("logistic", "exponential", "linear", "squared", "cross_entropy")


def loss_terms(
    outputs: ArrayLike, y: ArrayLike, loss: str = "logistic"
) -> tuple[Array, Array, Array]:
    """Losses ℓ, their derivatives r = ∂ℓ/∂F and log|r|, of outputs F and targets y of one shape.

    With the margin m = y F, y = ±1:

        logistic        log(1 + exp(-m))          r = -y / (1 + exp(m))
        exponential     exp(-m)                   r = -y exp(-m)
        linear          -m                        r = -y
        squared         (F - y)², y real          r = 2 (F - y)
        cross_entropy   logsumexp(F) - F_y        r = softmax(F) - onehot(y)

    The last takes rows F (...,p), classes y (...) and gives values (...,1).  log|r| stays finite
    even if r itself underflows.

    Raises
    ------
    ValueError
        For an unknown loss.
    """
    F = double(outputs)
    if loss == "cross_entropy":
        return _cross_entropy(F, np.asarray(y, dtype=np.int64))
    y = double(y)
    m = y * F
    if loss == "logistic":
        small = np.exp(-np.abs(m))
        value = np.log1p(small) + np.maximum(-m, 0.0)
        loss_derivative = -y * np.where(m > 0, small, 1.0) / (1.0 + small)
        return value, loss_derivative, -np.log1p(small) - np.maximum(m, 0.0)
    if loss == "exponential":
        with np.errstate(over="ignore"):
            return np.exp(-m), -y * np.exp(-m), -m
    if loss == "linear":
        return -m, -y, np.zeros_like(m)
    if loss == "squared":
        with np.errstate(divide="ignore"):
            return (F - y) ** 2, 2.0 * (F - y), np.log(2.0 * np.abs(F - y))
    raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {loss!r}")


def _cross_entropy(F: Array, y: NDArray[np.int64]) -> tuple[Array, Array, Array]:
    # 1 - p_y is taken as the sum of the other probabilities: at large margins p_y rounds to one.
    own = np.arange(F.shape[-1]) == y[..., None]
    log_others = _logsumexp(np.where(own, -np.inf, F))
    F_y = np.where(own, F, 0.0).sum(axis=-1)
    value = np.logaddexp(0.0, log_others - F_y)[..., None]
    log_slope = np.where(own, log_others[..., None], F) - F_y[..., None] - value
    loss_derivative = np.where(own, -1.0, 1.0) * np.exp(log_slope)
    return value, loss_derivative, log_slope


def _logsumexp(F: Array) -> Array:
    top = F.max(axis=-1, keepdims=True)
    top = np.where(top == -np.inf, 0.0, top)
    with np.errstate(divide="ignore"):
        total: Array = np.log(np.exp(F - top).sum(axis=-1)) + top[..., 0]
    return total


def derivative_tangent(
    outputs: ArrayLike, y: ArrayLike, direction: ArrayLike, loss: str = "logistic"
) -> Array:
    """Tangent of the derivatives r as the outputs change along `direction`: ℓ'' times it.

    ℓ'' is, with m = y F and P = softmax(F),

        logistic   exp(-|m|) / (1 + exp(-|m|))²      exponential     exp(-m)
        linear     0                                 squared         2
                                                     cross_entropy   diag(P) - P Pᵀ

    The last is P∘(dF - ⟨P, dF⟩), with differences taken from the likeliest output's dF, so that
    they keep their relative accuracy where one probability is nearly one.
    """
    F, dF = double(outputs), double(direction)
    if loss == "cross_entropy":
        P = np.exp(F - _logsumexp(F)[..., None])
        centred = dF - np.take_along_axis(dF, P.argmax(axis=-1)[..., None], axis=-1)
        change: Array = P * (centred - (P * centred).sum(axis=-1, keepdims=True))
        return change
    m = double(y) * F
    if loss == "logistic":
        small = np.exp(-np.abs(m))
        return small / (1.0 + small) ** 2 * dF
    if loss == "exponential":
        return np.exp(-m) * dF
    return {"linear": 0.0, "squared": 2.0}[loss] * dF


def loss_weights(data: Inputs, outputs: Array, weight: ArrayLike | None, loss: str) -> Array:
    """Factor of every loss, (n,) or (n,q,1): the loss is the sum of factor times ℓ.

    weight (n,) or None for ones: w_i / Σ_i w_i in every row; for cross_entropy, a mean over rows,
    w_i / Σ_it w_i.  weight (n,q): w_it / Σ_it w_it.  In self-attention with lengths the factor of
    padding rows is 0 and sums over rows leave them out.
    """
    w = np.ones(len(data.X)) if weight is None else double(weight)
    loss_weight: Array
    if outputs.ndim == 1:
        loss_weight = w / w.sum()
        return loss_weight
    rows = np.ones(outputs.shape[:2]) if data.real is None else double(data.real)
    of_rows = rows * (w if w.ndim == 2 else w[:, None])
    counted = w if w.ndim == 1 and loss != "cross_entropy" else of_rows
    loss_weight = of_rows / counted.sum()
    return loss_weight[..., None]


def real_targets(data: Inputs, y: ArrayLike) -> NDArray[Any]:
    """Targets with 0 in padding rows, whose targets are arbitrary."""
    y = np.asarray(y)
    if data.real is None or y.ndim == 1:
        return y
    return np.where(data.real.reshape(data.real.shape + (1,) * (y.ndim - 2)), y, 0)


def margins(outputs: ArrayLike, y: ArrayLike, loss: str = "logistic") -> Array:
    """Margins, above 0 where F is right: y F; for cross_entropy F_y - max_{o≠y} F_o (...,1)."""
    F = double(outputs)
    if loss != "cross_entropy":
        return double(y) * F
    own = np.arange(F.shape[-1]) == np.asarray(y)[..., None]
    other = np.where(own, -np.inf, F).max(axis=-1, keepdims=True)
    margin: Array = np.where(own, F, 0.0).sum(axis=-1, keepdims=True) - other
    return margin
