"""`needed_heads`: the number of heads from which on the training guarantee applies.

From a start with tangent margin γ, outputs up to BΦ, heads of ‖U_h‖ ≤ u and loss L0, and with
B = max(BΦ, 7/128), the tangent construction

    θ* = θ0 + s θ,   s = (2B + log(1/ε)) / γ,   D0 = sqrt(2) s

has L(θ*) ≤ ε once sqrt(H) ≥ b3 D0² / (2B), and the training guarantee with the comparator θ* needs
sqrt(H) ≥ (64/7) b3 D0², where b3 bounds the curvature in the ball of radius 3 D0.  For this B the
second implies the first, and hence

    N = ((64/7) b3 D0²)² heads are enough for   (1/k) Σ_j L(θ_j) ≤ (5/3) ε + D0² / (lr k),

at any lr of at most 1/ρ, D0²/(k ε) and D0²/L0.  Here the quantities of the start are assumed not to
depend on H, as is the case for `Classifier.random_step` with balanced signs.

The corollary follows the idea of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
Generalization of Multi-head Attention" (TMLR 2024), with constants of our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .._arguments import checks
from ..dataset.dataset import Dataset
from ..gradients import value_and_grad
from ..models import Classifier
from .bounds import CurvatureBounds, curvature_bounds
from .conditions import Guarantee, heads_shown, least_heads
from .guarantees import Comparison
from .inputs import no_weights, one_data_set, settled
from .margin import good_initialization
from .mixture import mixture_margins
from .realizability import check_separable

LEAST_ALLOWANCE = 7 / 128  # with a smaller B realizability would need more heads than training


@dataclass(frozen=True, eq=False)
class NeededHeads:
    """The smallest H for which all conditions are met, with what it is made of.

    Attributes
    ----------
    heads : float
        N, a whole number.
    realizability_heads, training_heads : float
        The smallest H for L(θ*) ≤ ε and for the training guarantee; `heads` is the larger.
    steps : int
        k.
    epsilon : float
        ε, the bound of the comparator's loss.
    margin, output, readout : float
        γ, BΦ and u of the start.
    allowance : float
        B.
    lr : float
        The largest step size for H = `heads`; the conditions are met in (0, lr].
    comparison : Comparison
        D0, L0, ε in place of L(θ*), and the curvature bounds in the ball, for H = `heads`.

    Examples
    --------
    >>> import mhfast as mh
    >>> given = {"relevant_fraction": 0.5, "contexts": 1, "norm": 40.0, "epsilon": 0.06}
    >>> needed = mh.theory.mixture_needed_heads(100, 10, 1000, **given)
    >>> needed.heads, round(needed.training.bound, 3), needed.training.applies
    (200.0, 0.647, True)
    >>> needed.generalization.applies, needed.distance > 0, needed.b3 > 0
    (True, True, True)
    """

    heads: float
    realizability_heads: float
    training_heads: float
    steps: int
    epsilon: float
    margin: float
    output: float
    readout: float
    allowance: float
    lr: float
    comparison: Comparison

    @property
    def distance(self) -> float:
        """D0, the distance of the comparator from the start."""
        return self.comparison.distance

    @property
    def b3(self) -> float:
        """The bound b3 of curvature in the ball of radius 3 D0."""
        return self.comparison.bounds.b3

    @property
    def training(self) -> Guarantee:
        """The bound of the average training loss at step size `lr`, with its conditions."""
        return self.comparison.training(self.lr, self.steps)

    @property
    def generalization(self) -> Guarantee:
        """The bound of the expected generalization gap for n samples at step size `lr`.

        It means a start that does not depend on the samples.
        """
        return self.comparison.generalization(self.lr, self.steps)

    def __str__(self) -> str:
        gap, n = self.generalization, self.comparison.n
        return "\n".join(
            [
                f"needs H >= {heads_shown(self.heads)}",
                f"  of the start: margin {self.margin:.4g}, outputs {self.output:.4g}, "
                f"norm of a head's U {self.readout:.4g}",
                f"  comparator: loss ≤ {self.epsilon:.4g} at distance {self.distance:.4g}, "
                f"for H >= {heads_shown(self.realizability_heads)}",
                f"  training: b3 = {self.b3:.4g} within {self.comparison.radius:.4g}, "
                f"for H >= {heads_shown(self.training_heads)}",
                f"  step size: up to {self.lr:.4g}",
                f"  average training loss of {self.steps} steps ≤ {self.training.bound:.4g}"
                + (", vacuous" if self.training.vacuous else ""),
                f"  expected test - training loss ≤ {gap.bound:.4g} for n = {n}"
                + (", vacuous" if gap.vacuous else ""),
            ]
        )


def needed_heads(
    data: Dataset,
    steps: int,
    *,
    start: Classifier | None = None,
    epsilon: float | None = None,
) -> NeededHeads:
    """Compute how many heads the training guarantee needs for k steps on the data.

    Parameters
    ----------
    data : Dataset
        X (n, T, d), y (n,) of -1 and 1, without a run axis or weights.
    steps : int
        k, at least 1.
    start : Classifier, optional
        θ0, with dense W and no prompt. By default the random first step with balanced signs, whose
        margin, outputs, norm of heads and loss are the same for every even H. For another start
        they are assumed not to change with H.
    epsilon : float, optional
        ε in (0, 1), the loss of the comparator; 1/k by default.

    Returns
    -------
    NeededHeads

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a number is out of range or not finite, data have a run axis or weights, the tangent
        features at the start do not separate them, or the number of heads exceeds float64.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> needed = mh.theory.needed_heads(data, 100)
    >>> needed.heads > 1e6  # with short tokens, far more than anyone trains
    True
    """
    one_data_set(data)
    no_weights(data)
    if start is None:
        start = Classifier.random_step(data, 2, seed=0, balanced=True)
    start, data, _ = settled(start, data, dense=True)
    found = good_initialization(start, data)
    check_separable(found.tangent)
    return solved(
        margin=found.margin,
        output=found.output,
        start_loss=float(value_and_grad(start, data)[0]),
        bounds=curvature_bounds(start, data),
        readouts=float(np.linalg.norm(start.U)) / math.sqrt(start.heads),
        steps=steps,
        epsilon=epsilon,
        n=data.n,
    )


def mixture_needed_heads(
    n: int,
    tokens: int,
    steps: int,
    *,
    relevant_fraction: float,
    norm: float,
    contexts: int,
    epsilon: float | None = None,
) -> NeededHeads:
    """Compute `needed_heads` of the noiseless tokenized mixture in closed form.

    The start is the random first step of the population with balanced signs,
    U_h = ± (ζ/4) 1_T u*ᵀ, so that u = ζ S sqrt(T/8), BΦ = 0 and L0 = log 2; for γ the lower bound
    γ_linear + γ_attention is taken.

    Parameters
    ----------
    n, tokens, steps : int
        n, T and k.
    relevant_fraction : float
        ζ in (0, 1].
    norm : float
        S > 0.
    contexts : int
        M.
    epsilon : float, optional
        ε in (0, 1), the loss of the comparator; 1/k by default.

    Returns
    -------
    NeededHeads

    Raises
    ------
    ValueError
        If a number is out of range, or the number of heads exceeds float64.

    Examples
    --------
    >>> import mhfast as mh
    >>> for norm in (1.0, 10.0, 40.0):  # the longer the tokens, the fewer heads
    ...     given = {"relevant_fraction": 0.5, "contexts": 1, "epsilon": 0.06, "norm": norm}
    ...     print(norm, f"{mh.theory.mixture_needed_heads(100, 10, 1000, **given).heads:.2g}")
    1.0 4.3e+07
    10.0 5e+04
    40.0 2e+02
    """
    margins = mixture_margins(
        tokens, relevant_fraction=relevant_fraction, norm=norm, contexts=contexts
    )
    readout = relevant_fraction * norm * math.sqrt(tokens / 8)
    empty = CurvatureBounds(norm, norm, tokens, 1, 1.0, readout, 0.0)
    return solved(
        margin=margins.total,
        output=0.0,
        start_loss=math.log(2),
        bounds=empty,
        readouts=readout,
        steps=steps,
        epsilon=epsilon,
        n=checks.count(n, "n"),
    )


def solved(
    *,
    margin: float,
    output: float,
    start_loss: float,
    bounds: CurvatureBounds,
    readouts: float,
    steps: int,
    epsilon: float | None,
    n: int,
) -> NeededHeads:
    """Return the result for a start; `readouts` is the root mean square of ‖U_h‖.

    Raises
    ------
    ValueError
        A number is out of range, or the number of heads exceeds float64.
    """
    found = required(margin, output, start_loss, bounds, checks.count(steps, "steps"), epsilon, n)
    if not found.heads < math.inf:
        raise ValueError(
            "data: expected a margin for which the number of heads is finite in float64, got "
            f"margin {margin:.4g} at loss {found.comparison.loss:.4g}"
        )
    near, distance = found.comparison.bounds, found.comparison.distance
    whole = int(found.heads)
    reach = math.sqrt(near.rows) * near.token_norm
    comparison = replace(
        found.comparison,
        bounds=replace(near, heads=whole),
        output=reach * (math.sqrt(whole) * readouts + 3 * distance),
    )
    lr = min(c.limit for c in comparison.conditions(1.0, steps)[1:])
    return NeededHeads(
        heads=found.heads,
        realizability_heads=found.of_realizability,
        training_heads=found.of_training,
        steps=steps,
        epsilon=comparison.loss,
        margin=margin,
        output=output,
        readout=bounds.readout,
        allowance=found.allowance,
        lr=lr,
        comparison=comparison,
    )


class Required(NamedTuple):
    """The numbers of heads that both theorems require of a start, infinite beyond float64."""

    of_realizability: float
    of_training: float
    allowance: float
    comparison: Comparison

    @property
    def heads(self) -> float:
        """The larger of both."""
        return max(self.of_realizability, self.of_training)


def required(
    margin: float,
    output: float,
    start_loss: float,
    bounds: CurvatureBounds,
    steps: int,
    epsilon: float | None,
    n: int,
) -> Required:
    """Return the numbers of heads that are required of a start of these properties."""
    loss = _loss(epsilon, steps)
    allowance = max(output, LEAST_ALLOWANCE)
    distance = math.sqrt(2) * (2 * allowance + math.log(1 / loss)) / margin
    near = _within(bounds, 3 * distance)
    comparison = Comparison(distance, start_loss, loss, 3 * distance, near, n, "proved", 0.0)
    condition = comparison.conditions(1.0, steps)[0]
    realizable = near.b3 * distance / (2 * allowance) * distance
    return Required(least_heads(realizable), least_heads(condition.limit), allowance, comparison)


def _within(bounds: CurvatureBounds, radius: float) -> CurvatureBounds:
    """Return the bounds in a ball about the model, in which ‖U_h‖ grows by its radius."""
    u = bounds.readout + radius
    reach = bounds.scale * bounds.query_norm * bounds.token_norm
    b1 = math.sqrt(bounds.rows) * bounds.token_norm * (reach * u + 1)
    return replace(bounds, readout=u, b1=b1)


def _loss(epsilon: float | None, steps: int) -> float:
    if epsilon is None:
        if steps < 2:
            raise ValueError("epsilon: expected a loss in (0, 1) for one step, got None")
        return 1 / steps
    if not 0.0 < checks.finite(epsilon, "epsilon") < 1.0:
        raise ValueError(f"epsilon: expected a loss in (0, 1), got {epsilon}")
    return float(epsilon)
