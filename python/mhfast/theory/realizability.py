"""Realizability: the distance from an initialization at which a given loss is reached.

With γ the tangent margin at θ0, θ* its direction of norm sqrt(2), BΦ = max_i |Φ(X_i; θ0)| and any
B ≥ BΦ, B > 0, the point

    θ(ε) = θ0 + s θ*,   s = (2B + log(1/ε)) / γ,

has L ≤ ε once sqrt(H) ≥ s² ‖θ*‖² b3 / (2B), where b3 bounds the curvature on the segment
(`mhfast.theory.bounds`).  So g0(ε) = sqrt(2) s bounds the distance of a point of loss ε, and
g(ε) = s max_h ‖θ*_h‖ that of its heads.  (Proved: the margin along the segment is at least
-BΦ + s γ - s² ‖θ*‖² b3 / (2 sqrt(H)).)

The notion is that of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization
of Multi-head Attention" (TMLR 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import Gradients, value_and_grad
from ..models import Classifier
from ..training.run import Run
from .bounds import curvature_bounds
from .conditions import heads_missed, least_heads
from .inputs import settled
from .margin import GoodInitialization, TangentMargin, good_initialization, head_norms
from .runs import over_runs

# Candidates for B, as multiples of the larger of BΦ and `SMALL`.
ALLOWANCES = np.geomspace(1.0, 1e6, 601)
SMALL = 1e-3


@dataclass(frozen=True, eq=False)
class Realizability:
    """The tangent construction at losses ε_1, ..., ε_m; arrays are float64 (m,).

    Attributes
    ----------
    epsilon : array
    distance : array
        g0(ε), the distance of θ(ε) from θ0.
    head_distance : array
        g(ε), the largest distance of a head.
    loss : array
        The loss at θ(ε), measured.
    heads_factor : array
        sqrt(H) over the value that the condition requires, for the B that requires least if none
        meets it.
    heads_needed : array
        The smallest H that meets the condition, all else equal: with the B that requires least.
    start : GoodInitialization
        B2, BΦ, γ and the direction.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=16, seed=0)
    >>> found = mh.theory.realizability(start, data, epsilon=[0.5, 0.1])
    >>> bool((found.met == (found.heads_needed <= 16)).all())
    True
    """

    epsilon: Array
    distance: Array
    head_distance: Array
    loss: Array
    heads_factor: Array
    heads_needed: Array
    start: GoodInitialization

    @property
    def met(self) -> npt.NDArray[np.bool_]:
        """Where the condition on H is met, so that loss ≤ ε is guaranteed."""
        return self.heads_factor >= 1.0

    def __str__(self) -> str:
        lines = ["      loss   distance   measured  sqrt(H)/needed  condition on H"]
        columns = (self.epsilon, self.distance, self.loss, self.heads_factor, self.heads_needed)
        for row in zip(*map(np.ravel, columns), strict=True):
            met = "met" if row[3] >= 1.0 else heads_missed(row[4], row[3])
            lines.append("{:10.3g} {:10.4g} {:10.3g} {:15.3g}".format(*row[:4]) + f"  {met}")
        return "\n".join(lines)


@over_runs
def realizability(
    model: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    epsilon: Sequence[float] | npt.NDArray[np.floating],
) -> Realizability:
    """Follow the tangent direction of the largest margin until the loss is ε.

    B is the smallest for which the condition on H holds. If there is none, nothing is guaranteed; B
    is then BΦ (at least 1e-3), and only the measured loss shows what is reached.

    Parameters
    ----------
    model : Classifier
        θ0, with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset
    epsilon : sequence of float
        Losses in (0, 1).

    Returns
    -------
    Realizability

    Raises
    ------
    ValueError
        A loss is not in (0, 1), a number is not finite, or the tangent features do not separate
        the data, so that the construction does not exist.

    Notes
    -----
    The construction bounds the loss of every sample of positive weight by ε, and so their mean with
    any weights, which is the loss that is measured.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=16, seed=0)
    >>> found = mh.theory.realizability(start, data, epsilon=[0.5, 0.1])
    >>> bool(found.distance[0] < found.distance[1])  # a smaller loss lies further away
    True
    >>> (found.loss <= found.epsilon).tolist(), found.met.tolist()  # measured; guaranteed
    ([True, True], [False, False])
    """
    model, data, _ = settled(model, as_dataset(X, y), dense=True)
    targets = _targets(epsilon)
    start = good_initialization(model, data)
    check_separable(start.tangent)
    direction = start.tangent.direction
    steps, factors, heads = np.array(
        [_step(model, data, start, float(e)) for e in targets]
    ).reshape(-1, 3).T  # fmt: skip
    return Realizability(
        epsilon=targets,
        distance=math.sqrt(2) * steps,
        head_distance=steps * head_norms(_arrays(direction)).max(),
        loss=np.array([value_and_grad(model + float(s) * direction, data)[0] for s in steps]),
        heads_factor=factors,
        heads_needed=heads,
        start=start,
    )


def check_separable(tangent: TangentMargin) -> None:
    """Raise ValueError unless the tangent features separate the data."""
    if tangent.separable:
        return
    proof = (
        "ntk_margin(model, X, y).weights is the certificate"
        if tangent.inseparable
        else f"rounding hides what is below {2 * tangent.resolution:.2g}"
    )
    raise ValueError(
        f"model: expected tangent features that separate the data, got margin 0; {proof}"
    )


def travelled(
    run: Run,
    epsilon: Sequence[float] | npt.NDArray[np.floating],
    *,
    per_head: bool = False,
) -> Array:
    """Compute the distance from the initialization at which the loss of a run first was at most ε.

    Parameters
    ----------
    run : Run
        With "loss" and "distance" recorded at the same steps, from step 0 on; for `per_head` with
        "loss", "W" and "U".
    epsilon : sequence of float
    per_head : bool
        The largest distance of a single head, max_h ‖θ_h - θ0_h‖, instead of that of all heads
        together, to be compared with `Realizability.head_distance`.

    Returns
    -------
    float64 array (m,), (R, m) with a run axis: NaN where training did not reach ε.

    Raises
    ------
    ValueError
        The run does not have these records.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> record = ("loss", "distance")
    >>> run = mh.train(start, data, steps=200, optimizer=mh.GradientDescent(2.0), record=record)
    >>> far = mh.theory.travelled(run, [0.5, 0.1, 1e-9])
    >>> bool(far[0] < far[1]), bool(np.isnan(far[2]))  # training did not reach 1e-9
    (True, True)
    """
    checks.instance(run, Run, "run")
    targets = _targets(epsilon)
    names = ("W", "U") if per_head else ("distance",)
    steps = run.steps
    if not {"loss", *names} <= steps.keys() or any(
        not np.array_equal(steps["loss"], steps[name]) for name in names
    ):
        raise ValueError(f"run: expected loss and {', '.join(names)} recorded at the same steps")
    loss = run.history["loss"]
    distance = _largest_of_heads(run) if per_head else run.history["distance"]
    reached = loss[..., None, :] <= targets[:, None]
    first = np.take_along_axis(distance, reached.argmax(axis=-1), axis=-1)
    return np.where(reached.any(axis=-1), first, np.nan)


def _largest_of_heads(run: Run) -> Array:
    """Return max_h of the distance of head h from its start, a number for each recorded step."""
    from_first = run.runs is not None  # the axis of steps is behind that of runs
    squares = 0.0
    for name in ("W", "U"):
        path = np.moveaxis(run.history[name], int(from_first), 0).astype(np.float64)
        squares = squares + ((path - path[0]) ** 2).sum(axis=(-2, -1))
    largest: Array = np.moveaxis(np.sqrt(squares).max(axis=-1), 0, int(from_first))
    return largest


def _step(
    model: Classifier, data: Dataset, start: GoodInitialization, epsilon: float
) -> tuple[float, float, float]:
    """Return s, the factor by which the condition on H is met, and the H that would meet it."""
    B = max(start.output, SMALL) * ALLOWANCES
    s = (2 * B + math.log(1 / epsilon)) / start.margin
    U = start.tangent.direction.U
    assert U is not None  # the margin was taken over all parameters
    here = curvature_bounds(model, data)
    # The readout's norm grows along the segment by at most s ‖θ*_h‖.  Factors are multiplied in an
    # order in which they stay moderate for tokens of any size.
    reach = here.scale * here.query_norm * here.token_norm
    readout = here.readout + s * float(head_norms([U]).max())
    needed = math.sqrt(here.rows) * (s * reach) * (s * here.token_norm / B)
    with np.errstate(over="ignore"):
        needed = needed * (2 * reach * readout + 1)
        factors = math.sqrt(model.heads) / needed if needed.all() else np.full_like(B, math.inf)
    at = int(np.argmax(factors >= 1.0))  # 0 if there is none
    met = bool(factors[at] >= 1.0)
    return float(s[at]), float(factors[at] if met else factors.max()), least_heads(needed.min())


def _targets(epsilon: Sequence[float] | npt.NDArray[np.floating]) -> Array:
    targets: Array = np.asarray(epsilon, dtype=np.float64)
    if targets.ndim != 1 or not targets.size or not ((targets > 0.0) & (targets < 1.0)).all():
        raise ValueError(f"epsilon: expected a sequence of losses in (0, 1), got {epsilon!r:.80}")
    return targets


def _arrays(g: Gradients) -> list[Array]:
    return [x for x in (g.W, g.U) if x is not None]
