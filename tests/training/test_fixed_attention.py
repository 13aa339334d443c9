"""Training of readouts alone, where the attended tokens are computed once and kept."""

import numpy as np
import pytest
from lists import LOSSES, targets, within_domain
from trainings import MODELS, PARAMETERS, draw

import mhfast as mh
from mhfast._arguments.names import AttentionName

# Other sums than the reference's, whose rounding of some units in the last place tens of steps of
# these sizes amplify by about ten.
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}
N, T, D, H = 11, 5, 6, 3
SCALARS = ("loss", "accuracy", "margin", "grad_norm", "param_norm", "distance")


def readout(model):
    return tuple(name for name in model.parameters if name in ("U", "V", "A", "B"))


def difference(a, b):
    return np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


def settings(model, **rest):
    squared = isinstance(model, mh.Layer)
    return {
        "steps": 12, "optimizer": mh.GradientDescent(0.02 if squared else 0.3),
        "loss": "squared" if squared else "logistic", "wrt": readout(model), "record": SCALARS,
    } | rest  # fmt: skip


def drawn(kind, parameter="dense", dtype=np.float64, *, n=N, seed=0, **rest):
    """A model whose readout can be trained, and data with weights of 0 and lengths."""
    model, data = draw(kind, parameter, dtype, n, T, D, H, seed=seed)
    rng = np.random.default_rng(seed + 1)
    weight = rng.uniform(0.5, 2.0, n).astype(dtype)
    weight[3] = 0
    lengths = rng.integers(1, T + 1, n)
    return model, mh.Dataset(
        data.X, data.y, query=data.query, weight=weight, lengths=lengths, **rest
    )


def close(run, other, tolerance):
    for name in run.wrt:
        assert difference(run.model.parameters[name], other.model.parameters[name]) < tolerance
    for name, values in other.history.items():
        assert difference(run.history[name], values) < tolerance, name


def same(run, other):
    assert run.model == other.model
    for name, values in other.history.items():
        np.testing.assert_array_equal(run.history[name], values, name)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("parameter", [p for p in PARAMETERS if p != "prompt and identity"])
@pytest.mark.parametrize("kind", MODELS)
def test_against_the_reference(kind, parameter, dtype, use_plan):
    use_plan("attended")
    model, data = drawn(kind, parameter, dtype)
    given = settings(model)
    run = mh.train(model, data, **given)
    end, history = mh.reference.train(
        model, data.X, data.y, steps=given["steps"], optimizer=given["optimizer"],
        loss=given["loss"], wrt=given["wrt"], query=data.query, weight=data.weight,
        lengths=data.lengths,
    )  # fmt: skip
    for name, array in run.model.parameters.items():
        assert array.dtype == dtype
        if name in given["wrt"]:
            assert difference(array, getattr(end, name)) < TOLERANCE[dtype]
        else:
            np.testing.assert_array_equal(array, model.parameters[name])
    for name in SCALARS:
        assert difference(run.history[name], history[name]) < TOLERANCE[dtype], name


@pytest.mark.parametrize(
    "optimizer",
    [
        mh.Momentum(0.05),
        mh.Adam(0.01),
        mh.NormalizedGradientDescent(0.05, by="head"),
        mh.NormalizedGradientDescent(0.05, by="all", l2=0.01),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", MODELS)
def test_optimizers_against_steps_from_the_tokens(kind, optimizer, use_plan):
    model, data = drawn(kind, "identity")
    given = settings(model, optimizer=optimizer, steps=30)
    runs = []
    for plan in ("attended", "rows"):
        use_plan(plan)
        runs.append(mh.train(model, data, **given))
    close(*runs, 1e-11)


@pytest.mark.parametrize("attention", AttentionName.__args__)
@pytest.mark.parametrize("causal", [False, True])
def test_row_maps(attention, causal, use_plan):
    rng = np.random.default_rng(2)
    W, V = rng.standard_normal((H, D, D)), rng.standard_normal((H, D, 4))
    model = mh.Layer(W, V, attention=attention, causal=causal)
    data = mh.Dataset(
        rng.standard_normal((N, T, D)), rng.standard_normal((N, T, 4)),
        lengths=rng.integers(1, T + 1, N), weight=rng.uniform(0.5, 2.0, (N, T)),
    )  # fmt: skip
    given = settings(model, optimizer=mh.NormalizedGradientDescent(0.05))
    runs = []
    for plan in ("attended", "rows"):
        use_plan(plan)
        runs.append(mh.train(model, data, **given))
    close(*runs, 1e-11)


@pytest.mark.parametrize(
    ("kind", "loss"), [(kind, loss) for kind in MODELS for loss in LOSSES[kind]], ids=str
)
def test_losses(kind, loss, use_plan):
    """As they are, and where the derivatives are to be normalized."""
    rng = np.random.default_rng(4)
    model, data = draw(kind, "token", np.float64, N, T, D, H)
    model, X = within_domain(loss, model, data.X)
    y = targets(loss, np.shape(data.y), rng, outputs=4)
    data = mh.Dataset(X, y, weight=rng.integers(0, 3, N).astype(float))
    for optimizer in (mh.GradientDescent(1e-3), mh.NormalizedGradientDescent(1e-3)):
        given = settings(model, loss=loss, optimizer=optimizer)
        runs = []
        for plan in ("attended", "rows"):
            use_plan(plan)
            runs.append(mh.train(model, data, **given))
        close(*runs, 1e-11)


@pytest.mark.parametrize("kind", MODELS)
def test_a_loss_of_ones_own(kind, use_plan):
    """A Python function, which is called for blocks of rows."""
    use_plan("attended")
    model, data = drawn(kind)

    def squares(f, y):
        return (f - y) ** 2, 2 * (f - y)

    given = settings(model, optimizer=mh.NormalizedGradientDescent(0.05))
    close(
        mh.train(model, data, **(given | {"loss": squares})),
        mh.train(model, data, **(given | {"loss": "squared"})),
        1e-12,
    )


@pytest.mark.parametrize("scale", [700, 2000])
def test_derivatives_below_the_smallest_number(scale, use_plan):
    """Logistic losses of margins from `scale` on: the largest derivative is taken out."""
    use_plan("attended")
    rng = np.random.default_rng(5)
    X = rng.standard_normal((7, T, D))
    W = rng.standard_normal((H, D, D))
    U = rng.standard_normal((H, T, D))
    f = mh.Classifier(W, U)(X)
    U *= scale / np.sort(np.abs(f))[0]
    model, y = mh.Classifier(W, U), np.sign(f)
    f = model(X) * y
    assert f.min() == pytest.approx(scale)
    run = mh.train(model, X, y, steps=1, optimizer=mh.NormalizedGradientDescent(1.0), wrt="U")
    attended = mh.reference.attention(model, X) @ X[:, None]  # (n, H, q, d)
    along = np.einsum("n,nhqd->hqd", y * np.exp(f.min() - f), attended)
    step = run.model.U - U
    # The step is a difference of numbers of the size of U.
    allowed = 4 * np.finfo(float).eps * np.abs(U).max()
    np.testing.assert_allclose(step, along / np.linalg.norm(along), rtol=0, atol=allowed)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_tokens_far_from_one(dtype, use_plan):
    """Powers of two in the tokens and out of the readout change no bit."""
    use_plan("attended")
    power = 60 if dtype is np.float32 else 300
    by = np.ldexp(dtype(1), power)
    model, data = draw(mh.Classifier, "dense", dtype, N, T, D, H)
    given = {"steps": 9, "wrt": "U", "record": ("loss", "margin")}
    W = model.W / by / by  # numbers that are subnormal lose bits
    model = mh.Classifier(W * by * by, model.U)
    plain = mh.train(model, data, optimizer=mh.GradientDescent(0.3), **given)
    far = mh.train(
        mh.Classifier(W, model.U / by), data.X * by, data.y,
        optimizer=mh.GradientDescent(0.3 / 4.0**power), **given,
    )  # fmt: skip
    np.testing.assert_array_equal(far.model.U * by, plain.model.U)
    for name in given["record"]:
        np.testing.assert_array_equal(far.history[name], plain.history[name])


@pytest.mark.parametrize("parameter", ["dense", "identity", "value factors"])
@pytest.mark.parametrize("kind", MODELS)
def test_threads_change_no_bit(kind, parameter):
    n = 3000 if kind is mh.Classifier else 500  # work for four threads
    model, data = draw(kind, parameter, np.float64, n, 9, 20, 4)
    assert mh.explain(model, data)["readout_plan"] == "attended"
    given = settings(model, steps=5, optimizer=mh.NormalizedGradientDescent(0.05))
    one = mh.train(model, data, num_threads=1, **given)
    for threads in (2, 3, 4):
        same(mh.train(model, data, num_threads=threads, **given), one)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("parameter", ["low rank", "identity"])
def test_a_saved_run_goes_on_bitwise(kind, parameter, tmp_path, use_plan):
    use_plan("attended")
    model, data = drawn(kind, parameter)
    given = settings(model, optimizer=mh.Momentum(0.02), test=drawn(kind, parameter, seed=3)[1])
    given["record"] = {"loss": 1, "test_loss": 2, "attention_max": 3}
    whole = mh.train(model, data, **given)
    mh.train(model, data, **(given | {"steps": 5})).save(tmp_path / "run.npz")
    run = mh.train(mh.Run.load(tmp_path / "run.npz"), data, test=given["test"], steps=7)
    assert run == whole


@pytest.mark.parametrize("own_scores", [False, True])
@pytest.mark.parametrize("parameter", ["dense", "identity", "prompt"])
def test_runs_side_by_side_are_those_of_each_alone(parameter, own_scores, use_plan):
    """With attended tokens that all share, or that each run has of its own."""
    use_plan("attended")
    runs = 5
    models, data = draw(mh.Classifier, parameter, np.float64, N, T, D, H, runs=runs)
    if not own_scores:
        first = models[0]
        models = mh.stack(
            [mh.Classifier(first.W, models[r].U, prompt=first.prompt) for r in range(runs)]
        )
    given = settings(models, record=("loss", "attention_max"))
    lr = np.linspace(0.1, 0.5, runs)
    together = mh.train(models, data, **(given | {"optimizer": mh.GradientDescent(lr)}))
    for r in range(runs):
        alone = mh.train(models[r], data, **(given | {"optimizer": mh.GradientDescent(lr[r])}))
        same(together[r], alone)


@pytest.mark.parametrize("plan", ["attended", "rows"])
def test_records_of_attention(plan, use_plan):
    use_plan(plan)
    groups = np.random.default_rng(5).integers(0, 2, (N, T))
    model, data = drawn(mh.Classifier, token_groups=(groups, ("a", "b")))
    names = ("attention", "attention_max", "attention_groups")
    run = mh.train(model, data, **settings(model, record=dict.fromkeys(names, 4)))
    expected = mh.evaluate(model, data, record=names)
    for name in names:
        assert len(run.history[name]) == 4
        for row in run.history[name]:
            np.testing.assert_array_equal(row, expected[name])


@pytest.mark.parametrize("kind", MODELS)
def test_attention_of_batches_is_recorded_too(kind):
    model, data = drawn(kind)
    given = settings(model, record={"attention": 5}, batch=4)
    run = mh.train(model, data, **given)
    expected = model.attention(data)
    for row in run.history["attention"]:
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("parameter", ["dense", "low rank"])
@pytest.mark.parametrize("kind", MODELS)
def test_test_sets(kind, parameter, use_plan):
    use_plan("attended")
    model, data = drawn(kind, parameter)
    _, test = drawn(kind, parameter, n=13, seed=7)
    run = mh.train(model, data, test=test, **settings(model, record=("test_loss", "test_margin")))
    for k, at in ((0, model), (-1, run.model)):
        found = mh.evaluate(at, test, record=("loss", "margin"), loss=run.loss)
        for name, value in found.items():
            assert run.history[f"test_{name}"][k] == pytest.approx(value, rel=1e-13)


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_not_finite_stays_where_it_is(kind, use_plan):
    """Samples of weight 0 and padding change no bit, whatever they hold; others are not finite."""
    use_plan("attended")
    model, data = drawn(kind)
    plain = mh.train(model, data, **settings(model))
    X = data.X.copy()
    X[3] = np.nan
    i = int(np.argmin(data.lengths))
    X[i, data.lengths[i] :] = np.inf
    assert data.lengths[i] < T
    bad = mh.Dataset(X, data.y, weight=data.weight, lengths=data.lengths)
    same(mh.train(model, bad, **settings(model)), plain)
    assert data.weight[0] > 0
    X[0, 0, 0] = np.nan
    for weight in (None, data.weight):
        with pytest.warns(RuntimeWarning, match="X holds nan at index 0, 0, 0"):
            run = mh.train(model, mh.Dataset(X, data.y, weight=weight), **settings(model))
        assert run.reason == "nonfinite"
        assert run.step == 0


def test_rows_of_a_long_sample_are_computed_a_few_at_a_time(use_plan):
    """One sample has more weights than are held while attended tokens are computed."""
    rng = np.random.default_rng(8)
    X = rng.standard_normal((2, 310, 5))
    words = mh.Tokens(rng.integers(0, 40, (2, 310)), rng.standard_normal((40, 5)))
    U = rng.standard_normal((H, 310, 5))
    W = rng.standard_normal((H, 5, 5))
    for tokens, causal in ((X, False), (X, True), (words, True)):
        model = mh.Classifier(W, U, causal=causal)
        data = mh.Dataset(tokens, np.array([1, -1]), lengths=np.array([310, 170]))
        runs = []
        for plan in ("attended", "tiles"):
            use_plan(plan)
            runs.append(mh.train(model, data, **settings(model, steps=3)))
        close(*runs, 1e-11)


@pytest.mark.verdict
def test_the_plan_says_what_is_kept():
    model = mh.Classifier.zeros(heads=4, tokens=16, dim=32)
    plan = mh.explain(model, (200, 16, 32))
    assert plan["readout_plan"] == "attended"
    assert plan["attended_bytes"] == 200 * 4 * 16 * 32 * 8
    alike = mh.Classifier(None, model.U)
    assert mh.explain(alike, (200, 16, 32))["attended_bytes"] == 200 * 16 * 32 * 8
    most = 2**28 // (4 * 16 * 32 * 8)
    assert mh.explain(model, (most, 16, 32))["readout_plan"] == "attended"
    assert mh.explain(model, (200, 16, 32), runs=most // 200)["readout_plan"] == "attended"
    for more in (
        mh.explain(model, (most + 1, 16, 32)),
        mh.explain(model, (200, 16, 32), runs=most // 200 + 1),
    ):
        assert more["readout_plan"] == more["plan"] or more["readout_plan"] == "runs"
        assert more["attended_bytes"] == 0


@pytest.mark.verdict
@pytest.mark.slow
def test_beyond_the_limit_steps_are_those_from_the_tokens(use_plan):
    """Bit by bit, while those below it sum in another order."""
    rng = np.random.default_rng(9)
    tokens, dim, heads = 16, 32, 4
    most = 2**28 // (heads * tokens * dim * 8)
    X = rng.standard_normal((most + 1, tokens, dim))
    y = np.where(rng.random(most + 1) < 0.5, -1, 1)
    model = mh.Classifier.gaussian(heads, tokens, dim, std=0.3, seed=0)
    for n, is_kept in ((most, True), (most + 1, False)):
        runs = []
        for plan in ("auto", mh.explain(model, (n, tokens, dim))["plan"]):
            use_plan(plan)
            runs.append(mh.train(model, X[:n], y[:n], **settings(model, steps=2)))
        assert (runs[0].model == runs[1].model) != is_kept
        close(*runs, 1e-12)
