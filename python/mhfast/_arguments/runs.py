"""The run axis: R independent problems side by side, on a leading axis that any array may lack."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class RunAxis(NamedTuple):
    """The common length R of all run axes met so far.

    Parameters
    ----------
    length : int
        R, or 0 if no array so far has a run axis.
    origin : str
        The first argument that had a run axis.
    """

    length: int = 0
    origin: str = ""

    def meet(self, name: str, shape: tuple[int, ...], axes: int) -> RunAxis:
        """Return the run axis including that of argument `name`, which has `axes` axes without it.

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
        return RunAxis(shape[0], name)

    def join(self, other: RunAxis) -> RunAxis:
        """Return the run axis including that of `other`."""
        return self.meet(other.origin, (other.length,), 0) if other.length else self


NO_RUNS = RunAxis()


def repeated(array: npt.NDArray[Any], axes: int, runs: int) -> npt.NDArray[Any]:
    """Return a writable C-contiguous copy of `array`, with a leading axis of `runs` unless 0."""
    if runs and array.ndim == axes:
        array = np.broadcast_to(array, (runs, *array.shape))
    return np.array(array, order="C")
