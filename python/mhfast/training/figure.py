"""The figure that `Run.plot` draws; the one module of the package's own that needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..optimizers import GradientFlow
from .quantities import names

if TYPE_CHECKING:
    from .run import Run

BAND = (0.1, 0.9)
"""The quantiles over the runs between which a band is drawn."""

LARGEST = 1e300
"""Largest value of a line that is drawn: matplotlib computes ranges in float64."""

LOGARITHMIC = ("loss", "grad_norm")
"""The kinds of record that have a logarithmic axis, unless a value is negative."""


class RunFigure(Figure):
    """A figure that is not known to pyplot, and shows itself where a notebook displays it."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", bbox_inches="tight")
        return content.getvalue()


def draw(run: Run, ax: Axes | Sequence[Axes] | npt.NDArray[np.object_] | None) -> Figure:
    """Return the figure that `Run.plot` describes."""
    scalar = 1 if run.runs is None else 2
    panels: dict[str, list[str]] = {}
    for name, rows in run.history.items():
        if rows.ndim == scalar and not (name == "time" and _flowed(run)):
            panels.setdefault(_kind(name), []).append(name)
    if not panels:
        raise ValueError(
            f"plot: expected a run with a scalar record, such as 'loss', got one with "
            f"{', '.join(run.history) or 'no records'}"
        )
    given = _new_axes(len(panels)) if ax is None else _given_axes(ax, panels)
    timed = _timed(run, panels)
    for one, (kind, members) in zip(given, panels.items(), strict=True):
        _fill(one, run, kind, members, timed)
    given[-1].set_xlabel("time t" if timed else "step k")
    figure = given[0].get_figure(root=True)
    assert figure is not None
    return figure


def _new_axes(count: int) -> list[Axes]:
    figure = RunFigure(figsize=(6.4, 1.0 + 2.2 * count), layout="constrained")
    return list(figure.subplots(count, sharex=True, squeeze=False)[:, 0])


def _given_axes(
    ax: Axes | Sequence[Axes] | npt.NDArray[np.object_], panels: dict[str, list[str]]
) -> list[Axes]:
    given = [ax] if isinstance(ax, Axes) else list(np.ravel(np.asarray(ax, dtype=object)))
    for one in given:
        if not isinstance(one, Axes):
            raise TypeError(f"ax: expected matplotlib Axes, got {type(one).__name__}")
    if len(given) != len(panels):
        raise ValueError(
            f"ax: expected {len(panels)} Axes, one for each of {', '.join(panels)}, "
            f"got {len(given)}"
        )
    return given


def _flowed(run: Run) -> bool:
    """Return whether the run is the solution of a gradient flow, whose times are recorded."""
    return isinstance(run.optimizer, GradientFlow)


def _timed(run: Run, panels: dict[str, list[str]]) -> bool:
    """Return whether all that is drawn has a time; steps before the flow have none."""
    drawn = [run.steps[name] for members in panels.values() for name in members]
    return _flowed(run) and all(np.isin(k, run.steps["time"]).all() for k in drawn)


def _fill(ax: Axes, run: Run, kind: str, members: Sequence[str], timed: bool) -> None:
    """Draw the records of one kind, against the times of a flow if it is ``timed``."""
    drawn = {name: _drawable(run.history[name]) for name in members}
    if kind in LOGARITHMIC and _is_positive(list(drawn.values())):
        ax.set_yscale("log")
    left_out = _diverged(run)
    for name, rows in drawn.items():
        if rows.ndim == 1:
            along = run.steps[name]
            if timed:
                along = run.history["time"][np.searchsorted(run.steps["time"], along)]
            ax.plot(along, rows, label=name)
        else:
            label = name
            if left_out.any():
                label = f"{name} of {int((~left_out).sum())} runs; {int(left_out.sum())} diverged"
            _draw_runs(ax, label, run.steps[name], rows[~left_out])
    ax.set_ylabel(kind)
    if len(members) > 1 or left_out.any():
        ax.legend()


def _draw_runs(
    ax: Axes, label: str, k: npt.NDArray[np.int64], rows: npt.NDArray[np.float64]
) -> None:
    """Draw the mean and the band of rows (R, rows), where at least one value is finite."""
    k = k[np.isfinite(rows).any(axis=0)]
    rows = rows[:, np.isfinite(rows).any(axis=0)]
    (line,) = ax.plot(k, np.nanmean(rows, axis=0), label=label)
    low, high = np.nanquantile(rows, BAND, axis=0)
    ax.fill_between(k, low, high, color=line.get_color(), alpha=0.25, linewidth=0)


def _drawable(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return values with NaN in place of what no axis can show."""
    values = rows.astype(np.float64)
    return np.where(np.abs(values) <= LARGEST, values, np.nan)


def _is_positive(drawn: Sequence[npt.NDArray[np.float64]]) -> bool:
    """Return whether a logarithmic axis shows all values: none is negative, one is above 0."""
    values = np.concatenate([rows.ravel() for rows in drawn])
    values = values[np.isfinite(values)]
    return bool(values.size and values.min() >= 0 and values.max() > 0)


def _diverged(run: Run) -> npt.NDArray[np.bool_]:
    """Return which of R runs are left out, because their values grew beyond any range."""
    if isinstance(run.reason, str):
        return np.zeros(0, bool)
    ended = np.array([reason == "nonfinite" for reason in run.reason])
    return ended & (not ended.all())


def _kind(name: str) -> str:
    """Return the record of the vocabulary that a key stands for, else the key itself."""
    if name.startswith("cosine_"):
        return "cosine"
    return next((known for known in names() if f"_{name}".endswith(f"_{known}")), name)
