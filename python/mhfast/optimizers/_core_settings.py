"""Optimizers in the form that the C++ core expects, and the step sizes of selected runs."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np

from .rules import Optimizer

_UNUSED = {
    "lr": 1.0, "eps": 0.0, "by": "tensor", "beta": 0.0, "nesterov": False, "beta1": 0.9,
    "beta2": 0.999, "weight_decay": 0.0, "target": 0.0, "factor": 0.5, "max_lr": math.inf,
    "p": 2.0, "normalized": False,
}  # fmt: skip
"""Placeholders for fields that an optimizer does not have; only the step size of `PolyakStep` is
used."""


def core_settings(optimizer: Optimizer, last: int, runs: int | None = None) -> dict[str, Any]:
    """Return the optimizer in the form that the core expects, for training up to step ``last``.

    With ``runs`` (R) there is a step size for each of them.

    Raises
    ------
    ValueError
        The schedule is shorter than ``last``.
    """
    own = {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}
    settings = {"name": optimizer.name} | _UNUSED | own
    if optimizer.schedule is not None:
        if len(optimizer.schedule) < last:
            raise ValueError(
                f"schedule: expected an entry for each of the {last} steps counted from the start "
                f"of the run, got {len(optimizer.schedule)}"
            )
        settings["schedule"] = np.array(optimizer.schedule, dtype=np.float64)
    settings["lr"] = np.full(runs or 1, settings["lr"], dtype=np.float64)
    settings["radius"] = optimizer.radius or 0.0
    return settings


def of_runs(optimizer: Optimizer, index: int | slice | np.ndarray[Any, Any]) -> Optimizer:
    """Return the optimizer with the step sizes of selected runs, of one run for an integer."""
    lr = getattr(optimizer, "lr", None)
    if not isinstance(lr, tuple):
        return optimizer
    chosen: Any = np.array(lr)[index]
    return replace(optimizer, lr=chosen)
