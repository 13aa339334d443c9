"""JAX: jit(value_and_grad) and jitted written-out gradients; training by lax.scan inside one jit.

Arrays are put on the device before; a call ends with block_until_ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ..problem import Answer, BenchProblem
from ..shapes import LONG, Loop
from . import Formulation, UnavailableError, check_memory
from . import jax_formulas as formulas
from .jax_config import configure
from .jax_formulas import Gradient, Parameters

configure()

# Attention weights of one chunk or tile: they and their like should stay in a second-level cache.
CHUNK = 2**20

# Arrays of all attention weights that are alive at once in one call.
COPIES = 4


def gradients(problem: BenchProblem, _threads: int) -> list[Formulation]:
    """Every way of writing it, for one call; XLA has the cores that the process has."""
    return [_formulation(name, gradient, problem) for name, gradient in _ways(problem)]


def training(problem: BenchProblem, loop: Loop, _threads: int) -> list[Formulation]:
    """Every way of writing it, all steps in one compiled scan."""
    return [
        _formulation(name, _descent(gradient, loop), problem) for name, gradient in _ways(problem)
    ]


def _ways(problem: BenchProblem) -> Iterator[tuple[str, Gradient]]:
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
    size = _divisor(shape.n, budget * shape.n // shape.scores)
    orders = [("queries first", formulas.queries_first, formulas.closed_queries_first)]
    if shape.T < LONG:
        orders.append(("keys first", formulas.keys_first, formulas.closed_keys_first))
    for name, loss, closed in orders:
        yield f"value_and_grad, {name}", jax.value_and_grad(loss)
        yield f"written out, {name}", closed
        if size < shape.n:
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


def _formulation(name: str, function: Callable[..., Any], problem: BenchProblem) -> Formulation:
    compiled = jax.jit(function)
    X, y, W, U = (jax.device_put(a) for a in (problem.X, problem.y, problem.W, problem.U))
    theta = (W, U)

    def run() -> Any:
        return jax.block_until_ready(compiled(theta, X, y))

    def answer(result: Any) -> Answer:
        losses, (W, U) = result
        return Answer(float(np.atleast_1d(losses)[-1]), np.asarray(W), np.asarray(U))

    return Formulation(name, run, answer)
