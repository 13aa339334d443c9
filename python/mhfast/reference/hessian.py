"""Hessian-vector products of the loss, by the exact formula.

Every line of `gradients` is differentiated along the direction (forward over backward), where a
dot stands for the derivative along it:

    Ṡ_ih = scale (Z_i Ẇ_h X_iᵀ + Ż_i W_h X_iᵀ)     Ȧ = A∘(Ṡ - rowsum(A∘Ṡ))
    Ġ = ℓ''(F) Ḟ                                   D = A∘(C - rowsum(A∘C))
    Ḃ = B(Ġ, U) + B(G, U̇)                          Ċ = Ḃ Xᵀ

and, with centred scores a = Ṡ - rowsum(A∘Ṡ), b = C - rowsum(A∘C) and E = a∘b + Ċ,

    Ḋ = A∘(E - rowsum(A∘E)).

All three differences are computed as `softmax_tangent`, so the product keeps its relative accuracy
in saturation too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .attention import of_entries, read_out, scores, softmax, weights
from .gradients import (
    Gradient,
    Wrt,
    asked,
    centre,
    cotangent_of_attended,
    logit_gradient,
    matrix_gradient,
    query_gradient,
    readout_gradient,
    softmax_tangent,
    through_factors,
    through_values,
    weights_tangent,
)
from .losses import Loss, derivative_tangent, loss_terms, loss_weights, real_targets
from .model import Array, Inputs, Model, Query, inputs
from .row_maps import ENTRIES, with_zero
from .runs import named_parts, over_runs


def hvp(model: Any, X: ArrayLike, y: ArrayLike, tangent: Any, **options: Any) -> Gradient:
    """Hessian of the loss of `value_and_grad` times `tangent`, by name of the parameter.

    tangent: a dict, or a record such as `Gradients`, of arrays shaped like parameters; those that
    are missing or None are zero.  `options`: loss, wrt (parameters for which the product is
    computed), query, weight, lengths.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=1.0, seed=0)
    >>> v = mh.value_and_grad(model, data)[1]
    >>> Hv = mh.reference.hvp(model, data.X, data.y, v)
    >>> bool(np.allclose(Hv["W"], mh.hvp(model, data, tangent=v).W))
    True
    """
    return _hvp(model, X, y, named_parts(tangent), **options)


@over_runs
def _hvp(
    model: Any,
    X: ArrayLike,
    y: ArrayLike,
    tangent: Mapping[str, ArrayLike],
    *,
    loss: Loss = "logistic",
    wrt: Wrt = None,
    query: Query = None,
    weight: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
) -> Gradient:
    model = Model.of(model)
    data = inputs(model, X, query, lengths)
    moving = model.moving(tangent)
    X, Z, W, dW = data.X, data.Z, model.dense(), _dense_tangent(model, moving)
    dZ = np.zeros_like(Z) if moving.prompt is None else np.broadcast_to(moving.prompt, Z.shape)

    A = weights(model, data)
    ZW = np.einsum("nqd,hde->nhqe", Z, dW) + np.einsum("nqd,hde->nhqe", dZ, W)
    dS = model.scale * np.einsum("nhqe,nte->nhqt", ZW, X)
    dA = weights_tangent(model, data, A, dS)

    F = read_out(model, X, A)
    moving_readout = replace(model, A=None, B=None, V=_value_tangent(model, moving))
    moving_readout = moving if model.A is None else moving_readout
    dF = read_out(model, X, dA) + read_out(moving_readout, X, A)
    loss_weight, target = loss_weights(data, F, weight, loss), real_targets(data, y)
    G = loss_weight * loss_terms(F, target, loss)[1]
    dG = loss_weight * derivative_tangent(F, target, dF, loss)

    C = logit_gradient(X, cotangent_of_attended(model, G))
    dB = cotangent_of_attended(model, dG) + cotangent_of_attended(moving_readout, G)
    dC = logit_gradient(X, dB)
    D = weights_tangent(model, data, A, C)
    dD = derivative_tangent_of_rows(model, data, A, dS, C, dC)

    gW = matrix_gradient(model.scale, Z, D, X)
    found = through_factors(
        model, matrix_gradient(model.scale, dZ, D, X) + matrix_gradient(model.scale, Z, dD, X)
    )
    if model.Q is not None:
        found = {n: part + through_factors(moving, gW)[n] for n, part in found.items()}
    by_A, by_G = readout_gradient(model, dA, X, G), readout_gradient(model, A, X, dG)
    found |= {n: by_A[n] + by_G[n] for n in by_A}
    if model.A is not None:
        dense = readout_gradient(replace(model, A=None, B=None, V=model.readout()), A, X, G)
        moved = through_values(moving, dense["V"])
        found |= {n: found[n] + moved[n] for n in moved}
    rows = query_gradient(model.scale, dD, X, W) + query_gradient(model.scale, D, X, dW)
    found["prompt"] = rows.sum(axis=0)
    return {n: found[n] for n in asked(model, wrt, also=())}


def derivative_tangent_of_rows(
    model: Model, data: Inputs, A: Array, dS: Array, C: Array, dC: Array
) -> Array:
    """Ḋ, how D moves as the logits move by Ṡ and C by Ċ."""
    if model.attention in ENTRIES:
        by_C = of_entries(model, data, "derivative") * dC
        return of_entries(model, data, "curvature") * dS * C + by_C
    if model.attention == "softmax1":
        A, dS, C, dC = softmax(scores(model, data)), with_zero(dS), with_zero(C), with_zero(dC)
    E = centre(A, dS)[0] * centre(A, C)[0] + dC
    moved: Array = softmax_tangent(A, E)[..., -data.X.shape[1] :]
    return moved


def _value_tangent(model: Model, moving: Model) -> Array | None:
    """V̇ = Ȧ B + A Ḃ (H,d,p) of V = A B."""
    if model.A is None or model.B is None or moving.A is None or moving.B is None:
        return None
    change: Array = moving.A @ model.B + model.A @ moving.B
    return change


def _dense_tangent(model: Model, moving: Model) -> Array:
    """Ẇ (H,d,d); Q̇ Kᵀ + Q K̇ᵀ for factors."""
    if model.Q is None or moving.Q is None:
        return moving.dense()
    K = model.Q if model.K is None else model.K
    dK = moving.Q if moving.K is None else moving.K
    change: Array = np.einsum("hdr,her->hde", moving.Q, K) + np.einsum("hdr,her->hde", model.Q, dK)
    return change
