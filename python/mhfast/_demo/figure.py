"""The demo as one figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..figures import BLUE, ORANGE, STYLE, name_lines
from .experiments import CONVENTIONS, STARTS, Array, DigitsResult, HeadsResult, SaturationResult
from .report import loss_ratio


def draw(digits: DigitsResult, heads: HeadsResult, saturation: SaturationResult) -> Figure:
    """Draw digits and saturation above, the role of H below, each with what it shows as its title.

    Lines are means over splits or trials (medians for saturation); bands reach from the smallest
    to the largest.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(9.8, 7.7), layout="constrained", dpi=1600 / 9.8)
        halves: Any = figure.subfigures(2, 1, height_ratios=[1.0, 1.7], hspace=0.06)
        top, bottom = halves
        curves, maps, change = top.subfigures(1, 3, width_ratios=[1.9, 1.9, 1.2], wspace=0.04)
        _draw_digits(curves, digits)
        _draw_attention(maps, digits)
        _draw_saturation(change, saturation)
        _draw_heads(bottom, heads)
    return figure


def _band(ax: Axes, x: Any, y: Array, color: Any, label: str, centre: Any = np.mean) -> None:
    ax.fill_between(x, y.min(axis=0), y.max(axis=0), color=color, alpha=0.18, linewidth=0)
    ax.plot(x, centre(y, axis=0), color=color, label=label)


def _title(panel: Any, letter: str, text: str) -> None:
    panel.suptitle(f"({letter})  {text}", fontsize=10, x=0.02, ha="left")


def _draw_digits(panel: Any, result: DigitsResult) -> None:
    losses, errors = panel.subplots(1, 2)
    k = result.steps[1:]
    _band(losses, k, result.train_loss[:, 1:], BLUE, "training")
    _band(losses, k, result.test_loss[:, 1:], ORANGE, "test")
    losses.set(xlabel="step k", ylabel="loss", xscale="log", yscale="log")
    losses.legend(loc="lower left")
    _band(errors, k, 100.0 * result.test_error[:, 1:], ORANGE, "test")
    errors.set(xlabel="step k", ylabel="test error (%)", xscale="log", ylim=(0.0, None))
    accuracy = 100.0 * (1.0 - result.test_error[:, -1].mean())
    text = f"3 from 8 in {accuracy:.1f} % of new images"
    _title(panel, "a", f"Attention over the rows of an image tells\n{text}")


def _draw_attention(panel: Any, result: DigitsResult) -> None:
    ax = panel.subplots()
    both = (result.attention_before, result.attention_after)
    H, q, T = both[0].shape
    gap = 1  # between maps, in entries of a map
    tiles = np.full((2 * q + gap, H * (T + gap) - gap), np.nan)
    for row, maps in enumerate(both):
        for h, weights in enumerate(maps):
            tiles[row * (q + gap) :, h * (T + gap) :][:q, :T] = weights
    image = ax.imshow(tiles, cmap="cividis", vmin=0.0)
    ax.set_xticks((T - 1) / 2 + (T + gap) * np.arange(H), [f"head {h + 1}" for h in range(H)])
    ax.set_yticks((q - 1) / 2 + (q + gap) * np.arange(2), ["before", "after"])
    ax.tick_params(length=0.0, top=True, bottom=False, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)
    bar = panel.colorbar(image, ax=ax, location="bottom", aspect=35, pad=0.04)
    bar.set_label("mean weight of key row (across) for query row (down)")
    before, after = (weights.max() for weights in both)
    text = f"mean weight goes from {before:.2f} to {after:.2f}"
    _title(panel, "b", f"Training changes attention: the largest\n{text}")


def _draw_saturation(panel: Any, result: SaturationResult) -> None:
    ax = panel.subplots()
    k = 1 + np.arange(result.textbook.shape[1])
    # Equal results have no place on a logarithmic axis; they are drawn at a tenth of an ulp.
    floor = 0.1 * np.finfo(float).eps
    lines = []
    for changes, name, color in (
        (result.textbook, "textbook", ORANGE),
        (result.mhfast, "mhfast", BLUE),
    ):
        shown = np.maximum(changes, floor)
        _band(ax, k, shown, color, name, np.median)
        lines.append((np.median(shown[:, -1]), f"{name}\n{np.median(changes[:, -1]):.0e}", color))
    ax.set(xlabel="normalized step k", ylabel="relative change of W", yscale="log")
    ax.set(xlim=(0, k[-1]), ylim=(floor, 10.0))
    name_lines(ax, lines)
    _title(panel, "c", "Token order changes\nW of the textbook only")


def _draw_heads(panel: Any, result: HeadsResult) -> None:
    columns = [(start, convention) for start in STARTS for convention in CONVENTIONS]
    axes = panel.subplots(2, len(columns), sharex=True, sharey="row")
    shades = colormaps["viridis"](np.linspace(0.0, 0.85, len(result.settings.heads)))
    lr = result.settings.lr
    factor = "" if lr == 1 else rf"{lr:g}\,"
    sizes = {"constant": f"lr = {lr:g}", "sqrt(H)": rf"lr = ${factor}\sqrt{{H}}$"}
    ends: list[tuple[Axes, list[Any]]] = []
    for (start, convention), (losses, errors) in zip(columns, axes.T, strict=True):
        ends += [(losses, []), (errors, [])]
        for H, shade in zip(result.settings.heads, shades, strict=True):
            setting = (start, convention, H)
            _band(losses, result.steps[1:], result.train_loss[setting][:, 1:], shade, f"H = {H}")
            error = 100.0 * result.test_error[setting][:, 1:]
            _band(errors, result.test_steps[1:], error, shade, f"H = {H}")
            for (_, lines), y in zip(ends[-2:], (result.train_loss[setting], error), strict=True):
                lines.append((y[:, -1].mean(), f"H={H}", shade))
        losses.set(title=f"{start} start, {sizes[convention]}", xscale="log", yscale="log")
        errors.set_xlabel("step k")
    axes[1, 0].set_ylim(bottom=0.0)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test error (%)")
    for ax, lines in ends:
        ax.set_xlim(1, result.steps[-1])
        name_lines(ax, lines, apart=0.08)
    few, many = min(result.settings.heads), max(result.settings.heads)
    slower, faster = (loss_ratio(result, convention) for convention in CONVENTIONS)
    _title(
        panel,
        "d",
        f"From a zero start the training loss with {many} heads ends at {slower:.2g} times that "
        f"with {few} if all take steps\nof one size, at {faster:.2g} times if it grows with √H: "
        "more heads act in part like longer steps",
    )
