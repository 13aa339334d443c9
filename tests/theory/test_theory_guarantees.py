"""Training and generalization guarantees, leave-one-out stability, and the certificate of a run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import theory_instances as instances

import mhfast as mh
from mhfast import theory


def covered(
    seed: int, *, n: int = 12, H: int = 36, steps: int = 60
) -> tuple[mh.Classifier, mh.Dataset, float, mh.Run]:
    """A training that the guarantees speak about: short tokens, hence long steps."""
    data = mh.data.tokenized_mixture(
        n, 10, 7, relevant_fraction=0.5, norm=0.01, noise=0.002, seed=seed
    )
    start = mh.Classifier.random_step(data, H, seed=seed)
    lr = 900.0
    record = {"loss": 1, "distance": 1, "W": 20, "U": 20}
    run = mh.train(start, data, steps=steps, optimizer=mh.GradientDescent(lr), record=record)
    return start, data, lr, run


def admissible(run: mh.Run, data: mh.Dataset, lr: float) -> mh.Classifier:
    """The model that training reached, or beyond it one for which lr is short enough."""
    change = mh.Gradients(run.model.W - run.start.W, U=run.model.U - run.start.U)
    reach, steps = 1.0, max(run.step, 1)
    while True:
        model = run.start + reach * change
        limit = mh.norm(reach * change) ** 2 / lr
        if max(steps * mh.value_and_grad(model, data)[0], run.history["loss"][0]) < limit:
            return model
        reach *= 1.05


@pytest.mark.parametrize("seeds", [5, pytest.param(67, marks=pytest.mark.slow)])
def test_training_bound_holds_and_is_not_far_off(seeds: int) -> None:
    ratios = []
    for seed in range(seeds):
        for steps in (3, 20, 60):
            start, data, lr, run = covered(seed, steps=steps)
            comparator = admissible(run, data, lr)
            bound = theory.training_bound(start, data, comparator=comparator, lr=lr, steps=steps)
            assert bound.applies, bound
            ratios.append(run.history["loss"][1:].mean() / bound.bound)
            assert run.history["distance"].max() <= bound.radius
            assert bound.radius == pytest.approx(3 * bound.distance, rel=1e-12)
    assert max(ratios) <= 1
    assert max(ratios) >= 1 / 20


def test_training_bound_against_any_comparator() -> None:
    start, data, lr, run = covered(0, H=400)
    direction = theory.ntk_margin(start, data).direction
    applied = 0
    for reach in (30.0, 60.0, 120.0):
        bound = theory.training_bound(
            start, data, comparator=start + reach * direction, lr=lr, steps=60
        )
        assert bound.distance == pytest.approx(math.sqrt(2) * reach, rel=1e-12)
        if bound.applies:
            applied += 1
            assert run.history["loss"][1:].mean() <= bound.bound
    assert applied >= 1


def test_the_conditions_are_reported_one_by_one() -> None:
    start, data, lr, run = covered(1)
    met = theory.training_bound(start, data, comparator=run.model, lr=lr, steps=60)
    assert [c.met for c in met.conditions] == [True] * 4
    too_fast = theory.training_bound(start, data, comparator=run.model, lr=1e9, steps=60)
    assert [c.met for c in too_fast.conditions] == [True, False, False, False]
    assert not too_fast.applies
    rate = too_fast.conditions[1]
    bounds = theory.curvature_bounds(start, data, within=met.radius)
    assert rate.factor == pytest.approx(1 / (1e9 * bounds.hessian), rel=1e-12)
    assert f"not met, short by a factor of {1 / rate.factor:.3g}" in str(too_fast)
    assert "nothing is guaranteed" in str(too_fast)
    assert "nothing is guaranteed" not in str(met)
    few_heads = met.conditions[0]
    assert few_heads.value == 6
    assert few_heads.limit == pytest.approx(64 / 7 * bounds.b3 * met.distance**2, rel=1e-12)


def test_bounds_are_the_formulas() -> None:
    start, data, lr, run = covered(2)
    arguments: Any = {"comparator": run.model, "lr": lr, "steps": 60}
    D0, loss = run.history["distance"][-1], run.history["loss"][-1]
    bounds = theory.curvature_bounds(start, data, within=3 * D0)
    x = bounds.weak_convexity * D0**2
    spread = math.exp(22 / 3 * x / (1 - 2 * x))
    S = spread * bounds.b1**2 / 12 * (5 / 3 * lr * 60 * loss + D0**2 + lr * run.history["loss"][0])
    training = theory.training_bound(start, data, **arguments)
    assert training.bound == pytest.approx(5 / 3 * loss + D0**2 / (lr * 60), rel=1e-9)
    assert theory.stability_bound(start, data, **arguments).bound == pytest.approx(S, rel=1e-9)
    gap = theory.generalization_bound(start, data, **arguments)
    assert gap.bound == pytest.approx(2 * S, rel=1e-9)
    assert gap.vacuous
    assert "vacuous" in str(gap)
    assert spread < 2.8


def test_recalled_constants_are_named() -> None:
    start, data, lr, run = covered(2)
    arguments: Any = {
        "comparator": run.model, "lr": lr, "steps": 60, "constants": "recalled"
    }  # fmt: skip
    D0, loss = run.history["distance"][-1], run.history["loss"][-1]
    training = theory.training_bound(start, data, **arguments)
    assert training.bound == pytest.approx(2 * loss + 5 / 4 * D0**2 / (lr * 60), rel=1e-9)
    assert training.radius == pytest.approx(4 * D0, rel=1e-9)
    assert "from memory" in str(training)
    gap = theory.generalization_bound(start, data, **arguments)
    expected = 4 / 12 * (2 * 60 * loss + 9 * D0**2 / (4 * lr))
    assert gap.bound == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("steps", [1, 20])
def test_stability_is_below_its_bound(steps: int) -> None:
    start, data, lr, run = covered(3, n=9, steps=steps)
    comparator = admissible(run, data, lr)
    bound = theory.stability_bound(start, data, comparator=comparator, lr=lr, steps=steps)
    assert bound.applies, bound
    found = theory.leave_one_out(start, data, steps=steps, lr=lr, every=steps, divisor="n")
    assert found.train_loss[-1] == pytest.approx(run.history["loss"][-1], rel=1e-12)
    assert 0 < found.stability[-1] <= bound.bound


def test_stability_bound_is_not_far_off() -> None:
    """Two equal samples of equal tokens: nothing is lost in b1, and one step says it all."""
    data = mh.Dataset(np.full((2, 3, 1), 0.01), [1.0, 1.0])
    start = mh.Classifier.zeros(5, 3, 1)
    lr = 2 / (3 * 0.01**2)
    run = mh.train(start, data, steps=1, optimizer=mh.GradientDescent(lr),
                   record=("loss", "distance"))  # fmt: skip
    bound = theory.stability_bound(
        start, data, comparator=admissible(run, data, lr), lr=lr, steps=1
    )
    assert bound.applies, bound
    found = theory.leave_one_out(start, data, steps=1, lr=lr, divisor="n")
    assert bound.bound / 20 <= found.stability[-1] <= bound.bound


def test_leave_one_out_is_training_without_the_sample() -> None:
    data = mh.data.tokenized_mixture(5, 10, 7, noise=0.5, seed=0)
    test = data.sample(8, seed=1)
    start = mh.Classifier.gaussian(3, 10, 7, std=0.2, seed=2)
    found = theory.leave_one_out(start, data, steps=6, lr=0.5, every=3, test=test)
    assert found.steps.tolist() == [0, 3, 6]
    whole = mh.train(start, data, steps=6, optimizer=mh.GradientDescent(0.5), test=test,
                     record={"loss": 3, "test_loss": 3})  # fmt: skip
    np.testing.assert_allclose(found.train_loss, whole.history["loss"], rtol=1e-13)
    np.testing.assert_allclose(
        found.gap, whole.history["test_loss"] - whole.history["loss"], rtol=0, atol=1e-13
    )
    for i in range(data.n):
        rest = data.subset(np.arange(data.n) != i)
        run = mh.train(start, rest, steps=6, optimizer=mh.GradientDescent(0.5))
        own = mh.value_and_grad(run.model, data.subset([i]))[0]
        # Six steps of rounding, with the samples in other lanes.
        assert found.left_out[-1, i] == pytest.approx(own, rel=1e-11)
    np.testing.assert_allclose(found.left_out_loss, found.left_out.mean(axis=1), rtol=1e-15)
    same_divisor = theory.leave_one_out(start, data, steps=6, lr=0.5, every=3, divisor="n")
    slower = mh.train(start, data.subset([1, 2, 3, 4]), steps=6, optimizer=mh.GradientDescent(0.4))
    own = mh.value_and_grad(slower.model, data.subset([0]))[0]
    assert same_divisor.left_out[-1, 0] == pytest.approx(own, rel=1e-11)
    assert np.isnan(same_divisor.gap).all()


def test_certificate_of_a_covered_run() -> None:
    _, data, _, run = covered(4, H=3)
    certificate = theory.certify(run, data)
    assert certificate.violated == ()
    names = [i.name.partition(":")[0].split(" ≤")[0] for i in certificate.inequalities]
    assert names == [
        "gradient", "Hessian", "-λ_min(∇²L)", "average loss", "distance"
    ]  # fmt: skip
    for inequality in certificate.inequalities:
        assert inequality.applies.all(), str(certificate)
        assert (inequality.ratio <= 1).all()
    gradient, hessian, convexity, loss, distance = certificate.inequalities
    assert gradient.steps.tolist() == [0, 20, 40, 60]
    assert loss.steps.tolist() == list(range(1, 61))
    np.testing.assert_array_equal(distance.value, run.history["distance"][1:])
    exact = np.linalg.eigvalsh(instances.dense_hessian(run.model, data))
    assert hessian.value[-1] == pytest.approx(np.abs(exact).max(), rel=1e-8)
    assert convexity.value[-1] == pytest.approx(-exact.min(), rel=1e-6)
    rows = list(certificate.rows())
    assert len(rows) == sum(len(i.steps) for i in certificate.inequalities)
    assert {"inequality", "step", "value", "bound", "ratio"} <= rows[0].keys()
    assert "holds" in str(certificate)


def test_certificate_says_what_is_not_guaranteed() -> None:
    data = mh.data.tokenized_mixture(12, 10, 7, noise=0.5, seed=0)
    start = mh.Classifier.random_step(data, 2, seed=0)
    run = mh.train(start, data, steps=5, optimizer=mh.GradientDescent(1.0), record="loss")
    certificate = theory.certify(run, data, hessian=False)
    assert certificate.violated == ()
    assert [len(i.steps) for i in certificate.inequalities] == [2, 5]
    text = str(certificate)
    assert "not guaranteed, for want of sqrt(H) ≥ (64/7) b3 D0²" in text
    assert certificate.guarantee is not None
    assert not certificate.guarantee.applies
    decayed = dataclasses.replace(run, optimizer=mh.GradientDescent(1.0, l2=0.1))
    assert theory.certify(decayed, data, hessian=False).guarantee is None


def test_certificate_in_float32() -> None:
    _, data, lr, run = covered(4, H=3, steps=5)
    few = mh.Dataset(data.X.astype(np.float32), data.y)
    start = mh.Classifier(run.start.W.astype(np.float32), run.start.U.astype(np.float32))
    record = ("loss", "distance", "W", "U")
    single = mh.train(start, few, steps=5, optimizer=mh.GradientDescent(lr), record=record)
    certificate = theory.certify(single, few, hessian=False)
    assert certificate.violated == ()
    exact = theory.certify(run, data, hessian=False)
    gradient, own = certificate.inequalities[0], exact.inequalities[0]
    # Parameters are rounded to 6e-8 five times.
    np.testing.assert_allclose(gradient.value[[0, -1]], own.value[[0, -1]], rtol=1e-5)


def test_certificate_with_a_test_set() -> None:
    start, data, lr, _ = covered(4, H=3, steps=2)
    run = mh.train(
        start, data, steps=6, optimizer=mh.GradientDescent(lr), test=data.sample(50, seed=1),
        record={"loss": 1, "test_loss": 3},
    )  # fmt: skip
    gap = theory.certify(run, data, hessian=False).inequalities[-1]
    assert gap.name == "test - training loss ≤ 2 S"
    assert gap.steps.tolist() == [3, 6]
    np.testing.assert_array_equal(
        gap.value, run.history["test_loss"][1:] - run.history["loss"][[3, 6]]
    )
    for k, bound in zip(gap.steps, gap.bound, strict=True):
        own = theory.generalization_bound(start, data, comparator=run.model, lr=lr, steps=int(k))
        assert bound == own.bound
    assert not gap.applies.any()  # a bound of expectations guarantees nothing for one run
    assert "the mean over training sets" in gap.note


def test_a_violation_would_be_seen() -> None:
    value, bound = np.array([1.0, 3.0, 3.0]), np.array([2.0, 2.0, 2.0])
    applies = np.array([True, False, True])
    inequality = theory.Inequality("x", np.arange(3), value, bound, applies, ~applies, "")
    assert inequality.violated.tolist() == [False, False, True]
    certificate = theory.Certificate((inequality,), None)
    assert certificate.violated == ("x",)
    assert "VIOLATED" in str(certificate)


def test_figure() -> None:
    pytest.importorskip("matplotlib").use("agg")
    _, data, _, run = covered(4, steps=20)
    figure = theory.certify(run, data, hessian=False).plot()
    (ax,) = figure.axes
    assert len(ax.lines) == 4  # three inequalities and the line at 1


def test_errors() -> None:
    start, data, _, run = covered(0, steps=2)
    weighted = mh.Dataset(data.X, data.y, weight=np.ones(12))
    with pytest.raises(ValueError, match="weight: expected None"):
        theory.leave_one_out(start, weighted, steps=1, lr=1.0)
    with pytest.raises(ValueError, match="weight: expected None"):
        theory.stability_bound(start, weighted, comparator=run.model, lr=1.0, steps=1)
    with pytest.raises(ValueError, match="X: expected at least 2 samples, got 1"):
        theory.leave_one_out(start, data.subset([0]), steps=1, lr=1.0)
    with pytest.raises(ValueError, match=r"divisor: expected one of n-1, n, got 'n\+1'"):
        theory.leave_one_out(start, data, steps=1, lr=1.0, divisor="n+1")
    with pytest.raises(ValueError, match=r"lr: expected a number above 0, got 0\.0"):
        theory.training_bound(start, data, comparator=run.model, lr=0.0, steps=1)
    with pytest.raises(ValueError, match="constants: expected one of proved, recalled"):
        theory.training_bound(start, data, comparator=run.model, lr=1.0, steps=1, constants="x")
    squared = mh.train(start, data, steps=1, optimizer=mh.GradientDescent(1.0), loss="squared")
    with pytest.raises(ValueError, match="run: expected training on the logistic loss"):
        theory.certify(squared, data)
