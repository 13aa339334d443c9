"""PyTorch, eager: autograd and gradients written out, all samples at once or in chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..problem import BenchProblem
from ..shapes import LONG, Loop
from . import Formulation, check_memory
from . import torch_formulas as formulas

# Attention weights of one chunk: they and their like should stay in a second-level cache.
CHUNK = 2**20

# Arrays of all attention weights that are alive at once: A, C, and gradients of both.
COPIES = 4


def gradients(problem: BenchProblem, threads: int) -> list[Formulation]:
    """Every way of writing it, for one call."""
    torch.set_num_threads(threads)
    return [formulas.call(name, gradient, problem) for name, gradient in _ways(problem)]


def training(problem: BenchProblem, loop: Loop, threads: int) -> list[Formulation]:
    """Every way of writing it, in a Python loop."""
    torch.set_num_threads(threads)
    return [formulas.loop_of(name, gradient, problem, loop) for name, gradient in _ways(problem)]


def _ways(problem: BenchProblem) -> Iterator[tuple[str, formulas.Gradient]]:
    shape = problem.shape
    check_memory(problem, COPIES)
    orders = [("queries first", formulas.queries_first, formulas.closed_queries_first)]
    if shape.T < LONG:
        orders.append(("keys first", formulas.keys_first, formulas.closed_keys_first))
    size = max(1, CHUNK * shape.n // (shape.scores * problem.X.itemsize))
    for name, loss, closed in orders:
        yield f"autograd, {name}", formulas.differentiated(loss)
        gradient = formulas.without_autograd(closed)
        yield f"written out, {name}", gradient
        if size < shape.n:
            yield f"written out, {name}, chunks of {size}", formulas.in_chunks(gradient, size)
