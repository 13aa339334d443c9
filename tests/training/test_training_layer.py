"""Layers, factored weights, prompts, lengths and masks train like the classifier."""

import dataclasses

import numpy as np
import pytest
from lists import LOSSES, targets, within_domain

import mhfast as mh

# Rounding of one step is a few units in the last place of the parameters; tens of steps at these
# step sizes amplify it by about ten.
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}
SCALARS = ("loss", "accuracy", "margin", "grad_norm", "param_norm", "distance")
n, T, d, H, p, r = 7, 3, 5, 2, 6, 4


def draw(dtype=np.float64, seed=1):
    rng = np.random.default_rng(seed)
    return lambda *shape: (0.4 * rng.standard_normal(shape)).astype(dtype)


def layer(dtype=np.float64, *, factored=False, rows=None, **options):
    new = draw(dtype)
    W = mh.LowRank(new(H, d, r), new(H, d, r)) if factored else new(H, d, d)
    prompt = None if rows is None else new(rows, d)
    return mh.Layer(W, new(H, d, p), prompt=prompt, **options)


def samples(dtype=np.float64, loss="squared", *, q=T, **options):
    new, rng = draw(dtype, 2), np.random.default_rng(3)
    y = new(n, q, p) if loss == "squared" else targets(loss, (n, q, p), rng, dtype, p)
    return mh.Dataset(2.5 * new(n, T, d), y, **options)


def fitting(loss, model, data):
    """The model and the samples, so that outputs are ones that the loss takes."""
    model, X = within_domain(loss, model, data.X)
    return model, dataclasses.replace(data, X=X)


def difference(a, b):
    return float(np.abs(np.asarray(a, np.float64) - b).max() / max(np.abs(b).max(), 1e-3))


def check(model, data, optimizer=mh.GradientDescent(0.05), steps=15, **options):  # noqa: B008
    run = mh.train(model, data, steps=steps, optimizer=optimizer, record=SCALARS, **options)
    end, history = mh.reference.train(
        model, data.X, data.y, steps=steps, optimizer=optimizer,
        query=data.query, weight=data.weight, lengths=data.lengths, **options,
    )  # fmt: skip
    tolerance = TOLERANCE[model.dtype.type]
    assert run.reason == "steps"
    assert run.model.dtype == model.dtype
    for name, array in end.parameters().items():
        assert difference(run.model.parameters[name], array) < tolerance, name
    for name in SCALARS:
        assert run.history[name].dtype == np.float64
        assert difference(run.history[name], history[name]) < tolerance, name
    assert history["distance"][-1] > 1e-3  # something happened
    return run


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("loss", LOSSES[mh.Layer])
def test_losses(loss, dtype):
    check(*fitting(loss, layer(dtype), samples(dtype, loss)), loss=loss)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["layer", "classifier"])
def test_factored_weights(kind, tied, dtype):
    new = draw(dtype)
    W = mh.LowRank(new(H, d, r)) if tied else mh.LowRank(new(H, d, r), new(H, d, r))
    if kind == "layer":
        model, data = mh.Layer(W, new(H, d, p)), samples(dtype)
    else:
        model = mh.Classifier(W, new(H, T, d))
        data = mh.Dataset(samples(dtype).X, np.where(np.arange(n) % 3, 1, -1))
    run = check(model, data, loss="squared" if kind == "layer" else "logistic")
    assert isinstance(run.model.W, mh.LowRank)
    assert (run.model.K is None) == tied
    assert run.wrt == tuple(model.parameters)


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_prompts(loss):
    run = check(layer(rows=8), samples(loss=loss, q=8), loss=loss)
    assert run.model.prompt.shape == (8, d)


def test_prompt_of_a_classifier():
    new = draw()
    model = mh.Classifier(new(H, d, d), new(H, 8, d), prompt=new(8, d))
    check(model, mh.Dataset(samples().X, np.where(np.arange(n) % 3, 1, -1)))


@pytest.mark.parametrize("query", [0, -1, "external"])
def test_queries(query):
    external = draw()(n, 4, d) if query == "external" else None
    q = 1 if external is None else 4
    check(
        layer(query=None if q == 4 else query, scale=0.7),
        samples(q=q, query=external),
        loss="squared",
    )


@pytest.mark.parametrize("loss", LOSSES[mh.Layer])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_and_masks(causal, loss):
    lengths = np.array([3, 2, 0, 1, 3, 2, 1])
    check(*fitting(loss, layer(causal=causal), samples(loss=loss, lengths=lengths)), loss=loss)


@pytest.mark.parametrize("loss", LOSSES[mh.Layer])
@pytest.mark.parametrize("shape", [(n,), (n, T)])
def test_weights_of_samples_and_of_rows(shape, loss):
    weight = np.random.default_rng(4).integers(0, 3, shape).astype(float)
    check(*fitting(loss, layer(), samples(loss=loss, weight=weight)), loss=loss)


@pytest.mark.parametrize(
    "wrt", ["Q", "K", "V", "prompt", ("Q", "K"), ("K", "prompt"), ("Q", "V", "prompt")]
)
@pytest.mark.parametrize(
    "optimizer", [mh.Momentum(0.05), mh.NormalizedGradientDescent(0.05, by="head")], ids=repr
)
def test_what_is_trained(optimizer, wrt):
    model = layer(factored=True, rows=8)
    run = check(model, samples(q=8), optimizer, loss="squared", wrt=wrt)
    for name, array in run.model.parameters.items():
        assert np.array_equal(array, model.parameters[name]) == (name not in wrt)
    assert run.wrt == ((wrt,) if isinstance(wrt, str) else wrt)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_records_of_a_layer(dtype):
    """Snapshots under the model's own names, and what is derived from them."""
    model = layer(dtype, factored=True, rows=8)
    groups = np.random.default_rng(5).integers(0, 2, (n, T))
    data = samples(dtype, q=8, token_groups=(groups, ("a", "b")))
    names = ("Q", "K", "V", "prompt")
    summaries = ("attention", "attention_max", "attention_groups", "cosine")
    direction = mh.Gradients(Q=model.Q, prompt=model.prompt)
    run = mh.train(
        model, data, steps=6, loss="squared", optimizer=mh.GradientDescent(0.2),
        record=dict.fromkeys((*names, *summaries), 3), directions=direction,
    )  # fmt: skip
    for row in range(3):
        Q, K, V, prompt = (run.history[name][row] for name in names)
        theta = mh.Layer(mh.LowRank(Q, K), V, prompt=prompt)
        A = mh.reference.attention(theta, data.X)
        assert A.shape == (n, H, 8, T)
        assert difference(run.history["attention"][row], A) < TOLERANCE[dtype]
        assert difference(run.history["attention_max"][row], A.max(axis=3).mean((0, 2))) < 1e-5
        second = (A * groups[:, None, None, :]).sum(axis=3).mean((0, 2))
        assert difference(run.history["attention_groups"][row][:, 0, 1], second) < 1e-5
        pairs = [(Q, model.Q), (prompt, model.prompt)]
        dot, left, right = (
            sum((np.asarray(a, np.float64) * b).sum() for a, b in terms)
            for terms in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
        )
        assert run.history["cosine"][row] == pytest.approx(dot / np.sqrt(left * right), rel=1e-6)
    for name in names:
        assert run.history[name].dtype == dtype
        assert np.array_equal(run.history[name][0], model.parameters[name])
        assert np.array_equal(run.history[name][-1], run.model.parameters[name])


def test_test_sets_of_a_layer():
    clean = samples()
    run = mh.train(
        layer(), samples(), steps=4, loss="squared", optimizer=mh.GradientDescent(0.2),
        test={"clean": clean, "pair": (clean.X, clean.y)},
        record=("loss", "clean_loss", "pair_margin", "margin"),
    )  # fmt: skip
    # The same sum, at most in another order.
    assert run.history["clean_loss"] == pytest.approx(run.history["loss"], rel=1e-14)
    assert run.history["pair_margin"] == pytest.approx(run.history["margin"], rel=1e-14)


@pytest.mark.parametrize(
    "model",
    [layer(), layer(factored=True, rows=8), layer(query=-1, causal=True, scale=0.7)],
    ids=["plain", "factored", "causal"],
)
@pytest.mark.parametrize(
    "optimizer", [mh.Momentum(0.05, 0.8), mh.Adam(0.02), mh.GradientDescent(0.1)], ids=repr
)
def test_a_saved_layer_goes_on_bitwise(model, optimizer, tmp_path):
    q = 1 if model.query == -1 else T if model.prompt is None else 8
    data = samples(q=q)
    options = {"loss": "squared", "optimizer": optimizer, "record": {"loss": 1, "V": 4}}
    whole = mh.train(model, data, steps=15, **options)
    mh.train(model, data, steps=7, **options).save(tmp_path / "run.npz")
    run = mh.Run.load(tmp_path / "run.npz")
    assert run.model.causal == model.causal
    assert mh.train(run, data, steps=8) == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrt": "U"}, r"wrt: expected names from Q, K, V, prompt, got 'U'"),
        ({"wrt": "W"}, r"wrt: .*got 'W'"),
        ({"record": "W"}, r"record: .*Q, K, V, prompt, .*got 'W'"),
        ({"loss": "hunge"}, r"loss: .*cross_entropy.*got 'hunge'"),
        ({"directions": mh.Gradients(W=np.ones((H, d, d)))}, r"directions: .*Q, K, V.*got 'W'"),
    ],
)
def test_wrong_names(options, message):
    with pytest.raises(ValueError, match=message):
        mh.train(
            layer(factored=True, rows=8), samples(q=8), steps=1,
            **({"loss": "squared", "optimizer": mh.GradientDescent(0.1)} | options),
        )  # fmt: skip
