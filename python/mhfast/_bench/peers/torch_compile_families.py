"""The model family through torch.compile: the gradient written out, or the loss under autograd."""

from __future__ import annotations

from typing import Any

import torch

from ..families import Trainees, Training
from . import Formulation
from .torch_families import by_autograd, loop, losses, written_out


def trainings(problem: Trainees, training: Training, threads: int) -> list[Formulation]:
    """Both ways, runs in one stack of products, in a Python loop."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.compiler.reset()

    def compiled(function: Any) -> Any:
        return torch.compile(function, dynamic=False)

    ways = {
        "written out, stacked": compiled(written_out),
        "autograd, stacked": by_autograd(compiled(losses)),
    }
    return [loop(name, gradient, problem, training) for name, gradient in ways.items()]
