"""The model family in PyTorch, eager: runs in one stack of products, or under torch.func.vmap.

Shapes of one run: X (n,T,d), Z (n,q,d), W (H,d,d), readout U (H,q,d) or V (H,d,p). Where several
runs are stacked, each has a leading R. Rows of queries and heads, q H of them, are attended to
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from ..families import Trainees, Training
from ..problem import Answer
from . import Formulation

Tensor: TypeAlias = Any
# (W, readout, X, Z, y), each with a leading R, to losses (R,) and two gradients.
Gradient: TypeAlias = Callable[..., tuple[Tensor, Tensor, Tensor]]


def trainings(problem: Trainees, training: Training, threads: int) -> list[Formulation]:
    """Every way of writing it, in a Python loop."""
    torch.set_num_threads(threads)
    # Weights of saturated attention would otherwise become denormal numbers, which are slow.
    torch.set_flush_denormal(True)
    return [loop(name, gradient, problem, training) for name, gradient in _ways(training)]


def _ways(training: Training) -> Iterator[tuple[str, Gradient]]:
    def one(W: Tensor, readout: Tensor, X: Tensor, Z: Tensor, y: Tensor) -> Tensor:
        some = losses(W[None], readout[None], X[None], Z[None], y[None])
        return some[0]

    def both(W: Tensor, readout: Tensor, X: Tensor, Z: Tensor, y: Tensor) -> Tensor:
        (gW, g_readout), loss = differentiated(W, readout, X, Z, y)
        return loss, gW, g_readout

    differentiated = torch.func.grad_and_value(one, argnums=(0, 1))
    yield "written out, stacked", written_out
    yield "autograd, stacked", by_autograd(losses)
    if training.runs > 1:
        yield "torch.func.vmap", torch.func.vmap(both)


def by_autograd(formula: Callable[..., Tensor]) -> Gradient:
    """Return losses and gradients of a formula for losses."""

    def gradient(W: Tensor, readout: Tensor, *data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        W, readout = W.detach().requires_grad_(), readout.detach().requires_grad_()
        with torch.enable_grad():
            found = formula(W, readout, *data)
            gW, g_readout = torch.autograd.grad(found.sum(), (W, readout))
        return found.detach(), gW, g_readout

    return gradient


def _attended(W: Tensor, X: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (R,n,q H,T) and what they attend to, (R,n,q H,d)."""
    R, n, q, d = Z.shape
    H = W.shape[1]
    queries = Z.reshape(R, n * q, d) @ W.transpose(1, 2).reshape(R, d, H * d)
    A = torch.softmax(queries.view(R, n, q * H, d) @ X.mT, dim=-1)
    return A, A @ X


def _by_rows(U: Tensor) -> Tensor:
    """Return U (R,H,q,d) with its rows ordered as those of the weights, (R,1,q H,d)."""
    R, H, q, d = U.shape
    return U.transpose(1, 2).reshape(R, 1, q * H, d)


def losses(W: Tensor, readout: Tensor, X: Tensor, Z: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each run, logistic for y (R,n) and squared for y (R,n,q,p)."""
    R, n, q, _ = Z.shape
    _, AX = _attended(W, X, Z)
    if y.ndim == 2:
        phi = (AX * _by_rows(readout)).sum((2, 3)) / W.shape[1] ** 0.5
        return functional.softplus(-y * phi).mean(1)
    F = AX.view(R, n * q, -1) @ readout.reshape(R, -1, y.shape[-1])
    return (F - y.reshape(F.shape)).square().sum((1, 2)) / n


def written_out(
    W: Tensor, readout: Tensor, X: Tensor, Z: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses and gradients without autograd."""
    R, n, q, d = Z.shape
    H = W.shape[1]
    A, AX = _attended(W, X, Z)
    if y.ndim == 2:
        U = _by_rows(readout)
        margin = (AX * U).sum((2, 3)).mul_(y).div_(H**0.5)
        loss = functional.softplus(-margin).mean(1)
        loss_derivative = torch.sigmoid(-margin).mul_(y).mul_(-1.0 / (H**0.5 * n))
        rows = loss_derivative[:, :, None, None] * U
        g_readout = loss_derivative[:, None] @ AX.view(R, n, -1)
        g_readout = g_readout.view(R, q, H, d).transpose(1, 2)
    else:
        mixed, V = AX.view(R, n * q, H * d), readout.reshape(R, H * d, -1)
        residual = mixed @ V - y.reshape(R, n * q, -1)
        loss = residual.square().sum((1, 2)) / n
        residual.mul_(2.0 / n)
        rows = (residual @ V.mT).view(R, n, q * H, d)
        g_readout = (mixed.mT @ residual).view(R, H, d, -1)
    D = (rows @ X.mT).mul_(A)
    D.addcmul_(A, D.sum(-1, keepdim=True), value=-1.0)
    gW = Z.reshape(R, n * q, d).mT @ (D @ X).view(R, n * q, H * d)
    return loss, gW.view(R, d, H, d).transpose(1, 2), g_readout


def loop(name: str, gradient: Gradient, problem: Trainees, training: Training) -> Formulation:
    """Return the formulation that trains with `gradient` in a Python loop."""
    X, Z, y, W0, readout0 = (
        torch.from_numpy(array)
        for array in (problem.X, problem.Z, problem.y, problem.W, problem.readout)
    )

    def run() -> tuple[Tensor, Tensor, Tensor]:
        W, readout = W0.clone(), readout0.clone()
        found = torch.empty((training.steps, training.runs), dtype=X.dtype)
        with torch.no_grad():
            for k in range(training.steps):
                found[k], *loss_derivatives = gradient(W, readout, X, Z, y)
                for theta, g in zip((W, readout), loss_derivatives, strict=True):
                    if training.normalized:
                        g = g / torch.linalg.vector_norm(g, dim=(1, 2, 3), keepdim=True)
                    theta.sub_(g, alpha=training.lr)
        return found[-1], W, readout

    return Formulation(name, run, _answer)


def _answer(result: tuple[Tensor, Tensor, Tensor]) -> Answer:
    loss, W, readout = result
    return Answer(loss.numpy(), W.numpy(), readout.numpy())
