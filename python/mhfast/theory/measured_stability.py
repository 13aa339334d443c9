"""On-average stability from curvature measured along the trajectory, without a condition on H.

Let θ_j be the steps of gradient descent on L, and θ_j^(-i) those on L^(-i) = (1/n) Σ_{l≠i} ℓ_l.
With the bounds of `mhfast.theory.measured_curvature`, at θ_j or at an earlier step s_j behind, let

    λ_ij ≤ ∇²L^(-i) ≤ Λ_ij  within s_j + Δ_ij of where curvature was measured,
    Δ_i0 = 0,    Δ_i,j+1 = max(1 - lr λ_ij, lr Λ_ij - 1) Δ_ij + (lr/n) ‖∇ℓ_i(θ_j)‖.

Then ‖θ_j - θ_j^(-i)‖ ≤ Δ_ij for all j.  With a_i(Δ) the bound of |Φ_i - Φ_i(θ_k)| within Δ of θ_k,

    (1/n) Σ_i ℓ_i(θ_k^(-i)) - L(θ_k) ≤ S = (1/n) Σ_i (ℓ(m_i - a_i(Δ_ik)) - ℓ(m_i)),
    E[L_test(θ_k) - L(θ_k)] ≤ E[S + (1/n) Σ_i b1 Δ_ik],
    E[ω L_test(θ_k)] ≤ E[L(θ_k) + S],    ω = (1/n) Σ_i exp(-b1 Δ_ik),

b1 the bound of ‖∇Φ‖ within Δ_ik of θ_k for all samples of the population; expectations are over
samples on which θ0, lr and k do not depend.  There are no conditions: where the recursion grows
without bound, S is infinite.  The proof is in docs/theory.md.

That stability bounds generalization here is the approach of Deora, Ghaderi, Taheri,
Thrampoulidis, "On the Optimization and Generalization of Multi-head Attention" (TMLR 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..models import Classifier
from ..optimizers import GradientDescent
from ..training.train import train
from .inputs import largest_norm, norms, query_side, settled
from .measured_curvature import LocalCurvature, measured, outputs, second, spreads
from .per_head import Sizes
from .trajectory import losses_and_gradients


@dataclass(frozen=True, eq=False)
class LocalStability:
    """The bound of the on-average stability by measured curvature.

    Attributes
    ----------
    bound : float
        S; infinite if the recursion grows without bound.
    gap : float
        S + (1/n) Σ_i b1 Δ_ik, whose expectation bounds that of test loss minus training loss, for a
        start, a step size and a number of steps that were not chosen by means of the samples.
    kept : float
        ω.
    trivial : float
        The largest loss that a sample can have at the θ_k^(-i), or at θ_k if `bound` is infinite.
    displacements : array (n,)
        Δ_ik.
    growth : float
        The largest product over the steps of the factors of a sample.
    train_loss : float
        L(θ_k).

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, norm=0.2, seed=0)
    >>> start = mh.Classifier.random_step(data, 2, seed=0)
    >>> found = mh.theory.local_stability(start, data, lr=2.0, steps=20)
    >>> found.bound < found.gap < 0.6931, found.vacuous
    (True, False)
    >>> bool(found.test_loss > found.train_loss)
    True
    """

    bound: float
    gap: float
    kept: float
    trivial: float
    displacements: Array
    growth: float
    train_loss: float

    @property
    def test_loss(self) -> float:
        """(L(θ_k) + S) / ω, which bounds the test loss where ω is the same for all draws."""
        return (self.train_loss + self.bound) / self.kept if self.kept > 0.0 else math.inf

    @property
    def vacuous(self) -> bool:
        """Whether the bound says no more than what is known without it."""
        return not self.bound < self.trivial

    def __str__(self) -> str:
        lines = [
            f"training loss {self.train_loss:.4g}; a sample moves the end by "
            f"{float(np.max(self.displacements)):.4g} at most",
            f"mean loss on left-out samples - training loss ≤ {self.bound:.4g}",
            f"  test loss ≤ {self.test_loss:.4g}, weighted over draws by a factor of "
            f"{self.kept:.4g} here",
            f"  steps multiply a difference by {self.growth:.4g} at most",
        ]
        if self.vacuous:
            lines.append(f"  vacuous: not below {self.trivial:.4g}, which is known anyway")
        return "\n".join(lines)


def local_stability(
    start: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    lr: float,
    steps: int,
    every: int = 1,
    num_threads: int | None = None,
) -> LocalStability:
    """Train by gradient descent, and bound what leaving out a sample would have changed.

    Parameters
    ----------
    start : Classifier
        θ0, with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset without weights
    y : array (n,) of -1 and 1, None with a Dataset
    lr : float
        The constant step size, above 0.
    steps : int
        k, at least 1.
    every : int
        The curvature is measured at every so many steps; in between it is enclosed in larger balls.
    num_threads : int, optional
        Threads for the training, in place of the default.

    Returns
    -------
    LocalStability

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape does not fit, a number is not finite, samples are weighted, data have a run axis,
        or `lr`, `steps` or `every` is not above 0.

    Notes
    -----
    One training, the gradient of every sample at every step, k n H (q T d + q² d) operations, and
    at every measurement the extreme eigenvalues of H matrices of d² + q d rows.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, norm=0.2, seed=0)
    >>> start = mh.Classifier.random_step(data, 2, seed=0)
    >>> close = mh.theory.local_stability(start, data, lr=2.0, steps=20)
    >>> coarse = mh.theory.local_stability(start, data, lr=2.0, steps=20, every=5)
    >>> close.growth < coarse.growth
    True
    """
    given = as_dataset(X, y)
    if given.runs is not None:
        raise ValueError(f"X: expected one data set, as X.run(0) is, got {given.runs} runs")
    if given.weight is not None:
        raise ValueError("weight: expected None, since leaving out a sample has no weight, got one")
    if not checks.finite(lr, "lr") > 0.0:
        raise ValueError(f"lr: expected a number above 0, got {lr}")
    steps, every = checks.count(steps, "steps"), checks.count(every, "every")
    model, data, _ = settled(start, given, dense=True)
    distances = spreads(data)
    moved, growth = np.zeros(data.n), np.ones(data.n)
    last: LocalCurvature | None = None
    at, end = model, model

    def measure(step: int, reached: Classifier) -> None:
        nonlocal last, at, end, moved, growth
        end = reached
        if step == steps:
            return
        _, gradients, slopes = losses_and_gradients(reached, data)
        if step % every == 0:
            last, at = measured(reached, data, gradients, distances), reached
        assert last is not None
        factor = _factors(last, _distance(reached, at) + moved, lr)
        with np.errstate(over="ignore", invalid="ignore"):
            moved = np.where(moved > 0.0, factor * moved, 0.0) + (lr / data.n) * slopes * gradients
            growth = growth * factor

    train(
        model, data, steps=steps, optimizer=GradientDescent(lr), callback=measure,
        num_threads=num_threads,
    )  # fmt: skip
    return _bound(end, data, distances, moved, float(growth.max()))


def _distance(first: Classifier, second: Classifier) -> float:
    parts = (first.parameters[name] - x for name, x in second.parameters.items())
    return math.hypot(*(float(norms(np.ravel(part), 1)) for part in parts))


def _factors(around: LocalCurvature, within: Array, lr: float) -> Array:
    """Return by how much a step on L^(-i) multiplies a difference at most (n,)."""
    here = np.zeros(len(around.slopes))
    own = around.weights * around.slopes * second(around, here)  # ‖N - N^(-i)‖
    lowest = around.smallest(within) - own
    highest = around.largest(within) + own
    return np.maximum(1.0 - lr * lowest, lr * highest - 1.0)


def _bound(
    end: Classifier, data: Dataset, distances: Array, moved: Array, growth: float
) -> LocalStability:
    losses, gradients, _ = losses_and_gradients(end, data)
    around = measured(end, data, gradients, distances)
    token = largest_norm(data.X)
    sizes = Sizes(
        token_norm=token,
        query_norm=largest_norm(query_side(end, data)),
        spread=float(distances.max()),
        rows=around.rows,
        heads=around.heads,
        scale=abs(end.scale),
        readout=around.readout,
        start_loss=math.nan,
    )
    far = float(moved.max())
    if not math.isfinite(far):
        bound = gap = math.inf
        kept = far = 0.0
    else:
        margins = np.asarray(data.y, np.float64) * end(data)
        lower = np.logaddexp(0.0, outputs(around, moved) - margins)
        bound = float(np.mean(lower - losses))
        each = np.array([sizes.b1(around.readout + float(r)) * float(r) for r in moved])
        gap, kept = bound + float(np.mean(each)), float(np.mean(np.exp(-each)))
    output = math.sqrt(around.rows) * token * (float(norms(end.U, 3)) + far)
    trivial = float(np.logaddexp(0.0, output))
    return LocalStability(bound, gap, kept, trivial, moved, growth, float(np.mean(losses)))
