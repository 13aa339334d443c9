"""The rows that tangent kernels are made of, by the core: A X and scale · D X by query rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core, config
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Classifier, Layer
from ..models.problem import problem as core_problem


class Rows(NamedTuple):
    """Rows of g heads, those of an identity being one; each may have a leading run axis.

    Parameters
    ----------
    pooled : array (n, q, g, d)
    moved : array (n, q, g, d), of a layer (n, q, p, g, d), or None if it was not asked for
        In units of 2^unit.
    unit : int64 array (R,) or (1,), or None where all are 0
    """

    pooled: Array
    moved: Array | None
    unit: npt.NDArray[np.int64] | None


class RowsOfModel:
    """The rows of one data set, of as many heads at a time as one asks for."""

    def __init__(self, model: Classifier | Layer, data: Dataset) -> None:
        self._model, self._seen = model, core_problem(model, data)

    @property
    def tokens(self) -> Array:
        """The tokens (n, T, d) as the core has them, perhaps with a run axis."""
        X = self._seen.data[0]
        assert isinstance(X, np.ndarray)
        return X

    @property
    def queries(self) -> Array:
        """The query rows (n, q, d), or (1, q, d) of a prompt, perhaps with a run axis."""
        if self._model.prompt is not None:
            return self._model.prompt[..., None, :, :]
        Z = self._seen.data[1]
        assert Z is None or isinstance(Z, np.ndarray)
        return self.tokens if Z is None else Z

    def of_heads(self, some: slice, *, derivative: bool) -> Rows | None:
        """Return rows, None where numbers are not finite or not ordinary, see `_core`."""
        model, seen = self._model, self._seen
        core = model._core
        found = _core.tangent_rows(
            seen.data, core.parameters, seen.runs.length, model.scale, seen.causal, core.row_map,
            some.start, some.stop, derivative, config.threads(None),
        )  # fmt: skip
        if found is None:
            return None
        pooled, moved, unit = found
        return Rows(pooled, moved, unit if unit.any() else None)
