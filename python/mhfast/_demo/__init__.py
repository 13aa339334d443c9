"""`mhfast demo`: train on real and synthetic data, print a table, write a figure."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path

from ..training.progress import progress_bar
from .experiments import Digits, Heads, Saturation, run_digits, run_heads, run_saturation
from .report import record, table

NEEDED = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
"""The modules that only the demo needs, with the packages that provide them."""

DIGITS, HEADS, SATURATION = Digits(), Heads(), Saturation()


def run_demo(
    path: Path,
    digits: Digits = DIGITS,
    heads: Heads = HEADS,
    saturation: Saturation = SATURATION,
    *,
    as_json: bool = False,
) -> None:
    """Run the three experiments, print their table or JSON and write their figure to `path`.

    Raises
    ------
    ImportError
        matplotlib or scikit-learn is not installed.
    """
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ImportError(
            f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    from .figure import draw

    begin = time.perf_counter()
    done = 0
    with progress_bar(0, digits.total + heads.total + saturation.total) as show:

        def advance(steps: int) -> None:
            nonlocal done
            done += steps
            show(done)

        results = (
            run_digits(digits, advance),
            run_heads(heads, advance),
            run_saturation(saturation, advance),
        )
    draw(*results).savefig(path)
    seconds = time.perf_counter() - begin
    if as_json:
        print(json.dumps(record(*results) | {"seconds": seconds, "figure": str(path)}, indent=1))
        return
    print(table(*results))
    print(f"\n{seconds:.0f} seconds; the figure is {path}")
