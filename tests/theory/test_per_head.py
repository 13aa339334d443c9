"""The training guarantee with radii of single heads, and the regime in which it says something."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import theory_instances as instances

import mhfast as mh
from mhfast import theory
from mhfast.theory import per_head


def long_tokens(*, n: int = 12, T: int = 4, norm: float = 40.0, seed: int = 0) -> mh.Dataset:
    return mh.data.tokenized_mixture(
        n, T, 5, relevant_fraction=0.5, contexts=1, norm=norm, seed=seed
    )


def instance(seed: int) -> tuple[mh.Classifier, mh.Dataset]:
    """A small random problem: tokens of any length, few heads or many, signs balanced or not."""
    rng = np.random.default_rng(seed)
    n, T, d = int(rng.integers(2, 6)), int(rng.integers(2, 5)), int(rng.integers(2, 5))
    size = 10 ** rng.uniform(-1.5, 1.5)
    data = mh.Dataset(
        size * (rng.standard_normal((n, T, d)) + rng.standard_normal(d)), instances.labels(rng, n)
    )
    H = 2 * int(rng.integers(1, 40))
    if seed % 2:
        start = mh.Classifier.random_step(data, H, seed=seed, balanced=seed % 4 == 1)
    else:
        start = instances.classifier(rng, H, d, T, 0.3 / size)
    return start, data


@pytest.mark.parametrize("seed", range(12))
def test_curvature_bounds(seed: int) -> None:
    """Where all heads but one are 0 the bounds are for that head; one sample, so that L = -yΦ."""
    rng = np.random.default_rng(seed)
    T, d = int(rng.integers(2, 5)), 2
    X = 10 ** rng.uniform(-0.5, 0.5) * (rng.standard_normal((1, T, d)) + 5 * (seed % 2))
    data = mh.Dataset(X, [1.0])
    model = instances.classifier(rng, 1, d, T, 10 ** rng.uniform(-1, 1), scale=-0.7)
    sizes = per_head._sizes(model, data)
    hessian = instances.dense_hessian(model, data, loss="linear")
    gradient = mh.value_and_grad(model, data, loss="linear")[1]
    assert mh.norm(gradient) <= sizes.b1(sizes.readout)
    assert np.abs(np.linalg.eigvalsh(hessian)).max() <= sizes.b3(sizes.readout)
    old = theory.curvature_bounds(model, data)
    assert sizes.b1(sizes.readout) <= old.b1 * (1 + 1e-12)
    assert sizes.b3(sizes.readout) <= old.b3 * (1 + 1e-12)


def test_curvature_bounds_are_reached_within_a_factor() -> None:
    """Two opposite tokens, W = 0: the covariance under equal weights is as large as it can be."""
    data = mh.Dataset(np.array([[[1.0], [-1.0]]]), [1.0])
    for u, factor in ((0.0, 1.0), (50.0, 1.4)):
        model = mh.Classifier(np.zeros((1, 1, 1)), np.array([[[u], [-u]]]))
        sizes = per_head._sizes(model, data)
        assert (sizes.spread, sizes.rows) == (2.0, 2)
        # Φ = Σ_t u_t tanh(z_t w): gradient Σ_t |u_t z_t| by W, Hessian 2 |z_t| / sqrt(2) mixed.
        assert mh.norm(mh.value_and_grad(model, data, loss="linear")[1]) <= sizes.b1(model_u(model))
        assert sizes.b1(model_u(model)) == pytest.approx(math.sqrt(2 + 4 * u**2), rel=1e-12)
        hessian = instances.dense_hessian(model, data, loss="linear")
        if factor == 1.0:
            assert np.abs(np.linalg.eigvalsh(hessian)).max() == pytest.approx(
                sizes.b3(0.0), rel=1e-9
            )


def model_u(model: mh.Classifier) -> float:
    return float(np.linalg.norm(model.U.reshape(model.heads, -1), axis=1).max())


def check(start: mh.Classifier, data: mh.Dataset, found: theory.PerHeadBound, steps: int) -> None:
    """Compare a run with all that the theorem says about it."""
    record = {"loss": 1, "distance": 1, "U": 1}
    optimizer = mh.GradientDescent(found.lr)
    run = mh.train(start, data, steps=steps, optimizer=optimizer, record=record)
    rounding = 1 + 1e-9
    assert run.history["loss"][1:].mean() <= found.bound * rounding
    assert run.history["distance"].max() <= found.guarantee.radius * rounding
    moved = run.history["U"] - start.U
    assert np.sqrt((moved**2).sum(axis=(2, 3))).max() <= found.head_radius * rounding


def least_bound(start: mh.Classifier, data: mh.Dataset, steps: int) -> theory.PerHeadBound:
    """The least bound that applies, with comparators along the gradient."""
    sizes = per_head._sizes(start, data)
    longest = 4 / sizes.b1(sizes.readout) ** 2
    gradient = mh.value_and_grad(start, data)[1]
    found = [
        theory.per_head_bound(start, data, comparator=start - s * gradient, lr=lr, steps=steps)
        for lr in longest * np.array([0.9, 0.1, 1e-3])
        for s in longest * 4.0 ** np.arange(-3, 7)
    ]
    return min((f for f in found if f.applies), key=lambda f: f.bound)


@pytest.mark.parametrize("part", range(4))
def test_two_hundred_instances_obey_the_bound(part: int) -> None:
    below = 0
    for seed in range(50 * part, 50 * part + 50):
        start, data = instance(seed)
        steps = int(np.random.default_rng(seed).integers(1, 300))
        found = least_bound(start, data, steps)
        below += found.bound < found.guarantee.trivial
        check(start, data, found, steps)
    assert below >= 3


def test_bound_by_hand() -> None:
    """One sample of two tokens ±1 (d = 1), U = 0: everything by the formulas of the docs."""
    data = mh.Dataset(np.array([[[1.0], [-1.0]]]), [1.0])
    H, lr, k = 400, 0.5, 3
    start = mh.Classifier.zeros(H, 2, 1)
    W, U = np.full((H, 1, 1), 0.02), np.tile([[[0.03], [-0.03]]], (H, 1, 1))
    end = mh.Classifier(W, U)
    found = theory.per_head_bound(start, data, comparator=end, lr=lr, steps=k)
    loss = math.log(1 + math.exp(-20 * 0.06 * math.tanh(0.02)))
    square = 400 * (0.02**2 + 2 * 0.03**2)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert found.distance == pytest.approx(math.sqrt(square), rel=1e-12)
    a, before, after = found.a, lr * math.log(2), lr * k * loss
    grown = square + a * before + (2 + a) * after
    assert found.c == pytest.approx(grown / square, rel=1e-12)
    r = math.sqrt(2) / 20 * (before + grown / (2 - a))
    assert found.head_radius == pytest.approx(r, rel=1e-12)
    u = max(r, 0.03 * math.sqrt(2))
    b3 = math.sqrt(2) / 2 * (u + math.sqrt(u**2 + 4))  # δ = 2, hence w = 2u
    assert found.b3 == pytest.approx(b3, rel=1e-12)
    assert found.b1 == pytest.approx(math.sqrt(2 * (1 + u**2)), rel=1e-12)
    curvature = b3 / 20 * grown
    assert found.guarantee.conditions[0].value == pytest.approx(curvature, rel=1e-12)
    # a is the least that satisfies the inequality, up to the search.
    assert a / (1 + 1e-5) <= curvature / (1 - curvature / 8) <= a
    bound = ((2 + a) * loss + (square + a * before) / (lr * k)) / (2 - a)
    assert found.bound == pytest.approx(bound, rel=1e-12)
    rate = found.guarantee.conditions[1]
    assert rate.limit == pytest.approx(1 / (found.b1**2 / 4 + b3 / 20), rel=1e-12)
    assert found.applies
    check(start, data, found, k)


def test_conditions_that_are_not_met() -> None:
    data = long_tokens()
    start = mh.Classifier.random_step(data, 2, seed=0, balanced=True)
    direction = theory.ntk_margin(start, data).direction
    near = start + 1e-5 * direction
    fast = theory.per_head_bound(start, data, comparator=near, lr=1.0, steps=5)
    assert [c.met for c in fast.guarantee.conditions] == [False, False]
    assert not fast.applies
    assert fast.bound == math.inf
    slow = theory.per_head_bound(start, data, comparator=near, lr=1e-14, steps=5)
    assert slow.applies
    rate = slow.guarantee.conditions[1].limit
    short = theory.per_head_bound(start, data, comparator=near, lr=rate * 1.1, steps=5)
    assert [c.met for c in short.guarantee.conditions] == [True, False]


def test_many_heads_are_computed_by_two() -> None:
    data = long_tokens(norm=3.0)
    start = mh.Classifier.random_step(data, 60, seed=3, balanced=True)
    ours = theory.best_bound(data, 30, heads=60)
    theirs = theory.best_bound(data, 30, start=start)
    for name in ("lr", "distance", "loss", "a", "head_radius", "b1", "b3", "bound"):
        # Sums over 60 heads, and a margin with its gap.
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name
    assert ours.heads == theirs.heads == 60
    fixed = theory.best_bound(data, 30, heads=60, lr=ours.lr / 3)
    assert fixed.lr == ours.lr / 3
    assert ours.bound <= fixed.bound


def test_training_many_heads_is_training_two() -> None:
    """What the table of examples/theory_needed_heads.py relies on, in place of long runs."""
    data = long_tokens(norm=3.0)
    start = mh.Classifier.random_step(data, 50, seed=3, balanced=True)
    two = mh.Classifier.random_step(data, 2, seed=0, balanced=True)
    few = mh.Classifier(two.W, 5 * two.U, scale=1 / 5)
    step = mh.GradientDescent(theory.best_bound(data, 30, heads=50).lr)
    ours, theirs = (
        mh.train(s, data, steps=30, optimizer=step, record="loss") for s in (few, start)
    )
    assert theirs.history["loss"][-1] < 0.6
    # Rounding of 30 steps, with sums over 50 heads on one side.
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-11)


def test_guarantee_where_attention_does_the_work() -> None:
    """Conditions met, bound below log 2, the run obeys it, and W = 0 is at chance."""
    data = long_tokens(n=8, T=10)
    heads, steps = 20, 1000
    start = mh.Classifier.random_step(data, heads, seed=0, balanced=True)
    tangent = theory.ntk_margin(start, data)
    comparator = start + (math.log(1 / 0.06) / tangent.margin) * tangent.direction
    common = theory.compare(start, data, comparator=comparator)
    lr = min(c.limit for c in common.conditions(1.0, steps)[1:])
    ball = common.training(lr, steps)
    single = theory.best_bound(data, steps, start=start, lr=lr)
    assert ball.applies, ball
    assert single.applies, single
    assert single.bound < ball.bound < 0.25 < math.log(2)
    assert not ball.vacuous
    run = mh.train(start, data, steps=steps, optimizer=mh.GradientDescent(lr), record={"loss": 1})
    assert 0.5 * single.bound < run.history["loss"][1:].mean() <= single.bound
    assert run.history["loss"][-1] < 0.05
    W, U = run.model.W, run.model.U
    without = mh.Classifier(np.zeros_like(W), U)
    assert mh.value_and_grad(without, data)[0] == pytest.approx(math.log(2), abs=1e-6)
    alone = mh.Classifier(W, start.U)
    assert mh.value_and_grad(alone, data)[0] == pytest.approx(run.history["loss"][-1], rel=1e-6)


@pytest.mark.parametrize(("norm", "expected"), [(40.0, 2), (10.0, 10), (5.0, 100)])
def test_least_heads(norm: float, expected: int) -> None:
    data = long_tokens(norm=norm)
    found = theory.least_heads_below(data, 1000)
    assert found.applies
    assert found.bound < math.log(2)
    assert found.heads <= expected
    if found.heads > 2:
        fewer = theory.best_bound(data, 1000, heads=found.heads - max(2, found.heads // 8 * 2))
        assert not (fewer.applies and fewer.bound < math.log(2))
    # What is certified is also true.
    start = mh.Classifier.random_step(data, found.heads, seed=1, balanced=True)
    check(start, data, found, 1000)


def test_errors() -> None:
    data = long_tokens()
    start = mh.Classifier.random_step(data, 2, seed=0, balanced=True)
    arguments: Any = {"comparator": start, "lr": 1.0, "steps": 1}
    with pytest.raises(ValueError, match="heads: expected either heads or start"):
        theory.best_bound(data, 3)
    with pytest.raises(ValueError, match="heads: expected an even number for balanced signs"):
        theory.best_bound(data, 3, heads=3)
    with pytest.raises(ValueError, match=r"lr: expected a number above 0, got 0\.0"):
        theory.best_bound(data, 3, heads=2, lr=0.0)
    with pytest.raises(ValueError, match="steps: expected enough of them for a bound below"):
        theory.least_heads_below(data, 1)
    with pytest.raises(ValueError, match="below: expected a number above 0"):
        theory.least_heads_below(data, 3, below=0.0)
    with pytest.raises(ValueError, match=r"lr: expected a number above 0, got -1\.0"):
        theory.per_head_bound(start, data, **{**arguments, "lr": -1.0})
    other = mh.Classifier.zeros(3, 4, 5)
    with pytest.raises(ValueError, match="comparator: expected W and U of the shapes"):
        theory.per_head_bound(start, data, **{**arguments, "comparator": other})
    # The start as its own comparator: nothing is gained, and nothing fails.
    assert theory.per_head_bound(start, data, **arguments).distance == 0.0
    runs = mh.Dataset(np.stack([data.X, data.X]), data.y)
    with pytest.raises(ValueError, match="data: expected one data set"):
        theory.best_bound(runs, 3, heads=2)
