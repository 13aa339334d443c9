"""`mhfast.interop.jax`: derivatives of both modes up to the second, of every array."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from instances import RUNS, SAMPLES, case, relative

import mhfast as mh

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.peers
jnp = jax.numpy

from jax.test_util import check_grads  # noqa: E402  (needs jax)
from jax_formula import arrays_and_options, of_jax, textbook  # noqa: E402

from mhfast.interop import jax as interop  # noqa: E402
from mhfast.interop.jax import calls  # noqa: E402

KINDS = [mh.Classifier, mh.Layer]
SEEN = [
    {"causal": True, "lengths": True},
    {"query": "given", "lengths": True, "causal": True},
    {"prompt": True, "lengths": True},
    {"query": -1, "lengths": True},
]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def moves(arrays, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(array.shape) for name, array in arrays.items()}


def along_two(function, arrays, along, then):
    """Outputs, their first derivatives, and second ones along one direction and then another."""
    moved = lambda arrays: jax.jvp(function, (arrays,), (along,))  # noqa: E731
    outputs, first = moved(arrays)
    return outputs, first, jax.jvp(lambda arrays: moved(arrays)[1], (arrays,), (then,))[1]


def products(function, arrays, along):
    """Products of a Hessian in every order of modes."""

    def value(arrays):
        return jnp.sin(function(arrays)).sum()

    def slope(arrays):
        return jax.jvp(value, (arrays,), (along,))[1]

    return {
        "forward over reverse": jax.jvp(jax.grad(value), (arrays,), (along,))[1],
        "reverse over forward": jax.grad(slope)(arrays),
        "reverse twice": jax.vjp(jax.grad(value), arrays)[1](along)[0],
        "linearized": jax.linearize(jax.grad(value), arrays)[1](along),
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind, options in zip(2 * KINDS, SEEN, strict=True)],
)
def test_second_derivatives_are_those_of_the_formula(kind, options):
    arrays, rest = arrays_and_options(case(kind, scale=0.7, **options))
    along, then = moves(arrays, 1), moves(arrays, 2)
    ours = lambda arrays: of_jax(kind)(**arrays, **rest)  # noqa: E731
    theirs = lambda arrays: textbook(arrays, **rest)  # noqa: E731

    @jax.jit
    def both(arrays, along, then):
        value = lambda arrays: jnp.sin(theirs(arrays)).sum()  # noqa: E731
        expected = jax.jvp(jax.grad(value), (arrays,), (along,))[1]
        derivatives = [along_two(f, arrays, along, then) for f in (ours, theirs)]
        return derivatives, products(ours, arrays, along), expected

    (found, by_formula), ours_by_mode, expected = both(arrays, along, then)
    for k, pair in enumerate(zip(found, by_formula, strict=True)):
        # Sums of some hundred terms of order 1, in another order; here and below.
        assert relative(*pair) < 1e-12, k
    for mode, product in ours_by_mode.items():
        assert product.keys() == arrays.keys()
        for name, part in product.items():
            assert relative(part, expected[name]) < 1e-12, (mode, name)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (mh.Classifier, {"attention": "softmax1", "lengths": True}),
        (mh.Classifier, {"attention": "sigmoid", "normalize": True, "causal": True}),
        (mh.Layer, {"attention": "linear", "query": 1}),
        (mh.Layer, {"prompt": True}),
    ],
)
def test_differences_of_every_order_and_mode(kind, options):
    the = case(kind, scale=0.7, **options)
    arrays, rest = arrays_and_options(the)
    rest |= {"attention": str(the.model.attention), "normalize": the.model.normalize}
    names, values = zip(*arrays.items(), strict=True)
    function = jax.jit(lambda *values: of_jax(kind)(**dict(zip(names, values)), **rest))  # noqa: B905
    # Differences in one direction, by the tolerances of JAX for float64.
    check_grads(function, values, order=2, modes=("fwd", "rev"))


def test_relu_and_hardmax_are_differentiated_as_the_core_does():
    the = case(mh.Classifier, attention="relu")
    X, W, U = the.X, the.model.W, the.model.U
    slope = jax.grad(lambda W: interop.classifier(X, W, U, attention="relu").sum())(W)
    expected = mh.backward(the.model, X, np.ones(SAMPLES), wrt="W").W
    assert np.array_equal(slope, expected)

    def hard(W, U):
        return interop.classifier(X, W, U, attention="hardmax").sum()

    model = dataclasses.replace(the.model, attention="hardmax")
    by_U = mh.backward(model, X, np.ones(SAMPLES), wrt="U").U
    assert np.array_equal(jax.grad(hard, 1)(W, U), by_U)
    message = r"^attention: 'hardmax' has no derivative by the logits; expected a derivative by U "
    with pytest.raises(ValueError, match=message + r"alone, got one by W(\n|$)"):
        jax.grad(hard)(W, U)


def test_jacobians_and_hessians():
    the = case()
    X, W, U = the.X, the.model.W, the.model.U
    of_W = jax.jit(lambda W: interop.classifier(X, W, U))
    rows = np.stack([mh.backward(the.model, X, e, wrt="W").W for e in np.eye(SAMPLES)])
    assert relative(jax.jacrev(of_W)(W), rows) < 1e-12  # rows in one call, of another plan
    assert relative(jax.jacfwd(of_W)(W), rows) < 1e-12
    of_U = lambda U: jnp.sin(interop.classifier(X, W, U)).sum()  # noqa: E731
    rows = np.asarray(jax.jacrev(lambda U: interop.classifier(X, W, U))(U)).reshape(SAMPLES, -1)
    # Outputs are linear in U.
    expected = -(rows.T * np.sin(the.model(X))) @ rows
    shape = U.shape + U.shape
    for hessian in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))):
        assert relative(hessian(of_U)(U), expected.reshape(shape)) < 1e-12


def test_hessian_products_are_those_of_the_core():
    the = case(mh.Layer, loss="squared", lengths=True)
    model, lengths = the.model, the.options["lengths"]
    rng = np.random.default_rng(3)
    along = mh.Gradients(W=rng.normal(size=model.W.shape), V=rng.normal(size=model.V.shape))
    expected = mh.hvp(model, the.X, the.y, tangent=along, loss="squared", lengths=lengths)
    seen = (np.arange(the.X.shape[1]) < lengths[:, None])[..., None]

    def loss(W, V):
        outputs = interop.layer(the.X, W, V, lengths=lengths)
        return (jnp.where(seen, outputs - the.y, 0) ** 2).sum() / SAMPLES

    products = jax.jit(lambda *at: jax.jvp(jax.grad(loss, (0, 1)), at, (along.W, along.V))[1])
    for found, product in zip(products(model.W, model.V), (expected.W, expected.V), strict=True):
        assert relative(found, product) < 1e-12  # another order of sums


def test_second_derivatives_keep_their_accuracy_in_saturation():
    # Two tokens whose logits differ by 60: the weight of the second is e^-60.
    X = np.array([[[1.0, 0.0], [0.0, 1.0]]])
    W = 60 * np.eye(2)[None]
    U = np.array([[[0.5, 2.0], [0.0, 0.0]]])
    value = lambda W: interop.classifier(X, W, U).sum()  # noqa: E731
    # It is 1.5 sigmoid(-(W00 - W01)) + const for row 0, whose second derivative is 1.5 e^-60.
    assert float(jax.hessian(value)(W)[0, 0, 0, 0, 0, 0]) == pytest.approx(
        1.5 * np.exp(-60), rel=1e-13
    )
    e = np.zeros_like(W)
    e[0, 0, 0] = 1.0
    twice = jax.jvp(lambda W: jax.jvp(value, (W,), (e,))[1], (W,), (e,))[1]
    assert float(twice) == pytest.approx(1.5 * np.exp(-60), rel=1e-13)


def test_second_derivatives_in_float32():
    the = case(dtype=np.float32)
    X, W, U = the.X, the.model.W, the.model.U
    with jax.enable_x64(False):
        value = lambda W: jnp.sin(interop.classifier(X, W, U)).sum()  # noqa: E731
        found = jax.jvp(jax.grad(value), (W,), (W,))[1]
    assert found.dtype == np.float32
    double = [a.astype(np.float64) for a in (X, W, U)]
    value = lambda W: jnp.sin(interop.classifier(double[0], W, double[2])).sum()  # noqa: E731
    # The outputs and the sine are rounded to float32, 6e-8, and terms of some ten samples cancel.
    assert relative(found, jax.jvp(jax.grad(value), (double[1],), (double[1],))[1]) < 1e-5


def test_vmap_of_second_derivatives_is_a_loop(monkeypatch):
    asked = []

    def spy(*args, **options):
        asked.append(1)
        return directional(*args, **options)

    directional = calls.directional
    monkeypatch.setattr(calls, "directional", spy)
    the = case(runs=("W",), lengths=True)
    arrays, rest = arrays_and_options(the)
    W = arrays.pop("W")
    along = np.random.default_rng(4).standard_normal(W.shape)

    def product(W, along):
        value = lambda W: jnp.sin(interop.classifier(W=W, **arrays, **rest)).sum()  # noqa: E731
        return jax.jvp(jax.grad(value), (W,), (along,))[1]

    alone = jax.jit(product)
    cases = (W, along, (0, 0)), (W, along[0], (0, None)), (W[0], along, (None, 0))
    for one, other, axes in cases:
        asked.clear()
        found = jax.block_until_ready(jax.jit(jax.vmap(product, axes))(one, other))
        assert len(asked) == 2  # of the outputs and of the gradient, each for all runs
        for r in range(RUNS):
            expected = alone(one[r] if axes[0] == 0 else one, other[r] if axes[1] == 0 else other)
            assert relative(found[r], expected) < 1e-12  # outputs by another plan


def test_a_third_derivative_is_refused():
    the = case()
    X, W, U = the.X, the.model.W, the.model.U
    value = lambda W: interop.classifier(X, W, U).sum()  # noqa: E731
    twice = lambda W: jax.jvp(jax.grad(value), (W,), (W,))[1].sum()  # noqa: E731
    message = (
        r"^mhfast\.interop\.jax: expected derivatives up to the second, got a third; a formula in "
        r"operations of jax\.numpy has more(\n|$)"  # JAX may add a note
    )
    for third in (jax.grad(twice), lambda W: jax.jvp(twice, (W,), (W,))):
        with pytest.raises(NotImplementedError, match=message):
            third(W)


def test_second_derivatives_by_what_multiplies_them():
    # Factors of cotangents and directions are no third derivative.
    the = case()
    X, W, U = the.X, the.model.W, the.model.U

    def curvature(factor, along):
        value = lambda W: (factor * interop.classifier(X, W, U)).sum()  # noqa: E731
        return (jax.jvp(jax.grad(value), (W,), (along,))[1] * along).sum()

    factor, along = np.linspace(0.5, 1.5, SAMPLES), np.sin(np.arange(W.size)).reshape(W.shape)
    by_factor, by_along = jax.jit(jax.grad(curvature, (0, 1)))(factor, along)
    # The curvature is linear in the factors and quadratic in the direction.
    whole = float(jax.jit(curvature)(factor, along))
    assert float(by_factor @ factor) == pytest.approx(whole, rel=1e-12)
    assert float((by_along * along).sum()) == pytest.approx(2 * whole, rel=1e-12)


def test_an_own_loss_of_jax_beside_the_bridge():
    the = case(mh.Layer, loss="squared", query="given")
    X, y, query = the.X, the.y, the.options["query"]

    def loss(F, y):
        return jnp.log1p((F - y) ** 2)

    @jax.jit
    def with_derivative(F, y):
        values, pull = jax.vjp(lambda F: loss(F, y), F)
        return values, pull(jnp.ones_like(values))[0]

    value, gradient = mh.value_and_grad(the.model, X, y, loss=with_derivative, query=query)

    @jax.jit
    def bridged(W, V):
        outputs = interop.layer(X, W, V, query=query)
        return loss(outputs, y).sum() / SAMPLES

    found, by_jax = jax.value_and_grad(bridged, (0, 1))(the.model.W, the.model.V)
    # A mean over samples in another order of sums.
    assert value == pytest.approx(float(found), rel=1e-13)
    assert relative(by_jax[0], gradient.W) < 1e-13
    assert relative(by_jax[1], gradient.V) < 1e-13
