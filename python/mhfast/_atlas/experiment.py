"""What an experiment of the atlas is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Claim:
    """A sentence with a number that decides whether it holds.

    Attributes
    ----------
    statement : str
        The quantity, in words.
    value : float
        What was measured.
    limit : float
        The number that it is compared with.
    at_least : bool
        Whether the claim is value ≥ limit; otherwise value ≤ limit.
    """

    statement: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        """Whether the claim holds; a NaN meets no limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        wanted = "at least" if self.at_least else "at most"
        return f"{verdict}: {self.statement}: {self.value:.5g} ({wanted} {self.limit:.5g})"


@dataclass(frozen=True)
class Outcome:
    """A table, the claims and the figure of one experiment."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    claims: Sequence[Claim]
    figure: Figure


@dataclass(frozen=True)
class Experiment:
    """One published result, as the atlas presents it.

    Attributes
    ----------
    title : str
        What is found, in a line.
    paper : str
        Authors, title and year.
    says : str
        What the paper claims, and what that sentence was taken from.
    setting : str
        Data, model and training, and which of these are choices of ours.
    run : callable
        ``run(quick)`` trains and returns an Outcome: under two minutes on two cores, with `quick`
        under ten seconds, on fewer or smaller instances.
    """

    title: str
    paper: str
    says: str
    setting: str
    run: Callable[[bool], Outcome]
