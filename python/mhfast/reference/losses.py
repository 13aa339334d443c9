"""Losses of outputs: value, slope and curvature, stable at any margin; and who counts how much.

A loss is a function of outputs F and targets y of one shape, in `LOSSES`. With the margin
m = y F, y = ±1:

    logistic        log(1 + exp(-m))
    exponential     exp(-m)
    linear          -m
    squared         (F - y)², y real
    squared_hinge   max(0, 1 - m)²
    cross_entropy   logsumexp(F) - F_y, of rows F (...,p) and classes y (...); values (...,1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .model import Array, Inputs, double


class Terms(NamedTuple):
    """A loss at each output.

    value : ℓ
    slope : r = ∂ℓ/∂F
    log_slope : log|r|, finite where r itself underflows
    curvature : ∂²ℓ/∂F²; of cross_entropy P = softmax(F), for it is diag(P) - P Pᵀ
    """

    value: Array
    slope: Array
    log_slope: Array
    curvature: Array


def _logistic(F: Array, y: Array) -> Terms:
    m = y * F
    small = np.exp(-np.abs(m))
    value = np.log1p(small) + np.maximum(-m, 0.0)
    slope = -y * np.where(m > 0, small, 1.0) / (1.0 + small)
    log_slope = -np.log1p(small) - np.maximum(m, 0.0)
    return Terms(value, slope, log_slope, small / (1.0 + small) ** 2)


def _exponential(F: Array, y: Array) -> Terms:
    m = y * F
    with np.errstate(over="ignore"):
        value = np.exp(-m)
    return Terms(value, -y * value, -m, value)


def _linear(F: Array, y: Array) -> Terms:
    m = y * F
    return Terms(-m, -y, np.zeros_like(m), np.zeros_like(m))


def _squared(F: Array, y: Array) -> Terms:
    with np.errstate(divide="ignore"):
        log_slope = np.log(2.0 * np.abs(F - y))
    return Terms((F - y) ** 2, 2.0 * (F - y), log_slope, np.full_like(F, 2.0))


def _squared_hinge(F: Array, y: Array) -> Terms:
    lack = np.maximum(0.0, 1.0 - y * F)
    with np.errstate(divide="ignore"):
        log_slope = np.log(2.0 * lack)
    return Terms(lack**2, -2.0 * y * lack, log_slope, np.where(lack > 0.0, 2.0, 0.0))


def _cross_entropy(F: Array, y: Array) -> Terms:
    # 1 - p_y is taken as the sum of the other probabilities: at large margins p_y rounds to one.
    own = np.arange(F.shape[-1]) == y[..., None]
    log_others = _logsumexp(np.where(own, -np.inf, F))
    F_y = np.where(own, F, 0.0).sum(axis=-1)
    value = np.logaddexp(0.0, log_others - F_y)[..., None]
    log_slope = np.where(own, log_others[..., None], F) - F_y[..., None] - value
    slope = np.where(own, -1.0, 1.0) * np.exp(log_slope)
    P = np.exp(F - _logsumexp(F)[..., None])
    return Terms(value, slope, log_slope, P)


def _logsumexp(F: Array) -> Array:
    top = F.max(axis=-1, keepdims=True)
    top = np.where(top == -np.inf, 0.0, top)
    with np.errstate(divide="ignore"):
        total: Array = np.log(np.exp(F - top).sum(axis=-1)) + top[..., 0]
    return total


LOSSES: dict[str, Callable[[Array, Any], Terms]] = {
    "logistic": _logistic,
    "exponential": _exponential,
    "linear": _linear,
    "squared": _squared,
    "squared_hinge": _squared_hinge,
    "cross_entropy": _cross_entropy,
}
OF_ROWS = ("cross_entropy",)


def terms(outputs: ArrayLike, y: ArrayLike, loss: str = "logistic") -> Terms:
    """Losses of outputs F and targets y, with their derivatives.

    Raises
    ------
    ValueError
        For an unknown loss.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {loss!r}")
    targets = np.asarray(y, dtype=np.int64) if loss in OF_ROWS else double(y)
    return LOSSES[loss](double(outputs), targets)


def loss_terms(
    outputs: ArrayLike, y: ArrayLike, loss: str = "logistic"
) -> tuple[Array, Array, Array]:
    """Value, slope and log|slope| of `terms`."""
    return terms(outputs, y, loss)[:3]


def derivative_tangent(
    outputs: ArrayLike, y: ArrayLike, direction: ArrayLike, loss: str = "logistic"
) -> Array:
    """Tangent of the derivatives r as the outputs change along `direction`: ∂²ℓ/∂F² times it.

    For cross_entropy that is P∘(dF - ⟨P, dF⟩), with differences taken from the likeliest output's
    dF, so that they keep their relative accuracy where one probability is nearly one.
    """
    dF, curvature = double(direction), terms(outputs, y, loss).curvature
    if loss in OF_ROWS:
        P = curvature
        centred = dF - np.take_along_axis(dF, P.argmax(axis=-1)[..., None], axis=-1)
        return np.asarray(P * (centred - (P * centred).sum(axis=-1, keepdims=True)))
    return np.asarray(curvature * dF)


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
    counted = w if w.ndim == 1 and loss not in OF_ROWS else of_rows
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
    if loss not in OF_ROWS:
        return double(y) * F
    own = np.arange(F.shape[-1]) == np.asarray(y)[..., None]
    other = np.where(own, -np.inf, F).max(axis=-1, keepdims=True)
    margin: Array = np.where(own, F, 0.0).sum(axis=-1, keepdims=True) - other
    return margin
