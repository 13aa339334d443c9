"""The models as a user of JAX writes them, and how the tests call both."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import mhfast as mh
from mhfast.interop import jax as interop


def of_jax(kind):
    return interop.classifier if kind is mh.Classifier else interop.layer


def arrays_and_options(the):
    """What the functions are called with: the arrays to differentiate by, and the rest."""
    arrays = {"X": the.X, **the.model.parameters}
    options = {"scale": the.model.scale, "causal": the.model.causal}
    if "query" in the.options:
        arrays["query"] = the.options["query"]
    else:
        options["query"] = the.model.query
    return arrays, {**options, "lengths": the.options.get("lengths")}


def textbook(arrays, *, scale, causal, lengths, query=None):
    """The outputs as a user of JAX writes them."""
    X, W = arrays["X"], arrays["W"]
    n, tokens, _ = X.shape
    ends = jnp.full(n, tokens) if lengths is None else jnp.asarray(lengths)
    rows = jnp.broadcast_to(jnp.arange(tokens), (n, tokens))
    asked = rows < ends[:, None]
    if "prompt" in arrays:
        Z = jnp.broadcast_to(arrays["prompt"], (n, *arrays["prompt"].shape))
    elif "query" in arrays:
        Z = arrays["query"]
    elif query is not None:
        rows = (ends + query if query < 0 else jnp.full(n, query))[:, None]
        inside = (rows >= 0) & (rows < ends[:, None])
        Z = jnp.where(inside[..., None], jnp.take_along_axis(X, rows[..., None] % tokens, 1), 0)
    else:
        Z = X
    seen = jnp.arange(tokens) < ends[:, None, None]
    if causal:
        seen &= jnp.arange(tokens) <= rows[:, : Z.shape[1], None]
    if Z is X:
        seen &= asked[..., None]
    E = jnp.exp(scale * jnp.einsum("nqd,hde,nte->nhqt", Z, W, X)) * seen[:, None]
    total = E.sum(-1, keepdims=True)
    A = E / jnp.where(total > 0, total, 1)
    if "U" in arrays:
        return jnp.einsum("nhqt,ntd,hqd->n", A, X, arrays["U"]) / np.sqrt(len(W))
    return jnp.einsum("nhqt,ntd,hdp->nqp", A, X, arrays["V"])
