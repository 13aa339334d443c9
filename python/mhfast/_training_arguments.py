"""The arguments of `mhfast.train`, checked and in the form in which the core takes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _checks
from ._checks import PARAMETERS, Wrt
from ._values import Array
from .dataset import Dataset, as_dataset
from .gradients import Gradients
from .history import NamedRows
from .models import Classifier
from .recording import MissingFunction, Record
from .run import Stop

Pair: TypeAlias = tuple[npt.ArrayLike, npt.ArrayLike]
Tests: TypeAlias = Dataset | Pair | Mapping[str, Dataset | Pair]
Directions: TypeAlias = Mapping[str, Gradients | Classifier]
CorePair: TypeAlias = tuple[Array | None, Array | None]
CoreData: TypeAlias = tuple[Array, Array | None, Array, Array | None]

THRESHOLDS = ("loss", "grad_norm", "accuracy", "margin")


def dataset(X: npt.ArrayLike | Dataset, y: npt.ArrayLike | None, model: Classifier) -> Dataset:
    """Return the training data; lists of numbers adapt to the dtype of the model."""
    if isinstance(X, Dataset):
        return as_dataset(X, y)
    return as_dataset(_checks.real(X, "X", model.dtype), y)


def tests(test: Tests | None, model: Classifier) -> dict[str, Dataset]:
    """Return the test sets by name.

    Raises
    ------
    TypeError
        If something is neither a Dataset nor a pair (X, y), or a name is not a str.
    """
    if test is None:
        return {}
    if not isinstance(test, Mapping):
        test = {"test": test}
    sets = {}
    for name, data in test.items():
        if not isinstance(name, str):
            raise TypeError(f"test: expected names of type str, got {name!r}")
        if isinstance(data, Dataset):
            sets[name] = data
        elif isinstance(data, tuple | list) and len(data) == 2:
            sets[name] = dataset(*data, model)
        else:
            raise TypeError(
                f"test: expected a Dataset, a pair (X, y) or a dict of them, "
                f"got {type(data).__name__}"
            )
    return sets


def arrays(data: Dataset, model: Classifier, loss: str, test: str | None = None) -> CoreData:
    """Return X, Z, y and weight of a data set as the core reads them.

    Raises
    ------
    TypeError, ValueError
        If the data do not fit the model; the message names the test set.
    """
    try:
        X, Z = _checks.inputs(model, data.X, data.query)
        return X, Z, _checks.targets(data.y, data.n, X.dtype, loss), data.weight
    except (TypeError, ValueError) as error:
        if test is None:
            raise
        raise type(error)(f"test set {test!r}: {error}") from error


def core_record(rows: NamedRows, data: Dataset) -> tuple[Any, ...]:
    """Return a record as the core takes it; ``data`` are the training data."""
    entry = rows.entry
    record = (entry.name, entry.dataset, entry.every, rows.buffer)
    if entry.name != "attention_groups":
        return record
    assert data.token_groups is not None  # or there would be no rows
    if data.sample_groups is None:
        return *record, np.zeros(data.n, np.int64), data.token_groups.index
    return *record, data.sample_groups.index, data.token_groups.index


def directions(given: Directions | None, model: Classifier) -> dict[str, CorePair]:
    """Return pairs W (H,d,d), U (H,q,d) by name, None for what does not enter the cosine.

    Raises
    ------
    TypeError
        If something is not a dict of Gradients, or of another dtype than the model.
    ValueError
        If a shape does not fit the model, or a direction has no entry other than zero.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"directions: expected a dict of Gradients, got {type(given).__name__}")
    return {name: _direction(name, value, model) for name, value in given.items()}


def _direction(name: str, given: Gradients | Classifier, model: Classifier) -> CorePair:
    label = f"directions[{name!r}]"
    if not isinstance(given, Gradients | Classifier):
        raise TypeError(f"{label}: expected Gradients, got {type(given).__name__}")
    W = None if given.W is None else _checks.real(given.W, f"{label}.W", model.dtype)
    U = None if given.U is None else _checks.real(given.U, f"{label}.U", model.dtype)
    if W is not None:
        _checks.shape(W, f"{label}.W", "H d d", model.W.shape)
    if U is not None:
        _checks.shape(U, f"{label}.U", "H q d", model.U.shape)
    if not any(part is not None and part.any() for part in (W, U)):
        raise ValueError(f"{label}: expected an entry other than zero, got none")
    return W, U


def steps(value: int) -> int:
    """Return the number of steps, at least 0."""
    number = _checks.integer(value, "steps")
    if number < 0:
        raise ValueError(f"steps: expected an integer of at least 0, got {number}")
    return number


def wrt(names: Wrt) -> tuple[str, ...]:
    """Return the names of what is trained, at least one."""
    asked = tuple(name for name, given in zip(PARAMETERS, _checks.wrt(names), strict=True) if given)
    if not asked:
        raise ValueError(f"wrt: expected at least one of {', '.join(PARAMETERS)}, got none")
    return asked


def stop(value: Stop) -> Stop:
    """Return thresholds as a dict of floats, or the function.

    Raises
    ------
    TypeError
        If it is neither a dict of numbers nor a function.
    ValueError
        If a threshold is unknown or not finite, or the function of a saved run is missing.
    """
    if isinstance(value, MissingFunction):
        value.refuse("stop")
    if callable(value):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"stop: expected a dict of thresholds or a function, got {value!r}")
    for name in value:
        if name not in THRESHOLDS:
            raise ValueError(f"stop: expected names from {', '.join(THRESHOLDS)}, got {name!r}")
    return {name: _checks.finite(number, f"stop[{name!r}]") for name, number in value.items()}


def restored(record: Record) -> Record:
    """Return ``record``; ValueError if it is that of a saved run and functions are missing."""
    if isinstance(record, Mapping):
        for what in record:
            if isinstance(what, MissingFunction):
                what.refuse("record")
    return record


def function(value: Callable[..., object] | None, name: str) -> None:
    """Raise TypeError unless ``value`` is a function or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a function, got {type(value).__name__}")


def checkpoint(
    value: tuple[str | os.PathLike[str], int] | None,
) -> tuple[str | os.PathLike[str], int] | None:
    """Return the pair (path, every), with a path that can be written to.

    Raises
    ------
    TypeError
        If it is not a pair of a path and an integer.
    ValueError
        If the directory does not exist or "every" is below 1.
    """
    if value is None:
        return None
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise TypeError(f"checkpoint: expected a pair (path, every), got {value!r}")
    path, every = value
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"checkpoint: expected a path, got {type(path).__name__}")
    if not Path(path).parent.is_dir():
        raise ValueError(f"checkpoint: expected an existing directory, got {Path(path).parent}")
    return path, _checks.count(every, "checkpoint every")
