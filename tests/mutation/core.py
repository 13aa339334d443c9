"""Mutants of the C++ core: one small change at a time, a rebuild, and the tests that concern it.

    python tests/mutation/core.py [--count 100] [--seed 0] [FILE ...]
    python tests/mutation/core.py --only csrc/training/loop.cpp:310:12

In a copy of the tree, with one instruction set and cheap optimization. Prints every mutant that the
tests let live, with its line. A mutant that does not compile is replaced by another one.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTRUCTION_SET = "baseline"  # every processor of the x86-64 family has it
LIMIT = 300.0  # seconds for the tests of one mutant: an endless loop counts as noticed

# What is mutated where no files are named, and the tests that must notice; the quick ones first.
OPTIMIZERS = "tests/optimizers/test_optimizer_formulas.py"
GRADIENTS = "tests/gradients/test_losses.py tests/gradients/test_hvp.py"
TRAINING = (
    f"{OPTIMIZERS} tests/training/test_training.py tests/training/test_training_runs.py "
    "tests/training/test_training_layer.py tests/training/test_recording.py "
    "tests/gradients/test_saturation.py tests/training/test_run.py"
)
RECORDS = (
    "tests/training/test_recording.py tests/training/test_training_layer.py "
    "tests/training/test_training_runs.py"
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
    "csrc/training/batches.cpp": "tests/training/test_batches.py tests/training/test_streams.py",
    "csrc/training/balls.cpp": STEPS,
    "csrc/training/descent.cpp": TRAINING,
    "csrc/training/directions.cpp": STEPS,
    "csrc/training/loop.cpp": f"{TRAINING} tests/gradients/test_losses.py",
    "csrc/training/norms.hpp": TRAINING,
    "csrc/training/polar.cpp": STEPS,
    "csrc/training/population.cpp": "tests/training/test_streams.py",
    "csrc/training/records.cpp": RECORDS,
    "csrc/kernels/step.hpp": TRAINING,
    "csrc/problem/loss.hpp": f"{GRADIENTS} tests/training/test_training_layer.py",
    "csrc/problem/clean.hpp": "tests/core/test_no_influence.py",
    "csrc/problem/rescale.hpp": "tests/core/test_scales.py tests/core/test_no_influence.py",
    "csrc/passes/inputs.cpp": (
        "tests/gradients/test_backward.py tests/gradients/test_gradients.py "
        "tests/core/test_scales.py tests/core/test_no_influence.py"
    ),
    "csrc/passes/layer_rows.cpp": (
        "tests/models/test_layer.py tests/training/test_training_layer.py "
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
    """A change of one line of a file, the lines counted from 1."""

    file: str
    line: int
    number: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.number}"

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
    found = []
    for number, line in enumerate((ROOT / file).read_text().splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith(("//", "///", "#", "template", "static_assert")):
            continue
        if '"' in stripped:
            continue
        found += [Mutant(file, number, k, line, after) for k, after in enumerate(changes(line))]
    return found


class Tree:
    """A copy of the sources in which one mutant at a time is built and tested."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\n")  # fmt: skip
        for name in files:
            if name and (ROOT / name).is_file():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, path / name)
        pybind11 = subprocess.run(
            [sys.executable, "-m", "pybind11", "--cmakedir"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        subprocess.run(
            ["cmake", "-S", path, "-B", path / "build", "-G", "Ninja", f"-Dpybind11_DIR={pybind11}",
             f"-DPython_EXECUTABLE={sys.executable}", f"-DMHFAST_ONLY={INSTRUCTION_SET}",
             "-DMHFAST_TOGETHER=OFF", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def build(self) -> bool:
        """Whether it compiles; the module then lies in the package."""
        done = subprocess.run(["cmake", "--build", self.path / "build"], capture_output=True)
        for module in (self.path / "build").glob("_core*.so"):
            shutil.copy2(module, self.path / "python" / "mhfast" / module.name)
        return done.returncode == 0

    def passes(self, tests: str) -> bool:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                 *tests.split()],
                cwd=self.path, capture_output=True, timeout=LIMIT,
                env={**os.environ, "PYTHONPATH": str(self.path / "python")},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def write(self, mutant: Mutant, text: str) -> None:
        lines = (ROOT / mutant.file).read_text().split("\n")
        lines[mutant.line - 1] = text
        (self.path / mutant.file).write_text("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=list(TESTS), metavar="FILE")
    parser.add_argument("--count", type=int, default=100, help="mutants that compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these mutants")
    chosen = parser.parse_args()
    every = [mutant for file in chosen.files for mutant in mutants(file)]
    random.Random(chosen.seed).shuffle(every)
    if chosen.only:
        every = [mutant for file in TESTS for mutant in mutants(file)]
        every = [mutant for mutant in every if mutant.name in chosen.only]
    with tempfile.TemporaryDirectory() as path:
        tree = Tree(Path(path))
        if not tree.build():
            print("the sources do not compile")
            return 1
        tried = survived = 0
        for mutant in every:
            if tried == chosen.count:
                break
            tree.write(mutant, mutant.after)
            begin = time.monotonic()
            if tree.build():
                tried += 1
                alive = tree.passes(TESTS.get(mutant.file, TRAINING))
                survived += alive
                print(f"{time.monotonic() - begin:5.0f} s ", end="")
                print(f"survived: {mutant}" if alive else f"noticed:  {mutant.name}", flush=True)
            tree.write(mutant, mutant.before)
    print(f"{survived} of {tried} mutants survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
