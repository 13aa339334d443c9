"""Cells of the map in JAX: automatic differentiation and written-out derivatives, under jit.

Training is a Python loop around a compiled step, as users write it, and one compiled lax.scan.
With more than one thread the samples are also divided among one device per core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..cells import CellProblem
from ..problem import Array
from . import Formulation, natural
from .jax_config import configure
from .natural import Data, Tensor, Theta
from .operations import (
    JOINED,
    OF_SAMPLES,
    VALUES,
    Extra,
    Found,
    Function,
    chunk,
    forms,
    inputs,
    natural_loss,
    natural_values,
    with_record,
    written,
)

DEVICES = configure()

for kind, constants in ((Data, ["total"]), (Extra, [])):
    names = [field.name for field in fields(kind) if field.name not in constants]
    jax.tree_util.register_dataclass(kind, names, constants)


class Jax:
    """`mhfast._bench.peers.natural.Library`."""

    def softmax(self, S: Tensor, axis: int) -> Tensor:
        return jax.nn.softmax(S, axis)

    def softmax_derivative(self, A: Tensor, C: Tensor, axis: int) -> Tensor:
        AC = A * C
        return AC - A * AC.sum(axis, keepdims=True)

    def softplus(self, x: Tensor) -> Tensor:
        return jax.nn.softplus(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return jax.nn.sigmoid(x)

    def concatenate(self, parts: list[Tensor], axis: int) -> Tensor:
        return jnp.concatenate(parts, axis)

    def added(self, parts: list[Tensor], axis: int) -> Tensor:
        longest = max(part.shape[axis] for part in parts)

        def whole(part: Tensor) -> Tensor:
            widths = [(0, 0)] * part.ndim
            widths[axis] = (0, longest - part.shape[axis])
            return jnp.pad(part, widths)

        return sum(map(whole, parts[1:]), whole(parts[0]))

    def add_rows(self, gX: Tensor, rows: tuple[Tensor, Tensor], gZ: Tensor) -> Tensor:
        return gX.at[..., rows[0], rows[1], :].add(gZ[..., 0, :])

    def repeated(self, x: Tensor, heads: int) -> Tensor:
        return jnp.broadcast_to(x, (*x.shape[:-3], heads, *x.shape[-2:]))

    def identity(self, size: int, like: Tensor) -> Tensor:
        return jnp.eye(size, dtype=like.dtype)

    def sqrt(self, x: Tensor) -> Tensor:
        return jnp.sqrt(x)

    def largest(self, x: Tensor, axis: int) -> Tensor:
        return x.max(axis)

    def least(self, x: Tensor, axis: int) -> Tensor:
        return x.min(axis)


LIBRARY = Jax()


def ways(problem: CellProblem, threads: int) -> list[Formulation]:
    """As a user writes it, and every form written out, at once and on several devices.

    Compiling takes time, so that chunks are tried of one form only, the last without tiles: "keys
    first" where samples are short.
    """
    plain = ordinary(problem)
    found = [_formulation("jit", plain, problem, ordinary=True)]
    if problem.cell.operation.startswith("step"):
        found.append(_formulation("scan", plain, problem, scan=True))
    size = _even(problem, chunk(problem))
    every = forms(problem)
    in_parts = [form for form in every if form.tile is None][-1]
    for form in every:
        function = written(LIBRARY, problem, form)
        found.append(_formulation(str(form), function, problem, scan=True))
        if size is not None and form == in_parts:
            pieces = _scanned(function, size)
            found.append(_formulation(f"{form}, chunks of {size}", pieces, problem, scan=True))
        if threads > 1 and len(problem.y) % DEVICES == 0:
            name = f"{form}, {DEVICES} devices"
            found.append(_formulation(name, function, problem, scan=True, devices=DEVICES))
    return found


def _even(problem: CellProblem, size: int | None) -> int | None:
    """Return the largest divisor of the samples that is at most `size`."""
    if size is None:
        return None
    n = len(problem.X)
    return max(k for k in range(1, size + 1) if n % k == 0)


def _scanned(function: Function, size: int) -> Function:
    """Take `size` samples at a time, in a loop that is compiled once."""

    def chunked(theta: Theta, data: Data, extra: Extra) -> Found:
        n = data.X.shape[0]

        def parts(array: Tensor) -> Tensor:
            return array.reshape(n // size, size, *array.shape[1:])

        arrays = {name: getattr(data, name) for name in OF_SAMPLES}
        split = {name: parts(array) for name, array in arrays.items() if array is not None}
        if data.hidden is not None and data.hidden.shape[0] == n:
            split["hidden"] = parts(data.hidden)
        if data.places is not None:
            split["last"] = parts(data.places[1])

        def one(part: Mapping[str, Tensor]) -> Found:
            changes = dict(part)
            if data.places is not None:
                changes["places"] = data.places[0][:size], changes.pop("last")
            return function(theta, replace(data, **changes), extra)

        found = jax.lax.map(one, split)
        return {
            name: value.reshape(n, *value.shape[2:]) if name in JOINED else value.sum(0)
            for name, value in found.items()
        }

    return chunked


def ordinary(problem: CellProblem) -> Function:
    """Return what a user writes: the formula, and a transformation of JAX."""
    operation = problem.cell.operation
    if operation in VALUES:
        return natural_values(LIBRARY, problem)
    if operation == "hvp":
        return _hessian_product(problem)
    if operation == "ntk":
        return _kernel(problem)

    def gradient(theta: Theta, data: Data, _extra: Extra) -> Found:
        others = {name: getattr(data, name) for name in problem.wrt if name in ("X", "query")}
        variables = {name: theta[name] for name in problem.wrt if name in theta} | others

        def loss(variables: Theta) -> tuple[Tensor, Found]:
            return natural_loss(LIBRARY, problem, {**theta, **variables}, data)

        found, beside = jax.grad(loss, has_aux=True)(variables)
        return {**found, **beside}

    return gradient


def _hessian_product(problem: CellProblem) -> Function:
    def product(theta: Theta, data: Data, extra: Extra) -> Found:
        def loss(theta: Theta) -> Tensor:
            return natural_loss(LIBRARY, problem, theta, data)[0]

        found: Found = jax.jvp(jax.grad(loss), (theta,), (extra.tangent,))[1]
        return found

    return product


def _kernel(problem: CellProblem) -> Function:
    """Return the product of Jacobians, that of each sample by jacrev."""

    def kernel(theta: Theta, X: Tensor, data: Data) -> Tensor:
        def outputs(theta: Theta, x: Tensor, extras: tuple[Tensor, ...]) -> Tensor:
            one = natural.of_sample(data, x, extras)
            return natural.outputs(LIBRARY, theta, one)[0][0]

        found = jax.vmap(jax.jacrev(outputs), (None, 0, 0))(theta, X, natural.extras(data))
        first = next(iter(theta))
        size = found[first].shape[: found[first].ndim - theta[first].ndim]
        rows = jnp.concatenate([found[name].reshape(*size, -1) for name in theta], -1)
        flat = rows.reshape(-1, rows.shape[-1])
        return (flat @ flat.mT).reshape(*size, *size)

    def call(theta: Theta, data: Data, _extra: Extra) -> Found:
        one = jax.vmap(kernel, (0, 0, None)) if problem.sizes.runs else kernel
        return {"kernel": one(theta, data.X, data)}

    return call


def _formulation(
    name: str,
    function: Function,
    problem: CellProblem,
    *,
    ordinary: bool = False,
    scan: bool = False,
    devices: int = 1,
) -> Formulation:
    given = _placed(inputs(problem), problem, devices)
    if not problem.cell.operation.startswith("step"):
        compiled = jax.jit(function)
        return Formulation(name, lambda: jax.block_until_ready(compiled(*given)), _answer, ordinary)
    step = _step(with_record(LIBRARY, problem, function), problem)
    loop = _scan(step, problem) if scan else _python_loop(step, problem)
    return Formulation(name, lambda: jax.block_until_ready(loop(*given)), _answer, ordinary)


def _placed(operands: Any, problem: CellProblem, devices: int) -> Any:
    """Put the operands on devices, those with an axis of samples, or of runs, divided."""
    theta, data, extra = operands
    if devices == 1:
        return jax.device_put((theta, data, extra))
    mesh = Mesh(np.array(jax.devices()[:devices]), ("part",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((), ("part",)))
    runs = problem.sizes.runs > 0
    theta, extra = jax.device_put((theta, extra), split if runs else whole)
    shared = jax.device_put(data, whole)
    names = [name for name in ("X", "y", "query") if getattr(data, name) is not None]
    if not runs:
        names += [name for name in ("real", "share", "groups") if getattr(data, name) is not None]
    parts = {name: jax.device_put(getattr(data, name), split) for name in names}
    return theta, replace(shared, **parts), extra


Step = Callable[[Theta, Data, Extra], tuple[Theta, Found]]


def _step(function: Function, problem: CellProblem) -> Step:
    rate = problem.rate

    def step(theta: Theta, data: Data, extra: Extra) -> tuple[Theta, Found]:
        found = function(theta, data, extra)
        moved = {name: array - rate * found[name] for name, array in theta.items()}
        return moved, {name: found[name] for name in ("loss", "record") if name in found}

    return step


def _scan(step: Step, problem: CellProblem) -> Callable[..., Found]:
    def train(theta: Theta, data: Data, extra: Extra) -> Found:
        def body(theta: Theta, _: None) -> tuple[Theta, Found]:
            return step(theta, data, extra)

        theta, history = jax.lax.scan(body, dict(theta), None, length=problem.steps)
        return {**theta, **history}

    compiled: Callable[..., Found] = jax.jit(train)
    return compiled


def _python_loop(step: Step, problem: CellProblem) -> Callable[..., Found]:
    compiled = jax.jit(step)

    def train(theta: Theta, data: Data, extra: Extra) -> Found:
        history: list[Found] = []
        for _ in range(problem.steps):
            theta, found = compiled(theta, data, extra)
            history.append(found)
        joined = {name: jnp.stack([found[name] for found in history]) for name in history[0]}
        return {**theta, **joined}

    return train


def _answer(found: Found) -> dict[str, Array]:
    return {name: np.asarray(value) for name, value in found.items()}
