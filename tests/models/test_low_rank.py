"""`LowRank`: a factored W means what its dense product means, and is trained by its factors."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from instances import DIM, HEADS, RANK, RUNS, TOLERANCE, case, relative

import mhfast as mh
from mhfast import reference

KINDS = [mh.Classifier, mh.Layer]


def dense(model):
    return dataclasses.replace(model, W=model.W.dense())


@pytest.mark.parametrize("factors", ["low rank", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_factored_model_is_its_dense_product(kind, factors):
    the = case(kind, factors=factors)
    # Logits are summed in another order, of 5 and of 8 products of order 1.
    assert relative(the.model(the.X), dense(the.model)(the.X)) < 1e-13
    assert relative(the.model.attention(the.X), dense(the.model).attention(the.X)) < 1e-13


@pytest.mark.parametrize("query", [None, -1, "given"])
@pytest.mark.parametrize("factors", ["low rank", "tied"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_gradients_follow_the_reference(dtype, kind, factors, query):
    the = case(kind, factors=factors, query=query, dtype=dtype, scale=0.5)
    value, g = the.value_and_grad(wrt=the.names())
    expected, gradients = mh.reference.value_and_grad(
        the.model, the.X, the.y, wrt=the.names(), **the.options
    )
    assert value == pytest.approx(expected, rel=TOLERANCE[the.model.dtype])
    for name in the.names():
        assert getattr(g, name).dtype == dtype
        assert relative(getattr(g, name), gradients[name]) < TOLERANCE[the.model.dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_the_factors_follow_from_those_by_the_product(kind):
    the = case(kind, factors="low rank")
    _, g = the.value_and_grad()
    _, h = the._replace(model=dense(the.model)).value_and_grad()
    Q, K = the.model.Q, the.model.K
    assert g.W is None
    # Sums of 8 products more.
    assert relative(g.Q, h.W @ K) < 1e-12
    assert relative(g.K, h.W.swapaxes(1, 2) @ Q) < 1e-12

    tied = case(kind, factors="tied")
    _, g = tied.value_and_grad()
    _, h = tied._replace(model=dense(tied.model)).value_and_grad()
    assert g.K is None
    assert relative(g.Q, (h.W + h.W.swapaxes(1, 2)) @ tied.model.Q) < 1e-12


def test_factors_and_shapes():
    Q = np.random.default_rng(0).standard_normal((HEADS, DIM, RANK))
    tied = mh.LowRank(Q)
    assert tied.rank == RANK
    assert tied.dtype == np.float64
    assert tied.K is None
    np.testing.assert_array_equal(tied.dense(), Q @ Q.swapaxes(1, 2))
    both = mh.LowRank(Q, -Q)
    np.testing.assert_array_equal(both.dense(), -tied.dense())
    runs = mh.LowRank(np.stack([Q] * RUNS), -Q)
    assert runs.dense().shape == (RUNS, HEADS, DIM, DIM)


def test_a_model_knows_its_factors():
    the = case(factors="low rank")
    model = the.model
    assert isinstance(model.W, mh.LowRank)
    assert model.Q is model.W.Q
    assert model.K is model.W.K
    assert list(model.parameters) == ["Q", "K", "U"]
    assert (model.heads, model.dim) == (HEADS, DIM)
    assert list(case(factors="tied").model.parameters) == ["Q", "U"]
    assert case().model.Q is None
    assert case().model.K is None


def test_a_factored_model_moves_by_gradients_of_its_factors():
    the = case(factors="low rank")
    _, g = the.value_and_grad()
    moved = the.model - 0.5 * g
    np.testing.assert_array_equal(moved.Q, the.model.Q - 0.5 * g.Q)
    np.testing.assert_array_equal(moved.K, the.model.K - 0.5 * g.K)
    partial = the.model + mh.Gradients(K=g.K)
    assert partial.Q is the.model.Q
    np.testing.assert_array_equal(partial.K, the.model.K + g.K)


def test_models_of_a_rank_are_drawn_and_made():
    drawn = mh.Classifier.gaussian(HEADS, 3, DIM, std=2.0, seed=1, rank=RANK)
    rng = np.random.default_rng(1)
    np.testing.assert_array_equal(drawn.Q, 2.0 * rng.standard_normal((HEADS, DIM, RANK)))
    np.testing.assert_array_equal(drawn.K, 2.0 * rng.standard_normal((HEADS, DIM, RANK)))
    tied = mh.Layer.zeros(HEADS, DIM, 4, rank=RANK, tied=True)
    assert tied.K is None
    assert tied.Q.shape == (HEADS, DIM, RANK)


def test_factors_cannot_change():
    Q = np.ones((HEADS, DIM, RANK))
    factors = mh.LowRank(Q)
    Q[:] = 2.0
    assert (factors.Q == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        factors.Q[0] = 2.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        factors.Q = Q


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_are_equal_and_frozen(duplicate):
    the = case(factors="low rank")
    for value in (the.model.W, the.model):
        assert duplicate(value) == value
    assert not duplicate(the.model).Q.flags.writeable
    factors = the.model.W
    assert factors not in (mh.LowRank(factors.Q), mh.LowRank(factors.Q, -factors.K), None)
    assert the.model != dense(the.model)


def test_repr_tells_shapes():
    assert repr(mh.Layer.zeros(7, 8, 4, rank=5, tied=True)) == (
        "Layer(W=LowRank(Q=<float64 (7, 8, 5)>), V=<float64 (7, 8, 4)>, scale=1.0)"
    )


@pytest.mark.parametrize("query", [None, "prompt"])
def test_more_dimensions_than_a_block_of_a_product_has(query):
    """Products of factors, and of a prompt, go over 512 numbers of a row at a time."""
    rng = np.random.default_rng(5)
    n, T, d, H, r = 3, 4, 530, 2, 1
    prompt = None if query is None else rng.standard_normal((2, d))
    rows = T if query is None else 2
    W = mh.LowRank(rng.standard_normal((H, d, r)) / d, rng.standard_normal((H, d, r)))
    model = mh.Classifier(W, rng.standard_normal((H, rows, d)) / d, prompt=prompt)
    X, y = rng.standard_normal((n, T, d)), np.array([1.0, -1.0, 1.0])
    value, g = mh.value_and_grad(model, X, y)
    expected, gradients = reference.value_and_grad(model, X, y)
    assert value == pytest.approx(expected, rel=1e-13)
    step = 1e-6
    tangent = g * (1 / np.sqrt(sum((part**2).sum() for part in gradients.values())))
    product = mh.hvp(model, X, y, tangent=tangent)
    ahead, behind = (mh.value_and_grad(model + s * step * tangent, X, y)[1] for s in (1, -1))
    for name in model.parameters:
        want = gradients[name]
        assert np.abs(getattr(g, name) - want).max() < 1e-12 * np.abs(want).max()
        want = (getattr(ahead, name) - getattr(behind, name)) / (2 * step)
        # Central differences lose to rounding what they gain by a short step.
        assert np.abs(getattr(product, name) - want).max() < 1e-5 * np.abs(want).max()
    run = mh.train(model, X, y, steps=2, optimizer=mh.GradientDescent(0.1))
    moved, _ = reference.train(model, X, y, steps=2, optimizer=mh.GradientDescent(0.1))
    for name, array in run.model.parameters.items():
        want = getattr(moved, name)
        assert np.abs(array - want).max() < 1e-12 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_runs_side_by_side_in_more_dimensions_than_a_block_has(dtype):
    """The more lanes, the fewer dimensions in a block: 32 at least, and 256 at most."""
    rng = np.random.default_rng(6)
    R, n, T, d, H, r = 17, 3, 2, 270, 1, 1
    W = mh.LowRank(*((rng.standard_normal((R, H, d, r)) / 16).astype(dtype) for _ in range(2)))
    model = mh.Classifier(W, (rng.standard_normal((R, H, T, d)) / 16).astype(dtype))
    X, y = rng.standard_normal((n, T, d)).astype(dtype), np.array([1, -1, 1], dtype)
    options = {"steps": 2, "optimizer": mh.GradientDescent(0.1), "record": "loss"}
    together = mh.train(model, X, y, **options)
    for k in (0, 7, R - 1):
        alone = mh.train(model[k], X, y, **options)
        # Sums of d terms in another order.
        tolerance = 30 * d * np.finfo(dtype).eps
        assert np.abs(together.history["loss"][k] - alone.history["loss"]).max() < tolerance
        for name, array in alone.model.parameters.items():
            found = together.model.parameters[name][k]
            assert np.abs(found - array).max() < tolerance * np.abs(array).max()
