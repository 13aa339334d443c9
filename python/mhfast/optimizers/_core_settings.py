"""Optimizers as the core takes them, and the step sizes of some of several runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments.lists import PARAMETERS
from ._by_parameter import ByParameter, of_parameters
from ._common import StepRule
from .rules import OPTIMIZERS, Optimizer
from .solvers import Solver

_Numbers: TypeAlias = npt.NDArray[np.float64]

# Members by name: the attribute of a class makes a dict of them at each call.
_SCOPES, _BALL_NORMS = _core.Scope.__members__, _core.BallNorm.__members__
_PROJECTIONS = _core.Projection.__members__
_CHOSEN: dict[str, Mapping[str, Any]] = {
    "by": _SCOPES, "norm": _core.Norm.__members__, "polar": _core.Polar.__members__,
}  # fmt: skip

_COMMON = {"lr", *(field.name for field in fields(StepRule))}
_OWN = {
    kind.name: tuple(field.name for field in fields(kind) if field.name not in _COMMON)
    for kind in OPTIMIZERS
}

Rule = TypeVar("Rule", bound=Optimizer | Solver)


def core_settings(
    optimizer: Optimizer,
    last: int,
    runs: int | None = None,
    since: npt.NDArray[np.int64] | None = None,
    wrt: Collection[str] = PARAMETERS,
) -> _core.Optimizer:
    """Return the optimizer as the core takes it, for training that ends at step ``last``.

    A rule of the core has the name of the dataclass, and the fields that are its own, except
    ``lr``. With ``runs`` (R) there is a step size for each of them. ``since`` is the step at which
    the state was zero, of each run; ``wrt`` are the names of what is trained.

    Raises
    ------
    ValueError
        A schedule is shorter than ``last``, or something trained has no step size.
    """
    own = {name: _core_value(name, getattr(optimizer, name)) for name in _OWN[optimizer.name]}
    lr, norm = getattr(optimizer, "lr", 1.0), optimizer.project_norm
    p = norm if isinstance(norm, float) else None
    return _core.Optimizer(
        rule=_core.Rule(type(optimizer).__name__, **own),
        lr=_arrays(lr, wrt, lambda name, value: _rates(name, value, runs or 1)),
        schedule=_arrays(optimizer.schedule, wrt, lambda name, value: _schedule(name, value, last)),
        l2=of_parameters(optimizer.l2, 0.0),
        clip=optimizer.clip,
        project=None if optimizer.project is None else _PROJECTIONS[optimizer.project],
        radius=[radius or np.inf for radius in of_parameters(optimizer.radius, None)],
        project_by=_SCOPES[optimizer.project_by],
        project_norm=_BALL_NORMS["power" if p is not None else str(norm)],
        project_power=2.0 if p is None else p,
        since=np.zeros(runs or 1, np.int64) if since is None else since,
    )


def _arrays(
    setting: Any, wrt: Collection[str], array: Callable[[str, Any], _Numbers | None]
) -> tuple[_Numbers | None, ...]:
    """Return an array for each parameter, None for those not trained; a common one is shared."""
    if type(setting) is not ByParameter:
        common = array("", setting)
        if common is None:
            return (None,) * len(PARAMETERS)
        return tuple([common if name in wrt else None for name in PARAMETERS])
    return tuple(array(name, setting.get(name)) if name in wrt else None for name in PARAMETERS)


def _rates(name: str, value: Any, runs: int) -> _Numbers:
    if value is None:
        raise ValueError(
            f"lr: expected a step size for each trained parameter, got none for {name}; "
            f"0.0 leaves it unchanged"
        )
    return np.full(runs, value, dtype=np.float64)


def _schedule(name: str, value: Any, last: int) -> _Numbers | None:
    if value is None:
        return None
    if len(value) < last:
        raise ValueError(
            f"schedule{f'[{name!r}]' if name else ''}: expected an entry for each of the {last} "
            f"steps counted from the start of the run, got {len(value)}"
        )
    return np.array(value, dtype=np.float64)


def _core_value(name: str, value: object) -> object:
    """Return the value of a field as the core takes it: what is chosen by name as a member."""
    return _CHOSEN[name][cast(str, value)] if name in _CHOSEN else value


def fields_of(optimizer: Optimizer | Solver) -> dict[str, Any]:
    """Return the fields by name, as their class and JSON take them."""
    values = {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}
    return {
        name: dict(value) if isinstance(value, ByParameter) else value
        for name, value in values.items()
    }


def of_runs(optimizer: Rule, index: int | slice | np.ndarray[Any, Any]) -> Rule:
    """Return the optimizer with the step sizes of some of its runs, of one run for an integer."""
    lr = getattr(optimizer, "lr", None)
    parts = lr if isinstance(lr, ByParameter) else {"": lr}
    if not any(isinstance(part, tuple) for part in parts.values()):
        return optimizer
    some = {
        name: np.array(part)[index] if isinstance(part, tuple) else part
        for name, part in parts.items()
    }
    chosen: dict[str, Any] = {"lr": some if isinstance(lr, ByParameter) else some[""]}
    return replace(optimizer, **chosen)
