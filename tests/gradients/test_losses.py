"""Losses of a classifier's outputs: error at any margin, left-out samples, every lane and slab."""

import dataclasses

import numpy as np
import pytest
from lists import LOSSES, kind_of_targets

import mhfast as mh
from mhfast import _core
from mhfast._arguments.losses import name_of

# exp and log1p of a register are each within 1.25 units in the last place, and so are slopes but
# for a division; the sum and the rounding of the result add one each.
BOUND = 4 * np.finfo(np.float64).eps


def exact(loss, output, label):
    """Loss at an output, and the size of its derivative by it, in long double."""
    formula = mh.reference.LOSSES[name_of(loss)]
    parameter = {} if isinstance(loss, str) else dataclasses.asdict(loss)
    terms = formula(*(np.array([x], np.longdouble) for x in (output, label)), **parameter)
    return float(terms.value[0]), abs(float(terms.slope[0]))


def outputs_themselves(margins, labels, weight=None):
    """Classifier and data whose output of sample i is exactly labels[i] margins[i]."""
    outputs = np.asarray(labels * margins)
    model = mh.Classifier(W=np.zeros((1, 1, 1)), U=np.ones((1, 1, 1)))
    return model, mh.Dataset(outputs[:, None, None], labels, weight=weight)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("loss", LOSSES[mh.Classifier])
def test_error_at_any_margin(isa, loss, use_isa):
    use_isa(isa)
    rng = np.random.default_rng(0)
    sizes = np.concatenate([np.geomspace(1e-12, 700, 60), rng.uniform(0, 3, 60), [0.0]])
    for m in np.concatenate([sizes, -sizes]):
        label = rng.choice([-1.0, 1.0])
        if kind_of_targets(loss) == "nonnegative":
            m, label = abs(m), 1.0
        model, data = outputs_themselves(np.array([m]), np.array([label]))
        value, gradient = mh.value_and_grad(model, data, loss=loss, wrt="U")
        value_there, slope = exact(loss, label * m, label)
        assert value == value_there or abs(value - value_there) <= BOUND * abs(value_there), m
        if m:  # the tokens are the outputs: at 0 there is no gradient, whatever the slope
            assert abs(abs(gradient.U[0, 0, 0]) - slope * abs(m)) <= BOUND * slope * abs(m), m


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("plan", ["samples", "hybrid", "rows", "tiles"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 3, 8, 17, 70])
def test_left_out_samples_have_no_part(isa, plan, dtype, n, use_isa, use_plan):
    """Samples of weight 0 may have any output; loss, accuracy and margin are of the others."""
    use_isa(isa)
    use_plan(plan)
    rng = np.random.default_rng(n)
    labels, margins = rng.choice([-1.0, 1.0], n), rng.uniform(-4, 4, n)
    weight = rng.uniform(0.5, 2, n)
    model, data = outputs_themselves(margins, labels, weight)
    left_out = np.concatenate([[np.nan, np.inf, -np.inf], data.X[:, 0, 0], [np.nan]])
    more = mh.Dataset(
        left_out[:, None, None].astype(dtype),
        np.concatenate([[1, -1, 1], labels, [-1]]).astype(dtype),
        weight=np.concatenate([[0, 0, 0], weight, [0]]).astype(dtype),
    )
    model = mh.Classifier(W=model.W.astype(dtype), U=model.U.astype(dtype))
    m = labels * left_out[3:-1].astype(dtype).astype(np.float64)
    w = weight.astype(dtype).astype(np.float64)
    expected = np.average(np.logaddexp(0, -m), weights=w)
    record = ("loss", "accuracy", "margin")
    history = mh.train(
        model, more, steps=0, optimizer=mh.GradientDescent(0.1), record=record
    ).history
    # Sums of at most 70 terms of one sign, each within BOUND.
    assert history["loss"][0] == pytest.approx(expected, rel=1e-13)
    assert history["accuracy"][0] == pytest.approx(np.average(m > 0, weights=w), rel=1e-13)
    assert history["margin"][0] == m.min()


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("plan", ["samples", "hybrid", "rows", "tiles"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("query", [None, -1])
def test_a_recorded_loss_does_not_depend_on_how_far_training_goes(
    isa, plan, dtype, query, use_isa, use_plan
):
    """The last point has only its loss computed, those before it also their gradient."""
    use_isa(isa)
    use_plan(plan)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        X, y = rng.standard_normal((7, 5, 3)).astype(dtype), rng.choice([-1.0, 1.0], 7)
        W = rng.standard_normal((2, 3, 3)).astype(dtype)
        U = rng.standard_normal((2, 1 if query else 5, 3)).astype(dtype)
        model, data = mh.Classifier(W=W, U=U, query=query), mh.Dataset(X, y.astype(dtype))
        options = {"optimizer": mh.GradientDescent(0.3), "record": ("loss", "margin")}
        whole = mh.train(model, data, steps=4, **options).history
        for steps in range(4):
            part = mh.train(model, data, steps=steps, **options).history
            for name in ("loss", "margin"):
                np.testing.assert_array_equal(part[name], whole[name][: steps + 1])
