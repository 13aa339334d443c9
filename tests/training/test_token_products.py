"""Steps of linear attention from products of the tokens, which are computed once and kept."""

import numpy as np
import pytest
from instances import case
from lists import LOSSES, kind_of_targets
from side_by_side import same_run

import mhfast as mh
from mhfast import _core

# Other sums than the reference's, whose rounding of some units in the last place steps of these
# sizes amplify by about ten.
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}
SCALARS = ("loss", "accuracy", "margin", "grad_norm", "param_norm", "distance")
SETTINGS = {
    "all tokens": {},
    "the last token": {"query": -1},
    "the second one": {"query": 1, "causal": True},  # sees the tokens up to it
    "queries of the model": {"query": "own", "factors": "low rank", "weight": "samples"},
    "queries of the call": {"query": "given", "lengths": True, "scale": 0.7},
    "tied factors": {"factors": "tied", "lengths": True, "normalize": False},
    "value factors": {"value_rank": 3, "weight": "rows", "scale": 1.5},
    "lengths and weights": {"lengths": True, "weight": "rows"},
}


def linear(dtype=np.float64, **settings):
    return case(mh.Layer, attention="linear", dtype=dtype, **settings)


def steps(loss="squared", **rest):
    """Options of a training: steps of a size at which the losses of the cases go down."""
    return {"steps": 6, "optimizer": mh.GradientDescent(1e-3), "loss": loss, **rest}


def train(the, record=SCALARS, **given):
    options = {k: v for k, v in the.options.items() if k != "loss"}
    data = mh.Dataset(the.X, the.y, **options)
    return mh.train(the.model, data, record=record, **given)


def difference(a, b):
    return np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


def numbers(dtype, shape, d, H, p, query=None, runs=None):
    rng = np.random.default_rng(5)
    n, T = shape
    X = rng.standard_normal((n, T, d)).astype(dtype)
    y = rng.standard_normal((n, T if query is None else 1, p)).astype(dtype)
    model = mh.Layer.gaussian(
        H, d, p, std=0.3, seed=1, query=query, runs=runs, attention="linear", dtype=dtype
    )
    return model, X, y


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("setting", SETTINGS)
def test_against_the_reference(setting, dtype, use_plan, use_isa):
    the = linear(dtype, **SETTINGS[setting])
    options = {k: v for k, v in the.options.items() if k != "loss"}
    end, history = mh.reference.train(the.model, the.X, the.y, **steps(), **options)
    use_plan("products")
    for isa in _core.available_isas():
        use_isa(isa)
        run = train(the, **steps())
        for name, array in run.model.parameters.items():
            if name != "query":
                assert array.dtype == dtype
                assert difference(array, getattr(end, name)) < TOLERANCE[dtype], (isa, name)
        for name in SCALARS:
            assert difference(run.history[name], history[name]) < TOLERANCE[dtype], (isa, name)


@pytest.mark.parametrize("wrt", ["W", "V"])
def test_one_parameter_alone(wrt, use_plan):
    """W; V, which is from attended tokens else."""
    the = linear()
    end, _ = mh.reference.train(the.model, the.X, the.y, **steps(), wrt=wrt)
    use_plan("products")
    run = train(the, **steps(wrt=wrt))
    other = "V" if wrt == "W" else "W"
    assert difference(getattr(run.model, wrt), getattr(end, wrt)) < 1e-12
    assert np.array_equal(getattr(run.model, other), getattr(the.model, other))


@pytest.mark.parametrize("loss", LOSSES[mh.Layer], ids=str)
def test_losses(loss, use_plan):
    """As they are, and where the derivatives are to be normalized."""
    the = linear(loss=loss, weight="rows", seed=3)
    if kind_of_targets(loss) == "nonnegative":  # and so are outputs, of logits that are
        the = the._replace(model=the.model.replace(W=np.abs(the.model.W)))
    for rule in (mh.GradientDescent(1e-3), mh.NormalizedGradientDescent(1e-3, by="head")):
        runs = []
        for plan in ("products", "rows"):
            use_plan(plan)
            runs.append(train(the, **steps(loss, optimizer=rule)))
        same_run(*runs, 1e-11)


def test_a_loss_of_ones_own(use_plan):
    """A Python function, which is called for blocks of rows; each step is along its gradient."""
    use_plan("products")
    the = linear(weight="rows", lengths=True)

    def squares(f, y):
        return (f - y) ** 2, 2 * (f - y)

    for rule in (mh.GradientDescent(1e-3), mh.NormalizedGradientDescent(1e-2)):
        own = train(the, **steps(squares, optimizer=rule))
        known = train(the, **steps("squared", optimizer=rule))
        for name in ("W", "V"):
            # A mean over outputs, and over p of them the squared loss is a sum.
            assert np.isfinite(getattr(own.model, name)).all()
            if isinstance(rule, mh.NormalizedGradientDescent):
                assert difference(getattr(own.model, name), getattr(known.model, name)) < 1e-12
        ratio = known.history["loss"][0] / own.history["loss"][0]
        assert ratio == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_derivatives_below_the_smallest_number(dtype, use_plan):
    """Logistic losses of large margins: the largest derivative is taken out."""
    least = 300 if dtype is np.float32 else 700
    model, X, _ = numbers(dtype, (7, 5), 4, 3, 1, query=-1)
    f = model(X)[:, 0, 0]
    model = model.replace(V=model.V * dtype(least / np.abs(f).min()))
    f = model(X)[:, 0, 0].astype(float)
    y = np.sign(f).astype(dtype)[:, None, None]
    use_plan("products")
    run = mh.train(model, X, y, steps=1, optimizer=mh.NormalizedGradientDescent(1.0))
    factor = np.exp(np.abs(f).min() - np.abs(f))[:, None, None]
    along = mh.reference.backward(model, X, y.astype(float) * factor)
    for name in ("W", "V"):
        step = getattr(run.model, name).astype(float) - getattr(model, name)
        gradient = along[name] / np.linalg.norm(along[name])
        # The step is a difference of numbers of the size of the parameter, and margins
        # have errors that exponentials amplify.
        eps = float(np.finfo(dtype).eps)
        allowed = 4 * eps * np.abs(getattr(model, name)).max() + 2 * least * eps
        np.testing.assert_allclose(step, gradient, rtol=0, atol=allowed)


def test_axes_of_every_length(use_plan):
    """Pairs of features, outputs and samples up to more than a register; more chunks than one."""
    for d, p, query, n in (
        (1, 1, -1, 1), (2, 3, -1, 7), (3, 1, None, 18), (5, 9, -1, 33), (17, 2, None, 9),
        (7, 5, None, 200),
    ):  # fmt: skip
        model, X, y = numbers(np.float64, (n, 4), d, 3, p, query=query)
        rule = mh.GradientDescent(1e-3)
        end, _ = mh.reference.train(model, X, y, steps=2, optimizer=rule, loss="squared")
        use_plan("products")
        run = mh.train(model, X, y, steps=2, optimizer=rule, loss="squared")
        for name in ("W", "V"):
            assert difference(getattr(run.model, name), getattr(end, name)) < 1e-12, (d, n)


def test_threads_change_no_bit():
    """One run with threads that share its samples, and runs that share threads."""
    for runs in (None, 3):
        model, X, y = numbers(np.float32, (3000, 6), 9, 4, 5, runs=runs)
        assert mh.explain(model, X)["training_plan"] == "products"
        given = {"steps": 4, "optimizer": mh.Adam(0.01), "loss": "squared"}
        one = mh.train(model, X, y, num_threads=1, **given)
        for threads in (2, 3, 4):
            other = mh.train(model, X, y, num_threads=threads, **given)
            assert other.model == one.model
            assert np.array_equal(other.history["loss"], one.history["loss"])


@pytest.mark.parametrize("axes", [(), ("X", "y"), ("lengths",), ("y", "weight")])
def test_runs_side_by_side_are_those_of_each_alone(axes, use_plan):
    use_plan("products")
    more = {"lengths": True} if "lengths" in axes else {"weight": "samples"}
    the = linear(runs=("W", "V", *axes), **more)
    together = train(the, **steps())
    for r in range(together.model.runs):
        of = the.run(r)
        alone = train(of, **steps())
        assert together[r].model == alone.model
        for name in SCALARS:
            assert np.array_equal(together[r].history[name], alone.history[name])


def test_a_saved_run_goes_on_bitwise(tmp_path, use_plan):
    use_plan("products")
    the = linear(lengths=True)
    test = mh.Dataset(*linear(seed=8)[1:3])
    given = steps(optimizer=mh.Momentum(1e-3), test=test)
    record = {"loss": 1, "test_loss": 2, "attention": 3}
    whole = train(the, record=record, **given)
    train(the, record=record, **(given | {"steps": 2})).save(tmp_path / "run.npz")
    data = mh.Dataset(the.X, the.y, lengths=the.options["lengths"])
    run = mh.train(mh.Run.load(tmp_path / "run.npz"), data, test=test, steps=4)
    assert run == whole
    expected = mh.evaluate(the.model, data, record=("attention",))["attention"]
    assert np.array_equal(whole.history["attention"][0], expected)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_tokens_far_from_one(dtype, use_plan):
    """Powers of two in the tokens and out of the parameters change no bit."""
    use_plan("products")
    model, X, y = numbers(dtype, (9, 6), 4, 3, 2)
    power = 30 if dtype is np.float32 else 300
    by = np.ldexp(dtype(1), power)
    plain = mh.train(model, X, y, steps=1, optimizer=mh.GradientDescent(0.01), loss="squared")
    far = mh.train(
        model.replace(W=model.W / by / by, V=model.V / by), X * by, y,
        steps=0, optimizer=mh.GradientDescent(0.01), loss="squared",
    )  # fmt: skip
    assert far.history["loss"][0] == pytest.approx(plain.history["loss"][0], rel=1e-5)
    far = mh.train(
        model.replace(W=model.W / by / by, V=model.V / by), X * by, y, wrt="V",
        steps=1, optimizer=mh.GradientDescent(0.01 / 4.0**power), loss="squared",
    )  # fmt: skip
    near = mh.train(
        model, X, y, wrt="V", steps=1, optimizer=mh.GradientDescent(0.01), loss="squared"
    )
    assert np.array_equal(far.model.V * by, near.model.V)


def test_what_is_not_finite_stays_where_it_is(use_plan):
    """Rows of weight 0 and padding change no bit, whatever they hold; others are not finite."""
    use_plan("products")
    model, X, y = numbers(np.float64, (11, 6), 4, 3, 2)
    weight = np.random.default_rng(3).uniform(0.5, 2.0, 11)
    weight[3] = 0
    lengths = np.array([6, 5, 4, 6, 3, 2, 1, 0, 6, 5, 4])
    given = {"steps": 4, "optimizer": mh.GradientDescent(0.02), "loss": "squared"}
    plain = mh.train(model, mh.Dataset(X, y, weight=weight, lengths=lengths), **given)
    bad = X.copy()
    bad[3] = np.nan
    bad[4, 3:] = np.inf
    run = mh.train(model, mh.Dataset(bad, y, weight=weight, lengths=lengths), **given)
    assert run.model == plain.model
    bad[0, 0, 0] = np.nan
    for weights in (None, weight):
        with pytest.warns(RuntimeWarning, match="X holds nan at index 0, 0, 0"):
            run = mh.train(model, mh.Dataset(bad, y, weight=weights, lengths=lengths), **given)
        assert run.reason == "nonfinite"
        assert run.step == 0


@pytest.mark.verdict
def test_what_explain_says(use_plan):
    model, X, _ = numbers(np.float64, (50, 21), 15, 7, 2)
    found = mh.explain(model, X)
    assert found["training_plan"] == "products"
    assert found["product_bytes"] == 50 * 120 * 8  # pairs, which fill registers of any length
    assert mh.explain(model, X, runs=3)["product_bytes"] == 3 * found["product_bytes"]
    most = 2**28 // (120 * 8)
    assert mh.explain(model, (most, 21, 15))["training_plan"] == "products"
    more = mh.explain(model, (most + 1, 21, 15))
    assert (more["training_plan"], more["product_bytes"]) == (more["plan"], 0)
    use_plan("products")
    # Never of models that they do not serve.
    others = (
        model.replace(attention="softmax"), model.replace(causal=True), model.replace(W=None),
        mh.Layer(model.W, None, attention="linear"),
        mh.Layer(model.W, model.V, prompt=X[0, :3], attention="linear"),
        mh.Classifier.zeros(heads=7, tokens=21, dim=15, attention="linear"),
    )  # fmt: skip
    for other in others:
        assert mh.explain(other, X)["training_plan"] != "products"
