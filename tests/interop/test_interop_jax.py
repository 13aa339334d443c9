"""`mhfast.interop.jax`: against the formula in jax.numpy, and under the transformations of JAX."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from instances import DIM, HEADS, RUNS, SAMPLES, TOKENS, TOLERANCE, case, relative

import mhfast as mh

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.peers
jnp = jax.numpy

from jax_formula import arrays_and_options, of_jax, textbook  # noqa: E402  (needs jax)

from mhfast.interop import jax as interop  # noqa: E402
from mhfast.interop.jax import calls  # noqa: E402

KINDS = [mh.Classifier, mh.Layer]
CASES = [
    {},
    {"causal": True, "scale": 0.7},
    {"lengths": True},
    {"query": -2, "lengths": True},
    {"query": 1, "causal": True},
    {"query": "given", "lengths": True},
    {"query": "given", "causal": True},
    {"prompt": True, "lengths": True},
]


@pytest.fixture(autouse=True)
def _float64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)  # in the threads of XLA too, unlike the context
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize(
    ("kind", "options"), [(mh.Classifier, o) for o in CASES] + [(mh.Layer, o) for o in CASES[1:4]]
)
def test_outputs_and_gradients_are_those_of_the_formula(kind, options):
    the = case(kind, **options)
    arrays, rest = arrays_and_options(the)
    outputs = of_jax(kind)(**arrays, **rest)
    assert isinstance(outputs, jax.Array)
    assert np.array_equal(outputs, the.model(the.X, **the.seen()))

    def ours(arrays):
        return jnp.sin(of_jax(kind)(**arrays, **rest)).sum()

    def theirs(arrays):
        return jnp.sin(textbook(arrays, **rest)).sum()

    both = jax.jit(lambda arrays: [jax.value_and_grad(f)(arrays) for f in (ours, theirs)])
    (value, gradients), (expected, by_formula) = both(arrays)
    # Some dozen terms of order 1 in another order.
    assert value == pytest.approx(float(expected), rel=1e-12)
    assert gradients.keys() == arrays.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == np.float64
        assert relative(gradient, by_formula[name]) < 1e-12


def test_only_what_is_differentiated_by_is_computed(monkeypatch):
    asked = []

    def spy(*args, wrt, **options):
        asked.append(wrt)
        return mh.backward(*args, wrt=wrt, **options)

    monkeypatch.setattr(calls, "backward", spy)
    arrays, rest = arrays_and_options(case(query="given", lengths=True))
    lengths = jnp.asarray(rest.pop("lengths"))

    def value(W, U, lengths):
        return interop.classifier(**{**arrays, "W": W, "U": U}, **rest, lengths=lengths).sum()

    for order, names in ((0, ("W",)), (1, ("U",)), ((0, 1), ("U", "W"))):
        for derivative in (jax.grad(value, order), jax.jit(jax.grad(value, order))):
            jax.block_until_ready(derivative(arrays["W"], arrays["U"], lengths))
            assert tuple(sorted(asked.pop())) == names
    assert not asked


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_may_be_traced_and_are_not_differentiated(kind):
    the = case(kind, lengths=True)
    arrays, rest = arrays_and_options(the)
    lengths = rest.pop("lengths")

    @jax.jit
    def pulled(arrays, lengths):
        outputs, pull = jax.vjp(lambda a, k: of_jax(kind)(**a, lengths=k, **rest), arrays, lengths)
        return pull(jnp.cos(outputs))

    gradients, by_lengths = pulled(arrays, lengths)
    assert by_lengths.dtype == jax.dtypes.float0
    cotangent = np.cos(the.model(the.X, lengths=lengths))
    expected = mh.backward(the.model, the.X, cotangent, wrt=tuple(arrays), lengths=lengths)
    for name, gradient in gradients.items():
        # The cosine may be rounded otherwise.
        assert relative(gradient, getattr(expected, name)) < 1e-13


@pytest.mark.parametrize("mapped", [("W",), ("X", "U"), ("lengths",), ("query", "W")])
def test_vmap_equals_a_loop_and_is_one_call(mapped, monkeypatch):
    seen = []

    def spy(*args, **options):
        seen.append(options)
        return mh.backward(*args, **options)

    monkeypatch.setattr(calls, "backward", spy)
    query = "given" if "query" in mapped else None
    the = case(query=query, lengths="lengths" in mapped, runs=mapped)
    arrays, rest = arrays_and_options(the)
    arrays["lengths"] = rest.pop("lengths")
    axes = ({name: 0 if name in mapped else None for name in arrays},)

    def value(arrays):
        return jnp.sin(interop.classifier(**arrays, **rest)).sum()

    derivative = jax.jit(jax.value_and_grad(value, allow_int=True))
    values, gradients = jax.vmap(derivative, in_axes=axes)(arrays)
    total = jax.jit(jax.grad(lambda a: jax.vmap(value, axes)(a).sum(), allow_int=True))(arrays)
    jax.block_until_ready((gradients, total))
    assert len(seen) == 2
    del gradients["lengths"]
    for r in range(RUNS):
        alone = {name: a[r] if name in mapped else a for name, a in arrays.items()}
        expected, by_run = derivative(alone)
        assert values[r] == pytest.approx(float(expected), rel=1e-13)
        for name in gradients:
            # The same numbers by another plan.
            assert relative(gradients[name][r], by_run[name]) < 1e-12
            if name in mapped:
                assert relative(total[name][r], by_run[name]) < 1e-12
    for name in gradients.keys() - set(mapped):
        assert total[name].shape == np.shape(arrays[name])
        assert relative(total[name], gradients[name].sum(0)) < 1e-12


def test_nested_vmap_is_every_pair():
    the = case(mh.Layer, runs=("W",))
    arrays, rest = arrays_and_options(the)
    Xs = np.stack([the.X, -the.X, the.X / 2, 2 * the.X])
    del arrays["X"], arrays["W"]

    def value(W, X):
        return jnp.sin(interop.layer(X, W, **arrays, **rest)).sum()

    by_W = jax.jit(jax.grad(value))
    pairs = jax.vmap(jax.vmap(by_W, in_axes=(None, 0)), in_axes=(0, None))(the.model.W, Xs)
    assert pairs.shape == (RUNS, 4, HEADS, DIM, DIM)
    for r in range(RUNS):
        for s in range(4):
            assert relative(pairs[r, s], by_W(the.model.W[r], Xs[s])) < 1e-12  # another plan
    one = jax.vmap(by_W, in_axes=(0, None))(the.model.W[:1], Xs[0])
    assert np.array_equal(one[0], by_W(the.model.W[0], Xs[0]))
    assert jax.vmap(by_W, in_axes=(0, None))(the.model.W[:0], Xs[0]).shape == (0, HEADS, DIM, DIM)


def test_descent_in_a_scan_equals_training():
    the = case(lengths=True)
    arrays, rest = arrays_and_options(the)
    X, steps, lr = arrays.pop("X"), 20, 0.3

    def loss(parameters):
        return jax.nn.softplus(-the.y * interop.classifier(X, **parameters, **rest)).mean()

    def step(parameters, _):
        value, g = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda a, b: a - lr * b, parameters, g), value

    descent = jax.jit(lambda start: jax.lax.scan(step, start, length=steps))
    parameters, losses = descent(jax.tree.map(jnp.asarray, arrays))
    optimizer = mh.GradientDescent(lr=lr)
    data = mh.Dataset(X, the.y, lengths=rest["lengths"])
    run = mh.train(the.model, data, steps=steps, optimizer=optimizer)
    # Rounding of twenty steps that contract.
    k = run.steps["loss"][:-1]
    assert relative(losses[k], run.history["loss"][:-1]) < 1e-13
    assert relative(parameters["W"], run.model.W) < 1e-13
    assert relative(parameters["U"], run.model.U) < 1e-13


def test_rematerialization_gives_the_same_gradient():
    arrays, rest = arrays_and_options(case(mh.Layer))
    value = lambda arrays: jnp.sin(interop.layer(**arrays, **rest)).sum()  # noqa: E731
    expected = jax.grad(value)(arrays)
    for name, gradient in jax.grad(jax.checkpoint(value))(arrays).items():
        assert np.array_equal(gradient, expected[name])


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_float32(kind, double):
    the = case(kind, dtype=np.float32)
    arrays, rest = arrays_and_options(the)
    with jax.enable_x64(double):
        outputs, pull = jax.vjp(jax.jit(lambda arrays: of_jax(kind)(**arrays, **rest)), arrays)
        (gradients,) = pull(jnp.ones_like(outputs))
    assert outputs.dtype == np.float32
    cotangent = np.ones(outputs.shape, np.float32)
    expected = mh.reference.backward(the.model, the.X, cotangent, wrt=tuple(arrays))
    for name, gradient in gradients.items():
        assert gradient.dtype == np.float32
        assert relative(gradient, expected[name]) < TOLERANCE[the.model.dtype]


def test_threads_do_not_matter():
    arrays, rest = arrays_and_options(case())
    one, two = (interop.classifier(**arrays, **rest, num_threads=k) for k in (1, 2))
    assert np.array_equal(one, two)


X, W, U = np.zeros((SAMPLES, TOKENS, DIM)), np.zeros((HEADS, DIM, DIM)), np.zeros((7, TOKENS, DIM))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"X": X[0]}, ValueError,
            "X: expected shape (n, T, d), got (3, 8); "
            "X.reshape(n, T, d) has the tokens of rows of length T d",
        ),
        ({"W": W[None]}, ValueError, "W: expected shape (H, d, d), got (1, 7, 8, 8)"),
        ({"X": X[:, :2]}, ValueError, "X: expected shape (n, T, d) = (n, 3, 8), got (6, 2, 8)"),
        ({"U": U[1:]}, ValueError, "U: expected shape (H, q, d) = (7, q, 8), got (6, 3, 8)"),
        ({"query": 1}, ValueError, "U: expected shape (H, q, d) = (7, 1, 8), got (7, 3, 8)"),
        ({"query": 3, "U": U[:, :1]}, ValueError, "query: expected a token in [-3, 3), got 3"),
        (
            {"query": X[1:]}, ValueError,
            "query: expected shape (n, q, d) = (6, 3, 8), got (5, 3, 8)",
        ),
        (
            {"query": X, "prompt": X[0]}, ValueError,
            "query: expected None with a prompt, got both",
        ),
        ({"lengths": [1, 2]}, ValueError, "lengths: expected shape (n,) = (6,), got (2,)"),
        ({"lengths": X[:, 0, 0]}, TypeError, "lengths: expected integers, got dtype float64"),
        ({"scale": np.inf}, ValueError, "scale: expected a finite number, got inf"),
        ({"num_threads": 0}, ValueError, "num_threads: expected an integer of at least 1, got 0"),
        (
            {"W": W.astype(int)}, TypeError,
            "W: expected dtype float32 or float64, got int64; W.astype(np.float64) converts it",
        ),
        (
            {"U": U.astype(np.float32)}, TypeError,
            "U: expected dtype float64, that of W, got float32; U.astype(np.float64) converts it",
        ),
        (
            {"X": jnp.zeros(X.shape, jnp.bfloat16)}, TypeError,
            "X: expected dtype float64, that of the model, got bfloat16",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_while_tracing(changes, kind, message):
    given = {"X": X, "W": W, "U": U, **changes}
    arrays = {name: given.pop(name) for name in ("X", "W", "U")}
    for call in (interop.classifier, lambda **a: jax.eval_shape(interop.classifier, **a)):
        if call is not interop.classifier and given:
            continue  # eval_shape would trace what is static
        with pytest.raises(kind) as caught:
            call(**arrays, **given)
        assert str(caught.value) == message


def test_a_static_argument_may_not_be_traced():
    with pytest.raises(TypeError, match=r"^scale: expected a real number, got "):
        jax.grad(lambda scale: interop.classifier(X, W, U, scale=scale).sum())(1.0)
    with pytest.raises(TypeError, match=r"^query: expected an integer or an array "):
        jax.jit(lambda query: interop.classifier(X, W, U[:, :1], query=query))(1)


def test_lengths_out_of_range_are_an_error_of_the_computation():
    # What JAX makes of an error on the host depends on how it runs.
    errors = (ValueError, jax.errors.JaxRuntimeError)
    with pytest.raises(errors, match=r"lengths: expected integers in \[0, 3\]"):
        jax.block_until_ready(interop.classifier(X, W, U, lengths=np.full(SAMPLES, 4)))


def test_with_an_old_jax_the_import_tells_what_to_install(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 4, 38))
    monkeypatch.setattr(jax, "__version__", "0.4.38")
    monkeypatch.delitem(sys.modules, "mhfast.interop.jax")
    message = r"^mhfast\.interop\.jax needs jax 0\.6\.2 or later, got 0\.4\.38$"
    with pytest.raises(ImportError, match=message):
        importlib.import_module("mhfast.interop.jax")


def test_without_jax_the_import_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "mhfast.interop.jax")
    with pytest.raises(ImportError, match=r"^mhfast\.interop\.jax needs jax: pip install jax$"):
        importlib.import_module("mhfast.interop.jax")
