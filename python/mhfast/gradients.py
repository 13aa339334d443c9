"""`Gradients` and how to get them: `value_and_grad`, with `dot` and `norm`."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _checks, _core, config
from ._checks import PARAMETERS, Wrt
from ._values import Array, describe, same_fields
from .dataset import Dataset, no_second_source
from .models import Classifier


@dataclass(frozen=True, eq=False, repr=False)
class Gradients:
    """Arrays shaped like the parameters of a model, None where nothing was asked for.

    Gradients add, subtract, and scale by real numbers; `model + s * gradients` is the moved model,
    whose parameters without a gradient stay. Nothing is broadcast and no dtype is promoted.

    Parameters
    ----------
    W : array (H, d, d) or None
    U : array (H, q, d) or None
    """

    W: Array | None = None
    U: Array | None = None

    # NumPy scalars then leave `scalar * gradients` to __rmul__.
    __array_ufunc__: ClassVar[None] = None

    def __add__(self, other: Gradients) -> Gradients:
        return _pairwise(operator.add, self, other)

    def __sub__(self, other: Gradients) -> Gradients:
        return _pairwise(operator.sub, self, other)

    def __mul__(self, factor: float) -> Gradients:
        return _scaled(operator.mul, self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Gradients:
        return _scaled(operator.truediv, self, divisor)

    def __neg__(self) -> Gradients:
        return _scaled(operator.mul, self, -1.0)

    def __radd__(self, model: Classifier) -> Classifier:
        return _moved(operator.add, model, self)

    def __rsub__(self, model: Classifier) -> Classifier:
        return _moved(operator.sub, model, self)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __repr__ = describe


Vector: TypeAlias = Gradients | Classifier


def value_and_grad(
    model: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    loss: str = "logistic",
    wrt: Wrt = None,
    query: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
    num_threads: int | None = None,
) -> tuple[float, Gradients]:
    """Compute the loss L = Σ_i w_i ℓ(Φ(X_i), y_i) / Σ_i w_i and its gradients.

    Gradients keep full relative accuracy when attention saturates, and are bitwise equal for every
    number of threads.

    Parameters
    ----------
    model : Classifier
    X : array (n, T, d) of the model's dtype, or Dataset
        With a Dataset, y, query and weight are its own.
    y : array (n,)
        Labels -1 and 1 of any real dtype. For "squared", real targets of the model's dtype.
    loss : str
        "logistic" log(1 + exp(-yΦ)), "exponential" exp(-yΦ), "linear" -yΦ, or "squared" (Φ - y)².
    wrt : str or tuple of str, optional
        The parameters to differentiate by, among W and U; None means both.
    query : array (n, q, d), optional
        An external query, in place of the model's own.
    weight : array (n,), optional
        The weights w, finite and >= 0; None means ones.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    value : float
    gradients : Gradients
        Arrays of the model's dtype.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape or a value does not fit.
    """
    if not isinstance(model, Classifier):
        raise TypeError(f"model: expected a Classifier, got {type(model).__name__}")
    if isinstance(X, Dataset):
        no_second_source(y, query, weight)
        data = X
        X, Z = _checks.inputs(model, data.X, data.query)
        y, w = data.y, data.weight
    else:
        X, Z = _checks.inputs(model, X, query)
        w = None if weight is None else _checks.weights(weight, X.shape[0], X.dtype)
    if loss not in _checks.LOSSES:
        _checks.loss(loss)
    if y is None:
        raise TypeError("y: expected labels beside the array X, got None")
    targets = _checks.targets(y, X.shape[0], X.dtype, loss)
    by_W, by_U = (True, True) if wrt is None else _checks.wrt(wrt)
    value, W, U = _core.value_and_grad(
        X, Z, targets, w, model.W, model.U, model.scale, loss, by_W, by_U,
        config.threads(num_threads),
    )  # fmt: skip
    return value, Gradients(W, U)


def dot(a: Vector, b: Vector) -> float:
    """Compute the inner product Σ a b over all entries of two gradients (or models), in float64.

    Each side is rescaled by a power of two to entries below 1, so that sums of products that are
    in the range of float64 do not under- or overflow on the way.

    Raises
    ------
    ValueError
        If one has a field or a shape that the other has not.
    """
    low, high = _exponent(a), _exponent(b)
    _check_alike(a, b)
    total = 0.0
    for name, x in _fields(a):
        y = getattr(b, name)
        total += float(np.vdot(_rescaled(x, low), _rescaled(y, high)))
    return _ldexp(total, low + high)


def norm(g: Vector) -> float:
    """Compute the Euclidean norm over all entries of gradients (or of a model), in float64.

    Right wherever the norm itself is a float64: entries are rescaled by a power of two, since a
    plain sum of squares underflows near 1e-160 and overflows near 1e154.
    """
    exponent = _exponent(g)
    squares = (np.square(_rescaled(x, exponent)).sum() for _, x in _fields(g))
    return _ldexp(math.sqrt(sum(squares)), exponent)


def _fields(g: Vector) -> Iterator[tuple[str, Array]]:
    if not isinstance(g, Gradients | Classifier):
        raise TypeError(f"expected Gradients or a model, got {type(g).__name__}")
    for name in PARAMETERS:
        array: Array | None = getattr(g, name)
        if array is not None:
            yield name, array


def _exponent(g: Vector) -> int:
    """Return e with the largest entry in [2^(e-1), 2^e); 0 if it is zero or not finite."""
    largest = max((float(np.abs(x).max(initial=0.0)) for _, x in _fields(g)), default=0.0)
    return math.frexp(largest)[1] if math.isfinite(largest) else 0


def _rescaled(x: Array, exponent: int) -> Array:
    return np.ldexp(x.astype(np.float64, copy=False), -exponent)


def _ldexp(x: float, exponent: int) -> float:
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.copysign(math.inf, x)


def _pairwise(operation: Callable[[Array, Array], Array], a: Gradients, b: Gradients) -> Gradients:
    if not isinstance(b, Gradients):
        raise TypeError(f"expected Gradients to combine with Gradients, got {type(b).__name__}")
    _check_alike(a, b)
    return Gradients(**{name: operation(x, getattr(b, name)) for name, x in _fields(a)})


def _scaled(operation: Callable[[Array, float], Array], g: Gradients, factor: float) -> Gradients:
    if not isinstance(factor, numbers.Real):
        raise TypeError(f"expected a real number to scale Gradients, got {type(factor).__name__}")
    # A Python float keeps float32 entries float32 where a NumPy scalar would promote them.
    number = float(factor)
    return Gradients(**{name: operation(x, number) for name, x in _fields(g)})


def _moved(
    operation: Callable[[Array, Array], Array], model: Classifier, g: Gradients
) -> Classifier:
    if not isinstance(model, Classifier):
        raise TypeError(f"expected a model to move by Gradients, got {type(model).__name__}")
    changes: dict[str, Any] = {}
    for name, x in _fields(g):
        parameter = getattr(model, name)
        _check_entries(name, parameter, x)
        changes[name] = operation(parameter, x)
        changes[name].flags.writeable = False
    return dataclasses.replace(model, **changes)


def _check_alike(a: Vector, b: Vector) -> None:
    for name in PARAMETERS:
        x, y = getattr(a, name), getattr(b, name)
        if (x is None) != (y is None):
            raise ValueError(f"{name}: expected in both or in neither, got it in one only")
        if x is not None:
            _check_entries(name, x, y)


def _check_entries(name: str, x: Array, y: Array) -> None:
    if x.dtype != y.dtype:
        raise TypeError(f"{name}: expected one dtype, got {x.dtype} and {y.dtype}")
    if x.shape != y.shape:
        raise ValueError(f"{name}: expected one shape, got {x.shape} and {y.shape}")
