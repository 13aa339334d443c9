"""The examples: checked once, then read in portions, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.deprecated import keyword_only
from .._arguments.values import Array
from ..models import Layer

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

PORTION = 1 << 22
"""Size of the largest array made of a portion of the examples, in numbers."""

ROUNDING = 1e-14
"""Share of the largest second moment of the outputs below which a direction is that of rounding.

Sums of squares in float64 leave about 1e-16 times the number of outputs.  Outputs in float32 are
themselves rounded to 6e-8: see `_rounding`.
"""

CONSTANT = 1e-12
"""Share of the second moment that a mean must leave if outputs are to count as varying."""

LARGEST = 1e100
"""Norm of an output row, or its inverse, beyond which squares might overflow."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs X (n, T, d) and outputs Y (n, T, p) of an unknown layer.

    X and Y are kept unchanged, memory maps and float32 included; `portions` and `part` give pieces
    in float64.  A row is one query of one sample, number ``sample * T + query``.  After `split`
    only the samples of `index` count, numbered by their place in it.

    If the outputs of all rows lie in a subspace, the learner uses their coordinates in it, and p is
    its dimension, because dependent outputs certify nothing.

    Attributes
    ----------
    X, Y : array
    scale : float
        Root mean square of the norms of the rows of Y: residuals are relative to it.
    basis : array (outputs of Y, p) or None
        Orthonormal basis of the subspace of the outputs; None if it is the whole space.
    noise : float
        Standard deviation of the noise on every entry of Y, as given by the caller.
    index : int array (n,) or None
        The samples of X and Y, ascending; None means all.
    constant : bool
        Whether all rows of Y are the same, to rounding.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 6, 2, noise=0.1, seed=0)
    >>> examples = mh.learner.as_examples(data.X, data.y, noise=0.1)
    >>> examples.n, examples.tokens, examples.dim, examples.out_dim, examples.rows
    (500, 2, 6, 6, 1000)
    >>> examples.first(20).n, [part.n for part in examples.split(50, seed=0)]
    (20, [450, 50])
    >>> 0.05 < examples.noise_floor < 0.5
    True
    >>> sum(len(X) for _, X, _ in examples.portions())
    500
    >>> examples.portion > 500  # so that there is one portion
    True
    """

    X: Array
    Y: Array
    scale: float
    basis: Float64 | None = None
    noise: float = 0.0
    index: Int64 | None = field(default=None, repr=False)
    constant: bool = False

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.X) if self.index is None else len(self.index)

    @property
    def tokens(self) -> int:
        """The number of tokens T."""
        return int(self.X.shape[1])

    @property
    def dim(self) -> int:
        """The dimension d of a token."""
        return int(self.X.shape[2])

    @property
    def out_dim(self) -> int:
        """The dimension p of the outputs."""
        return int(self.Y.shape[2] if self.basis is None else self.basis.shape[1])

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.n * self.tokens

    @property
    def noise_floor(self) -> float:
        """The residual of a row that is due to noise alone, relative to `scale`."""
        return self.noise * float(np.sqrt(self.out_dim)) / self.scale

    @property
    def portion(self) -> int:
        """The number of samples of a portion."""
        longest = max(self.tokens, self.dim, int(self.Y.shape[2]))
        return max(1, PORTION // (self.tokens * longest))

    def first(self, samples: int) -> Examples:
        """Select the first samples; nothing is copied.

        Parameters
        ----------
        samples : int
            How many; all if there are fewer.

        Returns
        -------
        selected : Examples
        """
        if self.index is not None:
            return replace(self, index=self.index[:samples])
        return replace(self, X=self.X[:samples], Y=self.Y[:samples])

    @keyword_only("seed", 2)
    def split(self, held_out: int, *, seed: int) -> tuple[Examples, Examples]:
        """Split off samples drawn at random; nothing is copied.

        Each part has the scale and the basis of its own outputs: no number of the one depends on
        the other.  A part of zeros only has scale 0.

        Parameters
        ----------
        held_out : int
            How many to split off.
        seed : int
            Seed of the draw.

        Returns
        -------
        kept : Examples
        held_out : Examples

        Raises
        ------
        ValueError
            If squares of the outputs of a part overflow or vanish.
        """
        chosen = np.zeros(self.n, dtype=bool)
        chosen[np.random.default_rng([seed, 1]).choice(self.n, held_out, replace=False)] = True
        every = np.arange(self.n) if self.index is None else self.index
        kept, drawn = (_described(replace(self, index=every[which])) for which in (~chosen, chosen))
        return kept, drawn

    def part(self, samples: Int64 | slice) -> tuple[Float64, Float64]:
        """Return X and Y of some samples in the form that the core expects.

        Parameters
        ----------
        samples : int64 array (m,) or slice
            The numbers of the samples.

        Returns
        -------
        X : float64 array (m, T, d)
        Y : float64 array (m, T, p)
            In coordinates of `basis` if there is one.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.boolean_layer(500, 2, 6, 2, seed=0)
        >>> X, Y = mh.learner.as_examples(data.X, data.y).part(slice(0, 20))
        >>> X.shape, Y.shape
        ((20, 2, 6), (20, 2, 6))
        """
        X, Y = self._read(samples)
        return X, self._outputs(Y)

    def gather(self, rows: Int64) -> tuple[Float64, Float64, Int64]:
        """Return X and Y of the samples of some rows, and the numbers of the rows among them.

        Parameters
        ----------
        rows : int64 array (k,)
            Rows as sample · T + query.

        Returns
        -------
        X : float64 array (m, T, d)
        Y : float64 array (m, T, p)
        rows : int64 array (k,)
            The same rows, counted in the m samples that are returned.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> data = mh.data.boolean_layer(500, 2, 6, 2, seed=0)
        >>> X, Y, rows = mh.learner.as_examples(data.X, data.y).gather(np.array([7, 6, 30]))
        >>> X.shape, rows.tolist()  # rows 6 and 7 belong to sample 3
        ((2, 2, 6), [1, 0, 2])
        """
        samples, which = np.unique(rows // self.tokens, return_inverse=True)
        X, Y = self.part(samples)
        return X, Y, which * self.tokens + rows % self.tokens

    def portions(self, *, whole: bool = False) -> Iterator[tuple[int, Float64, Float64]]:
        """Yield all samples, a portion at a time.

        Parameters
        ----------
        whole : bool
            Whether Y has all its outputs and not their coordinates in `basis`.

        Yields
        ------
        begin : int
            The number of the first sample of the portion.
        X : float64 array (m, T, d)
        Y : float64 array (m, T, p)
        """
        for begin in range(0, self.n, self.portion):
            X, Y = self._read(slice(begin, begin + self.portion))
            yield begin, X, Y if whole else self._outputs(Y)

    def _read(self, samples: Int64 | slice) -> tuple[Float64, Float64]:
        at = samples if self.index is None else self.index[samples]
        return _float64(self.X[at]), _float64(self.Y[at])

    def whole_layer(self, layer: Layer) -> Layer:
        """Turn a layer of the p independent outputs into one that computes all outputs of Y.

        Parameters
        ----------
        layer : Layer
            With p outputs.

        Returns
        -------
        Layer

        Raises
        ------
        TypeError
            If it is not a Layer.
        ValueError
            If the layer does not have p outputs.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> data = mh.data.boolean_layer(500, 2, 6, 2, seed=0)
        >>> twice = np.concatenate([data.y, 2 * data.y], axis=-1)
        >>> examples = mh.learner.as_examples(data.X, twice)
        >>> layer = mh.Layer(data.truth["layer"].W, np.zeros((2, 6, examples.out_dim)))
        >>> examples.whole_layer(layer).out_dim
        12
        """
        checks.instance(layer, Layer, "layer")
        if layer.out_dim != self.out_dim:
            raise ValueError(f"layer: expected p = {self.out_dim} outputs, got {layer.out_dim}")
        return layer if self.basis is None else Layer(layer.W, layer.V @ self.basis.T)

    def _outputs(self, Y: Float64) -> Float64:
        return Y if self.basis is None else np.ascontiguousarray(Y @ self.basis)


def as_examples(
    X: npt.ArrayLike, Y: npt.ArrayLike, noise: float = 0.0, *, fewest_tokens: int = 2
) -> Examples:
    """Check the arrays to learn from.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64
        The tokens, T at least 2.
    Y : array (n, T, p) of the same dtype
        The outputs of the unknown layer.
    noise : float
        Standard deviation of the noise in each entry of Y, at least 0.
    fewest_tokens : int
        The least T that is accepted; the phases need 2.

    Returns
    -------
    checked : Examples
        Y in units of its root mean square row, and a basis of its outputs if they are dependent.

    Raises
    ------
    TypeError
        X is not float32 or float64, or Y not of its dtype.
    ValueError
        The shapes do not fit, there are too few tokens, an entry is not finite, Y is all zero.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 6, 2, seed=0)
    >>> twice = np.concatenate([data.y, 2 * data.y], axis=-1)  # half of it is redundant
    >>> examples = mh.learner.as_examples(data.X, twice)
    >>> twice.shape[-1], examples.out_dim
    (12, 6)
    >>> layer = examples.whole_layer(mh.Layer(data.truth["layer"].W, np.zeros((2, 6, 6))))
    >>> layer.V.shape
    (2, 6, 12)
    """
    X = _real(X, "X")
    Y = _real(Y, "Y")
    if Y.dtype != X.dtype:
        raise TypeError(f"Y: expected dtype {X.dtype.name}, that of X, got {Y.dtype.name}")
    checks.shape(X, "X", "n T d", (None, None, None))
    n, tokens, _ = X.shape
    checks.shape(Y, "Y", "n T p", (n, tokens, None))
    if 0 in X.shape or 0 in Y.shape:
        raise ValueError(f"X, Y: expected no empty axis, got shapes {X.shape} and {Y.shape}")
    if tokens < checks.count(fewest_tokens, "fewest_tokens"):
        raise ValueError(f"X: expected at least {fewest_tokens} tokens per sample, got {tokens}")
    noise = checks.finite(noise, "noise")
    if noise < 0.0:
        raise ValueError(f"noise: expected a standard deviation of at least 0, got {noise}")
    examples = Examples(X, Y, 0.0, noise=noise)
    for _, x, y in examples.portions():
        for name, part in (("X", x), ("Y", y)):
            if not np.isfinite(part).all():
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    examples = _described(examples)
    if examples.scale == 0.0:
        raise ValueError("Y: expected outputs of a layer, got only zeros")
    return examples


def _described(examples: Examples) -> Examples:
    """Return the examples with the scale and the basis of their outputs.

    Raises
    ------
    ValueError
        Squares of the outputs overflow or vanish.
    """
    p = examples.Y.shape[2]
    moment, total, only_zeros = np.zeros((p, p)), np.zeros(p), True
    for _, _, Y in examples.portions(whole=True):
        only_zeros = only_zeros and not Y.any()
        y = Y.reshape(-1, p)
        with np.errstate(over="ignore", invalid="ignore"):
            moment += y.T @ y
            total += np.ones(len(y)) @ y
    if only_zeros:
        return replace(examples, scale=0.0, basis=None, constant=True)
    scale = float(np.sqrt(np.trace(moment) / examples.rows))
    if not 1.0 / LARGEST < scale < LARGEST:
        raise ValueError(
            f"Y: expected outputs whose squares can be added, got rows of size {scale:.3g}"
        )
    spread = float(np.trace(moment)) - float(total @ total) / examples.rows
    sizes, axes = np.linalg.eigh(moment)
    taken = sizes > _rounding(examples.Y.dtype) * sizes[-1]
    return replace(
        examples,
        scale=scale,
        basis=None if taken.all() else axes[:, taken],
        constant=spread <= CONSTANT * float(np.trace(moment)),
    )


def _rounding(dtype: np.dtype[Any]) -> float:
    """Return the share of the largest second moment that rounding of the outputs may reach.

    Outputs rounded to ε have errors of at most ε/2 of an entry each: ε² / 4 of the second moment.
    The limit is sixteen times as much.
    """
    return max(ROUNDING, 4.0 * float(np.finfo(dtype).eps) ** 2)


def _real(value: npt.ArrayLike, name: str) -> Array:
    """Like `checks.real`, but a large array is not copied to change its memory layout."""
    if type(value) in (np.ndarray, np.memmap):
        array = np.asarray(value)
        if array.dtype.type in (np.float32, np.float64) and array.dtype.isnative:
            return array
    return checks.real(value, name)


def _float64(array: Array) -> Float64:
    return np.require(array, np.float64, ("C", "A"))
