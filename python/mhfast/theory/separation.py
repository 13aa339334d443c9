"""The token-separation support vector machine, the limit that implicit-bias theory predicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from .._arguments import checks, sample_checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..gradients import Gradients
from .hull import is_separated, nearest_point, resolution
from .inputs import check_finite, double, exponent, in_units
from .runs import stacked


@dataclass(frozen=True, eq=False)
class TokenSVM:
    """The least-norm parameters with which the best tokens win by a margin of 1.

    Attributes
    ----------
    direction : Gradients
        W (1, d, d), or prompt (1, d), for the `directions` of `mhfast.train`.  If the tokens are
        not separable, the hull point itself, which is zero up to rounding.
    margin : float
        1/‖direction‖, the margin of the unit direction; 0 if the tokens are not separable.
    dual : float
        Norm of the hull point: no unit direction has a larger margin.
    weights : float64 array (n, q, T)
        Convex weights of the constraints, 0 where there is none, as at the best tokens.
    resolution : float
        A margin of this size cannot be told from 0: see `token_svm`.
    """

    direction: Gradients
    margin: float
    dual: float
    weights: Array
    resolution: float

    @property
    def gap(self) -> float:
        """The primal-dual gap `dual` - `margin`."""
        return self.dual - self.margin

    @property
    def separable(self) -> bool:
        """Whether `direction` separates, by more than rounding could feign."""
        return self.margin > 0.0

    @property
    def inseparable(self) -> bool:
        """Whether `weights` put the origin into the hull of the constraints up to rounding.

        Neither this nor `separable` where the margin is within a factor of two of `resolution`.
        """
        return self.dual <= self.resolution


def token_svm(
    data: Dataset,
    best: npt.ArrayLike,
    *,
    wrt: str = "W",
    norm: str = "fro",
    query: int | None = None,
    W: npt.ArrayLike | None = None,
    causal: bool = False,
) -> TokenSVM:
    """Find the least-norm parameters that separate the best token of each query row from others.

        minimise ‖W‖_F   subject to   zᵀ W (x_best - x_t) ≥ 1   for all rows z, all x_t ≠ x_best.

    Parameters
    ----------
    data : Dataset
        X (n, T, d); labels play no role.  Tokens beyond `lengths` are neither rivals nor queries,
        and samples (or rows) of weight 0 are no constraints; other weights do not matter.  With a
        run axis, R problems are solved; numbers of the result become arrays (R,), and arrays gain a
        leading R.
    best : integers (n,) or (n, q), with a leading R for each run its own
        The token that each query row is to select, among those that it sees.  Its copies, which
        get the same weight from any W, are no rivals; a copy may differ by 4 units in the last
        place of the largest number of the sample.  What stands in rows that are no constraints
        does not matter.
    wrt : {"W", "prompt"}
        What to optimize: W (d, d), or one prompt z (d,) for all samples with a fixed `W`.
    norm : {"fro"}
        The Frobenius norm, to which a dense W converges.
    query : int, optional
        The query token of each sample, as in `Classifier`; a query of the data set overrides it.
        None: every token is a query.
    W : array (d, d), optional
        For wrt="prompt"; the identity by default.
    causal : bool
        Whether row t sees the tokens up to its own only, as in `Classifier`; not for a prompt.

    Returns
    -------
    TokenSVM

    Raises
    ------
    ValueError
        A shape or a value does not fit.  In particular the nuclear norm, to which factored W
        converges, is not supported: it needs a semidefinite program, for which SciPy has no solver.

    Notes
    -----
    Solved from the inner products of up to N = n q (T-1) constraints, by `nearest_point`; a float64
    array (N, N) must fit in memory.  Tokens and queries enter in units of their own size.

    Rounding hides a margin below r times the longest constraint, r² = 10 (N + d) 2⁻⁵² c, where c is
    by how much the longest difference x_best - x_t is shorter than the longest token; in float32
    that is at least 16 · 2⁻²³ c.  Tokens count
    as separable where W has a margin of twice that, and as inseparable where the hull point is
    shorter.

    References
    ----------
    Tarzanagh, Li, Thrampoulidis, Oymak, "Transformers as Support Vector Machines" (2023), and
    Vasudeva, Deora, Thrampoulidis, "Implicit Bias and Fast Convergence Rates for Self-attention"
    (2024).
    """
    if wrt not in ("W", "prompt"):
        raise ValueError(f"wrt: expected 'W' or 'prompt', got {wrt!r}")
    if norm != "fro":
        raise ValueError(f"norm: expected 'fro', the only one with a solver here, got {norm!r}")
    if data.runs is not None:
        own = np.shape(best)[:2] == (data.runs, data.n)
        parts: list[npt.ArrayLike] = list(np.asarray(best)) if own else [best] * data.runs
        problems = [
            token_svm(data.run(r), part, wrt=wrt, norm=norm, query=query, W=W, causal=causal)
            for r, part in enumerate(parts)
        ]
        return cast(TokenSVM, stacked(problems))
    eps = float(np.finfo(data.dtype).eps)
    data = double(data)
    check_finite(None, data)
    # What is not finite belongs to samples that do not count.
    data = replace(
        data, X=_zeroed(data.X), query=None if data.query is None else _zeroed(data.query)
    )
    n, _, d = data.X.shape
    x, z = exponent(data.X), 0
    X = in_units(data.X, x)
    if wrt == "prompt":
        if causal:
            raise ValueError("causal: expected False for a prompt, which has no place, got True")
        fixed: Array = np.eye(d) if W is None else np.asarray(W, dtype=np.float64)
        checks.shape(fixed, "W", "d d", (d, d))
        if not np.isfinite(fixed).all():
            raise ValueError("W: expected finite numbers, got others")
        z = exponent(fixed)
        fixed = in_units(fixed, z)
        Z: Array = np.zeros((n, 1, d))  # one row for all samples, whose value is optimized
        seen = _visible(data, 1)
    elif W is not None:
        raise ValueError("W: expected None unless wrt is 'prompt', got an array")
    else:
        Z, seen = _queries(data, query, causal)
        z = exponent(Z)
        Z = in_units(Z, z)
    index = _best(best, seen)
    apart = X[np.arange(n)[:, None], index][:, :, None] - X[:, None]  # (n, q, T, d)
    largest = np.abs(X).max(axis=(1, 2))[:, None, None]
    rivals = seen & (np.abs(apart).max(axis=-1) > 4 * eps * largest)
    if not rivals.any():
        raise ValueError("data: expected two different tokens in a sample, got copies only")
    right = apart[rivals]
    tokens = float(np.linalg.norm(X, axis=2).max())
    if wrt == "prompt":
        right = right @ fixed.T
        tokens *= float(np.linalg.norm(fixed))
        G = right @ right.T
    else:
        left = np.broadcast_to(Z[:, :, None], apart.shape)[rivals]
        G = (left @ left.T) * (right @ right.T)
    longest = float(np.linalg.norm(right, axis=1).max())
    least = resolution(len(right), d * d, eps, tokens / longest if longest > 0.0 else 1.0)
    weights = nearest_point(G)
    point = weights @ right if wrt == "prompt" else (weights[:, None] * left).T @ right
    length = float(np.linalg.norm(point))
    products = G @ weights
    separable = is_separated(products, G, least)
    margin = float(products.min()) / length if separable else 0.0
    direction = in_units(point / (length * margin), x + z) if separable else in_units(point, -x - z)
    spread = np.zeros(rivals.shape)
    spread[rivals] = weights
    direction = direction[None]
    named = Gradients(prompt=direction) if wrt == "prompt" else Gradients(W=direction)
    hidden = least * float(np.sqrt(G.diagonal().max()))
    found = in_units(np.array([margin, length, hidden]), -x - z)
    return TokenSVM(named, float(found[0]), float(found[1]), spread, float(found[2]))


def _zeroed(array: Array) -> Array:
    return np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0)


def _visible(data: Dataset, q: int) -> npt.NDArray[np.bool_]:
    """Return which tokens (n, q, T) the rows of samples that count see."""
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


def _queries(data: Dataset, query: int | None, causal: bool) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return the query rows Z (n, q, d) and the tokens (n, q, T) that each sees."""
    n, T, _ = data.X.shape
    before = np.arange(T)[None, None]
    if data.query is not None:
        Z = data.query
    elif query is None:
        Z = data.X
    else:
        token, prefix = sample_checks.token(checks.integer(query, "query"), T, data.lengths)
        Z, seen = sample_checks.picked(data.X, token), _visible(data, 1)
        lacking = (np.broadcast_to(token, n) < 0) & seen.any(axis=(1, 2))
        if lacking.any():
            raise ValueError(
                f"query: expected a token that every sample has, got {query}, "
                f"which sample {int(np.argmax(lacking))} is too short for"
            )
        return Z, seen & (before < np.reshape(prefix, (-1, 1, 1))) if causal else seen
    seen = _visible(data, Z.shape[1])
    if data.query is None and data.lengths is not None:  # rows beyond ask nothing
        seen = seen & (np.arange(T) < data.lengths[:, None])[:, :, None]
    if causal:
        seen = seen & (before <= np.arange(Z.shape[1])[None, :, None])
    return Z, seen


def _best(best: npt.ArrayLike, seen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
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
