"""Checks of samples, labels, weights and seeds by the conventions of scikit-learn."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_array, check_random_state

from ..._arguments import checks
from ..._arguments.values import Array
from ...dataset.dataset import Seed

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before scikit-learn 1.6 it is a method

    def validate_data(estimator: Any, X: Any, **settings: Any) -> Any:
        """Call the method of the estimator."""
        return estimator._validate_data(X, **settings)


def validated(estimator: Any, X: Any, dtype: np.dtype[Any], reset: bool, **y: Any) -> Any:
    """Return X, and y if it is given, as arrays validated by scikit-learn."""
    if not (reset or y) and _is_valid(estimator, X, dtype):
        return X
    ndim = X.ndim if hasattr(X, "ndim") else np.asarray(X).ndim
    return validate_data(
        estimator, X, **y, reset=reset, dtype=dtype, allow_nd=True, ensure_2d=ndim < 3
    )


def _is_valid(estimator: Any, X: Any, dtype: np.dtype[Any]) -> bool:
    """Whether scikit-learn would return X as it is, which it takes several small calls to find."""
    if type(X) is not np.ndarray or X.dtype != dtype or X.ndim < 2 or X.size == 0:
        return False
    if hasattr(estimator, "feature_names_in_"):
        return False  # of which it warns
    if X.ndim == 2 and X.shape[1] != estimator.n_features_in_:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(X.sum()))  # NaN and infinite numbers stay so in sums


def tokenized(X: Array, tokens: int | None, dim: int | None = None) -> Array:
    """Return X as (n, T, d)."""
    if X.ndim != 2:
        checks.shape(X, "X", "n T d", (None, tokens, dim))
        return X
    if tokens is None:
        raise ValueError(f"tokens: expected T for X of shape (n, T d) = {X.shape}, got None")
    if X.shape[1] % tokens:
        raise ValueError(
            f"X: expected a number of features divisible by tokens = {tokens}, got {X.shape[1]}"
        )
    return X.reshape(len(X), tokens, -1)


def with_constant(X: Array) -> Array:
    """Return X (n, T, d + 1) with a constant 1 after the features of each token."""
    return np.concatenate([X, np.ones((*X.shape[:-1], 1), X.dtype)], axis=-1)


def weights(sample_weight: npt.ArrayLike, samples: Array) -> Array:
    """Return weights (n,) of at least 0 that are not all zero."""
    weight: Array = check_array(
        sample_weight, ensure_2d=False, dtype=samples.dtype, input_name="sample_weight"
    )
    checks.shape(weight, "sample_weight", "n", (len(samples),))
    if weight.min() < 0 or not weight.any():
        raise ValueError(
            "sample_weight: expected numbers >= 0 that are not all zero, "
            f"got {weight.min()} to {weight.max()}"
        )
    return weight


def seed(random_state: Any) -> Seed:
    """Return an integer unchanged, otherwise draw one as scikit-learn does."""
    if isinstance(random_state, np.random.Generator):
        return random_state
    rng = check_random_state(random_state)
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(rng.randint(np.iinfo(np.int32).max))
