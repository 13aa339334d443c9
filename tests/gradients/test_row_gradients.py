"""Gradients by W from D X of all rows, which is kept where features are many and rows are few."""

import numpy as np
import pytest

import mhfast as mh
from mhfast import reference

n, T, H, p = 5, 3, 2, 4
DIMS = (37, 64)  # a last register that is not whole, in every instruction set; and whole ones
PLANS = [
    (mh.Classifier, "hybrid"),
    (mh.Classifier, "rows"),
    (mh.Layer, "hybrid"),
    (mh.Layer, "rows"),
]
# Relative to the largest entry: the promise for results against the float64 reference.
TOLERANCE = {np.float64: 1e-12, np.float32: 3e-6}


def draw(kind, d, dtype, *, query=None, samples=n, scale=0.75, causal=False, seed=0):
    """A model of kind, and data with lengths and weights, one of which is 0."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    q = 2 if query == "external" else 1 if query == -1 else T
    W = normal(H, d, d) / dtype(d)
    readout = normal(H, *((q, d) if kind is mh.Classifier else (d, p))) / dtype(d**0.5)
    of_rows = None if query == "external" else query
    model = kind(W, readout, query=of_rows, scale=scale, causal=causal)
    y = np.sign(normal(samples, *(() if kind is mh.Classifier else (q, p))))
    data = mh.Dataset(
        normal(samples, T, d), y,
        query=normal(samples, q, d) if query == "external" else None,
        lengths=None if causal else rng.integers(1, T + 1, samples),
        weight=np.arange(samples, dtype=dtype),
    )  # fmt: skip
    return model, data


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("query", [None, -1, "external"])
@pytest.mark.parametrize(("kind", "plan"), PLANS)
def test_gradients_are_those_of_the_reference(kind, plan, query, d, dtype, use_plan):
    use_plan(plan)
    model, data = draw(kind, d, dtype, query=query)
    value, gradients = mh.value_and_grad(model, data)
    expected, of_reference = reference.value_and_grad(
        model, data.X, data.y, query=data.query, lengths=data.lengths, weight=data.weight
    )
    assert value == pytest.approx(expected, rel=TOLERANCE[dtype])
    for name in model.parameters:
        found, true = getattr(gradients, name), of_reference[name]
        np.testing.assert_allclose(
            found, true, rtol=0, atol=TOLERANCE[dtype] * np.abs(true).max(), err_msg=name
        )


@pytest.mark.verdict
@pytest.mark.parametrize(("kind", "plan"), PLANS)
def test_few_rows_have_no_gradient_of_each_chunk(kind, plan, use_plan):
    """`explain` says how many bytes: D X takes the place of gradients by W up to 4 d rows."""
    use_plan(plan)
    d = 37
    few, many = (mh.explain(draw(kind, d, np.float64)[0], (m, T, d)) for m in (49, 50))
    of_w = H * d * d * 8
    assert few["gradient_bytes"] < many["gradient_bytes"]
    assert many["gradient_bytes"] > of_w * many["chunks"]


@pytest.mark.parametrize(("kind", "plan"), PLANS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_bitwise_the_same_on_any_number_of_threads(kind, plan, causal, use_plan):
    use_plan(plan)
    d = 261  # three pieces of the gradient, and sums in two parts
    model, data = draw(kind, d, np.float64, samples=90, causal=causal)
    single = mh.value_and_grad(model, data, num_threads=1)
    for threads in (2, 3):
        value, gradients = mh.value_and_grad(model, data, num_threads=threads)
        assert value == single[0]
        for name in model.parameters:
            np.testing.assert_array_equal(getattr(gradients, name), getattr(single[1], name))


@pytest.mark.parametrize(("kind", "plan"), PLANS)
def test_steps_in_saturation_are_those_of_samples_as_lanes(kind, plan, use_plan):
    """Scaled passes keep D X relative to the largest factors too."""
    d = 37
    model, data = draw(kind, d, np.float64)
    model = model.replace(W=2000.0 * model.W)
    options = {"steps": 4, "optimizer": mh.NormalizedGradientDescent(0.5), "loss": "squared"}
    if kind is mh.Classifier:
        options["loss"] = "logistic"
    run = {}
    for name in (plan, "samples"):
        use_plan(name)
        run[name] = mh.train(model, data, **options).model
    for name in model.parameters:
        found, true = getattr(run[plan], name), getattr(run["samples"], name)
        # Steps of equal length in directions of a relative accuracy of 1e-12.
        np.testing.assert_allclose(found, true, rtol=0, atol=1e-10 * np.abs(true).max())


# With so many features a W of float64 does not fit the second level of a cache of usual size, and
# gradients by parameters come from the pass of those by inputs. A last register is not whole, or W
# is read where it is.
WIDE = 331
SCALES = {WIDE: 0.75, 352: 1.0}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("d", SCALES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("query", [None, "external"])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer, mh.ValueOutput])
def test_everything_from_one_pass(kind, query, causal, d, dtype):
    values, options = kind is mh.ValueOutput, {"scale": SCALES[d], "causal": causal}
    model, data = draw(mh.Layer if values else kind, d, dtype, query=query, **options)
    if values:
        rng = np.random.default_rng(1)
        A, B = rng.standard_normal((H, d, 2)) / d**0.5, rng.standard_normal((H, 2, p))
        model = mh.Layer(model.W, mh.ValueOutput(A.astype(dtype), B.astype(dtype)), **options)
    names = (*model.parameters, "X") + (("query",) if query else ())
    given = {"query": data.query, "lengths": data.lengths, "weight": data.weight}
    value, gradients = mh.value_and_grad(model, data, wrt=names, num_threads=1)
    expected, true = reference.value_and_grad(model, data.X, data.y, wrt=names, **given)
    assert value == pytest.approx(expected, rel=TOLERANCE[dtype])
    for name in names:
        found, want = getattr(gradients, name), true[name]
        np.testing.assert_allclose(
            found, want, rtol=0, atol=TOLERANCE[dtype] * np.abs(want).max(), err_msg=name
        )
    threads = mh.value_and_grad(model, data, wrt=names, num_threads=3)[1]
    few = (names[1], *names[len(model.parameters) :])
    some = mh.value_and_grad(model, data, wrt=few, num_threads=2)[1]
    for name in names:
        np.testing.assert_array_equal(getattr(threads, name), getattr(gradients, name))
    for name in few:
        np.testing.assert_array_equal(getattr(some, name), getattr(gradients, name))


@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_everything_of_a_sample_that_is_left_out(kind):
    """Its numbers are not finite, and its weight is 0."""
    model, data = draw(kind, WIDE, np.float64)
    X = np.array(data.X)
    X[0] = np.nan
    names = (*model.parameters, "X")
    given = {"lengths": data.lengths, "weight": data.weight}
    _, found = mh.value_and_grad(model, X, data.y, wrt=names, **given)
    _, want = mh.value_and_grad(model, data.X, data.y, wrt=names, **given)
    assert data.weight[0] == 0
    for name in names:
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name))


def test_everything_where_derivatives_are_near_underflow():
    """Of margins of 600: 1e-261 before they are multiplied with anything."""
    model, data = draw(mh.Classifier, WIDE, np.float64)
    outputs = model(data.X)
    far = np.abs(outputs[1:]).min()  # the first one has the weight 0
    model = mh.Classifier(model.W, 600 / far * np.asarray(model.U), scale=0.75)
    y, names = np.sign(outputs), ("W", "U", "X")
    given = {"weight": data.weight}
    _, found = mh.value_and_grad(model, data.X, y, wrt=names, **given)
    _, want = reference.value_and_grad(model, data.X, y, wrt=names, **given)
    for name in ("W", "U"):
        error = np.abs(getattr(found, name) - want[name]).max() / np.abs(want[name]).max()
        assert error < 1e-10, name  # logits of 600, whose rounding is that of the derivative
