"""Starting points of training that depend on the data."""

from __future__ import annotations

import numpy as np

from . import _checks
from .data.streams import START, settled, signs, stream
from .dataset import Dataset, Seed
from .models import Classifier


def random_step(
    data: Dataset, heads: int, seed: Seed, *, query: int | None = None, scale: float = 1.0
) -> Classifier:
    """Return the classifier one gradient step of random sign per head away from zero.

        W_h = 0,   U_h = α_h / 2 · 1_q (Σ_i w_i y_i x̄_i / Σ w)ᵀ

    x̄_i (d,) is the mean token of sample i, α_h independent fair signs.  This is a step of size
    sqrt(H) of the logistic loss from zero, with its sign drawn anew for each head, so that
    outputs do not grow with H.

    Parameters
    ----------
    data : Dataset
        X (n,T,d), y (n,) of -1 and 1, weights w or None for ones.
    heads : int
        H.
    seed : int or numpy.random.Generator
    query, scale
        As for `Classifier`.  U has as many rows as the query side of data and model.

    Returns
    -------
    Classifier
        W (H,d,d) and U (H,q,d) of the dtype of the data.

    Raises
    ------
    TypeError
        `data` is not a Dataset, or the seed is neither one integer nor a generator.
    ValueError
        A label is neither -1 nor 1.

    References
    ----------
    The randomised initialization of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization
    and Generalization of Multi-head Attention", TMLR 2024.
    """
    if not isinstance(data, Dataset):
        raise TypeError(f"data: expected a Dataset, got {type(data).__name__}")
    heads = _checks.count(heads, "heads")
    y = data.y.astype(np.float64)
    wrong = np.flatnonzero(np.abs(y) != 1.0)
    if wrong.size:
        raise ValueError(f"y: expected -1 or 1, got {y[wrong[0]]} at index {wrong[0]}")
    weight = np.ones(data.n) if data.weight is None else data.weight.astype(np.float64)
    means = data.X.mean(axis=1, dtype=np.float64)
    step = ((weight * y)[:, None] * means).sum(axis=0) / weight.sum()
    alpha = signs(stream(settled(seed), START), heads)
    q = data.tokens if query is None else 1
    if data.query is not None:
        q = data.query.shape[1]
    U = np.broadcast_to(0.5 * alpha[:, None, None] * step, (heads, q, data.dim))
    W = np.zeros((heads, data.dim, data.dim))
    return Classifier(W.astype(data.dtype), U.astype(data.dtype), query, scale=scale)
