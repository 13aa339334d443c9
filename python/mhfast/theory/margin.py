"""The tangent-kernel margin, and the properties of a good initialization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import Gradients, norm, value_and_grad
from ..models import Classifier
from .hull import CertifiedMargin, is_separated, nearest_point, resolution
from .inputs import classifier, norms, settled
from .kernel import scaled_kernel
from .runs import over_runs


@dataclass(frozen=True, eq=False)
class TangentMargin(CertifiedMargin):
    """The largest margin γ of the tangent features, with its certificate.

    Attributes
    ----------
    margin : float
        γ = min_i y_i ⟨∇Φ(X_i), θ*⟩ of `direction`; 0 if the features are not separable.
    direction : Gradients
        θ* of norm sqrt(2).  If the features are not separable, the gradients of the hull point
        itself, which are zero up to rounding.
    dual : float
        sqrt(2) ‖Σ_i λ_i y_i ∇Φ(X_i)‖ with λ = `weights`: no direction of norm sqrt(2) has a larger
        margin.
    weights : float64 array (n,)
        Convex weights λ.  Those above zero belong to the support vectors; if the features are not
        separable they show that the origin lies in the convex hull of y_i ∇Φ(X_i).
    margins : float64 array (n,)
        y_i ⟨∇Φ(X_i), θ*⟩; zeros where the features are not separable, NaN for samples of weight 0.
    resolution : float
        A margin of this size is indistinguishable from 0, whatever the solver: see `ntk_margin`.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> tangent = mh.theory.ntk_margin(start, data)
    >>> tangent.separable, tangent.inseparable
    (True, False)
    >>> tangent.gap < 1e-8 * tangent.margin  # no direction does better by more
    True
    >>> round(float(mh.norm(tangent.direction)) ** 2, 6)
    2.0
    """

    margin: float
    direction: Gradients
    dual: float
    weights: Array
    margins: Array
    resolution: float


@over_runs
def ntk_margin(
    model: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
) -> TangentMargin:
    """Compute γ = max over ‖θ*‖ = sqrt(2) of min_i y_i ⟨∇Φ(X_i), θ*⟩.

    Parameters
    ----------
    model : Classifier
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset
    wrt : str or tuple of str, optional
        The parameters whose gradients count, as in `ntk`.

    Returns
    -------
    TangentMargin
        With a run axis in model or data every number is an array (R,) and arrays gain a leading R.

    Raises
    ------
    TypeError
        If the model is not a Classifier, or an array has the wrong kind or dtype.
    ValueError
        If a shape or a name in `wrt` does not fit, a number is not finite, or a
        label is neither -1 nor 1.

    Notes
    -----
    A sample of weight 0 is not a constraint; other weights do not matter.

    γ / sqrt(2) is the distance of the origin from the convex hull of y_i ∇Φ(X_i), whose nearest
    point `nearest_point` finds from the tangent kernel; everything is computed in float64.  The
    gap is typically 1e-12 of γ.  Rounding hides a distance below r times the longest gradient,
    r² = 10 (n + sqrt(P)) 2⁻⁵² for P parameters, r = 16 · 2⁻²³ if larger in float32.
    Features count as separable where a direction has a margin of twice that, and as inseparable
    where the hull point is shorter.

    Property P3 of the good initialization of Deora, Ghaderi, Taheri, Thrampoulidis, "On the
    Optimization and Generalization of Multi-head Attention" (TMLR 2024).

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> both, W = (mh.theory.ntk_margin(start, data, wrt=names) for names in (None, "W"))
    >>> both.margin > W.margin > 0
    True
    >>> twice = mh.Dataset(data.X[[0, 0]], [1, -1])  # one sample with both labels
    >>> mh.theory.ntk_margin(start, twice).inseparable
    True
    """
    dtype = classifier(model).dtype  # of the direction, so that it can be added to the model
    n = as_dataset(X, y).n
    model, data, counting = settled(model, as_dataset(X, y))
    labels = _labels(data, counting)
    K, unit = scaled_kernel(model, data, wrt=wrt)
    G = labels[:, None] * K * labels
    weights = nearest_point(G)
    # The linear loss -Σ λ_i y_i Φ(X_i) has minus the hull point for its gradient.
    combined = replace(data, y=labels, weight=weights)
    _, gradient = value_and_grad(model, combined, loss="linear", wrt=wrt)
    length = float(norm(gradient))
    products = G @ weights
    parameters = sum(x.size for x in arrays_of(gradient).values())
    least = resolution(data.n, parameters, float(np.finfo(dtype).eps))
    longest = math.ldexp(math.sqrt(G.diagonal().max()), unit)
    separable = is_separated(products, G, least)
    if separable:  # the products are in units of 4^unit
        margins = math.sqrt(2) * np.ldexp(products * (math.ldexp(1.0, unit) / length), unit)
    else:
        margins = np.zeros(data.n)
    direction = gradient * (-math.sqrt(2) / length) if separable else -gradient
    return TangentMargin(
        margin=float(margins.min()),
        direction=cast_to(dtype, direction),
        dual=math.sqrt(2) * length,
        weights=_at(counting, weights, n, 0.0),
        margins=_at(counting, margins, n, math.nan),
        resolution=math.sqrt(2) * least * longest,
    )


@dataclass(frozen=True, eq=False)
class GoodInitialization:
    """The three properties of a good initialization.

    Attributes
    ----------
    head_norm : float
        B2 = max_h ‖θ_h‖ (P1).
    output : float
        BΦ = max_i |Φ(X_i)| (P2).
    tangent : TangentMargin
        γ and a direction that attains it (P3).

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> good = mh.theory.good_initialization(start, data)
    >>> good.margin == good.tangent.margin > 0
    True
    """

    head_norm: float
    output: float
    tangent: TangentMargin

    @property
    def margin(self) -> float:
        """γ, 0 if the tangent features do not separate the data."""
        return self.tangent.margin


@over_runs
def good_initialization(
    model: Classifier, X: npt.ArrayLike | Dataset, y: npt.ArrayLike | None = None
) -> GoodInitialization:
    """Report how good an initialization `model` is for training on the data.

    A good initialization has small B2 and BΦ and a large γ: then every loss ε is reached at a
    distance of about sqrt(2) (2 BΦ + log(1/ε)) / γ, given enough heads (see `realizability`).

    Parameters
    ----------
    model : Classifier
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset

    Returns
    -------
    GoodInitialization
        Of the samples of positive weight.

    Raises
    ------
    TypeError
        If the model is not a Classifier, or an array has the wrong kind or dtype.
    ValueError
        If a shape does not fit, or run axes differ.

    References
    ----------
    Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
    Attention" (TMLR 2024).

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    >>> for H in (2, 32):  # neither norm nor margin grows with H if signs are balanced
    ...     start = mh.Classifier.random_step(data, heads=H, seed=0, balanced=True)
    ...     good = mh.theory.good_initialization(start, data)
    ...     print(round(good.head_norm, 4), round(good.margin, 4), good.output < 1e-12)
    0.1768 0.4478 True
    0.1768 0.4478 True
    """
    model, data, _ = settled(model, as_dataset(X, y))
    return GoodInitialization(
        head_norm=float(head_norms(list(model.parameters.values())).max()),
        output=float(np.abs(model(data)).max()),
        tangent=ntk_margin(model, data),
    )


def cast_to(dtype: np.dtype[Any], g: Gradients) -> Gradients:
    """Return gradients with all their arrays in `dtype`."""
    return Gradients(**{name: x.astype(dtype, copy=False) for name, x in arrays_of(g).items()})


def arrays_of(g: Gradients) -> dict[str, Array]:
    """Return the arrays that gradients have, by name."""
    named = {field.name: getattr(g, field.name) for field in fields(g)}
    return {name: x for name, x in named.items() if x is not None}


def head_norms(arrays: Sequence[Array]) -> Array:
    """Return the norm (H,) of every head over arrays (H, ...)."""
    together = np.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1)
    return norms(together, 1)


def _labels(data: Dataset, counting: npt.NDArray[np.int64]) -> Array:
    checks.shape(data.y, "y", "n", (data.n,))
    y: Array = data.y.astype(np.float64)
    wrong = np.flatnonzero(np.abs(y) != 1.0)
    if wrong.size:
        at = counting[wrong[0]]
        raise ValueError(f"y: expected -1 or 1, got {y[wrong[0]]} at index {at}")
    return y


def _at(places: npt.NDArray[np.int64], values: Array, n: int, elsewhere: float) -> Array:
    """Return n numbers that are `values` at `places`."""
    spread = np.full(n, elsewhere)
    spread[places] = values
    return spread
