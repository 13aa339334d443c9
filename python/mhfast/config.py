"""How mhfast runs here: threads, instruction set, build."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from . import _checks, _core
from .dataset import Dataset

if TYPE_CHECKING:
    from .models import Model

_MOST_THREADS = 2**31 - 1  # what a C int holds; work is never split among as many

_wanted = os.environ.get("MHFAST_NUM_THREADS", "").strip()
if _wanted and not (_wanted.isdecimal() and int(_wanted) >= 1):
    raise ImportError(f"MHFAST_NUM_THREADS: expected an integer of at least 1, got {_wanted!r}")

# What `with num_threads(k)` sets. 0 leaves the choice to the default of the process. A context
# variable, so that the setting ends with the block and stays in the Python thread that made it.
_threads: ContextVar[int] = ContextVar("mhfast.num_threads", default=0)


def set_num_threads(k: int) -> None:
    """Use `k` threads in this process wherever no argument or `num_threads` block says otherwise.

    Without this call the number is, in this order: the environment variable MHFAST_NUM_THREADS,
    OMP_NUM_THREADS, the processors that the container and the affinity mask allow. The last two are
    bounded by `threadpoolctl.threadpool_limits`, and whatever else sets the number of threads of
    OpenMP; a number that was given to mhfast itself is not.

    Raises
    ------
    TypeError, ValueError
        If `k` is not an integer of at least 1.
    """
    _core.set_num_threads(_count(k, "k"))


@contextmanager
def num_threads(k: int) -> Iterator[None]:
    """Use `k` threads within a `with` block, in the Python thread that entered it.

    Raises
    ------
    TypeError, ValueError
        If `k` is not an integer of at least 1.
    """
    token = _threads.set(_count(k, "k"))
    try:
        yield
    finally:
        _threads.reset(token)


def threads(num_threads: int | None) -> int:
    """Return the thread count for the core: the argument, else the context, else 0 (default)."""
    if num_threads is None:
        return _threads.get()
    return _count(num_threads, "num_threads")


def _count(threads: object, name: str) -> int:
    return min(_checks.count(threads, name), _MOST_THREADS)


def explain(
    model: Model, X: npt.ArrayLike | Dataset | tuple[int, ...], *, runs: int | None = None
) -> dict[str, object]:
    """Tell how the core would compute this model on these samples: lanes, tiles, chunks, scratch.

    Parameters
    ----------
    model : Classifier or Layer
    X : array (n, T, d), Dataset, or the shape (n, T, d) alone
        A run axis may come first.
    runs : int, optional
        How many runs side by side, where neither model nor X has a run axis.

    Returns
    -------
    dict of plain values, for reading; its entries may change between versions.

    Raises
    ------
    ValueError
        If the shape does not fit the model, or run axes each other.
    """
    query = X.query if isinstance(X, Dataset) else None
    shape = X if isinstance(X, tuple) else np.shape(X.X if isinstance(X, Dataset) else X)
    side_by_side = model._core.runs
    if runs is not None:
        side_by_side = side_by_side.meet("runs", (_checks.count(runs, "runs"),), 0)
    if isinstance(X, Dataset):
        side_by_side = side_by_side.join(X._runs)
    if len(shape) == 4:
        side_by_side = side_by_side.meet("X", shape, 3)
        shape = shape[1:]
    itself = query is None and model.query is None and model.prompt is None
    rows = model._rows if itself else None
    if len(shape) != 3 or shape[2] != model.dim or rows not in (None, shape[1]):
        T = "T" if rows is None else rows
        raise ValueError(f"X: expected shape (n, T, d) = (n, {T}, {model.dim}), got {shape}")
    n, tokens = (_checks.count(length, "X") for length in shape[:2])
    q = model._query_rows(tokens) if query is None else query.shape[-2]
    return _core.explain(
        n, tokens, q, model.dim, model.heads, model._out_dim,
        side_by_side.length, model.dtype.name,
    )  # fmt: skip


@overload
def show_config(mode: Literal["text"] = "text") -> None: ...
@overload
def show_config(mode: Literal["dict"]) -> dict[str, Any]: ...
def show_config(mode: str = "text") -> dict[str, Any] | None:
    """Tell version, compiler, instruction sets, threads and OpenMP runtime.

    Parameters
    ----------
    mode : "text" or "dict"
        "text" prints a table; "dict" returns the same as a dict.

    Raises
    ------
    ValueError
        For another mode.
    """
    if mode not in ("text", "dict"):
        raise ValueError(f"mode: expected 'text' or 'dict', got {mode!r}")
    config: dict[str, Any] = {
        "mhfast": version("mhfast"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **_core.config(),
        "threads": threads(None) or _core.get_num_threads(),
    }
    if mode == "dict":
        return config
    width = max(map(len, config))
    for name, value in config.items():
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        print(f"{name:<{width}}  {text}")
    return None
