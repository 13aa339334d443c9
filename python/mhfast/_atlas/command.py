"""The command `mhfast reproduce`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .catalogue import NAMES, load
from .report import numbers, text, write


def main(arguments: Sequence[str] | None = None) -> int:
    """List the experiments, or run those named.

    Returns
    -------
    int
        0; 1 when a claim does not hold.
    """
    parser = command_line()
    options = parser.parse_args(arguments)
    if not options.names:
        _list(as_json=options.json)
        return 0
    names = NAMES if options.names == ["all"] else options.names
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"NAME: expected one of {', '.join(NAMES)} or all, got {', '.join(unknown)}")
    if not options.output.is_dir():
        parser.error(f"--output: expected an existing directory, got {options.output}")
    found = [_reproduce(name, options) for name in names]
    if options.json:
        print(json.dumps(found, indent=1))
    return 0 if all(claim["holds"] for one in found for claim in one["claims"]) else 1


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(
        prog="mhfast reproduce",
        description="Check results of attention theory: train, print a table and whether the "
        "paper's claim holds, write a figure, the table and a page. Without a name, list all.",
        epilog="The exit status is 0 where all claims hold, and 1 where one does not.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="an experiment, or all")
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller instances, within ten seconds each"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where NAME.png, NAME.csv and NAME.md are written (default: the current directory)",
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser


def _list(*, as_json: bool) -> None:
    """Print the names and titles of all experiments."""
    titles = {name: load(name).title for name in NAMES}
    if as_json:
        print(json.dumps(titles, indent=1))
        return
    width = max(map(len, NAMES))
    for name, title in titles.items():
        print(f"{name:<{width}}  {title}")
    print("\nmhfast reproduce NAME runs one; --help says more")


def _reproduce(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run an experiment, write its files and return its numbers, which are printed but for JSON."""
    experiment = load(name)
    begin = time.perf_counter()
    outcome = experiment.run(options.quick)
    figure, *_ = write(options.output, name, experiment, outcome, quick=options.quick)
    seconds = time.perf_counter() - begin
    if not options.json:
        print(f"{text(experiment, outcome)}\n\n{seconds:.0f} seconds; the figure is {figure}\n")
    return {"name": name, **numbers(experiment, outcome), "seconds": seconds, "figure": str(figure)}
