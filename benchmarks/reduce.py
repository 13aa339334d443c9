"""What a step costs in several processes: 1, 2 and 4 of them here, and a model for 64.

    python -m benchmarks.reduce
    python -m benchmarks.reduce --shape 256,10,20,4 --ranks 1 2 4 --latency 20 --bandwidth 1.2

The processes of `torch.distributed` with the backend gloo on this machine, one thread each, share
the samples of one training; trainings of 1, 2 and 4 take turns.  A step is the work between two
calls of the function that adds up, in seconds of the processor, which other programs do not
lengthen, and the sum, in seconds of the clock, with the time that it waits for others; of each the
lower decile in the first process counts.  "Alone" is a sum of as many numbers with no work around
it.  The model of a step with P processes and m numbers of 8 bytes is

    step(P) = n / P * work  +  sum(P)
    sum(P) = (P - 1) (latency + 8 m / bandwidth)                where P m <= SMALL
           = (P - 1) (2 latency + 2 * 8 m / (P bandwidth))      in slices, beyond that

with the work of a sample from the step of one process, and latency and bandwidth from sums of two
processes of 8 and of a million numbers, unless they are given (microseconds, and GB in a second, of
another network).  It takes a processor for each process: with fewer, sums wait for them.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
from typing import Any

import numpy as np

import mhfast as mh
from mhfast._bench.shapes import Shape, parse_shape
from mhfast.interop import reduce

SHAPE = "1024,10,50,16"
STEPS, WARM_UP, ROUNDS = 25, 4, 3
FEW, MANY = 8, 1 << 20
MODELLED = (8, 64)


class Clock:
    """A function that adds up, and when it was called and returned."""

    def __init__(self, add: Any) -> None:
        self.add = add
        self.times: list[tuple[float, float, float]] = []
        self.numbers = 0

    def __call__(self, numbers: Any) -> Any:
        worked, begin = time.thread_time(), time.perf_counter()
        sums = self.add(numbers)
        self.times.append((worked, time.thread_time(), time.perf_counter() - begin))
        self.numbers = len(numbers)
        return sums

    def of_steps(self) -> tuple[list[float], list[float]]:
        """Return the seconds of the work of each step, and of each sum."""
        begins, ends, sums = np.array(self.times[WARM_UP:-1]).T
        return (begins[1:] - ends[:-1]).tolist(), sums.tolist()


def sums_alone(add: Any, count: int) -> list[float]:
    """Return the seconds of sums of so many numbers with no work between them."""
    clock = Clock(add)
    for _ in range(WARM_UP + 10):
        clock(np.zeros(count))
    return clock.of_steps()[1]


def worker(rank: int, ranks: list[int], store: str, shape: Shape, answers: Any) -> None:
    """Take part in all trainings in turn, and answer as the first process."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=max(ranks)
    )
    groups = {size: distributed.new_group(list(range(size))) for size in ranks}
    data = mh.data.planted_attention(shape.n, shape.T, shape.d, 2, seed=0)
    model = mh.Classifier.gaussian(shape.H, shape.T, shape.d, std=0.3, seed=0)
    works: dict[Any, list[float]] = {size: [] for size in ranks}
    sums: dict[Any, list[float]] = {size: [] for size in ranks}
    alone: dict[Any, list[float]] = {key: [] for key in (*ranks, FEW, MANY)}
    numbers = {}
    for _, size in itertools.product(range(ROUNDS), ranks):
        distributed.barrier()
        if rank >= size:
            continue
        together = reduce.torch_distributed(groups[size])
        own = data[rank * shape.n // size : (rank + 1) * shape.n // size]
        clock = Clock(together.function)
        mh.train(
            model, own, steps=STEPS, optimizer=mh.GradientDescent(0.01), num_threads=1,
            record={"loss": STEPS}, reduce=mh.Reduction(clock, rank=rank, size=size),
        )  # fmt: skip
        for kept, seconds in zip((works[size], sums[size]), clock.of_steps(), strict=True):
            kept += seconds
        numbers[size] = clock.numbers
        alone[size] += sums_alone(together.function, numbers[size])
        for count in (FEW, MANY) if size == 2 else ():
            alone[count] += sums_alone(together.function, count)
    if rank == 0:
        answers.put(
            {
                "work": {size: decile(works[size]) for size in ranks},
                "sum": {size: decile(sums[size]) for size in ranks},
                "alone": {key: decile(alone[key]) for key in alone},
                "numbers": numbers,
            }
        )
    distributed.barrier()
    distributed.destroy_process_group()


def decile(seconds: Any) -> float:
    """Return the lower decile."""
    return float(np.quantile(seconds, 0.1))


def measure(ranks: list[int], shape: Shape) -> dict[str, dict[int, float]]:
    """Return what the first process measures, by the number of those that train."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=worker, args=(rank, ranks, store, shape, answers))
            for rank in range(max(ranks))
        ]
        for process in processes:
            process.start()
        answer: dict[str, dict[int, float]] = answers.get(timeout=600)
        for process in processes:
            process.join()
    return answer


def modelled_sum(size: int, numbers: float, latency: float, bandwidth: float) -> float:
    """Return the seconds that the model gives."""
    if size * numbers <= reduce.SMALL:
        return (size - 1) * (latency + 8 * numbers / bandwidth)
    return (size - 1) * (2 * latency + 2 * 8 * numbers / (size * bandwidth))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=parse_shape, default=parse_shape(SHAPE), metavar="n,T,d,H")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--latency", type=float, help="of a message, in microseconds")
    parser.add_argument("--bandwidth", type=float, help="of a process, in GB in a second")
    given = parser.parse_args()
    shape: Shape = given.shape
    ranks = sorted({1, 2, *given.ranks})
    answer = measure(ranks, shape)
    works, sums, alone, numbers = (answer[name] for name in ("work", "sum", "alone", "numbers"))
    work, one = works[1] / shape.n, works[1] + sums[1]
    latency = alone[FEW] if given.latency is None else given.latency * 1e-6
    rest = max(alone[MANY] - 2 * alone[FEW], 1e-9)
    bandwidth = 8 * MANY / rest if given.bandwidth is None else given.bandwidth * 1e9
    print(
        f"n,T,d,H {shape}, float64, {numbers[1]:,.0f} numbers to add up, "
        f"{len(os.sched_getaffinity(0))} processors"
    )
    print(
        f"work {1e6 * work:.2f} µs a sample, latency {1e6 * latency:.0f} µs, "
        f"bandwidth {bandwidth / 1e9:.2f} GB/s"
    )
    print(
        "processes   step, ms  sum, ms  part  of one's  sum alone   model's step      sum  of one's"
    )
    for size in sorted({*ranks, *MODELLED}):
        added = modelled_sum(size, numbers.get(size, numbers[1]), latency, bandwidth)
        step = work * shape.n / size + added
        model = f"{1e3 * step:9.2f} {1e3 * added:8.2f} {step / one:8.2f}"
        found = " " * 43
        if size in works:
            took, inside = works[size] + sums[size], sums[size]
            found = f"{1e3 * took:8.2f} {1e3 * inside:7.2f} {inside / took:5.0%} {took / one:9.2f}"
            found += f" {1e3 * alone[size]:9.2f}"
        print(f"{size:9}   {found}   {model}")


if __name__ == "__main__":
    main()
