"""Mutants of the Python package, a seeded sample by area, and the tests that concern them.

    pip install mutmut==3.8.1
    python tests/mutation/package.py [--count 300] [--seed 0] [--processes 2] [AREA ...]
    python tests/mutation/package.py --only theory/kernel.py#57

mutmut makes the mutants.  Each is written into a copy of the tree, where a forked process runs the
tests up to the first that fails.  Left out: strings, annotations, what is raised or asserted, and
what draws.  Prints every mutant that no test notices, with its change.
"""

from __future__ import annotations

import argparse
import compileall
import difflib
import functools
import importlib.util
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds of the processor for one mutant: an endless loop counts as noticed

# Of so many mutants in all, how many each area gets, in hundredths.
AREAS = {"theory": 34, "learner": 33, "optimizers": 13, "training": 20}

# Drawing and progress on a terminal are neither formulas nor verdicts.
LEFT_OUT = ("figure.py", "figures.py", "display.py", "progress.py", "__init__.py")

# The files of tests that are asked, the likely ones first; the folder of the area comes last.
FIRST = {
    "theory/bounds.py": "theory/test_theory_bounds.py",
    "theory/conditions.py": "theory/test_theory_bounds.py",
    "theory/hessian.py": "theory/test_theory_bounds.py theory/test_theory_verdicts.py",
    "theory/certificate.py": "theory/test_theory_guarantees.py",
    "theory/guarantees.py": "theory/test_theory_guarantees.py",
    "theory/stability.py": "theory/test_theory_guarantees.py",
    "theory/mixture.py": "theory/test_theory_mixture.py",
    "theory/needed_heads.py": "theory/test_needed_heads.py",
    "theory/per_head.py": "theory/test_per_head.py",
    "theory/programs.py": "theory/test_theory_programs.py",
    "theory/projected.py": "theory/test_theory_programs.py",
    "theory/regularization.py": "theory/test_theory_programs.py",
    "theory/norms.py": "theory/test_theory_programs.py",
    "theory/separation.py": "theory/test_theory_separation.py",
    "theory/next_token.py": "theory/test_theory_separation.py",
    "theory/joint.py": "theory/test_theory_separation.py",
    "theory/token_optimality.py": "theory/test_theory_separation.py",
    "theory/alignment.py": "theory/test_theory_separation.py",
    "theory/": "theory/test_theory_margin.py",
    "learner/queries/": "learner/test_learner_queries.py",
    "learner/facts.py": "learner/test_learner_facts.py",
    "learner/refinement.py": "learner/test_learner_refinement.py",
    "learner/alignment.py": "learner/test_learner_alignment.py",
    "learner/": "learner/test_learner_core.py learner/test_learner_phases.py",
    "optimizers/": "optimizers",
    "training/subspace.py": "training/test_subspace.py",
    "training/segments.py": "training/test_segments.py",
    "training/evaluate.py": "training/test_evaluate.py",
    "training/minimize.py": "training/test_minimize.py",
    "training/flow.py": "training/test_flow.py",
    "training/iterates.py": "training/test_minimize.py training/test_flow.py",
    "training/objective.py": "training/test_minimize.py training/test_flow.py",
    "training/": "training/test_recording.py training/test_run.py",
}
THEN = {
    "theory": "theory",
    "learner": "learner",
    "optimizers": (
        "optimizers training/test_training.py training/test_run.py arguments/test_errors.py"
    ),
    "training": "training arguments/test_errors.py arguments/test_run_axis.py",
}


def tests(file: str) -> list[str]:
    """What is asked of a mutant of a file under python/mhfast."""
    first = max((start for start in FIRST if file.startswith(start)), key=len)
    every = f"{FIRST[first]} {THEN[file.split('/')[0]]}".split()
    if file.startswith("learner/queries/"):
        every = FIRST[first].split()
    return [f"tests/{name}" for name in every]


@dataclass(frozen=True)
class Mutant:
    """The `number`-th change of a file."""

    file: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.file}#{self.number}"

    def source(self) -> str:
        """The file with the change."""
        from mutmut.mutation.file_mutation import deep_replace

        module, changes = mutations(self.file)
        change = changes[self.number]
        return deep_replace(module, change.original_node, change.mutated_node).code  # type: ignore[union-attr]

    def difference(self) -> str:
        before = (ROOT / "python" / "mhfast" / self.file).read_text().splitlines()
        lines = difflib.unified_diff(before, self.source().splitlines(), n=0, lineterm="")
        return "\n".join(f"  {line}" for line in list(lines)[2:])


@functools.cache
def mutations(file: str):  # type: ignore[no-untyped-def]
    """The module, and its changes but for those of strings and of what is raised or asserted."""
    import libcst
    from mutmut.mutation.file_mutation import create_mutations

    source = (ROOT / "python" / "mhfast" / file).read_text()
    module, found, _, _ = create_mutations(file, source)
    silent: set[int] = set()

    class Raised(libcst.CSTVisitor):
        def on_visit(self, node: libcst.CSTNode) -> bool:
            if isinstance(node, (libcst.Raise, libcst.Assert, libcst.FormattedString)):
                silent.update(id(part) for part in parts(node))
                return False
            return True

    module.visit(Raised())
    kinds = (libcst.SimpleString, libcst.ConcatenatedString)
    return module, [
        change for change in found
        if id(change.original_node) not in silent and not isinstance(change.original_node, kinds)
    ]  # fmt: skip


def parts(node):  # type: ignore[no-untyped-def]
    """A node of the syntax tree and all below it."""
    yield node
    for child in node.children:
        yield from parts(child)


def sample(areas: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Mutants drawn without replacement, of each area its share, in random order."""
    rng = random.Random(seed)
    areas = list(areas)
    shares = sum(AREAS[area] for area in areas)
    drawn: list[Mutant] = []
    for area in areas:
        files = sorted(
            str(path.relative_to(ROOT / "python" / "mhfast"))
            for path in (ROOT / "python" / "mhfast" / area).rglob("*.py")
            if path.name not in LEFT_OUT
        )
        every = [Mutant(file, k) for file in files for k in range(len(mutations(file)[1]))]
        drawn += rng.sample(every, min(len(every), round(count * AREAS[area] / shares)))
    rng.shuffle(drawn)
    return drawn


class Tree:
    """A copy of the package and its tests, in which one file at a time is changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("python", "tests", "docs", "examples"):
            shutil.copytree(ROOT / name, path / name)
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
            shutil.copy2(ROOT / name, path / name)
        compileall.compile_dir(path / "python", quiet=2)

    def notices(self, mutant: Mutant | None, asked: list[str]) -> bool:
        """Whether a test fails, in a process of its own that takes at most LIMIT."""
        if mutant is not None:
            changed = self.path / "python" / "mhfast" / mutant.file
            changed.write_text(mutant.source())
            # Times of files are compared in seconds: another mutant's would do.
            Path(importlib.util.cache_from_source(str(changed))).unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os._exit(self._run(asked))
        _, status = os.waitpid(child, 0)
        if mutant is not None:
            shutil.copy2(ROOT / "python" / "mhfast" / mutant.file, changed)
        return status != 0

    def _run(self, asked: list[str]) -> int:
        import pytest

        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        signal.alarm(10 * LIMIT)  # it may wait for ever
        os.chdir(self.path)
        os.environ["PYTHONPATH"] = str(self.path / "python")
        sys.path.insert(0, str(self.path / "python"))
        for peer in ("torch", "jax"):  # slow to import, and never the only ones that notice
            sys.modules[peer] = None  # type: ignore[assignment]
        settings = ["-x", "-q", "-p", "no:cacheprovider"]
        first, rest = asked[0], [name for name in asked[1:] if name != asked[0]]
        try:  # the likely file alone first: to collect the others takes longer than it does
            failed = pytest.main([*settings, first])
            if rest and not failed:
                failed = pytest.main([*settings, f"--ignore={first}", *rest])
            return int(failed)
        except BaseException:
            return 1


def work(mutants: list[Mutant], lists: list[list[str]], results) -> None:  # type: ignore[no-untyped-def]
    """Ask of each mutant whether its tests pass, at the end whether they do without a change."""
    import numpy  # noqa: F401 - what every forked process needs is imported once
    import pytest  # noqa: F401
    import scipy.linalg
    import scipy.optimize
    import scipy.sparse.linalg  # noqa: F401

    with tempfile.TemporaryDirectory() as path:
        tree = Tree(Path(path))
        for mutant in mutants:
            begin = time.monotonic()
            noticed = tree.notices(mutant, tests(mutant.file))
            results.put((mutant, noticed, time.monotonic() - begin))
        for asked in lists:
            results.put((" ".join(asked), tree.notices(None, asked), 0.0))
    results.put(None)


def judged(mutants: list[Mutant], processes: int) -> Iterator[tuple[Mutant | str, bool, float]]:
    """Yield mutants or lists of tests, whether a test failed, and the seconds that it took."""
    areas = sorted({mutant.file.split("/")[0] for mutant in mutants})
    lists = [[f"tests/{name}" for name in THEN[area].split()] for area in areas]
    results = multiprocessing.SimpleQueue()  # type: ignore[var-annotated]
    workers = [
        multiprocessing.get_context("fork").Process(
            target=work,
            args=(mutants[k::processes], lists[k::processes], results),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these mutants")
    chosen = parser.parse_args()
    os.chdir(ROOT)  # mutmut reads its settings from pyproject.toml
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    if chosen.only:
        mutants = [Mutant(file, int(k)) for file, k in (n.split("#") for n in chosen.only)]
    else:
        mutants = sample(chosen.areas or AREAS, chosen.count, chosen.seed)
    tried, alive = dict.fromkeys(AREAS, 0), dict.fromkeys(AREAS, 0)
    for found, noticed, seconds in judged(mutants, chosen.processes):
        if isinstance(found, str):
            if noticed:
                print(f"these tests fail without a change: {found}", flush=True)
            continue
        area = found.file.split("/")[0]
        tried[area] += 1
        alive[area] += not noticed
        verdict = f"noticed:  {found.name}" if noticed else f"survived: {found.name}"
        print(f"{seconds:5.0f} s {verdict}", flush=True)
        if not noticed:
            print(found.difference(), flush=True)
    for area in AREAS:
        print(f"{area}: {alive[area]} of {tried[area]} mutants survived")
    print(f"all: {sum(alive.values())} of {sum(tried.values())} mutants survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
