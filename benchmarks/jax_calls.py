"""What JAX adds to a call of the core: microseconds of the smallest one.

    python -m benchmarks.jax_calls

n = 2 samples of T = 3 tokens, d = 4, H = 2, float32, one thread, compiled with jit. A call of the
host by `jax.pure_callback`, as earlier versions made it, against a foreign function of XLA, each
empty and with the core behind it, and the core called by Python. Ways are timed in turn, call by
call, and the lower decile of each counts, which other processes disturb least.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mhfast as mh
from mhfast import _core
from mhfast.interop.jax import calls, classifier, primitive

ROUNDS, WARM_UP = 1000, 30

Way = Callable[[], Any]


def ways() -> dict[str, Way]:
    """Return what is timed, by name."""
    rng = np.random.default_rng(0)
    shapes = (2, 3, 4), (2, 4, 4), (2, 3, 4)
    X, W, U = arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    model, tokens, ones = mh.Classifier(np.array(W), np.array(U)), np.array(X), np.ones(2, "f")
    result = jax.ShapeDtypeStruct((2,), jnp.float32)
    call = calls.Call(False, ("X", "W", "U"), None, 1.0, False, "softmax", None, 1)

    def empty(*_: Any) -> Any:
        return jax.pure_callback(lambda *_: ones, result, *arrays)

    callback = jax.jit(lambda *arrays: primitive._by_callback(*arrays, call=call)[0])
    outputs = jax.jit(lambda *arrays: classifier(*arrays, num_threads=1))
    gradient = jax.jit(jax.grad(lambda *a: jnp.sin(classifier(*a, num_threads=1)).sum(), (1, 2)))
    empty = jax.jit(empty)

    def unserved(function: Any) -> Way:
        def way() -> Any:
            _core.xla_handler(lambda *_: None)
            begin = time.perf_counter_ns()
            jax.block_until_ready(function(*arrays))
            taken = time.perf_counter_ns() - begin
            _core.xla_handler(calls.serve)
            return taken

        return way

    return {
        "empty callback": lambda: jax.block_until_ready(empty(*arrays)),
        "outputs by callback": lambda: jax.block_until_ready(callback(*arrays)),
        "empty foreign function": unserved(outputs),
        "outputs": lambda: jax.block_until_ready(outputs(*arrays)),
        "two empty foreign functions": unserved(gradient),
        "outputs and gradient": lambda: jax.block_until_ready(gradient(*arrays)),
        "outputs, from Python": lambda: model(tokens, num_threads=1),
        "gradient, from Python": lambda: mh.backward(model, tokens, ones, num_threads=1),
    }


def microseconds(ways: dict[str, Way]) -> dict[str, float]:
    """Return the lower decile of the times of each way."""
    times: dict[str, list[int]] = {name: [] for name in ways}
    for k in range(WARM_UP + ROUNDS):
        for name, way in ways.items():
            begin = time.perf_counter_ns()
            own = way()
            taken = time.perf_counter_ns() - begin
            if k >= WARM_UP:
                times[name].append(own if isinstance(own, int) else taken)
    return {name: float(np.quantile(taken, 0.1)) / 1e3 for name, taken in times.items()}


if __name__ == "__main__":
    for name, taken in microseconds(ways()).items():
        print(f"{name:28} {taken:7.1f}")
