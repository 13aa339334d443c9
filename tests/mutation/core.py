"""Mutants of the C++ core: one small change at a time, a rebuild, and the tests that concern it.

    python tests/mutation/core.py [--count 100] [--seed 0] [--record FILE] [FILE ...]
    python tests/mutation/core.py --only csrc/training/loop.cpp:310:12

In a copy of the tree, with one instruction set and cheap optimization, where only what includes the
changed file is compiled again.  The tests must pass without a change first, which also tells how
long they take: quick files run first, those that concern the file before all others, of which only
the quick ones run, up to the first failure.  Prints every mutant that the tests let live, with its
line.  A mutant that does not compile, or to the same machine code, is replaced by another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from record import Record, digest
from warm import IMPORT, MEMORY, Limits

ROOT = Path(__file__).parents[2]
INSTRUCTION_SET = "baseline"  # every processor of the x86-64 family has it
QUICK = 2.0  # seconds of a file of tests that is asked for mutants that it does not concern
# Compilers of Python take long to import.
SETTINGS = (
    "-q", "-p", "no:cacheprovider", "-m", "not slow and not peers", "-k", "not numba and not jax",
)  # fmt: skip
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a third of what a start of pytest takes
}
BINDINGS = "csrc/bindings"

# What is mutated where no files are named, and the tests that must notice; the quick ones first.
OPTIMIZERS = "tests/optimizers/test_optimizer_formulas.py"
GRADIENTS = "tests/gradients/test_losses.py tests/gradients/test_hvp.py"
TRAINING = (
    f"{OPTIMIZERS} tests/training/test_training.py tests/training/test_training_runs.py "
    "tests/training/test_training_layer.py tests/training/test_recording.py "
    "tests/gradients/test_saturation.py tests/training/test_run.py"
)
LOOP = (
    f"{TRAINING} tests/training/test_batches.py tests/training/test_streams.py "
    "tests/training/test_reduce.py tests/training/test_callbacks.py "
    "tests/training/test_averages.py tests/training/test_constraints.py "
    "tests/training/test_fixed_attention.py "
    "tests/core/test_scales.py tests/gradients/test_losses.py"
)
RECORDS = (
    "tests/training/test_recording.py tests/training/test_training_layer.py "
    "tests/training/test_training_runs.py tests/training/test_evaluate.py"
)
STEPS = (
    f"{OPTIMIZERS} tests/optimizers/test_optimizers.py tests/training/test_training.py "
    "tests/training/test_training_runs.py tests/training/test_run.py"
)
CONCERNED = {
    "csrc/losses/*.hpp": (
        "tests/gradients/test_losses.py tests/gradients/test_loss_forms.py "
        "tests/gradients/test_hvp.py tests/gradients/test_saturation.py "
        "tests/training/test_training_layer.py tests/training/test_own_losses.py"
    ),
    "csrc/optimizers/*.hpp": STEPS,
    "csrc/row_maps/*.hpp": "tests/models/test_row_maps.py",
    "csrc/training/batches.cpp": (
        "tests/training/test_batches.py tests/training/test_streams.py tests/dataset/test_words.py"
    ),
    "csrc/training/balls.cpp": STEPS,
    "csrc/training/descent.cpp": f"{TRAINING} tests/training/test_constraints.py",
    "csrc/training/directions.cpp": STEPS,
    "csrc/training/loop.cpp": LOOP,
    "csrc/training/norms.hpp": TRAINING,
    "csrc/training/polar.cpp": STEPS,
    "csrc/training/population.cpp": "tests/training/test_streams.py",
    "csrc/training/records.cpp": RECORDS,
    "csrc/training/shard_sums.cpp": LOOP,
    "csrc/training/state.cpp": LOOP,
    "csrc/kernels/step.hpp": f"{TRAINING} tests/models/test_low_rank.py",
    "csrc/problem/loss.hpp": f"{GRADIENTS} tests/training/test_training_layer.py",
    "csrc/problem/clean.hpp": "tests/core/test_no_influence.py",
    "csrc/problem/rescale.hpp": "tests/core/test_scales.py tests/core/test_no_influence.py",
    "csrc/passes/input*.cpp": (
        "tests/gradients/test_backward.py tests/gradients/test_gradients.py "
        "tests/core/test_scales.py tests/core/test_no_influence.py "
        "tests/dataset/test_words.py tests/models/test_identities.py"
    ),
    "csrc/passes/layer_rows.cpp": (
        "tests/models/test_layer.py tests/training/test_training_layer.py "
        "tests/dataset/test_words.py tests/models/test_identities.py "
        "tests/training/test_own_losses.py "
        "tests/core/test_no_influence.py tests/core/test_kernels_family.py"
    ),
}
TESTS = {
    str(path.relative_to(ROOT)): tests
    for pattern, tests in CONCERNED.items()
    for path in sorted(ROOT.glob(pattern))
}

SWAPS = {
    " < ": [" <= ", " >= "],
    " <= ": [" < ", " > "],
    " > ": [" >= ", " <= "],
    " >= ": [" > ", " < "],
    " == ": [" != "],
    " != ": [" == "],
    " && ": [" || "],
    " || ": [" && "],
    " + ": [" - "],
    " - ": [" + "],
    " * ": [" / "],
    " / ": [" * "],
    " % ": [" / "],
    " += ": [" -= ", " = "],
    " -= ": [" += "],
    " *= ": [" = "],
    " /= ": [" *= "],
    " |= ": [" = "],
    " &= ": [" = "],
    "std::max": ["std::min"],
    "std::min": ["std::max"],
    "true": ["false"],
    "false": ["true"],
    "if (": ["if (!", "if (true || ", "if (false && "],
    "continue;": [";"],
    " ? ": [" ? 0 * "],
}
TOKEN = re.compile(
    "|".join(re.escape(text) for text in sorted(SWAPS, key=len, reverse=True))
    + r"|(?<![\w.\[])\d+(?:\.\d+)?(?![\w.]|\s*<)"
)
CALL = re.compile(r"^\s+[\w.>:\-]+\([^;{}]*\);$")  # a statement that is one call, on one line


@dataclass(frozen=True)
class Mutant:
    """A change of one line of a file, the lines counted from 1; the `same`-th of equal ones."""

    file: str
    line: int
    number: int
    before: str
    after: str
    same: int = 0

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.number}"

    @property
    def key(self) -> str:
        """What is changed to what; lines elsewhere do not count."""
        return f"{self.file}\n- {self.before.strip()}\n+ {self.after.strip()}\n{self.same}"

    def __str__(self) -> str:
        return f"{self.name}\n  - {self.before.strip()}\n  + {self.after.strip()}"


def changes(line: str) -> Iterator[str]:
    """What the line may become."""
    code = line.split("//")[0]
    for found in TOKEN.finditer(code):
        text = found.group()
        others = SWAPS.get(text)
        if others is None:
            others = [repr(float(text) + 0.5) if "." in text else str(int(text) + 1)]
        for other in others:
            yield line[: found.start()] + other + line[found.end() :]
    if CALL.match(code) and "return" not in code:
        yield re.match(r"\s*", line).group() + ";"  # type: ignore[union-attr]


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file, but for comments, directives, strings and compile-time checks."""
    found: list[Mutant] = []
    seen = Counter[str]()
    for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith(("//", "///", "#", "template", "static_assert")):
            continue
        if '"' in stripped:
            continue
        for k, after in enumerate(changes(line)):
            found.append(Mutant(file, number, k, line, after, seen[line.strip()]))
        seen[line.strip()] += 1
    return found


def order(mutant: Mutant, seed: int) -> bytes:
    """A random order which a change elsewhere in the core leaves as it is."""
    return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()


class Tree:
    """A copy of the sources in which one mutant at a time is built and tested."""

    def __init__(self, path: Path, jobs: int) -> None:
        self.path, self.jobs = path, jobs
        self.build, self.clean, self.sources = path / "build", path / "clean", path / "sources"
        if self.sources.exists():  # the last run may have ended amid a mutant
            shutil.copytree(self.sources, path, dirs_exist_ok=True)
            self._restore_build()
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\n")  # fmt: skip
        for name in files:
            if name != "CMakeLists.txt" and (ROOT / name).is_file():
                self._update(path / name, (ROOT / name).read_bytes())
        self._update(path / "CMakeLists.txt", self._cheap_settings().encode())
        pybind11 = subprocess.run(
            [sys.executable, "-m", "pybind11", "--cmakedir"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        subprocess.run(
            ["cmake", "-S", path, "-B", self.build, "-G", "Ninja", f"-Dpybind11_DIR={pybind11}",
             f"-DPython_EXECUTABLE={sys.executable}", f"-DMHFAST_ONLY={INSTRUCTION_SET}",
             "-DMHFAST_TOGETHER=ON", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        subprocess.run(["cmake", "--build", self.build, "--parallel", str(jobs)], check=True)
        (self.module,) = (module.name for module in self.build.glob("_core*.so"))
        for before, copy in ((self.build, self.clean), (path / "csrc", self.sources / "csrc")):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(before, copy)
        self.depends = self._dependencies()
        self.seconds = self._time_tests()

    @staticmethod
    def _update(file: Path, content: bytes) -> None:
        """Write it, but leave its time alone where nothing has changed."""
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_bytes() != content:
            file.write_bytes(content)

    @staticmethod
    def _cheap_settings() -> str:
        """Less optimization; the bindings, most of whose time is pybind11's headers, as one."""
        text = (ROOT / "CMakeLists.txt").read_text()
        loop = "foreach(source ${MHFAST_SOURCES})\n"
        assert text.count("-O3") == 1
        assert text.count(loop) == 1
        skip = f"  if(NOT source MATCHES {BINDINGS})\n    continue()\n  endif()\n"
        return text.replace("-O3", "-O1").replace(loop, loop + skip)

    def _ninja(self, *arguments: str) -> list[str]:
        return subprocess.run(
            ["ninja", "-C", self.build, "--quiet", *arguments],
            capture_output=True, text=True, check=True,
        ).stdout.split("\n")  # fmt: skip

    def _dependencies(self) -> dict[str, list[str]]:
        """The objects that depend on each source."""
        found: dict[str, list[str]] = {}
        for line in self._ninja("-t", "deps"):
            if line and not line.startswith(" "):
                target = line.split(":")[0]
            elif line and (file := Path(line.strip()).resolve()).is_relative_to(self.path):
                found.setdefault(str(file.relative_to(self.path)), []).append(target)
        return found

    def _time_tests(self) -> dict[str, float]:
        """How long each file takes; ends the program if one fails.

        The tree remembers it of files that have not changed since, with the same package.
        """
        shutil.copy2(self.build / self.module, self.path / "python" / "mhfast" / self.module)
        kept = self.path / "seconds.json"
        known = json.loads(kept.read_text()) if kept.exists() else {}
        package = digest(
            self.clean / self.module,
            *(ROOT / "python" / "mhfast").rglob("*.py"),
            *(ROOT / "tests").glob("*.py"),
        )
        seconds = {}
        for file in sorted({file for tests in TESTS.values() for file in tests.split()}):
            key = package + digest(ROOT / file)
            if known.get(file, [None])[0] != key:
                begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
                if not self.passes([file], {file: 600.0}):
                    sys.exit(f"{file}: tests fail without a change")
                taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin
                known[file] = [key, taken]
                kept.write_text(json.dumps(known))
            seconds[file] = known[file][1]
        return seconds

    def compile(self, objects: list[str]) -> bool:
        """Compile these, the others as they are, and link; whether it compiles."""
        commands = {name: self._ninja("-t", "commands", "-s", name)[0] for name in objects}
        with ThreadPoolExecutor(self.jobs) as threads:
            done = list(threads.map(self._command, commands.values()))
        if not all(done) or not self._command(self._ninja("-t", "commands", "-s", self.module)[0]):
            return False
        shutil.copy2(self.build / self.module, self.path / "python" / "mhfast" / self.module)
        return True

    def _command(self, command: str) -> bool:
        return not subprocess.run(
            command, shell=True, cwd=self.build, capture_output=True
        ).returncode

    def is_the_same(self) -> bool:
        """Whether the module is what it is without a change."""
        built, clean = (path / self.module for path in (self.build, self.clean))
        return built.read_bytes() == clean.read_bytes()

    def passes(self, files: list[str], seconds: dict[str, float]) -> bool:
        """Run the files one after another, in a process of its own, up to the first failure."""
        child = os.fork()
        if child == 0:
            os._exit(self._run(files, Limits(seconds)))
        _, status = os.waitpid(child, 0)
        return status == 0

    def _run(self, files: list[str], limits: Limits) -> int:
        import pytest

        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(self.path)
        os.environ["PYTHONPATH"] = str(self.path / "python")
        sys.path.insert(0, str(self.path / "python"))
        try:
            limits.begin(IMPORT)
            return int(pytest.main(["-x", *SETTINGS, *files], plugins=[limits]))
        except BaseException:
            return 1

    def lives(self, mutant: Mutant) -> bool | None:
        """Whether all tests pass; None if it does not compile, or to the same machine code.

        What the bindings take from a header, names and defaults, is little and takes longest to
        compile: they follow only where the tests pass without.
        """
        self.write(mutant, mutant.after)
        objects = self.depends.get(mutant.file, [])
        try:
            first = [name for name in objects if "unity_bindings" not in name]
            if not self.compile(first or objects):
                return None
            if first == objects and self.is_the_same():
                return None
            if not self.is_the_same() and not self._all_pass(mutant):
                return False
            if first == objects:
                return True
            if not self.compile(objects) or self.is_the_same():
                return None
            return self._all_pass(mutant)
        finally:
            shutil.copy2(self.sources / mutant.file, self.path / mutant.file)
            for name in (*objects, self.module):  # with their times: nothing is to be built
                shutil.copy2(self.clean / name, self.build / name)

    def _all_pass(self, mutant: Mutant) -> bool:
        concerned = TESTS.get(mutant.file, TRAINING).split()
        others = [f for f in self.seconds if f not in concerned and self.seconds[f] < QUICK]
        return all(
            self.passes(sorted(files, key=self.seconds.__getitem__), self.seconds)
            for files in (concerned, others)
        )

    def write(self, mutant: Mutant, text: str) -> None:
        lines = (self.path / mutant.file).read_text().split("\n")
        lines[mutant.line - 1] = text
        (self.path / mutant.file).write_text("\n".join(lines))

    def _restore_build(self) -> None:
        shutil.rmtree(self.build, ignore_errors=True)
        shutil.copytree(self.clean, self.build)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE")
    parser.add_argument("--count", type=int, default=100, help="mutants that compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these mutants")
    parser.add_argument("--tree", type=Path, metavar="FOLDER", help="to be kept for the next time")
    parser.add_argument("--record", type=Path, metavar="FILE", help="of verdicts, to go on from")
    chosen = parser.parse_args()
    record = Record(chosen.record)
    every = [mutant for file in chosen.files for mutant in mutants(file)]
    every.sort(key=lambda mutant: order(mutant, chosen.seed))
    if chosen.only:
        files = sorted({name.split(":")[0] for name in chosen.only})
        every = [mutant for file in files for mutant in mutants(file)]
        every = [mutant for mutant in every if mutant.name in chosen.only]
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = False  # tests are compiled once
    import numpy  # noqa: F401 - what every forked process needs is imported once
    import pytest  # noqa: F401
    import scipy.linalg
    import scipy.optimize
    import scipy.sparse.linalg  # noqa: F401

    with tempfile.TemporaryDirectory() as path:
        tree = Tree((chosen.tree or Path(path)).resolve(), chosen.jobs)
        tried = survived = equal = 0
        for mutant in every:
            if tried == chosen.count:
                break
            begin, known = time.monotonic(), record.is_settled(mutant.key)
            alive = record.known[mutant.key] if known else tree.lives(mutant)
            if not known:
                record.add(mutant.key, alive)
            if alive is None:
                continue
            tried += 1
            if isinstance(alive, str):
                equal += 1
                continue
            survived += alive
            print(f"{time.monotonic() - begin:5.0f} s ", end="")
            print(f"survived: {mutant}" if alive else f"noticed:  {mutant.name}", flush=True)
    print(f"{survived} of {tried} mutants survived, beside {equal} that change nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
