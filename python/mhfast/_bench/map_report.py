"""The map as tables, as JSON, and compared with an earlier one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cell_timing import Measured
from .environment import warnings
from .grid import AXES, OPERATIONS, Cell
from .peers import PEERS
from .results import geometric_mean
from .tables import NOTHING, Table

# The goal: no cell below the first, at most one in twenty below the second.
LEAST, LOW = 1.0, 1.5

AXIS_NAMES = ("operation", "model", "shape", "dtype")


@dataclass
class Map:
    """Cells that were measured, the environment, and by cell why one is missing."""

    environment: dict[str, Any]
    cells: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write everything as JSON, a line for each cell."""
        cells = ",\n".join(f"  {json.dumps(cell.record())}" for cell in self.cells)
        head = json.dumps({"environment": self.environment, "failed": self.failed}, indent=1)
        path.write_text(f'{head[:-2]},\n "cells": [\n{cells}\n ]\n}}\n', encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Map:
        """Read what `write` wrote.

        Raises
        ------
        ValueError
            The file holds something else.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            cells = [Measured.of_record(record) for record in found["cells"]]
            return cls(found["environment"], cells, found["failed"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected a map written by benchmarks.map") from error

    def sort(self) -> None:
        """Order the cells as the axes are."""
        order = {level: k for levels in AXES for k, level in enumerate(levels)}
        self.cells.sort(key=lambda one: [order[level] for level in one.cell.levels])

    def low(self, below: float) -> list[Measured]:
        """Return the cells with a lower ratio against the best formulation, the lowest first."""
        found = [(ratio, one) for one, ratio in self._ratios(ordinary=False) if ratio < below]
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def ratios(self, *, ordinary: bool) -> list[float]:
        """Return the ratio of every cell that has a peer."""
        return [ratio for _, ratio in self._ratios(ordinary=ordinary)]

    def _ratios(self, *, ordinary: bool) -> Iterator[tuple[Measured, float]]:
        for one in self.cells:
            ratio = one.lowest(ordinary=ordinary)
            if ratio is not None:
                yield one, ratio

    @property
    def message(self) -> str:
        """What the map shows, as one sentence."""
        best, plain = self.ratios(ordinary=False), self.ratios(ordinary=True)
        if not best:
            return "No cell has been compared"
        means = [geometric_mean(group) or 1.0 for group in (best, plain)]
        slower = sum(ratio < LEAST for ratio in best)
        return (
            f"mhfast takes {1 / means[0]:.2f} of the time of the best formulation of any library "
            f"and {1 / means[1]:.2f} of that of ordinary code (geometric means); it is slower than "
            f"the best in {slower} of {len(best)} cells"
        )


def matrix(found: Map, *, ordinary: bool) -> dict[tuple[str, str], float]:
    """Return by operation and model the lowest ratio of their cells."""
    lowest: dict[tuple[str, str], float] = {}
    for one in found.cells:
        ratio = one.lowest(ordinary=ordinary)
        if ratio is not None:
            key = one.cell.operation, one.cell.model
            lowest[key] = min(ratio, lowest.get(key, ratio))
    return lowest


def markdown(found: Map) -> str:
    """Return the tables of the map in markdown."""
    tables = (_by_operation(found), _by_level(found), _low(found))
    return "\n\n".join([conditions(found), *(table.markdown() for table in tables)]) + "\n"


def conditions(found: Map) -> str:
    """Say what was measured, where and how, in a sentence or two."""
    there = found.environment
    present = [key for key in PEERS if any(key in one.best for one in found.cells)]
    versions = there.get("versions") or {}
    packages = dict.fromkeys(PEERS[key].package for key in present)
    said = (
        f"{len(found.cells)} cells on {there.get('cpu')}, {there.get('isa')}, "
        f"{there.get('threads')} thread{'s' if there.get('threads') != 1 else ''}, "
        f"by {there.get('clock', 'wall')} time, against "
        + ", ".join(PEERS[key].name for key in present)
        + " ("
        + ", ".join(f"{name} {versions.get(name)}" for name in packages)
        + ")."
    )
    disturbed = warnings(there) if "load" in there else []
    return " ".join([said, *(f"Caution: {caution}." for caution in disturbed)])


def text(found: Map) -> str:
    """Return every cell, and the summary, for a terminal."""
    tables = (_cells(found.cells), _by_level(found), _low(found))
    return "\n\n".join(table.text() for table in tables) + "\n"


def _by_operation(found: Map) -> Table:
    best, plain = matrix(found, ordinary=False), matrix(found, ordinary=True)
    models = [model for model in AXES[1] if any(key[1] == model for key in best)]
    rows = []
    for operation in OPERATIONS:
        if any(key[0] == operation for key in best):
            keys = [(operation, model) for model in models]
            rows.append((operation, *(_pair(best.get(key), plain.get(key)) for key in keys)))
    note = (
        "Time of the fastest formulation of any library over that of mhfast, and after the stroke "
        "time of the fastest ordinary code; each of one shape class and dtype, the lowest where "
        "there are several. The cells are in `docs/map.json`."
    )
    return Table("Operations by models", ("operation", *models), rows, note)


def _by_level(found: Map) -> Table:
    rows = [_summary("all cells", found.cells)]
    for k, levels in enumerate(AXES):
        for level in levels:
            some = [one for one in found.cells if one.cell.levels[k] == level]
            if some:
                rows.append(_summary(f"{AXIS_NAMES[k]} {level}", some))
    heads = ("", "cells", "x best", "x ordinary", f"below {LEAST:g}", f"below {LOW:g}")
    note = "Geometric means of the ratios, and how many ratios against the best are below a number."
    return Table("Summary", heads, rows, note)


def _summary(name: str, some: Sequence[Measured]) -> tuple[str, ...]:
    best = [ratio for one in some if (ratio := one.lowest(ordinary=False)) is not None]
    plain = [ratio for one in some if (ratio := one.lowest(ordinary=True)) is not None]
    counts = (str(sum(ratio < bound for ratio in best)) for bound in (LEAST, LOW))
    return (
        name, str(len(some)), _number(geometric_mean(best)), _number(geometric_mean(plain)), *counts
    )  # fmt: skip


def _low(found: Map) -> Table:
    table = _cells(found.low(LOW))
    return Table(f"Cells below {LOW:g}", table.heads, table.rows, table.note)


def _cells(cells: Iterable[Measured]) -> Table:
    rows = []
    for one in cells:
        key, plain = one.fastest(ordinary=False), one.fastest(ordinary=True)
        best = one.best[key] if key else None
        rows.append((
            str(one.cell), one.sizes, _microseconds(one.own.seconds),
            NOTHING if one.at_peak is None else f"{100 * one.at_peak / one.own.seconds:.0f} %",
            f"{PEERS[key].name}, {best.formulation}" if key and best else NOTHING,
            _microseconds(best.seconds) if best else NOTHING,
            _number(one.lowest(ordinary=False)),
            PEERS[plain].name if plain else NOTHING,
            _number(one.lowest(ordinary=True)),
        ))  # fmt: skip
    note = (
        "Of the peak: the time that the multiply-adds of the cheapest order of products take at "
        "the measured peak, over that of mhfast."
    )
    heads = (
        "cell", "n,T,d,H", "mhfast, µs", "of the peak", "best peer", "its µs", "x best", "ordinary",
        "x ordinary",
    )  # fmt: skip
    return Table("Cells", heads, rows, note)


def _pair(best: float | None, plain: float | None) -> str:
    return NOTHING if best is None else f"{_number(best)} / {_number(plain)}"


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _microseconds(seconds: float) -> str:
    return f"{float(f'{1e6 * seconds:.3g}'):g}"


def changes(now: Map, before: Map, factor: float) -> list[tuple[Cell, float, float]]:
    """Return cells whose ratio against the best changed by more than a factor, with both ratios.

    The cells that got worst first. Cells that one of the maps lacks are left out.
    """
    old = {str(one.cell): one.lowest(ordinary=False) for one in before.cells}
    found = []
    for one in now.cells:
        was, ratio = old.get(str(one.cell)), one.lowest(ordinary=False)
        if was is not None and ratio is not None and max(ratio / was, was / ratio) > factor:
            found.append((one.cell, was, ratio))
    return sorted(found, key=lambda change: change[2] / change[1])


def differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Say in what two environments differ that times depend on."""
    names = ("cpu", "isa", "threads", "versions", "blas")
    return [
        f"{name}: {before.get(name)} before, {now.get(name)} now"
        for name in names
        if now.get(name) != before.get(name)
    ]
