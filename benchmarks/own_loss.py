"""A loss of the caller's own beside the same loss by name, and beside torch and jax.

    python -m benchmarks.own_loss
    python -m benchmarks.own_loss --json own_loss.json

The logistic loss of n = 1000 samples, T = 10 tokens of d = 20 dimensions and H = 4 heads: a step of
gradient descent with the loss by name, as a function of NumPy, as one under jax.jit and as a numba
cfunc; torch takes it eagerly with autograd, jax all steps in one compiled lax.scan. The ways are
timed in turn on one processor, in processor time of the process, which others disturb less; the
table has lower deciles, and the final losses of all must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import mhfast as mh

N, T, D, H = 1000, 10, 20, 4
LR = 0.1

Array = npt.NDArray[Any]
Way = Callable[[int], float]  # takes so many steps, and returns the loss before the last


def logistic(F: Array, y: Array) -> tuple[Array, Array]:
    """Return the loss and its derivative at each output."""
    m = y * F
    e = np.exp(-np.abs(m))
    return np.log1p(e) + np.maximum(-m, 0), -y * np.where(m > 0, e, 1) / (1 + e)


def jax_logistic() -> Any:
    """Return the same function for JAX to compile."""
    import jax

    return jax.jit(lambda F, y: (jax.nn.softplus(-y * F), -y * jax.nn.sigmoid(-y * F)))


def compiled_logistic() -> Any:
    """Return the same function compiled by numba."""
    import numba
    from numba import types

    pointer = types.CPointer(types.float64)

    @numba.cfunc(types.void(types.intp, pointer, pointer, pointer, pointer, types.voidptr))
    def compiled(count, F, y, values, derivatives, _):  # type: ignore[no-untyped-def]
        for i in range(count):
            m = y[i] * F[i]
            e = np.exp(-abs(m))
            values[i] = np.log1p(e) + max(-m, 0.0)
            derivatives[i] = -y[i] * (e if m > 0 else 1.0) / (1 + e)

    return compiled


def own(model: mh.Classifier, data: mh.Dataset, loss: Any) -> Way:
    """Train with mhfast."""

    def way(steps: int) -> float:
        rule = mh.GradientDescent(LR)
        run = mh.train(model, data, steps=steps - 1, optimizer=rule, loss=loss, num_threads=1)
        return float(run.history["loss"][-1])

    return way


def by_jax(model: mh.Classifier, data: mh.Dataset) -> Way:
    """Train with one compiled loop of jax."""
    import jax
    import jax.numpy as jnp

    X, y = jnp.asarray(data.X), jnp.asarray(data.y)

    def loss(theta: Any) -> Any:
        W, U = theta
        scores = jnp.einsum("nqd,hde,nte->nhqt", X, W, X)
        F = jnp.einsum("nhqt,ntd,hqd->n", jax.nn.softmax(scores), X, U) / H**0.5
        return jax.nn.softplus(-y * F).mean()

    def step(theta: Any, _: None) -> Any:
        value, g = jax.value_and_grad(loss)(theta)
        return jax.tree.map(lambda a, b: a - LR * b, theta, g), value

    loop = jax.jit(lambda theta, k: jax.lax.scan(step, theta, None, length=k), static_argnums=1)
    return lambda steps: float(loop((jnp.asarray(model.W), jnp.asarray(model.U)), steps)[1][-1])


def by_torch(model: mh.Classifier, data: mh.Dataset) -> Way:
    """Train with torch, eagerly."""
    import torch

    torch.set_num_threads(1)
    X, y = torch.tensor(data.X), torch.tensor(data.y)

    def way(steps: int) -> float:
        theta = [torch.tensor(a, requires_grad=True) for a in (model.W, model.U)]
        for _ in range(steps):
            A = torch.softmax((X[:, None] @ theta[0]) @ X[:, None].mT, -1)
            F = ((A @ X[:, None]) * theta[1]).sum((1, 2, 3)) / H**0.5
            value = torch.nn.functional.softplus(-y * F).mean()
            for a, g in zip(theta, torch.autograd.grad(value, theta), strict=True):
                a.data -= LR * g
        return float(value.detach())

    return way


def measure(dtype: str, steps: int, rounds: int) -> dict[str, float]:
    """Return microseconds a step of every way."""
    rng = np.random.default_rng(0)
    W, U = (0.3 * rng.standard_normal((H, rows, D)).astype(dtype) for rows in (D, T))
    model = mh.Classifier(W.astype(dtype), U.astype(dtype))
    y = rng.choice([-1, 1], N).astype(dtype)
    data = mh.Dataset(rng.standard_normal((N, T, D)).astype(dtype), y)
    ways = {
        "by name": own(model, data, "logistic"),
        "NumPy": own(model, data, logistic),
        "jax.jit": own(model, data, jax_logistic()),
        "numba": own(model, data, compiled_logistic()),
        "all in jax": by_jax(model, data),
        "all in torch": by_torch(model, data),
    }
    losses = [way(steps) for way in ways.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way(steps)
            times[name].append((time.process_time() - start) / steps * 1e6)
    return {name: float(np.quantile(taken, 0.1)) for name, taken in times.items()}


def main() -> None:
    """Print a table for both dtypes."""
    parser = argparse.ArgumentParser(description="Own losses beside losses by name.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="where to write the numbers")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    import jax

    jax.config.update("jax_enable_x64", True)
    results = {
        kind: measure(kind, options.steps, options.rounds) for kind in ("float32", "float64")
    }
    for kind, times in results.items():
        print(f"{kind}: microseconds a step, and times the loss by name")
        for name, taken in times.items():
            print(f"  {name:12} {taken:8.0f}  {taken / times['by name']:.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
