"""`certify`: every inequality of the theory, evaluated along a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import norm, value_and_grad
from ..models import Classifier
from ..optimizers import GradientDescent
from ..training.run import Run
from .bounds import curvature_bounds
from .conditions import Guarantee
from .guarantees import Comparison, compare
from .hessian import hessian_extremes
from .sides import classifier, double, in_double

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rounding of the two sides, far above it: a violation is not a matter of the last digits.
SLACK = 1e-9


@dataclass(frozen=True, eq=False)
class Inequality:
    """value ≤ bound at the steps of a run; arrays have one entry a step.

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
        What is wanting for a guarantee at the last step: conditions that are not met.
    """

    name: str
    steps: npt.NDArray[np.int64]
    value: Array
    bound: Array
    applies: npt.NDArray[np.bool_]
    vacuous: npt.NDArray[np.bool_]
    note: str

    @property
    def ratio(self) -> Array:
        """Value over bound: at most 1 where the inequality holds."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: Array = np.where(self.value > 0.0, self.value / self.bound, 0.0)
        return ratio

    @property
    def violated(self) -> npt.NDArray[np.bool_]:
        """Where it is guaranteed and does not hold: nowhere, unless something is wrong."""
        return self.applies & ~(self.ratio <= 1.0 + SLACK)


@dataclass(frozen=True)
class Certificate:
    """The inequalities of a run; `print` shows them as a table.

    Attributes
    ----------
    inequalities : tuple of Inequality
    guarantee : Guarantee or None
        The training guarantee for all steps, with its conditions one by one; None if the run is
        not one that it speaks about.
    """

    inequalities: tuple[Inequality, ...]
    guarantee: Guarantee | None

    @property
    def violated(self) -> tuple[str, ...]:
        """Names of the inequalities that are guaranteed somewhere and do not hold there."""
        return tuple(i.name for i in self.inequalities if i.violated.any())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a dict for each inequality and step, in the form that `pandas.DataFrame` takes.

        Yields
        ------
        dict
            "inequality", "step", "value", "bound", "ratio", "applies", "vacuous" and "violated" as
            plain
            Python values.
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
        Of a Classifier with dense W and no prompt, on the logistic loss.  Curvature is judged at
        the steps at which both "W" and "U" were recorded, and at the start and the end; the
        training guarantee if "loss" was recorded at every step, the distance if "distance" was,
        and the generalization gap where "loss" and "test_loss" were.  Its bound is one of
        expectations, so that no single run is guaranteed to meet it.
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
    ValueError
        The run trained on another loss.
    """
    end, data = in_double(classifier(run.model, dense=True), as_dataset(X, y))
    start = double(classifier(run.start, dense=True))
    if run.loss != "logistic":
        raise ValueError(f"run: expected training on the logistic loss, got {run.loss!r}")
    inequalities = list(_curvature(run, data, hessian))
    guarantee = None
    lr = _plain_rate(run)
    if run.step > 0 and lr is not None:
        if comparator is not None:
            end = double(classifier(comparator))
        comparison = compare(start, data, comparator=end)
        guarantee = comparison.training(lr, run.step)
        inequalities += _guaranteed(run, comparison, lr, data.weight is not None)
    return Certificate(tuple(inequalities), guarantee)


def _curvature(run: Run, data: Dataset, hessian: bool) -> Iterator[Inequality]:
    steps, columns = [], []
    for step, model in _snapshots(run):
        bounds = curvature_bounds(model, data)
        loss, gradient = value_and_grad(model, data)
        pairs = [(norm(gradient), bounds.gradient(loss))]
        if hessian:
            ends = hessian_extremes(model, data)
            pairs.append((max(-ends.smallest, ends.largest), bounds.hessian))
            pairs.append((max(-ends.smallest, 0.0), -bounds.smallest_eigenvalue(loss)))
        steps.append(step)
        columns.append(pairs)
    names = ("gradient: ‖∇L‖ ≤ b1 L", "Hessian: ‖∇²L‖ ≤ b1²/4 + b3/√H", "-λ_min(∇²L) ≤ (b3/√H) L")
    table = np.array(columns)
    always, never = np.ones(len(steps), bool), np.zeros(len(steps), bool)
    for j in range(table.shape[1]):
        value, bound = table[:, j].T
        yield Inequality(names[j], np.array(steps), value, bound, always, never, "")


def _guaranteed(
    run: Run, comparison: Comparison, lr: float, weighted: bool
) -> Iterator[Inequality]:
    k, loss = run.steps.get("loss", np.zeros(0, np.int64)), run.history.get("loss")
    if loss is not None and len(k) == run.step + 1:
        found = [comparison.training(lr, int(step)) for step in k[1:]]
        mean = np.cumsum(loss[1:]) / k[1:]
        yield _inequality("average loss ≤ (5/3) L(θ*) + D0²/(lr k)", k[1:], mean, found)
    if "distance" in run.steps:
        k = run.steps["distance"]
        k, distance = k[k > 0], run.history["distance"][k > 0]
        found = [comparison.training(lr, int(step)) for step in k]
        near = [replace(g, bound=g.radius, trivial=np.inf) for g in found]
        yield _inequality("distance ≤ 3 D0", k, distance, near)
    if loss is not None and "test_loss" in run.steps and not weighted:
        k, at, at_test = np.intersect1d(
            run.steps["loss"], run.steps["test_loss"], return_indices=True
        )
        gap = run.history["test_loss"][at_test] - loss[at]
        found = [comparison.generalization(lr, int(step)) for step in k[k > 0]]
        gaps = _inequality("test - training loss ≤ 2 S", k[k > 0], gap[k > 0], found)
        note = "; ".join(filter(None, [gaps.note, "the mean over training sets"]))
        yield replace(gaps, applies=np.zeros_like(gaps.applies), note=note)


def _inequality(
    name: str, k: npt.NDArray[np.int64], value: Array, guarantees: list[Guarantee]
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


def _plain_rate(run: Run) -> float | None:
    """Return lr if the run is what the guarantees mean: constant steps on W and U, no extras."""
    rule = run.optimizer
    if (
        isinstance(rule, GradientDescent)
        and isinstance(rule.lr, float)
        and rule == GradientDescent(rule.lr)
        and set(run.wrt) == {"W", "U"}
    ):
        return rule.lr
    return None


def _verdict(i: Inequality) -> str:
    if i.violated.any():
        return "VIOLATED"
    if not i.applies.all():
        return f"not guaranteed, for want of {i.note}" if i.note else "not guaranteed at all steps"
    return "holds, but vacuous" if i.vacuous.all() else "holds"
