"""The first queries: how large tokens must be, the sum of the values, and the noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..examples import Float64
from .oracle import ROUNDINGS, Oracle, on_grid, two_tokens

LARGEST = 20
"""Tokens are of norms between 2^-20 and 2^20."""

SATURATED = 0.6
"""Share of the largest effect of attention that typical tokens should have."""

PROBES = 2
"""Pairs of tokens by which the size is found."""

REPEATS = 4
"""Inputs of random equal tokens that check the sum."""

NOISE_NUMBERS = 512
"""Number of outputs from which the noise is measured."""

NOISY_REPEATS = 16
"""Inputs of every token of a basis while only a start is wanted, if there is noise."""

LINEAR = 1e-5
"""Misfit of outputs of equal tokens, relative, up to which they are linear in the token."""


@dataclass(frozen=True, eq=False)
class Sum:
    """Outputs of inputs of equal tokens: x S + β.

    Attributes
    ----------
    values : array (d, p)
        S = Σ_h V_h.
    offset : array (p,)
        β, zero unless there are biases.
    misfit : float
        Root mean square residual at other tokens, over that of the outputs.
    allowed : float
        The part of it that noise and rounding explain, or 1e-5 for rounding inside the oracle.
    """

    values: Float64
    offset: Float64
    misfit: float
    allowed: float


def measured_noise(oracle: Oracle, rng: np.random.Generator) -> float:
    """Return the standard deviation of an output by asking the same inputs twice.

    Differences of the size of rounding are not noise: sums may be computed in another order.
    """
    noise, count = 0.0, 2
    for _ in range(2):
        X = on_grid(rng.standard_normal((count, oracle.tokens, oracle.dim)), 1.0)
        first, second = oracle(np.concatenate([X, X])).reshape(2, -1)
        noise = float(np.sqrt(np.mean((first - second) ** 2) / 2.0))
        if noise <= ROUNDINGS * oracle.rounding * float(np.sqrt(np.mean(first**2))):
            return 0.0
        count = -(-NOISE_NUMBERS // (len(first) // count))
    return noise


def token_size(
    oracle: Oracle, noise: float, rng: np.random.Generator
) -> tuple[float | None, float]:
    """Return the norm of tokens at which attention is neither flat nor saturated.

    The effect of attention, y without what equal weights give, over the norm of tokens grows with
    their square and then levels off; the size is where it is .6 of the limit, found by bisection.

    Returns
    -------
    tuple of (float or None, float)
        The size, None if attention has no effect at all; and the largest effect, a root mean
        square over outputs for tokens of norm 1.
    """
    d, T = oracle.dim, oracle.tokens
    x, z = rng.standard_normal((2, PROBES, d)) / np.sqrt(d)

    def effect(exponent: float) -> float:
        size = 2.0**exponent
        a, b = (on_grid(size * one, size / np.sqrt(d)) for one in (x, z))
        m = T // 2
        outs = np.stack(two_tokens(oracle, a, b, m))
        equal = oracle(np.repeat(np.concatenate([a, b])[:, None], T, axis=1)).mean(axis=1)
        flat = (m * equal[:PROBES] + (T - m) * equal[PROBES:]) / T
        change = float(np.sqrt(np.mean((outs - flat) ** 2)))
        unsure = 4.0 * noise + ROUNDINGS * oracle.rounding * float(np.abs(equal).max(initial=0.0))
        return change / size if change > unsure else 0.0

    low, high = -float(LARGEST), float(LARGEST)
    most = effect(high)
    if most == 0.0:
        return None, 0.0
    while high - low > 1.0:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if effect(middle) > SATURATED * most else (middle, high)
    return float(2.0**high), most


def sum_of_values(
    oracle: Oracle,
    size: float,
    bias: bool,
    noise: float,
    repeats: int,
    effect: float,
    rng: np.random.Generator,
) -> Sum:
    """Learn S, and β with biases, from inputs of T equal tokens, and check it at other tokens.

    Misfits are relative to these outputs and to the effect of attention, whichever is larger.
    """
    d, T = oracle.dim, oracle.tokens
    step = on_grid(np.array(size), size / np.sqrt(d))

    def equal(x: Float64) -> Float64:
        return np.asarray(oracle(np.repeat(x[:, None], T, axis=1)).mean(axis=1))

    basis = np.tile(step * np.eye(d), (repeats, 1))
    offset = np.zeros(1)
    if bias:
        offset = equal(np.zeros((repeats, d))).mean(axis=0)
    values = (equal(basis) - offset).reshape(repeats, d, -1).mean(axis=0) / step
    x = on_grid(rng.standard_normal((REPEATS, d)) * size / np.sqrt(d), size / np.sqrt(d))
    found = equal(x)
    scale = max(float(np.sqrt(np.mean(found**2))), effect * size, 1e-300)
    misfit = float(np.sqrt(np.mean((found - x @ values - offset) ** 2))) / scale
    allowed = max(LINEAR, 4.0 * noise / scale)
    return Sum(values, np.broadcast_to(offset, values.shape[1:]).copy(), misfit, allowed)
