"""What was measured, and the numbers that follow from it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .implementation import Work

OWN = "mhfast"


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the first, and of the later ones the median and the quartiles."""

    formulation: str
    first: float
    median: float
    quartiles: tuple[float, float]
    calls: int
    difference: float

    @classmethod
    def of(cls, formulation: str, first: float, times: list[float], difference: float) -> Timing:
        """Summarize the times of all calls but the first."""
        low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        return cls(formulation, first, middle, (low, high), len(times), difference)


@dataclass(frozen=True)
class Comparison:
    """All implementations on one piece of work.

    `timings` by name; `missing` says why a name is not there. `peak` is the rate of fused
    multiply-adds in operations a second, measured between the calls. `even` is the time of mhfast
    at the neighbouring multiples of four, where that was requested.
    """

    group: str
    work: Work
    timings: dict[str, Timing]
    missing: dict[str, str] = field(default_factory=dict)
    peak: float | None = None
    even: Timing | None = None

    @property
    def own(self) -> Timing:
        """The time of mhfast."""
        return self.timings[OWN]

    @property
    def best_peer(self) -> str | None:
        """The fastest of the others, NumPy included; None if there is no other."""
        peers = [name for name in self.timings if name != OWN]
        return min(peers, key=lambda name: self.timings[name].median, default=None)

    def ratio(self, name: str | None) -> float | None:
        """Time of the named implementation over that of mhfast."""
        if name is None or name not in self.timings:
            return None
        return self.timings[name].median / self.own.median

    def rate(self, name: str) -> float | None:
        """Operations a second, by the common count."""
        if name not in self.timings:
            return None
        return self.work.flops / self.timings[name].median

    @property
    def peak_fraction(self) -> float | None:
        """The rate of mhfast over the peak."""
        own = self.rate(OWN)
        return own / self.peak if own and self.peak else None

    @property
    def against_even(self) -> float | None:
        """Time per operation over that at the neighbouring multiples of four."""
        if self.even is None:
            return None
        there = self.even.median / self.work.shape.even().flops
        return self.own.median / self.work.shape.flops / there

    def record(self) -> dict[str, Any]:
        """Return everything, measured and derived, as JSON types."""
        timings = {
            name: dataclasses.asdict(timing)
            | {"ratio": self.ratio(name), "gflops": _giga(self.rate(name))}
            for name, timing in self.timings.items()
        }
        return {
            "group": self.group,
            "work": str(self.work),
            "shape": dataclasses.asdict(self.work.shape),
            "dtype": self.work.dtype,
            "threads": self.work.threads,
            "steps": self.work.loop.steps if self.work.loop else None,
            "timings": timings,
            "missing": self.missing,
            "best_peer": self.best_peer,
            "ratio_best_peer": self.ratio(self.best_peer),
            "ratio_numpy": self.ratio("numpy"),
            "peak_gflops": _giga(self.peak),
            "peak_fraction": self.peak_fraction,
            "against_even": self.against_even,
        }


@dataclass(frozen=True)
class Scaling:
    """Seconds per call of mhfast by number of threads, and whether all gave the same bits."""

    work: Work
    medians: dict[int, float]
    identical: bool

    @property
    def speedup(self) -> float:
        """Time on one thread over time on the most."""
        return self.medians[min(self.medians)] / self.medians[max(self.medians)]

    def record(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "shape": dataclasses.asdict(self.work.shape),
            "dtype": self.work.dtype,
            "seconds": {str(threads): median for threads, median in self.medians.items()},
            "speedup": self.speedup,
            "identical": self.identical,
        }


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the ratios that are not None, or None if all are."""
    present = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(present) if present else None


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9
