"""Gradients and normalized steps stay right however far attention saturates.

The judge is extended precision (numpy.longdouble, 64 bits of mantissa and exponents to e±11000 on
x86): there nothing of interest cancels or underflows, up to logit gaps of 5000.
"""

import numpy as np
import pytest
from lists import LOSSES, kind_of_targets, targets

import mhfast as mh

real = np.longdouble
extended = pytest.mark.skipif(
    np.finfo(real).maxexp < 16384, reason="longdouble is not extended precision here"
)


def exact_gradients(X, y, W, U, Z=None):
    """Loss gradients in W and U (logistic, mean), in extended precision and centred."""
    X, y, W, U = (np.asarray(a, real) for a in (X, y, W, U))
    Z = X if Z is None else np.asarray(Z, real)
    S = np.einsum("nqd,hde,nte->nhqt", Z, W, X)
    A = np.exp(S - S.max(axis=-1, keepdims=True))
    A /= A.sum(axis=-1, keepdims=True)
    C = np.einsum("hqd,ntd->nhqt", U, X)
    m = A.argmax(axis=-1)[..., None]
    C_centred = C - np.take_along_axis(C, m, -1)
    D = A * (C_centred - (A * C_centred).sum(-1, keepdims=True))
    np.put_along_axis(D, m, 0, -1)
    np.put_along_axis(D, m, -D.sum(-1, keepdims=True), -1)
    root = np.sqrt(real(len(W)))
    phi = (A * C).sum(axis=(1, 2, 3)) / root
    g = -y / (1 + np.exp(y * phi)) / len(y) / root
    gW = np.einsum("n,nqd,nhqt,nte->hde", g, Z, D, X)
    gU = np.einsum("n,nhqt,nte->hqe", g, A, X)
    return gW, gU


def textbook_gradient(X, y, W, U, Z):
    """The gradient in W as every textbook has it, in the precision of its arguments."""
    S = np.einsum("nqd,hde,nte->nhqt", Z, W, X)
    A = np.exp(S - S.max(axis=-1, keepdims=True))
    A /= A.sum(axis=-1, keepdims=True)
    C = np.einsum("hqd,ntd->nhqt", U, X)
    D = A * (C - (A * C).sum(axis=-1, keepdims=True))
    phi = (A * C).sum(axis=(1, 2, 3)) / np.sqrt(len(W)).astype(X.dtype)
    g = -y / (1 + np.exp(y * phi)) / len(y)
    return np.einsum("n,nqd,nhqt,nte->hde", g.astype(X.dtype), Z, D, X)


def relative(a, b):
    return float(np.abs(np.asarray(a, real) - b).max() / np.abs(b).max())


def cosine(a, b):
    a, b = (np.asarray(x, real).ravel() for x in (a, b))
    a, b = a / np.abs(a).max(), b / np.abs(b).max()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def normalized(g):
    g = g / np.abs(g).max()
    return g / np.sqrt((g**2).sum())


def with_gap(gap, dtype, query):
    """A problem in which every row has logits 0, -gap, -2 gap, ... in some order, exactly.

    Feature 0 of every token is 1, feature 1 its rank, and W picks their product: the logits are
    integers, so that nothing but the softmax and what follows is put to the test.
    """
    rng = np.random.default_rng(11)
    n, T, d, H = 3, 5, 7, 2
    X = rng.standard_normal((n, T, d)).astype(dtype)
    X[:, :, 0] = 1
    X[:, :, 1] = [rng.permutation(T) for _ in range(n)]
    W = np.zeros((H, d, d), dtype)
    W[:, 0, 1] = [-gap, gap]  # the heads prefer opposite ends
    q = T if query is None else 1
    U = (0.2 * rng.standard_normal((H, q, d))).astype(dtype)
    return mh.Classifier(W, U, query), X, np.array([1, -1, 1])


@extended
@pytest.mark.parametrize("query", [None, -2])
@pytest.mark.parametrize(
    ("dtype", "gaps", "tolerance"),
    # A few roundings and the kernels' exp; the loss derivative and sums over few terms add little.
    [(np.float64, range(1, 701, 3), 2e-15), (np.float32, range(1, 81), 1e-6)],
)
def test_gradients_are_accurate_at_every_gap(dtype, gaps, tolerance, query):
    for gap in gaps:
        model, X, y = with_gap(gap, dtype, query)
        _, g = mh.value_and_grad(model, X, y)
        Z = X if query is None else X[:, [query]]
        gW, gU = exact_gradients(X, y, model.W, model.U, Z)
        assert relative(g.W, gW) < tolerance, gap
        assert relative(g.U, gU) < tolerance, gap


@extended
def test_the_textbook_formula_fails_this():
    model, X, y = with_gap(60, np.float64, -2)
    Z = X[:, [-2]]
    gW, _ = exact_gradients(X, y, model.W, model.U, Z)
    assert relative(textbook_gradient(X, y, model.W, model.U, Z), gW) > 0.1


def instance(seed, dtype=np.float64):
    """n = 6 samples of T = 8 Gaussian tokens in d = 10 dimensions, random labels and readout."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((6, 8, 10))
    y = rng.choice([-1, 1], 6)
    u = rng.standard_normal((1, 1, 10))
    return X.astype(dtype), y, (u / np.linalg.norm(u)).astype(dtype)


STEP = mh.NormalizedGradientDescent(0.1)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("query", [0, "external"])
def test_token_order_does_not_change_500_normalized_steps(seed, query):
    X, y, U = instance(seed)
    if query == "external":
        Z = np.random.default_rng(100 + seed).standard_normal((6, 1, 10))
        data, reverse = mh.Dataset(X, y, query=Z), mh.Dataset(X[:, ::-1], y, query=Z)
        models = [mh.Classifier(np.zeros((1, 10, 10)), U)] * 2
    else:
        data, reverse = mh.Dataset(X, y), mh.Dataset(X[:, ::-1], y)
        models = [mh.Classifier(np.zeros((1, 10, 10)), U, query) for query in (0, -1)]
    options = {"steps": 500, "optimizer": STEP, "wrt": "W", "record": {"attention_max": 500}}
    run = mh.train(models[0], data, **options)
    other = mh.train(models[1], reverse, **options)
    assert run.history["attention_max"][-1, 0] > 0.99  # it did saturate
    # The promise of the documentation.
    assert relative(other.model.W, run.model.W) < 1e-12


@pytest.mark.parametrize("by", ["tensor", "head", "all"])
def test_token_order_does_not_change_500_steps_of_all_parameters(by):
    """Self-attention with two heads; the rows of U are reversed with the tokens."""
    X, y, _ = instance(3)
    start = mh.Classifier.gaussian(2, 8, 10, std=0.1, seed=3)
    reverse = mh.Classifier(start.W, start.U[:, ::-1])
    options = {"steps": 500, "optimizer": mh.NormalizedGradientDescent(0.1, by=by)}
    run = mh.train(start, X, y, **options)
    other = mh.train(reverse, X[:, ::-1], y, **options)
    # The promise of the documentation.
    assert relative(other.model.W, run.model.W) < 1e-12
    assert relative(other.model.U[:, ::-1], run.model.U) < 1e-12


def test_sample_order_does_not_change_500_normalized_steps():
    X, y, U = instance(4)
    order = [3, 1, 5, 0, 4, 2]
    model = mh.Classifier(np.zeros((1, 10, 10)), U, 0)
    options = {"steps": 500, "optimizer": STEP, "wrt": "W"}
    run = mh.train(model, X, y, **options)
    other = mh.train(model, X[order], y[order], **options)
    assert relative(other.model.W, run.model.W) < 1e-12


def test_the_textbook_formula_fails_the_promise():
    X, y, U = instance(0)
    ends = []
    for tokens, query in ((X, 0), (X[:, ::-1], -1)):
        W = np.zeros((1, 10, 10))
        for _ in range(500):
            g = textbook_gradient(tokens, y, W, U, tokens[:, [query]])
            W = W - 0.1 * g / np.linalg.norm(g)
        ends.append(W)
    assert relative(ends[1], ends[0]) > 1e-3


@extended
@pytest.mark.parametrize("seed", range(5))
def test_the_direction_of_single_precision_is_the_exact_one(seed):
    X, y, U = instance(seed, np.float32)
    start = mh.Classifier(np.zeros((1, 10, 10), np.float32), U, 0)
    W = mh.train(start, X, y, steps=500, optimizer=STEP, wrt="W").model.W
    # A long step, so that the difference of the parameters shows its direction.
    long = mh.NormalizedGradientDescent(1e3)
    run = mh.train(mh.Classifier(W, U, 0), X, y, steps=1, optimizer=long, wrt="W")
    step = run.model.W.astype(np.float64) - W
    exact, _ = exact_gradients(X, y, W, U, X[:, [0]])
    assert cosine(-step, exact) > 0.999


@extended
@pytest.mark.parametrize("seed", range(3))
def test_single_precision_training_follows_double(seed):
    X, y, U = instance(seed)
    W0 = np.zeros((1, 10, 10))
    options = {"steps": 500, "optimizer": STEP, "wrt": "W"}
    double = mh.train(mh.Classifier(W0, U, 0), X, y, **options).model.W
    single = mh.train(
        mh.Classifier(W0.astype("f4"), U.astype("f4"), 0), X.astype("f4"), y, **options
    ).model.W
    assert cosine(single, double) > 0.999


def moved(model, X, y, **options):
    """One normalized step of length 1 from the model, as the difference of the parameters."""
    run = mh.train(model, X, y, steps=1, **options)
    return run.model.W.astype(real) - model.W, run.model.U.astype(real) - model.U


@extended
@pytest.mark.parametrize("query", [None, -2])
@pytest.mark.parametrize(
    # Rounding of W, of the size of the gap, is what remains: 1000 times the unit of the type.
    ("dtype", "gap", "tolerance"),
    [(np.float64, 760, 1e-12), (np.float64, 2000, 1e-12), (np.float64, 5000, 1e-12),
     (np.float32, 110, 1e-4), (np.float32, 1000, 1e-3)],
)  # fmt: skip
def test_normalized_steps_where_all_other_weights_underflow(dtype, gap, tolerance, query):
    model, X, y = with_gap(gap, dtype, query)
    A = model.attention(X)
    assert np.array_equal(np.sort(A, axis=3)[..., :-1], np.zeros((*A.shape[:3], 4)))
    Z = X if query is None else X[:, [query]]
    gW, gU = exact_gradients(X, y, model.W, model.U, Z)
    dW, dU = moved(model, X, y, optimizer=mh.NormalizedGradientDescent(1.0))
    assert relative(dW, -normalized(gW)) < tolerance
    assert relative(dU, -normalized(gU)) < tolerance
    dW, dU = moved(model, X, y, optimizer=mh.NormalizedGradientDescent(1.0, by="head"))
    for h in range(2):
        assert relative(dW[h], -normalized(gW[h])) < tolerance
        assert relative(dU[h], -normalized(gU[h])) < tolerance


@extended
@pytest.mark.parametrize(
    ("dtype", "margin", "tolerance"),
    # What remains is rounding of U, which is of the size of the margin.
    [(np.float64, 1500, 1e-12), (np.float32, 200, 1e-4)],
)
def test_normalized_steps_where_every_loss_derivative_underflows(dtype, margin, tolerance):
    model, X, _ = with_gap(3, dtype, -2)
    phi = model(X)
    y = np.sign(phi)
    larger = dtype(margin / np.abs(phi).min())
    model = mh.Classifier(model.W, larger * model.U, -2)
    _, g = mh.value_and_grad(model, X, y)
    assert not g.W.any()
    assert not g.U.any()
    gW, gU = exact_gradients(X, y, model.W, model.U, X[:, [-2]])
    dW, dU = moved(model, X, y, optimizer=mh.NormalizedGradientDescent(1.0))
    assert relative(dW, -normalized(gW)) < tolerance
    assert relative(dU, -normalized(gU)) < tolerance
    dW, _ = moved(model, X, y, optimizer=mh.NormalizedGradientDescent(1.0, by="all"))
    together = normalized(np.concatenate([gW.ravel(), gU.ravel()]))
    assert relative(dW.ravel(), -together[: gW.size]) < tolerance


@extended
@pytest.mark.parametrize(
    ("dtype", "margin", "tolerance"), [(np.float64, 1500, 1e-12), (np.float32, 200, 1e-4)]
)
def test_a_normalized_step_of_the_readout_alone(dtype, margin, tolerance):
    """Where no gradient of W asks for the second pass, that of the readout does."""
    model, X, _ = with_gap(3, dtype, -2)
    phi = model(X)
    larger = dtype(margin / np.abs(phi).min())
    model, y = mh.Classifier(model.W, larger * model.U, -2), np.sign(phi)
    _, gU = exact_gradients(X, y, model.W, model.U, X[:, [-2]])
    for by, parts in (("tensor", [...]), ("head", [0, 1])):
        optimizer = mh.NormalizedGradientDescent(1.0, by=by)
        dW, dU = moved(model, X, y, optimizer=optimizer, wrt="U")
        assert not dW.any()
        for part in parts:
            assert relative(dU[part], -normalized(gU[part])) < tolerance


@extended
@pytest.mark.parametrize("by", ["tensor", "head", "all"])
def test_eps_is_compared_with_the_norm_itself(by):
    """Also where the gradient is stored without its largest factors: here W's is about 1e-27."""
    model, X, y = with_gap(60, np.float32, -2)
    gW, _ = exact_gradients(X, y, model.W, model.U, X[:, [-2]])
    sizes = [np.sqrt((part**2).sum()) for part in (gW if by == "head" else [gW, gW])]
    whole, _ = moved(model, X, y, optimizer=mh.NormalizedGradientDescent(1.0, by=by), wrt="W")
    for eps in (1e-3, float(sizes[0]), float(sizes[0]) / 7):
        optimizer = mh.NormalizedGradientDescent(1.0, eps, by)
        part, _ = moved(model, X, y, optimizer=optimizer, wrt="W")
        for h in range(2):
            kept = float(sizes[h] / (sizes[h] + eps))
            # Of the step, a number of float32 is rounded at the size of W.
            assert np.abs(part[h] - kept * whole[h]).max() < 2e-5 * np.abs(whole[h]).max()


def smallest_gap(W, X, query):
    """The least difference of a row's largest logit and its second."""
    logits = np.einsum("ak,hkl,asl->ahs", X[:, query], W, X, dtype=np.float64)
    second, largest = np.moveaxis(np.sort(logits), -1, 0)[-2:]
    return (largest - second).min()


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(mh.Classifier, plan) for plan in ("samples", "hybrid", "rows", "tiles")]
    + [(mh.Layer, "samples"), (mh.Layer, "hybrid")],
)
def test_steps_across_the_threshold_of_underflow_continue_bitwise(kind, plan, use_plan):
    """A step after one whose largest factors were left out begins otherwise than that of a new run.

    In float32 factors are left out where all are below exp(-50), with a derivative of the loss of
    about 1/2 from a gap of 49.3 on.
    """
    use_plan(plan)
    model, X, y = with_gap(54, np.float32, -2)
    options = {
        "optimizer": mh.NormalizedGradientDescent(1.0), "wrt": "W", "record": ("loss", "W"),
    }  # fmt: skip
    data = mh.Dataset(X, -y)
    if kind is mh.Layer:
        model = mh.Layer(model.W, np.swapaxes(model.U, 1, 2), query=-2)
        data = mh.Dataset(X, model(X) + np.float32(1))
        options["loss"] = "squared"
    steps = 11
    whole = mh.train(model, data, steps=steps, **options)
    beyond = [smallest_gap(W, X, -2) > 51 for W in whole.history["W"]]
    assert beyond[0]
    assert not beyond[3]
    assert any(beyond[3:]) == (kind is mh.Classifier)  # which overshoots to the other side
    for k in range(1, steps):
        part = mh.train(model, data, steps=k, **options)
        assert mh.train(part, data, steps=steps - k) == whole


@pytest.mark.parametrize("query", [None, -2])
def test_a_gradient_that_is_exactly_zero_makes_no_step(query):
    """With equal tokens attention cannot matter; rounding must not pass for a direction."""
    rng = np.random.default_rng(6)
    X = np.repeat(rng.standard_normal((5, 1, 7)), 3, axis=1)
    start = mh.Classifier.gaussian(2, 3, 7, std=1.0, seed=6)
    model = mh.Classifier(start.W, start.U[:, : 3 if query is None else 1], query)
    dW, dU = moved(model, X, rng.choice([-1, 1], 5), optimizer=mh.NormalizedGradientDescent(1.0))
    assert not dW.any()
    assert dU.any()


def two_tokens(gap, dtype):
    """Two tokens whose logits differ by the gap, exactly; and the direction between them."""
    rng = np.random.default_rng(5)
    X = rng.standard_normal((1, 2, 5)).astype(dtype)
    X[0, :, 0] = 1
    X[0, :, 1] = [1, 0]
    W = np.zeros((1, 5, 5), dtype)
    W[0, 0, 1] = gap
    return X, W, X[0, 0].astype(float) - X[0, 1]


@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
@pytest.mark.parametrize(
    ("dtype", "gaps", "tolerance"),
    # A few roundings and the kernels' exp. Two features of X are subtracted in float32.
    [(np.float64, range(1, 701, 7), 1e-14), (np.float32, range(1, 81), 1e-5)],
)
def test_gradients_and_products_of_the_hessian_have_closed_forms(kind, dtype, gaps, tolerance):
    """With two tokens the output is a constant plus c σ(s), s the gap, and c = ⟨u, x_0 - x_1⟩."""
    rng = np.random.default_rng(6)
    readout = rng.standard_normal((1, 1, 5) if kind is mh.Classifier else (1, 5, 1)).astype(dtype)
    direction = rng.standard_normal((1, 5, 5)).astype(dtype)
    y = np.ones((1,) if kind is mh.Classifier else (1, 1, 1))
    for gap in gaps:
        X, W, apart = two_tokens(gap, dtype)
        model = kind(W, readout, query=-1)
        _, g = mh.value_and_grad(model, X, y, loss="linear", wrt="W")
        tangent = mh.Gradients(W=direction)
        Hv = mh.hvp(model, X, y, tangent=tangent, loss="linear", wrt="W")
        z = X[0, 1].astype(float)
        loss_derivative = 1 / (2 + 2 * np.cosh(float(gap)))  # σ'(s); σ''(s) = -σ'(s) tanh(s / 2)
        exact = -np.outer(z, apart) * (readout.ravel().astype(float) @ apart) * loss_derivative
        assert relative(g.W[0], exact) < tolerance, gap
        moved = z @ direction[0].astype(float) @ apart
        assert relative(Hv.W[0], -exact * np.tanh(gap / 2) * moved) < tolerance, gap


@pytest.mark.parametrize(
    ("dtype", "gap", "tolerance"),
    [(np.float64, 5000, 1e-12), (np.float32, 1000, 1e-3)],  # as for the classifier above
)
def test_a_normalized_step_of_a_layer_where_weights_underflow(dtype, gap, tolerance):
    X, W, apart = two_tokens(gap, dtype)
    V = np.ones((1, 5, 1), dtype)
    step = mh.NormalizedGradientDescent(1e8)  # so long that W shows its direction
    layer = mh.Layer(W, V, query=-1)
    assert not mh.value_and_grad(layer, X, np.ones((1, 1, 1)), loss="linear", wrt="W")[1].W.any()
    run = mh.train(layer, X, np.ones((1, 1, 1)), steps=1, optimizer=step, loss="linear", wrt="W")
    expected = np.outer(X[0, 1].astype(float), apart) * apart.sum()
    assert relative(run.model.W[0] - W[0], normalized(expected) * 1e8) < tolerance


@pytest.mark.parametrize("loss", LOSSES[mh.Layer], ids=str)
def test_the_norm_and_the_step_where_factors_are_left_out(loss):
    """Of every loss, whose derivatives then come as logarithms: they are those of double precision.

    Logits are integers, and attention in float32 has weights of exp(-60) and less beside 1; the
    outputs of the two heads cancel for no loss.
    """
    model, X, _ = with_gap(60, np.float32, -2)
    V = np.abs(np.swapaxes(model.U, 1, 2))[:, :, :1] + np.float32([[0.1, 0.3, 0.2]])
    model = mh.Layer(model.W, V.astype(np.float32), query=-2)
    wide = mh.Layer(np.float64(model.W), np.float64(V.astype(np.float32)), query=-2)
    X = np.abs(X) / np.float32(4)
    X[:, :, 0] = 1
    X[:, :, 1] = np.argsort(np.argsort(X[:, :, 2], axis=1), axis=1)
    y = targets(loss, (3, 1, 3), np.random.default_rng(7), np.float32, 3)
    if kind_of_targets(loss) in ("reals", "nonnegative"):
        y += np.float32(3)
    options = {"loss": loss, "wrt": "W"}
    wide_y = y.astype(np.float64) if y.dtype == np.float32 else y
    _, g = mh.value_and_grad(wide, np.float64(X), wide_y, **options)
    run = mh.train(
        model, X, y, steps=1, optimizer=mh.NormalizedGradientDescent(64.0), record="grad_norm",
        **options,
    )  # fmt: skip
    assert 0 < np.abs(g.W).max() < 1e-20
    # A few roundings of float32, of logarithms up to 180.
    assert run.history["grad_norm"][0] == pytest.approx(np.linalg.norm(g.W), rel=1e-4)
    step = np.float64(run.model.W) - model.W
    assert np.abs(step + 64 * g.W / np.linalg.norm(g.W)).max() < 1e-3
