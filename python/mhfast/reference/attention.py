"""Attention weights and outputs.

    A_ih = softmax_row(scale · Z_i W_h X_iᵀ)                        over the visible keys
    Classifier   Φ(X_i) = H^(-1/2) Σ_h ⟨U_h, A_ih X_i⟩              a number per sample
    Layer        F(X_i) = Σ_h A_ih X_i V_h                          (q,p) per sample

Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
Attention" (TMLR 2024); Chen, Li, "Provably learning a multi-head attention layer" (STOC 2025).

Other maps of the row than softmax are in `row_maps`.

Products are written with `einsum`, whose loops treat every token alike: equal tokens get equal
scores to the last bit, which a blocked matrix product does not promise and which the gradients of
saturated attention over repeated tokens need.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .model import Array, Inputs, Model, Query, inputs
from .row_maps import ENTRIES, hardmax, tokens_seen, with_zero
from .runs import over_runs


def logits(model: Model, data: Inputs) -> Array:
    """Logits (n,H,q,T) of all keys."""
    ZW = np.einsum("nqd,hde->nhqe", data.Z, model.dense())
    S: Array = model.scale * np.einsum("nhqe,nte->nhqt", ZW, data.X)
    return S


def scores(model: Model, data: Inputs) -> Array:
    """Logits minus the largest of their row; -inf where the key is invisible.

    Those of softmax1 (n,H,q,T+1) begin with that of no key.
    """
    S = np.where(data.visible[:, None], logits(model, data), -np.inf)
    if model.attention == "softmax1":
        S = with_zero(S)
    top = S.max(axis=-1, keepdims=True)
    return S - np.where(top == -np.inf, 0.0, top)


def softmax(S: Array) -> Array:
    """Weights A of such scores.  Rows sum to one, or are 0 where no key is visible."""
    E = np.exp(S)
    total = E.sum(axis=-1, keepdims=True)
    A: Array = E / np.where(total == 0.0, 1.0, total)
    return A


def weights(model: Model, data: Inputs) -> Array:
    """Attention weights A (n,H,q,T)."""
    if model.attention in ENTRIES:
        return of_entries(model, data, "value")
    if model.attention == "hardmax":
        return hardmax(logits(model, data), data.visible)
    return softmax(scores(model, data))[..., -data.X.shape[1] :]


def of_entries(model: Model, data: Inputs, what: str) -> Array:
    """f(S) / N, or f' or f'', of a map of entries; 0 where the key is invisible."""
    function = getattr(ENTRIES[model.attention], what)
    N = tokens_seen(model.attention, model.normalize, data.visible)
    values: Array = np.where(data.visible[:, None], function(logits(model, data)) / N, 0.0)
    return values


def output_root(model: Model) -> float:
    """H^(1/2), by which a classifier divides its output."""
    return float(np.sqrt(len(model.dense())))


def read_out(model: Model, X: Array, A: Array) -> Array:
    """Compute outputs (n,) or (n,q,p) from weights A (n,H,q,T) of tokens X (n,T,d); linear in A."""
    if model.U is not None:
        C = np.einsum("hqd,ntd->nhqt", model.U, X)
        phi: Array = (A * C).sum(axis=(1, 2, 3)) / output_root(model)
        return phi
    F: Array = np.einsum("nhqd,hdp->nqp", np.einsum("nhqt,ntd->nhqd", A, X), model.readout())
    return F


@over_runs
def attention(
    model: Any, X: ArrayLike, *, query: Query = None, lengths: ArrayLike | None = None
) -> Array:
    """Attention weights A (n,H,q,T) of tokens X (n,T,d); `inputs` says what the rows are.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X = np.random.default_rng(0).standard_normal((20, 5, 9))
    >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=1.0, seed=0)
    >>> A = mh.reference.attention(model, X)
    >>> bool(abs(A - model.attention(X)).max() < 1e-14)
    True
    """
    model = Model.of(model)
    return weights(model, inputs(model, X, query, lengths))


@over_runs
def outputs(
    model: Any, X: ArrayLike, *, query: Query = None, lengths: ArrayLike | None = None
) -> Array:
    """Φ (n,) of a classifier, F (n,q,p) of a layer, at tokens X (n,T,d).

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X = np.random.default_rng(0).standard_normal((20, 5, 9))
    >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=1.0, seed=0)
    >>> A = mh.reference.attention(model, X)
    >>> by_hand = np.einsum("hqd,nhqd->n", model.U, A @ X[:, None]) / np.sqrt(3)
    >>> bool(np.allclose(mh.reference.outputs(model, X), by_hand))
    True
    """
    model = Model.of(model)
    data = inputs(model, X, query, lengths)
    return read_out(model, data.X, weights(model, data))
