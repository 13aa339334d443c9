"""One implementation: prepared for a problem, then timed in blocks."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .. import _core
from . import families
from .environment import available_cores
from .families import Training
from .peers import PEERS, Formulation, Peer, UnavailableError, family_formulations, formulations
from .problem import Answer, draw
from .shapes import Loop, Shape

# A formulation is tried this many times, or for this many seconds, whichever ends first.
TRIALS = 5
TRIAL_TIME = 0.3

# A formulation whose second call, which is without compilation, is this much slower than the best
# one so far is not called again.
HOPELESS = 5.0

# Calls shorter than this get an untimed one before a block, which wakes sleeping threads.
SHORT = 0.02


@dataclass(frozen=True)
class Work:
    """What to compute: one loss and gradient, or with `loop` a whole training loop.

    The loop is one of the classifier or, a Training, of the model family.
    """

    shape: Shape
    dtype: str
    threads: int
    loop: Loop | Training | None = None

    def __str__(self) -> str:
        return str(self.loop if isinstance(self.loop, Training) else self.shape)

    @property
    def flops(self) -> int:
        """Operations of one call, by the common count."""
        if isinstance(self.loop, Training):
            return self.loop.steps * self.loop.flops
        return (self.loop.steps if self.loop else 1) * self.shape.flops


@dataclass(frozen=True)
class Prepared:
    """The fastest formulation, its first call and a later one in seconds, its answer."""

    formulation: str
    first: float
    later: float
    answer: Answer


class Implementation(Protocol):
    """The interface that `mhfast._bench.measure` uses, for this process or another."""

    def prepare(self, work: Work) -> Prepared:
        """Choose a formulation for the work; raises UnavailableError where there is none."""

    def block(self, seconds: float) -> list[float]:
        """Call it repeatedly for `seconds`, at least once, and return the time of each call."""

    def close(self) -> None:
        """Release its resources."""


class Local:
    """An implementation in this process."""

    def __init__(self, peer: str) -> None:
        self.peer = PEERS[peer]
        self.run: Callable[[], Any] | None = None
        self.short = False

    def prepare(self, work: Work) -> Prepared:
        """Try every formulation and keep the fastest, with its answer."""
        self.run = None
        gc.collect()
        try:
            found = _formulations(self.peer, work)
            best, chosen = _fastest(found)
        except self.peer.failures as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnavailableError(f"failed: {reason}") from error
        self.run, self.short = chosen.run, best.later < SHORT
        return best

    def block(self, seconds: float) -> list[float]:
        """Time calls with the garbage collector off."""
        run = self.run
        assert run is not None
        collecting = gc.isenabled()
        gc.disable()
        try:
            if self.short:
                run()
            times = []
            end = time.perf_counter() + seconds
            while True:
                begin = time.perf_counter()
                run()
                now = time.perf_counter()
                times.append(now - begin)
                if now >= end:
                    return times
        finally:
            if collecting:
                gc.enable()

    def close(self) -> None:
        """Forget the problem."""
        self.run = None


def _formulations(peer: Peer, work: Work) -> Sequence[Formulation]:
    if isinstance(work.loop, Training):
        trainees = families.draw(work.loop, work.dtype)
        return family_formulations(peer, trainees, work.loop, work.threads)
    return formulations(peer, draw(work.shape, work.dtype), work.loop, work.threads)


def _fastest(found: Sequence[Formulation]) -> tuple[Prepared, Formulation]:
    best: tuple[Prepared, Formulation] | None = None
    for formulation in found:
        first, result = _timed(formulation.run)
        answer = formulation.answer(result)
        times = [_timed(formulation.run)[0]]
        if best and times[0] > HOPELESS * best[0].later:
            continue
        while len(times) < TRIALS and sum(times) < TRIAL_TIME:
            times.append(_timed(formulation.run)[0])
        prepared = Prepared(formulation.name, first, min(times), answer)
        if best is None or prepared.later < best[0].later:
            best = prepared, formulation
    assert best is not None
    return best


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def configure(threads: int, isa: str | None, cores: Sequence[int] | None = None) -> list[str]:
    """Give this process `threads` cores and threads, and mhfast an instruction set.

    To be called before PyTorch or JAX compute anything: XLA has as many threads as the process has
    cores, by default the first ones. Returns a description of what could not be set.
    """
    if isa is not None:
        _core.select_isa(isa)
    available = available_cores()
    chosen = available[:threads] if cores is None else cores
    if len(chosen) < len(available) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)
    try:
        import threadpoolctl
    except ImportError:
        if threads < len(available):
            return ["threadpoolctl is not installed: NumPy's BLAS may use more threads"]
        return []
    threadpoolctl.threadpool_limits(threads, user_api="blas")
    return []
