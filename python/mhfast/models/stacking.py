"""`stack`: several models side by side on the run axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from .._arguments.lists import AXES
from .._arguments.runs import repeated
from .._arguments.values import Array, same
from . import problem as arguments
from .model import Model

M = TypeVar("M", bound=Model)


def stack(models: Sequence[M]) -> M:
    """Put models side by side on the run axis: ``stack(models)[r]`` equals ``models[r]``.

    A model that already has a run axis contributes all its runs. External queries that are equal
    stay shared.

    Parameters
    ----------
    models : sequence of Classifier or of Layer
        At least one; all of the same kind, shapes, dtype, scale, causal, row map and integer
        query.

    Returns
    -------
    Classifier or Layer
        Of the kind of the models, with a run axis of as many runs as they have together.

    Raises
    ------
    TypeError
        If an entry is not a model, or differs from the first in class or dtype.
    ValueError
        If `models` is empty, or one differs from the first in more than the values of arrays.

    Examples
    --------
    >>> import mhfast as mh
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> mh.stack([model, model, model]).runs
    3
    """
    models = list(models)
    if not models:
        raise ValueError("models: expected at least one, got none")
    first = models[0]
    for j, model in enumerate(models):
        _check_alike(first, model, f"models[{j}]")
    arrays = {
        name: np.concatenate([_leading(m, m.parameters[name], name) for m in models])
        for name in first.parameters
    }
    query = first.query
    shared = not isinstance(query, np.ndarray) or (
        query.ndim == AXES["query"] and all(same(query, m.query) for m in models)
    )
    if not shared:
        queries = [_leading(m, np.asarray(m.query), "query") for m in models]
        arrays["query"] = np.concatenate(queries)
    return arguments.with_arrays(first, arrays)


def _leading(model: Model, array: Array, name: str) -> Array:
    """Return the array of every run of `model`, with a leading axis."""
    axes = AXES[name]
    return array if array.ndim > axes else repeated(array, axes, model.runs or 1)


def _check_alike(first: Model, model: Model, name: str) -> None:
    if not isinstance(model, Model):
        raise TypeError(f"{name}: expected a model, got {type(model).__name__}")
    if type(model) is not type(first):
        raise TypeError(
            f"{name}: expected a {type(first).__name__} like the first, got a "
            f"{type(model).__name__}"
        )
    for what, expected, got in (
        ("parameters", _shapes(first), _shapes(model)),
        ("query", _kind(first), _kind(model)),
        ("scale", first.scale, model.scale),
        ("causal", first.causal, model.causal),
        ("attention", str(first.attention), str(model.attention)),
        ("normalize", first.normalize, model.normalize),
    ):
        if expected != got:
            raise ValueError(f"{name}: expected {what} {expected} like the first, got {got}")
    if model.dtype != first.dtype:
        raise TypeError(f"{name}: expected dtype {first.dtype} like the first, got {model.dtype}")


def _shapes(model: Model) -> str:
    """Describe the parameters and their shapes without a run axis."""
    shapes = (f"{name} {array.shape[-AXES[name] :]}" for name, array in model.parameters.items())
    return ", ".join(shapes)


def _kind(model: Model) -> object:
    query = model.query
    return f"of shape {query.shape[-3:]}" if isinstance(query, np.ndarray) else query
