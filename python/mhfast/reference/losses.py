"""Losses of outputs: value, derivative and curvature, stable at any margin; and their weights.

A loss is a function of outputs F and targets y of one shape, in `LOSSES`. With the margin
m = y F, y = ±1:

    logistic            log(1 + exp(-m))
    exponential         exp(-m)
    linear              -m
    squared_hinge       max(0, 1 - m)²
    hinge               max(0, 1 - m)
    polynomial_tail     (1 + m)^-a for m ≥ 0, 1 - a m for m < 0

With real y, and r = F - y:

    squared             r²
    correlation         -y F
    huber               r²/2 for |r| ≤ δ, else δ (|r| - δ/2)
    quantile            (1 - τ) r for r > 0, else -τ r
    negative_log        -y log F, y ≥ 0; 0 where y = 0, else infinite for F ≤ 0

Of rows F (...,p), values (...,1):

    cross_entropy       logsumexp(F) - Σ_o q_o F_o, q = (1 - s) onehot(y) + s/p, of classes y (...)
    soft_cross_entropy  Σ_o y_o (logsumexp(F) - F_o), of probabilities y

a, δ, τ and s are the parameters of `mhfast.PolynomialTail`, `Huber`, `Quantile`, `CrossEntropy`.

Derivatives at the kinks of hinge and quantile are 0. Curvatures are those of the pieces, at the
ends of pieces: 0 of hinge and quantile; 1 of huber at |r| = δ; 0 of squared_hinge at m = 1; a(a +
1) of polynomial_tail at m = 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .model import Array, Inputs, double


class Terms(NamedTuple):
    """A loss at each output.

    value : ℓ
    slope : r = ∂ℓ/∂F
    log_slope : log|r|, finite where r itself underflows
    curvature : ∂²ℓ/∂F²; of losses of rows P = softmax(F), for it is diag(P) - P Pᵀ
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


def _hinge(F: Array, y: Array) -> Terms:
    inside = y * F < 1.0
    slope = np.where(inside, -y, 0.0)
    log_slope = np.where(inside, 0.0, -np.inf)
    return Terms(np.maximum(0.0, 1.0 - y * F), slope, log_slope, np.zeros_like(F))


def _polynomial_tail(F: Array, y: Array, exponent: float = 1.0) -> Terms:
    m, a = y * F, exponent
    base = 1.0 + np.maximum(m, 0.0)
    tail = base**-a
    value = np.where(m < 0.0, 1.0 - a * m, tail)
    slope = -y * a * np.where(m < 0.0, 1.0, tail / base)
    curvature = np.where(m < 0.0, 0.0, a * (a + 1.0) * tail / base**2)
    return Terms(value, slope, np.log(a) - (a + 1.0) * np.log(base), curvature)


def _negative_log(F: Array, y: Array) -> Terms:
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.where(F > 0.0, -y * np.log(F), np.inf)
        slope = np.where(F >= 0.0, -y / F, np.nan)
        log_slope = np.log(y) - np.log(F)
        curvature = y / F**2
    counts = y > 0.0
    value, slope, curvature = (np.where(counts, part, 0.0) for part in (value, slope, curvature))
    return Terms(value, slope, np.where(counts, log_slope, -np.inf), curvature)


def _correlation(F: Array, y: Array) -> Terms:
    with np.errstate(divide="ignore"):
        return Terms(-y * F, -y, np.log(np.abs(y)), np.zeros_like(F))


def _huber(F: Array, y: Array, delta: float = 1.0) -> Terms:
    r = F - y
    slope = np.clip(r, -delta, delta)
    value = np.where(np.abs(r) <= delta, 0.5 * r**2, delta * (np.abs(r) - 0.5 * delta))
    with np.errstate(divide="ignore"):
        log_slope = np.log(np.abs(slope))
    return Terms(value, slope, log_slope, np.where(np.abs(r) <= delta, 1.0, 0.0))


def _quantile(F: Array, y: Array, level: float = 0.5) -> Terms:
    r = F - y
    slope = np.where(r > 0.0, 1.0 - level, np.where(r < 0.0, -level, 0.0))
    with np.errstate(divide="ignore"):
        log_slope = np.log(np.abs(slope))
    return Terms(slope * r, slope, log_slope, np.zeros_like(F))


def _cross_entropy(F: Array, y: Array, smoothing: float = 0.0) -> Terms:
    if smoothing > 0.0:
        own = np.arange(F.shape[-1]) == y[..., None]
        return _soft_cross_entropy(F, (1.0 - smoothing) * own + smoothing / F.shape[-1])
    # 1 - p_y is taken as the sum of the other probabilities: at large margins p_y rounds to one.
    own = np.arange(F.shape[-1]) == y[..., None]
    log_others = _logsumexp(np.where(own, -np.inf, F))
    F_y = np.where(own, F, 0.0).sum(axis=-1)
    value = np.logaddexp(0.0, log_others - F_y)[..., None]
    log_slope = np.where(own, log_others[..., None], F) - F_y[..., None] - value
    slope = np.where(own, -1.0, 1.0) * np.exp(log_slope)
    P = np.exp(F - _logsumexp(F)[..., None])
    return Terms(value, slope, log_slope, P)


def _soft_cross_entropy(F: Array, y: Array) -> Terms:
    # The likeliest output is taken apart from the others, so that 1 - P does not round to zero.
    top = np.arange(F.shape[-1]) == F.argmax(axis=-1)[..., None]
    lack = F.max(axis=-1, keepdims=True) - F
    rest = np.where(top, 0.0, np.exp(-lack)).sum(axis=-1, keepdims=True)
    total = y.sum(axis=-1, keepdims=True)
    P = np.exp(-lack) / (1.0 + rest)
    slope = np.where(top, (total - y) - total * (rest / (1.0 + rest)), total * P - y)
    with np.errstate(divide="ignore"):
        log_slope = np.log(np.abs(slope))
    value = (y * (np.log1p(rest) + lack)).sum(axis=-1, keepdims=True)
    return Terms(value, slope, log_slope, P)


def _logsumexp(F: Array) -> Array:
    top = F.max(axis=-1, keepdims=True)
    top = np.where(top == -np.inf, 0.0, top)
    with np.errstate(divide="ignore"):
        total: Array = np.log(np.exp(F - top).sum(axis=-1)) + top[..., 0]
    return total


LOSSES: dict[str, Callable[..., Terms]] = {
    "logistic": _logistic,
    "exponential": _exponential,
    "linear": _linear,
    "squared": _squared,
    "squared_hinge": _squared_hinge,
    "hinge": _hinge,
    "polynomial_tail": _polynomial_tail,
    "negative_log": _negative_log,
    "correlation": _correlation,
    "huber": _huber,
    "quantile": _quantile,
    "cross_entropy": _cross_entropy,
    "soft_cross_entropy": _soft_cross_entropy,
}
OF_ROWS = ("cross_entropy", "soft_cross_entropy")
OF_CLASSES = ("cross_entropy",)

Loss: TypeAlias = Any
"""A name in `LOSSES`, or a dataclass with that name and the parameter for its field."""


def name_of(loss: Loss) -> str:
    """Return the name of a loss."""
    return loss if isinstance(loss, str) else str(loss.name)


def terms(outputs: ArrayLike, y: ArrayLike, loss: Loss = "logistic") -> Terms:
    """Losses of outputs F and targets y, with their derivatives.

    Raises
    ------
    ValueError
        For an unknown loss.
    """
    name = name_of(loss)
    if name not in LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {loss!r}")
    targets = np.asarray(y, dtype=np.int64) if name in OF_CLASSES else double(y)
    parameter = {} if isinstance(loss, str) else dataclasses.asdict(loss)
    return LOSSES[name](double(outputs), targets, **parameter)


def loss_terms(
    outputs: ArrayLike, y: ArrayLike, loss: Loss = "logistic"
) -> tuple[Array, Array, Array]:
    """Value, slope and log|slope| of `terms`.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> value, slope, log_slope = mh.reference.loss_terms([-1000.0, 0.0, 1000.0], [1.0] * 3)
    >>> [round(float(entry), 6) for entry in value]
    [1000.0, 0.693147, 0.0]
    >>> bool(slope[2] == 0.0), round(float(log_slope[2]), 6)  # no underflow
    (True, -1000.0)
    """
    return terms(outputs, y, loss)[:3]


def derivative_tangent(
    outputs: ArrayLike, y: ArrayLike, direction: ArrayLike, loss: Loss = "logistic"
) -> Array:
    """Tangent of the derivatives r as the outputs change along `direction`: ∂²ℓ/∂F² times it.

    For losses of rows that is P∘(dF - ⟨P, dF⟩), of probabilities y times Σ_o y_o, with differences
    taken from the likeliest output's dF, so that they keep their relative accuracy where one
    probability is nearly one.
    """
    dF, curvature = double(direction), terms(outputs, y, loss).curvature
    if name_of(loss) in OF_ROWS:
        P = curvature
        centred = dF - np.take_along_axis(dF, P.argmax(axis=-1)[..., None], axis=-1)
        move = np.asarray(P * (centred - (P * centred).sum(axis=-1, keepdims=True)))
        if name_of(loss) not in OF_CLASSES:
            move = double(y).sum(axis=-1, keepdims=True) * move
        return move
    return np.asarray(curvature * dF)


def loss_weights(data: Inputs, outputs: Array, weight: ArrayLike | None, loss: Loss) -> Array:
    """Factor of every loss, (n,) or (n,q,1): the loss is the sum of factor times ℓ.

    weight (n,) or None for ones: w_i / Σ_i w_i in every row; for losses of rows, a mean over them,
    w_i / Σ_it w_i.  weight (n,q): w_it / Σ_it w_it.  In self-attention with lengths the factor of
    padding rows is 0 and sums over rows leave them out.
    """
    w = np.ones(len(data.X)) if weight is None else double(weight)
    loss_weight: Array
    total = counted_weights(data, outputs, weight, loss).sum()
    if outputs.ndim == 1:
        loss_weight = w / total
        return loss_weight
    loss_weight = _of_rows(data, outputs, w) / total
    return loss_weight[..., None]


def counted_weights(data: Inputs, outputs: Array, weight: ArrayLike | None, loss: Loss) -> Array:
    """Return the weights (n,), or those of rows (n,q), by whose sum the loss is divided."""
    w = np.ones(len(data.X)) if weight is None else double(weight)
    of_samples = outputs.ndim == 1 or (w.ndim == 1 and name_of(loss) not in OF_ROWS)
    return w if of_samples else _of_rows(data, outputs, w)


def _of_rows(data: Inputs, outputs: Array, w: Array) -> Array:
    rows = np.ones(outputs.shape[:2]) if data.real is None else double(data.real)
    weights: Array = rows * (w if w.ndim == 2 else w[:, None])
    return weights


def real_targets(data: Inputs, y: ArrayLike) -> NDArray[Any]:
    """Targets with 0 in padding rows, whose targets are arbitrary."""
    y = np.asarray(y)
    if data.real is None or y.ndim == 1:
        return y
    return np.where(data.real.reshape(data.real.shape + (1,) * (y.ndim - 2)), y, 0)


def margins(outputs: ArrayLike, y: ArrayLike, loss: Loss = "logistic") -> Array:
    """Margins, above 0 where F is right: y F; of rows F_c - max_{o≠c} F_o (...,1) with the class c.

    Of probabilities the class is the first of the likeliest.
    """
    F = double(outputs)
    if name_of(loss) not in OF_ROWS:
        return double(y) * F
    classes = np.asarray(y) if name_of(loss) in OF_CLASSES else np.argmax(y, axis=-1)
    own = np.arange(F.shape[-1]) == classes[..., None]
    other = np.where(own, -np.inf, F).max(axis=-1, keepdims=True)
    margin: Array = np.where(own, F, 0.0).sum(axis=-1, keepdims=True) - other
    return margin
