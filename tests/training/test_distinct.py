"""Training finds few distinct tokens and identical samples in arrays, and goes over those."""

import numpy as np
import pytest

import mhfast as mh
from mhfast.models import distinct
from mhfast.training.segments import fingerprint

N, T, D, H, V, P = 70, 9, 32, 2, 5, 3
RECORD = ("loss", "accuracy", "margin", "grad_norm", "attention", "attention_max")
# Sums over pairs of words and over samples are added in another order than those of the array: some
# 1e3 roundings of 1e-16 in a gradient, which a few steps carry on.
TOLERANCE = 1e-11


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    """Look at small data too."""
    monkeypatch.setattr(distinct, "LEAST_WORK", 0)


@pytest.fixture
def plainly(monkeypatch):
    """Call a function that computes with all that is given."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(distinct, "LEAST_WORK", float("inf"))
            return function()

    return call


def drawn(kind=mh.Classifier, *, few="words", dtype=np.float64, d=D, seed=0, **options):
    """A model and data with few words, few samples, or both; options of the Dataset."""
    rng = np.random.default_rng(seed)
    words = rng.standard_normal((V, d))
    ids = rng.integers(V, size=(N, T))
    if few == "both":
        ids = ids[rng.integers(6, size=N)]
    X = words[ids]
    if few == "samples":
        picked = rng.integers(6, size=N)
        X = rng.standard_normal((6, T, d))[picked]
        ids = np.arange(6 * T).reshape(6, T)[picked]
    sign = np.where(ids[:, 0] % 2 == 1, 1.0, -1.0)
    if kind is mh.Classifier:
        model, y = mh.Classifier.gaussian(H, T, d, std=0.3, seed=1, dtype=dtype), sign
    else:
        model = mh.Layer.gaussian(H, d, P, std=0.3, seed=1, dtype=dtype)
        y = sign[:, None, None] * np.linspace(0.5, 1.5, T * P).reshape(T, P)
    if "weight" in options:
        options["weight"] = rng.random(N).astype(dtype)
    if "lengths" in options:
        options["lengths"] = np.where(ids[:, 1] % 2 == 0, T, 4)
    if "groups" in options:
        del options["groups"]
        options |= {"token_groups": ids % 2, "sample_groups": rng.integers(2, size=N)}
    return model, mh.Dataset(X.astype(dtype), y.astype(dtype), **options)


def found(model, data):
    """What training goes over: words, 0 for the array, and samples."""
    seen = distinct.compact(model, data)
    return 0 if seen.data.words is None else seen.data.words.words, seen.data.n


def train(model, data, **options):
    options = {"steps": 6, "optimizer": mh.GradientDescent(0.05), "record": RECORD, **options}
    return mh.train(model, data, **options)


def assert_alike(run, other, tolerance=TOLERANCE):
    assert list(run.history) == list(other.history)
    for name, rows in run.history.items():
        np.testing.assert_array_equal(run.steps[name], other.steps[name])
        assert rows.shape == other.history[name].shape
        size = np.abs(other.history[name]).max()
        np.testing.assert_allclose(
            rows, other.history[name], rtol=0, atol=tolerance * size, err_msg=name
        )
    for name, array in run.model.parameters.items():
        np.testing.assert_allclose(
            array, other.model.parameters[name], rtol=0, atol=tolerance * np.abs(array).max()
        )


@pytest.mark.parametrize("few", ["words", "samples", "both"])
@pytest.mark.parametrize("options", [(), ("weight",), ("lengths",), ("groups", "weight")])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_the_same_history(kind, options, few, plainly):
    if kind is mh.Layer and few != "samples":
        model, data = drawn(kind, few=few, d=48, **dict.fromkeys(options))
    else:
        model, data = drawn(kind, few=few, **dict.fromkeys(options))
    words, n = found(model, data)
    assert (words > 0) == (few != "samples")
    assert (n < N) == (few != "words")
    record = (*RECORD, "attention_groups") if "groups" in options else RECORD
    settings = {"record": dict.fromkeys(record, 2), "test": data[:40], "steps": 7}
    if kind is mh.Layer:
        settings |= {"loss": "squared", "optimizer": mh.GradientDescent(1e-4)}
    settings["record"] |= {"test_loss": 1, "test_margin": 3}
    run = train(model, data, **settings)
    assert run.history["attention"].shape == (5, N, H, T, T)
    assert_alike(run, plainly(lambda: train(model, data, **settings)))


def test_as_with_tokens_and_merged():
    """Bit for bit what `Tokens` and `merged` would have made of it."""
    model, data = drawn(few="both")
    words = mh.Tokens(np.zeros((N, T), int), data.X[0, :1])
    rows, ids = np.unique(data.X.reshape(-1, D), axis=0, return_inverse=True)
    first = np.sort(np.unique(ids, return_index=True)[1])  # words in the order they come in
    order = np.argsort(ids.ravel()[first])
    words = mh.Tokens(order[ids].reshape(N, T), rows[ids.ravel()[first]])
    np.testing.assert_array_equal(words, data.X)
    explicit = mh.Dataset(words, data.y).merged()
    record = ("loss", "grad_norm")
    assert train(model, data, record=record).history["loss"].tolist() == (
        train(model, explicit, record=record).history["loss"].tolist()
    )


def test_float32(plainly):
    model, data = drawn(few="both", dtype=np.float32)
    assert found(model, data) == (V, len(np.unique(data.X, axis=0)))
    run, other = train(model, data), plainly(lambda: train(model, data))
    assert run.model.dtype == np.float32
    assert_alike(run, other, 1e-11 * 2.0**29)  # roundings are so many times larger


@pytest.mark.parametrize("few", ["words", "samples", "both"])
@pytest.mark.parametrize("optimizer", [mh.Momentum(0.05), mh.Adam(0.01)])
def test_resuming_threads_and_files(optimizer, few, tmp_path, plainly):
    model, data = drawn(few=few)
    whole = train(model, data, steps=9, optimizer=optimizer, num_threads=1)
    for threads in (2, 4):
        assert train(model, data, steps=9, optimizer=optimizer, num_threads=threads) == whole
    once = train(model, data, steps=1, optimizer=optimizer)
    once.save(tmp_path / "run.npz")
    for run in (once, mh.Run.load(tmp_path / "run.npz")):
        for _ in range(8):
            run = mh.train(run, data, steps=1)
        assert run == whole
    assert whole.segments == plainly(lambda: train(model, data, optimizer=optimizer)).segments
    assert whole.segments[0].data == fingerprint(data)


def test_what_training_records_is_what_evaluate_computes():
    model, data = drawn(few="both", weight=None, groups=None)
    record = (*RECORD, "attention_groups", "test_loss")
    values = []
    run = train(
        model, data, record=record, test=data[:30],
        callback=mh.Callback(lambda _k, _model, metrics: values.append(metrics)),
    )  # fmt: skip
    now = mh.evaluate(model, data, record=record, test=data[:30])
    for name in record:
        np.testing.assert_array_equal(run.history[name][0], now[name])
        for row, metrics in zip(run.history[name], values, strict=True):
            np.testing.assert_array_equal(row, metrics[name])


def test_attention_of_every_sample_is_that_of_the_model():
    model, data = drawn(few="samples")
    run = train(model, data, record="attention")
    np.testing.assert_array_equal(run.history["attention"][0], model.attention(data))
    half = train(model, data, record="attention", steps=3)
    assert mh.train(half, data, steps=3) == run


def test_thresholds_and_stop_functions(plainly):
    model, data = drawn(few="both")
    settings = {"stop": {"loss": 0.3}, "steps": 500, "optimizer": mh.GradientDescent(0.5)}
    run, other = (call(lambda: train(model, data, **settings)) for call in (lambda f: f(), plainly))
    assert run.stopped == other.stopped
    assert run.stopped > 3
    run = train(model, data, stop=lambda step, _: step == 4)
    assert run.stopped == 4


@pytest.mark.parametrize("solve", [mh.minimize, mh.gradient_flow])
@pytest.mark.parametrize("few", ["words", "samples", "both"])
def test_solvers(solve, few, plainly):
    model, data = drawn(few=few, weight=None)
    settings = {"record": ("loss", "attention_max"), "test": data[:30], "wrt": "U"}
    settings |= {"steps": 3} if solve is mh.minimize else {"until": 1.0, "times": [0, 0.5, 1.0]}
    run, other = (call(lambda: solve(model, data, **settings)) for call in (lambda f: f(), plainly))
    # A line search, or an adaptive step, carries roundings further than a step of given size.
    assert_alike(run, other, 1e-8)
    assert run.segments == other.segments


def test_in_the_span_of_the_tokens(plainly):
    """Words and samples get coordinates of the span, whose basis is that of the array."""
    rng = np.random.default_rng(0)
    words, ids = rng.standard_normal((40, 400)), rng.integers(40, size=(60, T))[np.arange(N) % 60]
    model = mh.Classifier.gaussian(H, T, 400, std=0.02, seed=0)
    data = mh.Dataset(words[ids], np.where(ids[:, 0] % 2 == 1, 1.0, -1.0))
    for one, n in ((data, N), (mh.Dataset(data.X[np.arange(N) % 7], data.y[np.arange(N) % 7]), 7)):
        run = train(model, one, record=("loss", "W", "attention"))
        other = plainly(lambda one=one: train(model, one, record=("loss", "W", "attention")))
        assert run.subspace is not None
        np.testing.assert_array_equal(run.subspace.basis, other.subspace.basis)
        assert found(run.subspace.model, one)[1] == n
        assert_alike(run, other)
        half = train(model, one, record=("loss", "W", "attention"), steps=2)
        assert mh.train(half, one, steps=4) == run


def test_runs_side_by_side(plainly):
    model, data = drawn(few="both")
    optimizer = mh.GradientDescent([0.05, 0.1, 0.2])
    run = train(model, data, optimizer=optimizer)
    assert run.history["attention"].shape == (3, 7, N, H, T, T)
    assert_alike(run, plainly(lambda: train(model, data, optimizer=optimizer)))
    alone = train(model, data, optimizer=mh.GradientDescent(0.1))
    # Plans of runs side by side may add in another order.
    assert_alike(run[1], alone)


@pytest.mark.parametrize("name", ["y", "weight"])
def test_targets_and_weights_of_runs(name, plainly):
    model, data = drawn(few="both")
    rng = np.random.default_rng(3)
    if name == "y":
        data = mh.Dataset(data.X, np.stack([data.y, -data.y, data.y]))
    else:
        data = mh.Dataset(data.X, data.y, weight=rng.random((3, N)))
    assert found(model, data)[1] < N
    assert_alike(train(model, data), plainly(lambda: train(model, data)))


def test_what_is_merged():
    model, data = drawn(few="both")
    seen = distinct.compact(model, data)
    np.testing.assert_array_equal(np.asarray(seen.data.words)[seen.places], data.X)
    np.testing.assert_array_equal(seen.data.y[seen.places], data.y)
    np.testing.assert_array_equal(seen.data.weight, np.bincount(seen.places))
    # Of other labels, lengths and groups they stay apart.
    few = seen.data.n
    flipped = mh.Dataset(data.X, np.where(np.arange(N) < 35, data.y, -data.y))
    assert few < found(model, flipped)[1] <= 2 * few
    grouped = mh.Dataset(data.X, data.y, sample_groups=np.arange(N) % 3)
    assert few < found(model, grouped)[1] <= 3 * few
    unlike = mh.Dataset(data.X, data.y, lengths=T - np.arange(N) % 2)
    assert few < found(model, unlike)[1] <= 2 * few
    # Not if more than half would be left.
    assert found(model, mh.Dataset(data.X, data.y, sample_groups=np.arange(N) // 2))[1] == N


def test_query_rows():
    """Those of the data are part of a sample; those of a model belong to all n."""
    _, data = drawn(few="samples")
    Z = np.random.default_rng(0).standard_normal((2, 3, D))
    model = mh.Classifier.gaussian(H, 3, D, std=0.3, seed=1, query=Z[np.arange(N) % 2])
    assert distinct.compact(model, data).data is data
    asking = mh.Dataset(data.X, data.y, query=Z[np.arange(N) % 2])
    model = mh.Classifier.gaussian(H, 3, D, std=0.3, seed=1)
    assert data.merged().n < found(model, asking)[1] <= 2 * data.merged().n
    token = mh.Classifier.gaussian(H, 1, D, std=0.3, seed=1, query=-1)
    assert found(token, data) == (0, data.merged().n)


def test_bits_decide():
    """Zeros of both signs are two words, and what is not finite is none."""
    model, data = drawn(few="words")
    X = data.X.copy()
    X[X[0, 0] == X] = 0.0
    X[3, 2] = 0.0
    words = found(model, mh.Dataset(X, data.y))[0]
    X[3, 2] = -0.0
    assert found(model, mh.Dataset(X, data.y))[0] == words + 1
    X[3, 2] = np.nan
    assert found(model, mh.Dataset(X, data.y)) == (0, N)


@pytest.mark.parametrize("d", [8, 24, D])
def test_what_is_not_looked_up(d, plainly):
    rng = np.random.default_rng(0)
    model = mh.Classifier.gaussian(H, T, d, std=0.3, seed=1)
    most = {8: 0, 24: 0, D: 4 * D}[d]  # by shape: T d < 256, and 4 words for each dimension
    for more in (0, 1):
        words = rng.standard_normal((most + more, d))
        if len(words) == 0:
            continue
        ids = np.arange(1000 * T).reshape(1000, T) % len(words)
        y = rng.choice([-1.0, 1.0], 1000)
        data = mh.Dataset(words[ids], y, sample_groups=np.arange(1000))
        assert found(model, data) == (0 if more else most, 1000)
    assert distinct.compact(model, data).data is data
    assert train(model, data, steps=2) == plainly(lambda: train(model, data, steps=2))


def test_few_samples_of_words_too_many_for_them():
    """Words of all samples pay, those of the few merged ones do not: these stay arrays."""
    model, _ = drawn()
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2, T, D))[np.arange(400) % 2]
    data = mh.Dataset(X, np.where(np.arange(400) % 2 == 1, 1.0, -1.0))
    seen = distinct.compact(model, data).data
    assert (seen.words, seen.n) == (None, 2)
    np.testing.assert_array_equal(seen.X, X[:2])


@pytest.mark.parametrize("reason", ["hardmax", "identity", "low rank", "runs"])
def test_other_models_and_data(reason):
    model, data = drawn(few="words")
    if reason == "hardmax":
        model = mh.Classifier(model.W, model.U, attention="hardmax")
    elif reason == "identity":
        model = mh.Classifier(None, model.U)
    elif reason == "low rank":
        model = mh.Classifier(mh.LowRank(model.W[..., :2], None), model.U)
    else:
        data = mh.Dataset(np.stack([data.X, data.X]), data.y)
    assert distinct.compact(model, data).data is data


def test_small_data_are_not_looked_at(monkeypatch):
    monkeypatch.undo()
    model, data = drawn(few="both")
    few = data[:8]
    assert distinct.compact(model, few).data is few
    many = mh.Dataset(np.tile(data.X, (10, 1, 1)), np.tile(data.y, 10))
    assert found(model, many) == (V, data.merged().n)


@pytest.mark.parametrize("how", ["batch", "stream", "reduce"])
def test_steps_on_other_than_all_samples_go_over_what_is_given(how, plainly):
    model, data = drawn(few="both")
    record = ("loss", "margin")
    options = {
        "batch": {"batch": 20, "seed": 3},
        "stream": {"stream": lambda n, seed: drawn(seed=seed % 7)[1][:n], "batch": 20},
        "reduce": {"reduce": mh.Reduction(lambda sums: sums, shards=2)},
    }[how]
    run, other = (
        call(lambda: train(model, data, record=record, **options))
        for call in (lambda f: f(), plainly)
    )
    assert run == other


def test_own_losses_see_all_samples(plainly):
    model, data = drawn(few="both")
    sizes = []

    def loss(outputs, targets):
        sizes.append(outputs.size)
        margin = outputs * targets
        return np.log1p(np.exp(-margin)), -targets / (1 + np.exp(margin))

    run = train(model, data, loss=loss, record="loss", steps=1)
    assert sum(sizes) % N == 0
    other = plainly(lambda: train(model, data, loss=loss, record="loss", steps=1))
    assert_alike(run, other)


def test_errors_are_about_what_is_given():
    model, data = drawn(few="both")
    with pytest.raises(ValueError, match=rf"y: expected shape .* = \(R, {N}\)"):
        mh.train(
            model, mh.Dataset(data.X, np.ones((N, 2))), steps=1, optimizer=mh.GradientDescent(0.1)
        )
    X = np.array(data.X)
    X[np.arange(60, N), 1, 2] = np.inf
    with pytest.warns(RuntimeWarning, match="X holds inf at index 60, 1, 2"):
        train(model, mh.Dataset(X, data.y), record="loss")


@pytest.mark.verdict
@pytest.mark.parametrize("few", ["words", "both"])
@pytest.mark.parametrize("as_array", [False, True])
def test_explain(few, as_array):
    model, data = drawn(few=few)
    words, n = found(model, data)
    report = mh.explain(model, data.X if as_array else data)
    assert report["training_words"] == words == V
    assert report["training_samples"] == (N if as_array else n)
    report = mh.explain(model, data.X.shape)
    assert (report["training_words"], report["training_samples"]) == (0, N)


def test_tokens_that_are_given_are_merged_too(plainly):
    model, data = drawn(few="both", weight=None)
    rows, ids = np.unique(data.X.reshape(-1, D), axis=0, return_inverse=True)
    words = mh.Dataset(mh.Tokens(ids.reshape(N, T), rows), data.y, weight=data.weight)
    assert found(model, words) == (V, data.merged().n)
    run = train(model, words)
    assert_alike(run, plainly(lambda: train(model, words)))
    assert run.segments == train(model, data).segments


def test_test_sets_beside_batches(plainly):
    """These are gone over whole, whatever the steps are taken on."""
    model, data = drawn(few="both")
    settings = {"batch": 20, "test": data[:50], "record": ("test_loss", "test_accuracy")}
    run, other = (call(lambda: train(model, data, **settings)) for call in (lambda f: f(), plainly))
    assert_alike(run, other)
    assert run.model == other.model
    expected = mh.evaluate(model, data, test=data[:50], record="test_loss")["test_loss"]
    assert run.history["test_loss"][0] == expected
