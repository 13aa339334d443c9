"""`Run`: what training returns, with its history; it can be saved, drawn and continued."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _run_file
from ._values import same_fields
from .models import Classifier
from .optimizers import Optimizer
from .recording import NAMES, Metric, MissingFunction

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Stop: TypeAlias = Mapping[str, float] | Callable[[int, Classifier], object]


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """The result of `mhfast.train`, and all that is needed to go on from there.

    Attributes
    ----------
    model : Classifier
        The parameters θ_k at the step that was reached.
    history : dict of arrays
        One entry a record, under its name; the cosines under ``cosine_<direction>``, functions
        under their name. Row r holds the value at step ``steps[name][r]``.
    steps : dict of int arrays
        The k of every row: the multiples of the record's "every" and the step reached. Values at k
        belong to θ_k, before step k + 1.
    step : int
        The step k reached, counted from the start of the run over all calls that continued it.
    reason : str
        Why it ended: "steps" when all steps that were asked for are done; "loss", "grad_norm",
        "accuracy" or "margin" when that threshold is met; "stop" or "callback" when that function
        said so; "nonfinite" when the loss or a gradient at θ_k is not finite (no step is taken from
        there); "interrupted" or "exception" in a run that an exception carries; "checkpoint" in a
        file written on the way.
    optimizer, loss, wrt, record, stop
        The settings, which continuing the run keeps unless told otherwise.
    start : Classifier
        The parameters θ_0, from which "distance" is measured.

    Notes
    -----
    Functions in ``record`` and ``stop`` survive copying. Saving and pickling replace them by a
    placeholder, since code cannot be stored safely: to go on, give them again.
    """

    model: Classifier
    history: dict[str, npt.NDArray[Any]]
    steps: dict[str, npt.NDArray[np.int64]]
    step: int
    reason: str
    optimizer: Optimizer
    loss: str
    wrt: tuple[str, ...]
    record: dict[str | Metric, int]
    stop: Stop
    start: Classifier

    @property
    def stopped(self) -> bool:
        """Whether the run ended before all steps that were asked for were done."""
        return self.reason != "steps"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run as an .npz archive without pickled objects.

        The file appears under ``path`` at once and complete, or not at all.
        """
        _run_file.write(path, _stored(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """Read a run that `save` wrote; nothing in the file is executed.

        Raises
        ------
        ValueError
            If the file is not a saved run.
        """
        return cls(**_run_file.read(path))

    def to_dataframe(self) -> DataFrame:
        """Return the history as a pandas DataFrame, one row a step and one column a record.

        A record with one value a head, or with any other single axis, gets a column for each:
        ``attention_max[0]``. Records with more axes do not fit a table and are left out. Steps at
        which something was not recorded hold NaN.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        pandas = _optional("pandas", "to_dataframe")
        columns = {}
        for name, rows in self.history.items():
            if rows.ndim == 1:
                columns[name] = pandas.Series(rows, self.steps[name])
            elif rows.ndim == 2:
                for j, column in enumerate(rows.T):
                    columns[f"{name}[{j}]"] = pandas.Series(column, self.steps[name])
        frame: DataFrame = pandas.DataFrame(columns)
        return frame.rename_axis("step")

    def plot(self) -> Figure:
        """Draw the scalar records against the steps, one panel for each kind of record.

        Records of the training data and of test sets share a panel, and so do all cosines; the loss
        and the norm of the gradient have a logarithmic axis.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If there is no scalar record.
        """
        pyplot = _optional("matplotlib.pyplot", "plot")
        panels: dict[str, list[str]] = {}
        for name, rows in self.history.items():
            if rows.ndim == 1:
                panels.setdefault(_kind(name), []).append(name)
        if not panels:
            raise ValueError("plot: expected a run with a scalar record, got none")
        figure: Figure
        figure, axes = pyplot.subplots(
            len(panels), sharex=True, squeeze=False, layout="constrained",
            figsize=(6.4, 1.0 + 2.2 * len(panels)),
        )  # fmt: skip
        for ax, (kind, names) in zip(axes[:, 0], panels.items(), strict=True):
            for name in names:
                ax.plot(self.steps[name], self.history[name], label=name)
            if kind in ("loss", "grad_norm"):
                ax.set_yscale("log")
            ax.set_ylabel(kind)
            if len(names) > 1:
                ax.legend()
        axes[-1, 0].set_xlabel("step k")
        return figure

    def __getstate__(self) -> dict[str, Any]:
        return _stored(self)

    def __copy__(self) -> Run:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        return Run(**{name: deepcopy(value, memo) for name, value in vars(self).items()})

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    def __repr__(self) -> str:
        return (
            f"Run(step={self.step}, reason={self.reason!r}, optimizer={self.optimizer}, "
            f"history=<{', '.join(self.history)}>)"
        )


class Interrupted(KeyboardInterrupt):
    """Training was interrupted by Ctrl-C.

    Attributes
    ----------
    run : Run
        The run up to the step reached; ``mhfast.train(run, ...)`` goes on from there.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return f"training was interrupted at step {self.run.step}; .run holds the run so far"


def _stored(run: Run) -> dict[str, Any]:
    """Return the fields of the run with placeholders for its functions."""
    values = {field.name: getattr(run, field.name) for field in fields(run)}
    values["record"] = {
        MissingFunction(what.__name__) if callable(what) else what: every
        for what, every in run.record.items()
    }
    if callable(run.stop):
        values["stop"] = MissingFunction(getattr(run.stop, "__name__", "stop"))
    return values


def _optional(module: str, what: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"Run.{what} needs {package}: pip install {package}") from error


def _kind(name: str) -> str:
    """Return the record of the vocabulary that a key stands for, else the key itself."""
    if name.startswith("cosine_"):
        return "cosine"
    return next((known for known in NAMES if f"_{name}".endswith(f"_{known}")), name)
