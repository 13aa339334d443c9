"""The models `Classifier`, `Layer`, `Stack`, the factors `LowRank`, `ValueOutput`, and `stack`."""

from .classifier import Classifier
from .depth import AnyModel, Stack
from .layer import Layer
from .low_rank import LowRank
from .model import Model
from .plan import explain
from .stacking import stack
from .value_output import ValueOutput

__all__ = [
    "AnyModel", "Classifier", "Layer", "LowRank", "Model", "Stack", "ValueOutput", "explain",
    "stack",
]  # fmt: skip
