"""The theory of multi-head attention as functions that return numbers.

Curvature of a model and its loss (`bounds`, `layer_bounds`, `hessian`), its tangent kernel
(`kernel`) and margin (`margin`), realizability, guarantees of training and generalization with
their conditions, leave-one-out stability, the tokenized mixture in closed form, and the
optimization programs whose solutions training tends to (`token_svm`, `next_token_svm`, `joint_svm`,
`regularization_path`). docs/theory.md lists every formula with its source and its test.
"""

from .alignment import alignment
from .bounds import CurvatureBounds, curvature_bounds
from .certificate import Certificate, Inequality, certify
from .conditions import Condition, Guarantee
from .gaussian_start import GaussianStart, gaussian_needed_heads, gaussian_start
from .guarantees import Comparison, compare, generalization_bound, stability_bound, training_bound
from .hessian import HessianExtremes, hessian_extremes
from .hull import nearest_point
from .joint import JointSVM, joint_svm
from .kernel import ntk
from .layer_bounds import LayerBounds, layer_bounds
from .margin import GoodInitialization, TangentMargin, good_initialization, ntk_margin
from .measured_curvature import (
    LocalCurvature,
    SegmentCurvature,
    local_curvature,
    segment_curvature,
)
from .measured_stability import LocalStability, local_stability
from .mixture import MixtureMargins, mixture_margins, population_first_step, separating_direction
from .needed_heads import NeededHeads, mixture_needed_heads, needed_heads
from .next_token import NextTokenSVM, next_token_svm
from .per_head import PerHeadBound, best_bound, least_heads_below, per_head_bound
from .realizability import Realizability, realizability, travelled
from .regularization import RegularizationPath, regularization_path
from .separation import TokenSVM, token_svm
from .stability import Stability, leave_one_out
from .token_optimality import TokenOptimality, optimal_tokens, token_optimality, token_scores
from .trajectory import TrajectoryStability, trajectory_stability

__all__ = [
    "Certificate",
    "Comparison",
    "Condition",
    "CurvatureBounds",
    "GaussianStart",
    "GoodInitialization",
    "Guarantee",
    "HessianExtremes",
    "Inequality",
    "JointSVM",
    "LayerBounds",
    "LocalCurvature",
    "LocalStability",
    "MixtureMargins",
    "NeededHeads",
    "NextTokenSVM",
    "PerHeadBound",
    "Realizability",
    "RegularizationPath",
    "SegmentCurvature",
    "Stability",
    "TangentMargin",
    "TokenOptimality",
    "TokenSVM",
    "TrajectoryStability",
    "alignment",
    "best_bound",
    "certify",
    "compare",
    "curvature_bounds",
    "gaussian_needed_heads",
    "gaussian_start",
    "generalization_bound",
    "good_initialization",
    "hessian_extremes",
    "joint_svm",
    "layer_bounds",
    "least_heads_below",
    "leave_one_out",
    "local_curvature",
    "local_stability",
    "mixture_margins",
    "mixture_needed_heads",
    "nearest_point",
    "needed_heads",
    "next_token_svm",
    "ntk",
    "ntk_margin",
    "optimal_tokens",
    "per_head_bound",
    "population_first_step",
    "realizability",
    "regularization_path",
    "segment_curvature",
    "separating_direction",
    "stability_bound",
    "token_optimality",
    "token_scores",
    "token_svm",
    "training_bound",
    "trajectory_stability",
    "travelled",
]
