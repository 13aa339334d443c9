"""Attention weights, and what is made of them, of samples whose rows do not fit into one tile."""

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

n, T, d, H = 3, 205, 5, 2

# Relative to the largest entry; the promise for results against the float64 reference.
TOLERANCE = {np.float64: 1e-12, np.float32: 3e-6}

CASES = {
    "self": {},
    "causal": {"causal": True},
    "lengths": {"lengths": [205, 1, 98]},
    "causal, lengths": {"causal": True, "lengths": [7, 205, 160]},
    "external": {"query": 131},
    "prompt": {"prompt": 83},
    "identity": {"W": None, "causal": True},
    "low rank": {"rank": 2},
    "softmax1": {"attention": "softmax1", "causal": True},
    "linear": {"attention": "linear", "causal": True},
}


def drawn(name, dtype):
    """Return a layer of a case and its data."""
    case = dict(CASES[name])
    rng = np.random.default_rng(3)
    normal = lambda *shape: rng.standard_normal(shape).astype(dtype)  # noqa: E731
    rows, prompt, lengths, rank = (
        case.pop(k, None) for k in ("query", "prompt", "lengths", "rank")
    )
    W = normal(H, d, d)
    if rank:
        W = mh.LowRank(normal(H, d, rank), normal(H, d, rank))
    W = case.pop("W", W)
    if prompt:
        case["prompt"] = normal(prompt, d)
    q = rows or prompt or T
    data = mh.Dataset(
        normal(n, T, d),
        normal(n, q, 4),
        query=normal(n, rows, d) if rows else None,
        lengths=lengths,
        token_groups=rng.integers(0, 3, (n, T)),
        sample_groups=([0, 1, 0], ("even", "odd")),
    )
    return mh.Layer(W, normal(H, d, 4), scale=0.5, **case), data


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", CASES)
def test_weights_follow_the_reference(name, dtype):
    model, data = drawn(name, dtype)
    weights = model.attention(data)
    expected = mh.reference.attention(model, data.X, query=data.query, lengths=data.lengths)
    assert weights.dtype == dtype
    assert weights.shape == expected.shape
    assert np.abs(weights - expected).max() < TOLERANCE[dtype] * np.abs(expected).max()
    # What no row sees is exactly zero.
    assert np.array_equal(weights == 0, expected == 0)


@pytest.mark.parametrize("name", ["self", "causal, lengths"])
def test_weights_depend_on_neither_threads_nor_batch(name):
    model, data = drawn(name, np.float32)
    weights = model.attention(data, num_threads=1)
    np.testing.assert_array_equal(model.attention(data, num_threads=2), weights)
    for i in range(n):
        alone = data[[i]]
        np.testing.assert_array_equal(model.attention(alone), weights[[i]])


def test_words_attend_as_their_embeddings():
    rng = np.random.default_rng(0)
    ids, embedding = rng.integers(0, 11, (n, T)), rng.standard_normal((11, d))
    model, _ = drawn("causal", np.float64)
    np.testing.assert_array_equal(
        model.attention(mh.Tokens(ids, embedding)), model.attention(embedding[ids])
    )


def test_a_token_that_is_not_finite_matters_to_the_rows_that_see_it():
    model, data = drawn("causal", np.float64)
    X = np.array(data.X)
    X[1, 150] = np.nan
    weights = model.attention(X)
    clean = model.attention(data)
    np.testing.assert_array_equal(weights[1, :, :150], clean[1, :, :150])
    assert np.isnan(weights[1, :, 150:, :151]).all()
    np.testing.assert_array_equal(weights[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("name", CASES)
def test_records_are_means_over_the_weights(name):
    model, data = drawn(name, np.float64)
    run = mh.train(
        model, data, steps=1, optimizer=mh.GradientDescent(1e-3), loss="squared", wrt=("V",),
        record=("attention_max", "attention_groups"),
    )  # fmt: skip
    A = model.attention(data)
    lengths = np.full(n, T) if data.lengths is None else data.lengths
    rows = np.ones((n, A.shape[2]), bool)
    if data.query is None and model.prompt is None:
        rows = np.arange(T) < lengths[:, None]
    largest = np.einsum("nht,nt->h", A.max(axis=3), rows) / rows.sum()
    groups = np.zeros((H, 2, 3))
    for a in range(2):
        for b in range(3):
            seen = A * (data.token_groups.index == b)[:, None, None, :]
            members = rows * (data.sample_groups.index == a)[:, None]
            groups[:, a, b] = np.einsum("nhts,nt->h", seen, members) / members.sum()
    # Float64 sums of at most 600 rows, in another order.
    for k in range(2):
        np.testing.assert_allclose(run.history["attention_max"][k], largest, rtol=1e-12)
        np.testing.assert_allclose(run.history["attention_groups"][k], groups, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_readout_is_trained_on_attended_tokens(name):
    model, data = drawn(name, np.float64)
    settings = {"steps": 3, "optimizer": mh.GradientDescent(1e-4), "loss": "squared"}
    run = mh.train(model, data, wrt=("V",), **settings)
    try:
        _core.force_plan("tiles")  # never from attended tokens
        expected = mh.train(model, data, wrt=("V",), **settings)
    finally:
        _core.force_plan("auto")
    # Float64 sums in another order.
    np.testing.assert_allclose(run.history["loss"], expected.history["loss"], rtol=1e-11)
    np.testing.assert_allclose(run.model.V, expected.model.V, rtol=0, atol=1e-11)
