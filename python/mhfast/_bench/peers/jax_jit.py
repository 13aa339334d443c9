"""JAX: jit(value_and_grad) and jitted written-out gradients; training by lax.scan inside one jit.

Each way is tried unchanged, where XLA may use all cores for one operation, and with the samples
divided by hand among one device per core. Arrays are put on the devices before; a call ends with
block_until_ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..problem import Answer, BenchProblem
from ..shapes import LONG, Loop
from . import Formulation, UnavailableError, check_memory
from . import jax_formulas as formulas
from .jax_config import configure
from .jax_formulas import Gradient, Parameters

DEVICES = configure()

# Attention weights of one chunk or tile: they and their like should stay in a second-level cache.
CHUNK = 2**20

# Arrays of all attention weights that are alive at once in one call.
COPIES = 4


def gradients(problem: BenchProblem, _threads: int) -> list[Formulation]:
    """Every way of writing it, for one call."""
    return [
        _formulation(name, gradient, problem, devices)
        for devices in _places(problem)
        for name, gradient in _ways(problem, devices)
    ]


def training(problem: BenchProblem, loop: Loop, _threads: int) -> list[Formulation]:
    """Every way of writing it, all steps in one compiled scan."""
    return [
        _formulation(name, _descent(gradient, loop), problem, devices)
        for devices in _places(problem)
        for name, gradient in _ways(problem, devices)
    ]


def _places(problem: BenchProblem) -> tuple[int, ...]:
    """Return the numbers of devices among which samples are divided."""
    several = DEVICES > 1 and problem.shape.n % DEVICES == 0
    return (1, DEVICES) if several else (1,)


def _mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("part",))


def _ways(problem: BenchProblem, devices: int) -> Iterator[tuple[str, Gradient]]:
    if devices == 1:
        yield from _forms(problem, problem.shape.n)
        return
    whole, split = PartitionSpec(), PartitionSpec("part")
    for name, gradient in _forms(problem, problem.shape.n // devices):

        def mean(
            theta: Parameters, X: Any, y: Any, gradient: Gradient = gradient
        ) -> tuple[Any, Parameters]:
            averaged: tuple[Any, Parameters] = jax.lax.pmean(gradient(theta, X, y), "part")
            return averaged

        divided: Gradient = jax.shard_map(
            mean, mesh=_mesh(devices), in_specs=(whole, split, split), out_specs=whole,
            check_vma=False,
        )  # fmt: skip
        yield f"{name}, {devices} devices", divided


def _forms(problem: BenchProblem, samples: int) -> Iterator[tuple[str, Gradient]]:
    """Yield every way of writing it for so many samples of the problem."""
    shape = problem.shape
    budget = CHUNK // problem.X.itemsize
    if shape.T >= LONG:
        size = _divisor(shape.T, budget // (shape.H * shape.T))
        yield f"written out, tiles of {size} queries", formulas.in_tiles(size)
    try:
        check_memory(problem, COPIES)
    except UnavailableError:
        if shape.T >= LONG:
            return
        raise
    size = _divisor(samples, budget * shape.n // shape.scores)
    orders = [("queries first", formulas.queries_first, formulas.closed_queries_first)]
    if shape.T < LONG:
        orders.append(("keys first", formulas.keys_first, formulas.closed_keys_first))
    for name, loss, closed in orders:
        yield f"value_and_grad, {name}", jax.value_and_grad(loss)
        yield f"written out, {name}", closed
        if size < samples:
            yield f"written out, {name}, chunks of {size}", formulas.in_chunks(closed, size)


def _divisor(number: int, limit: int) -> int:
    """Return the largest divisor that is at most `limit`, or 1."""
    return max((k for k in range(1, min(number, limit) + 1) if number % k == 0), default=1)


def _descent(gradient: Gradient, loop: Loop) -> Callable[..., tuple[Any, Parameters]]:
    def train(theta: Parameters, X: Any, y: Any) -> tuple[Any, Parameters]:
        def step(theta: Parameters, _: None) -> tuple[Parameters, Any]:
            loss, loss_derivative = gradient(theta, X, y)
            return jax.tree.map(lambda a, g: a - loop.lr * g, theta, loss_derivative), loss

        theta, losses = jax.lax.scan(step, theta, None, length=loop.steps)
        return losses, theta

    return train


def _formulation(
    name: str, function: Callable[..., Any], problem: BenchProblem, devices: int
) -> Formulation:
    compiled = jax.jit(function)
    mesh = _mesh(devices)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("part",)))
    theta = jax.device_put((problem.W, problem.U), whole)
    X, y = jax.device_put((problem.X, problem.y), split)

    def run() -> Any:
        return jax.block_until_ready(compiled(theta, X, y))

    def answer(result: Any) -> Answer:
        losses, (W, U) = result
        return Answer(float(np.atleast_1d(losses)[-1]), np.asarray(W), np.asarray(U))

    return Formulation(name, run, answer)
