"""Refinement from random layers, for examples about which certified rows say nothing.

Where V_2 is a multiple of V_1 every row is an average of tokens, and certifies facts that are
wrong; where Σ_h V_h = 0 no row certifies anything; tokens of few values have too few facts.
Refinement succeeds there from a good share of random layers.  The budget is `STARTS` of them, fewer
where a step is costly, and `STEPS` steps each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..models import Layer
from .examples import Float64
from .refinement import OUTPUTS_PER_PARAMETER, Restarts
from .surplus import Problem
from .values import solve_values

STARTS = 20
"""Largest number of random layers that are refined."""

STEPS = 40
"""Steps of each refinement: a successful one mostly needs 10 to 30."""

OPERATIONS = 3e10
"""Operations of all refinements together; but there are always `LEAST` starts."""

LEAST = 2

SCORES = (0.5, 1.0, 2.0)
"""Standard deviations of the scores of the random layers, one after the other."""

APART = 0.1
"""Distance to which heads of a layer that was found are moved apart, relative to its largest W."""

CLOSE = 1e-2
"""Residual below which a start is refined for longer: almost equal heads part slowly."""

SAMPLES = 300
"""Examples from which their value matrices are solved."""


def starts_for(parameters: int) -> int:
    """Return how many random layers are refined.

    A step takes outputs P² operations for the normal equations and P³ / 3 to solve them.

    Parameters
    ----------
    parameters : int
        P.

    Returns
    -------
    int
    """
    step = (OUTPUTS_PER_PARAMETER + 1 / 3) * float(parameters) ** 3
    return int(min(max(OPERATIONS / (STEPS * step), LEAST), STARTS))


def restart(
    problem: Problem, heads: int, near: Layer | None = None, *, most: int = STARTS
) -> Restarts:
    """Refine other layers until one explains the examples, or the budget is used up.

    Parameters
    ----------
    problem : Problem
    heads : int
    near : Layer, optional
        A layer of at most that many heads. The first start is near it, with its heads moved apart:
        two heads of almost the same W first become one, which is a saddle.
    most : int
        The most starts.

    Returns
    -------
    Restarts
    """
    examples = problem.examples
    rng = np.random.default_rng([problem.seed, 2])
    d, few = examples.dim, examples.first(SAMPLES)
    square = float(np.mean(np.sum(few.part(slice(None))[0] ** 2, axis=2))) or 1.0
    cheap = replace(problem, count=problem.fewest(heads))
    best, starts = None, 0
    most = min(most, starts_for(heads * d * (d + examples.out_dim)))
    for starts in range(1, most + 1):
        W: Float64 = rng.standard_normal((heads, d, d))
        if near is not None and starts == 1:
            W = _apart(np.asarray(near.W), W)
        else:
            W *= SCORES[starts % len(SCORES)] / square
        values = solve_values(few, W, num_threads=problem.num_threads)
        found = cheap.refined(values.layer(W), steps=STEPS)
        if found.residual < CLOSE and not problem.explains(found):
            found = cheap.refined(found.layer)
        if best is None or found.residual < best.residual:
            best = found
        if problem.explains(found):
            break
    assert best is not None
    return Restarts(best, starts)


def _apart(W: Float64, random: Float64) -> Float64:
    """Return matrices (H, d, d) near those of W (at most H, d, d), in random directions."""
    old = np.resize(np.arange(len(W)), len(random))
    size = np.maximum(np.linalg.norm(W[old], axis=(1, 2)), np.linalg.norm(W, axis=(1, 2)).max())
    unit = random / np.linalg.norm(random, axis=(1, 2), keepdims=True)
    return np.asarray(W[old] + APART * size[:, None, None] * unit)
