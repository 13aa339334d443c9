"""Cells of the map in NumPy: derivatives written out, as there is no automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..cells import CellProblem
from ..problem import Array
from . import Formulation
from .natural import Tensor
from .operations import Function, chunk, forms, in_chunks, inputs, with_record, written
from .written import Form


class NumPy:
    """`mhfast._bench.peers.natural.Library`, in place where that saves memory traffic."""

    def softmax(self, S: Array, axis: int) -> Array:
        S -= S.max(axis, keepdims=True)
        np.exp(S, out=S)
        S /= S.sum(axis, keepdims=True)
        return S

    def softmax_derivative(self, A: Array, C: Array, axis: int) -> Array:
        if C.shape != A.shape or not C.flags.writeable:
            C = A * C
        else:
            C *= A
        C -= A * C.sum(axis, keepdims=True)
        return C

    def softplus(self, x: Array) -> Array:
        return np.logaddexp(0.0, x, dtype=x.dtype)

    def sigmoid(self, x: Array) -> Array:
        found: Array = 0.5 * np.tanh(0.5 * x) + 0.5
        return found

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        return np.concatenate(parts, axis)

    def added(self, parts: list[Array], axis: int) -> Array:
        longest = max(parts, key=lambda part: part.shape[axis])
        total = np.zeros_like(longest)
        for part in parts:
            index = [slice(None)] * total.ndim
            index[axis] = slice(part.shape[axis])
            total[tuple(index)] += part
        return total

    def add_rows(self, gX: Array, rows: tuple[Array, Array], gZ: Array) -> Array:
        gX[..., rows[0], rows[1], :] += gZ[..., 0, :]
        return gX

    def repeated(self, x: Array, heads: int) -> Array:
        return np.broadcast_to(x, (*x.shape[:-3], heads, *x.shape[-2:]))

    def identity(self, size: int, like: Array) -> Array:
        return np.eye(size, dtype=like.dtype)

    def sqrt(self, x: Tensor) -> Tensor:
        return np.sqrt(x)

    def largest(self, x: Array, axis: int) -> Any:
        return x.max(axis)

    def least(self, x: Array, axis: int) -> Any:
        return x.min(axis)


LIBRARY = NumPy()


def ways(problem: CellProblem, _threads: int) -> list[Formulation]:
    """Every form, of all samples at once and in chunks; the first is what a user writes."""
    found: list[Formulation] = []
    size = chunk(problem)
    plain = Form("by samples" if problem.cell.operation == "ntk" else "queries first")
    for form in sorted(forms(problem), key=lambda form: form != plain):
        function = written(LIBRARY, problem, form)
        found.append(_formulation(str(form), function, problem, ordinary=not found))
        if size is not None:
            pieces = in_chunks(LIBRARY, function, size)
            found.append(_formulation(f"{form}, chunks of {size}", pieces, problem))
    return found


def _formulation(
    name: str, function: Function, problem: CellProblem, *, ordinary: bool = False
) -> Formulation:
    operands = inputs(problem)
    run: Callable[[], Any] = lambda: function(*operands)  # noqa: E731
    if problem.cell.operation.startswith("step"):
        run = _loop(with_record(LIBRARY, problem, function), problem)
    return Formulation(name, run, _answer, ordinary)


def _loop(step: Function, problem: CellProblem) -> Callable[[], Mapping[str, Any]]:
    start, data, extra = inputs(problem)

    def run() -> Mapping[str, Any]:
        theta = dict(start)
        losses: list[Any] = []
        records: list[Any] = []
        for _ in range(problem.steps):
            found = step(theta, data, extra)
            losses.append(found["loss"])
            records.append(found.get("record"))
            for name, array in theta.items():
                theta[name] = array - array.dtype.type(problem.rate) * found[name]
        history = {} if problem.record is None else {"record": np.stack(records)}
        return theta | {"loss": np.stack(losses)} | history

    return run


def _answer(found: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(value) for name, value in found.items()}
