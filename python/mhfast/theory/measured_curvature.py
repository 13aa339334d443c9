"""Curvature of the logistic loss around a model, measured there and enclosed in a ball.

Let p_i be the weights of the samples, m_i = y_i Φ_i, w_i = -ℓ'(m_i) and g_i = ∇Φ_i at θ.  Then

    ∇²L = G + N,    G = Σ_i p_i ℓ''(m_i) g_i g_iᵀ ≥ 0,    N = -Σ_i p_i w_i y_i ∇²Φ_i,

and N consists of one block for each head.  The extreme eigenvalues of N and the largest of G are
computed at θ.  With Rz_i, δ_i the largest query row and distance of two tokens of sample i, s_i =
σ Rz_i δ_i, u the largest ‖U_h‖ and κ_i, τ_i the bounds

    sqrt(H) ‖∇²Φ_i‖ ≤ κ_i(u) = sqrt(q) s_i (δ_i/8) (s_i u/2 + sqrt(s_i² u²/4 + 4))
    sqrt(H) ‖∇³Φ_i‖ ≤ τ_i(u) = sqrt(q) s_i² δ_i sqrt(s_i² u²/16 + 9/64)

everywhere within r of θ, with κ_i, τ_i at u + r,

    |Φ_i - Φ_i(θ)| ≤ a_i = ‖g_i‖ r + κ_i r²/(2 sqrt(H))
    ‖N - N(θ)‖ ≤ ν = Σ_i p_i w_i (exp(a_i) τ_i r + (exp(a_i) - 1) κ_i) / sqrt(H)
    λ_min(∇²L) ≥ λ_min(N(θ)) - ν
    λ_max(∇²L) ≤ (exp(max a_i / 2) λ_max(G(θ))^(1/2) + f)² + λ_max(N(θ)) + ν,
    f² = Σ_i p_i min(1/4, ℓ''(m_i) exp(a_i)) (κ_i r)² / H.

Proofs are in docs/theory.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import Gradients, norm
from ..models import Classifier
from .guarantees import same_family
from .inputs import classifier, dense_W, norms, query_side, settled, spread
from .kernel import ntk

BLOCK = 1 << 22  # numbers of one block of tokens, 32 MiB


@dataclass(frozen=True, eq=False)
class LocalCurvature:
    """Curvature at a model, and bounds of it in balls around the model.

    Attributes
    ----------
    least, most : float
        Bounds of the eigenvalues of N at θ, rounding included.
    spread : float
        λ_max(G) at θ, or a bound of it.
    weights, slopes, bends, gradients : array (n,)
        p_i, w_i, ℓ''(m_i) and ‖g_i‖.
    sizes : array (n,)
        s_i.
    spreads : array (n,)
        δ_i.
    readout : float
        u, the largest ‖U_h‖ at θ.
    rows, heads : int
        q and H.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, norm=0.5, seed=0)
    >>> model = mh.Classifier.gaussian(3, 5, 8, std=0.3, seed=0)
    >>> around = mh.theory.local_curvature(model, data)
    >>> ends = mh.theory.hessian_extremes(model, data)
    >>> bool(around.smallest(0.0) <= ends.smallest <= ends.largest <= around.largest(0.0))
    True
    >>> bool(around.largest(0.1) > around.largest(0.0))
    True
    """

    least: float
    most: float
    spread: float
    weights: Array
    slopes: Array
    bends: Array
    gradients: Array
    sizes: Array
    spreads: Array
    readout: float
    rows: int
    heads: int

    def smallest(self, within: npt.ArrayLike) -> Array:
        """Bound the eigenvalues of ∇²L from below, at all parameters within a distance of θ.

        Parameters
        ----------
        within : float, or array
            r, at least 0.

        Returns
        -------
        array of the shape of `within`
            -inf where numbers overflow.
        """
        return self.least - self._change(np.asarray(within, np.float64))

    def largest(self, within: npt.ArrayLike) -> Array:
        """Bound the eigenvalues of ∇²L from above, at all parameters within a distance of θ.

        Parameters
        ----------
        within : float, or array
            r, at least 0.

        Returns
        -------
        array of the shape of `within`
            inf where numbers overflow.
        """
        r = np.asarray(within, np.float64)[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            a, bend = outputs(self, r), second(self, r)
            grown = np.minimum(0.25, self.bends * np.exp(a)) * (bend * r) ** 2
            more = np.sqrt((self.weights * grown).sum(axis=-1))
            root = np.exp(a.max(axis=-1) / 2) * math.sqrt(self.spread) + more
            found = root * root + self.most + self._change(r[..., 0])
        return np.where(np.isnan(found), np.inf, found)

    def _change(self, within: Array) -> Array:
        """Return ν."""
        r = within[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            a = outputs(self, r)
            each = np.exp(a) * third(self, r) * r + np.expm1(a) * second(self, r)
            found = (self.weights * self.slopes * each).sum(axis=-1)
        return np.where(np.isnan(found), np.inf, found)


def second(around: LocalCurvature, within: Array) -> Array:
    """Bound ‖∇²Φ_i‖ within a distance of θ, for `within` of shape (..., 1) or (n,)."""
    half = around.sizes * (around.readout + within) / 2
    size = math.sqrt(around.rows / around.heads) * around.sizes * around.spreads / 8
    return np.asarray(size * (half + np.hypot(half, 2.0)))


def outputs(around: LocalCurvature, within: Array) -> Array:
    """Bound |Φ_i - Φ_i(θ)| within a distance of θ, for `within` of shape (..., 1) or (n,)."""
    with np.errstate(over="ignore"):  # the bound is then infinite, and right
        return np.asarray((around.gradients + second(around, within) * within / 2) * within)


def third(around: LocalCurvature, within: Array) -> Array:
    """Bound ‖∇³Φ_i‖ within a distance of θ, for `within` of shape (..., 1) or (n,)."""
    size = math.sqrt(around.rows / around.heads) * around.sizes**2 * around.spreads
    return np.asarray(size * np.hypot(around.sizes * (around.readout + within) / 4, 3 / 8))


class SegmentCurvature(NamedTuple):
    """Bounds of the eigenvalues of ∇²L on a segment.

    Attributes
    ----------
    smallest, largest : float

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, norm=0.5, seed=0)
    >>> start = mh.Classifier.gaussian(3, 5, 8, std=0.3, seed=0)
    >>> end = mh.train(start, data, steps=1, optimizer=mh.GradientDescent(0.5)).model
    >>> bounds = mh.theory.segment_curvature(start, end, data)
    >>> ends = mh.theory.hessian_extremes(end, data)
    >>> bool(bounds.smallest <= ends.smallest <= ends.largest <= bounds.largest)
    True
    """

    smallest: float
    largest: float


def local_curvature(
    model: Classifier, X: npt.ArrayLike | Dataset, y: npt.ArrayLike | None = None
) -> LocalCurvature:
    """Measure the curvature of the logistic loss at a model, and enclose it in balls around it.

    Parameters
    ----------
    model : Classifier
        θ, with dense W and no prompt.
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset

    Returns
    -------
    LocalCurvature

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape does not fit, a number is not finite, or data have a run axis.

    Notes
    -----
    The matrix N is formed head by head, (d² + q d)² numbers each, and its eigenvalues are those of
    LAPACK, widened by (d² + q d) 2⁻⁵⁰ of its Frobenius norm; λ_max(G) is that of the tangent
    kernel.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, norm=0.5, seed=0)
    >>> model = mh.Classifier.gaussian(3, 5, 8, std=0.3, seed=0)
    >>> around = mh.theory.local_curvature(model, data)
    >>> worst = mh.theory.curvature_bounds(model, data, within=0.01)
    >>> bool(-around.smallest(0.01) < worst.weak_convexity * model.loss(data))
    True
    """
    data = as_dataset(X, y)
    if data.runs is not None:
        raise ValueError(f"X: expected one data set, as X.run(0) is, got {data.runs} runs")
    model, data, _ = settled(model, data, dense=True)
    kernel = ntk(model, data)
    found = measured(model, data, np.sqrt(np.diag(kernel)), spreads(data))
    scaled = np.sqrt(found.weights * found.bends)
    _, largest = _extremes(scaled[:, None] * kernel * scaled)
    return dataclasses.replace(found, spread=largest)


def segment_curvature(
    first: Classifier,
    last: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    parts: int = 1,
) -> SegmentCurvature:
    """Enclose the eigenvalues of the Hessian of the logistic loss on a segment.

    The segment is cut into parts of equal length, each in a ball around its middle, where the
    curvature is measured.

    Parameters
    ----------
    first, last : Classifier
        Its ends, with dense W and no prompt, alike but for W and U.
    X : array (n, T, d) of the models' dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset
    parts : int
        How many, at least 1; the more, the closer.

    Returns
    -------
    SegmentCurvature

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If an argument does not fit, as in `local_curvature`, the models differ in more than W and
        U, or `parts` is below 1.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, norm=0.5, seed=0)
    >>> start = mh.Classifier.gaussian(3, 5, 8, std=0.3, seed=0)
    >>> end = mh.train(start, data, steps=3, optimizer=mh.GradientDescent(0.5)).model
    >>> one, four = (mh.theory.segment_curvature(start, end, data, parts=k) for k in (1, 4))
    >>> one.smallest < four.smallest < 0.0 < four.largest < one.largest
    True
    """
    parts = checks.count(parts, "parts")
    same_family(classifier(first, dense=True), classifier(last, dense=True), "last", "first")
    change = {name: last.parameters[name] - x for name, x in first.parameters.items()}
    step = Gradients(**change)
    half = float(norm(step)) / (2 * parts) * (1 + 2.0**-40)  # middles are rounded
    around = [local_curvature(first + ((k + 0.5) / parts) * step, X, y) for k in range(parts)]
    return SegmentCurvature(
        min(float(part.smallest(half)) for part in around),
        max(float(part.largest(half)) for part in around),
    )


def measured(
    model: Classifier, data: Dataset, gradients: Array, distances: Array
) -> LocalCurvature:
    """Return the curvature at a model, with the trace of G for its largest eigenvalue.

    Model and data are as `settled` returns them; `gradients` (n,) are the ‖∇Φ_i‖, and
    `distances` (n,) the δ_i.
    """
    weights = np.full(data.n, 1.0 / data.n)
    if data.weight is not None:
        weights = np.asarray(data.weight / data.weight.sum(), np.float64)
    y = np.asarray(data.y, np.float64)
    margins = y * model(data)
    slopes = np.exp(-np.logaddexp(0.0, margins))
    bends = slopes * np.exp(-np.logaddexp(0.0, -margins))
    ends = [_extremes(block) for block in _blocks(model, data, -weights * slopes * y)]
    Z = query_side(model, data)
    return LocalCurvature(
        least=min(low for low, _ in ends),
        most=max(high for _, high in ends),
        spread=float((weights * bends * gradients**2).sum()),
        weights=weights,
        slopes=slopes,
        bends=bends,
        gradients=gradients,
        sizes=abs(model.scale) * norms(Z, 1).max(axis=1) * distances,
        spreads=distances,
        readout=float(norms(model.U, 2).max()),
        rows=int(model.U.shape[1]),
        heads=model.heads,
    )


def spreads(data: Dataset) -> Array:
    """Return δ_i (n,)."""
    return np.array([spread(data.subset([i])) for i in range(data.n)])


def _extremes(matrix: Array) -> tuple[float, float]:
    """Return the extreme eigenvalues of a symmetric matrix, widened by what rounding may do."""
    values = np.linalg.eigvalsh(matrix)
    rounding = len(values) * 2.0**-50 * float(np.linalg.norm(values))
    return float(values[0]) - rounding, float(values[-1]) + rounding


def _blocks(model: Classifier, data: Dataset, of_samples: Array) -> Iterator[Array]:
    """Yield Σ_i c_i ∇²Φ_i for each head, (d² + q d, d² + q d), parameters of W first.

    A row of weights p on tokens x, query z and readout u has, with e_s = scale zᵀ Ẇ x_s and c_s =
    ⟨u, x_s⟩, the second derivative E[(e - E e)² (c - E c)] + 2 Cov(e, ⟨u̇, x⟩).
    """
    Z, W = query_side(model, data), dense_W(model)
    q, d = int(model.U.shape[1]), model.dim
    most = max(1, BLOCK // (q * (data.tokens + d) * d))
    for h in range(model.heads):
        head = dataclasses.replace(model, W=W[h : h + 1], U=model.U[h : h + 1])
        of_W, mixed = np.zeros((d * d, d * d)), np.zeros((d, d, q, d))
        for begin in range(0, data.n, most):
            part = np.arange(begin, min(begin + most, data.n))
            samples, z = data.subset(part), Z[part]
            A = head.attention(samples)[:, 0]  # (n, q, T)
            x = samples.X - samples.X[:, :1]  # what tokens have in common cancels exactly
            away = x[:, None] - (A @ x)[:, :, None]  # (n, q, T, d)
            c = (away @ model.U[h][:, :, None])[..., 0]
            c -= (A * c).sum(axis=-1, keepdims=True)
            cov = (A[..., None] * away).swapaxes(2, 3) @ away
            skew = ((A * c)[..., None] * away).swapaxes(2, 3) @ away
            weighted = (of_samples[part] / math.sqrt(model.heads))[:, None, None] * z
            pairs = (weighted[..., :, None] * z[..., None, :]).reshape(-1, d * d)
            of_W += pairs.T @ skew.reshape(-1, d * d)
            mixed += np.einsum("nqa,nqbe->abqe", weighted, cov, optimize=True)
        square = of_W.reshape(d, d, d, d).transpose(0, 2, 1, 3).reshape(d * d, d * d)
        matrix = np.zeros((d * d + q * d, d * d + q * d))
        matrix[: d * d, : d * d] = model.scale**2 * (square + square.T) / 2
        matrix[: d * d, d * d :] = model.scale * mixed.reshape(d * d, q * d)
        matrix[d * d :, : d * d] = matrix[: d * d, d * d :].T
        yield matrix
