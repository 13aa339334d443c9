"""Linear attention by the triangular factor of the tokens, R with RᵀR = XᵀX / N in the place of X.

`use_keys("triangle")` takes R whatever it costs, `use_keys("tokens")` never, and "auto" where it is
cheaper, as `mhfast.explain` says.
"""

import numpy as np
import pytest
from instances import TOLERANCE, case, relative
from side_by_side import same_run
from trainings import PLANS

import mhfast as mh
from mhfast import _core

KINDS = (mh.Classifier, mh.Layer)
NOT_CAUSAL = (
    {},
    {"query": -1},
    {"query": 1, "causal": True},  # sees the tokens up to it
    {"query": "given", "lengths": True},
    {"query": "own", "factors": "low rank"},
    {"prompt": True, "weight": "samples"},
    {"factors": "tied", "prompt": True, "lengths": True},
    {"lengths": True, "weight": "samples", "scale": 0.7},
    {"identities": "W", "lengths": True},
    {"identities": "V", "query": "given", "scale": 0.7},
    {"identities": "WV", "prompt": True},
)


def cases(dtype):
    """Every setting with either kind of model, divided by the tokens or not; plans in turn."""
    for j, setting in enumerate(NOT_CAUSAL):
        for kind in KINDS:
            if kind is mh.Classifier and "identities" in setting:
                continue
            more = {"attention": "linear", "normalize": j % 3 != 0, "seed": 10 + j}
            if kind is mh.Layer and "weight" in setting:
                more["weight"] = "rows"
            yield case(kind, **setting | {"loss": "squared", "dtype": dtype} | more), setting


def many_tokens(kind, *, dtype=np.float64, n=11, T=23, d=4, H=7, seed=0, **settings):
    """A model and samples for which R is cheaper in single calls, all rows being queries."""
    rng = np.random.default_rng(seed)
    W = (rng.standard_normal((H, d, d)) / d).astype(dtype)
    readout = (rng.standard_normal((H, T if kind is mh.Classifier else d, d)) / 9).astype(dtype)
    X = rng.standard_normal((n, T, d)).astype(dtype)
    y = rng.standard_normal((n,) if kind is mh.Classifier else (n, T, d)).astype(dtype)
    return kind(W, readout, attention="linear", **settings), X, y


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_outputs_and_gradients_are_those_of_the_reference(dtype, use_keys, use_plan):
    use_keys("triangle")
    for j, (the, setting) in enumerate(cases(dtype)):
        for plan in (PLANS[j % len(PLANS)], PLANS[(j + 2) % len(PLANS)]):
            use_plan(plan)
            outputs = mh.reference.outputs(the.model, the.X, **the.seen())
            error = relative(the.model(the.X, **the.seen()), outputs)
            assert error < TOLERANCE[np.dtype(dtype)], (setting, plan)
            names = [name for name in the.names() if name != "X"]
            value, found = the.value_and_grad(wrt=names)
            known, gradient = mh.reference.value_and_grad(
                the.model, the.X, the.y, wrt=names, **the.options
            )
            assert abs(value - known) <= TOLERANCE[np.dtype(dtype)] * abs(known)
            for name in names:
                error = relative(getattr(found, name), gradient[name])
                assert error < TOLERANCE[np.dtype(dtype)], (setting, plan, name)


def test_gradients_by_tokens_take_the_tokens(use_keys):
    use_keys("triangle")
    for the, _ in cases(np.float64):
        _, found = the.value_and_grad(wrt=the.names())
        _, gradient = mh.reference.value_and_grad(
            the.model, the.X, the.y, wrt=the.names(), **the.options
        )
        for name in the.names():
            assert relative(getattr(found, name), gradient[name]) < 1e-12


def test_hessian_products_are_those_of_the_reference(use_keys):
    use_keys("triangle")
    for the, setting in cases(np.float64):
        found = mh.hvp(the.model, the.X, the.y, tangent=the.model, **the.options)
        direction = dict(the.model.parameters)
        known = mh.reference.hvp(the.model, the.X, the.y, direction, **the.options)
        for name, product in known.items():
            # A sum of three terms.
            assert relative(getattr(found, name), product) < 3e-12, (setting, name)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set(kind, dtype, use_isa):
    """Where R is cheaper, without force; lengths from 0 to T."""
    model, X, y = many_tokens(kind, dtype=dtype)
    assert mh.explain(model, X)["keys"] == 4
    lengths = np.array([23, 0, 1, 3, 4, 5, 22, 23, 17, 2, 9])
    options = {"lengths": lengths, "loss": "squared"}
    known, gradient = mh.reference.value_and_grad(model, X, y, **options)
    outputs = mh.reference.outputs(model, X, lengths=lengths)
    for isa in _core.available_isas():
        use_isa(isa)
        tolerance = TOLERANCE[np.dtype(dtype)]
        assert relative(model(X, lengths=lengths), outputs) < tolerance, isa
        value, found = mh.value_and_grad(model, X, y, **options)
        assert abs(value - known) <= tolerance * known
        for name in model.parameters:
            assert relative(getattr(found, name), gradient[name]) < tolerance, (isa, name)


def test_axes_of_every_length(use_keys):
    """Features up to more than a register, tokens up to more than a block of reflections."""
    use_keys("triangle")
    rng = np.random.default_rng(3)
    for d in (1, 2, 3, 5, 8, 17):
        for T in (1, 2, d, 31, 32, 33, 67):
            model = mh.Layer(
                rng.standard_normal((2, d, d)) / d, rng.standard_normal((2, d, 3)), -1,
                attention="linear",
            )  # fmt: skip
            X = rng.standard_normal((13, T, d))
            assert relative(model(X), mh.reference.outputs(model, X)) < 1e-12, (d, T)


def test_dependent_tokens_and_features_of_any_size():
    """R of tokens in a plane, of features 1e-9 to 1e9 in size, and of a single repeated token."""
    model, X, _ = many_tokens(mh.Layer, d=6, n=5)
    rng = np.random.default_rng(1)
    plane = rng.standard_normal((5, 23, 2)) @ rng.standard_normal((2, 6))
    sizes = 10.0 ** np.array([-9, 3, 0, 9, -5, 6])
    W, V = model.W / np.outer(sizes, sizes), model.V / sizes[:, None]
    scaled = mh.Layer(W, V, attention="linear")
    for of, tokens in ((model, plane), (scaled, X * sizes), (model, np.repeat(X[:, :1], 23, 1))):
        assert mh.explain(of, tokens)["keys"] == 6
        assert relative(of(tokens), mh.reference.outputs(of, tokens)) < 1e-12
    zeros = np.zeros_like(X)
    assert not model(zeros).any()


@pytest.mark.parametrize("exponent", [-400, 400])
def test_tokens_of_extreme_size(exponent):
    """XᵀX would leave the range of float64; powers of two leave all digits alone."""
    model, X, _ = many_tokens(mh.Layer)
    factor = 2.0**exponent
    extreme = mh.Layer(model.W / factor / factor, model.V / factor, attention="linear")
    assert np.array_equal(extreme(X * factor), model(X))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_do_not_depend_on_the_batch_or_the_number_of_threads(kind):
    model, X, y = many_tokens(kind, n=37)
    lengths = np.random.default_rng(0).integers(0, 24, 37)
    together = model(X, lengths=lengths)
    for i in (0, 5, 36):
        assert np.array_equal(model(X[i : i + 1], lengths=lengths[i : i + 1])[0], together[i])
    with mh.num_threads(3):
        assert np.array_equal(model(X, lengths=lengths), together)
        _, several = mh.value_and_grad(model, X, y, loss="squared")
    _, one = mh.value_and_grad(model, X, y, loss="squared", num_threads=1)
    for name in model.parameters:
        assert np.array_equal(getattr(several, name), getattr(one, name))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_sample(kind):
    model, X, y = many_tokens(kind)
    lengths = np.full(len(X), 20)
    bad = X.copy()
    bad[3, 0, 0] = np.nan
    bad[4, 7, 3] = np.inf
    bad[:, 20:] = np.nan  # beyond the length
    outputs = model(bad, lengths=lengths)
    clean = model(X, lengths=lengths)
    kept = ~np.isin(np.arange(len(X)), (3, 4))
    assert np.array_equal(outputs[kept], clean[kept])
    seen = outputs[~kept] if kind is mh.Classifier else outputs[~kept][:, :20]
    assert not np.isfinite(seen).any()
    weight = kept.astype(float)
    options = {"lengths": lengths, "weight": weight, "loss": "squared"}
    value, found = mh.value_and_grad(model, bad, y, **options)
    known, gradient = mh.reference.value_and_grad(model, X, y, **options)
    assert abs(value - known) < 1e-12 * known  # sums in another order
    for name in model.parameters:
        assert relative(getattr(found, name), gradient[name]) < 1e-12


def test_many_samples_go_by_in_pieces(use_keys):
    """R of 30000 samples of 9 dimensions has more than the 16 MB that a call keeps at a time."""
    rng = np.random.default_rng(0)
    n, T, d, H = 30000, 14, 9, 8
    model = mh.Layer(
        rng.standard_normal((H, d, d)), rng.standard_normal((H, d, 1)), attention="linear"
    )
    X = rng.standard_normal((n, T, d))
    assert mh.explain(model, X)["keys"] == d
    outputs = model(X)
    for first in (0, 25000, n - 5):
        assert np.array_equal(model(X[first : first + 5]), outputs[first : first + 5])
    use_keys("tokens")
    assert relative(outputs, model(X)) < 1e-12  # sums in another order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [False, True])
def test_training_is_that_with_the_tokens(kind, lengths, use_keys, use_plan):
    """Alone and side by side, on 1 and 2 threads, resumed; attention is recorded of the tokens."""
    model, X, y = many_tokens(kind, T=13, H=3)
    model = mh.stack([model.replace(W=factor * model.W) for factor in (1.0, -0.5, 0.7)])
    ends = np.array([13, 0, 1, 3, 4, 5, 12, 13, 7, 2, 9]) if lengths else None
    data = mh.Dataset(X, y, lengths=ends, token_groups=np.arange(11 * 13).reshape(11, 13) % 2)
    options = {
        "optimizer": mh.Adam(0.02),
        "loss": "squared",
        "record": ("loss", "grad_norm", "attention", "attention_groups", "test_loss"),
        "test": data[:5],
    }
    assert mh.explain(model[0], (11, 13, 4))["training_keys"] == 4
    use_keys("tokens")
    known = [mh.train(model[r], data, steps=6, **options) for r in range(3)]
    use_keys("auto")
    for plan in ("runs", "auto", "rows"):
        use_plan(plan)
        run = mh.train(model, data, steps=6, num_threads=1, **options)
        again = mh.train(model, data, steps=6, num_threads=2, **options)
        half = mh.train(model, data, steps=2, **options)
        resumed = mh.train(half, data, steps=4, **options)
        for name, array in run.model.parameters.items():
            assert np.array_equal(array, again.model.parameters[name])
            assert np.array_equal(array, resumed.model.parameters[name])
        for r in range(3):
            same_run(run[r], known[r], 1e-12)  # six steps of sums in another order


def test_training_on_batches(use_keys):
    """Factors of all samples before the first step, or where they are many of each batch."""
    rng = np.random.default_rng(0)
    for n, d, T in ((50, 4, 13), (5400, 20, 31)):
        X = rng.standard_normal((n, T, d))
        y = rng.standard_normal((n, T, 1))
        model = mh.Layer.gaussian(4, d, 1, std=0.2, seed=1, runs=2, attention="linear")
        lengths = rng.integers(0, T + 1, n)
        data = mh.Dataset(X, y, lengths=lengths, weight=rng.random((n, T)))
        options = {
            "steps": 5, "optimizer": mh.GradientDescent(0.1), "loss": "squared", "batch": 7,
            "seed": (3, 4), "record": {"loss": 5},
        }  # fmt: skip
        runs = {}
        for keys in ("tokens", "auto"):
            use_keys(keys)
            runs[keys] = mh.train(model, data, num_threads=1, **options)
        several = mh.train(model, data, num_threads=2, **options)
        for r in range(2):
            same_run(runs["auto"][r], runs["tokens"][r], 1e-12)
        assert np.array_equal(several.model.W, runs["auto"].model.W)


@pytest.mark.parametrize("every", [1, 3])
def test_training_on_new_samples(every, use_keys):
    """Of a population that the core draws from, and of a function."""
    d = 5
    data = mh.data.icl_regression(40, 30, d, seed=0)
    model = mh.Layer.gaussian(9, d, 1, std=0.1, seed=1, query=-1, attention="linear")
    for stream in (data, lambda n, seed: data.sample(n, seed=seed)):
        options = {
            "steps": 7, "optimizer": mh.GradientDescent(0.05), "loss": "squared", "batch": 9,
            "record": {"loss": 7}, "stream": mh.Stream(stream, every),
        }  # fmt: skip
        runs = {}
        for keys in ("tokens", "triangle", "auto"):
            use_keys(keys)
            runs[keys] = mh.train(model, data, num_threads=1, **options)
        several = mh.train(model, data, num_threads=2, **options)
        same_run(runs["triangle"], runs["tokens"], 1e-12)
        same_run(runs["auto"], runs["tokens"], 1e-12)
        assert np.array_equal(several.model.W, runs["auto"].model.W)


@pytest.mark.verdict
def test_what_explain_says():
    def keys(model, shape):
        found = mh.explain(model, shape)
        return found["keys"], found["training_keys"]

    linear = mh.Layer.gaussian(1, 4, 1, std=0.1, seed=0, query=-1, attention="linear")
    assert keys(linear, (50, 21, 4)) == (21, 4)  # one head, one row: R costs more than it saves
    assert keys(linear, (50, 5, 4)) == (5, 5)
    several = mh.Layer.gaussian(40, 4, 1, std=0.1, seed=0, query=-1, attention="linear")
    assert keys(several, (50, 21, 4)) == (4, 4)
    assert keys(several.replace(attention="relu"), (50, 21, 4)) == (21, 21)
    assert keys(several.replace(query=None, causal=True), (50, 21, 4)) == (21, 21)
    # An integer query sees a prefix of the tokens, and is not causal in the core.
    assert keys(several.replace(causal=True), (50, 21, 4)) == (4, 4)


def test_names_of_keys():
    with pytest.raises(ValueError, match="keys: expected auto, tokens or triangle, got 'few'"):
        _core.force_keys("few")
