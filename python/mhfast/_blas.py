"""The threads of the BLAS that NumPy and SciPy call.

OpenBLAS keeps its threads spinning for some hundredths of a second after each product, and OpenMP
keeps those of the core: where small products and calls of the core alternate, each waits for the
other's. One thread for BLAS is then several times faster.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# A function found through one of these may stand in a library that it is linked with.
_MODULES = ("numpy.linalg._umath_linalg", "scipy.linalg._flapack")
_SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix in ("scipy_", "")
    for suffix in ("", "64_")
)

_lock = threading.Lock()
_inside = 0  # blocks that have begun and not ended, in all Python threads
_before: list[int] = []  # what the last of them sets again


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS use one thread within the block, or the function that this decorates.

    Of a BLAS other than OpenBLAS the threads stay as they are. The number is the process's: other
    Python threads meet it too, and it is what it was when the last block ends.
    """
    global _inside
    with _lock:
        if _inside == 0:
            _before[:] = [get() for get, _ in _openblas()]
            for _, set_threads in _openblas():
                set_threads(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for (_, set_threads), count in zip(_openblas(), _before, strict=True):
                    set_threads(count)


@cache
def _openblas() -> tuple[tuple[Callable[[], int], Callable[[int], None]], ...]:
    """Return the functions that read and set the number of threads, of each OpenBLAS in use."""
    found = {}
    for name in _MODULES:
        try:
            library = ctypes.CDLL(importlib.import_module(name).__file__)
        except (ImportError, OSError):
            continue
        for setter in _SETTERS:
            set_threads = getattr(library, setter, None)
            get_threads = getattr(library, setter.replace("_set_", "_get_"), None)
            if set_threads is not None and get_threads is not None:
                address = ctypes.cast(set_threads, ctypes.c_void_p).value
                found[address] = (get_threads, set_threads)
    return tuple(found.values())
