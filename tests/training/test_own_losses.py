"""A loss that is a function: the same numbers as the loss that it computes, in every plan."""

import ctypes
import pickle

import numpy as np
import pytest

import mhfast as mh

n, T, d, H, p = 23, 5, 6, 3, 4
OPTIMIZERS = [mh.GradientDescent(0.1), mh.NormalizedGradientDescent(0.05), mh.PolyakStep()]


def logistic(F, y):
    m = y * F
    return np.logaddexp(0, -m), -y / (1 + np.exp(m))


def squared(F, y):
    return (F - y) ** 2, 2 * (F - y)


def drawn(kind, dtype=np.float64, runs=None, tokens=T):
    rng = np.random.default_rng(2)

    def new(*shape):
        return rng.standard_normal(shape).astype(dtype)

    lead = () if runs is None else (runs,)
    W = new(*lead, H, d, d) / d
    if kind is mh.Classifier:
        model, y = mh.Classifier(W, new(H, tokens, d)), rng.choice([-1, 1], n).astype(dtype)
    else:
        model, y = mh.Layer(W, new(H, d, p) / 2), new(n, tokens, p)
    weight = rng.integers(0, 3, n).astype(dtype)
    return model, mh.Dataset(new(n, tokens, d), y, weight=weight)


KINDS = [(mh.Classifier, logistic, "logistic"), (mh.Layer, squared, "squared")]
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}  # of some steps; outputs come in the dtype


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("plan", ["samples", "hybrid", "rows", "tiles"])
@pytest.mark.parametrize(("kind", "own", "name"), KINDS)
def test_the_numbers_are_those_of_the_loss(kind, own, name, plan, dtype, use_plan):
    if kind is mh.Classifier or plan in ("samples", "hybrid", "rows"):
        use_plan(plan)
    model, data = drawn(kind, dtype)
    value, g = mh.value_and_grad(model, data, loss=own)
    expected, gradients = mh.value_and_grad(model, data, loss=name)
    tolerance = TOLERANCE[dtype]
    assert value == pytest.approx(expected, rel=tolerance)
    for parameter in model.parameters:
        a, b = getattr(g, parameter), getattr(gradients, parameter)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
    record = ("loss", "accuracy", "margin", "grad_norm", "test_loss")
    for optimizer in OPTIMIZERS:
        options = {"steps": 6, "optimizer": optimizer, "record": record, "test": data}
        run = mh.train(model, data, loss=own, **options)
        same = mh.train(model, data, loss=name, **options)
        for quantity in record:
            a, b = run.history[quantity], same.history[quantity]
            np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "own", "name"), KINDS)
def test_gradients_below_all_numbers_have_their_direction(kind, own, name):
    """Attention so saturated that the norm of the gradient by W is zero: steps are normalized."""
    model, data = drawn(kind)
    model = model.replace(W=1e5 * model.W)
    options = {"steps": 3, "optimizer": mh.NormalizedGradientDescent(0.05), "wrt": "W"}
    run = mh.train(model, data, loss=own, record="grad_norm", **options)
    assert not run.history["grad_norm"].any()
    moved = run.model.W - model.W
    assert np.abs(moved).max() > 0.01
    expected = mh.train(model, data, loss=name, **options).model.W - model.W
    # Of differences of numbers of 1e5.
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_blocks_change_no_bit(kind, dtype):
    """With as many chunks as a loss by name has, the derivatives and so all sums are the same.

    Weights of a chunk exceed `kOwnLossBytes` in every instruction set, so that a chunk has several
    blocks.
    """
    samples, heads, tokens, dim, outputs = 2200, 28, 10, 12, 3
    rng = np.random.default_rng(4)
    W = rng.standard_normal((heads, dim, dim)).astype(dtype) / dim
    X = rng.standard_normal((samples, tokens, dim)).astype(dtype)
    if kind is mh.Classifier:
        model = mh.Classifier(W, rng.standard_normal((heads, tokens, dim)).astype(dtype))
        y = rng.standard_normal(samples).astype(dtype)
    else:
        model = mh.Layer(W, rng.standard_normal((heads, dim, outputs)).astype(dtype))
        y = rng.standard_normal((samples, tokens, outputs)).astype(dtype)
    calls = []

    def correlation(F, y):
        calls.append(F.shape)
        return -y * F, -y

    chunks = mh.explain(model, X.shape)["chunks"]
    named, g = mh.value_and_grad(model, X, y, loss="correlation", num_threads=1)
    for threads in (1, 2, 4):
        calls.clear()
        value, own = mh.value_and_grad(model, X, y, loss=correlation, num_threads=threads)
        assert len(calls) > chunks
        assert sum(rows for rows, *_ in calls) == samples * (1 if kind is mh.Classifier else tokens)
        assert value == pytest.approx(named, rel=1e-12 if dtype == np.float64 else 1e-4)
        for name in model.parameters:
            np.testing.assert_array_equal(getattr(own, name), getattr(g, name))


@pytest.mark.parametrize(("kind", "own", "name"), KINDS)
def test_other_row_maps(kind, own, name):
    model, data = drawn(kind)
    model = model.replace(attention="sigmoid")
    value, g = mh.value_and_grad(model, data, loss=own)
    expected, gradients = mh.value_and_grad(model, data, loss=name)
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(g.W, gradients.W, rtol=0, atol=1e-12 * np.abs(g.W).max())


def test_batches_and_resuming():
    model, data = drawn(mh.Classifier)
    options = {"batch": 5, "order": "shuffle", "seed": 3, "optimizer": mh.Adam(0.01)}
    run = mh.train(model, data, steps=9, loss=logistic, record={"loss": 4}, **options)
    same = mh.train(model, data, steps=9, loss="logistic", record={"loss": 4}, **options)
    np.testing.assert_allclose(run.history["loss"], same.history["loss"], rtol=1e-12)
    part = mh.train(model, data, steps=4, loss=logistic, record={"loss": 4}, **options)
    assert mh.train(part, data, steps=5).model == run.model


def test_lengths_and_values_that_are_not_finite():
    model, data = drawn(mh.Layer)
    lengths = np.arange(n) % (T + 1)
    padded = mh.Dataset(data.X, data.y, lengths=lengths, weight=data.weight)
    value, g = mh.value_and_grad(model, padded, loss=squared)
    expected, gradients = mh.value_and_grad(model, padded, loss="squared")
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(g.V, gradients.V, rtol=0, atol=1e-12 * np.abs(g.V).max())

    def diverging(F, y):
        value, slope = squared(F, y)
        return np.where(value > 0, np.nan, value), slope

    with pytest.warns(RuntimeWarning, match="the function for the loss returned such values"):
        run = mh.train(model, data, steps=4, loss=diverging, optimizer=mh.GradientDescent(0.1))
    assert run.reason == "nonfinite"
    assert run.step == 0


def test_a_failure_beside_other_runs():
    """Of runs side by side each keeps what it had recorded."""
    models, data = drawn(mh.Layer, runs=3)
    calls = []

    def failing(F, y):
        calls.append(len(F))
        if len(calls) == 8:
            raise OSError("gone")
        return squared(F, y)

    options = {"steps": 9, "optimizer": mh.GradientDescent(0.01), "num_threads": 1}
    with pytest.raises(OSError, match="gone") as caught:
        mh.train(models, data, loss=failing, **options)
    run = caught.value.run
    same = mh.train(models, data, loss="squared", **options)
    losses = run.history["loss"]
    assert 0 < losses.shape[1] <= 4
    # At least one run was recorded up to the last row; the others repeat theirs.
    assert np.isclose(losses, same.history["loss"][:, : losses.shape[1]], rtol=1e-12).any(0).all()


def test_runs_side_by_side_and_threads_and_resuming():
    models, data = drawn(mh.Classifier, runs=3)
    options = {"optimizer": mh.Momentum(0.1), "loss": logistic, "record": ("loss",)}
    runs = mh.train(models, data, steps=5, num_threads=1, **options)
    for threads in (2, 4):
        again = mh.train(models, data, steps=5, num_threads=threads, **options)
        assert again.model == runs.model
    for r in range(3):
        assert mh.train(models[r], data, steps=5, **options).model == runs[r].model
    part = mh.train(models, data, steps=2, **options)
    assert mh.train(part, data, steps=3).model == runs.model


def test_a_saved_run_asks_for_the_function(tmp_path):
    model, data = drawn(mh.Classifier)
    run = mh.train(model, data, steps=2, loss=logistic, optimizer=mh.GradientDescent(0.1))
    run.save(tmp_path / "run")
    whole = mh.train(run, data, steps=2)
    for kept in (mh.Run.load(tmp_path / "run"), pickle.loads(pickle.dumps(run))):
        with pytest.raises(ValueError, match="loss: the function 'logistic' is not kept"):
            mh.train(kept, data, steps=2)
        assert mh.train(kept, data, steps=2, loss=logistic).model == whole.model


def test_an_exception_ends_training_with_what_was_recorded():
    model, data = drawn(mh.Classifier)
    calls = []

    def failing(F, y):
        calls.append(F)
        if len(calls) == 4:
            raise OSError("the file is gone")
        return logistic(F, y)

    with pytest.raises(OSError, match="the file is gone") as caught:
        mh.train(model, data, steps=9, loss=failing, optimizer=mh.GradientDescent(0.1))
    run = caught.value.run
    assert run.step == 3
    np.testing.assert_array_equal(
        run.history["loss"],
        mh.train(model, data, steps=3, loss=logistic, optimizer=mh.GradientDescent(0.1)).history[
            "loss"
        ][:3],
    )
    calls[:] = [None] * 3
    with pytest.raises(OSError, match="gone"):
        mh.value_and_grad(model, data, loss=failing)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda F, _: F, TypeError, r"loss: .* return \(values, derivatives\).*, got ndarray"),
        (lambda F, _: (F, F[1:]), ValueError,
         r"loss: expected derivatives of the shape of the outputs, \(23,\), .* got \(22,\)"),
        (lambda F, _: (F.sum(), F), ValueError, r"loss: expected values of the shape .* got \(\)"),
        (lambda F, _: (F > 0, F), ValueError, "loss: expected values .* got .* of dtype bool"),
        (lambda F, _: (F,), TypeError, r"loss: .* return \(values, .* got a tuple of 1"),
    ],
    ids=["one array", "too few", "a sum", "truth values", "one of two"],
)  # fmt: skip
def test_wrong_results(result, error, message):
    model, data = drawn(mh.Classifier)
    with pytest.raises(error, match=message):
        mh.value_and_grad(model, data, loss=result)
    with pytest.raises(error, match=message) as caught:
        mh.train(model, data, steps=2, loss=result, optimizer=mh.GradientDescent(0.1))
    assert caught.value.run.step == 0


def with_curvature(F, y):
    value, slope = logistic(F, y)
    return value, slope, -slope * (y + slope)


def test_inputs_and_hessians():
    model, data = drawn(mh.Classifier)
    wrt = ("W", "U", "X")
    value, g = mh.value_and_grad(model, data, loss=logistic, wrt=wrt)
    expected, gradients = mh.value_and_grad(model, data, wrt=wrt)
    assert value == pytest.approx(expected, rel=1e-12)
    product = mh.hvp(model, data, tangent=model, loss=with_curvature)
    of_name = mh.hvp(model, data, tangent=model)
    pairs = [(g, gradients, name) for name in wrt] + [(product, of_name, name) for name in "WU"]
    for own, named, name in pairs:
        a, b = getattr(own, name), getattr(named, name)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())
    layer, rows = drawn(mh.Layer)
    own = mh.hvp(layer, rows, tangent=layer, loss=lambda F, y: (*squared(F, y), 0 * F + 2))
    named = mh.hvp(layer, rows, tangent=layer, loss="squared")
    np.testing.assert_allclose(own.V, named.V, rtol=0, atol=1e-12 * np.abs(named.V).max())
    own, named = (
        mh.value_and_grad(layer, rows, loss=loss, wrt="X")[1].X for loss in (squared, "squared")
    )
    np.testing.assert_allclose(own, named, rtol=0, atol=1e-12 * np.abs(named).max())


def test_what_a_function_cannot_do():
    model, data = drawn(mh.Classifier)
    with pytest.raises(ValueError, match=r"loss: expected the function to return .* second deriv"):
        mh.hvp(model, data, tangent=model, loss=logistic)
    run = mh.train(model, data, steps=1, loss=logistic, optimizer=mh.GradientDescent(0.1))
    with pytest.raises(ValueError, match="run: expected training on the logistic loss"):
        mh.theory.certify(run, data)


POINTER = ctypes.POINTER(ctypes.c_double)
SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_ssize_t, POINTER, POINTER, POINTER, POINTER, ctypes.c_void_p
)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_functions_of_ctypes_and_scipy(dtype):
    from scipy import LowLevelCallable

    @SIGNATURE
    def scaled(count, outputs, targets, values, derivatives, user_data):
        factor = 1.0 if user_data is None else ctypes.cast(user_data, POINTER)[0]
        F, y, value, slope = (
            np.ctypeslib.as_array(a, (count,)) for a in (outputs, targets, values, derivatives)
        )
        value[:], slope[:] = (factor * part for part in logistic(F, y))

    model, data = drawn(mh.Classifier, dtype)
    plain, g = mh.value_and_grad(model, data, loss="logistic")
    twice = ctypes.c_double(2.0)
    user_data = ctypes.cast(ctypes.pointer(twice), ctypes.c_void_p)
    for loss, factor in ((scaled, 1.0), (LowLevelCallable(scaled, user_data), 2.0)):
        value, gradient = mh.value_and_grad(model, data, loss=loss)
        assert value == pytest.approx(factor * plain, rel=TOLERANCE[dtype])
        scale = np.abs(g.W).max()
        np.testing.assert_allclose(
            gradient.W, factor * g.W, rtol=0, atol=factor * TOLERANCE[dtype] * scale
        )
    with pytest.raises(TypeError, match="loss: expected a compiled function"):
        mh.value_and_grad(model, data, loss=ctypes.CFUNCTYPE(None, ctypes.c_int)(print))


@pytest.mark.peers
def test_functions_of_numba():
    numba = pytest.importorskip("numba", reason="pip install numba")
    pointer = numba.types.CPointer(numba.float64)

    @numba.cfunc(numba.void(numba.intp, pointer, pointer, pointer, pointer, numba.types.voidptr))
    def compiled(count, outputs, targets, values, derivatives, user_data):  # noqa: ARG001
        for i in range(count):
            m = targets[i] * outputs[i]
            values[i] = np.log1p(np.exp(-m))
            derivatives[i] = -targets[i] / (1 + np.exp(m))

    model, data = drawn(mh.Classifier)
    options = {"steps": 5, "optimizer": mh.GradientDescent(0.2)}
    run = mh.train(model, data, loss=compiled, **options)
    same = mh.train(model, data, loss="logistic", **options)
    np.testing.assert_allclose(run.history["loss"], same.history["loss"], rtol=1e-12)


@pytest.mark.peers
def test_functions_of_jax():
    jax = pytest.importorskip("jax", reason="pip install jax")
    # In float32, the default of JAX.
    loss = jax.jit(lambda F, y: (jax.nn.softplus(-y * F), -y * jax.nn.sigmoid(-y * F)))
    model, data = drawn(mh.Classifier, np.float32)
    value, _ = mh.value_and_grad(model, data, loss=loss)
    assert value == pytest.approx(mh.value_and_grad(model, data)[0], rel=1e-5)


def test_functions_do_not_see_later_changes_of_what_they_got():
    """The arrays are the function's own, which may keep them and write to them."""
    model, data = drawn(mh.Layer)
    kept = []

    def keeping(F, y):
        kept.append(F)
        result = squared(F.copy(), y)
        F[:] = 0
        y[:] = np.nan
        return result

    run = mh.train(model, data, steps=2, loss=keeping, optimizer=mh.GradientDescent(0.1))
    same = mh.train(model, data, steps=2, loss="squared", optimizer=mh.GradientDescent(0.1))
    np.testing.assert_allclose(run.history["loss"], same.history["loss"], rtol=1e-12)
    assert len({id(F) for F in kept}) == len(kept)
