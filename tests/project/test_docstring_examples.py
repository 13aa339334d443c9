"""Examples in docstrings run and print what they say; every public name has one."""

from __future__ import annotations

import doctest
import inspect
import re
from typing import Any

import pytest
from test_docstrings import public

import mhfast as mh

NEEDS = {
    "mhfast.Run.plot": "matplotlib",
    "mhfast.Run.to_dataframe": "pandas",
    "mhfast.Sweep.to_dataframe": "pandas",
    "mhfast.data.digits": "sklearn",
    "mhfast.learner.Learning.plot": "matplotlib",
    "mhfast.theory.Certificate.plot": "matplotlib",
}


def documented() -> dict[str, Any]:
    """All public names, with the functions of the reference."""
    reference = {name: getattr(mh.reference, name) for name in mh.reference.__all__}
    functions = {n: member for n, member in reference.items() if inspect.isroutine(member)}
    return public() | {f"mhfast.reference.{name}": member for name, member in functions.items()}


def examples(member: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(member) or "")


WITH_EXAMPLES = [name for name, member in documented().items() if examples(member)]


@pytest.mark.parametrize("name", documented())
def test_every_public_name_has_an_example(name):
    """A method or property may instead be used in the example of its class."""
    of_class, _, own = name.rpartition(".")
    used = "".join(part.source for part in examples(documented().get(of_class)))
    assert examples(documented()[name]) or re.search(rf"\.{own}\b", used)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_say(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"pip install {NEEDS[name]}")
    member = documented()[name]
    member = inspect.unwrap(getattr(member, "fget", None) or member)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    found = doctest.DocTestFinder(recurse=False).find(member, name, globs={})
    assert sum(len(test.examples) for test in found) > 0
    said: list[str] = []
    for test in found:
        runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
