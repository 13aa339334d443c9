"""The tangent kernel of a layer, between all outputs of all rows of all samples.

With P = A_h X (n, q, d) and M[o] = D X (n, q, d) the derivative of column o of A_h X V_h by the
scores, centred as in `kernel`,

    ⟨∂F_ito/∂V_h, ∂F_jsr/∂V_h⟩ = [o = r] ⟨P_it, P_js⟩,
    ⟨∂F_ito/∂W_h, ∂F_jsr/∂W_h⟩ = scale² ⟨z_it, z_js⟩ ⟨M_ito, M_jsr⟩.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Layer
from .inputs import plain_layer, query_side


def layer_kernel(
    model: Layer,
    first: Dataset,
    second: Dataset | None,
    wrt: str | Sequence[str] | None,
) -> Array:
    """Return K (n, q, p, n2, q2, p) in float64."""
    inputs = (first,) if second is None else (first, second)
    # Samples of weight 0 keep their places.
    sides = [plain_layer(model, replace(data, weight=None), identities=True) for data in inputs]
    known = tuple(model.parameters)
    names = known if wrt is None else (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in known:
            raise ValueError(f"wrt: expected names from {', '.join(known)}, got {name!r}")
    Z = [query_side(layer, data).reshape(-1, model.dim) for layer, data in sides]
    p = model.out_dim
    rows, columns = len(Z[0]), len(Z[-1])
    K = np.zeros((rows, p, columns, p))
    alike = model.scale**2 * (Z[0] @ Z[-1].T)[:, None, :, None]
    for h in range(model.heads):
        parts = [_features(layer, data, h) for layer, data in sides]
        (pooled, moved), (pooled2, moved2) = parts[0], parts[-1]
        if "V" in names:
            together = pooled @ pooled2.T
            for o in range(p):
                K[:, o, :, o] += together
        if "W" in names:
            K += alike * np.tensordot(moved, moved2, axes=(2, 2))
    q, q2 = rows // inputs[0].n, columns // inputs[-1].n
    return K.reshape(inputs[0].n, q, p, inputs[-1].n, q2, p)


def _features(layer: Layer, data: Dataset, h: int) -> tuple[Array, Array]:
    """Return A X (n q, d) and its derivative by the scores (n q, p, d) of head h."""
    one: dict[str, Any] = {name: a[h : h + 1] for name, a in layer.parameters.items()}
    head = replace(layer, **one)
    A = head.attention(data)[:, 0]
    n, q, T = A.shape
    pooled = (A @ data.X).reshape(n * q, -1)
    values = data.X if layer.V is None else data.X @ layer.V[h]
    C = np.broadcast_to(values.transpose(0, 2, 1)[:, :, None], (n, head.out_dim, q, T))
    A = np.broadcast_to(A[:, None], C.shape)
    D = score_gradient(A, C)
    moved = (D @ data.X[:, None]).transpose(0, 2, 1, 3).reshape(n * q, head.out_dim, -1)
    return pooled, moved


def score_gradient(A: Array, C: Array) -> Array:
    """D = A∘(C - rowsum(A∘C)) computed centred: c = C - C_m with m the row's largest weight."""
    m = A.argmax(axis=-1)[..., None]
    c = C - np.take_along_axis(C, m, axis=-1)
    D: Array = A * (c - (A * c).sum(axis=-1, keepdims=True))
    np.put_along_axis(D, m, 0.0, axis=-1)
    np.put_along_axis(D, m, -D.sum(axis=-1, keepdims=True), axis=-1)
    return D
