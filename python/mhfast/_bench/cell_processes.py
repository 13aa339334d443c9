"""Cells of the map in processes of their own, some at a time, each on cores of its own.

Where the system can fork, processes are forked from one that has imported the libraries and
computed nothing, so that starting one takes no time.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .cell_timing import Effort, Measured, measure
from .environment import available_cores
from .grid import Cell
from .implementation import configure
from .peers import PEERS
from .problem import DisagreementError

MODULES = ("mhfast", "mhfast._bench.cell_timing")


@dataclass(frozen=True)
class Settings:
    """What all cells share: threads of each implementation, effort, instruction set of mhfast."""

    threads: int
    effort: Effort
    isa: str | None = None


def measured(
    cells: Sequence[tuple[Cell, Sequence[str]]], settings: Settings, jobs: int
) -> Iterator[tuple[Cell, Measured | str]]:
    """Measure cells with their peers.

    Yields each cell with its times, or with the message of a disagreement, as they end.
    """
    # Compiling in the process itself: it has the cores of the cell, and no pool outlives it.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    forking = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forking else "spawn")
    if forking:
        packages = {PEERS[key].package for _, peers in cells for key in peers}
        context.set_forkserver_preload([*MODULES, *sorted(packages)])
    with context.Manager() as manager:
        free = manager.Queue()
        cores = available_cores()
        for job in range(jobs):
            free.put(cores[job * settings.threads : (job + 1) * settings.threads])
        tasks = [(cell, peers, settings, free) for cell, peers in cells]
        with context.Pool(jobs, maxtasksperchild=1) as pool:
            yield from pool.imap_unordered(_one, tasks, chunksize=1)


def _one(task: tuple[Cell, Sequence[str], Settings, Any]) -> tuple[Cell, Measured | str]:
    cell, peers, settings, free = task
    cores = free.get()
    try:
        configure(settings.threads, settings.isa, cores)
        return cell, measure(cell, peers, settings.threads, settings.effort)
    except DisagreementError as error:
        return cell, str(error)
    finally:
        free.put(cores)
