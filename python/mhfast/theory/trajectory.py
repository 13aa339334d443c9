"""On-average stability, bounded along a trajectory that was computed.

The theorem of `mhfast.theory.per_head` says where training goes: with κ = b3/sqrt(H), ρ = b1²/4 +
κ, G = c D0² and its conditions met, θ_j and every θ_j^(-i), trained on (1/n) Σ_{l≠i} ℓ_l, stay in a
convex set R of these curvatures, within sqrt(G) of θ*.  What happens there is measured instead of
bounded: with S_L = lr Σ_{j<k} L(θ_j) and g_ij = ‖∇ℓ_i(θ_j)‖ along the trajectory,

    growth = exp(κ (S_L + lr L(θ0) + G/(2 - a)) / (1 - κG/2))
    Δ_i    = growth (lr/n) Σ_{j<k} g_ij            ‖θ_k - θ_k^(-i)‖ ≤ Δ_i
    S      = (1/n) Σ_i (g_ik Δ_i + ρ Δ_i²/2)       (1/n) Σ_i ℓ_i(θ_k^(-i)) - L(θ_k) ≤ S.

The proof is in docs/theory.md.  S is for these samples; where the conditions hold for all, and θ0,
lr and k do not depend on them,

    E[L_test(θ_k) - L(θ_k)] ≤ E[S + (b1/n) Σ_i Δ_i].

The approach is that of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
Generalization of Multi-head Attention" (TMLR 2024), with constants of our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..models import Classifier
from ..optimizers import GradientDescent
from ..training.train import train
from .conditions import Guarantee
from .inputs import largest_norm, norms, query_side, settled
from .layer_kernel import score_gradient
from .per_head import PerHeadBound, per_head_bound

BLOCK = 1 << 22  # numbers of one block of weights, 32 MiB


@dataclass(frozen=True, eq=False)
class TrajectoryStability:
    """The bound of the on-average stability, and what it is made of.

    Attributes
    ----------
    guarantee : Guarantee
        S, with the conditions.
    training : PerHeadBound
        The theorem about the trajectory, with a, c, b1 and b3.
    growth : float
        The largest factor by which the steps increase a difference.
    displacements : array (n,)
        Δ_i.
    train_loss : float
        L(θ_k), measured.
    mean_loss : float
        (1/k) Σ_{j=1..k} L(θ_j), measured.

    Examples
    --------
    >>> import mhfast as mh
    >>> settings = dict(relevant_fraction=0.5, contexts=1, norm=40.0)
    >>> data = mh.data.tokenized_mixture(60, 4, 5, **settings, seed=0)
    >>> start = mh.Classifier.random_step(data, 20, seed=0, balanced=True)
    >>> best = mh.theory.best_bound(data, 100, start=start)
    >>> tangent = mh.theory.ntk_margin(start, data).direction
    >>> comparator = start + (best.distance / 2**0.5) * tangent
    >>> found = mh.theory.trajectory_stability(
    ...     start, data, comparator=comparator, lr=best.lr, steps=100
    ... )
    >>> found.applies, found.bound < found.gap < 0.6931
    (True, True)
    """

    guarantee: Guarantee
    training: PerHeadBound
    growth: float
    displacements: Array
    train_loss: float
    mean_loss: float

    @property
    def bound(self) -> float:
        """S."""
        return self.guarantee.bound

    @property
    def applies(self) -> bool:
        """Whether all conditions are met."""
        return self.guarantee.applies

    @property
    def gap(self) -> float:
        """S + b1 Δ, whose expectation bounds that of test loss minus training loss.

        For a start, a step size and a number of steps that were not chosen by means of the samples.
        """
        return self.bound + self.training.b1 * float(np.mean(self.displacements))

    def __str__(self) -> str:
        return "\n".join(
            [
                f"training loss {self.train_loss:.4g} by steps of {self.training.lr:.4g}; a sample "
                f"moves the end by {float(np.max(self.displacements)):.4g} at most",
                str(self.guarantee),
            ]
        )


def trajectory_stability(
    start: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    comparator: Classifier,
    lr: float,
    steps: int,
    num_threads: int | None = None,
) -> TrajectoryStability:
    """Train by gradient descent, and bound what leaving out a sample would have changed.

    Parameters
    ----------
    start : Classifier
        θ0, with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset without weights
    y : array (n,) of -1 and 1, None with a Dataset
    comparator : Classifier
        Any θ*; good ones are near and have a small loss.
    lr : float
        The constant step size, above 0.
    steps : int
        k, at least 1.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    TrajectoryStability

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If an argument does not fit, as in `per_head_bound`, or samples are weighted.

    Notes
    -----
    One training, and the gradient of every sample at every step, in NumPy: k n H (q T d + q² d)
    operations.

    Examples
    --------
    >>> import mhfast as mh
    >>> settings = dict(relevant_fraction=0.5, contexts=1, norm=40.0)
    >>> data = mh.data.tokenized_mixture(60, 4, 5, **settings, seed=0)
    >>> start = mh.Classifier.random_step(data, 20, seed=0, balanced=True)
    >>> best = mh.theory.best_bound(data, 200, start=start)
    >>> tangent = mh.theory.ntk_margin(start, data).direction
    >>> comparator = start + (best.distance / 2**0.5) * tangent
    >>> found = mh.theory.trajectory_stability(
    ...     start, data, comparator=comparator, lr=best.lr, steps=200
    ... )
    >>> found.applies
    True
    """
    given = as_dataset(X, y)
    if given.weight is not None:
        raise ValueError("weight: expected None, since leave-one-out has no weights, got an array")
    training = per_head_bound(start, given, comparator=comparator, lr=lr, steps=steps)
    model, data, _ = settled(start, given, dense=True)
    sums, losses, last = np.zeros(data.n), np.zeros(steps + 1), np.zeros(data.n)

    def measure(step: int, reached: Classifier) -> None:
        each, gradients, slopes = losses_and_gradients(reached, data)
        losses[step], last[:] = float(np.mean(each)), slopes * gradients
        if step < steps:
            sums[:] += last

    train(
        model, data, steps=steps, optimizer=GradientDescent(lr), callback=measure,
        num_threads=num_threads,
    )  # fmt: skip
    rows, token = int(model.U.shape[1]), largest_norm(data.X)
    output = math.sqrt(rows) * token * (float(norms(model.U, 3)) + training.guarantee.radius)
    return _bound(training, sums, losses, last, output)


def losses_and_gradients(model: Classifier, data: Dataset) -> tuple[Array, Array, Array]:
    """Return ℓ_i, ‖∇Φ_i‖ and -ℓ'(m_i) of every sample (n,)."""
    margins, gradients = np.empty(data.n), np.empty(data.n)
    Z = query_side(model, data)
    most = max(1, BLOCK // (model.heads * Z.shape[1] * data.tokens))
    for begin in range(0, data.n, most):
        part = np.arange(begin, min(begin + most, data.n))
        block = data.subset(part)
        margins[part] = block.y * model(block)
        gradients[part] = _gradient_norms(model, block, Z[part])
    return np.logaddexp(0.0, -margins), gradients, np.exp(-np.logaddexp(0.0, margins))


def _gradient_norms(model: Classifier, data: Dataset, Z: Array) -> Array:
    """Return ‖∇Φ(X_i)‖ (n,): ∂Φ/∂U_h = A X / sqrt(H), ∂Φ/∂W_h = scale Zᵀ D X / sqrt(H)."""
    A = model.attention(data)  # (n, H, q, T)
    tokens = data.X[:, None]
    pooled = A @ tokens
    C = model.U @ tokens.transpose(0, 1, 3, 2)
    moved = score_gradient(A, C) @ tokens
    alike = (Z @ Z.transpose(0, 2, 1))[:, None]  # ‖Zᵀ M‖² = Σ_ts ⟨z_t, z_s⟩ ⟨m_t, m_s⟩
    of_W = np.sum(alike * (moved @ moved.transpose(0, 1, 3, 2)), axis=(1, 2, 3))
    of_U = np.sum(pooled * pooled, axis=(1, 2, 3))
    squares = of_U + model.scale**2 * np.maximum(of_W, 0.0)
    return np.asarray(np.sqrt(squares / model.heads))


def _bound(
    training: PerHeadBound, sums: Array, losses: Array, last: Array, output: float
) -> TrajectoryStability:
    n, lr = len(sums), training.lr
    kappa = training.b3 / math.sqrt(training.heads)
    reach = training.c * training.distance * training.distance  # G
    growth = math.inf
    if training.applies:  # κG ≤ 8/5 and a < 2
        path = lr * float(np.sum(losses[:-1])) + lr * losses[0] + reach / (2.0 - training.a)
        growth = math.exp(kappa * path / (1.0 - kappa * reach / 2))
    moved = growth * (lr / n) * sums
    rho = training.b1**2 / 4 + kappa
    bound = float(np.mean(last * moved + rho / 2 * moved * moved)) if training.applies else math.inf
    guarantee = Guarantee(
        "mean loss on left-out samples - training loss", "proved", bound,
        float(np.logaddexp(0.0, output)), training.guarantee.conditions, training.distance,
        training.guarantee.radius,
    )  # fmt: skip
    mean = float(np.mean(losses[1:]))
    return TrajectoryStability(guarantee, training, growth, moved, float(losses[-1]), mean)
