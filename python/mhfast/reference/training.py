"""Gradient descent and normalized gradient descent, one step after the other.

Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
Attention" (TMLR 2024) train with plain gradient descent; normalized steps belong to the work on
the implicit bias of attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..optimizers import NormalizedGradientDescent, Optimizer
from .classifier import Array, Query, double, outputs, shares, value_and_grad
from .normalized import add_decay, norm, normalized, scaled_gradients

RECORDS = ("loss", "accuracy", "margin", "grad_norm", "param_norm", "distance")


def train(
    X: ArrayLike,
    y: ArrayLike,
    W: ArrayLike,
    U: ArrayLike,
    *,
    steps: int,
    optimizer: Optimizer,
    query: Query = None,
    scale: float = 1.0,
    loss: str = "logistic",
    weight: ArrayLike | None = None,
    wrt: Sequence[str] = ("W", "U"),
) -> tuple[Array, Array, dict[str, Array]]:
    """Take `steps` full-batch steps from W (H,d,d), U (H,q,d) on X (n,T,d), y (n,).

    Step k: g is the gradient of the loss in the parameters named by `wrt`, then

        g ← g + l2 θ,   g ← g min(1, clip / ‖g‖),   g ← g / (‖g‖ + eps)  (normalized only),
        θ ← θ - lr · schedule[k] · g.

    Returns
    -------
    W, U : the parameters after the last step.
    history : dict of arrays (steps + 1,)
        Entry k belongs to θ_k, before step k + 1.  loss; accuracy, the weighted share of samples
        with y Φ > 0; margin, the smallest y Φ; grad_norm, of the loss in what is trained;
        param_norm and distance (from the start), of W and U together.
    """
    theta = {"W": double(W).copy(), "U": double(U).copy()}
    start = {name: array.copy() for name, array in theta.items()}
    y = double(y)
    share = shares(len(y), weight)
    history: dict[str, list[float]] = {name: [] for name in RECORDS}
    for k in range(steps + 1):
        problem = (X, y, theta["W"], theta["U"], query, scale, loss, weight)
        value, gW, gU = value_and_grad(*problem)
        gradients = {name: g for name, g in (("W", gW), ("U", gU)) if name in wrt}
        margins = y * outputs(X, theta["W"], theta["U"], query, scale)
        history["loss"].append(value)
        history["accuracy"].append(float((share * (margins > 0.0)).sum()))
        history["margin"].append(float(margins.min()))
        history["grad_norm"].append(norm(gradients.values()))
        history["param_norm"].append(norm(theta.values()))
        history["distance"].append(norm(theta[name] - start[name] for name in theta))
        if k == steps:
            break
        clip = np.inf if optimizer.clip is None else optimizer.clip
        if isinstance(optimizer, NormalizedGradientDescent):
            scaled = {name: g for name, g in scaled_gradients(*problem).items() if name in wrt}
            if optimizer.l2 > 0.0:
                scaled = {n: add_decay(g, optimizer.l2, theta[n]) for n, g in scaled.items()}
            direction = normalized(scaled, optimizer.by, optimizer.eps, clip)
        else:
            decayed = {name: g + optimizer.l2 * theta[name] for name, g in gradients.items()}
            shrink = min(1.0, clip / max(norm(decayed.values()), np.finfo(float).tiny))
            direction = {name: g * shrink for name, g in decayed.items()}
        rate = optimizer.lr * (1.0 if optimizer.schedule is None else optimizer.schedule[k])
        for name, step in direction.items():
            theta[name] = theta[name] - rate * step
    return theta["W"], theta["U"], {name: np.array(values) for name, values in history.items()}
