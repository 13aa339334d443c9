"""The classifier in JAX: formulas that XLA compiles well on a CPU.

Shapes: X (n,T,d), y (n,), W (H,d,d), U (H,T,d). W is folded into one matrix (d, H d), so that rows
of queries and heads (T H of them) are attended together; attention weights are held keys first,
(n, T, T H), or queries first, (n, T H, T).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

JaxArray: TypeAlias = Any
Parameters: TypeAlias = tuple[JaxArray, JaxArray]
Gradient: TypeAlias = Callable[[Parameters, JaxArray, JaxArray], tuple[JaxArray, Parameters]]


def folded(X: JaxArray, W: JaxArray) -> JaxArray:
    """Return X W_h for all heads, (n, T H, d)."""
    n, T, d = X.shape
    H = len(W)
    return (X.reshape(n * T, d) @ W.transpose(1, 0, 2).reshape(d, H * d)).reshape(n, T * H, d)


def rows_first(U: JaxArray) -> JaxArray:
    """Return U with its rows ordered as those of `folded`, (T H, d)."""
    H, T, d = U.shape
    return U.transpose(1, 0, 2).reshape(T * H, d)


def keys_first(theta: Parameters, X: JaxArray, y: JaxArray) -> JaxArray:
    """Loss, weights keys first: Φ = H^(-1/2) Σ A∘C with C = U Xᵀ."""
    W, U = theta
    n, T, d = X.shape
    H = len(W)
    A = jax.nn.softmax(jnp.einsum("nsd,nrd->nsr", X, folded(X, W)), axis=1)
    C = (X.reshape(n * T, d) @ rows_first(U).T).reshape(n, T, T * H)
    return jax.nn.softplus(-y * (A * C).sum((1, 2)) / H**0.5).mean()


def queries_first(theta: Parameters, X: JaxArray, y: JaxArray) -> JaxArray:
    """Loss, weights queries first: Φ = H^(-1/2) ⟨U, A X⟩."""
    W, U = theta
    A = jax.nn.softmax(folded(X, W) @ X.transpose(0, 2, 1), axis=-1)
    phi = (A @ X).reshape(len(X), -1) @ rows_first(U).reshape(-1)
    return jax.nn.softplus(-y * phi / len(W) ** 0.5).mean()


def closed_keys_first(theta: Parameters, X: JaxArray, y: JaxArray) -> tuple[JaxArray, Parameters]:
    """Loss and gradients written out, weights keys first."""
    W, U = theta
    n, T, d = X.shape
    H = len(W)
    flat = X.reshape(n * T, d)
    A = jax.nn.softmax(jnp.einsum("nsd,nrd->nsr", X, folded(X, W)), axis=1)
    AC = A * (flat @ rows_first(U).T).reshape(n, T, T * H)
    sums = AC.sum(1, keepdims=True)
    loss, loss_derivative = _loss_and_derivative(sums.sum((1, 2)), y, H)
    weighted = X * loss_derivative[:, None, None]
    gU = A.reshape(n * T, T * H).T @ weighted.reshape(n * T, d)
    DX = jnp.einsum("nsr,nsd->nrd", AC - A * sums, weighted)
    gW = flat.T @ DX.reshape(n * T, H * d)
    return loss, _unfolded(gW, gU, H)


def closed_queries_first(
    theta: Parameters, X: JaxArray, y: JaxArray
) -> tuple[JaxArray, Parameters]:
    """Loss and gradients written out, weights queries first."""
    W, U = theta
    n, T, d = X.shape
    H = len(W)
    readout = rows_first(U)
    A = jax.nn.softmax(folded(X, W) @ X.transpose(0, 2, 1), axis=-1)
    AX = (A @ X).reshape(n, -1)
    loss, loss_derivative = _loss_and_derivative(AX @ readout.reshape(-1), y, H)
    gU = (loss_derivative @ AX).reshape(T * H, d)
    AC = A * (readout @ X.transpose(0, 2, 1))
    DX = (AC - A * AC.sum(-1, keepdims=True)) @ (X * loss_derivative[:, None, None])
    gW = X.reshape(n * T, d).T @ DX.reshape(n * T, H * d)
    return loss, _unfolded(gW, gU, H)


def in_chunks(gradient: Gradient, size: int) -> Gradient:
    """Scan over chunks of `size` samples (a divisor of n): what lies between stays in a cache."""

    def scanned(theta: Parameters, X: JaxArray, y: JaxArray) -> tuple[JaxArray, Parameters]:
        chunks = len(X) // size
        zeros = (jnp.zeros((), X.dtype), jax.tree.map(jnp.zeros_like, theta))

        def body(total: Any, chunk: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(theta, *chunk)), None

        split = (X.reshape(chunks, size, *X.shape[1:]), y.reshape(chunks, size))
        total, _ = jax.lax.scan(body, zeros, split)
        mean: tuple[JaxArray, Parameters] = jax.tree.map(lambda a: a / chunks, total)
        return mean

    return scanned


def in_tiles(size: int) -> Gradient:
    """One sample after the other, tiles of `size` queries (a divisor of T): T x T is never held."""

    def tiled(theta: Parameters, X: JaxArray, y: JaxArray) -> tuple[JaxArray, Parameters]:
        W, U = theta
        n, T, d = X.shape
        H = len(W)
        across = W.transpose(1, 0, 2).reshape(d, H * d)
        readout = rows_first(U).reshape(T // size, size * H, d)

        def tile(x: JaxArray, some: Any) -> tuple[JaxArray, Any]:
            rows, u = some
            A = jax.nn.softmax((rows @ across).reshape(size * H, d) @ x.T, axis=-1)
            AX = A @ x
            D = A * (u @ x.T - (u * AX).sum(-1, keepdims=True))
            return x, (AX, rows.T @ (D @ x).reshape(size, H * d))

        def sample(total: Any, pair: Any) -> tuple[Any, None]:
            x, label = pair
            _, (AX, gW) = jax.lax.scan(tile, x, (x.reshape(T // size, size, d), readout))
            margin = label * jnp.vdot(AX, readout) / H**0.5
            loss_derivative = -label * jax.nn.sigmoid(-margin) / (n * H**0.5)
            part = (jax.nn.softplus(-margin) / n, loss_derivative * gW.sum(0), loss_derivative * AX)
            return jax.tree.map(jnp.add, total, part), None

        zeros = (jnp.zeros((), X.dtype), jnp.zeros_like(across), jnp.zeros_like(readout))
        (loss, gW, gU), _ = jax.lax.scan(sample, zeros, (X, y))
        return loss, _unfolded(gW, gU.reshape(T * H, d), H)

    return tiled


def _loss_and_derivative(raw: JaxArray, y: JaxArray, H: int) -> tuple[JaxArray, JaxArray]:
    """Return the loss at Φ = H^(-1/2) raw, and its derivative in raw, per sample."""
    margin = y * raw / H**0.5
    loss_derivative = -y * jax.nn.sigmoid(-margin) / (H**0.5 * len(y))
    return jax.nn.softplus(-margin).mean(), loss_derivative


def _unfolded(gW: JaxArray, gU: JaxArray, H: int) -> Parameters:
    """Return gradients (d, H d) and (T H, d) as (H,d,d) and (H,T,d)."""
    d = len(gW)
    T = len(gU) // H
    return gW.reshape(d, H, d).transpose(1, 0, 2), gU.reshape(T, H, d).transpose(1, 0, 2)
