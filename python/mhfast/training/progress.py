"""A progress bar for long work: tqdm if it is installed, otherwise a plain line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

UNSHOWN = (OSError, ValueError, AttributeError)
"""The exceptions of a stream that is a closed pipe, a closed file or None."""


@contextmanager
def progress_bar(
    first: int, last: int, what: str = "training", unit: str = "step"
) -> Iterator[Callable[[int], None]]:
    """Show the progress of work from step ``first`` to ``last``.

    Yields
    ------
    function of the step reached, to be called from time to time
    """
    stream = sys.stderr  # None under pythonw, closed by some hosts
    if stream is None or getattr(stream, "closed", False):
        yield _nothing
        return
    try:
        show, close = _bar(first, last, what, unit)
    except UNSHOWN:
        show = close = _nothing
    try:
        yield _lasting(show)
    finally:
        _lasting(close)(last)


def _nothing(_: int) -> None:
    """Show nothing."""


def _bar(
    first: int, last: int, what: str, unit: str
) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """Return what shows a step and what ends the line."""
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError:
        return _line(last, what, unit), lambda _: print(file=sys.stderr)
    bar = tqdm(total=last, initial=first, desc=what, unit=unit)
    return lambda k: bar.update(k - bar.n), lambda _: bar.close()


def _lasting(show: Callable[[int], object]) -> Callable[[int], None]:
    """Return ``show`` for a stream that may be closed at any time: work continues without a bar."""
    open_ = True

    def lasting(k: int) -> None:
        nonlocal open_
        if open_:
            try:
                show(k)
            except UNSHOWN:
                open_ = False

    return lasting


def _line(last: int, what: str, unit: str) -> Callable[[int], None]:
    def show(k: int) -> None:
        print(f"\r{what}: {unit} {k} of {last}", end="", file=sys.stderr, flush=True)

    return show
