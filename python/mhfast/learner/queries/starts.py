"""A start for the heads at one δ: derivatives of the outputs as a tensor, which is decomposed.

At a base point q the outputs y = Σ_h tanh((q·a_h + b) / 2) c_h have the derivatives

    ∂y_o / ∂q_i       = Σ_h a_hi c_ho g_h(q),         g_h = ½ (1 - tanh²),
    ∂²y_o / ∂q_i ∂q_j = Σ_h a_hi a_hj c_ho g'_h(q),   g'_h = -½ tanh (1 - tanh²).

Over several base points each is a sum of H tensors of rank one, and such a sum has one
decomposition if two of the three modes have rank H and the third tells the heads apart (Jennrich).
It comes from eigenvectors: of two combinations M₁, M₂ of the slices, M₁ M₂⁻¹ has the vectors of the
first mode.  Derivatives are differences, so that this is a start only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..examples import Float64
from .oracle import Pairs

INDEPENDENT = 1e-7
"""H-th singular value of an unfolding, over the largest, from which a mode counts as of rank H."""

COMBINATIONS = 12
"""Pairs of combinations of slices that are tried; the one that diagonalizes best is kept."""

LENGTHS = np.geomspace(0.01, 1000.0, 240)
"""Lengths of a_h, times typical tokens over √d, of which the profile over base points chooses."""

BIASES = np.linspace(-4.0, 4.0, 33)
"""Terms of a score that do not depend on the query, likewise."""

RADII = (0.03, 2.0)
"""Norms of base points, over that of typical tokens."""

Factors = tuple[Float64, Float64, Float64]
Profile = Callable[[Float64], Float64]


def starts(
    pairs: Pairs, delta: Float64, heads: int, rng: np.random.Generator
) -> Iterator[tuple[str, Float64]]:
    """Yield (method, A (heads, d or d + 1)), the most promising start first."""
    d, p = len(delta), pairs.values.shape[1]
    if heads <= min(d, p):
        for points in (3, 4, 6, 8):
            yield from _by_gradients(pairs, delta, heads, points, rng)
    if heads <= d:
        for _ in range(2):
            yield from _by_hessians(pairs, delta, heads, rng)
    if heads <= max(d, p) and min(d, p) >= 2:
        for _ in range(2):
            yield from _by_gradients(pairs, delta, heads, heads + 1, rng)
    width = d + int(pairs.bias)
    for _ in range(30 if heads * d <= 60 else 3):
        yield "random", rng.standard_normal((heads, width)) * 2.0 / pairs.size


def _by_gradients(
    pairs: Pairs, delta: Float64, heads: int, points: int, rng: np.random.Generator
) -> Iterator[tuple[str, Float64]]:
    d = len(delta)
    x = _base_points(pairs, delta, points, rng)
    step = pairs.size * _step(pairs, 3)
    moves = pairs.grid(np.linalg.qr(rng.standard_normal((d, d)))[0] * step)
    asked = pairs.grid((x[:, None, None] + np.stack([moves, -moves])).reshape(-1, d))
    rows = pairs.rows(asked, delta, like=2 * d)
    Y = rows.Y.reshape(2 * points, 2, d, -1)
    slopes = np.asarray(np.linalg.solve(2.0 * moves, Y[:, 0] - Y[:, 1]), np.float64)
    centres = np.concatenate([x, x - delta])
    found = decompose(slopes.transpose(1, 2, 0), heads, rng)
    if found is not None:
        A, _, profile = found
        yield "gradients", _lengths(pairs, A, profile, centres, rows.b[:: 2 * d], _first_derivative)


def _by_hessians(
    pairs: Pairs, delta: Float64, heads: int, rng: np.random.Generator
) -> Iterator[tuple[str, Float64]]:
    d, points = len(delta), 3
    x = _base_points(pairs, delta, points, rng)
    step = pairs.size * _step(pairs, 4)
    moves = pairs.grid(np.linalg.qr(rng.standard_normal((d, d)))[0] * step)
    first, second = np.triu_indices(d)
    around = np.vstack([np.zeros((1, d)), moves, moves[first] + moves[second]])
    asked = (x[:, None] + around).reshape(-1, d)
    rows = pairs.rows(asked, delta, like=len(around))
    Y = rows.Y.reshape(2 * points, len(around), -1)
    bent = Y[:, 1 + d :] - Y[:, 1 + first] - Y[:, 1 + second] + Y[:, :1]
    H = np.empty((2 * points, d, d, Y.shape[2]))
    H[:, first, second] = H[:, second, first] = bent
    back = np.linalg.inv(moves)
    H = np.einsum("ia,kabo,jb->kijo", back, H, back, optimize=True)
    found = decompose(H.transpose(1, 2, 0, 3).reshape(d, d, -1), heads, rng)
    if found is None:
        return
    A, _, profile = found
    spread = profile.T.reshape(heads, 2 * points, -1)
    centres = np.concatenate([x, x - delta])
    along = np.stack([np.linalg.svd(one)[0][:, 0] for one in spread], axis=1)
    yield (
        "second derivatives",
        _lengths(pairs, A, along, centres, rows.b[:: len(around)], _second_derivative),
    )


def _base_points(pairs: Pairs, delta: Float64, points: int, rng: np.random.Generator) -> Float64:
    """Return x (points, d), near 0 and far: queries are x and x - δ."""
    x = rng.standard_normal((points, len(delta)))
    radii = pairs.size * np.geomspace(*RADII, points)[:, None]
    return pairs.grid(x * radii / np.linalg.norm(x, axis=1, keepdims=True))


def _step(pairs: Pairs, order: int) -> float:
    """Return the length of differences, over that of tokens, which depends on the noise."""
    lost = pairs.limit(0.0) / max(pairs.magnitude(0.0), 1e-300)
    return float(np.clip(2.0 * lost ** (1.0 / order), 2e-3, 1.0))


def decompose(T: Float64, heads: int, rng: np.random.Generator) -> Factors | None:
    """Write a tensor (n1, n2, n3) as a sum of `heads` tensors of rank one, by Jennrich's method.

    Returns
    -------
    tuple of array (n_i, heads) or None
        The factors, those of two of the modes with columns of norm 1.  None where no two modes are
        of rank `heads`, or the third has only one slice or does not distinguish the heads.
    """
    size = float(np.abs(T).max(initial=0.0))
    if not 0.0 < size < np.inf:
        return None
    T = T / size
    ranks, bases = [], []
    for mode in range(3):
        unfolded = np.moveaxis(T, mode, 0).reshape(T.shape[mode], -1)
        basis, values, _ = np.linalg.svd(unfolded, full_matrices=False)
        ranks.append(values[heads - 1] / values[0] if len(values) >= heads else 0.0)
        bases.append(basis[:, :heads])
    third = min(range(3), key=lambda mode: ranks[mode] if T.shape[mode] > 1 else np.inf)
    one, two = (mode for mode in range(3) if mode != third)
    if min(ranks[one], ranks[two]) < INDEPENDENT:
        return None
    slices = np.moveaxis(T, third, 0) if third != 1 else np.moveaxis(T, 1, 0)
    core = np.einsum("ia,kij,jb->kab", bases[one], slices, bases[two], optimize=True)
    best, left, right = np.inf, None, None
    for _ in range(COMBINATIONS):
        M1, M2 = np.einsum("lk,kab->lab", rng.standard_normal((2, len(core))), core)
        try:
            _, P = np.linalg.eig(np.linalg.solve(M2.T, M1.T).T)
            if np.iscomplexobj(P):  # of pairs that noise has joined the real and imaginary parts
                P = np.where(np.abs(P.imag).max(axis=0) > 0.0, P.real + P.imag, P.real)
            P = P / np.linalg.norm(P, axis=0)
            R = np.linalg.solve(P, M2).T
            R = R / np.linalg.norm(R, axis=0)
            inside = np.linalg.inv(P) @ core @ np.linalg.inv(R).T
        except np.linalg.LinAlgError:
            continue
        off = inside * (1.0 - np.eye(heads))
        misfit = float(np.linalg.norm(off) / np.linalg.norm(inside))
        if misfit < best:
            best, left, right = misfit, P, R
    if left is None or right is None:
        return None
    inside = np.linalg.inv(left) @ core @ np.linalg.inv(right).T
    factors: dict[int, Float64] = {
        one: bases[one] @ left,
        two: bases[two] @ right,
        third: size * np.einsum("khh->kh", inside),
    }
    return factors[0], factors[1], factors[2]


def _first_derivative(score: Float64) -> Float64:
    return np.asarray(1.0 - np.tanh(0.5 * score) ** 2)


def _second_derivative(score: Float64) -> Float64:
    tau = np.tanh(0.5 * score)
    return np.asarray(tau * (1.0 - tau**2))


def _lengths(
    pairs: Pairs, A: Float64, profile: Float64, centres: Float64, b: Float64, shape: Profile
) -> Float64:
    """Give directions A (d, H) the lengths (and biases) whose profile over base points fits best.

    A profile (points, H) determines a head's a_h up to a factor of the profile.
    """
    A = A / np.linalg.norm(A, axis=0)
    lengths = np.concatenate([LENGTHS, -LENGTHS]) * np.sqrt(len(A)) / pairs.size
    biases = BIASES if pairs.bias else np.zeros(1)
    score = (centres @ A)[:, :, None, None] * lengths[:, None] + biases + b[:, None, None, None]
    predicted = shape(score)
    norm = np.sqrt(np.sum(predicted**2, axis=0)) + 1e-300
    like = np.abs(np.einsum("khlb,kh->hlb", predicted, profile)) / norm
    best = like.reshape(len(A.T), -1).argmax(axis=1)
    at, of = np.unravel_index(best, like.shape[1:])
    found = (A * lengths[at]).T
    return np.hstack([found, biases[of][:, None]]) if pairs.bias else np.asarray(found)
