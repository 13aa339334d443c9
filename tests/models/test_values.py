"""`model.loss` and `model.accuracy` are what `value_and_grad` computes and training records."""

from __future__ import annotations

import numpy as np
import pytest

import mhfast as mh

n, T, d, H, p, R = 9, 4, 5, 3, 2, 6
RNG = np.random.default_rng(0)
X = RNG.standard_normal((n, T, d))
SIGNS = RNG.choice([-1.0, 1.0], n)
LENGTHS = RNG.integers(0, T + 1, n)
CLASSIFIER = mh.Classifier.gaussian(H, T, d, std=0.7, seed=1)
LAYER = mh.Layer.gaussian(H, d, p, std=0.7, seed=2)
ROW_SIGNS = RNG.choice([-1.0, 1.0], (n, T, p))
CLASSES = RNG.integers(0, p, (n, T))
SIDE = {"query": RNG.standard_normal((n, 3, d))}
OF_RUNS = mh.Classifier.gaussian(H, T, d, std=0.7, seed=3, runs=R)
LAYERS = mh.Layer.gaussian(H, d, p, std=0.7, seed=4, runs=R)

CASES = {
    "classifier": (CLASSIFIER, SIGNS, "logistic", {}),
    "weights": (CLASSIFIER, SIGNS, "exponential", {"weight": RNG.random(n)}),
    "lengths": (CLASSIFIER, SIGNS, "linear", {"lengths": LENGTHS}),
    "runs": (OF_RUNS, SIGNS, "logistic", {}),
    "weights of runs": (OF_RUNS, SIGNS, "logistic", {"weight": RNG.random((R, n))}),
    "layer": (LAYER, ROW_SIGNS, "squared_hinge", {"weight": RNG.random(n)}),
    "weights of rows": (LAYER, ROW_SIGNS, "logistic", {"weight": RNG.random((n, T))}),
    "rows within lengths": (LAYER, ROW_SIGNS, "logistic", {"lengths": LENGTHS}),
    "external": (LAYER, ROW_SIGNS[:, :3], "logistic", SIDE | {"lengths": LENGTHS}),
    "classes": (LAYER, CLASSES, "cross_entropy", {"lengths": LENGTHS, "weight": RNG.random(n)}),
    "classes of runs": (LAYERS, CLASSES, "cross_entropy", {"weight": RNG.random((R, n, T))}),
    "a loss with a parameter": (CLASSIFIER, SIGNS, mh.PolynomialTail(2.0), {}),
    "smoothed classes": (LAYER, CLASSES, mh.CrossEntropy(0.2), {"lengths": LENGTHS}),
    "probabilities": (LAYER, RNG.dirichlet(np.ones(p), (n, T)), "cross_entropy", {}),
    "layers of runs": (LAYERS, ROW_SIGNS, "logistic", {"weight": RNG.random((R, n))}),
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_what_training_records(case):
    model, y, loss, options = CASES[case]
    data = mh.Dataset(X, y, **options)
    recorded = mh.evaluate(model, data, record=("loss", "accuracy"), loss=loss)
    value = model.loss(data, loss=loss)
    assert type(value) is type(recorded["loss"])
    # Runs side by side are summed in another order than one by one.
    np.testing.assert_allclose(value, recorded["loss"], rtol=1e-15)
    assert np.array_equal(value, mh.value_and_grad(model, X, y, loss=loss, **options)[0])
    share = model.accuracy(data, loss=loss)
    assert type(share) is type(recorded["accuracy"])
    # Sums of some dozen weights in two orders.
    np.testing.assert_allclose(share, recorded["accuracy"], rtol=1e-14)
    np.testing.assert_array_equal(model.accuracy(X, y, loss=loss, **options), share)


def test_wrong_arguments():
    for call in (CLASSIFIER.loss, CLASSIFIER.accuracy):
        with pytest.raises(ValueError, match=r"loss: expected one of .*, got 'absolute'"):
            call(X, SIGNS, loss="absolute")
        with pytest.raises(TypeError, match="y: expected labels with the array X, got None"):
            call(X)


def test_a_seed_by_position_is_deprecated():
    data = mh.Dataset(X, SIGNS)
    with pytest.warns(DeprecationWarning, match="random_step: seed is given by keyword, seed=..."):
        model = mh.Classifier.random_step(data, H, 3)
    assert model == mh.Classifier.random_step(data, H, seed=3)
    with pytest.raises(TypeError, match="positional arguments"):
        mh.Classifier.random_step(data, H, 3, True)
