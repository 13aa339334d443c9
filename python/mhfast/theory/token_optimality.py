"""Which tokens training may select: globally and locally optimal ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from .constraints import problems_of_runs, queries, token_constraints, visible, zeroed
from .inputs import double, in_units
from .norms import Norm, checked_norm
from .runs import stacked
from .separation import TokenSVM, solved


@dataclass(frozen=True, eq=False)
class TokenOptimality:
    """The scores of tokens, and whether the tokens named are optimal.

    Attributes
    ----------
    scores : array (n, q, T)
        γ = y ⟨u, x⟩ of each token for each query row; NaN for tokens that the row does not see.
    slack : array (n, q, T)
        zᵀ W (x_best - x_t) - 1 of the solution of the SVM for the named tokens; NaN where there is
        no constraint.
    neighbours : bool array (n, q, T)
        The SVM-neighbours of the named token: those whose constraint is active, with a slack of
        at most the tolerance.
    globally : bool array (n, q)
        Whether the named token has the largest score of its row.
    locally : bool array (n, q)
        Whether it has a larger score than each of its SVM-neighbours.
    svm : TokenSVM
        The solution; if it does not separate, no token is locally optimal.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> X, z = rng.standard_normal((4, 3, 6)), rng.standard_normal((4, 1, 6))
    >>> data = mh.Dataset(X, [1.0, -1.0, 1.0, -1.0], query=z)
    >>> u = rng.standard_normal(6)
    >>> best = mh.theory.optimal_tokens(data, u)
    >>> found = mh.theory.token_optimality(data, best, u)
    >>> bool(found.is_global), bool(found.is_local)
    (True, True)
    >>> bool(mh.theory.token_optimality(data, (best + 1) % 3, u).is_global)
    False
    """

    scores: Array
    slack: Array
    neighbours: npt.NDArray[np.bool_]
    globally: npt.NDArray[np.bool_]
    locally: npt.NDArray[np.bool_]
    svm: TokenSVM

    @property
    def is_global(self) -> npt.NDArray[np.bool_]:
        """Whether all named tokens are globally optimal, for each run."""
        return np.asarray(self.globally.all(axis=(-2, -1)))

    @property
    def is_local(self) -> npt.NDArray[np.bool_]:
        """Whether all named tokens are locally optimal, for each run."""
        return np.asarray(self.locally.all(axis=(-2, -1)))


def token_scores(
    data: Dataset,
    readout: npt.ArrayLike,
    *,
    wrt: str = "W",
    query: int | None = None,
    causal: bool = False,
) -> Array:
    """Compute the score γ = y ⟨u, x⟩ of each token for each query row.

    Parameters
    ----------
    data : Dataset
        X (n, T, d) and labels y (n,) of -1 and 1; without a run axis.
    readout : array (d,) or (q, d)
        The readout u, the same or one for each query row; `U[0]` of a classifier with one head.
    wrt : {"W", "prompt"}
        With a prompt there is one row for each sample, which sees all of its tokens.
    query : int, optional
        The query token, as in `token_svm`.
    causal : bool
        As in `token_svm`.

    Returns
    -------
    array (n, q, T)
        NaN for tokens that a row does not see, all of them in samples of weight 0.

    Raises
    ------
    ValueError
        A shape or a value does not fit.

    References
    ----------
    Tarzanagh, Li, Thrampoulidis, Oymak, "Transformers as Support Vector Machines" (2023),
    definition of token scores, there with one query row.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.Dataset(np.eye(6)[None, :3], [-1.0])
    >>> mh.theory.token_scores(data, [3.0, 2.0, 1.0, 0.0, 0.0, 0.0], query=-1)
    array([[[-3., -2., -1.]]])
    """
    checks.instance(data, Dataset, "data")
    if data.runs is not None:
        raise ValueError(f"data: expected one run, as data.run(0) is, got {data.runs} runs")
    if wrt not in ("W", "prompt"):
        raise ValueError(f"wrt: expected 'W' or 'prompt', got {wrt!r}")
    data = double(data)
    checks.shape(data.y, "y", "n", (data.n,))
    seen = visible(data, 1) if wrt == "prompt" else queries(data, query, causal)[1]
    q = seen.shape[1]
    u = np.atleast_2d(np.asarray(readout, dtype=np.float64))
    if u.shape not in ((1, data.dim), (q, data.dim)):
        raise ValueError(
            f"readout: expected shape (d,) = ({data.dim},) or (q, d) = ({q}, {data.dim}), "
            f"got {np.shape(readout)}"
        )
    X = zeroed(data.X)  # of samples that do not count
    y = data.y.astype(np.float64)[:, None, None]
    scores: Array = np.where(seen, y * (u @ np.swapaxes(X, 1, 2)), np.nan)
    return scores


def optimal_tokens(
    data: Dataset,
    readout: npt.ArrayLike,
    *,
    wrt: str = "W",
    query: int | None = None,
    causal: bool = False,
) -> npt.NDArray[np.int64]:
    """Return the globally optimal token, that of the largest score, of each query row.

    Parameters
    ----------
    data, readout, wrt, query, causal
        As in `token_scores`.

    Returns
    -------
    int64 array (n, q)
        The first one of several; 0 in rows that see no token.

    Raises
    ------
    ValueError
        A shape or a value does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.Dataset(np.eye(6)[None, :3].repeat(2, axis=0), [1.0, -1.0])
    >>> mh.theory.optimal_tokens(data, [3.0, 2.0, 1.0, 0.0, 0.0, 0.0], query=-1)
    array([[0],
           [2]])
    """
    scores = token_scores(data, readout, wrt=wrt, query=query, causal=causal)
    best: npt.NDArray[np.int64] = np.where(np.isnan(scores), -np.inf, scores).argmax(axis=-1)
    return best


def token_optimality(
    data: Dataset,
    best: npt.ArrayLike,
    readout: npt.ArrayLike,
    *,
    wrt: str = "W",
    norm: Norm = "fro",
    query: int | None = None,
    W: npt.ArrayLike | None = None,
    causal: bool = False,
    tolerance: float = 1e-6,
) -> TokenOptimality:
    """Return whether the named tokens are globally or locally optimal for a fixed readout.

    With the score γ = y ⟨u, x⟩ of a token, the globally optimal token of a row has the largest
    score.  Solve `token_svm` for the named tokens; the SVM-neighbours of a named token are those
    whose constraint is active, zᵀ W (x_best - x_t) = 1.  The named tokens are locally optimal if
    each has a larger score than all of its SVM-neighbours.  Training that starts near the
    direction of that W, with a large norm, stays there if and only if they are, in the cases that
    the theory covers.

    Parameters
    ----------
    data : Dataset
        X (n, T, d) and labels y (n,) of -1 and 1.  With a run axis, arrays of the result gain a
        leading R.
    best : integers (n,) or (n, q), with a leading R for each run its own
        The tokens named.
    readout : array (d,) or (q, d), with a leading R for each run its own
        The fixed readout u of one head.
    wrt, norm, query, W, causal
        As in `token_svm`.
    tolerance : float
        The largest slack of an active constraint.

    Returns
    -------
    TokenOptimality

    Raises
    ------
    TypeError
        `best` does not hold integers.
    ValueError
        A shape or a value does not fit.
    ImportError
        The norm needs cvxpy, which is not installed.
    RuntimeError
        Clarabel found no solution.

    Notes
    -----
    Rows that are not constraints, and copies of a named token, count as optimal.  The definition
    is for one query row for each sample; for several, each row is judged with its own readout,
    which is ours.  A slack near the tolerance is a verdict near its limit: look at `slack`.

    References
    ----------
    Tarzanagh, Li, Thrampoulidis, Oymak, "Transformers as Support Vector Machines" (2023),
    definition of SVM-neighbours and of globally and locally optimal tokens; for a prompt Tarzanagh,
    Li, Zhang, Oymak, "Max-Margin Token Selection in Attention Mechanism" (NeurIPS 2023).

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X = np.eye(6)[None, :3]  # one sample of three tokens
    >>> data = mh.Dataset(X, [1.0], query=X[:, :1])
    >>> u = [3.0, 2.0, 1.0, 0.0, 0.0, 0.0]  # their scores are 3, 2 and 1
    >>> [bool(mh.theory.token_optimality(data, [t], u).is_local) for t in range(3)]
    [True, False, False]
    """
    checks.instance(data, Dataset, "data")
    checked = checked_norm(norm, vector=wrt == "prompt")
    if data.runs is not None:
        u = np.asarray(readout)
        mine = u.ndim > 1 and len(u) == data.runs
        results = [
            token_optimality(
                of_run, part, u[r] if mine else u, wrt=wrt, norm=norm, query=query, W=W,
                causal=causal, tolerance=tolerance,
            )
            for r, (of_run, part) in enumerate(problems_of_runs(data, best))
        ]  # fmt: skip
        return cast(TokenOptimality, stacked(results))
    given = token_constraints(data, best, wrt=wrt, query=query, W=W, causal=causal)
    svm = solved(given, wrt, checked)
    scores = token_scores(data, readout, wrt=wrt, query=query, causal=causal)
    direction = svm.direction.W if wrt == "W" else svm.direction.prompt
    assert direction is not None
    unit = in_units(direction[0], -(given.x + given.z))
    if given.left is None:
        products = given.right @ unit
    else:
        products = np.einsum("ia,ab,ib->i", given.left, unit, given.right)
    slack = given.spread(products - 1.0, np.nan)
    neighbours = slack <= tolerance  # NaN is not
    index = np.asarray(best).reshape(scores.shape[:2])
    rivals = given.rivals
    index = np.where(rivals.any(axis=-1), index, 0)[..., None]
    lead = np.take_along_axis(scores, index, axis=-1) - scores
    wins = lead > 0.0
    globally = np.asarray((wins | ~rivals).all(axis=-1))
    locally = np.asarray((wins | ~neighbours).all(axis=-1) & svm.separable)
    return TokenOptimality(scores, slack, neighbours, globally, locally, svm)
