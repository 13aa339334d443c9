"""The classifier in PyTorch: formulas, and how one becomes a gradient call or a training loop.

Shapes: X (n,T,d), y (n,), W (H,d,d), U (H,T,d). W is folded into one matrix (d, H d), so that rows
of queries and heads (T H of them) are attended together, without copies per head.

Keys first holds attention weights as (n, T, T H): the readout of all heads is one matrix product
and softmax is vectorized across rows; better for short sequences. Queries first, (n, T H, T), reads
memory in order; better for longer ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from ..problem import Answer, BenchProblem
from ..shapes import Loop
from . import Formulation

Tensor: TypeAlias = Any
Loss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Gradient: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def folded(X: Tensor, W: Tensor) -> Tensor:
    """Return X W_h for all heads, (n, T H, d)."""
    n, T, d = X.shape
    H = len(W)
    return torch.mm(X.view(n * T, d), W.transpose(0, 1).reshape(d, H * d)).view(n, T * H, d)


def rows_first(U: Tensor) -> Tensor:
    """Return U with its rows ordered as those of `folded`, (T H, d)."""
    H, T, d = U.shape
    return U.transpose(0, 1).reshape(T * H, d)


def logistic(phi: Tensor, y: Tensor) -> Tensor:
    """Return the mean of log(1 + exp(-yΦ))."""
    return functional.softplus(-y * phi).mean()


def keys_first(W: Tensor, U: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Loss, weights keys first: Φ = H^(-1/2) Σ A∘C with C = U Xᵀ."""
    n, T, d = X.shape
    H = len(W)
    A = torch.softmax(torch.bmm(X, folded(X, W).mT), dim=1)
    C = torch.mm(X.view(n * T, d), rows_first(U).t()).view(n, T, T * H)
    return logistic((A * C).sum((1, 2)) / H**0.5, y)


def queries_first(W: Tensor, U: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Loss, weights queries first: Φ = H^(-1/2) ⟨U, A X⟩."""
    A = torch.softmax(torch.bmm(folded(X, W), X.mT), dim=-1)
    AX = torch.bmm(A, X).view(len(X), -1)
    return logistic(torch.mv(AX, rows_first(U).view(-1)) / len(W) ** 0.5, y)


def closed_keys_first(W: Tensor, U: Tensor, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients written out, weights keys first; call it without autograd."""
    n, T, d = X.shape
    H = len(W)
    flat = X.view(n * T, d)
    A = torch.softmax(torch.bmm(X, folded(X, W).mT), dim=1)
    AC = torch.mm(flat, rows_first(U).t()).view(n, T, T * H).mul_(A)
    sums = AC.sum(1, keepdim=True)
    loss, loss_derivative = _loss_and_derivative(sums.sum((1, 2)), y, H)
    weighted = X * loss_derivative[:, None, None]
    gU = torch.mm(A.view(n * T, T * H).t(), weighted.view(n * T, d))
    D = AC.addcmul_(A, sums, value=-1.0)
    gW = torch.mm(flat.t(), torch.bmm(D.mT, weighted).view(n * T, H * d))
    return loss, gW.view(d, H, d).transpose(0, 1), gU.view(T, H, d).transpose(0, 1)


def closed_queries_first(
    W: Tensor, U: Tensor, X: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients written out, weights queries first; call it without autograd."""
    n, T, d = X.shape
    H = len(W)
    readout = rows_first(U)
    A = torch.softmax(torch.bmm(folded(X, W), X.mT), dim=-1)
    AX = torch.bmm(A, X).view(n, T * H * d)
    loss, loss_derivative = _loss_and_derivative(torch.mv(AX, readout.view(-1)), y, H)
    gU = torch.mv(AX.t(), loss_derivative)
    AC = torch.matmul(readout, X.mT).mul_(A)
    D = torch.addcmul(AC, A, AC.sum(-1, keepdim=True), value=-1.0)
    DX = torch.bmm(D, X * loss_derivative[:, None, None])
    gW = torch.mm(X.view(n * T, d).t(), DX.view(n * T, H * d))
    return loss, gW.view(d, H, d).transpose(0, 1), gU.view(T, H, d).transpose(0, 1)


def _loss_and_derivative(raw: Tensor, y: Tensor, H: int) -> tuple[Tensor, Tensor]:
    """Return the loss at Φ = H^(-1/2) raw, and its derivative in raw, per sample."""
    margin = raw.mul(y).div_(H**0.5)
    loss_derivative = torch.sigmoid(-margin).mul_(y).mul_(-1.0 / (H**0.5 * len(y)))
    return functional.softplus(-margin).mean(), loss_derivative


def differentiated(formula: Loss) -> Gradient:
    """Return loss and gradients by autograd."""

    def gradient(W: Tensor, U: Tensor, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = formula(W, U, X, y)
        gW, gU = torch.autograd.grad(loss, (W, U))
        return loss.detach(), gW, gU

    return gradient


def without_autograd(closed: Gradient) -> Gradient:
    """Return a written-out gradient with the recording of operations off."""

    def gradient(W: Tensor, U: Tensor, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            return closed(W, U, X, y)

    return gradient


def in_chunks(closed: Gradient, size: int) -> Gradient:
    """Take `size` samples at a time, so that what lies between the operations stays in a cache."""

    def gradient(W: Tensor, U: Tensor, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss, gW, gU = torch.zeros((), dtype=X.dtype), torch.zeros_like(W), torch.zeros_like(U)
        for x, labels in zip(X.split(size), y.split(size), strict=True):
            share = len(x) / len(X)
            for total, part in zip((loss, gW, gU), closed(W, U, x, labels), strict=True):
                total.add_(part, alpha=share)
        return loss, gW, gU

    return gradient


def even_chunk(samples: int, most: int) -> int:
    """Return the largest divisor of the number of samples that is at most `most`, or 1."""
    return max((k for k in range(1, min(samples, most) + 1) if samples % k == 0), default=1)


def call(name: str, gradient: Gradient, problem: BenchProblem) -> Formulation:
    """Return the formulation that evaluates `gradient` once."""
    X, y, W, U = _tensors(problem)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        return gradient(W, U, X, y)

    return Formulation(name, run, _answer)


def loop_of(name: str, gradient: Gradient, problem: BenchProblem, loop: Loop) -> Formulation:
    """Return the formulation that trains with `gradient`, updating in place."""
    X, y, W0, U0 = _tensors(problem)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        W, U = W0.detach().clone().requires_grad_(), U0.detach().clone().requires_grad_()
        losses = torch.empty(loop.steps, dtype=X.dtype)
        for k in range(loop.steps):
            losses[k], gW, gU = gradient(W, U, X, y)
            with torch.no_grad():
                W.sub_(gW, alpha=loop.lr)
                U.sub_(gU, alpha=loop.lr)
        return losses[-1], W.detach(), U.detach()

    return Formulation(name, run, _answer)


def _tensors(problem: BenchProblem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    X, y, W, U = map(torch.from_numpy, (problem.X, problem.y, problem.W, problem.U))
    return X, y, W.clone().requires_grad_(), U.clone().requires_grad_()


def _answer(result: tuple[Tensor, Tensor, Tensor]) -> Answer:
    loss, W, U = result
    return Answer(float(loss), W.numpy(), U.numpy())
