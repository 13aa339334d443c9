"""The phases of `learn_layer` as one figure of four panels."""

from __future__ import annotations

from importlib import import_module
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from .facts import Facts
from .sculpting import Body

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .net import Net
    from .result import Learning
    from .sums import SumEstimate

FIRST, SECOND = "C0", "C1"
"""Colours of the first and the second sculpting, and of certificates and residuals."""

LEAST = 1e-17
"""Value at which exact zeros are drawn on a logarithmic axis."""


def draw(learning: Learning) -> Figure:
    """Draw the figure that `Learning.plot` describes.

    The panel of a phase that was not reached says so.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    found = {phase.name: phase.parts for phase in learning.phases}
    figure: Figure
    figure, axes = pyplot.subplots(2, 2, figsize=(9.0, 6.6), layout="constrained")
    figure.suptitle(fill(learning.verdict, 100), fontsize="medium")
    _spectrum(axes[0, 0], found)
    _certificates(axes[0, 1], found)
    _candidates(axes[1, 0], found)
    _residuals(axes[1, 1], found, learning)
    return figure


def _spectrum(ax: Axes, found: dict[str, Any]) -> None:
    """Draw the smallest eigenvalues of the facts and the gap above the H-th."""
    ax.set_title("spectrum of the facts")
    bodies = _sculptings(found, Body)
    if not bodies:
        _missing(ax, "no body was sculpted")
        return
    for (name, body), colour in zip(bodies.items(), (FIRST, SECOND), strict=False):
        k = 1 + np.arange(len(body.eigenvalues))
        ax.plot(k, body.eigenvalues, ".-", color=colour, linewidth=0.8, label=name)
    ax.axvline(body.heads + 0.5, color="black", linestyle=":", linewidth=0.8)
    label = f" gap {body.gap:.3g} above H = {body.heads}"
    ax.text(body.heads + 0.5, 0.02, label, transform=ax.get_xaxis_transform(), va="bottom")
    ax.set(xlabel="number of the eigenvalue", ylabel="eigenvalue", yscale="log")
    ax.set_xticks(range(0, len(body.eigenvalues) + 1, 4))
    ax.margins(y=0.12)
    ax.legend()


def _certificates(ax: Axes, found: dict[str, Any]) -> None:
    """Draw the distribution of the residuals of the rows, and the certificates."""
    ax.set_title("rows explained as averages of tokens")
    every = _sculptings(found, Facts)
    if "crude sum" not in found:
        _missing(ax, "no row was explained")
        return
    estimates: list[SumEstimate] = [found["crude sum"][0]]
    if "second sculpting" in found:
        estimates.append(found["second sculpting"][0])
    share = np.linspace(0.0, 1.0, 101)[1:]
    for (name, facts), colour in zip(every.items(), (FIRST, SECOND), strict=False):
        ax.plot(share, np.maximum(facts.residual_quantiles[1:], LEAST), color=colour, label=name)
    for estimate, colour in zip(estimates, (FIRST, SECOND), strict=False):
        ax.plot(estimate.level, max(estimate.certificate, LEAST), "o", color=colour)
    level = estimates[0].level
    ax.axvline(level, color="black", linestyle=":", linewidth=0.8)
    label = f" certificates: best {100 * level:.2g} %"
    ax.text(level, 0.98, label, transform=ax.get_xaxis_transform(), va="top")
    ax.set(xlabel="share of the rows", ylabel="relative residual", xscale="log", yscale="log")
    ax.margins(y=0.12)
    if every:
        ax.legend(loc="lower right")


def _candidates(ax: Axes, found: dict[str, Any]) -> None:
    """Draw the polished candidates of the net."""
    ax.set_title("candidates of the net")
    if "net" not in found:
        _missing(ax, "no net was searched")
        return
    net: Net = found["net"][0]
    residuals = [candidate.values.residual for candidate in net.candidates]
    if len(net.box) == 1:
        ax.axvspan(*net.box[0], color="0.92", label="box of the linear programs")
        for k, (candidate, residual) in enumerate(zip(net.candidates, residuals, strict=True)):
            ends = np.sort(candidate.coordinates[:, 0])
            label = "both heads of a candidate" if k == 0 else None
            ax.plot(ends, [residual] * 2, "o-", color=SECOND, alpha=0.5, label=label)
        ax.set_xlabel("coordinate in the hull")
    else:
        largest = [float(candidate.stretch.max()) for candidate in net.candidates]
        ax.plot(largest, residuals, "o", color=SECOND, alpha=0.5, label="candidate")
        ax.set(xlabel="stretch of the tolerances, largest of the heads", xscale="log")
        ax.set_xlim(*_room(largest))
    ax.set(ylabel="relative residual of the outputs", yscale="log")
    ax.set_ylim(*_room(residuals))
    ax.legend()


def _residuals(ax: Axes, found: dict[str, Any], learning: Learning) -> None:
    """Draw the result of each phase: certificates of the sum, then residuals of the outputs."""
    ax.set_title("what the phases left")
    rows: list[tuple[str, float | None, str]] = [
        ("crude sum", _of(found, "crude sum", "certificate"), FIRST),
        ("refined sum", _of(found, "refined sum", "certificate"), FIRST),
        ("sum sculpted with", _of(found, "second sculpting", "certificate"), FIRST),
        ("net", found["net"][0].candidates[0].values.residual if "net" in found else None, SECOND),
        ("values", _of(found, "values", "residual"), SECOND),
        ("refinement", _of(found, "refinement", "residual"), SECOND),
        ("held-out", learning.held_out, "black"),
    ]
    limit = next((c.limit for c in learning.certificates if c.name == "held-out residual"), None)
    if limit is not None:
        ax.axvline(limit, color="black", linestyle=":", linewidth=0.8)
        label = " learnt below"
        ax.text(limit, 0.98, label, transform=ax.get_xaxis_transform(), va="top", ha="left")
    for place, (_, value, colour) in enumerate(rows):
        if value is None or not np.isfinite(value):
            state = "not reached" if value is None else "not finite"
            ax.text(
                0.02, place, state, transform=ax.get_yaxis_transform(), va="center", color="0.5"
            )
        else:
            ax.plot(max(value, LEAST), place, "o", color=colour)
    ax.set_xscale("log")
    ax.set_xlim(LEAST / 3.0, 30.0)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    ax.set_xlabel("certificate (blue), relative residual of the outputs")


def _sculptings(found: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the results of one class from the sculpting phases, by phase."""
    return {
        label: next(part for part in found[name] if isinstance(part, kind))
        for name, label in (("sculpting", "first sculpting"), ("second sculpting",) * 2)
        if name in found
    }


def _of(found: dict[str, Any], phase: str, attribute: str) -> float | None:
    return float(getattr(found[phase][0], attribute)) if phase in found else None


def _room(values: list[float]) -> tuple[float, float]:
    """Return axis limits around values, at least a decade apart: rounding must not look large."""
    low = max(min(values), LEAST)
    return low / 3.0, max(max(values), low) * 3.0


def _missing(ax: Axes, text: str) -> None:
    ax.set(xticks=[], yticks=[])
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="0.5")
