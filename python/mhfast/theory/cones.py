"""Largest margins in other norms than Frobenius', by the solver Clarabel through cvxpy."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from .norms import Norm, size

TOLERANCE = 1e-11  # requested of Clarabel; the certificate shows what it attained


def largest_margin(
    F: Array, norm: Norm, strict: npt.NDArray[np.bool_], ties: Array
) -> tuple[Array, Array, Array]:
    """Maximise m over ‖W‖ ≤ 1 with ⟨F_i, W⟩ ≥ m where strict, ≥ 0 elsewhere, and ⟨E_j, W⟩ = 0.

    The problem always has a solution, of m = 0 where nothing separates.

    Parameters
    ----------
    F : array (N, a, b)
        Of lengths of about 1.
    norm : "nuclear" or a number above 1
    strict : bool array (N,)
    ties : array (M, a, b)
        E.

    Returns
    -------
    W : array (a, b)
    weights : array (N,)
        At least 0, with sum 1 over the strict constraints.
    forces : array (M,)
        The multipliers of the ties: Σ weights_i F_i + Σ forces_j E_j is short.

    Raises
    ------
    ImportError
        cvxpy is not installed.
    RuntimeError
        The solver gave up without a solution.
    """
    try:
        import cvxpy as cp
    except ImportError as error:
        raise ImportError(
            f"norm={norm!r} needs cvxpy with Clarabel: pip install 'mhfast[programs]'"
        ) from error
    N, a, b = F.shape
    W, m = cp.Variable((a, b)), cp.Variable()
    flat = cp.vec(W, order="C")
    separated = F.reshape(N, -1) @ flat >= strict.astype(np.float64) * m
    length = cp.normNuc(W) if norm == "nuclear" else cp.pnorm(flat, norm)
    conditions = [separated, length <= 1.0]
    if len(ties):
        conditions.append(ties.reshape(len(ties), -1) @ flat == 0.0)
    problem = cp.Problem(cp.Maximize(m), conditions)
    with warnings.catch_warnings():
        # About inaccurate solutions, whose accuracy the certificate shows, and about other
        # packages.
        warnings.simplefilter("ignore")
        problem.solve(
            solver="CLARABEL", tol_gap_abs=TOLERANCE, tol_gap_rel=TOLERANCE, tol_feas=TOLERANCE
        )
    if W.value is None or separated.dual_value is None:
        raise RuntimeError(f"norm={norm!r}: Clarabel found no solution, status {problem.status!r}")
    weights = np.maximum(separated.dual_value, 0.0)
    total = float(weights[strict].sum())
    weights = weights / total if total > 0.0 else strict / strict.sum()
    forces = np.zeros(len(ties))
    if len(ties):
        forces = np.asarray(conditions[-1].dual_value) / (total if total > 0.0 else 1.0)
        hull, pull = np.tensordot(weights, F, 1), np.tensordot(forces, ties, 1)
        # cvxpy does not promise the sign of the multiplier of an equation.
        if np.linalg.norm(hull - pull) < np.linalg.norm(hull + pull):
            forces = -forces
    solution: Array = np.asarray(W.value)
    return solution / max(size(solution, norm), 1e-300), weights, forces
