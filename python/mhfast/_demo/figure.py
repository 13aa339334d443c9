"""The demo as one figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .experiments import CONVENTIONS, STARTS, Array, DigitsResult, HeadsResult, SaturationResult

BLUE, ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito's palette for all kinds of colour vision

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


def titled(message: str, height: float) -> Figure:
    """Return a figure 1600 pixels wide and 200 `height` pixels high, its message as the title."""
    figure = Figure(figsize=(8.0, height), layout="constrained", dpi=200)
    figure.suptitle(message, fontsize=10.5, fontweight="bold")
    return figure


def draw(digits: DigitsResult, heads: HeadsResult, saturation: SaturationResult) -> Figure:
    """Draw digits and saturation above, the role of H below.

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
    _title(panel, "a", "Digits 3 against 8")


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
    bar.set_label("weight of key row (across) for query row (down)")
    _title(panel, "b", "Attention, mean over test images")


def _draw_saturation(panel: Any, result: SaturationResult) -> None:
    ax = panel.subplots()
    k = 1 + np.arange(result.textbook.shape[1])
    # Equal results have no place on a logarithmic axis; they are drawn at a tenth of an ulp.
    floor = 0.1 * np.finfo(float).eps
    _band(ax, k, np.maximum(result.textbook, floor), ORANGE, "textbook", np.median)
    _band(ax, k, np.maximum(result.mhfast, floor), BLUE, "mhfast", np.median)
    ax.set(xlabel="normalized step k", ylabel="relative change of W", yscale="log")
    ax.set_ylim(floor, 10.0)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.12))
    _title(panel, "c", "Tokens reversed")


def _draw_heads(panel: Any, result: HeadsResult) -> None:
    columns = [(start, convention) for start in STARTS for convention in CONVENTIONS]
    axes = panel.subplots(2, len(columns), sharex=True, sharey="row")
    shades = colormaps["viridis"](np.linspace(0.0, 0.85, len(result.settings.heads)))
    lr = result.settings.lr
    factor = "" if lr == 1 else rf"{lr:g}\,"
    sizes = {"constant": f"lr = {lr:g}", "sqrt(H)": rf"lr = ${factor}\sqrt{{H}}$"}
    for (start, convention), (losses, errors) in zip(columns, axes.T, strict=True):
        for H, shade in zip(result.settings.heads, shades, strict=True):
            setting = (start, convention, H)
            _band(losses, result.steps[1:], result.train_loss[setting][:, 1:], shade, f"H = {H}")
            error = 100.0 * result.test_error[setting][:, 1:]
            _band(errors, result.test_steps[1:], error, shade, f"H = {H}")
        losses.set(title=f"{start} start, {sizes[convention]}", xscale="log", yscale="log")
        errors.set_xlabel("step k")
    axes[1, 0].set_ylim(bottom=0.0)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test error (%)")
    axes[0, 0].legend(loc="lower left")
    _title(panel, "d", "The role of H on the tokenized mixture")
