"""Facts that files of the repository state twice: versions of the package and of lint tools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_ci = pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="not in a source distribution")


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_the_version_is_the_same_everywhere():
    version = re.search(r'^version = "(.+)"$', text("pyproject.toml"), re.M)[1]
    assert re.search(r"^version: (.+)$", text("CITATION.cff"), re.M)[1] == version
    assert re.findall(r"^## \[?(\d[\w.]*)", text("CHANGELOG.md"), re.M)[0] == version


@needs_ci
def test_pre_commit_runs_the_tools_and_versions_of_the_lint():
    pinned = set(re.findall(r"^[\w-]+==[\d.]+$", text(".ci/lint-requirements.txt"), re.M))
    hooks = set(re.findall(r"[\w-]+==[\d.]+", text(".pre-commit-config.yaml")))
    assert hooks
    assert hooks <= pinned
    setting = r"(?:env )?(?:\w+=\S+ )?"
    commands = re.findall(rf"^{setting}([a-z][\w-]+)\b", text(".ci/lint").split("cd ", 1)[1], re.M)
    entries = re.findall(rf"entry: {setting}([\w-]+)", text(".pre-commit-config.yaml"))
    assert set(commands) == set(entries)
