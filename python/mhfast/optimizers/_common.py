"""Common to all optimizers: decay, clipping, schedule and projection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments.lists import SLOTS

Numbers: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]]
Rates: TypeAlias = float | Numbers
Schedule: TypeAlias = Numbers

GROUPINGS = ("tensor", "head", "all")
MOST_SHOWN = 8
PROJECTIONS = ("ball", "sphere")


@dataclass(frozen=True, kw_only=True, repr=False)
class StepRule:
    """The fields that every optimizer has, by keyword only.

    Parameters
    ----------
    schedule : sequence of float (steps,), optional
        Entry k multiplies the step size at step k, counted from the start of the run (also in a
        resumed run). It must cover every step that is taken. Stored as a tuple.
    l2 : float
        λ of the weight decay λθ added to the gradient; the recorded loss does not contain it.
    clip : float
        Largest norm of the gradient over all trained parameters; a longer gradient is scaled down
        to it.
    project : {None, "ball", "sphere"}
        After the step: "ball" scales parameters whose norm is above `radius` to it, "sphere" all
        parameters except zeros.
    radius : float, optional
        The radius of the projection, above 0; given if and only if `project` is.
    project_by : {"tensor", "head", "all"}
        Over what the norm is taken: each parameter, each head of each parameter, or all trained
        parameters together. A parameter without heads counts as one head.

    Raises
    ------
    TypeError
        A field is not of the kind asked for.
    ValueError
        A field is out of range.
    """

    name: ClassVar[str]
    slots: ClassVar[int]
    """The number of arrays of state per parameter, of its shape."""

    def __init_subclass__(cls) -> None:
        cls.slots = SLOTS[cls.name]

    schedule: Schedule | None = None
    l2: float = 0.0
    clip: float = math.inf
    project: str | None = None
    radius: float | None = None
    project_by: str = "tensor"

    def __post_init__(self) -> None:
        if self.schedule is not None:
            self._set_field("schedule", _numbers("schedule", "steps", self.schedule))
        self._set_field("l2", at_least_zero("l2", self.l2))
        self._set_field("clip", positive("clip", self.clip))
        one_of("project_by", self.project_by, GROUPINGS)
        if self.project is not None:
            one_of("project", self.project, PROJECTIONS)
            if self.radius is None:
                raise TypeError(
                    f"radius: expected a number with project={self.project!r}, got None"
                )
            self._set_field("radius", positive("radius", self.radius, finite=True))
        elif self.radius is not None:
            raise ValueError(f"radius: expected None without project=, got {self.radius!r}")

    def _set_field(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the way to set a field when frozen

    def __repr__(self) -> str:
        """Return the constructor call: positional arguments, then those that are not defaults.

        Of many numbers only some are shown.
        """
        order = sorted(fields(self), key=lambda field: bool(field.kw_only))
        given = (
            f"{field.name}={_shown(getattr(self, field.name))}"
            for field in order
            if field.default is MISSING or getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({', '.join(given)})"


def _shown(value: object) -> str:
    """Return the repr of a field; of a long sequence its ends."""
    if not isinstance(value, tuple) or len(value) <= MOST_SHOWN:
        return repr(value)
    return f"<{len(value)} numbers, {value[0]!r} to {value[-1]!r}>"


def number(name: str, value: object) -> float:
    """Return a real number, not NaN, as a float."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if math.isnan(value):
        raise ValueError(f"{name}: expected a number, got nan")
    return float(value)


def at_least_zero(name: str, value: object) -> float:
    """Return a finite number of at least 0 as a float."""
    result = number(name, value)
    if not 0.0 <= result < math.inf:
        raise ValueError(f"{name}: expected a finite number of at least 0, got {result}")
    return result


def positive(name: str, value: object, *, finite: bool = False) -> float:
    """Return a number above 0 as a float; infinity may be excluded."""
    result = number(name, value)
    if not result > 0.0 or (finite and math.isinf(result)):
        raise ValueError(
            f"{name}: expected a {'finite ' if finite else ''}number above 0, got {result}"
        )
    return result


def fraction(name: str, value: object) -> float:
    """Return a number in [0, 1) as a float."""
    result = number(name, value)
    if not 0.0 <= result < 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1), got {result}")
    return result


def truth(name: str, value: object) -> bool:
    """Return a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
    return bool(value)


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the choices."""
    if value not in choices:
        *most, last = map(repr, choices)
        raise ValueError(f"{name}: expected {', '.join(most)} or {last}, got {value!r}")


def rates(value: Rates) -> float | tuple[float, ...]:
    """Return step sizes, one number or one for each of R runs, as Python floats."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) and np.ndim(value):
        return _numbers("lr", "R", value)
    return at_least_zero("lr", value.item() if isinstance(value, np.ndarray) else value)


def _numbers(name: str, letter: str, values: Numbers) -> tuple[float, ...]:
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name}: expected a sequence of numbers, got {values!r:.80}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected shape ({letter},), got {array.shape}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ValueError(
            f"{name}: expected finite numbers of at least 0, "
            f"got {array[wrong[0]]} at index {wrong[0]}"
        )
    return tuple(array.astype(np.float64).tolist())
