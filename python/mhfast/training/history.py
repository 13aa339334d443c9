"""The rows of a history: buffers that are filled during training, joined to earlier rows.

A history array is (rows, ...) for one run and (R, rows, ...) for R runs side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments.lists import PARAMETERS
from ..dataset.dataset import Dataset
from ..models import Model
from ..models.distinct import Compact
from ..models.problem import CoreData, CoreParameters
from .quantities import Entry, check_room, count_due, due_steps, real_value, row_of, size_of
from .subspace import Subspace

OF_WHOLE = (*PARAMETERS, "cosine")
"""Records of the parameters themselves, which a subspace does not have."""

Rows: TypeAlias = npt.NDArray[Any]
History: TypeAlias = dict[str, Rows]
Steps: TypeAlias = dict[str, npt.NDArray[np.int64]]


@dataclass(frozen=True)
class NamedRows:
    """Rows of a record of the vocabulary, which the core writes: buffer (rows, ...).

    For a norm, ``beyond``, a number or (R,), is the contribution that the core does not see. Of
    merged samples ``places`` (n,) are those of the given ones in the buffer.
    """

    entry: Entry
    buffer: Rows
    runs: int = 0  # with R runs the buffer is (R, rows, ...)
    columns: tuple[str, ...] = ()  # the keys of the columns of a cosine record
    beyond: npt.NDArray[np.float64] | None = None
    places: npt.NDArray[np.int32] | None = None

    def so_far(self, first: int, reached: int, written: int) -> tuple[History, Steps]:
        """Return what is recorded from step ``first`` to ``reached``: the rows ``written``."""
        k = due_steps(first, reached, self.entry.every)[:written]
        rows = leading(self.buffer, written, self.runs)
        if self.places is not None:
            rows = np.take(rows, self.places, axis=2 if self.runs else 1)
        if self.beyond is not None:
            rows = np.hypot(rows, self.beyond[..., None])
        if self.columns:
            columns = {key: rows[..., j].copy() for j, key in enumerate(self.columns)}
            return columns, {key: k.copy() for key in columns}
        return {self.entry.key: rows}, {self.entry.key: k}


@dataclass
class FunctionRows:
    """Rows of a function of the model. The first value determines their shape and dtype.

    `inside`: a function of the parameters inside the span in which the core trains, instead.
    """

    entry: Entry
    function: Callable[[Any], npt.ArrayLike]
    capacity: int
    runs: int = 0
    earlier: Rows | None = None  # the rows of the run that is resumed
    buffer: Rows | None = None  # (rows, ...), with R runs (rows, R, ...)
    taken: list[int] = field(default_factory=list)
    inside: bool = False

    def take(self, k: int, model: Model | CoreParameters) -> None:
        """Evaluate the function on θ_k, unless that has been done.

        With R runs the value is a number for all of them or an array (R, ...).

        Raises
        ------
        TypeError
            If the value is not real.
        ValueError
            If its shape differs from that of the first or lacks the runs, or the rows would take
            too much memory.
        """
        if self.taken and self.taken[-1] == k:
            return
        value = self._value(model)
        if self.buffer is None:
            single = value.dtype == np.float32 and value.ndim > (self.runs > 0)
            dtype = np.dtype(np.float32 if single else np.float64)
            check_room({self.entry.key: size_of((self.capacity, *value.shape), dtype)})
            if self.earlier is not None:
                row = value.shape[1:] if self.runs else value.shape
                check_continues(self.entry.key, self.earlier, row, self.runs)
            self.buffer = np.empty((self.capacity, *value.shape), dtype)
        if value.shape != self.buffer.shape[1:]:
            raise ValueError(
                f"record {self.entry.key!r}: expected shape {self.buffer.shape[1:]} of its first "
                f"value, got {value.shape} at step {k}"
            )
        self.buffer[len(self.taken)] = value
        self.taken.append(k)

    def _value(self, model: Model | CoreParameters) -> Rows:
        value = real_value(self.entry.key, np.asarray(self.function(model)))
        if self.runs and value.ndim == 0:
            return np.broadcast_to(value, (self.runs,))
        if self.runs and len(value) != self.runs:
            raise ValueError(
                f"record {self.entry.key!r}: expected a number or shape (R, ...) = "
                f"({self.runs}, ...), got {value.shape}"
            )
        return value

    def so_far(self) -> tuple[History, Steps]:
        """Return what is recorded up to now."""
        k = np.array(self.taken, dtype=np.int64)
        if self.buffer is not None:
            rows = self.buffer[: len(k)]
            rows = np.moveaxis(rows, 0, 1) if self.runs else rows
            return {self.entry.key: rows.copy()}, {self.entry.key: k}
        if self.earlier is not None:
            return {self.entry.key: leading(self.earlier, 0, self.runs)}, {self.entry.key: k}
        return {}, {}


def prepare(
    entries: Sequence[Entry],
    model: Model,
    data: Dataset,
    core_data: CoreData,
    directions: Sequence[str],
    earlier: Mapping[str, Rows],
    first: int,
    last: int,
) -> tuple[list[NamedRows], list[FunctionRows]]:
    """Allocate the rows of all records of training from step ``first`` to ``last``.

    Parameters
    ----------
    entries : what to record
    model : the model that is trained, with the run axis where there is one
    data, core_data : the training data, and the arrays that the core gets of them
    directions : the keys of the columns of the record "cosine"
    earlier : the history of the run that is resumed
    first, last : the range of steps

    Raises
    ------
    ValueError
        If a record lacks what it needs, does not fit its earlier rows, or takes too much memory.
    """
    runs = model.runs or 0
    named = []
    functions = []
    layouts = {}
    for entry in entries:
        rows = count_due(first, last, entry.every) + (last % entry.every > 0)
        if entry.function is not None:
            before = earlier.get(entry.key)
            functions.append(FunctionRows(entry, entry.function, rows, runs, before))
            continue
        row, dtype = row_of(entry, model, data, core_data, len(directions))
        if entry.key in earlier and entry.name != "cosine":
            check_continues(entry.key, earlier[entry.key], row, runs)
        layouts[entry] = ((runs, rows, *row) if runs else (rows, *row), dtype)
    check_room({entry.key: size_of(*layout) for entry, layout in layouts.items()})
    for entry, (shape, dtype) in layouts.items():
        columns = tuple(directions) if entry.name == "cosine" else ()
        named.append(NamedRows(entry, np.empty(shape, dtype), runs, columns))
    return named, functions


def of_merged(named: Sequence[NamedRows], train: Compact) -> list[NamedRows]:
    """Let the core write the attention of the samples that it goes over, not of all given ones."""
    if train.places is None:
        return list(named)
    axis = 2 if any(rows.runs for rows in named) else 1
    few = []
    for rows in named:
        if rows.entry.name == "attention":
            shape = list(rows.buffer.shape)
            shape[axis] = train.data.n
            rows = replace(rows, buffer=np.empty(shape, rows.buffer.dtype), places=train.places)
        few.append(rows)
    return few


def of_subspace(
    named: Sequence[NamedRows],
    subspace: Subspace,
    start: Model,
    earlier: Mapping[str, Rows],
    evaluated: Callable[..., Mapping[str, Any]],
    sees_tests: bool,
    directions: Mapping[str, CoreParameters],
) -> tuple[list[NamedRows], list[FunctionRows]]:
    """Let the core record what it can inside the span; compute the rest from the whole model.

    Parameters
    ----------
    named : rows of the vocabulary
    subspace : the span in which the core trains
    start : the whole model at step 0
    earlier : the history of the run that is continued
    evaluated : `mhfast.evaluate`, with all but the model and the record given
    sees_tests : whether the outputs of the test sets are those inside
    directions : by the keys of their cosines
    """
    stay, functions = [], []
    for rows in named:
        entry = rows.entry
        if entry.name == "param_norm":
            rows = replace(rows, beyond=subspace.rest(start))
        if entry.name not in OF_WHOLE and (entry.dataset < 0 or sees_tests):
            stay.append(rows)
            continue
        capacity = rows.buffer.shape[1 if rows.runs else 0]
        for key in rows.columns or (entry.key,):
            function: Callable[[Any], npt.ArrayLike]
            if rows.columns:
                function = subspace.cosine(start, directions[key])
            elif entry.name in OF_WHOLE:
                function = partial(_parameter, subspace, start, entry.name)
            else:
                function = partial(_value, evaluated, entry.key, key)
            part = Entry(key, key, entry.every, function=function)
            functions.append(
                FunctionRows(
                    part, function, capacity, rows.runs, earlier.get(key),
                    inside=entry.name in OF_WHOLE,
                )
            )  # fmt: skip
    return stay, functions


def _parameter(
    subspace: Subspace, start: Model, name: str, parameters: CoreParameters
) -> npt.ArrayLike:
    return subspace.whole(start, (name,), parameters)[name]


def _value(
    evaluated: Callable[..., Mapping[str, Any]], record: str, key: str, model: Model
) -> npt.ArrayLike:
    value: npt.ArrayLike = evaluated(model, record=record)[key]
    return value


def joined(
    history: Mapping[str, Rows],
    steps: Mapping[str, npt.NDArray[np.int64]],
    first: int,
    reached: int,
    parts: Sequence[tuple[History, Steps]],
    runs: int,
) -> tuple[History, Steps]:
    """Join the earlier history up to step ``first`` and the rows recorded from there on.

    The earlier row at ``first`` is replaced by a new one. Once a step is taken it is removed in any
    case: if it was recorded only because the earlier call ended there, an uninterrupted run would
    not have it. Records that are not continued stay unchanged.

    Raises
    ------
    ValueError
        If the rows of a record have another shape than they had.
    """
    history, steps = dict(history), dict(steps)
    for new_history, new_steps in parts:
        for key, rows in new_history.items():
            k = new_steps[key]
            if key in history:
                check_continues(key, history[key], rows.shape[2:] if runs else rows.shape[1:], runs)
                stays = reached == first and not len(k)
                kept = int(np.searchsorted(steps[key], first, "right" if stays else "left"))
                before = leading(history[key], kept, runs)
                rows = np.concatenate([before, rows], axis=1 if runs else 0)
                k = np.concatenate([steps[key][:kept], k])
            history[key], steps[key] = rows, k
    return history, steps


def check_continues(key: str, earlier: Rows, row: tuple[int, ...], runs: int) -> None:
    """Raise ValueError unless rows of the shape ``row`` (of one run) can follow the earlier."""
    before = earlier.shape[2:] if runs else earlier.shape[1:]
    if before != row:
        raise ValueError(
            f"record {key!r}: expected rows of shape {before} as in the run so far, got {row}"
        )


def leading(buffer: Rows, rows: int, runs: int) -> Rows:
    """Return the first rows, in memory of their own if there are fewer than the buffer has."""
    if rows == buffer.shape[1 if runs else 0]:
        return buffer
    return buffer[:, :rows].copy() if runs else buffer[:rows].copy()
