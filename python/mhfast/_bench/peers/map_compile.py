"""Cells of the map through torch.compile: the ordinary code, and the fastest of the written forms.

Compiling takes seconds, so that of the written forms only that one is compiled that is fastest
without it, of all samples or of a chunk of them.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..cells import CellProblem
from . import Formulation
from .map_torch import (
    LIBRARY,
    by_hand,
    configure,
    formulation,
    operands,
    ordinary,
    without_autograd,
)
from .operations import Function, in_chunks, written
from .written import Form

# Calls of a form without compilation, of which the fastest counts.
TRIALS = 3


def ways(problem: CellProblem, threads: int) -> list[Formulation]:
    """Return the ordinary code, compiled forward, and the fastest form."""
    configure(threads)
    torch.compiler.reset()
    operation = problem.cell.operation
    found = []
    if operation not in ("hvp", "ntk"):  # compiled code has no second derivatives
        plain = ordinary(problem, _compiled)
        found.append(formulation("autograd", plain, problem, ordinary=True))
    form, size = min(by_hand(problem), key=lambda way: _seconds(problem, *way))
    name = str(form) if size is None else f"{form}, chunks of {size}"
    found.append(formulation(name, _function(problem, form, size, _compiled), problem))
    return found


def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def _function(problem: CellProblem, form: Form, size: int | None, compiler: Any) -> Function:
    function = without_autograd(compiler(written(LIBRARY, problem, form)))
    return function if size is None else in_chunks(LIBRARY, function, size)


def _seconds(problem: CellProblem, form: Form, size: int | None) -> float:
    function, given = _function(problem, form, size, lambda function: function), operands(problem)
    times = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        function(*given)
        times.append(time.perf_counter() - begin)
    return min(times)
