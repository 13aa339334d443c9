"""The part of a layer that its tokens can see.

Scores of one query are compared with each other only, and the weights of a row add up to one.
Outputs therefore depend on W_h through x_a W_h (x_b - x_c)ᵀ, and on V_h through differences of
tokens, except for what a sample's tokens have in common, which meets Σ_h V_h.  Let S be the
orthogonal projection on the span of all tokens, and D that on the span of the differences of tokens
of one sample, which is contained in it.  The layers

    W_h and S W_h D,        V_h and D V_h + (S - D) Σ_g V_g / H

are the same function.  For independent signs or normal tokens S = D = 1.  One-hot tokens, and all
tokens in a hyperplane aᵀx = 1, have S = 1 and D = 1 - a aᵀ / aᵀa: W + c aᵀ is as good as W.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from ..models import Layer
from .alignment import dense_parameters
from .examples import Examples, Float64

ROUNDING = 1e-12
"""Share of the largest second moment below which a direction of tokens is that of rounding."""


@dataclass(frozen=True, eq=False)
class Visible:
    """The directions in which tokens, and their differences within a sample, vary.

    Attributes
    ----------
    tokens : array (d, s)
        Orthonormal basis of the span of all tokens; S = tokens tokensᵀ.
    differences : array (d, l)
        Orthonormal basis of the span of the differences of tokens of one sample, l ≤ s.
    """

    tokens: Float64
    differences: Float64

    @property
    def everything(self) -> bool:
        """Whether all of W and V can be seen."""
        d, moving = self.differences.shape
        return bool(d == moving)

    @property
    def key_query(self) -> int:
        """The numbers of a key-query matrix that can be seen."""
        return int(self.tokens.shape[1] * self.differences.shape[1])

    def unseen(self, heads: int, out_dim: int) -> int:
        """Return how many of the numbers of a layer, of H d (d + p), cannot be seen.

        Parameters
        ----------
        heads : int
        out_dim : int

        Returns
        -------
        int
        """
        d, s = self.tokens.shape
        moving = self.differences.shape[1]
        seen = heads * (self.key_query + moving * out_dim) + (s - moving) * out_dim
        return int(heads * d * (d + out_dim) - seen)

    def basis(self, heads: int, out_dim: int) -> Float64 | None:
        """Return an orthonormal basis of the layers of `part`, as numbers W before V.

        Parameters
        ----------
        heads, out_dim : int

        Returns
        -------
        array (P, k) or None
            k = P - `unseen` vectors; None if everything can be seen.
        """
        if self.everything:
            return None
        d = len(self.tokens)
        W = np.kron(np.eye(heads), np.kron(self.tokens, self.differences))
        V = np.kron(np.eye(heads), np.kron(self.differences, np.eye(out_dim)))
        # Of what all tokens of a sample share, the heads have equal parts.
        S, D = (basis @ basis.T for basis in (self.tokens, self.differences))
        sizes, directions = np.linalg.eigh(S - D)  # a projection
        common = directions[:, sizes > 0.5]
        shared = np.tile(np.kron(common, np.eye(out_dim)), (heads, 1)) / np.sqrt(heads)
        values = np.hstack([V, shared])
        basis = np.zeros((heads * d * (d + out_dim), W.shape[1] + values.shape[1]))
        basis[: len(W), : W.shape[1]] = W
        basis[len(W) :, W.shape[1] :] = values
        return basis

    def part(self, layer: Layer) -> Layer:
        """Return the layer of least norm that is the same function of such tokens.

        Parameters
        ----------
        layer : Layer
            A single run.

        Returns
        -------
        Layer
            With S W_h D and D V_h + (S - D) Σ_g V_g / H.

        Raises
        ------
        TypeError
            `layer` is not a Layer.
        ValueError
            It has a run axis, holds NaN or inf, or is of another dimension.
        """
        W, V = dense_parameters(layer, "layer")
        if W.shape[1] != len(self.tokens):
            raise ValueError(f"layer: expected d = {len(self.tokens)}, got {W.shape[1]}")
        S, D = (basis @ basis.T for basis in (self.tokens, self.differences))
        return Layer(S @ W @ D, D @ V + (S - D) @ V.mean(axis=0))


def visible_of(examples: Examples) -> Visible:
    """Determine what the tokens of examples can see.

    Parameters
    ----------
    examples : Examples

    Returns
    -------
    Visible
    """
    d = examples.dim
    tokens, differences = np.zeros((2, d, d))
    for _, X, _ in examples.portions():
        every, apart = X.reshape(-1, d), (X - X.mean(axis=1, keepdims=True)).reshape(-1, d)
        tokens += every.T @ every
        differences += apart.T @ apart
    # Differences are measured by the tokens: those of equal tokens are rounding.
    size = float(np.linalg.norm(tokens, 2))
    return Visible(_range(tokens, size), _range(differences, size))


def visible_part(layer: Layer, X: npt.ArrayLike) -> Layer:
    """Return a layer without what the tokens X cannot see of it.

    Two layers that are the same function of such tokens have the same visible part, up to the order
    of their heads.

    Parameters
    ----------
    layer : Layer
    X : array (n, T, d), float32 or float64

    Returns
    -------
    Layer
        S W_h D and D V_h + (S - D) Σ_g V_g / H, where S and D are the orthogonal projections on the
        span of all tokens and on that of their differences within a sample.

    Raises
    ------
    TypeError
        `layer` is not a Layer.
    ValueError
        X is not finite, or it does not fit the layer.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> layer = mh.Layer.gaussian(2, 6, 4, std=0.5, seed=0)
    >>> X = np.eye(6)[np.arange(60) % 6].reshape(20, 3, 6)
    >>> seen = mh.learner.visible_part(layer, X)
    >>> bool(np.allclose(seen(X), layer(X)))
    True
    """
    X = checks.numbers_of_shape(X, "X", "n T d", (None, None, None))
    if not X.size:
        raise ValueError(f"X: expected no axis of length 0, got shape {X.shape}")
    return visible_of(Examples(X, X, 1.0)).part(layer)


def _range(moment: Float64, size: float) -> Float64:
    """Return an orthonormal basis (d, rank) of the range of a second moment."""
    values, vectors = np.linalg.eigh(moment)
    basis: Float64 = vectors[:, values > ROUNDING * size]
    return basis
