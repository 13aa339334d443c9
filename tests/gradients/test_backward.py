"""`backward`: gradients for an upstream gradient of the caller's own."""

from __future__ import annotations

import numpy as np
import pytest
from instances import OUTPUTS, RUNS, SAMPLES, TOKENS, TOLERANCE, case, relative

import mhfast as mh

KINDS = [mh.Classifier, mh.Layer]


def cotangent_of(the, dtype=np.float64):
    shape = the.model(the.X, **the.seen()).shape
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("identities", ["", "W", "V"])
@pytest.mark.parametrize("query", [None, -2, "given"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_follow_the_reference(dtype, kind, query, identities, lengths):
    options = {"query": query, "identities": identities, "lengths": lengths, "dtype": dtype}
    the = case(kind, causal=query is None, scale=0.7, **options)
    cotangent = cotangent_of(the, dtype)
    g = mh.backward(the.model, the.X, cotangent, wrt=the.names(), **the.seen())
    expected = mh.reference.backward(the.model, the.X, cotangent, wrt=the.names(), **the.seen())
    for name in the.names():
        assert getattr(g, name).dtype == dtype
        assert relative(getattr(g, name), expected[name]) < TOLERANCE[the.model.dtype]


@pytest.mark.parametrize("plan", ["samples", "rows"])
@pytest.mark.parametrize("query", [None, "given"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_inputs_where_heads_have_factors(kind, tied, query, plan, use_plan):
    use_plan(plan)
    n, tokens, d, H, p, rank = 7, 6, 17, 3, 4, 2
    rng = np.random.default_rng(2)
    q = tokens if query is None else tokens + 2
    factors = rng.standard_normal((2, H, d, rank))
    W = mh.LowRank(factors[0]) if tied else mh.LowRank(*factors)
    model = kind(W, rng.standard_normal((H, d, p) if kind is mh.Layer else (H, q, d)), scale=0.7)
    X, given = rng.standard_normal((n, tokens, d)), {}
    if query == "given":
        given["query"] = rng.standard_normal((n, q, d))
    cotangent = rng.standard_normal((n, q, p) if kind is mh.Layer else (n,))
    wrt = ("X", *given)
    g = mh.backward(model, X, cotangent, wrt=wrt, **given)
    expected = mh.reference.backward(model, X, cotangent, wrt=wrt, **given)
    for name in wrt:
        assert relative(getattr(g, name), expected[name]) < TOLERANCE[X.dtype], name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seen", ["all", "causal", "lengths", "external"])
def test_gradients_of_long_samples_are_put_together_from_tiles_of_query_rows(kind, seen):
    """T and q so that A and D of all rows exceed the cache; the last tile is a partial one."""
    n, T, d, H, p, rows = 2, 330, 5, 2, 3, 190
    rng = np.random.default_rng(1)
    q = rows if seen == "external" else T
    readout = (H, d, p) if kind is mh.Layer else (H, q, d)
    model = kind(
        rng.standard_normal((H, d, d)), rng.standard_normal(readout), causal=seen == "causal"
    )
    given = {"query": rng.standard_normal((n, q, d))} if seen == "external" else {}
    given |= {"lengths": [T, 101]} if seen == "lengths" else {}
    X = rng.standard_normal((n, T, d))
    cotangent = rng.standard_normal((n, q, p) if kind is mh.Layer else (n,))
    wrt = ("X", "query") if seen == "external" else ("X",)
    g = mh.backward(model, X, cotangent, wrt=wrt, **given)
    expected = mh.reference.backward(model, X, cotangent, wrt=wrt, **given)
    for name in wrt:
        assert relative(getattr(g, name), expected[name]) < TOLERANCE[X.dtype], name


@pytest.mark.parametrize("kind", KINDS)
def test_the_derivative_of_a_loss_gives_the_gradient_of_the_loss(kind):
    the = case(kind, loss="squared")
    residual = 2 * (the.model(the.X) - the.y) / SAMPLES
    _, g = the.value_and_grad(wrt=("W", "X"))
    h = mh.backward(the.model, the.X, residual, wrt=("W", "X"))
    assert relative(h.W, g.W) < 1e-12
    assert relative(h.X, g.X) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_without_weight_has_no_gradient_even_where_its_output_overflows(kind):
    the = case(kind, loss="squared")
    X = the.X.copy()
    X[1] *= 1e200
    weight = np.ones(len(X))
    weight[1] = 0.0
    assert not np.isfinite(the.model(X)[1]).all()
    _, g = mh.value_and_grad(the.model, X, the.y, loss="squared", weight=weight, wrt="X")
    assert not g.X[1].any()
    _, expected = mh.value_and_grad(the.model, the.X, the.y, loss="squared", weight=weight, wrt="X")
    assert np.array_equal(g.X, expected.X)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_linear_in_the_cotangent(kind):
    the = case(kind)
    cotangent = cotangent_of(the)
    once = mh.backward(the.model, the.X, cotangent)
    twice = mh.backward(the.model, the.X, 2 * cotangent)
    assert twice == 2 * once  # a power of two commutes with rounding
    zero = mh.backward(the.model, the.X, np.zeros_like(cotangent))
    assert mh.norm(zero) == 0.0


@pytest.mark.peers
def test_gradients_agree_with_torch():
    torch = pytest.importorskip("torch")
    the = case(mh.Layer)
    W, V, X = (torch.tensor(a, requires_grad=True) for a in (the.model.W, the.model.V, the.X))
    A = torch.einsum("nqd,hde,nte->nhqt", X, W, X).softmax(-1)
    F = torch.einsum("nhqt,nte,hep->nqp", A, X, V)
    F.sin().sum().backward()
    g = mh.backward(the.model, the.X, np.cos(the.model(the.X)), wrt=("W", "V", "X"))
    for name, tensor in (("W", W), ("V", V), ("X", X)):
        assert relative(getattr(g, name), tensor.grad.numpy()) < 1e-12


def test_a_cotangent_may_have_any_strides():
    the = case(mh.Layer)
    cotangent = cotangent_of(the)
    expected = mh.backward(the.model, the.X, cotangent)
    wide = np.repeat(cotangent, 2, axis=-1)[..., ::2]
    for given in (np.asfortranarray(cotangent), wide, cotangent[::-1].copy()[::-1]):
        assert not given.flags.c_contiguous
        assert mh.backward(the.model, the.X, given) == expected
    constant = np.broadcast_to(np.float64(0.5), cotangent.shape)
    assert constant.strides == (0, 0, 0)
    assert mh.backward(the.model, the.X, constant) == (
        mh.backward(the.model, the.X, constant.copy())
    )


def test_rows_beyond_the_lengths_have_no_influence():
    the = case(mh.Layer, lengths=True)
    cotangent = cotangent_of(the)
    expected = mh.backward(the.model, the.X, cotangent, wrt=the.names(), **the.seen())
    cotangent[np.arange(TOKENS) >= the.options["lengths"][:, None]] = np.nan
    assert mh.backward(the.model, the.X, cotangent, wrt=the.names(), **the.seen()) == expected


def test_a_dataset_stands_for_its_tokens():
    the = case(query="given", lengths=True)
    data = mh.Dataset(the.X, the.y, weight=np.arange(SAMPLES), **the.seen())
    cotangent = cotangent_of(the)
    expected = mh.backward(the.model, the.X, cotangent, **the.seen())
    assert mh.backward(the.model, data, cotangent) == expected


@pytest.mark.parametrize("runs", [("W",), ("X", "V", "U"), ("cotangent",)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_equals_the_call_on_it_alone(kind, runs):
    the = case(kind, runs=runs)
    shape = (SAMPLES,) if kind is mh.Classifier else (SAMPLES, TOKENS, OUTPUTS)
    lead = (RUNS,) if "cotangent" in runs else ()
    cotangent = np.random.default_rng(7).standard_normal(lead + shape)
    g = mh.backward(the.model, the.X, cotangent, wrt=the.names())
    assert g.runs == RUNS
    for r in range(RUNS):
        alone = the.run(r)
        h = mh.backward(alone.model, alone.X, cotangent[r] if lead else cotangent, wrt=the.names())
        for name in the.names():
            assert relative(getattr(g[r], name), getattr(h, name)) < 1e-12


def test_the_cotangent_is_named_in_errors():
    the = case()
    layer = case(mh.Layer)
    for model, X, cotangent, kind, message in (
        (
            the.model, the.X, np.ones(SAMPLES + 1), ValueError,
            "cotangent: expected shape (n,) = (6,), got (7,)",
        ),
        (
            layer.model, layer.X, np.ones((SAMPLES, TOKENS)), ValueError,
            "cotangent: expected shape (n, q, p) = (6, 3, 4), got (6, 3)",
        ),
        (
            the.model, the.X, np.ones(SAMPLES, np.float32), TypeError,
            "cotangent: expected dtype float64, that of X, got float32; "
            "cotangent.astype(np.float64) converts it",
        ),
        (
            the.model, the.X, None, TypeError,
            "cotangent: expected an array of the shape of the outputs, got None",
        ),
        (
            "model",
            the.X,
            None,
            TypeError,
            "model: expected a Classifier, a Layer or a Stack, got str",
        ),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            mh.backward(model, X, cotangent)
        assert str(caught.value) == message
