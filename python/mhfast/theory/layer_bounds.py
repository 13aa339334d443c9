"""Bounds on the derivatives of a layer F(X) = Σ_h A_h X V_h and of its losses.

With Rx and Rz the largest norms of a token and of a query row, δ the largest distance of two tokens
of one sample, q query rows, σ = |scale|, v_h = ‖V_h‖ the spectral norm and w_h = σ Rz δ v_h,

    j² = Σ_h (Rx² + (σ Rz δ² v_h / 4)²)                           ‖DF‖ ≤ sqrt(q) j
    c = max_h σ Rz (δ²/8) (w_h/2 + sqrt(w_h²/4 + 4))              ‖D²F‖ ≤ sqrt(q) c

where D²F is applied twice to one direction; single rows of F obey the same without sqrt(q).  No
factor falls with the number of heads, as a layer has none: j grows like sqrt(H).  For a loss L, an
average over samples with any weights,

    squared        ‖∇L‖ ≤ 2 sqrt(q L) j    -2 sqrt(q L) c ≤ ∇²L ≤ 2 q j² + 2 sqrt(q L) c
    logistic       ‖∇L‖ ≤ sqrt(q) j L      -sqrt(q) c L  ≤ ∇²L ≤ q j²/4 + sqrt(q) c L
    cross_entropy  ‖∇L‖ ≤ sqrt(2) j L      -sqrt(2) c L  ≤ ∇²L ≤ j²/2 + sqrt(2) c L

so that the loss is nearly convex where it is small.  Proofs are in docs/theory.md.

The approach is that of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
Generalization of Multi-head Attention" (TMLR 2024), which is about classifiers; the statements
about layers are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Layer
from .inputs import largest_norm, plain_layer, query_side, samples, spread
from .runs import over_runs

LOSSES = ("squared", "logistic", "cross_entropy")


@dataclass(frozen=True)
class LayerBounds:
    """Bounds that hold at every layer whose V_h have spectral norms of at most `values`.

    Attributes
    ----------
    token_norm, query_norm, spread : float
        Rx, Rz and δ.
    rows, heads : int
        q and H.
    scale : float
        σ.
    values : array (H,)
        v_h.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(50, 3, 5, 2, seed=0)
    >>> layer = mh.Layer.gaussian(2, 5, 5, std=0.3, seed=1)
    >>> bounds = mh.theory.layer_bounds(layer, data)
    >>> value = layer.loss(data, loss="squared")
    >>> ends = mh.theory.hessian_extremes(layer, data, loss="squared")
    >>> bounds.smallest_eigenvalue(value) < ends.smallest
    True
    >>> ends.largest < bounds.largest_eigenvalue(value)
    True
    >>> _, gradient = mh.value_and_grad(layer, data, loss="squared")
    >>> bool(mh.norm(gradient) < bounds.gradient(value))
    True
    >>> bool((abs(layer(data)) < bounds.output).all())
    True
    >>> bounds.row_jacobian < bounds.jacobian, bounds.row_curvature < bounds.curvature
    (True, True)
    """

    token_norm: float
    query_norm: float
    spread: float
    rows: int
    heads: int
    scale: float
    values: Array

    @property
    def row_jacobian(self) -> float:
        """The bound j of the derivative of a row of F, as a map of all parameters."""
        moved = self.scale * self.query_norm * self.spread**2 * self.values / 4
        return math.sqrt(float(np.sum(self.token_norm**2 + moved**2)))

    @property
    def row_curvature(self) -> float:
        """The bound c of the second derivative of a row of F along a unit vector."""
        reach = self.scale * self.query_norm * self.spread
        w = reach * float(np.max(self.values))
        return reach * self.spread / 8 * (w / 2 + math.sqrt(w * w / 4 + 4))

    @property
    def jacobian(self) -> float:
        """The bound sqrt(q) j of ‖DF‖, in the Frobenius norm of the outputs of a sample."""
        return math.sqrt(self.rows) * self.row_jacobian

    @property
    def curvature(self) -> float:
        """The bound sqrt(q) c of ‖D²F‖."""
        return math.sqrt(self.rows) * self.row_curvature

    @property
    def output(self) -> float:
        """The bound sqrt(q) Rx Σ_h v_h of ‖F(X)‖_F."""
        return math.sqrt(self.rows) * self.token_norm * float(np.sum(self.values))

    def gradient(self, value: float, loss: str = "squared") -> float:
        """Bound ‖∇L‖ where the loss is L = `value`.

        Parameters
        ----------
        value : float
            The loss.
        loss : {"squared", "logistic", "cross_entropy"}

        Returns
        -------
        float

        Raises
        ------
        ValueError
            There is no bound for this loss.
        """
        return self._of_loss(loss, value)[0] * self.row_jacobian

    def largest_eigenvalue(self, value: float, loss: str = "squared") -> float:
        """Bound the eigenvalues of ∇²L from above where the loss is L = `value`.

        Parameters
        ----------
        value : float
            The loss.
        loss : {"squared", "logistic", "cross_entropy"}

        Returns
        -------
        float

        Raises
        ------
        ValueError
            There is no bound for this loss.
        """
        convex = self._of_loss(loss, value)[1] * self.row_jacobian**2
        return convex - self.smallest_eigenvalue(value, loss)

    def smallest_eigenvalue(self, value: float, loss: str = "squared") -> float:
        """Bound the eigenvalues of ∇²L from below where the loss is L = `value`.

        Parameters
        ----------
        value : float
            The loss.
        loss : {"squared", "logistic", "cross_entropy"}

        Returns
        -------
        float

        Raises
        ------
        ValueError
            There is no bound for this loss.
        """
        return -self._of_loss(loss, value)[0] * self.row_curvature

    def _of_loss(self, loss: str, value: float) -> tuple[float, float]:
        """Return bounds of ‖∂ℓ/∂F‖ sqrt(q) and ‖∂²ℓ/∂F²‖ q; q = 1 where rows are averaged."""
        root = math.sqrt(self.rows)
        if loss == "squared":
            return 2.0 * math.sqrt(value) * root, 2.0 * self.rows
        if loss == "logistic":
            return value * root, 0.25 * self.rows
        if loss == "cross_entropy":
            return math.sqrt(2.0) * value, 0.5
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {loss!r}")


@over_runs
def layer_bounds(model: Layer, X: npt.ArrayLike | Dataset, *, within: float = 0.0) -> LayerBounds:
    """Compute the bounds of this module for a layer and its data.

    Parameters
    ----------
    model : Layer
        With dense W and no prompt; any `query` and `scale`.  With a run axis every number of the
        result is an array (R,).
    X : array (n, T, d) or Dataset
        The bounds are for samples of positive weight, and for losses of any weights.
    within : float
        Let the bounds hold in the whole ball of this radius about the layer, by v_h + `within`.

    Returns
    -------
    LayerBounds

    Raises
    ------
    TypeError
        The model is not a Layer of this kind.
    ValueError
        `within` is negative, or a number is not finite.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(50, 3, 5, 2, seed=0)
    >>> layer = mh.Layer.gaussian(2, 5, 5, std=0.3, seed=1)
    >>> round(mh.theory.layer_bounds(layer, data).output, 1)
    7.1
    """
    if not within >= 0.0:
        raise ValueError(f"within: expected a number of at least 0, got {within}")
    layer, data = plain_layer(model, samples(X))
    Z = query_side(layer, data)
    values = np.linalg.svd(np.asarray(layer.V), compute_uv=False)[:, 0] + within
    return LayerBounds(
        token_norm=largest_norm(data.X),
        query_norm=largest_norm(Z),
        spread=spread(data),
        rows=int(Z.shape[1]),
        heads=layer.heads,
        scale=abs(layer.scale),
        values=values,
    )
