"""The results of an experiment: text for the terminal, a page, comma-separated values."""

from __future__ import annotations

import csv
import math
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .experiment import Experiment, Outcome


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"


def table(outcome: Outcome) -> str:
    """Return the table in aligned columns."""
    rows = [list(outcome.columns), *([_cell(value) for value in row] for row in outcome.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *rest]).rstrip())
    return "\n".join(lines)


def text(experiment: Experiment, outcome: Outcome) -> str:
    """Return table and claims for a terminal."""
    claims = "\n".join(map(str, outcome.claims))
    return f"{experiment.title}\n{experiment.paper}\n\n{table(outcome)}\n\n{claims}"


def numbers(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Return what was found in the types of JSON; a NaN or an infinity is None."""
    return {
        "title": experiment.title,
        "paper": experiment.paper,
        "columns": list(outcome.columns),
        "rows": [list(map(_json, row)) for row in outcome.rows],
        "claims": [
            {key: _json(value) for key, value in asdict(claim).items()}
            | {"holds": bool(claim.holds)}
            for claim in outcome.claims
        ],
    }


def _json(value: str | float) -> str | float | None:
    if isinstance(value, str | bool):
        return value
    return float(value) if math.isfinite(value) else None


def page(name: str, experiment: Experiment, outcome: Outcome, *, quick: bool) -> str:
    """Return the page of the gallery, in Markdown."""
    command = f"mhfast reproduce {name}{' --quick' if quick else ''}"
    header = "| " + " | ".join(outcome.columns) + " |"
    rule = "|---" + "|--:" * (len(outcome.columns) - 1) + "|"
    rows = ["| " + " | ".join(map(_cell, row)) + " |" for row in outcome.rows]
    parts = [
        f"# {experiment.title}",
        f"{experiment.paper}",
        f"**The claim.** {experiment.says}",
        f"**What is run.** {experiment.setting}",
        f"![{experiment.title}]({name}.png)",
        "\n".join([header, rule, *rows]),
        "**What it shows.**",
        "\n".join(textwrap.fill(f"- {c}", 100, subsequent_indent="  ") for c in outcome.claims),
        f"Command: `{command}`",
    ]
    wrapped = [p if p[0] in "#|-!" else textwrap.fill(p, 100) for p in parts]
    return "\n\n".join(wrapped) + "\n"


def write(
    directory: Path, name: str, experiment: Experiment, outcome: Outcome, *, quick: bool
) -> list[Path]:
    """Write figure, table and page into a directory, and return their paths."""
    figure, values, markdown = (directory / f"{name}.{end}" for end in ("png", "csv", "md"))
    outcome.figure.savefig(figure)
    with values.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(outcome.columns)
        writer.writerows(outcome.rows)
    markdown.write_text(page(name, experiment, outcome, quick=quick), "utf-8")
    return [figure, values, markdown]
