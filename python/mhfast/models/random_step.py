"""The initialization that depends on the data: one gradient step of random sign per head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import START, integer_seed, permutations, signs, stream


def random_step(
    data: Dataset, heads: int, seed: Seed | Seeds, query: int | None, *, balanced: bool = False
) -> dict[str, Any]:
    """Return the arrays of the classifier one gradient step from zero, a random sign for each head.

        W_h = 0,   U_h = α_h / 2 · 1_q (Σ_i w_i y_i x̄_i / Σ w)ᵀ

    x̄_i (d,) is the mean token of sample i within its length, α_h independent random signs.  This
    is a step of size sqrt(H) of the logistic loss from zero, with an independent sign for each
    head, so that outputs do not grow with H.

    Parameters
    ----------
    data : Dataset
        X (n,T,d), y (n,) of -1 and 1, weights w or None for ones.
    heads : int
        H.
    seed : int, numpy.random.Generator, or a sequence of them
        A sequence of seeds or a run axis of the data gives a run axis. Run r uses entry r and the
        data of run r; the runs of one seed have independent signs.
    query : int, optional
        As for `Classifier`.  U has as many rows as the query side of data and model.
    balanced : bool
        Whether half of the signs are 1 and half -1, in random order; H must then be even, and all
        outputs are 0.

    Returns
    -------
    dict of W (H,d,d) and U (H,q,d)
        Of the dtype of the data, with the run axis if there is one.

    Raises
    ------
    TypeError
        `data` is not a Dataset, or a seed is neither an integer nor a generator.
    ValueError
        A label is neither -1 nor 1, the number of seeds is not R, or an odd number of heads is to
        be balanced.

    References
    ----------
    The randomised initialization of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization
    and Generalization of Multi-head Attention", TMLR 2024.
    """
    checks.instance(data, Dataset, "data")
    heads = checks.count(heads, "heads")
    if balanced and heads % 2:
        raise ValueError(f"heads: expected an even number for balanced signs, got {heads}")
    if data.runs is None and not checks.is_sequence(seed):
        return _of_one_run(data, stream(integer_seed(seed), START), heads, query, balanced)
    generators = _generators(seed, data.runs)
    data_of_runs = (
        [data] * len(generators) if data.runs is None else map(data.run, range(data.runs))
    )
    steps = [
        _of_one_run(data_of_run, rng, heads, query, balanced)
        for data_of_run, rng in zip(data_of_runs, generators, strict=True)
    ]
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def _generators(seed: Seed | Seeds, runs: int | None) -> list[np.random.Generator]:
    """Return the random stream of each run: from its own seed, or spawned from a common seed."""
    if not checks.is_sequence(seed):
        root = integer_seed(seed)
        return [stream(root, START, r) for r in range(runs or 1)]
    seeds = [integer_seed(one) for one in seed]  # type: ignore[union-attr]
    if not seeds or (runs is not None and len(seeds) != runs):
        expected = "at least one" if runs is None else f"R = {runs} of them"
        raise ValueError(f"seed: expected {expected}, got {len(seeds)}")
    return [stream(one, START) for one in seeds]


def _of_one_run(
    data: Dataset, rng: np.random.Generator, heads: int, query: int | None, balanced: bool
) -> dict[str, Any]:
    """Return the arrays of one run."""
    checks.shape(data.y, "y", "n", (data.n,))
    y = data.y.astype(np.float64)
    wrong = np.flatnonzero(np.abs(y) != 1.0)
    if wrong.size:
        raise ValueError(f"y: expected -1 or 1, got {y[wrong[0]]} at index {wrong[0]}")
    weight = np.ones(data.n) if data.weight is None else data.weight.astype(np.float64)
    if data.lengths is None:
        means = data.X.mean(axis=1, dtype=np.float64)
    else:  # tokens beyond the lengths are zeros
        means = data.X.sum(axis=1, dtype=np.float64) / np.maximum(data.lengths, 1)[:, None]
    step = ((weight * y)[:, None] * means).sum(axis=0) / weight.sum()
    alpha = _balanced(rng, heads) if balanced else signs(rng, heads)
    q = data.tokens if query is None else 1
    if data.query is not None:
        q = data.query.shape[1]
    U = np.broadcast_to(0.5 * alpha[:, None, None] * step, (heads, q, data.dim))
    W = np.zeros((heads, data.dim, data.dim))
    return {"W": W.astype(data.dtype), "U": U.astype(data.dtype)}


def _balanced(rng: np.random.Generator, heads: int) -> NDArray[np.float64]:
    """Return as many signs 1 as -1, in random order."""
    return np.where(permutations(rng, 1, heads)[0] < heads // 2, -1.0, 1.0)
