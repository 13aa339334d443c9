"""The tokenized mixture: a class token hidden among context tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import (
    FIRST,
    POPULATION,
    choices,
    dot,
    integer_seed,
    orthonormal_frame,
    permutations,
    stream,
)
from .population import Population
from .runs import over_seeds

NOISE_KINDS = ("none", "bounded", "gaussian")
POSITIONS = ("random", "fixed")


@over_seeds
def tokenized_mixture(
    n: int,
    tokens: int,
    dim: int,
    *,
    relevant_fraction: float = 0.2,
    contexts: int = 4,
    norm: float = 1.0,
    noise: float = 0.0,
    noise_kind: str = "gaussian",
    positions: str = "random",
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw samples of the tokenized mixture model.

    The label y is 1 or -1 with equal probability.  Of the T tokens of a sample, ζT are the class
    token μ_y; each other is ν_j + z with j uniform over M context tokens and z independent noise.
    μ₊, μ₋, ν_1 .. ν_M are orthogonal, of norm S, in uniformly random position.

    Parameters
    ----------
    n, tokens, dim : int
        Samples n, tokens T, dimension d of a token; d is at least M + 2.
    relevant_fraction : float
        ζ; ζT must be a whole number from 1 to T.
    contexts : int
        M, at least 1.
    norm : float
        S, above 0.
    noise : float
        Root mean square norm of z, at least 0.
    noise_kind : {"gaussian", "bounded", "none"}
        "gaussian": z ~ N(0, noise²/d · I).  "bounded": z uniform on the sphere of radius `noise`,
        hence ‖z‖ ≤ noise and |⟨z,μ⟩|, |⟨z,ν⟩| ≤ noise · S.  "none": z = 0, and `noise` must be 0.
    positions : {"random", "fixed"}
        The positions of the class token: random, or the first ζT.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  Labels, positions, contexts and noise are separate streams:
        changing the noise leaves the others unchanged.  A sequence gives a run axis.
    dtype : float64 or float32
        Drawn in float64 and rounded.

    Returns
    -------
    Dataset
        X (n,T,d), y (n,).  Token groups "context" and "class".  `truth`: "mu_plus" and "mu_minus"
        (d,), "contexts" (M,d), "relevant_fraction" and "norm".  `.sample` draws from the same
        class and context tokens; it may change tokens, relevant_fraction, norm, noise, noise_kind,
        positions and dtype.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A seed is neither an integer nor a generator.

    Notes
    -----
    The data model DM1 of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
    Generalization of Multi-head Attention".

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> data.X.shape, sorted(set(data.y.tolist()))
    ((20, 5, 9), [-1.0, 1.0])
    """
    contexts, dim = checks.count(contexts, "contexts"), checks.count(dim, "dim")
    if dim < contexts + 2:
        raise ValueError(
            f"dim: expected at least contexts + 2 = {contexts + 2} for orthogonal class and "
            f"context tokens, got {dim}"
        )
    seed = integer_seed(seed)
    return _draw(
        n,
        seed=seed,
        role=FIRST,
        frame=orthonormal_frame(stream(seed, POPULATION), contexts + 2, dim),
        tokens=tokens,
        relevant_fraction=relevant_fraction,
        norm=norm,
        noise=noise,
        noise_kind=noise_kind,
        positions=positions,
        dtype=dtype,
    )


def _draw(
    n: int,
    *,
    seed: int,
    role: int,
    frame: NDArray[np.float64],
    tokens: int,
    relevant_fraction: float,
    norm: float,
    noise: float,
    noise_kind: str,
    positions: str,
    dtype: DTypeLike,
) -> Dataset:
    """Draw from the mixture with μ₋, μ₊, ν_1 .. ν_M = norm · frame, rows of (M+2,d)."""
    n, tokens = checks.count(n, "n"), checks.count(tokens, "tokens")
    relevant = _relevant_tokens(relevant_fraction, tokens)
    _check_settings(norm, noise, noise_kind, positions)
    dtype = checks.float_dtype(dtype)
    table = norm * frame

    label = (stream(seed, role, 0).random(n) < 0.5).astype(np.int64)
    ids = np.empty((n, tokens), dtype=np.int64)
    ids[:, :relevant] = label[:, None]
    rest = (n, tokens - relevant)
    ids[:, relevant:] = 2 + choices(stream(seed, role, 1), len(frame) - 2, rest)
    if positions == "random":
        order = permutations(stream(seed, role, 2), n, tokens)
        ids = np.take_along_axis(ids, order, axis=1)
    X = table[ids]
    context = ids >= 2
    if noise > 0.0:
        X[context] += noise * _unit_noise(stream(seed, role, 3), noise_kind, X[context].shape)

    return Dataset(
        X.astype(dtype, copy=False),
        np.where(label == 1, 1.0, -1.0).astype(dtype),
        token_groups=((~context).astype(np.int64), ("context", "class")),
        truth={
            "mu_minus": table[0].astype(dtype),
            "mu_plus": table[1].astype(dtype),
            "contexts": table[2:].astype(dtype),
            "relevant_fraction": relevant / tokens,
            "norm": float(norm),
        },
        generator=Population(
            _draw,
            {"frame": frame},
            {
                "tokens": tokens,
                "relevant_fraction": relevant_fraction,
                "norm": norm,
                "noise": noise,
                "noise_kind": noise_kind,
                "positions": positions,
                "dtype": dtype,
            },
            _in_core,
        ),
    )


def _in_core(
    *,
    frame: NDArray[np.float64],
    tokens: int,
    relevant_fraction: float,
    norm: float,
    noise: float,
    noise_kind: str,
    positions: str,
    **_others: object,
) -> tuple[object, ...]:
    relevant = _relevant_tokens(relevant_fraction, tokens)
    bounded, random = noise_kind == "bounded", positions == "random"
    return ("tokenized_mixture", norm * frame, relevant, float(noise), bounded, random)


def _unit_noise(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Independent rows of mean square norm 1."""
    z = rng.standard_normal(shape)
    if kind == "gaussian":
        return z / math.sqrt(shape[-1])
    lengths: NDArray[np.float64] = np.sqrt(dot(z, z))[..., None]
    return z / lengths


def _relevant_tokens(fraction: float, tokens: int) -> int:
    count = checks.finite(fraction, "relevant_fraction") * tokens
    relevant = round(count)
    # .3 * 10 is not 3 in binary arithmetic; allow for a few ulp.
    if abs(count - relevant) > 1e-12 * tokens or not 1 <= relevant <= tokens:
        raise ValueError(
            "relevant_fraction: expected relevant_fraction * tokens to be a whole number from 1 to "
            f"{tokens}, got {fraction} * {tokens} = {count:g}"
        )
    return relevant


def _check_settings(norm: float, noise: float, noise_kind: str, positions: str) -> None:
    if checks.finite(norm, "norm") <= 0.0:
        raise ValueError(f"norm: expected a number above 0, got {norm}")
    if checks.finite(noise, "noise") < 0.0:
        raise ValueError(f"noise: expected a number of at least 0, got {noise}")
    if noise_kind not in NOISE_KINDS:
        raise ValueError(f"noise_kind: expected one of {NOISE_KINDS}, got {noise_kind!r}")
    if noise_kind == "none" and noise > 0.0:
        raise ValueError(f"noise: expected 0 with noise_kind='none', got {noise}")
    if positions not in POSITIONS:
        raise ValueError(f"positions: expected one of {POSITIONS}, got {positions!r}")
