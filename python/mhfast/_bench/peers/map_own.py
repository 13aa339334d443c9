"""Cells of the map in mhfast itself, through the calls that a user makes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import (
    Classifier,
    Dataset,
    GradientDescent,
    Gradients,
    Layer,
    LowRank,
    Run,
    ValueOutput,
    backward,
    hvp,
    theory,
    train,
    value_and_grad,
)
from ..._arguments.losses import Loss
from ..cells import CellProblem
from ..problem import Array
from . import Formulation


def model_of(problem: CellProblem) -> Classifier | Layer:
    """Return the model of a problem."""
    theta = problem.theta
    W: Any = theta.get("W")
    if "Q" in theta:
        W = LowRank(theta["Q"], theta.get("K"))
    options: dict[str, Any] = {
        "query": -1 if problem.last else None,
        "prompt": theta.get("prompt"),
        "causal": problem.kind.causal,
    }
    if "U" in theta:
        return Classifier(W, theta["U"], **options)
    V: Any = ValueOutput(theta["A"], theta["B"]) if "A" in theta else theta["V"]
    return Layer(W, V, **options)


def ways(problem: CellProblem, threads: int) -> list[Formulation]:
    """Return the call that a user makes."""
    operation = problem.cell.operation
    if operation.startswith("predict"):
        module = importlib.import_module(".map_bridges", __package__)
        made: Formulation = getattr(module, operation.removeprefix("predict-"))(problem, threads)
        return [made]
    make = _loop if operation.startswith("step") else _call
    return [make(problem, threads)]


def loss_of(problem: CellProblem) -> Loss:
    """Return the loss of the model."""
    return "logistic" if problem.kind.readout == "U" else "squared"


def _call(problem: CellProblem, threads: int) -> Formulation:
    model, X, y = model_of(problem), problem.X, problem.y
    side: dict[str, Any] = {"query": problem.query, "lengths": problem.lengths}
    options = side | {"num_threads": threads}
    loss, wrt = loss_of(problem), problem.wrt

    def gradient() -> Any:
        return value_and_grad(model, X, y, loss=loss, wrt=wrt, **options)

    def of_gradient(found: Any) -> dict[str, Array]:
        value, gradients = found
        return {"loss": np.asarray(value)} | _named(gradients)

    match problem.cell.operation:
        case "forward":
            return Formulation("model(X)", lambda: model(X, **options), _as("outputs"))
        case "attention":
            weights = lambda: model.attention(X, **options)  # noqa: E731
            return Formulation("model.attention", weights, _as("weights"))
        case "backward":
            c = problem.cotangent
            return Formulation("backward", lambda: backward(model, X, c, **options), _named)
        case "hvp":
            tangent = Gradients(**problem.tangent)
            return Formulation(
                "hvp", lambda: hvp(model, X, y, tangent=tangent, loss=loss, **options), _named
            )
        case "ntk":
            data = Dataset(X, y, lengths=problem.lengths)  # arrays would be shared by runs
            return Formulation("theory.ntk", lambda: theory.ntk(model, data), _as("kernel"))
    return Formulation("value_and_grad", gradient, of_gradient)


def _as(name: str) -> Callable[[Any], dict[str, Array]]:
    return lambda found: {name: np.asarray(found)}


def _named(found: Gradients) -> dict[str, Array]:
    arrays = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {name: array for name, array in arrays.items() if array is not None}


def _loop(problem: CellProblem, threads: int) -> Formulation:
    model, name = model_of(problem), problem.record
    groups = problem.groups if name == "attention_groups" else None
    data = Dataset(problem.X, problem.y, lengths=problem.lengths, token_groups=groups)
    snapshot = "A" if problem.kind.factors else problem.kind.readout
    key = snapshot if name == "snapshot" else name
    record: Any = ("loss",) if key is None else ("loss", key)
    directions = Gradients(**problem.direction) if name == "cosine" else None
    optimizer, loss, steps = GradientDescent(problem.rate), loss_of(problem), problem.steps

    def run() -> Run[Any]:
        return train(
            model, data, steps=steps, optimizer=optimizer, loss=loss, record=record,
            directions=directions, num_threads=threads,
        )  # fmt: skip

    def answer(result: Run[Any]) -> dict[str, Array]:
        # The peers stop before evaluating anything at the end point, and have runs behind steps.
        runs = int(problem.sizes.runs > 0)
        history = {"loss": result.history["loss"]}
        if key is not None:
            history["record"] = result.history[key]
        if name == "cosine":
            history["record"] = history["record"].reshape(history["loss"].shape)
        if name == "attention_groups":  # of one group of samples
            history["record"] = history["record"][..., 0, :]
        found = {k: np.moveaxis(array, runs, 0)[:-1] for k, array in history.items()}
        parameters: dict[str, Array] = result.model.parameters
        return found | parameters

    return Formulation("train", run, answer)
