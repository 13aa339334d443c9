"""Trainings of the model family: right by the reference, and timed. Run: pytest benchmarks."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest

import mhfast as mh
from mhfast._bench import families
from mhfast._bench.environment import available_cores
from mhfast._bench.families import FAMILIES, Training
from mhfast._bench.peers import PEERS, family_formulations
from mhfast._bench.problem import Answer, difference

# The reference takes one run after the other, and a few steps show what is wrong with one.
STEPS = 3

# Three steps add less than one gradient's rounding each, relative to the largest parameter.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

CASES = [(name, dtype) for name, training in FAMILIES.items() for dtype in training.dtypes]


@lru_cache
def reference(training: Training, dtype: str) -> Answer:
    """Losses before the last step and trained parameters, float64 from the values of the dtype."""
    problem = families.draw(training, dtype)
    classifier = training.model == "classifier"
    rule = mh.NormalizedGradientDescent if training.normalized else mh.GradientDescent
    kind, loss = (mh.Classifier, "logistic") if classifier else (mh.Layer, "squared")
    trained, history = mh.reference.train(
        kind(problem.W, problem.readout, -1 if training.last else None), problem.X, problem.y,
        steps=training.steps, optimizer=rule(training.lr), loss=loss,
    )  # fmt: skip
    return Answer(history["loss"][..., -2], trained.W, trained.U if classifier else trained.V)


@pytest.mark.parametrize("key", ["mhfast", "numpy"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_family(benchmark, name, dtype, key):
    training = dataclasses.replace(FAMILIES[name], steps=STEPS)
    benchmark.group = f"{training} {dtype}, {STEPS} steps"
    problem = families.draw(training, dtype)
    (formulation,) = family_formulations(PEERS[key], problem, training, len(available_cores()))
    answer = formulation.answer(benchmark(formulation.run))
    assert difference(answer, reference(training, dtype)) < TOLERANCE[dtype]
