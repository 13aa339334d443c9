"""Batches: which samples each step of training is taken on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from .. import _core
from .._arguments import checks

Order: TypeAlias = Literal["shuffle", "replace"]
Size: TypeAlias = int | Literal["all"]
Seed: TypeAlias = Any  # an integer, a numpy.random.Generator or a sequence of R of them

ORDERS = dict(_core.Order.__members__)
MOST_SAMPLES = 2**32 - 1


@dataclass(frozen=True)
class Batches:
    """Which samples each step is taken on, a function of the number of the step.

    Attributes
    ----------
    size : int
        B, the number of samples of a batch.
    order : str
        "shuffle": every epoch of floor(n / B) steps goes through a random permutation of the
        samples, of which the last n mod B are left out. "replace": every sample of every batch is
        drawn independently of all others.
    seed : int, or tuple of R of them
        From 0 to 2^64 - 1; one for all runs, which then see the same samples, or one for each run.
    fresh : int or None
        The number of steps after which new samples were drawn from a stream; all of them are taken,
        and there is no order. None: batches of the data.
    """

    size: int
    order: Order = "shuffle"
    seed: int | tuple[int, ...] = 0
    fresh: int | None = None

    def __post_init__(self) -> None:
        checks.count(self.size, "batch")
        if self.order not in ORDERS:
            raise ValueError(f"order: expected {_either(ORDERS)}, got {self.order!r}")
        object.__setattr__(self, "seed", _seeds(self.seed))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each run, or the one that they share."""
        return self.seed if isinstance(self.seed, tuple) else (self.seed,)

    def epoch(self, n: int) -> int:
        """Return the number of steps of an epoch of n samples, floor(n / B), but at least 1."""
        return max(1, n // self.size)

    def of_runs(self, which: Any) -> Batches:
        """Return those of one run (an integer) or of some."""
        if isinstance(self.seed, int):
            return self
        chosen: Any = self.seed[which] if isinstance(which, int) else np.array(self.seed, object)
        return replace(self, seed=chosen if isinstance(which, int) else tuple(chosen[which]))


def chosen(
    batch: Size | None,
    order: Order | None,
    seed: Seed | None,
    kept: Batches | None,
    n: int,
    fresh: int | None = None,
) -> Batches | None:
    """Return the batches of a training on n samples, None for steps on all samples.

    Parameters
    ----------
    batch, order, seed : the arguments of `mhfast.train`
    kept : Batches or None
        Those of the run that is resumed, which are kept where an argument is None.
    n : int
    fresh : int or None
        The period of the stream, None without.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, or there is an order or a seed but no batch.
    """
    if isinstance(batch, str) and batch != "all":
        raise ValueError(f"batch: expected a number of samples or 'all', got {batch!r}")
    if fresh is not None:
        return _of_stream(batch, order, seed, kept, n, fresh)
    if kept is not None and kept.fresh is not None:
        if batch is None:
            raise ValueError(
                "stream: expected the stream of the run again, which a run does not keep; batch= "
                "continues with batches of the data, batch='all' with all of them"
            )
        kept = replace(kept, fresh=None)
    settings = (("order", order), ("seed", seed))
    given: dict[str, Any] = {name: value for name, value in settings if value is not None}
    if batch == "all" or (batch is None and kept is None):
        for name, value in given.items():
            raise ValueError(f"{name}: expected batch= with it, got {value!r:.80} without")
        return None
    if batch is not None:
        given["size"] = checks.count(batch, "batch")
    batches = replace(kept, **given) if kept is not None else Batches(**given)
    if batches.size > n:
        raise ValueError(f"batch: expected at most the n = {n} samples, got {batches.size}")
    if n > MOST_SAMPLES:
        raise ValueError(f"batch: expected data of less than 2^32 samples, got {n}")
    return batches


def _of_stream(
    batch: Size | None,
    order: Order | None,
    seed: Seed | None,
    kept: Batches | None,
    n: int,
    fresh: int,
) -> Batches:
    if order is not None:
        raise ValueError(f"order: expected None with stream=, got {order!r}")
    size = n if batch == "all" else batch
    if size is None:
        size = n if kept is None else kept.size
    if seed is None:
        seed = 0 if kept is None else kept.seed
    return Batches(checks.count(size, "batch"), seed=seed, fresh=fresh)


def _seeds(seed: object) -> int | tuple[int, ...]:
    if not checks.is_sequence(seed):
        return _seed(seed)
    seeds = tuple(_seed(one) for one in seed)  # type: ignore[attr-defined]
    if not seeds:
        raise ValueError("seed: expected at least one, got none")
    return seeds


def _seed(seed: object) -> int:
    if isinstance(seed, np.random.Generator):
        return int.from_bytes(seed.bytes(8), "little")
    number = checks.integer(seed, "seed", "an integer, a Generator or a sequence of R of them")
    if not 0 <= number < 2**64:
        raise ValueError(f"seed: expected an integer from 0 to 2^64 - 1, got {number}")
    return number


def _either(names: Any) -> str:
    return " or ".join(map(repr, names))
