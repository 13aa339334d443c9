"""Common to all optimizers: decay, clipping, schedule and projection."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments.lists import SLOTS
from ._by_parameter import ByParameter, each

Numbers: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]]
Rates: TypeAlias = float | Numbers | Mapping[str, float | Numbers]
Schedule: TypeAlias = Numbers | Mapping[str, Numbers]
Sizes: TypeAlias = float | Mapping[str, float]

GROUPINGS = ("tensor", "head", "all")
MOST_SHOWN = 8
PROJECTIONS = ("ball", "sphere")
BALLS = ("fro", "nuclear", "spectral")


@dataclass(frozen=True, kw_only=True, repr=False)
class StepRule:
    """The fields that every optimizer has, by keyword only.

    Parameters
    ----------
    schedule : sequence of float (steps,) or dict of them, optional
        Entry k multiplies the step size at step k, counted from the start of the run (also in a
        resumed run). It must cover every step that is taken. Stored as a tuple.
    l2 : float or dict
        λ of the weight decay λθ added to the gradient; the recorded loss does not contain it.
    clip : float
        Largest norm of the gradient over all trained parameters; a longer gradient is scaled down
        to it.
    project : {None, "ball", "sphere"}
        After the step: "ball" takes parameters whose norm is above `radius` to the nearest point
        (in the Frobenius norm) where it is not, "sphere" scales all parameters except zeros to it.
    radius : float or dict, optional
        The radius of the projection, above 0; given if and only if `project` is.
    project_by : {"tensor", "head", "all"}
        Over what the norm is taken: each parameter, each head of each parameter, or all trained
        parameters together. A parameter without heads counts as one head.
    project_norm : {"fro", "nuclear", "spectral"} or float
        The norm of the projection: Frobenius, of the singular values of a head's matrix (these only
        with ``project_by="head"``), or the p-norm of the entries, p from 1 to infinity. All but
        "fro" need ``project_by`` to be "tensor" or "head", and are computed in float64.

    Raises
    ------
    TypeError
        A field is of the wrong kind.
    ValueError
        A field is out of range, or a dict has an unknown name.

    Notes
    -----
    ``lr``, ``schedule``, ``l2`` and ``radius`` may differ between parameters: then they are dicts
    by the names of parameters, such as ``lr={"W": 0.1, "U": 1.0}``. ``lr`` must have an
    entry for every parameter that is trained; 0.0 leaves a parameter unchanged. Parameters without
    an entry have a constant schedule, no decay, and are not projected. Entries of parameters that
    are not trained have no effect; the model must have them. With ``project_by="all"`` there is one
    norm, and ``radius`` is one number.
    """

    name: ClassVar[str]
    slots: ClassVar[int]
    """The number of arrays of state per parameter, of its shape."""
    kinds: ClassVar[list[type[StepRule]]] = []
    """Every optimizer, those that specialize another among them."""

    def __init_subclass__(cls) -> None:
        cls.slots = SLOTS[cls.name]
        StepRule.kinds.append(cls)

    schedule: Schedule | None = None
    l2: Sizes = 0.0
    clip: float = math.inf
    project: str | None = None
    radius: Sizes | None = None
    project_by: str = "tensor"
    project_norm: str | float = "fro"

    def __post_init__(self) -> None:
        if self.schedule is not None:
            self._set_field("schedule", each("schedule", self.schedule, _schedule))
        self._set_field("l2", each("l2", self.l2, at_least_zero))
        self._set_field("clip", positive("clip", self.clip))
        one_of("project_by", self.project_by, GROUPINGS)
        self._set_field("project_norm", _ball(self.project_norm))
        self._check_norm()
        if self.project is not None:
            one_of("project", self.project, PROJECTIONS)
            if self.radius is None:
                raise TypeError(
                    f"radius: expected a number with project={self.project!r}, got None"
                )
            self._set_field("radius", each("radius", self.radius, _radius))
            if isinstance(self.radius, Mapping) and self.project_by == "all":
                raise ValueError(
                    f"radius: expected one number with project_by='all', got {self.radius!r}"
                )
        elif self.radius is not None:
            raise ValueError(f"radius: expected None without project=, got {self.radius!r}")

    def _check_norm(self) -> None:
        norm = self.project_norm
        if norm == "fro":
            return
        if self.project is None:
            raise ValueError(f"project_norm: expected 'fro' without project=, got {norm!r}")
        if isinstance(norm, str) and self.project_by != "head":
            raise ValueError(
                f"project_by: expected 'head' with project_norm={norm!r}, a norm of one matrix, "
                f"got {self.project_by!r}"
            )
        if self.project_by == "all":
            raise ValueError(
                f"project_by: expected 'tensor' or 'head' with project_norm={norm!r}, got 'all'"
            )

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
    """Return the repr of a field; for a long sequence only its ends."""
    if isinstance(value, ByParameter):
        return f"{{{', '.join(f'{name!r}: {_shown(item)}' for name, item in value.items())}}}"
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


def rates(value: Rates) -> float | tuple[float, ...] | ByParameter[float | tuple[float, ...]]:
    """Return step sizes, numbers or one for each of R runs, as Python floats."""
    return each("lr", value, _rates)


def _rates(name: str, value: Any) -> float | tuple[float, ...]:
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) and np.ndim(value):
        return _numbers(name, "R", value)
    return at_least_zero(name, value.item() if isinstance(value, np.ndarray) else value)


def _schedule(name: str, value: Any) -> tuple[float, ...]:
    return _numbers(name, "steps", value)


def _ball(value: object) -> str | float:
    if isinstance(value, str):
        one_of("project_norm", value, BALLS)
        return value
    p = number("project_norm", value)
    if p < 1.0:
        raise ValueError(f"project_norm: expected a p of at least 1, got {p}")
    return p


def _radius(name: str, value: object) -> float:
    return positive(name, value, finite=True)


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
