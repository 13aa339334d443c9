"""One loss and gradient: right by the reference, and timed. Run: pytest benchmarks."""

from __future__ import annotations

from functools import lru_cache

import pytest

import mhfast as mh
from mhfast._bench.environment import available_cores
from mhfast._bench.peers import PEERS, formulations
from mhfast._bench.problem import Answer, difference, draw
from mhfast._bench.shapes import SHAPES, Shape

# Relative to the largest entry of each result: the promise of mhfast, which NumPy keeps as well.
TOLERANCE = {"float64": 1e-12, "float32": 3e-6}


@lru_cache
def reference(shape: Shape, dtype: str) -> Answer:
    """The float64 reference on the values that the dtype holds."""
    problem = draw(shape, dtype)
    model = mh.Classifier(problem.W, problem.U)
    value, gradients = mh.reference.value_and_grad(model, problem.X, problem.y)
    return Answer(value, gradients["W"], gradients["U"])


@pytest.mark.parametrize("key", ["mhfast", "numpy"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES["main"], ids=str)
def test_value_and_grad(benchmark, shape, dtype, key):
    benchmark.group = f"{shape} {dtype}"
    problem = draw(shape, dtype)
    *_, formulation = formulations(PEERS[key], problem, None, len(available_cores()))
    answer = formulation.answer(benchmark(formulation.run))
    assert difference(answer, reference(shape, dtype)) < TOLERANCE[dtype]
