"""`Tokens`: tokens that are words of a dictionary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array, describe, field_values, read_only, same_fields


def word_numbers(ids: npt.ArrayLike, name: str, words: int) -> npt.NDArray[np.int32]:
    """Check numbers of words, from 0 to `words` - 1, which errors call `name`."""
    array = checks.as_array(ids, name)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype.name}")
    if array.size and not (array.min() >= 0 and array.max() < words):
        place = tuple(np.argwhere((array < 0) | (array >= words))[0].tolist())
        raise ValueError(
            f"{name}: expected integers in [0, {words - 1}], got {array[place]} at index "
            f"{', '.join(map(str, place))}"
        )
    return array.astype(np.int32, copy=False)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Tokens:
    """Tokens taken from a dictionary of V words: in place of the array `embedding[ids]`.

    Accepted as X (n, T, d), with the same results up to rounding. With E the embedding, the logits
    E W Eᵀ of all pairs of words are computed once for each call or step and looked up for each
    sample, of few words their exponentials too, and gradients are summed over pairs of words first,
    so that the cost of a sample does not depend on d. This is done for outputs, attention,
    gradients with respect to parameters, training and `evaluate`, where the tables cost less than
    they save. Everything else, such as gradients with respect to X, Hessian-vector
    products and theory, uses the array of tokens, which is computed once when it is needed.

    Parameters
    ----------
    ids : integers (n, T), or (R, n, T) with a run axis
        The word of each token, from 0 to V - 1.
    embedding : array (V, d), or (R, V, d), float32 or float64
        The dictionary. `value_and_grad` differentiates by it, `train` leaves it as it is: an
        embedding that is trained is that of a `Stack`.

    Raises
    ------
    TypeError
        If `ids` are not integers, or `embedding` is neither float32 nor float64.
    ValueError
        If a shape does not fit or an id is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> X = mh.Tokens(rng.integers(7, size=(20, 5)), rng.standard_normal((7, 9)))
    >>> X.shape, X.ndim, X.size, X.dtype.name, X.words, X.is_finite
    ((20, 5, 9), 3, 900, 'float64', 7, True)
    >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.1, seed=0)
    >>> bool(np.allclose(model(X), model(np.asarray(X)), rtol=1e-13))
    True
    """

    ids: npt.NDArray[np.int32]
    embedding: Array

    def __init__(self, ids: npt.ArrayLike, embedding: npt.ArrayLike) -> None:
        embedding = checks.real(embedding, "embedding")
        checks.shape(embedding, "embedding", "V d", (None, None), runs=True)
        if embedding.size == 0:
            raise ValueError(
                f"embedding: expected at least one word and feature, got shape {embedding.shape}"
            )
        array = word_numbers(ids, "ids", embedding.shape[-2])
        checks.shape(array, "ids", "n T", (None, None), runs=True)
        if array.ndim == 3 and embedding.ndim == 3 and len(array) != len(embedding):
            raise ValueError(
                f"embedding: expected R = {len(array)} runs, those of ids, got {len(embedding)}"
            )
        vars(self).update(
            ids=read_only(checks.ready(array)),
            embedding=read_only(embedding),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (n, T, d), or (R, n, T, d), of the tokens."""
        return shape_of(self.ids, self.embedding)

    @property
    def ndim(self) -> int:
        """The number of axes, 3 or 4."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of entries of the array of tokens."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the embedding."""
        return self.embedding.dtype

    @property
    def words(self) -> int:
        """The number V of words."""
        return int(self.embedding.shape[-2])

    @cached_property
    def is_finite(self) -> bool:
        """Whether all numbers of the embedding are finite."""
        return bool(np.isfinite(self.embedding).all())

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """Return the array of tokens, `embedding[ids]`, read-only."""
        array = self._array
        if dtype is None or np.dtype(dtype) == array.dtype:
            return array.copy() if copy else array
        return array.astype(dtype)

    @cached_property
    def _array(self) -> npt.NDArray[Any]:
        """The array of tokens, read-only, kept because it is often needed again."""
        if self.embedding.ndim == 2:
            array: npt.NDArray[Any] = self.embedding[self.ids]
        else:
            runs = np.arange(len(self.embedding)).reshape(-1, 1, 1)
            array = self.embedding[runs, self.ids]
        array.flags.writeable = False
        return array

    def __getitem__(self, index: Any) -> Tokens:
        """Select along the first axis, as of an array: samples by a slice or several, or runs."""
        if self.ndim == 3:
            return Tokens(self.ids[index], self.embedding)
        ids = self.ids[index] if self.ids.ndim == 3 else self.ids
        return Tokens(ids, self.embedding[index] if self.embedding.ndim == 3 else self.embedding)

    # Otherwise Python and NumPy would take them for a sequence.
    __iter__ = None

    def _samples(self, index: Any) -> Tokens:
        """Return the tokens of some samples, of every run."""
        return Tokens(self.ids[..., index, :], self.embedding)

    def __getstate__(self) -> dict[str, Any]:
        return field_values(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __repr__ = describe


def shape_of(ids: npt.NDArray[np.int32], embedding: Array) -> tuple[int, ...]:
    """Return the shape of the array of the rows of a dictionary that `ids` select."""
    runs = ids.shape[:-2] or embedding.shape[:-2]
    return (*runs, *ids.shape[-2:], embedding.shape[-1])
