"""Arguments of model constructors, checked and in the form that models store."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import ROW_MAPS
from .._arguments.values import Array, frozen
from .low_rank import LowRank


def key_query(W: npt.ArrayLike | LowRank) -> tuple[Array | LowRank, int, int]:
    """Return W in the form that models store, the number H of heads and the dimension d."""
    if isinstance(W, LowRank):
        return W, *W.Q.shape[-3:-1]
    W = checks.real(W, "W")
    columns = W.shape[-1] if W.ndim else None
    checks.shape(W, "W", "H d d", (None, columns, columns), runs=True)
    return frozen(W), *W.shape[-3:-1]


def query_side(
    query: int | npt.ArrayLike | None,
    prompt: npt.ArrayLike | None,
    dim: int,
    dtype: np.dtype[Any],
    like: str = "W",
) -> tuple[int | Array | None, Array | None]:
    """Return `query` (None, an int or a frozen array) and `prompt` (None or a frozen array)."""
    if prompt is not None:
        if query is not None:
            raise ValueError("query: expected None with a prompt, got both")
        rows = checks.real(prompt, "prompt", dtype, like)
        checks.shape(rows, "prompt", "q d", (None, dim), runs=True)
        if rows.size == 0:
            raise ValueError(f"prompt: expected at least one row, got shape {rows.shape}")
        return None, frozen(rows)
    if query is None:
        return None, None
    if not np.ndim(query):
        return checks.integer(query, "query", "an integer or an array (n, q, d)"), None
    Z = checks.real(query, "query", dtype, like)
    checks.shape(Z, "query", "n q d", (None, None, dim), runs=True)
    return frozen(Z), None


def rows(query: int | Array | None, prompt: Array | None) -> int | None:
    """Return the number q of rows that `query` or `prompt` determine, None if the tokens do."""
    if prompt is not None:
        return int(prompt.shape[-2])
    if query is None:
        return None
    return 1 if isinstance(query, int) else int(query.shape[-2])


def query_rows(
    query: int | npt.ArrayLike | None,
    prompt_rows: int | None,
    tokens: int,
    dim: int,
    dtype: np.dtype[Any],
) -> int:
    """Return the number q of rows of the readout of a classifier under construction."""
    if prompt_rows is not None:
        return checks.count(prompt_rows, "prompt_rows")
    which, _ = query_side(query, None, dim, dtype, "the model")
    if isinstance(which, int):
        checks.token_index(which, tokens)
    q = rows(which, None)
    return tokens if q is None else q


def scale(value: object, dtype: np.dtype[Any]) -> float:
    """Return the factor of the logits as a float that ``dtype`` can hold.

    Raises
    ------
    TypeError
        If it is not a real number.
    ValueError
        If it is not finite, or neither zero nor within the range of ``dtype``.
    """
    number = checks.finite(value, "scale")
    with np.errstate(over="ignore", under="ignore"):
        kept = float(dtype.type(number))
    if np.isinf(kept) or (kept == 0) != (number == 0):
        limits = np.finfo(dtype)
        raise ValueError(
            f"scale: expected 0 or a number between {limits.smallest_subnormal:.1e} and "
            f"{limits.max:.1e}, the range of {dtype.name}, got {number}"
        )
    return number


def causal(value: object, prompt: Array | None) -> bool:
    """Return `causal` as a bool; a model with a prompt cannot be causal."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"causal: expected True or False, got {type(value).__name__}")
    if value and prompt is not None:
        raise ValueError(
            "causal: expected False with a prompt, whose rows have no place among the tokens, "
            "got True"
        )
    return bool(value)


def row_map(attention: object, normalize: object) -> tuple[str, bool | None]:
    """Return the name of the row map and whether its weights are divided by the tokens.

    Raises
    ------
    TypeError
        If the name is not a string, or `normalize` is neither None nor a bool.
    ValueError
        If there is no such row map, or it has no choice of `normalize`.
    """
    if not isinstance(attention, str):
        names = ", ".join(ROW_MAPS)
        raise TypeError(f"attention: expected one of {names}, got {type(attention).__name__}")
    name = str(attention)
    if name not in ROW_MAPS:
        raise ValueError(f"attention: expected one of {', '.join(ROW_MAPS)}, got {name!r}")
    if normalize is None:
        return name, None
    if not isinstance(normalize, bool | np.bool_):
        raise TypeError(f"normalize: expected None, True or False, got {type(normalize).__name__}")
    if ROW_MAPS[name] is None:
        raise ValueError(
            f"normalize: expected None with attention {name!r}, whose weights are not divided "
            f"by the tokens, got {bool(normalize)}"
        )
    return name, bool(normalize)


def no_empty_axis(name: str, W: Array | LowRank, readout_name: str, readout: Array) -> None:
    """Raise ValueError if W or the readout has an axis of length 0."""
    shape = W.Q.shape if isinstance(W, LowRank) else W.shape
    if 0 in shape or readout.size == 0:
        raise ValueError(
            f"{name}, {readout_name}: expected no axis of length 0, got shapes {shape} and "
            f"{readout.shape}"
        )
