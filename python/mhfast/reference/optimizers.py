"""The rules of `mhfast.optimizers`: one function each, in `STEPS`, of one parameter's step.

A rule gets the optimizer, θ, the gradient g (after decay, clipping and, where it is normalized,
division by its norm), what it keeps for the parameter (a list of arrays, zeros at first, which it
overwrites), and the state of training: step k = 0, 1, ..., the step size lr · schedule[k], the loss
and the norm of the whole gradient. It returns the next θ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .model import Array


class At(NamedTuple):
    """Where a step is taken."""

    k: int
    lr: float
    loss: float
    length: float  # ‖g‖ of all that is trained
    schedule: float = 1.0


def gradient_descent(_o: Any, theta: Array, g: Array, _kept: list[Array], at: At) -> Array:
    """Return θ - lr g, with g normalized before where the optimizer does so."""
    return np.asarray(theta - at.lr * g)


def polyak_step(o: Any, theta: Array, g: Array, _kept: list[Array], at: At) -> Array:
    """Return θ - min(max_lr, factor (loss - target) / ‖g‖²) g, times the schedule."""
    gap = at.loss - o.target
    if gap <= 0.0 or at.length == 0.0:
        return theta
    size = min(o.max_lr, o.factor * gap / at.length / at.length)
    return np.asarray(theta - size * at.schedule * g)


def momentum(o: Any, theta: Array, g: Array, kept: list[Array], at: At) -> Array:
    """Update v ← beta v + g; return θ - lr v or, with nesterov, θ - lr (g + beta v)."""
    kept[0] = v = o.beta * kept[0] + g
    return np.asarray(theta - at.lr * (g + o.beta * v if o.nesterov else v))


def adam(o: Any, theta: Array, g: Array, kept: list[Array], at: At) -> Array:
    """Update the moments m and v of g, correct their bias, and decay θ separately."""
    kept[0] = m = o.beta1 * kept[0] + (1.0 - o.beta1) * g
    kept[1] = v = o.beta2 * kept[1] + (1.0 - o.beta2) * g**2
    mean = m / (1.0 - o.beta1 ** (at.k + 1))
    square = v / (1.0 - o.beta2 ** (at.k + 1))
    size = np.sqrt(square) + o.eps
    step = np.divide(at.lr * mean, size, out=np.zeros_like(theta), where=size != 0.0)
    return np.asarray(theta * (1.0 - at.lr * o.weight_decay) - step)


def mirror_descent(o: Any, theta: Array, g: Array, _kept: list[Array], at: At) -> Array:
    """Return sign(s) |s|^(1/(p-1)) with s = sign(θ) |θ|^(p-1) - lr g."""
    s = np.sign(theta) * np.abs(theta) ** (o.p - 1.0) - at.lr * g
    return np.asarray(np.sign(s) * np.abs(s) ** (1.0 / (o.p - 1.0)))


def sign_descent(_o: Any, theta: Array, g: Array, _kept: list[Array], at: At) -> Array:
    """Return θ - lr sign(g), with sign(0) = 0."""
    return np.asarray(theta - at.lr * np.sign(g))


def adagrad(o: Any, theta: Array, g: Array, kept: list[Array], at: At) -> Array:
    """Update v ← v + g²; return θ - lr g / (sqrt(v) + eps)."""
    kept[0] = v = kept[0] + g**2
    return np.asarray(theta - at.lr * quotient(g, np.sqrt(v) + o.eps))


def rmsprop(o: Any, theta: Array, g: Array, kept: list[Array], at: At) -> Array:
    """Update the mean square v of g and the momentum b of g / (sqrt(v) + eps); return θ - lr b."""
    kept[0] = v = o.beta * kept[0] + (1.0 - o.beta) * g**2
    kept[1] = b = o.momentum * kept[1] + quotient(g, np.sqrt(v) + o.eps)
    return np.asarray(theta - at.lr * b)


def exponentiated_gradient(o: Any, theta: Array, g: Array, _kept: list[Array], at: At) -> Array:
    """Return θ exp(-sign(θ) lr g), or with a scale β, β sinh(arcsinh(θ / β) - lr g)."""
    if o.scale == 0.0:
        return np.asarray(theta * np.exp(-np.sign(theta) * at.lr * g))
    return np.asarray(o.scale * np.sinh(np.arcsinh(theta / o.scale) - at.lr * g))


def steepest_descent(o: Any, theta: Array, g: Array, kept: list[Array], at: At) -> Array:
    """Return θ - lr D of the momentum, by head or for all, D times the dual norm if scaled."""
    kept[0] = v = o.beta * kept[0] + g
    m = g + o.beta * v if o.nesterov else v
    heads = m.reshape(-1, *m.shape[-2:])
    groups = heads[:, None] if o.by == "head" else heads[None]
    step = np.empty_like(groups)
    for j, group in enumerate(groups):
        D, dual = direction(o, group)
        step[j] = dual * D if o.scaled else D
    return np.asarray(theta - at.lr * step.reshape(theta.shape))


def direction(o: Any, m: Array) -> tuple[Array, float]:
    """Return the D of norm 1 with the largest ⟨D, m⟩, and that product; m (heads, rows, cols)."""
    size = np.abs(m)
    if o.norm == "max":
        return np.sign(m), float(size.sum())
    if o.norm == "l1":
        D = np.zeros_like(m)
        D.flat[size.argmax()] = np.sign(m.flat[size.argmax()])
        return D, float(size.max())
    if o.norm == "fro":
        length = float(np.sqrt((m**2).sum()))
        return (m / length if length > 0.0 else m), length
    factors = [polar_exact(h) if o.polar == "exact" else polar_newton_schulz(h) for h in m]
    return np.stack([D for D, _ in factors]), float(sum(dual for _, dual in factors))


def polar_exact(m: Array) -> tuple[Array, float]:
    """U Vᵀ of m = U S Vᵀ without singular values that are rounding errors, and their sum."""
    U, s, Vt = np.linalg.svd(m, full_matrices=False)
    r = int((s > 32 * max(m.shape) * np.finfo(m.dtype).eps * s[0]).sum())
    return U[:, :r] @ Vt[:r], float(s[:r].sum())


def polar_newton_schulz(m: Array) -> tuple[Array, float]:
    """Five steps x ← a x + (b x xᵀ + c (x xᵀ)²) x from m / ‖m‖, and the product with m."""
    length = np.sqrt((m**2).sum())
    x = m / length if length > 0.0 else m
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x, float((x * m).sum())


def quotient(a: Array, b: Array) -> Array:
    """Return a / b, 0 where b is."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0.0)


STEPS: dict[str, Callable[[Any, Array, Array, list[Array], At], Array]] = {
    "gradient_descent": gradient_descent,
    "normalized_gradient_descent": gradient_descent,
    "polyak_step": polyak_step,
    "momentum": momentum,
    "adam": adam,
    "mirror_descent": mirror_descent,
    "sign_descent": sign_descent,
    "adamw": adam,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "exponentiated_gradient": exponentiated_gradient,
    "steepest_descent": steepest_descent,
}
