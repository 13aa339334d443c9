"""Timing: in rounds, every implementation once per round, in one process or in several.

A round gives each implementation a block of calls. After each block there is a short pause, so
that the threads of the implementation before, which spin for some milliseconds after a call, are
asleep; before short calls an untimed one wakes the threads. The order rotates from round to round.
The peak of fused multiply-adds is measured in the same rounds, so that a change of clock frequency
affects everything equally. Medians are over all calls of all rounds; the first call is reported
separately.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import _core
from .families import Training
from .implementation import Implementation, Prepared, Work
from .peers import PEERS, Peer, UnavailableError
from .problem import Answer, check_agreement, difference
from .results import OWN, Comparison, Scaling, Timing
from .shapes import Loop, Shape

# OpenBLAS threads spin for 2^26 clock ticks after a call, OpenMP's for less: 30 ms at 2 GHz.
PAUSE = 0.04
# Long enough for the clock to settle, short compared with a block.
PEAK_TIME = 0.02
# Normalized steps amplify rounding from step to step, so agreement is checked for the first few
# only.
CHECKED = 3

Start = Callable[[str], Implementation]


@dataclass(frozen=True)
class Budget:
    """Seconds for each implementation on one shape, spent in at most a number of rounds.

    Where single calls are long, the rounds become fewer, down to the least number, and the time
    longer. Training loops have a largest number of steps.
    """

    seconds: float
    rounds: int
    least_rounds: int
    steps: int


FULL = Budget(seconds=1.0, rounds=10, least_rounds=3, steps=10_000)
QUICK = Budget(seconds=0.02, rounds=2, least_rounds=1, steps=20)


class Bench:
    """The implementations of one comparison, started when first needed.

    Parameters
    ----------
    start : function
        Returns a new implementation for a key of `PEERS`.
    peers : sequence of str
        Keys of `PEERS` to compare mhfast with.
    threads : int
        For every implementation.
    """

    def __init__(self, start: Start, peers: Sequence[str], threads: int, budget: Budget) -> None:
        self.start = start
        self.peers = peers
        self.threads = threads
        self.budget = budget
        self.contenders: dict[str, Implementation] = {}

    def work(self, shape: Shape, dtype: str, loop: Loop | Training | None = None) -> Work:
        """Return the work on a shape, on the threads of this comparison."""
        return Work(shape, dtype, self.threads, loop)

    def gradient(self, group: str, shape: Shape, dtype: str) -> Comparison:
        """Compare one loss and gradient; odd sizes also with mhfast at their even neighbours."""
        work = self.work(shape, dtype)
        even = None
        if group == "odd" and shape.even() != shape:
            even = dataclasses.replace(work, shape=shape.even())
        return self._compare(group, work, even)

    def training(self, loop: Loop, dtype: str) -> Comparison:
        """Compare a training loop; the times are those of the whole loop."""
        loop = dataclasses.replace(loop, steps=min(loop.steps, self.budget.steps))
        return self._compare("loops", self.work(loop.shape, dtype, loop), None)

    def family(self, training: Training, dtype: str) -> Comparison:
        """Compare training of the model family; its first steps must agree."""
        steps = min(training.steps, self.budget.steps)
        whole, short = (
            self.work(training.shape, dtype, dataclasses.replace(training, steps=k))
            for k in (steps, min(steps, CHECKED))
        )
        return self._compare("families", whole, None, checked=short)

    def scaling(self, shape: Shape, dtype: str) -> Scaling:
        """Time mhfast on 1, 2, 4, ... and all threads."""
        counts = sorted({1 << k for k in range(self.threads.bit_length())} | {self.threads})
        works = {count: Work(shape, dtype, count) for count in counts}
        contenders = {str(count): self._implementation(f"on {count}", "mhfast") for count in works}
        prepared = {
            str(count): contenders[str(count)].prepare(work) for count, work in works.items()
        }
        times, _ = self._rounds(contenders, prepared, None)
        first = prepared[str(counts[0])].answer
        identical = all(
            np.array_equal(first.W, p.answer.W)
            and np.array_equal(first.U, p.answer.U)
            and first.loss == p.answer.loss
            for p in prepared.values()
        )
        medians = {count: statistics.median(times[str(count)]) for count in counts}
        return Scaling(works[self.threads], medians, identical)

    def close(self) -> None:
        """End the processes of the implementations, if there are any."""
        for implementation in self.contenders.values():
            implementation.close()

    def _compare(
        self, group: str, work: Work, even: Work | None, checked: Work | None = None
    ) -> Comparison:
        """Time `work` if the answers to `checked`, by default itself, agree."""
        contenders: dict[str, Implementation] = {}
        prepared: dict[str, Prepared] = {}
        answers: dict[str, Answer] = {}
        missing: dict[str, str] = {}
        for key in (OWN, *self.peers):
            peer = PEERS[key]
            if not _takes_part(peer, work):
                continue
            implementation = self._implementation(peer.name, key)
            try:
                if checked is not None:
                    answers[peer.name] = implementation.prepare(checked).answer
                prepared[peer.name] = implementation.prepare(work)
                contenders[peer.name] = implementation
            except UnavailableError as reason:
                missing[peer.name] = str(reason)
        if checked is None:
            answers = {name: ready.answer for name, ready in prepared.items()}
        for name in prepared:
            check_agreement(name, answers[name], answers[OWN], work.dtype)
        differences = {name: difference(answers[name], answers[OWN]) for name in prepared}
        if even is not None:
            contenders["even"] = self._implementation("even", "mhfast")
            prepared["even"] = contenders["even"].prepare(even)
            differences["even"] = 0.0
        times, peak = self._rounds(contenders, prepared, work)
        timings = {
            name: Timing.of(ready.formulation, ready.first, times[name], differences[name])
            for name, ready in prepared.items()
        }
        beside = timings.pop("even", None)
        return Comparison(group, work, timings, missing, peak, beside)

    def _implementation(self, label: str, key: str) -> Implementation:
        if label not in self.contenders:
            self.contenders[label] = self.start(key)
        return self.contenders[label]

    def _rounds(
        self,
        contenders: Mapping[str, Implementation],
        prepared: Mapping[str, Prepared],
        peak_of: Work | None,
    ) -> tuple[dict[str, list[float]], float | None]:
        budget = self.budget
        slice_ = budget.seconds / budget.rounds
        a_round = sum(max(slice_, ready.later) for ready in prepared.values())
        affordable = int(2.0 * budget.seconds * len(contenders) / a_round)
        rounds = min(budget.rounds, max(budget.least_rounds, affordable))
        times: dict[str, list[float]] = {name: [] for name in contenders}
        peaks: list[float] = []
        names = list(contenders)
        for k in range(rounds):
            turn = k % len(names)
            for name in names[turn:] + names[:turn]:
                time.sleep(PAUSE)
                times[name] += contenders[name].block(slice_)
            if peak_of is not None:
                time.sleep(PAUSE)
                peaks.append(
                    _core.peak_flops(
                        dtype_name=peak_of.dtype, threads=peak_of.threads, seconds=PEAK_TIME
                    )
                )
        return times, statistics.median(peaks) if peaks else None


def _takes_part(peer: Peer, work: Work) -> bool:
    if isinstance(work.loop, Training):
        return peer.family is not None
    return work.loop is None or peer.trains
