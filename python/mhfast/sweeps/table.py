"""The table of a sweep: one row for each point, run and recorded step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..training.display import scalar_columns
from ..training.run import Run
from .grid import Call, Point

if TYPE_CHECKING:
    from pandas import DataFrame
    from xarray import Dataset

Columns: TypeAlias = dict[str, npt.NDArray[Any]]

PLACE = ("point", "run", "step")
"""The columns that say where a row belongs."""


@dataclass(frozen=True)
class Failure:
    """A call that raised an exception.

    Attributes
    ----------
    points : tuple of dicts
        The points that it would have computed.
    error : str
        Type and text of the exception.
    traceback : str
        Its traceback, as Python prints it.
    """

    points: tuple[Point, ...]
    error: str
    traceback: str

    def __repr__(self) -> str:
        some = f"{len(self.points)} points" if len(self.points) > 1 else f"{self.points[0]}"
        return f"Failure({some}: {self.error})"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """What `mhfast.sweep` returns.

    Attributes
    ----------
    points : tuple of dicts
        The points of the grid, in order.
    columns : dict of arrays (rows,)
        The table: ``point`` (an index into ``points``), ``run``, ``step``, with ``seed=`` the
        ``seed`` that the function got, and one column for each recorded number, NaN where it was
        not recorded. Rows are in the order of the points, then
        of the runs, then of the steps.
    failures : tuple of Failure
        The calls that raised an exception. Their points have no rows.

    Examples
    --------
    >>> import mhfast as mh
    >>> table = mh.sweep(lambda a, b: {"product": a * b}, {"a": [1, 2], "b": [3]})
    >>> table.points
    ({'a': 1, 'b': 3}, {'a': 2, 'b': 3})
    >>> table.columns["product"], len(table.failures)
    (array([3., 6.]), 0)
    """

    points: tuple[Point, ...]
    columns: Columns
    failures: tuple[Failure, ...] = ()

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        values = ", ".join(name for name in self.columns if name not in PLACE)
        failed = f", failures={len(self.failures)}" if self.failures else ""
        rows = len(self.columns["point"])
        return f"Sweep({len(self.points)} points, {rows} rows, columns=<{values}>{failed})"

    def to_dataframe(self) -> DataFrame:
        """Return the table as a pandas DataFrame, with a column for each name of the grid.

        Returns
        -------
        DataFrame
            Columns: point, the names of the grid, run, step, then what was recorded.

        Raises
        ------
        ImportError
            If pandas is not installed.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> def trained(lr):
        ...     start = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        ...     return mh.train(start, data, steps=2, optimizer=mh.GradientDescent(lr))
        >>> mh.sweep(trained, {"lr": [0.1, 0.2]}).to_dataframe().shape
        (6, 5)
        """
        pandas = _optional("pandas", "to_dataframe")
        place = self.columns["point"]
        columns: dict[str, Any] = {"point": place}
        for name in self.points[0]:
            values = [point[name] for point in self.points]
            columns[name] = pandas.Series([values[j] for j in place])
        columns |= {name: rows for name, rows in self.columns.items() if name != "point"}
        frame: DataFrame = pandas.DataFrame(columns)
        return frame

    def to_xarray(self) -> Dataset:
        """Return the table as an xarray Dataset: a dimension for each name of the grid, and step.

        There is a dimension ``run`` too where a point has several runs. Missing values are NaN.

        Returns
        -------
        xarray.Dataset

        Raises
        ------
        ImportError
            If pandas or xarray is not installed.

        Examples
        --------
        >>> import mhfast as mh
        >>> table = mh.sweep(lambda lr: {"loss": lr}, {"lr": [0.1, 0.2]})
        >>> table.to_xarray()  # doctest: +SKIP
        """
        _optional("xarray", "to_xarray")
        frame = self.to_dataframe().drop(columns="point")
        names = [*self.points[0], "step"]
        if frame.duplicated(names).any():
            names.insert(-1, "run")
        else:
            frame = frame.drop(columns="run")
        result: Dataset = frame.set_index(names).to_xarray()
        return result


def columns_of(result: Any, call: Call) -> Columns:
    """Return the rows of one call: what a function returned, as a table without grid values.

    Raises
    ------
    TypeError
        If the result is neither a Run nor a dict of real numbers or arrays.
    ValueError
        If it has not one run for each point of a batched call.
    """
    count = len(call.points) if call.batched else None
    parts = _of_run(result) if isinstance(result, Run) else _of_mapping(result, count)
    if not parts:
        raise ValueError("function: expected a result with at least one number in it, got none")
    runs = max(len(column) for _, column in parts.values())
    if count is not None and any(len(column) != count for _, column in parts.values()):
        raise ValueError(
            f"function: expected a result with R = {count} runs, one for each value of batch, "
            f"got {runs}"
        )
    steps = np.unique(np.concatenate([k for k, _ in parts.values()]))
    table: Columns = {
        "point": np.repeat(call.points, len(steps))
        if call.batched
        else np.full(runs * len(steps), call.points[0]),
        "run": np.repeat(np.arange(runs), len(steps)),
        "step": np.tile(steps, runs),
    }
    if call.seeds:
        table["seed"] = np.repeat(call.seeds, len(table["point"]) // len(call.seeds))
    for name, (k, column) in parts.items():
        if name in PLACE or (name == "seed" and call.seeds):
            raise ValueError(f"function: expected results with other names than {name!r}")
        rows = np.full((runs, len(steps)), np.nan)
        rows[:, np.searchsorted(steps, k)] = column
        table[name] = rows.reshape(-1)
    return table


Part: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[Any]]


def _of_run(run: Run) -> dict[str, Part]:
    """Return steps (rows,) and values (R, rows) of every scalar record."""
    return {name: (k, np.atleast_2d(column)) for name, k, column in scalar_columns(run)}


def _of_mapping(result: Any, runs: int | None) -> dict[str, Part]:
    """Return the numbers of a dict as records of one step; a vector has a column for each entry."""
    if not isinstance(result, Mapping):
        raise TypeError(
            f"function: expected a Run or a dict of numbers as a result, "
            f"got {type(result).__name__}"
        )
    at_once = np.zeros(1, np.int64)
    parts: dict[str, Part] = {}
    for name, value in result.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"function: expected real numbers as {name!r}, got {value!r:.60}")
        if runs is None:
            array = array[None]
        elif array.shape[:1] != (runs,):
            raise ValueError(
                f"function: expected {name!r} of shape (R, ...) = ({runs}, ...), got {array.shape}"
            )
        if array.ndim > 2:
            raise ValueError(
                f"function: expected {name!r} to be a number or a vector of each run, "
                f"got shape {array.shape}"
            )
        if array.ndim == 1:
            parts[str(name)] = (at_once, array[:, None].astype(np.float64))
        else:
            for j in range(array.shape[1]):
                parts[f"{name}[{j}]"] = (at_once, array[:, j : j + 1].astype(np.float64))
    return parts


def joined(tables: Sequence[Columns]) -> Columns:
    """Return the tables of all calls as one, in the order of the points."""
    names = dict.fromkeys((*PLACE, *(name for table in tables for name in table)))
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in names}
    for table in tables:
        rows = len(table["point"])
        for name, column in parts.items():
            column.append(table.get(name, np.full(rows, np.nan)))
    columns = {
        name: np.concatenate(column) if column else np.zeros(0, np.int64 if name in PLACE else None)
        for name, column in parts.items()
    }
    order = np.lexsort((columns["step"], columns["run"], columns["point"]))
    return {name: column[order] for name, column in columns.items()}


def _optional(module: str, what: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"Sweep.{what} needs {module}: pip install {module}") from error
