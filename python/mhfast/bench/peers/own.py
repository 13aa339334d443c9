"""mhfast itself, through the calls that a user makes."""

from __future__ import annotations

from ... import Classifier, GradientDescent, Gradients, Run, train, value_and_grad
from ..problem import Answer, Array, Problem
from ..shapes import Loop
from . import Formulation


def gradients(problem: Problem, threads: int) -> list[Formulation]:
    """`mhfast.value_and_grad`."""
    model = Classifier(problem.W, problem.U)
    X, y = problem.X, problem.y

    def run() -> tuple[float, Gradients]:
        return value_and_grad(model, X, y, num_threads=threads)

    def answer(result: tuple[float, Gradients]) -> Answer:
        loss, found = result
        return Answer(loss, _present(found.W), _present(found.U))

    return [Formulation("value_and_grad", run, answer)]


def training(problem: Problem, loop: Loop, threads: int) -> list[Formulation]:
    """`mhfast.train`, recording the loss at every step."""
    model = Classifier(problem.W, problem.U)
    optimizer = GradientDescent(loop.lr)
    X, y, steps = problem.X, problem.y, loop.steps

    def run() -> Run:
        return train(model, X, y, steps=steps, optimizer=optimizer, num_threads=threads)

    def answer(result: Run) -> Answer:
        # The peers stop before evaluating the loss at the end point.
        before_last_step = float(result.history["loss"][-2])
        return Answer(before_last_step, result.model.W, result.model.U)

    return [Formulation("train", run, answer)]


def _present(array: Array | None) -> Array:
    assert array is not None
    return array
