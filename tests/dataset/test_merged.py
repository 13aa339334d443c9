"""`Dataset.merged`: the same quantities from the different samples alone."""

import numpy as np
import pytest

import mhfast as mh

N, T, D, H, V = 90, 3, 4, 2, 2
RECORD = ("loss", "accuracy", "margin", "grad_norm", "attention_max")


def drawn(kind="words", *, weight=False, lengths=False, layer=False, runs=False, seed=0):
    """Data with 2^3 different sequences, or with lengths fewer, and a model."""
    rng = np.random.default_rng(seed)
    ids, embedding = rng.integers(V, size=(N, T)), rng.standard_normal((V, D))
    if runs:
        embedding = np.stack([embedding, -embedding])
    X = mh.Tokens(ids, embedding)
    if kind == "array":
        X = np.asarray(X)
    # Targets are a function of the last word, so that there are some of both.
    y = np.where(ids[:, -1] == 1, 1.0, -1.0)
    options = {"weight": rng.random(N)} if weight else {}
    if lengths:
        options["lengths"] = rng.integers(1, T + 1, size=N)
    if layer:
        model = mh.Layer.gaussian(H, D, 3, std=0.5, seed=1)
        y = y[:, None, None] * np.ones((T, 3))
    else:
        model = mh.Classifier.gaussian(H, T, D, std=0.5, seed=1)
    return model, mh.Dataset(X, y, **options)


@pytest.mark.parametrize("kind", ["words", "array"])
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_the_same_quantities(kind, runs, layer, weight, lengths):
    model, data = drawn(kind, weight=weight, lengths=lengths, layer=layer, runs=runs)
    few = data.merged()
    # Of lengths 1, 2 and 3 there are 2, 4 and 8 sequences, with one label if all words are seen.
    assert few.n <= (4 + 8 + 8 if lengths else 8)
    total = data.weight.sum() if weight else N
    assert few.weight.sum() == pytest.approx(total, rel=1e-14)
    found, expected = (mh.evaluate(model, d, record=RECORD) for d in (few, data))
    for name in RECORD:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, err_msg=name)
    value, g = mh.value_and_grad(model, few)
    expected_value, expected_g = mh.value_and_grad(model, data)
    np.testing.assert_allclose(value, expected_value, rtol=1e-13)
    for name in model.parameters:
        a, b = getattr(g, name), getattr(expected_g, name)
        np.testing.assert_allclose(a, b, atol=1e-13 * np.abs(b).max())


@pytest.mark.parametrize("optimizer", [mh.NormalizedGradientDescent(0.3), mh.Momentum(0.2)])
def test_training(optimizer):
    model, data = drawn()
    runs = [
        mh.train(model, d, steps=30, optimizer=optimizer, record=("loss", "margin"))
        for d in (data.merged(), data)
    ]
    for name in ("loss", "margin"):
        np.testing.assert_allclose(runs[0].history[name], runs[1].history[name], rtol=1e-11)
    np.testing.assert_allclose(runs[0].model.W, runs[1].model.W, atol=1e-11)


def test_what_is_kept_and_where():
    ids = np.array([[1, 0], [0, 0], [1, 0], [0, 0], [1, 0], [0, 0]])
    y = np.array([1, 1, -1, 1, 1, 1])
    groups = np.array([0, 1, 0, 1, 0, 0])
    data = mh.Dataset(
        mh.Tokens(ids, np.eye(2, 3)), y, weight=np.arange(1.0, 7.0), sample_groups=groups,
        truth={"a": 1},
    )  # fmt: skip
    few = data.merged()
    np.testing.assert_array_equal(few.words.ids, [[1, 0], [0, 0], [1, 0], [0, 0]])
    np.testing.assert_array_equal(few.y, [1, 1, -1, 1])
    np.testing.assert_array_equal(few.weight, [1 + 5, 2 + 4, 3, 6])
    assert few.truth == {"a": 1}
    assert few.merged() is few
    assert few.dtype == few.weight.dtype


def test_weights_of_rows_and_of_runs():
    rng = np.random.default_rng(0)
    X = mh.Tokens(rng.integers(2, size=(40, 2)), np.eye(2, 3))
    model = mh.Layer.gaussian(2, 3, 2, std=1.0, seed=0)
    y = np.where(X.ids[..., None] == [0, 1], 1.0, -1.0)
    for weight in (rng.random((40, 2)), rng.random((5, 40, 2))):
        data = mh.Dataset(X, y, weight=weight)
        few = data.merged()
        assert few.weight.shape == (*weight.shape[:-2], 4, 2)
        np.testing.assert_allclose(model.loss(few), model.loss(data), rtol=1e-13)


def test_padding_beyond_the_lengths_does_not_matter():
    ids = np.array([[1, 0, 1], [1, 0, 0], [1, 1, 0]])
    data = mh.Dataset(mh.Tokens(ids, np.eye(2, 3)), np.ones(3), lengths=[2, 2, 2])
    assert data.merged().n == 2


def test_runs_with_other_samples_are_kept_apart():
    ids = np.array([[[0, 1], [0, 1], [0, 1]], [[1, 1], [1, 1], [1, 0]]])
    data = mh.Dataset(mh.Tokens(ids, np.eye(2, 3)), np.ones(3))
    few = data.merged()
    np.testing.assert_array_equal(few.words.ids, ids[:, [0, 2]])
    np.testing.assert_array_equal(few.weight, [2, 1])
