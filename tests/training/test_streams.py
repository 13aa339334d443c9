"""Training on new samples at every step."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from side_by_side import same_run
from trainings import MODELS, PARAMETERS, PLANS, draw

import mhfast as mh
from mhfast.data.planted import _draw as draw_planted
from mhfast.reference import sample_seed

B = 7
TOLERANCE = 1e-12  # of two plans, or of another order of sums


def samples(n, seed):
    """Draw samples for classifiers with 4 tokens of 5 dimensions."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 4, 5))
    return mh.Dataset(X, np.where(X[:, 0, 0] + X[:, 1, 1] > 0, 1.0, -1.0))


def start(runs=None, dtype=np.float64):
    return mh.Classifier.gaussian(3, 4, 5, std=0.5, seed=1, runs=runs, dtype=dtype)


def one_by_one(model, stream, steps, optimizer, every=1, seed=0, size=B, **options):
    """Take the steps by a training on all samples of each set."""
    run = model
    for k in range(steps):
        data = stream(size, seed=sample_seed(seed, k // every))
        given = {"optimizer": optimizer} if k == 0 else {}
        run = mh.train(run, data, steps=1, record=(), **given, **options)
    return run.model


def is_close(a, b, tolerance=TOLERANCE):
    for name, array in a.parameters.items():
        assert abs(array - b.parameters[name]).max() <= tolerance * abs(array).max(), name


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "rule", [mh.GradientDescent(0.3, l2=0.1), mh.Adam(0.02), mh.PolyakStep(max_lr=0.5)]
)
def test_a_step_is_one_on_all_samples_of_a_set(rule, every):
    stream = mh.Stream(samples, every=every)
    options = {"steps": 7, "optimizer": rule, "batch": B, "seed": 5}
    run = mh.train(start(), samples(20, 0), stream=stream, record=(), **options)
    is_close(run.model, one_by_one(start(), samples, 7, rule, every, seed=5))
    assert run.batches.fresh == every
    several = mh.train(start(), samples(20, 0), stream=stream, record=(), num_threads=3, **options)
    assert np.array_equal(several.model.W, run.model.W)


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("kind", MODELS)
def test_models_and_plans(kind, parameter, use_plan):
    model, data = draw(kind, parameter, float, 40, 4, 5, 3)

    def stream(n, seed):
        return data[np.random.default_rng(seed).permutation(40)[:n]]

    rule = mh.GradientDescent(0.002)
    for plan in PLANS:
        use_plan(plan)
        options = {"loss": "squared", "record": ()}
        run = mh.train(model, data, steps=3, optimizer=rule, batch=B, stream=stream, **options)
        is_close(run.model, one_by_one(model, stream, 3, rule, loss="squared"))


def test_lengths_and_classes():
    """The loss of a set is a mean over the rows that it has, of which sets have more or less."""
    layer = mh.Layer.gaussian(3, 5, 6, std=0.5, seed=0)

    def stream(n, seed):
        rng = np.random.default_rng(seed)
        X, lengths = rng.standard_normal((n, 4, 5)), rng.integers(1, 5, n)
        return mh.Dataset(X, rng.integers(0, 6, (n, 4)), lengths=lengths)

    for model in (layer, replace(layer, causal=True)):
        options = {"loss": "cross_entropy", "record": ()}
        rule = mh.Adam(0.01)
        run = mh.train(
            model, stream(9, 0), steps=4, optimizer=rule, batch=B, stream=stream, **options
        )
        is_close(run.model, one_by_one(model, stream, 4, rule, loss="cross_entropy"))


def test_large_numbers_are_scaled_in_every_set():
    def stream(n, seed):
        data = samples(n, seed)
        return mh.Dataset(2.0**200 * data.X, data.y)

    model = start()
    model = replace(model, W=model.W * 2.0**-400, U=model.U * 2.0**-200)
    rule = mh.NormalizedGradientDescent(2.0**-402)
    run = mh.train(
        model, stream(9, 0), steps=4, optimizer=rule, batch=B, stream=stream, wrt="W", record=()
    )
    is_close(run.model, one_by_one(model, stream, 4, rule, wrt="W"))


@pytest.mark.parametrize("rule", [mh.GradientDescent(0.2), mh.NormalizedGradientDescent(0.05)])
def test_runs_side_by_side_are_runs_alone(rule):
    """Own samples and shared ones, in blocks of lanes and one by one."""
    for R, size in ((19, 6), (2, 60)):
        starts = start(runs=R)
        for seed in (3, range(R)):
            options = {
                "steps": 5, "optimizer": rule, "batch": size, "record": ("loss", "W"),
                "stream": samples,
            }  # fmt: skip
            data = samples(30, 9)
            runs = mh.train(starts, data, seed=seed, **options)
            for r in (0, R - 1):
                of_run = seed if isinstance(seed, int) else seed[r]
                alone = mh.train(starts[r], data, seed=of_run, **options)
                same_run(runs[r], alone, TOLERANCE)
                assert runs[r].batches == alone.batches


def test_populations():
    """A Dataset stands for its population; with a run axis for that of each run."""
    data = mh.data.signal_noise(12, 4, 7, seed=0)  # one that the core does not draw from
    model = mh.Classifier.gaussian(3, 4, 7, std=0.5, seed=0)
    options = {"steps": 3, "optimizer": mh.GradientDescent(0.1), "batch": 5, "record": ()}
    run = mh.train(model, data, stream=data, **options)
    assert np.array_equal(run.model.W, mh.train(model, data, stream=data.sample, **options).model.W)
    is_close(run.model, one_by_one(model, data.sample, 3, options["optimizer"], size=5))
    for make in (
        lambda seed: mh.data.planted_attention(12, 4, 7, 2, seed=seed),
        lambda seed: mh.data.tokenized_mixture(12, 4, 7, relevant_fraction=0.25, seed=seed),
    ):
        several = make([0, 1])
        for seed in (4, (4, 5)):
            runs = mh.train(model, several, stream=several, seed=seed, **options)
            one = several.run(1)
            alone = mh.train(model, one, stream=one, seed=np.max(seed), **options)
            is_close(runs[1].model, alone.model)


def sphere(query):
    data = mh.data.sphere_tokens(9, 4, 7, external_query=query is None, seed=0)
    model = mh.Classifier.gaussian(3, 4 if query == "all" else 1, 7, std=0.5, seed=0)
    if query != "all" and query is not None:
        model = replace(model, query=query)

    def drawn(n, seed, block):
        X, y, rows = mh.reference.sphere_samples(
            n, 4, 7, external_query=query is None, seed=seed, block=block
        )
        return mh.Dataset(X, y, query=rows)

    return model, data, drawn, {}


def mixture(noise, kind, positions):
    settings = {"noise": noise, "noise_kind": kind, "positions": positions}
    data = mh.data.tokenized_mixture(
        9, 5, 8, relevant_fraction=0.4, norm=3.0, contexts=3, **settings, seed=0
    )
    table = np.vstack([data.truth[name] for name in ("mu_minus", "mu_plus", "contexts")])

    def drawn(n, seed, block):
        return mh.Dataset(
            *mh.reference.mixture_samples(n, 5, table, 2, **settings, seed=seed, block=block)
        )

    return mh.Classifier.gaussian(3, 5, 8, std=0.5, seed=0), data, drawn, {}


def regression(noise):
    covariance = [[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 0.7]]
    data = mh.data.icl_regression(9, 5, 4, noise=noise, covariance=covariance, seed=0)
    root = np.linalg.cholesky(covariance)
    model = mh.Layer.gaussian(3, 4, 1, std=0.5, seed=0, query=-1)

    def drawn(n, seed, block):
        return mh.Dataset(
            *mh.reference.regression_samples(n, 5, root, noise=noise, seed=seed, block=block)
        )

    return model, data, drawn, {"loss": "squared"}


def planted():
    data = mh.data.planted_attention(9, 5, 6, 2, score_std=3.0, seed=0)

    def drawn(n, seed, block):
        return mh.Dataset(
            *mh.reference.planted_samples(n, data.truth["model"], seed=seed, block=block)
        )

    return mh.Classifier.gaussian(3, 5, 6, std=0.5, seed=0), data, drawn, {}


def markov(order, embedding=None):
    data = mh.data.markov_chain(9, 6, 4, order=order, embedding=embedding, seed=0)
    E = np.eye(4) if embedding is None else embedding
    model = mh.Layer.gaussian(3, E.shape[1], 4, std=0.5, seed=0, causal=True)

    def drawn(n, seed, block):
        ids, following = mh.reference.markov_samples(
            n, 6, data.truth["transition"], seed=seed, block=block
        )
        return mh.Dataset(E[ids], following)

    return model, data, drawn, {"loss": "cross_entropy"}


IN_CORE = [
    sphere(None), sphere("all"), sphere(2), mixture(0.5, "gaussian", "random"),
    mixture(0.7, "bounded", "fixed"), mixture(0.0, "none", "random"), regression(0.0),
    regression(0.3), planted(), markov(1), markov(2, np.random.default_rng(1).normal(size=(4, 5))),
]  # fmt: skip


@pytest.mark.parametrize("case", IN_CORE, ids=range(len(IN_CORE)))
def test_populations_that_the_core_draws_from(case, use_plan):
    model, data, drawn, options = case
    rule = mh.GradientDescent(0.02)
    for every, plan in ((1, "samples"), (2, "rows"), (3, "auto")):
        use_plan(plan)
        stream = mh.Stream(data, every=every)
        run = mh.train(
            model, data[:3], steps=5, optimizer=rule, batch=B, stream=stream, seed=8, record=(),
            **options,
        )  # fmt: skip
        expected = model
        for k in range(5):
            given = {"optimizer": rule} if k == 0 else {}
            samples_of_step = drawn(B, 8, k // every)
            expected = mh.train(expected, samples_of_step, steps=1, record=(), **given, **options)
        is_close(run.model, expected.model)
        again = mh.train(
            model, data[:3], steps=2, optimizer=rule, batch=B, stream=stream, seed=8, record=(),
            num_threads=3, **options,
        )  # fmt: skip
        again = mh.train(again, data[:3], steps=3, stream=stream)
        assert np.array_equal(again.model.W, run.model.W)
    R = 19
    starts = mh.stack([model] * R)
    for seed in (3, range(R)):
        runs = mh.train(
            starts, data, steps=3, optimizer=rule, batch=6, stream=data, seed=seed, **options
        )
        for r in (0, R - 1):
            alone = mh.train(
                model, data, steps=3, optimizer=rule, batch=6, stream=data, **options,
                seed=seed if isinstance(seed, int) else seed[r],
            )  # fmt: skip
            same_run(runs[r], alone, TOLERANCE)


def test_large_tokens_and_queries_that_the_core_draws():
    """All lengths are the same powers of two apart, and so are the weights that are learnt."""
    large, ends = 2.0**200, []
    for unit in (1.0, large):
        data = mh.data.tokenized_mixture(9, 5, 8, relevant_fraction=0.4, norm=3.0 * unit, seed=0)
        model = mh.Classifier.gaussian(3, 1, 8, std=0.5, seed=0)
        model = replace(model, query=-1, W=model.W / unit**2, U=model.U / unit)
        rule = mh.NormalizedGradientDescent(0.25 / unit**2)
        options = {"steps": 4, "optimizer": rule, "wrt": "W", "record": ()}
        run = mh.train(model, data, batch=B, stream=data, seed=8, **options)
        assert abs(run.model.W - model.W).max() > 0.0
        ends.append(run.model.W * unit**2)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_samples_have_the_bits_of_the_reference(dtype):
    """With one token and one sample, the momentum of U is the gradient -y x, exactly."""
    d = 23
    data = mh.data.sphere_tokens(2, 1, d, external_query=False, seed=0, dtype=dtype)
    run = mh.Classifier.zeros(1, 1, d, dtype=dtype)
    for k in range(6):
        given = {"optimizer": mh.Momentum(0.1, beta=0.0), "seed": 5} if k == 0 else {}
        run = mh.train(
            run, data, steps=1, batch=1, stream=data, loss="linear", wrt="U", record=(), **given
        )
        X, y, _ = mh.reference.sphere_samples(1, 1, d, external_query=False, seed=5, block=k)
        assert np.array_equal(run.state["U"][0][0, 0], (-y * X[0, 0]).astype(dtype))


def test_planted_labels_in_float32_are_those_of_float64():
    """Two heads nearly cancel, so that float32 alone would get many of the signs wrong.

    The student attends uniformly, and the momentum of its U is -y times the mean token.
    """
    n, T, d = 80, 3, 5
    random = np.random.default_rng(0)
    W, U = random.standard_normal((d, d)), random.standard_normal((T, d))
    W = np.stack([W, W + 2.0**-22 * random.standard_normal((d, d))]).astype(np.float32)
    teacher = mh.Classifier(W, np.stack([U, -U]).astype(np.float32))
    data = draw_planted(2, seed=0, role=1, teacher=teacher)
    rounded = 0
    run = mh.Classifier.zeros(1, T, d, dtype=np.float32)
    for k in range(n):
        given = {"optimizer": mh.Momentum(0.1, beta=0.0), "seed": 5} if k == 0 else {}
        run = mh.train(
            run, data, steps=1, batch=1, stream=data, loss="linear", wrt="U", record=(), **given
        )
        X, y = mh.reference.planted_samples(1, teacher, seed=5, block=k)
        mean = X[0].mean(axis=0)
        np.testing.assert_allclose(run.state["U"][0][0, 0], -y * mean, rtol=0, atol=1e-6)
        rounded += np.sign(teacher(X.astype(np.float32))) != y
    assert rounded > 5


def test_what_the_core_draws_has_the_distribution():
    """Moments of normals; labels, contexts and positions are equally likely."""
    words = np.random.Philox(key=3).random_raw(1 << 18)
    z = mh.reference.normals(words)
    # Standard errors: of moment 2 k it is sqrt of (4 k - 1)!! - ((2 k - 1)!!)^2 over the number.
    for k, (mean, variance) in {1: (1, 2), 2: (3, 96), 3: (15, 10170)}.items():
        assert abs(np.mean(z ** (2 * k)) - mean) < 5 * (variance / z.size) ** 0.5
        assert abs(np.mean(z ** (2 * k - 1))) < 5 * (variance / z.size) ** 0.5
    pairs = z.reshape(-1, 2, 8)
    assert abs(np.mean(pairs[:, 0] * pairs[:, 1])) < 5 * (1 / pairs[:, 0].size) ** 0.5
    table = np.eye(5)
    X, y = mh.reference.mixture_samples(3000, 4, table, 1, seed=1, block=0)
    place = X[..., :2].sum(-1).argmax(axis=1)
    assert abs(y.mean()) < 5 / 3000**0.5
    assert max(abs(np.bincount(place) - 750)) < 5 * 750**0.5
    assert max(abs(X[..., 2:].sum(axis=(0, 1)) - 3000)) < 5 * 3000**0.5


def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    for runs, every in ((None, 3), (17, 1)):
        options = {"stream": mh.Stream(samples, every=every), "test": samples(9, 3)}
        data = samples(16, 0)
        first = {
            "optimizer": mh.Adam(0.01), "batch": B, "seed": 9 if runs is None else range(runs),
            "record": {"loss": 2, "test_loss": 3, "grad_norm": 5},
        }  # fmt: skip
        whole = mh.train(start(runs), data, steps=11, **first, **options)
        part = mh.train(
            start(runs), data, steps=4, checkpoint=(tmp_path / "run.npz", 2), **first, **options
        )
        assert mh.train(part, data, steps=7, **options) == whole
        loaded = mh.Run.load(tmp_path / "run.npz")
        assert loaded.batches == part.batches == pickle.loads(pickle.dumps(part)).batches
        assert mh.train(loaded, data, steps=7, **options) == whole
        hooked = mh.train(start(runs), data, steps=11, callback=lambda *_: None, **first, **options)
        assert hooked == whole
        with pytest.raises(ValueError, match="stream: expected the stream of the run again"):
            mh.train(part, data, steps=1, test=options["test"])
        test = options["test"]
        assert mh.train(part, data, steps=1, batch=4, test=test).batches.fresh is None
        assert mh.train(part, data, steps=1, batch="all", test=test).batches is None


def test_records_and_thresholds_are_of_the_data():
    data = samples(30, 0)
    options = {"optimizer": mh.GradientDescent(0.3), "batch": B, "stream": samples}
    run = mh.train(
        start(), data, steps=5, record=("loss", "grad_norm", "W", "U"), stop={"loss": 1e-9},
        **options,
    )  # fmt: skip
    for k in range(6):
        at = replace(start(), W=run.history["W"][k], U=run.history["U"][k])
        known = mh.evaluate(at, data, record=("loss", "grad_norm"))
        for name, value in known.items():
            np.testing.assert_allclose(run.history[name][k], value, rtol=1e-12)
    assert mh.train(start(), data, steps=5, **options).record == {"loss": 4}
    assert mh.train(start(), data[:5], steps=5, **options).record == {"loss": 1}  # n < B
    ended = mh.train(start(), data, steps=900, stop={"accuracy": 0.8}, **options)
    assert ended.reason == "accuracy"
    assert ended.step % 4 == 0
    certificate = mh.theory.certify(run, data, hessian=False)
    assert "new samples" in certificate.notes[0]
    default = mh.train(start(), data, steps=2, optimizer=mh.GradientDescent(0.1), stream=samples)
    assert default.batches.size == 30


def test_a_run_keeps_what_it_had_when_a_stream_fails():
    def stream(n, seed):
        if seed == sample_seed(0, 3):
            raise ArithmeticError("no more samples")
        return samples(n, seed)

    options = {"optimizer": mh.GradientDescent(0.3), "batch": B, "stream": stream}
    with pytest.raises(ArithmeticError, match="no more") as caught:
        mh.train(start(), samples(30, 0), steps=9, **options)
    assert caught.value.run.step == 3
    expected = mh.train(start(), samples(30, 0), steps=3, **options)
    assert np.array_equal(caught.value.run.model.W, expected.model.W)


def later(change):
    """Make a stream whose samples are changed after the first set."""
    return lambda n, seed: change(samples(n, seed)) if seed != sample_seed(0, 0) else samples(n, 0)


def constant(dim, label):
    return lambda n, **_: mh.Dataset(np.ones((n, 4, dim)), np.full(n, label))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (3, r"stream: expected a function \(n, seed\) -> Dataset, or a Dataset"),
        (samples(9, 0), "stream: expected a Dataset made by a generator of mhfast.data"),
        (lambda n, seed: samples(n + 1, seed), "stream: expected a Dataset of n = 7 samples, got"),
        (lambda n, seed: samples(n, seed).X, "stream: expected a function that returns a Dataset"),
        (constant(6, 1), "stream: .*X"),
        (constant(5, 0), "y: expected labels"),
        (
            lambda n, seed: replace(samples(n, seed), weight=np.ones(n)),
            "stream: expected samples without weights",
        ),
        (later(lambda d: replace(d, X=d.X * np.nan)), "stream: expected finite numbers"),
        (later(lambda d: replace(d, y=d.y * 2)), "y: expected labels"),
        (
            later(lambda d: replace(d, lengths=np.ones(d.n, int))),
            "stream: expected samples like the first ones, with lengths of shape",
        ),
    ],
)
def test_refusals(stream, message):
    options = {"steps": 3, "optimizer": mh.GradientDescent(0.1), "batch": B}
    with pytest.raises((TypeError, ValueError), match=message):
        mh.train(start(), samples(30, 0), stream=stream, **options)
    with pytest.raises(ValueError, match="order: expected None with stream="):
        mh.train(start(), samples(30, 0), stream=samples, order="shuffle", **options)
    with pytest.raises(ValueError, match="batch: expected an integer of at least 1"):
        mh.train(start(), samples(30, 0), stream=samples, **options | {"batch": 0})
    with pytest.raises(ValueError, match="every: expected an integer of at least 1"):
        mh.Stream(samples, every=0)


def test_seeds_of_samples_are_those_of_philox():
    philox = np.random.Philox(key=np.array([6, 1], np.uint64), counter=np.array([0, 8, 0, 0]))
    assert sample_seed(6, 8) == int(philox.random_raw(1)[0]) // 2
    assert len({sample_seed(s, j) for s in range(20) for j in range(20)}) == 400


def test_the_core_draws_the_samples_of_a_data_set_by_its_method_too(monkeypatch):
    data = mh.data.sphere_tokens(8, 3, 5, seed=0)
    monkeypatch.setattr("mhfast.training.streams.Draws.__call__", None)  # what Python would draw
    settings = {"steps": 3, "optimizer": mh.GradientDescent(0.1)}
    model = mh.Classifier.zeros(heads=2, tokens=1, dim=5)
    runs = [mh.train(model, data, stream=stream, **settings) for stream in (data, data.sample)]
    assert np.array_equal(runs[0].model.W, runs[1].model.W)
