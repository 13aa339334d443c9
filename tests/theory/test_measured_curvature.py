"""Curvature enclosed in balls and on segments: never violated, and close where balls are small."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import theory_instances as instances

import mhfast as mh
from mhfast import theory
from mhfast.theory import measured_curvature as module


def instance(seed: int) -> tuple[mh.Classifier, mh.Dataset]:
    """A problem small enough for dense Hessians: any query side, weights, scale and saturation."""
    rng = np.random.default_rng(seed)
    n, T, d = int(rng.integers(2, 6)), int(rng.integers(2, 5)), int(rng.integers(1, 4))
    H = int(rng.integers(1, 4))
    query, external, q = instances.query_side(rng, seed % 3, n, T, d)
    size = 10 ** rng.uniform(-1, 0.5)
    X = size * (rng.standard_normal((n, T, d)) + 3 * (seed % 2) * rng.standard_normal(d))
    data = mh.Dataset(X, instances.labels(rng, n), query=external)
    start = instances.classifier(
        rng, H, d, q, 10 ** rng.uniform(-1, 1), query=query, scale=-0.7 if seed % 4 == 3 else 1.0
    )
    return start, data


def away(model: mh.Classifier, rng: np.random.Generator, distance: float) -> mh.Classifier:
    """Move a model by so much in a random direction."""
    step = mh.Gradients(W=rng.standard_normal(model.W.shape), U=rng.standard_normal(model.U.shape))
    return model + (distance / float(mh.norm(step))) * step


def ends(model: mh.Classifier, data: mh.Dataset) -> tuple[float, float]:
    """The extreme eigenvalues of the Hessian, by complex steps."""
    values = np.linalg.eigvalsh(instances.dense_hessian(model, data))
    return float(values[0]), float(values[-1])


def radius(around: theory.LocalCurvature, rng: np.random.Generator) -> float:
    """A radius in which outputs change by .001 to 1 to first order."""
    return float(10 ** rng.uniform(-3, 0) / around.gradients.max())


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 10))]
)
def test_two_hundred_balls_are_never_violated(part: int) -> None:
    closest = 0.0
    for seed in range(20 * part, 20 * part + 20):
        model, data = instance(seed)
        rng = np.random.default_rng([seed, 1])
        around = theory.local_curvature(model, data)
        far = radius(around, rng)
        for share in (0.0, 0.3, 1.0, 1.0):
            r = share * far
            low, high = ends(away(model, rng, r), data)
            # Complex steps are exact to rounding of the eigenvalues.
            rounding = 1e-12 * max(abs(low), abs(high))
            assert low >= around.smallest(r) - rounding
            assert high <= around.largest(r) + rounding
            if share == 0.0:
                closest = max(closest, low / float(around.smallest(r)))
    # At the model itself the bound by N leaves out G only.
    assert closest > 0.9


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 25))]
)
def test_two_hundred_segments_are_never_violated(part: int) -> None:
    """Steps of gradient descent, sampled at eleven points each."""
    ratios = []
    for seed in range(8 * part, 8 * part + 8):
        start, data = instance(seed)
        rng = np.random.default_rng([seed, 2])
        reached = radius(theory.local_curvature(start, data), rng)
        gradient = mh.value_and_grad(start, data)[1]
        end = start - (reached / float(mh.norm(gradient))) * gradient
        bounds = theory.segment_curvature(start, end, data, parts=1 + seed % 3)
        step = mh.Gradients(W=end.W - start.W, U=end.U - start.U)
        found = [ends(start + s * step, data) for s in np.linspace(0.0, 1.0, 11)]
        low, high = min(f[0] for f in found), max(f[1] for f in found)
        rounding = 1e-12 * max(abs(low), abs(high))
        assert bounds.smallest <= low + rounding
        assert high <= bounds.largest + rounding
        ratios.append(bounds.largest / high)
        # Many parts: no further from the truth than a few parts.
        finer = theory.segment_curvature(start, end, data, parts=4 * (1 + seed % 3))
        assert bounds.smallest <= finer.smallest <= low + rounding
        assert high - rounding <= finer.largest
    assert min(ratios) < 1.5


def test_blocks_are_second_derivatives() -> None:
    for seed in range(12):
        model, data = instance(seed)
        rng = np.random.default_rng(seed)
        c = rng.standard_normal(data.n)
        d, rows = model.dim, model.U.shape[1]
        whole = 0.0
        for i in range(data.n):
            alone = replace(data.subset([i]), y=np.array([-1.0]))  # the linear loss is then Φ
            whole = whole + c[i] * instances.dense_hessian(model, alone, loss="linear")
        found = list(module._blocks(model, data, c))
        assert len(found) == model.heads
        for h, block in enumerate(found):
            of_W = np.arange(h * d * d, (h + 1) * d * d)
            of_U = model.W.size + np.arange(h * rows * d, (h + 1) * rows * d)
            at = np.concatenate([of_W, of_U])
            # Sums of up to 20 rows of tokens of size 30.
            size = np.abs(whole).max()
            np.testing.assert_allclose(block, whole[np.ix_(at, at)], atol=1e-11 * size)


def test_blocks_of_samples_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = instance(7)
    c = np.linspace(-1.0, 2.0, data.n)
    whole = list(module._blocks(model, data, c))
    monkeypatch.setattr(module, "BLOCK", 1)
    for one, all_of_it in zip(module._blocks(model, data, c), whole, strict=True):
        np.testing.assert_allclose(one, all_of_it, rtol=1e-12, atol=1e-14 * np.abs(one).max())


def test_third_derivative_by_hand() -> None:
    """One head, tokens ±1: Φ = Σ_t u_t tanh(z_t w), so that derivatives are known."""
    data = mh.Dataset(np.array([[[1.0], [-1.0]]]), [1.0])
    u = 0.8
    model = mh.Classifier(np.zeros((1, 1, 1)), np.array([[[u], [-u]]]))
    around = theory.local_curvature(model, data)
    assert around.spreads == pytest.approx([2.0])
    assert around.sizes == pytest.approx([2.0])
    total = u * math.sqrt(2)
    assert around.readout == pytest.approx(total)
    # By the formulas of the docs, with s = δ = 2 and q = 2.
    root = math.sqrt(2)
    assert module.second(around, np.zeros(1)) == pytest.approx(
        [root * 2 * 2 / 8 * (total + math.sqrt(total**2 + 4))]
    )
    third = root * 8 * math.hypot(2 * total / 4, 3 / 8)
    assert module.third(around, np.zeros(1)) == pytest.approx([third])
    # ∂³Φ/∂w³ = -2 Σ_t u_t z_t³ = -4u and ∂³Φ/∂w²∂u_t = 0 at w = 0.
    assert 4 * u <= third
    r = 0.1
    gradient = math.sqrt(2 * u * 2 * u)  # W: Σ_t u_t z_t = 2u; U: pooled tokens are 0
    assert around.gradients == pytest.approx([gradient])
    second = float(module.second(around, np.array([r]))[0])
    assert module.outputs(around, np.array([r])) == pytest.approx(
        [gradient * r + second * r * r / 2]
    )


def test_many_equal_heads_are_one_divided_by_a_square_root() -> None:
    """Each head enters Φ by 1/√H, and derivatives by different heads do not add up."""
    rng = np.random.default_rng(0)
    data = mh.Dataset(rng.standard_normal((4, 5, 3)), np.ones(4), query=rng.random((4, 2, 3)))
    W, U = rng.standard_normal((1, 3, 3)), rng.standard_normal((1, 2, 3))
    one, seven = (
        theory.local_curvature(mh.Classifier(np.tile(W, (H, 1, 1)), np.tile(U, (H, 1, 1))), data)
        for H in (1, 7)
    )
    for bound in (module.second, module.third):
        ratio = bound(one, np.array([0.3])) / bound(seven, np.array([0.3]))
        np.testing.assert_allclose(ratio, math.sqrt(7.0), rtol=1e-12)


def test_weights_are_those_of_the_loss() -> None:
    model, data = instance(4)
    weight = np.arange(data.n, dtype=float)  # the first takes no part
    weighted = replace(data, weight=weight)
    around = theory.local_curvature(model, weighted)
    assert around.weights == pytest.approx(weight[1:] / weight.sum())
    twice = data.subset(np.repeat(np.arange(data.n), np.arange(data.n)))
    same = theory.local_curvature(model, twice)
    for r in (0.0, 1e-2):
        assert around.smallest(r) == pytest.approx(same.smallest(r), rel=1e-10)
        assert around.largest(r) == pytest.approx(same.largest(r), rel=1e-10)


def test_radii_as_arrays_and_overflow() -> None:
    model, data = instance(1)
    around = theory.local_curvature(model, data)
    radii = np.array([[0.0, 1e-3, 1e-2], [0.1, 1e3, np.inf]])
    low, high = around.smallest(radii), around.largest(radii)
    assert low.shape == high.shape == (2, 3)
    assert low[0, 1] == around.smallest(1e-3)
    assert high[1, 0] == around.largest(0.1)
    assert (np.diff(low.ravel()[:4]) < 0).all()
    assert (np.diff(high.ravel()[:4]) > 0).all()
    assert low[1, 2] == -np.inf
    assert high[1, 2] == np.inf


def test_errors() -> None:
    model, data = instance(0)
    runs = mh.Dataset(np.stack([data.X, data.X]), data.y)
    plain = replace(model, query=None)
    arguments: Any = {"parts": 0}
    with pytest.raises(ValueError, match="X: expected one data set"):
        theory.local_curvature(plain, runs)
    with pytest.raises(ValueError, match="parts"):
        theory.segment_curvature(model, model, data, **arguments)
    with pytest.raises(TypeError, match="model: expected a Classifier"):
        theory.local_curvature(mh.Layer.zeros(2, 3, 3), data)  # type: ignore[arg-type]
    other = replace(model, scale=2.0)
    with pytest.raises(ValueError, match="last: expected the scale of first"):
        theory.segment_curvature(model, other, data)


@pytest.mark.parametrize("query", [None, 0, -1])
def test_padding_and_causal_rows(query: int | None) -> None:
    """Against the library's own Hessian, which other tests compare with finite differences."""
    rng = np.random.default_rng(3)
    n, T, d = 4, 5, 2
    X = rng.standard_normal((n, T, d))
    for i, length in enumerate((3, 5, 1, 4)):
        X[i, length:] = 1e3  # must not matter
    data = mh.Dataset(X, instances.labels(rng, n), lengths=np.array([3, 5, 1, 4]))
    model = instances.classifier(
        rng, 2, d, T if query is None else 1, 3.0, query=query, causal=query is None
    )
    around = theory.local_curvature(model, data)
    found = theory.hessian_extremes(model, data)
    # N is most of the smallest eigenvalue, and adds what it has at its other end to the largest.
    assert 1.5 * found.smallest < around.smallest(0.0) <= found.smallest < 0.0
    assert found.largest <= around.largest(0.0) < 2 * found.largest
    moved = away(model, rng, 0.01)
    there = theory.hessian_extremes(moved, data)
    assert around.smallest(0.01) <= there.smallest
    assert there.largest <= around.largest(0.01)
