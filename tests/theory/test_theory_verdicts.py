"""Verdicts hold beyond rounding: seeds, one unit in the last place of the inputs, any scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import theory_instances as instances

import mhfast as mh
from mhfast import theory

pytestmark = pytest.mark.verdict


def nudged(seed: int, array: Any) -> Any:
    """Every number up, down or left alone at random, by one unit in the last place."""
    way = np.random.default_rng(seed).integers(-1, 2, array.shape)
    return np.where(way, np.nextafter(array, np.where(way > 0, np.inf, -np.inf)), array).astype(
        array.dtype
    )


def nudges(seed: int, model: Any, data: mh.Dataset) -> tuple[Any, mh.Dataset]:
    moved = mh.Classifier(
        nudged(seed, model.W), nudged(seed + 1, model.U), query=model.query, scale=model.scale
    )
    query = None if data.query is None else nudged(seed + 3, data.query)
    return moved, mh.Dataset(nudged(seed + 2, data.X), data.y, query=query)


def verdict(found: Any) -> str:
    assert not (found.separable and found.inseparable)
    return "yes" if found.separable else "no" if found.inseparable else "hidden by rounding"


def apart(seed: int) -> tuple[Any, mh.Dataset]:
    rng = np.random.default_rng(seed)
    data = mh.Dataset(rng.standard_normal((6, 3, 5)), instances.labels(rng, 6))
    return instances.classifier(rng, 7, 5, 3, 1.0), data


def twins(seed: int, by: float = 0.0) -> tuple[Any, mh.Dataset]:
    """The first sample once more, with the other label, moved by this much."""
    model, data = apart(seed)
    moved = data.X[:1] + by * np.random.default_rng(seed + 99).standard_normal((1, 3, 5))
    return model, mh.Dataset(np.concatenate([data.X, moved]), np.append(data.y, -data.y[0]))


def reordered(seed: int) -> tuple[Any, mh.Dataset]:
    """The first sample with the other label and its tokens in another order: equal by one query."""
    rng = np.random.default_rng(seed)
    X, Z = rng.standard_normal((6, 4, 5)), rng.standard_normal((6, 1, 5))
    y = instances.labels(rng, 6)
    X[5], Z[5], y[5] = X[0, [2, 3, 0, 1]], Z[0], -y[0]
    return instances.classifier(rng, 7, 5, 1, 1.0), mh.Dataset(X, y, query=Z)


def crowded(seed: int) -> tuple[Any, mh.Dataset]:
    """More samples than dimensions of the features, with random labels."""
    rng = np.random.default_rng(seed)
    data = mh.Dataset(rng.standard_normal((40, 3, 2)), instances.labels(rng, 40))
    return instances.classifier(rng, 1, 2, 1, 1.0, query=0), data


MARGINS: list[tuple[Callable[[int], Any], str]] = [
    (apart, "yes"),
    (lambda seed: twins(seed, 1e-3), "yes"),
    (lambda seed: twins(seed, 1e-12), "no"),
    (twins, "no"),
    (reordered, "no"),
    (crowded, "no"),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("make", "expected"), MARGINS)
def test_tangent_features_are_separable_or_not(make: Any, expected: str, seed: int) -> None:
    model, data = make(seed)
    first = theory.ntk_margin(model, data)
    assert verdict(first) == expected
    for move in range(3):
        assert verdict(theory.ntk_margin(*nudges(move, model, data))) == expected
    if expected == "yes":
        assert first.margin > 2 * first.resolution
        assert abs(first.gap) < 1e-6 * first.margin
    else:
        assert first.margin == 0
        assert first.dual <= first.resolution


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["apart", "inside", "copies", "between two"])
def test_tokens_are_separable_or_not(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((3, 4, 7))
    if kind == "inside":
        X[0, 0] = X[0, 1:].mean(axis=0)
    if kind == "between two":
        X[1, 0] = 0.3 * X[1, 1] + 0.7 * X[1, 2]
    if kind == "copies":
        X[:, 3] = X[:, 0]
    expected = "yes" if kind in ("apart", "copies") else "no"
    best = [0, 0, 0]
    found = theory.token_svm(mh.Dataset(X, np.ones(3)), best, query=-1)
    assert verdict(found) == expected
    for move in range(3):
        moved = theory.token_svm(mh.Dataset(nudged(move, X), np.ones(3)), best, query=-1)
        assert verdict(moved) == expected
        assert moved.margin == pytest.approx(found.margin, rel=1e-9)


def test_what_rounding_hides_is_told_from_what_is_inseparable() -> None:
    """Two opposite features δ apart: margin δ/2, against a resolution of about 1e-7."""

    def found(apart: float) -> Any:
        X = np.zeros((2, 2, 3))
        X[:, :, 0], X[0, :, 1], X[1, :, 1] = 1, apart / 2, -apart / 2
        model = mh.Classifier(np.zeros((1, 3, 3)), np.zeros((1, 2, 3)))
        return theory.ntk_margin(model, mh.Dataset(X, [1.0, -1.0]))

    # At W = U = 0 a feature is each row's mean token: f = sqrt(2) (1, ±δ/2, 0).
    clear = found(1e-3)
    assert clear.margin == pytest.approx(math.sqrt(2) * math.sqrt(2) * 1e-3 / 2, rel=1e-6)
    # r² = 10 (n + sqrt(P)) 2⁻⁵², n = 2, P = 9 + 6, of the longest feature sqrt(2).
    r = math.sqrt(10 * (2 + math.sqrt(15)) * 2.0**-52)
    assert clear.resolution == pytest.approx(math.sqrt(2) * math.sqrt(2) * r, rel=1e-5)
    expected = {0.5: "no", 1.5: "hidden by rounding", 3.0: "yes"}  # margins in units of r
    for times, verdict_there in expected.items():
        assert verdict(found(2 * times * r)) == verdict_there, times


@pytest.mark.parametrize("seed", range(4))
def test_float32_counts_as_given_to_its_own_last_place(seed: int) -> None:
    model, data = twins(seed)
    single = mh.Classifier(model.W.astype(np.float32), model.U.astype(np.float32))
    few = mh.Dataset(data.X.astype(np.float32), data.y)
    for move in range(3):
        assert verdict(theory.ntk_margin(*nudges(move, single, few))) == "no"
    X = few.X[:3].copy()
    X[0, 0] = X[0, 1:].mean(axis=0)
    for move in range(3):
        moved = mh.Dataset(nudged(move, X), np.ones(3))
        assert verdict(theory.token_svm(moved, [0, 0, 0], query=-1)) == "no"


SCALES = [(1e-80, np.float64), (1e80, np.float64), (1e-15, np.float32), (1e15, np.float32)]


def rescaled(model: Any, data: mh.Dataset, c: float, dtype: Any) -> tuple[Any, mh.Dataset]:
    """Tokens c times as long; W and U such that attention and outputs are the same."""
    arrays = (model.W / c / c).astype(dtype), (model.U / c).astype(dtype)
    return mh.Classifier(*arrays), mh.Dataset((data.X * c).astype(dtype), data.y)


def rounding(dtype: Any) -> float:
    return 1e-12 if dtype == np.float64 else 1e-5


@pytest.mark.parametrize(("c", "dtype"), SCALES)
def test_margins_scale_with_the_tokens(c: float, dtype: Any) -> None:
    model, data = apart(0)
    scaled = rescaled(model, data, c, dtype)
    # Gradients by U are as long as tokens, by W as tokens squared: the inverse of the parameters.
    for wrt, power in (("U", 1), ("W", 2)):
        one, found = theory.ntk_margin(model, data, wrt=wrt), theory.ntk_margin(*scaled, wrt=wrt)
        # In float32 what the given numbers leave open is more than the rounding of float64.
        for each in ("margin", "dual", "resolution")[: 3 if dtype == np.float64 else 2]:
            exact = getattr(one, each) * (c if power == 1 else c * c)
            assert getattr(found, each) == pytest.approx(exact, rel=100 * rounding(dtype))
        assert abs(found.gap) < 1e-10 * found.margin
    model, data = twins(0)
    assert verdict(theory.ntk_margin(*rescaled(model, data, c, dtype))) == "no"


@pytest.mark.parametrize(("c", "dtype"), SCALES)
def test_tokens_of_any_length_are_separated(c: float, dtype: Any) -> None:
    X = np.random.default_rng(2).standard_normal((4, 3, 6))
    W = np.random.default_rng(3).standard_normal((6, 6))
    best = [0, 1, 2, 0]
    one, found = (
        theory.token_svm(mh.Dataset(data, np.ones(4)), best, query=-1)
        for data in (X, (c * X).astype(dtype))
    )
    assert found.margin == pytest.approx(one.margin * c * c, rel=rounding(dtype))
    np.testing.assert_allclose(
        found.direction.W, one.direction.W / c / c, rtol=0,
        atol=100 * rounding(dtype) * np.abs(one.direction.W / c / c).max(),
    )  # fmt: skip
    assert abs(found.gap) < 1e-10 * found.margin
    one, found = (
        theory.token_svm(mh.Dataset(data, np.ones(4)), best, wrt="prompt", W=of)
        for data, of in ((X, W), ((c * X).astype(dtype), W / c))
    )
    assert found.margin == pytest.approx(one.margin, rel=100 * rounding(dtype))
    X[0, 0] = X[0, 1:].mean(axis=0)
    inside = theory.token_svm(mh.Dataset((c * X).astype(dtype), np.ones(4)), best, query=-1)
    assert verdict(inside) == "no"


@pytest.mark.parametrize(("c", "dtype"), [*SCALES, (1e-160, np.float64), (1e150, np.float64)])
def test_hull_points_of_any_scale(c: float, dtype: Any) -> None:
    F = np.array([[1.0, 0.0], [1.0, 2.0], [0.0, 2.0]])  # nearest to 0: (4/5, 2/5) of rows 0 and 2
    weights = theory.nearest_point((F @ F.T) * c * (c if dtype == np.float32 else 1.0))
    np.testing.assert_allclose(weights, [0.8, 0, 0.2], atol=1e-14)


@pytest.mark.parametrize(("c", "dtype"), SCALES)
def test_spectra_and_distances_scale_with_the_tokens(c: float, dtype: Any) -> None:
    model, data = apart(1)
    scaled = rescaled(model, data, c, dtype)
    one, found = (theory.hessian_extremes(*of, wrt="U") for of in ((model, data), scaled))
    assert found.largest == pytest.approx(one.largest * c * c, rel=rounding(dtype))
    if dtype == np.float32:  # c⁴ is a number, of float64
        one, found = (theory.hessian_extremes(*of, wrt="W") for of in ((model, data), scaled))
        assert found.largest == pytest.approx(one.largest * c**4, rel=rounding(dtype))
        assert found.smallest == pytest.approx(one.smallest * c**4, rel=rounding(dtype))
        assert found.largest_vector.W.dtype == dtype
    # Of short tokens the gradients by U are all that matters, of long ones those by W.
    wrt, power = ("U", c) if c < 1 else ("W", c * c)
    margin = theory.ntk_margin(model, data, wrt=wrt).margin
    curve = theory.realizability(*scaled, epsilon=[0.1])
    s = (2 * max(curve.start.output, 1e-3) + math.log(10)) / margin / power
    assert curve.distance[0] == pytest.approx(math.sqrt(2) * s, rel=100 * rounding(dtype))
    assert curve.met[0] == (c < 1)
    bounds = theory.curvature_bounds(*scaled)
    plain = theory.curvature_bounds(model, data)
    reach = plain.token_norm**2 * plain.readout * c
    expected = math.sqrt(3) * plain.token_norm * c * (reach + 1)
    assert bounds.b1 == pytest.approx(expected, rel=rounding(dtype))
