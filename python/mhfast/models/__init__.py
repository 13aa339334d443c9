"""The models `Classifier`, `Layer` and `Stack`, the factored matrix `LowRank`, and `stack`."""

from .classifier import Classifier
from .depth import AnyModel, Stack
from .layer import Layer
from .low_rank import LowRank
from .model import Model
from .plan import explain
from .stacking import stack

__all__ = ["AnyModel", "Classifier", "Layer", "LowRank", "Model", "Stack", "explain", "stack"]
