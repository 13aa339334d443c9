"""The operations of the map over `written` and `natural`: what all libraries have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ..cells import CellProblem
from ..problem import Array
from ..shapes import LONG
from . import natural, second_order
from .natural import Data, Library, Tensor, Theta
from .recorded import Step, recorded
from .written import Form, Written, upstream_of_loss

Found: TypeAlias = dict[str, Tensor]

# Bytes of attention weights of a chunk of samples: they and their like should stay in a cache.
CHUNK = 2**19

# Rows of queries in a tile.
TILE = 64

# Operations that need nothing but outputs or weights.
VALUES = ("forward", "attention", "predict-torch", "predict-jax", "predict-sklearn")

# Operations whose results are, sample by sample, joined or added.
BY_SAMPLES = ("forward", "gradient", "backward", "step", "predict")
OF_SAMPLES = ("X", "y", "query", "real", "share", "groups")
JOINED = ("outputs", "weights", "X", "query")

# Records that need the attention weights.
OF_WEIGHTS = ("attention", "attention_max", "attention_groups")


@dataclass(frozen=True)
class Extra:
    """Further operands: a tangent and a direction of the parameters, and those at the start."""

    tangent: Theta
    direction: Theta
    start: Theta


# One evaluation: (theta, data, extra) to named results.  A step gives "loss", the gradients by
# name, and "record" if it has one.
Function: TypeAlias = Callable[[Theta, Data, Extra], Found]


def inputs(problem: CellProblem) -> tuple[dict[str, Array], Data, Extra]:
    """Return all operands as NumPy arrays."""
    n, T = problem.X.shape[-3:-1]
    rows = problem.theta.get("prompt", problem.X).shape[-2]
    if problem.query is not None:
        rows = problem.query.shape[-2]
    dtype, lengths = problem.X.dtype, problem.lengths
    hidden, real, places = None, None, None
    if lengths is not None:
        inside = np.arange(T) < lengths[:, None]
        hidden = np.where(inside, 0.0, -np.inf)[:, None].astype(dtype)
        if problem.query is None and "prompt" not in problem.theta and not problem.last:
            real = inside[:, :, None].astype(dtype)
    if problem.last:
        rows = 1
        places = np.arange(n), np.full(n, T - 1) if lengths is None else lengths - 1
    elif problem.kind.causal:
        hidden = np.where(np.tri(rows, T, dtype=bool), 0.0, -np.inf)[None].astype(dtype)
    seen = np.ones((n, rows, 1), dtype) if real is None else real
    y = problem.cotangent if problem.cell.operation == "backward" else problem.y
    data = Data(
        problem.X, y, n, problem.query, hidden, real, places,
        share=seen / seen.sum(), groups=np.eye(2, dtype=dtype)[problem.groups],
    )  # fmt: skip
    return problem.theta, data, Extra(problem.tangent, problem.direction, problem.theta)


def forms(problem: CellProblem) -> list[Form]:
    """Return the forms that may be the fastest for a problem."""
    operation, kind = problem.cell.operation, problem.kind
    T = problem.X.shape[-2]
    if operation == "hvp":
        return [Form("queries first")]
    if operation == "ntk":
        return [Form("pairs of rows"), *([Form("by samples")] if kind.readout == "U" else [])]
    found = [Form("queries first")]
    heads = kind.readout == "V" or kind.W in ("low rank", "tied")
    by_heads = ["by heads", "by heads, V multiplied"] if kind.factors else ["by heads"]
    if heads:
        found += map(Form, by_heads)
    if T < LONG:
        found.append(Form("keys first"))
    whole_weights = operation == "attention" or problem.record in OF_WEIGHTS
    if T >= LONG and not problem.last and not whole_weights and "prompt" not in problem.theta:
        found.append(Form("queries first", TILE))
        if heads and kind.readout == "V":
            found += [Form(name, TILE) for name in by_heads]
    return found


def chunk(problem: CellProblem) -> int | None:
    """Return how many samples at a time keep the weights in a cache; None: all, or no chunks."""
    if problem.X.ndim > 3 or not problem.cell.operation.startswith(BY_SAMPLES):
        return None
    n, T, _ = problem.X.shape
    H = next(problem.theta[name] for name in "UVA" if name in problem.theta).shape[0]
    rows = problem.y.shape[1] if problem.y.ndim > 1 else problem.theta["U"].shape[-2]
    size = max(1, CHUNK // (T * H * rows * problem.X.itemsize))
    return size if size < n else None


def written(library: Library, problem: CellProblem, form: Form) -> Function:
    """Return an operation with derivatives written out; a step without its record."""
    operation, kind, wrt = problem.cell.operation, problem.kind, problem.wrt
    if operation == "hvp":
        return lambda theta, data, extra: second_order.hessian_product(
            library, theta, data, extra.tangent
        )
    if operation == "ntk":
        gram = form.name == "pairs of rows"
        return lambda theta, data, _extra: {
            "kernel": second_order.tangent_kernel(library, theta, data, gram=gram)
        }
    model = Written(library, form, kind.causal, wrt)
    if operation == "attention":
        return lambda theta, data, _extra: {"weights": model.attention(theta, data)}
    if operation in VALUES:
        return lambda theta, data, _extra: {"outputs": model.forward(theta, data)[0]}
    upstream = upstream_of_loss(library, kind.readout == "U")
    if operation == "backward":
        return lambda theta, data, _extra: model.passed(theta, data, _given).gradients

    def gradient(theta: Theta, data: Data, _extra: Extra) -> Found:
        passed = model.passed(theta, data, upstream)
        return passed.gradients | kept(problem, passed.loss, passed.outputs, passed.A)

    return gradient


def _given(_outputs: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """Take the place of a loss: the targets are its derivative."""
    return 0.0, data.y


def kept(problem: CellProblem, loss: Tensor, outputs: Tensor, A: Tensor) -> Found:
    """Return the loss, and what the record of a step needs."""
    found = {"loss": loss}
    if problem.record in OF_WEIGHTS:
        found["weights"] = A
    elif problem.record in ("accuracy", "margin"):
        found["outputs"] = outputs
    return found


def with_record(library: Library, problem: CellProblem, function: Function) -> Function:
    """Return a step with its record, by name, in place of what it is computed from."""
    name = problem.record
    if name is None:
        return function

    def step(theta: Theta, data: Data, extra: Extra) -> Found:
        found = function(theta, data, extra)
        gradients = {key: found[key] for key in theta}
        state = Step(theta, extra.start, gradients, found.get("outputs"), found.get("weights"))
        record = recorded(library, name, state, data, extra.direction)
        return gradients | {"loss": found["loss"], "record": record}

    return step


def in_chunks(library: Library, function: Function, size: int) -> Function:
    """Take `size` samples at a time; results of samples are joined, others added."""

    def chunked(theta: Theta, data: Data, extra: Extra) -> Found:
        parts = [function(theta, part, extra) for part in split(data, size)]
        return {
            name: library.concatenate([part[name] for part in parts], 0)
            if name in JOINED
            else sum((part[name] for part in parts[1:]), parts[0][name])
            for name in parts[0]
        }

    return chunked


def split(data: Data, size: int) -> list[Data]:
    """Return the data of `size` samples each; the last may have fewer."""
    n = data.X.shape[0]
    found = []
    for first in range(0, n, size):
        some = slice(first, min(first + size, n))
        arrays = {name: getattr(data, name) for name in OF_SAMPLES}
        changes = {name: a[some] for name, a in arrays.items() if a is not None}
        hidden = data.hidden
        if hidden is not None and hidden.shape[0] == n:
            hidden = hidden[some]
        places = data.places
        if places is not None:
            places = places[0][: some.stop - first], places[1][some]
        found.append(replace(data, **changes, hidden=hidden, places=places))
    return found


def natural_loss(
    library: Library,
    problem: CellProblem,
    variables: Theta,
    data: Data,
    outputs_of: Callable[[Theta, Data], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Found]:
    """Return the loss (of backward: Σ cotangent · outputs) and what a record needs.

    `variables` are the parameters and, where they are differentiated by, "X" and "query".
    `outputs_of` returns outputs and weights, by default `natural.outputs`.
    """
    theta = {name: array for name, array in variables.items() if name not in ("X", "query")}
    X, query = variables.get("X", data.X), variables.get("query", data.query)
    data = replace(data, X=X, query=query)
    outputs, A = outputs_of(theta, data) if outputs_of else natural.outputs(library, theta, data)
    if problem.cell.operation == "backward":
        return (outputs * data.y).sum(), {}
    loss = natural.loss(library, theta, data, outputs)
    return loss.sum(), kept(problem, loss, outputs, A)


def natural_values(library: Library, problem: CellProblem) -> Function:
    """Return an operation without derivatives, as a user writes it."""
    if problem.cell.operation == "attention":
        return lambda theta, data, _extra: {"weights": natural.attention(library, theta, data)}
    return lambda theta, data, _extra: {"outputs": natural.outputs(library, theta, data)[0]}
