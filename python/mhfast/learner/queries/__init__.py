"""Learning a layer from chosen inputs.

`mhfast.learn_layer_by_queries` runs all of it: `oracle` counts the queries, `probing` finds the
size of tokens, the sum of the values and the noise, `starts` and `fitting` the heads at one
difference of tokens, and `learning` follows them to all differences.
"""

from .learning import learn_layer_by_queries
from .result import QueryLearning

__all__ = ["QueryLearning", "learn_layer_by_queries"]
