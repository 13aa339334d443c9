"""Gradients of one model, a `Classifier` or a `Layer`, by one call of the core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .. import _core, config
from .._arguments import losses
from .._arguments.checks import Wrt
from .._arguments.lists import BITS, LOSSES, OF_OUTPUTS
from .._arguments.losses import Loss
from .._arguments.own_losses import raise_error_of
from .._arguments.values import Value
from ..dataset.dataset import Dataset, no_second_source
from ..models import Model
from ..models import problem as arguments
from ..models.problem import CoreGradients, CoreProblem
from .record import Gradients


def of_loss(
    model: Model,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None,
    loss: Loss,
    wrt: Wrt,
    query: npt.ArrayLike | None,
    weight: npt.ArrayLike | None,
    lengths: npt.ArrayLike | None,
    num_threads: int | None,
) -> tuple[Value, Gradients]:
    """Return what `mhfast.value_and_grad` does."""
    _check_model(model)
    name: str
    if isinstance(loss, str) and loss in OF_OUTPUTS:
        name, of_loss = loss, LOSSES[loss]
    else:
        loss = arguments.loss(model, loss, X.y if isinstance(X, Dataset) else y)
        name, of_loss = losses.name_of(loss), losses.core(loss)
    problem = arguments.problem(
        model, X, y, loss=name, query=query, weight=weight, lengths=lengths,
        words=wrt is None or _of_parameters(wrt),
    )  # fmt: skip
    result = _differentiated(model, problem, of_loss, wrt, num_threads)
    if name == "own":
        raise_error_of(of_loss)
    return result


def of_outputs(
    model: Model,
    X: npt.ArrayLike | Dataset,
    cotangent: npt.ArrayLike,
    wrt: Wrt,
    query: npt.ArrayLike | None,
    lengths: npt.ArrayLike | None,
    num_threads: int | None,
) -> Gradients:
    """Return what `mhfast.backward` does."""
    _check_model(model)
    if cotangent is None:
        raise TypeError("cotangent: expected an array of the shape of the outputs, got None")
    if isinstance(X, Dataset):
        no_second_source(query=query, lengths=lengths)
        data = X
        X, query, lengths = data._given, data.query, data.lengths
    problem = arguments.problem(
        model, X, cotangent, loss="cotangent", query=query, lengths=lengths,
        words=wrt is None or _of_parameters(wrt),
    )  # fmt: skip
    _, gradients = _differentiated(model, problem, LOSSES["cotangent"], wrt, num_threads)
    return gradients


def _check_model(model: object) -> None:
    if not isinstance(model, Model):
        raise TypeError(
            f"model: expected a Classifier, a Layer or a Stack, got {type(model).__name__}"
        )


def _of_parameters(wrt: object) -> bool:
    """Return whether neither X nor a query is among the requested gradients."""
    if isinstance(wrt, str) or not isinstance(wrt, Sequence):
        return wrt not in ("X", "query")
    return "X" not in wrt and "query" not in wrt


def _differentiated(
    model: Model, problem: CoreProblem, loss: _core.Loss, wrt: Wrt, num_threads: int | None
) -> tuple[Value, Gradients]:
    core = model._core
    bits = core.bits if wrt is None else _bits(model, problem, wrt)
    if core.row_map_name == "hardmax":
        arguments.differentiable(model, bits)
    value, gradients = _core.value_and_grad(
        problem.data, core.parameters, problem.runs.length, model.scale, problem.causal,
        core.row_map, loss, bits, config.threads(num_threads),
    )  # fmt: skip
    if problem.token is not None and bits & BITS["X"]:
        gradients = _gathered(gradients, problem.token)
    return value, Gradients._of_core(gradients)


def _bits(model: Model, problem: CoreProblem, wrt: Wrt) -> int:
    names = arguments.wrt(model, wrt, inputs=True)
    if "query" in names and (problem.token is not None or problem.data[1] is None):
        raise ValueError("wrt: expected an external query to differentiate by, got none")
    if "X" in names and problem.token is not None:  # the core treats the token as an external query
        names = (*names, "query")
    return arguments.bits(names)


def _gathered(gradients: CoreGradients, token: int | npt.NDArray[np.int64]) -> CoreGradients:
    """Add the gradient of the query token to the gradient of X, at the position of that token."""
    *by_parameters, by_X, by_query = gradients
    assert by_X is not None
    assert by_query is not None
    place = np.broadcast_to(token, by_X.shape[:-2])[..., None, None]
    here = np.take_along_axis(by_X, np.maximum(place, 0), axis=-2)
    np.put_along_axis(
        by_X, np.maximum(place, 0), np.where(place < 0, here, here + by_query), axis=-2
    )
    return (*by_parameters, by_X, None)
