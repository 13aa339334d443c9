"""What the functions of the theory need of a model and its data, in one form."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Classifier
from ..models import problem as arguments

Record = TypeVar("Record", Classifier, Dataset)


def classifier(model: object, *, dense: bool = False) -> Classifier:
    """Return `model` if it is one `Classifier`, with W dense and no prompt if `dense` is asked for.

    Raises
    ------
    TypeError
        It is something else, or its W is factored or it has a prompt where that is not allowed.
    ValueError
        It has a run axis.
    """
    if not isinstance(model, Classifier):
        raise TypeError(f"model: expected a Classifier, got {type(model).__name__}")
    if model.runs is not None:
        raise ValueError(f"model: expected one run, as model[0] is, got {model.runs} runs")
    if dense and not isinstance(model.W, np.ndarray):
        raise TypeError(f"W: expected an array (H, d, d), got {type(model.W).__name__}")
    if dense and model.prompt is not None:
        raise TypeError("prompt: expected None, got an array, which these bounds do not cover")
    return model


def dense_W(model: Classifier) -> Array:  # noqa: N802
    """Return the W (H, d, d) of a model that `classifier` found dense."""
    assert isinstance(model.W, np.ndarray)
    return model.W


def samples(X: npt.ArrayLike | Dataset) -> Dataset:
    """Return X as a Dataset, with labels of no meaning if it is an array (n, T, d)."""
    return X if isinstance(X, Dataset) else Dataset(X, np.ones(len(np.asarray(X))))


def query_side(model: Classifier, data: Dataset) -> Array:
    """Return the query rows Z (n, q, d) with which `model` looks at the samples."""
    if model.prompt is not None:
        return np.broadcast_to(model.prompt, (data.n, *model.prompt.shape))
    Z = arguments.problem(model, data).data[1]
    return data.X if Z is None else Z


def in_double(model: Classifier, data: Dataset) -> tuple[Classifier, Dataset]:
    """Return model and data, which must have one dtype, in float64.

    Raises
    ------
    TypeError
        Their dtypes differ.
    """
    if data.dtype != model.dtype:
        raise TypeError(
            f"X: expected dtype {model.dtype.name}, that of the model, got {data.dtype.name}"
        )
    return double(model), double(data)


def double(record: Record) -> Record:
    """Return a model or data set with all its real arrays in float64."""
    return _double(record)  # type: ignore[no-any-return]


def _double(record: Any) -> Any:
    changes = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            changes[field.name] = value.astype(np.float64, copy=False)
        elif field.name == "W" and dataclasses.is_dataclass(value):
            changes[field.name] = _double(value)
    return dataclasses.replace(record, **changes)
