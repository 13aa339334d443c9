"""Cells of the map in PyTorch, eager: autograd, and derivatives written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..cells import CellProblem
from ..problem import Array
from . import Formulation, natural
from .natural import Data, Tensor, Theta
from .operations import (
    VALUES,
    Extra,
    Found,
    Function,
    chunk,
    forms,
    in_chunks,
    inputs,
    natural_loss,
    natural_values,
    with_record,
    written,
)
from .written import Form


class Torch:
    """`mhfast._bench.peers.natural.Library`, in place where that saves memory traffic."""

    def softmax(self, S: Tensor, axis: int) -> Tensor:
        return torch.softmax(S, axis)

    def softmax_derivative(self, A: Tensor, C: Tensor, axis: int) -> Tensor:
        AC = C.mul_(A) if C.shape == A.shape else A * C
        return AC.addcmul_(A, AC.sum(axis, keepdim=True), value=-1.0)

    def softplus(self, x: Tensor) -> Tensor:
        return functional.softplus(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def concatenate(self, parts: list[Tensor], axis: int) -> Tensor:
        return torch.cat(parts, axis)

    def added(self, parts: list[Tensor], axis: int) -> Tensor:
        total = torch.zeros_like(max(parts, key=lambda part: part.shape[axis]))
        for part in parts:
            total.narrow(axis, 0, part.shape[axis]).add_(part)
        return total

    def add_rows(self, gX: Tensor, rows: tuple[Tensor, Tensor], gZ: Tensor) -> Tensor:
        gX[..., rows[0], rows[1], :] += gZ[..., 0, :]
        return gX

    def repeated(self, x: Tensor, heads: int) -> Tensor:
        return x.expand(*x.shape[:-3], heads, *x.shape[-2:])

    def identity(self, size: int, like: Tensor) -> Tensor:
        return torch.eye(size, dtype=like.dtype)

    def sqrt(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)

    def largest(self, x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    def least(self, x: Tensor, axis: int) -> Tensor:
        return x.amin(axis)


LIBRARY = Torch()
Loss = Callable[[Theta, Data], tuple[Tensor, Found]]
Compiler = Callable[[Any], Any]


def ways(problem: CellProblem, threads: int) -> list[Formulation]:
    """As a user writes it, and every form written out, at once and in chunks."""
    configure(threads)
    found = [formulation("autograd", ordinary(problem), problem, ordinary=True)]
    for form, size in by_hand(problem):
        function = without_autograd(written(LIBRARY, problem, form))
        name = str(form) if size is None else f"{form}, chunks of {size}"
        function = function if size is None else in_chunks(LIBRARY, function, size)
        found.append(formulation(name, function, problem))
    return found


def configure(threads: int) -> None:
    """Set what all peers on torch share."""
    torch.set_num_threads(threads)
    # Weights of saturated attention would otherwise become denormal numbers, which are slow.
    torch.set_flush_denormal(True)


def by_hand(problem: CellProblem) -> list[tuple[Form, int | None]]:
    """Return the forms, each of all samples at once and of a chunk of samples."""
    size = chunk(problem)
    sizes = (None,) if size is None else (None, size)
    return [(form, size) for form in forms(problem) for size in sizes]


def without_autograd(function: Function) -> Function:
    """Return the function with the recording of operations off."""

    def call(theta: Theta, data: Data, extra: Extra) -> Found:
        with torch.no_grad():
            return function(theta, data, extra)

    return call


def ordinary(problem: CellProblem, compiler: Compiler = lambda function: function) -> Function:
    """Return what a user writes: the formula, and torch.autograd or torch.func for the rest.

    `compiler` is applied to what is computed forward.
    """
    operation = problem.cell.operation
    if operation in VALUES:
        return without_autograd(compiler(natural_values(LIBRARY, problem)))
    if operation == "hvp":
        return _double_backward(problem)
    if operation == "ntk":
        return _kernel(problem)

    def loss(variables: Theta, data: Data) -> tuple[Tensor, Found]:
        return natural_loss(OUT_OF_PLACE, problem, variables, data)

    return differentiated(compiler(loss), problem)


class OutOfPlace(Torch):
    """The same under autograd, and where functions are transformed."""

    def softmax_derivative(self, A: Tensor, C: Tensor, axis: int) -> Tensor:
        return A * (C - (A * C).sum(axis, keepdim=True))


OUT_OF_PLACE = OutOfPlace()


def differentiated(loss: Loss, problem: CellProblem) -> Function:
    """Return the gradients of a loss by autograd, with the loss and what it returns beside."""

    def gradient(theta: Theta, data: Data, _extra: Extra) -> Found:
        variables = dict(theta)
        for name in problem.wrt:
            if name in ("X", "query"):
                variables[name] = getattr(data, name)
        leaves = {
            name: array.detach().requires_grad_(name in problem.wrt)
            for name, array in variables.items()
        }
        total, beside = loss(leaves, data)
        found = torch.autograd.grad(total, [leaves[name] for name in problem.wrt])
        kept = {name: value.detach() for name, value in beside.items()}
        return dict(zip(problem.wrt, found, strict=True)) | kept

    return gradient


def _double_backward(problem: CellProblem) -> Function:
    def product(theta: Theta, data: Data, extra: Extra) -> Found:
        leaves = {name: array.detach().requires_grad_() for name, array in theta.items()}
        total, _ = natural_loss(OUT_OF_PLACE, problem, leaves, data)
        gradients = torch.autograd.grad(total, list(leaves.values()), create_graph=True)
        along = [extra.tangent[name] for name in leaves]
        found = torch.autograd.grad(gradients, list(leaves.values()), along)
        return dict(zip(leaves, found, strict=True))

    return product


def _kernel(problem: CellProblem) -> Function:
    """Return the product of Jacobians, that of each sample by torch.func."""
    runs = problem.sizes.runs > 0

    def kernel(theta: Theta, X: Tensor, data: Data) -> Tensor:
        def outputs(theta: Theta, x: Tensor, extras: tuple[Tensor, ...]) -> Tensor:
            one = natural.of_sample(data, x, extras)
            return natural.outputs(OUT_OF_PLACE, theta, one)[0][0]

        jacobian = torch.func.vmap(torch.func.jacrev(outputs), (None, 0, 0))
        found = jacobian(theta, X, natural.extras(data))
        size = found[next(iter(theta))].shape[: -theta[next(iter(theta))].ndim]
        rows = torch.cat([found[name].reshape(*size, -1) for name in theta], -1)
        flat = rows.reshape(-1, rows.shape[-1])
        return (flat @ flat.mT).reshape(*size, *size)

    def call(theta: Theta, data: Data, _extra: Extra) -> Found:
        if runs:
            return {"kernel": torch.func.vmap(lambda t, X: kernel(t, X, data))(dict(theta), data.X)}
        return {"kernel": kernel(dict(theta), data.X, data)}

    return call


def operands(problem: CellProblem) -> tuple[Theta, Data, Extra]:
    """Return the inputs as tensors."""
    theta, data, extra = inputs(problem)

    def tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: tensor(array) for name, array in arrays.items()}

    def tensor(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(tensor, value))
        return (
            torch.from_numpy(np.ascontiguousarray(value))
            if isinstance(value, np.ndarray)
            else value
        )

    changed = {field.name: tensor(getattr(data, field.name)) for field in fields(data)}
    others = {field.name: tensors(getattr(extra, field.name)) for field in fields(extra)}
    return tensors(theta), replace(data, **changed), replace(extra, **others)


def formulation(
    name: str, function: Function, problem: CellProblem, *, ordinary: bool = False
) -> Formulation:
    """Return a call of a function, or the loop of its steps."""
    given = operands(problem)
    run: Callable[[], Any] = lambda: function(*given)  # noqa: E731
    if problem.cell.operation.startswith("step"):
        run = _loop(with_record(LIBRARY, problem, function), problem)
    return Formulation(name, run, answer, ordinary)


def _loop(step: Function, problem: CellProblem) -> Callable[[], Found]:
    start, data, extra = operands(problem)

    def run() -> Found:
        theta = {name: array.clone() for name, array in start.items()}
        losses, records = [], []
        for _ in range(problem.steps):
            found = step(theta, data, extra)
            losses.append(found["loss"])
            if problem.record is not None:
                copied = problem.record == "snapshot"
                records.append(found["record"].clone() if copied else found["record"])
            for name, array in theta.items():
                array.sub_(found[name], alpha=problem.rate)
        history = {"record": torch.stack(records)} if records else {}
        return theta | {"loss": torch.stack(losses)} | history

    return run


def answer(found: Found) -> dict[str, Array]:
    """Return results as NumPy arrays."""
    return {name: np.asarray(value.detach()) for name, value in found.items()}
