"""Examples, and the code and names in README and docs, are as true as the rest."""

from __future__ import annotations

import doctest
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mhfast as mh

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("**/*.md"))
SMALL = {
    "learner_degenerate.py": "--quick",
    "learner_examples.py": "--quick --output figure.png",
    "learner_growth.py": "--quick --output figure.png",
    "learner_hard.py": "--quick --output figure.png",
    "learner_phases.py": "--quick --output figure.png",
    "learner_queries.py": "--heads 2 --dim 6",
    "learner_refinement.py": "--quick --output figure.png",
    "regularization_path.py": "--instances 2 --radii 3 --largest 5 --output figure.png",
    "role_of_heads.py": "--heads 1 3 --trials 1 --steps 5 --start random_step",
    "saturation.py": "--instances 2 --steps 20 --output figure.png",
    "saturation_digits.py": "--steps 1 3",
    "theory_curvature.py": ("--heads 1 2 --n 9 --dim 6 --steps 3 --trials 2 --output figure.png"),
    "theory_distance.py": "--heads 1 3 --n 10 --steps 20 --output figure.png",
    "theory_guarantee.py": "--heads 60 --steps 30 --n 6 --output figure.png",
    "theory_heads.py": "--heads 1 3 --trials 2 --steps 5 --n 20 --output figure.png",
    "theory_margin.py": "--n 10 --trials 2 --heads 1 3 --output figure.png",
    "theory_more_heads.py": (
        "--heads 1 3 --teachers 2 --n 60 --test 50 --trials 1 --steps 20 --output figure.png"
    ),
    "theory_needed_heads.py": "--n 6",
    "theory_rates.py": (
        "--samples 10 20 --test 30 --left-out 10 --data-sets 2 --heads 2 --trials 2 --steps 20 "
        "--long-heads 2 --long-samples 10 --long-sets 2 --output figure.png"
    ),
    "theory_stability.py": (
        "--heads 4 --steps 3 --longest 4 --samples 4 6 --left-out 4 --most 4 --output figure.png"
    ),
    "theory_text.py": (
        "--heads 1 3 --trials 1 --steps 20 --n 200 --test 100 --words 50 --dim 6 "
        "--output figure.png"
    ),
    "train_digits.py": "--heads 2 --splits 1 --steps 20 --save run.npz --plot figure.png",
}
WRITTEN = {
    "learner_examples.py": ["figure.png"],
    "learner_growth.py": ["figure.png"],
    "learner_hard.py": ["figure.png"],
    "learner_phases.py": ["figure.png"],
    "learner_refinement.py": ["figure.png"],
    "regularization_path.py": ["figure.png"],
    "saturation.py": ["figure.png"],
    "theory_curvature.py": ["figure.png"],
    "theory_distance.py": ["figure.png"],
    "theory_guarantee.py": ["figure.png"],
    "theory_heads.py": ["figure.png"],
    "theory_margin.py": ["figure.png"],
    "theory_more_heads.py": ["figure.png"],
    "theory_rates.py": ["figure.png"],
    "theory_stability.py": ["figure.png"],
    "theory_text.py": ["figure.png"],
    "train_digits.py": ["run.npz", "figure.png"],
}
COMMANDS = (
    'python3 -m venv .venv && .venv/bin/pip install ".[demo]" && .venv/bin/mhfast demo',
    'python3 -m venv .venv && .venv/bin/pip install ".[test]" && .venv/bin/pytest',
)

of_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


# Warnings that other libraries give of themselves.
OF_OTHERS = ("-W", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def run(arguments: list[str], directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *OF_OTHERS, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here():
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_an_example(name, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("mpmath")
    pytest.importorskip("sklearn")
    out = run([str(ROOT / "examples" / name), *SMALL[name].split()], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(WRITTEN.get(name, []))
    assert "nan" not in out


def test_gradients_keep_their_digits_along_a_training(tmp_path):
    """As the README says, by the command that it names, with any automatic differentiation."""
    pytest.importorskip("mpmath")
    out = run([str(ROOT / "examples/saturation_digits.py"), "--steps", "150", "190"], tmp_path)
    errors = [[float(number) for number in line.split()[-2:]] for line in out.splitlines()[2:]]
    # Weights of e^-26 to e^-37 are differences of numbers near 1: 2^-53 e^26 = 2e-5 and more.
    assert all(theirs > 1e-5 and ours < 1e-13 for theirs, ours in errors)


def packages(block: str) -> list[str]:
    return re.findall(r"^(?:from|import) (\w+)", block, re.M)


def has_its_packages(block: str) -> bool:
    return all(importlib.util.find_spec(name) for name in packages(block))


PEERS = {"distributed", "jax", "numba", "optuna", "ray", "torch"}
"""Packages in blocks of the pages that the extra `test` does not install."""


def marks(page: Path) -> list[pytest.MarkDecorator]:
    """Learning in vain takes long; blocks of peers are to be run where these are."""
    used = {name for block in blocks(page, "python") for name in packages(block)}
    slow, peers = page.name == "learner.md", bool(used & PEERS)
    return slow * [pytest.mark.slow] + peers * [pytest.mark.peers]


def test_every_package_of_a_page_is_installed_by_one_of_the_test_environments():
    used = {name for page in PAGES for block in blocks(page, "python") for name in packages(block)}
    standard = set(sys.stdlib_module_names) | {"mhfast", "numpy", "scipy", "sklearn", "matplotlib"}
    assert used - standard == PEERS


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks(page)) for page in PAGES], ids=lambda page: page.name
)
def test_the_code_of_a_page_runs(page, tmp_path):
    """A block about another library is left out where that is not installed."""
    code = [block for block in blocks(page, "python") if has_its_packages(block)]
    (tmp_path / "page.py").write_text("\n".join(code), "utf-8")
    run(["page.py"], tmp_path)


def test_the_code_in_the_docstring_of_the_package_runs():
    found = doctest.testmod(mh)
    assert found.attempted
    assert not found.failed


def test_the_commands_of_the_readme():
    lines = [line for block in blocks(PAGES[0], "sh") for line in block.splitlines()]
    for command in COMMANDS:
        assert command in lines


def test_the_output_in_the_readme_is_that_of_its_first_example(tmp_path):
    (tmp_path / "page.py").write_text(blocks(PAGES[0], "python")[0], "utf-8")
    assert run(["page.py"], tmp_path) == blocks(PAGES[0], "text")[0]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_every_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8"))
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@of_every_page
def test_files_that_are_named_exist(page):
    text = page.read_text("utf-8")
    folders = r"(?:csrc|python|tests|benchmarks|docs|examples|\.ci)/[\w./-]*"
    tops = r"(?:CMakeLists\.txt|pyproject\.toml|LICENSE|README\.md)\b"
    names = {name.rstrip(".") for name in re.findall(rf"(?<![\w./-])(?:{folders}|{tops})", text)}
    for name in names:
        if name.startswith(".ci") and not (ROOT / ".ci").exists():
            continue  # a source distribution comes without it
        assert (ROOT / name).exists(), name


@functools.cache
def sources() -> str:
    files = [
        path
        for folder in ("csrc", "python", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cpp", ".hpp", ".py") and path != Path(__file__)
    ]
    return "\n".join(path.read_text("utf-8") for path in (*files, ROOT / "CMakeLists.txt"))


@of_every_page
def test_names_that_are_mentioned_exist(page):
    text = page.read_text("utf-8")
    for name in re.findall(r"\bmh\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", text):
        functools.reduce(getattr, name.split("."), mh)
    for name in set(re.findall(r"\b(?:MHFAST_\w+|k[A-Z]\w+)\b", text)):
        assert re.search(rf"\b{name}\b", sources()), name
