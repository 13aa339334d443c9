"""Gradients of models with a prompt of few rows, or of more, and tokens of several registers."""

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

n, T, H = 3, 5, 2

# Relative to the largest entry; the promise for gradients against the float64 reference.
TOLERANCE = {np.float64: 1e-11, np.float32: 3e-5}


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("form", ["dense", "scaled", "low rank", "tied"])
@pytest.mark.parametrize("rows", [1, 2, 4, 6])
@pytest.mark.parametrize("d", [7, 38, 150])
def test_gradients_follow_the_reference(isa, dtype, form, rows, d, use_isa):
    use_isa(isa)
    rng = np.random.default_rng(d + rows)
    normal = lambda *shape: (rng.standard_normal(shape) / d**0.5).astype(dtype)  # noqa: E731
    W = d**-0.5 * normal(H, d, d)  # logits of order one
    if form == "low rank":
        W = mh.LowRank(0.5 * normal(H, d, 21), 0.5 * normal(H, d, 21))
    elif form == "tied":
        W = mh.LowRank(normal(H, d, 3))
    model = mh.Classifier(
        W, normal(H, rows, d), prompt=d**0.5 * normal(rows, d),
        scale=0.7 if form == "scaled" else 1.0,
    )  # fmt: skip
    X, y = d**0.5 * normal(n, T, d), np.array([1, -1, 1])
    value, found = mh.value_and_grad(model, X, y)
    expected_value, expected = mh.reference.value_and_grad(model, X, y)
    assert value == pytest.approx(expected_value, rel=TOLERANCE[dtype])
    for name, array in expected.items():
        error = np.abs(getattr(found, name) - array).max()
        assert error < TOLERANCE[dtype] * np.abs(array).max(), name


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("rows", [1, 2, 6, 19])
@pytest.mark.parametrize("d", [37, 64, 304])
def test_attention_of_few_rows_or_many(isa, dtype, rows, d, use_isa):
    """Prompts of fewer rows than lanes have features as lanes where these are whole vectors."""
    use_isa(isa)
    rng = np.random.default_rng(d + rows)
    W, U = rng.standard_normal((H, d, d)) / d, rng.standard_normal((H, rows, d))
    prompt, X = rng.standard_normal((rows, d)), rng.standard_normal((11, T, d))
    model = mh.Classifier(W.astype(dtype), U.astype(dtype), prompt=prompt.astype(dtype), scale=0.7)
    A = model.attention(X.astype(dtype))
    # Weights are at most one, and logits of order one are sums of d² products.
    tolerance = 1e-12 if dtype is np.float64 else 1e-5
    np.testing.assert_allclose(A, mh.reference.attention(model, X), rtol=0, atol=tolerance)
    np.testing.assert_array_equal(model.attention(X[:1].astype(dtype)), A[:1])
