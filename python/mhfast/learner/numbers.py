"""The number of heads, where it is not given: from the evidence of fits.

The spectrum of the certified facts proposes a number, but with few examples, or with heads that
rarely attend alike, its largest step means little.  Numbers are therefore tried upward from 1, each
with all phases and refinement, until one fits: the examples determine the layer, and it explains
those it was fitted to and others, which were set aside to choose the number.  A proposal of the
spectrum that stands out clearly (`CERTAIN`) is tried first.
"""

from __future__ import annotations

from collections.abc import Iterator

from .sculpting import CERTAIN

MOST = 8
"""The largest number of heads that is tried without a certain proposal."""

PROGRESS = 0.9
"""A number of heads makes progress if it lowers the least residual so far to this share or less."""

PATIENCE = 2
"""Numbers in a row, above the best so far, without progress after which no more are tried."""


class NumberOfHeads:
    """The numbers of heads to try, in order, and the evidence for them."""

    @classmethod
    def given(cls, heads: int) -> NumberOfHeads:
        """Return a single number."""
        return cls(heads, CERTAIN, 0)

    def __init__(self, proposed: int | None, sureness: float | None, most: int) -> None:
        self._first = proposed if sureness is not None and sureness >= CERTAIN else None
        self._most = min(MOST, most)
        self._least, self._best, self._idle, self._current = float("inf"), 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        """Yield numbers until larger ones are not expected to fit better."""
        if self._first is not None:
            self._current = self._first
            yield self._first
        for heads in range(1, self._most + 1):
            if heads == self._first:
                continue
            if self._idle >= PATIENCE:
                return
            self._current = heads
            yield heads

    def take(self, residual: float) -> bool:
        """Take the residual of the number yielded last; return whether it is the least so far."""
        if residual <= PROGRESS * self._least:
            self._idle = 0
        elif self._current > self._best:
            self._idle += 1  # that fewer heads than the best fit worse says nothing about more
        if residual >= self._least:
            return False
        self._least, self._best = residual, self._current
        return True
