"""The command line of `mhfast bench`."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .. import _core
from . import tables
from .environment import available_cores, environment, warnings
from .families import FAMILIES, chosen
from .implementation import Implementation, Local, configure
from .isolated import Isolated
from .measure import FULL, QUICK, Bench
from .peers import PEERS
from .problem import DisagreementError
from .results import OWN
from .shapes import LOOPS, SCALING, SHAPES, Loop, Shape, parse_loop, parse_shape

DTYPES = ("float32", "float64")


def run(argv: Sequence[str] | None = None) -> int:
    """Measure as given by the arguments, print the tables and write the files.

    Returns
    -------
    status : int
        0, or 1 when a peer does not agree with mhfast.
    """
    parser = command_line()
    arguments = parser.parse_args(argv)
    cores = len(available_cores())
    if not 1 <= arguments.threads <= cores:
        parser.error(f"--threads: expected 1 to {cores}, got {arguments.threads}")
    try:
        shapes = list(_shapes(arguments.shapes))
        loops = list(_loops(arguments.loops))
        trainings = chosen(arguments.families)
        cautions = configure(arguments.threads, arguments.isa)
    except ValueError as error:
        parser.error(str(error))
    report = tables.Report(environment(arguments.threads, isolated=arguments.isolate))
    for caution in (*cautions, *warnings(dict(report.environment))):
        _say(f"warning: {caution}")

    start: Callable[[str], Implementation] = Local
    if arguments.isolate:
        start = functools.partial(Isolated, threads=arguments.threads, isa=_core.active_isa())
    budget = QUICK if arguments.quick else FULL
    bench = Bench(start, arguments.peers, arguments.threads, budget)
    scaling = any(group in arguments.shapes for group in ("scaling", "all"))
    try:
        for dtype in arguments.dtype:
            for group, shape in shapes:
                _say(f"{shape} {dtype}")
                report.gradients.append(bench.gradient(group, shape, dtype))
            for loop in loops:
                _say(f"training {loop.shape} {dtype}")
                report.loops.append(bench.training(loop, dtype))
            for training in trainings:
                if dtype in training.dtypes:
                    _say(f"family {training} {dtype}")
                    report.families.append(bench.family(training, dtype))
            if scaling:
                _say(f"threads {SCALING} {dtype}")
                report.scaling.append(bench.scaling(SCALING, dtype))
    except DisagreementError as error:
        print(f"mhfast bench: {error}", file=sys.stderr)
        return 1
    finally:
        bench.close()
    print(tables.text(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.record(), indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(tables.markdown(report))
    return 0


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(
        prog="mhfast bench",
        description="Compare mhfast with NumPy, PyTorch and JAX on this machine.",
    )
    groups = ", ".join((*SHAPES, "scaling", "all", "none"))
    parser.add_argument(
        "--shapes", nargs="+", default=["main"], metavar="GROUP",
        help=f"groups ({groups}) or sizes n,T,d,H of one loss and gradient; default main",
    )  # fmt: skip
    parser.add_argument(
        "--loops", nargs="+", default=["main"], metavar="GROUP",
        help="main, none, or sizes n,T,d,H of training loops; default main",
    )  # fmt: skip
    parser.add_argument(
        "--families", nargs="+", default=["main"], metavar="NAME",
        help=f"main, none, or trainings of the model family: {', '.join(FAMILIES)}; default main",
    )  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="default: both")
    parser.add_argument(
        "--peers", nargs="*", default=[key for key in PEERS if key != OWN],
        choices=[key for key in PEERS if key != OWN], help="default: all installed ones",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, default=len(available_cores()), metavar="K",
        help="threads of every implementation; default: all cores",
    )  # fmt: skip
    parser.add_argument(
        "--isa", help="instruction set of mhfast; the peers keep theirs", metavar="NAME"
    )
    parser.add_argument(
        "--isolate", action="store_true", help="one process for each implementation, taking turns"
    )
    parser.add_argument("--quick", action="store_true", help="a rough look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser


def _shapes(names: Sequence[str]) -> Iterator[tuple[str, Shape]]:
    for name in names:
        if name == "all":
            yield from _shapes(list(SHAPES))
        elif name in SHAPES:
            yield from ((name, shape) for shape in SHAPES[name])
        elif name not in ("scaling", "none"):
            yield "given", parse_shape(name)


def _loops(names: Sequence[str]) -> Iterator[Loop]:
    for name in names:
        if name == "main":
            yield from LOOPS
        elif name != "none":
            yield parse_loop(name)


def _say(line: str) -> None:
    """Report progress, separately from the result."""
    print(line, file=sys.stderr, flush=True)
