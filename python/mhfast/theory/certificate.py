"""`certify`: every inequality of the theory, evaluated along a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import norm, value_and_grad
from ..models import Classifier, Model
from ..optimizers import GradientDescent
from ..training.run import Run
from ..training.segments import Segment, fingerprint
from .bounds import curvature_bounds
from .conditions import Guarantee
from .guarantees import Comparison, compare
from .hessian import ACCURACY, hessian_extremes
from .inputs import classifier, double, settled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Allowance for rounding of the two sides, far above it: no violation is a matter of last digits.
# What a run of float32 recorded carries the rounding of its parameters at every step.
SLACK = {"float64": 1e-9, "float32": 1e-4}


@dataclass(frozen=True, eq=False)
class Inequality:
    """value ≤ bound at the steps of a run; arrays have one entry per step.

    Attributes
    ----------
    name : str
        What is bounded.
    steps : int64 array
    value, bound : float64 array
    applies : bool array
        Whether the conditions are met at that step.
    vacuous : bool array
        Whether the bound says no more than what is known without it.
    note : str
        The conditions of the guarantee that are not met at the last step.
    slack : float
        How far the ratio may exceed 1 by rounding alone.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(10, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> given = {"optimizer": mh.GradientDescent(0.01), "record": ("loss", "distance", "W", "U")}
    >>> run = mh.train(start, data, steps=2, **given)
    >>> one = mh.theory.certify(run, data, hessian=False).inequalities[0]
    >>> print(one.name)
    gradient: ‖∇L‖ ≤ b1 L
    >>> [bool(part.any()) for part in (one.ratio > 1, one.violated, one.undecided)]
    [False, False, False]
    """

    name: str
    steps: npt.NDArray[np.int64]
    value: Array
    bound: Array
    applies: npt.NDArray[np.bool_]
    vacuous: npt.NDArray[np.bool_]
    note: str
    slack: float = SLACK["float64"]

    @property
    def ratio(self) -> Array:
        """Value over bound: at most 1 where the inequality holds, NaN where nothing can be said."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            quotient = self.value / self.bound
        ratio: Array = np.where((self.value <= 0.0) & (self.bound >= 0.0), 0.0, quotient)
        return ratio

    @property
    def undecided(self) -> npt.NDArray[np.bool_]:
        """Where value or bound is not a number, or both are infinite."""
        undecided: npt.NDArray[np.bool_] = np.isnan(self.ratio)
        return undecided

    @property
    def violated(self) -> npt.NDArray[np.bool_]:
        """Where it is guaranteed but does not hold; this indicates an error."""
        return self.applies & (self.ratio > 1.0 + self.slack)


@dataclass(frozen=True)
class Certificate:
    """The inequalities of a run; `print` shows them as a table.

    Attributes
    ----------
    inequalities : tuple of Inequality
    guarantee : Guarantee or None
        The training guarantee for the steps that it covers, with its conditions one by one; None
        if the run has none.
    notes : tuple of str
        What no guarantee covers, and why.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(10, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> given = {"optimizer": mh.GradientDescent(0.01), "record": ("loss", "distance", "W", "U")}
    >>> run = mh.train(start, data, steps=2, **given)
    >>> certificate = mh.theory.certify(run, data)
    >>> certificate.violated  # inequalities that fail although their conditions are met
    ()
    >>> certificate.guarantee.applies  # two heads are too few
    False
    >>> row = next(certificate.rows())
    >>> row["inequality"], row["step"], row["violated"]
    ('gradient: ‖∇L‖ ≤ b1 L', 0, False)
    """

    inequalities: tuple[Inequality, ...]
    guarantee: Guarantee | None
    notes: tuple[str, ...] = ()

    @property
    def violated(self) -> tuple[str, ...]:
        """Names of the inequalities that are guaranteed at a step but do not hold there."""
        return tuple(i.name for i in self.inequalities if i.violated.any())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a dict for each inequality and step, in the form that `pandas.DataFrame` takes.

        Yields
        ------
        dict
            "inequality", "step", "value", "bound", "ratio", "applies", "vacuous" and "violated" as
            plain Python values.
        """
        for i in self.inequalities:
            for j, step in enumerate(i.steps):
                yield {
                    "inequality": i.name,
                    "step": int(step),
                    "value": float(i.value[j]),
                    "bound": float(i.bound[j]),
                    "ratio": float(i.ratio[j]),
                    "applies": bool(i.applies[j]),
                    "vacuous": bool(i.vacuous[j]),
                    "violated": bool(i.violated[j]),
                }

    def __str__(self) -> str:
        lines = [f"{'inequality':42}{'value':>11}{'bound':>11}{'ratio':>9}  at step  verdict"]
        for i in self.inequalities:
            worst = int(np.argmax(i.ratio))
            lines.append(
                f"{i.name:42}{i.value[worst]:11.3g}{i.bound[worst]:11.3g}{i.ratio[worst]:9.2g}"
                f"{i.steps[worst]:9d}  {_verdict(i)}"
            )
        if self.guarantee is not None:
            lines += ["", str(self.guarantee)]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Draw value over bound of every inequality against the steps.

        Dotted where nothing is guaranteed; a line above 1 would be a violation.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(10, 5, 8, seed=0)
        >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
        >>> given = {"optimizer": mh.GradientDescent(0.01), "record": ("loss", "W", "U")}
        >>> run = mh.train(start, data, steps=2, **given)
        >>> figure = mh.theory.certify(run, data, hessian=False).plot()
        >>> figure.axes[0].get_xlabel()
        'step k'
        """
        try:
            pyplot = import_module("matplotlib.pyplot")
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from error
        figure: Figure
        figure, ax = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
        for i in self.inequalities:
            ratio = np.where(i.ratio > 0.0, i.ratio, np.nan)
            style = "-" if i.applies.all() else ":"
            marker = "." if len(i.steps) < 30 else ""
            ax.plot(i.steps, ratio, style, marker=marker, label=i.name)
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.set(xlabel="step k", ylabel="value / bound", yscale="log")
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
        return figure


def certify(
    run: Run,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    comparator: Classifier | None = None,
    hessian: bool = True,
) -> Certificate:
    """Evaluate every inequality of the theory along a run of gradient descent.

    Parameters
    ----------
    run : Run
        One training, of a Classifier with dense W and no prompt, on the logistic loss.  Curvature
        is judged where both "W" and "U" were recorded, at the start and at the end; the
        training guarantee if "loss" was recorded at every step, the distance if "distance" was,
        and the generalization gap where "loss" and "test_loss" were.  Its bound is on an
        expectation for a start that does not depend on the samples, so a single run may exceed it.
    X : array (n, T, d) of the model's dtype, or Dataset
        The training data.
    y : array (n,) of -1 and 1, None with a Dataset
    comparator : Classifier, optional
        θ* of the training guarantee; the model that the run reached by default.
    hessian : bool
        Whether to compute the extreme eigenvalues of the Hessian, which costs most of the time.

    Returns
    -------
    Certificate

    Raises
    ------
    TypeError
        The model is not of this kind, or of another dtype than the data.
    ValueError
        The run has a run axis or trained on another loss, the comparator is of another shape or
        not finite, or data of a sample that counts or the start are not finite.

    Notes
    -----
    A guarantee covers steps of plain gradient descent from θ0 on: of a run that was continued with
    other settings or on other data, its first segment (`Run.segments`).  `notes` of the certificate
    say which steps are not covered, and why.

    Where the parameters reached are not finite nothing is decided, and no guarantee is given for
    the default comparator.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(10, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> given = {"optimizer": mh.GradientDescent(0.01), "record": ("loss", "distance", "W", "U")}
    >>> run = mh.train(start, data, steps=2, **given)
    >>> certificate = mh.theory.certify(run, data)
    >>> for inequality in certificate.inequalities:
    ...     print(inequality.name, inequality.applies.any(), inequality.violated.any())
    gradient: ‖∇L‖ ≤ b1 L True False
    Hessian: ‖∇²L‖ ≤ b1²/4 + b3/√H True False
    -λ_min(∇²L) ≤ (b3/√H) L True False
    average loss ≤ (5/3) L(θ*) + D0²/(lr k) False False
    distance ≤ 3 D0 False False
    """
    checks.instance(run, Run, "run")
    if run.runs is not None:
        raise ValueError(f"run: expected one training, as run[0] is, got {run.runs} of them")
    start, end = classifier(run.start, dense=True), classifier(run.model, dense=True)
    if run.loss != "logistic":
        raise ValueError(f"run: expected training on the logistic loss, got {run.loss!r}")
    given = as_dataset(X, y)
    if given.runs is not None:
        raise ValueError(f"X: expected one data set, as X.run(0) is, got {given.runs} runs")
    _, data, _ = settled(start, given, dense=True)
    inequalities = list(_curvature(run, data, hessian))
    lr, last, notes = _covered(run, fingerprint(given))
    if comparator is None and not _is_finite(end):
        lr = None
        notes.append(
            "no guarantee: the parameters reached are not finite; another comparator may work"
        )
    if lr is None:
        return Certificate(tuple(inequalities), None, tuple(notes))
    end = end if comparator is None else classifier(comparator)
    comparison = compare(double(start), data, comparator=double(end))
    inequalities += _guaranteed(run, comparison, lr, last, data.weight is not None)
    return Certificate(tuple(inequalities), comparison.training(lr, last), tuple(notes))


def _curvature(run: Run, data: Dataset, hessian: bool) -> Iterator[Inequality]:
    steps, columns = [], []
    for step, model in _snapshots(run):
        steps.append(step)
        columns.append(_of_snapshot(model, data, hessian))
    names = ("gradient: ‖∇L‖ ≤ b1 L", "Hessian: ‖∇²L‖ ≤ b1²/4 + b3/√H", "-λ_min(∇²L) ≤ (b3/√H) L")
    table = np.array(columns)
    always, never = np.ones(len(steps), bool), np.zeros(len(steps), bool)
    for j in range(table.shape[1]):
        value, bound = table[:, j].T
        yield Inequality(names[j], np.array(steps), value, bound, always, never, "")


def _of_snapshot(model: Classifier, data: Dataset, hessian: bool) -> list[tuple[float, float]]:
    """Return values and bounds of curvature, NaN where the parameters are not finite."""
    if not _is_finite(model):
        return [(math.nan, math.nan)] * (3 if hessian else 1)
    bounds = curvature_bounds(model, data)
    value, gradient = value_and_grad(model, data)
    loss = float(value)
    pairs = [(float(norm(gradient)), bounds.gradient(loss))]
    if hessian:
        try:
            ends = hessian_extremes(model, data)
            smallest, largest = ends.smallest, ends.largest
        except ValueError:  # it overflows
            smallest = largest = math.nan
        pairs.append((max(-smallest, largest), bounds.hessian))
        # A lower bound: rounding makes an eigenvalue negative where the Hessian has no negative
        # one.
        certain = max(0.0, -smallest - ACCURACY * (largest - smallest))
        pairs.append((certain, -bounds.smallest_eigenvalue(loss)))
    return pairs


def _is_finite(model: Model) -> bool:
    return all(bool(np.isfinite(array).all()) for array in model.parameters.values())


def _guaranteed(
    run: Run, comparison: Comparison, lr: float, last: int, weighted: bool
) -> Iterator[Inequality]:
    k, loss = run.steps.get("loss", np.zeros(0, np.int64)), run.history.get("loss")
    slack = SLACK[run.model.dtype.name]
    if loss is not None and np.array_equal(k[: last + 1], np.arange(last + 1)):
        k, losses = k[: last + 1], loss[: last + 1]
        found = [comparison.training(lr, int(step)) for step in k[1:]]
        with np.errstate(over="ignore"):
            mean = np.cumsum(losses[1:], dtype=np.float64) / k[1:]
        yield _inequality("average loss ≤ (5/3) L(θ*) + D0²/(lr k)", k[1:], mean, found, slack)
    k = run.steps.get("distance", np.zeros(0, np.int64))
    inside = (k > 0) & (k <= last)
    if inside.any():
        k, distance = k[inside], run.history["distance"][inside]
        found = [comparison.training(lr, int(step)) for step in k]
        near = [replace(g, bound=g.radius, trivial=np.inf) for g in found]
        yield _inequality("distance ≤ 3 D0", k, distance, near, slack)
    if loss is not None and "test_loss" in run.steps and not weighted:
        k, at, at_test = np.intersect1d(
            run.steps["loss"], run.steps["test_loss"], return_indices=True
        )
        inside = (k > 0) & (k <= last)
        if not inside.any():
            return
        k, gap = k[inside], (run.history["test_loss"][at_test] - loss[at])[inside]
        found = [comparison.generalization(lr, int(step)) for step in k]
        gaps = _inequality("test - training loss ≤ 2 S", k, gap, found, slack)
        note = "; ".join(filter(None, [gaps.note, "the mean over training sets, of one start"]))
        yield replace(gaps, applies=np.zeros_like(gaps.applies), note=note)


def _inequality(
    name: str,
    k: npt.NDArray[np.int64],
    value: Array,
    guarantees: list[Guarantee],
    slack: float,
) -> Inequality:
    missed = [c.statement for c in guarantees[-1].conditions if not c.met]
    return Inequality(
        name=name,
        steps=k,
        value=value,
        bound=np.array([g.bound for g in guarantees]),
        applies=np.array([g.applies for g in guarantees]),
        vacuous=np.array([g.vacuous for g in guarantees]),
        note="; ".join(missed),
        slack=slack,
    )


def _snapshots(run: Run) -> Iterator[tuple[int, Classifier]]:
    """Yield the steps at which the parameters are known, and the models, in float64."""
    end = classifier(run.model)
    known = {0: classifier(run.start), run.step: end}
    if {"W", "U"} <= run.steps.keys():
        W, U = (dict(zip(run.steps[n].tolist(), run.history[n], strict=True)) for n in "WU")
        for step in W.keys() & U.keys():
            known[step] = replace(end, W=W[step], U=U[step])
    for step in sorted(known):
        yield step, double(known[step])


def _covered(run: Run, data: str | tuple[str, ...]) -> tuple[float | None, int, list[str]]:
    """Return lr and the last step of what the guarantees speak about, and what they do not cover.

    They mean constant steps of gradient descent on W and U, no extras, from θ0 on.
    """
    if run.step == 0:
        return None, 0, ["no guarantee covers this run: it made no step"]
    segments = [segment for segment in run.segments if segment.first < run.step]
    if not segments or segments[0].first != 0:
        return None, 0, ["no guarantee covers this run: how its steps were taken is not known"]
    ends = [segment.first for segment in segments[1:]] + [run.step]
    lr, others = _plain_rate(segments[0], data)
    whole = len(segments) == 1
    steps = "this run" if whole else f"steps 1 to {ends[0]}"
    notes = [f"no guarantee covers {steps}: {other}" for other in others]
    for before, segment, end in zip(segments, segments[1:], ends[1:], strict=False):
        changed = [
            f.name for f in fields(Segment)
            if f.name != "first" and getattr(segment, f.name) != getattr(before, f.name)
        ]  # fmt: skip
        notes.append(
            f"no guarantee covers steps {segment.first + 1} to {end}: they do not start at θ0, "
            f"but continue with other {' and '.join(changed)}"
        )
    return (None if others else lr), ends[0], notes


def _plain_rate(segment: Segment, data: str | tuple[str, ...]) -> tuple[float | None, list[str]]:
    """Return lr, and what keeps a first segment from being what the guarantees mean."""
    rule, lr, others = segment.optimizer, None, []
    if not isinstance(rule, GradientDescent):
        others.append(f"{type(rule).__name__} is not gradient descent")
    elif not isinstance(rate := _common_rate(rule, segment.wrt), float):
        others.append("lr is not one number")
    elif not rate > 0.0:
        others.append(f"lr is {rate:g}, not above 0")
    else:
        lr, plain = rate, GradientDescent(rule.lr)
        extras = [f.name for f in fields(rule) if getattr(rule, f.name) != getattr(plain, f.name)]
        others += [f"its steps have {name}" for name in extras]
    others += [f"{name} was not trained" for name in ("W", "U") if name not in segment.wrt]
    if segment.loss != "logistic":
        others.append(f"the loss was {segment.loss}")
    if segment.batches is not None:
        kind = "batches of" if segment.batches.fresh is None else "sets of new samples, each of"
        others.append(f"its steps were taken on {kind} {segment.batches.size} samples")
    others += [f"it was constrained ({held})" for held in segment.constraints]
    if segment.data != data:
        others.append("it trained on other data than these")
    return lr, others


def _common_rate(rule: GradientDescent, wrt: tuple[str, ...]) -> object:
    """Return lr, or what all that is trained has by name if that is the same."""
    if not isinstance(rule.lr, Mapping):
        return rule.lr
    found = {rule.lr[name] for name in wrt}
    return found.pop() if len(found) == 1 else rule.lr


def _verdict(i: Inequality) -> str:
    if i.violated.any():
        return "VIOLATED"
    if i.undecided.any():
        at = int(np.argmax(i.undecided))
        return f"cannot be judged at step {i.steps[at]}: {i.value[at]:.3g} ≤ {i.bound[at]:.3g}"
    if not i.applies.all():
        return f"not guaranteed; it needs {i.note}" if i.note else "not guaranteed at all steps"
    if i.vacuous.all():
        return "holds, but vacuous"
    return "holds, but vacuous at some steps" if i.vacuous.any() else "holds"
