"""Losses with a parameter, and how losses are passed to the core and stored in files.

A loss is a name, or one of the classes here, whose name alone stands for the default of its field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, TypeAlias, cast

from .. import _core
from .lists import LOSSES
from .names import LossName
from .own_losses import Function, MissingLoss, NumbaFunction, core_own, is_own, name_of_function

__all__ = ["CrossEntropy", "Huber", "PolynomialTail", "Quantile"]


@dataclass(frozen=True)
class PolynomialTail:
    """A loss with a polynomial tail: (1 + m)^-a for m >= 0, 1 - a m for m < 0, with m = yΦ.

    Parameters
    ----------
    exponent : float
        a, finite and above 0.

    Raises
    ------
    TypeError
        If the exponent is not a number.
    ValueError
        If it is not finite or not above 0.

    References
    ----------
    Ji, Dudík, Schapire, Telgarsky, "Gradient descent follows the regularization path for general
    losses", COLT 2020, where the limit of gradient descent depends on the tail of the loss. Here
    the tail continues in its tangent at margin 0.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X, y = np.ones((1, 5, 9)), [1.0]
    >>> model = mh.Classifier(np.zeros((1, 9, 9)), np.full((1, 5, 9), 0.2))  # the margin is 9
    >>> [round(model.loss(X, y, loss=mh.PolynomialTail(a)), 6) for a in (1.0, 2.0)]  # 1/10, 1/100
    [0.1, 0.01]
    """

    name: ClassVar[LossName] = "polynomial_tail"

    exponent: float = 1.0

    def __post_init__(self) -> None:
        _set(self, "exponent", above=0.0, below=math.inf)


@dataclass(frozen=True)
class Huber:
    """Huber's loss of r = Φ - y: r² / 2 for ``|r|`` <= delta, else delta (``|r|`` - delta / 2).

    Parameters
    ----------
    delta : float
        Where the loss becomes linear, finite and above 0.

    Raises
    ------
    TypeError
        If delta is not a number.
    ValueError
        If it is not finite or not above 0.

    References
    ----------
    Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics 1964.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> layer = mh.Layer.zeros(heads=1, dim=9, out_dim=1, query=-1)
    >>> X, Y = np.ones((1, 5, 9)), np.full((1, 1, 1), 10.0)  # off by 10
    >>> [layer.loss(X, Y, loss=loss) for loss in ("squared", mh.Huber(delta=1.0))]
    [100.0, 9.5]
    """

    name: ClassVar[LossName] = "huber"

    delta: float = 1.0

    def __post_init__(self) -> None:
        _set(self, "delta", above=0.0, below=math.inf)


@dataclass(frozen=True)
class Quantile:
    """The quantile loss: level (y - Φ) where Φ < y, else (1 - level) (Φ - y).

    Its expectation is smallest at the quantile of y. Level 0.5 is half of the absolute error.

    Parameters
    ----------
    level : float
        The quantile, between 0 and 1, both excluded.

    Raises
    ------
    TypeError
        If the level is not a number.
    ValueError
        If it is not between 0 and 1.

    References
    ----------
    Koenker, Bassett, "Regression Quantiles", Econometrica 1978.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> layer = mh.Layer.zeros(heads=1, dim=9, out_dim=1, query=-1)
    >>> X, one = np.ones((1, 5, 9)), np.ones((1, 1, 1))  # all outputs are 0: too small, too large
    >>> [round(layer.loss(X, Y, loss=mh.Quantile(0.9)), 3) for Y in (one, -one)]
    [0.9, 0.1]
    """

    name: ClassVar[LossName] = "quantile"

    level: float = 0.5

    def __post_init__(self) -> None:
        _set(self, "level", above=0.0, below=1.0)


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of classes with smoothed labels, a loss of layers.

        log Σ_o exp(F_o) - (1 - s) F_y - s / p Σ_o F_o

    Parameters
    ----------
    smoothing : float
        s, at least 0 and below 1: the class has probability 1 - s + s / p, others have s / p.

    Raises
    ------
    TypeError
        If the smoothing is not a number.
    ValueError
        If it is not at least 0 and below 1.

    References
    ----------
    Szegedy, Vanhoucke, Ioffe, Shlens, Wojna, "Rethinking the Inception Architecture for Computer
    Vision", CVPR 2016.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> layer = mh.Layer.gaussian(2, 9, 3, std=1.0, seed=0, query=-1)
    >>> X, y = np.random.default_rng(0).standard_normal((20, 5, 9)), np.arange(20)[:, None] % 3
    >>> plain, smoothed = (layer.loss(X, y, loss=mh.CrossEntropy(s)) for s in (0.0, 0.1))
    >>> plain == layer.loss(X, y, loss="cross_entropy"), plain == smoothed
    (True, False)
    """

    name: ClassVar[LossName] = "cross_entropy"

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _set(self, "smoothing", above=-math.ulp(0.0), below=1.0)


WithParameter: TypeAlias = PolynomialTail | Huber | Quantile | CrossEntropy
Named: TypeAlias = LossName | WithParameter
Loss: TypeAlias = Named | Function | NumbaFunction
"""A loss by name, one with a parameter, or a function; some compiled ones have no types."""

CLASSES = {kind.name: kind for kind in (PolynomialTail, Huber, Quantile, CrossEntropy)}

WITH_KINKS = ("hinge", "quantile")
"""The losses whose derivative jumps; that of others is continuous where the loss is finite."""


def name_of(loss: Loss) -> str:
    """Return the name of a loss, with or without a parameter; of a function "own"."""
    if isinstance(loss, str):
        return loss
    return "own" if is_own(loss) else cast(WithParameter, loss).name


def parameter_of(loss: WithParameter) -> float:
    """Return the parameter of a loss."""
    return float(getattr(loss, fields(loss)[0].name))


def core(loss: Loss) -> _core.Loss:
    """Return a loss as the core takes it."""
    if isinstance(loss, str):
        return LOSSES[loss]
    if is_own(loss):
        return _core.Loss(core_own(loss))
    given = cast(WithParameter, loss)
    return _core.Loss(LOSSES[given.name].name, parameter_of(given))


def kept(loss: Loss) -> Loss:
    """Return a loss as files and pickles keep it, with a placeholder for a function."""
    return MissingLoss(name_of_function(loss)) if is_own(loss) else loss


def stored(loss: Loss) -> Any:
    """Return a loss as JSON can hold it: a name, or also the parameter or the function's name."""
    if isinstance(loss, str):
        return loss
    if is_own(loss):
        return ["own", name_of_function(loss)]
    given = cast(WithParameter, loss)
    return [given.name, parameter_of(given)]


def restored(value: Any) -> Loss:
    """Return the loss that `stored` made `value` of."""
    if isinstance(value, str):
        return cast(Loss, value)
    return MissingLoss(str(value[1])) if value[0] == "own" else CLASSES[value[0]](value[1])


def _set(loss: Any, field: str, *, above: float, below: float) -> None:
    value = getattr(loss, field)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{field}: expected a number, got {value!r}")
    if not above < float(value) < below:
        where = f"above {above:g}" if above >= 0.0 else "of at least 0"
        upper = "finite number" if below == math.inf else "number"
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{field}: expected a {upper} {where}{limit}, got {value!r}")
    object.__setattr__(loss, field, float(value))
