"""Bounds on gradient and Hessian of a classifier and of its logistic loss.

With Rx and Rz the largest norms of a token and of a query row, q query rows, σ = |scale| and
u = max_h ‖U_h‖_F,

    b1 = sqrt(q) Rx (σ Rz Rx u + 1)            ‖∇Φ(X)‖ ≤ b1
    b3 = σ sqrt(q) Rz Rx² (2 σ Rz Rx u + 1)    ‖∇²Φ(X)‖ ≤ b3 / sqrt(H)

and for the logistic loss L, an average over samples with any weights,

    ‖∇L‖ ≤ b1 L,   ‖∇²L‖ ≤ b1²/4 + b3/sqrt(H),   λ_min(∇²L) ≥ -(b3/sqrt(H)) L.

The last one, self-bounded weak convexity, is why many heads help: the curvature that gradient
descent must overcome shrinks with H and with the loss itself.  Proofs are in docs/theory.md.

The bounds follow the idea of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
Generalization of Multi-head Attention" (TMLR 2024), with constants of our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..dataset.dataset import Dataset
from ..models import Classifier
from .inputs import dense_W, largest_norm, norms, query_side, samples, settled
from .runs import over_runs

CONSTANTS = ("proved", "recalled")


@dataclass(frozen=True)
class CurvatureBounds:
    """Bounds that hold at every model whose heads have ‖U_h‖_F ≤ `readout`, for given data.

    Parameters
    ----------
    token_norm, query_norm : float
        Rx and Rz.
    rows, heads : int
        q and H.
    scale : float
        σ.
    readout : float
        u, the largest norm of a head's readout.
    b1 : float
        Bound of ‖∇Φ‖.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, seed=0)
    >>> few, many = (mh.Classifier.gaussian(H, 5, 8, std=0.1, seed=0) for H in (2, 200))
    >>> bounds = mh.theory.curvature_bounds(few, data)
    >>> loss, g = mh.value_and_grad(few, data)
    >>> bool(mh.norm(g) <= bounds.gradient(loss))
    True
    >>> ends = mh.theory.hessian_extremes(few, data)
    >>> bounds.smallest_eigenvalue(loss) <= ends.smallest <= ends.largest <= bounds.hessian
    True
    >>> wide = mh.theory.curvature_bounds(many, data)  # more heads: closer to convex
    >>> wide.weak_convexity < bounds.weak_convexity, wide.b3 < 2 * bounds.b3
    (True, True)
    """

    token_norm: float
    query_norm: float
    rows: int
    heads: int
    scale: float
    readout: float
    b1: float

    @property
    def b3(self) -> float:
        """The bound of sqrt(H) ‖∇²Φ‖."""
        reach = self.scale * self.query_norm * self.token_norm
        return math.sqrt(self.rows) * reach * self.token_norm * (2 * reach * self.readout + 1)

    @property
    def weak_convexity(self) -> float:
        """κ = b3/sqrt(H): the smallest eigenvalue of ∇²L is at least -κ L."""
        return self.b3 / math.sqrt(self.heads)

    @property
    def hessian(self) -> float:
        """Bound b1²/4 + b3/sqrt(H) of ‖∇²L‖."""
        return self.b1 * self.b1 / 4 + self.weak_convexity

    def gradient(self, loss: float) -> float:
        """Bound ‖∇L‖ by b1 L.

        Parameters
        ----------
        loss : float
            The loss L.

        Returns
        -------
        float
        """
        return self.b1 * loss

    def smallest_eigenvalue(self, loss: float) -> float:
        """Bound the eigenvalues of ∇²L from below, by -κ L.

        Parameters
        ----------
        loss : float
            The loss L.

        Returns
        -------
        float
        """
        return -self.weak_convexity * loss


@over_runs
def curvature_bounds(
    model: Classifier,
    X: npt.ArrayLike | Dataset,
    *,
    within: float = 0.0,
    constants: str = "proved",
) -> CurvatureBounds:
    """Compute the bounds of this module for a model and its data.

    Parameters
    ----------
    model : Classifier
        With dense W and no prompt; any `query` and `scale`. With a run axis every number of the
        result is an array (R,).
    X : array (n, T, d) or Dataset
        The bounds are for samples of positive weight, and for losses of any weights.
    within : float
        Let the bounds hold in the whole ball of this radius about the model, by u + `within`.
    constants : {"proved", "recalled"}
        "recalled" replaces b1 by β1 = sqrt(T) Rx (2 Rx² max_h ‖(W_h, U_h)‖ + 1), for self-attention
        with scale 1. Its constants are recalled, not derived or quoted.

    Returns
    -------
    CurvatureBounds

    Raises
    ------
    TypeError
        The model is of another kind.
    ValueError
        `within` is negative, or the constants are unknown or not for this model.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, seed=0)
    >>> model = mh.Classifier.gaussian(3, 5, 8, std=0.1, seed=0)
    >>> here = mh.theory.curvature_bounds(model, data)
    >>> ball = mh.theory.curvature_bounds(model, data, within=2.0)
    >>> here.b1 < ball.b1, round(ball.readout - here.readout, 12)
    (True, 2.0)
    """
    model, data, _ = settled(model, samples(X), dense=True)
    if not within >= 0.0:
        raise ValueError(f"within: expected a number of at least 0, got {within}")
    if constants not in CONSTANTS:
        raise ValueError(f"constants: expected one of {', '.join(CONSTANTS)}, got {constants!r}")
    Z = query_side(model, data)
    Rx, Rz = largest_norm(data.X), largest_norm(Z)
    q, scale = int(model.U.shape[1]), abs(model.scale)
    u = float(norms(model.U, 2).max()) + within
    if constants == "proved":
        b1 = math.sqrt(q) * Rx * (scale * Rz * Rx * u + 1)
    else:
        if Z is not data.X or scale != 1.0:
            raise ValueError(
                "constants: expected 'proved' unless the model is self-attention with scale 1, "
                "got 'recalled'"
            )
        both = (dense_W(model).reshape(model.heads, -1), model.U.reshape(model.heads, -1))
        heads = largest_norm(np.concatenate(both, axis=1)) + within
        b1 = math.sqrt(q) * Rx * (2 * Rx * Rx * heads + 1)
    return CurvatureBounds(Rx, Rz, q, model.heads, scale, u, b1)
