"""The layer that is queried: a function of tokens of which only the values are known.

Inputs are made of two tokens x and z = x - δ, repeated: x stands m times, z stands T - m times.  In
the rows of x and of z every head attends to two values only, so that for the query q = x or z

    out = z S + Σ_h σ(q W_h δᵀ + b) δ V_h + β,    b = log(m / (T - m)),    S = Σ_h V_h,

and y = 2 (out - (x + z) S / 2 - β) = Σ_h tanh((q W_h δᵀ + b) / 2) δ V_h.  With biases q W_h δᵀ has
one more term that depends on δ alone, and β is what the biases of the values add; else β = 0.

All coordinates lie on a dyadic grid of about 18 bits.  Tokens are then the same numbers in float32
and float64, and differences of tokens are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._arguments import checks as _checks
from ...models import Layer
from ..examples import Float64

GRID_BITS = 18
"""Bits of a coordinate of the typical size; 24 are what float32 holds."""

PORTION = 1 << 22
"""Numbers of the largest array of tokens that the oracle is given at a time."""

ROUNDINGS = 32.0
"""Rounding errors, relative to the terms of an output, that are tolerated."""

NOISE_ALLOWED = 1.4
"""Residual of a fit over the noise, at most: of few rows, and of a sum that has noise itself."""

Ask = Callable[[Float64], npt.ArrayLike]


@dataclass(eq=False)
class Oracle:
    """A function of tokens (n, T, d) with outputs (n, T, p), and the count of the queries.

    Attributes
    ----------
    ask : callable
    tokens, dim : int
        T and d.
    queries : int
        Inputs (T, d) asked so far.
    asked : dict
        The same by part of the learning.
    rounding : float
        Unit of rounding of the outputs.
    """

    ask: Ask
    tokens: int
    dim: int
    queries: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    rounding: float = float(np.finfo(np.float64).eps)
    out_dim: int | None = None
    _part: str = ""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the queries made in the block under this name."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def __call__(self, X: Float64) -> Float64:
        """Return the outputs (n, T, p) for tokens (n, T, d).

        Raises
        ------
        TypeError, ValueError
            The outputs are not finite real numbers of this shape.
        """
        size = max(1, PORTION // (self.tokens * max(self.dim, self.out_dim or 1)))
        parts = [self._one(X[begin : begin + size]) for begin in range(0, len(X), size)]
        self.queries += len(X)
        self.asked[self._part] = self.asked.get(self._part, 0) + len(X)
        return np.concatenate(parts)

    def _one(self, X: Float64) -> Float64:
        Y = _checks.as_array(self.ask(X), "oracle(X)")
        if Y.dtype.kind != "f":
            raise TypeError(f"oracle(X): expected real numbers, got {Y.dtype.name}")
        _checks.shape(Y, "oracle(X)", "n T p", (len(X), self.tokens, self.out_dim))
        if Y.shape[2] == 0:
            raise ValueError("oracle(X): expected at least one output for a token, got none")
        if not np.isfinite(Y).all():
            raise ValueError("oracle(X): expected finite numbers, got NaN or infinity")
        self.out_dim = int(Y.shape[2])
        self.rounding = max(self.rounding, float(np.finfo(Y.dtype).eps))
        return Y.astype(np.float64)


def as_oracle(oracle: Layer | Ask, tokens: int, dim: int) -> Oracle:
    """Make an oracle of a layer or of any callable.

    Raises
    ------
    TypeError
        It cannot be called.
    ValueError
        It is a Layer of another dimension, with a run axis, or not of plain self-attention.
    """
    if isinstance(oracle, Layer):
        for name, plain in (("query", None), ("prompt", None), ("causal", False)):
            if getattr(oracle, name) is not plain:
                raise ValueError(
                    f"oracle: expected a Layer without {name}, of plain self-attention"
                )
        if oracle.attention != "softmax":
            raise ValueError(
                f"oracle: expected a Layer of softmax attention, got {str(oracle.attention)!r}"
            )
        if oracle.dim != dim or oracle.V.ndim != 3:
            raise ValueError(
                f"oracle: expected a Layer of tokens of dimension {dim} without a run axis, "
                f"got {oracle!r}"
            )
        layer = oracle
        return Oracle(lambda X: layer(X.astype(layer.V.dtype)), tokens, dim)
    if not callable(oracle):
        raise TypeError(f"oracle: expected a callable, got {type(oracle).__name__}")
    return Oracle(oracle, tokens, dim)


@dataclass(frozen=True, eq=False)
class Rows:
    """The equations from rows of two-token inputs of one δ: y = Σ_h tanh((q·a_h + b) / 2) c_h.

    a_h = W_h δᵀ (with biases: and one more number) and c_h = δ V_h.

    Attributes
    ----------
    Q : array (n, d) or, with biases, (n, d + 1) with ones last
    b : array (n,)
    Y : array (n, p)
    """

    Q: Float64
    b: Float64
    Y: Float64

    @property
    def scale(self) -> float:
        """Root mean square of the numbers of Y."""
        return float(np.sqrt(np.mean(self.Y**2)))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Queries the oracle with inputs of two tokens.

    Attributes
    ----------
    oracle : Oracle
    size : float
        Norm of typical tokens: scores of heads are then neither small nor large.
    values : array (d, p)
        S.
    offset : array (p,)
        β.
    bias : bool
    noise : float
        Standard deviation of the noise of an output.
    """

    oracle: Oracle
    size: float
    values: Float64
    offset: Float64
    bias: bool
    noise: float

    @property
    def shifts(self) -> tuple[int, ...]:
        """How often x may stand in an input: m and T - m, which differ if they can."""
        m = max(1, (self.oracle.tokens - 1) // 2)
        return m, self.oracle.tokens - m

    def grid(self, X: Float64) -> Float64:
        """Round to the grid."""
        return on_grid(X, self.size / np.sqrt(self.oracle.dim))

    def rows(self, x: Float64, delta: Float64, *, like: int = 1) -> Rows:
        """Ask for tokens x (n, d) and x - delta, both on the grid; 2 n rows, of x and then of z.

        If T > 2, numbers m of x alternate after every `like` inputs, which shows the sign of a
        head.
        """
        T = self.oracle.tokens
        m = np.resize(np.repeat(self.shifts, like), len(x))
        outs = two_tokens(self.oracle, x, x - delta, m)
        q = np.concatenate([x, x - delta])
        out = np.concatenate(outs)
        middle = np.tile(x - 0.5 * delta, (2, 1)) @ self.values + self.offset
        if self.bias:
            q = np.hstack([q, np.ones((len(q), 1))])
        return Rows(q, np.tile(np.log(m / (T - m)), 2), 2.0 * (out - middle))

    def limit(self, scale: float) -> float:
        """Root mean square residual of y that noise and rounding explain, of outputs y ~ scale."""
        sharp = ROUNDINGS * self.oracle.rounding * self.magnitude(scale)
        return float(np.hypot(2.0 * NOISE_ALLOWED * self.noise, sharp))

    def magnitude(self, scale: float) -> float:
        """Size of the terms of an output: of the middle token's and of the heads'."""
        p = self.values.shape[1]
        return scale + self.size * float(np.linalg.norm(self.values)) / float(np.sqrt(p))


def two_tokens(
    oracle: Oracle, x: Float64, z: Float64, m: npt.NDArray[Any] | int
) -> tuple[Float64, Float64]:
    """Ask inputs in which x (n, d) stands m times and z fills up: outputs (n, p) of x and of z.

    Rows of equal tokens are averaged.
    """
    first = np.arange(oracle.tokens) < np.broadcast_to(m, len(x))[:, None]
    out = oracle(np.where(first[..., None], x[:, None], z[:, None]))
    share = first / first.sum(axis=1, keepdims=True)
    other = ~first / (~first).sum(axis=1, keepdims=True)
    return (share[:, None] @ out)[:, 0], (other[:, None] @ out)[:, 0]


def on_grid(X: Float64, size: float) -> Float64:
    """Round X to multiples of a power of two, 2^-18 of `size` or a little less."""
    step = 2.0 ** (np.floor(np.log2(size)) - GRID_BITS)
    return np.asarray(np.rint(X / step) * step)
