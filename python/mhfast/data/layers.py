"""Targets planted by a multi-head attention layer, on Boolean or Gaussian tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import FIRST, POPULATION, integer_seed, permutations, signs, stream
from ..models import Layer
from .population import Population
from .runs import over_seeds
from .teachers import outputs

INPUTS = ("boolean", "gaussian")


@over_seeds
def boolean_layer(
    n: int,
    tokens: int,
    dim: int,
    heads: int,
    *,
    out_dim: int | None = None,
    score_std: float = 2.0,
    inputs: str = "boolean",
    noise: float = 0.0,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw tokens and the outputs of a random multi-head attention layer.

    Entries of X are independent random signs ±1, or N(0, 1).  The layer has Gaussian parameters:
    W_h with entries N(0, score_std²/d²), so that the logit x_a W_h x_bᵀ of two different tokens has
    standard deviation `score_std`, and V_h with entries N(0, 1/d).

    Parameters
    ----------
    n, tokens, dim, heads : int
        Samples n, tokens T, dimension d of a token, heads H of the layer.
    out_dim : int, optional
        Outputs p; None means d.
    score_std : float
        Standard deviation of the logits, at least 0: the larger, the sharper the attention.
    inputs : {"boolean", "gaussian"}
    noise : float
        Standard deviation of independent Gaussian noise on every target, at least 0.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same layer and samples.  Tokens and noise are separate streams.  A sequence gives
        a run axis.
    dtype : float64 or float32
        Drawn in float64 and rounded; targets are computed in float64 from the rounded numbers.

    Returns
    -------
    Dataset
        X (n,T,d), y = F(X) (n,T,p) plus noise.  `truth["layer"]` is the `Layer`.  `.sample` draws
        from the same layer; it may change tokens, inputs and noise.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A seed is neither an integer nor a generator.

    Notes
    -----
    The learning problem of Chen, Li, "Provably learning a multi-head attention layer"; the
    distribution of the layer is our choice.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(50, 3, 6, 2, seed=0)
    >>> data.X.shape, data.y.shape, data.truth["layer"].heads
    ((50, 3, 6), (50, 3, 6), 2)
    """
    dim, heads = checks.count(dim, "dim"), checks.count(heads, "heads")
    out = dim if out_dim is None else checks.count(out_dim, "out_dim")
    if checks.finite(score_std, "score_std") < 0.0:
        raise ValueError(f"score_std: expected a number of at least 0, got {score_std}")
    dtype = checks.float_dtype(dtype)
    seed = integer_seed(seed)
    rng = stream(seed, POPULATION)
    W = rng.standard_normal((heads, dim, dim)) * (score_std / dim)
    V = rng.standard_normal((heads, dim, out)) / math.sqrt(dim)
    settings: dict[str, Any] = {"tokens": tokens, "inputs": inputs, "noise": noise}
    return _draw(n, seed=seed, role=FIRST, layer=_layer(W, V, dtype), **settings)


@over_seeds
def parity_layer(
    n: int,
    dim: int,
    heads: int,
    beta: float,
    *,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw pairs of Boolean tokens and a layer that computes a parity, a hard instance to learn.

    S is a random set of H coordinates without the first, u its indicator, e the first unit vector,
    t_j = H - 1 - 2j.  The layer has

        W_j = beta (u eᵀ - t_j e eᵀ),   V_j = (-1)^j e eᵀ,   j = 0 .. H - 1.

    Where the two tokens differ in the first coordinate, the first output of token x is, for large
    beta, the parity P = Π_{k in S} x_k if H is odd, and x_0 (P - 1) if H is even, x_0 the token's
    first coordinate.

    Parameters
    ----------
    n, dim, heads : int
        Samples n, dimension d of a token, at least H + 1, heads H.  T = 2.
    beta : float
        How sharply the layer attends.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same set and samples.  A sequence gives a run axis.
    dtype : float64 or float32

    Returns
    -------
    Dataset
        X (n,2,d) of random signs, y = F(X) (n,2,d).  `truth`: "layer", a `Layer`, and "support"
        (H,), the members of S in order.  `.sample` draws from the same layer.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A seed is neither an integer nor a generator.

    Notes
    -----
    There are C(d-1, H) such functions, pairwise orthogonal, so no learner that uses correlations
    can be fast.  The construction is ours; it behaves like the lower bound of Chen, Li, "Provably
    learning a multi-head attention layer".

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.parity_layer(50, 6, 2, 0.5, seed=0)
    >>> data.X.shape
    (50, 2, 6)
    """
    dim, heads = checks.count(dim, "dim"), checks.count(heads, "heads")
    if heads >= dim:
        raise ValueError(f"heads: expected at most dim - 1 = {dim - 1}, got {heads}")
    beta = checks.finite(beta, "beta")
    dtype = checks.float_dtype(dtype)
    seed = integer_seed(seed)
    support = np.sort(1 + permutations(stream(seed, POPULATION), 1, dim - 1)[0, :heads])
    j = np.arange(heads)
    W, V = np.zeros((2, heads, dim, dim))
    W[:, support, 0] = beta
    W[:, 0, 0] = -beta * (heads - 1 - 2 * j)
    V[:, 0, 0] = (-1.0) ** j
    return _draw(
        n,
        seed=seed,
        role=FIRST,
        layer=_layer(W, V, dtype),
        tokens=2,
        inputs="boolean",
        noise=0.0,
        support=support,
    )


def _layer(W: NDArray[np.float64], V: NDArray[np.float64], dtype: np.dtype[np.floating]) -> Layer:
    return Layer(W.astype(dtype), V.astype(dtype))


def _draw(
    n: int,
    *,
    seed: int,
    role: int,
    layer: Layer,
    tokens: int,
    inputs: str,
    noise: float,
    support: NDArray[np.int64] | None = None,
) -> Dataset:
    """Draw inputs of a layer; with a `support`, stored in `truth`, no setting may change."""
    n, tokens = checks.count(n, "n"), checks.count(tokens, "tokens")
    if inputs not in INPUTS:
        raise ValueError(f"inputs: expected one of {INPUTS}, got {inputs!r}")
    if checks.finite(noise, "noise") < 0.0:
        raise ValueError(f"noise: expected a number of at least 0, got {noise}")
    rng, shape = stream(seed, role, 0), (n, tokens, layer.dim)
    X = signs(rng, shape) if inputs == "boolean" else rng.standard_normal(shape)
    X = X.astype(layer.dtype, copy=False)
    y = outputs(layer, X.astype(np.float64))
    if noise > 0.0:
        y = y + noise * stream(seed, role, 1).standard_normal(y.shape)
    settings = {"tokens": tokens, "inputs": inputs, "noise": noise}
    fixed = (
        {"layer": layer} if support is None else {"layer": layer, "support": support, **settings}
    )
    return Dataset(
        X,
        y.astype(layer.dtype, copy=False),
        truth={name: fixed[name] for name in ("layer", "support") if name in fixed},
        generator=Population(_draw, fixed, settings if support is None else {}),
    )
