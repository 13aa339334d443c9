"""Rows explained as averages of tokens, beside NumPy. Run: pytest benchmarks/test_learner.py."""

from __future__ import annotations

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

EXAMPLES, TOKENS, DIM, HEADS = 100_000, 3, 8, 2
STEPS = 50  # of projected gradient: what leaves 99 % of the rows within 3e-2 of their minimum


@pytest.fixture(scope="module")
def problem():
    data = mh.data.boolean_layer(EXAMPLES, TOKENS, DIM, HEADS, seed=0)
    return data.X, data.y, data.truth["layer"].V.sum(axis=0)


def test_rows(benchmark, problem):
    benchmark.group = f"{EXAMPLES * TOKENS} rows of {TOKENS} tokens"
    X, Y, V_sum = problem
    weights, left = benchmark(_core.fit_rows, X, Y, None, V_sum, TOKENS, 0)
    explained = np.einsum("rt,rtp->rp", weights, np.repeat(X @ V_sum, TOKENS, axis=0))
    assert np.abs(np.linalg.norm(Y.reshape(len(left), -1) - explained, axis=1) - left).max() < 1e-12


def test_rows_by_numpy(benchmark, problem):
    benchmark.group = f"{EXAMPLES * TOKENS} rows of {TOKENS} tokens"
    X, Y, V_sum = problem
    left = benchmark(projected_gradient, X, Y, V_sum)
    exact = _core.fit_rows(X, Y, None, V_sum, TOKENS, 0)[1]
    assert (left > exact - 1e-9).all()
    assert np.quantile(left - exact, 0.99) < 3e-2


def test_certified_rows(benchmark, problem):
    X, Y, _ = problem
    examples = mh.learner.as_examples(X, Y)
    crude = mh.learner.crude_sum(examples)
    assert len(benchmark(mh.learner.certify, examples, crude)) == 16 * DIM**2


def projected_gradient(X, Y, V_sum):
    """Residuals of all rows by projected gradient, all rows of all samples at once."""
    values = X @ V_sum
    gram = values @ values.transpose(0, 2, 1)
    inner = Y @ values.transpose(0, 2, 1)
    step = 1.0 / np.trace(gram, axis1=1, axis2=2)[:, None, None]
    p = np.full(inner.shape, 1.0 / TOKENS)
    for _ in range(STEPS):
        p = onto_simplex(p - step * (p @ gram - inner))
    return np.linalg.norm(Y - p @ values, axis=2).ravel()


def onto_simplex(v):
    """The nearest points of the simplex, by sorting."""
    falling = -np.sort(-v, axis=-1)
    excess = (np.cumsum(falling, axis=-1) - 1.0) / np.arange(1, v.shape[-1] + 1)
    taking_part = (falling > excess).sum(axis=-1, keepdims=True) - 1
    return np.maximum(v - np.take_along_axis(excess, taking_part, axis=-1), 0.0)
