"""`Guarantee`: an inequality with its conditions, and the sentences that report it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Condition:
    """One condition of a guarantee: value ≥ limit, or value ≤ limit.

    Attributes
    ----------
    statement : str
        The inequality in symbols.
    value, limit : float
        Its two sides.
    at_least : bool
        True for value ≥ limit, False for value ≤ limit.
    """

    statement: str
    value: float
    limit: float
    at_least: bool

    @property
    def factor(self) -> float:
        """By what factor the condition is met (1 or more) or missed (less than 1)."""
        larger, smaller = self.value, self.limit
        if not self.at_least:
            larger, smaller = smaller, larger
        return larger / smaller if smaller > 0.0 else math.inf

    @property
    def met(self) -> bool:
        """Whether the condition holds."""
        return self.factor >= 1.0

    def __str__(self) -> str:
        verdict = "met, with a factor" if self.met else "not met, short by a factor"
        factor = self.factor if self.met else 1.0 / self.factor if self.factor > 0.0 else math.inf
        return (
            f"{self.statement}: {self.value:.4g} against {self.limit:.4g}, "
            f"{verdict} of {factor:.3g}"
        )


@dataclass(frozen=True)
class Guarantee:
    """An inequality that holds if its conditions do.

    Attributes
    ----------
    statement : str
        What is bounded.
    constants : {"proved", "recalled"}
        "recalled": the constants are recalled, not derived or quoted.
    bound : float
        The right side.
    trivial : float
        What is known without any theory. A bound of at least this is vacuous.
    conditions : tuple of Condition
        All must be met.
    distance, radius : float
        D0, and how far from θ0 the iterates may get.
    """

    statement: str
    constants: str
    bound: float
    trivial: float
    conditions: tuple[Condition, ...]
    distance: float
    radius: float

    @property
    def applies(self) -> bool:
        """Whether all conditions are met; if not, nothing is guaranteed."""
        return all(condition.met for condition in self.conditions)

    @property
    def vacuous(self) -> bool:
        """Whether the bound says no more than what is known without it."""
        return not self.bound < self.trivial

    def __str__(self) -> str:
        status = "" if self.constants == "proved" else " (constants from memory)"
        lines = [f"{self.statement} ≤ {self.bound:.4g}{status}"]
        lines += [f"  {condition}" for condition in self.conditions]
        if not self.applies:
            lines.append("  nothing is guaranteed: a condition is not met")
        if self.vacuous:
            lines.append(f"  vacuous: not below {self.trivial:.4g}")
        return "\n".join(lines)
