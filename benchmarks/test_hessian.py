"""Products of the Hessian beside gradients and jax's jvp of grad. Run: pytest benchmarks."""

from __future__ import annotations

import numpy as np
import pytest

import mhfast as mh
from mhfast._bench.problem import draw
from mhfast._bench.shapes import Shape

SHAPE = Shape(200, 16, 32, 32)
# Relative to the largest entry: what rounding leaves of sums of a few thousand terms.
TOLERANCE = {"float64": 1e-11, "float32": 1e-4}


def problem(dtype):
    drawn = draw(SHAPE, dtype)
    model = mh.Classifier(drawn.W, drawn.U)
    return drawn, model, mh.value_and_grad(model, drawn.X, drawn.y)[1]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradient(benchmark, dtype):
    benchmark.group = f"hvp {SHAPE} {dtype}"
    drawn, model, _ = problem(dtype)
    benchmark(mh.value_and_grad, model, drawn.X, drawn.y)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_hvp(benchmark, dtype):
    benchmark.group = f"hvp {SHAPE} {dtype}"
    drawn, model, tangent = problem(dtype)
    product = benchmark(mh.hvp, model, drawn.X, drawn.y, tangent=tangent)
    want = mh.reference.hvp(model, drawn.X, drawn.y, tangent)
    for name in ("W", "U"):
        error = np.abs(getattr(product, name) - want[name]).max() / np.abs(want[name]).max()
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_jax(benchmark, dtype):
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy
    benchmark.group = f"hvp {SHAPE} {dtype}"
    drawn, model, tangent = problem(dtype)
    X, y = jnp.asarray(drawn.X), jnp.asarray(drawn.y)

    def loss(W, U):
        A = jax.nn.softmax(jnp.einsum("ntd,hde,nse->nhts", X, W, X), axis=-1)
        readouts = (A * jnp.einsum("hqd,nsd->nhqs", U, X)).sum((1, 2, 3))
        return jax.nn.softplus(-y * readouts / np.sqrt(model.heads).astype(dtype)).mean()

    product = jax.jit(lambda at, along: jax.jvp(jax.grad(loss, (0, 1)), at, along)[1])
    at = tuple(map(jnp.asarray, (model.W, model.U)))
    along = tuple(map(jnp.asarray, (tangent.W, tangent.U)))
    found = benchmark(lambda: jax.block_until_ready(product(at, along)))
    ours = mh.hvp(model, drawn.X, drawn.y, tangent=tangent)
    for got, want in zip(found, (ours.W, ours.U), strict=True):
        error = np.abs(np.asarray(got) - want).max() / np.abs(want).max()
        assert error < TOLERANCE[dtype]
