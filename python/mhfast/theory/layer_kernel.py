"""The tangent kernel of a layer, between all outputs of all rows of all samples.

With P = A_h X (n, q, d) and M[o] = D X (n, q, d) the derivative of column o of A_h X V_h by the
scores, centred as in `kernel`,

    ⟨∂F_ito/∂V_h, ∂F_jsr/∂V_h⟩ = [o = r] ⟨P_it, P_js⟩,
    ⟨∂F_ito/∂W_h, ∂F_jsr/∂W_h⟩ = scale² ⟨z_it, z_js⟩ ⟨M_ito, M_jsr⟩,

and z is that of all heads: P and M of as many heads as fit `BLOCK` numbers lie side by side, so
that one product adds them.  The core computes them where numbers are near 1; else they are in units
of their own size, powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import _core
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Layer
from .inputs import (
    check_plain_layer,
    exponent,
    in_units,
    moderate,
    plain_layer,
    query_side,
)
from .tangent_rows import RowsOfModel

# Numbers of M of the heads that are taken together: 32 MiB in float64.
BLOCK = 1 << 22


def layer_kernel(
    model: Layer,
    first: Dataset,
    second: Dataset | None,
    wrt: str | Sequence[str] | None,
) -> Array:
    """Return K (n, q, p, n2, q2, p)."""
    known = tuple(model.parameters)
    names = known if wrt is None else (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in known:
            raise ValueError(f"wrt: expected names from {', '.join(known)}, got {name!r}")
    check_plain_layer(model, identities=True)
    inputs = (first,) if second is None else (first, second)
    sides = [_side(model, data, differentiate="W" in names) for data in inputs]
    a, b = sides[0], sides[-1]
    rows, columns, p = len(a.Z), len(b.Z), a.p
    K: Array | None = None
    alike = a.Z @ b.Z.T if "W" in names else None
    heads = 1 if model.W is None else model.heads  # heads of an identity attend alike
    each = min(side.heads_at_a_time for side in sides)
    for begin in range(0, heads, each):
        some = slice(begin, min(begin + each, heads))
        parts = [side.features(some) for side in sides]
        (pooled, moved, m), (pooled2, moved2, m2) = parts[0], parts[-1]
        of_W = of_V = None
        if alike is None:
            part = np.zeros((rows, p, columns, p), model.dtype)
        else:
            part = (moved @ moved2.T).reshape(rows, p, columns, p)
            of_W = _in_units(alike, -(a.z + b.z + m + m2))
        if "V" in names:
            of_V = _in_units(pooled @ pooled2.T, -(a.x + b.x))
            if model.W is None:
                of_V *= model.heads
        _core.join_outputs(part, of_W, of_V)
        K = part if K is None else K + part
    assert K is not None
    n, n2 = inputs[0].n, inputs[-1].n
    return K.reshape(n, rows // n, p, n2, columns // n2, p)


def _side(model: Layer, data: Dataset, *, differentiate: bool) -> _Side:
    """Return one data set as a layer sees it, in units if its numbers are not near 1."""
    side = _Side(model, data, differentiate)
    return side if side.is_ordinary else _SideInUnits(model, data, differentiate)


class _Side:
    """One data set as a layer sees it; Z (n q, d) and X in units of 2^z and 2^x, which are 1."""

    z = x = 0

    def __init__(self, model: Layer, data: Dataset, differentiate: bool) -> None:
        self.layer, self._data, self._differentiates = model, data, differentiate
        self._prepare()

    def _set_queries(self, Z: Array) -> None:
        """Set Z, p, and how many heads at a time fit a block, M or D of each."""
        self.Z = Z
        V = self.layer.V  # an array, as of every plain layer, or the identity
        self.p = p = Z.shape[-1] if V is None else V.shape[-1]
        self.heads_at_a_time = max(1, BLOCK // max(1, Z.size * p, len(Z) * p * self._data.tokens))

    def _prepare(self) -> None:
        self._rows = RowsOfModel(self.layer, self._data)
        Z = self._rows.queries
        self._set_queries(Z.reshape(-1, Z.shape[-1]))
        heads = 1 if self.layer.W is None else self.layer.heads
        self._last = slice(0, min(heads, self.heads_at_a_time))
        self._found = self._rows.of_heads(self._last, derivative=self._differentiates)

    @property
    def is_ordinary(self) -> bool:
        """Whether the core has the rows, whose numbers need no units."""
        return self._found is not None

    def features(self, some: slice) -> tuple[Array, Array, int]:
        """Return P (n q, g d) and M (n q p, g d) of some heads, and the exponent of M's unit."""
        if some != self._last:
            self._last = some
            self._found = self._rows.of_heads(some, derivative=self._differentiates)
        assert self._found is not None
        pooled, moved, unit = self._found
        columns = pooled.shape[-2] * pooled.shape[-1]
        pooled = pooled.reshape(-1, columns)
        if moved is None:
            return pooled, pooled, 0
        return pooled, moved.reshape(-1, columns), 0 if unit is None else int(unit[0])


class _SideInUnits(_Side):
    """The same with numbers in units of their size."""

    def _prepare(self) -> None:
        data = replace(self._data, weight=None)  # samples of weight 0 keep their places
        self.layer, self._data = plain_layer(self.layer, data, identities=True, in_double=False)
        Z = query_side(self.layer, self._data).reshape(-1, self._data.dim)
        Z, self.z = _scaled(Z)
        self._set_queries(Z)
        self._X, self.x = _scaled(self._data.X)

    def features(self, some: slice) -> tuple[Array, Array, int]:
        layer, X = self.layer, self._X
        g, whole = some.stop - some.start, some.stop - some.start == layer.heads
        parameters: dict[str, Any] = {name: array[some] for name, array in layer.parameters.items()}
        head = layer if whole else replace(layer, **parameters)
        A = head.attention(self._data)[:, :g]
        n, _, q, T = A.shape
        P = (A.reshape(n, g * q, T) @ X).reshape(n, g, q, -1)
        pooled = P.transpose(0, 2, 1, 3).reshape(n * q, -1)
        if not self._differentiates:
            return pooled, pooled, 0
        v, values = 0, X[:, None]
        if layer.V is not None:
            V, v = _scaled(layer.V[some])
            values = values @ V
        p = values.shape[-1]
        C = np.empty((n, g, q, p, T), A.dtype)
        C[...] = values.swapaxes(-1, -2)[:, :, None]
        D = _gradients(A.reshape(-1, T), C.reshape(-1, p, T)).reshape(n, g * q * p, T)
        M: Array = (D @ X).reshape(n, g, q * p, -1).swapaxes(1, 2).reshape(n * q * p, -1)
        scale, s = math.frexp(layer.scale)
        M *= M.dtype.type(scale)
        M, own = _scaled(M)
        return pooled, M, 2 * self.x + v + own + s


def _in_units(array: Array, unit: int) -> Array:
    return in_units(array, unit) if unit else array


def _scaled(array: Array) -> tuple[Array, int]:
    """Return `array` in units of its size unless that is near 1, and the exponent of the unit."""
    unit = moderate(exponent(array))
    return (in_units(array, unit) if unit else array), unit


def score_gradient(A: Array, C: Array) -> Array:
    """D = A∘(C - rowsum(A∘C)) computed centred: c = C - C_m with m the row's largest weight.

    As c_m is 0, D_m = -A_m rowsum(A∘c) keeps its digits where A_m is nearly 1.  D takes the place
    of C, whose memory is contiguous.
    """
    T = A.shape[-1]
    return _gradients(A.reshape(-1, T), C.reshape(-1, 1, T)).reshape(A.shape)


def _gradients(A: Array, C: Array) -> Array:
    """`score_gradient` (r, k, T) of weights (r, T) and C (r, k, T), in the place of C."""
    rows, m, D = np.arange(len(A)), A.argmax(axis=-1), C
    D -= C[rows, :, m][..., None]
    D -= D @ A[..., None]
    D *= A[:, None]
    return D
