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
from .._arguments.sample_checks import rows_of
from .._arguments.values import Array, Value
from ..dataset.dataset import Dataset, no_second_source
from ..dataset.words import Tokens
from ..models import Model
from ..models import problem as arguments
from ..models.problem import CoreGradients, CoreProblem, CoreWords
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
        words=wrt is None or not _of_inputs(wrt),
        embedding=wrt is not None and "embedding" in _names(wrt),
    )  # fmt: skip
    tokens = None if wrt is None else _tokens(X, wrt)
    result = _differentiated(model, problem, of_loss, wrt, num_threads, tokens)
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
        words=wrt is None or not _of_inputs(wrt),
        embedding=wrt is not None and "embedding" in _names(wrt),
    )  # fmt: skip
    tokens = None if wrt is None else _tokens(X, wrt)
    _, gradients = _differentiated(model, problem, LOSSES["cotangent"], wrt, num_threads, tokens)
    return gradients


def _check_model(model: object) -> None:
    if not isinstance(model, Model):
        raise TypeError(
            f"model: expected a Classifier, a Layer or a Stack, got {type(model).__name__}"
        )


def _names(wrt: object) -> Sequence[object]:
    if isinstance(wrt, tuple):  # at once: the check below takes half a microsecond
        return wrt
    return wrt if isinstance(wrt, Sequence) and not isinstance(wrt, str) else (wrt,)


def _of_inputs(wrt: object) -> bool:
    """Return whether X or a query is among the requested gradients."""
    names = _names(wrt)
    return "X" in names or "query" in names


def _tokens(X: npt.ArrayLike | Dataset, wrt: object) -> Tokens | None:
    """Return the tokens by whose embedding to differentiate, or None."""
    if "embedding" not in _names(wrt):
        return None
    given = X._given if isinstance(X, Dataset) else X
    if not isinstance(given, Tokens):
        raise ValueError(
            "wrt: expected Tokens to differentiate by their embedding, got "
            f"{'an array' if isinstance(given, np.ndarray) else type(given).__name__}"
        )
    return given


def _differentiated(
    model: Model,
    problem: CoreProblem,
    loss: _core.Loss,
    wrt: Wrt,
    num_threads: int | None,
    tokens: Tokens | None = None,
) -> tuple[Value, Gradients]:
    """Return loss and gradients; `tokens` if their embedding is in `wrt`."""
    core = model._core
    names: tuple[str, ...] = ()
    if wrt is None:
        bits = core.bits
    else:
        names = asked = arguments.wrt(model, wrt, inputs=True)
        if tokens is not None and not isinstance(problem.data[0], CoreWords):
            asked = (*(name for name in names if name not in ("X", "embedding")), "X")
        bits = _bits(problem, asked)
    if core.row_map_name == "hardmax":
        arguments.differentiable(model, bits)
    value, gradients = _core.value_and_grad(
        problem.data, core.parameters, problem.runs.length, model.scale, problem.causal,
        core.row_map, loss, bits, config.threads(num_threads),
    )  # fmt: skip
    if problem.token is not None and bits & BITS["X"]:
        gradients = _gathered(gradients, problem.token)
    if tokens is not None and bits & BITS["X"]:
        *by_parameters, _, by_X, by_query = gradients
        assert by_X is not None
        by_words = summed_by_word(by_X, tokens)
        gradients = (*by_parameters, by_words, by_X if "X" in names else None, by_query)
    return value, Gradients._of_core(gradients)


def _bits(problem: CoreProblem, names: tuple[str, ...]) -> int:
    if "query" in names and (problem.token is not None or problem.data[1] is None):
        raise ValueError("wrt: expected an external query to differentiate by, got none")
    if "X" in names and problem.token is not None:  # the core treats the token as an external query
        names = (*names, "query")
    return arguments.bits(names)


def summed_by_word(by_X: Array, tokens: Tokens) -> Array:
    """Return the gradient by the embedding (V, d), or (R, V, d), from that by the tokens."""
    of_runs = by_X.reshape(-1, *by_X.shape[-3:])
    ids = np.broadcast_to(tokens.ids, of_runs.shape[:-1])
    total = np.zeros((len(of_runs), *tokens.embedding.shape[-2:]))
    for run, words, g in zip(total, ids, of_runs, strict=True):
        np.add.at(run, words.ravel(), g.reshape(-1, g.shape[-1]))
    return total.reshape(*by_X.shape[:-3], *total.shape[1:]).astype(by_X.dtype)


def _gathered(gradients: CoreGradients, token: int | npt.NDArray[np.int64]) -> CoreGradients:
    """Add the gradient of the query token to the gradient of X, at the position of that token."""
    *by_parameters, by_X, by_query = gradients
    assert by_X is not None
    assert by_query is not None
    if isinstance(token, int):
        by_X[..., token, :] += by_query[..., 0, :]
    else:
        rows, known = rows_of(np.broadcast_to(token, by_X.shape[:-2]), by_X.shape[-2])
        flat, of_tokens = by_X.reshape(-1, by_X.shape[-1]), known.ravel()
        flat[rows[of_tokens]] += by_query[known][:, 0]
    return (*by_parameters, by_X, None)
