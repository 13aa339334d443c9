"""`Guarantee`: an inequality with its conditions, and the sentences that report it."""

from __future__ import annotations

import math
import sys
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
    of_heads : bool
        Whether `value` is sqrt(H), so that a larger H would meet the condition.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> target = mh.train(start, data, steps=50, optimizer=mh.GradientDescent(1.0)).model
    >>> guarantee = mh.theory.training_bound(start, data, comparator=target, lr=0.01, steps=50)
    >>> for condition in guarantee.conditions:
    ...     print(condition.statement, condition.met)
    sqrt(H) ≥ (64/7) b3 D0² False
    lr ≤ 1/ρ False
    lr ≤ D0²/(k L(θ*)) True
    lr ≤ D0²/L(θ0) True
    >>> heads = guarantee.conditions[0]
    >>> heads.factor < 1, heads.needed_heads > 2
    (True, True)
    """

    statement: str
    value: float
    limit: float
    at_least: bool
    of_heads: bool = False

    @property
    def factor(self) -> float:
        """The factor by which the condition is met (1 or more) or missed (less than 1).

        NaN where a side is NaN, or where both are 0 or infinite: then nothing can be said.
        """
        larger, smaller = self.value, self.limit
        if not self.at_least:
            larger, smaller = smaller, larger
        if math.isnan(larger) or math.isnan(smaller) or (math.isinf(larger) and larger == smaller):
            return math.nan
        if smaller > 0.0:
            return larger / smaller
        return math.inf if larger > 0.0 or self.value == self.limit else math.nan

    @property
    def met(self) -> bool:
        """Whether the condition holds; false if a side is NaN."""
        return self.factor >= 1.0

    @property
    def needed_heads(self) -> float:
        """The smallest H that meets a condition on sqrt(H), all else equal; NaN for others."""
        return least_heads(self.limit) if self.of_heads else math.nan

    def __str__(self) -> str:
        factor = self.factor
        inputs = f"{self.statement}: {self.value:.4g} against {self.limit:.4g}"
        if math.isnan(factor):
            return f"{inputs}, cannot be judged"
        if factor >= 1.0:
            return f"{inputs}, met, with a factor of {_shown(factor)}"
        missed = f"{inputs}, not met, short by a factor of "
        missed += _shown(1.0 / factor if factor > 0.0 else math.inf)
        if self.of_heads:
            missed += f"; {heads_missed(self.needed_heads, factor)}"
        return missed


def least_heads(root: float) -> float:
    """Return the smallest whole H with sqrt(H) ≥ `root`, which 1 is at least; inf beyond 1e308."""
    square = root * root
    if not square < 2.0**52:  # from here on every float is whole
        return square
    heads = max(1.0, math.floor(square))
    return heads if math.sqrt(heads) >= root else heads + 1.0


def heads_shown(heads: float) -> str:
    """Return a number of heads in words short enough for a line."""
    return f"{heads:.0f}" if heads < 1e6 else f"{min(heads, sys.float_info.max):.2g}"


def heads_missed(needed: float, factor: float) -> str:
    """Return the number of heads that a condition on sqrt(H) needs, and how many times H it is.

    `factor` is that of sqrt(H), below 1.
    """
    more = math.inf if factor < 1e-154 else factor**-2.0
    return f"needs H >= {heads_shown(needed)}, {_shown(more)} times as many"


def _shown(factor: float) -> str:
    return f"{factor:.3g}" if factor < math.inf else f"more than {sys.float_info.max:.2g}"


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
        A bound of the quantity that needs no theorem.  A bound of at least this is vacuous.
    conditions : tuple of Condition
        All must be met.
    distance, radius : float
        D0, and how far from θ0 the iterates may get.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> target = mh.train(start, data, steps=50, optimizer=mh.GradientDescent(1.0)).model
    >>> guarantee = mh.theory.training_bound(start, data, comparator=target, lr=0.01, steps=50)
    >>> guarantee.applies, guarantee.vacuous  # H is too small; the bound says nothing
    (False, True)
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
        recalled = " (constants recalled, not derived or quoted)"
        status = "" if self.constants == "proved" else recalled
        lines = [f"{self.statement} ≤ {self.bound:.4g}{status}"]
        lines += [f"  {condition}" for condition in self.conditions]
        if not self.applies:
            lines.append("  nothing is guaranteed: a condition is not met")
        if math.isnan(self.bound):
            lines.append("  says nothing: the bound is not a number")
        elif self.vacuous:
            lines.append(f"  vacuous: not below {self.trivial:.4g}, which is known anyway")
        elif not self.bound < math.log(2):
            lines.append("  says little: not below log 2, the loss of a classifier of outputs 0")
        return "\n".join(lines)
