"""The run axis in the theory: applying a function of one model and its data to all runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from ..dataset.dataset import Dataset

P = ParamSpec("P")
Result = TypeVar("Result")


def over_runs(function: Callable[P, Result]) -> Callable[P, Result]:
    """Extend function(model, X, ...) to a model and a Dataset with run axes, by stacking results.

    Every number of the result becomes an array (R,), every array gains a leading R.  Arrays in
    place of a Dataset are shared by all runs.
    """

    @wraps(function)
    def over(*arguments: P.args, **keywords: P.kwargs) -> Result:
        call = cast(Callable[..., Result], function)
        if len(arguments) < 2:
            return function(*arguments, **keywords)
        model: Any
        data: Any
        model, data, *rest = arguments
        of_model = getattr(model, "runs", None)
        of_data = data.runs if isinstance(data, Dataset) else None
        if of_model and of_data and of_model != of_data:
            raise ValueError(f"X: expected the R = {of_model} runs of the model, got {of_data}")
        runs = of_model or of_data
        if not runs:
            return function(*arguments, **keywords)
        results = [
            call(
                model[r] if of_model else model,
                data.run(r) if of_data else data,
                *rest,
                **keywords,
            )
            for r in range(runs)
        ]
        return cast(Result, stacked(results))

    return over


def stacked(results: Sequence[Any]) -> Any:
    """Stack the results of the runs, which are numbers, arrays or dataclasses of them.

    Integers and None that all runs share stay unchanged.
    """
    first: Any = results[0]
    kind: Any = type(first)
    if isinstance(first, bool | str | int | None):
        return first if all(r == first for r in results) else np.array(results)
    if isinstance(first, float | np.ndarray):
        return np.stack(results)
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        return kind(**{n: stacked([getattr(r, n) for r in results]) for n in names})
    if isinstance(first, tuple):  # a named tuple
        return kind(*(stacked(part) for part in zip(*results, strict=True)))
    raise TypeError(f"expected results that stack, got {kind.__name__}")
