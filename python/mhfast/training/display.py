"""A `Run` as a table and as a figure, with what is installed for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from .run import Run


def table(run: Run[Any]) -> DataFrame:
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


def figure(run: Run[Any], ax: Axes | Sequence[Axes] | npt.NDArray[np.object_] | None) -> Figure:
    """Return the figure that `Run.plot` describes."""
    _optional("matplotlib.figure", "plot")
    from .figure import draw

    return draw(run, ax)


def _optional(module: str, what: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"Run.{what} needs {package}: pip install {package}") from error
