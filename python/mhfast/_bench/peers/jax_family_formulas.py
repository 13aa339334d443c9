"""The model family in JAX: losses and gradients that XLA compiles well on a CPU.

Shapes of one run: X (n,T,d), Z (n,q,d), W (H,d,d), readout U (H,q,d) or V (H,d,p); y is (n,) for
a classifier with the logistic loss, (n,q,p) for a layer with the squared loss. Rows of queries and
heads (q H of them) are attended together; weights are held queries first, (n, q H, T), or keys
first, (n, T, q H). Also tried, and slower on everything that is measured: autodiff keys
first; sums of elementwise products in place of matrix products; runs or samples as the last axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

JaxArray: TypeAlias = Any
Parameters: TypeAlias = tuple[JaxArray, JaxArray]
Gradient: TypeAlias = Callable[..., tuple[JaxArray, Parameters]]


def queries_first(theta: Parameters, X: JaxArray, Z: JaxArray, y: JaxArray) -> JaxArray:
    """Loss, weights queries first."""
    W, readout = theta
    A = jax.nn.softmax(_folded(Z, W) @ X.transpose(0, 2, 1), axis=-1)
    return _loss(A @ X, readout, y)


def closed_queries_first(
    theta: Parameters, X: JaxArray, Z: JaxArray, y: JaxArray
) -> tuple[JaxArray, Parameters]:
    """Loss and gradients written out, weights queries first."""
    W, readout = theta
    A = jax.nn.softmax(_folded(Z, W) @ X.transpose(0, 2, 1), axis=-1)
    loss, rows, g_readout = _read(A @ X, readout, y)
    C = rows @ X.transpose(0, 2, 1)
    D = A * (C - (A * C).sum(-1, keepdims=True))
    return loss, (_unfolded(Z, D @ X), g_readout)


def closed_keys_first(
    theta: Parameters, X: JaxArray, Z: JaxArray, y: JaxArray
) -> tuple[JaxArray, Parameters]:
    """Loss and gradients written out, weights keys first."""
    W, readout = theta
    A = jax.nn.softmax(jnp.einsum("ntd,nrd->ntr", X, _folded(Z, W)), axis=1)
    loss, rows, g_readout = _read(jnp.einsum("ntr,ntd->nrd", A, X), readout, y)
    C = jnp.einsum("ntd,nrd->ntr", X, rows)
    D = A * (C - (A * C).sum(1, keepdims=True))
    return loss, (_unfolded(Z, jnp.einsum("ntr,ntd->nrd", D, X)), g_readout)


def _folded(Z: JaxArray, W: JaxArray) -> JaxArray:
    """Return Z W_h for all heads, (n, q H, d)."""
    n, q, d = Z.shape
    H = len(W)
    return (Z.reshape(n * q, d) @ W.transpose(1, 0, 2).reshape(d, H * d)).reshape(n, q * H, d)


def _unfolded(Z: JaxArray, DX: JaxArray) -> JaxArray:
    """Return Σ Zᵀ D X for each head, (H,d,d), of D X (n, q H, d)."""
    n, q, d = Z.shape
    H = DX.shape[1] // q
    g = Z.reshape(n * q, d).T @ DX.reshape(n * q, H * d)
    return g.reshape(d, H, d).transpose(1, 0, 2)


def _loss(AX: JaxArray, readout: JaxArray, y: JaxArray) -> JaxArray:
    """Return the loss, from A X (n, q H, d)."""
    n = len(y)
    H = len(readout)
    if y.ndim == 1:
        phi = AX.reshape(n, -1) @ readout.transpose(1, 0, 2).reshape(-1) / H**0.5
        return jax.nn.softplus(-y * phi).mean()
    F = AX.reshape(y.shape[0] * y.shape[1], -1) @ readout.reshape(-1, y.shape[2])
    return ((F - y.reshape(F.shape)) ** 2).sum() / n


def _read(AX: JaxArray, readout: JaxArray, y: JaxArray) -> tuple[JaxArray, JaxArray, JaxArray]:
    """Return the loss, its gradients in A X, (n, q H, d), and in the readout."""
    n, rows, d = AX.shape
    H = len(readout)
    if y.ndim == 1:
        U = readout.transpose(1, 0, 2).reshape(rows, d)
        margin = y * (AX.reshape(n, -1) @ U.reshape(-1)) / H**0.5
        loss_derivative = -y * jax.nn.sigmoid(-margin) / (H**0.5 * n)
        gU = (loss_derivative @ AX.reshape(n, -1)).reshape(rows // H, H, d).transpose(1, 0, 2)
        return jax.nn.softplus(-margin).mean(), loss_derivative[:, None, None] * U, gU
    V = readout.reshape(H * d, -1)
    mixed = AX.reshape(-1, H * d)
    residual = mixed @ V - y.reshape(-1, V.shape[1])
    G = residual * (2.0 / n)
    return (
        (residual**2).sum() / n,
        (G @ V.T).reshape(AX.shape),
        (mixed.T @ G).reshape(readout.shape),
    )
