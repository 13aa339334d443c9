"""What a `LowRank` and a `ValueOutput` share: matrices in two factors."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import numpy as np

from .._arguments.values import Array, describe, same_fields


class Factors:
    """Base of frozen dataclasses of two factors, the first of which has r columns."""

    @property
    def _first(self) -> Array:
        return cast("Array", getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    @property
    def rank(self) -> int:
        """The number r of columns of the first factor."""
        return int(self._first.shape[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the factors: float32 or float64."""
        return self._first.dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __repr__ = describe
