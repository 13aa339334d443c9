"""The tangent kernel of a classifier, K_ij = ⟨∇Φ(X_i), ∇Φ(X_j)⟩, head by head.

With A the attention of a head, C = U_h Xᵀ and D its derivative by the scores (centred, so that it
keeps its digits where attention saturates),

    ∂Φ/∂U_h = H^(-1/2) A X,   ∂Φ/∂W_h = H^(-1/2) scale · Zᵀ D X,
    ∂Φ/∂Q_h = ∂Φ/∂W_h K_h,   ∂Φ/∂K_h = (∂Φ/∂W_h)ᵀ Q_h,   ∂Φ/∂prompt = H^(-1/2) scale Σ_h D X W_hᵀ.

All but the last are products leftᵀ right over query rows.  They are formed for one head and as many
rows of `left` as fit `BLOCK` numbers, and multiplied by BLAS; the gradients of all samples never
exist at once.  Tokens, readout and factors enter in units of their own size, powers of two, and
so does each product, so that a kernel of any size is as exact as one of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Classifier, Layer
from ..reference.attention import weights
from ..reference.gradients import weights_tangent
from ..reference.model import Model as Plain
from ..reference.model import inputs
from .inputs import check_finite, classifier, exponent, in_units, query_side, samples
from .layer_kernel import layer_kernel, score_gradient
from .runs import over_runs

# Numbers of one block of features, or of attention weights: 32 MiB in float64.
BLOCK = 1 << 22

Outer = tuple[Array, Array]  # left (n, q, a), right (n, q, b); a feature is leftᵀ right (a, b)


@over_runs
def ntk(
    model: Classifier | Layer,
    X: npt.ArrayLike | Dataset,
    X2: npt.ArrayLike | Dataset | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
) -> Array:
    """Compute the tangent kernel K_ij = ⟨∇Φ(X_i), ∇Φ(X2_j)⟩; of a layer, of all outputs.

    Parameters
    ----------
    model : Classifier or Layer
        One run or several; a Layer with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset
    X2 : the same for n2 samples, optional
        None means X.
    wrt : str or tuple of str, optional
        The parameters whose gradients count: W and U, or Q, K and U where W is factored (Q holds
        both where it is tied), and prompt; of a Layer W and V.  None means all that the model has.

    Returns
    -------
    array (n, n2) of the model's dtype; (R, n, n2) if model or X have a run axis.  Of a Layer array
    (n, q, p, n2, q2, p): every output of every row is a function of its own.

    Raises
    ------
    TypeError
        The model is of another kind, or a dtype is not that of the model.
    ValueError
        A shape does not fit, a number is not finite, or `wrt` names something the model has not.

    Notes
    -----
    Weights of samples play no role.  An entry beyond the range of the dtype is inf, or 0.  BLAS
    multiplies, whose order of sums may depend on the number of its threads: entries are equal up
    to rounding, not bitwise.

    Beyond the result and one head's Z, A X and D X, at most two blocks of 2²² numbers are held;
    of a Layer D X of one head for every output, in float64.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> model = mh.Classifier.gaussian(3, 5, 8, std=0.5, seed=0)
    >>> K = mh.theory.ntk(model, data)
    >>> K.shape, bool(np.linalg.eigvalsh(K).min() > -1e-12)
    ((20, 20), True)
    >>> parts = [mh.theory.ntk(model, data, wrt=name) for name in ("W", "U")]
    >>> bool(np.allclose(K, sum(parts)))
    True
    """
    if isinstance(model, Layer):
        K = layer_kernel(model, samples(X), None if X2 is None else samples(X2), wrt)
        return K.astype(model.dtype, copy=False)
    model = classifier(model, any_map=True)
    if model.attention == "hardmax":
        raise ValueError("model: expected a row map with derivatives, got attention 'hardmax'")
    first = samples(X)
    for data in (first,) if X2 is None else (first, samples(X2)):
        check_finite(model, data)
    K, unit = scaled_kernel(model, first, None if X2 is None else samples(X2), wrt)
    return in_units(K, -2 * unit)


def scaled_kernel(
    model: Classifier,
    first: Dataset,
    second: Dataset | None = None,
    wrt: str | Sequence[str] | None = None,
) -> tuple[Array, int]:
    """Return the kernel as K 4^unit, with the entries of K of moderate size."""
    names = _names(model, wrt)
    same = second is None
    inputs = (first,) if second is None else (first, second)
    total = _Sum(np.zeros((inputs[0].n, inputs[-1].n), model.dtype))
    prompts: list[Any] = [0.0, 0.0]
    for h in range(model.heads):
        both = [_Head(model, h, side, names) for side in inputs]
        a, b = both[0], both[-1]
        if "U" in names:
            total.add(_products(a.pooled, b.pooled), a.pooled_unit + b.pooled_unit)
        if "prompt" in names:
            prompts = [p + head.prompt() for p, head in zip(prompts, (a, b), strict=True)]
        for left, right in zip(a.outers, b.outers, strict=True):
            total.add(_outer_products(left[0], right[0]), left[1] + right[1])
    if "prompt" in names:
        unit = a.prompt_unit + b.prompt_unit
        total.add(_products(prompts[0], prompts[0] if same else prompts[1]), unit)
    K = total.value / model.heads
    unit = total.unit - total.unit % 2
    return in_units(K, unit - total.unit), unit // 2


class _Sum:
    """A sum of arrays, each times a power of two, kept in units of its largest part."""

    def __init__(self, zeros: Array) -> None:
        self.value, self.unit, self._empty = zeros, 0, True

    def add(self, part: Array, unit: int) -> None:
        if not part.any():
            return
        top = unit + exponent(part)
        if self._empty or top > self.unit:
            if not self._empty:
                self.value = in_units(self.value, top - self.unit)
            self.unit, self._empty = top, False
        self.value += in_units(part, self.unit - unit)


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
    whose sum is its gradient.  Each comes with the exponent of its unit, a power of two.
    """

    def __init__(self, model: Classifier, h: int, data: Dataset, names: tuple[str, ...]) -> None:
        Z, z = _scaled(query_side(model, data))
        x, u, w = exponent(data.X), exponent(model.U), 0
        scale, s = math.frexp(model.scale)
        self.pooled, moved = _pooled(model, h, data, x, u)
        self.pooled_unit, m = x, 2 * x + u + s
        moved *= scale
        of_head, own = _scaled(moved)  # near underflow where attention saturates
        self.outers: list[tuple[list[Outer], int]] = []
        if isinstance(model.W, np.ndarray):
            w = exponent(model.W)
            W = in_units(model.W[h], w)
            if "W" in names:
                self.outers.append(([(Z, of_head)], z + m + own))
        else:
            q, k = exponent(model.W.Q), exponent(model.W.Q if model.W.K is None else model.W.K)
            Q = in_units(model.W.Q[h], q)
            K = Q if model.W.K is None else in_units(model.W.K[h], k)
            W, w = Q @ K.T, q + k
            by_Q, by_K = (Z, of_head @ K), (of_head, Z @ Q)
            m_own = z + m + own
            if model.W.K is None:
                self.outers += [([by_Q, by_K], m_own + k)] if "Q" in names else []
            else:
                self.outers += [([by_Q], m_own + k)] if "Q" in names else []
                self.outers += [([by_K], m_own + q)] if "K" in names else []
        self._moved, self._W, self.prompt_unit = moved, W, m + w

    def prompt(self) -> Array:
        """Return the gradient with respect to the query rows, (n, q, d)."""
        gradient: Array = self._moved @ self._W.T
        return gradient


def _scaled(array: Array) -> tuple[Array, int]:
    unit = exponent(array)
    return in_units(array, unit), unit


def _pooled(model: Classifier, h: int, data: Dataset, x: int, u: int) -> tuple[Array, Array]:
    """Return A X and D X of head h, (n, q, d) each, a block of samples at a time.

    X is taken in units of 2^x and U in units of 2^u, except in the attention.
    """
    U = in_units(model.U[h], u)
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
        tokens = in_units(block.X, x)
        pooled[part] = A @ tokens
        C = U @ tokens.transpose(0, 2, 1)
        D = score_gradient(A, C) if model.attention == "softmax" else _of_map(own, block, C)
        moved[part] = D @ tokens
    return pooled, moved


def _one_head(model: Classifier, h: int) -> Classifier:
    W: Any = model.W
    if isinstance(W, np.ndarray):
        W = W[h : h + 1]
    else:
        W = replace(W, Q=W.Q[h : h + 1], K=None if W.K is None else W.K[h : h + 1])
    return replace(model, W=W, U=model.U[h : h + 1])


def _of_map(model: Classifier, data: Dataset, C: Array) -> Array:
    """D (n, q, T) of one head with another row map, by the specification, in float64."""
    own = Plain.of(model)
    seen = inputs(own, data.X, data.query, data.lengths)
    C64 = C[:, None].astype(np.float64)
    D: Array = weights_tangent(own, seen, weights(own, seen), C64)[:, 0]
    return D.astype(model.dtype)


def _products(a: Array, b: Array) -> Array:
    """Return the inner products of two sets of features; of one set if both are the same object."""
    left = a.reshape(len(a), -1)
    found: Array = left @ (left if a is b else b.reshape(len(b), -1)).T
    return found


def _outer_products(left: list[Outer], right: list[Outer]) -> Array:
    """Return the inner products of features that are sums of products over query rows."""
    first, second = left[0][0], right[0][0]
    K: Array = np.zeros((len(first), len(second)), first.dtype)
    if first.shape[1] == 1:  # features of rank one: no need to form them
        for a, b in left:
            for a2, b2 in right:
                K += (a[:, 0] @ a2[:, 0].T) * (b[:, 0] @ b2[:, 0].T)
        return K
    rows, columns = first.shape[2], left[0][1].shape[2]
    step = max(1, BLOCK // (columns * max(K.shape)))
    for part in _slices(rows, step):
        features = _features(left, part)
        K += _products(features, features if right is left else _features(right, part))
    return K


def _features(outers: list[Outer], part: slice) -> Array:
    first, *rest = (a[:, :, part].transpose(0, 2, 1) @ b for a, b in outers)
    for other in rest:
        first += other
    return first


def _slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))
