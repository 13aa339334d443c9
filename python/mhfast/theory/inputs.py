"""Models and data in the form that the functions of the theory need."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Classifier, Layer, Model
from ..models import problem as arguments

Record = TypeVar("Record", Classifier, Layer, Dataset)


NOT_OF_LAYERS = (
    "statements about margins of single outputs y Φ(X) and their logistic loss have no counterpart "
    "for the outputs of a layer; of a Layer there are layer_bounds, hessian_extremes, ntk and "
    "regularization_path"
)


def one_data_set(data: object) -> None:
    """Raise unless `data` is a Dataset without a run axis."""
    checks.instance(data, Dataset, "data")
    assert isinstance(data, Dataset)
    if data.runs is not None:
        raise ValueError(f"data: expected one data set, as data.run(0) is, got {data.runs} runs")


def no_weights(data: Dataset) -> None:
    """Raise ValueError if samples have weights, which the result has not."""
    if data.weight is not None:
        raise ValueError("weight: expected None, since the bound has no weights, got an array")


def softmax_only(model: Model, name: str = "model") -> None:
    """Raise ValueError if attention is not softmax, which the result is about."""
    if model.attention != "softmax":
        raise ValueError(
            f"{name}: expected attention 'softmax', which this result is about, got "
            f"{str(model.attention)!r}"
        )


def classifier(model: object, *, dense: bool = False, any_map: bool = False) -> Classifier:
    """Return `model` if it is a single `Classifier`, with dense W and no prompt if `dense` is true.

    It is of softmax attention unless `any_map` is true.

    Raises
    ------
    TypeError
        It is not a Classifier, or its W is factored or it has a prompt and `dense` is true.
    ValueError
        It has a run axis, or is not of softmax attention.
    """
    if isinstance(model, Layer):
        raise TypeError(f"model: expected a Classifier, got Layer: {NOT_OF_LAYERS}")
    if not isinstance(model, Classifier):
        raise TypeError(f"model: expected a Classifier, got {type(model).__name__}")
    if model.runs is not None:
        raise ValueError(f"model: expected one run, as model[0] is, got {model.runs} runs")
    if not any_map:
        softmax_only(model)
    if dense:
        _dense(model)
    if dense and model.prompt is not None:
        raise TypeError("prompt: expected None, got an array, which these bounds do not cover")
    return model


def _dense(model: Model) -> None:
    """Raise TypeError if W is factored or an identity, which has no key-query matrices to move."""
    if not isinstance(model.W, np.ndarray):
        got = "None, an identity" if model.W is None else type(model.W).__name__
        raise TypeError(f"W: expected an array (H, d, d), got {got}")


def dense_W(model: Classifier) -> Array:  # noqa: N802
    """Return the W (H, d, d) of a model that `classifier` has checked to be dense."""
    assert isinstance(model.W, np.ndarray)
    return model.W


def samples(X: npt.ArrayLike | Dataset) -> Dataset:
    """Return X as a Dataset, with arbitrary labels if it is an array (n, T, d)."""
    return X if isinstance(X, Dataset) else Dataset(X, np.ones(len(np.asarray(X))))


def query_side(model: Classifier | Layer, data: Dataset) -> Array:
    """Return the query rows Z (n, q, d) with which `model` looks at the samples."""
    if model.prompt is not None:
        return np.broadcast_to(model.prompt, (data.n, *model.prompt.shape))
    Z = arguments.problem(model, data).data[1]
    return data.X if Z is None else np.asarray(Z)


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


def settled(
    model: Classifier, data: Dataset, *, dense: bool = False
) -> tuple[Classifier, Dataset, npt.NDArray[np.int64]]:
    """Return model and data in float64, with the samples that count and where they stood.

    A sample of weight 0 takes no part in the loss, and so in no statement about it. An external
    query of the model becomes that of the data.

    Raises
    ------
    TypeError
        The model is not what `classifier` requires, or the dtypes differ.
    ValueError
        A number is not finite.
    """
    model, data = in_double(classifier(model, dense=dense), data)
    if isinstance(model.query, np.ndarray):
        own = data.query is None
        data = dataclasses.replace(data, query=model.query if own else data.query)
        model = dataclasses.replace(model, query=None)
    check_finite(model, data)
    counting = np.arange(data.n)
    if data.weight is not None and data.weight.ndim == 1:
        counting = np.flatnonzero(data.weight)
        if len(counting) < data.n:
            data = data.subset(counting)
    return model, data, counting


def check_plain_layer(model: object, *, identities: bool = False) -> Layer:
    """Return a single layer of softmax with dense W and V and no prompt, or raise.

    Parameters
    ----------
    identities : bool
        Whether W and V may be identities.

    Raises
    ------
    TypeError
        The model is not a Layer of this kind.
    ValueError
        It has a run axis, or is not of softmax attention.
    """
    if not isinstance(model, Layer):
        raise TypeError(f"model: expected a Layer, got {type(model).__name__}")
    if model.runs is not None:
        raise ValueError(f"model: expected one run, as model[0] is, got {model.runs} runs")
    if not (identities and model.W is None):
        _dense(model)
    if not identities and model.V is None:
        raise TypeError("V: expected an array (H, d, p), got None, an identity")
    if model.B is not None:
        raise TypeError(
            "V: expected an array (H, d, p), got a ValueOutput; "
            "model.replace(V=model.V.dense()) has their product"
        )
    if model.prompt is not None:
        raise TypeError("prompt: expected None, got an array, which these bounds do not cover")
    softmax_only(model)
    return model


def plain_layer(
    model: object, data: Dataset, *, identities: bool = False, in_double: bool = True
) -> tuple[Layer, Dataset]:
    """Return a layer with dense W and no prompt and its data, as `settled` does for a classifier.

    Padding, which no row sees, becomes zeros.

    Parameters
    ----------
    identities : bool
        Whether W and V may be identities.
    in_double : bool
        Whether float64 is the dtype of what is returned; otherwise it stays as it is.

    Raises
    ------
    TypeError
        The model is not a Layer of this kind, or the dtypes differ.
    ValueError
        A number is not finite, or the model has a run axis.
    """
    layer = check_plain_layer(model, identities=identities)
    if data.dtype != layer.dtype:
        raise TypeError(
            f"X: expected dtype {layer.dtype.name}, that of the model, got {data.dtype.name}"
        )
    layer = double(layer) if in_double else layer
    data = double(data) if in_double else data
    if isinstance(layer.query, np.ndarray):
        data = dataclasses.replace(data, query=layer.query if data.query is None else data.query)
        layer = dataclasses.replace(layer, query=None)
    if data.weight is not None:
        axes = tuple(range(1, data.weight.ndim))
        data = data.subset(np.flatnonzero((data.weight > 0).any(axis=axes)))
    if data.lengths is not None:
        padding = np.arange(data.tokens) >= np.asarray(data.lengths)[:, None]
        data = dataclasses.replace(data, X=np.where(padding[..., None], 0.0, data.X))
    check_finite(layer, data)
    return layer, data


def spread(data: Dataset) -> float:
    """Return the largest distance of two tokens of one sample."""
    lengths = [data.tokens] * data.n if data.lengths is None else data.lengths.tolist()
    return max(
        (
            largest_norm(tokens[:length] - token)
            for tokens, length in zip(data.X, lengths, strict=True)
            for token in tokens[:length]
        ),
        default=0.0,
    )


def check_finite(model: Any, data: Dataset) -> None:
    """Raise ValueError if a number of the model, or of a sample that counts, is not finite."""
    if model is not None:
        for name, array in model.parameters.items():
            _finite(name, array, None)
        if isinstance(model.query, np.ndarray) and data.query is None:
            _finite("query", model.query, data.weight)
    for name in ("X", "query", "y"):
        array = getattr(data, name)
        if array is not None and array.dtype.kind == "f":
            _finite(name, array, data.weight)


def _finite(name: str, array: Array, weight: Array | None) -> None:
    finite = np.isfinite(array)
    if finite.all():
        return
    wrong = ~finite
    if weight is not None and weight.shape == array.shape[: weight.ndim]:
        wrong &= (weight > 0).reshape(weight.shape + (1,) * (array.ndim - weight.ndim))
    elif weight is not None and weight.shape[0] == len(array):  # of rows
        counts = (weight > 0).any(axis=tuple(range(1, weight.ndim)))
        wrong &= counts.reshape((-1,) + (1,) * (array.ndim - 1))
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        place = ", ".join(map(str, at))
        raise ValueError(f"{name}: expected finite numbers, got {array[at]} at index {place}")


def exponent(array: Array) -> int:
    """Return e such that the largest number of `array` is in [2^(e-1), 2^e); 0 for zeros."""
    size = float(np.abs(array).max(initial=0.0))
    return math.frexp(size)[1] if 0.0 < size < math.inf else 0


# Exponents e for which 2^e and 2^-e are ordinary numbers of float32, and so of float64.
WHOLE_UNIT = 126


def moderate(unit: Any) -> Any:
    """Return exponents (ints or an array of them) as they are, and 0 for those up to 4.

    Numbers so near 1 need no unit: products of a few of them are far inside the range.
    """
    return unit * (abs(unit) > 4)


def in_units(array: Array, unit: int) -> Array:
    """Return `array` / 2^unit, exact unless it leaves the range of its dtype."""
    if abs(unit) <= WHOLE_UNIT:
        with np.errstate(over="ignore", under="ignore"):
            found: Array = array * array.dtype.type(math.ldexp(1.0, -unit))
        return found
    # In two halves: 2^unit itself may be out of range.
    first = unit // 2
    with np.errstate(over="ignore", under="ignore"):
        scaled: Array = np.ldexp(np.ldexp(array, -first), first - unit)
    return scaled


def norms(array: Array, axes: int) -> Array:
    """Return the norms over the last axes, also of numbers whose squares overflow or underflow."""
    unit = exponent(array)
    squares = np.square(in_units(array, unit)).sum(axis=tuple(range(-axes, 0)))
    return in_units(np.sqrt(squares), -unit)


def largest_norm(vectors: Array) -> float:
    """Return the largest norm of vectors along the last axis."""
    return float(norms(vectors, 1).max())


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
