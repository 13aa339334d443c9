"""In-context linear regression: prompts of pairs followed by a question."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import FIRST, cholesky, dot, integer_seed, stream
from .population import Population
from .runs import over_seeds


@over_seeds
def icl_regression(
    n: int,
    tokens: int,
    dim: int,
    *,
    covariance: ArrayLike | None = None,
    noise: float = 0.0,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw prompts of in-context linear regression.

    Every sample has its own task w ~ N(0, I), in d - 1 dimensions.  Its first T - 1 tokens are
    pairs (x_j, y_j) with x_j ~ N(0, Λ) and y_j = ⟨w, x_j⟩ + noise · ξ_j, ξ_j ~ N(0, 1); its last is
    the question (x, 0), and the target is ⟨w, x⟩.

    It is a task for a `Layer` with query=-1 and one output, p = 1, with the squared loss.

    Parameters
    ----------
    n, tokens, dim : int
        Samples n; tokens T, at least 2: T - 1 pairs and the question; dimension d of a token, at
        least 2: d - 1 features and the response.
    covariance : number, (d-1,) or (d-1,d-1), optional
        Λ: a multiple of the identity, variances, or a positive definite matrix.  None means the
        identity.
    noise : float
        Standard deviation of the responses in the prompt, at least 0.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  Tasks, features and noise are separate streams.  A sequence gives a
        run axis.
    dtype : float64 or float32
        Drawn in float64 and rounded.

    Returns
    -------
    Dataset
        X (n,T,d), y (n,1,1).  Token groups "pair" and "question".  `truth`: "covariance"
        (d-1,d-1) and "noise".  `.sample` may change tokens, covariance, noise and dtype.

    Raises
    ------
    ValueError
        A parameter is out of range, or the covariance is not positive definite.
    TypeError
        A seed is neither an integer nor a generator, or the covariance is not real.

    Notes
    -----
    The task of Garg, Tsipras, Liang, Valiant, "What Can Transformers Learn In-Context?", with the
    tokens of Zhang, Frei, Bartlett, "Trained Transformers Learn Linear Models In-Context".

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.icl_regression(10, 6, 4, seed=0)
    >>> data.X.shape, data.y.shape
    ((10, 6, 4), (10, 1, 1))
    """
    dim = checks.count(dim, "dim")
    if dim < 2:
        raise ValueError(f"dim: expected at least 2, a feature and the response, got {dim}")
    return _draw(
        n,
        seed=integer_seed(seed),
        role=FIRST,
        dim=dim,
        tokens=tokens,
        covariance=covariance,
        noise=noise,
        dtype=dtype,
    )


def _draw(
    n: int,
    *,
    seed: int,
    role: int,
    dim: int,
    tokens: int,
    covariance: ArrayLike | None,
    noise: float,
    dtype: DTypeLike,
) -> Dataset:
    n, tokens = checks.count(n, "n"), checks.count(tokens, "tokens")
    if tokens < 2:
        raise ValueError(f"tokens: expected at least 2, a pair and the question, got {tokens}")
    if checks.finite(noise, "noise") < 0.0:
        raise ValueError(f"noise: expected a number of at least 0, got {noise}")
    matrix = _covariance(covariance, dim - 1)
    root = _root(matrix)
    dtype = checks.float_dtype(dtype)

    w = stream(seed, role, 0).standard_normal((n, 1, dim - 1))
    z = stream(seed, role, 1).standard_normal((n, tokens, dim - 1))
    X = np.empty((n, tokens, dim))
    for k, row in enumerate(root):
        X[..., k] = dot(z[..., : k + 1], row[: k + 1])
    response = dot(w, X[..., :-1])
    y = response[:, -1].copy()
    X[..., -1] = response + noise * stream(seed, role, 2).standard_normal((n, tokens))
    X[:, -1, -1] = 0.0

    question = np.broadcast_to(np.arange(tokens) == tokens - 1, (n, tokens))
    return Dataset(
        X.astype(dtype, copy=False),
        y[:, None, None].astype(dtype, copy=False),
        token_groups=(question.astype(np.int64), ("pair", "question")),
        truth={"covariance": matrix.astype(dtype), "noise": float(noise)},
        generator=Population(
            _draw,
            {"dim": dim},
            {"tokens": tokens, "covariance": matrix, "noise": noise, "dtype": dtype},
            _in_core,
        ),
    )


def _in_core(
    *, dim: int, covariance: NDArray[np.float64], noise: float, **_others: object
) -> tuple[object, ...]:
    return ("icl_regression", _root(_covariance(covariance, dim - 1)), float(noise))


def _covariance(covariance: ArrayLike | None, features: int) -> NDArray[np.float64]:
    """Λ as a matrix."""
    array = checks.as_array(1.0 if covariance is None else covariance, "covariance")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"covariance: expected real numbers, got dtype {array.dtype.name}")
    array = array.astype(np.float64)
    if array.ndim < 2 and array.shape in ((), (features,)):
        return np.diag(np.broadcast_to(array, (features,)))
    if array.shape != (features, features) or not np.array_equal(array, array.T):
        raise ValueError(
            f"covariance: expected a number, {features} variances or a symmetric matrix "
            f"({features}, {features}), got shape {array.shape}"
        )
    return array


def _root(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    root = cholesky(matrix)
    if root is None:
        raise ValueError(
            "covariance: expected a positive definite matrix, "
            f"got one with the eigenvalue {np.linalg.eigvalsh(matrix)[0]:.3g}"
        )
    return root
