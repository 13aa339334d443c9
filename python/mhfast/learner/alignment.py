"""The error of a learnt layer, up to what examples cannot determine.

With at least two tokens a layer is determined up to the order of its heads, heads with the same W,
which act as a single head with the sum of their V, and heads with V = 0, which do nothing. Errors
are therefore measured after both layers are reduced to the least number of heads and these are
paired.

The setting is that of Chen, Li, "Provably learning a multi-head attention layer".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from ..models import Layer
from ..models.low_rank import LowRank
from .examples import Float64, Int64

DEPENDENT = 1e-8
"""Relative to the largest singular value: smaller ones do not count towards the dimension of a
span."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """A learnt layer compared with the true one.

    Attributes
    ----------
    permutation : int64 array (H,)
        The learnt head of each true head.  -1 for a head that vanishes, that was merged with
        another one of the same W, or that has no partner.
    W_error, V_error : float64 array (H,)
        ‖W_learnt - W‖ / ‖W‖ of every head, and the same for V; NaN if there is no learnt head. For
        merged heads, the error of the merged head; if W = 0, ‖W_learnt‖.
    head_error : float64 array (H,)
        The same for W and V of a head together: √(‖W_learnt - W‖² + ‖V_learnt - V‖²) over
        √(‖W‖² + ‖V‖²).
    W_difference : float64 array (H, d, d)
        W_learnt - W, entry by entry; NaN if there is no learnt head.
    V_difference : float64 array (H, d, p)
        The same for V.
    error : float
        ‖learnt - truth‖ / ‖truth‖ over all W and V together; inf if the numbers of heads differ.
    merged : tuple of int
        The numbers of heads, learnt and true, that are left after merging.

    Examples
    --------
    >>> import mhfast as mh
    >>> truth = mh.Layer.gaussian(2, 6, 4, std=0.5, seed=0)
    >>> swapped = mh.Layer(truth.W[::-1], 1.1 * truth.V[::-1])
    >>> found = mh.learner.align(swapped, truth)
    >>> found.permutation.tolist()
    [1, 0]
    >>> found.V_error.round(3), found.W_error.round(3)
    (array([0.1, 0.1]), array([0., 0.]))
    """

    permutation: Int64
    W_error: Float64
    V_error: Float64
    head_error: Float64
    W_difference: Float64
    V_difference: Float64
    error: float
    merged: tuple[int, int]


def align(learnt: Layer, truth: Layer, *, tolerance: float = 1e-6) -> Alignment:
    """Pair the heads of a learnt layer with those of the true one and measure the differences.

    Parameters
    ----------
    learnt, truth : Layer
        With any numbers of heads and the same d and p. A `scale` is treated as part of W.
    tolerance : float
        Heads whose W differ by no more than this fraction of the largest ‖W‖ of the truth are
        merged; a head whose ‖V‖ is no more than this fraction of the largest ‖V‖ of the truth is
        removed.

    Returns
    -------
    Alignment
        The pairs have the least sum of ‖W_learnt - W‖² / w² + ‖V_learnt - V‖² / v², where w and v
        are the root mean squares of ‖W‖ and ‖V‖ over the true heads.

    Raises
    ------
    TypeError
        An argument is not a Layer, or the tolerance not a number.
    ValueError
        A layer has a run axis or holds NaN or inf, d or p differ, or the tolerance is negative.

    Examples
    --------
    >>> import mhfast as mh
    >>> truth = mh.Layer.gaussian(2, 6, 4, std=0.5, seed=0)
    >>> swapped = mh.Layer(truth.W[::-1], truth.V[::-1])  # the same function
    >>> mh.learner.align(swapped, truth).error < 1e-12
    True
    """
    tolerance = _checked(tolerance)
    W, V = dense_parameters(truth, "truth")
    learnt_W, learnt_V = dense_parameters(learnt, "learnt")
    checks.shape(learnt_W, "learnt.W", "H d d", (None, *W.shape[1:]))
    checks.shape(learnt_V, "learnt.V", "H d p", (None, *V.shape[1:]))
    alike, vanishing = tolerance * _norms(W).max(), tolerance * _norms(V).max()
    true_heads, V = _merged(W, V, alike, vanishing)
    learnt_heads, learnt_V = _merged(learnt_W, learnt_V, alike, vanishing)
    dW, dV = _distances(learnt_W[learnt_heads], W[true_heads]), _distances(learnt_V, V)
    learnt_at, true_at = _pairs(dW, dV, W[true_heads], V)

    permutation = np.full(truth.heads, -1)
    W_error, V_error, head_error = np.full((3, truth.heads), np.nan)
    W_difference, V_difference = np.full_like(W, np.nan), np.full((len(W), *V.shape[1:]), np.nan)
    heads = true_heads[true_at]
    W_difference[heads] = learnt_W[learnt_heads[learnt_at]] - W[heads]
    V_difference[heads] = learnt_V[learnt_at] - V[true_at]
    permutation[heads] = learnt_heads[learnt_at]
    dW, dV = dW[learnt_at, true_at], dV[learnt_at, true_at]
    W_error[heads] = dW / _or_one(_norms(W[heads]))
    V_error[heads] = dV / _or_one(_norms(V[true_at]))
    head_error[heads] = np.hypot(dW, dV) / _or_one(np.hypot(_norms(W[heads]), _norms(V[true_at])))
    counts = len(learnt_heads), len(true_heads)
    if counts[0] == counts[1]:
        size = math.hypot(np.linalg.norm(W[heads]), np.linalg.norm(V))
        error = math.hypot(np.linalg.norm(dW), np.linalg.norm(dV)) / (size or 1.0)
    else:
        error = math.inf
    return Alignment(
        permutation, W_error, V_error, head_error, W_difference, V_difference, error, counts
    )


def merge_heads(layer: Layer, *, tolerance: float = 1e-6) -> Layer:
    """Return the same function with the least number of heads.

    Heads with the same W become one with the sum of their V; heads with V = 0 are removed, but at
    least one head is kept.

    Parameters
    ----------
    layer : Layer
    tolerance : float
        Heads whose W differ by no more than this fraction of the largest ‖W‖, or of 1, are merged.
        A head whose ‖V‖ is no more than this fraction of the largest ‖V‖ is removed.

    Returns
    -------
    Layer
        With at least one head, in the order of the first of each group.

    Raises
    ------
    TypeError
        `layer` is not a Layer, or the tolerance not a number.
    ValueError
        It has a run axis or holds NaN or inf, or the tolerance is negative.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> one = mh.Layer.gaussian(1, 6, 4, std=0.5, seed=0)
    >>> two = mh.Layer(one.W.repeat(2, axis=0), np.concatenate([one.V, 2 * one.V]))
    >>> merged = mh.learner.merge_heads(two)  # heads with the same W act as one
    >>> merged.heads, bool(np.allclose(merged.V, 3 * one.V))
    (1, True)
    """
    tolerance = _checked(tolerance)
    W, V = dense_parameters(layer, "layer")
    heads, merged = _merged(
        W, V, tolerance * max(1.0, _norms(W).max()), tolerance * _norms(V).max()
    )
    if len(heads) == 0:
        heads, merged = np.array([0]), np.zeros_like(V[:1])
    return Layer(W[heads], merged)


def _checked(tolerance: float) -> float:
    tolerance = checks.finite(tolerance, "tolerance")
    if tolerance < 0.0:
        raise ValueError(f"tolerance: expected a number of at least 0, got {tolerance}")
    return tolerance


def hull_cosine(directions: npt.ArrayLike, truth: npt.ArrayLike) -> float:
    """Measure how well directions span the affine hull of the true key-query matrices.

    Parameters
    ----------
    directions : array (k, d, d)
        They need not be independent or of norm one.
    truth : array (H, d, d)
        W_1, ..., W_H.

    Returns
    -------
    float
        The smallest cosine of the principal angles between the span of the directions and that of
        the differences W_i - W_1: 1 if they are the same, as for H = 1 and k = 0; 0 if their
        dimensions differ.

    Raises
    ------
    ValueError
        A shape does not fit, `truth` has no head, or a number is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> W = np.eye(9).reshape(9, 3, 3)[:3]  # three heads: their hull has two directions
    >>> round(mh.learner.hull_cosine(W[1:] - W[0], W), 6)
    1.0
    >>> mh.learner.hull_cosine([W[0] + W[1]], W) < 0.5
    True
    """
    W = checks.numbers_of_shape(truth, "truth", "H d d", (None, None, None))
    checks.shape(W, "truth", "H d d", (None, *W.shape[-1:] * 2))
    if len(W) == 0:
        raise ValueError(f"truth: expected at least one head, got shape {W.shape}")
    D = checks.numbers_of_shape(directions, "directions", "k d d", (None, *W.shape[1:]))
    found, hull = _basis(D), _basis(W[1:] - W[0])
    if len(found) != len(hull):
        return 0.0
    if len(hull) == 0:
        return 1.0
    return min(1.0, float(np.linalg.svd(found @ hull.T, compute_uv=False)[-1]))


def dense_parameters(layer: Layer, name: str) -> tuple[Float64, Float64]:
    """Return the parameters of a layer of a single run as dense arrays in float64.

    Parameters
    ----------
    layer : Layer
    name : str
        The name in error messages.

    Returns
    -------
    W : float64 array (H, d, d)
        Times the scale.
    V : float64 array (H, d, p)

    Raises
    ------
    TypeError
        `layer` is not a Layer.
    ValueError
        It has a run axis, is not of softmax attention, or holds NaN or inf.
    """
    if not isinstance(layer, Layer):
        raise TypeError(f"{name}: expected a Layer, got {type(layer).__name__}")
    if layer.runs is not None:
        raise ValueError(f"{name}: expected one run, as {name}[0] is, got {layer.runs} runs")
    if layer.attention != "softmax":
        raise ValueError(f"{name}: expected attention 'softmax', got {str(layer.attention)!r}")
    dense = layer.W.dense() if isinstance(layer.W, LowRank) else layer.W
    identity = np.broadcast_to(np.eye(layer.dim), (layer.heads, layer.dim, layer.dim))
    values = layer.V if layer.B is None else layer.V.dense()
    dense, values = (identity if array is None else array for array in (dense, values))
    W, V = layer.scale * dense.astype(np.float64), values.astype(np.float64)
    if not (np.isfinite(W).all() and np.isfinite(V).all()):
        raise ValueError(f"{name}: expected finite parameters, got NaN or inf")
    return W, V


def _merged(W: Float64, V: Float64, alike: float, vanishing: float) -> tuple[Int64, Float64]:
    """Return the remaining heads, in order, and their V plus those of the heads merged into them.

    Of equal heads the one with the largest V is kept, because its W is determined best.
    """
    total = V.copy()
    left: list[int] = []
    for h in np.argsort(-_norms(V), kind="stable"):
        like = next((g for g in left if np.linalg.norm(W[g] - W[h]) <= alike), None)
        if like is None:
            left.append(int(h))
        else:
            total[like] += V[h]
    heads = np.array(sorted(left))
    heads = heads[_norms(total[heads]) > vanishing]
    return heads, total[heads]


def _pairs(dW: Float64, dV: Float64, W: Float64, V: Float64) -> tuple[Int64, Int64]:
    from scipy.optimize import linear_sum_assignment  # slow to import

    # Mean squares over the true heads; without a head there are no pairs.
    w2, v2 = (float((a**2).sum()) / max(len(a), 1) or 1.0 for a in (W, V))
    at, of = linear_sum_assignment(dW**2 / w2 + dV**2 / v2)
    return at, of


def _norms(matrices: Float64) -> Float64:
    norms: Float64 = np.linalg.norm(matrices, axis=(1, 2))
    return norms


def _distances(a: Float64, b: Float64) -> Float64:
    """‖a_i - b_j‖, computed from differences, so that small distances are accurate."""
    return np.array([_norms(each - b) for each in a]).reshape(len(a), len(b))


def _or_one(norms: Float64) -> Float64:
    return np.where(norms > 0.0, norms, 1.0)


def _basis(matrices: Float64) -> Float64:
    """Return orthonormal rows (rank, d²) of the span of matrices (k, d, d)."""
    flat = matrices.reshape(len(matrices), math.prod(matrices.shape[1:]))
    _, values, rows = np.linalg.svd(flat, full_matrices=False)
    basis: Float64 = rows[values > DEPENDENT * values.max(initial=0.0)]
    return basis
