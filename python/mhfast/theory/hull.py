"""The point of a convex hull nearest to the origin, from inner products alone."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from .inputs import exponent, in_units


class CertifiedMargin:
    """A margin, an upper bound over all directions, and what rounding hides of both."""

    margin: float
    dual: float
    resolution: float

    @property
    def gap(self) -> float:
        """The primal-dual gap `dual` - `margin`: by how much the margin may be larger."""
        return self.dual - self.margin

    @property
    def separable(self) -> bool:
        """Whether `direction` separates, by more than rounding can cause."""
        return self.margin > 0.0

    @property
    def inseparable(self) -> bool:
        """Whether `weights` put the origin into the hull of the constraints up to rounding.

        Neither this nor `separable` where the margin is within a factor of two of `resolution`.
        """
        return self.dual <= self.resolution


def nearest_point(G: Array, strict: npt.NDArray[np.bool_] | None = None) -> Array:
    """Compute convex weights λ that minimise ‖Σ_i λ_i f_i‖² = λᵀ G λ, where G = ⟨f_i, f_j⟩.

    This is the dual of the hard-margin problem: the nearest point w of the hull maximises
    min_i ⟨f_i, w⟩ / ‖w‖, and the maximum is ‖w‖.  Hence λ certifies its own quality: the margin
    lies between min_i (Gλ)_i / sqrt(λᵀGλ) and sqrt(λᵀGλ).

    Parameters
    ----------
    G : array (n, n)
        Symmetric and positive semidefinite up to rounding, of any scale.
    strict : bool array (n,), optional
        Margins ⟨f_i, w⟩ count where it is true; elsewhere they are only to be at least 0, and the
        λ_i there do not count in the sum. True everywhere by default.

    Raises
    ------
    ValueError
        G is not square, or holds a number that is not finite.

    Returns
    -------
    float64 array (n,)
        The weights λ: at least 0, with sum 1 over `strict`.

    Notes
    -----
    Lawson and Hanson's least distance programming, "Solving Least Squares Problems" (1974),
    chapter 23: nonnegative least squares (SciPy's active-set `nnls`) for F μ = 0, 1ᵀμ = 1, with F
    a square root of G by its eigenvectors.  On the active set the solution is exact up to
    rounding; G determines distances down to about sqrt(n · 2⁻⁵²) of the longest f_i.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> points = np.array([[1.0, 1.0], [1.0, -1.0], [3.0, 0.0]])
    >>> weights = mh.theory.nearest_point(points @ points.T)
    >>> abs(weights @ points).round(6)  # of the triangle, to the origin
    array([1., 0.])
    """
    from scipy.optimize import nnls  # takes as long to import as all of mhfast

    G = np.asarray(G, dtype=np.float64)
    if G.ndim != 2 or G.shape[0] != G.shape[1] or not G.size:
        raise ValueError(f"G: expected an array (n, n), got shape {G.shape}")
    if not np.isfinite(G).all():
        raise ValueError("G: expected finite inner products, got NaN or inf")
    G = in_units(G, exponent(G))  # a denormal size would have few digits
    size = float(G.diagonal().max())
    n = len(G)
    counted = np.ones(n) if strict is None else strict.astype(np.float64)
    if size <= 0.0:
        even: Array = counted / counted.sum()
        return even
    values, vectors = np.linalg.eigh(G / size)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    target = np.zeros(n + 1)
    target[n] = 1.0
    weights, _ = nnls(np.vstack([root, counted]), target, maxiter=30 * n)
    convex_weights: Array = weights / (counted * weights).sum()
    return convex_weights


def resolution(n: int, terms: int, precision: float, cancellation: float = 1.0) -> float:
    """Return the margin below which n features are indistinguishable from inseparable ones.

    It is relative to the longest feature: the larger of r, r² = 10 (n + sqrt(terms)) 2⁻⁵² c, and
    16 c `precision`.  Inner products of features of that many numbers, and their combinations by n
    convex weights, carry rounding below r², and a hull point found from them has a length of r
    where the origin is in the hull.  Numbers given with a relative `precision` (2⁻²³ in float32)
    leave a margin of about that.  `cancellation` c is by how much the longest feature is shorter
    than what it is a difference of.
    """
    eps, c = float(np.finfo(np.float64).eps), max(1.0, cancellation)
    return max(math.sqrt(10.0 * (n + math.sqrt(terms)) * eps * c), 16.0 * c * precision)


def is_separated(products: Array, G: Array, least: float) -> bool:
    """Return whether Gλ proves a margin of twice `least`, relative to the longest feature."""
    return bool(products.min() > (2.0 * least) ** 2 * float(G.diagonal().max()))
