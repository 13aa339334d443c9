"""The information with which more samples of the population of a data set can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..dataset.dataset import Dataset
from ..dataset.seeds import SAMPLE, integer_seed


@dataclass(frozen=True)
class Population:
    """The callable behind `Dataset.sample`.

    Parameters
    ----------
    draw : callable (n, *, seed, role, **fixed, **settings) -> Dataset
        A module-level function, so that data sets can be pickled.
    fixed : mapping
        What defines the population: class tokens, teacher.
    settings : mapping
        The settings that `sample` may change.
    in_core : callable (**fixed, **settings) -> tuple, optional
        The name and the settings of the population in the core, which can draw from it too; None
        where it cannot.
    """

    draw: Callable[..., Dataset]
    fixed: Mapping[str, Any]
    settings: Mapping[str, Any]
    in_core: Callable[..., tuple[Any, ...] | None] | None = None

    def core(self, dtype: Any) -> tuple[Any, ...] | None:
        """Return what the core takes to draw numbers of this dtype; None where it cannot."""
        if self.in_core is None or self.settings.get("dtype", dtype) != dtype:
            return None
        return self.in_core(**self.fixed, **self.settings)

    def __call__(self, n: int, *, seed: Any, **changes: Any) -> Dataset:
        """`n` new samples, independent of those that the generator itself returned.

        Raises
        ------
        TypeError
            If a change is not one of the settings, or the seed is not one seed.
        """
        unknown = sorted(changes.keys() - self.settings.keys())
        if unknown:
            known = ", ".join(self.settings) or "nothing"
            raise TypeError(f"sample: may change {known}, got {unknown[0]}")
        settings = {**self.settings, **changes}
        return self.draw(n, seed=integer_seed(seed), role=SAMPLE, **self.fixed, **settings)
