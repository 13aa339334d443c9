"""The models as estimators of scikit-learn: a classifier and a regressor of sets of tokens.

Both train a `mhfast.Classifier` with `mhfast.train`, on all samples at once. Several classes or
several outputs are runs side by side in one call.
"""

from __future__ import annotations

import warnings
from typing import Any

try:
    from sklearn.base import BaseEstimator as BaseEstimator
except ImportError as error:
    raise ImportError(
        "mhfast.interop.sklearn needs scikit-learn: pip install scikit-learn"
    ) from error

from .classifier import MultiHeadClassifier
from .regressor import MultiHeadRegressor

__all__ = ["MultiHeadClassifier", "MultiHeadRegressor"]


def __getattr__(name: str) -> Any:
    if name == "MultiHeadAttentionClassifier":
        warnings.warn(
            "mhfast.interop.sklearn.MultiHeadAttentionClassifier is now called "
            "MultiHeadClassifier; the old name ends with version 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return MultiHeadClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
