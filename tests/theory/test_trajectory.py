"""Stability bounded along a trajectory: never below the measured one, and made of what it says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import theory_instances as instances
from test_per_head import instance, long_tokens

import mhfast as mh
from mhfast import theory
from mhfast.theory import per_head, trajectory


def along_gradient(start: mh.Classifier, data: mh.Dataset, steps: int) -> Any:
    """The bound for the comparator along the gradient that gives the least training bound."""
    sizes = per_head._sizes(start, data)
    longest = 4 / sizes.b1(sizes.readout) ** 2
    gradient = mh.value_and_grad(start, data)[1]
    tried = []
    for lr in longest * np.array([0.9, 0.1, 1e-3]):
        for s in longest * 4.0 ** np.arange(-3, 7):
            comparator = start - s * gradient
            settings = {"comparator": comparator, "lr": float(lr), "steps": steps}
            found = theory.per_head_bound(start, data, **settings)
            if found.applies:
                tried.append((found.bound, len(tried), settings))
    return theory.trajectory_stability(start, data, **min(tried)[2])


def along_tangent(
    start: mh.Classifier, data: mh.Dataset, steps: int, lr: float | None = None
) -> Any:
    """The bound for the best comparator along the tangent direction."""
    best = theory.best_bound(data, steps, start=start, lr=lr)
    direction = theory.ntk_margin(start, data).direction
    comparator = start + (best.distance / math.sqrt(2)) * direction
    return theory.trajectory_stability(start, data, comparator=comparator, lr=best.lr, steps=steps)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 10))]
)
def test_two_hundred_instances_obey_the_bound(part: int) -> None:
    tightest = closest = 0.0
    for seed in range(20 * part, 20 * part + 20):
        start, data = instance(seed)
        steps = 1 + seed % 30
        found = along_gradient(start, data, steps)
        assert found.applies
        assert found.guarantee.radius == found.training.guarantee.radius
        assert found.guarantee.distance == found.training.distance
        lr = found.training.lr
        measured = theory.leave_one_out(start, data, steps=steps, lr=lr, every=steps, divisor="n")
        # Rounding of losses of order one.
        assert measured.stability[-1] <= found.bound + 1e-12
        tightest = max(tightest, measured.stability[-1] / found.bound)
        whole = mh.train(start, data, steps=steps, optimizer=mh.GradientDescent(lr)).model
        for i in range(data.n):
            weight = np.ones(data.n)
            weight[i] = 0.0
            less = mh.Dataset(data.X, data.y, weight=weight)
            step = mh.GradientDescent(lr * (data.n - 1) / data.n)
            other = mh.train(start, less, steps=steps, optimizer=step).model
            # Parameters of norm up to 30 are summed up to rounding.
            apart = math.hypot(
                float(np.linalg.norm(whole.W - other.W)), float(np.linalg.norm(whole.U - other.U))
            )
            assert apart <= found.displacements[i] * (1 + 1e-9) + 1e-12
            closest = max(closest, apart / (found.displacements[i] + 1e-12))
    # They are no more than a few times what they bound.
    assert tightest > 0.1
    assert closest > 0.5


def test_gradients_are_those_of_single_samples() -> None:
    start, data = instance(5)
    losses, gradients, slopes = trajectory.losses_and_gradients(start, data)
    loss, norms = losses.mean(), slopes * gradients
    assert loss == pytest.approx(mh.value_and_grad(start, data)[0], rel=1e-13)
    want = [mh.norm(mh.value_and_grad(start, data.subset([i]))[1]) for i in range(data.n)]
    assert norms == pytest.approx(want, rel=1e-12)
    rng = np.random.default_rng(0)
    Z = rng.standard_normal((3, 2, 5))
    X = rng.standard_normal((3, 4, 5))
    model = instances.classifier(rng, 3, 5, 2, 1.0, scale=-0.7)
    asked = mh.Dataset(X, [1.0, -1.0, 1.0], query=Z)
    _, gradients, slopes = trajectory.losses_and_gradients(model, asked)
    norms = slopes * gradients
    want = [mh.norm(mh.value_and_grad(model, asked.subset([i]))[1]) for i in range(3)]
    assert norms == pytest.approx(want, rel=1e-12)


def test_blocks_of_samples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start, data = instance(3)
    whole = trajectory.losses_and_gradients(start, data)
    monkeypatch.setattr(trajectory, "BLOCK", 1)
    for one, all_of_it in zip(trajectory.losses_and_gradients(start, data), whole, strict=True):
        assert one == pytest.approx(all_of_it, rel=1e-13)


def test_bound_by_hand() -> None:
    data = long_tokens(n=12)
    start = mh.Classifier.random_step(data, 20, seed=0, balanced=True)
    steps = 30
    found = along_tangent(start, data, steps)
    lr, per_head = found.training.lr, found.training
    losses, norms, model = [], [], start
    for _ in range(steps + 1):
        value, gradient = mh.value_and_grad(model, data)
        losses.append(value)
        norms.append(
            [mh.norm(mh.value_and_grad(model, data.subset([i]))[1]) for i in range(data.n)]
        )
        model = model - lr * gradient
    kappa = per_head.b3 / math.sqrt(20)
    G = per_head.c * per_head.distance**2
    path = lr * (sum(losses[:-1]) + losses[0]) + G / (2 - per_head.a)
    growth = math.exp(kappa * path / (1 - kappa * G / 2))
    moved = growth * lr / data.n * np.sum(norms[:-1], axis=0)
    rho = per_head.b1**2 / 4 + kappa
    S = np.mean(norms[-1] * moved + rho / 2 * moved**2)
    # Steps taken in another order of sums.
    assert found.growth == pytest.approx(growth, rel=1e-9)
    assert found.displacements == pytest.approx(moved, rel=1e-9)
    assert found.bound == pytest.approx(S, rel=1e-9)
    assert found.gap == pytest.approx(S + per_head.b1 * moved.mean(), rel=1e-9)
    assert found.train_loss == pytest.approx(losses[-1], rel=1e-9)
    assert found.mean_loss == pytest.approx(np.mean(losses[1:]), rel=1e-9)
    assert "S" not in str(found.guarantee.conditions[0])
    assert "moves the end by" in str(found)


def test_it_says_something_where_the_worst_case_does_not() -> None:
    data = long_tokens(n=40)
    start = mh.Classifier.random_step(data, 20, seed=0, balanced=True)
    found = along_tangent(start, data, 200)
    assert found.bound < 0.2 < math.log(2)
    best = found.training
    direction = theory.ntk_margin(start, data).direction
    comparator = start + (best.distance / math.sqrt(2)) * direction
    worst = theory.stability_bound(start, data, comparator=comparator, lr=best.lr, steps=200)
    assert worst.bound > 10


@pytest.mark.parametrize(
    ("n", "name", "limit"),
    [(10, "bound", math.log(2)), (23, "bound", 0.1), (31, "gap", math.log(2)), (200, "gap", 0.1)],
)
def test_the_smallest_numbers_of_samples_of_the_documentation(
    n: int, name: str, limit: float
) -> None:
    """Measured gaps are near 0, so that .1 is the measured gap and .1, up to .005."""
    found = []
    for samples in (n - 1, n):
        data = long_tokens(n=samples)
        others = data.sample(samples, seed=2)
        start = mh.Classifier.random_step(others, 20, seed=0, balanced=True)
        lr = theory.best_bound(others, 200, start=start).lr
        found.append(getattr(along_tangent(start, data, 200, lr), name))
    assert found[1] < limit <= found[0]


def test_conditions_that_are_not_met_and_wrong_use() -> None:
    start, data = instance(2)
    found = theory.trajectory_stability(start, data, comparator=start, lr=1e6, steps=2)
    assert not found.applies
    assert found.bound == math.inf
    weighted = mh.Dataset(data.X, data.y, weight=np.ones(data.n))
    with pytest.raises(ValueError, match="weight: expected None"):
        theory.trajectory_stability(start, weighted, comparator=start, lr=0.1, steps=2)
    with pytest.raises(ValueError, match="steps"):
        theory.trajectory_stability(start, data, comparator=start, lr=0.1, steps=0)
