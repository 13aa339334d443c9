"""How the figures of mhfast look: 1600 pixels wide, the message as title, names on the lines.

The demo, the atlas and the scripts in `examples/` draw with it; it needs matplotlib, and
`import mhfast` does not import it. Everything is plain matplotlib, used inside `rc_context(STYLE)`,
the saving of the figure included, because matplotlib creates ticks only then.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["BLUE", "GREEN", "ORANGE", "PINK", "STYLE", "name_lines", "titled"]

# Of Okabe and Ito's palette for all kinds of colour vision.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}
"""Settings of matplotlib for a figure 8 inches wide."""

CHARACTERS = 88
"""The number of characters of a title that fit into a line of 8 inches, with some room."""

ROUNDING = 1e-6
"""The rounding of the place of a point at the end of an axis, as a share of its length."""

INSIDE = (0.02, 0.98)
"""Where names of lines stand, as shares of the height of the axes."""


def titled(message: str, height: float) -> Figure:
    """Return a figure 1600 pixels wide whose title is its message.

    Parameters
    ----------
    message : str
        What the figure shows; broken into lines of about equal length unless it has lines already.
    height : float
        In units of 200 pixels; the width is 8 of them.

    Returns
    -------
    matplotlib.figure.Figure
        A figure without axes, unknown to pyplot.

    Examples
    --------
    >>> from mhfast import figures
    >>> figure = figures.titled("The loss halves with every step", 3.0)
    >>> [float(pixels) for pixels in figure.get_size_inches() * figure.dpi]
    [1600.0, 600.0]
    """
    if "\n" not in message:
        lines = math.ceil(len(message) / CHARACTERS)
        shortest = math.ceil(len(message) / lines)
        widths = range(shortest, CHARACTERS + 1)
        folds = (textwrap.wrap(message, width, break_long_words=False) for width in widths)
        message = "\n".join(next((fold for fold in folds if len(fold) == lines), [message]))
    figure = Figure(figsize=(8.0, height), layout="constrained", dpi=200)
    figure.suptitle(message, fontsize=10.5, fontweight="bold")
    return figure


def name_lines(
    ax: Axes, lines: Iterable[tuple[float, str, Any]] | None = None, *, apart: float = 0.08
) -> None:
    """Write names at the right end of lines, moved apart where they would overlap.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Its limits have to be final.
    lines : iterable of (float, str, color), optional
        For each line the y at which it ends, its name and its color. By default those of all
        lines of ``ax`` that have a label; no legend is needed then. A line that is nowhere finite
        gets no name.
    apart : float
        Least distance of two names of one line, as a share of the height of ``ax``; names of
        several lines are set apart by as many times that.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from mhfast import figures
    >>> ax = Figure().subplots()
    >>> _ = ax.plot([0, 1, 2], [3.0, 2.0, 1.0], color=figures.BLUE, label="training")
    >>> figures.name_lines(ax)
    >>> [name.get_text() for name in ax.texts]
    ['training']
    """
    if lines is None:
        named = list(_ends(ax))
    else:
        transform, x = ax.transData - ax.transAxes, ax.get_xlim()[1]
        named = [(transform.transform((x, y))[1], name, color) for y, name, color in lines]
    named = sorted((end for end in named if np.isfinite(end[0])), key=lambda end: end[0])
    heights = np.array([height for height, _, _ in named])
    sizes = np.array([1 + name.count("\n") for _, name, _ in named])
    gaps = apart * (sizes[1:] + sizes[:-1]) / 2
    for _ in range(100):  # every pass pushes neighbours apart by what is missing, half for each
        for k in range(len(named) - 1):
            missing = max(gaps[k] - (heights[k + 1] - heights[k]), 0.0)
            heights[k : k + 2] += -missing / 2, missing / 2
        heights[:1] = np.maximum(heights[:1], INSIDE[0])
        heights[-1:] = np.minimum(heights[-1:], INSIDE[1])
    for height, (_, name, color) in zip(heights, named, strict=True):
        ax.text(1.015, height, name, color=color, va="center", fontsize=8, transform=ax.transAxes)


def _ends(ax: Axes) -> Iterable[tuple[float, str, Any]]:
    """Yield the height at which each labelled line of ``ax`` ends, its label and its color."""
    ax.get_xlim(), ax.get_ylim()  # this updates the limits
    for line in ax.get_lines():
        label = str(line.get_label())
        x, y = (line.get_transform() - ax.transAxes).transform(line.get_xydata()).T
        y = y[np.isfinite(y) & (x > -ROUNDING) & (x < 1.0 + ROUNDING)]
        if len(y) and not label.startswith("_"):
            yield float(y[-1]), label, line.get_color()
