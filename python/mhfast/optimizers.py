"""Step rules of `mhfast.train`: frozen values that say how a gradient becomes a step.

Step k takes θ_k to θ_{k+1}. The gradient g of the recorded loss goes through, in this order:

1. l2:        g ← g + λ θ_k              (λ = ``l2``; λ/2 ‖θ‖² is not in the recorded loss)
2. clip:      g ← g min(1, clip / ‖g‖)   (one norm over all that is trained)
3. normalize: g ← g / (‖g‖ + eps)        (`NormalizedGradientDescent` only)
4. step:      θ_{k+1} = θ_k - lr schedule[k] g

Plain gradient descent is the setting of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization
and Generalization of Multi-head Attention"; normalized steps are those of the implicit-bias
literature on saturating attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["GradientDescent", "NormalizedGradientDescent", "Optimizer"]

Schedule: TypeAlias = Sequence[float] | npt.NDArray[np.floating]


@dataclass(frozen=True)
class GradientDescent:
    """Gradient descent: θ_{k+1} = θ_k - lr · schedule[k] · g.

    Parameters
    ----------
    lr : float
        Step size, finite and at least 0.
    schedule : sequence of float, optional
        Entry k multiplies ``lr`` at step k, counted from the start of the run (a continued run goes
        on in it). It must cover every step that is taken. Kept as a tuple.
    l2 : float
        λ of the weight decay λθ added to the gradient; the recorded loss does not contain it.
    clip : float, optional
        Largest norm of the gradient over all trained parameters; a longer one is scaled to it.

    Raises
    ------
    TypeError
        A field is not a number.
    ValueError
        A field is out of range.
    """

    name: ClassVar[str] = "gradient_descent"

    lr: float
    _: KW_ONLY
    schedule: Schedule | None = None
    l2: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        _settle_shared_fields(self)


@dataclass(frozen=True)
class NormalizedGradientDescent:
    """Normalized gradient descent: θ_{k+1} = θ_k - lr · schedule[k] · g / (‖g‖ + eps).

    A gradient that is exactly zero makes no step. The direction stays right where attention is so
    saturated that the gradient itself is too small for the number format.

    Parameters
    ----------
    lr : float
        Length of a step, finite and at least 0.
    eps : float
        Added to the norm, finite and at least 0.
    by : {"tensor", "head", "all"}
        What has a norm of its own: every parameter (W, U), every head of every parameter, or all
        trained parameters together.
    schedule, l2, clip
        As in `GradientDescent`. Clipping comes before normalizing, so that it only matters together
        with ``eps``.

    Raises
    ------
    TypeError
        A field is not of the kind asked for.
    ValueError
        A field is out of range.
    """

    name: ClassVar[str] = "normalized_gradient_descent"

    lr: float
    eps: float = 0.0
    by: str = "tensor"
    _: KW_ONLY
    schedule: Schedule | None = None
    l2: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        _settle_shared_fields(self)
        object.__setattr__(self, "eps", _number("eps", self.eps))
        if self.by not in ("tensor", "head", "all"):
            raise ValueError(f"by: expected 'tensor', 'head' or 'all', got {self.by!r}")


Optimizer: TypeAlias = GradientDescent | NormalizedGradientDescent


def core_settings(optimizer: Optimizer, last: int) -> dict[str, Any]:
    """Return the optimizer as the C++ core takes it, for a run that ends at step ``last``.

    Raises
    ------
    TypeError
        ``optimizer`` is not one of the optimizers of this module.
    ValueError
        The schedule is shorter than ``last``.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: expected GradientDescent or NormalizedGradientDescent, got {optimizer!r}"
        )
    schedule = None
    if optimizer.schedule is not None:
        schedule = np.array(optimizer.schedule, dtype=np.float64)
        if len(schedule) < last:
            raise ValueError(
                f"schedule: expected an entry for each of the {last} steps counted from the start "
                f"of the run, got {len(schedule)}"
            )
    eps, by = 0.0, "tensor"
    if isinstance(optimizer, NormalizedGradientDescent):
        eps, by = optimizer.eps, optimizer.by
    return {
        "name": optimizer.name,
        "lr": optimizer.lr,
        "eps": eps,
        "by": by,
        "schedule": schedule,
        "l2": optimizer.l2,
        "clip": math.inf if optimizer.clip is None else optimizer.clip,
    }


def _settle_shared_fields(optimizer: Optimizer) -> None:
    """Check the fields that every optimizer has and store them as plain Python numbers."""
    settle = object.__setattr__  # the way around `frozen` that dataclasses offer
    settle(optimizer, "lr", _number("lr", optimizer.lr))
    settle(optimizer, "l2", _number("l2", optimizer.l2))
    if optimizer.clip is not None:
        settle(optimizer, "clip", _number("clip", optimizer.clip))
        if optimizer.clip == 0:
            raise ValueError("clip: expected a number above 0 or None, got 0.0")
    if optimizer.schedule is not None:
        settle(optimizer, "schedule", _checked_schedule(optimizer.schedule))


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {number}")
    return number


def _checked_schedule(schedule: Schedule) -> tuple[float, ...]:
    values = np.asarray(schedule)
    if values.dtype.kind not in "iuf":
        raise TypeError(f"schedule: expected a sequence of numbers, got {schedule!r:.80}")
    if values.ndim != 1:
        raise ValueError(f"schedule: expected shape (steps,), got {values.shape}")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        raise ValueError(
            "schedule: expected finite numbers of at least 0, "
            f"got {values[wrong[0]]} at index {wrong[0]}"
        )
    return tuple(values.astype(np.float64).tolist())
