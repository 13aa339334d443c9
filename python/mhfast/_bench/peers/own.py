"""mhfast itself, through the calls that a user makes."""

from __future__ import annotations

import numpy as np

from ... import (
    Classifier,
    GradientDescent,
    Gradients,
    Layer,
    NormalizedGradientDescent,
    Run,
    train,
    value_and_grad,
)
from ..._arguments.losses import Loss
from ..._arguments.values import Value
from ..families import Trainees, Training
from ..problem import Answer, Array, BenchProblem
from ..shapes import Loop
from . import Formulation


def gradients(problem: BenchProblem, threads: int) -> list[Formulation]:
    """`mhfast.value_and_grad`."""
    model = Classifier(problem.W, problem.U)
    X, y = problem.X, problem.y

    def run() -> tuple[Value, Gradients]:
        return value_and_grad(model, X, y, num_threads=threads)

    def answer(result: tuple[Value, Gradients]) -> Answer:
        loss, found = result
        return Answer(loss, _present(found.W), _present(found.U))

    return [Formulation("value_and_grad", run, answer)]


def training(problem: BenchProblem, loop: Loop, threads: int) -> list[Formulation]:
    """`mhfast.train`, recording the loss at every step."""
    model = Classifier(problem.W, problem.U)
    optimizer = GradientDescent(loop.lr)
    X, y, steps = problem.X, problem.y, loop.steps

    def run() -> Run:
        return train(model, X, y, steps=steps, optimizer=optimizer, num_threads=threads)

    def answer(result: Run) -> Answer:
        # The peers stop before evaluating the loss at the end point.
        before_last_step = float(result.history["loss"][-2])
        return Answer(before_last_step, *_trained(result))

    return [Formulation("train", run, answer)]


def trainings(problem: Trainees, training: Training, threads: int) -> list[Formulation]:
    """`mhfast.train`, with a run axis where there is more than one run."""
    one = training.runs == 1
    X, y, W, readout = (
        array[0] if one else array for array in (problem.X, problem.y, problem.W, problem.readout)
    )
    query = -1 if training.last else None
    classifier = training.model == "classifier"
    model = Classifier(W, readout, query) if classifier else Layer(W, readout, query)
    loss: Loss = "logistic" if classifier else "squared"
    rule = NormalizedGradientDescent if training.normalized else GradientDescent
    steps, optimizer = training.steps, rule(training.lr)

    def run() -> Run:
        return train(model, X, y, steps=steps, optimizer=optimizer, loss=loss, num_threads=threads)

    def answer(result: Run) -> Answer:
        W, readout = _trained(result)
        before_last_step = np.reshape(result.history["loss"][..., -2], training.runs)
        return Answer(
            before_last_step, W.reshape(problem.W.shape), readout.reshape(problem.readout.shape)
        )

    return [Formulation("train", run, answer)]


def _trained(run: Run) -> tuple[Array, Array]:
    """Return W and the readout, U or V."""
    model = run.model
    assert isinstance(model.W, np.ndarray)
    assert isinstance(model, Classifier | Layer)
    return model.W, model.U if isinstance(model, Classifier) else model.V


def _present(array: Array | None) -> Array:
    assert array is not None
    return array
