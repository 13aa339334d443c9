"""Row maps: how logits become attention weights, in every plan and with everything beside them."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from instances import TOLERANCE, case, relative
from side_by_side import same_run
from trainings import PLANS

import mhfast as mh
from mhfast import _core
from mhfast._arguments.lists import ROW_MAPS

MAPS = [(name, None) for name in ROW_MAPS]
MAPS += [(name, not usual) for name, usual in ROW_MAPS.items() if usual is not None]
OTHERS = [(name, normalize) for name, normalize in MAPS if name != "softmax"]
DIFFERENTIABLE = [(name, normalize) for name, normalize in OTHERS if name != "hardmax"]
KINDS = (mh.Classifier, mh.Layer)
SETTINGS = (
    {},
    {"query": -1},
    {"query": "given", "lengths": True},
    {"prompt": True, "weight": "samples"},
    {"factors": "low rank", "causal": True},
    {"factors": "tied", "prompt": True},
    {"lengths": True, "weight": "samples", "scale": 0.7},
    {"causal": True, "lengths": True},
    {"identities": "W", "lengths": True},
    {"identities": "V", "query": "given", "scale": 0.7},
    {"identities": "WV", "prompt": True},
)


@pytest.fixture(autouse=True)
def chosen_plan():
    yield
    _core.force_plan("auto")


def drawn(kind, name, normalize, j, **more):
    """A case of the j-th setting, or of one after it."""
    settings = SETTINGS[j % len(SETTINGS)] | {
        "attention": name,
        "normalize": normalize,
        "seed": 100 + j,
    }
    if kind is mh.Layer and "weight" in settings:
        settings["weight"] = "rows"
    return case(kind, **settings | {"loss": "squared"} | more)


def drawn_cases(maps, dtype=np.float64):
    """Every map with every kind of model and plan; settings in turn, so that each meets them."""
    j = 0
    for name, normalize in maps:
        for kind in KINDS:
            for plan in PLANS:
                j += 1
                _core.force_plan(plan)
                yield drawn(kind, name, normalize, j, dtype=dtype), (name, normalize, kind, plan, j)


def seen(the):
    return {name: the.options[name] for name in ("query", "lengths") if name in the.options}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_outputs_and_weights_are_those_of_the_reference(dtype):
    for the, text in drawn_cases(OTHERS, dtype):
        outputs = mh.reference.outputs(the.model, the.X, **seen(the))
        assert relative(the.model(the.X, **seen(the)), outputs) < TOLERANCE[np.dtype(dtype)], text
        weights = mh.reference.attention(the.model, the.X, **seen(the))
        got = the.model.attention(the.X, **seen(the))
        assert relative(got, weights) < TOLERANCE[np.dtype(dtype)], text


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_gradients_are_those_of_the_reference(dtype):
    for the, text in drawn_cases(DIFFERENTIABLE, dtype):
        value, found = the.value_and_grad(wrt=the.names())
        known, gradient = mh.reference.value_and_grad(
            the.model, the.X, the.y, wrt=the.names(), **the.options
        )
        assert abs(value - known) <= TOLERANCE[np.dtype(dtype)] * abs(known), text
        for name in the.names():
            error = relative(getattr(found, name), gradient[name])
            assert error < TOLERANCE[np.dtype(dtype)], (text, name)


def torch_weights(torch, S, name, normalize, seen):
    """Weights of logits S (n, H, q, T) as a user of torch writes them; seen (n, 1, q, T)."""
    hidden = torch.where(seen, S, torch.full_like(S, -torch.inf))
    if name == "softmax":
        return hidden.softmax(-1)
    if name == "softmax1":
        zero = torch.zeros_like(S[..., :1])
        return torch.cat([hidden, zero], -1).softmax(-1)[..., :-1]
    values = {"linear": lambda s: s, "relu": torch.relu, "sigmoid": torch.sigmoid}[name](S)
    by_tokens = ROW_MAPS[name] if normalize is None else normalize
    return torch.where(seen, values, 0.0) / (seen.sum(-1, keepdim=True) if by_tokens else 1)


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_agree_with_torch(kind, causal):
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    for j, (name, normalize) in enumerate(m for m in MAPS if m[0] != "hardmax"):
        the = case(kind, attention=name, normalize=normalize, loss="squared", causal=causal, seed=j)
        readout = "U" if kind is mh.Classifier else "V"
        W, R, X = (
            torch.tensor(a, requires_grad=True)
            for a in (the.model.W, the.model.parameters[readout], the.X)
        )
        T = X.shape[1]
        seen = torch.ones(1, 1, T, T, dtype=torch.bool)
        seen = seen.tril() if causal else seen
        S = torch.einsum("nqd,hde,nte->nhqt", X, W, X)
        Y = torch_weights(torch, S, name, normalize, seen) @ X[:, None]
        if kind is mh.Classifier:
            F = (Y * R).sum((1, 2, 3)) / len(R) ** 0.5
        else:
            F = torch.einsum("nhqd,hdp->nqp", Y, R)
        loss = ((F - torch.tensor(the.y)) ** 2).sum() / len(X)
        loss.backward()
        value, found = the.value_and_grad(wrt=("W", readout, "X"))
        assert abs(value - loss.item()) < 1e-12 * abs(value)  # sums in another order
        for part, tensor in (("W", W), (readout, R), ("X", X)):
            assert relative(getattr(found, part), tensor.grad.numpy()) < 1e-12, (name, part)


def test_definitions():
    """The formulas, on three logits."""
    X = np.array([[[1.0], [2.0], [-3.0]]])
    S = np.array([1.0, 2.0, -3.0])  # of the row whose query is the token 1
    e = np.exp(S)
    known = {
        ("softmax", None): e / e.sum(),
        ("softmax1", None): e / (1 + e.sum()),
        ("linear", None): S / 3,
        ("linear", False): S,
        ("relu", None): np.array([1, 2, 0]) / 3,
        ("relu", False): np.array([1, 2, 0]),
        ("sigmoid", None): e / (1 + e),
        ("sigmoid", True): e / (1 + e) / 3,
        ("hardmax", None): np.array([0, 1, 0]),
    }
    assert set(known) == set(MAPS)
    for (name, normalize), row in known.items():
        model = mh.Layer(
            np.ones((1, 1, 1)), np.ones((1, 1, 1)), 0, attention=name, normalize=normalize
        )
        weights = model.attention(X)[0, 0, 0]
        assert np.allclose(weights, row, rtol=1e-14, atol=0), (name, normalize)
        assert np.allclose(model(X)[0, 0, 0], row @ X[0, :, 0], rtol=1e-14), (name, normalize)


def test_equal_largest_logits_share_the_weight_of_hardmax():
    X = np.array([[[2.0], [-1.0], [2.0], [2.0]], [[0.0], [0.0], [0.0], [0.0]]])
    model = mh.Layer(np.ones((1, 1, 1)), np.ones((1, 1, 1)), 0, attention="hardmax")
    first, second = model.attention(X)[:, 0, 0]
    assert np.array_equal(first, np.array([1, 0, 1, 1]) / 3)
    assert np.array_equal(second, np.full(4, 1 / 4))


@pytest.mark.parametrize("kind", KINDS)
def test_hardmax_has_gradients_by_the_readout_only(kind):
    the = case(kind, attention="hardmax", loss="squared")
    readout = "U" if kind is mh.Classifier else "V"
    _, found = the.value_and_grad(wrt=readout)
    _, gradient = mh.reference.value_and_grad(the.model, the.X, the.y, wrt=readout, loss="squared")
    assert relative(getattr(found, readout), gradient[readout]) < 1e-12
    with pytest.raises(ValueError, match="'hardmax' has no derivative by the logits"):
        the.value_and_grad()
    with pytest.raises(ValueError, match="'hardmax' has no derivative by the logits"):
        the.value_and_grad(wrt="X")
    rule = mh.GradientDescent(0.01)
    with pytest.raises(ValueError, match=f"expected wrt='{readout}'"):
        mh.train(the.model, the.X, the.y, steps=1, optimizer=rule, loss="squared")
    run = mh.train(the.model, the.X, the.y, steps=3, optimizer=rule, loss="squared", wrt=readout)
    assert run.history["loss"][-1] < run.history["loss"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_no_token_have_weight_0_and_nan_stays_in_its_sample(kind):
    for name, normalize in OTHERS:
        the = case(kind, attention=name, normalize=normalize, lengths=True, loss="squared")
        lengths = the.options["lengths"]
        X = the.X.copy()
        X[3, 0] = np.nan  # sees two tokens
        X[1, 2] = np.nan  # beyond the length
        for plan in PLANS:
            _core.force_plan(plan)
            weights = the.model.attention(X, lengths=lengths)
            assert not weights[lengths == 0].any()
            assert np.isnan(weights[3, :, :2]).any(axis=-1).all(), name
            kept = np.arange(len(X)) != 3
            assert np.isfinite(weights[kept]).all()
            outputs = the.model(X, lengths=lengths)
            clean = the.model(the.X, lengths=lengths)
            assert np.isnan(outputs[3]).any()
            assert np.array_equal(outputs[kept], clean[kept])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_softmax1_keeps_its_accuracy_in_saturation(dtype):
    """One key takes all weight but exp(-gap), which the further logit or another key has."""
    for top, other in ((40.0, -30.0), (40.0, 25.0), (-40.0, -60.0)):
        model = mh.Classifier(
            np.ones((1, 1, 1), dtype), np.full((1, 1, 1), 0.5, dtype), 0, attention="softmax1"
        )
        X = np.array([[[1.0], [top], [other]]], dtype)
        X[0, 0] = 1  # the query
        _, found = mh.value_and_grad(model, X, np.ones(1, dtype), loss="linear")
        import mpmath

        with mpmath.workdps(60):
            x = [mpmath.mpf(float(v)) for v in X[0, :, 0]]
            e = [mpmath.exp(v) for v in x]
            total = 1 + sum(e)
            a = [v / total for v in e]
            r = sum(p * v for p, v in zip(a, x, strict=True))
            known = -sum(p * (v - r) * v for p, v in zip(a, x, strict=True)) / 2
        assert abs(float(found.W[0, 0, 0]) / float(known) - 1) < 50 * np.finfo(dtype).eps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "normalize"), DIFFERENTIABLE)
def test_training(kind, name, normalize):
    """Against the reference, then side by side, resumed and on two threads."""
    shape = (3, 5, 6) if kind is mh.Classifier else (3, 6, 2)
    model = kind.gaussian(*shape, std=0.3, seed=0, runs=3, attention=name, normalize=normalize)
    rng = np.random.default_rng(1)
    X = rng.standard_normal((11, 5, 6))
    y = rng.choice([-1.0, 1.0], (11,) if kind is mh.Classifier else (11, 5, 2))
    options = {
        "optimizer": mh.NormalizedGradientDescent(0.05),
        "record": ("loss", "grad_norm", "attention", "attention_max"),
    }
    first = None
    for plan in ("runs", "auto", "rows"):
        _core.force_plan(plan)
        run = mh.train(model, X, y, steps=6, num_threads=1, **options)
        again = mh.train(model, X, y, steps=6, num_threads=2, **options)
        for part in run.model.parameters:
            assert np.array_equal(run.model.parameters[part], again.model.parameters[part])
        half = mh.train(model, X, y, steps=2, **options)
        resumed = mh.train(half, X, y, steps=4, **options)
        for part in run.model.parameters:
            assert np.array_equal(run.model.parameters[part], resumed.model.parameters[part])
        for r in range(3):
            same_run(run[r], mh.train(model[r], X, y, steps=6, **options), 1e-12)
        first = run if first is None else first
        for r in range(3):
            same_run(run[r], first[r], 1e-12)
    end, _ = mh.reference.train(model[0], X, y, steps=6, optimizer=options["optimizer"])
    for part, array in first[0].model.parameters.items():
        assert relative(array, getattr(end, part)) < 1e-11  # six normalized steps


def test_files_copies_and_repr(tmp_path):
    model = mh.Classifier.gaussian(2, 4, 3, std=0.5, seed=0, attention="sigmoid", normalize=True)
    assert model.attention == "sigmoid"
    assert repr(model).endswith("scale=1.0, attention='sigmoid', normalize=True)")
    for other in (
        pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model),
        dataclasses.replace(model), model.replace(),
    ):  # fmt: skip
        assert other == model
        assert (other.attention, other.normalize) == ("sigmoid", True)
    assert model != model.replace(normalize=None)
    linear = model.replace(attention="linear", normalize=None)
    assert linear.attention == "linear"
    X = np.random.default_rng(0).standard_normal((5, 4, 3))
    run = mh.train(model, X, np.ones(5), steps=2, optimizer=mh.GradientDescent(0.1))
    run.save(tmp_path / "run.npz")
    loaded = mh.Run.load(tmp_path / "run.npz")
    assert loaded.model == run.model
    assert (loaded.model.attention, loaded.model.normalize) == ("sigmoid", True)
    stacked = mh.stack([model, model])
    assert stacked.attention == "sigmoid"
    assert stacked[1] == model
    with pytest.raises(ValueError, match="expected attention sigmoid"):
        mh.stack([model, linear])


def test_wrong_arguments():
    W, U = np.zeros((2, 3, 3)), np.zeros((2, 4, 3))
    with pytest.raises(
        ValueError, match=r"attention: expected one of softmax, linear, .* 'cosine'"
    ):
        mh.Classifier(W, U, attention="cosine")
    with pytest.raises(TypeError, match=r"attention: expected one of softmax, .* got int"):
        mh.Classifier(W, U, attention=3)
    with pytest.raises(ValueError, match="normalize: expected None with attention 'softmax1'"):
        mh.Classifier(W, U, attention="softmax1", normalize=True)
    with pytest.raises(TypeError, match="normalize: expected None, True or False, got int"):
        mh.Classifier(W, U, attention="linear", normalize=1)
    model, X = mh.Classifier(W, U, attention="linear"), np.zeros((5, 4, 3))
    with pytest.raises(
        ValueError, match="expected attention 'softmax', which this result is about"
    ):
        mh.theory.curvature_bounds(model, X)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_hessian_products_are_those_of_the_reference(dtype):
    for the, text in drawn_cases(DIFFERENTIABLE, dtype):
        loss = "squared" if isinstance(the.model, mh.Layer) else "logistic"
        signs = the.y if loss == "squared" else np.sign(the.y)
        options = the.options | {"loss": loss}
        found = mh.hvp(the.model, the.X, signs, tangent=the.model, **options)
        direction = dict(the.model.parameters)
        known = mh.reference.hvp(the.model, the.X, signs, direction, **options)
        for name, product in known.items():
            error = relative(getattr(found, name), product)
            assert error < 3 * TOLERANCE[np.dtype(dtype)], (text, name)  # a sum of three terms


@pytest.mark.parametrize("kind", KINDS)
def test_hessian_products_by_differences(kind):
    for j, (name, normalize) in enumerate(DIFFERENTIABLE):
        the = case(kind, attention=name, normalize=normalize, loss="squared", causal=True, seed=j)
        rng = np.random.default_rng(j)
        arrays = the.model.parameters
        direction = mh.Gradients(**{n: rng.standard_normal(a.shape) for n, a in arrays.items()})
        found = mh.hvp(the.model, the.X, the.y, tangent=direction, loss="squared")
        # The fourth-order difference, whose error of 1e-12 / h and h^4 is about 1e-9. Relu has a
        # kink that no logit of these cases is within h of.
        h, ends = 1e-3, []
        for step in (-2 * h, -h, h, 2 * h):
            _, g = mh.value_and_grad(the.model + step * direction, the.X, the.y, loss="squared")
            ends.append(g)
        for part in arrays:
            a, b, c, d = (getattr(g, part) for g in ends)
            difference = (a - 8 * b + 8 * c - d) / (12 * h)
            assert relative(getattr(found, part), difference) < 1e-7, (name, part)


def test_tangent_kernel():
    """Inner products of the gradients of single samples."""
    for j, (name, normalize) in enumerate(DIFFERENTIABLE):
        the = case(attention=name, normalize=normalize, causal=True, scale=0.7, seed=j)
        rows = []
        for i in range(len(the.X)):
            g = mh.backward(the.model, the.X[i : i + 1], np.ones(1))
            rows.append(np.concatenate([g.W.ravel(), g.U.ravel()]))
        known = np.array(rows) @ np.array(rows).T
        assert relative(mh.theory.ntk(the.model, the.X), known) < 1e-12, name
    hard = the.model.replace(attention="hardmax", normalize=None)
    with pytest.raises(ValueError, match=r"expected a row map with derivatives, got .* 'hardmax'"):
        mh.theory.ntk(hard, the.X)
    with pytest.raises(ValueError, match=r"expected a row map with derivatives, got .* 'hardmax'"):
        mh.hvp(hard, the.X, the.y, tangent=hard)


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS)
def test_bridges_to_torch_and_jax(kind):
    """The functions and the module have the outputs of the model, and its gradients."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    from mhfast.interop import torch as bridge

    function = bridge.classifier if kind is mh.Classifier else bridge.layer
    module = bridge.MultiHeadClassifier if kind is mh.Classifier else bridge.MultiHeadLayer
    readout = "U" if kind is mh.Classifier else "V"
    for j, (name, normalize) in enumerate(DIFFERENTIABLE):
        the = case(kind, attention=name, normalize=normalize, loss="squared", seed=j)
        arrays = (the.X, the.model.W, the.model.parameters[readout])
        tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
        outputs = function(*tensors, attention=name, normalize=normalize)
        assert np.array_equal(outputs.detach().numpy(), the.model(the.X))
        outputs.sum().backward()
        known = mh.backward(the.model, the.X, np.ones(outputs.shape), wrt=("X", "W", readout))
        for tensor, part in zip(tensors, (known.X, known.W, getattr(known, readout)), strict=True):
            assert np.array_equal(tensor.grad.numpy(), part)
        made = module.from_model(the.model)
        assert made.model() == the.model
        assert np.array_equal(made(torch.tensor(the.X)).detach().numpy(), the.model(the.X))
    sizes = (2, 3, 5) if kind is mh.Classifier else (2, 5, 3)
    made = module(*sizes, attention="relu", normalize=False)
    assert (made.model().attention, made.model().normalize) == ("relu", False)
    assert "attention='relu', normalize=False" in repr(made)
    jax = pytest.importorskip("jax", reason="needs jax: pip install jax")
    from mhfast.interop import jax as other

    function = other.classifier if kind is mh.Classifier else other.layer
    the = case(kind, attention="relu", normalize=False, loss="squared", dtype=np.float32)
    arrays = (the.X, the.model.W, the.model.parameters[readout])

    def summed(W):
        return function(arrays[0], W, arrays[2], attention="relu", normalize=False).sum()

    value, found = jax.value_and_grad(summed)(arrays[1])
    outputs = the.model(the.X)
    assert abs(float(value) / outputs.sum() - 1) < 1e-5  # float32, summed in another order
    known = mh.backward(the.model, the.X, np.ones_like(outputs), wrt="W")
    assert np.array_equal(np.asarray(found), known.W)
