"""The position of the heads in their hull: a net of candidates (phase 5)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from .._arguments import checks
from .._arguments.values import frozen
from .._blas import one_blas_thread
from .examples import Examples, Float64
from .facts import Facts
from .sculpting import Body
from .values import Values, attended, attention, solve_values

GRID = 17
"""Points of the net along the interval, for two heads."""

STARTS = 40
"""Points of the net for three heads and more."""

MOST_STARTS = 1000
"""Most points of a net."""

POLISHED = 4
"""The number of candidates that are polished."""

LOOSE = 4.0
"""Stretch within which heads are searched, relative to that of the best point of the hull."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Key-query matrices in the hull.

    Attributes
    ----------
    coordinates : array (H, H - 1)
    W : array (H, d, d)
    values : Values
        The value matrices that fit best, and the residual.
    stretch : array (H,)
        For each head by how much the tolerances of the facts must be multiplied so that 95 % hold.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> body = mh.learner.sculpt(facts, heads=2)
    >>> net = mh.learner.search_net(examples, body, facts, samples=20)
    >>> best = net.candidates[0]
    >>> best.W.shape, best.values.V.shape, best.coordinates.shape
    ((2, 5, 5), (2, 5, 5), (2, 1))
    """

    coordinates: Float64
    W: Float64
    values: Values
    stretch: Float64


@dataclass(frozen=True, eq=False)
class Net:
    """The result of the search in the hull.

    Attributes
    ----------
    candidates : tuple of Candidate
        In ascending order of the residual.
    box : array (H - 1, 2)
        Bounds of the coordinates within which the facts hold, from linear programs.
    least_stretch : float
        The factor by which tolerances must be multiplied for some matrix of the hull to satisfy all
        facts, from a linear program.
    tried : int
        Points of the net.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> body = mh.learner.sculpt(facts, heads=2)
    >>> net = mh.learner.search_net(examples, body, facts, samples=20)
    >>> residuals = [candidate.values.residual for candidate in net.candidates]
    >>> residuals == sorted(residuals), net.tried > len(residuals)
    (True, True)
    """

    candidates: tuple[Candidate, ...]
    box: Float64
    least_stretch: float
    tried: int


@one_blas_thread()
def search_net(
    examples: Examples,
    body: Body,
    facts: Facts,
    *,
    seed: int = 0,
    samples: int = 1000,
    num_threads: int | None = None,
) -> Net:
    """Phase 5: search for the coordinates of the heads in their affine hull.

    Linear programs bound the part of the hull in which the facts hold; a net is laid over it, a
    grid for two heads and random points for more, and scored by the residual with the best value
    matrices.  The best candidates are polished by Gauss-Newton steps in the coordinates, with the
    value matrices eliminated, and checked against all facts.

    Parameters
    ----------
    examples : Examples
    body : Body
        The affine hull of the key-query matrices.
    facts : Facts
        Those the body was sculpted from.
    seed : int
        Draws the random points.
    samples : int
        The number of examples with which a candidate is scored.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    Net
        The candidates, the best one first.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If the body or the facts are of another dimension, or a number is out of range.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", the net over the span of the
    sculpted body; eliminating the value matrices (variable projection) is ours.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> body = mh.learner.sculpt(facts, heads=2)
    >>> net = mh.learner.search_net(examples, body, facts, samples=20)
    >>> best = net.candidates[0]
    >>> error = mh.learner.align(best.values.layer(best.W), truth).error
    >>> error < 0.5, best.values.residual < 0.3  # refinement does the rest
    (True, True)
    """
    checks.instance(examples, Examples, "examples")
    checks.instance(body, Body, "body")
    checks.instance(facts, Facts, "facts")
    checks.shape(body.point, "body.point", "d d", (examples.dim, examples.dim))
    checks.shape(facts.X, "facts.X", "n T d", (None, None, examples.dim))
    samples = checks.count(samples, "samples")
    heads = body.heads
    few = examples.first(samples)
    if heads == 1:
        only = _candidate(few, body, facts, np.zeros((1, 0)), num_threads)
        return Net((only,), np.zeros((0, 2)), float(_stretches(body.point, facts).max()), 1)
    box, least = _bounds(body, facts)
    points = _points(box, heads, np.random.default_rng(seed))
    quick = examples.first(min(samples, 200))
    left = [
        solve_values(quick, body.at(point), num_threads=num_threads).residual for point in points
    ]
    best = [points[i] for i in np.argsort(left, kind="stable")[:POLISHED]]
    found = [
        _candidate(few, body, facts, _polish(few, body, point, num_threads), num_threads)
        for point in best
    ]
    found.sort(key=lambda candidate: candidate.values.residual)
    return Net(tuple(found), frozen(box), least, len(points))


def _candidate(
    examples: Examples,
    body: Body,
    facts: Facts,
    coordinates: Float64,
    num_threads: int | None,
) -> Candidate:
    W = np.ascontiguousarray(body.at(coordinates))
    return Candidate(
        frozen(coordinates),
        frozen(W),
        solve_values(examples, W, num_threads=num_threads),
        frozen(np.quantile(_stretches(W, facts), 0.95, axis=-1)),
    )


def _stretches(W: Float64, facts: Facts) -> Float64:
    """Return the errors of matrices W (..., d, d) in units of the tolerances of facts (..., k)."""
    return np.abs(facts.of(W) - facts.value) / facts.tolerance


def _bounds(body: Body, facts: Facts) -> tuple[Float64, float]:
    """Return the box of coordinates in which the facts hold loosely, and the least stretch."""
    from scipy.optimize import linprog  # slow to import

    k = body.heads - 1
    slopes = facts.of(body.directions).T / facts.tolerance[:, None]
    offset = (facts.of(body.point) - facts.value) / facts.tolerance
    # min s  subject to  |slopes c + offset| <= s
    rows = np.concatenate([slopes, -slopes])
    sides = np.concatenate([-offset, offset])
    free = [(None, None)] * k
    stretch = linprog(
        np.append(np.zeros(k), 1.0),
        A_ub=np.column_stack([rows, -np.ones(len(rows))]),
        b_ub=sides,
        bounds=[*free, (0.0, None)],
    )
    least = float(stretch.fun)
    box = np.empty((k, 2))
    for j in range(k):
        for side, sign in enumerate((1.0, -1.0)):
            direction = np.zeros(k)
            direction[j] = sign
            solution = linprog(direction, A_ub=rows, b_ub=sides + LOOSE * least, bounds=free)
            box[j, side] = solution.x[j] if solution.status == 0 else -sign * _reach(body)
    return np.clip(box, -_reach(body), _reach(body)), least


def _reach(body: Body) -> float:
    """Return the largest distance from the point of the hull at which heads are searched."""
    return 10.0 * float(np.linalg.norm(body.point))


def _points(box: Float64, heads: int, rng: np.random.Generator) -> list[Float64]:
    if heads == 2:
        side = np.linspace(box[0, 0], box[0, 1], GRID)
        pairs = combinations_with_replacement(range(GRID), 2)
        return [np.array([[side[i]], [side[j]]]) for i, j in pairs if i != j]
    lowest, width = box[:, 0], box[:, 1] - box[:, 0]
    count = min(STARTS * (heads - 1) ** 2, MOST_STARTS)
    return [lowest + width * rng.random((heads, heads - 1)) for _ in range(count)]


def _polish(
    examples: Examples,
    body: Body,
    coordinates: Float64,
    num_threads: int | None,
    steps: int = 30,
) -> Float64:
    """Levenberg-Marquardt in the coordinates; the value matrices follow by least squares.

    The derivative is Kaufman's: that of the prediction with fixed value matrices, less the part
    that new value matrices can compensate.
    """
    from scipy.linalg import lstsq  # slow to import

    X, Y = examples.part(slice(None))
    Y = Y.reshape(-1, Y.shape[2])
    damping = 1e-2
    logit_tangents = np.einsum("naf,kfg,nbg->knab", X, body.directions, X, optimize=True)

    def at(coordinates: Float64) -> _Linearized:
        W = np.ascontiguousarray(body.at(coordinates))
        return _linearized(X, Y, W, logit_tangents, num_threads)

    here = at(coordinates)
    for _ in range(steps):
        damped = here.curvature + damping * np.diag(np.diag(here.curvature))
        step = lstsq(damped, -here.slope, cond=1e-14)[0]
        moved = coordinates + step.reshape(coordinates.shape)
        there = at(moved)
        if there.square < here.square:
            gained = 1.0 - there.square / here.square
            coordinates, here = moved, there
            damping = max(damping / 5.0, 1e-12)
            if gained < 1e-6:
                break
        else:
            damping *= 5.0
            if damping > 1e8:
                break
    return coordinates


@dataclass(frozen=True)
class _Linearized:
    """Square of the residual, and its normal equations in the coordinates."""

    square: float
    curvature: Float64
    slope: Float64


def _linearized(
    X: Float64, Y: Float64, W: Float64, logit_tangents: Float64, num_threads: int | None
) -> _Linearized:
    """Linearize at W; `moves` (H - 1, n, T, T) are the logits' derivatives by coordinates."""
    from scipy.linalg import lstsq, qr  # slow to import

    heads, d = len(W), X.shape[2]
    weights = attention(W, X, num_threads)
    basis, triangle = qr(attended(weights, X), mode="economic")
    target = basis.T @ Y
    V = lstsq(triangle, target, cond=1e-12)[0].reshape(heads, d, -1)
    residual = basis @ target - Y
    columns = []
    for h in range(heads):
        A = weights[:, h]
        for move in logit_tangents:
            change = A * (move - np.sum(A * move, axis=2, keepdims=True))
            column = (change @ X).reshape(-1, d) @ V[h]
            columns.append((column - basis @ (basis.T @ column)).ravel())
    J = np.array(columns)
    return _Linearized(float(np.sum(residual**2)), J @ J.T, J @ residual.ravel())
