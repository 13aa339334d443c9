"""Norms of matrices and their duals: what the programs of the theory minimise."""

from __future__ import annotations

from numbers import Real
from typing import Literal, TypeAlias

import numpy as np

from .._arguments.values import Array

Norm: TypeAlias = Literal["fro", "nuclear"] | float


def checked_norm(norm: object, *, vector: bool = False) -> Norm:
    """Return `norm` as "fro", "nuclear" or a float above 1 other than 2, which is "fro".

    Raises
    ------
    ValueError
        It is none of these, or "nuclear" for a vector.
    """
    choices = "'fro' or a number above 1" if vector else "'fro', 'nuclear' or a number above 1"
    if norm == "fro":
        return "fro"
    if norm == "nuclear" and not vector:
        return "nuclear"
    number = isinstance(norm, Real) and not isinstance(norm, bool)
    if not number or not 1.0 < float(norm) < np.inf:  # type: ignore[arg-type]
        raise ValueError(f"norm: expected {choices}, got {norm!r}")
    return "fro" if norm == 2 else float(norm)  # type: ignore[arg-type]


def size(array: Array, norm: Norm) -> float:
    """Compute the norm of a matrix (a, b), or of a vector: ‖W‖_F, Σ σ_i, or (Σ |w|^p)^(1/p)."""
    if norm == "fro":
        return float(np.linalg.norm(array))
    if norm == "nuclear":
        return float(np.linalg.norm(array, "nuc"))
    return _entrywise(array, norm)


def dual_size(array: Array, norm: Norm) -> float:
    """Compute the dual norm max ⟨array, W⟩ over ‖W‖ ≤ 1: ‖·‖_F, the largest σ, p / (p - 1)."""
    if norm == "fro":
        return float(np.linalg.norm(array))
    if norm == "nuclear":
        return float(np.linalg.norm(array, 2))
    return _entrywise(array, norm / (norm - 1.0))


def longest_product(left: Array | None, right: Array, norm: Norm) -> float:
    """Compute the largest dual norm of left_i right_iᵀ, or of right_i where left is None.

    Of a matrix of rank one each of these norms is the product of those of its factors.
    """
    p = 2.0 if isinstance(norm, str) else norm / (norm - 1.0)
    lengths = np.array([_entrywise(row, p) for row in right])
    if left is not None:
        lengths = lengths * np.array([_entrywise(row, p) for row in left])
    return float(lengths.max())


def _entrywise(array: Array, p: float) -> float:
    largest = float(np.abs(array).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    # Of numbers of at most 1 no power overflows, whatever p.
    return largest * float(float((np.abs(array / largest) ** p).sum()) ** (1.0 / p))
