"""The run axis: R independent problems side by side, on a leading axis that any array may lack."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Runs(NamedTuple):
    """The common length R of all run axes met so far.

    Parameters
    ----------
    length : int
        R, or 0 as long as no array has a run axis.
    origin : str
        The argument whose run axis was met first.
    """

    length: int = 0
    origin: str = ""

    def meet(self, name: str, shape: tuple[int, ...], axes: int) -> Runs:
        """Return what is known after the argument `name`, which has `axes` axes without runs.

        Raises
        ------
        ValueError
            If it has a run axis of another length.
        """
        if len(shape) == axes or self.length == shape[0]:
            return self
        if self.length:
            raise ValueError(
                f"{name}: expected a run axis of length R = {self.length}, that of {self.origin}, "
                f"got {shape[0]} (shape {shape})"
            )
        if shape[0] == 0:
            raise ValueError(f"{name}: expected at least one run, got shape {shape}")
        return Runs(shape[0], name)

    def join(self, other: Runs) -> Runs:
        """Return what is known after all that `other` has met."""
        return self.meet(other.origin, (other.length,), 0) if other.length else self


NO_RUNS = Runs()


def repeated(array: npt.NDArray[Any], axes: int, runs: int) -> npt.NDArray[Any]:
    """Return a writable C-contiguous copy of `array`, with a leading axis of `runs` unless 0."""
    if runs and array.ndim == axes:
        array = np.broadcast_to(array, (runs, *array.shape))
    return np.array(array, order="C")
