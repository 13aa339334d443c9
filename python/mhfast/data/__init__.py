"""Generators of data sets: synthetic populations of the theory, and real images.

Every generator takes a `seed` and returns the same arrays for it on every platform.  The data sets
of synthetic populations draw more samples of the same population with `Dataset.sample`.
"""

from .digits import digits
from .mixture import tokenized_mixture
from .planted import planted_attention

__all__ = ["digits", "planted_attention", "tokenized_mixture"]
