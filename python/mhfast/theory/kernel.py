"""The tangent kernel of a classifier, K_ij = ⟨∇Φ(X_i), ∇Φ(X_j)⟩, head by head.

With A the attention of a head, C = U_h Xᵀ and D its derivative by the scores (centred, so that it
keeps its digits where attention saturates),

    ∂Φ/∂U_h = H^(-1/2) A X,   ∂Φ/∂W_h = H^(-1/2) scale · Zᵀ D X,
    ∂Φ/∂Q_h = ∂Φ/∂W_h K_h,   ∂Φ/∂K_h = (∂Φ/∂W_h)ᵀ Q_h,   ∂Φ/∂prompt = H^(-1/2) scale Σ_h D X W_hᵀ.

All but the last are products leftᵀ right over query rows.  They are formed for one head and as many
rows of `left` as fit `BLOCK` numbers, and multiplied by BLAS; the gradients of all samples never
exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Classifier
from .runs import over_runs
from .sides import classifier, query_side, samples

# Numbers of one block of features, or of attention weights: 32 MiB in float64.
BLOCK = 1 << 22

Outer = tuple[Array, Array]  # left (n, q, a), right (n, q, b); a feature is leftᵀ right (a, b)


@over_runs
def ntk(
    model: Classifier,
    X: npt.ArrayLike | Dataset,
    X2: npt.ArrayLike | Dataset | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
) -> Array:
    """Compute the tangent kernel K_ij = ⟨∇Φ(X_i), ∇Φ(X2_j)⟩ of a classifier.

    Parameters
    ----------
    model : Classifier
        One run or several.
    X : array (n, T, d) of the model's dtype, or Dataset
    X2 : the same for n2 samples, optional
        None means X.
    wrt : str or tuple of str, optional
        The parameters whose gradients count: W and U, or Q, K and U where W is factored (Q holds
        both where it is tied), and prompt; None means all that the model has.

    Returns
    -------
    array (n, n2) of the model's dtype; (R, n, n2) if model or X have a run axis.

    Raises
    ------
    TypeError
        The model is not a Classifier, or a dtype is not that of the model.
    ValueError
        A shape does not fit, or `wrt` names something the model has not.

    Notes
    -----
    Beyond the result and one head's Z, A X and D X, at most two blocks of 2²² numbers are held.
    """
    model = classifier(model)
    names = _names(model, wrt)
    same = X2 is None
    first = samples(X)
    second = first if X2 is None else samples(X2)
    K = np.zeros((first.n, second.n), model.dtype)
    prompts = [np.zeros(1), np.zeros(1)]
    for h in range(model.heads):
        both = [_Head(model, h, side, names) for side in ((first,) if same else (first, second))]
        a, b = both[0], both[-1]
        if "U" in names:
            _add(K, a.pooled, b.pooled)
        if "prompt" in names:
            prompts = [p + head.prompt() for p, head in zip(prompts, (a, b), strict=True)]
        for left, right in zip(a.outers, b.outers, strict=True):
            _add_outer(K, left, right)
    if "prompt" in names:
        _add(K, prompts[0], prompts[0] if same else prompts[1])
    return K / model.heads


def _names(model: Classifier, wrt: str | Sequence[str] | None) -> tuple[str, ...]:
    factors: tuple[str, ...] = ("W",)
    if not isinstance(model.W, np.ndarray):
        factors = ("Q",) if model.W.K is None else ("Q", "K")
    known = (*factors, "U") if model.prompt is None else (*factors, "U", "prompt")
    names = known if wrt is None else (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in known:
            raise ValueError(f"wrt: expected names from {', '.join(known)}, got {name!r}")
    return names


class _Head:
    """The features of one head, for all samples of a data set.

    pooled (n, q, d) is A X; outers is a list with, for each parameter among W, Q, K, the products
    whose sum is its gradient.
    """

    def __init__(self, model: Classifier, h: int, data: Dataset, names: tuple[str, ...]) -> None:
        Z = query_side(model, data)
        self.pooled, moved = _pooled(model, h, data)
        moved *= model.scale
        self.outers: list[list[Outer]] = []
        if isinstance(model.W, np.ndarray):
            W = model.W[h]
            if "W" in names:
                self.outers.append([(Z, moved)])
        else:
            Q = model.W.Q[h]
            K = Q if model.W.K is None else model.W.K[h]
            W = Q @ K.T
            by_Q, by_K = (Z, moved @ K), (moved, Z @ Q)
            if model.W.K is None:
                self.outers += [[by_Q, by_K]] if "Q" in names else []
            else:
                self.outers += [[by_Q]] if "Q" in names else []
                self.outers += [[by_K]] if "K" in names else []
        self._moved, self._W = moved, W

    def prompt(self) -> Array:
        """Return the gradient with respect to the query rows, (n, q, d)."""
        gradient: Array = self._moved @ self._W.T
        return gradient


def _pooled(model: Classifier, h: int, data: Dataset) -> tuple[Array, Array]:
    """Return A X and D X of head h, (n, q, d) each, a block of samples at a time."""
    U = model.U[h]
    head = _one_head(model, h)
    pooled = np.empty((data.n, *U.shape), model.dtype)
    moved = np.empty_like(pooled)
    rows = max(1, BLOCK // (len(U) * data.tokens))
    for part in _slices(data.n, rows):
        block = data.subset(part)
        own = head
        if isinstance(model.query, np.ndarray) and data.query is None:
            own = replace(head, query=model.query[part])
        A = own.attention(block)[:, 0]
        pooled[part] = A @ block.X
        moved[part] = _score_gradient(A, U @ block.X.transpose(0, 2, 1)) @ block.X
    return pooled, moved


def _one_head(model: Classifier, h: int) -> Classifier:
    W: Any = model.W
    if isinstance(W, np.ndarray):
        W = W[h : h + 1]
    else:
        W = replace(W, Q=W.Q[h : h + 1], K=None if W.K is None else W.K[h : h + 1])
    return replace(model, W=W, U=model.U[h : h + 1])


def _score_gradient(A: Array, C: Array) -> Array:
    """D = A∘(C - rowsum(A∘C)) computed centred: c = C - C_m with m the row's largest weight."""
    m = A.argmax(axis=-1)[..., None]
    c = C - np.take_along_axis(C, m, axis=-1)
    D: Array = A * (c - (A * c).sum(axis=-1, keepdims=True))
    np.put_along_axis(D, m, 0.0, axis=-1)
    np.put_along_axis(D, m, -D.sum(axis=-1, keepdims=True), axis=-1)
    return D


def _add(K: Array, a: Array, b: Array) -> None:
    """Add the inner products of two sets of features; of one set if both are the same object."""
    left = a.reshape(len(a), -1)
    K += left @ (left if a is b else b.reshape(len(b), -1)).T


def _add_outer(K: Array, left: list[Outer], right: list[Outer]) -> None:
    """Add the inner products of features that are sums of products over query rows."""
    if left[0][0].shape[1] == 1:  # features of rank one: no need to form them
        for a, b in left:
            for a2, b2 in right:
                K += (a[:, 0] @ a2[:, 0].T) * (b[:, 0] @ b2[:, 0].T)
        return
    _, _, rows = left[0][0].shape
    columns = left[0][1].shape[2]
    step = max(1, BLOCK // (columns * max(K.shape)))
    for part in _slices(rows, step):
        features = _features(left, part)
        _add(K, features, features if right is left else _features(right, part))


def _features(outers: list[Outer], part: slice) -> Array:
    first, *rest = (a[:, :, part].transpose(0, 2, 1) @ b for a, b in outers)
    for other in rest:
        first += other
    return first


def _slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))
