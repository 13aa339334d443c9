"""What happens in Python while the core trains: functions, callback, stop function, checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import losses
from .._arguments.lists import PARAMETERS
from .._arguments.values import Array
from ..models import Model
from ..models.problem import (
    CoreParameters,
    CoreProblem,
    bits,
    borrowing,
    trainable,
    with_arrays,
)
from .averages import Averages
from .batches import ORDERS, Batches
from .callbacks import Callback, Calls
from .coefficients import Coefficients
from .history import FunctionRows, NamedRows, joined
from .partition import CoreConstraint
from .quantities import count_due
from .reduction import Group, Numbers, shard_sizes
from .run import Run
from .streams import Draws
from .subspace import Subspace

Callbacks: TypeAlias = (
    Callable[[int, Any], object] | Callback | Sequence[Callable[[int, Any], object] | Callback]
)
Slots: TypeAlias = tuple[Array, ...]

_UNUSED = Batches(size=1)  # what the core gets of a run that steps on all samples
_REASONS = _core.StopReason.__members__


@dataclass
class Loop:
    """One call of `mhfast.train` in progress.

    Attributes
    ----------
    run : Run
        The settings and the state at the first step of this call; everything trained has the run
        axis if there is one.
    named, functions
        The rows that the core and this loop fill.
    callback : Calls or None
    checkpoint : (path, every) or None
    parameters, state : tuples of the core
        Parameters and the optimizer's arrays, which the core overwrites.
    subspace : Subspace or None
        The span of the tokens in which the core trains; `parameters` and `state` then refer to it.
    stopped : int64 array (max(R, 1),)
        The step at which each run was frozen, -1 for those that continue; the core overwrites it.
    reasons : int64 array (max(R, 1),)
        Why each run was frozen, a `StopReason` of the core, which overwrites it.
    averages : Averages or None
        The means over steps, which the core overwrites.
    ended_by : str
        Which function ended training, if one did, in any process.
    group : Group or None
        The processes that train together.
    samples : int
        n, of this process, where there is a group.
    constraints : tuple of the core
        Those of each parameter.
    coefficients : Coefficients or None
        Where the core may train U in coefficients of the samples.
    """

    run: Run
    named: list[NamedRows]
    functions: list[FunctionRows]
    callback: Calls | None
    checkpoint: tuple[str | os.PathLike[str], int] | None
    subspace: Subspace | None
    stopped: npt.NDArray[np.int64]
    parameters: CoreParameters = field(init=False)
    state: tuple[Slots | None, ...] = field(init=False)
    reasons: npt.NDArray[np.int64] = field(init=False)
    averages: Averages | None = field(init=False)
    ended_by: str = ""
    group: Group | None = None
    samples: int = 0
    constraints: tuple[CoreConstraint, ...] = (None,) * len(PARAMETERS)
    coefficients: Coefficients | None = None

    def __post_init__(self) -> None:
        run = self.run
        inside = run if self.subspace is None else self.subspace
        self.parameters = trainable(inside.model._core.parameters, run.wrt, run.runs or 0)
        self.reasons = np.array(
            [
                int(_REASONS[why]) if k >= 0 else 0
                for k, why in zip(self.stopped, _listed(run.reason), strict=True)
            ]
        )
        self.averages = None if run.averages is None else run.averages.copy()
        self.state = tuple(
            _slots(run.optimizer.slots, inside.state.get(name, ()) if run.state else (), theta)
            if name in run.wrt and theta is not None
            else None
            for name, theta in zip(PARAMETERS, self.parameters, strict=True)
        )

    def every(self) -> int:
        """Return how often the core has to call `at`; 0 if there is nothing to do."""
        periods = [rows.entry.every for rows in self.functions]
        if self.checkpoint is not None:
            periods.append(self.checkpoint[1])
        if self.callback is not None:
            periods.append(self.callback.every)
        if callable(self.run.stop):
            periods.append(1)
        return math.gcd(*periods)

    def run_core(
        self,
        problem: CoreProblem,
        start: Model,
        settings: _core.Optimizer,
        last: int,
        records: Sequence[_core.Record],
        tests: Sequence[CoreProblem],
        directions: Sequence[CoreParameters],
        thresholds: dict[str, float],
        tick: Callable[[int], None] | None,
        threads: int,
        drawn: Draws | None = None,
    ) -> _core.TrainingResult:
        """Let the core go from the step of the run to ``last``; with no step it only records.

        Parameters
        ----------
        problem, tests : the training data and the test sets in the form that the core expects
        start : Classifier or Layer
            The parameters that distances are measured from.
        settings, records, directions, thresholds : in the form that the core expects
        tick : function of the step, optional
            Called from time to time.
        threads : int
        drawn : Draws or None
            New samples for the steps.
        """
        run, every = self.run, self.every()
        batches = run.batches or _UNUSED
        size = 0 if run.batches is None else batches.size  # 0: steps on all samples
        group = self.group
        processes = None
        if group is not None:
            shards = shard_sizes(group.reduction, self.samples)
            processes = (self.add, group.rank, group.size, group.head, shards)
        return _core.train(
            samples=problem.data, parameters=self.parameters, runs=run.runs or 0,
            scale=run.model.scale, causal=problem.causal, row_map=run.model._core.row_map,
            loss=losses.core(run.loss), wrt=bits(run.wrt), starts=start._core.parameters,
            optimizer=settings, state=self.state, batch=size, order=ORDERS[batches.order],
            seeds=batches.seeds, fresh=batches.fresh or 0, constraints=self.constraints,
            stream=None if drawn is None else (drawn.first.data, drawn, drawn.in_core()),
            first=run.step, last=last, records=records,
            tests=[test.data for test in tests],
            directions=directions,
            averages=None if self.averages is None else self.averages.core,
            coefficients=None if self.coefficients is None else self.coefficients.core,
            thresholds=thresholds, stopped=self.stopped,
            reasons=self.reasons, hook_every=every or 1,
            hook=self.at if every else None, on_progress=tick,
            processes=processes, threads=threads,
        )  # fmt: skip

    def add(self, numbers: Numbers, k: int) -> tuple[Numbers, bool]:
        """Return sums over all processes at θ_k; true ends training."""
        assert self.group is not None
        sums, ended_by = self.group.add(numbers, k, self.ended_by)
        self.ended_by = self.ended_by or ended_by
        return sums, bool(ended_by)

    def at(self, k: int) -> bool:
        """Do everything that is due at θ_k; true ends training."""
        due = [rows for rows in self.functions if k % rows.entry.every == 0]
        saving = self.checkpoint is not None and k > self.run.step and k % self.checkpoint[1] == 0
        stop = self.run.stop if callable(self.run.stop) else None
        calls = self.callback if self.callback is not None and self.callback.due(k) else None
        for rows in due:
            if rows.inside:
                rows.take(k, self.parameters)
        due = [rows for rows in due if not rows.inside]
        if not (due or saving or calls or stop):
            return False
        model = self.model()
        for rows in due:
            rows.take(k, model)
        if self.checkpoint is not None and saving:
            # The core records θ_k after this call, and so does a run resumed from the file.
            written = [count_due(self.run.step, k - 1, rows.entry.every) for rows in self.named]
            self.so_far(k, "checkpoint", written, model).save(self.checkpoint[0])
        if calls is not None and calls(k, model):
            self.ended_by = "callback"
        elif stop is not None and np.all(np.asarray(stop(k, model))):  # of R runs, all
            self.ended_by = "stop"
        return bool(self.ended_by)

    def model(self) -> Model:
        """Return the model with a copy of the current parameters."""
        run = self.run
        if self.subspace is None:
            return self._trained(run.model)
        whole = self.subspace.whole(run.start, run.wrt, self.parameters)
        return with_arrays(run.model, whole)

    def _trained(self, model: Model) -> Model:
        """Return ``model`` with the parameters that the core has trained."""
        trained = {}
        for name, array in zip(PARAMETERS, self.parameters, strict=True):
            if array is not None and name in self.run.wrt:
                trained[name] = own = array.copy()
                own.setflags(write=False)
        return borrowing(model, trained)

    def so_far(
        self, reached: int, reason: str, written: Sequence[int], model: Model | None = None
    ) -> Run:
        """Return the run up to θ_reached.

        Parameters
        ----------
        reached : int
        reason : str
            Why it ends there, for those that were not frozen before.
        written : sequence of int
            The number of rows written for each record in `named`.
        model : Classifier or Layer, optional
            What `model` returns at θ_reached, where it has been called.
        """
        run = self.run
        parts = [
            rows.so_far(run.step, reached, count)
            for rows, count in zip(self.named, written, strict=True)
        ]
        parts += [rows.so_far() for rows in self.functions]
        history, steps = joined(run.history, run.steps, run.step, reached, parts, run.runs or 0)
        state = self._state()
        subspace = run.subspace if reached == run.step else None
        coefficients = run.coefficients if reached == run.step else ()
        if self.coefficients is not None and reached > run.step:
            coefficients = self.coefficients.copy()
        if self.subspace is not None:
            subspace = replace(self.subspace, model=self._trained(self.subspace.model), state=state)
            state = subspace.whole_state(state)
        return run._replace(
            model=self.model() if model is None else model,
            history=history,
            steps=steps,
            step=reached,
            state=state,
            subspace=subspace,
            coefficients=coefficients,
            averages=None if self.averages is None else self.averages.copy(),
            **self._ends(reached, reason),
        )

    def _ends(self, reached: int, reason: str) -> dict[str, Any]:
        """Return `reason` and `stopped` of the run that ends at θ_reached for ``reason``."""
        ended = -1 if reason == "steps" else reached
        ends = [
            (reason, ended) if k < 0 else (_core.StopReason(why).name, k)
            for k, why in zip(self.stopped.tolist(), self.reasons.tolist(), strict=True)
        ]
        if isinstance(self.run.reason, list):
            reasons, stopped = zip(*ends, strict=True)
            return {"reason": list(reasons), "stopped": np.array(stopped, np.int64)}
        [(reason, k)] = ends
        return {"reason": reason, "stopped": None if k < 0 else k}

    def _state(self) -> dict[str, tuple[Array, ...]]:
        """Return a copy of the state of the optimizer."""
        return {
            name: tuple(slot.copy() for slot in slots)
            for name, slots in zip(PARAMETERS, self.state, strict=True)
            if slots
        }

    def finish(self, end: _core.TrainingResult) -> Run:
        """Return the run as it ended, after writing its last checkpoint."""
        model = self.model()
        for rows in self.functions:
            rows.take(end.reached, self.parameters if rows.inside else model)
        if self.callback is not None:
            self.callback(end.reached, model, at_end=True)
        run = self.so_far(end.reached, self.ended_by or "steps", end.rows, model)
        if self.checkpoint is not None:
            run.save(self.checkpoint[0])
        return run


def _listed(reason: str | list[str]) -> list[str]:
    return [reason] if isinstance(reason, str) else reason


def _slots(count: int, given: tuple[Array, ...], theta: Array) -> Slots:
    """Return the optimizer's arrays of a parameter: copies of what is given, else zeros."""
    return tuple(slot.copy() for slot in given) or tuple(np.zeros_like(theta) for _ in range(count))
