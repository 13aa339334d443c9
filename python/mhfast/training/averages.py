"""Averages of the iterates of a training, as Polyak and Ruppert take them.

Averaged from step a on, a trained parameter has at step k ≥ a the average

    θ̄_k = (θ_a + θ_{a+1} + ... + θ_k) / (k - a + 1),

computed in the loop of the core as a running mean in float64. A record ``<name>_average``, such as
"W_average", holds θ̄_k, and NaN before step a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import AXES, PARAMETERS
from .._arguments.runs import repeated
from .._arguments.values import same_fields
from ..models import Model, Stack
from ..models.problem import with_arrays
from .quantities import AVERAGE, Entry

if TYPE_CHECKING:
    from .run import Run

Means: TypeAlias = dict[str, npt.NDArray[np.float64]]
CoreAverages: TypeAlias = tuple[
    int, npt.NDArray[np.int64], tuple[npt.NDArray[np.float64] | None, ...]
]


@dataclass(frozen=True, eq=False)
class Averages:
    """The means of a run over the iterates that it has taken steps from.

    Attributes
    ----------
    first : int
        The step a from which on iterates are averaged.
    counts : int64 array (max(R, 1),)
        The iterates θ_a, ..., θ_{k-1} that the means of each run have, at step k of the run.
    means : dict of float64 arrays
        Their mean, of each trained parameter, of its shape.
    """

    first: int
    counts: npt.NDArray[np.int64]
    means: Means

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    @property
    def core(self) -> CoreAverages:
        """The averages in the form that the core expects, which overwrites them."""
        return self.first, self.counts, tuple(map(self.means.get, PARAMETERS))

    def copy(self) -> Averages:
        """Return averages with arrays of their own, which the core may overwrite."""
        means = {name: mean.copy() for name, mean in self.means.items()}
        return Averages(self.first, self.counts.copy(), means)

    def of_runs(self, which: Any) -> Averages:
        """Return those of one run (an integer) or of some."""
        counts = np.atleast_1d(self.counts[which])
        means = {name: mean[which].copy() for name, mean in self.means.items()}
        return Averages(self.first, counts, means)

    def spread(self, runs: int) -> Averages:
        """Return those of as many runs, each with these."""
        means = {name: repeated(mean, AXES[name], runs) for name, mean in self.means.items()}
        return Averages(self.first, np.resize(self.counts, runs), means)

    def model(self, run: Run[Any]) -> Model:
        """Return the model of the run with θ̄_k of all that was trained."""
        ends = np.asarray(run.step if run.stopped is None else run.stopped)
        ends = np.where(ends < 0, run.step, ends)
        if np.any(ends < self.first):
            raise ValueError(
                f"average: expected a run that has reached step {self.first}, the first one that "
                f"is averaged, got one at step {int(ends.min())}"
            )
        arrays = {}
        for name, mean in self.means.items():
            theta = run.model.parameters[name]
            counts = self.counts.reshape(-1, *[1] * AXES[name]) + 1
            whole = mean + (theta - mean) / (counts if run.runs else counts[0])
            arrays[name] = whole.astype(theta.dtype)
            arrays[name].flags.writeable = False
        averaged: Model = with_arrays(run.model, arrays)
        return averaged


def chosen(run: Run[Any], average: int | None, entries: Sequence[Entry]) -> Averages | None:
    """Return the averages of a run that trains, None where none are kept.

    Parameters
    ----------
    run : Run
        The run, with the settings of this call.
    average : int or None
        The argument of `mhfast.train`.
    entries : sequence of Entry
        What is recorded; a record of an average asks for averages from here on.

    Raises
    ------
    TypeError
        If `average` is not an integer.
    ValueError
        If it is a step that the run has left behind without averaging, or below 0; if an average is
        recorded of a parameter that is not trained, or of a stack.
    """
    recorded = [entry.name for entry in entries if entry.name.endswith(AVERAGE)]
    kept: Averages | None = run.averages
    if isinstance(run.model, Stack):
        if average is not None or recorded:
            raise ValueError("average: expected None for a Stack, whose iterates are not averaged")
        return None
    for name in recorded:
        if name.removesuffix(AVERAGE) not in run.wrt:
            raise ValueError(
                f"record {name!r}: expected the average of a parameter that is trained, which are "
                f"{', '.join(run.wrt)}"
            )
    if kept is not None and set(kept.means) != set(run.wrt):
        kept = None  # other parameters are trained from here on
    if average is not None:
        first = checks.integer(average, "average", "the number of a step")
        if kept is not None and first == kept.first:
            return kept
        if first < run.step:
            raise ValueError(
                f"average: expected a step from {run.step} on, where the run stands, got {first}"
            )
        return _none_yet(run, first)
    if kept is not None or not recorded:
        return kept
    return _none_yet(run, run.step)


def _none_yet(run: Run[Any], first: int) -> Averages:
    means = {name: np.zeros(run.model.parameters[name].shape) for name in run.wrt}
    return Averages(first, np.zeros(run.runs or 1, np.int64), means)
