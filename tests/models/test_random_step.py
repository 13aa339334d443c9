"""The randomised first step, and the closed forms of the tokenized mixture that follow from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mhfast as mh
from mhfast import reference

random_step = mh.Classifier.random_step


def census(T: int, zeta: float, S: float, M: int) -> mh.Dataset:
    """A noiseless mixture in which both labels see exactly the same contexts, in every share."""
    frame = S * np.eye(M + 2, M + 3)
    relevant = round(zeta * T)
    rows = [
        [label] * relevant + [2 + (j + t) % M for t in range(T - relevant)]
        for label in (0, 1)
        for j in range(M)
    ]
    return mh.Dataset(frame[np.array(rows)], np.repeat([-1.0, 1.0], M))


def test_formula() -> None:
    data = mh.data.tokenized_mixture(9, 10, 7, noise=0.4, seed=1)
    model = random_step(data, 5, seed=0)
    assert model.W.shape == (5, 7, 7)
    assert not model.W.any()
    step = (data.y[:, None] * data.X.mean(axis=1)).mean(axis=0) / 2
    # Means of 9 and 10 numbers in another order.
    np.testing.assert_allclose(np.abs(model.U), np.broadcast_to(np.abs(step), (5, 10, 7)), 1e-13)
    alpha = np.sign(model.U[:, 0] @ step)
    np.testing.assert_allclose(model.U, alpha[:, None, None] * model.U[:1] * alpha[0])


def test_it_is_a_signed_gradient_step_from_zero() -> None:
    data = mh.data.tokenized_mixture(9, 10, 7, noise=0.4, seed=1)
    weighted = mh.Dataset(data.X, data.y, weight=np.arange(1.0, 10.0))
    for part in (data, weighted):
        U = random_step(part, 5, seed=3).U
        zero = mh.Classifier.zeros(5, 10, 7)
        gU = reference.value_and_grad(zero, part.X, part.y, weight=part.weight)[1]["U"]
        alpha = -np.sign((U * gU).sum(axis=(1, 2)))
        # The same means in another order.
        np.testing.assert_allclose(U, -math.sqrt(5) * alpha[:, None, None] * gU, rtol=1e-12)


def test_signs_are_fair_and_seeded() -> None:
    data = mh.data.tokenized_mixture(9, 10, 7, seed=1)
    U = random_step(data, 400, seed=0).U[:, 0]
    alpha = np.sign(U @ U[0])
    assert abs(alpha.mean()) < 0.2  # standard deviation .05
    assert random_step(data, 400, seed=0) == random_step(data, 400, seed=0)
    assert random_step(data, 400, seed=0) != random_step(data, 400, seed=1)


def test_outputs_do_not_grow_with_heads() -> None:
    data = mh.data.tokenized_mixture(50, 10, 7, seed=1)
    sizes = [
        np.mean([np.abs(random_step(data, H, seed=seed)(data.X)).mean() for seed in range(40)])
        for H in (4, 64)
    ]
    # Both are means of |Σ α_h| / sqrt(H) over 40 draws: about .8 with a standard deviation of .1.
    assert 0.5 < sizes[1] / sizes[0] < 2.0


def test_rows_follow_the_query() -> None:
    data = mh.data.tokenized_mixture(9, 10, 7, seed=1, dtype=np.float32)
    model = random_step(data, 3, seed=0, query=-1, scale=0.5)
    assert model.U.shape == (3, 1, 7)
    assert (model.query, model.scale, model.dtype) == (-1, 0.5, np.float32)
    external = mh.Dataset(data.X, data.y, query=data.X[:, :4])
    assert random_step(external, 3, seed=0).U.shape == (3, 4, 7)


def test_the_mean_token_is_that_of_the_tokens_there_are() -> None:
    data = mh.data.tokenized_mixture(9, 10, 7, noise=0.4, seed=1)
    lengths = np.arange(9)
    short = mh.Dataset(data.X, data.y, lengths=lengths)
    zero = mh.Classifier.zeros(3, 10, 7)
    gradient = reference.value_and_grad(zero, data.X, data.y, lengths=lengths)[1]["U"][:, 0]
    U = random_step(short, 3, seed=0).U[:, 0]
    # Row 0 asks in every sample that has a token: one mean of tokens after the other.
    np.testing.assert_allclose(np.abs(U), math.sqrt(3) * np.abs(gradient), rtol=1e-12)


def test_errors() -> None:
    data = mh.data.tokenized_mixture(9, 10, 7, seed=1)
    with pytest.raises(TypeError, match="data: expected a Dataset, got ndarray"):
        random_step(data.X, 3, seed=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed: expected one integer"):
        random_step(data, 3, seed=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed: expected at least one, got 0"):
        random_step(data, 3, seed=[])
    layer = mh.Dataset(data.X, np.ones((9, 10, 2)))
    with pytest.raises(ValueError, match=r"y: expected shape \(n,\) = \(9,\), got \(9, 10, 2\)"):
        random_step(layer, 3, seed=0)
    with pytest.raises(ValueError, match=r"y: expected -1 or 1, got 0\.0 at index 2"):
        random_step(mh.Dataset(data.X[:3], np.array([1.0, -1.0, 0.0])), 3, seed=0)
    with pytest.raises(ValueError, match="heads: expected an integer of at least 1, got 0"):
        random_step(data, 0, seed=0)


MIXTURES = [(10, 0.2, 1.0, 3), (10, 0.3, 2.0, 4), (20, 0.25, 3.0, 2)]


@pytest.mark.parametrize(("T", "zeta", "S", "M"), MIXTURES)
def test_population_first_step(T: int, zeta: float, S: float, M: int) -> None:
    data = census(T, zeta, S, M)
    U = random_step(data, 1, seed=0).U[0]
    difference = np.zeros(M + 3)
    difference[:2] = [-S, S]  # u* = μ₊ - μ₋
    # Contexts cancel exactly up to the rounding of the means.
    np.testing.assert_allclose(
        np.abs(U), np.tile(np.abs(zeta / 4 * difference), (T, 1)), atol=1e-15
    )
    assert (U[:, :2] * U[0, 1] * [-1, 1] > 0).all()


@pytest.mark.parametrize(
    ("case", "linear", "attention"),
    list(zip(MIXTURES, [0.4472, 1.3416, 2.3717], [0.0283, 0.7969, 7.7503], strict=True)),
)
def test_margins_of_the_separating_direction(
    case: tuple[int, float, float, int], linear: float, attention: float
) -> None:
    T, zeta, S, M = case
    data, H = census(*case), 4
    start = random_step(data, H, seed=2)
    u = data.X[-1, 0] - data.X[0, 0]
    alpha = np.sign(start.U[:, 0] @ u)
    nu = S * np.eye(M + 2, M + 3)
    W = nu[1:2].T @ nu[1:2] + nu[:1].T @ nu[:1]
    W = W + sum(np.outer(context, nu[0] + nu[1]) for context in nu[2:])
    assert np.linalg.norm(W) == pytest.approx(S**2 * math.sqrt(2 * (M + 1)), rel=1e-14)
    W_part = alpha[:, None, None] * W / (math.sqrt(H) * np.linalg.norm(W))
    U_part = np.tile(u, (H, T, 1)) / (math.sqrt(H * T) * np.linalg.norm(u))
    margins = []
    for x, y in zip(data.X, data.y, strict=True):
        _, g = reference.value_and_grad(start, x[None], [y], loss="linear")
        margins.append((-(g["U"] * U_part).sum(), -(g["W"] * W_part).sum()))
    gamma_linear = S * math.sqrt(T) * zeta / math.sqrt(2)
    gamma_attention = T * zeta**2 * (1 - zeta) * S**4 / (4 * math.sqrt(2 * (M + 1)))
    # Exact for every sample of the noiseless mixture; sums of a few hundred products.
    np.testing.assert_allclose(margins, [[gamma_linear, gamma_attention]] * len(margins), 1e-12)
    assert gamma_linear == pytest.approx(linear, abs=5e-5)
    assert gamma_attention == pytest.approx(attention, abs=5e-5)


@pytest.mark.parametrize(
    ("case", "margin"), list(zip(MIXTURES, [2.236, 4.472, 9.487], strict=True))
)
def test_margin_of_saturated_attention(case: tuple[int, float, float, int], margin: float) -> None:
    T, _, S, M = case
    data = census(*case)
    nu = S * np.eye(M + 2, M + 3)
    W = nu[1:2].T @ nu[1:2] + nu[:1].T @ nu[:1]
    W = W + sum(np.outer(context, nu[0] + nu[1]) for context in nu[2:])
    u = nu[1] - nu[0]
    U = np.tile(u, (1, T, 1)) / (math.sqrt(T) * np.linalg.norm(u))
    margins: Any = data.y * reference.outputs(mh.Classifier(1e3 * W[None], U), data.X)
    np.testing.assert_allclose(margins, S * math.sqrt(T) / math.sqrt(2), rtol=1e-13)
    assert margins.min() == pytest.approx(margin, abs=5e-4)


def test_balanced_signs_cancel() -> None:
    data = mh.data.tokenized_mixture(9, 10, 7, noise=0.4, seed=1)
    model = random_step(data, 6, seed=0, balanced=True)
    alpha = np.sign(model.U[:, 0] @ model.U[0, 0])
    assert alpha.sum() == 0
    np.testing.assert_array_equal(model.U, alpha[:, None, None] * model.U[0])
    assert np.abs(model(data)).max() < 1e-15
    others = [random_step(data, 6, seed=seed, balanced=True) for seed in range(9)]
    assert any(other != model for other in others)
    runs = random_step(data, 6, seed=[0, 3], balanced=True)
    assert [runs[r] for r in range(2)] == [others[0], others[3]]
    with pytest.raises(ValueError, match="heads: expected an even number for balanced signs"):
        random_step(data, 5, seed=0, balanced=True)
