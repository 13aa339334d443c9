"""The specification of mhfast in plain NumPy: float64, no blocking, no threads.

Every function states its shapes and its formula and then writes that formula down.  The compiled
kernels are tested against it; nothing here is meant to be fast.
"""

from .classifier import (
    LOSSES,
    attention,
    loss_terms,
    outputs,
    queries,
    textbook_value_and_grad,
    value_and_grad,
)
from .normalized import Scaled, scaled_gradients
from .training import train

__all__ = [
    "LOSSES",
    "Scaled",
    "attention",
    "loss_terms",
    "outputs",
    "queries",
    "scaled_gradients",
    "textbook_value_and_grad",
    "train",
    "value_and_grad",
]
