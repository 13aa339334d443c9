"""Mutants of the Python package by mutmut, and the tests that concern them.

    pip install mutmut==3.8.1
    python tests/mutation/package.py [--digits 37] [--processes 2] [GROUP ...]

mutmut finds modules only where the package lies at the top of the tree, so it works in a copy of
that shape; the compiled module is taken from the installed package. Prints every mutant that lives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mhfast import _core

ROOT = Path(__file__).parents[2]

# Modules under python/mhfast, and the tests that must notice changes to them.
GROUPS = {
    "optimizers": (["optimizers/*.py"], ["optimizers", "training/test_training.py"]),
    "gradients": (["gradients/*.py"], ["gradients"]),
    "training": (["training/*.py"], ["training"]),
    "reference": (["reference/*.py"], ["reference", "gradients/test_hvp.py"]),
}

CONFIGURATION = """
[tool.mutmut]
source_paths = ["mhfast"]
only_mutate = {modules}
also_copy = ["README.md"]
do_not_mutate_patterns = ['raise \\w+', 'Error\\(', 'match=', '^\\s*f"']
pytest_add_cli_args = ["-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
"""


def copy_tree(to: Path, modules: list[str], tests: list[str]) -> None:
    """The package, the tests and what configures them."""
    skipped = shutil.ignore_patterns("__pycache__", "_core*.so")
    shutil.copytree(ROOT / "python" / "mhfast", to / "mhfast", ignore=skipped)
    shutil.copytree(ROOT / "tests", to / "tests", ignore=skipped)
    shutil.copy2(_core.__file__, to / "mhfast")
    shutil.copy2(ROOT / "README.md", to)
    configuration = CONFIGURATION.format(
        modules=json.dumps([f"mhfast/{module}" for module in modules]),
        tests=json.dumps([f"tests/{test}" for test in tests]),
    )
    (to / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + configuration)


def mutmut(tree: Path, *arguments: str) -> str:
    """What it prints; it ends with an error where mutants survive, which is none of ours."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=tree, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def results(tree: Path) -> dict[str, str]:
    lines = mutmut(tree, "results", "--all", "true").splitlines()
    return dict(line.strip().split(": ", 1) for line in lines if ": " in line)


def try_group(group: str, digits: str, processes: int) -> None:
    """Try the mutants of a group whose numbers end with one of the digits."""
    modules, tests = GROUPS[group]
    with tempfile.TemporaryDirectory() as path:
        tree = Path(path)
        copy_tree(tree, modules, tests)
        names = [f"*__mutmut_*{digit}" for digit in digits]
        log = mutmut(tree, "run", "--max-children", str(processes), *names)
        found = {n: end for n, end in results(tree).items() if n[-1] in digits}
        tried = [name for name, end in found.items() if end != "not checked"]
        if not tried:
            print(log)
        alive = sorted(name for name in tried if found[name] in ("survived", "no tests"))
        for name in alive:
            changed = [
                line for line in mutmut(tree, "show", name).splitlines()
                if line[:1] in "+-" and line[:3] not in ("+++", "---")
            ]  # fmt: skip
            print(f"survived: {name}", *changed, sep="\n  ", flush=True)
    print(f"{group}: {len(alive)} of {len(tried)} mutants survived", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--digits", default="0123456789", help="last digits of mutants' numbers")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    for group in chosen.groups or list(GROUPS):
        try_group(group, chosen.digits, chosen.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
