"""The run axis: R problems side by side, here simply one after the other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from .losses import OF_CLASSES, name_of
from .model import PARAMETERS, Model

DIRECTIONS = ("tangent", "then")  # arguments that are arrays by name

Function = TypeVar("Function", bound=Callable[..., Any])

# How many axes each array has in one run; one axis more, in front, is the run axis.
AXES = {
    "W": 3,
    "Q": 3,
    "K": 3,
    "U": 3,
    "V": 3,
    "A": 3,
    "B": 3,
    "prompt": 2,
    "X": 3,
    "query": 3,
    "lengths": 1,
}


def over_runs(function: Function) -> Function:
    """Extend `function(model, X, ...)` to a run axis.

    Every parameter, X, y, cotangent, query, weight, lengths, lr (also one parameter's) and part of
    a direction may have a leading R or not; those without are shared.  Results gain it: entry r is
    that of run r alone.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def looped(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options).arguments
        bound["model"] = model = Model.of(bound["model"], np.shape(bound["X"])[-1])
        if bound.get("query") is None and model.query is not None and model.prompt is None:
            bound["query"] = model.query  # then only one place determines whether it has runs
        axes = _axes(bound)
        runs = {len(a) for a, own in _arrays(bound, axes) if np.ndim(a) > own}
        if not runs:
            return function(**bound)
        if len(runs) > 1:
            raise ValueError(f"runs: expected one number of runs, got {sorted(runs)}")
        return stacked([function(**_run(bound, axes, r)) for r in range(runs.pop())])

    return cast(Function, looped)


def _of_classes(bound: Mapping[str, Any]) -> bool:
    return name_of(bound.get("loss", "logistic")) in OF_CLASSES


def _axes(bound: Mapping[str, Any]) -> dict[str, int]:
    classifier = bound["model"].U is not None
    axes = AXES | {"cotangent": 1 if classifier else 3, "lr": 0, "seed": 0, "weight": 1}
    axes["y"] = 1 if classifier else 2 if _of_classes(bound) else 3
    if not classifier and bound.get("weight") is not None:
        y = np.shape(bound["y"])
        rows = y if _of_classes(bound) else y[:-1]
        axes["weight"] = 2 if np.shape(bound["weight"])[-2:] == rows[-2:] else 1
    return axes


def _arrays(bound: Mapping[str, Any], axes: Mapping[str, int]) -> list[tuple[Any, int]]:
    """Return every array that may have runs, with the number of axes it has without."""
    directions = (bound.get(name) or {} for name in DIRECTIONS)
    groups = (bound, bound["model"].parameters(), *directions)
    rates = bound.get("lr")
    return [
        (value, axes[name])
        for group in groups
        for name, value in group.items()
        if name in axes and value is not None
    ] + [(rate, 0) for rate in (rates.values() if isinstance(rates, Mapping) else ())]


def _run(bound: Mapping[str, Any], axes: Mapping[str, int], r: int) -> dict[str, Any]:
    """Return the arguments of run r."""

    def part(group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value[r] if name in axes and np.ndim(value) > axes[name] else value
            for name, value in group.items()
        }

    model: Model = bound["model"]
    one = part(bound) | {"model": replace(model, **part(model.parameters()), query=None)}
    one |= {name: part(bound[name]) for name in DIRECTIONS if bound.get(name) is not None}
    if isinstance(bound.get("lr"), Mapping):
        one["lr"] = {n: rate[r] if np.ndim(rate) else rate for n, rate in bound["lr"].items()}
    return one


def stacked(results: list[Any]) -> Any:
    """Stack numbers and arrays, also inside tuples, dicts and models."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(stacked(list(parts)) for parts in zip(*results, strict=True))
    if isinstance(first, dict):
        return {name: stacked([part[name] for part in results]) for name in first}
    if isinstance(first, Model):
        arrays: Any = {n: np.stack([getattr(m, n) for m in results]) for n in first.parameters()}
        return replace(first, **arrays)
    return np.stack(results)


def named_parts(record: Any) -> dict[str, Any]:
    """Parameters by name, from a dict or an object with attributes such as `Gradients`."""
    if isinstance(record, Mapping):
        return dict(record)
    parts = ((name, getattr(record, name, None)) for name in PARAMETERS)
    return {name: part for name, part in parts if part is not None}
