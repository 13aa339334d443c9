"""Mutants of the Python package, a seeded sample by area, and the tests that execute what changed.

    pip install mutmut==3.8.1 coverage
    python tests/mutation/package.py [--count 300] [--seed 0] [--record FILE] [AREA ...]
    python tests/mutation/package.py --only theory/kernel.py#57 --kept executed.json

mutmut makes the mutants.  The tests of all areas run first, without a change: they must pass, and
coverage tells which of them execute which lines, which the file of --kept remembers: next
time only files of tests that have changed run, or all if the package has.  Then each mutant is
written into a copy of the tree, where a forked process runs the tests that execute its lines, quick
ones first, up to the first that fails.  Left out: strings, types, what is raised or asserted (with
`strict` of zip), what draws, and tests that measure time.
Prints every mutant that no test notices, with its change.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import functools
import importlib.util
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from record import Record, digest

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds of the processor for one mutant: an endless loop counts as noticed

# Of so many mutants in all, how many each area gets, in hundredths.
AREAS = {"theory": 34, "learner": 33, "optimizers": 13, "training": 20}

# Drawing and progress on a terminal are neither formulas nor verdicts.
LEFT_OUT = ("figure.py", "figures.py", "display.py", "progress.py", "__init__.py")

# What may notice, in so many processes of about the same length.
TESTS = (
    ("tests/learner", "tests/optimizers"),
    ("tests/theory", "tests/training", "tests/arguments", "tests/gradients/test_hvp.py"),
)
TIMED = ("test_interrupt.py", "test_learner_interrupt.py")  # fail where the machine is busy
SETTINGS = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not peers")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a third of what a start of pytest takes
}
COVERAGE = """\
[run]
dynamic_context = test_function
source = {source}
data_file = {data}
"""


@dataclass(frozen=True)
class Mutant:
    """The `number`-th change of a file."""

    file: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.file}#{self.number}"

    def __str__(self) -> str:
        return "\n".join([self.name, *self.difference()])

    def source(self) -> str:
        """The file with the change."""
        from mutmut.mutation.file_mutation import deep_replace

        module, changes = mutations(self.file)
        change = changes[self.number]
        return deep_replace(module, change.original_node, change.mutated_node).code  # type: ignore[union-attr]

    def difference(self) -> list[str]:
        before = (ROOT / "python" / "mhfast" / self.file).read_text().splitlines()
        return list(difflib.unified_diff(before, self.source().splitlines(), n=0, lineterm=""))[2:]

    def statements(self) -> list[ast.stmt]:
        """The innermost statements that are changed."""
        changed = set()
        for line in self.difference():
            if found := re.match(r"@@ -(\d+)(?:,(\d+))? ", line):
                first, count = int(found[1]), int(found[2] or 1)
                changed |= set(range(first, first + max(count, 1)))
        tree = ast.parse((ROOT / "python" / "mhfast" / self.file).read_text())
        inner = []
        for number in changed:
            around = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or 0)
            ]
            if around:
                inner.append(min(around, key=lambda node: (node.end_lineno or 0) - node.lineno))
        return inner

    def lines(self) -> set[int]:
        """The lines of these statements, of compound ones those before the body."""
        lines = set()
        for statement in self.statements():
            body = getattr(statement, "body", None)
            last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
            lines |= set(range(statement.lineno, max(last, statement.lineno) + 1))
        return lines

    def is_of_types(self) -> bool:
        """Whether the change is in the definition of a type alias or of a type variable."""
        return any(
            re.search(r"\bTypeAlias\b|= TypeVar\(", ast.unparse(statement))
            for statement in self.statements()
            if isinstance(statement, ast.Assign | ast.AnnAssign)
        )


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
            if isinstance(node, libcst.Arg) and node.keyword and node.keyword.value == "strict":
                silent.update(id(part) for part in parts(node))
            return True

    module.visit(Raised())
    kinds = (libcst.SimpleString, libcst.ConcatenatedString)
    return module, [
        change for change in found
        if id(change.original_node) not in silent
        and not isinstance(change.original_node, kinds)
        and plain(change.original_node) != plain(change.mutated_node)
    ]  # fmt: skip


def plain(node) -> str:  # type: ignore[no-untyped-def]
    """The code of a node, but for what `strict` of zip is."""
    import libcst

    return re.sub(r"(, *)?\bstrict=\w+", "", libcst.Module([]).code_for_node(node))


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
        some = rng.sample(every, min(len(every), round(count * AREAS[area] / shares)))
        # In the place of types, which the interpreter ignores, others are drawn.
        others = random.Random(f"{seed} {area}")
        for k, mutant in enumerate(some):
            while some[k].is_of_types():
                another = others.choice(every)
                some[k] = mutant if another in some else another
        drawn += some
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

    def notices(self, mutant: Mutant, tests: list[str]) -> bool:
        """Whether a test fails, in a process of its own that takes at most LIMIT."""
        changed = self.path / "python" / "mhfast" / mutant.file
        changed.write_text(mutant.source())
        # Times of files are compared in seconds: another mutant's would do.
        Path(importlib.util.cache_from_source(str(changed))).unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os._exit(self._run(tests))
        _, status = os.waitpid(child, 0)
        shutil.copy2(ROOT / "python" / "mhfast" / mutant.file, changed)
        return status != 0

    def _run(self, tests: list[str]) -> int:
        import pytest

        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        signal.alarm(10 * LIMIT)  # it may wait for ever
        os.chdir(self.path)
        os.environ["PYTHONPATH"] = str(self.path / "python")
        sys.path.insert(0, str(self.path / "python"))
        try:
            return int(pytest.main(["-x", *SETTINGS, *tests]))
        except BaseException:
            return 1


def read_report(data, source: Path, report: Path, found: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    """Add what one process of tests has measured to `found`, see `Executed._run`."""
    tests = {}  # by the name of their contexts
    for case in ElementTree.parse(report).iter("testcase"):
        file, name = case.attrib["file"], re.sub(r"\[.*", "", case.attrib["name"], flags=re.DOTALL)
        test = tests[f"{Path(file).stem}.{name}"] = f"{file}::{name}"
        seconds = found.setdefault(file, {"seconds": {}, "lines": {}})["seconds"]
        seconds[test] = seconds.get(test, 0.0) + float(case.attrib["time"])
    data.read()
    for path in data.measured_files():
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                if test := tests.get(".".join(context.split(".")[-2:])):
                    lines = found[test.split("::")[0]]["lines"]
                    lines.setdefault(f"{Path(path).relative_to(source)}:{line}", []).append(test)


class Executed:
    """Which tests execute which lines, and how long they take; ends the program if one fails."""

    def __init__(self, processes: int, kept: Path | None) -> None:
        known = json.loads(kept.read_text()) if kept and kept.exists() else {}
        package = digest(
            *(ROOT / "python" / "mhfast").rglob("*.py"), *(ROOT / "tests").glob("*.py")
        )
        folders = [ROOT / path for group in TESTS for path in group]
        files = [p for f in folders for p in (sorted(f.rglob("test_*.py")) if f.is_dir() else [f])]
        files = [file for file in files if file.name not in TIMED]
        keys = {str(file.relative_to(ROOT)): package + digest(file) for file in files}
        changed = [file for file, key in keys.items() if known.get(file, {}).get("key") != key]
        groups = [
            [file for file in changed if file.startswith(tuple(group))] for group in TESTS
        ] if processes > 1 else [changed]  # fmt: skip
        found = self._run([group for group in groups if group])
        nothing: dict[str, Any] = {"seconds": {}, "lines": {}}  # of a file whose tests are all slow
        entries = {
            file: {**found.get(file, nothing), "key": key} if file in changed else known[file]
            for file, key in keys.items()
        }
        if kept:
            kept.write_text(json.dumps(entries))
        self.tests: dict[tuple[str, int], set[str]] = {}
        self.seconds: dict[str, float] = {}
        for entry in entries.values():
            self.seconds.update(entry["seconds"])
            for line, tests in entry["lines"].items():
                file, number = line.split(":")
                self.tests.setdefault((file, int(number)), set()).update(tests)

    @staticmethod
    def _run(groups: list[list[str]]) -> dict[str, Any]:
        """Of each file of tests the seconds of its tests, and which lines they execute."""
        import coverage

        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            tree = Tree(Path(folder) / "tree")
            source = tree.path / "python" / "mhfast"
            begun = []
            for k, files in enumerate(groups):
                data, settings = Path(folder) / f"data{k}", Path(folder) / f"settings{k}"
                settings.write_text(COVERAGE.format(source=source, data=data))
                report = Path(folder) / f"report{k}.xml"
                command = [
                    sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest",
                    *SETTINGS, f"--junitxml={report}", "-o", "junit_family=xunit1", *files,
                ]  # fmt: skip
                paths = {"PYTHONPATH": str(tree.path / "python")}
                begun.append((subprocess.Popen(command, cwd=tree.path, env={**os.environ, **paths}),
                              data, report))  # fmt: skip
            failed = [process.wait() for process, _, _ in begun]
            if any(failed):
                sys.exit("tests fail without a change")
            for _, data, report in begun:
                read_report(coverage.CoverageData(str(data)), source, report, found)
        return found

    def of(self, mutant: Mutant) -> list[str]:
        """The tests of a mutant, quick ones first; of what runs at import all of its file."""
        found = set[str]().union(
            *(self.tests.get((mutant.file, line), set()) for line in mutant.lines())
        )
        if not found:
            found = set[str]().union(*(t for (f, _), t in self.tests.items() if f == mutant.file))
        return sorted(found or self.seconds, key=lambda test: self.seconds.get(test, 0.0))


def work(mutants: list[Mutant], executed: Executed, results) -> None:  # type: ignore[no-untyped-def]
    """Ask of each mutant whether its tests pass."""
    import numpy  # noqa: F401 - what every forked process needs is imported once
    import pytest  # noqa: F401
    import scipy.linalg
    import scipy.optimize
    import scipy.sparse.linalg  # noqa: F401

    with tempfile.TemporaryDirectory() as path:
        tree = Tree(Path(path) / "tree")
        for mutant in mutants:
            begin = time.monotonic()
            noticed = tree.notices(mutant, executed.of(mutant))
            results.put((mutant, noticed, time.monotonic() - begin))
    results.put(None)


def judged(
    mutants: list[Mutant], processes: int, kept: Path | None
) -> Iterator[tuple[Mutant, bool, float]]:
    """Yield mutants, whether a test failed, and the seconds that it took."""
    executed = Executed(processes, kept)
    results = multiprocessing.SimpleQueue()  # type: ignore[var-annotated]
    workers = [
        multiprocessing.get_context("fork").Process(
            target=work, args=(mutants[k::processes], executed, results)
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
    settled = [mutant for mutant in mutants if record.is_settled(str(mutant))]
    left = [mutant for mutant in mutants if mutant not in settled]
    tried, alive = dict.fromkeys(AREAS, 0), dict.fromkeys(AREAS, 0)
    for mutant in settled:
        tried[mutant.file.split("/")[0]] += 1
    for mutant, noticed, seconds in judged(left, chosen.processes, chosen.kept):
        record.add(str(mutant), not noticed)
        area = mutant.file.split("/")[0]
        tried[area] += 1
        alive[area] += not noticed
        verdict = "noticed: " if noticed else "survived:"
        print(f"{seconds:5.0f} s {verdict} {mutant.name}", flush=True)
        if not noticed:
            print("\n".join(f"  {line}" for line in mutant.difference()), flush=True)
    for area in AREAS:
        print(f"{area}: {alive[area]} of {tried[area]} mutants survived")
    print(f"all: {sum(alive.values())} of {sum(tried.values())} mutants survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
