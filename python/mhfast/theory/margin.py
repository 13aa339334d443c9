"""The tangent-kernel margin, and the report of a good initialization that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..gradients import Gradients, norm, value_and_grad
from ..models import Classifier
from .hull import is_positive, nearest_point
from .kernel import ntk
from .runs import over_runs
from .sides import classifier, in_double


@dataclass(frozen=True, eq=False)
class TangentMargin:
    """The largest margin γ of the tangent features, with what proves it.

    Attributes
    ----------
    margin : float
        γ = min_i y_i ⟨∇Φ(X_i), θ*⟩ of `direction`; 0 if the features are not separable.
    direction : Gradients
        θ* of norm sqrt(2).  Where the features are not separable, the gradients of the hull point
        itself: zero up to rounding.
    dual : float
        sqrt(2) ‖Σ_i λ_i y_i ∇Φ(X_i)‖ with λ = `weights`: no direction of norm sqrt(2) has a larger
        margin.
    weights : float64 array (n,)
        Convex weights λ.  Those above zero belong to the support vectors; where the features are
        not separable they put the origin into the convex hull of y_i ∇Φ(X_i).
    margins : float64 array (n,)
        y_i ⟨∇Φ(X_i), θ*⟩; zeros where the features are not separable.
    """

    margin: float
    direction: Gradients
    dual: float
    weights: Array
    margins: Array

    @property
    def gap(self) -> float:
        """The primal-dual gap `dual` - `margin`: by how much γ may be larger than `margin`."""
        return self.dual - self.margin

    @property
    def separable(self) -> bool:
        """Whether `direction` separates; if not, `weights` are the certificate."""
        return self.margin > 0.0


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
        If a shape or a name in `wrt` does not fit, or a label is neither -1 nor 1.

    Notes
    -----
    γ / sqrt(2) is the distance of the origin from the convex hull of y_i ∇Φ(X_i), whose nearest
    point `nearest_point` finds from the tangent kernel; everything is computed in float64.  The
    gap is typically 1e-12 of γ.  Features count as not separable where that distance is below
    rounding, sqrt(10 n · 2⁻⁵²) of the longest gradient.

    Property P3 of the good initialization of Deora, Ghaderi, Taheri, Thrampoulidis, "On the
    Optimization and Generalization of Multi-head Attention" (TMLR 2024).
    """
    dtype = classifier(model).dtype  # of the direction, so that it can be added to the model
    model, data = in_double(model, as_dataset(X, y))
    labels = _labels(data)
    G = labels[:, None] * ntk(model, data, wrt=wrt) * labels
    weights = nearest_point(G)
    # The linear loss -Σ λ_i y_i Φ(X_i) has minus the hull point for its gradient.
    combined = replace(data, y=labels, weight=weights)
    _, gradient = value_and_grad(model, combined, loss="linear", wrt=wrt)
    length = norm(gradient)
    products = G @ weights
    if not is_positive(products, G):
        dual, margins = math.sqrt(2) * length, np.zeros(data.n)
        return TangentMargin(0.0, cast_to(dtype, -gradient), dual, weights, margins)
    margins = math.sqrt(2) / length * products
    return TangentMargin(
        float(margins.min()),
        cast_to(dtype, gradient * (-math.sqrt(2) / length)),
        math.sqrt(2) * length,
        weights,
        margins,
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
    """Report how good a start `model` is for training on the data.

    Good means small B2, BΦ and large γ: then every loss ε is reached at a distance of about
    sqrt(2) (2 BΦ + log(1/ε)) / γ, given enough heads (see `realizability`).

    Parameters
    ----------
    model : Classifier
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array (n,) of -1 and 1, None with a Dataset

    Returns
    -------
    GoodInitialization

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
    """
    model, data = in_double(classifier(model), as_dataset(X, y))
    return GoodInitialization(
        head_norm=float(head_norms(list(model.parameters.values())).max()),
        output=float(np.abs(model(data)).max()),
        tangent=ntk_margin(model, data),
    )


def cast_to(dtype: np.dtype[Any], g: Gradients) -> Gradients:
    """Return gradients with all their arrays in `dtype`."""
    arrays = {name: getattr(g, name) for name in (field.name for field in fields(g))}
    return Gradients(
        **{name: x.astype(dtype, copy=False) for name, x in arrays.items() if x is not None}
    )


def head_norms(arrays: Sequence[Array]) -> Array:
    """Return the norm (H,) of every head over arrays (H, ...)."""
    norms: Array = np.sqrt(sum((a**2).reshape(len(a), -1).sum(axis=1) for a in arrays))
    return norms


def _labels(data: Dataset) -> Array:
    y: Array = data.y.astype(np.float64)
    wrong = np.flatnonzero(np.abs(y) != 1.0)
    if wrong.size:
        raise ValueError(f"y: expected -1 or 1, got {y[wrong[0]]} at index {wrong[0]}")
    return y
