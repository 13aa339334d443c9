"""The one place where arguments are checked.

Each function takes an argument, names it in its errors, and returns it in the form the core reads:
arrays C-contiguous, aligned, in native byte order and of one dtype, float32 or float64. An array
that is so already passes without a copy after a few attribute look-ups, because these checks stand
before every call of microseconds.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ._values import Array

if TYPE_CHECKING:
    from .models import Classifier

Wrt: TypeAlias = str | Sequence[str] | None

LOSSES = ("logistic", "exponential", "linear", "squared")
PARAMETERS = ("W", "U")

_ndarray = np.ndarray
_READY = 0x101  # flags.num of an array that is C-contiguous (0x1) and aligned (0x100)


def real(
    value: npt.ArrayLike, name: str, dtype: np.dtype[Any] | None = None, like: str = "the model"
) -> Array:
    """Return `value` as an array of float32 or float64, of `dtype` (that of `like`) if given.

    Lists of Python numbers adapt to the dtype. Nothing else is converted but layout and byte order.

    Raises
    ------
    TypeError
        If `value` cannot be read as an array or has another dtype.
    """
    if type(value) is _ndarray and value.dtype is dtype and value.flags.num & _READY == _READY:
        return value
    array = as_array(value, name)
    if _holds_python_numbers(value):
        array = array.astype(dtype or np.float64)
    if dtype is None:
        if array.dtype.type not in (np.float32, np.float64):
            raise TypeError(f"{name}: expected dtype float32 or float64, got {array.dtype.name}")
    elif array.dtype.type is not dtype.type:
        raise TypeError(
            f"{name}: expected dtype {dtype.name}, that of {like}, got {array.dtype.name}"
        )
    return ready(array)


def as_array(value: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    """Return `value` as an array of any dtype, sharing memory where NumPy or DLPack can.

    Raises
    ------
    TypeError
        If `value` is masked, lives on another device, tracks gradients, or is no array at all.
    ValueError
        If `value` is a ragged nested sequence.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, which would be ignored")
    try:
        if type(value) is _ndarray:
            array: npt.NDArray[Any] = value
        elif hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            array = np.from_dlpack(cast(Any, value))
        else:
            array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name}: cannot read {type(value).__name__} as an array: {error}") from error
    if array.dtype.kind in "OSU":
        raise TypeError(f"{name}: expected an array of numbers, got {_kind(value, array)}")
    return array


def ready(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `array` C-contiguous, aligned and in native byte order, copied only if it is not."""
    if array.dtype.isnative and array.flags.num & _READY == _READY:
        return array
    return np.require(array, array.dtype.newbyteorder("="), ["C", "A"])


def shape(
    array: npt.NDArray[Any], name: str, letters: str, expected: tuple[int | None, ...]
) -> None:
    """Raise ValueError unless `array` has the `expected` shape, where None is any length.

    `letters` names the axes in the message, as "n T d".
    """
    if array.ndim == len(expected) and all(
        want is None or want == got for want, got in zip(expected, array.shape, strict=True)
    ):
        return
    axes = letters.split()
    message = f"{name}: expected shape {_tuple(axes)}"
    if any(length is not None for length in expected):
        lengths = (a if n is None else str(n) for a, n in zip(axes, expected, strict=True))
        message += f" = {_tuple(lengths)}"
    raise ValueError(f"{message}, got {array.shape}")


def inputs(
    model: Classifier, X: npt.ArrayLike, query: npt.ArrayLike | None
) -> tuple[Array, Array | None]:
    """Return X (n, T, d) and the query side Z (n, q, d) of `model`, None for self-attention.

    Raises
    ------
    TypeError
        If a dtype is not that of the model.
    ValueError
        If a shape does not fit the model, or X has too few tokens for an integer query.
    """
    U = model.U
    X = real(X, "X", U.dtype)
    q, d = U.shape[1:]
    if query is None:
        query = model.query
        if query is None:
            if X.shape[1:] != (q, d):
                shape(X, "X", "n T d", (None, q, d))
            return X, None
        if isinstance(query, int):
            shape(X, "X", "n T d", (None, None, d))
            token = token_index(query, X.shape[1])
            return X, np.ascontiguousarray(X[:, token : token + 1])
    shape(X, "X", "n T d", (None, None, d))
    if X.shape[1] == 0:
        raise ValueError(f"X: expected at least one token, got shape {X.shape}")
    Z = real(query, "query", U.dtype)
    shape(Z, "query", "n q d", (X.shape[0], q, d))
    return X, Z


def token_index(query: int, tokens: int) -> int:
    """Return the position of an integer query in 0 ... tokens - 1; -1 is the last token."""
    if not -tokens <= query < tokens:
        raise ValueError(f"query: expected a token in [-{tokens}, {tokens}), got {query}")
    return query % tokens


def targets(y: npt.ArrayLike, n: int, dtype: np.dtype[Any], loss: str) -> Array:
    """Return targets (n,) in `dtype`. That labels are -1 or 1 is left to the core to check.

    Raises
    ------
    TypeError
        If y is not real, or not of `dtype` where the loss takes any real target.
    ValueError
        If y has another shape, or a label is neither -1 nor 1.
    """
    if (
        type(y) is _ndarray
        and y.dtype is dtype
        and y.shape == (n,)
        and y.flags.num & _READY == _READY
    ):
        return y
    array = as_array(y, "y")
    if array.shape != (n,):
        shape(array, "y", "n", (n,))
    kind = array.dtype.kind
    if kind not in "iuf":
        raise TypeError(f"y: expected a real or integer dtype, got {array.dtype.name}")
    if kind == "f" and loss == "squared":
        return real(y, "y", dtype, "X")
    labels = ready(array.astype(dtype))
    if kind == "f" and array.itemsize > labels.itemsize:
        # 1 + 1e-9 would become a label in float32. Integers cannot.
        wrong = np.flatnonzero(labels != array)
        if wrong.size:
            first = wrong[0]
            raise ValueError(f"y: expected labels +1 or -1, got {array[first]} at index {first}")
    return labels


def weights(weight: npt.ArrayLike, n: int, dtype: np.dtype[Any]) -> Array:
    """Return sample weights (n,) in `dtype`: finite, not negative, with a positive sum.

    Raises
    ------
    TypeError
        If the weights are not real.
    ValueError
        If they have another shape or another value.
    """
    array = as_array(weight, "weight")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"weight: expected a real or integer dtype, got {array.dtype.name}")
    shape(array, "weight", "n", (n,))
    array = ready(array.astype(dtype, copy=False))
    if array.min(initial=math.inf) >= 0 and 0 < array.max(initial=0) < math.inf:
        return array
    wrong = np.flatnonzero(~((array >= 0) & np.isfinite(array)))
    if wrong.size:
        first = wrong[0]
        raise ValueError(
            f"weight: expected finite numbers >= 0, got {array[first]} at index {first}"
        )
    raise ValueError("weight: expected at least one positive number, got none")


def loss(name: str) -> str:
    """Return the name of a loss, or raise ValueError listing what there is."""
    if name not in LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {name!r}")
    return name


def wrt(names: Wrt) -> tuple[bool, bool]:
    """Tell whether W and U are among `names`; None means all parameters."""
    if names is None:
        return True, True
    asked = (names,) if isinstance(names, str) else names
    if not isinstance(asked, Sequence):
        raise TypeError(
            f"wrt: expected names from {', '.join(PARAMETERS)}, got {type(names).__name__}"
        )
    for name in asked:
        if name not in PARAMETERS:
            raise ValueError(f"wrt: expected names from {', '.join(PARAMETERS)}, got {name!r}")
    return "W" in asked, "U" in asked


def integer(value: object, name: str, expected: str = "an integer") -> int:
    """Return `value` as an int; TypeError if it is not a whole number, which a bool is not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected {expected}, got {_kind(value)}") from None


def count(value: object, name: str) -> int:
    """Return `value` as an int of at least 1."""
    number = integer(value, name)
    if number < 1:
        raise ValueError(f"{name}: expected an integer of at least 1, got {number}")
    return number


def finite(value: object, name: str) -> float:
    """Return `value` as a finite float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a real number, got {_kind(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number


def generator(seed: object, name: str = "seed") -> np.random.Generator:
    """Return the random generator of an integer seed >= 0, or `seed` if it is a generator."""
    if isinstance(seed, np.random.Generator):
        return seed
    number = integer(seed, name)
    if number < 0:
        raise ValueError(f"{name}: expected an integer of at least 0, got {number}")
    return np.random.default_rng(number)


def float_dtype(value: npt.DTypeLike, name: str = "dtype") -> np.dtype[Any]:
    """Return `value` as the dtype float32 or float64."""
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise TypeError(f"{name}: expected float32 or float64, got {value!r}") from None
    if dtype.type not in (np.float32, np.float64):
        raise TypeError(f"{name}: expected float32 or float64, got {dtype.name}")
    return dtype.newbyteorder("=")


def _holds_python_numbers(value: object) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return type(value) in (int, float)


def _kind(value: object, array: npt.NDArray[Any] | None = None) -> str:
    if array is not None and isinstance(value, np.ndarray):
        return f"dtype {array.dtype.name}"
    return type(value).__name__


def _tuple(items: Any) -> str:
    text = ", ".join(items)
    return f"({text})" if ", " in text else f"({text},)"
