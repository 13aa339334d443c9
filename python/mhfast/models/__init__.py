"""The models: `Classifier`, `Layer`, the factored key-query matrix `LowRank`, and `stack`."""

from ..low_rank import LowRank
from .classifier import Classifier
from .layer import Layer
from .model import Model
from .stacking import stack

__all__ = ["Classifier", "Layer", "LowRank", "Model", "stack"]
