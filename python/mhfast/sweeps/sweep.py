"""`sweep`: call a function at every point of a grid and collect what it returns."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .._arguments import checks
from ..training.progress import progress_bar
from .grid import Call, Grid, Point, calls_of, key_of, points_of
from .store import Store, locked
from .table import Columns, Failure, Sweep, columns_of, joined


class _Outcome(NamedTuple):
    """What a worker sends back: the rows of a call, or how it failed. One of the two is None."""

    columns: Columns | None
    failure: dict[str, str] | None


class SweepInterrupted(KeyboardInterrupt):
    """A sweep was interrupted by Ctrl-C.

    Attributes
    ----------
    sweep : Sweep
        The calls that were finished.

    Examples
    --------
    >>> import mhfast as mh
    >>> def measured(k):
    ...     if k == 2:
    ...         raise KeyboardInterrupt  # as by Ctrl-C
    ...     return {"square": k * k}
    >>> try:
    ...     table = mh.sweep(measured, {"k": [0, 1, 2, 3]})
    ... except mh.SweepInterrupted as interrupted:
    ...     table = interrupted.sweep
    >>> table.columns["square"]
    array([0., 1.])
    """

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self.sweep = sweep

    def __str__(self) -> str:
        return "the sweep was interrupted; .sweep holds what was finished"


def sweep(
    function: Callable[..., Any],
    grid: Grid,
    *,
    batch: str | Sequence[str] = (),
    executor: Executor | None = None,
    directory: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> Sweep:
    """Call a function at every point of a grid and collect the results in one table.

    Parameters
    ----------
    function : function of the names of the grid
        Called as ``function(**point)``. It returns a `Run`, whose scalar records become columns and
        whose vector records become a column for each entry, or a dict of numbers or vectors. An
        executor of processes must be able to pickle it, so it must be defined at the top level of a
        module.
    grid : dict of sequences, or sequence of dicts
        The values of each name, of which all combinations are taken, the last name fastest; or the
        points themselves, dicts with the same names.
    batch : str or sequence of str
        Names whose values arrive together, as an array of R entries: points that differ in these
        only become runs side by side of one call, whose result has a run axis of length R. With
        several names all combinations are taken, and each name arrives as an array of that length.
    executor : concurrent.futures.Executor, optional
        Where calls are made, such as a ProcessPoolExecutor; by default in this process, one after
        the other. With several workers on one machine give each its share of the processors
        (`num_threads`).
    directory : path, optional
        Where finished calls are kept. The same sweep again, also with more points, computes only
        what is missing or had failed. A process can be killed at any moment; nothing finished is
        lost or computed again. One process works in a directory at a time.
    seed : int, optional
        The root of the seeds: the function gets an integer ``seed``, with ``batch`` an array of R,
        that depends on the root and the values of the point alone. It is a column of the table.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    Sweep
        Rows in the order of the grid, whatever the executor. A call that raised an exception is
        among ``failures``, with its traceback, and the others continue; a RuntimeWarning says so.

    Raises
    ------
    TypeError, ValueError
        If the grid, a name in it or the seed is invalid, or the directory holds something else.
    RuntimeError
        If another process works in the directory.
    SweepInterrupted
        After Ctrl-C: a KeyboardInterrupt whose ``.sweep`` holds what was finished.

    Examples
    --------
    >>> import mhfast as mh
    >>> def train(heads, lr):
    ...     data = mh.data.planted_attention(20, 5, 4, 2, seed=0)
    ...     start = mh.Classifier.zeros(heads, 5, 4)
    ...     return mh.train(start, data, steps=10, optimizer=mh.GradientDescent(lr))
    >>> result = mh.sweep(train, {"heads": [1, 4], "lr": [0.1, 1.0]}, batch="lr")
    >>> result
    Sweep(4 points, 44 rows, columns=<loss>)
    """
    if not callable(function):
        raise TypeError(f"function: expected a function, got {type(function).__name__}")
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            f"executor: expected a concurrent.futures.Executor, got {type(executor).__name__}"
        )
    if seed is not None and checks.integer(seed, "seed") < 0:
        raise ValueError(f"seed: expected an integer of at least 0, got {seed}")
    points = points_of(grid)
    names = (batch,) if isinstance(batch, str) else tuple(batch)
    calls = calls_of(points, names, seed)
    with ExitStack() as stack:
        store = None
        if directory is not None:
            stack.enter_context(locked(directory))
            store = Store(directory, f"{function.__module__}.{_qualified_name(function)}")
        show = (
            stack.enter_context(progress_bar(0, len(calls), "sweep", "call")) if progress else None
        )
        return _collect(function, points, calls, executor, store, show)


def _collect(
    function: Callable[..., Any],
    points: list[Point],
    calls: list[Call],
    executor: Executor | None,
    store: Store | None,
    show: Callable[[int], None] | None,
) -> Sweep:
    """Take finished calls from the store, compute the others and put them there."""
    done: dict[int, Columns] = {}
    failures: dict[int, Failure] = {}
    keys = [key_of(call, points) if store is not None else "" for call in calls]
    missing = []
    for j, call in enumerate(calls):
        columns = None if store is None else store.read(keys[j])
        if columns is None:
            missing.append(j)
        else:
            done[j] = _placed(columns, call)

    def result() -> Sweep:
        failed = tuple(failures[j] for j in sorted(failures))
        return Sweep(tuple(points), joined([done[j] for j in sorted(done)]), failed)

    outcomes = _outcomes(function, calls, missing, executor)
    try:
        for finished, (j, outcome) in enumerate(outcomes, len(calls) - len(missing) + 1):
            if store is not None:
                store.write(keys[j], outcome.columns, outcome.failure)
            if outcome.columns is not None:
                done[j] = outcome.columns
            elif outcome.failure is not None:
                where = tuple(points[place] for place in calls[j].points)
                failures[j] = Failure(where, **outcome.failure)
            if show is not None:
                show(finished)
    except KeyboardInterrupt:
        raise SweepInterrupted(result()) from None
    if failures:
        first = failures[min(failures)].error
        warnings.warn(
            f"sweep: {len(failures)} of {len(calls)} calls failed, the first with {first}; "
            f"see failures of the result",
            RuntimeWarning,
            stacklevel=3,
        )
    return result()


def _outcomes(
    function: Callable[..., Any], calls: list[Call], which: list[int], executor: Executor | None
) -> Iterator[tuple[int, _Outcome]]:
    """Make the calls and yield each when it is finished."""
    if executor is None:
        for j in which:
            yield j, _compute(function, calls[j])
        return
    futures = {}
    try:
        for j in which:
            futures[executor.submit(_compute, function, calls[j])] = j
        for future in as_completed(futures):
            try:
                outcome = future.result()
            except Exception as error:  # the worker died, or the function cannot be sent to it
                outcome = _Outcome(None, _described(error))
            yield futures[future], outcome
    finally:
        for future in futures:
            future.cancel()


def _compute(function: Callable[..., Any], call: Call) -> _Outcome:
    """Make one call, in the worker."""
    try:
        return _Outcome(columns_of(function(**call.arguments), call), None)
    except Exception as error:
        return _Outcome(None, _described(error))


def _described(error: Exception) -> dict[str, str]:
    text = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {error}", "traceback": text}


def _placed(columns: Columns, call: Call) -> Columns:
    """Add to columns from the store which points of this sweep they belong to."""
    runs = columns["run"]
    place = np.array(call.points)[runs] if call.batched else np.full(len(runs), call.points[0])
    return {"point": place, **columns}


def _qualified_name(function: Callable[..., Any]) -> str:
    if isinstance(function, partial):
        return _qualified_name(function.func)
    return getattr(function, "__qualname__", type(function).__qualname__)
