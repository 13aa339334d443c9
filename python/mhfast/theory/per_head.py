"""The training guarantee with radii of single heads, and the best comparator and step size for it.

With δ the largest distance of two tokens of one sample, and w = σ Rz δ u, u = max_h ‖U_h‖_F,

    b1² = q (Rx² + (σ Rz δ² u / 4)²)                      ‖∇Φ(X)‖ ≤ b1
    b3 = σ sqrt(q) Rz (δ²/8) (w/2 + sqrt(w²/4 + 4))        ‖∇²Φ(X)‖ ≤ b3 / sqrt(H)

are unaffected by what all tokens of a sample have in common, and do not depend on W.  The gradient
of the loss with respect to one U_h is at most sqrt(q) Rx L / sqrt(H), so that on the way of k steps

    ‖U_h - U_h(θ0)‖ ≤ r = sqrt(q/H) Rx (lr L(θ0) + c D0² / (2 - a)),

a fraction 1/sqrt(H) of the way of all heads together.  If there are a < 2 and c with

    κ c D0² / (1 - κ c D0²/8) ≤ a,    c ≥ 1 + (a lr L(θ0) + (2 + a) lr k L(θ*)) / D0²,

where κ = b3/sqrt(H) for u = max(max_h ‖U_h(θ0)‖ + r, max_h ‖U_h(θ*)‖), and lr ≤ 1/(b1²/4 + κ), then

    (1/k) Σ_{j=1..k} L(θ_j) ≤ ((2 + a) L(θ*) + (D0² + a lr L(θ0)) / (lr k)) / (2 - a)

and ‖θ_j - θ*‖² ≤ c D0² for all j ≤ k.  Proofs are in docs/theory.md.

The approach is that of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
Generalization of Multi-head Attention" (TMLR 2024), with constants of our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import Gradients, norm, value_and_grad
from ..models import Classifier
from .conditions import Condition, Guarantee
from .guarantees import ratio, same_family
from .inputs import classifier, largest_norm, norms, one_data_set, query_side, settled, spread
from .margin import ntk_margin
from .realizability import check_separable

LARGEST_CURVATURE = 1.6  # from here on a ≥ 2
# How much of the largest step size, and which losses in the tangent approximation, are tried.
FRACTIONS = 2.0 ** -np.arange(0.0, 8.0, 0.5)
LOSSES = np.geomspace(0.6, 1e-6, 61)


@dataclass(frozen=True)
class Sizes:
    """Sizes of data and start, from which the curvature bounds follow.

    Attributes
    ----------
    token_norm, query_norm, spread : float
        Rx, Rz and δ.
    rows, heads : int
        q and H.
    scale : float
        σ.
    readout : float
        max_h ‖U_h‖ at θ0.
    start_loss : float
        L(θ0).
    """

    token_norm: float
    query_norm: float
    spread: float
    rows: int
    heads: int
    scale: float
    readout: float
    start_loss: float

    def b1(self, readout: float) -> float:
        """Bound ‖∇Φ‖ where no head's ‖U_h‖ exceeds `readout`."""
        of_w = self.scale * self.query_norm * (self.spread**2 / 4) * readout
        return math.sqrt(self.rows) * math.hypot(self.token_norm, of_w)

    def b3(self, readout: float) -> float:
        """Bound sqrt(H) ‖∇²Φ‖ where no head's ‖U_h‖ exceeds `readout`."""
        half = self.scale * self.query_norm * self.spread * readout / 2
        size = self.scale * math.sqrt(self.rows) * self.query_norm * self.spread**2 / 8
        return size * (half + math.hypot(half, 2.0))


@dataclass(frozen=True)
class PerHeadBound:
    """The guarantee with radii of single heads, and what it is made of.

    Attributes
    ----------
    guarantee : Guarantee
        The bound of the average loss of steps 1 .. k with its conditions; its radius bounds how far
        all heads together get from θ0.
    lr : float
        The step size.
    heads : int
        H.
    distance, loss : float
        D0 and L(θ*) of the comparator.
    a, c : float
        As in the theorem, where its conditions are met.
    head_radius : float
        r: how far ‖U_h‖ of one head gets from θ0.
    b1, b3 : float
        The bounds of curvature on the way.

    Examples
    --------
    >>> import mhfast as mh
    >>> long = {"relevant_fraction": 0.5, "contexts": 1, "norm": 40.0}
    >>> data = mh.data.tokenized_mixture(20, 4, 8, **long, seed=0)
    >>> result = mh.theory.best_bound(data, 100, heads=2)
    >>> result.applies, bool(result.bound < 0.6)  # log 2 is the loss at the start
    (True, True)
    """

    guarantee: Guarantee
    lr: float
    heads: int
    distance: float
    loss: float
    a: float
    c: float
    head_radius: float
    b1: float
    b3: float

    @property
    def bound(self) -> float:
        """The bound of the average loss of steps 1 .. k."""
        return self.guarantee.bound

    @property
    def applies(self) -> bool:
        """Whether all conditions are met."""
        return self.guarantee.applies

    def __str__(self) -> str:
        return "\n".join(
            [
                f"H = {self.heads}, lr = {self.lr:.4g}; comparator of loss {self.loss:.4g} at "
                f"distance {self.distance:.4g}",
                f"b1 = {self.b1:.4g}, b3 = {self.b3:.4g}; U of a head gets no further than "
                f"{self.head_radius:.4g}",
                str(self.guarantee),
            ]
        )


def per_head_bound(
    start: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    comparator: Classifier,
    lr: float,
    steps: int,
) -> PerHeadBound:
    """Bound the average logistic loss of k steps of gradient descent, by radii of single heads.

    Parameters
    ----------
    start : Classifier
        θ0, with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset
    comparator : Classifier
        Any θ*; good ones are near and have a small loss.
    lr : float
        The constant step size, above 0.
    steps : int
        k, at least 1.

    Returns
    -------
    PerHeadBound

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape does not fit, start and comparator differ in more than W and U, a number is not
        finite, or `lr` or `steps` is not above 0.

    Examples
    --------
    >>> import mhfast as mh
    >>> long = {"relevant_fraction": 0.5, "contexts": 1, "norm": 40.0}
    >>> data = mh.data.tokenized_mixture(20, 4, 8, **long, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=200, seed=0, balanced=True)
    >>> there = mh.theory.realizability(start, data, epsilon=[0.06])
    >>> direction = there.start.tangent.direction
    >>> comparator = start + float(there.distance[0] / 2**0.5) * direction
    >>> given = {"comparator": comparator, "lr": 1e-12, "steps": 1000}
    >>> result = mh.theory.per_head_bound(start, data, **given)
    >>> result.applies, bool(result.bound < 0.5), result.head_radius < result.distance
    (True, True, True)
    """
    given = as_dataset(X, y)
    same_family(classifier(start, dense=True), classifier(comparator, dense=True))
    try:
        end, _, _ = settled(comparator, given, dense=True)
    except ValueError as error:
        raise ValueError(f"comparator: {error}") from error
    start, data, _ = settled(start, given, dense=True)
    change = {name: end.parameters[name] - x for name, x in start.parameters.items()}
    if not checks.finite(lr, "lr") > 0.0:
        raise ValueError(f"lr: expected a number above 0, got {lr}")
    return _bound(
        _sizes(start, data),
        distance=float(norm(Gradients(**change))),
        loss=float(value_and_grad(end, data)[0]),
        readout=float(norms(end.U, 2).max()),
        lr=float(lr),
        steps=checks.count(steps, "steps"),
    )


def best_bound(
    data: Dataset,
    steps: int,
    *,
    heads: int | None = None,
    start: Classifier | None = None,
    lr: float | None = None,
) -> PerHeadBound:
    """Return the least bound of `per_head_bound` over step sizes and comparators.

    The comparators tried are those along the tangent direction of the largest margin, with their
    own loss; the step sizes up to the largest allowed.

    Parameters
    ----------
    data : Dataset
        X (n, T, d), y (n,) of -1 and 1, without a run axis.
    steps : int
        k, at least 1.
    heads : int, optional
        An even H, for the random first step with balanced signs. No model of that many heads is
        formed: H heads of two kinds compute what two heads with U sqrt(H/2) times as large do.
    start : Classifier, optional
        θ0 in place of that, with dense W and no prompt.
    lr : float, optional
        The step size, if it is not to be optimized.

    Returns
    -------
    PerHeadBound
        If none applies, the one whose first condition is missed by least.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If not exactly one of `heads` and `start` is given, `heads` is odd, data have a run axis or
        numbers that are not finite, the tangent features do not separate them, or `lr` is not above
        0.

    Examples
    --------
    >>> import mhfast as mh
    >>> long = {"relevant_fraction": 0.5, "contexts": 1, "norm": 40.0}
    >>> data = mh.data.tokenized_mixture(20, 4, 8, **long, seed=0)
    >>> more, fewer = (mh.theory.best_bound(data, steps, heads=2) for steps in (1000, 100))
    >>> bool(more.bound < fewer.bound)  # of the average loss
    True
    """
    checks.instance(data, Dataset, "data")
    steps = checks.count(steps, "steps")
    if lr is not None and not checks.finite(lr, "lr") > 0.0:
        raise ValueError(f"lr: expected a number above 0, got {lr}")
    if (heads is None) == (start is None):
        raise ValueError("heads: expected either heads or start, got both or neither")
    return _best(_ray(data, start), steps, heads, lr)


def least_heads_below(data: Dataset, steps: int, *, below: float = math.log(2)) -> PerHeadBound:
    """Find the smallest even H for which `best_bound` is proved to be below a number.

    Parameters
    ----------
    data : Dataset
        X (n, T, d), y (n,) of -1 and 1, without a run axis.
    steps : int
        k, at least 1.
    below : float
        Above 0; log 2, the loss at the start, by default.

    Returns
    -------
    PerHeadBound
        For that H and balanced signs. Its `heads` is smallest among all even numbers if the best
        bound does not increase with H, which is so up to the resolution of the search.

    Raises
    ------
    ValueError
        If data are not as in `best_bound`, or no H up to 2**40 is enough, since the bound depends
        on the number of steps even for infinitely many heads.

    Examples
    --------
    >>> import mhfast as mh
    >>> long = {"relevant_fraction": 0.5, "contexts": 1, "norm": 40.0}
    >>> data = mh.data.tokenized_mixture(8, 4, 8, **long, seed=0)
    >>> least = mh.theory.least_heads_below(data, 100)
    >>> least.heads, least.applies
    (2, True)
    """
    checks.instance(data, Dataset, "data")
    steps = checks.count(steps, "steps")
    if not checks.finite(below, "below") > 0.0:
        raise ValueError(f"below: expected a number above 0, got {below}")
    ray = _ray(data, None)

    def enough(heads: int) -> bool:
        found = _best(ray, steps, heads)
        return found.applies and found.bound < below

    high = 2
    while not enough(high):
        high *= 4
        if high > 2**40:
            least = _best(ray, steps, high).bound
            raise ValueError(
                f"steps: expected enough of them for a bound below {below:.4g}, got {steps}, for "
                f"which it is {least:.4g} however many heads there are"
            )
    low = 0 if high == 2 else high // 4
    while high - low > max(2, low // 64 * 2):  # to 3 % where H is large
        middle = (low + high) // 4 * 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return _best(ray, steps, high)


@dataclass(frozen=True)
class _Ray:
    """A start, its direction of the largest margin, and the loss along it."""

    start: Classifier
    data: Dataset
    direction: Gradients
    margin: float
    sizes: Sizes

    def of(self, heads: int | None) -> tuple[Sizes, Callable[[float], tuple[float, float]]]:
        """Return the sizes for H heads, and (L, max_h ‖U_h‖) as a function of s."""
        more = 1.0 if heads is None else math.sqrt(heads / self.sizes.heads)
        sizes = replace(self.sizes, heads=self.sizes.heads if heads is None else heads)

        def at(s: float) -> tuple[float, float]:
            # Each of H heads moves by 1/`more` of what one of these does, and has U `more` times
            # as large here as there, so that the outputs agree.
            moved = self.start + (s / more) * self.direction
            together = replace(moved, U=more * moved.U)
            return float(value_and_grad(together, self.data)[0]), float(norms(moved.U, 2).max())

        return sizes, at


def _ray(data: Dataset, start: Classifier | None) -> _Ray:
    one_data_set(data)
    if start is None:
        start = Classifier.random_step(data, 2, seed=0, balanced=True)
    start, data, _ = settled(start, data, dense=True)
    tangent = ntk_margin(start, data)
    check_separable(tangent)
    return _Ray(start, data, tangent.direction, tangent.margin, _sizes(start, data))


def _best(ray: _Ray, steps: int, heads: int | None, lr: float | None = None) -> PerHeadBound:
    if heads is not None and (checks.count(heads, "heads") % 2):
        raise ValueError(f"heads: expected an even number for balanced signs, got {heads}")
    sizes, at = ray.of(heads)
    found = list(_tried(sizes, at, ray.margin, steps, lr))
    applying = [bound for bound in found if bound.applies]
    if applying:
        return min(applying, key=lambda bound: bound.bound)
    return max(found, key=lambda bound: bound.guarantee.conditions[0].factor)


def _tried(
    sizes: Sizes,
    at: Callable[[float], tuple[float, float]],
    margin: float,
    steps: int,
    fixed: float | None,
) -> Iterator[PerHeadBound]:
    for s in np.log(1 / LOSSES) / margin:
        loss, readout = at(float(s))
        rest = {"distance": math.sqrt(2) * float(s), "loss": loss, "readout": readout}
        if fixed is not None:
            yield _bound(sizes, lr=fixed, steps=steps, **rest)
            continue
        u = max(sizes.readout, readout)
        lr = 1.0 / (sizes.b1(u) ** 2 / 4 + sizes.b3(u) / math.sqrt(sizes.heads))
        for fraction in FRACTIONS:
            bound = _bound(sizes, lr=fraction * lr, steps=steps, **rest)
            for _ in range(8):  # heads grow on the way: a shorter step
                rate = bound.guarantee.conditions[1]
                if rate.met or not bound.guarantee.conditions[0].met:
                    break
                bound = _bound(sizes, lr=rate.limit * (1 - 1e-6), steps=steps, **rest)
            yield bound


def _bound(
    sizes: Sizes, *, distance: float, loss: float, readout: float, lr: float, steps: int
) -> PerHeadBound:
    """Return the bound from the least a and c that satisfy the two inequalities."""
    square, root = distance * distance, math.sqrt(sizes.heads)
    before, after = lr * sizes.start_loss, lr * steps * loss
    a, curvature, settled_down = 0.0, math.inf, False
    c = grown = radius = b1 = b3 = math.inf
    for _ in range(500):
        grown = square + a * before + (2 + a) * after  # c D0²
        radius = math.sqrt(sizes.rows) * sizes.token_norm * (before + grown / (2 - a)) / root
        u = max(sizes.readout + radius, readout)
        c, b1, b3 = ratio(grown, square), sizes.b1(u), sizes.b3(u)
        curvature = b3 / root * grown
        if not curvature < LARGEST_CURVATURE:
            break
        needed = curvature / (1 - curvature / 8)
        if needed <= a:
            settled_down = True
            break
        a = needed * (1 + 1e-6)
        if not a < 2.0:
            break
    else:
        curvature = math.nan  # not settled: nothing can be said
    if not settled_down and curvature < LARGEST_CURVATURE:
        curvature = LARGEST_CURVATURE * (1 + 1e-6)
    bound = math.inf
    if settled_down:
        bound = ((2 + a) * loss + (square + a * before) / (lr * steps)) / (2 - a)
    conditions = (
        Condition("κ c D0² ≤ 8/5", curvature, LARGEST_CURVATURE, False),
        Condition("lr ≤ 1/(b1²/4 + κ)", lr, ratio(1.0, b1 * b1 / 4 + b3 / root), False),
    )
    reach = distance + math.sqrt(grown)
    guarantee = Guarantee(
        "average training loss of steps 1 .. k", "proved", bound, sizes.start_loss, conditions,
        distance, reach,
    )  # fmt: skip
    return PerHeadBound(guarantee, lr, sizes.heads, distance, loss, a, c, radius, b1, b3)


def _sizes(start: Classifier, data: Dataset) -> Sizes:
    return Sizes(
        token_norm=largest_norm(data.X),
        query_norm=largest_norm(query_side(start, data)),
        spread=spread(data),
        rows=int(start.U.shape[1]),
        heads=start.heads,
        scale=abs(start.scale),
        readout=float(norms(start.U, 2).max()),
        start_loss=float(value_and_grad(start, data)[0]),
    )
