"""`Reduction`: how processes that train one model together add up what each has of its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import checks, losses
from ..dataset.dataset import Dataset
from ..models.problem import CoreProblem
from ..optimizers import Optimizer, fields_of
from .batches import Batches
from .callbacks import Callback, Calls
from .constraints import described
from .quantities import OF_ATTENTION, Entry
from .run import Run

Numbers: TypeAlias = npt.NDArray[np.float64]
Function: TypeAlias = Callable[[Any], npt.ArrayLike | None]
"""From an array of numbers to their sums over all processes; None: the array now holds them."""

SLOTS = 4096
"""Numbers of the array by which processes without a rank find one."""

SETTINGS = 10
"""How many settings are compared, see `_settings`."""

ENDS = ("callback", "stop")
"""What may end training in one process, and then does in all."""


@dataclass(frozen=True)
class Reduction:
    """A function that adds up numbers over processes, and which part this process has.

    Give it, or the function alone, to `mhfast.train` as ``reduce``: each process trains on its own
    samples, and all of them get the model that one process would get from all samples together.
    `mhfast.interop.reduce` makes one of torch.distributed, mpi4py or dask.

    Parameters
    ----------
    function : function (sums) -> array
        Gets a contiguous float64 array (m,), of the same m in every process, and returns the sums
        of its entries over all processes, the same numbers everywhere; or it writes them into the
        array and returns None. Every process calls it equally often, once in an ordinary step.
    shards : int or sequence of int
        Into how many parts this process cuts its samples, one after the other and as equal as
        possible, or how many samples are in each. The gradients of shards are added in pairs, then
        pairs of pairs, and so on: see Notes.
    rank, size : int, optional
        The number of this process, from 0 on, and how many there are. Without, processes find
        numbers of their own through the function.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If a number of shards, a rank or a size is out of range.

    Notes
    -----
    With k head numbers (one for each process, and 2), the array is

    ======================  =============================================================
    entries                 what
    ======================  =============================================================
    k                       which processes have failed, which ask for the end
    1                       the part of this process's samples in the loss, Σ wℓ / Σ w
    1                       the same of the accuracy
    all trained parameters  the same of the gradient, in the order W, Q, K, U, V, A, B,
                            prompt, each in C order; where steps are divided by its norm,
                            without factors that may be too small for the dtype
    size (H + 2)            a slot for each process, of which it fills its own: its margin, and
                            what steps divided by the norm of the gradient need
    ======================  =============================================================

    The second sum is over all samples of all processes, which are told of each other's weights
    before the first step. With R runs side by side there are R arrays in a step, one after another.

    If processes have one and the same power of two of shards, and the function adds processes in
    the order that shards are added in, as those of `mhfast.interop.reduce` do, then results are
    bitwise the same for any number of processes with the same shards.

    Examples
    --------
    One process with four shards, alone:

    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(24, 5, 9, seed=0)
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> alone = mh.Reduction(lambda sums: sums, shards=4)
    >>> settings = {"steps": 10, "optimizer": mh.GradientDescent(0.5)}
    >>> run = mh.train(model, data, reduce=alone, **settings)
    >>> other = mh.train(model, data, **settings)
    >>> bool(abs(run.model.U - other.model.U).max() < 1e-14)
    True
    """

    function: Function
    shards: int | Sequence[int] = 1
    rank: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function: expected a function, got {type(self.function).__name__}")
        if checks.is_sequence(self.shards):
            shards: Any = tuple(checks.count(one, "shards") for one in self.shards)  # type: ignore[union-attr]
            if not shards:
                raise ValueError("shards: expected at least one, got none")
        else:
            shards = checks.count(self.shards, "shards")
        object.__setattr__(self, "shards", shards)
        if (self.rank is None) != (self.size is None):
            raise TypeError(
                f"rank, size: expected both or none, got rank={self.rank}, size={self.size}"
            )
        if self.rank is None or self.size is None:
            return
        object.__setattr__(self, "size", checks.count(self.size, "size"))
        rank = checks.integer(self.rank, "rank")
        if not 0 <= rank < self.size:
            raise ValueError(f"rank: expected 0 to {self.size - 1}, below size, got {rank}")
        object.__setattr__(self, "rank", rank)

    def part(self, data: Dataset) -> Dataset:
        """Return this process's part of the samples, if each has equally many shards of all.

        Samples are cut into size x shards shards as equal as possible, the same ones for every
        number of processes with the same number of shards in all.

        Parameters
        ----------
        data : Dataset
            All samples.

        Returns
        -------
        Dataset

        Raises
        ------
        TypeError
            If there is no rank, or ``shards`` is not a number.
        ValueError
            If there are fewer samples than shards.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(10, 5, 9, seed=0)
        >>> second = mh.Reduction(lambda sums: sums, shards=2, rank=1, size=2)
        >>> second.part(data).n  # of shards of 3, 3, 2 and 2 samples
        4
        """
        if self.rank is None or self.size is None or not isinstance(self.shards, int):
            raise TypeError(
                f"part: expected a rank and a number of shards, got rank={self.rank}, "
                f"shards={self.shards}"
            )
        first = self.rank * self.shards
        sizes = _cut(data.n, self.size * self.shards)
        begin = sum(sizes[:first])
        return data[begin : begin + sum(sizes[first : first + self.shards])]


def shard_sizes(reduction: Reduction, n: int) -> tuple[int, ...]:
    """Return the number of samples of each shard of a process that has ``n``.

    Raises
    ------
    ValueError
        If there are fewer samples than shards, or other numbers of samples do not add up to n.
    """
    shards = reduction.shards
    if isinstance(shards, int):
        return _cut(n, shards)
    if sum(shards) != n:
        raise ValueError(
            f"shards: expected numbers that add up to the n = {n} samples, got {sum(shards)}"
        )
    return tuple(shards)


def _cut(n: int, shards: int) -> tuple[int, ...]:
    """Return the sizes of shards of n samples, the larger ones first."""
    if shards > n:
        raise ValueError(f"shards: expected at most the n = {n} samples, got {shards}")
    least, more = divmod(n, shards)
    return tuple(least + (i < more) for i in range(shards))


class Group:
    """The processes of one call of `mhfast.train`, as one of them sees them.

    All make the same calls of the function, up to a last one in which none has failed. A process
    that fails takes part in the call that the others make next, tells them, and leaves.

    Attributes
    ----------
    rank, size : int
        The number of this process, and how many there are.
    has_names : bool
        Whether others know a process by its number.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self._has_met = False
        self._next = 0  # numbers of the call that all make next; 0: none follows
        if reduction.rank is None or reduction.size is None:
            self.rank, self.size, self.has_names = *self._found(), False
        else:
            self.rank, self.size, self.has_names = reduction.rank, reduction.size, True
        self._next = self.size * (3 + SETTINGS)

    def meet(
        self, run: Run, last: int, frozen: npt.NDArray[np.int64], calls: Calls | None,
        problem: CoreProblem, data: str | tuple[str, ...],
    ) -> str:  # fmt: skip
        """Compare the settings of all processes; return a fingerprint of the data of all.

        Raises
        ------
        ValueError
            If settings differ; in every process.
        RuntimeError
            If a process has failed.
        """
        given = _settings(run, last, frozen, calls, problem)
        table = np.zeros((self.size, 3 + len(given)))
        table[self.rank, 1:3] = _hashed(data, parts=2)
        table[self.rank, 3:] = [_hashed(value)[0] for value in given.values()]
        table = self._call(table.ravel(), "the settings were compared").reshape(table.shape)
        self._refuse_failed(table[:, 0], "the settings were compared")
        for name, column in zip(given, table[:, 3:].T, strict=True):
            others = np.flatnonzero(column != column[0])
            if len(others):
                self._next = 0
                raise ValueError(
                    f"reduce: expected every process to have the same {name}, but "
                    f"{self._named(others[0])} differs from {self._named(0)}"
                )
        trained = sum(run.model.parameters[name].size for name in run.wrt) // (run.runs or 1)
        self._next = self.head + 2 + trained + self.size * (run.model.heads + 2)
        self._has_met = True
        return _digest(sorted(table[:, 1:3].tolist()), 8).hex()

    @property
    def head(self) -> int:
        """How many numbers of an array belong to this class."""
        return self.size + len(ENDS)

    def add(self, numbers: Numbers, step: int, ended_by: str) -> tuple[Numbers, str]:
        """Return the sums over all processes, and what ends training in one of them, or "".

        Parameters
        ----------
        numbers : array of the core, whose head is free
        step : int
        ended_by : str
            What ends training in this process, or "".

        Raises
        ------
        RuntimeError
            If the function fails, or a process has failed.
        ValueError, TypeError
            If the function does not return sums.
        """
        assert len(numbers) == self._next
        if ended_by:
            numbers[self.size + ENDS.index(ended_by)] = 1
        when = f"the sums of step {step} were added up"
        sums = self._call(numbers, when)
        self._refuse_failed(sums[: self.size], when)
        asked = [name for name, votes in zip(ENDS, sums[self.size :], strict=False) if votes]
        return sums, asked[0] if asked else ""

    def close(self) -> None:
        """End with the others; RuntimeError if one has failed."""
        sums = self._call(np.zeros(self._next), "all had ended")
        self._refuse_failed(sums[: self.size], "all had ended")
        self._next = 0

    def leave(self) -> None:
        """Tell the others, who wait for this process, that it has failed."""
        if self._next == 0:
            return
        numbers = np.zeros(self._next)
        # The first number of this process's row in the table of settings, or a number of a head.
        numbers[self.rank if self._has_met else self.rank * (len(numbers) // self.size)] = 1
        self._next = 0
        try:
            self.reduction.function(numbers)
        except Exception:  # the error that is on its way says more
            return

    def _call(self, numbers: Numbers, when: str) -> Numbers:
        following, self._next = self._next, 0  # after an error the others are out of reach
        size = len(numbers)
        try:
            result = self.reduction.function(numbers)
        except Exception as error:
            where = f"process {self.rank} of {self.size}: " if following and self.has_names else ""
            raise RuntimeError(
                f"reduce: {where}the function failed before {when}, as it does where another "
                f"process has died or cannot be reached: {type(error).__name__}: {error}"
            ) from error
        sums = numbers if result is None else np.asarray(result)
        if sums.shape != (size,) or sums.dtype.kind != "f":
            raise ValueError(
                f"reduce: expected the function to return a floating-point array of the shape of "
                f"its argument, ({size},), got {sums.dtype} of shape {sums.shape}"
            )
        self._next = following
        return np.ascontiguousarray(sums, np.float64)

    def _found(self) -> tuple[int, int]:
        """Return a number of this process's own, and that of all, from marks in random slots."""
        rng = np.random.default_rng()  # what is drawn has no influence on any result
        own = rng.integers(SLOTS)
        while True:
            marks = np.zeros(SLOTS)
            marks[own] = 1
            counts = self._call(marks, "the processes were counted")
            if counts[own] < 1 or np.any(counts != np.rint(counts)):
                raise ValueError(
                    "reduce: expected the function to return sums over all processes; of a one in "
                    f"one of them and zeros in the others it returned {counts[own]:g}"
                )
            if np.all(counts <= 1):
                return int(counts[:own].sum()), int(counts.sum())
            if counts[own] > 1:
                own = rng.choice(np.flatnonzero(counts == 0))

    def _refuse_failed(self, flags: Numbers, when: str) -> None:
        failed = np.flatnonzero(flags)
        if len(failed) == 0:
            return
        self._next = 0
        name = self._named(failed[0]) if self.has_names else "another process"
        raise RuntimeError(f"reduce: {name} failed before {when}; the error there says why")

    def _named(self, rank: int | np.intp) -> str:
        if not self.has_names:
            return "one process" if rank == 0 else "another"
        return f"process {rank}"


@contextmanager
def joined(reduce: object) -> Iterator[Group | None]:
    """Take part with the other processes, None for none; an exception tells them.

    Raises
    ------
    TypeError
        If ``reduce`` is neither None, a function nor a `Reduction`.
    """
    if reduce is None:
        yield None
        return
    if not isinstance(reduce, Reduction) and not callable(reduce):
        raise TypeError(f"reduce: expected a function or a Reduction, got {type(reduce).__name__}")
    group = Group(reduce if isinstance(reduce, Reduction) else Reduction(reduce))
    try:
        yield group
    except BaseException:
        group.leave()
        raise


def refuse_records(entries: Iterable[Entry]) -> None:
    """Raise ValueError for a record that is not a sum over samples."""
    for entry in entries:
        if entry.function is None and entry.name in OF_ATTENTION:
            raise ValueError(
                f"record: expected none of {', '.join(OF_ATTENTION)} beside reduce=, got "
                f"{entry.name!r}; mhfast.evaluate computes it of the samples of one process"
            )


def refuse_batches(batches: Batches | None) -> None:
    """Raise ValueError for steps on batches."""
    if batches is None:
        return
    given = f"batch={batches.size}" if batches.fresh is None else "stream="
    raise ValueError(
        f"reduce: expected steps on all samples of all processes, got {given}; "
        "batch='all' takes a run that has had batches on with all of them"
    )


def _settings(
    run: Run, last: int, frozen: npt.NDArray[np.int64], calls: Calls | None, problem: CoreProblem
) -> dict[str, object]:
    """Return what must be the same in all processes, by what it is called in errors."""
    model, rule = run.model, cast("Optimizer", run.optimizer)
    together = [one for one in calls.callbacks if isinstance(one, Callback)] if calls else []
    kept = {name: [_digest(slot.tobytes()) for slot in run.state[name]] for name in run.state}
    return {
        "instruction set, which MHFAST_ISA selects": _core.active_isa(),
        "model": (
            type(model).__name__, model.scale, vars(model)["_row_map"], problem.causal,
            [(name, a.dtype.str, a.shape, _digest(a.tobytes())) for name, a in
             model.parameters.items()],
        ),
        "steps": (run.step, last, run.runs, frozen.tolist()),
        "optimizer": (rule.name, fields_of(rule), kept, run.since),
        "loss": losses.stored(run.loss),
        "wrt": run.wrt,
        "constraints": described(run.constraints, run.wrt),
        "record": [(str(getattr(what, "__name__", what)), n) for what, n in run.record.items()],
        "thresholds in stop": [] if callable(run.stop) else sorted(run.stop.items()),
        "Callbacks and their quantities": [
            (one.every, str(getattr(one.record, "__name__", one.record))) for one in together
        ],
    }  # fmt: skip


def _digest(what: object, size: int = 16) -> bytes:
    return hashlib.blake2b(
        what if isinstance(what, bytes) else repr(what).encode(), digest_size=size
    ).digest()


def _hashed(what: object, parts: int = 1) -> list[float]:
    """Return a digest as numbers of 48 bits, which float64 holds exactly."""
    bits = _digest(what, 6 * parts)
    return [float(int.from_bytes(bits[6 * i : 6 * i + 6], "little")) for i in range(parts)]
