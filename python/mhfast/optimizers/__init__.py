"""Optimizers of `mhfast.train`: frozen dataclasses that define the step for a gradient.

Step k takes θ_k to θ_{k+1}. The gradient g of the recorded loss goes through, in this order:

1. l2:      g ← g + λ θ_k              (λ = ``l2``; λ/2 ‖θ‖² is not in the recorded loss)
2. clip:    g ← g min(1, clip / ‖g‖)   (one norm over all trained parameters)
3. step:    the rule of the optimizer, with the step size lr · schedule[k]
4. project: θ_{k+1} onto a ball or a sphere about zero

Runs side by side are independent: every norm is that of one run.
"""

from . import rules
from ._by_parameter import ByParameter, of_parameter
from ._common import Rates, Schedule, Sizes, StepRule
from ._core_settings import core_settings, fields_of, of_runs
from .rules import *  # noqa: F403  # every optimizer
from .rules import OPTIMIZERS, Optimizer
from .solvers import LBFGS, SOLVERS, GradientFlow, Method, Solver

__all__ = [
    "LBFGS",
    "OPTIMIZERS",
    "SOLVERS",
    "ByParameter",
    "GradientFlow",
    "Method",
    "Optimizer",
    "Rates",
    "Schedule",
    "Sizes",
    "Solver",
    "StepRule",
    "core_settings",
    "fields_of",
    "of_parameter",
    "of_runs",
]
__all__ += rules.__all__
