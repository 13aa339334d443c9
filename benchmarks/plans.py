"""How well the cost model predicts: every plan of some shapes, timed beside its predicted cycles.

    python -m benchmarks.plans
    python -m benchmarks.plans 64,8,16,8 100,10,10,16 --dtype float64

One thread and one loss and gradient of a classifier; the plans of a shape are timed in turn and
the fastest of many calls counts.  The last column is the predicted cycles over the measured time,
in GHz: where the model is right it is the same in every row.  `*` marks the plan that is chosen,
and what it loses against the fastest is the last line of a shape.
"""

from __future__ import annotations

import argparse
import math
import time

import mhfast as mh
from mhfast import _core
from mhfast._bench.shapes import Shape, parse_shape

SHAPES = ("64,8,16,8", "100,10,10,16", "20,10,50,64", "24,16,32,32", "16,32,64,16", "8,100,40,4")
PLANS = ("samples", "hybrid", "rows", "tiles")
ROUNDS, ROUND_SECONDS = 7, 0.05


def measure(shape: Shape, dtype: str) -> dict[str, tuple[float, float]]:
    """Return predicted cycles and measured seconds by plan, the chosen plan first."""
    data = mh.data.planted_attention(shape.n, shape.T, shape.d, 2, seed=0, dtype=dtype)
    model = mh.Classifier.gaussian(shape.H, shape.T, shape.d, std=0.3, seed=0, dtype=dtype)
    explained = mh.explain(model, data)
    cycles = explained["predicted_cycles"]
    plans = [plan for plan in PLANS if math.isfinite(cycles[plan])]
    plans.sort(key=lambda plan: plan != explained["plan"])
    seconds = dict.fromkeys(plans, math.inf)
    try:
        for _ in range(ROUNDS):
            for plan in plans:
                _core.force_plan(plan)
                end = time.perf_counter() + ROUND_SECONDS
                while (start := time.perf_counter()) < end:
                    mh.value_and_grad(model, data, num_threads=1)
                    seconds[plan] = min(seconds[plan], time.perf_counter() - start)
    finally:
        _core.force_plan("auto")
    return {plan: (cycles[plan], seconds[plan]) for plan in plans}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [parse_shape(text) for text in SHAPES]
    parser.add_argument("shapes", nargs="*", type=parse_shape, default=default, metavar="n,T,d,H")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    given = parser.parse_args()
    print(f"{_core.active_isa()}, {given.dtype}")
    print("n,T,d,H                 plan   predicted cycles  microseconds    GHz")
    for shape in given.shapes:
        table = measure(shape, given.dtype)
        for k, (plan, (cycles, seconds)) in enumerate(table.items()):
            mark = " " if k else "*"
            ghz = cycles / seconds / 1e9
            print(
                f"{shape!s:22} {mark}{plan:8} {cycles:14,.0f}  {1e6 * seconds:12,.1f}  {ghz:5.2f}"
            )
        times = [seconds for _, seconds in table.values()]
        print(
            f"{'':22}  the chosen plan takes {times[0] / min(times):.2f} of the fastest one's time"
        )


if __name__ == "__main__":
    main()
