"""What theory guarantees about training and generalization, with its conditions one by one.

For any comparator θ*, with D0 = ‖θ* - θ0‖, b1, b3 and ρ = b1²/4 + b3/sqrt(H) the bounds of
`mhfast.theory.bounds` in the ball of radius 3 D0 about θ0, and full-batch gradient descent of
constant step lr on the logistic loss L of n samples, let

    sqrt(H) ≥ (64/7) b3 D0²,   lr ≤ 1/ρ,   lr ≤ D0²/(k L(θ*)),   lr ≤ D0²/L(θ0).

Then (proved in docs/theory.md, with constants of our own)

    training        (1/k) Σ_{j=1..k} L(θ_j) ≤ (5/3) L(θ*) + D0²/(lr k),  all θ_j within 3 D0 of θ0;
    stability       (1/n) Σ_i ℓ_i(θ_k^(-i)) - L(θ_k) ≤ S,
                    S = (e b1²/n) ((5/3) lr k L(θ*) + D0² + lr L(θ0));
    generalization  E[L_test(θ_k) - L(θ_k)] ≤ 2 E[S] if the conditions hold for every sample,
                    for θ0, lr and k that do not depend on the sample.

θ^(-i) is trained in the same way on (1/n) Σ_{j≠i} ℓ_j, and e = exp((22/3) x / (1 - 2x)) ≤ 2.8,
x = b3 D0²/sqrt(H) ≤ 7/64, bounds how much the steps increase the distance of two training runs.

The approach is that of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
Generalization of Multi-head Attention" (TMLR 2024), whose own constants, recalled, not derived or
quoted, are available as constants="recalled".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import Gradients, norm, value_and_grad
from ..models import Classifier
from .bounds import CONSTANTS, CurvatureBounds, curvature_bounds
from .conditions import Condition, Guarantee
from .inputs import classifier, settled


@dataclass(frozen=True)
class Comparison:
    """The quantities of an initial model and a comparator on which the guarantees depend.

    Attributes
    ----------
    distance : float
        D0 = ‖θ* - θ0‖.
    start_loss, loss : float
        L(θ0) and L(θ*).
    radius : float
        Radius of the ball in which `bounds` hold, 3 D0, or 4 D0 with "recalled".
    bounds : CurvatureBounds
        The bounds of gradient and Hessian in that ball.
    n : int
        The number of samples.
    constants : {"proved", "recalled"}
        "recalled": the constants are recalled, not derived or quoted.
    output : float
        sqrt(q) Rx (‖U0‖ + `radius`): no |Φ| is larger in the ball for tokens of norm Rx or less.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> target = mh.train(start, data, steps=50, optimizer=mh.GradientDescent(1.0)).model
    >>> both = mh.theory.compare(start, data, comparator=target)
    >>> both.loss < both.start_loss < both.largest_loss
    True
    >>> sum(not condition.met for condition in both.conditions(lr=0.01, steps=50)) > 0
    True
    >>> [part(0.01, 50).applies for part in (both.training, both.stability, both.generalization)]
    [False, False, False]
    """

    distance: float
    start_loss: float
    loss: float
    radius: float
    bounds: CurvatureBounds
    n: int
    constants: str
    output: float

    @property
    def largest_loss(self) -> float:
        """What no sample's loss exceeds in the ball, from tokens and readouts alone."""
        return float(np.logaddexp(0.0, self.output))

    def conditions(self, lr: float, steps: int) -> tuple[Condition, ...]:
        """Return the conditions on H and lr for a number of steps.

        Parameters
        ----------
        lr : float
            The constant step size, above 0.
        steps : int
            The number k of steps, at least 1.

        Returns
        -------
        tuple of Condition
            Where the constants are recalled, not derived or quoted, the condition on H has an
            unknown factor.

        Raises
        ------
        TypeError
            If `lr` is not a number or `steps` not an integer.
        ValueError
            If `lr` is not above 0, or `steps` is below 1.
        """
        lr, steps = _settings(lr, steps)
        root, D0 = math.sqrt(self.bounds.heads), self.distance
        if self.constants == "proved":
            # The products of two in this order: neither over- nor underflows where the whole fits.
            enough = 64 / 7 * (self.bounds.b3 * D0) * D0
            heads = Condition("sqrt(H) ≥ (64/7) b3 D0²", root, enough, True, True)
        else:
            heads = Condition("sqrt(H) ≥ D0³ (factor unknown)", root, D0 * D0 * D0, True)
        return (
            heads,
            Condition("lr ≤ 1/ρ", lr, ratio(1.0, self.bounds.hessian), False),
            Condition("lr ≤ D0²/(k L(θ*))", lr, ratio(D0, steps * self.loss) * D0, False),
            Condition("lr ≤ D0²/L(θ0)", lr, ratio(D0, self.start_loss) * D0, False),
        )

    def training(self, lr: float, steps: int) -> Guarantee:
        """Bound the average loss of steps 1 .. k.

        Without the theory, but with lr ≤ 1/ρ, descent alone bounds it by L(θ0).

        Parameters
        ----------
        lr : float
            The constant step size, above 0.
        steps : int
            The number k of steps, at least 1.

        Returns
        -------
        Guarantee
            With its conditions. Its constants are those of `constants`: proved, or recalled, not
            derived or quoted.

        Raises
        ------
        TypeError
            If `lr` is not a number or `steps` not an integer.
        ValueError
            If `lr` is not above 0, or `steps` is below 1.
        """
        lr, steps = _settings(lr, steps)
        distance_term = self.distance / (lr * steps) * self.distance
        if self.constants == "proved":
            bound = 5 / 3 * self.loss + distance_term
        else:
            bound = 2 * self.loss + 5 / 4 * distance_term
        return self._guarantee(
            "average training loss of steps 1 .. k", bound, self.start_loss, lr, steps
        )

    def stability(self, lr: float, steps: int) -> Guarantee:
        """Bound the on-average stability by S; there are proved constants only.

        Parameters
        ----------
        lr : float
            The constant step size, above 0.
        steps : int
            The number k of steps, at least 1.

        Returns
        -------
        Guarantee
            With its conditions.

        Raises
        ------
        TypeError
            If `lr` is not a number or `steps` not an integer.
        ValueError
            If `constants` is not "proved", `lr` is not above 0, or `steps` is below 1.
        """
        lr, steps = _settings(lr, steps)
        if self.constants != "proved":
            raise ValueError("constants: expected 'proved' for the stability, got 'recalled'")
        # If the condition on H is not met the formula guarantees nothing; it is kept finite.
        square = self.distance * self.distance
        x = min(self.bounds.weak_convexity * self.distance * self.distance, 7 / 64)
        spread = math.exp(22 / 3 * x / (1 - 2 * x))
        travelled = 5 / 3 * lr * steps * self.loss + square + lr * self.start_loss
        bound = spread * (self.bounds.b1 * travelled) * self.bounds.b1 / self.n
        return self._guarantee(
            "mean loss on left-out samples - training loss", bound, self.largest_loss, lr, steps
        )

    def generalization(self, lr: float, steps: int) -> Guarantee:
        """Bound the expected generalization gap.

        Parameters
        ----------
        lr : float
            The constant step size, above 0.
        steps : int
            The number k of steps, at least 1.

        Returns
        -------
        Guarantee
            With its conditions. Its constants are those of `constants`: proved, or recalled, not
            derived or quoted.

        Raises
        ------
        TypeError
            If `lr` is not a number or `steps` not an integer.
        ValueError
            If `lr` is not above 0, or `steps` is below 1.
        """
        lr, steps = _settings(lr, steps)
        if self.constants == "proved":
            bound = 2 * self.stability(lr, steps).bound
        else:
            distance_term = 9 * (self.distance / (4 * lr)) * self.distance
            bound = 4 / self.n * (2 * steps * self.loss + distance_term)
        return self._guarantee(
            "expected test loss - training loss", bound, self.largest_loss, lr, steps
        )

    def _guarantee(
        self, statement: str, bound: float, trivial: float, lr: float, steps: int
    ) -> Guarantee:
        conditions = self.conditions(lr, steps)
        return Guarantee(
            statement, self.constants, bound, trivial, conditions, self.distance, self.radius
        )


def compare(
    start: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    comparator: Classifier,
    constants: str = "proved",
) -> Comparison:
    """Compute the quantities that the guarantees need of an initial model θ0 and a comparator θ*.

    Parameters
    ----------
    start, comparator : Classifier
        With dense W and no prompt, of the same shapes.
    X : array (n, T, d) of the models' dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset
    constants : {"proved", "recalled"}
        "recalled": the constants are recalled, not derived or quoted.

    Returns
    -------
    Comparison

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape does not fit, start and comparator differ in more than W and U, a number is not
        finite, or there are no such constants.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> target = mh.train(start, data, steps=50, optimizer=mh.GradientDescent(1.0)).model
    >>> both = mh.theory.compare(start, data, comparator=target)
    >>> gap = mh.Gradients(W=target.W - start.W, U=target.U - start.U)
    >>> bool(abs(both.distance - mh.norm(gap)) < 1e-12), both.radius == 3 * both.distance
    (True, True)
    """
    if constants not in CONSTANTS:
        raise ValueError(f"constants: expected one of {', '.join(CONSTANTS)}, got {constants!r}")
    given = as_dataset(X, y)
    same_family(classifier(start, dense=True), classifier(comparator, dense=True))
    try:
        end, _, _ = settled(comparator, given, dense=True)
    except ValueError as error:
        raise ValueError(f"comparator: {error}") from error
    start, data, _ = settled(start, given, dense=True)
    change = {name: end.parameters[name] - x for name, x in start.parameters.items()}
    distance = float(norm(Gradients(**change)))
    radius = (3.0 if constants == "proved" else 4.0) * distance
    bounds = curvature_bounds(start, data, within=radius)
    readout = float(norm(Gradients(U=start.U))) + radius
    return Comparison(
        distance=distance,
        start_loss=float(value_and_grad(start, data)[0]),
        loss=float(value_and_grad(end, data)[0]),
        radius=radius,
        bounds=bounds,
        n=data.n,
        constants=constants,
        output=math.sqrt(bounds.rows) * bounds.token_norm * readout,
    )


def same_family(
    start: Classifier, comparator: Classifier, name: str = "comparator", of: str = "the start"
) -> None:
    """Raise ValueError unless two models differ in nothing but the values of W and U."""
    if {n: a.shape for n, a in start.parameters.items()} != {
        n: a.shape for n, a in comparator.parameters.items()
    }:
        raise ValueError(
            f"{name}: expected W and U of the shapes of {of}, {start.U.shape} for U, "
            f"got {comparator.U.shape}"
        )
    for field in ("scale", "causal", "query", "attention", "normalize"):
        ours, theirs = getattr(start, field), getattr(comparator, field)
        if not np.array_equal(ours, theirs) or (ours is None) != (theirs is None):
            wanted, got = (
                f"an array of shape {one.shape}" if isinstance(one, np.ndarray) else repr(one)
                for one in (ours, theirs)
            )
            got = "other numbers" if got == wanted else got
            raise ValueError(f"{name}: expected the {field} of {of}, {wanted}, got {got}")


def training_bound(
    start: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    comparator: Classifier,
    lr: float,
    steps: int,
    constants: str = "proved",
) -> Guarantee:
    """Bound the average logistic loss of k steps of gradient descent.

    Parameters
    ----------
    start : Classifier
        θ0, with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset
    comparator : Classifier
        Any θ*; good ones are near and have a small loss, such as the model that training reached.
    lr : float
        The constant step size, above 0.
    steps : int
        k, at least 1.
    constants : {"proved", "recalled"}
        "proved": the formulas of this module. "recalled": average loss ≤ 2 L(θ*) + 5 D0²/(4 lr k)
        with iterates within 4 D0, whose constants are recalled, not derived or quoted. Its
        condition sqrt(H) ≳ D0³ has a factor that we do not know and take as 1.

    Returns
    -------
    Guarantee
        The bound with its conditions.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape does not fit, `lr` or `steps` is not above 0, or there are no such constants.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> target = mh.train(start, data, steps=50, optimizer=mh.GradientDescent(1.0)).model
    >>> guarantee = mh.theory.training_bound(start, data, comparator=target, lr=0.01, steps=50)
    >>> guarantee.applies, [condition.met for condition in guarantee.conditions]
    (False, [False, False, True, True])
    """
    lr, steps = _settings(lr, steps)
    return compare(start, X, y, comparator=comparator, constants=constants).training(lr, steps)


def generalization_bound(
    start: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    comparator: Classifier,
    lr: float,
    steps: int,
    constants: str = "proved",
) -> Guarantee:
    """Bound the expected gap of test and training loss after k steps of gradient descent.

    Parameters
    ----------
    start : Classifier
        θ0, with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset
        Samples may not be weighted.
    y : array (n,) of -1 and 1, None with a Dataset
    comparator : Classifier
        Any θ*, as in `training_bound`.
    lr : float
        The constant step size, above 0.
    steps : int
        k, at least 1.
    constants : {"proved", "recalled"}
        "proved": the formulas of this module. "recalled": (4/n) (2 k L(θ*) + 9 D0²/(4 lr)), whose
        constants are recalled, not derived or quoted.

    Returns
    -------
    Guarantee
        The expectation is over training sets, but the bound is computed from this one; the
        statement is about the mean bound over training sets that all meet the conditions, and
        assumes that no token of theirs or of test samples has a norm above Rx here, and that θ0, lr
        and k were not chosen by means of them: a start may be `Classifier.random_step` of others.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape does not fit, samples are weighted, `lr` or `steps` is not above 0, or there are
        no such constants.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> target = mh.train(start, data, steps=50, optimizer=mh.GradientDescent(1.0)).model
    >>> bound = {}
    >>> for n in (20, 2000):
    ...     data = data.sample(n, seed=1)
    ...     given = {"comparator": target, "lr": 0.01, "steps": 50}
    ...     bound[n] = mh.theory.generalization_bound(start, data, **given).bound
    >>> bound[2000] < 0.1 * bound[20]  # falls like 1/n
    True
    """
    return _of_samples(X, y, start, comparator, constants).generalization(*_settings(lr, steps))


def stability_bound(
    start: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    comparator: Classifier,
    lr: float,
    steps: int,
) -> Guarantee:
    """Bound the on-average stability that `leave_one_out(..., divisor="n")` measures.

    Parameters
    ----------
    start : Classifier
        θ0, with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset
        Samples may not be weighted.
    y : array (n,) of -1 and 1, None with a Dataset
    comparator : Classifier
        Any θ*, as in `training_bound`.
    lr : float
        The constant step size, above 0.
    steps : int
        k, at least 1.

    Returns
    -------
    Guarantee
        It holds for this training set; no expectation is involved.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape does not fit, samples are weighted, or `lr` or `steps` is not above 0.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(8, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> target = mh.train(start, data, steps=20, optimizer=mh.GradientDescent(1.0)).model
    >>> S = mh.theory.stability_bound(start, data, comparator=target, lr=0.01, steps=20)
    >>> measured = mh.theory.leave_one_out(start, data, steps=20, lr=0.01, divisor="n").stability
    >>> bool(measured[-1] < S.bound)
    True
    """
    return _of_samples(X, y, start, comparator, "proved").stability(*_settings(lr, steps))


def _of_samples(
    X: Any, y: Any, start: Classifier, comparator: Classifier, constants: str
) -> Comparison:
    data = as_dataset(X, y)
    if data.weight is not None:
        raise ValueError("weight: expected None, since leave-one-out has no weights, got an array")
    return compare(start, data, comparator=comparator, constants=constants)


def _settings(lr: float, steps: int) -> tuple[float, int]:
    if not checks.finite(lr, "lr") > 0.0:
        raise ValueError(f"lr: expected a number above 0, got {lr}")
    return float(lr), checks.count(steps, "steps")


def ratio(a: float, b: float) -> float:
    """Return a/b, and infinity where b is 0."""
    return a / b if b > 0.0 else math.inf
