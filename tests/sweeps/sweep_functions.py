"""Functions that sweeps of the tests call, also in other processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import mhfast as mh

T, d, n = 3, 4, 12


def area(a: float, b: float) -> dict[str, float]:
    return {"area": a * b, "sum": a + b}


def training(heads: int, lr: Any, every: int = 2) -> mh.Run:
    data = mh.data.planted_attention(n, T, d, 2, seed=0)
    start = mh.Classifier.gaussian(heads, T, d, std=0.3, seed=1)
    record = {"loss": 1, "grad_norm": every, "attention_max": every}
    return mh.train(start, data, steps=4, optimizer=mh.GradientDescent(lr), record=record)


def seeded(a: Any, seed: Any) -> dict[str, Any]:
    draw = [np.random.default_rng(int(one)).standard_normal() for one in np.atleast_1d(seed)]
    return {"a": a, "draw": np.array(draw) if np.ndim(seed) else draw[0]}


def picky(a: int) -> dict[str, int]:
    if a == 2:
        raise ZeroDivisionError("a is two")
    return {"square": a * a}


def counted(a: int, directory: str) -> dict[str, int]:
    """Leave a mark of every call that was begun and of every one that was finished."""
    with open(Path(directory) / f"begun-{a}", "ab") as file:
        file.write(b".")
    time.sleep(0.002)
    return {"square": a * a}


def fatal(a: int) -> dict[str, int]:
    if a == 1:
        os._exit(3)
    return {"square": a * a}


if __name__ == "__main__":  # a sweep to be killed: directory of the sweep, of the marks, points
    store, marks, points = sys.argv[1:]
    from sweep_functions import counted as function  # under its name for importers

    mh.sweep(function, {"a": range(int(points)), "directory": [marks]}, directory=store)
