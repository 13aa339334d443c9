"""A copy of the package with its tests, and which tests execute which lines of it."""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from changes import PACKAGE, ROOT, Mutant
from record import digest
from warm import IMPORT, Limits

# What may notice, in so many processes of about the same length.
TESTS = (
    ("tests/learner", "tests/optimizers", "tests/data", "tests/dataset", "tests/sweeps"),
    ("tests/theory", "tests/training", "tests/arguments", "tests/gradients", "tests/models"),
)
SETTINGS = (
    "-q", "-p", "no:cacheprovider", "-m", "not slow and not peers",
    "-k", "not interrupt and not ctrl_c",  # these fail where the machine is busy
)  # fmt: skip
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a third of what a start of pytest takes
}
NEAR = 0.2
COVERAGE = """\
[run]
source = {source}
data_file = {data}
"""


class Tree:
    """A copy of the package and its tests, in which one file at a time is changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("python", "tests", "docs", "examples"):
            shutil.copytree(ROOT / name, path / name)
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
            shutil.copy2(ROOT / name, path / name)
        compileall.compile_dir(path / "python", quiet=2)

    def write(self, mutant: Mutant) -> None:
        changed = self.path / "python" / "mhfast" / mutant.file
        changed.write_text(mutant.source)
        # Times of files are compared in seconds: another mutant's would do.
        Path(importlib.util.cache_from_source(str(changed))).unlink(missing_ok=True)

    def restore(self, mutant: Mutant) -> None:
        shutil.copy2(PACKAGE / mutant.file, self.path / "python" / "mhfast" / mutant.file)

    def pytest(self, arguments: list[str], plugins: list[object]) -> int:
        """Run pytest in this process and in silence, with the package of the tree."""
        import pytest

        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os.chdir(self.path)
        os.environ["PYTHONPATH"] = str(self.path / "python")
        sys.path.insert(0, str(self.path / "python"))
        return int(pytest.main([*SETTINGS, *arguments], plugins=plugins))

    def notices(self, tests: list[str], limits: Limits) -> bool:
        """Whether a test fails or takes too long, in a process of its own."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                limits.begin(IMPORT)
                status = self.pytest(["-x", *tests], [limits])
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        return status != 0


def pytest_runtest_protocol(item: Any) -> None:
    """Tell coverage, of whose process this file is a plugin, which test begins: in all threads."""
    import coverage

    if current := coverage.Coverage.current():
        current.switch_context(item.nodeid.split("[")[0])


def read_report(data, source: Path, report: Path, found: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    """Add what one process of tests has measured to `found`, see `Executed._run`."""
    for case in ElementTree.parse(report).iter("testcase"):
        file, name = case.attrib["file"], re.sub(r"\[.*", "", case.attrib["name"], flags=re.DOTALL)
        test = f"{file}::{name}"
        seconds = found.setdefault(file, {"seconds": {}, "lines": {}})["seconds"]
        seconds[test] = seconds.get(test, 0.0) + float(case.attrib["time"])
    data.read()
    for path in data.measured_files():
        for line, contexts in data.contexts_by_lineno(path).items():
            for test in filter(None, contexts):
                lines = found[test.split("::")[0]]["lines"]
                lines.setdefault(f"{Path(path).relative_to(source)}:{line}", []).append(test)


class Executed:
    """Which tests execute which lines, and how long they take; ends the program if one fails."""

    def __init__(self, processes: int, kept: Path | None) -> None:
        known = json.loads(kept.read_text()) if kept and kept.exists() else {}
        package = digest(*PACKAGE.rglob("*.py"), *(ROOT / "tests").glob("*.py"))
        folders = [ROOT / path for group in TESTS for path in group]
        files = [p for f in folders for p in (sorted(f.rglob("test_*.py")) if f.is_dir() else [f])]
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
        self.files = list(keys)
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
                    "-p", "executed", *SETTINGS, f"--junitxml={report}",
                    "-o", "junit_family=xunit1", *files,
                ]  # fmt: skip
                own = tree.path / "tests" / "mutation"
                paths = {"PYTHONPATH": f"{tree.path / 'python'}{os.pathsep}{own}"}
                begun.append((subprocess.Popen(command, cwd=tree.path, env={**os.environ, **paths}),
                              data, report))  # fmt: skip
            failed = [process.wait() for process, _, _ in begun]
            if any(failed):
                sys.exit("tests fail without a change")
            for _, data, report in begun:
                read_report(coverage.CoverageData(str(data)), source, report, found)
        return found

    def of(self, mutant: Mutant) -> list[str]:
        """The tests of a mutant; of what runs at import all of its file.

        Quick ones first, of which those of its area count as quicker.
        """
        found = set[str]().union(
            *(self.tests.get((mutant.file, line), set()) for line in mutant.lines())
        )
        if not found:
            found = set[str]().union(*(t for (f, _), t in self.tests.items() if f == mutant.file))

        def order(test: str) -> float:
            is_near = test.startswith(f"tests/{mutant.area}/")
            return self.seconds.get(test, 0.0) * (NEAR if is_near else 1.0)

        return sorted(sorted(found or self.seconds), key=order)
