"""Gradients of `mhfast.Stack`: against the reference, finite differences and PyTorch."""

import copy
import pickle

import numpy as np
import pytest

import mhfast as mh

# No two axes of one length.
SAMPLES, TOKENS, DIM, FIRST, SECOND, WIDE, OUT = 7, 5, 6, 3, 2, 4, 8
RESIDUALS = (True, "concatenate", False, (True, False), ("concatenate", False))
LENGTHS = np.array([5, 0, 3, 1, 4, 5, 2])
TOLERANCE = {np.float64: 1e-11, np.float32: 1e-4}  # of the largest entry, two layers deep


def stack(residual, dtype=np.float64, causal=True, query=None, **options):
    kinds = residual if isinstance(residual, tuple) else (residual,) * 2
    out = [DIM if kinds[0] is True else WIDE, OUT]
    given = DIM + WIDE if kinds[0] == "concatenate" else out[0]
    out[1] = given if kinds[1] is True else OUT
    common = {"std": 0.4, "dtype": dtype, "causal": causal, **options}
    first = mh.Layer.gaussian(FIRST, DIM, out[0], seed=0, **common)
    second = mh.Layer.gaussian(SECOND, given, out[1], seed=1, query=query, **common)
    return mh.Stack([first, second], residual)


def problem(model, loss, dtype=np.float64, rows=TOKENS, weight=None, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((SAMPLES, TOKENS, DIM)).astype(dtype)
    shape = (SAMPLES, rows, model.out_dim)
    if loss == "cross_entropy":
        y = rng.integers(0, model.out_dim, shape[:2])
    elif loss == "squared":
        y = rng.standard_normal(shape).astype(dtype)
    else:
        y = rng.choice([-1.0, 1.0], shape)
    weights = {None: None, "samples": rng.random(SAMPLES), "rows": rng.random(shape[:2])}[weight]
    return X, y, None if weights is None else weights.astype(dtype)


def close(found, expected, dtype):
    assert found.dtype == dtype
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * abs(expected).max())


def named(gradients):
    return {
        f"{j}.{name}": array
        for j, layer in enumerate(gradients.layers)
        for name, array in vars(layer).items()
        if array is not None
    } | ({} if gradients.X is None else {"X": gradients.X})


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("weight", [None, "samples", "rows"])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy", "logistic"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_are_those_of_the_reference(residual, loss, weight, lengths, dtype):
    model = stack(residual, dtype)
    X, y, weights = problem(model, loss, dtype, weight=weight)
    options = {"loss": loss, "weight": weights, "lengths": lengths}
    value, g = mh.value_and_grad(model, X, y, wrt=(*model.parameters, "X"), **options)
    exact, expected = mh.reference.stack_value_and_grad(model, X, y, **options)
    assert value == pytest.approx(exact, rel=TOLERANCE[dtype])
    assert value == pytest.approx(model.loss(X, y, **options), rel=1e-6)
    found = named(g)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        close(found[name], array, dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_agree_with_finite_differences(residual, causal):
    model = stack(residual, causal=causal)
    X, y, weight = problem(model, "squared", weight="rows")
    rng = np.random.default_rng(1)
    _, g = mh.value_and_grad(model, X, y, loss="squared", weight=weight)
    parts = [
        mh.Gradients(**{name: rng.standard_normal(a.shape) for name, a in layer.parameters.items()})
        for layer in model.layers
    ]
    along, step = mh.Gradients(layers=tuple(parts)), 1e-5
    ahead = (model + step * along).loss(X, y, loss="squared", weight=weight)
    behind = (model - step * along).loss(X, y, loss="squared", weight=weight)
    # The third derivative times step², and rounding over step.
    assert (ahead - behind) / (2 * step) == pytest.approx(mh.dot(g, along), rel=1e-5)


def test_a_last_layer_may_read_one_token():
    model = stack(("concatenate", False), query=-1)
    X, y, _ = problem(model, "cross_entropy", rows=1)
    lengths = np.maximum(LENGTHS, 1)
    _, g = mh.value_and_grad(
        model, X, y, loss="cross_entropy", lengths=lengths, wrt=(*model.parameters, "X")
    )
    _, expected = mh.reference.stack_value_and_grad(
        model, X, y, loss="cross_entropy", lengths=lengths
    )
    for name, array in named(g).items():
        close(array, expected[name], np.float64)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_backward_is_the_gradient_of_a_product_with_the_outputs(residual, lengths):
    model = stack(residual)
    X, cotangent, _ = problem(model, "squared")
    found = mh.backward(model, X, cotangent, lengths=lengths, wrt=(*model.parameters, "X"))
    # Σ cotangent · outputs is a loss: half of the squared one has the derivative F - y.
    outputs = model(X, lengths=lengths)
    _, expected = mh.reference.stack_value_and_grad(
        model, X, outputs - 0.5 * SAMPLES * cotangent, loss="squared", lengths=lengths
    )
    for name, array in named(found).items():
        # F - y loses digits where F is larger than the cotangent.
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-9 * abs(array).max())


def test_wrt_asks_for_a_part():
    model = stack("concatenate", rank=2)
    X, y, _ = problem(model, "squared")
    _, whole = mh.value_and_grad(model, X, y, loss="squared", wrt=(*model.parameters, "X"))
    for wrt, names in {
        "V": {"0.V", "1.V"},
        ("1.Q", "K"): {"0.K", "1.Q", "1.K"},
        "1.V": {"1.V"},
        "X": {"X"},
        (): set(),
    }.items():
        _, g = mh.value_and_grad(model, X, y, loss="squared", wrt=wrt)
        assert named(g).keys() == names
        for name, array in named(g).items():
            np.testing.assert_array_equal(array, named(whole)[name])
    for wrt in ("2.V", "U", "query", "0.W"):
        with pytest.raises(ValueError, match=r"wrt: expected names from 0.Q.*got"):
            mh.value_and_grad(model, X, y, loss="squared", wrt=wrt)


def test_own_losses_and_losses_with_a_parameter():
    model = stack(True)
    X, y, weight = problem(model, "squared", weight="samples")

    def own(outputs, targets):
        return (outputs - targets) ** 2, 2 * (outputs - targets)

    expected, g = mh.value_and_grad(model, X, y, loss="squared", weight=weight)
    value, h = mh.value_and_grad(model, X, y, loss=own, weight=weight)
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(h.layers[0].W, g.layers[0].W, rtol=1e-9, atol=1e-12)
    huber, _ = mh.value_and_grad(model, X, y, loss=mh.Huber(0.5))
    exact, _ = mh.reference.stack_value_and_grad(model, X, y, loss=mh.Huber(0.5))
    assert huber == pytest.approx(exact, rel=1e-12)
    probabilities = np.full((SAMPLES, TOKENS, model.out_dim), 1 / model.out_dim)
    soft, _ = mh.value_and_grad(model, X, probabilities, loss="cross_entropy")
    exact, _ = mh.reference.stack_value_and_grad(model, X, probabilities, loss="soft_cross_entropy")
    assert soft == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_any_number_of_threads_gives_the_same_bits(dtype):
    model = stack("concatenate", dtype)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((401, TOKENS, DIM)).astype(dtype)
    y = rng.integers(0, model.out_dim, (401, TOKENS))
    results = [
        mh.value_and_grad(
            model, X, y, loss="cross_entropy", wrt=(*model.parameters, "X"), num_threads=threads
        )
        for threads in (1, 2)
    ]
    assert results[0] == results[1]


def test_gradients_are_vectors():
    model = stack("concatenate")
    X, y, _ = problem(model, "squared")
    _, g = mh.value_and_grad(model, X, y, loss="squared")
    _, h = mh.value_and_grad(model, X, -y, loss="squared")
    twice = g + g - 0.5 * (2 * h) + h / 1.0
    for name, array in named(twice).items():
        np.testing.assert_allclose(array, 2 * named(g)[name], rtol=1e-12, atol=1e-12)
    assert mh.dot(g, g) == pytest.approx(mh.norm(g) ** 2, rel=1e-14)
    whole = sum(np.vdot(a, a) for a in named(g).values())
    assert mh.norm(g) ** 2 == pytest.approx(whole, rel=1e-12)
    along = sum(np.vdot(a, model.parameters[name]) for name, a in named(g).items())
    assert mh.dot(g, model) == pytest.approx(along, rel=1e-12)
    moved = model - 0.1 * g
    np.testing.assert_allclose(
        moved.layers[1].V, model.layers[1].V - 0.1 * g.layers[1].V, rtol=1e-14
    )
    assert moved.loss(X, y, loss="squared") != model.loss(X, y, loss="squared")
    for twin in (copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        assert twin == g
    assert twin != h
    with pytest.raises(
        ValueError, match=r"0.Q: expected gradients by parameters of the model, 0.W"
    ):
        model + mh.Gradients(layers=(mh.Gradients(Q=np.ones(2)), mh.Gradients()))
    with pytest.raises(ValueError, match=r"1.V: expected in both or in neither"):
        g + mh.Gradients(layers=(g.layers[0], mh.Gradients(W=g.layers[1].W)))


def test_what_does_not_fit_is_refused():
    model = stack("concatenate")
    X, y, weight = problem(model, "cross_entropy", weight="rows")

    def refused(kind, message, *arguments, function=mh.value_and_grad, **options):
        with pytest.raises(kind, match=message):
            function(model, *arguments, **options)

    refused(ValueError, "query: expected None, since a Stack", X, y, query=X)
    refused(ValueError, "query: expected None, since a Stack", X, y, query=X, function=mh.backward)
    refused(ValueError, r"y: expected shape \(n, q\)", X, y[:, 1:], loss="cross_entropy")
    refused(TypeError, "y: expected integer classes", X, 1.0 * y, loss="cross_entropy")
    refused(ValueError, "weight: expected", X, y, loss="cross_entropy", weight=weight[:, 1:])
    refused(ValueError, "lengths: expected", X, y, loss="cross_entropy", lengths=[9] * SAMPLES)
    refused(ValueError, r"cotangent: expected shape \(n, q, p\)", X, X, function=mh.backward)
    refused(TypeError, "cotangent: expected an array", X, None, function=mh.backward)
    with pytest.raises(TypeError, match="expected a Classifier, a Layer or a Stack, got str"):
        mh.value_and_grad("stack", X, y)


@pytest.mark.peers
@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_are_those_of_pytorch(residual):
    torch = pytest.importorskip("torch")
    model = stack(residual)
    X, y, weight = problem(model, "cross_entropy", weight="rows")
    value, g = mh.value_and_grad(
        model, X, y, loss="cross_entropy", weight=weight, wrt=(*model.parameters, "X")
    )
    leaves = {
        name: torch.tensor(np.asarray(array), requires_grad=True)
        for name, array in (*model.parameters.items(), ("X", X))
    }
    kinds = residual if isinstance(residual, tuple) else (residual,) * 2
    x, mask = leaves["X"], torch.ones(TOKENS, TOKENS).tril().bool()
    for j, kind in enumerate(kinds):
        scores = torch.einsum("nqd,hde,nte->nhqt", x, leaves[f"{j}.W"], x)
        A = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        F = torch.einsum("nhqt,ntd,hdp->nqp", A, x, leaves[f"{j}.V"])
        x = torch.cat([x, F], -1) if kind == "concatenate" else x + F if kind else F
    rows = torch.nn.functional.cross_entropy(
        x.flatten(0, 1), torch.tensor(y).flatten(), reduction="none"
    )
    w = torch.tensor(weight).flatten()
    loss = (w * rows).sum() / w.sum()
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-12)
    for name, array in named(g).items():
        close(array, leaves[name].grad.numpy(), np.float64)
