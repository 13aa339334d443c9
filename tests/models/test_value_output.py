"""`ValueOutput`: a layer whose value matrices are products of two factors."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
from instances import DIM, HEADS, OUTPUTS, SAMPLES, TOLERANCE, case, relative
from numpy.testing import assert_allclose, assert_array_equal
from trainings import OPTIMIZERS, PROJECTIONS

import mhfast as mh

RANK = 2
LAYERS = [
    {},
    {"loss": "cross_entropy", "causal": True},
    {"query": -1, "lengths": True},
    {"query": "given", "weight": "rows", "attention": "linear"},
    {"prompt": True, "factors": "low rank"},
    {"factors": "tied", "attention": "sigmoid", "lengths": True},
    {"identities": "W"},
    {"runs": ("W", "A")},
    {"runs": ("B", "y", "prompt"), "prompt": True},
]


def drawn(dtype=np.float64, **changes):
    return case(mh.Layer, **{"loss": "squared", "value_rank": RANK, "dtype": dtype} | changes)


def dense(layer):
    return layer.replace(V=layer.V.dense())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("changes", LAYERS)
def test_outputs_and_gradients_follow_the_reference(changes, dtype):
    the = drawn(dtype, **changes)
    assert_allclose(
        the.model(the.X, **the.seen()), mh.reference.outputs(the.model, the.X, **the.seen()),
        rtol=0, atol=20 * TOLERANCE[np.dtype(dtype)],
    )  # fmt: skip
    value, g = the.value_and_grad(wrt=the.names())
    expected, gradients = mh.reference.value_and_grad(
        the.model, the.X, the.y, wrt=the.names(), **the.options
    )
    assert_allclose(value, expected, rtol=TOLERANCE[np.dtype(dtype)])
    assert {"A", "B"} <= set(the.names())
    for name in the.names():
        assert getattr(g, name).dtype == dtype
        assert relative(getattr(g, name), gradients[name]) < TOLERANCE[np.dtype(dtype)]
    _, only = the.value_and_grad(wrt="B")
    assert_array_equal(only.B, g.B)
    assert only.A is only.W is None


@pytest.mark.parametrize("changes", LAYERS)
def test_hessian_products_follow_the_reference(changes):
    the = drawn(**changes)
    rng = np.random.default_rng(0)
    whole = {name: rng.standard_normal(a.shape) for name, a in the.model.parameters.items()}
    for names in (tuple(whole), ("A",), ("B",), (next(iter(whole)),)):
        tangent = mh.Gradients(**{name: whole[name] for name in names})
        product = mh.hvp(the.model, the.X, the.y, tangent=tangent, **the.options)
        expected = mh.reference.hvp(the.model, the.X, the.y, tangent, **the.options)
        for name in whole:
            error = np.abs(getattr(product, name) - expected[name]).max()
            assert error <= 1e-11 * max(1.0, np.abs(expected[name]).max())
    # The reference itself, by differences.
    step = 1e-5
    ends = [
        mh.value_and_grad(the.model + s * step * mh.Gradients(**whole), the.X, the.y, **the.options)
        for s in (1.0, -1.0)
    ]
    whole_product = mh.hvp(the.model, the.X, the.y, tangent=mh.Gradients(**whole), **the.options)
    for name in whole:
        difference = (getattr(ends[0][1], name) - getattr(ends[1][1], name)) / (2 * step)
        assert relative(getattr(whole_product, name), difference) < 1e-7


def test_it_is_the_layer_of_the_product():
    the = drawn()
    layer = the.model
    assert_allclose(layer(the.X), dense(layer)(the.X), atol=1e-14)
    assert_array_equal(layer.attention(the.X), dense(layer).attention(the.X))
    assert layer.out_dim == dense(layer).out_dim == OUTPUTS
    assert mh.explain(layer, the.X) == mh.explain(dense(layer), the.X)
    assert_allclose(
        mh.evaluate(layer, the.X, the.y, loss="squared")["loss"],
        dense(layer).loss(the.X, the.y, loss="squared"),
    )
    tokens = mh.Tokens(np.random.default_rng(0).integers(0, 3, (400, 9)), the.X[0])
    assert_allclose(layer(tokens), layer(np.asarray(tokens)), atol=1e-12)


@pytest.mark.peers
def test_gradients_agree_with_torch():
    torch = pytest.importorskip("torch")
    the = drawn()
    W, A, B, X = (
        torch.tensor(a, requires_grad=True) for a in (the.model.W, the.model.A, the.model.B, the.X)
    )
    weights = torch.einsum("nqd,hde,nte->nhqt", X, W, X).softmax(-1)
    F = torch.einsum("nhqt,nte,her,hrp->nqp", weights, X, A, B)
    ((F - torch.tensor(the.y)).square().sum() / SAMPLES).backward()
    _, g = the.value_and_grad(wrt=("W", "A", "B", "X"))
    for name, tensor in (("W", W), ("A", A), ("B", B), ("X", X)):
        assert relative(getattr(g, name), tensor.grad.numpy()) < 1e-12


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_trainings_follow_the_reference(rule, tmp_path):
    """Each optimizer with another kind of layer, projection and choice of what trains."""
    j = list(OPTIMIZERS).index(rule)
    optimizer = OPTIMIZERS[rule](**PROJECTIONS[j % len(PROJECTIONS)])
    the = drawn(**LAYERS[j % 7])
    wrt = (None, "A", ("B", "W"), ("A", "B"))[j % 4]
    if wrt == ("B", "W") and "W" not in the.model.parameters:
        wrt = "B"
    options = {"steps": 4, "optimizer": optimizer, "loss": the.options["loss"], "wrt": wrt}
    data = mh.Dataset(the.X, the.y, **{k: v for k, v in the.options.items() if k != "loss"})
    run = mh.train(the.model, data, record=("loss", "grad_norm"), **options)
    end, history = mh.reference.train(
        the.model, the.X, the.y,
        **options | {name: value for name, value in the.options.items() if name != "loss"},
    )  # fmt: skip
    for name, array in run.model.parameters.items():
        exact = getattr(end, name)
        assert_allclose(array, exact, rtol=0, atol=1e-10 * np.abs(exact).max())
    assert_allclose(run.history["grad_norm"], history["grad_norm"], rtol=1e-9)
    assert isinstance(run.model.V, mh.ValueOutput)
    half = mh.train(the.model, data, record=("loss", "grad_norm"), **options | {"steps": 2})
    half.save(tmp_path / "run.npz")
    assert mh.train(mh.Run.load(tmp_path / "run.npz"), data, steps=2) == run


@pytest.mark.parametrize("runs", [3, 17])
def test_runs_side_by_side(runs):
    rng = np.random.default_rng(0)
    the = drawn()
    layers = mh.Layer.gaussian(
        HEADS, DIM, OUTPUTS, std=0.4, seed=range(runs), runs=runs, value_rank=RANK
    )
    assert layers.A.shape == (runs, HEADS, DIM, RANK)
    lr = rng.uniform(0.01, 0.02, runs)
    options = {"steps": 10, "loss": "squared", "record": ("A", "loss", "distance")}
    together = mh.train(layers, the.X, the.y, optimizer=mh.Adam(lr), **options)
    assert together.history["A"].shape == (runs, 11, HEADS, DIM, RANK)
    for r in (0, runs - 1):
        alone = mh.train(layers[r], the.X, the.y, optimizer=mh.Adam(lr[r]), **options)
        for name in ("A", "B", "W"):
            # By other plans, which round sums differently; Adam divides by small moments.
            assert_allclose(
                together[r].model.parameters[name], alone.model.parameters[name], atol=1e-9
            )
        assert_allclose(together[r].history["distance"], alone.history["distance"], rtol=1e-9)
    one = layers[0]
    assert mh.stack([layers[r] for r in range(runs)]) == layers
    assert mh.stack([one, one]).runs == 2


def test_gradients_far_below_the_range():
    """Normalized steps in saturation, by both factors and W."""
    the = drawn()
    layer = the.model.replace(W=1e5 * the.model.W)
    for by, wrt in itertools.product(("tensor", "head", "all"), (None, ("A", "W"), "W")):
        options = {
            "steps": 4, "optimizer": mh.NormalizedGradientDescent(0.3, by=by), "wrt": wrt,
            "loss": "squared",
        }  # fmt: skip
        run = mh.train(layer, the.X, the.y, **options)
        end, _ = mh.reference.train(layer, the.X, the.y, **options)
        for name, array in run.model.parameters.items():
            assert_allclose(array, getattr(end, name), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("exponent", [-400, 500])
def test_tokens_far_from_one(exponent):
    """Powers of two change no digit: x 2^k, W 2^-2k and A 2^-k have the same outputs."""
    the = drawn()
    far = 2.0**exponent
    layer = the.model.replace(
        W=the.model.W / far / far, V=mh.ValueOutput(the.model.A / far, the.model.B)
    )
    X = the.X * far
    assert_array_equal(layer(X), the.model(the.X))
    _, g = the.value_and_grad()
    _, h = mh.value_and_grad(layer, X, the.y, loss="squared")
    # Of W the products of two of them leave the range.
    assert_allclose(h.B, g.B, rtol=1e-13)
    assert_allclose(h.A / far, g.A, rtol=1e-13)
    run = mh.train(
        layer, X, the.y, steps=3, loss="squared", wrt="B", optimizer=mh.GradientDescent(0.01)
    )
    near = mh.train(
        the.model, the.X, the.y, steps=3, loss="squared", wrt="B",
        optimizer=mh.GradientDescent(0.01),
    )  # fmt: skip
    assert_allclose(run.model.B, near.model.B, rtol=1e-13)


def test_a_stack_and_constraints():
    rng = np.random.default_rng(0)
    layers = [
        mh.Layer.gaussian(2, 5, 5, std=0.4, seed=0, value_rank=2, causal=True),
        mh.Layer.gaussian(3, 5, 4, std=0.4, seed=1, value_rank=1, causal=True),
    ]
    stack = mh.Stack(layers, residual=(True, False))
    data = mh.Dataset(rng.standard_normal((6, 3, 5)), rng.standard_normal((6, 3, 4)))
    constraints = {"0.A": "heads", "1.B": rng.random((3, 1, 4)) < 0.5}
    start = mh.tied(stack, constraints)
    assert list(start.parameters) == ["0.W", "0.A", "0.B", "1.W", "1.A", "1.B"]
    _, g = mh.value_and_grad(start, data, loss="squared")
    _, exact = mh.reference.stack_value_and_grad(start, data.X, data.y, loss="squared")
    for j, name in itertools.product((0, 1), ("W", "A", "B")):
        assert relative(getattr(g.layers[j], name), exact[f"{j}.{name}"]) < 1e-12
    run = mh.train(
        start, data, steps=3, optimizer=mh.Adam(0.1), loss="squared", constraints=constraints
    )
    assert not np.ptp(run.model.layers[0].A, axis=0).any()
    kept = ~constraints["1.B"]
    assert_array_equal(run.model.layers[1].B[kept], start.layers[1].B[kept])
    assert (run.model.layers[1].A != start.layers[1].A).all()


def test_training_in_the_span_of_the_tokens():
    """A has coordinates of tokens, B none."""
    rng = np.random.default_rng(0)
    wide = 400
    layer = mh.Layer(
        0.01 * rng.standard_normal((2, wide, wide)),
        mh.ValueOutput(rng.standard_normal((2, wide, 3)), rng.standard_normal((2, 3, 4))),
    )
    data = mh.Dataset(rng.standard_normal((4, 3, wide)) / 20, rng.standard_normal((4, 3, 4)))
    options = {"steps": 5, "optimizer": mh.GradientDescent(0.01), "loss": "squared"}
    inside = mh.train(layer, data, **options)
    assert inside.subspace is not None
    assert inside.subspace.model.A.shape == (2, 12, 3)
    end, _ = mh.reference.train(layer, data.X, data.y, **options)
    for name, array in inside.model.parameters.items():
        exact = getattr(end, name)
        assert_allclose(array, exact, rtol=0, atol=1e-12 * np.abs(exact).max())
        assert np.any(array != layer.parameters[name])


def test_hard_attention_trains_the_factors():
    the = drawn()
    layer = the.model.replace(attention="hardmax")
    run = mh.train(
        layer, the.X, the.y, steps=2, optimizer=mh.GradientDescent(0.01), loss="squared",
        wrt=("A", "B"),
    )  # fmt: skip
    assert run.history["loss"][2] < run.history["loss"][0]
    with pytest.raises(ValueError, match="expected wrt='A', or wrt='B', or a model with another"):
        mh.train(layer, the.X, the.y, steps=1, optimizer=mh.GradientDescent(0.01), loss="squared")


def test_values_compare_copy_and_draw():
    the = drawn()
    layer = the.model
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), copy.copy(layer)):
        assert other == layer
        assert isinstance(other.V, mh.ValueOutput)
    moved = layer + mh.Gradients(A=np.ones_like(layer.A))
    assert_array_equal(moved.A, layer.A + 1)
    assert_array_equal(moved.B, layer.B)
    assert moved != layer
    assert not layer.V.A.flags.writeable
    drawn_ = mh.Layer.gaussian(3, 9, 4, std=0.5, seed=0, rank=5, value_rank=2)
    rng = np.random.default_rng(0)
    for name, shape in (("Q", (3, 9, 5)), ("K", (3, 9, 5)), ("A", (3, 9, 2)), ("B", (3, 2, 4))):
        assert_array_equal(getattr(drawn_, name), 0.5 * rng.standard_normal(shape))
    zeros = mh.Layer.zeros(3, 9, 4, value_rank=2, dtype=np.float32)
    assert (zeros.V.rank, zeros.V.dtype, zeros.out_dim) == (2, np.float32, 4)
    assert math.prod(zeros.V.dense().shape) == 3 * 9 * 4
    assert dense(layer).A is None
    assert mh.Classifier.zeros(2, 3, 4).B is None


FACTORS = np.ones((3, 9, 2)), np.ones((3, 2, 4))


@pytest.mark.parametrize(
    ("A", "B", "error", "message"),
    [
        (FACTORS[0][0], FACTORS[1], ValueError, r"A: expected shape \(H, d, r\)"),
        (FACTORS[0], FACTORS[1][:2], ValueError, r"B: expected shape \(H, r, p\) = \(3, 2"),
        (FACTORS[0], FACTORS[0], ValueError, r"B: expected shape \(H, r, p\) = \(3, 2"),
        (FACTORS[0][..., :0], FACTORS[1][:, :0], ValueError, "A: expected no axis of length 0"),
        (FACTORS[0], FACTORS[1].astype(np.float32), TypeError, "B: expected dtype float64"),
        (np.stack([FACTORS[0]] * 5), np.stack([FACTORS[1]] * 4), ValueError, "B: .*5"),
    ],
)
def test_wrong_factors(A, B, error, message):
    with pytest.raises(error, match=message):
        mh.ValueOutput(A, B)


def test_factors_that_do_not_fit_the_layer():
    V = mh.ValueOutput(*FACTORS)
    for W, error, message in (
        (np.ones((3, 9, 9), np.float32), TypeError, "V: "),
        (np.ones((4, 9, 9)), ValueError, r"A: expected .* = \(4, 9, r\), got \(3, 9, 2\)"),
        (np.ones((3, 8, 8)), ValueError, r"A: expected .* = \(3, 8, r\)"),
    ):
        with pytest.raises(error, match=message):
            mh.Layer(W, V)
    with pytest.raises(ValueError, match="value_rank: "):
        mh.Layer.zeros(3, 9, 4, value_rank=0)
    with pytest.raises(TypeError, match=r"V: expected an array .*model\.V\.dense\(\)"):
        mh.theory.ntk(mh.Layer(np.ones((3, 9, 9)), V), np.ones((2, 3, 9)))
    layer = mh.Layer.gaussian(3, 9, 4, std=0.5, seed=0, value_rank=2)
    assert mh.learner.align(layer, dense(layer)).error < 1e-12
