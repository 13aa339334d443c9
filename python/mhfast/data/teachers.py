"""Outputs of teachers, the same on every platform to the last bit.

Products are sums of one term after the other, each operation rounded by itself: no BLAS, no fused
multiply-add, no instruction set changes them. The exponential is made of such operations too, since
those of NumPy and of the core differ between instruction sets in the last place.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..models import Classifier, Layer

Doubles = NDArray[np.float64]

BLOCK = 1 << 14
"""The numbers in a block of samples, so few that intermediate results stay in the cache."""

# ln 2 in two parts: multiples of the first by an integer below 2^11 are exact.
_LN2_HIGH = float.fromhex("0x1.62e42fefa3800p-1")
_LN2_LOW = float.fromhex("0x1.ef35793c76730p-45")
_LOG2_OF_E = float.fromhex("0x1.71547652b82fep+0")
_COEFFICIENTS = tuple(1.0 / math.factorial(j) for j in range(13, -1, -1))
_LOWEST = -746.0  # exp of less is 0


def exp(x: Doubles) -> Doubles:
    """Compute exp(x) of x <= 0 with an error of less than 2 units in the last place."""
    x = np.maximum(x, _LOWEST)
    k = np.rint(x * _LOG2_OF_E)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = np.full_like(r, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        series = series * r + coefficient
    return np.ldexp(series, k.astype(np.int32))


def product(a: Doubles, b: Doubles) -> Doubles:
    """Compute a (m, k, n) times b (k, p, n) or (k, p, 1) for n samples in the last axis.

    Sums run from the first term to the last; result (m, p, n).
    """
    total: Doubles = a[:, 0, None] * b[0]
    term = np.empty_like(total)
    for j in range(1, a.shape[1]):
        np.multiply(a[:, j, None], b[j], out=term)
        total += term
    return total


def outputs(model: Classifier | Layer, X: Doubles) -> Doubles:
    """Compute the outputs of a model with plain self-attention (all keys seen), in float64."""
    parameters = {name: a.astype(np.float64) for name, a in model.parameters.items()}
    step = max(1, BLOCK // (X.shape[-2] * max(X.shape[-2:])))
    blocks = (X[first : first + step] for first in range(0, len(X), step))
    of_block = _layer if isinstance(model, Layer) else _classifier
    # Samples last: elementwise work is fast where the last axis is long.
    made = [of_block(np.moveaxis(x, 0, -1).copy(), **parameters) for x in blocks]
    return np.moveaxis(np.concatenate(made, axis=-1), -1, 0)


def _layer(X: Doubles, W: Doubles, V: Doubles) -> Doubles:
    total = np.zeros((len(X), V.shape[-1], X.shape[-1]))
    for W_h, V_h in zip(W, V, strict=True):
        total += product(_attended(X, W_h), V_h[..., None])
    return total


def _classifier(X: Doubles, W: Doubles, U: Doubles) -> Doubles:
    total = np.zeros(X.shape[-1])
    for W_h, U_h in zip(W, U, strict=True):
        A = _attended(X, W_h).reshape(1, -1, X.shape[-1])
        total += product(A, U_h.reshape(-1, 1, 1))[0, 0]
    return total / math.sqrt(len(W))


def _attended(X: Doubles, W: Doubles) -> Doubles:
    """Compute softmax(X W Xᵀ) X for samples X (T, d, n) and one head."""
    scores = product(product(X, W[..., None]), np.swapaxes(X, 0, 1))
    weights = exp(scores - scores.max(axis=1, keepdims=True))
    total = weights[:, 0].copy()
    for j in range(1, len(X)):
        total += weights[:, j]
    weights /= total[:, None]
    return product(weights, X)
