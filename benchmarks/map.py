"""The map: every operation on every model, shape class and dtype, against other libraries.

    python -m benchmarks.map --write docs
    python -m benchmarks.map --cell gradient-X/layer/long/float32 --threads 2
    python -m benchmarks.map --operations hvp ntk --models layer tied --compare docs/map.json
    python -m benchmarks.map --from docs/map.json --figure map.png

The cells are a covering design of strength two: every possible pair of an operation, a model, a
shape class and a dtype occurs in one of them (`--list` prints them, with their sizes).  Each is
measured in a process of its own, in which mhfast and the other libraries take turns, and the lower
decile of the times of each counts; with `--jobs` several processes run at a time, each on its own
cores.  NumPy, PyTorch (eager, compiled, fused attention) and JAX each compute it as a user writes
it and in their best formulation, which a second call chooses.  All results are compared with those
of mhfast first, and a cell where one differs is an error.

torch.compile takes seconds for each cell and so takes part in the cells of a smaller design only:
every operation, model, shape class and dtype occurs there; `--compile all` or `none` changes that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mhfast._bench import cell_processes, map_report
from mhfast._bench.cell_timing import FULL, QUICK, Measured
from mhfast._bench.cells import draw_cell
from mhfast._bench.environment import available_cores, environment, warnings
from mhfast._bench.grid import DTYPES, MODELS, OPERATIONS, SHAPES, Cell, design, parse_cell, sample
from mhfast._bench.map_report import Map
from mhfast._bench.peers import PEERS
from mhfast._bench.results import OWN

# The ratio of two ratios above which a cell has changed: more than times vary on a quiet machine.
FACTOR = 1.25
TABLE = ("<!-- map: python -m benchmarks.map --write docs -->", "<!-- end of the map -->")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where a peer disagrees with mhfast."""
    parser = command_line()
    given = parser.parse_args(argv)
    try:
        cells = chosen(given)
        before = Map.read(given.compare) if given.compare else None
        found = Map.read(given.source) if given.source else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if given.list:
        for cell in cells:
            print(f"{cell!s:55} {draw_cell(cell).described}")
        return 0
    if found is None:
        found = measure(cells, given)
    print(map_report.text(found))
    if before is not None:
        compare(found, before, given.factor)
    if given.json:
        found.write(given.json)
    if given.markdown:
        given.markdown.write_text(map_report.markdown(found), encoding="utf-8")
    if given.figure:
        draw(found, given.figure)
    if given.write:
        write(found, given.write)
    for cell, message in found.failed.items():
        print(f"failed: {cell}: {message}", file=sys.stderr)
    return 1 if found.failed else 0


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = [key for key in PEERS if key != OWN]
    cores = len(available_cores())
    parser.add_argument("--cell", nargs="+", metavar="NAME", help="operation/model/shape/dtype")
    for name, known in (("operations", OPERATIONS), ("models", MODELS), ("shapes", SHAPES)):
        parser.add_argument(
            f"--{name}", nargs="+", choices=list(known), default=list(known), metavar="NAME",
            help=f"only these, of {', '.join(known)}",
        )  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--list", action="store_true", help="print the cells")
    parser.add_argument("--quick", action="store_true", help="a rough look, not a measurement")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument(
        "--compile", choices=("some", "all", "none"), default="some",
        help="the cells in which torch.compile takes part",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="of each implementation; default 1")
    parser.add_argument("--jobs", type=int, help="cells at a time; default: as many as cores allow")
    parser.add_argument(
        "--clock", choices=("wall", "processor"), default="wall",
        help="processor: calls of a millisecond and more by the processor time of the process, for "
        "a machine that others use too; one thread only",
    )  # fmt: skip
    parser.add_argument("--isa", help="instruction set of mhfast", metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the heat map")
    parser.add_argument(
        "--write", type=Path, metavar="DIRECTORY",
        help="write map.json and map.png there, and the tables into its performance.md",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="read a JSON, and measure nothing"
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier JSON")
    parser.add_argument(
        "--factor", type=float, default=FACTOR, help=f"change that --compare reports; {FACTOR:g}"
    )
    parser.set_defaults(cores=cores)
    return parser


def chosen(given: argparse.Namespace) -> list[Cell]:
    """Return the cells of the arguments.

    Raises
    ------
    ValueError
        There is no such cell, or there are not so many cores.
    """
    if not 1 <= given.threads <= given.cores:
        raise ValueError(f"--threads: expected 1 to {given.cores}, got {given.threads}")
    if given.clock == "processor" and given.threads > 1:
        raise ValueError(f"--clock processor: expected one thread, got {given.threads}")
    most = given.cores // given.threads
    if given.jobs is not None and not 1 <= given.jobs <= most:
        raise ValueError(f"--jobs: expected 1 to {most}, got {given.jobs}")
    if given.cell:
        return [parse_cell(text) for text in given.cell]
    cells = design(given.operations, given.models, given.shapes, given.dtype)
    if not cells:
        raise ValueError("there is no cell of these operations, models and shapes")
    return cells


def measure(cells: Sequence[Cell], given: argparse.Namespace) -> Map:
    """Measure cells, with a line on stderr for each."""
    found = Map(environment(given.threads, isolated=False))
    for caution in warnings(found.environment):
        print(f"warning: {caution}", file=sys.stderr)
    few = {"some": sample(cells), "all": set(cells), "none": set[Cell]()}[given.compile]
    compiled = set(cells) if given.cell and given.compile == "some" else few
    tasks = [
        (cell, [key for key in given.peers if key != "compile" or cell in compiled])
        for cell in cells
    ]
    effort = replace(QUICK if given.quick else FULL, processor=given.clock == "processor")
    settings = cell_processes.Settings(given.threads, effort, given.isa)
    jobs = given.jobs or given.cores // given.threads
    begin = time.perf_counter()
    for k, (cell, one) in enumerate(cell_processes.measured(tasks, settings, jobs), start=1):
        if isinstance(one, Measured):
            found.cells.append(one)
            ratio = one.lowest(ordinary=False)
            said = f"{1e6 * one.own.seconds:10.1f} µs, ratio {ratio or float('nan'):.2f}"
        else:
            found.failed[str(cell)] = said = one
        seconds = time.perf_counter() - begin
        print(f"{k:4d}/{len(cells)} {seconds:5.0f} s  {cell!s:50} {said}", file=sys.stderr)
    found.environment |= {
        "seconds": round(time.perf_counter() - begin),
        "jobs": jobs,
        "clock": given.clock,
    }
    found.sort()
    return found


def compare(found: Map, before: Map, factor: float) -> None:
    """Print the cells that have changed, and in what the environments differ."""
    for line in map_report.differing(found.environment, before.environment):
        print(line)
    changes = map_report.changes(found, before, factor)
    print(f"{len(changes)} ratios against the best changed by more than {factor:g}:")
    for cell, was, now in changes:
        print(f"{cell!s:55} {was:8.2f} -> {now:8.2f}")


def draw(found: Map, path: Path) -> None:
    """Draw the heat map; matplotlib is needed only here."""
    from mhfast._bench import map_figure

    map_figure.draw(found, path)


def write(found: Map, directory: Path) -> None:
    """Write JSON, figure and the tables between their marks in performance.md."""
    found.write(directory / "map.json")
    draw(found, directory / "map.png")
    page = directory / "performance.md"
    head, rest = page.read_text(encoding="utf-8").split(TABLE[0])
    _, tail = rest.split(TABLE[1])
    tables = f"{TABLE[0]}\n\n{map_report.markdown(found)}\n{TABLE[1]}"
    page.write_text(head + tables + tail, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
