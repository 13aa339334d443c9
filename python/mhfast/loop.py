"""What happens in Python while the core trains: functions, callback, stop function, checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ._values import Array
from .history import FunctionRows, NamedRows, joined
from .models import Classifier
from .recording import count_due
from .run import Run

Callback: TypeAlias = Callable[[int, Classifier], object]


@dataclass
class Loop:
    """One call of `mhfast.train` in progress.

    Attributes
    ----------
    run : Run
        The settings, and what was there at the first step of this call.
    W, U : arrays (H,d,d), (H,q,d)
        The parameters, which the core overwrites.
    named, functions
        The rows that the core and this loop fill.
    callback : function or None
    checkpoint : (path, every) or None
    ended_by : str
        Which function asked for the end, if one did.
    """

    run: Run
    W: Array
    U: Array
    named: list[NamedRows]
    functions: list[FunctionRows]
    callback: Callback | None
    checkpoint: tuple[str | os.PathLike[str], int] | None
    ended_by: str = ""

    def every(self) -> int:
        """Return how often the core has to call `at`; 0 if there is nothing to do."""
        periods = [rows.entry.every for rows in self.functions]
        if self.checkpoint is not None:
            periods.append(self.checkpoint[1])
        if self.callback is not None or callable(self.run.stop):
            periods.append(1)
        return math.gcd(*periods)

    def at(self, k: int) -> bool:
        """Do what is due at θ_k; true ends training."""
        due = [rows for rows in self.functions if k % rows.entry.every == 0]
        saving = self.checkpoint is not None and k > self.run.step and k % self.checkpoint[1] == 0
        stop = self.run.stop if callable(self.run.stop) else None
        if not (due or saving or self.callback or stop):
            return False
        model = self.model()
        for rows in due:
            rows.take(k, model)
        if self.checkpoint is not None and saving:
            # The core records θ_k after this call; going on from the file does so too.
            written = [count_due(self.run.step, k - 1, rows.entry.every) for rows in self.named]
            self.so_far(k, "checkpoint", written).save(self.checkpoint[0])
        if self.callback is not None and self.callback(k, model):
            self.ended_by = "callback"
        elif stop is not None and stop(k, model):
            self.ended_by = "stop"
        return bool(self.ended_by)

    def model(self) -> Classifier:
        """Return the model with the parameters as they are now, in memory of its own."""
        W, U = self.W.copy(), self.U.copy()
        W.flags.writeable = U.flags.writeable = False
        return replace(self.run.model, W=W, U=U)

    def so_far(self, reached: int, reason: str, written: Sequence[int]) -> Run:
        """Return the run up to θ_reached; ``written`` counts the rows of the records in `named`."""
        parts = [
            rows.so_far(self.run.step, reached, count)
            for rows, count in zip(self.named, written, strict=True)
        ]
        parts += [rows.so_far() for rows in self.functions]
        history, steps = joined(self.run.history, self.run.steps, self.run.step, reached, parts)
        return replace(
            self.run,
            model=self.model(),
            history=history,
            steps=steps,
            step=reached,
            reason=reason,
        )

    def finish(self, reached: int, reason: str, written: Sequence[int]) -> Run:
        """Return the run as it ended, after writing its last checkpoint."""
        for rows in self.functions:
            rows.take(reached, self.model())
        reason = self.ended_by if reason == "hook" else reason
        run = self.so_far(reached, reason, written)
        if self.checkpoint is not None:
            run.save(self.checkpoint[0])
        return run
