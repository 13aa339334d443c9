"""Examples in docstrings run and print what they say; each function has one."""

from __future__ import annotations

import doctest
import inspect
import types

import pytest
from test_docstrings import public

ADVANCED = ("mhfast.theory.", "mhfast.learner.", "mhfast.interop.")
"""Modules in which not every function has an example of its own; the guides have them."""

NEEDS = {
    "mhfast.Run.plot": "matplotlib",
    "mhfast.Run.to_dataframe": "pandas",
    "mhfast.Sweep.to_dataframe": "pandas",
    "mhfast.data.digits": "sklearn",
}

WITH_EXAMPLES = [name for name, member in public().items() if ">>>" in (member.__doc__ or "")]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, member in public().items()
        if isinstance(member, types.FunctionType) and not name.startswith(ADVANCED)
    ],
)
def test_every_function_has_an_example(name):
    assert ">>>" in (inspect.getdoc(public()[name]) or "")


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_say(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"pip install {NEEDS[name]}")
    member = inspect.unwrap(getattr(public()[name], "fget", None) or public()[name])
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    found = doctest.DocTestFinder(recurse=False).find(member, name, globs={})
    assert sum(len(test.examples) for test in found) > 0
    said: list[str] = []
    for test in found:
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
