"""Gradients and Hessian-vector products, and the class that holds them."""

from .calls import backward, value_and_grad
from .hvp import hvp
from .record import Gradients, dot, norm

__all__ = ["Gradients", "backward", "dot", "hvp", "norm", "value_and_grad"]
