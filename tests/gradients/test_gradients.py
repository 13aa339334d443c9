"""`value_and_grad` against the reference, finite differences and other frameworks; `Gradients`."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from lists import LOSSES, targets, within_domain

import mhfast as mh
from mhfast import Gradients

n, T, d, H, q = 6, 3, 5, 7, 4

# Relative to the largest entry; the promise for results against the float64 reference.
TOLERANCE = {np.float64: 1e-12, np.float32: 3e-6}


def relative_error(a, b):
    return np.max(np.abs(a - b)) / np.max(np.abs(b))


def problem(dtype=np.float64, query=None, loss="logistic"):
    """A model, tokens and targets; `query` "external" gives the query side as a fourth value."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, T, d)).astype(dtype)
    y = np.where(rng.random(n) < 0.5, 1.0, -1.0).astype(dtype)
    if loss != "logistic":
        y = targets(loss, (n,), rng, dtype)
    if query == "external":
        query = rng.standard_normal((n, q, d)).astype(dtype)
    model = mh.Classifier.gaussian(H, T, d, std=0.5, seed=1, dtype=dtype, query=query)
    return *within_domain(loss, model, X), y, query


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("query", [None, 0, -1, "external"])
@pytest.mark.parametrize("loss", LOSSES[mh.Classifier])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_value_and_gradients_follow_the_reference(dtype, loss, query, weighted):
    model, X, y, query = problem(dtype, query, loss)
    weight = np.arange(n).astype(dtype) if weighted else None

    value, g = mh.value_and_grad(model, X, y, loss=loss, weight=weight)

    expected, gradients = mh.reference.value_and_grad(model, X, y, loss=loss, weight=weight)
    assert isinstance(value, float)
    assert g.W.dtype == g.U.dtype == dtype
    # The linear loss crosses zero: measure it against the size of its terms, which is about 1.
    assert abs(value - expected) < TOLERANCE[dtype] * max(1.0, abs(expected))
    assert relative_error(g.W, gradients["W"]) < TOLERANCE[dtype]
    assert relative_error(g.U, gradients["U"]) < TOLERANCE[dtype]


def test_scale_multiplies_the_logits():
    model, X, y, _ = problem()
    scaled = mh.Classifier(model.W, model.U, scale=-0.25)
    folded = mh.Classifier(-0.25 * model.W, model.U)
    value, g = mh.value_and_grad(scaled, X, y)
    other, h = mh.value_and_grad(folded, X, y)
    # A power of two commutes with rounding, so that only the order of products differs.
    assert abs(value - other) < 1e-14
    assert relative_error(g.W, -0.25 * h.W) < 1e-13
    assert relative_error(g.U, h.U) < 1e-13


@pytest.mark.parametrize("query", [None, -1, "external"])
@pytest.mark.parametrize("loss", LOSSES[mh.Classifier])
def test_gradients_are_derivatives_of_the_value(loss, query):
    model, X, y, _ = problem(query=query, loss=loss)
    _, g = mh.value_and_grad(model, X, y, loss=loss)
    rng = np.random.default_rng(2)
    step = 1e-5
    for name in ("W", "U"):
        direction = rng.standard_normal(getattr(model, name).shape)
        v = Gradients(**{name: direction / np.linalg.norm(direction)})
        up, _ = mh.value_and_grad(model + step * v, X, y, loss=loss, wrt=())
        down, _ = mh.value_and_grad(model - step * v, X, y, loss=loss, wrt=())
        loss_derivative = mh.dot(Gradients(**{name: getattr(g, name)}), v)
        # Central differences: step² times third derivatives of order 1, and rounding 1e-16 / step.
        assert abs((up - down) / (2 * step) - loss_derivative) < 1e-9


def test_closed_form_at_zero():
    _, X, y, _ = problem()
    value, g = mh.value_and_grad(mh.Classifier.zeros(H, T, d), X, y)
    # Uniform attention: ∂L/∂U_h = -(1/2) H^(-1/2) 1 (mean_i y_i x̄_i)ᵀ, and nothing reaches W.
    row = -0.5 / math.sqrt(H) * (y[:, None] * X.mean(axis=1)).mean(axis=0)
    assert value == pytest.approx(math.log(2), rel=1e-15)
    assert not g.W.any()
    # A sum of n T = 18 terms in float64.
    np.testing.assert_allclose(g.U, np.broadcast_to(row, (H, T, d)), rtol=1e-13, atol=1e-16)


def framework_loss(xp, softmax, softplus, W, U, X, Z, y):
    """The logistic loss as a user of torch or jax writes it."""
    logits = xp.einsum("nqd,hde,nte->nhqt", Z, W, X)
    A = softmax(logits)
    outputs = xp.einsum("nhqt,nte,hqe->n", A, X, U) / math.sqrt(H)
    return softplus(-y * outputs).mean()


@pytest.mark.peers
@pytest.mark.parametrize("query", [None, "external"])
def test_gradients_agree_with_torch(query):
    torch = pytest.importorskip("torch")
    model, X, y, Z = problem(query=query)
    W = torch.tensor(model.W, requires_grad=True)
    U = torch.tensor(model.U, requires_grad=True)
    arrays = (torch.tensor(a) for a in (X, X if Z is None else Z, y))
    expected = framework_loss(
        torch, lambda s: s.softmax(-1), torch.nn.functional.softplus, W, U, *arrays
    )
    expected.backward()

    value, g = mh.value_and_grad(model, X, y)

    assert value == pytest.approx(expected.item(), rel=1e-12)
    assert relative_error(g.W, W.grad.numpy()) < 1e-12
    assert relative_error(g.U, U.grad.numpy()) < 1e-12


@pytest.mark.peers
@pytest.mark.parametrize("query", [None, "external"])
def test_gradients_agree_with_jax(query):
    jax = pytest.importorskip("jax")
    model, X, y, Z = problem(query=query)
    with jax.enable_x64(True):
        expected, (W, U) = jax.value_and_grad(
            lambda W, U: framework_loss(
                jax.numpy, jax.nn.softmax, jax.nn.softplus, W, U, X, X if Z is None else Z, y
            ),
            argnums=(0, 1),
        )(jax.numpy.asarray(model.W), jax.numpy.asarray(model.U))

    value, g = mh.value_and_grad(model, X, y)

    assert value == pytest.approx(float(expected), rel=1e-12)
    assert relative_error(g.W, np.asarray(W)) < 1e-12
    assert relative_error(g.U, np.asarray(U)) < 1e-12


@pytest.mark.parametrize(
    ("wrt", "asked"),
    [
        (None, {"W", "U"}),
        ("W", {"W"}),
        (("U",), {"U"}),
        (["U", "W"], {"W", "U"}),
        (("X", "U"), {"X", "U"}),
        ((), set()),
    ],
)
def test_only_what_is_asked_for_is_given(wrt, asked):
    model, X, y, _ = problem()
    value, full = mh.value_and_grad(model, X, y, wrt=("W", "U", "X"))
    same, g = mh.value_and_grad(model, X, y, wrt=wrt)
    # Other gradients or none may come from other kernels: the same sums in another order.
    assert same == pytest.approx(value, rel=1e-14)
    for name in (field.name for field in dataclasses.fields(Gradients)):
        if name in asked:
            assert relative_error(getattr(g, name), getattr(full, name)) < 1e-13
        else:
            assert getattr(g, name) is None


@pytest.mark.parametrize("label_dtype", [np.int8, np.int64, np.float16, np.float32, np.longdouble])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_labels_of_any_real_dtype_give_the_same(dtype, label_dtype):
    model, X, y, _ = problem(dtype)
    expected = mh.value_and_grad(model, X, y)
    assert mh.value_and_grad(model, X, y.astype(label_dtype)) == expected
    assert mh.value_and_grad(model, X, y.astype(int).tolist()) == expected


def test_weights_of_any_real_dtype_give_the_same():
    model, X, y, _ = problem(np.float32)
    expected = mh.value_and_grad(model, X, y, weight=np.arange(n).astype(np.float32))
    assert mh.value_and_grad(model, X, y, weight=range(n)) == expected
    assert mh.value_and_grad(model, X, y, weight=np.arange(n, dtype=float)) == expected


def test_a_sample_without_weight_does_not_count():
    model, X, y, _ = problem()
    value, g = mh.value_and_grad(model, X, y, weight=[1, 1, 1, 1, 1, 0])
    fewer, h = mh.value_and_grad(model, X[:-1], y[:-1])
    # The same sums with a zero added, divided by 5.
    assert value == pytest.approx(fewer, rel=1e-15)
    assert relative_error(g.W, h.W) < 1e-14


def test_every_number_of_threads_gives_the_same_bits():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((133, T, d)), np.where(rng.random(133) < 0.5, 1.0, -1.0)
    model = mh.Classifier.gaussian(H, T, d, std=1.0, seed=1)
    expected = mh.value_and_grad(model, X, y, num_threads=1)
    for threads in (2, 3, 4, 7):
        assert mh.value_and_grad(model, X, y, num_threads=threads) == expected


def arrays(dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return Gradients(
        W=rng.standard_normal((H, d, d)).astype(dtype),
        U=rng.standard_normal((H, T, d)).astype(dtype),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arithmetic_is_that_of_the_arrays_and_keeps_the_dtype(dtype):
    g, h = arrays(dtype), arrays(dtype, 1)
    cases = [
        (g + h, g.W + h.W),
        (g - h, g.W - h.W),
        (-g, -g.W),
        (2.5 * g, g.W * dtype(2.5)),
        (g * 2, g.W * dtype(2)),
        (np.float64(2.5) * g, g.W * dtype(2.5)),
        (g * np.int64(3), g.W * dtype(3)),
        (g / 3, g.W / dtype(3)),
    ]
    for result, expected in cases:
        assert result.W.dtype == result.U.dtype == dtype
        np.testing.assert_array_equal(result.W, expected)


def test_gradients_can_be_summed():
    g, h = arrays(np.float32), arrays(np.float32, 1)
    assert sum([g, h, g]) == g + h + g
    assert sum([g]) == g
    for start in (0.0, 1, True, None):
        with pytest.raises(TypeError, match=r"expected a model to move by Gradients, got"):
            start + g


def test_what_is_not_given_stays_so():
    g = Gradients(U=np.ones((H, T, d)))
    for result in (g + g, 2 * g, -g, g / 2):
        assert result.W is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_model_moves_by_gradients(dtype):
    model, *_ = problem(dtype)
    g = arrays(dtype)
    moved = model - np.float64(0.5) * g
    assert moved.dtype == dtype
    np.testing.assert_array_equal(moved.W, model.W - dtype(0.5) * g.W)
    np.testing.assert_array_equal((model + g).U, model.U + g.U)
    partial = model + Gradients(U=g.U)
    assert partial.W is model.W
    assert not partial.U.flags.writeable


def test_moving_keeps_query_and_scale():
    model = mh.Classifier.zeros(H, T, d, query=-1, scale=0.5)
    moved = model + Gradients(W=np.ones((H, d, d)))
    assert (moved.query, moved.scale) == (-1, 0.5)


def moved_models():
    """Models of every kind, with gradients to move them by."""
    rng = np.random.default_rng(4)
    model, X, y = problem()[:3]
    low = mh.LowRank(Q=rng.standard_normal((H, d, 2)), K=rng.standard_normal((H, d, 2)))
    for one in (
        model,
        dataclasses.replace(model, W=low),
        dataclasses.replace(model, W=mh.LowRank(Q=low.Q), scale=0.5, causal=True),
        dataclasses.replace(model, prompt=rng.standard_normal((T, d))),
        dataclasses.replace(model, W=np.stack([model.W, 2 * model.W])),
        mh.Layer(model.W, rng.standard_normal((H, d, 2)), query=-1),
    ):
        targets = rng.standard_normal((len(X), 1, 2)) if isinstance(one, mh.Layer) else y
        loss = "squared" if isinstance(one, mh.Layer) else "logistic"
        for wrt in (None, tuple(one.parameters)[:1]):
            yield one, mh.value_and_grad(one, X, targets, loss=loss, wrt=wrt)[1], X


def test_a_moved_model_is_one_made_of_its_arrays():
    """It takes over what was settled for the model before; nothing of that may be stale."""
    for model, g, X in moved_models():
        before = pickle.dumps(model)
        moved = model - 0.5 * g
        made = dataclasses.replace(moved)  # by the constructor
        assert moved == made
        assert moved.parameters.keys() == made.parameters.keys() == model.parameters.keys()
        for name, array in made.parameters.items():
            assert moved.parameters[name] is array
            assert not array.flags.writeable
        assert moved._core == made._core
        np.testing.assert_array_equal(moved(X), made(X))
        assert pickle.loads(pickle.dumps(moved)) == moved
        assert pickle.dumps(model) == before


def test_dot_and_norm():
    g, h = arrays(), arrays(seed=1)
    flat = [np.concatenate([x.W.ravel(), x.U.ravel()]) for x in (g, h)]
    # Sums of 280 products of order 1 in different orders.
    assert mh.dot(g, h) == pytest.approx(flat[0] @ flat[1], abs=1e-12)
    assert mh.norm(g) == pytest.approx(np.linalg.norm(flat[0]), rel=1e-14)
    assert mh.dot(Gradients(W=g.W), Gradients(W=h.W)) == pytest.approx(np.vdot(g.W, h.W), abs=1e-12)
    assert mh.norm(mh.Classifier(g.W, g.U)) == mh.norm(g)
    assert mh.norm(Gradients()) == 0.0


@pytest.mark.parametrize("exponent", [-1074, -1073, -600, -149, 0, 600, 1019])
def test_norm_neither_underflows_nor_overflows(exponent):
    entry = math.ldexp(1.0, exponent)
    g = Gradients(W=np.full((1, 4, 4), entry))
    assert mh.norm(g) == 4 * entry


def test_norm_of_float32_is_taken_in_float64():
    g = Gradients(U=np.full((H, T, d), 1e30, np.float32))
    # 1e30 is rounded to float32, the norm is not.
    assert mh.norm(g) == pytest.approx(float(np.float32(1e30)) * math.sqrt(H * T * d), rel=1e-15)


def test_norm_and_dot_of_what_is_no_number():
    assert math.isnan(mh.norm(Gradients(W=np.array([[[1.0, math.nan], [math.inf, 0.0]]]))))
    assert mh.norm(Gradients(W=np.array([[[1.0, -math.inf], [3.0, 0.0]]]))) == math.inf
    assert mh.norm(Gradients(W=np.full((1, 4, 4), 1e308))) == math.inf


def test_dot_neither_underflows_nor_overflows_on_the_way():
    small = Gradients(W=np.full((1, 2, 2), math.ldexp(1.0, -900)))
    large = Gradients(W=np.full((1, 2, 2), math.ldexp(1.0, 1000)))
    assert mh.dot(small, large) == math.ldexp(4.0, 100)
    left = Gradients(W=np.array([[[1e200, 1e200], [0.0, 1.0]]]))
    right = Gradients(W=np.array([[[1e200, -1e200], [1.0, 0.0]]]))
    assert mh.dot(left, right) == 0.0


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))]
)
def test_copies_are_equal(duplicate):
    g = Gradients(U=np.ones((H, T, d)))
    assert duplicate(g) == g
    assert duplicate(g) != 2 * g
    assert g != Gradients(W=np.ones((H, T, d)))
