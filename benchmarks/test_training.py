"""Training loops: right by the reference, and timed. Run: pytest benchmarks."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest

import mhfast as mh
from mhfast._bench.environment import available_cores
from mhfast._bench.peers import PEERS, formulations
from mhfast._bench.problem import Answer, difference, draw
from mhfast._bench.shapes import LOOPS, Loop

# The reference is slow, and a few steps show what is wrong with one.
STEPS = 3

# Three steps add less than one gradient's rounding each, relative to the largest parameter.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@lru_cache
def reference(loop: Loop, dtype: str) -> Answer:
    """Loss before the last step and trained parameters, float64 from the values of the dtype."""
    problem = draw(loop.shape, dtype)
    trained, history = mh.reference.train(
        mh.Classifier(problem.W, problem.U), problem.X, problem.y,
        steps=loop.steps, optimizer=mh.GradientDescent(loop.lr),
    )  # fmt: skip
    return Answer(history["loss"][-2], trained.W, trained.U)


@pytest.mark.parametrize("key", ["mhfast", "numpy"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: str(loop.shape))
def test_training(benchmark, loop, dtype, key):
    benchmark.group = f"{loop.shape} {dtype}, {STEPS} steps"
    loop = dataclasses.replace(loop, steps=STEPS)
    problem = draw(loop.shape, dtype)
    *_, formulation = formulations(PEERS[key], problem, loop, len(available_cores()))
    answer = formulation.answer(benchmark(formulation.run))
    assert difference(answer, reference(loop, dtype)) < TOLERANCE[dtype]
