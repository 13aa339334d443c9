"""Derivatives of outputs and of their gradients along a direction, for second derivatives.

Every line of `mhfast.reference.gradients` is differentiated along a direction, in which parameters,
tokens X and external query rows Z may change together (a dot stands for the derivative along it):

    Ṡ = scale (Ż W Xᵀ + Z Ẇ Xᵀ + Z W Ẋᵀ)         Ȧ = A∘(Ṡ - rowsum(A∘Ṡ))
    Ẏ = Ȧ X + A Ẋ                                 the attended rows, from which Ḟ is linear
    Ċ = Ḃ Xᵀ + B Ẋᵀ                               B from the cotangent G, which is a constant
    Ḋ = A∘(E - rowsum(A∘E)),  E = a∘c + Ċ         a, c: Ṡ and C centred by row

as in `mhfast.reference.hessian`, whose differences keep their relative accuracy in saturation.
Along two directions, one after the other, the weights move as D does with the second Ṡ for C. The
computation is in NumPy, in float64, for a few samples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.attention import read_out, weights
from ..reference.gradients import (
    cotangent_of_attended,
    logit_gradient,
    matrix_gradient,
    query_gradient,
    readout_gradient,
    weights_tangent,
)
from ..reference.hessian import derivative_tangent_of_rows
from ..reference.model import Array, Inputs, Model, double, inputs
from ..reference.runs import over_runs

BLOCK_BYTES = 32e6
"""The bytes that the arrays of weights of the samples computed together may occupy."""

ARRAYS = 12  # of the size of the weights that are alive at once


def directional(
    model: Any,
    X: npt.ArrayLike,
    tangent: Mapping[str, npt.ArrayLike],
    cotangent: npt.ArrayLike | None = None,
    *,
    query: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Compute the derivatives of the outputs and of the gradients along a direction.

    Parameters
    ----------
    model : Classifier or Layer
        With a dense W.
    X : array (n, T, d)
    tangent : dict of arrays by name
        The direction: arrays of the shapes of W, U or V, prompt, X and query; others are constants.
    cotangent : array of the shape of the outputs, optional
        The G of the gradients of Σ G · model(X), a constant.
    query, lengths
        As for a call of the model.

    Returns
    -------
    outputs : float64 array of the shape of the outputs
    gradients : dict of float64 arrays
        The derivatives of the gradients by W, U or V, prompt, X and query; empty without a
        cotangent. With a run axis in any argument everything has it.
    """
    return _directional(model, X, dict(tangent), cotangent, query=query, lengths=lengths)


@over_runs
def _directional(
    model: Any,
    X: npt.ArrayLike,
    tangent: Mapping[str, npt.ArrayLike],
    cotangent: npt.ArrayLike | None,
    *,
    query: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
) -> tuple[Array, dict[str, Array]]:
    model = Model.of(model)
    data = inputs(model, X, query, lengths)
    moving, dX, dZ = _direction(model, data, tangent)
    G = None if cotangent is None else double(cotangent)
    outputs: list[Array] = []
    summed: dict[str, Array] = {}
    by_sample: dict[str, list[Array]] = {"X": [], "query": []}
    for part, some in _blocks(model, data):
        found, gradients = _of_samples(
            model, moving, some, dX[part], dZ[part], None if G is None else G[part]
        )
        outputs.append(found)
        for name, array in gradients.items():
            if name in by_sample:
                by_sample[name].append(array)
            else:
                summed[name] = summed[name] + array if name in summed else array
    joined = {name: np.concatenate(arrays) for name, arrays in by_sample.items() if arrays}
    return np.concatenate(outputs), summed | joined


def second(
    model: Any,
    X: npt.ArrayLike,
    tangent: Mapping[str, npt.ArrayLike],
    then: Mapping[str, npt.ArrayLike],
    *,
    query: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
) -> Array:
    """Compute the second derivatives of the outputs, along one direction and then another.

    Parameters
    ----------
    model, X, tangent, query, lengths
        As for `directional`.
    then : dict of arrays by name
        The other direction.

    Returns
    -------
    float64 array of the shape of the outputs
    """
    return _second(model, X, dict(tangent), then=dict(then), query=query, lengths=lengths)


@over_runs
def _second(
    model: Any,
    X: npt.ArrayLike,
    tangent: Mapping[str, npt.ArrayLike],
    *,
    then: Mapping[str, npt.ArrayLike],
    query: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
) -> Array:
    model = Model.of(model)
    data = inputs(model, X, query, lengths)
    (one, dX, dZ), (other, eX, eZ) = (_direction(model, data, t) for t in (tangent, then))
    return np.concatenate(
        [
            _twice(model, some, (one, dX[part], dZ[part]), (other, eX[part], eZ[part]))
            for part, some in _blocks(model, data)
        ]
    )


def _blocks(model: Model, data: Inputs) -> Iterator[tuple[slice, Inputs]]:
    """Yield the samples that are computed together, and which they are."""
    n, q = data.visible.shape[:2]
    of_sample = 8.0 * ARRAYS * len(model.dense()) * q * max(data.X.shape[1], 1)
    step = max(1, int(BLOCK_BYTES / of_sample))
    for first in range(0, max(n, 1), step):
        part = slice(first, first + step)
        yield (
            part,
            Inputs(
                data.X[part], data.Z[part], data.visible[part], None,
                None if data.place is None else data.place[part],
            ),
        )  # fmt: skip


def _direction(
    model: Model, data: Inputs, tangent: Mapping[str, npt.ArrayLike]
) -> tuple[Model, Array, Array]:
    """Return how the parameters move, as a model, and the tangents of X and Z."""
    along = {name: double(array) for name, array in tangent.items()}
    moved: dict[str, Any] = {
        name: along.get(name, np.zeros_like(array)) for name, array in model.parameters().items()
    }
    moving = replace(model, **moved)
    return moving, *_moving_inputs(model, moving, data, along)


def _moving_inputs(
    model: Model, moving: Model, data: Inputs, along: Mapping[str, Array]
) -> tuple[Array, Array]:
    """Return the tangents of X and Z, 0 where tokens are never seen."""
    dX = np.zeros_like(data.X)
    if "X" in along:
        seen = np.asarray(data.visible.any(axis=1))
        dX = np.where(seen[..., None], along["X"], 0.0)
    if model.prompt is not None and moving.prompt is not None:
        return dX, np.broadcast_to(moving.prompt, data.Z.shape)
    if data.place is not None:
        rows = np.equal(data.place[..., None], np.arange(data.X.shape[1]))
        return dX, np.einsum("nqt,ntd->nqd", rows * 1.0, dX)
    return dX, along.get("query", np.zeros_like(data.Z))


def _of_samples(
    model: Model, moving: Model, data: Inputs, dX: Array, dZ: Array, G: Array | None
) -> tuple[Array, dict[str, Array]]:
    X, Z, W, dW, scale = data.X, data.Z, model.dense(), moving.dense(), model.scale
    A = weights(model, data)
    P = np.einsum("nqd,hde->nhqe", Z, W)
    dP = np.einsum("nqd,hde->nhqe", Z, dW) + np.einsum("nqd,hde->nhqe", dZ, W)
    dS = scale * (np.einsum("nhqe,nte->nhqt", dP, X) + np.einsum("nhqe,nte->nhqt", P, dX))
    dA = weights_tangent(model, data, A, dS)
    dF = read_out(model, X, dA) + read_out(model, dX, A) + read_out(moving, X, A)
    if G is None:
        return dF, {}
    B, dB = cotangent_of_attended(model, G), cotangent_of_attended(moving, G)
    C, dC = logit_gradient(X, B), logit_gradient(X, dB) + logit_gradient(dX, B)
    D = weights_tangent(model, data, A, C)
    dD = derivative_tangent_of_rows(model, data, A, dS, C, dC)

    by_W = (
        matrix_gradient(scale, dZ, D, X)
        + matrix_gradient(scale, Z, dD, X)
        + matrix_gradient(scale, Z, D, dX)
    )
    by_Z = (
        query_gradient(scale, dD, X, W)
        + query_gradient(scale, D, dX, W)
        + query_gradient(scale, D, X, dW)
    )
    by_keys = np.einsum("nhqt,nhqd->ntd", dA, B) + np.einsum("nhqt,nhqd->ntd", A, dB)
    by_keys += scale * (np.einsum("nhqt,nhqd->ntd", dD, P) + np.einsum("nhqt,nhqd->ntd", D, dP))
    if data.place is not None:
        rows = np.equal(data.place[..., None], np.arange(X.shape[1]))
        by_keys += np.einsum("nqt,nqd->ntd", rows * 1.0, by_Z)
    name, _ = next(iter(readout_gradient(model, A, X, G).items()))
    readout = readout_gradient(model, dA, X, G)[name] + readout_gradient(model, A, dX, G)[name]
    found = {"W": by_W, name: readout, "X": by_keys}
    if model.prompt is not None:
        return dF, found | {"prompt": by_Z.sum(axis=0)}
    return dF, found | ({} if data.place is not None else {"query": by_Z})


def _twice(
    model: Model,
    data: Inputs,
    one: tuple[Model, Array, Array],
    other: tuple[Model, Array, Array],
) -> Array:
    """Return the outputs' derivative along one direction and then another."""
    (d, dX, dZ), (e, eX, eZ) = one, other
    X, Z, W, dW, eW = data.X, data.Z, model.dense(), d.dense(), e.dense()
    A = weights(model, data)

    def projected(*pairs: tuple[Array, Array]) -> Array:
        return sum((np.einsum("nqd,hde->nhqe", rows, M) for rows, M in pairs), np.zeros(()))

    P, dP, eP = projected((Z, W)), projected((dZ, W), (Z, dW)), projected((eZ, W), (Z, eW))
    dS = model.scale * (logit_gradient(X, dP) + logit_gradient(dX, P))
    eS = model.scale * (logit_gradient(X, eP) + logit_gradient(eX, P))
    both = projected((dZ, eW), (eZ, dW))
    deS = model.scale * (logit_gradient(X, both) + logit_gradient(eX, dP) + logit_gradient(dX, eP))
    dA, eA = weights_tangent(model, data, A, dS), weights_tangent(model, data, A, eS)
    deA = derivative_tangent_of_rows(model, data, A, dS, eS, deS)
    by_weights = read_out(model, X, deA) + read_out(model, eX, dA) + read_out(model, dX, eA)
    by_d = read_out(d, X, eA) + read_out(d, eX, A)
    by_e = read_out(e, X, dA) + read_out(e, dX, A)
    moved: Array = by_weights + by_d + by_e
    return moved
