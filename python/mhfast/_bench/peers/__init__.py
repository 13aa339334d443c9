"""The implementations under comparison: one module each, imported only when needed.

A module has `gradients(problem, threads)` and, where it can train, `training(problem, loop,
threads)`; a module for the model family has `trainings(problem, training, threads)`. All return
formulations: different ways of writing the same computation, of which the fastest for the problem
at hand is found by trial and timed. The peer is thus as good as the best of them on every shape.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cells import CellProblem
from ..families import Trainees, Training
from ..problem import BenchProblem
from ..shapes import Loop


class UnavailableError(Exception):
    """An implementation cannot run here; the message says why."""


@dataclass(frozen=True)
class Formulation:
    """One way of writing the computation.

    `run` is what is timed: it takes nothing, returns when the result is there, and leaves its
    inputs as they were. `answer` turns what it returned into NumPy: an Answer, or for a cell of the
    map arrays by name. `ordinary`: it is what a user writes, without care for speed.
    """

    name: str
    run: Callable[[], Any]
    answer: Callable[[Any], Any]
    ordinary: bool = False


@dataclass(frozen=True)
class Peer:
    """Where an implementation is, and what it needs.

    `family` is the module for trainings of the model family, `cells` that for cells of the map,
    None where there is none. `failures`
    are the exceptions that mean that it cannot work in this environment, rather than that the
    comparison is wrong.
    """

    name: str
    module: str
    package: str
    trains: bool = True
    family: str | None = None
    cells: str | None = None
    failures: tuple[type[Exception], ...] = ()


PEERS: dict[str, Peer] = {
    "mhfast": Peer("mhfast", "own", "mhfast", family="own", cells="map_own"),
    "numpy": Peer("numpy", "numpy_tiles", "numpy", family="numpy_families", cells="map_numpy"),
    "torch": Peer(
        "torch eager", "torch_eager", "torch", family="torch_families", cells="map_torch"
    ),
    # Compiling needs a C++ compiler at run time; all its errors are RuntimeErrors.
    "compile": Peer(
        "torch.compile",
        "torch_compile",
        "torch",
        family="torch_compile_families",
        cells="map_compile",
        failures=(RuntimeError,),
    ),
    "sdpa": Peer("torch SDPA", "torch_sdpa", "torch", trains=False, cells="map_sdpa"),
    "jax": Peer("jax jit", "jax_jit", "jax", family="jax_families", cells="map_jax"),
}


def formulations(
    peer: Peer, problem: BenchProblem, loop: Loop | None, threads: int
) -> Sequence[Formulation]:
    """Return the formulations of a peer, for training when there is a loop.

    Raises
    ------
    UnavailableError
        Its package is not installed, or it would not fit into memory.
    """
    module = _module(peer, peer.module)
    found: Sequence[Formulation]
    if loop is None:
        found = module.gradients(problem, threads)
    else:
        found = module.training(problem, loop, threads)
    return found


def family_formulations(
    peer: Peer, problem: Trainees, training: Training, threads: int
) -> Sequence[Formulation]:
    """Return the formulations of a peer for a training of the model family.

    Raises
    ------
    UnavailableError
        Its package is not installed.
    """
    assert peer.family is not None
    found: Sequence[Formulation] = _module(peer, peer.family).trainings(problem, training, threads)
    return found


def cell_formulations(peer: Peer, problem: CellProblem, threads: int) -> Sequence[Formulation]:
    """Return the formulations of a peer for a cell of the map.

    Raises
    ------
    UnavailableError
        Its package is not installed, or it cannot do the operation.
    """
    assert peer.cells is not None
    found: Sequence[Formulation] = _module(peer, peer.cells).ways(problem, threads)
    return found


def _module(peer: Peer, name: str) -> Any:
    try:
        importlib.import_module(peer.package)
    except ImportError:
        raise UnavailableError("not installed") from None
    return importlib.import_module(f".{name}", __name__)


def check_memory(problem: BenchProblem, copies: int) -> None:
    """Reject a formulation that holds `copies` arrays of all attention weights, (n,H,T,T).

    Raises
    ------
    UnavailableError
        They would take more than half of the memory that is free now.
    """
    needed = copies * problem.shape.scores * problem.X.itemsize
    if needed > _free_memory() / 2:
        raise UnavailableError(f"needs about {needed / 2**30:.0f} GiB of memory")


def _free_memory() -> float:
    """Return the bytes available without swapping; infinity where Linux does not report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024.0
    except OSError:
        pass
    return float("inf")
