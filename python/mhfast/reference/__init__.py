"""The specification of mhfast in plain NumPy: float64, no blocking, no threads.

Functions take a `mhfast.Classifier` or `mhfast.Layer`, or anything with their attributes, and plain
arrays, which may all have a run axis.  Every function states its shapes and its formula and then
implements that formula directly. The compiled kernels are tested against it; nothing here is meant
to be fast.  Gradients are dicts of arrays by name.

`model`: parameters, query rows and visible keys.  `attention`: weights and outputs.  `losses`.
`gradients`: centred, so that they are accurate in saturation.  `normalized`: directions of
gradients that underflow.  `hessian`.  `depth`: layers one after the other.  `training`: the
optimizers.  `constraints`: parameters in a subspace.  `batches`: the samples of each step.
`populations`: those that a stream draws.  `runs`: the run axis, a loop.
"""

from .attention import attention, outputs
from .batches import batches, sample_seed
from .constraints import labels, project
from .depth import stack_outputs, stack_value_and_grad
from .gradients import backward, textbook_value_and_grad, value_and_grad
from .hessian import hvp
from .losses import LOSSES, loss_terms
from .model import Model
from .normalized import Scaled, scaled_gradients
from .optimizers import STEPS
from .populations import (
    markov_samples,
    mixture_samples,
    normals,
    planted_samples,
    regression_samples,
    sphere_samples,
)
from .training import train

__all__ = [
    "LOSSES",
    "STEPS",
    "Model",
    "Scaled",
    "attention",
    "backward",
    "batches",
    "hvp",
    "labels",
    "loss_terms",
    "markov_samples",
    "mixture_samples",
    "normals",
    "outputs",
    "planted_samples",
    "project",
    "regression_samples",
    "sample_seed",
    "scaled_gradients",
    "sphere_samples",
    "stack_outputs",
    "stack_value_and_grad",
    "textbook_value_and_grad",
    "train",
    "value_and_grad",
]
