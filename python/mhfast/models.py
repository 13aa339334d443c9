"""`Classifier`: multi-head softmax attention read out to one number per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _checks, _core, config
from ._values import Array, describe, frozen, same_fields
from .dataset import Dataset, Seed, no_second_source

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Classifier:
    """The multi-head attention classifier.

        Φ(X) = H^(-1/2) Σ_h ⟨U_h, softmax(scale · Z W_h Xᵀ) X⟩,

    a scalar for each sample X (T, d). softmax acts on every row; ⟨,⟩ sums the products of all
    entries. The query side Z (q, d) is X itself, one of its tokens or external.

    The arrays are read-only, and shared with the caller only if nobody can write to them. A model
    therefore never changes; `model + s * gradients` and `dataclasses.replace` make new ones.

    Parameters
    ----------
    W : array (H, d, d), float32 or float64
        Key-query matrices.
    U : array (H, q, d) of the same dtype
        Readout matrices.
    query : None, int or array (n, q, d)
        None: Z = X, so that q = T. An integer: that token of each sample, counted from the end if
        negative, so that q = 1. An array: an external query for each of n samples. A `query` that
        comes with the data overrides it.
    scale : float
        Factor of the logits; 1.0 and not 1/sqrt(d) by default.

    Raises
    ------
    TypeError
        If W, U or query are not of one dtype, float32 or float64.
    ValueError
        If their shapes do not fit together, or scale is not finite.

    References
    ----------
    Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
    Attention", TMLR 2024.
    """

    W: Array
    U: Array
    query: int | Array | None = None
    scale: float = 1.0

    def __init__(
        self,
        W: npt.ArrayLike,
        U: npt.ArrayLike,
        query: int | npt.ArrayLike | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        W = _checks.real(W, "W")
        columns = W.shape[-1] if W.ndim else None
        _checks.shape(W, "W", "H d d", (None, columns, columns))
        U = _checks.real(U, "U", W.dtype, "W")
        heads, _, dim = W.shape
        query = _settled(query, dim, W.dtype, "W")
        _checks.shape(U, "U", "H q d", (heads, _query_rows(query), dim))
        if W.size == 0 or U.size == 0:
            raise ValueError(
                f"W, U: expected no axis of length 0, got shapes {W.shape} and {U.shape}"
            )
        vars(self).update(
            W=frozen(W), U=frozen(U), query=query, scale=_checks.finite(scale, "scale")
        )

    @property
    def heads(self) -> int:
        """The number H of heads."""
        return len(self.W)

    @property
    def dim(self) -> int:
        """The dimension d of a token."""
        return int(self.W.shape[2])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of parameters, data and results: float32 or float64."""
        return self.W.dtype

    @classmethod
    def zeros(
        cls,
        heads: int,
        tokens: int,
        dim: int,
        *,
        dtype: npt.DTypeLike = np.float64,
        query: int | npt.ArrayLike | None = None,
        scale: float = 1.0,
    ) -> Self:
        """Make the classifier with all parameters zero, for samples of `tokens` tokens.

        Parameters
        ----------
        heads, tokens, dim : int
            H, T and d, each at least 1.
        dtype : float32 or float64
        query, scale
            As for the class. U has q = `tokens` rows without a query, else as many as the query.
        """
        real = _checks.float_dtype(dtype)
        W_shape, U_shape = _parameter_shapes(heads, tokens, dim, query, real)
        return cls(np.zeros(W_shape, real), np.zeros(U_shape, real), query, scale=scale)

    @classmethod
    def gaussian(
        cls,
        heads: int,
        tokens: int,
        dim: int,
        *,
        std: float,
        seed: Seed,
        dtype: npt.DTypeLike = np.float64,
        query: int | npt.ArrayLike | None = None,
        scale: float = 1.0,
    ) -> Self:
        """Draw a classifier with independent entries N(0, std²), for samples of `tokens` tokens.

        W is drawn before U, both in float64, so that a float32 model is the float64 model of the
        same seed rounded.

        Parameters
        ----------
        heads, tokens, dim : int
            H, T and d, each at least 1.
        std : float
            Standard deviation of every entry, at least 0.
        seed : int or numpy.random.Generator
        dtype : float32 or float64
        query, scale
            As for the class. U has q = `tokens` rows without a query, else as many as the query.
        """
        real = _checks.float_dtype(dtype)
        W_shape, U_shape = _parameter_shapes(heads, tokens, dim, query, real)
        std = _checks.finite(std, "std")
        if std < 0:
            raise ValueError(f"std: expected a number of at least 0, got {std}")
        rng = _checks.generator(seed)
        W = (std * rng.standard_normal(W_shape)).astype(real, copy=False)
        U = (std * rng.standard_normal(U_shape)).astype(real, copy=False)
        return cls(W, U, query, scale=scale)

    @classmethod
    def random_step(
        cls,
        data: Dataset,
        heads: int,
        seed: Seed,
        *,
        query: int | None = None,
        scale: float = 1.0,
    ) -> Classifier:
        """Make the classifier one gradient step of random sign per head away from zero.

        See `mhfast.starts.random_step` for parameters and formula.
        """
        from .starts import random_step

        return random_step(data, heads, seed, query=query, scale=scale)

    def __call__(
        self,
        X: npt.ArrayLike | Dataset,
        *,
        query: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> Array:
        """Compute the outputs Φ(X_i).

        Parameters
        ----------
        X : array (n, T, d) of the model's dtype, or Dataset
        query : array (n, q, d), optional
            An external query, in place of the model's own.
        num_threads : int, optional
            Threads for this call, in place of the default.

        Returns
        -------
        array (n,) of the model's dtype. The result of a sample does not depend on the others.

        Raises
        ------
        TypeError, ValueError
            If an array has another dtype or does not fit the model.
        """
        X, Z = self._inputs(X, query)
        return _core.outputs(X, Z, self.W, self.U, self.scale, config.threads(num_threads))

    def attention(
        self,
        X: npt.ArrayLike | Dataset,
        *,
        query: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> Array:
        """Compute the attention weights softmax(scale · Z_i W_h X_iᵀ), whose rows sum to one.

        Parameters and errors are those of calling the model.

        Returns
        -------
        array (n, H, q, T) of the model's dtype.
        """
        X, Z = self._inputs(X, query)
        return _core.attention(X, Z, self.W, self.scale, config.threads(num_threads))

    def _inputs(
        self, X: npt.ArrayLike | Dataset, query: npt.ArrayLike | None
    ) -> tuple[Array, Array | None]:
        if isinstance(X, Dataset):
            no_second_source(None, query, None)
            return _checks.inputs(self, X.X, X.query)
        return _checks.inputs(self, X, query)

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __repr__ = describe


def _settled(
    query: int | npt.ArrayLike | None, dim: int, dtype: np.dtype[Any], like: str
) -> int | Array | None:
    """Return the `query` of a model as it is kept: None, an int or a frozen (n, q, `dim`) array."""
    if query is None:
        return None
    if not np.ndim(query):
        return _checks.integer(query, "query", "an integer or an array (n, q, d)")
    Z = _checks.real(query, "query", dtype, like)
    _checks.shape(Z, "query", "n q d", (None, None, dim))
    return frozen(Z)


def _parameter_shapes(
    heads: int,
    tokens: int,
    dim: int,
    query: int | npt.ArrayLike | None,
    dtype: np.dtype[Any],
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes (H, d, d) of W and (H, q, d) of U for samples of `tokens` tokens."""
    H = _checks.count(heads, "heads")
    T = _checks.count(tokens, "tokens")
    d = _checks.count(dim, "dim")
    which = _settled(query, d, dtype, "the model")
    if isinstance(which, int):
        _checks.token_index(which, T)
    q = _query_rows(which)
    return (H, d, d), (H, T if q is None else q, d)


def _query_rows(query: int | Array | None) -> int | None:
    """Return the number q of rows that `query` decides on, None if it is that of the tokens."""
    if query is None:
        return None
    return 1 if isinstance(query, int) else int(query.shape[1])
