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
from .sequences import (
    associative_recall,
    bigram_triggers,
    copying,
    markov_chain,
    sparse_parity,
    word_priorities,
)
from .signal import signal_noise
from .sphere import sphere_tokens

__all__ = [
    "associative_recall",
    "bigram_triggers",
    "boolean_layer",
    "copying",
    "digits",
    "icl_regression",
    "markov_chain",
    "parity_layer",
    "planted_attention",
    "signal_noise",
    "sparse_parity",
    "sphere_tokens",
    "tokenized_mixture",
    "word_priorities",
]
