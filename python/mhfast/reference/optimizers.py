"""The rules of `mhfast.optimizers`: one function each, in `STEPS`, of one parameter's step.

A rule gets the optimizer, θ, the gradient g (after decay, clipping and, where it is normalized,
division by its norm), what it keeps of the parameter (a list of arrays, zeros at first, which it
overwrites), and where training is: step k = 0, 1, ..., the step size lr · schedule[k], the loss and
the norm of the whole gradient. It returns the next θ.
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
    """θ - lr g; normalized gradients come so."""
    return np.asarray(theta - at.lr * g)


def polyak_step(o: Any, theta: Array, g: Array, _kept: list[Array], at: At) -> Array:
    """θ - min(max_lr, factor (loss - target) / ‖g‖²) g, times the schedule."""
    gap = at.loss - o.target
    if gap <= 0.0 or at.length == 0.0:
        return theta
    size = min(o.max_lr, o.factor * gap / at.length / at.length)
    return np.asarray(theta - size * at.schedule * g)


def momentum(o: Any, theta: Array, g: Array, kept: list[Array], at: At) -> Array:
    """V ← beta v + g, θ - lr v or, with nesterov, θ - lr (g + beta v)."""
    kept[0] = v = o.beta * kept[0] + g
    return np.asarray(theta - at.lr * (g + o.beta * v if o.nesterov else v))


def adam(o: Any, theta: Array, g: Array, kept: list[Array], at: At) -> Array:
    """Moments m and v of g, corrected for having been zero; decay of θ apart."""
    kept[0] = m = o.beta1 * kept[0] + (1.0 - o.beta1) * g
    kept[1] = v = o.beta2 * kept[1] + (1.0 - o.beta2) * g**2
    mean = m / (1.0 - o.beta1 ** (at.k + 1))
    square = v / (1.0 - o.beta2 ** (at.k + 1))
    size = np.sqrt(square) + o.eps
    step = np.divide(at.lr * mean, size, out=np.zeros_like(theta), where=size != 0.0)
    return np.asarray(theta * (1.0 - at.lr * o.weight_decay) - step)


def mirror_descent(o: Any, theta: Array, g: Array, _kept: list[Array], at: At) -> Array:
    """Sign and root of s = sign(θ) |θ|^(p-1) - lr g: sign(s) |s|^(1/(p-1))."""
    s = np.sign(theta) * np.abs(theta) ** (o.p - 1.0) - at.lr * g
    return np.asarray(np.sign(s) * np.abs(s) ** (1.0 / (o.p - 1.0)))


def sign_descent(_o: Any, theta: Array, g: Array, _kept: list[Array], at: At) -> Array:
    """θ - lr sign(g), with sign(0) = 0."""
    return np.asarray(theta - at.lr * np.sign(g))


STEPS: dict[str, Callable[[Any, Array, Array, list[Array], At], Array]] = {
    "gradient_descent": gradient_descent,
    "normalized_gradient_descent": gradient_descent,
    "polyak_step": polyak_step,
    "momentum": momentum,
    "adam": adam,
    "mirror_descent": mirror_descent,
    "sign_descent": sign_descent,
}
