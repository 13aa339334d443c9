"""`evaluate` gives what training records at step 0, for one model and without training."""

from __future__ import annotations

import numpy as np
import pytest

import mhfast as mh
from mhfast.training.quantities import names

n, T, d, H, p, R = 9, 4, 5, 3, 2, 6
RATE = mh.GradientDescent(0.1)


def classifier(seed=0, runs=None):
    return mh.Classifier.gaussian(H, T, d, std=0.5, seed=seed, runs=runs)


def data_set(seed=1):
    rng = np.random.default_rng(seed)
    return mh.Dataset(
        rng.standard_normal((n, T, d)),
        np.where(rng.random(n) < 0.5, 1.0, -1.0),
        weight=rng.random(n),
        token_groups=rng.integers(0, 2, (n, T)),
    )


def layer():
    rng = np.random.default_rng(2)
    model = mh.Layer(
        mh.LowRank(rng.standard_normal((H, d, 2))), rng.standard_normal((H, d, p)), query=-1
    )
    data = mh.Dataset(
        rng.standard_normal((n, T, d)),
        rng.standard_normal((n, 1, p)),
        token_groups=rng.integers(0, 2, (n, T)),
    )
    return model, data


def everything(model):
    return names(tuple(model.parameters))


@pytest.mark.parametrize("runs", [None, R])
def test_every_quantity_is_that_of_step_0(runs):
    model, data = classifier(runs=runs), data_set()
    record = (*everything(model), "test_loss", "test_accuracy", "test_margin")
    options = {"test": data_set(3), "directions": {"a": classifier(5), "b": classifier(6)}}
    found = mh.evaluate(model, data, record=record, **options)
    run = mh.train(model, data, steps=0, optimizer=RATE, record=record, **options)
    assert list(found) == list(run.history)
    for name, rows in run.history.items():
        np.testing.assert_array_equal(found[name], rows[:, 0] if runs else rows[0], name)


def test_a_layer_with_factors_and_its_own_losses():
    model, data = layer()
    record = [name for name in everything(model) if name != "cosine"]
    found = mh.evaluate(model, data, record=record, loss="squared")
    run = mh.train(model, data, steps=0, optimizer=RATE, record=record, loss="squared")
    for name, rows in run.history.items():
        np.testing.assert_array_equal(found[name], rows[0], name)


def test_values_by_hand():
    model, data = classifier(), data_set()
    f, w = model(data), data.weight / data.weight.sum()
    found = mh.evaluate(model, data, record=("loss", "accuracy", "margin", "param_norm"))
    assert found["loss"] == pytest.approx(w @ np.log1p(np.exp(-data.y * f)), rel=1e-12)
    assert found["accuracy"] == pytest.approx(w @ (data.y * f > 0), rel=1e-12)
    assert found["margin"] == pytest.approx(min(data.y * f), rel=1e-12)
    assert found["param_norm"] == pytest.approx(mh.norm(mh.Gradients(**model.parameters)))
    assert all(type(value) is float for value in found.values())


def test_distance_is_measured_from_start():
    model, start = classifier(), classifier(7)
    change = mh.Gradients(**{k: a - start.parameters[k] for k, a in model.parameters.items()})
    found = mh.evaluate(model, data_set(), record="distance", start=start)
    assert found["distance"] == pytest.approx(mh.norm(change), rel=1e-12)
    assert mh.evaluate(model, data_set(), record="distance")["distance"] == 0.0


def test_functions_see_the_model_and_gradients_what_is_asked_for():
    model, data = classifier(), data_set()

    def trace(model):
        return np.trace(model.W, axis1=1, axis2=2)

    found = mh.evaluate(model, data, record=(trace, "grad_norm"), wrt="U")
    np.testing.assert_array_equal(found["trace"], trace(model))
    expected = mh.norm(mh.value_and_grad(model, data, wrt="U")[1])
    assert found["grad_norm"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"record": "los"}, ValueError, "record: expected one of loss"),
        ({"record": "cosine"}, ValueError, "record 'cosine': expected directions="),
        ({"loss": "cross_entropy"}, ValueError, "loss: expected one of"),
        ({"start": layer()[0]}, TypeError, "start: expected a Classifier like the model"),
        (
            {"start": mh.Classifier.zeros(H + 1, T, d)},
            ValueError,
            r"start: expected W of dtype float64 and shape \(3, 5, 5\), got float64 of shape",
        ),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        mh.evaluate(classifier(), data_set(), **options)


def test_a_run_is_not_a_model():
    run = mh.train(classifier(), data_set(), steps=0, optimizer=RATE)
    with pytest.raises(
        TypeError, match="model: expected a Classifier, Layer, Stack or Run, got str"
    ):
        mh.evaluate("model", data_set())
    assert mh.evaluate(run.model, data_set())["loss"] == run.history["loss"][-1]
