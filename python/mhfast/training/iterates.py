"""A run whose loop is in Python: models one after the other, and records by `mhfast.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments.checks import Wrt
from .._arguments.losses import Loss
from ..dataset.dataset import Dataset
from ..models import AnyModel, Model
from ..models import problem as _core_arguments
from ..optimizers import GradientDescent, Solver, of_parameter
from . import arguments, quantities
from .arguments import Directions, Tests
from .constraints import Constraints, check_start, checked, described, partitions
from .evaluate import evaluate_together
from .history import check_continues, joined
from .objective import Objective, Vector
from .quantities import Entry, Record, check_room, count_due, size_of
from .run import Interrupted, Run, fresh
from .segments import Segment, extended, fingerprint

M = TypeVar("M", bound=Model)
AnyM = TypeVar("AnyM", bound=AnyModel)


@dataclass
class Iterates(Generic[AnyM]):
    """Models θ_k one after the other, and what is recorded of them.

    Attributes
    ----------
    run : Run
        The settings, and the run before the first step.
    entries : tuple of Entry
        What to record.
    evaluated : function (model, record) -> dict
        `mhfast.evaluate` on the data of the run.
    most : int
        The largest number of further steps.
    model, step : Model, int
        The last iterate θ_k, and its k.
    rows : dict of list of (k, value)
        What is recorded, by key.
    sizes : dict of int
        The bytes that each record may take.
    """

    run: Run[AnyM]
    entries: tuple[Entry, ...]
    evaluated: Callable[..., dict[str, Any]]
    most: int
    model: AnyM = field(init=False)
    step: int = field(init=False)
    rows: dict[str, list[tuple[int, npt.NDArray[Any]]]] = field(default_factory=dict, init=False)
    sizes: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.model, self.step = self.run.model, self.run.step

    def record_due(self) -> None:
        """Record what is due at θ_k.

        Raises
        ------
        TypeError, ValueError
            If the value of a function does not fit its earlier values, or rows take too much
            memory.
        """
        self._record([entry for entry in self.entries if self.step % entry.every == 0])

    def _record(self, due: list[Entry]) -> None:
        for entry in due:
            what = entry.key if entry.function is None else entry.function
            for key, value in self.evaluated(self.model, record=what).items():
                self._add(key, entry.every, np.asarray(value))

    def _add(self, key: str, every: int, value: Any) -> None:
        if key not in self.rows:
            most = count_due(self.run.step, self.run.step + self.most, every) + 1
            self.sizes[key] = size_of((most, *value.shape), value.dtype)
            check_room(self.sizes)
            if key in self.run.history:
                check_continues(key, self.run.history[key], value.shape, 0)
            self.rows[key] = []
        elif value.shape != self.rows[key][0][1].shape:
            raise ValueError(
                f"record {key!r}: expected shape {self.rows[key][0][1].shape} of its first "
                f"value, got {value.shape} at step {self.step}"
            )
        self.rows[key].append((self.step, value))

    def ended(self, reason: str) -> Run[AnyM]:
        """Return the run up to the last iterate; where it ends there, everything is recorded."""
        if reason not in ("interrupted", "exception", "checkpoint"):
            self._record([entry for entry in self.entries if self.step % entry.every > 0])
        history = {key: np.stack([value for _, value in rows]) for key, rows in self.rows.items()}
        steps = {key: np.array([k for k, _ in rows]) for key, rows in self.rows.items()}
        history, steps = joined(
            self.run.history, self.run.steps, self.run.step, self.step, [(history, steps)], 0
        )
        return self.run._replace(
            model=self.model, history=history, steps=steps, step=self.step,
            reason=reason, stopped=None if reason == "steps" else self.step,
        )  # fmt: skip

    @contextmanager
    def rescued(self) -> Iterator[None]:
        """Attach the run so far to an exception, as `mhfast.train` does."""
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(self.ended("interrupted")) from None
        except Exception as error:
            arguments.carry(error, self.ended("exception"))
            raise


@dataclass
class Solved(Iterates[M]):
    """The iterates of a solver of SciPy, which knows a model as a vector θ.

    Attributes
    ----------
    objective : Objective
        What is minimized, or flows downhill.
    data : Dataset
        The data that were given.
    """

    objective: Objective[M]
    data: Dataset

    def take(self, step: int, theta: Vector, **others: float) -> None:
        """Go to θ_k, and record what is due there; ``others`` are scalars to record as well."""
        self.model, self.step = self.objective.at(theta), step
        for key, value in others.items():
            self._add(key, 1, np.float64(value))
        self.record_due()

    def solved(self, go: Callable[[Vector, Vector], str], **others: float) -> Run[M]:
        """Return the run that ``go`` takes from θ_0, if value and gradient there are finite.

        Parameters
        ----------
        go : function (θ_0, gradient at θ_0) -> reason
            Calls `take` for every further iterate, and returns why the last one is it.
        others : float
            Scalars to record at θ_0.
        """
        with self.rescued():
            theta = self.objective.vector(self.run.model)
            self.take(self.run.step, theta, **others)
            value, gradient = self.objective(theta)
            finite = np.isfinite(value) and np.isfinite(gradient).all()
            ended = self.ended(go(theta, gradient) if finite else "nonfinite")
        arguments.warn_of_nonfinite(ended, self.run.step, self.data)
        return ended


def begin(
    what: str,
    model: M | Run[M],
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None,
    solver: Solver,
    most: int,
    *,
    loss: Loss | None,
    wrt: Wrt,
    constraints: Constraints | None,
    test: Tests | None,
    record: Record | None,
    directions: Directions | None,
    num_threads: int | None,
) -> Solved[M]:
    """Check the arguments that solvers share with `mhfast.train`, and return θ of step 0.

    Parameters
    ----------
    what : the function that was called
    solver : its settings
    most : the largest number of steps

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape, a name or a number does not fit, or there is a run axis.
    """
    run: Run[M] = model if isinstance(model, Run) else fresh(model, GradientDescent(0.0))
    if not isinstance(run.model, Model):
        raise TypeError(
            f"{what}: expected a Classifier, a Layer or a Run of one, got a "
            f"{type(run.model).__name__}"
        )
    data = arguments.dataset(X, y, run.model)
    tests = arguments.tests(test, run.model)
    record = arguments.restored(run.record if record is None else record)
    entries = quantities.parse(record, tuple(run.model.parameters), tuple(tests))
    run = run._replace(
        optimizer=solver,
        state={},
        subspace=None,
        coefficients=(),
        batches=None,
        averages=None,
        loss=run.loss if loss is None else _core_arguments.loss(run.model, loss, data.y),
        wrt=run.wrt if wrt is None else arguments.wrt(run.model, wrt),
        record={entry.function or entry.key: entry.every for entry in entries},
        since=run.step if isinstance(run.since, int) else run.since,
        constraints=run.constraints if constraints is None else checked(run.model, constraints),
    )
    ties = partitions(run.model, run.constraints, run.wrt)
    check_start(run.model, ties, run.wrt)
    arguments.settings_of_parameters(solver, run.model)
    _core_arguments.differentiable(run.model, _core_arguments.bits(run.wrt))
    problem, test_problems = arguments.problems(run, data, tests)
    if problem.runs.length:
        raise ValueError(
            f"{what}: expected one model and one data set, got a run axis of length "
            f"{problem.runs.length}; call it for each run, with model[r] and data[r]"
        )
    held = described(run.constraints, run.wrt)
    now = Segment(run.step, solver, run.loss, run.wrt, fingerprint(data), None, held)
    run = run._replace(segments=extended(run.segments, now))
    l2 = {name: of_parameter(solver.l2, name, 0.0) for name in run.wrt}
    seen = arguments.compacted(run, data, tests, (problem, test_problems))
    whole = partial(
        evaluate_together, None, X=seen.train, loss=run.loss, wrt=run.wrt, test=seen.tests,
        directions=directions,
        start=run.start, constraints=run.constraints, num_threads=num_threads,
    )  # fmt: skip
    objective = Objective(run.model, seen.train.data, run.loss, run.wrt, l2, num_threads, ties)
    return Solved(run, entries, whole, most, objective, data)
