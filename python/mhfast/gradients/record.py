"""`Gradients`: arrays named after the parameters and inputs, with `dot` and `norm`."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import AXES
from .._arguments.runs import NO_RUNS, RunAxis
from .._arguments.values import Array, Optional, Value, describe, same_fields
from ..models import AnyModel, Model, Stack
from ..models.depth import with_arrays
from ..models.depth_parameters import by_layer, of_layer
from ..models.problem import CoreGradients

M = TypeVar("M", bound=AnyModel)


@dataclass(frozen=True, eq=False, repr=False)
class Gradients:
    """Arrays of the shapes of the parameters and inputs of a model, None if not requested.

    Gradients add, subtract, and scale by real numbers or by an array (R,) with one for each run;
    `model + s * gradients` is the updated model, in which parameters without a gradient are
    unchanged. An array without a run axis is shared by all runs; nothing else is broadcast and no
    dtype is promoted. ``gradients[r]`` are those of run r.

    Parameters
    ----------
    W : array (H, d, d) or None
    Q, K : arrays (H, d, r) or None
    U : array (H, q, d) or None
    V : array (H, d, p) or None
    A, B : arrays (H, d, r) and (H, r, p), or None
    prompt : array (q, d) or None
    embedding : array (V, d) or None, by that of `Tokens` or of a `Stack`
    X : array (n, T, d) or None
    query : array (n, q, d) or None
    layers : tuple of Gradients, one for each layer of a `Stack`, or None

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.1, seed=0)
    >>> loss, g = mh.value_and_grad(model, data)
    >>> g.W.shape, g.U.shape, g.prompt is None, g.runs
    ((3, 9, 9), (3, 5, 9), True, None)
    >>> mh.value_and_grad(model - 0.1 * g, data)[0] < loss
    True
    """

    W: Optional = None
    Q: Optional = None
    K: Optional = None
    U: Optional = None
    V: Optional = None
    A: Optional = None
    B: Optional = None
    prompt: Optional = None
    embedding: Optional = None
    X: Optional = None
    query: Optional = None
    layers: tuple[Gradients, ...] | Any = None  # None where there are none

    @classmethod
    def _of_core(cls, arrays: CoreGradients) -> Gradients:
        """Create an instance from arrays in the order of the fields, without calling __init__.

        The __init__ of a frozen dataclass takes as long as all checks of a small call.
        """
        made = object.__new__(cls)
        at = made.__dict__
        (
            at["W"], at["Q"], at["K"], at["U"], at["V"], at["A"], at["B"], at["prompt"],
            at["embedding"], at["X"], at["query"],
        ) = arrays  # fmt: skip
        return made

    # NumPy scalars and arrays then leave `factor * gradients` to __rmul__.
    __array_ufunc__: ClassVar[None] = None

    @property
    def runs(self) -> int | None:
        """The length R of the run axis, None if no array has one.

        Raises
        ------
        ValueError
            If arrays have run axes of different lengths.
        """
        return _runs(self).length or None

    def __getitem__(self, index: int | slice | npt.ArrayLike) -> Gradients:
        """Select a run by an integer, or runs by a slice, integers or a mask.

        Raises
        ------
        TypeError
            If there is no run axis.
        IndexError
            If the index is out of range, does not select along one axis or selects nothing.
        """
        if self.runs is None:
            raise TypeError("expected Gradients with a run axis, got some without")
        runs = checks.run_index(index, self.runs)
        return _changed(
            self, {name: x[runs] if x.ndim > _axes(name) else x for name, x in _fields(self)}
        )

    def __add__(self, other: Gradients) -> Gradients:
        return _pairwise(operator.add, self, other)

    def __sub__(self, other: Gradients) -> Gradients:
        return _pairwise(operator.sub, self, other)

    def __mul__(self, factor: Factor) -> Gradients:
        return _scaled(operator.mul, self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Factor) -> Gradients:
        return _scaled(operator.truediv, self, divisor)

    def __neg__(self) -> Gradients:
        return _scaled(operator.mul, self, -1.0)

    @overload
    def __radd__(self, other: M) -> M: ...
    @overload
    def __radd__(self, other: Literal[0]) -> Gradients: ...
    def __radd__(self, other: Any) -> Any:
        if type(other) is int and other == 0:
            return self  # sum() of gradients begins with it
        return _moved(operator.add, other, self)

    def __rsub__(self, model: M) -> M:
        return _moved(operator.sub, model, self)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    __repr__ = describe


Factor: TypeAlias = float | npt.NDArray[Any]
Vector: TypeAlias = Gradients | AnyModel


def dot(a: Vector, b: Vector) -> Value:
    """Compute the inner product Σ a b over all entries of two gradients (or models), in float64.

    Each side is rescaled by a power of two to entries below 1, so that sums of products that are
    in the range of float64 neither underflow nor overflow.

    Parameters
    ----------
    a, b : Gradients or model
        With the same arrays, of the same shapes and dtype except for a run axis. A model stands
        for its parameters.

    Returns
    -------
    float, or float64 array (R,)
        With a run axis, the product of each run.

    Raises
    ------
    TypeError
        If one is neither a Gradients nor a model, or their dtypes differ.
    ValueError
        If one has a field or a shape that the other has not.

    Examples
    --------
    >>> import mhfast as mh
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> ones = mh.Gradients(W=model.W + 1)
    >>> mh.dot(ones, ones)  # 3 · 9 · 9
    243.0
    """
    left, right = dict(_fields(a)), dict(_fields(b))
    _check_alike(left, right)
    runs = _runs(a).join(_runs(b)).length
    low, high = _exponent(left), _exponent(right)
    total = np.zeros(max(runs, 1))
    for name, x in left.items():
        products = _rescaled(name, x, low) * _rescaled(name, right[name], high)
        total += products.sum(axis=1)
    return _ldexp(total, low + high, runs)


def norm(g: Vector) -> Value:
    """Compute the Euclidean norm over all entries of gradients (or of a model), in float64.

    Accurate whenever the norm itself is a float64: entries are rescaled by a power of two, since a
    plain sum of squares underflows near 1e-160 and overflows near 1e154.

    Parameters
    ----------
    g : Gradients or model
        A model stands for its parameters.

    Returns
    -------
    float, or float64 array (R,)
        With a run axis, the norm of each run.

    Raises
    ------
    TypeError
        If `g` is neither a Gradients nor a model.

    Examples
    --------
    >>> import mhfast as mh
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> round(mh.norm(mh.Gradients(W=model.W + 1)), 3)  # of 3 · 9 · 9 ones
    15.588
    """
    runs, fields = _runs(g).length, dict(_fields(g))
    exponent = _exponent(fields)
    squares = np.zeros(max(runs, 1))
    for name, x in fields.items():
        squares += np.square(_rescaled(name, x, exponent)).sum(axis=1)
    return _ldexp(np.sqrt(squares), exponent, runs)


def _fields(g: Vector) -> Iterator[tuple[str, Array]]:
    """Yield the arrays by name; those of layer j of a stack are named "j.W", ..."""
    if isinstance(g, Model | Stack):
        yield from g.parameters.items()
    elif isinstance(g, Gradients):
        for j, part in enumerate(g.layers or ()):
            yield from ((f"{j}.{name}", array) for name, array in _fields(part))
        for name in AXES:
            array: Array | None = getattr(g, name)
            if array is not None:
                yield name, array
    else:
        raise TypeError(f"expected Gradients or a model, got {type(g).__name__}")


def _axes(name: str) -> int:
    return AXES[of_layer(name)[1]]


def _changed(g: Gradients, arrays: dict[str, Array]) -> Gradients:
    """Return gradients of the fields of `g` with other arrays."""
    of_layers = None
    if g.layers is not None:
        split = by_layer({name: array for name, array in arrays.items() if "." in name})
        of_layers = tuple(Gradients(**split.get(j, {})) for j in range(len(g.layers)))
    plain = {name: array for name, array in arrays.items() if "." not in name}
    return Gradients(**plain, layers=of_layers)


def _runs(g: Vector) -> RunAxis:
    runs = NO_RUNS
    for name, x in _fields(g):
        runs = runs.meet(name, x.shape, _axes(name))
    return runs


def _rows(name: str, x: Array) -> Array:
    """Return an array as one row of entries for each run, or a single row that all share."""
    return x.reshape(x.shape[0] if x.ndim > _axes(name) else 1, -1)


def _exponent(fields: dict[str, Array]) -> npt.NDArray[np.intc]:
    """Return for each run e with the largest entry in [2^(e-1), 2^e); 0 if zero or not finite."""
    largest = np.zeros(1)
    for name, x in fields.items():
        largest = np.maximum(largest, np.abs(_rows(name, x)).max(axis=1, initial=0.0))
    return np.frexp(np.where(np.isfinite(largest), largest, 0.0))[1]


def _rescaled(name: str, x: Array, exponent: npt.NDArray[np.intc]) -> npt.NDArray[np.float64]:
    return np.ldexp(_rows(name, x).astype(np.float64, copy=False), -exponent[:, None])


def _ldexp(x: npt.NDArray[np.float64], exponent: npt.NDArray[np.intc], runs: int) -> Value:
    with np.errstate(over="ignore"):
        result = np.ldexp(x, exponent)
    return result if runs else float(result[0])


def _pairwise(operation: Callable[[Array, Array], Array], a: Gradients, b: Gradients) -> Gradients:
    if not isinstance(b, Gradients):
        raise TypeError(f"expected Gradients to combine with Gradients, got {type(b).__name__}")
    left, right = dict(_fields(a)), dict(_fields(b))
    _check_alike(left, right)
    return _changed(a, {name: operation(x, right[name]) for name, x in left.items()})


def _scaled(operation: Callable[[Array, Any], Array], g: Gradients, factor: Factor) -> Gradients:
    if isinstance(factor, numbers.Real):
        # A Python float keeps float32 entries float32 whereas a NumPy scalar would promote them.
        number = float(factor)
        return _changed(g, {name: operation(x, number) for name, x in _fields(g)})
    if not isinstance(factor, np.ndarray) or factor.dtype.kind not in "iuf":
        raise TypeError(f"expected a real number to scale Gradients, got {type(factor).__name__}")
    if factor.ndim != 1:
        raise ValueError(f"expected one factor for each run, of shape (R,), got {factor.shape}")
    _runs(g).meet("factor", factor.shape, 0)
    return _changed(
        g,
        {
            name: operation(x, factor.astype(x.dtype).reshape(-1, *[1] * _axes(name)))
            for name, x in _fields(g)
        },
    )


def _moved(operation: Callable[[Array, Array], Array], model: M, g: Gradients) -> M:
    if not isinstance(model, Model | Stack):
        raise TypeError(f"expected a model to move by Gradients, got {type(model).__name__}")
    changes: dict[str, Array] = {}
    for name, x in _fields(g):
        parameter = model.parameters.get(name)
        if parameter is None:
            known = ", ".join(model.parameters)
            raise ValueError(f"{name}: expected gradients by parameters of the model, {known}")
        _check_entries(name, parameter, x)
        changes[name] = operation(parameter, x)
        changes[name].flags.writeable = False
    return with_arrays(model, changes)


def _check_alike(a: dict[str, Array], b: dict[str, Array]) -> None:
    for name in {**a, **b}:
        if (name in a) != (name in b):
            one = "first" if name in a else "second"
            raise ValueError(f"{name}: expected in both or in neither, got it in the {one} only")
        _check_entries(name, a[name], b[name])


def _check_entries(name: str, x: Array, y: Array) -> None:
    """Raise unless two arrays have the same dtype and, except for a run axis, the same shape."""
    if x.dtype != y.dtype:
        raise TypeError(f"{name}: expected one dtype, got {x.dtype} and {y.dtype}")
    if x.shape == y.shape:
        return
    axes = _axes(name)
    if x.ndim == y.ndim or x.shape[-axes:] != y.shape[-axes:]:
        raise ValueError(f"{name}: expected one shape, got {x.shape} and {y.shape}")
