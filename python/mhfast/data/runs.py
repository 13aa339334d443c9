"""Seeds as the run axis: data sets of several seeds side by side in one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from ..dataset.dataset import Dataset
from ..dataset.groups import Groups
from ..dataset.words import Tokens
from ..models import Model, stack

Function = TypeVar("Function", bound=Callable[..., Any])


def over_seeds(generate: Function) -> Function:
    """Extend a generator to a sequence of R seeds.

    All arrays of the result, those in `truth` included, then have a leading run axis, also where
    the runs agree; run r equals the call with seed[r].
    """

    @functools.wraps(generate)
    def generated(*arguments: Any, seed: Any, **settings: Any) -> Any:
        if not _is_sequence(seed):
            return generate(*arguments, seed=seed, **settings)
        if len(seed) == 0:
            raise ValueError("seed: expected at least one seed, got an empty sequence")
        made = [generate(*arguments, seed=one, **settings) for one in seed]
        if isinstance(made[0], tuple):
            return tuple(map(side_by_side, zip(*made, strict=True)))
        return side_by_side(made)

    return cast(Function, generated)


@dataclass(frozen=True)
class Populations:
    """The callable behind `Dataset.sample` of a data set with a run axis.

    Parameters
    ----------
    of_run : tuple of callables
        The functions that draw from the population of each run.
    """

    of_run: tuple[Callable[..., Dataset], ...]

    def __call__(self, n: int, *, seed: Any, **changes: Any) -> Dataset:
        """`n` new samples for every run: run r equals `run(r)` called with the seed or seed[r].

        Raises
        ------
        ValueError
            If there is not one seed for each run.
        """
        runs = len(self.of_run)
        if _is_sequence(seed) and len(seed) != runs:
            raise ValueError(
                f"seed: expected one seed or a sequence of R = {runs}, got {len(seed)}"
            )
        seeds = seed if _is_sequence(seed) else [seed] * runs
        return side_by_side(
            [draw(n, seed=one, **changes) for draw, one in zip(self.of_run, seeds, strict=True)]
        )

    def run(self, r: int) -> Callable[..., Dataset]:
        """Return the function that draws from the population of run `r`."""
        return self.of_run[r]


def _is_sequence(seed: object) -> bool:
    return isinstance(seed, list | tuple | range) or (
        isinstance(seed, np.ndarray) and seed.ndim > 0
    )


def side_by_side(sets: Sequence[Dataset]) -> Dataset:
    """Stack data sets that differ only in the values of arrays."""
    generators = [data.generator for data in sets if data.generator is not None]
    return Dataset(
        _stacked([data._given for data in sets]),
        _stacked([data.y for data in sets]),
        **{
            name: _stacked([getattr(data, name) for data in sets])
            for name in ("query", "weight", "token_groups", "sample_groups", "truth")
        },
        generator=Populations(tuple(generators)) if generators else None,
    )


def _stacked(values: Sequence[Any]) -> Any:
    """Stack arrays, groups and models, also in mappings; other values hold for all runs."""
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.stack(values)
    if isinstance(first, Tokens):
        return Tokens(_stacked([X.ids for X in values]), _stacked([X.embedding for X in values]))
    if isinstance(first, Groups):
        return np.stack([groups.index for groups in values]), first.names
    if isinstance(first, Model):
        return stack(values)
    if isinstance(first, Mapping):
        return {name: _stacked([value[name] for value in values]) for name in first}
    return first
