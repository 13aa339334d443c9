"""Generators of data sets: synthetic populations of the theory, and real images.

Every generator takes a `seed` and returns the same arrays for it on every platform; a sequence of
R seeds gives R data sets side by side, on the run axis.  The data sets of synthetic populations
draw more samples of the same population with `Dataset.sample`.
"""

from .digits import digits
from .layers import boolean_layer, parity_layer
from .mixture import tokenized_mixture
from .planted import planted_attention
from .regression import icl_regression
from .signal import signal_noise
from .sphere import sphere_tokens

__all__ = [
    "boolean_layer",
    "digits",
    "icl_regression",
    "parity_layer",
    "planted_attention",
    "signal_noise",
    "sphere_tokens",
    "tokenized_mixture",
]
