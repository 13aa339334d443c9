"""The sum of the value matrices: a first guess (phase 1) and its refinement (phases 3 and 4).

A row in which all heads attend alike, with weights p, has the output p X Σ_h V_h: an average of
tokens times the sum. Such rows are few, but no other matrix explains as many rows as well. The sum
is therefore the robust regression of the outputs on averages of tokens, with the best weights for
every row; how well an estimate explains the best rows of a fixed population is its certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import _core
from .._arguments import checks
from ..config import threads
from .examples import Examples, Float64

POPULATION = 30_000
"""The number of samples whose rows certify every estimate."""

ACTIVE = 20_000
"""The number of rows of a robust regression."""

ROUNDING = 1e-12
"""Residual of a row, relative to the outputs, that counts as zero."""

COARSE = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
"""Fractions of the rows that phase 3 uses, one after the other."""


@dataclass(frozen=True, eq=False)
class SumEstimate:
    """An estimate of Σ_h V_h.

    Attributes
    ----------
    V_sum : array (d, p)
    certificate : float
        The `level` quantile of the residuals of the rows of a fixed population as averages of
        tokens, relative to the outputs.  Only comparable at equal `support`.
    level : float
    support : int
        The number of tokens that a row may be an average of.
    rounds : tuple of (share, certificate)
        The certificate after each fraction of the rows.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(1_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> crude = mh.learner.crude_sum(examples)
    >>> crude.V_sum.shape, 0 < crude.certificate < 0.5, crude.support
    ((5, 5), True, 2)
    """

    V_sum: Float64
    certificate: float
    level: float
    support: int
    rounds: tuple[tuple[float, float], ...] = ()


def default_support(examples: Examples) -> int:
    """Return how many tokens a row may be an average of.

    With many tokens almost any output is an average of all of them; p outputs distinguish heads
    that attend alike from others only if few tokens take part.
    """
    return min(examples.tokens, max(2, 1 + examples.out_dim // 4))


def crude_sum(
    examples: Examples, *, support: int | None = None, num_threads: int | None = None
) -> SumEstimate:
    """Phase 1: regress the mean output of a sample on its mean token.

    With attention that did not depend on X this would be Σ_h V_h exactly.  It has an error that
    grows with the key-query matrices and that no number of samples removes.

    Parameters
    ----------
    examples : Examples
    support : int, optional
        The most tokens that a row is averaged from.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    SumEstimate
        V_sum (d, p) with its certificate.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If a number is out of range.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", the estimate of the sum of
    projections from the correlation of inputs and outputs.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(1_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> crude = mh.learner.crude_sum(examples)
    >>> exact = truth.V.sum(axis=0)
    >>> bool(np.linalg.norm(crude.V_sum - exact) < 0.5 * np.linalg.norm(exact))
    True
    """
    checks.instance(examples, Examples, "examples")
    d = examples.dim
    moment = np.zeros((d, d + examples.out_dim))
    for _, X, Y in examples.portions():
        x = X.mean(axis=1)
        moment += x.T @ np.concatenate([x, Y.mean(axis=1)], axis=1)
    return _judged(examples, _solve(moment[:, :d], moment[:, d:]), support, num_threads)


def one_hot_sum(
    examples: Examples,
    point: Float64,
    *,
    support: int | None = None,
    num_threads: int | None = None,
) -> SumEstimate:
    """Start phase 3 from rows in which all heads should attend to the same token.

    `point` is in the affine hull of the key-query matrices and shortest there, so that all heads
    have the same inner product with it: in rows of large margin under it all heads attend to one
    token, and the output is that token times Σ_h V_h.

    Parameters
    ----------
    examples : Examples
    point : float64 array (d, d)
        In the affine hull of the key-query matrices, shortest there.
    support : int, optional
        The most tokens that a row is averaged from.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    SumEstimate
        V_sum (d, p) with its certificate.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If the shape of `point` does not fit, it is not finite, or a number is out of range.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> body = mh.learner.sculpt(facts, heads=2)
    >>> better = mh.learner.one_hot_sum(examples, body.point)
    >>> better.certificate < mh.learner.crude_sum(examples).certificate
    True
    """
    checks.instance(examples, Examples, "examples")
    point = checks.numbers_of_shape(point, "point", "d d", (examples.dim, examples.dim))
    X, Y = examples.first(POPULATION).part(slice(None))
    scores = X @ point @ X.transpose(0, 2, 1)
    winner = scores.argmax(axis=2)
    scores.sort(axis=2)
    margin = scores[..., -1] - scores[..., -2]
    sample, query = np.nonzero(margin >= np.quantile(margin, 0.9))
    x, y = X[sample, winner[sample, query]], Y[sample, query]
    V_sum = _solve(x.T @ x, x.T @ y)
    least = ROUNDING * examples.scale
    for _ in range(20):
        residual = np.linalg.norm(y - x @ V_sum, axis=1)
        weight = 1.0 / (1.0 + (residual / max(float(np.median(residual)), least)) ** 2) ** 2
        xw = (x * weight[:, None]).T
        V_sum = _solve(xw @ x, xw @ y)
    return _judged(examples, V_sum, support, num_threads)


def refine_sum(
    examples: Examples,
    start: SumEstimate,
    *,
    shares: Sequence[float] = COARSE,
    seed: int = 0,
    num_threads: int | None = None,
) -> SumEstimate:
    """Phases 3 and 4: alternate reweighting of the rows and least squares, on fewer and fewer rows.

    For each share (a fraction of the rows), rows within ten times the share are kept, weighted by
    (1 + (r/s)²)^-2 with s the residual at the share itself, and the sum is solved for until it
    converges. The estimate with the smallest certificate is returned, including the initial one.

    Parameters
    ----------
    examples : Examples
    start : SumEstimate
    shares : sequence of float
        In (0, 1], decreasing. Shares below 0.01 use all rows, larger ones a fixed population.
    seed : int
        Chooses the rows for the regression if there are too many.
    num_threads : int, optional

    Returns
    -------
    SumEstimate
        The best of the start and all rounds.

    Raises
    ------
    ValueError
        There is no share, or one is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(300, 2, 4, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> crude = mh.learner.crude_sum(examples)
    >>> refined = mh.learner.refine_sum(examples, crude, shares=(0.1,))
    >>> exact = truth.V.sum(axis=0)
    >>> errors = [np.linalg.norm(part.V_sum - exact) for part in (refined, crude)]
    >>> bool(errors[0] < errors[1]), refined.certificate < crude.certificate
    (True, True)
    """
    checks.instance(examples, Examples, "examples")
    checks.instance(start, SumEstimate, "start")
    if not isinstance(shares, Sequence) or not len(shares):
        raise ValueError(f"shares: expected a sequence of at least one number, got {shares!r}")
    for share in shares:
        if not 0.0 < checks.finite(share, "shares") <= 1.0:
            raise ValueError(f"shares: expected numbers above 0 and at most 1, got {share}")
    rng = np.random.default_rng(seed)
    best, V_sum, rounds = start, start.V_sum, list(start.rounds)
    for share in shares:
        population = examples if share < 0.01 else examples.first(POPULATION)
        V_sum = _regress(population, V_sum, start.support, share, rng, num_threads)
        now = _judged(examples, V_sum, start.support, num_threads)
        rounds.append((share, now.certificate))
        if now.certificate < best.certificate:
            best = now
    return SumEstimate(best.V_sum, best.certificate, best.level, best.support, tuple(rounds))


def with_support(
    examples: Examples,
    estimate: SumEstimate,
    support: int | None = None,
    *,
    num_threads: int | None = None,
) -> SumEstimate:
    """Recompute the certificate of an estimate, with rows that are averages of `support` tokens.

    Parameters
    ----------
    examples : Examples
    estimate : SumEstimate
    support : int, optional
        The most tokens that a row is averaged from.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    SumEstimate
        The same V_sum with a new certificate.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 3, 6, 2, seed=0)
    >>> examples = mh.learner.as_examples(data.X, data.y)
    >>> crude = mh.learner.crude_sum(examples, support=2)
    >>> judged = mh.learner.with_support(examples, crude, 3)  # averages of more tokens fit better
    >>> judged.support, judged.certificate < crude.certificate
    (3, True)
    """
    checks.instance(examples, Examples, "examples")
    checks.instance(estimate, SumEstimate, "estimate")
    return _judged(examples, estimate.V_sum, support, num_threads)


def residuals(
    examples: Examples, V_sum: Float64, support: int, num_threads: int | None = None
) -> Float64:
    """Return the relative distance of each row from averages of `support` tokens, (rows,)."""
    parts = [
        _core.fit_rows(X, Y, None, V_sum, support, threads(num_threads))[1]
        for _, X, Y in examples.portions()
    ]
    return np.concatenate(parts) / examples.scale


def certificate_level(examples: Examples) -> float:
    """Return the fraction of the rows that certifies a sum: a few rows per unknown of a head."""
    return float(np.clip(8.0 * examples.dim**2 / examples.rows, 0.002, 0.2))


def _judged(
    examples: Examples, V_sum: Float64, support: int | None, num_threads: int | None
) -> SumEstimate:
    if support is None:
        support = default_support(examples)
    level = certificate_level(examples)
    found = residuals(examples.first(POPULATION), V_sum, support, num_threads)
    return SumEstimate(V_sum, float(np.quantile(found, level)), level, support)


def _regress(
    examples: Examples,
    V_sum: Float64,
    support: int,
    share: float,
    rng: np.random.Generator,
    num_threads: int | None,
) -> Float64:
    """Return the sum as estimated from the rows within the share."""
    found = residuals(examples, V_sum, support, num_threads)
    kept = min(1.0, 10.0 * share)
    rows = np.flatnonzero(found <= np.quantile(found, kept))
    if len(rows) > ACTIVE:
        rows = np.sort(rng.choice(rows, ACTIVE, replace=False))
    X, Y, listed = examples.gather(rows)
    left, d = found[rows] * examples.scale, examples.dim
    floor = max(examples.noise_floor, ROUNDING) * examples.scale
    for _ in range(100):
        scale = max(float(np.quantile(left, share / kept)), floor)
        moment, left = _core.sum_equations(
            X, Y, listed, V_sum, support, scale, threads(num_threads)
        )
        moved = _solve(moment[:d, :d], moment[:d, d:]) - V_sum
        V_sum = V_sum + moved
        if np.linalg.norm(moved) <= 1e-4 * np.linalg.norm(V_sum):
            break
    return V_sum


def _solve(A: Float64, B: Float64) -> Float64:
    """Solve A x = B for a second moment A; the solution is 0 in directions that no row has."""
    from scipy.linalg import lstsq  # slow to import

    return np.ascontiguousarray(lstsq(A, B, cond=1e-12)[0])
