"""Training and generalization guarantees, leave-one-out stability, and the certificate of a run."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
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
    # |Φ| ≤ sqrt(q) Rx ‖U‖ in the ball: losses up to 18 are possible, and a bound of 14 is below.
    output = math.sqrt(10) * bounds.token_norm * (np.linalg.norm(start.U) + 3 * D0)
    assert gap.trivial == pytest.approx(math.log(1 + math.exp(output)), rel=1e-9)
    assert math.log(2) < gap.bound < gap.trivial
    assert not gap.vacuous
    assert "says little: not below log 2" in str(gap)
    assert training.trivial == pytest.approx(run.history["loss"][0], rel=1e-12)
    assert training.bound > training.trivial  # 60 steps do not show more than that the loss falls
    assert training.vacuous
    few = theory.generalization_bound(start, data.subset([0, 1]), **arguments)
    assert few.bound > few.trivial
    assert few.vacuous
    assert "vacuous: not below" in str(few)
    assert spread < 2.8


def test_a_bound_is_vacuous_from_what_is_known_anyway_on() -> None:
    def bound(value: float) -> theory.Guarantee:
        return theory.Guarantee("x", "proved", value, 0.9, (), 1.0, 3.0)

    assert [bound(value).vacuous for value in (0.1, 0.8, 0.9, 1.0, math.nan)] == [
        False, False, True, True, True
    ]  # fmt: skip
    assert "vacuous: not below 0.9" in str(bound(0.9))
    assert "says little" in str(bound(0.8))
    assert str(bound(0.1)) == "x ≤ 0.1"


def test_recalled_constants_are_named() -> None:
    start, data, lr, run = covered(2)
    arguments: Any = {
        "comparator": run.model, "lr": lr, "steps": 60, "constants": "recalled"
    }  # fmt: skip
    D0, loss = run.history["distance"][-1], run.history["loss"][-1]
    training = theory.training_bound(start, data, **arguments)
    assert training.bound == pytest.approx(2 * loss + 5 / 4 * D0**2 / (lr * 60), rel=1e-9)
    assert training.radius == pytest.approx(4 * D0, rel=1e-9)
    assert "recalled, not derived or quoted" in str(training)
    gap = theory.generalization_bound(start, data, **arguments)
    expected = 4 / 12 * (2 * 60 * loss + 9 * D0**2 / (4 * lr))
    assert gap.bound == pytest.approx(expected, rel=1e-9)


def test_the_spread_stays_finite_where_nothing_is_promised() -> None:
    start, data, lr, _ = covered(2, H=3, steps=1)
    far = start + 1e5 * theory.ntk_margin(start, data).direction
    found = theory.compare(start, data, comparator=far)
    assert found.bounds.weak_convexity * found.distance**2 > 7 / 64
    bound = found.stability(lr, 4)
    assert not bound.applies
    # e at x = 7/64: exp((22/3) (7/64) / (25/32)).
    share = 5 / 3 * lr * 4 * found.loss + found.distance**2 + lr * found.start_loss
    expected = math.exp(22 / 3 * 7 / 64 * 32 / 25) * found.bounds.b1**2 / 12 * share
    assert bound.bound == pytest.approx(expected, rel=1e-12)


def test_generalization_from_hundreds_of_samples_on() -> None:
    """The first example of the documentation: nothing is said for 12 samples, something for 600."""
    bounds = []
    for n in (12, 600):
        data = mh.data.tokenized_mixture(n, 10, 7, relevant_fraction=0.5, norm=0.01, seed=0)
        start = mh.Classifier.random_step(data.sample(n, seed=1), heads=36, seed=0)
        end = mh.train(start, data, steps=100, optimizer=mh.GradientDescent(2500.0)).model
        bounds.append(
            theory.generalization_bound(start, data, comparator=end, lr=2500.0, steps=100)
        )
    few, many = bounds
    assert few.vacuous
    assert few.bound == pytest.approx(33.9, abs=0.05)
    assert many.applies
    assert not many.vacuous
    assert many.bound == pytest.approx(0.679, abs=0.0005)  # below log 2
    # What is certified is a linear classifier: without attention outputs are the same.
    without = mh.Classifier(0.0 * end.W, end.U)
    assert np.abs(end(data) - without(data)).max() < 1e-5
    assert np.abs(end(data)).max() > 1.0


@pytest.mark.parametrize("seeds", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_stability_is_below_its_bound(seeds: int) -> None:
    """And what samples that were not seen cost more than others is below twice of it."""
    gaps, bounds = [], []
    for seed in range(seeds):
        for steps in (1, 20):
            start, data, lr, run = covered(seed, n=9, steps=steps)
            comparator = admissible(run, data, lr)
            given: Any = {"comparator": comparator, "lr": lr, "steps": steps}
            bound = theory.stability_bound(start, data, **given)
            assert bound.applies, bound
            found = theory.leave_one_out(start, data, steps=steps, lr=lr, every=steps, divisor="n")
            assert found.train_loss[-1] == pytest.approx(run.history["loss"][-1], rel=1e-12)
            assert 0 < found.stability[-1] <= bound.bound
            new = mh.value_and_grad(run.model, data.sample(200, seed=seed))[0]
            gaps.append(new - run.history["loss"][-1])
            bounds.append(theory.generalization_bound(start, data, **given).bound)
    assert 0.0 < np.mean(gaps) <= np.mean(bounds)


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
    of_arrays = theory.certify(run, data.X, data.y)
    assert str(of_arrays) == str(certificate)
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
    assert "not guaranteed; it needs sqrt(H) ≥ (64/7) b3 D0²" in text
    assert certificate.guarantee is not None
    assert not certificate.guarantee.applies


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
        record={"loss": 1, "test_loss": 1},
    )  # fmt: skip
    comparator = admissible(run, data, lr)
    gap = theory.certify(run, data, comparator=comparator, hessian=False).inequalities[-1]
    assert gap.name == "test - training loss ≤ 2 S"
    assert gap.steps.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(gap.value, (run.history["test_loss"] - run.history["loss"])[1:])
    for k, bound in zip(gap.steps, gap.bound, strict=True):
        own = theory.generalization_bound(start, data, comparator=comparator, lr=lr, steps=int(k))
        assert own.applies
        assert bound == own.bound
    assert not gap.applies.any()  # a bound of expectations guarantees nothing for one run
    assert "the mean over training sets" in gap.note


def test_values_and_bounds_of_a_certificate() -> None:
    """Every number once more, from the run's own records and the dense Hessian."""
    start, data, lr, run = covered(5, H=3, steps=20)
    other = start + 50.0 * theory.ntk_margin(start, data).direction
    certificate = theory.certify(run, data, comparator=other)
    gradient, hessian, convexity, average, distance = certificate.inequalities
    for row, (W, U) in enumerate(zip(run.history["W"], run.history["U"], strict=True)):
        model = mh.Classifier(W, U)
        loss, g = mh.value_and_grad(model, data)
        u = np.linalg.norm(U.reshape(3, -1), axis=1).max()
        R = np.linalg.norm(data.X, axis=2).max()
        b1 = math.sqrt(10) * R * (R**2 * u + 1)
        b3 = math.sqrt(10) * R**3 * (2 * R**2 * u + 1)
        exact = np.linalg.eigvalsh(instances.dense_hessian(model, data))
        # A few products; eigenvalues to 1e-10 of the width of the spectrum.
        assert gradient.value[row] == pytest.approx(mh.norm(g), rel=1e-12)
        assert gradient.bound[row] == pytest.approx(b1 * loss, rel=1e-12)
        assert hessian.value[row] == pytest.approx(np.abs(exact).max(), rel=1e-8)
        assert hessian.bound[row] == pytest.approx(b1**2 / 4 + b3 / math.sqrt(3), rel=1e-12)
        assert convexity.value[row] == pytest.approx(-exact.min(), rel=1e-6)
        assert convexity.bound[row] == pytest.approx(b3 / math.sqrt(3) * loss, rel=1e-12)
    D0, end = math.sqrt(2) * 50.0, mh.value_and_grad(other, data)[0]
    losses = run.history["loss"]
    for k in (1, 2, 20):
        assert average.steps[k - 1] == k
        assert average.value[k - 1] == pytest.approx(losses[1 : k + 1].mean(), rel=1e-13)
        expected = 5 / 3 * end + D0**2 / (lr * k)
        assert average.bound[k - 1] == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(distance.bound, 3 * D0, rtol=1e-12)
    assert certificate.guarantee is not None
    assert certificate.guarantee.bound == average.bound[-1]
    assert certificate.guarantee.distance == pytest.approx(D0, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "wrt", "why"),
    [
        (mh.GradientDescent(1.0, l2=0.1), None, "its steps have l2"),
        (mh.GradientDescent(1.0, clip=1.0), None, "its steps have clip"),
        (mh.GradientDescent(1.0, schedule=(1.0, 0.5, 0.2)), None, "its steps have schedule"),
        (mh.GradientDescent(0.0), None, "lr is 0, not above 0"),
        (mh.GradientDescent({"W": 1.0, "U": 0.5}), None, "lr is not one number"),
        (mh.GradientDescent({"W": 0.0, "U": 0.0}), None, "lr is 0, not above 0"),
        (mh.GradientDescent(1.0, l2={"W": 0.1}), None, "its steps have l2"),
        (mh.GradientDescent(1.0, schedule={"U": (1.0,) * 9}), None, "its steps have schedule"),
        (mh.Adam(0.1), None, "Adam is not gradient descent"),
        (mh.NormalizedGradientDescent(0.1), None, "NormalizedGradientDescent is not gradient"),
        (mh.GradientDescent(1.0), ("U",), "W was not trained"),
        (mh.GradientDescent(1.0), ("W",), "U was not trained"),
    ],
)
def test_a_run_that_no_guarantee_covers_gets_none(optimizer: Any, wrt: Any, why: str) -> None:
    start, data, _, _ = covered(0, H=3, steps=1)
    run = mh.train(start, data, steps=3, optimizer=optimizer, wrt=wrt)
    certificate = theory.certify(run, data, hessian=False)
    assert certificate.guarantee is None
    assert len(certificate.inequalities) == 1  # curvature is that of the loss, whatever the steps
    assert f"no guarantee covers this run: {why}" in str(certificate)


def test_a_run_of_no_steps_or_of_several_trainings() -> None:
    start, data, lr, _ = covered(0, H=3, steps=1)
    none = mh.train(start, data, steps=0, optimizer=mh.GradientDescent(lr))
    assert "no guarantee covers this run: it made no step" in str(theory.certify(none, data))
    both = mh.train(start, data, steps=2, optimizer=mh.GradientDescent([lr, 2 * lr]))
    with pytest.raises(ValueError, match=r"run: expected one training, as run\[0\] is, got 2"):
        theory.certify(both, data)
    assert theory.certify(both[0], data, hessian=False).guarantee is not None


def test_a_continued_run_is_covered_up_to_other_settings() -> None:
    """Judged by the last step size alone, this correct run would violate its bound."""
    start, data, _, _ = covered(0, H=36, steps=1)
    record = ("loss", "distance")
    comparator = mh.train(start, data, steps=100, optimizer=mh.GradientDescent(900.0)).model
    slow = mh.train(start, data, steps=300, optimizer=mh.GradientDescent(1e-3), record=record)
    run = mh.train(slow, data, steps=1, optimizer=mh.GradientDescent(900.0))
    as_one = theory.compare(start, data, comparator=comparator).training(900.0, 301)
    assert as_one.applies
    assert run.history["loss"][1:].mean() > as_one.bound
    certificate = theory.certify(run, data, comparator=comparator, hessian=False)
    assert certificate.violated == ()
    assert certificate.guarantee is not None
    own = theory.training_bound(start, data, comparator=comparator, lr=1e-3, steps=300)
    assert certificate.guarantee.bound == own.bound
    assert all(i.steps[-1] == 300 for i in certificate.inequalities[1:])
    (note,) = certificate.notes
    assert note.startswith("no guarantee covers steps 301 to 301: they do not start at θ0, but")
    assert note.endswith("continue with other optimizer")
    same = mh.train(slow, data, steps=2)
    assert theory.certify(same, data, hessian=False).notes == ()
    assert theory.certify(same, data, hessian=False).inequalities[1].steps[-1] == 302


def test_a_run_on_other_data_is_not_certified_as_one_on_these() -> None:
    start, data, _, run = covered(0, H=3, steps=2)
    shuffled = mh.Dataset(data.X, data.y[::-1])
    certificate = theory.certify(run, shuffled, hessian=False)
    assert certificate.guarantee is None
    assert certificate.notes == (
        "no guarantee covers this run: it trained on other data than these",
    )
    moved = mh.train(run, shuffled, steps=3)
    assert theory.certify(moved, data, hessian=False).notes == (
        "no guarantee covers steps 3 to 5: they do not start at θ0, but continue with other data",
    )
    assert theory.certify(moved, data, hessian=False).guarantee is not None
    squared = mh.train(start, data, steps=1, optimizer=mh.GradientDescent(1.0), loss="squared")
    back = mh.train(squared, data, steps=1, loss="logistic")
    assert "no guarantee covers steps 1 to 1: the loss was squared" in str(
        theory.certify(back, data, hessian=False)
    )
    unknown = dataclasses.replace(run, segments=())
    assert "how its steps were taken is not known" in str(theory.certify(unknown, data))
    with pytest.raises(ValueError, match=r"X: expected one data set, as X\.run\(0\) is, got 2"):
        theory.certify(run, mh.Dataset(np.stack([data.X, data.X]), data.y))


def wild() -> tuple[mh.Classifier, mh.Dataset]:
    rng = np.random.default_rng(0)
    data = mh.Dataset(rng.standard_normal((4, 3, 5)), [1, -1, 1, -1.0])
    return mh.Classifier(rng.standard_normal((3, 5, 5)), rng.standard_normal((3, 3, 5))), data


def test_a_run_that_diverged_is_not_said_to_hold() -> None:
    start, data = wild()
    run = mh.train(
        start, data, steps=9, optimizer=mh.GradientDescent(1e308), record=("loss", "W", "U")
    )
    assert run.reason == "nonfinite"
    certificate = theory.certify(run, data)
    assert certificate.violated == ()
    assert not certificate.guarantee.applies
    assert math.isnan(certificate.guarantee.bound)
    for inequality in certificate.inequalities[:3]:
        assert inequality.undecided[-1]
    lines = str(certificate).splitlines()
    assert "  says nothing: the bound is not a number" in lines
    assert "cannot be judged at step" in lines[1]
    assert "holds" not in lines[1]
    assert not any("factor of inf" in line for line in lines)
    gone = dataclasses.replace(run, model=mh.Classifier(run.start.W * np.nan, run.start.U))
    text = str(theory.certify(gone, data, hessian=False))
    assert "no guarantee: the parameters reached are not finite" in text
    assert theory.certify(gone, data, hessian=False, comparator=start).guarantee is not None
    with pytest.raises(
        ValueError, match="comparator: W: expected finite numbers, got nan at index"
    ):
        theory.certify(run, data, comparator=gone.model)


@pytest.mark.parametrize("size", [1e-170, 1e-100, 1e40])
def test_tokens_of_any_length_get_a_verdict(size: float) -> None:
    _, data, _, _ = covered(0, H=3, steps=1)
    data = mh.Dataset(data.X / 0.01 * size, data.y)
    start = mh.Classifier.random_step(data, 3, seed=0)
    run = mh.train(
        start, data, steps=2, optimizer=mh.GradientDescent(1.0), record=("loss", "distance")
    )
    text = str(theory.certify(run, data, hessian=size < 1))
    assert "VIOLATED" not in text
    assert "nan" not in text
    assert "factor of inf" not in text


@pytest.mark.parametrize(("share", "value"), [(1e-11, 0.0), (1e-3, 1e-3)])
def test_an_eigenvalue_that_rounding_makes_violates_nothing(monkeypatch, share, value) -> None:
    """The bound b3 L / √H of short tokens is far below the rounding of the largest eigenvalue."""
    monkeypatch.setattr(
        "mhfast.theory.certificate.hessian_extremes",
        lambda *_: SimpleNamespace(smallest=-share * 2.0, largest=2.0),
    )
    _, data, _, _ = covered(0, H=3, steps=1)
    data = mh.Dataset(data.X * 1e-98, data.y)
    start = mh.Classifier.random_step(data, 3, seed=0)
    run = mh.train(start, data, steps=1, optimizer=mh.GradientDescent(1.0))
    smallest = theory.certify(run, data).inequalities[2]
    assert smallest.value == pytest.approx(2.0 * value, rel=1e-6)
    assert smallest.violated.all() == (value > 0.0)
    assert smallest.bound.max() < 1e-200


def test_a_record_of_nan_is_not_judged() -> None:
    value, bound = (
        np.array([1.0, np.nan, np.inf, 0.0, np.inf]),
        np.array([2.0, 2.0, np.inf, 0.0, 1.0]),
    )
    always, never = np.ones(5, bool), np.zeros(5, bool)
    inequality = theory.Inequality("x", np.arange(5), value, bound, always, never, "")
    assert inequality.undecided.tolist() == [False, True, True, False, False]
    assert inequality.violated.tolist() == [False, False, False, False, True]
    np.testing.assert_array_equal(inequality.ratio, [0.5, np.nan, np.nan, 0, np.inf])
    part = theory.Inequality("x", np.arange(2), value[:2], bound[:2], always[:2], never[:2], "")
    assert "cannot be judged at step 1: nan ≤ 2" in str(theory.Certificate((part,), None))


def test_verdicts_in_words() -> None:
    value, bound = np.array([1.0, 1.0]), np.array([2.0, 2.0])
    yes, no, one = np.ones(2, bool), np.zeros(2, bool), np.array([True, False])
    cases = [
        (yes, no, "", "holds"),
        (yes, yes, "", "holds, but vacuous"),
        (yes, one, "", "holds, but vacuous at some steps"),
        (one, no, "", "not guaranteed at all steps"),
        (one, no, "heads", "not guaranteed; it needs heads"),
    ]
    for applies, vacuous, note, expected in cases:
        i = theory.Inequality("x", np.arange(2), value, bound, applies, vacuous, note)
        assert str(theory.Certificate((i,), None)).endswith(f"  {expected}")


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "factor", "text"),
    [
        (6.0, 2.0, True, 3.0, "met, with a factor of 3"),
        (2.0, 6.0, True, 1 / 3, "short by a factor of 3; needs H >= 36, 9 times as many"),
        (2.0, 2.5, True, 0.8, "factor of 1.25; needs H >= 7, 1.56 times as many"),
        (2.0, 6.0, False, 3.0, "met, with a factor of 3"),
        (6.0, 2.0, False, 1 / 3, "not met, short by a factor of 3"),
        (1.0, math.inf, False, math.inf, "met, with a factor of more than 1.8e+308"),
        (1.0, 0.0, False, 0.0, "not met, short by a factor of more than 1.8e+308"),
        (0.0, 0.0, False, math.inf, "met"),
        (math.nan, 1.0, True, math.nan, "cannot be judged"),
        (1.0, math.nan, False, math.nan, "cannot be judged"),
        (1.0, math.inf, True, 0.0, "needs H >= 1.8e+308, more than 1.8e+308 times as many"),
    ],
)
def test_a_condition_and_its_factor(
    value: float, limit: float, at_least: bool, factor: float, text: str
) -> None:
    condition = theory.Condition("x", value, limit, at_least, at_least)
    assert condition.factor == pytest.approx(factor, nan_ok=True)
    assert condition.met == (factor >= 1)
    assert text in str(condition)
    if at_least and math.isfinite(limit):
        H = condition.needed_heads
        assert math.sqrt(H) >= limit > math.sqrt(H - 1)


def test_heads_are_told_in_heads() -> None:
    start, data, lr, _ = covered(1)
    few = mh.Classifier(start.W[:1], start.U[:1])
    far = few + 3e4 * theory.ntk_margin(few, data).direction
    bound = theory.training_bound(few, data, comparator=far, lr=lr, steps=60)
    condition = bound.conditions[0]
    assert not condition.met
    needed = condition.needed_heads
    assert needed == math.ceil(condition.limit**2)
    assert needed > 1.9 / condition.factor  # sqrt(H) is missed by much less than H
    assert f"needs H >= {needed:.0f}" in str(bound) or f"needs H >= {needed:.2g}" in str(bound)
    assert f", {condition.limit**2:.3g} times as many" in str(bound)  # as one head
    assert math.isnan(bound.conditions[1].needed_heads)


def test_a_comparator_is_of_the_family_of_the_start() -> None:
    start, data, lr, run = covered(0, steps=2)
    arguments: Any = {"lr": lr, "steps": 2}
    for name, other in (("scale", 2.0), ("causal", True)):
        comparator = dataclasses.replace(run.model, **{name: other})
        with pytest.raises(ValueError, match=f"comparator: expected the {name} of the start"):
            theory.training_bound(start, data, comparator=comparator, **arguments)
    fewer = mh.Classifier(run.model.W[:2], run.model.U[:2])
    with pytest.raises(ValueError, match="comparator: expected W and U of the shapes of the start"):
        theory.training_bound(start, data, comparator=fewer, **arguments)


def test_weights_count_as_they_do_in_training() -> None:
    """A weight of 2 is a sample twice, and one of 0 none, be it NaN."""
    start, data, lr, _ = covered(6, n=5, steps=1)
    X = np.concatenate([data.X, np.full((1, 10, 7), np.nan)])
    weight = np.array([2.0, 1, 1, 1, 1, 0])
    weighted = mh.Dataset(X, np.append(data.y, 1.0), weight=weight)
    twice = data.subset([0, 0, 1, 2, 3, 4])
    end = start + 40.0 * theory.ntk_margin(start, data).direction
    bounds = [
        theory.training_bound(start, of, comparator=end, lr=lr, steps=3) for of in (weighted, twice)
    ]
    assert bounds[0].bound == pytest.approx(bounds[1].bound, rel=1e-13)
    assert bounds[0].radius == bounds[1].radius
    weighted = weighted.subset(slice(5))
    certificates = []
    for of in (weighted, twice):
        run = mh.train(
            start, of, steps=3, optimizer=mh.GradientDescent(lr), record=("loss", "distance")
        )
        certificates.append(theory.certify(run, of))
    assert len(certificates[0].inequalities) == 5
    for ours, theirs in zip(*(c.inequalities for c in certificates), strict=True):
        np.testing.assert_allclose(ours.value, theirs.value, rtol=1e-7)
        np.testing.assert_allclose(ours.bound, theirs.bound, rtol=1e-12)


def test_leaving_out_needs_trainings_that_stay_finite() -> None:
    start, data = wild()
    with pytest.raises(ValueError, match="lr: expected trainings whose numbers stay finite, got"):
        theory.leave_one_out(start, data, steps=9, lr=1e308)
    runs = mh.Dataset(np.stack([data.X, data.X]), data.y)
    with pytest.raises(
        ValueError, match=r"X: expected one data set, as X\.run\(0\) is, got 2 runs"
    ):
        theory.leave_one_out(start, runs, steps=1, lr=1.0)


def test_a_violation_would_be_seen() -> None:
    value, bound = np.array([1.0, 3.0, 3.0]), np.array([2.0, 2.0, 2.0])
    applies = np.array([True, False, True])
    inequality = theory.Inequality("x", np.arange(3), value, bound, applies, ~applies, "")
    assert inequality.violated.tolist() == [False, False, True]
    certificate = theory.Certificate((inequality,), None)
    assert certificate.violated == ("x",)
    assert "VIOLATED" in str(certificate)
    # Eigenvalues are known to 1e-10: what exceeds its bound by more than 1e-9 does exceed it.
    value = 2 * np.array([1 + 1e-10, 1 + 2e-9, 1 + 0.01])
    close = dataclasses.replace(inequality, value=value, applies=np.ones(3, bool))
    assert close.violated.tolist() == [False, True, True]


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
    with pytest.raises(ValueError, match="steps: expected an integer of at least 1, got 0"):
        theory.compare(start, data, comparator=run.model).training(1.0, 0)
    with pytest.raises(ValueError, match=r"lr: expected a number above 0, got -1\.0"):
        theory.compare(start, data, comparator=run.model).conditions(-1.0, 1)
    with pytest.raises(ValueError, match="constants: expected 'proved' for the stability"):
        theory.compare(start, data, comparator=run.model, constants="recalled").stability(1.0, 1)
    squared = mh.train(start, data, steps=1, optimizer=mh.GradientDescent(1.0), loss="squared")
    with pytest.raises(ValueError, match="run: expected training on the logistic loss"):
        theory.certify(squared, data)
