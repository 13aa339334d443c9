"""The extreme eigenvalues of the Hessian of a loss, by Lanczos' method."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import mhfast

from .._arguments.losses import Loss
from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import Gradients
from ..models import Classifier, Stack
from .inputs import check_finite, double, settled
from .margin import cast_to
from .runs import over_runs

# Up to here a dense eigensolver on the columns is no slower than Lanczos' method, and exact.
DENSE = 48

# The default accuracy of an eigenvalue, relative to the width of the spectrum.
ACCURACY = 1e-10


class HessianExtremes(NamedTuple):
    """The two ends of the spectrum of a Hessian.

    Attributes
    ----------
    smallest, largest : float
        Eigenvalues.
    smallest_residual, largest_residual : float
        ‖∇²L v - λ v‖ of the unit eigenvector found: an eigenvalue lies within this of λ.
    smallest_vector, largest_vector : Gradients
        The unit eigenvectors, shaped like the parameters.
    products : int
        The number of Hessian-vector products used.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, seed=0)
    >>> model = mh.Classifier.gaussian(3, 5, 8, std=0.1, seed=0)
    >>> ends = mh.theory.hessian_extremes(model, data)
    >>> v = ends.largest_vector
    >>> bool(mh.norm(mh.hvp(model, data, tangent=v) - ends.largest * v) < 1e-8)
    True
    """

    smallest: float
    largest: float
    smallest_residual: float
    largest_residual: float
    smallest_vector: Gradients
    largest_vector: Gradients
    products: int


@over_runs
def hessian_extremes(
    model: Any,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    loss: Loss = "logistic",
    wrt: Any = None,
    tolerance: float | None = None,
    num_threads: int | None = None,
) -> HessianExtremes:
    """Compute the smallest and the largest eigenvalue of the Hessian of the loss.

    Parameters
    ----------
    model : Classifier or Layer
        One run or several; the results of several gain a leading R.
    X : array (n, T, d) or Dataset
    y : array (n,)
        As in `mhfast.value_and_grad`, and None with a Dataset.
    loss, wrt, num_threads
        As in `mhfast.value_and_grad`.
    tolerance : float, optional
        Accuracy of an eigenvalue relative to the width of the spectrum: 1e-10 by default.

    Returns
    -------
    HessianExtremes

    Raises
    ------
    scipy.sparse.linalg.ArpackNoConvergence
        The tolerance is not reached.
    TypeError, ValueError
        If an argument does not fit, as in `mhfast.value_and_grad`; a ValueError, too, if a number
        of the model, of a sample that counts or of the Hessian is not finite.

    Notes
    -----
    Where a loss has no second derivative, that of `mhfast.hvp` is used: of "hinge" and
    "quantile" the Hessian is that between their kinks.

    Everything is computed in float64, for arrays of float32 as well; the vectors are of the model's
    dtype.

    SciPy's implicitly restarted Lanczos method on `mhfast.hvp`, from a fixed start: largest
    modulus first, then the other end of the spectrum shifted by it, so that an eigenvalue near zero
    is found as fast as any other.  Up to 48 parameters the Hessian is formed column by column.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(30, 5, 8, seed=0)
    >>> model = mh.Classifier.gaussian(3, 5, 8, std=0.1, seed=0)
    >>> ends = mh.theory.hessian_extremes(model, data)
    >>> ends.smallest < 0 < ends.largest  # the loss is not convex
    True
    >>> mh.theory.hessian_extremes(model, data, wrt="U").smallest > -1e-12  # but in U alone it is
    True
    """
    if isinstance(model, Stack):
        raise TypeError("model: expected a Classifier or a Layer, got Stack")
    data = as_dataset(X, y)
    _, own = mhfast.value_and_grad(
        model, data, loss=loss, wrt=wrt, num_threads=num_threads
    )  # checks the arguments, and shows which arrays a vector consists of
    if isinstance(model, Classifier):
        model, data, _ = settled(model, data)
    else:
        model, data = double(model), double(data)
        check_finite(model, data)
    shape = cast_to(np.dtype(np.float64), own)

    def product(v: Array) -> Array:
        tangent = unflatten(v, shape)
        return flatten(
            mhfast.hvp(model, data, tangent=tangent, loss=loss, wrt=wrt, num_threads=num_threads)
        )

    ends = _extremes(product, shape, ACCURACY if tolerance is None else tolerance)
    vectors = (ends.smallest_vector, ends.largest_vector)
    bottom, top = (cast_to(_dtype(own), vector) for vector in vectors)
    return ends._replace(smallest_vector=bottom, largest_vector=top)


def _extremes(
    product: Callable[[Array], Array], shape: Gradients, tolerance: float
) -> HessianExtremes:
    P = flatten(shape).size
    count, unit = 0, 1.0

    def apply(v: npt.NDArray[Any]) -> Array:
        nonlocal count
        count += 1
        return product(np.ravel(v)) / unit

    start = np.random.default_rng(0).standard_normal(P)
    start /= np.linalg.norm(start)
    # In units of its own size a Hessian of 1e-200 does not underflow in squared norms.
    unit = float(np.abs(apply(start)).max()) or 1.0
    if not math.isfinite(unit):
        raise ValueError(
            "X: expected a Hessian of finite numbers, got NaN or inf: tokens, parameters or "
            "targets are too large"
        )
    pairs: list[tuple[float, Array]]
    if not apply(start).any():  # a random vector is mapped to zero by the zero matrix only
        pairs = [(0.0, start), (0.0, start)]
    elif P <= DENSE:
        columns = np.column_stack([apply(e) for e in np.eye(P)])
        values, vectors = np.linalg.eigh((columns + columns.T) / 2)
        pairs = [(values[0], vectors[:, 0]), (values[-1], vectors[:, -1])]
    else:
        pairs = _lanczos(apply, P, start, tolerance)
    residuals = [float(np.linalg.norm(apply(v) - value * v)) for value, v in pairs]
    (smallest, bottom), (largest, top) = pairs
    return HessianExtremes(
        float(smallest) * unit, float(largest) * unit, residuals[0] * unit, residuals[1] * unit,
        unflatten(bottom, shape), unflatten(top, shape), count,
    )  # fmt: skip


def _lanczos(
    apply: Callable[[npt.NDArray[Any]], Array], P: int, start: Array, tolerance: float
) -> list[tuple[float, Array]]:
    """Return the smallest and the largest eigenpair."""
    from scipy.sparse.linalg import LinearOperator, eigsh  # takes as long to import as mhfast

    ends = []
    shift = 0.0
    for _ in range(2):
        operator = LinearOperator(
            (P, P), matvec=lambda v, c=shift: apply(v) - c * np.ravel(v), dtype=np.float64
        )
        values, vectors = eigsh(
            operator, k=1, which="LM", v0=start, tol=tolerance, ncv=min(P, 40), maxiter=100 * P
        )
        ends.append((float(values[0]) + shift, vectors[:, 0]))
        shift = ends[0][0]
    return sorted(ends, key=lambda pair: pair[0])


def flatten(g: Gradients) -> Array:
    """Return the entries of gradients as one float64 vector."""
    return np.concatenate([np.ravel(x).astype(np.float64, copy=False) for _, x in _arrays(g)])


def unflatten(v: Array, shape: Gradients) -> Gradients:
    """Return the vector as gradients of the shapes and the dtype of `shape`."""
    parts, at = {}, 0
    for name, x in _arrays(shape):
        parts[name] = v[at : at + x.size].reshape(x.shape).astype(x.dtype)
        at += x.size
    return Gradients(**parts)


def _arrays(g: Gradients) -> list[tuple[str, Array]]:
    named = ((field.name, getattr(g, field.name)) for field in fields(g))
    return [(name, x) for name, x in named if x is not None]


def _dtype(g: Gradients) -> np.dtype[Any]:
    return _arrays(g)[0][1].dtype
