"""Classifiers of long samples whose W has low rank: keys go through its factors, (Z Q) (X K)ᵀ."""

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

n, T = 3, 150

# Relative to the largest entry; the promise for results against the float64 reference.
TOLERANCE = {np.float64: 1e-12, np.float32: 3e-5}

CASES = {
    "plain": {},
    "causal, tied": {"causal": True, "tied": True, "scale": 0.7},
    "lengths": {"lengths": [150, 97, 0], "scale": 0.7},
    "external": {"query": 531, "rank": 5},  # rows of two threads
    "few features": {"d": 11, "rank": 3},  # whose gradients come from D X
    "softmax1": {"attention": "softmax1", "tied": True},
    "relu": {"attention": "relu", "causal": True},
}


def drawn(name, dtype=np.float64, size=1.0):
    case = dict(CASES[name])
    rng = np.random.default_rng(5)
    d, rank, rows = case.pop("d", 37), case.pop("rank", 2), case.pop("query", None)
    tied, lengths = case.pop("tied", False), case.pop("lengths", None)
    normal = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    Q, K = (np.asarray(0.4 * size**0.5 / d**0.25 * normal(2, d, rank), dtype) for _ in range(2))
    model = mh.Classifier(
        mh.LowRank(Q, None if tied else K), normal(2, rows or T, d) / dtype(T), **case
    )
    data = mh.Dataset(
        normal(n, T, d),
        np.where(np.arange(n) % 2, 1.0, -1.0),
        query=normal(n, rows, d) if rows else None,
        lengths=lengths,
    )
    return model, data, {"query": data.query, "lengths": data.lengths}


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_follow_the_reference(name, dtype, isa, use_isa):
    use_isa(isa)
    model, data, given = drawn(name, dtype)
    f, expected = model(data), mh.reference.outputs(model, data.X, **given)
    assert np.abs(f - expected).max() < TOLERANCE[dtype] * np.abs(expected).max()
    value, found = mh.value_and_grad(model, data)
    expected_value, gradients = mh.reference.value_and_grad(model, data.X, data.y, **given)
    assert value == pytest.approx(expected_value, rel=TOLERANCE[dtype])
    for key, array in gradients.items():
        error = np.abs(getattr(found, key) - array).max()
        assert error < TOLERANCE[dtype] * np.abs(array).max(), key
    for wrt in model.parameters:
        _, one = mh.value_and_grad(model, data, wrt=wrt)
        if wrt == "U":  # outputs are sums of A X, which no derivative of softmax needs
            error = np.abs(one.U - found.U).max()
            assert error < TOLERANCE[dtype] * np.abs(found.U).max()
        else:
            np.testing.assert_array_equal(getattr(one, wrt), getattr(found, wrt))


@pytest.mark.parametrize("name", CASES)
def test_results_depend_on_neither_threads_nor_batch_nor_plan(name, use_plan):
    model, data, _ = drawn(name, np.float32)
    value, found = mh.value_and_grad(model, data, num_threads=1)
    again, other = mh.value_and_grad(model, data, num_threads=3)
    assert again == value
    for key in model.parameters:
        np.testing.assert_array_equal(getattr(other, key), getattr(found, key))
    f = model(data)
    np.testing.assert_array_equal(model(data[[1]]), f[[1]])
    for plan in ("samples", "hybrid", "rows", "tiles"):
        use_plan(plan)
        np.testing.assert_array_equal(model(data), f)


@pytest.mark.parametrize("name", ["plain", "causal, tied", "lengths", "few features"])
def test_gradients_of_tiny_derivatives(name):
    """Below 1e-280 they are computed again without their largest factors."""
    model, data, given = drawn(name)
    f = mh.reference.outputs(model, data.X, **given)
    seen = f[f != 0]  # a sample without tokens has the output 0, and a weight of 0 here
    factor, weight = 660 / np.abs(seen).min(), (f != 0).astype(float)
    model = mh.Classifier(model.W, model.U * factor, scale=model.scale, causal=model.causal)
    y = np.where(f < 0, -1.0, 1.0)
    value, found = mh.value_and_grad(model, data.X, y, weight=weight, **given)
    expected_value, gradients = mh.reference.value_and_grad(
        model, data.X, y, weight=weight, **given
    )
    assert 0 < expected_value < 1e-280
    tolerance = 1e-13 * factor * np.abs(f).max()  # margins have errors of some 1e-16 of the largest
    assert value == pytest.approx(expected_value, rel=tolerance)
    for key, array in gradients.items():
        error = np.abs(getattr(found, key) - array).max()
        assert error < tolerance * np.abs(array).max(), key


@pytest.mark.parametrize("name", ["plain", "causal, tied", "few features"])
def test_gradients_in_saturation(name):
    """A normalized step needs all digits of a gradient whose weights are far apart."""
    model, data, _ = drawn(name, size=60.0)
    settings = {"steps": 5, "optimizer": mh.NormalizedGradientDescent(1e-3)}
    run = mh.train(model, data, **settings)
    if model.causal:  # rows follow the tokens: samples are moved in their place
        order = [2, 0, 1]
        other = mh.train(model, mh.Dataset(data.X[order], data.y[order]), **settings)
    else:
        order = np.random.default_rng(0).permutation(T)
        moved = mh.Classifier(model.W, model.U[:, order])
        other = mh.train(moved, mh.Dataset(data.X[:, order], data.y), **settings)
    # Rounding of sums in another order; without centred derivatives digits would be lost.
    np.testing.assert_allclose(other.history["loss"], run.history["loss"], rtol=1e-12)
    np.testing.assert_allclose(other.model.W.Q, run.model.W.Q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_the_inputs(name, dtype, isa, use_isa):
    use_isa(isa)
    model, data, given = drawn(name, dtype)
    weight = np.array([1.0, 0.0, 0.5], dtype)  # a sample that nothing depends on
    wrt = ("X",) if data.query is None else ("X", "query")
    settings = {"wrt": wrt, "weight": weight, **given}
    _, found = mh.value_and_grad(model, data.X, data.y, num_threads=1, **settings)
    _, other = mh.value_and_grad(model, data.X, data.y, num_threads=2, **settings)
    _, expected = mh.reference.value_and_grad(model, data.X, data.y, **settings)
    for key in wrt:
        error = np.abs(getattr(found, key) - expected[key]).max()
        assert error < TOLERANCE[dtype] * np.abs(expected[key]).max(), key
        assert not getattr(found, key)[1].any()
        np.testing.assert_array_equal(getattr(other, key), getattr(found, key))
