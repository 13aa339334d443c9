"""Configuration: threads, instruction set, build."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, Literal, overload

import numpy as np

from . import _core
from ._arguments import checks

_MAX_THREADS = 2**31 - 1  # the largest C int; work is never split among that many

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
    bounded by `threadpoolctl.threadpool_limits` and by whatever else limits the threads of OpenMP;
    a number that was given to mhfast itself is not.

    Parameters
    ----------
    k : int
        At least 1.

    Raises
    ------
    TypeError
        If `k` is not an integer.
    ValueError
        If `k` is below 1.

    Examples
    --------
    >>> import mhfast as mh
    >>> mh.set_num_threads(2)  # doctest: +SKIP
    """
    _core.set_num_threads(_count(k, "k"))


@contextmanager
def num_threads(k: int) -> Iterator[None]:
    """Use `k` threads within a `with` block, in the Python thread that entered it.

    Parameters
    ----------
    k : int
        At least 1.

    Yields
    ------
    None

    Raises
    ------
    TypeError
        If `k` is not an integer.
    ValueError
        If `k` is below 1.

    Examples
    --------
    >>> import mhfast as mh
    >>> with mh.num_threads(1):
    ...     print(mh.show_config("dict")["threads"])
    1
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
    if type(num_threads) is int and 1 <= num_threads <= _MAX_THREADS:
        return num_threads  # what _count would return, at once
    return _count(num_threads, "num_threads")


def _count(threads: object, name: str) -> int:
    return min(checks.count(threads, name), _MAX_THREADS)


@overload
def show_config(mode: Literal["text"] = "text") -> None: ...
@overload
def show_config(mode: Literal["dict"]) -> dict[str, Any]: ...
def show_config(mode: str = "text") -> dict[str, Any] | None:
    """Show version, compiler, instruction sets, threads and OpenMP runtime.

    Parameters
    ----------
    mode : "text" or "dict"
        "text" prints a table; "dict" returns the same as a dict.

    Returns
    -------
    dict or None
        With "dict", the values by name; None otherwise.

    Raises
    ------
    ValueError
        For another mode.

    Examples
    --------
    >>> import mhfast as mh
    >>> mh.show_config("dict")["mhfast"] == mh.__version__
    True
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
