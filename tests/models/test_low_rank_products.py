"""Models of low rank multiply with their factors one by one, in every plan and in training."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from instances import TOLERANCE, relative

import mhfast as mh

n, T, q, H, p, R = 7, 6, 4, 2, 3, 9
# The rank and the dimension of tokens: rows are one vector or less, several, with a rest; of the
# second scores alone have the factors where features are the lanes, of the last the gradients too.
SIZES = [(1, 5), (3, 13), (2, 97), (17, 131)]
# So many tokens with wide features that projections.hpp does not apply.
MORE = 21
PLANS = {
    mh.Classifier: ("samples", "hybrid", "rows", "tiles"),
    mh.Layer: ("samples", "hybrid", "rows"),
}
EVERY_PLAN = [(kind, plan) for kind, plans in PLANS.items() for plan in plans]
SIDES = ["self", "token", "external", "prompt"]


def draw(kind, size, *, tied=False, side="self", dtype=np.float64, runs=(), tokens=T, **settings):
    """A model of such a rank and dimension, and data for it."""
    r, d = size
    rng = np.random.default_rng(5)
    rows = {"self": tokens, "token": 1}.get(side, q)

    def new(*shape):
        return rng.standard_normal(shape).astype(dtype)

    # Logits of order 1.
    Q, K = new(*runs, H, d, r) / d**0.5, new(*runs, H, d, r) / (d * r) ** 0.5
    rest = {"prompt": new(*runs, q, d)} if side == "prompt" else {}
    if side == "token":
        rest["query"] = 2
    readout = new(*runs, *((H, rows, d) if kind is mh.Classifier else (H, d, p))) / d**0.5
    model = kind(mh.LowRank(Q, None if tied else K), readout, **rest, **settings)
    y = rng.choice([-1.0, 1.0], (n,) if kind is mh.Classifier else (n, rows, p)).astype(dtype)
    external = {"query": new(n, q, d)} if side == "external" else {}
    return model, mh.Dataset(new(n, tokens, d), y, **external)


def dense(model):
    return dataclasses.replace(model, W=model.W.dense())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PLANS)
def test_values_and_gradients_follow_the_reference(kind, size, tied, side, dtype):
    model, data = draw(kind, size, tied=tied, side=side, dtype=dtype, scale=0.5)
    of_inputs = ("X", "query") if side == "external" else ("X",)
    tolerance = TOLERANCE[np.dtype(dtype)]
    assert relative(model(data), mh.reference.outputs(model, data.X, query=data.query)) < tolerance
    assert (
        relative(model.attention(data), mh.reference.attention(model, data.X, query=data.query))
        < tolerance
    )
    for wrt in (tuple(model.parameters), (*model.parameters, *of_inputs)):
        value, g = mh.value_and_grad(model, data, wrt=wrt)
        expected, want = mh.reference.value_and_grad(model, data.X, data.y, wrt=wrt,
                                                     query=data.query)  # fmt: skip
        assert value == pytest.approx(expected, rel=tolerance)
        for name in wrt:
            assert relative(getattr(g, name), want[name]) < tolerance, name


@pytest.mark.parametrize("limits", ["causal", "lengths"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "plan"), EVERY_PLAN)
def test_every_plan_has_the_same_outputs_and_its_gradients(
    kind, plan, size, tied, limits, use_plan
):
    tokens = T if size[1] < 16 else MORE
    model, data = draw(kind, size, tied=tied, causal=limits == "causal", tokens=tokens)
    if limits == "lengths":
        data = dataclasses.replace(data, lengths=np.array([tokens, 3, 1, 5, 2, tokens - 1, 4]))
    outputs = model(data)
    _, want = mh.reference.value_and_grad(model, data.X, data.y, lengths=data.lengths)
    use_plan(plan)
    assert mh.explain(model, data)["plan"] == plan
    np.testing.assert_array_equal(model(data), outputs)
    # A sample's outputs do not depend on the others.
    ends = None if data.lengths is None else data.lengths[2:3]
    np.testing.assert_array_equal(model(data.X[2:3], lengths=ends), outputs[2:3])
    value, g = mh.value_and_grad(model, data, num_threads=1)
    for name in model.parameters:
        assert relative(getattr(g, name), want[name]) < 1e-12, name
    again, h = mh.value_and_grad(model, data, num_threads=3)
    assert again == value
    for name in model.parameters:
        np.testing.assert_array_equal(getattr(h, name), getattr(g, name))


@pytest.mark.parametrize("wrt", [("Q",), ("K",), ("prompt",), ("K", "prompt")])
@pytest.mark.parametrize("kind", PLANS)
def test_gradients_by_some_of_the_factors(kind, wrt):
    model, data = draw(kind, (2, 97), side="prompt")
    value, g = mh.value_and_grad(model, data, wrt=wrt)
    whole_value, whole = mh.value_and_grad(model, data)
    assert value == whole_value
    for name in wrt:
        np.testing.assert_array_equal(getattr(g, name), getattr(whole, name))


@pytest.mark.parametrize("rule", [mh.GradientDescent(0.1), mh.NormalizedGradientDescent(0.1),
                                  mh.Adam(0.01)])  # fmt: skip
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", SIZES[:3])
@pytest.mark.parametrize("kind", PLANS)
def test_training_follows_the_reference(kind, size, tied, side, rule):
    model, data = draw(kind, size, tied=tied, side=side)
    query = None if data.query is None else data.query[:4]
    test = mh.Dataset(data.X[:4], data.y[:4], query=query)
    run = mh.train(model, data, steps=4, optimizer=rule, test=test, record=("loss", "test_loss"))
    # Adam divides by the root of the second moment, which amplifies the rounding of small entries.
    tolerance = 1e-9 if isinstance(rule, mh.Adam) else 1e-12
    want, _ = mh.reference.train(model, data.X, data.y, steps=4, optimizer=rule, query=data.query)
    for name in model.parameters:
        assert relative(getattr(run.model, name), getattr(want, name)) < tolerance, name
    losses = run.history["test_loss"]
    assert losses[-1] == mh.value_and_grad(run.model, test, wrt=())[0]


@pytest.mark.parametrize("kind", PLANS)
def test_training_is_bitwise_equal_on_any_number_of_threads(kind):
    model, data = draw(kind, (2, 97), tied=False)
    runs = [
        mh.train(model, data, steps=5, optimizer=mh.GradientDescent(0.3), num_threads=k)
        for k in (1, 2, 3)
    ]
    for run in runs[1:]:
        for name in model.parameters:
            np.testing.assert_array_equal(getattr(run.model, name), getattr(runs[0].model, name))


@pytest.mark.parametrize("kind", PLANS)
def test_runs_that_are_lanes_multiply_the_factors_out(kind, use_plan):
    model, data = draw(kind, (3, 13), runs=(R,))
    alone = mh.train(model, data, steps=4, optimizer=mh.GradientDescent(0.3))
    use_plan("runs")
    together = mh.train(model, data, steps=4, optimizer=mh.GradientDescent(0.3))
    for name in model.parameters:
        assert relative(getattr(together.model, name), getattr(alone.model, name)) < 1e-12


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("size", [(2, 97), (40, 97)])
def test_factors_whose_product_overflows(kind, size):
    """Tokens near 1e-20 have logits of order 1 by factors near 1e20, whose product is 1e40."""
    model, data = draw(kind, size, dtype=np.float32)
    power = 66
    far = model.replace(W=mh.LowRank(np.ldexp(model.Q, power), np.ldexp(model.K, power)))
    X = np.ldexp(data.X, -power)
    readout = "U" if kind is mh.Classifier else "V"
    far = far.replace(**{readout: np.ldexp(getattr(model, readout), power)})
    np.testing.assert_array_equal(far(X), model(data))
    _, g = mh.value_and_grad(model, data, wrt=(*model.parameters, "X"))
    _, far_g = mh.value_and_grad(far, X, data.y, wrt=(*model.parameters, "X"))
    for name in model.parameters:
        np.testing.assert_array_equal(getattr(far_g, name), np.ldexp(getattr(g, name), -power))
    np.testing.assert_array_equal(far_g.X, np.ldexp(g.X, power))


def test_factors_of_a_layer_without_v_whose_product_overflows():
    """An identity in the place of V cannot be multiplied by a power of two, as factors can."""
    model, data = draw(mh.Layer, (2, 97), dtype=np.float32)
    model = model.replace(V=None)
    power = 66
    far = model.replace(W=mh.LowRank(np.ldexp(model.Q, power), np.ldexp(model.K, power)))
    np.testing.assert_array_equal(far(np.ldexp(data.X, -power)), np.ldexp(model(data), -power))


@pytest.mark.verdict
def test_a_low_rank_is_predicted_to_take_less(use_plan):
    """In cycles and in the size of gradients, as `explain` says."""
    low, full = mh.Classifier.zeros(H, MORE, 97, rank=2), mh.Classifier.zeros(H, MORE, 97)
    # Two thirds of d save nothing.
    high = mh.Classifier.zeros(H, MORE, 97, rank=64)
    assert mh.explain(high, (n, MORE, 97)) == mh.explain(full, (n, MORE, 97))
    many = 500, MORE, 97  # of few samples chunks have no gradient by W
    for plan in PLANS[mh.Classifier]:
        use_plan(plan)
        of_low, of_full = mh.explain(low, many), mh.explain(full, many)
        assert of_low["predicted_cycles"][plan] < of_full["predicted_cycles"][plan] / 1.5
        of_chunk = [kind["gradient_bytes"] / kind["chunks"] for kind in (of_low, of_full)]
        assert of_chunk[0] < of_chunk[1] / 2
