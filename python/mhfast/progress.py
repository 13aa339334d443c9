"""A progress bar for training: tqdm where it is installed, a plain line on stderr elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def progress_bar(first: int, last: int) -> Iterator[Callable[[int], None]]:
    """Show how far training from step ``first`` to ``last`` is.

    Yields
    ------
    function of the step reached, to be called every now and then
    """
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError:
        try:
            yield _line(last)
        finally:
            print(file=sys.stderr)
        return
    with tqdm(total=last, initial=first, desc="training", unit="step") as bar:
        yield lambda k: bar.update(k - bar.n)


def _line(last: int) -> Callable[[int], None]:
    def show(k: int) -> None:
        print(f"\rtraining: step {k} of {last}", end="", file=sys.stderr, flush=True)

    return show
