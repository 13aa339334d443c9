"""How rows of logits become attention weights: the name of a row map, and its call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy.typing as npt

from .. import _core, config
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from . import problem as arguments

if TYPE_CHECKING:
    from .model import Model


class Attention(str):
    """The attention of a model: the name of its row map, which can be called.

    It is the name, for example "softmax", and equal to it; calling it computes the weights.
    """

    __slots__ = ("_model",)
    _model: Model

    def __new__(cls, model: Model) -> Attention:
        """Name the row map of `model`."""
        attention = super().__new__(cls, model._core.row_map_name)
        attention._model = model
        return attention

    def __call__(
        self,
        X: npt.ArrayLike | Dataset,
        *,
        query: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> Array:
        """Compute the attention weights of the logits scale · Z_i W_h X_iᵀ.

        Rows of softmax sum to one; a row that sees no token is 0, and so is every weight of an
        unseen token.

        Parameters
        ----------
        X : array (n, T, d) of the model's dtype, or Dataset
        query : array (n, q, d), optional
            An external query, in place of the model's own.
        lengths : integers (n,), optional
            The number of tokens of each sample; what is beyond has no influence.
        num_threads : int, optional
            Threads for this call, in place of the default.

        Returns
        -------
        array of the model's dtype
            (n, H, q, T), or (R, n, H, q, T) with a run axis.

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit the model.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> model.attention(data).shape  # (n, H, q, T)
        (20, 3, 5, 5)
        """
        model = self._model
        seen = arguments.problem(model, X, query=query, lengths=lengths, words=True)
        return _core.attention(
            seen.data, model._core.parameters, runs=seen.runs.length, scale=model.scale,
            causal=seen.causal, row_map=model._core.row_map, threads=config.threads(num_threads),
        )  # fmt: skip

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)
