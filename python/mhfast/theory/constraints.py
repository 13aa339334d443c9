"""The constraints that make the best tokens win, from a data set and the tokens named."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .._arguments import checks, sample_checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from .inputs import check_finite, double, exponent, in_units


@dataclass(frozen=True, eq=False)
class TokenConstraints:
    """Constraints zᵀ W (x_best - x_t) ≥ 1, one for each rival, in units of tokens and queries.

    Attributes
    ----------
    left : array (N, d) or None
        The query row z of each constraint, divided by 2^`z`; None for a prompt.
    right : array (N, d)
        x_best - x_t divided by 2^`x`; for a prompt multiplied by W, divided by 2^`z`.
    rivals : bool array (n, q, T)
        Where the constraints stand; N of them are true.
    size : float
        The length of what `right` is a difference of.
    eps : float
        The precision of the data's dtype.
    x, z : int
        The units.
    """

    left: Array | None
    right: Array
    rivals: npt.NDArray[np.bool_]
    size: float
    eps: float
    x: int
    z: int

    def spread(self, values: Array, elsewhere: float = 0.0) -> Array:
        """Return values (N,) of the constraints as an array (n, q, T)."""
        spread = np.full(self.rivals.shape, elsewhere)
        spread[self.rivals] = values
        return spread


def problems_of_runs(data: Dataset, best: npt.ArrayLike) -> list[tuple[Dataset, npt.ArrayLike]]:
    """Return the data of each run with its best tokens, which all runs may share."""
    assert data.runs is not None
    own = np.shape(best)[:2] == (data.runs, data.n)
    parts: list[npt.ArrayLike] = list(np.asarray(best)) if own else [best] * data.runs
    return [(data.run(r), part) for r, part in enumerate(parts)]


def token_constraints(
    data: Dataset,
    best: npt.ArrayLike,
    *,
    wrt: str,
    query: int | None,
    W: npt.ArrayLike | None,
    causal: bool,
) -> TokenConstraints:
    """Return the constraints of `token_svm`, whose arguments these are, for data without runs.

    Raises
    ------
    TypeError
        `best` does not hold integers.
    ValueError
        A shape or a value does not fit.
    """
    if wrt not in ("W", "prompt"):
        raise ValueError(f"wrt: expected 'W' or 'prompt', got {wrt!r}")
    eps = float(np.finfo(data.dtype).eps)
    data = double(data)
    check_finite(None, data)
    # What is not finite belongs to samples that do not count.
    data = replace(data, X=zeroed(data.X), query=None if data.query is None else zeroed(data.query))
    n, _, d = data.X.shape
    x, z = exponent(data.X), 0
    X = in_units(data.X, x)
    fixed: Array = np.eye(d)
    if wrt == "prompt":
        if causal:
            raise ValueError("causal: expected False for a prompt, which has no position, got True")
        fixed = fixed if W is None else np.asarray(W, dtype=np.float64)
        checks.shape(fixed, "W", "d d", (d, d))
        if not np.isfinite(fixed).all():
            raise ValueError("W: expected finite numbers, got NaN or inf")
        z = exponent(fixed)
        fixed = in_units(fixed, z)
        Z: Array = np.zeros((n, 1, d))  # one row for all samples, whose value is optimized
        seen = visible(data, 1)
    elif W is not None:
        raise ValueError("W: expected None unless wrt is 'prompt', got an array")
    else:
        Z, seen = queries(data, query, causal)
        z = exponent(Z)
        Z = in_units(Z, z)
    index = best_tokens(best, seen)
    apart = X[np.arange(n)[:, None], index][:, :, None] - X[:, None]  # (n, q, T, d)
    largest = np.abs(X).max(axis=(1, 2))[:, None, None]
    rivals = seen & (np.abs(apart).max(axis=-1) > 4 * eps * largest)
    if not rivals.any():
        raise ValueError("data: expected two different tokens in a sample, got copies only")
    right = apart[rivals]
    size = float(np.linalg.norm(X, axis=2).max())
    if wrt == "prompt":
        size *= float(np.linalg.norm(fixed))
        return TokenConstraints(None, right @ fixed.T, rivals, size, eps, x, z)
    left = np.broadcast_to(Z[:, :, None], apart.shape)[rivals]
    return TokenConstraints(left, right, rivals, size, eps, x, z)


def zeroed(array: Array) -> Array:
    """Return the array with zeros for what is not finite."""
    return np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0)


def visible(data: Dataset, q: int) -> npt.NDArray[np.bool_]:
    """Return which tokens (n, q, T) the rows of samples that count see.

    Raises
    ------
    ValueError
        The shape of the weights does not fit.
    """
    n, T, _ = data.X.shape
    lengths = np.full(n, T) if data.lengths is None else data.lengths
    seen = np.arange(T) < lengths[:, None, None]
    seen = np.repeat(seen, q, axis=1)
    if data.weight is not None:
        weight = data.weight if data.weight.ndim == 2 else data.weight[:, None]
        if weight.shape[1] not in (1, q):
            raise ValueError(f"weight: expected shape (n,) or (n, {q}), got {data.weight.shape}")
        seen = seen & (weight > 0)[:, :, None]
    return seen


def queries(data: Dataset, query: int | None, causal: bool) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return the query rows Z (n, q, d) and the tokens (n, q, T) that each sees.

    Raises
    ------
    ValueError
        A sample that counts lacks the query token.
    """
    n, T, _ = data.X.shape
    before = np.arange(T)[None, None]
    if data.query is not None:
        Z = data.query
    elif query is None:
        Z = data.X
    else:
        token, prefix = sample_checks.token(checks.integer(query, "query"), T, data.lengths)
        Z, seen = sample_checks.picked(data.X, token), visible(data, 1)
        lacking = (np.broadcast_to(token, n) < 0) & seen.any(axis=(1, 2))
        if lacking.any():
            raise ValueError(
                f"query: expected a token that every sample has, got {query}, "
                f"which sample {int(np.argmax(lacking))} is too short for"
            )
        return Z, seen & (before < np.reshape(prefix, (-1, 1, 1))) if causal else seen
    seen = visible(data, Z.shape[1])
    if data.query is None and data.lengths is not None:  # rows beyond ask nothing
        seen = seen & (np.arange(T) < data.lengths[:, None])[:, :, None]
    if causal:
        seen = seen & (before <= np.arange(Z.shape[1])[None, :, None])
    return Z, seen


def best_tokens(best: npt.ArrayLike, seen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the best tokens (n, q) of rows that see the tokens `seen`; 0 in rows that see none.

    Raises
    ------
    TypeError
        They are not integers.
    ValueError
        The shape does not fit, or a row does not see its best token.
    """
    n, q, T = seen.shape
    index = np.asarray(best)
    if index.dtype.kind not in "iu":
        raise TypeError(f"best: expected integers, got dtype {index.dtype.name}")
    if index.shape == (n,) and q == 1:
        index = index[:, None]
    checks.shape(index, "best", "n q", (n, q))
    asked = seen.any(axis=-1)
    index = np.where(asked, index, 0)
    if index.min() < 0 or index.max() >= T:
        raise ValueError(f"best: expected tokens in [0, {T}), got {index.min()} to {index.max()}")
    index = index.astype(np.int64)
    hidden = asked & ~np.take_along_axis(seen, index[:, :, None], axis=-1)[:, :, 0]
    if hidden.any():
        i, row = np.argwhere(hidden)[0].tolist()
        raise ValueError(
            f"best: expected a token that the row sees, got {index[i, row]} at index {i}, {row}"
        )
    return index
