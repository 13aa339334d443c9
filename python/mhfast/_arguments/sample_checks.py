"""Query tokens, lengths, targets and weights of samples, array by array.

Any of them may have a leading run axis R, which the shapes below leave out.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .. import _core
from . import checks
from .lists import OF_CLASSES, TARGETS
from .values import Array

Integers = npt.NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

_ndarray = np.ndarray


def lengths(value: npt.ArrayLike, n: int, tokens: int) -> Integers:
    """Return lengths (n,) as int64.

    Raises
    ------
    TypeError
        If they are not integers.
    ValueError
        If they have another shape or are not in 0 ... T.
    """
    array = checks.as_array(value, "lengths")
    if array.dtype.kind not in "iu":
        raise TypeError(f"lengths: expected integers, got dtype {array.dtype.name}")
    checks.shape(array, "lengths", "n", (n,), runs=True)
    array = checks.ready(array.astype(np.int64, copy=False))
    if not _core.all_within(array.reshape(-1), 0, tokens):
        wrong = tuple(np.argwhere((array < 0) | (array > tokens))[0].tolist())
        raise ValueError(
            f"lengths: expected integers in [0, {tokens}], got {array[wrong]} at {_place(wrong)}"
        )
    return array


def padded(X: Array, lengths: Integers) -> Array:
    """Return X (n, T, d) with zeros at and beyond `lengths` (n,), copied if it has others there."""
    if X.shape[:-2] != lengths.shape:  # where they are equal, the calls below cost as much as all
        lead = np.broadcast_shapes(X.shape[:-2], lengths.shape)
        if X.shape[:-2] != lead:
            X = np.broadcast_to(X, lead + X.shape[-2:])
        lengths = np.broadcast_to(lengths, lead)
    tokens = checks.ready(X)
    padded = _core.with_padding(tokens, checks.ready(lengths))
    return tokens if padded is None else padded


def token(
    query: int, tokens: int, lengths: Integers | None
) -> tuple[int | Integers, int | Integers]:
    """Find the position of an integer query in each sample.

    Returns
    -------
    token : int, or int64 (n,) with lengths
        Its position, where a negative query counts from the end of the sample; -1 in a sample that
        is too short.
    prefix : int, or int64 (n,) with lengths
        The number of tokens up to and including it, at most the length of the sample.
    """
    checks.token_index(query, tokens)
    if lengths is None:
        position = query % tokens
        return position, position + 1
    places = lengths + query if query < 0 else np.full_like(lengths, query)
    prefix = np.clip(places + 1, 0, lengths)
    return np.where((places >= 0) & (places < lengths), places, -1), prefix


def picked(X: npt.NDArray[Number], token: int | Integers) -> npt.NDArray[Number]:
    """Return the token of each sample of X (n, T, d) as a query side (n, 1, d); zeros for -1."""
    if isinstance(token, int):
        return np.ascontiguousarray(X[..., token : token + 1, :])
    lead = np.broadcast_shapes(X.shape[:-2], token.shape)
    X = np.ascontiguousarray(np.broadcast_to(X, lead + X.shape[-2:]))
    rows, known = rows_of(np.broadcast_to(token, lead), X.shape[-2])
    Z = X.reshape(-1, X.shape[-1])[rows].reshape(*lead, 1, X.shape[-1])
    Z[~known] = 0
    return Z


def rows_of(token: Integers, tokens: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Return the rows of all samples' tokens (n T, d) that tokens (n,) are, and which exist.

    The token -1 does not; its row is that of the sample's first.
    """
    first = np.arange(token.size) * tokens
    return first + np.maximum(token, 0).ravel(), token >= 0


def name(loss: str) -> str:
    """Return the name of the argument that holds the targets."""
    return "cotangent" if loss == "cotangent" else "y"


def targets(
    y: npt.ArrayLike, loss: str, letters: str, expected: tuple[int, ...], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return targets of the `expected` shape in `dtype`; as int64 where they are classes.

    The core checks that labels are -1 or 1, classes in [0, p), others in the range of the loss.

    Raises
    ------
    TypeError
        If y is not real, not of `dtype` where the loss takes any real target, or not integers
        where it takes classes.
    ValueError
        If y has another shape, or a label is neither -1 nor 1.
    """
    if (
        type(y) is _ndarray
        and y.dtype is dtype
        and y.shape == expected
        and y.flags.num & checks.READY == checks.READY
        and loss not in OF_CLASSES
    ):
        return y
    argument = name(loss)
    array = checks.as_array(y, argument)
    _check_axes(array, argument, loss, letters, expected)
    kind = array.dtype.kind
    if loss in OF_CLASSES:
        if kind not in "iu":
            raise TypeError(
                f"y: expected integer classes, got dtype {array.dtype.name}"
                f"{'; y.astype(int) makes them integers' if kind == 'f' else ''}"
            )
        return checks.ready(array.astype(np.int64, copy=False))
    if kind not in "iuf":
        raise TypeError(
            f"{argument}: expected a real or integer dtype, got {array.dtype.name}"
            f"{'; np.where(y, 1, -1) has labels' if kind == 'b' else ''}"
        )
    if TARGETS[loss] != "signs":
        if kind == "f":
            return checks.real(y, argument, dtype, "X")
        return checks.ready(checks.exactly(array, argument, dtype))
    labels = checks.ready(array.astype(dtype))
    if kind == "f" and array.itemsize > labels.itemsize:
        # 1 + 1e-9 would become a label in float32. Integers are exact.
        wrong = np.argwhere(labels != array)
        if wrong.size:
            first = tuple(wrong[0].tolist())
            raise ValueError(f"y: expected labels +1 or -1, got {array[first]} at {_place(first)}")
    return labels


def _check_axes(
    array: npt.NDArray[Any], name: str, loss: str, letters: str, expected: tuple[int, ...]
) -> None:
    """Raise ValueError unless targets have the `expected` shape, perhaps behind a run axis."""
    got, repair = array.shape, ""
    one_row = len(expected) > 1 and expected[1] == 1
    # An extra axis at the end could be mistaken for a run axis, which comes first.
    if len(got) == len(expected) + 1 and got[:-1] == expected and got[1:] != expected:
        if loss in OF_CLASSES:
            repair = f"{name}.argmax(axis=-1) has the class numbers of one-hot targets"
        elif got[-1] == 1:
            repair = f"{name}[..., 0] has this shape"
    elif one_row and got == (expected[0], *expected[2:]):
        repair = f"{name}[:, None] has this shape"
    elif one_row and loss in OF_CLASSES and len(got) == 2 and got[0] == expected[0] and got[1] > 1:
        repair = f"{name}.argmax(axis=-1)[:, None] has the class numbers of one-hot targets"
    if repair:
        shape = f"({letters.replace(' ', ', ')}{',' if len(expected) == 1 else ''})"
        raise ValueError(f"{name}: expected shape {shape} = {expected}, got {got}; {repair}")
    checks.shape(array, name, letters, expected, runs=True)


def weights(
    weight: npt.ArrayLike, rows: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Array, int]:
    """Return weights in `dtype`: finite, not negative, with a positive sum in every run.

    Parameters
    ----------
    rows : (n,) or (n, q)
        Samples, or for a layer also rows, that may have weights. An array (n, q) belongs to the
        rows, even if n = q would allow a run axis.

    Returns
    -------
    weight : array
    axes : int
        2 if there is a weight for each row, else 1.

    Raises
    ------
    TypeError
        If the weights are not real.
    ValueError
        If they have another shape, or a value is out of range.
    """
    array = nonnegative(weight, dtype)
    by_row = len(rows) == 2 and (array.shape == rows or array.ndim == 3)
    if by_row:
        checks.shape(array, "weight", "n q", rows, runs=True)
    else:
        checks.shape(array, "weight", "n", rows[:1], runs=True)
    axes = 2 if by_row else 1
    if array.ndim > axes and not array.any(axis=tuple(range(-axes, 0))).all():
        raise ValueError("weight: expected at least one positive number in every run, got none")
    return array, axes


def nonnegative(weight: npt.ArrayLike, dtype: np.dtype[Any]) -> Array:
    """Return weights of any shape in `dtype`: finite, not negative, not all zero.

    Errors are those of `weights`.
    """
    array = checks.as_array(weight, "weight")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"weight: expected a real or integer dtype, got {array.dtype.name}")
    if isinstance(weight, list | tuple) and array.dtype.kind == "f":
        array = checks.real(weight, "weight", dtype, "X")
    array = checks.ready(checks.exactly(array, "weight", dtype))
    if array.min(initial=math.inf) >= 0 and array.max(initial=0) < math.inf:
        if array.any():
            return array
        raise ValueError("weight: expected at least one positive number, got none")
    first = tuple(np.argwhere(~((array >= 0) & np.isfinite(array)))[0].tolist())
    raise ValueError(f"weight: expected finite numbers >= 0, got {array[first]} at {_place(first)}")


def check_samples(array: npt.NDArray[Any], name: str, n: int, most_axes: int) -> None:
    """Raise ValueError unless the first axis, or the one behind a run axis, is that of samples."""
    if array.ndim < 2:
        checks.shape(array, name, "n", (n,))
    elif array.ndim > most_axes or n not in array.shape[:2]:
        raise ValueError(
            f"{name}: expected shape (n, ...) or (R, n, ...) of at most {most_axes} axes with "
            f"n = {n}, got {array.shape}"
        )


def targets_have_runs(y: npt.NDArray[Any], n: int) -> bool:
    """Return whether y has a run axis before (n,), (n, q) of classes or (n, q, p)."""
    if y.ndim in (1, 4):
        return y.ndim == 4
    if y.shape[0] != n or y.shape[1] != n:
        return bool(y.shape[0] != n)
    # R or q is equal to n, too: an array that cannot be classes holds labels or real targets.
    classes = y.dtype.kind in "iu" and bool(y.min() >= 0)
    return classes is (y.ndim == 3)


def filled(y: npt.NDArray[Any], lengths: Integers, loss: str) -> npt.NDArray[Any]:
    """Return targets (n, q, p), or (n, q), with a valid value in the rows beyond `lengths` (n,)."""
    classes, kind = loss in OF_CLASSES, TARGETS[loss]
    if not classes and kind not in ("signs", "probabilities"):
        return padded(y, lengths)
    visible = np.arange(y.shape[-1 if classes else -2]) < lengths[..., None]
    filler = 0.0 if classes else 1.0 if kind == "signs" else 1.0 / y.shape[-1]
    return np.ascontiguousarray(
        np.where(visible if classes else visible[..., None], y, y.dtype.type(filler))
    )


def _place(index: tuple[int, ...]) -> str:
    """Name a position in an error: "index 3", or "index 1, 3"."""
    return f"index {', '.join(map(str, index))}"
