"""A progress bar for long work: tqdm where it is installed, a plain line on stderr elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def progress_bar(
    first: int, last: int, what: str = "training", unit: str = "step"
) -> Iterator[Callable[[int], None]]:
    """Show how far work from step ``first`` to ``last`` is.

    Yields
    ------
    function of the step reached, to be called every now and then
    """
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError:
        try:
            yield _line(last, what, unit)
        finally:
            print(file=sys.stderr)
        return
    with tqdm(total=last, initial=first, desc=what, unit=unit) as bar:
        yield lambda k: bar.update(k - bar.n)


def _line(last: int, what: str, unit: str) -> Callable[[int], None]:
    def show(k: int) -> None:
        print(f"\r{what}: {unit} {k} of {last}", end="", file=sys.stderr, flush=True)

    return show
