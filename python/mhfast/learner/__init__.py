"""Learning a multi-head attention layer from examples, phase by phase.

`mhfast.learn_layer` runs all phases. Each phase is a separate function: `crude_sum`; `certify` and
`sculpt`; `one_hot_sum` and `refine_sum`; `certify` and `sculpt` again; `search_net`;
`solve_values`; and then `refine`, with noise also `estimate`.  They take `Examples`, made by
`as_examples`.

References
----------
Chen, Li, "Provably learning a multi-head attention layer".
"""

from .agreement import Agreement, agreement
from .alignment import Alignment, align, hull_cosine, merge_heads
from .covariance import Covariance
from .enclosure import Enclosure, enclose
from .estimate import Estimate, estimate
from .examples import Examples, as_examples
from .facts import Facts, certify
from .learning import learn_layer
from .net import Candidate, Net, search_net
from .nondegeneracy import Nondegeneracy, nondegeneracy
from .queries import QueryLearning, learn_layer_by_queries
from .refinement import Refinement, refine
from .result import Certificate, Learning, LearningInterrupted, Phase
from .sculpting import Body, propose_heads, sculpt
from .sums import SumEstimate, crude_sum, one_hot_sum, refine_sum, with_support
from .values import Values, solve_values
from .visible import visible_part

__all__ = [
    "Agreement",
    "Alignment",
    "Body",
    "Candidate",
    "Certificate",
    "Covariance",
    "Enclosure",
    "Estimate",
    "Examples",
    "Facts",
    "Learning",
    "LearningInterrupted",
    "Net",
    "Nondegeneracy",
    "Phase",
    "QueryLearning",
    "Refinement",
    "SumEstimate",
    "Values",
    "agreement",
    "align",
    "as_examples",
    "certify",
    "crude_sum",
    "enclose",
    "estimate",
    "hull_cosine",
    "learn_layer",
    "learn_layer_by_queries",
    "merge_heads",
    "nondegeneracy",
    "one_hot_sum",
    "propose_heads",
    "refine",
    "refine_sum",
    "sculpt",
    "search_net",
    "solve_values",
    "visible_part",
    "with_support",
]
