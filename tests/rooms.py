"""Threads in the place of processes that train together, for `mhfast.train(..., reduce=)`."""

from __future__ import annotations

import threading

import numpy as np

import mhfast as mh
from mhfast.interop.reduce import pairwise_sum

SECONDS = 30.0
"""How long a thread waits for the others: a test that hangs fails."""


class Room:
    """Where threads add up: by rank, in pairs of neighbours."""

    def __init__(self, size):
        self.rows = [np.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.calls = 0

    def adding(self, rank):
        def add(numbers):
            assert numbers.flags.c_contiguous
            assert numbers.dtype == np.float64
            self.rows[rank] = numbers.copy()
            self.calls += rank == 0
            self.barrier.wait()
            sums = pairwise_sum(np.stack(self.rows))
            self.barrier.wait()
            return sums

        return add


def together(size, training, *, shards=None, named=True):
    """Results of `training(rank, reduce)` in as many threads, exceptions in the place of results.

    `shards`: numbers of samples of all shards, which the ranks share equally.
    """
    room = Room(size)
    results = [None] * size

    def work(rank):
        each = 1 if shards is None else len(shards) // size
        own = 1 if shards is None else shards[rank * each : (rank + 1) * each]
        names = (rank, size) if named else (None, None)
        try:
            results[rank] = training(rank, mh.Reduction(room.adding(rank), own, *names))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive()
    return results, room


def part(data, shards, rank, size):
    """The samples of a rank, which has an equal number of the shards."""
    ends = np.cumsum([0, *shards])
    each = len(shards) // size
    return data[ends[rank * each] : ends[(rank + 1) * each]]
