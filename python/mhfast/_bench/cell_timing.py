"""One cell of the map, timed: every implementation in one process, in turn.

Each formulation is called twice, the first time checked against mhfast; the second call, which is
without compilation, decides which formulation of an implementation is timed: the fastest of those
that a user writes without care for speed, and the fastest of all.  These then take turns in short
blocks of calls, and the lower decile of the times of each counts, which other work on the machine
disturbs least.  A training loop is one call; the time of a step is that of the call over its steps,
of which mhfast takes more.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from .. import _core
from .arithmetic import multiply_adds
from .cells import OWN_STEPS, draw_cell
from .grid import Cell, Sizes
from .peers import PEERS, Formulation, UnavailableError, cell_formulations
from .problem import Array, DisagreementError
from .results import OWN

# Largest |a - b| / max |b|.  Training and second derivatives amplify rounding; observed over all
# cells at most a tenth of this.
TOLERANCE = {"float64": 1e-9, "float32": 5e-3}

DECILE = 0.1

PEAK_TIME = 0.02  # seconds, long enough for the clock of the processor to settle

Clock = Callable[[], float]


# From this many seconds on, a call may be measured by processor time: shorter ones are measured
# between two interruptions, and the clock of a process takes a call of the system.
INTERRUPTED = 1e-3


@dataclass(frozen=True)
class Effort:
    """Seconds of the timed calls of a cell, in at least a number of rounds, in blocks of seconds.

    `processor`: longer calls are measured by the processor time of the process, which other work on
    the machine does not add to; right for one thread only.
    """

    seconds: float
    least_rounds: int
    block: float
    processor: bool = False


FULL = Effort(seconds=1.0, least_rounds=7, block=2e-3)
QUICK = Effort(seconds=0.1, least_rounds=3, block=2e-4)


@dataclass(frozen=True)
class Contender:
    """A formulation that is timed: the first call, and the lower decile of the later ones.

    `seconds` are those of a call or, in training, of one of its `steps`.
    """

    formulation: str
    first: float
    seconds: float
    calls: int
    steps: int = 1


@dataclass(frozen=True)
class Measured:
    """A cell with the times of mhfast and, by key of the peer, of ordinary code and the best.

    `missing` says why a peer is not there, `spread` is the upper quartile of the times of mhfast
    over the lower decile, `at_peak` the seconds that the multiply-adds of a call or step take at
    the peak measured beside it, None where their number is not known.
    """

    cell: Cell
    sizes: str
    own: Contender
    ordinary: dict[str, Contender] = field(default_factory=dict)
    best: dict[str, Contender] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    spread: float = 1.0
    at_peak: float | None = None

    def fastest(self, *, ordinary: bool) -> str | None:
        """Return the key of the peer that is fastest, None if there is none."""
        group = self.ordinary if ordinary else self.best
        return min(group, key=lambda key: group[key].seconds, default=None)

    def ratio(self, peer: str | None, *, ordinary: bool) -> float | None:
        """Time of a peer over that of mhfast; None if it is missing."""
        group = self.ordinary if ordinary else self.best
        return group[peer].seconds / self.own.seconds if peer in group else None

    def lowest(self, *, ordinary: bool) -> float | None:
        """Return the ratio of the fastest peer."""
        return self.ratio(self.fastest(ordinary=ordinary), ordinary=ordinary)

    def record(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "cell": str(self.cell),
            "sizes": self.sizes,
            "own": asdict(self.own),
            "ordinary": {key: asdict(one) for key, one in self.ordinary.items()},
            "best": {key: asdict(one) for key, one in self.best.items()},
            "missing": self.missing,
            "spread": self.spread,
            "at_peak": self.at_peak,
            "ratio_ordinary": self.lowest(ordinary=True),
            "ratio_best": self.lowest(ordinary=False),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Measured:
        """Read what `record` returned."""
        return cls(
            Cell(*record["cell"].split("/")),
            record["sizes"],
            Contender(**record["own"]),
            {key: Contender(**one) for key, one in record["ordinary"].items()},
            {key: Contender(**one) for key, one in record["best"].items()},
            dict(record["missing"]),
            record["spread"],
            record.get("at_peak"),
        )


@dataclass(frozen=True)
class _Tried:
    formulation: Formulation
    first: float
    second: float
    steps: int


def measure(
    cell: Cell, peers: Sequence[str], threads: int, effort: Effort, sizes: Sizes | None = None
) -> Measured:
    """Check and time one cell.

    Parameters
    ----------
    cell : Cell
    peers : sequence of str
        Keys of `PEERS` other than mhfast.
    threads : int
        For every implementation.
    effort : Effort
    sizes : Sizes, optional
        By default those of the shape class.

    Raises
    ------
    DisagreementError
        A peer does not compute what mhfast computes.
    """
    problem = draw_cell(cell, sizes)
    clock: Clock = time.process_time if effort.processor else time.perf_counter
    (own,) = cell_formulations(PEERS[OWN], problem, threads)
    first, result = _timed(own.run, clock)
    truth = own.answer(result)
    own_steps = steps = problem.steps if problem.trains else 1
    if steps < OWN_STEPS and problem.trains:
        own_steps = OWN_STEPS
        (own,) = cell_formulations(PEERS[OWN], replace(problem, steps=own_steps), threads)
    tried = {OWN: [_Tried(own, first, _timed(own.run, clock)[0], own_steps)]}
    missing: dict[str, str] = {}
    for key in peers:
        peer = PEERS[key]
        try:
            tried[key] = [
                _try(formulation, truth, f"{peer.name}, {formulation.name}", cell, clock, steps)
                for formulation in cell_formulations(peer, problem, threads)
            ]
        except UnavailableError as reason:
            missing[key] = str(reason)
        except peer.failures as error:
            missing[key] = f"failed: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    best = {key: min(ways, key=lambda way: way.second) for key, ways in tried.items()}
    plain = {
        key: min(ways, key=lambda way: way.second)
        for key, all_ways in tried.items()
        if (ways := [way for way in all_ways if way.formulation.ordinary])
    }
    times = _rounds({id(way): way for way in (*best.values(), *plain.values())}, effort)

    def contender(way: _Tried) -> Contender:
        found = times[id(way)]
        decile = float(np.quantile(found, DECILE, method="lower"))
        return Contender(way.formulation.name, way.first, decile / way.steps, len(found), way.steps)

    mine = best.pop(OWN)
    of_own = contender(mine)
    ordinary = {key: contender(way) for key, way in plain.items()}
    fastest = {key: contender(way) for key, way in best.items()}
    for key, way in ordinary.items():  # the trial may have been wrong
        fastest[key] = min(fastest[key], way, key=lambda one: one.seconds)
    count = multiply_adds(problem)
    peak = _core.peak_flops(dtype_name=cell.dtype, threads=threads, seconds=PEAK_TIME)
    return Measured(
        cell, problem.described, of_own, ordinary, fastest, missing,
        spread=float(np.quantile(times[id(mine)], 0.75)) / (mine.steps * of_own.seconds),
        at_peak=None if count is None else 2.0 * count / peak,
    )  # fmt: skip


def _try(
    formulation: Formulation,
    truth: Mapping[str, Array],
    name: str,
    cell: Cell,
    clock: Clock,
    steps: int,
) -> _Tried:
    first, result = _timed(formulation.run, clock)
    check(f"{cell}: {name}", formulation.answer(result), truth, cell.dtype)
    return _Tried(formulation, first, _timed(formulation.run, clock)[0], steps)


def check(name: str, answer: Mapping[str, Array], truth: Mapping[str, Array], dtype: str) -> float:
    """Compare arrays with those of mhfast by name, and return the largest relative difference.

    An axis of heads may have length 1 where the heads are equal.

    Raises
    ------
    DisagreementError
        An array is missing, or one differs by more than rounding explains or is not finite.
    """
    largest = 0.0
    for key, expected in truth.items():
        if key not in answer:
            raise DisagreementError(f"{name} has no {key}")
        found = np.broadcast_to(answer[key], expected.shape)
        scale = float(np.abs(expected).max()) or 1.0
        difference = float(np.abs(found - expected).max()) / scale
        if not difference <= TOLERANCE[dtype]:
            raise DisagreementError(
                f"{name} and mhfast differ by {difference:.1e} relative in {key}, "
                f"expected at most {TOLERANCE[dtype]:.0e}"
            )
        largest = max(largest, difference)
    return largest


def _rounds(ways: Mapping[int, _Tried], effort: Effort) -> dict[int, list[float]]:
    """Call all in turn, a block of calls each."""
    round_seconds = sum(max(effort.block, way.second) for way in ways.values())
    rounds = max(effort.least_rounds, int(effort.seconds / round_seconds))
    times: dict[int, list[float]] = {key: [] for key in ways}
    order = list(ways)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for k in range(rounds):
            turn = k % len(order)
            for key in order[turn:] + order[:turn]:
                times[key] += _block(ways[key], effort)
    finally:
        if collecting:
            gc.enable()
    return times


def _block(way: _Tried, effort: Effort) -> list[float]:
    """Time calls for so long, at least one; before short ones there is an untimed one."""
    run, clock = way.formulation.run, time.perf_counter
    if effort.processor and way.second > INTERRUPTED:
        clock = time.process_time
    if way.second < effort.block:
        run()
    times: list[float] = []
    while not times or sum(times) < effort.block:
        times.append(_timed(run, clock)[0])
    return times


def _timed(run: Callable[[], Any], clock: Clock) -> tuple[float, Any]:
    begin = clock()
    result = run()
    return clock() - begin, result
