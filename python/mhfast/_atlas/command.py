"""The command `mhfast reproduce`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from .catalogue import NAMES, load
from .report import text, write


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
        width = max(map(len, NAMES))
        for name in NAMES:
            print(f"{name:<{width}}  {load(name).title}")
        print("\nmhfast reproduce NAME runs one; --help says more")
        return 0
    names = NAMES if options.names == ["all"] else options.names
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"NAME: expected one of {', '.join(NAMES)} or all, got {', '.join(unknown)}")
    if not options.output.is_dir():
        parser.error(f"--output: expected an existing directory, got {options.output}")
    return max([_reproduce(name, options.output, quick=options.quick) for name in names])


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
    return parser


def _reproduce(name: str, directory: Path, *, quick: bool) -> int:
    experiment = load(name)
    begin = time.perf_counter()
    outcome = experiment.run(quick)
    print(f"{text(experiment, outcome)}\n")
    figure, *_ = write(directory, name, experiment, outcome, quick=quick)
    print(f"{time.perf_counter() - begin:.0f} seconds; the figure is {figure}\n")
    return 0 if all(claim.holds for claim in outcome.claims) else 1
