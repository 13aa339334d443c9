"""A `Run` as HTML: what happened in words, and a small curve that needs no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .run import Run

WIDTH, HEIGHT, EDGE = 320, 80, 4
MOST_POINTS = 160
MOST_LINES = 12
"""Runs side by side that are drawn, evenly chosen among all."""

Numbers = npt.NDArray[np.float64]


def html(run: Run[Any]) -> str:
    """Return the repr of the run above a curve of its first scalar record, if there is one."""
    text = f"<code>{escape(repr(run))}</code>"
    scalar = 1 if run.runs is None else 2
    name = next((name for name, rows in run.history.items() if rows.ndim == scalar), None)
    if name is None:
        return f"<div>{text}</div>"
    rows = run.history[name].astype(np.float64).reshape(-1, len(run.steps[name]))
    finite = rows[np.isfinite(rows)]
    if not finite.size:
        return f"<div>{text}</div>"
    lines = rows[np.unique(np.linspace(0, len(rows) - 1, MOST_LINES).astype(int))]
    logarithmic = bool(finite.min() > 0)
    drawn = _polylines(run.steps[name], lines, logarithmic)
    shown = f" ({len(lines)} of {len(rows)} runs)" if len(lines) < len(rows) else ""
    axis = ", logarithmic" if logarithmic else ""
    words = (
        f"{escape(name)}{shown}: {finite.min():.3g} to {finite.max():.3g}{axis}, "
        f"steps {run.steps[name][0]} to {run.steps[name][-1]}"
    )
    return (
        f'<div>{text}<br><svg width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{words}" xmlns="http://www.w3.org/2000/svg">{drawn}</svg>'
        f"<br><small>{words}</small></div>"
    )


def _polylines(k: npt.NDArray[np.int64], lines: Numbers, logarithmic: bool) -> str:
    """Return the lines (lines, rows) as SVG, with gaps where a value is not finite."""
    kept = np.unique(np.linspace(0, len(k) - 1, MOST_POINTS).astype(int))
    values = np.where(np.isfinite(lines), lines, np.nan)[:, kept]
    if logarithmic:
        values = np.log10(values)
    low, high = np.nanmin(values), np.nanmax(values)
    x = EDGE + (k[kept] - k[0]) * ((WIDTH - 2 * EDGE) / max(k[-1] - k[0], 1))
    y = HEIGHT - EDGE - (values - low) * ((HEIGHT - 2 * EDGE) / ((high - low) or 1.0))
    style = 'fill="none" stroke="#1f77b4" stroke-width="1.5"'
    return "".join(
        f'<polyline {style} points="{points}"/>' for line in y for points in _pieces(x, line)
    )


def _pieces(x: Numbers, y: Numbers) -> Sequence[str]:
    """Return the points of each stretch of finite values."""
    ends = np.flatnonzero(~np.isfinite(y))
    pieces = [np.arange(a + 1, b) for a, b in zip([-1, *ends], [*ends, len(y)], strict=True)]
    return [" ".join(f"{x[i]:.1f},{y[i]:.1f}" for i in piece) for piece in pieces if len(piece)]
