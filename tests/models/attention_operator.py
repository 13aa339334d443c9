"""The ONNX operator Attention as a `Layer`: its inputs as columns of tokens, queries and matrices.

With the operator's heads j of queries Q_j (q, a) and g of keys K_g (T, a) and values V_g (T, b),
and an additive mask B_j (q, T),

    tokens   X = [ 0    | 0    | I ]      queries   Z = [ 0    | 0    ]
                 [ K_g  | V_g  |   ]                    [ Q_j  | B_j  ]

with one block of columns for every head. W_j sends the block Q_j to K_g, times the scale, and the
block B_j to the identity, so that the logits are scale · Q_j K_gᵀ + B_j. V_j sends the block V_g to
columns of its own. The first token carries no key and no value: it takes the weight of a row that
may see nothing else, whose output is then 0. The first query row keeps the two sides aligned, so
that `causal` means the same to both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import mhfast as mh

# Against logits of order one this weighs exactly 0 in either dtype, and it is finite.
NEVER = -1e6


@dataclass(frozen=True)
class Operation:
    """Inputs Q (n,J,q,a), K (n,G,T,a), V (n,G,T,b), additive mask (n,J,q,T) or None, in one dtype.

    `causal` lets row t see keys 0..t, `lengths` (n,) the keys before it; both on top of the mask.
    """

    Q: Any
    K: Any
    V: Any
    scale: float
    mask: Any = None
    causal: bool = False
    lengths: Any = None


def outputs(operation: Operation) -> Any:
    """Return the operator's result, (n,J,q,b)."""
    X, layer, lengths = _embedded(operation)
    F = layer(X, lengths=lengths)[:, 1:]
    n, J, q, _ = operation.Q.shape
    return F.reshape(n, q, J, -1).transpose(0, 2, 1, 3)


def weights(operation: Operation) -> Any:
    """Return the softmax of the logits, (n,J,q,T)."""
    X, layer, lengths = _embedded(operation)
    return layer.attention(X, lengths=lengths)[:, :, 1:, 1:]


def logits(operation: Operation) -> Any:
    """Return the logits, (n,J,q,T): logarithms of weights beside that of a token of logit 0."""
    X, layer, lengths = _embedded(operation, first=0.0)
    A = layer.attention(X, lengths=lengths)[:, :, 1:]
    with np.errstate(divide="ignore"):
        return np.log(A[..., 1:]) - np.log(A[..., :1])


def _embedded(operation: Operation, first: float | None = None) -> tuple[Any, mh.Layer, Any]:
    """Return tokens, layer and lengths; `first` is the logit of the first token.

    It is by default NEVER, or 0 in rows that must not see any other.
    """
    Q, K, V = operation.Q, operation.K, operation.V
    n, J, q, a = Q.shape
    _, G, T, b = V.shape
    mask = np.zeros((n, J, q, T), Q.dtype) if operation.mask is None else operation.mask
    visible = mask > -np.inf
    if operation.causal:
        visible = visible & np.tri(q, T, dtype=bool)
    if operation.lengths is not None:
        visible = visible & (np.arange(T) < operation.lengths[:, None, None, None])
    if first is None:
        nulls = np.where(visible.any(axis=-1, keepdims=True), NEVER, 0.0)
    else:
        nulls = np.full((n, J, q, 1), first)
    B = np.concatenate((nulls, np.where(mask > -np.inf, mask, NEVER)), axis=-1)

    key, value, position = 0, G * a, G * (a + b)
    question, bias = 0, J * a
    d = max(position + T + 1, bias + J * (T + 1))
    X, Z = np.zeros((n, T + 1, d), Q.dtype), np.zeros((n, q + 1, d), Q.dtype)
    X[:, 1:, key:value] = _columns(K)
    X[:, 1:, value:position] = _columns(V)
    X[:, :, position : position + T + 1] = np.eye(T + 1)
    Z[:, 1:, question:bias] = _columns(Q)
    Z[:, 1:, bias : bias + J * (T + 1)] = _columns(B)

    W, readout = np.zeros((J, d, d), Q.dtype), np.zeros((J, d, J * b), Q.dtype)
    for j in range(J):
        g = j * G // J
        rows = np.arange(a)
        W[j, question + j * a + rows, key + g * a + rows] = operation.scale
        rows = np.arange(T + 1)
        W[j, bias + j * (T + 1) + rows, position + rows] = 1.0
        rows = np.arange(b)
        readout[j, value + g * b + rows, j * b + rows] = 1.0
    lengths = None if operation.lengths is None else operation.lengths + 1
    return X, mh.Layer(W, readout, Z, causal=operation.causal), lengths


def _columns(heads: Any) -> Any:
    """Put the heads of (n,J,rows,c) side by side: (n,rows,J c)."""
    n, J, rows, c = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(n, rows, J * c)
