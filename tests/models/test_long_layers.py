"""Layers of long samples: values X V, and keys X K, that come before the weights.

The former of few outputs, the latter of a W of low rank.
"""

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

n, T, d = 2, 150, 37

# Relative to the largest entry; the promise for results against the float64 reference.
TOLERANCE = {np.float64: 1e-12, np.float32: 3e-5}

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"lengths": [150, 97]},
    "external": {"query": 131},
    "softmax1": {"attention": "softmax1"},
    "relu": {"attention": "relu", "causal": True},
    "many heads": {"heads": 14},
    "low rank": {"rank": 2},
    "low rank, causal": {"rank": 2, "causal": True, "scale": 0.7},
    "tied, lengths": {"rank": 5, "tied": True, "lengths": [150, 97]},
    "low rank, many outputs": {"rank": 3, "outputs": 23, "query": 131, "scale": 0.7},
    "tied, identity": {"rank": 3, "tied": True, "identity": True, "heads": 14},
    "low rank, sigmoid": {"rank": 2, "attention": "sigmoid", "outputs": 23},
    "identity": {"W": None},
    "factored values": {"value_rank": 2},
}


def drawn(name, dtype=np.float64, size=1.0):
    case = dict(CASES[name])
    rng = np.random.default_rng(5)
    normal = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    names = ("heads", "rank", "tied", "value_rank", "outputs", "identity", "query", "lengths")
    heads, rank, tied, value_rank, outputs, identity, rows, lengths = (
        case.pop(key, None) for key in names
    )
    H, p = heads or 3, d if identity else outputs or 3
    W = (size / d) * normal(H, d, d)
    if rank:
        Q, K = (0.2 * size**0.5 * normal(H, d, rank) for _ in range(2))
        W = mh.LowRank(Q, None if tied else K)
    W = case.pop("W", W)
    V = normal(H, d, p) / d**0.5
    if value_rank:
        V = mh.ValueOutput(normal(H, d, value_rank) / d**0.5, normal(H, value_rank, p))
    data = mh.Dataset(
        normal(n, T, d) / (d**0.25 if W is None else 1.0),
        normal(n, rows or T, p),
        query=normal(n, rows, d) if rows else None,
        lengths=lengths,
    )
    if W is not None and not rank:
        W = W.astype(dtype)
    elif rank:
        W = mh.LowRank(W.Q.astype(dtype), None if tied else W.K.astype(dtype))
    V = None if identity else V if value_rank else V.astype(dtype)
    return mh.Layer(W, V, **case), data


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_follow_the_reference(name, dtype, isa, use_isa):
    use_isa(isa)
    model, data = drawn(name, dtype)
    given = {"query": data.query, "lengths": data.lengths}
    f = model(data)
    expected = mh.reference.outputs(model, data.X, **given)
    assert np.abs(f - expected).max() < TOLERANCE[dtype] * np.abs(expected).max()
    value, found = mh.value_and_grad(model, data, loss="squared")
    expected_value, gradients = mh.reference.value_and_grad(
        model, data.X, data.y, loss="squared", **given
    )
    assert value == pytest.approx(expected_value, rel=TOLERANCE[dtype])
    for key, array in gradients.items():
        error = np.abs(getattr(found, key) - array).max()
        assert error < TOLERANCE[dtype] * np.abs(array).max(), key
    for wrt in model.parameters if name != "factored values" else ():
        _, one = mh.value_and_grad(model, data, loss="squared", wrt=wrt)
        np.testing.assert_array_equal(getattr(one, wrt), getattr(found, wrt))


FACTORED = ["low rank, causal", "tied, lengths", "low rank, many outputs"]


@pytest.mark.parametrize("name", ["plain", "causal", "lengths", *FACTORED])
def test_results_depend_on_neither_threads_nor_batch_nor_plan(name, use_plan):
    model, data = drawn(name, np.float32)
    value, found = mh.value_and_grad(model, data, loss="squared", num_threads=1)
    again, other = mh.value_and_grad(model, data, loss="squared", num_threads=2)
    assert again == value
    for key in model.parameters:
        np.testing.assert_array_equal(getattr(other, key), getattr(found, key))
    f = model(data)
    np.testing.assert_array_equal(model(data[[1]]), f[[1]])
    for plan in ("samples", "hybrid", "rows"):
        use_plan(plan)
        np.testing.assert_array_equal(model(data), f)


@pytest.mark.parametrize("name", ["plain", "low rank", "low rank, sigmoid"])
def test_gradients_in_saturation(name):
    """A normalized step needs all digits of a gradient whose weights are far apart."""
    model, data = drawn(name, size=60.0)
    rule = mh.NormalizedGradientDescent(1e-3)
    settings = {"steps": 5, "optimizer": rule, "loss": "squared", "record": ("loss",)}
    run = mh.train(model, data, **settings)
    order = np.random.default_rng(0).permutation(T)
    moved = mh.Dataset(data.X[:, order], data.y[:, order])
    other = mh.train(model, moved, **settings)
    # Rounding of sums in another order; without centred derivatives digits would be lost.
    np.testing.assert_allclose(other.history["loss"], run.history["loss"], rtol=1e-12)
    for key, array in run.model.parameters.items():
        np.testing.assert_allclose(other.model.parameters[key], array, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["causal", *FACTORED])
def test_a_loss_of_ones_own_has_the_same_gradient(name):
    model, data = drawn(name)

    def squared(outputs, targets):
        error = outputs - targets
        return error**2, 2 * error

    value, found = mh.value_and_grad(model, data, loss="squared")
    own, other = mh.value_and_grad(model, data, loss=squared)
    # The same numbers but for the order of sums.
    assert own == pytest.approx(value, rel=1e-12)
    for key in model.parameters:
        np.testing.assert_allclose(getattr(other, key), getattr(found, key), rtol=0, atol=1e-12)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_the_inputs_leave_out_keys_that_no_row_sees(name, dtype, isa, use_isa):
    use_isa(isa)
    model, data = drawn(name, dtype)
    wrt = ("X",) if data.query is None else ("X", "query")
    _, found = mh.value_and_grad(model, data, loss="squared", wrt=wrt)
    _, expected = mh.reference.value_and_grad(
        model, data.X, data.y, loss="squared", wrt=wrt, query=data.query, lengths=data.lengths
    )
    _, other = mh.value_and_grad(model, data, loss="squared", wrt=wrt, num_threads=2)
    for key in wrt:
        array = expected[key]
        error = np.abs(getattr(found, key) - array).max()
        assert error < TOLERANCE[dtype] * np.abs(array).max(), key
        np.testing.assert_array_equal(getattr(other, key), getattr(found, key))
    if data.lengths is not None:
        assert not found.X[1, data.lengths[1] :].any()


@pytest.mark.parametrize("name", ["plain", *FACTORED])
def test_gradients_of_tiny_derivatives(name):
    """Below 1e-280 they are computed again without their largest factors."""
    model, data = drawn(name)
    given = {"query": data.query, "lengths": data.lengths}
    f = mh.reference.outputs(model, data.X, **given)
    seen = f if data.lengths is None else f[0]  # rows beyond a length have outputs 0
    factor = 660 / np.abs(seen).min()
    model = mh.Layer(model.W, model.V * factor, scale=model.scale, causal=model.causal)
    y = np.where(f < 0, -1.0, 1.0)
    value, found = mh.value_and_grad(model, data.X, y, **given)
    expected_value, gradients = mh.reference.value_and_grad(
        model, data.X, y, loss="logistic", **given
    )
    assert 0 < expected_value < 1e-280
    tolerance = 1e-14 * factor * np.abs(f).max()  # margins have errors of some 1e-16 of the largest
    assert value == pytest.approx(expected_value, rel=tolerance)
    for key, array in gradients.items():
        error = np.abs(getattr(found, key) - array).max()
        assert error < tolerance * np.abs(array).max(), key
