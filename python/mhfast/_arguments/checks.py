"""The one place where arguments are checked.

Each function takes an argument, names it in its errors, and returns it in the form the core reads:
arrays C-contiguous, aligned, in native byte order and of one dtype, float32 or float64. An array
that already has this form passes without a copy after a few attribute look-ups, because calls of
microseconds go through these checks.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .values import Array

Wrt: TypeAlias = str | Sequence[str] | None

READY = 0x101  # flags.num of an array that is C-contiguous (0x1) and aligned (0x100)

_ndarray = np.ndarray
_REAL = frozenset({np.dtype(np.float32), np.dtype(np.float64)})


def real(
    value: npt.ArrayLike, name: str, dtype: np.dtype[Any] | None = None, like: str = "the model"
) -> Array:
    """Return `value` as an array of float32 or float64, of `dtype` (that of `like`) if given.

    Lists of Python numbers adapt to the dtype, which rounds what is not an integer. Nothing else is
    converted but layout and byte order.

    Raises
    ------
    TypeError
        If `value` cannot be read as an array or has another dtype.
    ValueError
        If the dtype cannot hold a Python number.
    """
    if (
        type(value) is _ndarray
        and (value.dtype is dtype or (dtype is None and value.dtype in _REAL))
        and value.flags.num & READY == READY
    ):
        return value
    array = as_array(value, name)
    if isinstance(value, list | tuple | int | float) and not isinstance(value, np.generic):
        array = _adapted(value, array, name, dtype or np.dtype(np.float64))
    if dtype is None:
        if array.dtype.type not in (np.float32, np.float64):
            raise TypeError(
                f"{name}: expected dtype float32 or float64, got {array.dtype.name}"
                f"{_conversion(name, array, 'float64')}"
            )
    elif array.dtype.type is not dtype.type:
        raise TypeError(
            f"{name}: expected dtype {dtype.name}, that of {like}, got {array.dtype.name}"
            f"{_conversion(name, array, dtype.name)}"
        )
    return ready(array)


def exactly(array: npt.NDArray[Any], name: str, dtype: np.dtype[Any]) -> Array:
    """Return integers or floats in `dtype`, which must represent each of them exactly.

    Raises
    ------
    ValueError
        At the first entry that would be rounded.
    """
    if array.dtype.type is dtype.type:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
        # Convert back: comparing an integer with a float would round the integer first.
        same = result.astype(array.dtype) == array
    if array.dtype.kind == "f":
        same |= np.isnan(array)
    if not same.all():
        place = tuple(np.argwhere(~same)[0].tolist())
        where = f" at index {', '.join(map(str, place))}" if place else ""
        raise ValueError(
            f"{name}: expected numbers that {dtype.name} holds exactly, got {array[place]}{where}; "
            f"{name}.astype(np.{dtype.name}) rounds them"
        )
    return result


def _adapted(
    value: object, array: npt.NDArray[Any], name: str, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return the array of a list in `dtype` if all its entries are Python numbers."""
    kinds = _kinds(value)
    if bool in kinds:
        raise TypeError(f"{name}: expected numbers, got a list with a bool")
    if not kinds or not kinds <= {int, float}:
        return array
    if array.dtype.kind != "f":
        return exactly(array, name, dtype)
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    wrong = np.argwhere(np.isinf(result) & ~np.isinf(array))
    if wrong.size:
        place = tuple(wrong[0].tolist())
        raise ValueError(
            f"{name}: expected numbers in the range of {dtype.name}, got {array[place]} at index "
            f"{', '.join(map(str, place))}"
        )
    return result


def _conversion(name: str, array: npt.NDArray[Any], dtype: str) -> str:
    """Return how to get the dtype, if that is one call."""
    if array.dtype.kind == "c":
        return f"; {name}.real has the real parts"
    return f"; {name}.astype(np.{dtype}) converts it" if array.dtype.kind in "iufb" else ""


def as_array(value: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    """Return `value` as an array of any dtype, sharing memory where NumPy or DLPack can.

    Raises
    ------
    TypeError
        If `value` is masked, lives on another device, tracks gradients, or is not an array.
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
    if array.dtype.isnative and array.flags.num & READY == READY:
        return array
    return np.require(array, array.dtype.newbyteorder("="), ["C", "A"])


class HasShape(Protocol):
    """An array, or what stands for one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        ...


def shape(
    array: HasShape,
    name: str,
    letters: str,
    expected: tuple[int | None, ...],
    *,
    runs: bool = False,
) -> None:
    """Raise ValueError unless `array` has the `expected` shape, where None stands for any length.

    `letters` names the axes in the message, as "n T d". With `runs` there may be one more axis, of
    any length, before the others.
    """
    got = array.shape
    if len(got) == len(expected) + 1 and runs:
        letters, expected = f"R {letters}", (None, *expected)
    if len(got) == len(expected) and all(
        want is None or want == length for want, length in zip(expected, got, strict=True)
    ):
        return
    axes = letters.split()
    message = f"{name}: expected shape {_tuple(axes)}"
    if any(length is not None for length in expected):
        lengths = (a if n is None else str(n) for a, n in zip(axes, expected, strict=True))
        message += f" = {_tuple(lengths)}"
    raise ValueError(f"{message}, got {got}{_reshaped(name, letters, expected, got)}")


def numbers_of_shape(
    value: npt.ArrayLike, name: str, letters: str, expected: tuple[int | None, ...]
) -> npt.NDArray[np.float64]:
    """Return finite numbers of the `expected` shape, as in `shape`, in float64.

    Raises
    ------
    TypeError
        If `value` is not an array of float32 or float64, or a list of numbers.
    ValueError
        If its shape is another, or a number is not finite.
    """
    array = np.asarray(real(value, name), dtype=np.float64)
    shape(array, name, letters, expected)
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or inf")
    return array


def _reshaped(
    name: str, letters: str, expected: tuple[int | None, ...], got: tuple[int, ...]
) -> str:
    """Return how a table becomes tokens: one sample (T, d), or rows (n, T d) of other libraries."""
    if letters.split()[-3:] != ["n", "T", "d"] or len(got) != 2:
        return ""
    if got[1] == expected[-1]:
        return f"; {name}[None] is one sample"
    return f"; {name}.reshape(n, T, d) has the tokens of rows of length T d"


def instance(value: object, kind: type, name: str) -> None:
    """Raise TypeError unless `value` is an object of `kind`, a class of mhfast."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise TypeError(f"{name}: expected {article} {kind.__name__}, got {type(value).__name__}")


def token_index(query: int, tokens: int) -> None:
    """Raise ValueError unless an integer query selects a token; -1 is the last one."""
    if not -tokens <= query < tokens:
        raise ValueError(f"query: expected a token in [-{tokens}, {tokens}), got {query}")


def integer(value: object, name: str, expected: str = "an integer") -> int:
    """Return `value` as an int; TypeError if it is not an integer; a bool is not."""
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
    return np.random.default_rng(_nonnegative(seed, name))


def generators(seed: object, runs: int | None, name: str = "seed") -> list[np.random.Generator]:
    """Return a generator for each run: from a sequence of seeds, or else from children of one seed.

    Child r is the same for every number of runs.

    Raises
    ------
    TypeError, ValueError
        If a seed is invalid, or there are not as many as `runs`.
    """
    if is_sequence(seed):
        seeds = list(seed)  # type: ignore[call-overload]
        if not seeds or (runs is not None and len(seeds) != runs):
            expected = "at least one" if runs is None else f"R = {runs} of them"
            raise ValueError(f"{name}: expected {expected}, got {len(seeds)}")
        return [generator(one, name) for one in seeds]
    if isinstance(seed, np.random.Generator):
        seed = int.from_bytes(seed.bytes(16), "little")
    root = np.random.SeedSequence(_nonnegative(seed, name))
    return [np.random.default_rng(child) for child in root.spawn(runs or 1)]


def is_sequence(seed: object) -> bool:
    """Return whether `seed` is a sequence of seeds, one per run."""
    return isinstance(seed, list | tuple | range) or (
        isinstance(seed, np.ndarray) and seed.ndim > 0
    )


def run_index(index: object, runs: int) -> int | slice | npt.NDArray[Any]:
    """Return an index that selects one of `runs` runs (an int) or some of them (anything else).

    Raises
    ------
    IndexError
        If it is out of range, does not run along one axis or selects nothing.
    """
    chosen: Any = index if isinstance(index, slice) else np.asarray(index)
    try:
        selected = np.arange(runs)[chosen]
        if selected.ndim > 1 or selected.size == 0:
            raise IndexError("it must be an integer, or select some along one axis")
    except IndexError as error:
        raise IndexError(f"index: cannot select from {runs} runs: {error}") from None
    return int(selected) if selected.ndim == 0 else cast("slice | npt.NDArray[Any]", chosen)


def _nonnegative(seed: object, name: str) -> int:
    number = integer(seed, name)
    if number < 0:
        raise ValueError(f"{name}: expected an integer of at least 0, got {number}")
    return number


def float_dtype(value: npt.DTypeLike, name: str = "dtype") -> np.dtype[Any]:
    """Return `value` as the dtype float32 or float64."""
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise TypeError(f"{name}: expected float32 or float64, got {value!r}") from None
    if dtype.type not in (np.float32, np.float64):
        raise TypeError(f"{name}: expected float32 or float64, got {dtype.name}")
    return dtype.newbyteorder("=")


def _kinds(value: object) -> set[type]:
    """Return the types of the entries of nested lists."""
    if not isinstance(value, list | tuple):
        return {type(value)}
    return set().union(*map(_kinds, value))


def _kind(value: object, array: npt.NDArray[Any] | None = None) -> str:
    if array is not None and isinstance(value, np.ndarray):
        return f"dtype {array.dtype.name}"
    return type(value).__name__


def _tuple(items: Any) -> str:
    text = ", ".join(items)
    return f"({text})" if ", " in text else f"({text},)"
