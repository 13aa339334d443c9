"""What models with identities take, over the same with the identity stored.

    python -m benchmarks.identities
    python -m benchmarks.identities 100,2,1000,1 --dtype float64

One thread; both models are called in turn, and a ratio is that of the lower deciles of their times.
Gradients are by the parameters that both have.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import mhfast as mh
from mhfast import _core
from mhfast._bench.shapes import Shape, parse_shape

SHAPES = ("100,2,1000,1", "64,16,256,4", "200,8,32,4")
SECONDS, LEAST = 1.0, 15  # of the calls of a pair, and how many at least

Pair = tuple[str, mh.Classifier | mh.Layer, mh.Classifier | mh.Layer]


def pairs(shape: Shape, dtype: str) -> Iterator[Pair]:
    """Yield models with an identity, each with its twin that stores it."""
    T, d, H = shape.T, shape.d, shape.H
    rng = np.random.default_rng(0)
    U = rng.standard_normal((H, T, d)).astype(dtype) / T
    W = rng.standard_normal((H, d, d)).astype(dtype) / d
    identity = np.broadcast_to(np.eye(d, dtype=dtype), (H, d, d))
    scale = d**-0.5
    for name, fixed, stored in (
        ("classifier, W", mh.Classifier(None, U), mh.Classifier(identity, U)),
        ("layer, W", mh.Layer(None, W), mh.Layer(identity, W)),
        ("layer, V", mh.Layer(W, None), mh.Layer(W, identity)),
    ):
        yield name, fixed.replace(scale=scale), stored.replace(scale=scale)


def ratio(first: Callable[[], object], second: Callable[[], object]) -> float:
    """Return the lower decile of the times of `first` over that of `second`."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[0]) < LEAST:
        for call, found in zip((first, second), times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    first_time, second_time = (float(np.quantile(found, 0.1)) for found in times)
    return first_time / second_time


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [parse_shape(text) for text in SHAPES]
    parser.add_argument("shapes", nargs="*", type=parse_shape, default=default, metavar="n,T,d,H")
    parser.add_argument("--dtype", choices=("float32", "float64"), nargs="*")
    given = parser.parse_args()
    print(f"{_core.active_isa()}; time over that of the stored identity")
    print(f"{'n,T,d,H':14} {'dtype':8} {'model':14} outputs  loss and gradient")
    mh.set_num_threads(1)
    for shape in given.shapes:
        for dtype in given.dtype or ("float32", "float64"):
            rng = np.random.default_rng(1)
            X = rng.standard_normal((shape.n, shape.T, shape.d)).astype(dtype)
            for name, fixed, stored in pairs(shape, dtype):
                y = np.ones(stored(X).shape, dtype)
                wrt = tuple(fixed.parameters)
                options: dict[str, Any] = {"X": X, "y": y, "loss": "squared", "wrt": wrt}
                outputs = ratio(partial(fixed, X), partial(stored, X))
                gradient = ratio(
                    partial(mh.value_and_grad, fixed, **options),
                    partial(mh.value_and_grad, stored, **options),
                )
                text = f"{shape.n},{shape.T},{shape.d},{shape.H}"
                print(f"{text:14} {dtype:8} {name:14} {outputs:7.2f} {gradient:9.2f}", flush=True)


if __name__ == "__main__":
    main()
