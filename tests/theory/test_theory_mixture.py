"""Closed forms of the tokenized mixture against numbers from data."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mhfast as mh
from mhfast import theory

CASES = [(10, 0.2, 1.0, 3), (10, 0.3, 2.0, 4), (20, 0.25, 3.0, 2)]  # T, ζ, S, M
VALUES = [(0.4472, 0.0283, 2.236), (1.3416, 0.7969, 4.472), (2.3717, 7.7503, 9.487)]


def mixture(T: int, zeta: float, S: float, M: int, n: int = 30, noise: float = 0.0) -> mh.Dataset:
    return mh.data.tokenized_mixture(
        n, T, M + 3, relevant_fraction=zeta, contexts=M, norm=S, seed=0, noise=noise,
        noise_kind="bounded" if noise else "none",
    )  # fmt: skip


def closed(T: int, zeta: float, S: float, M: int, noise: float = 0.0) -> theory.MixtureMargins:
    return theory.mixture_margins(T, relevant_fraction=zeta, norm=S, contexts=M, noise=noise)


@pytest.mark.parametrize(
    ("case", "values"),
    list(zip(CASES, VALUES, strict=True)),
)
def test_check_values(
    case: tuple[int, float, float, int], values: tuple[float, float, float]
) -> None:
    found = closed(*case)
    assert found.linear == pytest.approx(values[0], abs=5e-5)
    assert found.attention == pytest.approx(values[1], abs=5e-5)
    assert found.saturated == pytest.approx(values[2], abs=5e-4)
    assert found.total == found.linear + found.attention


@pytest.mark.parametrize("case", CASES)
def test_margins_at_the_population_first_step(case: tuple[int, float, float, int]) -> None:
    data, found = mixture(*case), closed(*case)
    signs = np.array([1.0, -1.0, -1.0, 1.0, 1.0])
    start = theory.population_first_step(data, signs)
    direction = theory.separating_direction(data, signs)
    for part in (direction.W, direction.U):
        assert np.linalg.norm(part) == pytest.approx(1, rel=1e-14)
    for i in range(5):
        _, g = mh.value_and_grad(start, data.subset([i]), loss="linear")
        # Exact without noise, for every sample: sums of a few hundred products.
        assert -np.vdot(g.U, direction.U) == pytest.approx(found.linear, rel=1e-10)
        assert -np.vdot(g.W, direction.W) == pytest.approx(found.attention, rel=1e-10)
    margin = theory.ntk_margin(start, data)
    assert margin.margin >= found.total * (1 - 1e-10)
    # The best direction is better, but not by orders of magnitude: both bounds can fail.
    assert margin.margin <= 3 * found.total


@pytest.mark.parametrize("case", CASES)
def test_saturated_attention(case: tuple[int, float, float, int]) -> None:
    data = mixture(*case)
    direction = theory.separating_direction(data, [1.0])
    model = mh.Classifier(1e4 * direction.W, direction.U)
    # Attention on other tokens is exp(-1e3) or less.
    np.testing.assert_allclose(data.y * model(data), closed(*case).saturated, rtol=1e-10)
    assert closed(*case).saturated == pytest.approx(closed(*case).linear / case[1], rel=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_population_first_step_is_the_mean_over_samples(
    case: tuple[int, float, float, int],
) -> None:
    data = mixture(*case, n=4000)
    sampled = mh.Classifier.random_step(data, 5, seed=3)
    u = data.truth["mu_plus"] - data.truth["mu_minus"]
    signs = np.sign(sampled.U[:, 0] @ u)
    population = theory.population_first_step(data, signs)
    assert not population.W.any()
    error = np.linalg.norm(sampled.U - population.U) / np.linalg.norm(population.U)
    assert error < 8 / math.sqrt(4000)  # means over 4000 samples, contexts included


@pytest.mark.parametrize("case", CASES)
def test_bounded_noise_lowers_the_linear_margin_by_no_more_than_stated(
    case: tuple[int, float, float, int],
) -> None:
    T, _, S, M = case
    noise = 0.1 * S
    data = mixture(*case, noise=noise)
    # |⟨z, μ⟩| ≤ ‖z‖ S.
    least = closed(*case, noise=noise * S).linear
    direction = theory.separating_direction(data, [1.0, -1.0])
    zeros = mh.Classifier.zeros(2, T, M + 3)
    margins = [
        -np.vdot(mh.value_and_grad(zeros, data.subset([i]), loss="linear")[1].U, direction.U)
        for i in range(data.n)
    ]
    assert least <= min(margins) < closed(*case).linear
    assert least > 0


def test_noise_enters_twice_and_by_the_context_tokens_only() -> None:
    # S sqrt(T) (ζ - 2 (1-ζ) Zμ/S²) / sqrt(2) with T = 8, S = 2, ζ = 1/4: 4 (1/4 - 3/2 Zμ/4).
    assert closed(8, 0.25, 2.0, 3, noise=0.4).linear == pytest.approx(0.4, rel=1e-14)
    assert closed(8, 1.0, 2.0, 3, noise=0.4).linear == pytest.approx(4.0, rel=1e-14)
    assert closed(8, 0.25, 2.0, 3, noise=0.4).attention == closed(8, 0.25, 2.0, 3).attention


def test_the_worst_noise_attains_the_linear_margin() -> None:
    """All noise against the label: z = -y (Zμ/S²) u* has ⟨z, μ_y⟩ = -Zμ and ⟨z, μ_-y⟩ = Zμ."""
    data = mixture(10, 0.3, 2.0, 4)
    u, S, Z = data.truth["mu_plus"] - data.truth["mu_minus"], 2.0, 0.6
    mean = data.truth["mu_plus"] if data.y[0] > 0 else data.truth["mu_minus"]
    X = data.X[:1].copy()
    X[:, ~(np.abs(X[0] - mean).max(axis=1) < 1e-12)] -= data.y[0] * Z / S**2 * u
    model = mh.Classifier.zeros(2, 10, 7)
    direction = theory.separating_direction(data, [1.0, -1.0])
    _, g = mh.value_and_grad(model, mh.Dataset(X, data.y[:1]), loss="linear")
    assert -np.vdot(g.U, direction.U) == pytest.approx(closed(10, 0.3, 2.0, 4, Z).linear, rel=1e-12)


def test_mixtures_of_any_norm() -> None:
    for S in (1e-200, 1e-80, 1e80):
        found, one = closed(10, 0.2, S, 3, 0.05 * S * S), closed(10, 0.2, 1.0, 3, 0.05)
        assert found.saturated == pytest.approx(one.saturated * S, rel=1e-14)
        if S > 1e-150:  # else the noise is no number
            assert found.linear == pytest.approx(one.linear * S, rel=1e-14)
    for S in (1e-110, 1e110):
        direction, one = (
            theory.separating_direction(mixture(10, 0.2, of, 3), [1.0, -1.0]) for of in (S, 1.0)
        )
        np.testing.assert_allclose(direction.W, one.W, atol=1e-14)
        np.testing.assert_allclose(direction.U, one.U, atol=1e-14)


def test_no_noise_no_heads_no_matter() -> None:
    data = mixture(10, 0.2, 1.0, 3)
    single = theory.population_first_step(data, [1.0])
    many = theory.population_first_step(data, np.ones(16))
    np.testing.assert_array_equal(many.U, np.repeat(single.U, 16, axis=0))
    assert many.dtype == data.dtype
    assert theory.separating_direction(data, np.ones(16)).W.shape == (16, 6, 6)


def test_the_direction_of_float32_data_is_rounded_only_at_the_end() -> None:
    data = mh.data.tokenized_mixture(5, 10, 6, seed=0, dtype=np.float32)
    truth = {name: np.float64(value) for name, value in data.truth.items()}
    double = mh.Dataset(np.float64(data.X), np.float64(data.y), truth=truth)
    found, exact = (theory.separating_direction(each, [1, -1, -1]) for each in (data, double))
    for name in ("W", "U"):
        one, other = getattr(found, name), getattr(exact, name)
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other.astype(np.float32))


def test_errors() -> None:
    data = mh.data.planted_attention(3, 4, 5, 2, seed=0)
    with pytest.raises(ValueError, match="data: expected a Dataset of tokenized_mixture"):
        theory.separating_direction(data, [1.0])
    with pytest.raises(ValueError, match="signs: expected an array"):
        theory.population_first_step(mixture(10, 0.2, 1.0, 3), [0.5])
    with pytest.raises(ValueError, match="relevant_fraction: expected a number in"):
        closed(10, 1.2, 1.0, 3)
    with pytest.raises(ValueError, match="norm: expected a number above 0, got 0"):
        closed(10, 0.2, 0, 3)
    with pytest.raises(ValueError, match="noise: expected a number of at least 0, got -1"):
        closed(10, 0.2, 1.0, 3, noise=-1)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"norm: expected a finite number, got {bad}"):
            closed(10, 0.2, bad, 3)
        with pytest.raises(ValueError, match=f"noise: expected a finite number, got {bad}"):
            closed(10, 0.2, 1.0, 3, noise=bad)
        with pytest.raises(
            ValueError, match=f"relevant_fraction: expected a finite number, got {bad}"
        ):
            closed(10, bad, 1.0, 3)
    with pytest.raises(ValueError, match="contexts: expected an integer of at least 1, got 0"):
        closed(10, 0.2, 1.0, 0)
