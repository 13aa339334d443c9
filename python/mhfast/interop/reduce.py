"""One training on many machines: `Reduction` for torch.distributed, mpi4py and dask.

Each adapter imports its library when it is called. All of them add processes in the order in which
a process adds its shards, so that results are bitwise the same for any number of processes that
have the same shards, see `mhfast.Reduction`. ``docs/many_machines.md`` shows how to start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from ..training.reduction import Reduction

if TYPE_CHECKING:
    from distributed import Client
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

__all__ = ["dask", "mpi", "pairwise_sum", "torch_distributed"]

Numbers: TypeAlias = npt.NDArray[np.float64]
Shards: TypeAlias = int | Sequence[int]
Part = TypeVar("Part")
Result = TypeVar("Result")

SMALL = 1 << 15
"""Most numbers of all processes together that each gets whole; more are first added up in slices.
Chosen, not fitted: below, the time goes into messages, not into numbers."""


def pairwise_sum(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Add rows in pairs of neighbours, then pairs of pairs, and so on.

    The last one waits where it has no neighbour. It is the order in which a process adds its
    shards; a function for `mhfast.Reduction` that adds the arrays of the processes, by rank, with
    it does not depend on how many processes the shards are spread over.

    Parameters
    ----------
    rows : array (P, ...)

    Returns
    -------
    array (...)

    Examples
    --------
    >>> import numpy as np
    >>> from mhfast.interop.reduce import pairwise_sum
    >>> pairwise_sum(np.array([[1.0], [2.0], [3.0]]))  # (1 + 2) + 3
    array([6.])
    """
    while len(rows) > 1:
        pairs = rows[0 : len(rows) - 1 : 2] + rows[1::2]
        rows = np.concatenate([pairs, rows[-1:]]) if len(rows) % 2 else pairs
    total: npt.NDArray[Any] = rows[0]
    return total


def torch_distributed(group: ProcessGroup | None = None, *, shards: Shards = 1) -> Reduction:
    """Add up over the processes of torch.distributed, on the CPU with the backend gloo.

    Parameters
    ----------
    group : ProcessGroup, optional
        By default all processes. Its timeout is how long a process waits for one that is alive but
        does not come.
    shards : int or sequence of int
        Into how many parts this process cuts its samples, as for `mhfast.Reduction`.

    Returns
    -------
    Reduction

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    RuntimeError
        If ``torch.distributed.init_process_group`` has not been called.
    ValueError
        If this process is not in the group, or there are no shards.

    Examples
    --------
    >>> from mhfast.interop import reduce
    >>> def main(model, data, optimizer):  # run by torchrun, each process with its own data
    ...     torch.distributed.init_process_group("gloo")
    ...     together = reduce.torch_distributed()
    ...     return mh.train(model, data, steps=100, optimizer=optimizer, reduce=together)
    """
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        raise RuntimeError(
            'torch_distributed: expected init_process_group("gloo") to have been called'
        )
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise ValueError("group: expected a group that this process belongs to")

    def swap(rows: Numbers) -> Numbers:
        swapped = torch.empty(rows.shape, dtype=torch.float64)
        distributed.all_to_all_single(swapped, torch.from_numpy(rows), group=group)
        return np.asarray(swapped)

    def gather(numbers: Numbers) -> Numbers:
        rows = torch.empty((size, len(numbers)), dtype=torch.float64)
        distributed.all_gather(list(rows), torch.from_numpy(numbers), group=group)
        return np.asarray(rows)

    return Reduction(_adding(size, swap, gather), shards, rank, size)


def mpi(comm: MPI.Comm | None = None, *, shards: Shards = 1) -> Reduction:
    """Add up over the processes of an MPI communicator, by mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        By default ``MPI.COMM_WORLD``.
    shards : int or sequence of int
        Into how many parts this process cuts its samples, as for `mhfast.Reduction`.

    Returns
    -------
    Reduction

    Raises
    ------
    ImportError
        If mpi4py is not installed.
    ValueError
        If there are no shards.

    Examples
    --------
    >>> from mhfast.interop import reduce
    >>> def main(model, data, optimizer):  # run by mpiexec, each process with its own data
    ...     together = reduce.mpi()
    ...     return mh.train(model, data, steps=100, optimizer=optimizer, reduce=together)
    """
    from mpi4py import MPI

    of = MPI.COMM_WORLD if comm is None else comm
    rank, size = of.Get_rank(), of.Get_size()

    def swap(rows: Numbers) -> Numbers:
        swapped = np.empty_like(rows)
        of.Alltoall(rows, swapped)
        return swapped

    def gather(numbers: Numbers) -> Numbers:
        rows = np.empty((size, len(numbers)))
        of.Allgather(numbers, rows)
        return rows

    return Reduction(_adding(size, swap, gather), shards, rank, size)


def dask(
    client: Client,
    function: Callable[[Part, Reduction], Result],
    parts: Sequence[Part],
    *,
    shards: Shards = 1,
    timeout: float = 300.0,
) -> list[Result]:
    """Run ``function(part, reduce)`` for all parts at once, each on a dask worker of its own.

    The workers add up through one of them, which takes and sends each array P times: for some
    workers and models of moderate size. A worker that is lost ends the others.

    Parameters
    ----------
    client : distributed.Client
    function : function (part, reduce) -> object
        Calls `mhfast.train` with this ``reduce``.
    parts : sequence
        What belongs to each process, such as its data. There must be at least as many workers.
    shards : int or sequence of int
        Into how many parts each process cuts its samples, as for `mhfast.Reduction`.
    timeout : float
        Seconds that a process waits for one that does not come.

    Returns
    -------
    list
        The results, in the order of the parts.

    Raises
    ------
    ImportError
        If dask.distributed is not installed.
    ValueError
        If there are fewer workers than parts, or no parts.
    RuntimeError
        If a worker is lost; and whatever the function raises.

    Examples
    --------
    >>> from mhfast.interop import reduce
    >>> def main(client, model, parts, optimizer):
    ...     def training(data, together):
    ...         return mh.train(model, data, steps=100, optimizer=optimizer, reduce=together)
    ...     return reduce.dask(client, training, parts)[0]
    """
    from distributed import wait

    size = checks.count(len(parts), "number of parts")
    cluster: Any = client  # whose methods have no types
    workers: list[str] = list(cluster.nthreads())[:size]
    if len(workers) < size:
        raise ValueError(f"parts: expected at most one for each worker, {len(workers)}, got {size}")
    hub: Any = client.submit(
        _Hub, size, timeout, actor=True, workers=workers[:1], pure=False
    ).result()
    tasks: list[Any] = [
        client.submit(
            _on_worker, function, part, hub, rank, size, shards, timeout,
            workers=[worker], allow_other_workers=False, retries=0, pure=False,
        )
        for rank, (worker, part) in enumerate(zip(workers, parts, strict=True))
    ]  # fmt: skip
    failed: list[Any] = []
    running = set(tasks)
    while running:
        done = _finished(wait, running)
        running -= done
        failed += [task for task in tasks if task in done and task.status == "error"]
        alive = cluster.nthreads()  # scheduler_info has none from time to time
        lost = [worker for worker in workers if worker not in alive]
        why = f"the worker {lost[0]} was lost" if lost else "another process failed"
        if (failed or lost) and workers[0] in alive:
            hub.fail(why).result()
        if lost:
            for task in tasks:
                task.cancel()
            raise RuntimeError(f"dask: {why}, and training ended")
    # The others were told of the one that says why.
    for task in sorted(failed, key=lambda task: str(task.exception()).startswith("reduce:")):
        task.result()
    return [task.result() for task in tasks]


def _finished(wait: Any, running: set[Any]) -> set[Any]:
    """Return those that end within a second."""
    try:
        done: set[Any] = wait(running, timeout=1.0, return_when="FIRST_COMPLETED").done
    except TimeoutError:
        return set()
    return done


def _on_worker(
    function: Callable[[Any, Reduction], Any],
    part: Any,
    hub: Any,
    rank: int,
    size: int,
    shards: Shards,
    timeout: float,
) -> Any:
    calls = iter(range(1 << 62))

    def add(numbers: Numbers) -> Numbers:
        sums: Numbers = hub.add(rank, next(calls), numbers).result(timeout)
        return sums

    return function(part, Reduction(add, shards, rank, size))


class _Hub:
    """Where the processes on dask workers add up: an actor, whose methods run in an event loop."""

    def __init__(self, size: int, timeout: float) -> None:
        import asyncio

        self.size, self.timeout = size, timeout
        self.rows: dict[int, Numbers] = {}
        self.call, self.sums = 0, np.empty(0)
        self.complete = asyncio.Event()
        self.error = ""

    async def add(self, rank: int, call: int, numbers: Numbers) -> Numbers:
        """Wait for the numbers of all; return their sums."""
        import asyncio

        if call != self.call and not self.error:  # dask has started a task again
            self._end(f"process {rank} made its call {call} while others made {self.call}")
        complete = self.complete
        if not self.error:
            self.rows[rank] = numbers
        if len(self.rows) == self.size:
            self.sums = pairwise_sum(np.stack([self.rows[r] for r in range(self.size)]))
            self.rows, self.call, self.complete = {}, self.call + 1, asyncio.Event()
            complete.set()
            return self.sums
        if not self.error:
            try:
                await asyncio.wait_for(complete.wait(), self.timeout)
            except asyncio.TimeoutError:
                missing = sorted(set(range(self.size)) - set(self.rows))
                self._end(f"process {missing[0]} did not come in {self.timeout:g} seconds")
        if self.error:
            raise RuntimeError(self.error)
        return self.sums

    def fail(self, why: str) -> None:
        """Make all calls raise."""
        self._end(why)

    def _end(self, why: str) -> None:
        self.error = why
        self.complete.set()


def _adding(
    size: int, swap: Callable[[Numbers], Numbers], gather: Callable[[Numbers], Numbers]
) -> Callable[[Numbers], Numbers]:
    """Return a function that adds up, from two collective operations.

    Parameters
    ----------
    size : int
        P
    swap : function of an array (P, k)
        Row r goes to process r; returns the rows that came, by process.
    gather : function of an array (k,)
        Returns that of all processes (P, k).
    """

    def add(numbers: Numbers) -> Numbers:
        if size * len(numbers) <= SMALL:
            return pairwise_sum(gather(numbers))
        rows = np.zeros((size, -(-len(numbers) // size)))
        rows.ravel()[: len(numbers)] = numbers
        return gather(np.ascontiguousarray(pairwise_sum(swap(rows)))).ravel()[: len(numbers)]

    return add
