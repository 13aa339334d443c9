"""Numbers far from 1: what is in range comes out right, although products on the way are not.

A problem and one whose tokens, queries and parameters are multiplied by powers of two that cancel
have the same logits and outputs to the last bit, and gradients that differ by these powers.
"""

from dataclasses import replace

import numpy as np
import pytest

import mhfast as mh
from mhfast import reference

n, T, d, H, p, q, r = 9, 5, 6, 3, 4, 2, 2
KINDS = (mh.Classifier, mh.Layer)
QUERIES = ("self", "token", "external", "prompt")
WEIGHTS = ("dense", "factored", "tied")
# Powers of the tokens and of external queries or prompts. In the first pair Q K^T is out of range,
# for which a dense W, which must be in it, has the second.
POWERS = {
    np.float32: ((-66, -66), (-60, -60), (-66, 40), (62, -64)),
    np.float64: ((-664, -664), (-500, -500), (664, -666)),
}


def draw(kind, query, weights, dtype, runs=None):
    rng = np.random.default_rng(3)
    lead = () if runs is None else (runs,)

    def new(*shape):
        return rng.standard_normal(shape).astype(dtype)

    rows = {"self": T, "token": 1}.get(query, q)
    if weights == "dense":
        W = new(*lead, H, d, d)
    else:
        W = mh.LowRank(new(*lead, H, d, r), new(*lead, H, d, r) if weights == "factored" else None)
    rest = {"prompt": new(*lead, q, d)} if query == "prompt" else {}
    if query == "token":
        rest["query"] = 1
    readout = new(*lead, *((H, rows, d) if kind is mh.Classifier else (H, d, p)))
    shape = (n,) if kind is mh.Classifier else (n, rows, p)
    y = rng.choice([-1.0, 1.0], shape).astype(dtype)
    external = {"query": new(n, q, d)} if query == "external" else {}
    return kind(W, readout, scale=0.5, **rest), mh.Dataset(new(n, T, d), y, **external)


def powers(query, weights, of_tokens, of_queries):
    """By name, the power of two that each array is multiplied by."""
    x, z = of_tokens, of_queries if query in ("external", "prompt") else of_tokens
    of_Q = -(x + z) // 2 if weights == "tied" else -z
    return {"X": x, "query": z, "prompt": z, "W": -(x + z), "Q": of_Q, "K": -x, "U": -x, "V": -x}


def times(power, name, array):
    """Exactly `array` times 2^power[name]."""
    return np.ldexp(array, power[name]).astype(array.dtype)


def scaled(model, data, power):
    parameters = {name: times(power, name, array) for name, array in model.parameters.items()}
    if "Q" in parameters:
        parameters["W"] = mh.LowRank(parameters.pop("Q"), parameters.pop("K", None))
    arrays = {"X": times(power, "X", data.X)}
    if data.query is not None:
        arrays["query"] = times(power, "query", data.query)
    return model.replace(**parameters), replace(data, **arrays)


CASES = [
    (kind, query, weights, dtype, pair)
    for dtype, pairs in POWERS.items()
    for kind in KINDS
    for query in QUERIES
    for weights in WEIGHTS
    for pair in (pairs[weights == "dense" :] if query in ("external", "prompt") else pairs[:2])
    if not (weights == "dense" and pair == pairs[0])
]


@pytest.mark.parametrize(("kind", "query", "weights", "dtype", "pair"), CASES)
def test_outputs_and_derivatives(kind, query, weights, dtype, pair):
    power = powers(query, weights, *pair)
    model, data = draw(kind, query, weights, dtype)
    far, far_data = scaled(model, data, power)
    np.testing.assert_array_equal(far(far_data), model(data))
    np.testing.assert_array_equal(far.attention(far_data), model.attention(data))
    wrt = (*model.parameters, "X", *(("query",) if data.query is not None else ()))
    for names in (wrt, tuple(model.parameters)):
        value, g = mh.value_and_grad(model, data, loss="squared", wrt=names)
        far_value, far_g = mh.value_and_grad(far, far_data, loss="squared", wrt=names)
        assert far_value == value
        for name in names:
            want = np.ldexp(getattr(g, name), -power[name])
            np.testing.assert_array_equal(getattr(far_g, name), want, err_msg=name)
    # Along the parameters themselves, so that every term of the product is in range.
    product = mh.hvp(model, data, tangent=model, loss="squared")
    far_product = mh.hvp(far, far_data, tangent=far, loss="squared")
    for name in model.parameters:
        want = np.ldexp(getattr(product, name), -power[name])
        np.testing.assert_array_equal(getattr(far_product, name), want, err_msg=name)


# With the power of the rate, in units of that of the parameters, k. The factor of a gradient is a
# number of the model's dtype, which limits k where it is not taken apart from the step.
TRAININGS = [
    (mh.NormalizedGradientDescent, {}, 1, 66),
    (mh.NormalizedGradientDescent, {"by": "all"}, 1, 66),
    (mh.NormalizedGradientDescent, {"by": "head", "l2": 0.125}, 1, 58),
    (mh.GradientDescent, {}, 2, 62),
    (mh.Momentum, {}, 2, 62),
]


@pytest.mark.parametrize("runs", [None, 20])
@pytest.mark.parametrize(("rule", "rest", "lr_power", "k"), TRAININGS)
@pytest.mark.parametrize("weights", WEIGHTS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_training(kind, weights, rule, rest, lr_power, k, runs):
    """All parameters have one power here; gradients the opposite one, which the rate makes up."""
    power = powers("self", weights, -k, -k)
    model, data = draw(kind, "self", weights, np.float32, runs)
    far, far_data = scaled(model, data, power)
    far_rest = {**rest, "l2": np.ldexp(rest["l2"], -2 * k)} if "l2" in rest else rest
    options = {"steps": 5, "loss": "squared", "record": ("loss", "test_margin", "attention_max")}
    run = mh.train(model, data, optimizer=rule(0.25, **rest), test=data, **options)
    far_rule = rule(np.ldexp(0.25, lr_power * k), **far_rest)
    far_run = mh.train(far, far_data, optimizer=far_rule, test=far_data, **options)
    for key, rows in run.history.items():
        np.testing.assert_array_equal(far_run.history[key], rows, err_msg=key)
    for name, array in run.model.parameters.items():
        want = times(power, name, array)
        np.testing.assert_array_equal(far_run.model.parameters[name], want, err_msg=name)


@pytest.mark.parametrize("by", ["tensor", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_normalized_training_of_a_prompt(kind, by):
    """The gradient by the prompt and by the rest have different powers."""
    k = 60
    power = powers("prompt", "factored", -k, -k)
    model, data = draw(kind, "prompt", "factored", np.float32)
    far, far_data = scaled(model, data, power)
    for wrt, of_rate in ((("prompt",), -k), (("Q", "K"), k)):
        options = {"steps": 5, "loss": "squared", "wrt": wrt, "record": ("loss",)}
        rules = [mh.NormalizedGradientDescent(np.ldexp(0.25, e), by=by) for e in (0, of_rate)]
        run = mh.train(model, data, optimizer=rules[0], **options)
        far_run = mh.train(far, far_data, optimizer=rules[1], **options)
        np.testing.assert_array_equal(far_run.history["loss"], run.history["loss"])
        for name in wrt:
            want = times(power, name, getattr(run.model, name))
            np.testing.assert_array_equal(getattr(far_run.model, name), want)


def close(a, b):
    """As single precision is where sums cancel, and to the smallest number that it has."""
    smallest = np.finfo(np.float32).smallest_subnormal
    np.testing.assert_allclose(a, b, rtol=0, atol=max(1e-5 * np.abs(b).max(), smallest))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_below_the_normal_range(kind):
    """They have lost digits, so what comes out is compared with what they are in float64."""
    model, data = draw(kind, "self", "factored", np.float32)
    power = powers("self", "factored", -134, -134)
    limited = {name: min(e, 122) for name, e in power.items()}
    far, far_data = scaled(model, data, {**limited, "X": -134})
    assert 0 < np.abs(far_data.X).max() < np.finfo(np.float32).smallest_normal
    wide = far.replace(
        W=mh.LowRank(np.float64(far.Q), np.float64(far.K)),
        **{name: np.float64(getattr(far, name)) for name in ("U", "V") if hasattr(far, name)},
    )
    wide_X, y = np.float64(far_data.X), np.float64(data.y)
    outputs = reference.outputs(wide, wide_X)
    close(far(far_data), outputs)
    close(far.attention(far_data), reference.attention(wide, wide_X))
    wrt = (*model.parameters, "X")
    value, g = mh.value_and_grad(far, far_data, loss="linear", wrt=wrt)
    want, want_g = reference.value_and_grad(wide, wide_X, y, loss="linear", wrt=wrt)
    np.testing.assert_allclose(value, want, rtol=1e-4)
    for name in wrt:
        close(getattr(g, name), want_g[name])


@pytest.mark.parametrize(("dtype", "large"), [(np.float32, 1e25), (np.float64, 1e190)])
def test_one_large_entry_leaves_other_samples_alone(dtype, large):
    """Scaled down to 1, it would take the other tokens out of range."""
    model, data = draw(mh.Layer, "self", "factored", dtype)
    X = data.X.copy()
    X[n - 1, T - 1, d - 1] = large
    np.testing.assert_array_equal(model(X)[:-1], model(data)[:-1])
    gradients = [
        mh.value_and_grad(model, x, data.y, loss="squared", wrt=("X",))[1].X for x in (data.X, X)
    ]
    np.testing.assert_array_equal(gradients[1][:-1], gradients[0][:-1])


@pytest.mark.parametrize("large", [("X",), ("query",), ("X", "query")])
@pytest.mark.parametrize(("dtype", "k", "huge"), [(np.float32, 21, 120), (np.float64, 151, 1000)])
def test_one_large_entry_of_tokens_or_queries(dtype, k, huge, large):
    """Beside a large W, which scaling must not make infinite.

    The other entries are as small as W is large, but not so small that they would be scaled.
    """
    power = {"X": 0, "query": -k, "W": k, "V": 0}
    if large == ("query",):
        power = {"X": -k, "query": 0, "W": k, "V": k}
    model, data = draw(mh.Layer, "external", "dense", dtype)
    far, far_data = scaled(model, data, power)
    arrays = {name: getattr(far_data, name).copy() for name in large}
    for array in arrays.values():
        array[n - 1, -1, -1] = np.ldexp(dtype(1), huge)
    far_data = replace(far_data, **arrays)
    np.testing.assert_array_equal(far(far_data)[:-1], model(data)[:-1])
    wrt = ("X", "query")
    _, g = mh.value_and_grad(model, data, loss="squared", wrt=wrt)
    with np.errstate(over="ignore", invalid="ignore"):
        _, far_g = mh.value_and_grad(far, far_data, loss="squared", wrt=wrt)
    for name in wrt:
        want = np.ldexp(getattr(g, name), -power[name])[:-1]
        np.testing.assert_array_equal(getattr(far_g, name)[:-1], want, err_msg=name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("query", ["self", "external"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sample_that_is_not_finite_leaves_the_scale_of_others(dtype, query, bad):
    """Also where it is the first of the numbers, or one of the last."""
    power = powers(query, "factored", *POWERS[dtype][0])
    model, data = draw(mh.Layer, query, "factored", dtype)
    far, far_data = scaled(model, data, power)
    want = model(data)
    for sample in (0, n - 1):
        X = far_data.X.copy()
        X[sample, -1, -1] = bad
        outputs = far(replace(far_data, X=X))
        others = np.arange(n) != sample
        np.testing.assert_array_equal(outputs[others], want[others])
        assert np.isnan(outputs[sample]).any()
