"""Early stopping: the held-out loss at each step, and the model for which it is smallest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..._arguments import checks
from ..._arguments.losses import Loss
from ...dataset.dataset import Dataset
from ...models import Classifier
from ...training.evaluate import evaluate


class EarlyStopping:
    """A callback of `mhfast.train` that ends training when the held-out loss no longer falls.

    The loss is the mean over classes or outputs. Training ends after ``patience`` steps in a row
    without a loss below the smallest one so far by more than ``tol``.
    """

    def __init__(
        self, validation: Dataset, loss: Loss, patience: int, tol: float, threads: int | None
    ) -> None:
        self.validation, self.loss, self.threads = validation, loss, threads
        self.patience = checks.count(patience, "n_iter_no_change")
        self.tol = checks.finite(tol, "tol")
        if self.tol < 0:
            raise ValueError(f"tol: expected a number of at least 0, got {tol}")
        self.losses: list[float] = []
        self.best: Classifier | None = None
        self.best_index, self.to_beat, self.waited = 0, math.inf, 0

    def __call__(self, _: int, model: Any) -> bool:
        """Compute the held-out loss at θ_k; true ends training."""
        values = evaluate(model, self.validation, loss=self.loss, num_threads=self.threads)["loss"]
        loss = float(np.mean(values))
        if self.best is None or loss < self.losses[self.best_index]:
            self.best, self.best_index = model, len(self.losses)
        self.losses.append(loss)
        if loss < self.to_beat - self.tol:
            self.to_beat, self.waited = loss, 0
        else:
            self.waited += 1
        return self.waited >= self.patience
