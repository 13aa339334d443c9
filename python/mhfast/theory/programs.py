"""Margin maximisation: the least-norm matrix with ⟨f_i, W⟩ ≥ 1, and its certificate.

The dual of max over ‖W‖ ≤ 1 of min_i ⟨f_i, W⟩ is the least dual norm ‖P‖ of P = Σ_i λ_i f_i over
convex weights λ: for feasible W of norm 1, min_i ⟨f_i, W⟩ ≤ Σ_i λ_i ⟨f_i, W⟩ = ⟨P, W⟩ ≤ ‖P‖.
Where some constraints require ⟨f_i, W⟩ ≥ 0 only, their λ_i need not sum to one, and equations
⟨e_j, W⟩ = 0 add a multiple of any sign of e_j to P; the bound stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from .cones import largest_margin
from .hull import is_separated, nearest_point, resolution
from .norms import Norm, dual_size, longest_product
from .norms import size as size_of

Factors = tuple[Array | None, Array]


@dataclass(frozen=True, eq=False)
class Solution:
    """The solution of a program in the units of its features.

    Attributes
    ----------
    direction : array (a, b), or (b,) for vectors
        The least-norm W; the hull point P if the features are not separable.
    margin, dual : float
        1/‖W‖, or 0; ‖P‖ in the dual norm.
    weights : array (N,)
        λ.
    hidden : float
        The margin that rounding hides.
    """

    direction: Array
    margin: float
    dual: float
    weights: Array
    hidden: float

    @property
    def separable(self) -> bool:
        """Whether `direction` separates."""
        return self.margin > 0.0


def solve(
    left: Array | None,
    right: Array,
    norm: Norm,
    *,
    size: float,
    eps: float,
    strict: npt.NDArray[np.bool_] | None = None,
    ties: tuple[Array, Array] | None = None,
) -> Solution:
    """Minimise ‖W‖ subject to left_iᵀ W right_i ≥ 1.

    Parameters
    ----------
    left : array (N, a) or None
        None: W is a vector.
    right : array (N, b)
    norm : "fro", "nuclear" or a number above 1
    size : float
        The length of what `right` is a difference of.
    eps : float
        The precision with which the factors are given.
    strict : bool array (N,), optional
        Constraints that are not strict require ≥ 0 only.
    ties : pair of arrays (M, a) and (M, b), optional
        left_jᵀ W right_j = 0.

    Returns
    -------
    Solution

    Raises
    ------
    ImportError
        The norm needs cvxpy, which is not installed.
    RuntimeError
        The solver found no solution.
    """
    longest = float(np.linalg.norm(right, axis=1).max())
    cancellation = size / longest if longest > 0.0 else 1.0
    least = resolution(len(right), right.shape[1] ** 2, eps, cancellation)
    strict = np.ones(len(right), dtype=bool) if strict is None else strict
    if norm == "fro" and ties is None:
        return from_products(left, right, least, strict)
    if norm == "nuclear":
        return _in_spans(left, right, least, strict, ties)
    return _dense((left, right), norm, least, strict, ties)


def from_products(
    left: Array | None, right: Array, least: float, strict: npt.NDArray[np.bool_]
) -> Solution:
    """Solve in the Frobenius norm from inner products of the features.

    `least` is the margin that rounding hides, relative to the longest feature.
    """
    G = right @ right.T if left is None else (left @ left.T) * (right @ right.T)
    weights = nearest_point(G, strict)
    point = weights @ right if left is None else (weights[:, None] * left).T @ right
    length = float(np.linalg.norm(point))
    products = (G @ weights)[strict]
    separable = is_separated(products, G, least)
    margin = float(products.min()) / length if separable else 0.0
    hidden = least * float(np.sqrt(G.diagonal().max()))
    direction = point / (length * margin) if separable else point
    return Solution(direction, margin, length, weights, hidden)


def _in_spans(
    left: Array | None,
    right: Array,
    least: float,
    strict: npt.NDArray[np.bool_],
    ties: tuple[Array, Array] | None,
) -> Solution:
    """Solve in the nuclear norm, in coordinates of the spans of both sides, which hold W."""
    assert left is not None
    rows = _span(left if ties is None else np.vstack([left, ties[0]]))
    columns = _span(right if ties is None else np.vstack([right, ties[1]]))
    inside = None if ties is None else (ties[0] @ rows.T, ties[1] @ columns.T)
    found = _dense((left @ rows.T, right @ columns.T), "nuclear", least, strict, inside)
    direction = rows.T @ found.direction @ columns
    return Solution(direction, found.margin, found.dual, found.weights, found.hidden)


def _span(vectors: Array) -> Array:
    """Return an orthonormal basis (r, d) of the span of vectors (N, d)."""
    _, values, basis = np.linalg.svd(vectors, full_matrices=False)
    kept: Array = basis[: max(1, int((values > 1e-13 * values[0]).sum()))]
    return kept


def _dense(
    factors: Factors,
    norm: Norm,
    least: float,
    strict: npt.NDArray[np.bool_],
    ties: tuple[Array, Array] | None,
) -> Solution:
    """Solve with all features in memory, (N, a, b)."""
    F = features(factors)
    hidden = least * longest_product(*factors, norm)
    if hidden == 0.0:  # all features are zero
        return Solution(F[0].squeeze(0) if factors[0] is None else F[0], 0.0, 0.0,
                        strict / strict.sum(), 0.0)  # fmt: skip
    E = np.zeros((0, *F.shape[1:])) if ties is None else features(ties)
    E = independent(E)
    unit = hidden / least
    if norm == "fro":
        inside = without(F / unit, E)
        flat = inside.reshape(len(F), -1)
        weights = nearest_point(flat @ flat.T, strict)
        W = hull = np.tensordot(weights, inside, 1)
    else:
        W, weights, forces = largest_margin(F / unit, norm, strict, E)
        W = without(W[None], E)[0]
        hull = np.tensordot(weights, F / unit, 1) + np.tensordot(forces, E, 1)
    length, dual = size_of(W, norm), dual_size(hull, norm) * unit
    products = np.tensordot(F[strict], W, 2)
    margin = float(products.min()) / length if length > 0.0 else 0.0
    separable = margin > 2.0 * hidden
    direction = W / float(products.min()) if separable else hull * unit
    if factors[0] is None:
        direction = direction[0]
    return Solution(direction, margin if separable else 0.0, dual, weights, hidden)


def features(factors: Factors) -> Array:
    """Return the matrices left_i right_iᵀ (N, a, b), or rows (N, 1, b) where left is None."""
    left, right = factors
    outer: Array = (
        right[:, None] if left is None else left[:, :, None] * right[:, None, :]
    )  # (N, a, b)
    return outer


def independent(E: Array) -> Array:
    """Return an orthonormal basis of the span of matrices (M, a, b)."""
    if not len(E):
        return E
    _, values, basis = np.linalg.svd(E.reshape(len(E), -1), full_matrices=False)
    kept: Array = basis[values > 1e-12 * values[0]]
    return kept.reshape(-1, *E.shape[1:])


def without(F: Array, E: Array) -> Array:
    """Return matrices (N, a, b) projected on the complement of an orthonormal basis E."""
    for _ in range(2 if len(E) else 0):  # twice: what rounding leaves of the first
        F = F - np.tensordot(np.tensordot(F, E, ((1, 2), (1, 2))), E, 1)
    return F
