"""The map as a heat map: operations by models, red where mhfast is slower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

from ..figures import BLUE, STYLE, titled
from .grid import AXES, OPERATIONS
from .map_report import LEAST, Map, matrix

# Ratios at the ends of the colours; in the middle, at 1, light red turns into white.
SLOWEST, FASTEST = 0.25, 16.0
RED, LIGHT_RED, IMPOSSIBLE, ROW = "#B2182B", "#F4A582", "0.85", 0.21


def draw(found: Map, path: Path) -> None:
    """Draw the ratios against the best formulation and, beside them, against ordinary code."""
    pairs = [matrix(found, ordinary=ordinary) for ordinary in (False, True)]
    operations = [name for name in OPERATIONS if any(key[0] == name for key in pairs[0])]
    models = [name for name in AXES[1] if any(key[1] == name for key in pairs[0])]
    with rc_context(STYLE):
        figure = titled(found.message, 1.9 + ROW * len(operations))
        axes = figure.subplots(1, 2, sharey=True)
        names = ("against the best formulation", "against ordinary code")
        for ax, name, ratios in zip(axes, names, pairs, strict=True):
            _panel(ax, ratios, operations, models)
            ax.set_title(name)
        axes[0].set_yticks(range(len(operations)), operations)
        figure.savefig(path)
    if path.suffix == ".png":
        _with_few_colours(path)


def _with_few_colours(path: Path) -> None:
    """Write a picture again with a palette: a third of the bytes, and nothing that one sees."""
    from PIL import Image  # which matplotlib needs

    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def _panel(
    ax: Axes, ratios: dict[tuple[str, str], float], operations: list[str], models: list[str]
) -> None:
    stops = [(0.0, RED), (0.5, LIGHT_RED), (0.5, "white"), (1.0, BLUE)]
    colours = LinearSegmentedColormap.from_list("ratios", stops)
    norm = TwoSlopeNorm(np.log(LEAST), np.log(SLOWEST), np.log(FASTEST))
    values = np.array(
        [[ratios.get((row, column), np.nan) for column in models] for row in operations]
    )
    ax.set_facecolor(IMPOSSIBLE)
    ax.imshow(np.log(values), cmap=colours, norm=norm, aspect="auto")
    for (k, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            strong = value < 0.5 or value > 6.0
            digits = 2 if value < 0.995 else 1 if value < 9.95 else 0
            number = f"{value:.{digits}f}".lstrip("0")
            ax.text(
                j, k, number, ha="center", va="center", fontsize=6.5,
                color="white" if strong else "black", fontweight="bold" if value < 1.0 else None,
            )  # fmt: skip
    ax.set_xticks(range(len(models)), models, rotation=40, ha="right", rotation_mode="anchor")
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
