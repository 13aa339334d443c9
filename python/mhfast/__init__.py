"""Models that attention theory studies, exactly and fast, on CPUs.

>>> import mhfast as mh
>>> data = mh.data.tokenized_mixture(100, 10, 20, seed=0)
>>> model = mh.Classifier.zeros(heads=16, tokens=10, dim=20)
>>> run = mh.train(model, data, steps=1000, optimizer=mh.GradientDescent(lr=1.0))
"""

from importlib.metadata import version

from . import data, learner, reference, theory
from ._arguments import losses as _losses
from ._arguments.losses import *  # noqa: F403  # every loss with a parameter
from .config import num_threads, set_num_threads, show_config
from .dataset.dataset import Dataset, as_dataset
from .dataset.words import Tokens
from .gradients import Gradients, backward, dot, hvp, norm, value_and_grad
from .learner import learn_layer, learn_layer_by_queries
from .models import Classifier, Layer, LowRank, Stack, ValueOutput, explain, stack
from .optimizers import rules as _rules
from .optimizers.rules import *  # noqa: F403  # every optimizer
from .sweeps.sweep import SweepInterrupted, sweep
from .sweeps.table import Sweep
from .training.callbacks import Callback
from .training.constraints import position_ties, tied
from .training.evaluate import evaluate
from .training.flow import gradient_flow
from .training.minimize import minimize
from .training.reduction import Reduction
from .training.run import Interrupted, Run
from .training.streams import Stream
from .training.train import train

__version__ = version("mhfast")

__all__ = [
    "Callback",
    "Classifier",
    "Dataset",
    "Gradients",
    "Interrupted",
    "Layer",
    "LowRank",
    "Reduction",
    "Run",
    "Stack",
    "Stream",
    "Sweep",
    "SweepInterrupted",
    "Tokens",
    "ValueOutput",
    "__version__",
    "as_dataset",
    "backward",
    "data",
    "dot",
    "evaluate",
    "explain",
    "gradient_flow",
    "hvp",
    "learn_layer",
    "learn_layer_by_queries",
    "learner",
    "minimize",
    "norm",
    "num_threads",
    "position_ties",
    "reference",
    "set_num_threads",
    "show_config",
    "stack",
    "sweep",
    "theory",
    "tied",
    "train",
    "value_and_grad",
]
__all__ += _losses.__all__ + _rules.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
