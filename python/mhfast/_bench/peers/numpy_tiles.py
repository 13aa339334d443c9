"""NumPy, optimized with BLAS and in-place arithmetic.

Attention weights are held keys first, Aᵀ (samples, T keys, queries and heads): products with W, U
and the readout of all heads are single matrix products, softmax reduces over an axis whose
neighbours are contiguous (NumPy vectorizes that, but not a reduction over a short last axis),
and nothing is transposed in memory. Samples, and the queries of long ones, are taken in tiles whose
weights fit a cache; every array is allocated once. The derivative of the loss is multiplied into X
at the end, the softmax gradient is D = A∘(C - rowsum(A∘C)) with rowsum(A∘C) = ⟨U, A X⟩ by rows.
"""

from __future__ import annotations

import numpy as np

from ..problem import Answer, Array, BenchProblem
from ..shapes import Loop
from . import Formulation

# Bytes of attention weights in a tile; which is best depends on the machine and on the shape.
TILES = (2**18, 2**20, 2**22)


class Tiles:
    """Loss and gradients on fixed data, with a workspace."""

    def __init__(self, X: Array, y: Array, heads: int, size: int) -> None:
        n, T, d = X.shape
        row = T * heads * X.itemsize
        self.X, self.y = X, y
        self.samples = min(n, max(1, size // (T * row)))
        self.queries = min(T, max(1, size // row))
        rows = T * heads
        tile = self.samples * T * self.queries * heads
        self.A, self.C = np.empty(tile, X.dtype), np.empty(tile, X.dtype)
        self.AX = np.empty((self.samples, rows, d), X.dtype)
        self.DX, self.XW = np.empty_like(self.AX), np.empty_like(self.AX)
        self.sums = np.empty((self.samples, 1, self.queries * heads), X.dtype)

    def __call__(self, W: Array, U: Array) -> Answer:
        """Return the logistic loss and its gradients for W (H,d,d) and U (H,T,d)."""
        n, T, d = self.X.shape
        H = len(W)
        across = W.transpose(1, 0, 2).reshape(d, H * d)
        readout = U.transpose(1, 0, 2).reshape(T * H, d)
        scale = 1.0 / np.sqrt(H)
        loss = 0.0
        gW, gU = np.zeros_like(across), np.zeros_like(readout).reshape(-1)
        for first in range(0, n, self.samples):
            x, y = self.X[first : first + self.samples], self.y[first : first + self.samples]
            k = len(x)
            AX, DX = self._attend(x, across, readout)
            margin = y * (AX.reshape(k, -1) @ readout.reshape(-1))
            margin *= scale
            loss += float(np.logaddexp(0.0, -margin).sum())
            loss_derivative = (-scale / n * y / (1.0 + np.exp(margin))).astype(x.dtype)
            gU += loss_derivative @ AX.reshape(k, -1)
            weighted = x * loss_derivative[:, None, None]
            gW += weighted.reshape(k * T, d).T @ DX.reshape(k * T, H * d)
        return Answer(
            loss / n, gW.reshape(d, H, d).transpose(1, 0, 2), gU.reshape(T, H, d).transpose(1, 0, 2)
        )

    def _attend(self, x: Array, across: Array, readout: Array) -> tuple[Array, Array]:
        """Return A X and D X of some samples, rows ordered by query, then head."""
        k, T, d = x.shape
        flat = x.reshape(k * T, d)
        H = len(readout) // T
        AX, DX, XW = self.AX[:k], self.DX[:k], self.XW[:k]
        np.matmul(flat, across, out=XW.reshape(k * T, H * d))
        for query in range(0, T, self.queries):
            rows = slice(query * H, min(query + self.queries, T) * H)
            width = rows.stop - rows.start
            A = self.A[: k * T * width].reshape(k, T, width)
            C = self.C[: k * T * width].reshape(k, T, width)
            sums = self.sums[:k, :, :width]
            np.matmul(x, XW[:, rows].swapaxes(1, 2), out=A)
            A.max(axis=1, keepdims=True, out=sums)
            A -= sums
            np.exp(A, out=A)
            A.sum(axis=1, keepdims=True, out=sums)
            np.reciprocal(sums, out=sums)
            A *= sums
            np.matmul(A.swapaxes(1, 2), x, out=AX[:, rows])
            np.matmul(flat, readout[rows].T, out=C.reshape(k * T, width))
            np.einsum("nrd,rd->nr", AX[:, rows], readout[rows], out=sums[:, 0])
            C -= sums
            C *= A
            np.matmul(C.swapaxes(1, 2), x, out=DX[:, rows])
        return AX, DX


def gradients(problem: BenchProblem, _threads: int) -> list[Formulation]:
    """Tiles of several sizes; BLAS has the threads that the process gave it."""

    def formulation(name: str, tiles: Tiles) -> Formulation:
        return Formulation(name, lambda: tiles(problem.W, problem.U), lambda found: found)

    return [formulation(name, tiles) for name, tiles in _tilings(problem).items()]


def training(problem: BenchProblem, loop: Loop, _threads: int) -> list[Formulation]:
    """Train in a Python loop, parameters updated in place."""

    def formulation(name: str, tiles: Tiles) -> Formulation:
        def run() -> Answer:
            W, U = problem.W.copy(), problem.U.copy()
            losses = []
            for _ in range(loop.steps):
                found = tiles(W, U)
                losses.append(found.loss)
                W -= loop.lr * found.W
                U -= loop.lr * found.U
            return Answer(losses[-1], W, U)

        return Formulation(name, run, lambda found: found)

    return [formulation(name, tiles) for name, tiles in _tilings(problem).items()]


def _tilings(problem: BenchProblem) -> dict[str, Tiles]:
    """Return those that differ, by name."""
    found = {}
    for size in TILES:
        tiles = Tiles(problem.X, problem.y, problem.shape.H, size)
        found[f"tiles of {tiles.samples} samples, {tiles.queries} queries"] = tiles
    return found
