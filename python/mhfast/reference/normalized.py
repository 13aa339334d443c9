"""Gradients as mantissa and logarithm, for steps that divide by the gradient's norm.

A normalized step needs the direction of the gradient also where the gradient itself underflows:
saturated attention has weights such as exp(-1000), a well classified sample a loss derivative such
as exp(-2000).  Every gradient is a sum of terms that carry these two factors; here the largest
product of the two is taken out in the log domain, before anything is exponentiated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .classifier import (
    Array,
    Query,
    centre,
    double,
    logits,
    loss_terms,
    queries,
    readout,
    score_gradient,
    shares,
)

Part: TypeAlias = tuple[str, int]


class Scaled(NamedTuple):
    """An array with one exponent a head: exp(log[h]) · mantissa[h]; mantissa (H,...), log (H,)."""

    mantissa: Array
    log: Array


def scaled_gradients(
    X: ArrayLike,
    y: ArrayLike,
    W: ArrayLike,
    U: ArrayLike,
    query: Query = None,
    scale: float = 1.0,
    loss: str = "logistic",
    weight: ArrayLike | None = None,
) -> dict[str, Scaled]:
    """Gradients of `value_and_grad` in W (H,d,d) and U (H,q,d), free of underflow.

    With log A = S - logsumexp(S), both are sums of terms

        ± exp(log(w_i / Σ w) + log|r_i| + log A_ihqs) · (a factor of ordinary size),

    for W over the keys s other than the row's largest.  The largest exponent of a head, among the
    terms whose factor is not zero, becomes its `log`.  A head without such a term has gradient 0.
    """
    X, Z = double(X), queries(X, query)
    S, C = logits(X, W, query, scale), readout(X, U)
    S = S - S.max(axis=-1, keepdims=True)
    log_A = S - np.log(np.exp(S).sum(axis=-1, keepdims=True))
    A = np.exp(log_A)
    n, H = A.shape[:2]

    phi = (A * C).sum(axis=(1, 2, 3)) / np.sqrt(H)
    _, slope, log_slope = loss_terms(phi, y, loss)
    sign = np.copysign(1.0, slope)[:, None, None, None] / np.sqrt(H)
    with np.errstate(divide="ignore"):
        log_g = np.log(shares(n, weight)) + log_slope
    log_terms = log_g[:, None, None, None] + log_A

    centred, m = centre(A, C)
    factor = centred * np.abs(Z).max(axis=-1)[:, None, :, None]
    np.put_along_axis(factor, m, 0.0, axis=-1)
    weights, log_W = _factor_out(log_terms, factor)
    DX = np.einsum("nhqt,nte->nhqe", score_gradient(sign * weights, centred, m), X)
    gW = scale * np.einsum("nqd,nhqe->hde", Z, DX)

    weights, log_U = _factor_out(log_terms, np.abs(X).max(axis=-1)[:, None, None, :])
    gU = np.einsum("nhqt,nte->hqe", sign * weights, X)
    return {"W": Scaled(gW, log_W), "U": Scaled(gU, log_U)}


def _factor_out(logs: Array, factor: Array) -> tuple[Array, Array]:
    """Return exp(logs - largest), (n,H,q,T), 0 where factor is; and the largest by head, (H,)."""
    logs = np.where(factor == 0.0, -np.inf, logs)
    largest = logs.max(axis=(0, 2, 3))
    largest = np.where(largest == -np.inf, 0.0, largest)
    return np.exp(logs - largest[:, None, None]), largest


def add_decay(gradient: Scaled, l2: float, theta: Array) -> Scaled:
    """Add l2 · theta, theta (H,...), to a gradient."""
    H = len(theta)
    with np.errstate(divide="ignore"):
        log_decay = np.log(l2 * np.abs(theta).reshape(H, -1).max(axis=1))
    log = np.where(log_decay > gradient.log, log_decay, gradient.log)
    column = (H,) + (1,) * (theta.ndim - 1)
    mantissa = gradient.mantissa * np.exp(gradient.log - log).reshape(column)
    return Scaled(mantissa + l2 * theta * np.exp(-log).reshape(column), log)


def norm(arrays: Iterable[Array]) -> float:
    """Euclidean norm over all entries of all arrays, of rescaled entries: squares may underflow."""
    entries = np.concatenate([np.ravel(a) for a in arrays])
    largest = np.abs(entries).max()
    if largest == 0.0 or not np.isfinite(largest):
        return float(largest)
    return float(largest * np.sqrt(((entries / largest) ** 2).sum()))


def normalized(
    gradients: dict[str, Scaled], by: str = "tensor", eps: float = 0.0, clip: float = np.inf
) -> dict[str, Array]:
    """Return g / (‖g‖ + eps), after clipping all of g to norm `clip`; zero where g is zero.

    `by` says what has a norm of its own: every "tensor", every "head" of every tensor, or "all".
    """
    parts = [
        (name, h) for name, g in gradients.items() for h in range(len(g.log)) if g.mantissa[h].any()
    ]
    slack = eps
    if eps > 0.0 and clip < np.inf and parts:
        scaled, log = _common_exponent(gradients, parts)
        slack = eps * np.exp(max(0.0, log + np.log(norm(scaled.values())) - np.log(clip)))
    steps = {name: np.zeros_like(g.mantissa) for name, g in gradients.items()}
    for group in _groups(parts, by):
        scaled, log = _common_exponent(gradients, group)
        with np.errstate(over="ignore"):
            length = norm(scaled.values()) + (slack * np.exp(-log) if slack > 0.0 else 0.0)
        for (name, h), part in scaled.items():
            steps[name][h] = part / length
    return steps


def _groups(parts: list[Part], by: str) -> list[list[Part]]:
    """Group the parts (tensor, head) that share a norm."""
    if by == "all":
        return [parts] if parts else []
    if by == "head":
        return [[part] for part in parts]
    if by == "tensor":
        return [[p for p in parts if p[0] == name] for name in sorted({p[0] for p in parts})]
    raise ValueError(f"by: expected 'tensor', 'head' or 'all', got {by!r}")


def _common_exponent(
    gradients: dict[str, Scaled], parts: list[Part]
) -> tuple[dict[Part, Array], float]:
    """Divide the parts by exp(log), log the largest exponent among them; return log too."""
    log = max(float(gradients[name].log[h]) for name, h in parts)
    return {
        (name, h): gradients[name].mantissa[h] * np.exp(gradients[name].log[h] - log)
        for name, h in parts
    }, log
