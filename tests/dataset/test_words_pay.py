"""Which dictionaries are looked up, and that only the time depends on it."""

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

# (kind, T, d, words, query), by how many times the other way was slower where it was measured.
LOOKED_UP = [
    ("Classifier", 16, 32, 8, None),  # 5 times
    ("Classifier", 16, 16, 24, None),  # 2
    ("Classifier", 32, 8, 64, None),  # 2
    ("Layer", 32, 64, 64, None),
]
MULTIPLIED = [
    ("Classifier", 16, 4, 64, None),  # 1.6
    ("Classifier", 8, 8, 8, None),  # 2
    ("Classifier", 32, 8, 8, -1),  # 6
    ("Layer", 16, 8, 8, None),  # 2.5
    ("Layer", 32, 8, 24, None),  # 1.5
    ("Layer", 16, 16, 8, -1),  # 6
]


def instance(kind, T, d, words, query, n=40):
    rng = np.random.default_rng(0)
    rows = T if query is None else 1
    W = 0.2 * rng.standard_normal((3, d, d))
    ids = rng.integers(words, size=(n, T))
    X = mh.Tokens(ids.astype(np.int64), rng.standard_normal((words, d)).astype(np.float32))
    W = W.astype(np.float32)
    if kind == "Classifier":
        U = rng.standard_normal((3, rows, d)).astype(np.float32)
        y = np.where(rng.random(n) < 0.5, -1, 1).astype(np.float32)
        return mh.Classifier(W, U, query=query), X, y
    V = rng.standard_normal((3, d, 2)).astype(np.float32)
    return mh.Layer(W, V, query), X, rng.standard_normal((n, rows, 2)).astype(np.float32)


def is_looked_up(model, X):
    return mh.explain(model, X)["plan"] == "words"


@pytest.mark.parametrize("size", LOOKED_UP)
def test_where_products_take_longer_words_are_looked_up(size):
    model, X, _ = instance(*size, n=4000)
    assert is_looked_up(model, X)


@pytest.mark.parametrize("size", MULTIPLIED)
def test_short_products_are_not_looked_up(size):
    model, X, _ = instance(*size, n=4000)
    assert not is_looked_up(model, X)


@pytest.mark.parametrize("size", [LOOKED_UP[0], MULTIPLIED[0], MULTIPLIED[1]])
def test_the_samples_of_a_classifier_do_not_matter(size):
    kind, T, d, words, query = size
    words = min(words, 2 * T)  # whose weights are looked up
    for n in (1, 7000):
        model, X, _ = instance(kind, T, d, words, query, n=n)
        assert is_looked_up(model, X) == (size in LOOKED_UP)


@pytest.mark.parametrize("size", MULTIPLIED)
def test_a_gradient_by_the_embedding_looks_words_up(size, monkeypatch):
    model, X, y = instance(*size, n=500)
    loss = "logistic" if size[0] == "Classifier" else "squared"
    expected = mh.value_and_grad(model, np.asarray(X), y, loss=loss)
    seen = []
    core = _core.value_and_grad
    monkeypatch.setattr(
        _core, "value_and_grad", lambda data, *rest: seen.append(data[0]) or core(data, *rest)
    )
    for wrt in (None, (*model.parameters, "embedding")):
        value, gradient = mh.value_and_grad(model, X, y, loss=loss, wrt=wrt)
        # Sums in float32 in another order.
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        np.testing.assert_allclose(
            gradient.W, expected[1].W, rtol=0, atol=1e-5 * np.abs(expected[1].W).max()
        )
    assert [isinstance(tokens, np.ndarray) for tokens in seen] == [True, False]
