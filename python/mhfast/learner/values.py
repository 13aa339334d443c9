"""The value matrices that belong to key-query matrices: linear least squares (phase 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._arguments import checks
from .._arguments.values import frozen
from ..models import Layer
from .examples import Examples, Float64

ROUNDING = 1e-12
"""Share of the largest singular value of normal equations that counts as zero: sums over all
samples have rounding errors of some 1e-15."""

SAMPLES = 4000
"""The largest number of samples used for exact outputs, which need no more."""


@dataclass(frozen=True, eq=False)
class Values:
    """Value matrices fitted to key-query matrices.

    Attributes
    ----------
    V : array (H, d, p)
    residual : float
        ‖F(X) - Y‖ / ‖Y‖ on the fitted examples.
    condition : float
        Smallest over largest eigenvalue of the normal equations; 0 if heads attend alike.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 4, 2, seed=0)
    >>> truth = data.truth["layer"]
    >>> values = mh.learner.solve_values(mh.learner.as_examples(data.X, data.y), truth.W)
    >>> values.residual < 1e-6, bool(np.allclose(values.layer(truth.W)(data.X), data.y))
    (True, True)
    """

    V: Float64
    residual: float
    condition: float

    def layer(self, W: Float64) -> Layer:
        """Return the layer with these values and the key-query matrices W.

        Parameters
        ----------
        W : float64 array (H, d, d)

        Returns
        -------
        Layer
            V (H, d, p).

        Raises
        ------
        ValueError
            If W does not have the heads and dimensions of V.
        """
        return Layer(W, self.V)


def attention(W: Float64, X: Float64, num_threads: int | None = None) -> Float64:
    """Return softmax(X W_h Xᵀ) for every head h: array (n, H, T, T)."""
    heads, d, _ = W.shape
    layer = Layer(W, np.zeros((heads, d, 1)))
    return np.asarray(layer.attention(X, num_threads=num_threads), dtype=np.float64)


def attended(weights: Float64, X: Float64) -> Float64:
    """Return the attended tokens, weights (n, H, T, T) times tokens: array (n T, H d)."""
    n, heads, T, _ = weights.shape
    seen = weights.reshape(n, heads * T, T) @ X
    return seen.reshape(n, heads, T, -1).transpose(0, 2, 1, 3).reshape(n * T, -1)


def solve_values(
    examples: Examples,
    W: Float64,
    *,
    samples: int | None = None,
    num_threads: int | None = None,
) -> Values:
    """Phase 6: with the attention known, solve for the value matrices by least squares.

    Parameters
    ----------
    examples : Examples
    W : float64 array (H, d, d)
        Key-query matrices.
    samples : int, optional
        The number of samples to use, from the first on; None means up to 4000, or all with noise.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    Values
        V (H, d, p), with the relative residual and the conditioning of the equations.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If the shape of W does not fit, it is not finite, or a number is out of range.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", the last step of the learner.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 4, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> bool(np.allclose(mh.learner.solve_values(examples, truth.W).V, truth.V))
    True
    >>> mh.learner.solve_values(examples, 0.9 * truth.W).residual > 0.01
    True
    """
    from scipy.linalg import lstsq  # slow to import

    checks.instance(examples, Examples, "examples")
    d, p = examples.dim, examples.out_dim
    W = checks.numbers_of_shape(W, "W", "H d d", (None, d, d))
    heads = len(W)
    if not heads:
        raise ValueError(f"W: expected at least one head, got shape {W.shape}")
    if samples is None:
        samples = examples.n if examples.noise > 0.0 else SAMPLES
    samples = checks.count(samples, "samples")
    moment = np.zeros((heads * d + p, heads * d + p))
    for _, X, Y in examples.first(samples).portions():
        rows = np.concatenate([attended(attention(W, X, num_threads), X), Y.reshape(-1, p)], axis=1)
        moment += rows.T @ rows
    A, B, C = moment[:-p, :-p], moment[:-p, -p:], moment[-p:, -p:]
    V, _, _, singular = lstsq(A, B, cond=ROUNDING)
    left = max(float(np.trace(C) - np.vdot(B, V)), 0.0) / max(float(np.trace(C)), 1e-300)
    return Values(
        frozen(V.reshape(heads, d, p)),
        float(np.sqrt(left)),
        float(singular[-1] / singular[0]),
    )
