"""Who asks and which tokens are seen: integer and external queries, prompts, lengths, causal."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
from instances import DIM, HEADS, ROWS, SAMPLES, TOKENS, TOLERANCE, case, relative

import mhfast as mh

KINDS = [mh.Classifier, mh.Layer]
QUERIES = [None, 0, 1, -1, -2, "own", "given"]
SEEN = [
    {"query": query, "causal": causal, "lengths": lengths}
    for query, causal, lengths in product(QUERIES, (False, True), (False, True))
] + [{"prompt": True, "lengths": lengths} for lengths in (False, True)]
SEEN += [
    {"identities": "W", "causal": True},
    {"identities": "V", "query": -1, "lengths": True},
    {"identities": "WV", "causal": True},
    {"identities": "WV", "query": "own"},
    {"identities": "WV", "prompt": True, "lengths": True},
]


@pytest.mark.parametrize("options", SEEN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_everything_follows_the_reference(dtype, kind, options):
    the = case(kind, dtype=dtype, **options)
    close = TOLERANCE[np.dtype(dtype)]
    for action in ("outputs", "attention"):
        got = (the.model if action == "outputs" else the.model.attention)(the.X, **the.seen())
        expected = getattr(mh.reference, action)(the.model, the.X, **the.seen())
        assert got.dtype == dtype
        assert got.shape == expected.shape
        assert relative(got, expected) < close

    value, g = the.value_and_grad(wrt=the.names())
    expected, gradients = mh.reference.value_and_grad(
        the.model, the.X, the.y, wrt=the.names(), **the.options
    )
    assert value == pytest.approx(expected, rel=close)
    for name in the.names():
        got = getattr(g, name)
        assert got.shape == gradients[name].shape
        # The first query row of a causal model sees one token, and no gradient reaches its W.
        assert np.abs(got - gradients[name]).max() <= close * max(np.abs(gradients[name]).max(), 1)


@pytest.mark.parametrize("weight", ["", "samples", "rows"])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_rows_beyond_the_lengths_do_not_count_in_the_loss_of_a_layer(loss, weight):
    """A mean over samples of sums over rows; over rows for cross_entropy and weights of rows."""
    the = case(mh.Layer, loss=loss, lengths=True, weight=weight)
    value, g = the.value_and_grad()
    F, lengths = the.model(the.X, **the.seen()), the.options["lengths"]
    w = the.options.get("weight", np.ones(SAMPLES))
    by_row = loss == "cross_entropy" or weight == "rows"
    total, norm = 0.0, 0.0 if by_row else w.sum()
    for i, t in product(range(SAMPLES), range(TOKENS)):
        if t >= lengths[i]:
            assert not F[i, t].any()
            continue
        if loss == "squared":
            term = np.square(F[i, t] - the.y[i, t]).sum()
        else:
            term = np.log(np.exp(F[i, t]).sum()) - F[i, t, the.y[i, t]]
        share = w[i, t] if weight == "rows" else w[i]
        total += share * term
        norm += share if by_row else 0.0
    # A dozen terms of order 1.
    assert value == pytest.approx(total / norm, rel=1e-13)
    assert g.V.any()


@pytest.mark.parametrize("query", [None, -1, "given"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_beyond_the_lengths_has_no_influence(kind, query):
    the = case(kind, query=query, lengths=True)
    names = the.names()
    expected = the.value_and_grad(wrt=names)
    outputs, weights = (f(the.X, **the.seen()) for f in (the.model, the.model.attention))
    beyond = np.arange(TOKENS) >= the.options["lengths"][:, None]
    for filling in (np.nan, np.inf, 1e300):
        X = the.X.copy()
        X[beyond] = filling
        y = the.y.copy()
        if kind is mh.Layer and query is None:
            y[beyond] = filling
        value, g = the._replace(X=X, y=y).value_and_grad(wrt=names)
        assert (value, g) == expected
        assert not g.X[beyond].any()
        np.testing.assert_array_equal(the.model(X, **the.seen()), outputs)
        np.testing.assert_array_equal(the.model.attention(X, **the.seen()), weights)
        data = mh.Dataset(X, y, query=the.options.get("query"), lengths=the.options["lengths"])
        assert mh.value_and_grad(the.model, data, wrt=names) == expected
        np.testing.assert_array_equal(the.model(data), outputs)
    assert np.isnan(X).sum() == 0  # the last filling; the caller's array is as it was
    assert (X[beyond] == 1e300).all()


@pytest.mark.parametrize("query", [None, 0, -1, "given"])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_with_lengths_are_those_cut_off_there(kind, query):
    the = case(kind, query=query, lengths=True)
    outputs = the.model(the.X, **the.seen())
    for i, length in enumerate(the.options["lengths"]):
        if length == 0:
            assert not outputs[i].any()
            continue
        options = {name: a[i : i + 1] for name, a in the.seen().items() if name == "query"}
        model = the.model
        if kind is mh.Classifier and query is None:
            model = dataclasses.replace(model, U=model.U[:, :length])
        alone = model(the.X[i : i + 1, :length], **options)[0]
        rows = outputs[i][:length] if kind is mh.Layer and query is None else outputs[i]
        # The same numbers by another plan.
        assert relative(rows, alone) < 1e-13


def test_attention_of_short_samples():
    the = case(lengths=True)
    A = the.model.attention(the.X, **the.seen())
    seen = np.arange(TOKENS) < the.options["lengths"][:, None]
    rows = A.sum(axis=-1)
    # Rows of at most three weights.
    np.testing.assert_allclose(
        rows, np.broadcast_to(seen[:, None], rows.shape).astype(float), rtol=0, atol=1e-15
    )
    assert not A[np.broadcast_to(~seen[:, None, None], A.shape)].any()


def test_lengths_that_cut_nothing_off_change_nothing():
    the = case(mh.Classifier)
    full = the.value_and_grad(lengths=[TOKENS] * SAMPLES)
    value, g = the.value_and_grad()
    # The same numbers, by another plan perhaps.
    assert full[0] == pytest.approx(value, rel=1e-14)
    assert relative(full[1].W, g.W) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_row_sees_what_a_shorter_sample_has(kind):
    the = case(kind, causal=True)
    A = the.model.attention(the.X)
    whole = dataclasses.replace(the.model, causal=False)
    for t in range(TOKENS):
        prefix = mh.Layer(whole.W, np.ones((HEADS, DIM, 1)), query=-1)
        expected = prefix.attention(the.X[:, : t + 1])
        assert relative(A[:, :, t : t + 1, : t + 1], expected) < 1e-13
        assert not A[:, :, t, t + 1 :].any()


@pytest.mark.parametrize("query", [0, 1, -1, -2])
@pytest.mark.parametrize("lengths", [False, True])
def test_a_causal_integer_query_is_a_row_of_causal_self_attention(query, lengths):
    the = case(mh.Layer, causal=True, lengths=lengths)
    rows = the.model(the.X, **the.seen())
    one = dataclasses.replace(the.model, query=query)(the.X, **the.seen())
    ends = the.options.get("lengths", np.full(SAMPLES, TOKENS))
    for i, end in enumerate(ends):
        place = query if query >= 0 else end + query
        if 0 <= place < end:
            assert relative(one[i, 0], rows[i, place]) < 1e-13


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("query", [None, 1, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_tokens_are_derivatives(kind, query, causal, lengths):
    the = case(kind, query=query, causal=causal, lengths=lengths)
    _, g = the.value_and_grad(wrt="X")
    direction = np.random.default_rng(1).standard_normal(the.X.shape)
    step = 1e-5
    up, _ = the._replace(X=the.X + step * direction).value_and_grad(wrt=())
    down, _ = the._replace(X=the.X - step * direction).value_and_grad(wrt=())
    # Central differences: step² times third derivatives, here up to 10, and rounding 1e-16 / step.
    assert abs((up - down) / (2 * step) - np.vdot(g.X, direction)) < 1e-8


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_an_external_query_of_all_samples(kind):
    the = case(kind, prompt=True)
    value, g = the.value_and_grad(wrt=("prompt", "X"))
    Z = np.broadcast_to(the.model.prompt, (SAMPLES, ROWS, DIM))
    bare = dataclasses.replace(the.model, prompt=None)
    expected, h = the._replace(model=bare).value_and_grad(query=Z, wrt=("query", "X"))
    assert value == pytest.approx(expected, rel=1e-14)
    # The sum over six samples in another order.
    assert relative(g.prompt, h.query.sum(axis=0)) < 1e-13
    assert relative(g.X, h.X) < 1e-13


def test_a_model_with_a_prompt_is_made_and_drawn():
    zeros = mh.Classifier.zeros(HEADS, TOKENS, DIM, prompt_rows=ROWS)
    assert zeros.prompt.shape == (ROWS, DIM)
    assert zeros.U.shape == (HEADS, ROWS, DIM)
    drawn = mh.Layer.gaussian(HEADS, DIM, 4, std=1.0, seed=0, prompt_rows=ROWS)
    rng = np.random.default_rng(0)
    for name, shape in (("W", (HEADS, DIM, DIM)), ("V", (HEADS, DIM, 4)), ("prompt", (ROWS, DIM))):
        np.testing.assert_array_equal(drawn.parameters[name], rng.standard_normal(shape))


def test_asking_for_nothing_but_inputs():
    the = case(query="given")
    value, full = the.value_and_grad(wrt=the.names())
    same, g = the.value_and_grad(wrt=("query", "X"))
    # Without parameters the outputs may be summed in another order.
    assert same == pytest.approx(value, rel=1e-14)
    assert g.W is g.U is None
    assert relative(g.X, full.X) < 1e-13
    assert relative(g.query, full.query) < 1e-13
