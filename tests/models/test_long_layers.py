"""Layers of long samples with few outputs, whose values X V come before the weights."""

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

n, T, d, p = 2, 150, 37, 3

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
    "identity": {"W": None},
    "factored values": {"value_rank": 2},
}


def drawn(name, dtype=np.float64, size=1.0):
    case = dict(CASES[name])
    rng = np.random.default_rng(5)
    normal = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    names = ("heads", "rank", "value_rank", "query", "lengths")
    heads, rank, value_rank, rows, lengths = (case.pop(key, None) for key in names)
    H = heads or 3
    W = (size / d) * normal(H, d, d)
    if rank:
        W = mh.LowRank(0.2 * normal(H, d, rank), 0.2 * normal(H, d, rank))
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
    return mh.Layer(W, V.astype(dtype) if not value_rank else V, **case), data


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
    for wrt in ("W", "V") if name not in ("identity", "low rank", "factored values") else ():
        _, one = mh.value_and_grad(model, data, loss="squared", wrt=wrt)
        np.testing.assert_array_equal(getattr(one, wrt), getattr(found, wrt))


@pytest.mark.parametrize("name", ["plain", "causal", "lengths"])
def test_results_depend_on_neither_threads_nor_batch_nor_plan(name, use_plan):
    model, data = drawn(name, np.float32)
    value, found = mh.value_and_grad(model, data, loss="squared", num_threads=1)
    again, other = mh.value_and_grad(model, data, loss="squared", num_threads=2)
    assert again == value
    np.testing.assert_array_equal(other.W, found.W)
    np.testing.assert_array_equal(other.V, found.V)
    f = model(data)
    np.testing.assert_array_equal(model(data[[1]]), f[[1]])
    for plan in ("samples", "hybrid", "rows"):
        use_plan(plan)
        np.testing.assert_array_equal(model(data), f)


def test_gradients_in_saturation():
    """A normalized step needs all digits of a gradient whose weights are far apart."""
    model, data = drawn("plain", size=60.0)
    rule = mh.NormalizedGradientDescent(1e-3)
    settings = {"steps": 5, "optimizer": rule, "loss": "squared", "record": ("loss",)}
    run = mh.train(model, data, **settings)
    order = np.random.default_rng(0).permutation(T)
    moved = mh.Dataset(data.X[:, order], data.y[:, order])
    other = mh.train(model, moved, **settings)
    # Rounding of sums in another order; without centred derivatives digits would be lost.
    np.testing.assert_allclose(other.history["loss"], run.history["loss"], rtol=1e-12)
    np.testing.assert_allclose(other.model.W, run.model.W, rtol=0, atol=1e-12)


def test_a_loss_of_ones_own_has_the_same_gradient():
    model, data = drawn("causal")

    def squared(outputs, targets):
        error = outputs - targets
        return error**2, 2 * error

    value, found = mh.value_and_grad(model, data, loss="squared")
    own, other = mh.value_and_grad(model, data, loss=squared)
    # The same numbers but for the order of sums.
    assert own == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(other.V, found.V, rtol=0, atol=1e-12)
    np.testing.assert_allclose(other.W, found.W, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", ["causal", "lengths", "relu", "external", "identity"])
def test_gradients_by_the_inputs_leave_out_keys_that_no_row_sees(name, dtype):
    model, data = drawn(name, dtype)
    wrt = ("X",) if data.query is None else ("X", "query")
    _, found = mh.value_and_grad(model, data, loss="squared", wrt=wrt)
    _, expected = mh.reference.value_and_grad(
        model, data.X, data.y, loss="squared", wrt=wrt, query=data.query, lengths=data.lengths
    )
    for key in wrt:
        array = expected[key]
        error = np.abs(getattr(found, key) - array).max()
        assert error < TOLERANCE[dtype] * np.abs(array).max(), key
    if data.lengths is not None:
        assert not found.X[1, data.lengths[1] :].any()
