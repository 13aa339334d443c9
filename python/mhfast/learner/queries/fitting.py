"""Heads at one δ by least squares: y ≈ Σ_h tanh((q·a_h + b) / 2) c_h in A (H, d) and C (H, p).

The c_h are linear and eliminated.  With τ (n, H) the tanh, B (n, H d) the derivatives
½ (1 - τ²)_h q, and P = I - τ τ⁺, the Gauss-Newton normal matrix of A after that is exactly

    N = (Bᵀ P B) ∘ (C Cᵀ ⊗ 1 1ᵀ),

H d numbers square whatever p is.  The Jacobian of all H (d + p) numbers has full column rank if and
only if τᵀτ and N are positive definite: N is the Schur complement of τᵀτ ⊗ I.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..examples import Float64
from .oracle import Rows

DAMPING = 1e-3
"""The initial damping, relative to the diagonal of N."""

MOST_DAMPING = 1e8
FASTER, SLOWER = 0.1, 10.0
"""Factors of the damping after a step that was taken, and after one that was not."""

UNSATURATED = 6.0
"""Score up to which a head is not saturated."""

STILL = 1e-13
"""Relative step in A below which the fit has converged."""

SETTLED = 1e-9
"""Share by which a step must lower the sum of squared residuals; otherwise it is the last."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Heads at one δ.

    Attributes
    ----------
    A : array (H, d) or, with biases, (H, d + 1)
    C : array (H, p)
    residual : float
        Root mean square of the residuals.
    """

    A: Float64
    C: Float64
    residual: float


def fit_heads(rows: Rows, A: Float64, *, steps: int = 60, rounding: float = 0.0) -> Fit:
    """Fit from a start A by Levenberg-Marquardt.

    Stops where steps no longer lower the residuals; below `rounding`, where they save less than
    half.
    """
    damping = DAMPING
    A = A.copy()
    C, R, tau = _values(rows, A)
    cost = float(np.sum(R**2))
    for _ in range(steps):
        B = _derivatives(rows, tau)
        N = _normal(B, tau, C)
        gradient = np.einsum("nhd,nh->hd", B.reshape(len(B), *A.shape), R @ C.T).ravel()
        moved, still = False, False
        while damping <= MOST_DAMPING and not moved:
            step = _solve(N, gradient, damping)
            if step is not None:
                step = step.reshape(A.shape)
                still = bool(np.linalg.norm(step) <= STILL * np.linalg.norm(A))
                trial = _values(rows, A + step)
                new = float(np.sum(trial[1] ** 2))
                if new < cost:
                    saved = 0.5 if new <= rounding**2 * R.size else SETTLED
                    still = still or new > (1.0 - saved) * cost
                    A, (C, R, tau), cost, moved = A + step, trial, new, True
                    damping = max(damping * FASTER, 1e-15)
                elif still:
                    break
            if not moved:
                damping = max(damping * SLOWER, 1e-12)
        if still or not moved:
            break
    return Fit(A, C, float(np.sqrt(cost / max(1, R.size))))


def identified(rows: Rows, fit: Fit) -> float:
    """Return a lower bound of the smallest over the largest eigenvalue of the normal matrices.

    τᵀτ and N are scaled to a unit diagonal, M, and 1 / (‖M‖ ‖M⁻¹‖) in the Frobenius norm is at
    most that ratio.  The worse of the two is returned, 0 if one is singular.  A bound that is far
    above the rounding of M, 1e-13, shows full rank of the Jacobian.
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve  # slow to import

    tau = _tanh(rows, fit.A)
    worst = 1.0
    for matrix in (tau.T @ tau, _normal(_derivatives(rows, tau), tau, fit.C)):
        diagonal = np.sqrt(np.maximum(np.diag(matrix), 0.0))
        if not diagonal.min() > 0.0 or not np.isfinite(diagonal).all():
            return 0.0
        M = matrix / np.outer(diagonal, diagonal)
        try:
            inverse = cho_solve(cho_factor(M), np.eye(len(M)))
        except LinAlgError:
            return 0.0
        worst = min(worst, 1.0 / float(np.linalg.norm(M) * np.linalg.norm(inverse)))
    return worst


def determined(rows: Rows, A: Float64) -> bool:
    """Whether every head has as many rows at which it is not saturated as it has unknowns."""
    scores = rows.Q @ A.T + rows.b[:, None]
    return bool((np.abs(scores) < UNSATURATED).sum(axis=0).min() >= A.shape[1])


def variances(rows: Rows, fit: Fit) -> tuple[float, float]:
    """Return the sums of the variances of A and of C for residuals of variance 1.

    The trace of (JᵀJ)⁻¹ by blocks: N⁻¹ for A; for C, p tr (τᵀτ)⁻¹ and what the errors of A leave.
    """
    tau = _tanh(rows, fit.A)
    B = _derivatives(rows, tau)
    inverse = np.asarray(np.linalg.inv(_normal(B, tau, fit.C)), np.float64)
    lift = np.linalg.pinv(tau) @ B
    of_A = float(np.trace(inverse))
    of_C = fit.C.shape[1] * float(np.trace(np.linalg.inv(tau.T @ tau)))
    of_C += float(np.sum(lift @ _weighted(inverse, fit.C) * lift))
    return of_A, of_C


def _tanh(rows: Rows, A: Float64) -> Float64:
    return np.asarray(np.tanh(0.5 * (rows.Q @ A.T + rows.b[:, None])))


def _values(rows: Rows, A: Float64) -> tuple[Float64, Float64, Float64]:
    """Return the best C, the residuals and the tanh."""
    tau = _tanh(rows, A)
    C = np.asarray(np.linalg.lstsq(tau, rows.Y, rcond=None)[0], np.float64)
    return C, rows.Y - tau @ C, tau


def _derivatives(rows: Rows, tau: Float64) -> Float64:
    B = (0.5 * (1.0 - tau**2))[:, :, None] * rows.Q[:, None, :]
    return np.asarray(B.reshape(len(tau), -1))


def _weighted(G: Float64, C: Float64) -> Float64:
    """Return G ∘ (C Cᵀ ⊗ 1 1ᵀ), in the memory of G."""
    width = len(G) // len(C)
    blocks = G.reshape(len(C), width, len(C), width)
    blocks *= (C @ C.T)[:, None, :, None]
    return G


def _normal(B: Float64, tau: Float64, C: Float64) -> Float64:
    basis = np.linalg.qr(tau)[0]
    B = B - basis @ (basis.T @ B)
    return _weighted(B.T @ B, C)


def _solve(N: Float64, gradient: Float64, damping: float) -> Float64 | None:
    from scipy.linalg import LinAlgError, cho_factor, cho_solve  # slow to import

    diagonal = np.diag(N)
    damped = N.copy()
    floor = 1e-15 * diagonal.max(initial=0.0)
    damped[np.diag_indices_from(damped)] += damping * np.maximum(diagonal, floor) + floor * 1e-3
    try:
        step: Float64 = cho_solve(cho_factor(damped, check_finite=False), gradient)
    except (LinAlgError, ValueError):
        return None
    return step if np.isfinite(step).all() else None
