"""Optimizers as the core takes them, and the step sizes of some of several runs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ._common import StepRule
from .rules import Optimizer


def core_settings(
    optimizer: Optimizer,
    last: int,
    runs: int | None = None,
    since: npt.NDArray[np.int64] | None = None,
) -> _core.Optimizer:
    """Return the optimizer as the core takes it, for training that ends at step ``last``.

    The core has a class of the same name, whose fields are those of the dataclass that are its own,
    but for ``lr``. With ``runs`` (R) there is a step size for each of them. ``since`` is the
    step at which the state was zero, of each run.

    Raises
    ------
    ValueError
        The schedule is shorter than ``last``.
    """
    common = {field.name for field in fields(StepRule)} | {"lr"}
    own = {
        field.name: _core_value(field.name, getattr(optimizer, field.name))
        for field in fields(optimizer)
        if field.name not in common
    }
    schedule = None
    if optimizer.schedule is not None:
        if len(optimizer.schedule) < last:
            raise ValueError(
                f"schedule: expected an entry for each of the {last} steps counted from the start "
                f"of the run, got {len(optimizer.schedule)}"
            )
        schedule = np.array(optimizer.schedule, dtype=np.float64)
    return _core.Optimizer(
        rule=getattr(_core, type(optimizer).__name__)(**own),
        lr=np.full(runs or 1, getattr(optimizer, "lr", 1.0), dtype=np.float64),
        schedule=schedule,
        l2=optimizer.l2,
        clip=optimizer.clip,
        project=None
        if optimizer.project is None
        else _core.Projection.__members__[optimizer.project],
        radius=optimizer.radius or 0.0,
        project_by=_core.Scope.__members__[optimizer.project_by],
        since=np.zeros(runs or 1, np.int64) if since is None else since,
    )


def _core_value(name: str, value: object) -> object:
    """Return the value of a field as the core takes it: a scope by its name."""
    return _core.Scope.__members__[str(value)] if name == "by" else value


def of_runs(optimizer: Optimizer, index: int | slice | np.ndarray[Any, Any]) -> Optimizer:
    """Return the optimizer with the step sizes of some of its runs, of one run for an integer."""
    lr = getattr(optimizer, "lr", None)
    if not isinstance(lr, tuple):
        return optimizer
    chosen: dict[str, Any] = {"lr": np.array(lr)[index]}
    return replace(optimizer, **chosen)
