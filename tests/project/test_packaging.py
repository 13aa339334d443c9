"""Wheels and releases: the workflows, the settings and the documentation say the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import conftest
import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
needs_workflows = pytest.mark.skipif(
    not WORKFLOWS.exists(), reason="needs the repository: not in a source distribution"
)


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def minor_versions(pattern: str, where: str) -> list[int]:
    return sorted(int(minor) for minor in re.findall(pattern, where))


def test_wheels_begin_with_the_oldest_python_and_are_those_of_the_classifiers():
    settings = text("pyproject.toml")
    digits = re.search(r'"cp31\{([\d,]+)\}-\*"', settings)[1]
    built = [10 + int(digit) for digit in digits.split(",")]
    oldest = int(re.search(r'^requires-python = ">=3\.(\d+)"$', settings, re.M)[1])
    assert built[0] == oldest
    assert minor_versions(r'"Programming Language :: Python :: 3\.(\d+)"', settings) == built


@needs_workflows
def test_the_workflows_test_the_oldest_and_the_newest_python():
    settings = text("pyproject.toml")
    supported = minor_versions(r'"Programming Language :: Python :: 3\.(\d+)"', settings)
    tested = minor_versions(r'python: "3\.(\d+)"', text(".github/workflows/ci.yml"))
    assert {supported[0], supported[-1]} <= set(tested) <= set(supported)


@needs_workflows
def test_every_file_that_the_workflows_run_exists():
    for workflow in sorted(WORKFLOWS.glob("*.yml")):
        commands = re.findall(r"run: (.*)", workflow.read_text("utf-8"))
        assert commands
        for name in re.findall(r"(?<![\w/])\.ci/[\w./-]+", " ".join(commands)):
            assert (ROOT / name).is_file(), f"{workflow.name} runs {name}"
    script = re.search(r"\{project\}/(\S+)\"", text("pyproject.toml"))[1]
    assert (ROOT / script).is_file()


@needs_workflows
def test_only_publishing_may_write_and_only_a_tag_publishes():
    wheels = text(".github/workflows/wheels.yml")
    before, publish = wheels.split("\n  publish:\n")
    assert "write" not in before
    assert "if: github.event_name == 'push'" in publish
    events = before.split("\npermissions:")[0]
    assert re.search(r'push:\n    tags: \["v\*"\]\n', events)
    assert "branches" not in events
    assert "write" not in text(".github/workflows/ci.yml")


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("make") is None,
    reason="needs cmake and make: apt-get install cmake make",
)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["-DCMAKE_SYSTEM_NAME=Windows"], r"mhfast does not build on Windows: .*MSVC.* Use WSL"),
        (
            ["-DCMAKE_SYSTEM_NAME=Darwin", "-DCMAKE_OSX_ARCHITECTURES=arm64;x86_64"],
            r'for one architecture at a time.*"arm64;x86_64"',
        ),
    ],
)
def test_a_platform_that_cannot_be_built_for_is_named(tmp_path, settings, message):
    """CMake believes the platform that it is told, and stops before it compiles for it."""
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_CXX_COMPILER_WORKS=1", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search(message, " ".join(done.stderr.split()))


@needs_workflows
def test_ci_installs_what_tests_are_marked_for():
    lines = text(".ci/clients.txt").splitlines()
    installed = {re.match(r"\w+", line)[0] for line in lines if not line.startswith("#")}
    assert installed == set(conftest.PEERS)
