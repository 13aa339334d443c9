"""`Layer`: meaning, losses and weights of rows, constructors, and that it is frozen."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from instances import (
    DIM,
    HEADS,
    OUTPUTS,
    SAMPLES,
    TOKENS,
    TOLERANCE,
    case,
    relative,
)
from lists import LOSSES

import mhfast as mh


@pytest.mark.parametrize("query", [None, 1, -1, "own", "given"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_outputs_and_attention_follow_the_reference(dtype, query):
    the = case(mh.Layer, query=query, dtype=dtype, scale=-0.5)

    F = the.model(the.X, **the.seen())
    A = the.model.attention(the.X, **the.seen())

    expected = mh.reference.outputs(the.model, the.X, **the.seen())
    assert F.dtype == A.dtype == dtype
    assert F.shape == expected.shape == (SAMPLES, A.shape[2], OUTPUTS)
    assert relative(F, expected) < TOLERANCE[F.dtype]
    weights = mh.reference.attention(the.model, the.X, **the.seen())
    assert relative(A, weights) < TOLERANCE[A.dtype]


def test_outputs_are_attention_times_values():
    the = case(mh.Layer)
    A = the.model.attention(the.X)
    F = np.einsum("nhqt,nte,hep->nqp", A, the.X, the.model.V)
    # Sums of 7 · 3 · 8 products in another order.
    assert relative(the.model(the.X), F) < 1e-13


@pytest.mark.parametrize("weight", ["", "samples", "rows"])
@pytest.mark.parametrize("loss", LOSSES[mh.Layer])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_gradients_follow_the_reference(dtype, loss, weight):
    the = case(mh.Layer, loss=loss, weight=weight, dtype=dtype)
    value, g = the.value_and_grad(wrt=the.names())
    expected, gradients = mh.reference.value_and_grad(
        the.model, the.X, the.y, wrt=the.names(), **the.options
    )
    # The linear loss crosses zero: measure it against the size of its terms, which is about 1.
    assert abs(value - expected) < TOLERANCE[the.model.dtype] * max(1.0, abs(expected))
    for name in the.names():
        assert getattr(g, name).dtype == dtype
        assert relative(getattr(g, name), gradients[name]) < TOLERANCE[the.model.dtype]


@pytest.mark.peers
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_gradients_agree_with_torch(loss):
    torch = pytest.importorskip("torch")
    the = case(mh.Layer, loss=loss)
    W, V, X = (torch.tensor(a, requires_grad=True) for a in (the.model.W, the.model.V, the.X))
    A = torch.einsum("nqd,hde,nte->nhqt", X, W, X).softmax(-1)
    F = torch.einsum("nhqt,nte,hep->nqp", A, X, V)
    if loss == "squared":
        expected = (F - torch.tensor(the.y)).square().sum() / SAMPLES
    else:
        expected = torch.nn.functional.cross_entropy(F.flatten(0, 1), torch.tensor(the.y).flatten())
    expected.backward()

    value, g = the.value_and_grad(wrt=("W", "V", "X"))

    assert value == pytest.approx(expected.item(), rel=1e-12)
    for name, tensor in (("W", W), ("V", V), ("X", X)):
        assert relative(getattr(g, name), tensor.grad.numpy()) < 1e-12


def test_the_loss_at_chosen_rows_is_that_of_an_integer_query():
    the = case(mh.Layer, loss="squared")
    weight = np.zeros((SAMPLES, TOKENS))
    weight[:, -1] = 1.0
    value, g = the.value_and_grad(weight=weight)
    last = dataclasses.replace(the.model, query=-1)
    expected, h = mh.value_and_grad(last, the.X, the.y[:, -1:], loss="squared")
    # The same sums with zeros added.
    assert value == pytest.approx(expected, rel=1e-13)
    assert relative(g.W, h.W) < 1e-12
    assert relative(g.V, h.V) < 1e-12


def test_closed_form_at_zero():
    the = case(mh.Layer, loss="cross_entropy")
    model = mh.Layer.zeros(HEADS, DIM, OUTPUTS)
    value, g = mh.value_and_grad(model, the.X, the.y, loss="cross_entropy")
    # Uniform attention, all classes alike: ∂L/∂V_h = mean_it x̄_i (1/p - onehot(y_it))ᵀ.
    loss_derivative = 1 / OUTPUTS - np.eye(OUTPUTS)[the.y]
    expected = np.einsum("ne,nqp->ep", the.X.mean(axis=1), loss_derivative) / (SAMPLES * TOKENS)
    assert value == pytest.approx(np.log(OUTPUTS), rel=1e-14)
    assert not g.W.any()
    # Sums of 18 terms of order 1 that may cancel.
    np.testing.assert_allclose(g.V, np.broadcast_to(expected, g.V.shape), rtol=0, atol=1e-14)


@pytest.mark.parametrize("label_dtype", [np.int8, np.uint16, np.int32])
def test_classes_of_any_integer_dtype_give_the_same(label_dtype):
    the = case(mh.Layer, loss="cross_entropy")
    expected = the.value_and_grad()
    assert the._replace(y=the.y.astype(label_dtype)).value_and_grad() == expected
    assert the._replace(y=the.y.tolist()).value_and_grad() == expected


def test_samples_may_have_any_number_of_tokens():
    model = case(mh.Layer).model
    for tokens in (1, 4, 17):
        X = np.random.default_rng(0).standard_normal((2, tokens, DIM))
        assert model(X).shape == (2, tokens, OUTPUTS)


def test_zeros_and_gaussian():
    zeros = mh.Layer.zeros(HEADS, DIM, OUTPUTS, dtype=np.float32, query=-1, causal=True)
    assert (zeros.heads, zeros.dim, zeros.out_dim, zeros.dtype) == (HEADS, DIM, OUTPUTS, np.float32)
    assert (zeros.query, zeros.causal, zeros.runs) == (-1, True, None)
    assert zeros.V.shape == (HEADS, DIM, OUTPUTS)
    assert not zeros.W.any()
    assert not zeros.V.any()

    drawn = mh.Layer.gaussian(HEADS, DIM, OUTPUTS, std=0.5, seed=3)
    rng = np.random.default_rng(3)
    np.testing.assert_array_equal(drawn.W, 0.5 * rng.standard_normal((HEADS, DIM, DIM)))
    np.testing.assert_array_equal(drawn.V, 0.5 * rng.standard_normal((HEADS, DIM, OUTPUTS)))
    single = mh.Layer.gaussian(HEADS, DIM, OUTPUTS, std=0.5, seed=3, dtype=np.float32)
    np.testing.assert_array_equal(single.V, drawn.V.astype(np.float32))


def test_parameters_are_named_in_order():
    layer = mh.Layer.gaussian(HEADS, DIM, OUTPUTS, std=1.0, seed=0, rank=2, prompt_rows=3)
    assert list(layer.parameters) == ["Q", "K", "V", "prompt"]
    assert layer.parameters["V"] is layer.V
    with pytest.raises(TypeError):
        layer.parameters["V"] = layer.V


def test_a_layer_cannot_change():
    W, V = np.ones((HEADS, DIM, DIM)), np.ones((HEADS, DIM, OUTPUTS))
    layer = mh.Layer(W, V)
    V[:] = 2.0
    assert (layer.V == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        layer.V[0] = 3.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.V = V


@pytest.mark.parametrize("options", [{}, {"query": 1, "causal": True}, {"prompt": True}])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_are_equal_and_frozen(duplicate, options):
    the = case(mh.Layer, **options)
    expected = the.model(the.X)
    twin = duplicate(the.model)
    assert twin is not the.model
    assert twin == the.model
    assert not twin.V.flags.writeable
    np.testing.assert_array_equal(twin(the.X), expected)
    assert twin != dataclasses.replace(the.model, scale=3.0)
    assert twin != dataclasses.replace(the.model, V=-the.model.V)
