"""PyTorch through torch.compile; it needs a C++ compiler when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..problem import BenchProblem
from ..shapes import LONG, Loop
from . import Formulation, check_memory
from . import torch_formulas as formulas
from .torch_eager import CHUNK

# Arrays of all attention weights that are alive at once, as without compilation.
COPIES = 4


def gradients(problem: BenchProblem, threads: int) -> list[Formulation]:
    """Compiled loss under autograd, and the compiled gradient, at once and in chunks."""
    return [formulas.call(name, gradient, problem) for name, gradient in _ways(problem, threads)]


def training(problem: BenchProblem, loop: Loop, threads: int) -> list[Formulation]:
    """Train in a Python loop around either."""
    return [
        formulas.loop_of(name, gradient, problem, loop)
        for name, gradient in _ways(problem, threads)
    ]


def _ways(problem: BenchProblem, threads: int) -> Iterator[tuple[str, formulas.Gradient]]:
    check_memory(problem, COPIES)
    torch.set_num_threads(threads)
    # A compiled function keeps its code for every shape it has met, up to a limit.
    torch.compiler.reset()

    def compiled(function: Any) -> Any:
        return torch.compile(function, dynamic=False)

    yield "autograd, queries first", formulas.differentiated(compiled(formulas.queries_first))
    shape = problem.shape
    size = formulas.even_chunk(shape.n, CHUNK * shape.n // (shape.scores * problem.X.itemsize))
    orders = [("queries first", formulas.closed_queries_first)]
    if shape.T < LONG:
        orders.append(("keys first", formulas.closed_keys_first))
    for name, closed in orders:
        yield f"written out, {name}", formulas.without_autograd(compiled(closed))
        if size < shape.n:
            chunks = formulas.in_chunks(compiled(closed), size)
            yield f"written out, {name}, chunks of {size}", formulas.without_autograd(chunks)
