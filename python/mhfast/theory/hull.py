"""The point of a convex hull nearest to the origin, from inner products alone."""

from __future__ import annotations

import numpy as np

from .._arguments.values import Array


def nearest_point(G: Array) -> Array:
    """Compute convex weights λ that minimise ‖Σ_i λ_i f_i‖² = λᵀ G λ, where G = ⟨f_i, f_j⟩.

    This is the dual of the hard-margin problem: the nearest point w of the hull maximises
    min_i ⟨f_i, w⟩ / ‖w‖, and the maximum is ‖w‖.  Hence λ certifies its own quality: the margin
    lies between min_i (Gλ)_i / sqrt(λᵀGλ) and sqrt(λᵀGλ).

    Parameters
    ----------
    G : array (n, n)
        Symmetric and positive semidefinite up to rounding.

    Returns
    -------
    float64 array (n,)
        The weights λ: at least 0, with sum 1.

    Notes
    -----
    Lawson and Hanson's least distance programming, "Solving Least Squares Problems" (1974),
    chapter 23: nonnegative least squares (SciPy's active-set `nnls`) for F μ = 0, 1ᵀμ = 1, with F
    a square root of G by its eigenvectors.  On the active set the solution is exact up to
    rounding; G determines distances down to about sqrt(n · 2⁻⁵²) of the longest f_i.
    """
    from scipy.optimize import nnls  # takes as long to import as all of mhfast

    size = float(G.diagonal().max())
    n = len(G)
    if size <= 0.0:
        return np.full(n, 1.0 / n)
    values, vectors = np.linalg.eigh(G / size)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    target = np.zeros(n + 1)
    target[n] = 1.0
    weights, _ = nnls(np.vstack([root, np.ones(n)]), target, maxiter=30 * n)
    share: Array = weights / weights.sum()
    return share


def is_positive(products: Array, G: Array) -> bool:
    """Tell whether all of Gλ is positive beyond rounding, which proves a positive margin."""
    rounding = 10 * len(G) * np.finfo(np.float64).eps * float(G.diagonal().max())
    return bool(products.min() > rounding)
