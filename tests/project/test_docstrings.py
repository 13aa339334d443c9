"""Docstrings of the public API: every parameter, result and exception is documented."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mhfast as mh

MODULES = ["mhfast", "mhfast.data", "mhfast.theory", "mhfast.learner", "mhfast.interop.jax"]
MODULES += ["mhfast.interop.torch", "mhfast.interop.sklearn", "mhfast.interop.loggers"]
MODULES += ["mhfast.figures"]
SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises")


def sections(docstring: str) -> dict[str, str]:
    """The numpy-style sections of a docstring by title."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", docstring, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def names(section: str) -> set[str]:
    """The names that a section lists: ``name : type`` or ``name, name``, not indented."""
    heads = re.findall(r"^(?! )([^:\n]+)", section, re.M)
    return {name.strip(" *`") for head in heads for name in head.split(",")}


def ours(member: Any) -> bool:
    return getattr(member, "__module__", "").startswith("mhfast.")


def public_names(module: types.ModuleType) -> list[str]:
    """What ``__all__`` lists, or, without one, what the module itself defines."""
    defined = [
        name
        for name, member in vars(module).items()
        if not name.startswith("_") and getattr(member, "__module__", None) == module.__name__
    ]
    return list(getattr(module, "__all__", defined))


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of mhfast and its bases define."""
    for owner in cls.__mro__:
        for name, member in vars(owner).items() if ours(owner) else ():
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            member = getattr(member, "fn", member)  # of scikit-learn's `available_if`
            if not name.startswith("_") and isinstance(member, (types.FunctionType, property)):
                yield name, member


@functools.cache
def public() -> dict[str, Any]:
    """Every public function, class, method and property by its dotted name."""
    found: dict[str, Any] = {}
    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # PyTorch, JAX, scikit-learn and matplotlib are optional
            continue
        for name in public_names(module):
            member = getattr(module, name)
            if not ours(member) or isinstance(member, types.ModuleType):
                continue
            if isinstance(member, type):
                found |= {f"{module_name}.{name}.{key}": part for key, part in methods(member)}
            if isinstance(member, (type, types.FunctionType)):
                found[f"{module_name}.{name}"] = member
    once = {id(member): name for name, member in reversed(found.items())}
    return {name: member for name, member in found.items() if once[id(member)] == name}


@functools.cache
def docs(member: Any) -> dict[str, str]:
    """The sections of a member's docstring; for a class, those of its bases are added."""
    found: dict[str, str] = {}
    for part in member.__mro__ if isinstance(member, type) else [member]:
        if part is member or ours(part):
            for title, body in sections(inspect.getdoc(part) or "").items():
                found[title] = found.get(title, "") + body.rstrip() + "\n"
    return found


def bodies(member: Any) -> list[types.FunctionType]:
    """The functions whose exceptions a caller of the member meets."""
    if isinstance(member, property):
        return [inspect.unwrap(member.fget)]
    if isinstance(member, type):
        made = (vars(member).get(name) for name in ("__init__", "__post_init__", "__new__"))
        return [f for f in made if isinstance(f, types.FunctionType) and source(f)]
    return [inspect.unwrap(member)]


@functools.cache
def source(function: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):  # generated, such as the __init__ of a dataclass
        return None


def raised(function: Callable[..., Any]) -> set[str]:
    """The classes of ``raise X`` and ``raise X(...)`` in the body of a function."""
    found = set()
    for node in ast.walk(source(function)) if source(function) else ():
        if isinstance(node, ast.Raise):
            what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(what, ast.Name) and what.id[0].isupper():
                found.add(what.id)
    return found


def owner(function: types.FunctionType) -> Any:
    """The class that a method is written in, or None."""
    return function.__globals__.get(function.__qualname__.split(".")[0])


def called(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """What a function calls of mhfast: ``name()``, ``module.name()``, ``self.name()``."""
    for node in ast.walk(source(function)) if source(function) else ():
        if not isinstance(node, ast.Call):
            continue
        target: Any = None
        if isinstance(node.func, ast.Name):
            target = function.__globals__.get(node.func.id)
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            base = node.func.value.id
            holder = owner(function) if base in ("self", "cls") else function.__globals__.get(base)
            if isinstance(holder, (type, types.ModuleType)):
                target = inspect.getattr_static(holder, node.func.attr, None)
        if isinstance(target, (classmethod, staticmethod)):
            target = target.__func__
        if isinstance(target, (type, types.FunctionType)) and ours(target):
            yield from bodies(target)


def may_raise(function: types.FunctionType) -> bool:
    """Whether the function, or one that it calls at any depth, raises TypeError or ValueError."""
    seen, waiting = set(), [function]
    while waiting:
        current = waiting.pop()
        if raised(current) & {"TypeError", "ValueError"}:
            return True
        seen.add(current)
        waiting += [f for f in called(current) if f not in seen]
    return False


of_all = pytest.mark.parametrize("name", public())


def test_the_public_api_is_found():
    some = {"mhfast.train", "mhfast.Classifier.attention", "mhfast.data.signal_noise"}
    assert some <= set(public())


@of_all
def test_every_parameter_is_documented(name):
    member = public()[name]
    if isinstance(member, property):
        return
    documented = names(docs(member).get("Parameters", "") + docs(member).get("Attributes", ""))
    required = {p for p in inspect.signature(member).parameters if p not in ("self", "cls")}
    assert {p for p in required if not p.startswith("_")} - documented == set()


@pytest.mark.parametrize("keyword", ["seed", "tangent"])
def test_what_is_easily_confused_is_given_by_keyword(keyword):
    """A seed among sizes, or a tangent among data, would be read as one of them."""
    functions = {n: m for n, m in public().items() if isinstance(m, types.FunctionType)}
    kinds = {
        name: inspect.signature(member).parameters[keyword].kind
        for name, member in functions.items()
        if keyword in inspect.signature(member).parameters
    }
    assert {n for n, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY} == set()
    assert kinds


@of_all
def test_every_documented_parameter_exists(name):
    member = public()[name]
    if isinstance(member, (property, type)):
        return
    assert names(docs(member).get("Parameters", "")) <= set(inspect.signature(member).parameters)


@of_all
def test_what_is_returned_is_documented(name):
    member = public()[name]
    if isinstance(member, (property, type)):
        return
    returns = inspect.signature(member).return_annotation
    assert returns is not inspect.Signature.empty
    nothing = returns in (None, "None", "NoReturn")
    assert nothing != bool({"Returns", "Yields"} & set(docs(member)))


@of_all
def test_exceptions_are_documented(name):
    member = public()[name]
    documented = names(docs(member).get("Raises", ""))
    for function in bodies(member):
        assert raised(function) - documented == set()
        assert documented or not may_raise(function)


@of_all
def test_sections_are_not_empty(name):
    member = public()[name]
    assert (inspect.getdoc(member) or "").strip()
    for title in SECTIONS:
        assert docs(member).get(title, "nothing expected").strip()


@of_all
def test_recalled_constants_are_named_as_such(name):
    """What can use constants that are neither proved here nor quoted says so."""
    member = public()[name]
    text = " ".join((inspect.getdoc(member) or "").split())
    if "recalled" in text:
        assert "recalled, not derived or quoted" in text
    if not isinstance(member, property) and "constants" in inspect.signature(member).parameters:
        assert "recalled" in text


def test_the_reading_of_docstrings():
    """The test reads what it claims to read."""

    def function(a, b):  # noqa: ARG001
        """Do.

        Parameters
        ----------
        a, b : int
            Numbers: both.

        Raises
        ------
        ValueError
            Never.
        """
        raise TypeError("no")

    assert names(docs(function)["Parameters"]) == {"a", "b"}
    assert names(docs(function)["Raises"]) == {"ValueError"}
    assert raised(function) == {"TypeError"}
    assert may_raise(mh.train)
