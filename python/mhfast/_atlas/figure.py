"""What the figures of the atlas share."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..figures import BLUE, GREEN, ORANGE, PINK, STYLE, name_lines, titled

GRAY = "0.5"
COLORS = (BLUE, ORANGE, GREEN, PINK, "black")

Array = npt.NDArray[np.floating[Any]]


def panels(
    title: str, rows: int = 1, columns: int = 2, *, height: float = 3.2, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure 1600 pixels wide with the message as title, and its axes row by row."""
    with rc_context(STYLE):
        figure = titled(title, height)
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def band(
    ax: Axes, x: npt.ArrayLike, y: Array, color: Any, label: str | None, style: str = "-"
) -> None:
    """Draw the mean over the first axis, with a band from the 5th to the 95th percentile."""
    low, high = np.quantile(y, (0.05, 0.95), axis=0)
    ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    ax.plot(x, y.mean(axis=0), style, color=color, label=label)


def label(ax: Axes, x: str, y: str, title: str | None = None, **options: Any) -> None:
    """Name the axes, the panel and the lines that have a label."""
    ax.set(xlabel=x, ylabel=y, **options)
    if title is not None:
        ax.set_title(title, fontsize=9)
    for line in ax.get_lines():
        name = str(line.get_label())
        if "\n" not in name and not name.startswith("_"):
            line.set_label(textwrap.fill(name, 16))
    name_lines(ax)


def pixels(ax: Axes, values: Array, *, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Draw a small matrix with its numbers."""
    ax.imshow(values, cmap="Blues", vmin=min(0.0, float(values.min())), vmax=1.0)
    for i, j in np.ndindex(*values.shape):
        ax.text(j, i, f"{values[i, j]:.3f}", ha="center", va="center",
                color="white" if values[i, j] > 0.6 else "black")  # fmt: skip
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
