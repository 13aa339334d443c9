"""PyTorch through torch.compile; it needs a C++ compiler when it runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..problem import BenchProblem
from ..shapes import LONG, Loop
from . import Formulation, check_memory
from . import torch_formulas as formulas

# Arrays of all attention weights that are alive at once, as without compilation.
COPIES = 4


def gradients(problem: BenchProblem, threads: int) -> list[Formulation]:
    """Compiled loss under autograd, and the compiled gradient."""
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

    def compiled(function: formulas.Loss) -> formulas.Loss:
        result: formulas.Loss = torch.compile(function, dynamic=False)
        return result

    yield "autograd, queries first", formulas.differentiated(compiled(formulas.queries_first))
    if problem.shape.T < LONG:
        name, closed = "keys first", formulas.closed_keys_first
    else:
        name, closed = "queries first", formulas.closed_queries_first
    yield f"written out, {name}", formulas.without_autograd(compiled(closed))
