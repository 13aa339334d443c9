"""The examples a learner reads: checked once, then read in portions, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .._arguments import checks as _checks
from .._arguments.values import Array
from ..models import Layer

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

PORTION = 1 << 22
"""Numbers of the largest array that is made of the examples read at a time."""

ROUNDING = 1e-14
"""Share of the largest second moment of the outputs below which a direction is that of rounding."""

LARGEST = 1e100
"""Size of an output row, and of its inverse, beyond which squares might overflow."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs X (n, T, d) and outputs Y (n, T, p) of an unknown layer.

    X and Y stay as they are, memory maps and float32 included; `portions` and `part` give pieces in
    float64.  A row is one query of one sample, number ``sample * T + query``.

    Where the outputs of all rows lie in a subspace the learner sees their coordinates there, and p
    is its dimension: numbers that follow from others certify nothing.

    Attributes
    ----------
    X, Y : array
    scale : float
        Root mean square of the norms of the rows of Y: residuals are told relative to it.
    basis : array (outputs of Y, p) or None
        Orthonormal, of the subspace of the outputs; None where it is the whole space.
    noise : float
        Standard deviation of the noise on every entry of Y, as told by the caller.
    """

    X: Array
    Y: Array
    scale: float
    basis: Float64 | None = None
    noise: float = 0.0

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.X.shape[0])

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
        """What noise alone makes of a row's residual, relative to `scale`."""
        return self.noise * float(np.sqrt(self.out_dim)) / self.scale

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
        return replace(self, X=self.X[:samples], Y=self.Y[:samples])

    def split(self, held_out: int) -> tuple[Examples, Examples]:
        """Split off the last samples; nothing is copied.

        Parameters
        ----------
        held_out : int
            How many to split off.

        Returns
        -------
        kept : Examples
            All but the last `held_out` samples.
        held_out : Examples
            The last ones.
        """
        cut = self.n - held_out
        return self.first(cut), replace(self, X=self.X[cut:], Y=self.Y[cut:])

    def part(self, samples: Int64 | slice) -> tuple[Float64, Float64]:
        """Return X and Y of some samples as the core reads them.

        Parameters
        ----------
        samples : int64 array (m,) or slice
            The numbers of the samples.

        Returns
        -------
        X : float64 array (m, T, d)
        Y : float64 array (m, T, p)
            In coordinates of `basis` if there is one.
        """
        return _float64(self.X[samples]), self._outputs(_float64(self.Y[samples]))

    def gather(self, rows: Int64) -> tuple[Float64, Float64, Int64]:
        """Return X and Y of the samples of some rows, and the rows' numbers among them.

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
        for begin, X, Y in _portions(self.X, self.Y):
            yield begin, X, Y if whole else self._outputs(Y)

    def whole_layer(self, layer: Layer) -> Layer:
        """Turn a layer of the p independent outputs into one that makes all outputs of Y.

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
            If V does not have the dtype of W.
        ValueError
            If the layer does not have p outputs.
        """
        return layer if self.basis is None else Layer(layer.W, layer.V @ self.basis.T)

    def _outputs(self, Y: Float64) -> Float64:
        return Y if self.basis is None else np.ascontiguousarray(Y @ self.basis)


def as_examples(X: npt.ArrayLike, Y: npt.ArrayLike, noise: float = 0.0) -> Examples:
    """Check the arrays a learner is given.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64
        The tokens, T at least 2.
    Y : array (n, T, p) of the same dtype
        The outputs of the unknown layer.
    noise : float
        Standard deviation of the noise in each entry of Y, at least 0.

    Returns
    -------
    checked : Examples
        Y in units of its root mean square row, and a basis of its outputs if they are dependent.

    Raises
    ------
    TypeError
        X is not float32 or float64, or Y not of its dtype.
    ValueError
        The shapes do not fit, there is only one token, an entry is not finite, Y is all zero.
    """
    X = _real(X, "X")
    Y = _real(Y, "Y")
    if Y.dtype != X.dtype:
        raise TypeError(f"Y: expected dtype {X.dtype.name}, that of X, got {Y.dtype.name}")
    _checks.shape(X, "X", "n T d", (None, None, None))
    n, tokens, _ = X.shape
    _checks.shape(Y, "Y", "n T p", (n, tokens, None))
    if 0 in X.shape or 0 in Y.shape:
        raise ValueError(f"X, Y: expected no empty axis, got shapes {X.shape} and {Y.shape}")
    if tokens < 2:
        raise ValueError("X: expected at least 2 tokens, with one there is nothing to attend to")
    noise = _checks.finite(noise, "noise")
    if noise < 0.0:
        raise ValueError(f"noise: expected a standard deviation of at least 0, got {noise}")
    only_zeros = True
    moment = np.zeros((Y.shape[2], Y.shape[2]))
    for _, x, y in _portions(X, Y):
        for name, part in (("X", x), ("Y", y)):
            if not np.isfinite(part).all():
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
        only_zeros = only_zeros and not y.any()
        y = y.reshape(-1, Y.shape[2])
        with np.errstate(over="ignore", invalid="ignore"):
            moment += y.T @ y
    if only_zeros:
        raise ValueError("Y: expected outputs of a layer, got only zeros")
    scale = float(np.sqrt(np.trace(moment) / (n * tokens)))
    if not 1.0 / LARGEST < scale < LARGEST:
        raise ValueError(
            f"Y: expected outputs whose squares can be added, got rows of size {scale:.3g}"
        )
    sizes, axes = np.linalg.eigh(moment)
    taken = sizes > ROUNDING * sizes[-1]
    return Examples(X, Y, scale, None if taken.all() else axes[:, taken], noise)


def _real(value: npt.ArrayLike, name: str) -> Array:
    """Like `_checks.real`, but a large array is not copied for its memory layout."""
    if type(value) in (np.ndarray, np.memmap):
        array = np.asarray(value)
        if array.dtype.type in (np.float32, np.float64) and array.dtype.isnative:
            return array
    return _checks.real(value, name)


def _portions(X: Array, Y: Array) -> Iterator[tuple[int, Float64, Float64]]:
    tokens, dim = X.shape[1:]
    size = max(1, PORTION // (tokens * max(tokens, dim, Y.shape[2])))
    for begin in range(0, len(X), size):
        yield begin, _float64(X[begin : begin + size]), _float64(Y[begin : begin + size])


def _float64(array: Array) -> Float64:
    return np.require(array, np.float64, ("C", "A"))
