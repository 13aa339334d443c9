"""A signal among noise, with flipped labels: the setting of benign overfitting."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import (
    FIRST,
    POPULATION,
    integer_seed,
    orthonormal_frame,
    permutations,
    signs,
    stream,
)
from .mixture import POSITIONS
from .population import Population
from .runs import over_seeds

KINDS = ("signal", "weak", "noise")


@over_seeds
def signal_noise(
    n: int,
    tokens: int,
    dim: int,
    *,
    signal: float = 20.0,
    rho: float = 0.1,
    flip: float = 0.2,
    weak: int = 1,
    noise: float = 1.0,
    positions: str = "random",
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw samples with one signal token, weak tokens and noise tokens.

    The class c of a sample is 1 or -1 with equal probability; its label y is -c with probability
    `flip`, else c.
    μ₊ and μ₋ are orthogonal, of norm `signal`, in uniformly random position.  With independent
    noise z ~ N(0, noise² I_d) for each token, the tokens of a sample are

        1               signal token   μ_c + z,
        weak            weak tokens    rho μ_s + z, each with a random sign s of its own,
        T - 1 - weak    noise tokens   z.

    Parameters
    ----------
    n, tokens, dim : int
        Samples n, tokens T, dimension d of a token; T is at least 1 + `weak`, d at least 2.
    signal : float
        ‖μ₊‖ = ‖μ₋‖, above 0.
    rho : float
        Size of the signal in a weak token, in units of that in the signal token; at least 0.
    flip : float
        Probability of a flipped label, in [0, 1].
    weak : int
        Weak tokens of a sample, at least 0.
    noise : float
        Standard deviation of every entry of z, at least 0.
    positions : {"random", "fixed"}
        Random order of the tokens, or the order above.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  Classes, flips, signs of weak tokens, positions and noise are
        separate streams: changing the noise leaves the others unchanged.  A sequence gives a run
        axis.
    dtype : float64 or float32
        Drawn in float64 and rounded.

    Returns
    -------
    Dataset
        X (n,T,d), y (n,).  Token groups "signal", "weak", "noise"; sample groups "clean",
        "flipped".  `truth`: "mu_plus" and "mu_minus" (d,), "signal", "rho", "flip".  `.sample`
        draws from the same directions; it may change tokens, signal, rho, flip, weak, noise,
        positions and dtype: `flip=0.0` gives a clean test set.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A seed is neither an integer nor a generator.

    Notes
    -----
    The defaults are meant for experiments with n = 20, T = 8, d = 2000.  After the data model of
    Sakamoto, Sato, "Benign Overfitting in Token Selection of Attention Mechanism".  That the signs
    of weak tokens are random and carry no information about the class is our choice.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.signal_noise(10, 5, 8, signal=1.0, rho=0.1, flip=0.1, seed=0)
    >>> data.X.shape
    (10, 5, 8)
    """
    dim = checks.count(dim, "dim")
    if dim < 2:
        raise ValueError(f"dim: expected at least 2 for two orthogonal directions, got {dim}")
    seed = integer_seed(seed)
    return _draw(
        n,
        seed=seed,
        role=FIRST,
        frame=orthonormal_frame(stream(seed, POPULATION), 2, dim),
        tokens=tokens,
        signal=signal,
        rho=rho,
        flip=flip,
        weak=weak,
        noise=noise,
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
    signal: float,
    rho: float,
    flip: float,
    weak: int,
    noise: float,
    positions: str,
    dtype: DTypeLike,
) -> Dataset:
    """Draw with μ₋, μ₊ = signal · frame, rows of (2,d)."""
    n, tokens, weak = checks.count(n, "n"), checks.count(tokens, "tokens"), _weak(weak, tokens)
    _check_settings(signal, rho, flip, noise, positions)
    dtype = checks.float_dtype(dtype)
    mu = signal * frame

    c = signs(stream(seed, role, 0), n)
    flipped = stream(seed, role, 1).random(n) < flip
    kind = np.broadcast_to(np.repeat([0, 1, 2], [1, weak, tokens - 1 - weak]), (n, tokens))
    X = np.zeros((n, tokens, frame.shape[1]))
    X[:, 0] = mu[_row(c)]
    X[:, 1 : 1 + weak] = rho * mu[_row(signs(stream(seed, role, 2), (n, weak)))]
    if positions == "random":
        order = permutations(stream(seed, role, 3), n, tokens)
        kind = np.take_along_axis(kind, order, axis=1)
        X = np.take_along_axis(X, order[..., None], axis=1)
    X += noise * stream(seed, role, 4).standard_normal(X.shape)

    return Dataset(
        X.astype(dtype, copy=False),
        np.where(flipped, -c, c).astype(dtype),
        token_groups=(kind, KINDS),
        sample_groups=(flipped.astype(np.int64), ("clean", "flipped")),
        truth={
            "mu_minus": mu[0].astype(dtype),
            "mu_plus": mu[1].astype(dtype),
            "signal": float(signal),
            "rho": float(rho),
            "flip": float(flip),
        },
        generator=Population(
            _draw,
            {"frame": frame},
            {
                "tokens": tokens,
                "signal": signal,
                "rho": rho,
                "flip": flip,
                "weak": weak,
                "noise": noise,
                "positions": positions,
                "dtype": dtype,
            },
        ),
    )


def _row(sign: NDArray[np.float64]) -> NDArray[np.int64]:
    """0 for -1, 1 for 1."""
    return (sign > 0.0).astype(np.int64)


def _weak(weak: int, tokens: int) -> int:
    count = checks.integer(weak, "weak")
    if not 0 <= count < tokens:
        raise ValueError(
            f"weak: expected an integer from 0 to tokens - 1 = {tokens - 1}, got {count}"
        )
    return count


def _check_settings(signal: float, rho: float, flip: float, noise: float, positions: str) -> None:
    if checks.finite(signal, "signal") <= 0.0:
        raise ValueError(f"signal: expected a number above 0, got {signal}")
    for name, value in (("rho", rho), ("noise", noise)):
        if checks.finite(value, name) < 0.0:
            raise ValueError(f"{name}: expected a number of at least 0, got {value}")
    if not 0.0 <= checks.finite(flip, "flip") <= 1.0:
        raise ValueError(f"flip: expected a probability, got {flip}")
    if positions not in POSITIONS:
        raise ValueError(f"positions: expected one of {POSITIONS}, got {positions!r}")
