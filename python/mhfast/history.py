"""The rows of a history: buffers that fill while training goes on, joined to what came before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .dataset import Dataset
from .models import Classifier
from .recording import Entry, Metric, check_room, count_due, due_steps, row_of, size_of

History: TypeAlias = dict[str, npt.NDArray[Any]]
Steps: TypeAlias = dict[str, npt.NDArray[np.int64]]


@dataclass(frozen=True)
class NamedRows:
    """Rows of a record of the vocabulary, which the core writes: buffer (rows, ...)."""

    entry: Entry
    buffer: npt.NDArray[Any]
    columns: tuple[str, ...] = ()  # the keys of the columns of a cosine record

    def so_far(self, first: int, reached: int, written: int) -> tuple[History, Steps]:
        """Return what is recorded from step ``first`` to ``reached``: the rows ``written``."""
        k = due_steps(first, reached, self.entry.every)[:written]
        rows = _trimmed(self.buffer, written)
        if self.columns:
            columns = {key: rows[:, j].copy() for j, key in enumerate(self.columns)}
            return columns, {key: k.copy() for key in columns}
        return {self.entry.key: rows}, {self.entry.key: k}


@dataclass
class FunctionRows:
    """Rows of a function of the model. The first value settles their shape and dtype."""

    entry: Entry
    function: Metric
    capacity: int
    earlier: npt.NDArray[Any] | None = None  # the rows of the run that is continued
    buffer: npt.NDArray[Any] | None = None
    taken: list[int] = field(default_factory=list)

    def take(self, k: int, model: Classifier) -> None:
        """Evaluate the function on θ_k, unless that has been done.

        Raises
        ------
        TypeError
            If the value is not real.
        ValueError
            If its shape differs from that of the first, or the rows would take too much room.
        """
        if self.taken and self.taken[-1] == k:
            return
        value = np.asarray(self.function(model))
        if value.dtype.kind not in "biuf":
            raise TypeError(f"record {self.entry.key!r}: expected real values, got {value!r:.80}")
        if self.buffer is None:
            single = value.dtype == np.float32 and value.ndim > 0
            dtype = np.dtype(np.float32 if single else np.float64)
            check_room({self.entry.key: size_of((self.capacity, *value.shape), dtype)})
            if self.earlier is not None:
                check_continues(self.entry.key, self.earlier, value.shape)
            self.buffer = np.empty((self.capacity, *value.shape), dtype)
        if value.shape != self.buffer.shape[1:]:
            raise ValueError(
                f"record {self.entry.key!r}: expected shape {self.buffer.shape[1:]} as at first, "
                f"got {value.shape} at step {k}"
            )
        self.buffer[len(self.taken)] = value
        self.taken.append(k)

    def so_far(self) -> tuple[History, Steps]:
        """Return what is recorded up to now."""
        k = np.array(self.taken, dtype=np.int64)
        if self.buffer is not None:
            return {self.entry.key: _trimmed(self.buffer, len(k))}, {self.entry.key: k}
        if self.earlier is not None:
            return {self.entry.key: self.earlier[:0]}, {self.entry.key: k}
        return {}, {}


def prepare(
    entries: Sequence[Entry],
    model: Classifier,
    data: Dataset,
    directions: Sequence[str],
    earlier: Mapping[str, npt.NDArray[Any]],
    first: int,
    last: int,
) -> tuple[list[NamedRows], list[FunctionRows]]:
    """Make room for all records of a training from step ``first`` to ``last``.

    Parameters
    ----------
    entries : what to record
    model : the model that is trained
    data : the training data
    directions : names of the directions of the record "cosine"
    earlier : the history of the run that is continued
    first, last : the range of steps

    Raises
    ------
    ValueError
        If a record lacks what it needs, does not fit its earlier rows, or takes too much room.
    """
    named = []
    functions = []
    layouts = {}
    for entry in entries:
        rows = count_due(first, last, entry.every) + (last % entry.every > 0)
        if entry.function is not None:
            before = earlier.get(entry.key)
            functions.append(FunctionRows(entry, entry.function, rows, before))
            continue
        shape, dtype = row_of(entry, model, data, len(directions))
        if entry.key in earlier:
            check_continues(entry.key, earlier[entry.key], shape)
        layouts[entry] = ((rows, *shape), dtype)
    check_room({entry.key: size_of(*layout) for entry, layout in layouts.items()})
    for entry, (shape, dtype) in layouts.items():
        columns = tuple(f"cosine_{name}" for name in directions if entry.name == "cosine")
        named.append(NamedRows(entry, np.empty(shape, dtype), columns))
    return named, functions


def joined(
    history: Mapping[str, npt.NDArray[Any]],
    steps: Mapping[str, npt.NDArray[np.int64]],
    first: int,
    reached: int,
    parts: Sequence[tuple[History, Steps]],
) -> tuple[History, Steps]:
    """Join the earlier history up to step ``first`` and what was recorded from there on.

    The earlier row at ``first`` gives way to a new one. Once a step is taken it goes in any case:
    if it was not due but the end point of the earlier call, an uninterrupted run would not have it.
    Records that are not continued stay as they are.

    Raises
    ------
    ValueError
        If the rows of a record have another shape than they had.
    """
    history, steps = dict(history), dict(steps)
    for new_history, new_steps in parts:
        for key, rows in new_history.items():
            if key in history:
                check_continues(key, history[key], rows.shape[1:])
                stays = reached == first and not len(rows)
                kept = int(np.searchsorted(steps[key], first, "right" if stays else "left"))
                rows = np.concatenate([history[key][:kept], rows])
                new_steps[key] = np.concatenate([steps[key][:kept], new_steps[key]])
            history[key], steps[key] = rows, new_steps[key]
    return history, steps


def check_continues(key: str, earlier: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless rows of ``shape`` can follow the ``earlier`` ones."""
    if earlier.shape[1:] != shape:
        raise ValueError(
            f"record {key!r}: expected rows of shape {earlier.shape[1:]} as in the run so far, "
            f"got {shape}"
        )


def _trimmed(buffer: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Return the first rows, in memory of their own if there are fewer than the buffer has."""
    return buffer if rows == len(buffer) else buffer[:rows].copy()
