"""The covariance of a layer that was fitted to noisy outputs, and the intervals that follow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .._arguments import checks
from .._arguments.values import frozen
from ..models import Layer
from .examples import Float64


@dataclass(frozen=True, eq=False)
class Covariance:
    """How far an estimated layer may be from the true one, to first order in the noise.

    The order of the heads is that of the estimate, and the true layer means its visible part
    (`mhfast.learner.visible_part`).

    Attributes
    ----------
    layer : Layer
        The estimate.
    matrix : float64 array (P, P)
        Covariance of its P = H d (d + p) numbers, W before V, each in memory order; 0 in
        directions that the tokens cannot see.
    noise : float
        Standard deviation σ of the noise, as given.
    outputs : int
        The numbers that were fitted, n T p.
    W_error, V_error : float64 arrays (H, d, d) and (H, d, p)
        Standard errors of W and V, the roots of the diagonal of `matrix`.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 2, noise=0.05, seed=0)
    >>> examples = mh.learner.as_examples(data.X, data.y, noise=0.05)
    >>> truth = data.truth["layer"]
    >>> covariance = mh.learner.estimate(examples, truth).covariance
    >>> lower, upper = covariance.interval(0.95)
    >>> inside = (lower.W <= truth.W) & (truth.W <= upper.W)
    >>> bool(inside.mean() > 0.8), covariance.W_error.shape
    (True, (2, 3, 3))
    """

    layer: Layer
    matrix: Float64
    noise: float
    outputs: int
    W_error: Float64 = field(init=False)
    V_error: Float64 = field(init=False)

    def __post_init__(self) -> None:
        """Split the roots of the diagonal."""
        errors = np.sqrt(np.maximum(self.matrix.diagonal(), 0.0))
        W, V = np.split(errors, [self.layer.W.size])
        object.__setattr__(self, "W_error", frozen(W.reshape(self.layer.W.shape)))
        object.__setattr__(self, "V_error", frozen(V.reshape(self.layer.V.shape)))

    def interval(self, level: float = 0.95) -> tuple[Layer, Layer]:
        """Return intervals that contain each true number with this probability.

        Parameters
        ----------
        level : float
            Between 0 and 1. It holds for each number separately, not for all of them jointly.

        Returns
        -------
        lower, upper : Layer

        Raises
        ------
        TypeError
            `level` is not a number.
        ValueError
            `level` is not between 0 and 1.
        """
        from scipy.special import ndtri  # slow to import

        level = checks.finite(level, "level")
        if not 0.0 < level < 1.0:
            raise ValueError(f"level: expected a probability between 0 and 1, got {level}")
        half = float(ndtri(0.5 + 0.5 * level))
        W, V = half * self.W_error, half * self.V_error
        return (
            Layer(self.layer.W - W, self.layer.V - V),
            Layer(self.layer.W + W, self.layer.V + V),
        )

    def with_outputs(self, basis: Float64) -> Covariance:
        """Return the same for a layer of which these p outputs are coordinates in a basis.

        Parameters
        ----------
        basis : array (q, p)
            Orthonormal columns.

        Returns
        -------
        Covariance
            Of a layer with q outputs.

        Raises
        ------
        ValueError
            `basis` does not have p columns, or is not finite.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> data = mh.data.boolean_layer(500, 2, 3, 2, noise=0.05, seed=0)
        >>> examples = mh.learner.as_examples(data.X, data.y, noise=0.05)
        >>> covariance = mh.learner.estimate(examples, data.truth["layer"]).covariance
        >>> turned = covariance.with_outputs(np.eye(3)[::-1])  # the outputs in the opposite order
        >>> bool(np.allclose(turned.V_error, covariance.V_error[..., ::-1]))
        True
        """
        H, d, p = self.layer.V.shape
        basis = checks.numbers_of_shape(basis, "basis", "q p", (None, p))
        of_W, of_V = self.layer.W.size, np.kron(np.eye(H * d), basis)
        change = np.zeros((of_W + len(of_V), of_W + H * d * p))
        change[:of_W, :of_W] = np.eye(of_W)
        change[of_W:, of_W:] = of_V
        layer = Layer(self.layer.W, self.layer.V @ basis.T)
        matrix = frozen(change @ self.matrix @ change.T)
        return Covariance(layer, matrix, self.noise, self.outputs)
