"""Check that includes in csrc point one way: a folder uses only itself and those before it.

Exits with 1 and names every include that points the other way, and every cycle of headers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "csrc"

# Arrows point from later to earlier rows; folders of one row do not know each other.
LAYERS = (
    ("simd", "losses", "optimizers", "row_maps"),
    ("lists",),
    ("kernels",),
    ("dispatch",),
    ("runtime",),
    ("problem",),
    ("passes",),
    ("training", "learner"),
    ("bindings",),
)
ROW = {folder: row for row, folders in enumerate(LAYERS) for folder in folders}
INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
SUFFIXES = (".hpp", ".cpp", ".inc")


def included(file: Path) -> list[Path]:
    """Return the files of csrc that a file includes."""
    return [(file.parent / name).resolve() for name in INCLUDE.findall(file.read_text())]


def wrong_ways(files: list[Path]) -> list[str]:
    """Return a sentence for each include of a later row, or of another folder of the same row."""
    found = []
    for file in files:
        here = file.relative_to(ROOT).parts[0]
        for target in included(file):
            there = target.relative_to(ROOT).parts[0]
            if here != there and ROW[there] >= ROW[here]:
                found.append(f"csrc/{file.relative_to(ROOT)}: {here}/ may not include {there}/")
    return found


def cycles(files: list[Path]) -> list[str]:
    """Return a sentence for each header that includes itself by way of others."""
    graph = {file: included(file) for file in files}
    found = []
    for start in files:
        seen: set[Path] = set()
        waiting = list(graph[start])
        while waiting:
            file = waiting.pop()
            if file not in seen:
                seen.add(file)
                waiting += graph.get(file, [])
        if start in seen:
            found.append(f"csrc/{start.relative_to(ROOT)}: includes itself by way of others")
    return found


def main() -> int:
    """Print what is wrong."""
    files = sorted(file for file in ROOT.rglob("*") if file.suffix in SUFFIXES)
    unknown = sorted({file.relative_to(ROOT).parts[0] for file in files} - ROW.keys())
    problems = [f"csrc/{folder}/: expected a row in .ci/includes.py" for folder in unknown]
    problems = problems or [*wrong_ways(files), *cycles(files)]
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
