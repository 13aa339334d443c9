"""The run axis of a `Run`: selecting some of its runs, and branching one run into several.

The selection is the Run that training these runs without the others would have returned: a run that
stopped before the others ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import AXES
from .._arguments.runs import repeated
from .._arguments.values import Array
from ..models import Model
from ..models.problem import with_arrays
from ..optimizers import of_runs
from .segments import of_training

if TYPE_CHECKING:
    from .run import Run, Stopped

M = TypeVar("M", bound=Model)


def selected(run: Run[M], index: int | slice | npt.ArrayLike) -> Run[M]:
    """Return one run (for an integer) or several (for a slice, a mask or integers)."""
    if run.runs is None:
        raise TypeError("run: expected a Run with a run axis to select from, got one training")
    assert isinstance(run.stopped, np.ndarray)
    which: Any = checks.run_index(index, run.runs)
    one = isinstance(which, int)
    ends = run.stopped[which]
    last = run.step if np.any(ends < 0) else int(np.max(ends))
    history, steps = {}, {}
    for name, rows in run.history.items():
        history[name], steps[name] = _until(last, rows[which], run.steps[name], 0 if one else 1)
    return run._replace(
        model=run.model[which],
        start=run.start[which],
        state={name: tuple(s[which] for s in slots) for name, slots in run.state.items()},
        history=history,
        steps=steps,
        step=last,
        reason=run.reason[which] if one else [run.reason[r] for r in np.arange(run.runs)[which]],
        stopped=_ended_at(ends) if one else ends,
        optimizer=of_runs(run.optimizer, which),
        batches=None if run.batches is None else run.batches.of_runs(which),
        since=settled_steps(np.broadcast_to(run.since, run.runs)[which]),
        subspace=None if run.subspace is None else run.subspace[which],
        segments=of_training(run.segments, which, last),
        averages=None if run.averages is None else run.averages.of_runs(which),
        coefficients=tuple(array[which] for array in run.coefficients),
    )


def _ended_at(end: np.int64) -> int | None:
    return None if end < 0 else int(end)


def _until(
    last: int, rows: npt.NDArray[Any], k: npt.NDArray[np.int64], axis: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the rows up to θ_last, whose own row is the first at or after it."""
    if not len(k) or k[-1] < last:  # a record that was not continued
        return rows, k
    count = int(np.searchsorted(k, last)) + 1
    k = k[:count].copy()
    k[-1] = last
    return np.take(rows, range(count), axis), k


def spread(run: Run[M], runs: int) -> Run[M]:
    """Return the run with a run axis of length ``runs`` on everything trained and recorded.

    A Run that already has it keeps its arrays; a single run is repeated, so that it can be resumed
    as several. 0 means no run axis.
    """
    if not runs:
        return run
    model = _spread_model(run.model, run.wrt, runs)
    start = model if run.start is run.model else _spread_model(run.start, run.wrt, runs)
    if run.averages is not None:
        run = run._replace(averages=run.averages.spread(runs))
    if isinstance(run.reason, list):
        return run._replace(model=model, start=start)
    ended: Stopped = np.full(runs, -1 if run.stopped is None else run.stopped, np.int64)
    inside = run.subspace
    if inside is not None:
        inside = replace(
            inside,
            start=_spread_model(inside.start, run.wrt, runs),
            model=_spread_model(inside.model, run.wrt, runs),
            state=_spread_state(inside.state, runs),
        )
    return run._replace(
        model=model,
        start=start,
        state=_spread_state(run.state, runs),
        subspace=inside,
        coefficients=tuple(repeated(array, 1, runs) for array in run.coefficients),
        history={name: np.repeat(rows[None], runs, axis=0) for name, rows in run.history.items()},
        reason=[run.reason] * runs,
        stopped=ended,
    )


def _spread_state(
    state: Mapping[str, tuple[Array, ...]], runs: int
) -> dict[str, tuple[Array, ...]]:
    return {
        name: tuple(repeated(slot, AXES[name], runs) for slot in slots)
        for name, slots in state.items()
    }


def _spread_model(model: M, names: tuple[str, ...], runs: int) -> M:
    given = model.parameters
    lacking = [name for name in names if given[name].ndim == AXES[name]]
    arrays = {name: repeated(given[name], AXES[name], runs) for name in lacking}
    for array in arrays.values():
        array.flags.writeable = False
    return with_arrays(model, arrays) if arrays else model


def settled_steps(steps: npt.ArrayLike) -> int | tuple[int, ...]:
    """Return steps of runs as `Run.since` keeps them: one number where all are the same."""
    each = [int(step) for step in np.ravel(steps)]
    return each[0] if len(set(each)) == 1 else tuple(each)
