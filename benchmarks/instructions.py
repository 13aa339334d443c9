"""Instructions that one loss and gradient executes: a count that a busy machine does not disturb.

    python -m benchmarks.instructions
    python -m benchmarks.instructions 64,8,16,8 100,10,10,16 --dtype float64

Needs valgrind.  A process that makes one call and one that makes several are counted by
callgrind, so that the difference is that of the calls.  The table relates it to the multiply-adds
of whole registers that n H (2 T d² + 4 T² d) multiply-adds amount to: two of these can start in a
cycle, and the instructions beside each say why they do not.  One thread.  The instruction set and
the plan are those of the counted process, which valgrind may hold to a narrower set than the
machine has (it does not know AVX-512).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mhfast as mh
from mhfast import _core
from mhfast._bench.shapes import Shape, parse_shape

SHAPES = ("64,8,16,8", "100,10,10,16", "20,10,50,64", "24,16,32,32", "16,32,64,16")
CALLS = 20  # that the difference is taken over


def call(shape: Shape, dtype: str, times: int) -> None:
    """Compute loss and gradient on one thread so many times, and print what computes them."""
    data = mh.data.planted_attention(shape.n, shape.T, shape.d, 2, seed=0, dtype=dtype)
    model = mh.Classifier.gaussian(shape.H, shape.T, shape.d, std=0.3, seed=0, dtype=dtype)
    for _ in range(times):
        mh.value_and_grad(model, data, num_threads=1)
    plan = mh.explain(model, data)
    print(_core.active_isa(), plan["plan"], plan["lanes"])


def count(shape: Shape, dtype: str, times: int) -> tuple[int, list[str]]:
    """Return the instructions of a process that makes so many calls, and what `call` printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={Path(folder) / 'out'}"]
        command += [sys.executable, "-m", "benchmarks.instructions", str(shape), "--dtype", dtype]
        command += ["--call", str(times)]
        # What Python does before the calls is the same each time; other threads would spin.
        same = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        same = os.environ | same
        done = subprocess.run(command, env=same, capture_output=True, text=True, check=True)
    return collected(done.stderr), done.stdout.split()


def collected(report: str) -> int:
    """Return the number of instructions in what callgrind says at its end."""
    found = re.search(r"Collected : (\d+)", report)
    if found is None:
        raise RuntimeError(f"callgrind: expected 'Collected : ...' in its report, got {report!r}")
    return int(found[1])


def main() -> None:
    """Print the table, or make calls for callgrind to count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [parse_shape(text) for text in SHAPES]
    parser.add_argument("shapes", nargs="*", type=parse_shape, default=default, metavar="n,T,d,H")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--call", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.call is not None:
        call(given.shapes[0], given.dtype, given.call)
        return
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind: not found; it counts the instructions")
    print("n,T,d,H        isa       plan     instructions  per multiply-add of a register")
    for shape in given.shapes:
        (more, (isa, plan, lanes)), (once, _) = (
            count(shape, given.dtype, times) for times in (1 + CALLS, 1)
        )
        of_calls = (more - once) / CALLS
        ratio = of_calls / (shape.flops / 2 / int(lanes))
        print(f"{shape!s:13}  {isa:8}  {plan:7}  {of_calls:12,.0f}  {ratio:.2f}")


if __name__ == "__main__":
    main()
