"""The tangent kernel of a classifier, K_ij = ⟨∇Φ(X_i), ∇Φ(X_j)⟩.

With A the attention of a head, C = U_h Xᵀ and D its derivative by the scores (centred, so that it
keeps its digits where attention saturates),

    ∂Φ/∂U_h = H^(-1/2) A X,   ∂Φ/∂W_h = H^(-1/2) scale · Zᵀ D X,
    ∂Φ/∂Q_h = ∂Φ/∂W_h K_h,   ∂Φ/∂K_h = (∂Φ/∂W_h)ᵀ Q_h,   ∂Φ/∂prompt = H^(-1/2) scale Σ_h D X W_hᵀ.

All are formed for as many heads at a time as fit `BLOCK` numbers.  All but the last and that by U
are products leftᵀ right over query rows, and their inner products are found in the cheaper of two
ways: from the features, for as many rows of leftᵀ as fit `BLOCK` numbers, or from pairs of query
rows, ⟨leftᵀ right, left'ᵀ right'⟩ = Σ_ts ⟨left_t, left'_s⟩ ⟨right_t, right'_s⟩.  Of a prompt P, the
left of all samples, they are ⟨P Pᵀ right, right'⟩.  Heads of an identity are one head, whose U is
the sum of theirs.

The core computes A X and D X where all numbers are near 1.  Else tokens, readout and factors enter
in units of their own size, powers of two, of each run, and so does each product, so that a kernel
of any size is as exact as one of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Classifier, Layer
from ..reference.attention import weights
from ..reference.gradients import weights_tangent
from ..reference.model import Model as Plain
from ..reference.model import inputs
from .inputs import (
    WHOLE_UNIT,
    check_finite,
    in_units,
    moderate,
    query_side,
    samples,
)
from .layer_kernel import layer_kernel, score_gradient
from .runs import over_runs
from .tangent_rows import RowsOfModel

# Numbers of one block of features, or of attention weights: 32 MiB in float64.
BLOCK = 1 << 22

# left (R, n, q, G, a), right (R, n, q, g, b) of g heads; features are leftᵀ right (g, a, b).  G is
# g, or 1 where all heads have the same left.
Outer = tuple[Array, Array]
# Exponents (R,) of units, powers of two by which arrays (R, ...) are divided; None where there are
# none.
Unit = npt.NDArray[Any] | None
# Products whose sum is the gradient by one parameter, and its unit.
Part = tuple[list[Outer], Unit]


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

    Beyond the result and Z, A X and D X of one head, at most a few blocks of 2²² numbers are held;
    of a Layer also D X of one head for every output.

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
    if isinstance(model, Classifier):
        return _of_classifier(model, X, X2, wrt)
    return _of_layer(model, X, X2, wrt)


def _of_classifier(
    model: Classifier,
    X: npt.ArrayLike | Dataset,
    X2: npt.ArrayLike | Dataset | None,
    wrt: str | Sequence[str] | None,
) -> Array:
    if model._core.row_map_name == "hardmax":
        raise ValueError("model: expected a row map with derivatives, got attention 'hardmax'")
    of_data = X.runs if isinstance(X, Dataset) else None
    if model.runs is None and not of_data:
        second = None if X2 is None else samples(X2)
        K: Array = _in_dtype(_kernels(model, samples(X), second, wrt))[0]
        return K
    if X2 is None and _is_one_batch(model, X):
        return _in_dtype(_kernels(model, samples(X), None, wrt))
    return _of_each_run(model, X, X2, wrt)


def _is_one_batch(model: Classifier, X: object) -> bool:
    """Whether all runs fit one block; over runs that are larger there is nothing to gain."""
    if model._core.row_map_name != "softmax":
        return False
    data = X if isinstance(X, Dataset) else None
    of_data = None if data is None else data.runs
    runs = model.runs or of_data
    if not runs or (of_data and model.runs and of_data != model.runs):
        return False
    if isinstance(model.query, np.ndarray) or (data is not None and data.weight is not None):
        return False
    n, T, d = X.shape if isinstance(X, np.ndarray) and X.ndim == 3 else (0, 0, 0)
    if data is not None:
        n, T, d = data.n, data.tokens, data.dim
    rows = runs * n * model.heads * model.U.shape[-2]
    return bool(0 < rows * max(T, d) <= BLOCK)


@over_runs
def _of_each_run(
    model: Classifier | Layer,
    X: npt.ArrayLike | Dataset,
    X2: npt.ArrayLike | Dataset | None,
    wrt: str | Sequence[str] | None,
) -> Array:
    return ntk(model, X, X2, wrt=wrt)


def _of_layer(
    model: Layer,
    X: npt.ArrayLike | Dataset,
    X2: npt.ArrayLike | Dataset | None,
    wrt: str | Sequence[str] | None,
) -> Array:
    if not isinstance(model, Layer):
        raise TypeError(f"model: expected a Classifier or a Layer, got {type(model).__name__}")
    if model.runs is None and not (isinstance(X, Dataset) and X.runs):
        return layer_kernel(model, samples(X), None if X2 is None else samples(X2), wrt)
    return _of_each_run(model, X, X2, wrt)


def scaled_kernel(
    model: Classifier,
    first: Dataset,
    second: Dataset | None = None,
    wrt: str | Sequence[str] | None = None,
) -> tuple[Array, int]:
    """Return the kernel of one run as K 4^unit, with the entries of K of moderate size."""
    K, unit = _kernels(model, first, second, wrt)
    own = np.frexp(_largest(K))[1]
    top = own if unit is None else own + unit
    unit = top - top % 2
    return _in_units(K, own - top % 2)[0], int(unit[0] // 2)


def _in_dtype(kernels: tuple[Array, Array | None]) -> Array:
    K, unit = kernels
    return K if unit is None else _in_units(K, -unit)


def _kernels(
    model: Classifier, first: Dataset, second: Dataset | None, wrt: str | Sequence[str] | None
) -> tuple[Array, Array | None]:
    """Return K (R, n, n2) and its units (R,), None where it is in none; of one run R is 1."""
    names = _names(model, wrt)
    inputs = (first,) if second is None else (first, second)
    sides = [_side(model, data, names) for data in inputs]
    a, b = sides[0], sides[-1]
    total, prompts = _Sum(), [_Sum() for _ in sides]
    heads = 1 if model.W is None else model.heads
    for some in _slices(heads, min(side.heads_at_a_time for side in sides)):
        found = [side.features(some) for side in sides]
        of_a, of_b = found[0], found[-1]
        if "U" in names:  # of all heads of an identity, if they are one, which have the same A X
            total.add(_products(of_a.pooled, of_b.pooled), _joint(a.pooled_unit, b.pooled_unit))
        if "prompt" in names:
            for prompt, side, of in zip(prompts, sides, found, strict=True):
                prompt.add(side.of_prompt(of.moved, some), of.prompt_unit)
        for left, right in zip(of_a.parts, of_b.parts, strict=True):
            total.add(_outer_products(left[0], right[0]), _joint(left[1], right[1]))
    if "prompt" in names:
        p, p2 = prompts[0], prompts[-1]
        K = _products(p.value, p2.value)
        total.add(K if model.W is not None else K / model.heads, _joint(p.unit, p2.unit))
    if total.value is None:  # no names
        return np.zeros((model.runs or 1, first.n, b.data.n), model.dtype), None
    return total.value if heads == 1 else total.value / heads, total.unit


def _joint(unit: Unit, unit2: Unit) -> Unit:
    """Return the unit of a product."""
    if unit is None or unit2 is None:
        return unit if unit2 is None else unit2
    return unit + unit2


# The unit of a sum of nothing.
_NONE = -(10**6)


class _Sum:
    """A sum of arrays (R, ...); if one is in units, in that of its largest part, by runs."""

    value: Any = None
    unit: Unit = None

    def add(self, part: Array, unit: Unit) -> None:
        if self.value is None or (unit is None and self.unit is None):
            self.value = part if self.value is None else self.value + part
            self.unit = unit
            return
        tops = [_top(x, u) for x, u in ((self.value, self.unit), (part, unit))]
        largest = np.maximum(*tops)
        largest = np.where(largest == _NONE, 0, largest)
        self.value = sum(
            _in_units(x, np.where(top == _NONE, 0, largest - (0 if u is None else u)))
            for x, u, top in zip((self.value, part), (self.unit, unit), tops, strict=True)
        )
        self.unit = largest


def _top(array: Array, unit: Unit) -> Array:
    """Return the exponents (R,) of the largest numbers of an array in units; `_NONE` of zeros."""
    size = _largest(array)
    top: Array = np.where(size > 0, np.frexp(size)[1] + (0 if unit is None else unit), _NONE)
    return top


def _names(model: Classifier, wrt: str | Sequence[str] | None) -> tuple[str, ...]:
    known = tuple(model.parameters)
    names = known if wrt is None else (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in known:
            raise ValueError(f"wrt: expected names from {', '.join(known)}, got {name!r}")
    return names


class _Features(NamedTuple):
    """Of some heads A X, D X (R, n, q, g, d) and the gradients, each in its unit."""

    pooled: Array
    moved: Array
    prompt_unit: Unit
    parts: list[Part]


def _side(model: Classifier, data: Dataset, names: tuple[str, ...]) -> _Side:
    """Return one data set as a model sees it, in units if its numbers are not near 1."""
    if model._core.row_map_name == "softmax":
        side = _Side(model, data, names)
        if side.is_ordinary:
            return side
    check_finite(model, data)
    return _SideInUnits(model, data, names)


class _Side:
    """One data set as a model sees it, with numbers as they are, and an axis of runs in front."""

    pooled_unit: Unit = None

    def __init__(self, model: Classifier, data: Dataset, names: tuple[str, ...]) -> None:
        self.model, self.data, self._names = model, data, names
        self._differentiates = names != ("U",)
        q, d = model.U.shape[-2:]
        numbers = (model.runs or data.runs or 1) * data.n * q * max(d, data.tokens)
        self.heads_at_a_time = max(1, BLOCK // max(1, numbers))  # A X or A of each fits a block
        self._prepare()

    def _prepare(self) -> None:
        self._rows = RowsOfModel(self.model, self.data)
        heads = 1 if self.model.W is None else self.model.heads
        self._last = slice(0, min(heads, self.heads_at_a_time))
        self._found = self._rows.of_heads(self._last, derivative=self._differentiates)
        self._Z = _with_runs(self._rows.queries, 4)
        W: Any = self.model.W
        factors = () if W is None else (W,) if isinstance(W, np.ndarray) else (W.Q, W.K)
        self._W: list[tuple[Array, Unit]] = [
            (_with_runs(x, 4), None) for x in factors if x is not None
        ]

    @property
    def is_ordinary(self) -> bool:
        """Whether the core has the rows, whose numbers need no units."""
        return self._found is not None

    def features(self, some: slice) -> _Features:
        """Return the rows of some heads and their gradients."""
        if some != self._last:
            self._last = some
            self._found = self._rows.of_heads(some, derivative=self._differentiates)
        assert self._found is not None
        pooled, moved, unit = self._found
        pooled = _with_runs(pooled, 5)
        if moved is None:
            return _Features(pooled, pooled, None, [])
        moved = _with_runs(moved, 5)
        return _Features(pooled, moved, unit, self._parts(moved, unit, some))

    def _parts(self, moved: Array, unit: Unit, some: slice) -> list[Part]:
        """Return the gradients by W, or Q and K, of D X in units, with those of Z there."""
        if self.model.W is None:
            return []
        Z = self._Z[:, :, :, None]
        if isinstance(self.model.W, np.ndarray):
            return [([(Z, moved)], unit)] if "W" in self._names else []
        (Q, of_Q), (K, of_K) = self._W[0], self._W[-1]
        by_Q = _of_samples(Z, moved), _by_heads(moved, K[:, some])
        by_K = moved, _of_samples(_by_heads(Z, Q[:, some]), moved)
        if len(self._W) == 1:
            return [([by_Q, by_K], _joint(unit, of_Q))] if "Q" in self._names else []
        parts = {"Q": ([by_Q], _joint(unit, of_K)), "K": ([by_K], _joint(unit, of_Q))}
        return [part for name, part in parts.items() if name in self._names]

    def of_prompt(self, moved: Array, some: slice) -> Array:
        """Return the part of some heads in the gradient by the query rows, (R, n, q, d)."""
        if not self._W:
            return np.asarray(moved.sum(axis=3))
        # Rows of the heads side by side, so that one product adds them.
        W = self._W[0][0][:, some]
        if not isinstance(self.model.W, np.ndarray):
            W = W @ self._W[-1][0][:, some].swapaxes(-1, -2)
        stacked = W.swapaxes(-1, -2).reshape(len(W), 1, -1, W.shape[-1])
        found: Array = moved.reshape(*moved.shape[:3], -1) @ stacked
        return found


class _SideInUnits(_Side):
    """The same with all arrays in units, or of a row map other than softmax."""

    def _prepare(self) -> None:
        model, data = self.model, self.data
        self._of_map = model.attention != "softmax"
        self._X, self.pooled_unit = _scaled(_with_runs(data.X, 4))
        U, self._u = _scaled(_with_runs(model.U, 4))
        self._U = U.sum(axis=1, keepdims=True) if model.W is None else U
        if self._differentiates:
            self._Z, self._z = self._query_rows()
            self._scale, s = math.frexp(model.scale)
            self._moved_unit = 2 * self.pooled_unit + self._u + s
            self._W = self._factors()
            tied = len(self._W) == 1 and not isinstance(model.W, np.ndarray)
            factors = [*self._W, *self._W] if tied else self._W
            self._prompt_unit: Unit = self._moved_unit
            for _, unit in factors:
                self._prompt_unit = _joint(self._prompt_unit, unit)

    def _query_rows(self) -> tuple[Array, Array]:
        if self.model.prompt is None:
            return _scaled(_with_runs(query_side(self.model, self.data), 4))
        prompt, unit = _scaled(_with_runs(self.model.prompt, 3))
        return prompt[:, None], unit

    def _factors(self) -> list[tuple[Array, Unit]]:
        """Return W, or Q and K (or Q alone if they are tied), in units."""
        W: Any = self.model.W
        if W is None:
            return []
        if isinstance(W, np.ndarray):
            return [_scaled(_with_runs(W, 4))]
        return [_scaled(_with_runs(x, 4)) for x in (W.Q, W.K) if x is not None]

    def features(self, some: slice) -> _Features:
        pooled, moved = self._pooled(some)
        if not self._differentiates:
            return _Features(pooled, moved, None, [])
        moved *= moved.dtype.type(self._scale)
        of_head, own = _scaled(moved)  # near underflow where attention saturates
        parts = self._parts(of_head, self._z + self._moved_unit + own, some)
        return _Features(pooled, moved, self._prompt_unit, parts)

    def _pooled(self, some: slice) -> tuple[Array, Array]:
        """Return A X and D X of some heads, (R, n, q, g, d) each, a block of samples at a time."""
        U = self._U[:, some]
        g, q, d = U.shape[1:]
        U = U.swapaxes(1, 2).reshape(len(U), 1, q * g, d)
        head = self.model if g == self.model.heads else _of_heads(self.model, some)
        n, T = self.data.n, self.data.tokens
        rows = max(1, BLOCK // (g * q * T))
        if rows >= n:
            found = self._block(head, self.data, U, self._X)
        else:
            parts = []
            for part in _slices(n, rows):
                own = head
                if isinstance(head.query, np.ndarray) and self.data.query is None:
                    own = replace(head, query=head.query[part])
                X = self._X[:, part]
                parts.append(self._block(own, self.data.subset(part), U, X))
            of_A, of_D = zip(*parts, strict=True)
            found = np.concatenate(of_A, axis=1), np.concatenate(of_D, axis=1)
        pooled, moved = (x.reshape(*x.shape[:2], q, g, d) for x in found)
        return pooled, moved

    def _block(
        self, head: Classifier, data: Dataset, U: Array, tokens: Array
    ) -> tuple[Array, Array]:
        """Return A X and D X (R, n, q g, d) of a block of samples; without W or prompt no D X."""
        A = _with_runs(head.attention(data), 5).swapaxes(2, 3)
        shape = A.shape
        A = A.reshape(*shape[:2], -1, shape[-1])
        pooled = A @ tokens
        if not self._differentiates:
            return pooled, pooled
        C = U @ tokens.swapaxes(-1, -2)
        if self._of_map:
            by_heads = C.reshape(shape)[0].swapaxes(1, 2)
            D = _of_map(head, data, by_heads).swapaxes(1, 2).reshape(A.shape)
        else:
            D = score_gradient(A, C)
        return pooled, D @ tokens


def _with_runs(array: Array, axes: int) -> Array:
    return array if array.ndim == axes else array[None]


def _scaled(array: Array) -> tuple[Array, Array]:
    """Return an array (R, ...) in units of the size of each run, and their exponents (R,)."""
    unit = moderate(np.frexp(_largest(array))[1])
    return _in_units(array, unit), unit


def _largest(array: Array) -> Array:
    """Return the largest |x| of each run (R,)."""
    rows = array.reshape(len(array), -1)
    found: Array = np.maximum(rows.max(axis=1, initial=0), -rows.min(axis=1, initial=0))
    return found


def _in_units(array: Array, unit: Array) -> Array:
    """Return `array` (R, ...) / 2^unit, exact unless it leaves the range of its dtype."""
    if not unit.any():
        return array
    shape = (-1,) + (1,) * (array.ndim - 1)
    if np.abs(unit).max() <= WHOLE_UNIT:
        with np.errstate(over="ignore", under="ignore"):
            scaled: Array = array * np.ldexp(array.dtype.type(1), -unit).reshape(shape)
        return scaled
    if len(unit) == 1:
        return in_units(array, int(unit[0]))
    return np.stack([in_units(x, int(u)) for x, u in zip(array, unit, strict=True)])


def _of_samples(rows: Array, samples: Array) -> Array:
    """Repeat rows (R, 1, ...) that all samples (R, n, ...) share."""
    if rows.shape[1] == samples.shape[1]:
        return rows
    return np.broadcast_to(rows, (len(rows), samples.shape[1], *rows.shape[2:]))


def _by_heads(rows: Array, factor: Array) -> Array:
    """Multiply rows (R, n, q, g or 1, d) by the factors (R, g, d, r) of the heads."""
    found: Array = rows.swapaxes(2, 3) @ factor[:, None]
    return found.swapaxes(2, 3)


def _of_heads(model: Classifier, some: slice) -> Classifier:
    at = (slice(None),) * (model.runs is not None) + (some,)
    W: Any = model.W
    if isinstance(W, np.ndarray):
        W = W[at]
    elif W is not None:
        W = replace(W, Q=W.Q[at], K=None if W.K is None else W.K[at])
    return replace(model, W=W, U=model.U[at])


def _of_map(model: Classifier, data: Dataset, C: Array) -> Array:
    """D (n, H, q, T) with another row map, by the specification, in float64."""
    own = Plain.of(model)
    seen = inputs(own, data.X, data.query, data.lengths)
    D: Array = weights_tangent(own, seen, weights(own, seen), C.astype(np.float64))
    return D.astype(model.dtype)


def _products(a: Array, b: Array) -> Array:
    """Return inner products (R, n, n2) of two sets of features; of one if both are one object."""
    left = a.reshape(*a.shape[:2], -1)
    right = left if a is b else b.reshape(*b.shape[:2], -1)
    found: Array = left @ right.swapaxes(-1, -2)
    return found


def _outer_products(left: list[Outer], right: list[Outer]) -> Array:
    """Return the inner products of features that are sums of products over query rows."""
    (first, columns), (second, columns2) = left[0], right[0]
    n, n2, q = columns.shape[1], columns2.shape[1], first.shape[2]
    g, rows, of_column = columns.shape[3], first.shape[4], columns.shape[4]
    if first.shape[1] != n or second.shape[1] != n2:  # rows of a prompt, which all samples share
        if q <= rows:
            prompt = first[:, :, :, 0]
            alike = prompt @ prompt.swapaxes(-1, -2)
            moved = alike @ columns.reshape(*columns.shape[:3], -1)
            return _products(moved, columns2)
        left = [(_of_samples(first, columns), columns)]
        right = left if columns is columns2 else [(_of_samples(second, columns2), columns2)]
    # Multiplications; an entry of a product of two products counts as four.
    by_features = (n + n2) * q * g * rows * of_column * len(left) + n * n2 * g * rows * of_column
    by_pairs = sum(
        n * n2 * q * q * (a.shape[3] * a.shape[4] + b.shape[3] * b.shape[4] + 4 * a.shape[3])
        for a, b in left
        for _ in right
    )
    if by_pairs < by_features and (q == 1 or n * n2 * q * q * len(columns) <= BLOCK):
        return _by_pairs(left, right)
    K: Any = 0.0
    step = max(1, BLOCK // (len(columns) * g * of_column * max(n, n2)))
    for part in _slices(rows, step):
        features = _features(left, part)
        K = K + _products(features, features if right is left else _features(right, part))
    return np.asarray(K)


def _by_pairs(left: list[Outer], right: list[Outer]) -> Array:
    """Return the same as sums over pairs of query rows, and of heads whose lefts differ."""
    K: Any = 0.0
    for a, b in left:
        for a2, b2 in right:
            heads = [slice(None)] if a.shape[3] == a2.shape[3] == 1 else None
            for h in heads or [slice(h, h + 1) for h in range(b.shape[3])]:
                own, own2 = (x if x.shape[3] == 1 else x[:, :, :, h] for x in (a, a2))
                pairs = _pairs(own, own2 if a2 is not a else own)
                of_b = b[:, :, :, h]
                pairs = pairs * _pairs(of_b, of_b if b2 is b else b2[:, :, :, h])
                K = K + _sums(pairs)
    return np.asarray(K)


def _sums(pairs: Array) -> Array:
    """Return the sums over both axes of rows of pairs (R, n, q, n2, q2)."""
    q2 = pairs.shape[4]
    if q2 > 1:  # a product is faster than a sum over a short last axis
        pairs = pairs @ np.ones(q2, pairs.dtype)
    found: Array = pairs.reshape(pairs.shape[:4]).sum(axis=2)
    return found


def _pairs(a: Array, b: Array) -> Array:
    """Return the inner products (R, n, q, n2, q2) of rows, of all their heads together."""
    (runs, n, q), (n2, q2) = a.shape[:3], b.shape[1:3]
    left = a.reshape(runs, n * q, -1)
    right = left if a is b else b.reshape(len(b), n2 * q2, -1)
    found: Array = left @ right.swapaxes(-1, -2)
    return found.reshape(-1, n, q, n2, q2)


def _features(outers: list[Outer], part: slice) -> Array:
    """Return rows `part` of leftᵀ right, (R, n, ...)."""
    if len(outers) == 1:
        return _feature(outers[0][0][..., part], outers[0][1])[0]
    first, *rest = (_feature(a[..., part], b) for a, b in outers)
    total, by_rows = first
    for other, same in rest:
        total = total + (other if same == by_rows else other.swapaxes(2, 3))
    return total


def _feature(a: Array, b: Array) -> tuple[Array, bool]:
    """Return leftᵀ right of all heads and whether it is (R, n, a, g, b), or (R, n, g, a, b)."""
    if a.shape[3] == 1:
        found: Array = a[:, :, :, 0].swapaxes(-1, -2) @ b.reshape(*b.shape[:3], -1)
        return found.reshape(*found.shape[:3], *b.shape[3:]), True
    return a.transpose(0, 1, 3, 4, 2) @ b.swapaxes(2, 3), False


def _slices(length: int, step: int) -> Iterator[slice]:
    for begin in range(0, length, step):
        yield slice(begin, min(begin + step, length))
