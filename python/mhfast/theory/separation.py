"""The token-separation support vector machine, the limit that implicit-bias theory predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from .._arguments import checks as _checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..gradients import Gradients
from .hull import is_positive, nearest_point
from .runs import stacked
from .sides import double


@dataclass(frozen=True, eq=False)
class TokenSVM:
    """The least-norm parameters under which the best tokens win by 1.

    Attributes
    ----------
    direction : Gradients
        W (1, d, d), or prompt (1, d), for the `directions` of `mhfast.train`.  Where nothing
        separates the tokens, the hull point itself: zero up to rounding.
    margin : float
        1/‖direction‖, the margin of the unit direction; 0 if the tokens are not separable.
    dual : float
        Norm of the hull point: no unit direction has a larger margin.
    weights : float64 array (n, q, T)
        Convex weights of the constraints, 0 at the best tokens.
    """

    direction: Gradients
    margin: float
    dual: float
    weights: Array

    @property
    def gap(self) -> float:
        """The primal-dual gap `dual` - `margin`."""
        return self.dual - self.margin

    @property
    def separable(self) -> bool:
        """Whether `direction` separates; if not, `weights` are the certificate."""
        return self.margin > 0.0


def token_svm(
    data: Dataset,
    best: npt.ArrayLike,
    *,
    wrt: str = "W",
    norm: str = "fro",
    query: int | None = None,
    W: npt.ArrayLike | None = None,
) -> TokenSVM:
    """Separate the best token of every query row from all others by the least norm.

        minimise ‖W‖_F   subject to   zᵀ W (x_best - x_t) ≥ 1   for all rows z, all x_t ≠ x_best.

    Parameters
    ----------
    data : Dataset
        X (n, T, d); labels play no role.  With a run axis, so many problems side by side; numbers
        of the result become arrays (R,), and arrays gain a leading R.
    best : integers (n,) or (n, q), with a leading R for each run its own
        The token that each query row is to select.  Its copies, which get the same weight from any
        W, are no rivals.
    wrt : {"W", "prompt"}
        What is sought: W (d, d), or one prompt z (d,) for all samples at fixed `W`.
    norm : {"fro"}
        The Frobenius norm, to which a dense W converges.
    query : int, optional
        The query token of each sample, as in `Classifier`; a query of the data set overrides it.
        None: every token asks.
    W : array (d, d), optional
        For wrt="prompt"; the identity by default.

    Returns
    -------
    TokenSVM

    Raises
    ------
    ValueError
        A shape or a value does not fit.  In particular the nuclear norm, to which factored W
        converges, is refused: it needs a semidefinite program, and SciPy has no solver for one.

    Notes
    -----
    Solved from the inner products of up to N = n q (T-1) constraints, by `nearest_point`; a float64
    array (N, N) must fit in memory.

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
            token_svm(data.run(r), part, wrt=wrt, norm=norm, query=query, W=W)
            for r, part in enumerate(parts)
        ]
        return cast(TokenSVM, stacked(problems))
    data = double(data)
    n, T, d = data.X.shape
    if wrt == "prompt":
        fixed = np.eye(d) if W is None else np.asarray(W, dtype=np.float64)
        _checks.shape(fixed, "W", "d d", (d, d))
        Z: Array = np.zeros((n, 1, d))  # one row for all samples, whose value is sought
    elif W is not None:
        raise ValueError("W: expected None unless wrt is 'prompt', got an array")
    else:
        Z = _queries(data, query)
    index = _best(best, n, Z.shape[1], T)
    apart = data.X[np.arange(n)[:, None], index][:, :, None] - data.X[:, None]  # (n, q, T, d)
    rivals = apart.any(axis=-1)
    if not rivals.any():
        raise ValueError("data: expected two different tokens in a sample, got copies only")
    right = apart[rivals]
    if wrt == "prompt":
        right = right @ fixed.T
        G = right @ right.T
    else:
        left = np.broadcast_to(Z[:, :, None], apart.shape)[rivals]
        G = (left @ left.T) * (right @ right.T)
    weights = nearest_point(G)
    point = weights @ right if wrt == "prompt" else (weights[:, None] * left).T @ right
    length = float(np.linalg.norm(point))
    products = G @ weights
    separable = is_positive(products, G)
    margin = float(products.min()) / length if separable else 0.0
    direction = (point / (length * margin) if separable else point)[None]
    spread = np.zeros(rivals.shape)
    spread[rivals] = weights
    named = Gradients(prompt=direction) if wrt == "prompt" else Gradients(W=direction)
    return TokenSVM(named, margin, length, spread)


def _queries(data: Dataset, query: int | None) -> Array:
    if data.query is not None:
        return data.query
    if query is None:
        return data.X
    token = _checks.integer(query, "query")
    if not -data.tokens <= token < data.tokens:
        raise ValueError(f"query: expected a token in [-{data.tokens}, {data.tokens}), got {token}")
    return data.X[:, [token]]


def _best(best: npt.ArrayLike, n: int, q: int, T: int) -> npt.NDArray[np.int64]:
    index = np.asarray(best)
    if index.dtype.kind not in "iu":
        raise TypeError(f"best: expected integers, got dtype {index.dtype.name}")
    if index.shape == (n,) and q == 1:
        index = index[:, None]
    _checks.shape(index, "best", "n q", (n, q))
    if index.min() < 0 or index.max() >= T:
        raise ValueError(f"best: expected tokens in [0, {T}), got {index.min()} to {index.max()}")
    return index.astype(np.int64)
