"""Sweeps on executors that need a program of their own, for `test_sweep`.

mpiexec -n 3 python -m mpi4py.futures sweep_executors.py mpi
python sweep_executors.py ray
"""

from __future__ import annotations

import re
import sys
import warnings
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import sweep_functions as functions

import mhfast as mh

PAGE = Path(__file__).parents[2] / "docs" / "sweeps.md"


def check(executor: Executor) -> None:
    """Compare tables and failures with those of a sweep in this process."""
    warnings.simplefilter("ignore", RuntimeWarning)  # calls that fail
    grid = {"heads": [1, 2], "lr": [0.1, 0.5]}
    found = mh.sweep(functions.training, grid, executor=executor)
    here = mh.sweep(functions.training, grid)
    assert not found.failures
    for name, column in here.columns.items():
        np.testing.assert_array_equal(found.columns[name], column)
    (failure,) = mh.sweep(functions.picky, {"a": [1, 2]}, executor=executor).failures
    assert failure.error == "ZeroDivisionError: a is two"
    assert "in picky" in failure.traceback
    print("same")


def of_ray() -> Executor:
    """Return the executor that the page on sweeps defines."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class RayExecutor" in block), names)
    return names["RayExecutor"]()


if __name__ == "__main__":
    if sys.argv[1] == "ray":
        check(of_ray())
    else:
        from mpi4py.futures import MPIPoolExecutor

        with MPIPoolExecutor() as executor:
            check(executor)
