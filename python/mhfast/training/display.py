"""A `Run` as a table and as a figure."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .quantities import names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from .run import Run

BAND = (0.1, 0.9)
"""The quantiles over the runs between which a band is drawn."""


def table(run: Run) -> DataFrame:
    """Return the history as `Run.to_dataframe` describes."""
    pandas = _optional("pandas", "to_dataframe")
    columns = {}
    for name, k, column in scalar_columns(run):
        if run.runs is None:
            index: Any = pandas.Index(k, name="step")
        else:
            index = pandas.MultiIndex.from_product([range(run.runs), k], names=["run", "step"])
        columns[name] = pandas.Series(column.reshape(-1), index)
    frame: DataFrame = pandas.DataFrame(columns).sort_index()
    return frame if run.runs is not None else frame.rename_axis("step")


def scalar_columns(run: Run) -> Iterator[tuple[str, npt.NDArray[np.int64], npt.NDArray[Any]]]:
    """Go through the columns of the table: name, steps (rows,) and values (rows,) or (R, rows)."""
    scalar = 1 if run.runs is None else 2
    for name, rows in run.history.items():
        if rows.ndim == scalar:
            yield name, run.steps[name], rows
        elif rows.ndim == scalar + 1:
            for j in range(rows.shape[-1]):
                yield f"{name}[{j}]", run.steps[name], rows[..., j]


def figure(run: Run) -> Figure:
    """Return the figure that `Run.plot` describes."""
    pyplot = _optional("matplotlib.pyplot", "plot")
    scalar = 1 if run.runs is None else 2
    panels: dict[str, list[str]] = {}
    for name, rows in run.history.items():
        if rows.ndim == scalar:
            panels.setdefault(_kind(name), []).append(name)
    if not panels:
        raise ValueError("plot: expected a run with a scalar record, got none")
    result: Figure
    result, axes = pyplot.subplots(
        len(panels), sharex=True, squeeze=False, layout="constrained",
        figsize=(6.4, 1.0 + 2.2 * len(panels)),
    )  # fmt: skip
    for ax, (kind, members) in zip(axes[:, 0], panels.items(), strict=True):
        for name in members:
            _draw(ax, name, run.steps[name], run.history[name])
        if kind in ("loss", "grad_norm"):
            ax.set_yscale("log")
        ax.set_ylabel(kind)
        if len(members) > 1:
            ax.legend()
    axes[-1, 0].set_xlabel("step k")
    return result


def _draw(ax: Axes, name: str, k: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
    """Draw rows (rows,), or the mean and the band of rows (R, rows)."""
    if rows.ndim == 1:
        ax.plot(k, rows, label=name)
        return
    (line,) = ax.plot(k, rows.mean(axis=0), label=name)
    low, high = np.quantile(rows, BAND, axis=0)
    ax.fill_between(k, low, high, color=line.get_color(), alpha=0.25, linewidth=0)


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
    return next((known for known in names() if f"_{name}".endswith(f"_{known}")), name)
