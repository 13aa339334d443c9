"""Mutants of the Python package, a seeded sample by area, and the tests that execute what changed.

    pip install mutmut==3.8.1 coverage
    python tests/mutation/package.py [--count 300] [--seed 0] [--record FILE] [AREA ...]
    python tests/mutation/package.py --only theory/kernel.py#57 --kept executed.json

The tests of all areas run first, without a change: they must pass, and coverage tells which of them
execute which lines, which the file of --kept remembers: next time only files of tests that have
changed run, or all if the package has.  Then each mutant is written into a copy of the tree, and a
forked process runs the tests that execute its lines, quick ones first, up to the first that fails:
with the tests collected and the functions exchanged (warm.py), or where what runs at import is
changed with everything imported anew.  Left out are tests that measure time and the changes that
changes.py names.  Prints every mutant that no test notices, with its change.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from changes import AREAS, ROOT, Mutant, sample
from executed import ENVIRONMENT, Executed, Tree
from record import Record
from warm import Forks, Limits

# A mutant, whether a test failed (or None if that is not known), the test, the seconds.
Verdict = tuple[Mutant, bool | None, str, float]


def ask_warm(mutants: list[Mutant], executed: Executed, results: Any) -> None:
    """Ask of each mutant whether its tests pass where the functions are exchanged."""
    with tempfile.TemporaryDirectory() as path:
        tree = Tree(Path(path).resolve() / "tree")

        def loop(forks: Forks) -> None:
            for mutant in mutants:
                begin = time.monotonic()
                file = tree.path / "python" / "mhfast" / mutant.file
                functions = forks.replacements(file, mutant.before(), mutant.source)
                if functions is None:
                    results.put((mutant, None, "", 0.0))
                    continue
                tree.write(mutant)  # for processes that a test starts
                test = forks.noticed(functions, executed.of(mutant))
                tree.restore(mutant)
                results.put((mutant, bool(test), test, time.monotonic() - begin))

        with (forks := Forks(tree.path / "python", loop)).calls:
            tree.pytest(["-s", *executed.files], [forks, Limits(executed.seconds)])
    results.put(None)


def ask_cold(mutants: list[Mutant], executed: Executed, results: Any) -> None:
    """Ask the others."""
    import numpy  # noqa: F401 - what every forked process needs is imported once
    import pytest  # noqa: F401
    import scipy.linalg
    import scipy.optimize
    import scipy.sparse.linalg  # noqa: F401

    with tempfile.TemporaryDirectory() as path:
        tree = Tree(Path(path).resolve() / "tree")
        for mutant in mutants:
            begin = time.monotonic()
            tree.write(mutant)
            noticed = tree.notices(executed.of(mutant), Limits(executed.seconds))
            tree.restore(mutant)
            results.put((mutant, noticed, "", time.monotonic() - begin))
    results.put(None)


def answers(
    ask: Callable[..., None], mutants: list[Mutant], executed: Executed, processes: int
) -> Iterator[Verdict]:
    """What so many processes find."""
    results = multiprocessing.SimpleQueue()  # type: ignore[var-annotated]
    workers = [
        multiprocessing.get_context("fork").Process(
            target=ask, args=(mutants[k::processes], executed, results)
        )
        for k in range(processes)
    ]
    for worker in workers:
        worker.start()
    left = processes
    while left:
        result = results.get()
        if result is None:
            left -= 1
        else:
            yield result
    for worker in workers:
        worker.join()


def judged(mutants: list[Mutant], processes: int, kept: Path | None) -> Iterator[Verdict]:
    executed = Executed(processes, kept)
    cold, answered = [], 0
    for verdict in answers(ask_warm, mutants, executed, processes):
        answered += 1
        if verdict[1] is None:
            cold.append(verdict[0])
        else:
            yield verdict
    if answered < len(mutants):
        sys.exit("tests cannot be collected")
    yield from answers(ask_cold, cold, executed, processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these mutants")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="which tests execute which lines")
    parser.add_argument("--record", type=Path, metavar="FILE", help="of verdicts, to go on from")
    chosen = parser.parse_args()
    if chosen.kept:
        chosen.kept = chosen.kept.absolute()
    record = Record(chosen.record and chosen.record.absolute())
    os.chdir(ROOT)  # mutmut reads its settings from pyproject.toml
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = False  # tests are compiled once
    if chosen.only:
        mutants = [Mutant(file, int(k)) for file, k in (n.split("#") for n in chosen.only)]
    else:
        mutants = sample(chosen.areas or AREAS, chosen.count, chosen.seed)
    alive, tried, equal = Counter[str](), Counter[str](), Counter[str]()
    left = []
    for mutant in mutants:
        if record.is_settled(mutant.key):
            tried[mutant.area] += 1
            equal[mutant.area] += isinstance(record.known[mutant.key], str)
        else:
            left.append(mutant)
    for mutant, noticed, test, seconds in judged(left, chosen.processes, chosen.kept):
        record.add(mutant.key, not noticed)
        tried[mutant.area] += 1
        alive[mutant.area] += not noticed
        verdict = "noticed: " if noticed else "survived:"
        print(f"{seconds:5.1f} s {verdict} {mutant.name} {test}", flush=True)
        if not noticed:
            print("\n".join(f"  {line}" for line in mutant.difference()), flush=True)
    for area in AREAS:
        print(
            f"{area}: {alive[area]} of {tried[area]} mutants survived, "
            f"beside {equal[area]} that change nothing"
        )
    print(
        f"all: {alive.total()} of {tried.total()} mutants survived, "
        f"beside {equal.total()} that change nothing"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
