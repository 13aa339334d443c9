"""Models whose W, or whose V, is the identity of every head: those of a stored identity."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from instances import DIM, HEADS, ROWS, RUNS, SAMPLES, TOKENS, TOLERANCE, case, relative
from side_by_side import same_run
from trainings import OPTIMIZERS, PLANS

import mhfast as mh
from mhfast import _core

CASES = [
    (mh.Classifier, {"identities": "W"}),
    (mh.Classifier, {"identities": "W", "query": -1, "scale": 0.7}),
    (mh.Classifier, {"identities": "W", "query": "given", "lengths": True, "weight": "samples"}),
    (mh.Classifier, {"identities": "W", "prompt": True, "scale": -0.4}),
    (mh.Classifier, {"identities": "W", "causal": True, "attention": "softmax1"}),
    (mh.Layer, {"identities": "W"}),
    (mh.Layer, {"identities": "W", "prompt": True, "scale": 0.7, "attention": "sigmoid"}),
    (mh.Layer, {"identities": "V", "loss": "squared", "lengths": True, "weight": "rows"}),
    (mh.Layer, {"identities": "V", "loss": "cross_entropy", "query": "given", "scale": 0.7}),
    (mh.Layer, {"identities": "V", "factors": "low rank", "causal": True}),
    (mh.Layer, {"identities": "V", "attention": "relu", "loss": "squared", "query": -1}),
    (mh.Layer, {"identities": "V", "prompt": True, "loss": "squared"}),
    (mh.Layer, {"identities": "WV", "loss": "squared", "lengths": True, "scale": 0.7}),
    (mh.Layer, {"identities": "WV", "loss": "cross_entropy", "query": "given"}),
    (mh.Layer, {"identities": "WV", "prompt": True, "loss": "squared", "scale": 1.3}),
    (mh.Layer, {"identities": "WV", "query": "own", "loss": "squared", "scale": -0.6}),
]
TRAINED = [
    (kind, options)
    for kind, options in CASES
    if options["identities"] != "WV" or "prompt" in options
]
CUBE = np.ones((3, 3, 3))
OF_ALL = pytest.mark.parametrize(("kind", "options"), CASES)
OF_TRAINED = pytest.mark.parametrize(("kind", "options"), TRAINED)


@pytest.fixture(autouse=True)
def chosen_plan():
    yield
    _core.force_plan("auto")


def stored(model, dtype=np.float64):
    """The same model with its identities as arrays."""
    identity = np.broadcast_to(np.eye(DIM, dtype=dtype), (model.heads, DIM, DIM))
    changes = {} if model.W is not None else {"W": identity}
    if isinstance(model, mh.Layer) and model.V is None:
        changes["V"] = identity
    assert changes
    return model.replace(**changes)


def reals(model, seed=3):
    """A direction with an array for each parameter."""
    rng = np.random.default_rng(seed)
    parts = {n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in model.parameters.items()}
    return mh.Gradients(**parts)


def close(a, b, dtype, text=None):
    # Products with ones and zeros do not round; sums may run in another order.
    assert np.abs(a - b).max() <= TOLERANCE[np.dtype(dtype)] * max(np.abs(b).max(), 1), text


@OF_ALL
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_all_that_a_stored_identity_gives(dtype, kind, options):
    for plan in PLANS:
        _core.force_plan(plan)
        the = case(kind, dtype=dtype, **options)
        other = the._replace(model=stored(the.model, dtype))
        for action in ("__call__", "attention"):
            got, want = (getattr(one.model, action)(one.X, **one.seen()) for one in (the, other))
            close(got, want, dtype, (plan, action))
        names = the.names()
        assert not {"W", "V"} & set(options["identities"]) & set(names)
        value, g = the.value_and_grad(wrt=names)
        expected, h = other.value_and_grad(wrt=names)
        assert abs(value - expected) <= TOLERANCE[np.dtype(dtype)] * max(abs(expected), 1)
        for name in names:
            close(getattr(g, name), getattr(h, name), dtype, (plan, name))
        if not the.model.parameters:
            continue
        direction = reals(the.model)
        product, full = (
            mh.hvp(one.model, one.X, one.y, tangent=direction, wrt=tuple(the.model.parameters),
                   **one.options)
            for one in (the, other)
        )  # fmt: skip
        for name in the.model.parameters:
            close(getattr(product, name), getattr(full, name), dtype, (plan, name))


@pytest.mark.parametrize(("kind", "options"), [c for c in CASES if c[1]["identities"] == "W"])
def test_heads_that_attend_alike_are_one_head(kind, options):
    the = case(kind, **options)
    (name,) = {"U", "V"} & set(the.model.parameters)
    readout = the.model.parameters[name]
    factor = HEADS**-0.5 if name == "U" else 1.0
    one = the._replace(model=the.model.replace(**{name: factor * readout.sum(0, keepdims=True)}))
    value, g = the.value_and_grad(wrt=the.names())
    expected, h = one.value_and_grad(wrt=the.names())
    assert value == pytest.approx(expected, rel=1e-14)
    for other in the.names():
        got, want = getattr(g, other), getattr(h, other)
        close(got, np.repeat(factor * want, HEADS, 0) if other == name else want, float, other)
    assert (getattr(g, name) == getattr(g, name)[:1]).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_readouts_whose_sum_is_out_of_range(sign):
    rng = np.random.default_rng(1)
    U = np.array([1.0, 0.9, sign * 0.8])[:, None, None] * rng.uniform(1.0, 1.7, (3, 4, 5)) * 1e308
    X = 1e-9 * rng.standard_normal((6, 4, 5))
    ordinary = mh.Classifier(None, np.ldexp(U, -1000))(X)  # X alone decides the weights
    np.testing.assert_allclose(np.ldexp(mh.Classifier(None, U)(X), -1000), ordinary, rtol=1e-12)


@OF_ALL
def test_the_reference_agrees(kind, options):
    the = case(kind, **options)
    for action in ("outputs", "attention"):
        got = (the.model if action == "outputs" else the.model.attention)(the.X, **the.seen())
        close(got, getattr(mh.reference, action)(the.model, the.X, **the.seen()), float)
    value, g = the.value_and_grad(wrt=the.names())
    expected, h = mh.reference.value_and_grad(
        the.model, the.X, the.y, wrt=the.names(), **the.options
    )
    assert value == pytest.approx(expected, rel=1e-12)
    assert h.keys() == set(the.names())
    for name in the.names():
        close(getattr(g, name), h[name], float, name)
    if the.model.parameters:
        direction = reals(the.model)
        product = mh.hvp(the.model, the.X, the.y, tangent=direction, **the.options)
        exact = mh.reference.hvp(the.model, the.X, the.y, direction, **the.options)
        assert exact.keys() == the.model.parameters.keys()
        for name in exact:
            close(getattr(product, name), exact[name], float, name)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", [(3, 37, 19, 2), (2, 300, 6, 3), (40, 5, 33, 2)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_long_sequences_and_wide_tokens(dtype, shape, plan):
    """Several tiles of query rows, sums in parts of 256 keys, features that fill no register."""
    n, T, d, H = shape
    rng = np.random.default_rng(5)
    X = (rng.standard_normal((n, T, d)) / d**0.25).astype(dtype)
    U = rng.standard_normal((H, T, d)).astype(dtype) / T
    W = rng.standard_normal((H, d, d)).astype(dtype) / d
    Y = rng.standard_normal((n, T, d)).astype(dtype)
    identity = np.array([np.eye(d, dtype=dtype)] * H)
    _core.force_plan(plan)
    for model, other, y, wrt in (
        (mh.Classifier(None, U), mh.Classifier(identity, U), np.sign(Y[:, 0, 0]), ("U", "X")),
        (mh.Layer(W, None), mh.Layer(W, identity), Y, ("W", "X")),
        (mh.Layer(None, W), mh.Layer(identity, W), Y, ("V", "X")),
    ):
        close(model(X), other(X), dtype)
        value, g = mh.value_and_grad(model, X, y, loss="squared", wrt=wrt)
        expected, h = mh.value_and_grad(other, X, y, loss="squared", wrt=wrt)
        assert value == pytest.approx(expected, rel=TOLERANCE[np.dtype(dtype)])
        for name in wrt:
            assert relative(getattr(g, name), getattr(h, name)) < TOLERANCE[np.dtype(dtype)]


def test_closed_forms():
    the = case(mh.Classifier, identities="W", scale=0.3)
    S = 0.3 * the.X @ the.X.transpose(0, 2, 1)
    A = np.exp(S) / np.exp(S).sum(axis=-1, keepdims=True)
    weights = the.model.attention(the.X)
    assert weights.shape == (SAMPLES, HEADS, TOKENS, TOKENS)
    # All heads attend alike; exp and sums of a few numbers of order one.
    assert np.abs(weights - A[:, None]).max() < 1e-15
    pooled = A @ the.X
    outputs = np.einsum("hqd,nqd->n", the.model.U, pooled) / np.sqrt(HEADS)
    assert relative(the.model(the.X), outputs) < 1e-13
    g = mh.backward(the.model, the.X, np.ones(SAMPLES))
    # Also the gradient by U is the same for all heads.
    assert relative(g.U, np.broadcast_to(pooled.sum(0) / np.sqrt(HEADS), g.U.shape)) < 1e-13

    the = case(mh.Layer, identities="V")
    together = the.model.attention(the.X).sum(axis=1) @ the.X
    assert relative(the.model(the.X), together) < 1e-13


@OF_TRAINED
def test_gradients_are_derivatives_of_the_value(kind, options):
    the = case(kind, **options)
    direction = reals(the.model)
    direction = direction / mh.norm(direction)
    _, g = the.value_and_grad()
    step = 1e-5
    up, down = (
        the._replace(model=the.model + s * direction).value_and_grad(wrt=())[0]
        for s in (step, -step)
    )
    # Central differences: step² times third derivatives of order 1, and rounding 1e-16 / step.
    assert abs((up - down) / (2 * step) - mh.dot(g, direction)) < 1e-8


@pytest.mark.peers
@pytest.mark.parametrize("identities", ["W", "V"])
def test_gradients_agree_with_torch(identities):
    torch = pytest.importorskip("torch")
    the = case(mh.Layer, identities=identities)
    tensors = {
        name: torch.tensor(a, requires_grad=True)
        for name, a in {**the.model.parameters, "X": the.X}.items()
    }
    X = tensors["X"]
    Z = X[:, None] if identities == "W" else torch.einsum("nqd,hde->nhqe", X, tensors["W"])
    pooled = (Z @ X[:, None].transpose(-1, -2)).softmax(-1) @ X[:, None]
    F = pooled.sum(1) if identities == "V" else (pooled @ tensors["V"]).sum(1)
    F.sin().sum().backward()
    g = mh.backward(the.model, the.X, np.cos(the.model(the.X)), wrt=the.names())
    for name, tensor in tensors.items():
        assert relative(getattr(g, name), tensor.grad.numpy()) < 1e-12


def test_what_a_model_with_identities_has():
    the = case(mh.Classifier, identities="W")
    model = the.model
    assert list(model.parameters) == ["U"]
    assert (model.heads, model.dim, model.dtype) == (HEADS, DIM, np.float64)
    assert model.W is model.Q is model.K is model.runs is None
    assert repr(model) == f"Classifier(W=None, U=<float64 {(HEADS, TOKENS, DIM)}>, scale=1.0)"
    _, g = the.value_and_grad()
    assert g.W is None
    assert (model - 0.1 * g).W is None
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.replace(scale=1)):
        assert twin == model
    assert model != stored(model)
    assert model.replace(W=np.zeros((HEADS, DIM, DIM))).W is not None

    layer = case(mh.Layer, identities="V").model
    assert list(layer.parameters) == ["W"]
    assert layer.out_dim == layer.dim == DIM
    assert repr(layer) == f"Layer(W=<float64 {(HEADS, DIM, DIM)}>, V=None, scale=1.0)"
    assert mh.Layer(W=None, V=np.ones((2, DIM, 3))).heads == 2

    both = mh.Layer(None, None, prompt=np.ones((ROWS, DIM), np.float32))
    assert list(both.parameters) == ["prompt"]
    assert (both.heads, both.dim, both.out_dim, both.dtype) == (1, DIM, DIM, np.float32)
    by_query = mh.Layer(None, None, query=np.ones((SAMPLES, ROWS, DIM)))
    assert (by_query.heads, by_query.dim, dict(by_query.parameters)) == (1, DIM, {})


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_layer_without_arrays_takes_all_tokens(dtype):
    layer = mh.Layer(None, None, scale=0.5)
    assert repr(layer) == "Layer(W=None, V=None, scale=0.5)"
    assert (layer.heads, dict(layer.parameters), layer.runs) == (1, {}, None)
    assert pickle.loads(pickle.dumps(layer)) == layer
    for d in (3, 7):
        X = np.random.default_rng(d).standard_normal((4, 2, d)).astype(dtype)
        S = np.exp(0.5 * X @ X.transpose(0, 2, 1))
        F = layer(X)
        assert F.dtype == dtype
        assert relative(F, S / S.sum(axis=-1, keepdims=True) @ X) < TOLERANCE[F.dtype]
        value, g = mh.value_and_grad(layer, X, np.zeros_like(X), loss="squared", wrt="X")
        assert value == pytest.approx(np.square(F, dtype=float).sum() / 4, rel=1e-5)
        assert g.X.shape == X.shape
        again, none = mh.value_and_grad(layer, X, np.zeros_like(X), loss="squared")
        assert again == pytest.approx(value, rel=1e-6 if dtype is np.float32 else 1e-14)
        assert none == mh.Gradients()
        found = mh.evaluate(
            layer, X, np.zeros_like(X), loss="squared", record=("loss", "attention")
        )
        assert found["loss"] == again
        assert np.array_equal(found["attention"], layer.attention(X))
        assert mh.explain(layer, X)["plan"] in PLANS
        # Two rows of one class each, and of probabilities.
        of_classes = layer.loss(X, np.zeros((4, 2), int), loss="cross_entropy")
        soft = np.zeros_like(X)
        soft[..., 0] = 1
        of_soft = layer.loss(X, soft, loss="cross_entropy")
        assert of_soft == pytest.approx(of_classes, rel=1e-6)
    for name in ("dim", "dtype", "out_dim"):
        assert not hasattr(layer, name)
    with pytest.raises(AttributeError, match=r"dim: expected a model with an array, got Layer\(W="):
        layer.dim  # noqa: B018


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mh.Layer(None, None)(np.ones((1, 2, 4)), query=np.ones((1, 2, 5))),
            r"query: expected shape \(n, q, d\) = \(1, q, 4\), got \(1, 2, 5\)",
        ),
        (
            lambda: mh.Layer(None, None).loss(np.ones((1, 2, 4)), np.ones((1, 2, 5))),
            r"y: expected shape \(n, q, p\) = \(1, 2, 4\), got \(1, 2, 5\)",
        ),
        (lambda: mh.Classifier(None, np.ones((2, 3))), r"U: expected shape \(H, q, d\)"),
        (lambda: mh.Classifier(None, np.ones((2, 3, 0))), "U: expected no axis of length 0"),
        (
            lambda: mh.Classifier(None, np.ones((2, 3, 5)), prompt=np.ones((3, 4))),
            r"prompt: expected shape \(q, d\) = \(q, 5\), got \(3, 4\)",
        ),
        (
            lambda: mh.value_and_grad(mh.Layer(None, np.ones((2, 3, 5))), np.ones((1, 2, 3)),
                                      np.ones((1, 2, 5)), wrt="W"),
            "wrt: expected names from V, X, query, embedding, got 'W'",
        ),
        (
            lambda: mh.Layer(np.ones((2, 3, 3)), None)(np.ones((1, 2, 4))),
            r"X: expected shape \(n, T, d\) = \(n, T, 3\), got \(1, 2, 4\)",
        ),
        (
            lambda: mh.train(
                mh.Layer(None, None), np.ones((1, 2, 3)), np.ones((1, 2, 3)), steps=1,
                optimizer=mh.GradientDescent(0.1),
            ),
            "model: expected a parameter to train, got Layer",
        ),
        (
            lambda: mh.stack([mh.Layer(None, CUBE), mh.Layer(CUBE, None)]),
            "expected parameters V",
        ),
        (
            lambda: mh.stack([mh.Layer(None, None)] * 2),
            "models: expected a parameter, or queries that differ, to have a run axis, got none",
        ),
    ],
)  # fmt: skip
def test_wrong_use(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_kinds():
    with pytest.raises(TypeError, match="U: expected an array of numbers, got NoneType"):
        mh.Classifier(np.ones((2, 3, 3)), None)
    with pytest.raises(TypeError, match="prompt: expected dtype float64, that of U, got float32"):
        mh.Classifier(None, np.ones((2, 3, 5)), prompt=np.ones((3, 5), np.float32))
    bounds = mh.theory.curvature_bounds, mh.theory.layer_bounds, mh.theory.layer_bounds
    models = (
        mh.Classifier(None, np.ones((2, 3, 5))),
        mh.Layer(None, np.ones((2, 5, 4))),
        mh.Layer(np.ones((2, 5, 5)), None),
    )
    for name, function, model in zip("WWV", bounds, models, strict=True):
        with pytest.raises(TypeError, match=f"{name}: expected an array .* got None, an identity"):
            function(model, np.ones((4, 3, 5)))
    with pytest.raises(TypeError, match="layer: expected an array V, got None, an identity"):
        mh.learner.refine(mh.Layer(np.eye(5)[None], None), np.ones((4, 3, 5)), np.ones((4, 3, 5)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_a_stored_identity_which_does_not_move(name):
    """All optimizers, alone; what is recorded of all parameters together differs and is not."""
    optimizer = OPTIMIZERS[name]()
    record = ("loss", "accuracy", "margin", "grad_norm", "distance", "attention_max")
    for j, (kind, options) in enumerate(TRAINED):
        the = case(kind, **options, seed=j)
        given = {k: v for k, v in the.options.items() if k != "loss"}
        data = mh.Dataset(the.X, the.y, **given)
        settings = {"steps": 7, "optimizer": optimizer, "loss": the.options["loss"]}
        settings |= {"record": record, "wrt": tuple(the.model.parameters)}
        run = mh.train(the.model, data, **settings)
        other = mh.train(stored(the.model), data, **settings)
        assert run.wrt == tuple(the.model.parameters)
        assert run.state.keys() <= set(the.model.parameters)
        for which, array in run.model.parameters.items():
            # Seven steps amplify the rounding of sums in another order, sign descent most; with
            # ReLU some of them diverge, to numbers near 1e20.
            want = other.model.parameters[which]
            size = max(1.0, np.abs(want).max())
            assert np.abs(array - want).max() < 1e-9 * size, (options, which)
        for which, rows in run.history.items():
            np.testing.assert_allclose(rows, other.history[which], rtol=1e-8, atol=1e-10)


@OF_TRAINED
@pytest.mark.parametrize("plan", ["auto", "runs"])
def test_runs_side_by_side_are_the_runs_alone(kind, options, plan):
    names = [c for c in ("W", "Q", "K", "U", "V", "prompt") if c not in options["identities"]]
    if "weight" in options:
        options = options | {"weight": "samples"}
    the = case(kind, **options, runs=(*names, "X"))
    assert the.model.runs == RUNS
    value, g = the.value_and_grad(wrt=the.names())
    settings = {"steps": 5, "optimizer": mh.NormalizedGradientDescent(0.1)}
    settings |= {"loss": the.options["loss"], "record": ("loss", "grad_norm", "param_norm")}
    given = {k: v for k, v in the.options.items() if k != "loss"}
    _core.force_plan(plan)
    run = mh.train(the.model, mh.Dataset(the.X, the.y, **given), **settings)
    _core.force_plan("auto")
    for r in (0, 4, RUNS - 1):
        one = the.run(r)
        expected, h = one.value_and_grad(wrt=the.names())
        assert value[r] == pytest.approx(expected, rel=1e-12)
        for name in the.names():
            close(getattr(g[r], name), getattr(h, name), float, name)
        given = {k: v for k, v in one.options.items() if k != "loss"}
        alone = mh.train(one.model, mh.Dataset(one.X, one.y, **given), **settings)
        same_run(run[r], alone, 1e-9)


@OF_TRAINED
def test_a_saved_run_goes_on(kind, options, tmp_path):
    the = case(kind, **options)
    given = {k: v for k, v in the.options.items() if k != "loss"}
    data = mh.Dataset(the.X, the.y, **given)
    record = {"loss": 1, next(iter(the.model.parameters)): 2}
    settings = {"optimizer": mh.Adam(0.01), "loss": the.options["loss"], "record": record}
    whole = mh.train(the.model, data, steps=6, **settings)
    half = mh.train(the.model, data, steps=3, **settings)
    half.save(tmp_path / "run.npz")
    loaded = mh.Run.load(tmp_path / "run.npz")
    assert loaded == half
    assert loaded.model.W is None or "W" not in options["identities"]
    with np.load(tmp_path / "run.npz") as file:
        assert not any(f"model.{name}" in file.files for name in options["identities"])
    again = mh.train(loaded, data, steps=3)
    assert again.model == whole.model
    np.testing.assert_array_equal(again.history["loss"], whole.history["loss"])
    with pytest.raises(ValueError, match="record"):
        mh.train(the.model, data, steps=1, **settings | {"record": options["identities"][0]})


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_training_enters_the_span_of_the_tokens(kind, prompt):
    """There the identity is again the identity, and the run is that of the whole model."""
    n, T, d, H = 3, 2, 700, 400
    rng = np.random.default_rng(2)
    X = rng.standard_normal((n, T, d)) / d**0.5
    rows = 1 if prompt else T
    readout = rng.standard_normal((H, rows, d) if kind is mh.Classifier else (H, d, 3)) / 10
    rest = {"prompt": rng.standard_normal((1, d))} if prompt else {}
    model = kind(None, readout, **rest)
    y = rng.choice([-1.0, 1.0], (n,) if kind is mh.Classifier else (n, rows, 3))
    settings = {"steps": 4, "record": ("loss", "grad_norm")}
    inside = mh.train(model, X, y, optimizer=mh.GradientDescent(0.5), **settings)
    assert inside.subspace is not None
    assert inside.subspace.model.W is None
    assert inside.subspace.model.dim <= n * T + 1
    # The same steps outside, where Adam's are never taken inside the span.
    outside = mh.train(
        stored_wide(model),
        X,
        y,
        optimizer=mh.GradientDescent(0.5, l2=1e-300),
        wrt=inside.wrt,
        **settings,
    )
    assert outside.subspace is None
    for name, rows in inside.history.items():
        np.testing.assert_allclose(rows, outside.history[name], rtol=1e-11)
    for name, array in inside.model.parameters.items():
        # Coordinates of the basis and back.
        assert relative(array, outside.model.parameters[name]) < 1e-12


def stored_wide(model):
    return model.replace(W=np.broadcast_to(np.eye(model.dim), (model.heads, model.dim, model.dim)))


def test_outputs_that_are_tokens_stay_outside_the_span():
    """The loss is about their coordinates, of which the span has fewer."""
    n, T, d, H = 3, 2, 400, 2
    rng = np.random.default_rng(2)
    X, Y = rng.standard_normal((2, n, T, d)) / d**0.5
    layer = mh.Layer(rng.standard_normal((H, d, d)) / d, None)
    run = mh.train(
        layer, X, Y, steps=3, optimizer=mh.GradientDescent(0.5), loss="squared", record="loss"
    )
    assert run.subspace is None
    losses = [np.square(layer(X) - Y).sum() / n, np.square(run.model(X) - Y).sum() / n]
    assert run.history["loss"][[0, -1]] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (kind, options)
        for kind, options in TRAINED
        if kind is mh.Classifier or not options.keys() & {"prompt", "factors", "attention"}
    ],
)
def test_tangent_kernels(kind, options):
    """The inner products of the gradients of all outputs, by parameters that are there."""
    the = case(kind, **options)
    data = mh.Dataset(the.X, np.ones(SAMPLES), **the.seen())
    K = mh.theory.ntk(the.model, data)
    shape = the.model(the.X, **the.seen()).shape
    J = []
    for index in np.ndindex(*shape):
        cotangent = np.zeros(shape)
        cotangent[index] = 1.0
        g = mh.backward(the.model, the.X, cotangent, **the.seen())
        parts = (getattr(g, name) for name in the.model.parameters)
        J.append(np.concatenate([part.ravel() for part in parts]))
    J = np.array(J)
    assert relative(K, (J @ J.T).reshape(*shape, *shape)) < 1e-12
    with pytest.raises(ValueError, match="wrt: expected names from"):
        mh.theory.ntk(the.model, data, wrt=options["identities"])


def test_the_rest_of_the_package_takes_them():
    the = case(mh.Classifier, identities="W")
    data = mh.Dataset(the.X, the.y)
    found = mh.evaluate(the.model, data, record=("loss", "param_norm", "attention_max"))
    assert found["loss"] == the.value_and_grad()[0]
    assert found["param_norm"] == pytest.approx(np.linalg.norm(the.model.U), rel=1e-14)
    # The loss is convex in U alone.
    smallest, *_ = mh.theory.hessian_extremes(the.model, data)
    assert smallest > -1e-12
    assert mh.explain(the.model, the.X)["plan"] in PLANS
    best = mh.minimize(the.model, data, steps=50)
    assert best.model.W is None
    assert best.history["loss"][-1] < 0.3 * best.history["loss"][0]
    flow = mh.gradient_flow(the.model, data, until=1.0)
    assert flow.model.W is None

    layers = [case(mh.Layer, identities="V", seed=seed).model for seed in range(3)]
    side_by_side = mh.stack(layers)
    assert side_by_side.runs == 3
    assert [side_by_side[r] for r in range(3)] == layers
    assert mh.learner.align(layers[0], stored(layers[0])).error < 1e-12
    assert dataclasses.replace(layers[0], V=None) == layers[0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    for kind, options in CASES:
        the = case(kind, dtype=dtype, **options)
        first, *others = (
            the.value_and_grad(wrt=the.names(), num_threads=threads) for threads in (1, 2, 4)
        )
        assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("kind", "identity"), [(mh.Classifier, "W"), (mh.Layer, "W"), (mh.Layer, "V")]
)
def test_outputs_are_the_same_bits_in_every_plan(kind, identity):
    the = case(kind, identities=identity, scale=0.7)
    outputs = []
    for plan in PLANS:
        _core.force_plan(plan)
        outputs.append(the.model(the.X))
    assert all(np.array_equal(one, outputs[0]) for one in outputs)
