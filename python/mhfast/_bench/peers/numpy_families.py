"""The model family in NumPy: gradients written out, all runs in one stack of matrix products."""

from __future__ import annotations

import numpy as np

from ..families import Trainees, Training
from ..problem import Answer, Array
from . import Formulation


def trainings(problem: Trainees, training: Training, _threads: int) -> list[Formulation]:
    """Train in a Python loop, parameters updated in place."""

    def run() -> Answer:
        W, readout = problem.W.copy(), problem.readout.copy()
        losses = np.empty((training.steps, training.runs), W.dtype)
        for k in range(training.steps):
            losses[k], gW, g_readout = gradient(problem, training, W, readout)
            for theta, g in ((W, gW), (readout, g_readout)):
                size = training.lr * unit(g) if training.normalized else training.lr
                theta -= size * g
        return Answer(losses[-1], W, readout)

    return [Formulation("stacked products", run, lambda found: found)]


def unit(g: Array) -> Array:
    """Return 1 / ‖g‖ of every run, for g (R,a,b,c)."""
    inverse: Array = 1.0 / np.sqrt(np.einsum("rabc,rabc->r", g, g))
    return inverse[:, None, None, None]


def gradient(
    problem: Trainees, training: Training, W: Array, readout: Array
) -> tuple[Array, Array, Array]:
    """Loss (R,) and gradients, rows of queries and heads (q H of them) attended together."""
    X, Z, y = problem.X, problem.Z, problem.y
    R, n, q, d = Z.shape
    H = W.shape[1]
    keys = X.swapaxes(2, 3)
    flat = Z.reshape(R, n * q, d)
    A = (flat @ W.transpose(0, 2, 1, 3).reshape(R, d, H * d)).reshape(R, n, q * H, d) @ keys
    A -= A.max(-1, keepdims=True)
    np.exp(A, out=A)
    A /= A.sum(-1, keepdims=True)
    AX = A @ X
    if training.model == "classifier":
        U = readout.swapaxes(1, 2).reshape(R, 1, q * H, d)
        margin = (AX * U).sum((2, 3)) * (y / H**0.5)
        loss = np.logaddexp(0.0, -margin).mean(1)
        loss_derivative = -y / (H**0.5 * n) / (1.0 + np.exp(margin))
        rows = loss_derivative[:, :, None, None] * U
        g_readout = (
            (loss_derivative[:, None] @ AX.reshape(R, n, -1)).reshape(R, q, H, d).swapaxes(1, 2)
        )
    else:
        mixed, V = AX.reshape(R, n * q, H * d), readout.reshape(R, H * d, -1)
        residual = mixed @ V - y.reshape(R, n * q, -1)
        loss = (residual**2).sum((1, 2)) / n
        residual *= 2.0 / n
        rows = (residual @ V.swapaxes(1, 2)).reshape(R, n, q * H, d)
        g_readout = (mixed.swapaxes(1, 2) @ residual).reshape(R, H, d, -1)
    D = rows @ keys
    D -= (D * A).sum(-1, keepdims=True)
    D *= A
    gW = flat.swapaxes(1, 2) @ (D @ X).reshape(R, n * q, H * d)
    return loss, gW.reshape(R, d, H, d).swapaxes(1, 2), g_readout
