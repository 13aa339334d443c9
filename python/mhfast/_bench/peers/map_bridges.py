"""Predictions of mhfast through its bridges to other libraries, with inputs of that library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ... import Classifier
from ..cells import CellProblem
from ..problem import Array
from . import Formulation
from .map_own import model_of


def torch(problem: CellProblem, threads: int) -> Formulation:
    """`mhfast.interop.torch`, without gradients; runs are an axis of the tensors."""
    import torch as library

    from ...interop import torch as bridge

    function, X, theta, options = _function(problem, bridge, library.from_numpy)
    library.set_num_threads(threads)

    def run() -> Any:
        with library.no_grad():
            return function(X, *_multiplied(problem, theta), **options, num_threads=threads)

    return Formulation("interop.torch", run, _outputs)


def jax(problem: CellProblem, threads: int) -> Formulation:
    """`mhfast.interop.jax` under jit; runs are mapped over."""
    import jax as library

    from ...interop import jax as bridge
    from .jax_config import configure

    configure()
    function, X, theta, options = _function(problem, bridge, library.device_put)
    prompt = options.pop("prompt")

    def call(X: Any, theta: Any, prompt: Any) -> Any:
        W, readout = _multiplied(problem, theta)
        return function(X, W, readout, prompt=prompt, **options, num_threads=threads)

    if problem.sizes.runs:
        call = library.vmap(call)
    compiled = library.jit(call)

    def run() -> Any:
        return library.block_until_ready(compiled(X, theta, prompt))

    return Formulation("interop.jax", run, _outputs)


def sklearn(problem: CellProblem, threads: int) -> Formulation:
    """`mhfast.interop.sklearn`: the class of each sample."""
    from ...interop.sklearn import MultiHeadClassifier

    labels = np.arange(len(problem.X)) % 2
    estimator = MultiHeadClassifier(
        heads=len(problem.theta["W"]), steps=0, start="zeros", dtype=problem.cell.dtype,
        query=-1 if problem.last else None, num_threads=threads,
    ).fit(problem.X, labels)  # fmt: skip
    model = model_of(problem)
    assert isinstance(model, Classifier)
    estimator.model_ = model

    def answer(_: Any) -> dict[str, Array]:
        return {"outputs": estimator.decision_function(problem.X)}

    return Formulation("interop.sklearn", lambda: estimator.predict(problem.X), answer)


def _function(
    problem: CellProblem, bridge: Any, convert: Callable[[Array], Any]
) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Return the function of a bridge, X, the parameters by name, and its options."""
    theta = {name: convert(array) for name, array in problem.theta.items()}
    options = {
        "query": -1 if problem.last else None,
        "prompt": theta.pop("prompt", None),
        "causal": problem.kind.causal,
        "lengths": problem.lengths,
    }
    function = bridge.classifier if problem.kind.readout == "U" else bridge.layer
    return function, convert(problem.X), theta, options


def _multiplied(problem: CellProblem, theta: dict[str, Any]) -> tuple[Any, Any]:
    """Return W and the readout; products of factors, because the bridges have dense ones only."""
    W = theta.get("W")
    if "Q" in theta:
        W = theta["Q"] @ theta.get("K", theta["Q"]).swapaxes(-1, -2)
    readout = theta["A"] @ theta["B"] if problem.kind.factors else theta[problem.kind.readout]
    return W, readout


def _outputs(found: Any) -> dict[str, Array]:
    return {"outputs": np.asarray(found)}
