"""The models: `Classifier`, `Layer`, the factored key-query matrix `LowRank`, and `stack`."""

from .classifier import Classifier
from .layer import Layer
from .low_rank import LowRank
from .model import Model
from .plan import explain
from .stacking import stack

__all__ = ["Classifier", "Layer", "LowRank", "Model", "explain", "stack"]
