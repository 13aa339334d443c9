"""Steps on batches: which samples, the steps of the reference, records, resumption, refusals."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from lists import with_every
from side_by_side import TOLERANCE, same_run
from trainings import MODELS, PARAMETERS, PLANS, draw

import mhfast as mh
from mhfast.training.batches import Batches, chosen

n, B = 23, 6  # epochs of 3 steps, which leave 5 samples out
OPTIMIZERS = with_every(
    [
        mh.GradientDescent(0.3, l2=0.05, clip=0.1, schedule=np.linspace(0.5, 1.5, 40)),
        mh.NormalizedGradientDescent(0.05, eps=0.3, by="all"),
        mh.PolyakStep(max_lr=0.5),
        mh.Momentum(0.1, nesterov=True),
        mh.Adam(0.01),
    ]
)


def problem(samples=n, dtype=np.float64, seed=1, **options):
    """A model of ordinary size, and samples with noisy labels."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((samples, 4, 5)).astype(dtype)
    y = np.where(rng.random(samples) < 0.5, -1.0, 1.0).astype(dtype)
    model = mh.Classifier.gaussian(3, 4, 5, std=0.5, seed=seed, dtype=dtype, **options)
    return model, mh.Dataset(X, y)


def seen(samples, steps, first=0, **options):
    """How often each sample is in the batch of each step, (steps, samples).

    Sample i is the token e_i, so that a step along the linear loss of label 1 adds to U what
    counts it.
    """
    model = mh.Classifier(np.zeros((1, samples, samples)), np.zeros((1, 1, samples)))
    data = mh.Dataset(np.eye(samples)[:, None], np.ones(samples))
    run = mh.train(
        model, data, steps=first + steps, optimizer=mh.GradientDescent(1.0), loss="linear", wrt="U",
        record="U", **options,
    )  # fmt: skip
    counts = np.diff(run.history["U"], axis=-4)[..., first:, 0, 0, :] * options["batch"]
    assert abs(counts - counts.round()).max() < 1e-9
    return counts.round()


def counted(order, samples):
    return np.array([np.bincount(row, minlength=samples) for row in order])


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
@pytest.mark.parametrize("order", ["shuffle", "replace"])
def test_the_core_draws_the_order_of_the_reference(order, seed):
    for samples, size, steps in ((n, B, 20), (5, 5, 7), (9, 1, 20), (200, 99, 5)):
        expected = mh.reference.batches(samples, size, steps, order=order, seed=seed)
        drawn = seen(samples, steps, batch=size, order=order, seed=seed)
        assert np.array_equal(drawn, counted(expected, samples))


def test_philox_is_the_published_generator():
    """Philox4x64-10 of zeros: the known answer that its authors publish (kat_vectors)."""
    before = np.full(4, 2**64 - 1, np.uint64)  # NumPy adds one first
    philox = np.random.Philox(key=np.zeros(2, np.uint64), counter=before)
    assert [f"{word:016x}" for word in philox.random_raw(4)] == [
        "16554d9eca36314c", "db20fe9d672d0fdc", "d7e772cee186176b", "7e68b68aec7ba23b",
    ]  # fmt: skip


def test_an_epoch_goes_through_a_permutation_and_orders_are_fair():
    for epoch in range(4):
        rows = mh.reference.batches(n, B, 3, seed=5, first=3 * epoch)
        assert len(set(rows.ravel().tolist())) == 18
    # Each of the 20 ordered pairs of 5 samples, and each of the 25 with replacement, equally often:
    # chi-square with 19 and 24 degrees of freedom, whose 99.9 % quantiles are 43.8 and 51.2.
    for order, kinds, most in (("shuffle", 20, 43.8), ("replace", 25, 51.2)):
        rows = mh.reference.batches(5, 2, 8000, order=order, seed=3)[::2]
        observed = np.bincount(rows @ [5, 1], minlength=25)
        expected = len(rows) / kinds
        observed = observed[observed > 0] if order == "shuffle" else observed
        assert len(observed) == kinds
        assert ((observed - expected) ** 2 / expected).sum() < most


def check_against_reference(model, data, optimizer, steps=9, **options):
    names = ("loss", "accuracy", "margin", "grad_norm", "distance")
    run = mh.train(model, data, steps=steps, optimizer=optimizer, record=names, **options)
    end, history = mh.reference.train(
        model, data.X, data.y, steps=steps, optimizer=optimizer, query=data.query,
        weight=data.weight, lengths=data.lengths, **options,
    )  # fmt: skip
    tolerance = TOLERANCE[model.dtype.type]
    for name, array in run.model.parameters.items():
        expected = getattr(end, name)
        assert abs(array - expected).max() <= tolerance * abs(expected).max(), name
    for name in names:
        difference = abs(run.history[name] - history[name]).max()
        assert difference <= tolerance * abs(history[name]).max(), name


@pytest.mark.parametrize("order", ["shuffle", "replace"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_optimizers_against_the_reference(optimizer, order):
    for dtype in (np.float64, np.float32):
        model, data = problem(dtype=dtype)
        weight = np.linspace(0.5, 2.0, n).astype(dtype)
        data = replace(data, weight=weight)
        check_against_reference(model, data, optimizer, batch=B, order=order, seed=2)


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("kind", MODELS)
def test_models_and_plans_against_the_reference(kind, parameter, use_plan):
    model, data = draw(kind, parameter, float, n, 7, 9, 2)
    for plan in PLANS:
        use_plan(plan)
        check_against_reference(
            model, data, mh.GradientDescent(0.002), 4, batch=9, seed=1, loss="squared"
        )


def test_lengths_row_weights_and_classes_against_the_reference():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, 4, 5))
    lengths = rng.integers(1, 5, n)
    classes = rng.integers(0, 3, (n, 4))
    weight = rng.uniform(0.5, 2.0, (n, 4))
    layer = mh.Layer(rng.standard_normal((3, 5, 5)), rng.standard_normal((3, 5, 3)))
    for query in (None, -1, "causal"):
        causal = query == "causal"
        model = replace(layer, causal=True) if causal else replace(layer, query=query)
        y, w = (classes[:, :1], weight[:, 0]) if query == -1 else (classes, weight)
        data = mh.Dataset(X, y, lengths=lengths, weight=w)
        check_against_reference(
            model, data, mh.Adam(0.02), batch=B, seed=4, order="replace", loss="cross_entropy"
        )


def test_weights_are_shares_of_all_samples():
    """A step on a batch is lr (n / B) Σ wg / Σ w, whose mean over an epoch is the gradient."""
    model, data = problem(samples=12)
    data = replace(data, weight=np.where(np.arange(12) < 6, 0.0, np.arange(12.0)))
    lr = 1e-6  # so that parameters hardly move in an epoch
    run = mh.train(model, data, steps=6, optimizer=mh.GradientDescent(lr), batch=2, seed=0)
    gradient = mh.value_and_grad(model, data)[1]
    moved = (run.model.W - model.W) / (-6 * lr)
    assert abs(moved - gradient.W).max() < 1e-4 * abs(gradient.W).max()
    nothing = replace(data, weight=np.eye(12)[3])  # batches without weight do not move anything
    run = mh.train(
        model, nothing, steps=6, optimizer=mh.NormalizedGradientDescent(0.1), batch=2, record="W"
    )
    moves = np.abs(np.diff(run.history["W"], axis=0)).max(axis=(1, 2, 3)) > 0
    rows = mh.reference.batches(12, 2, 6)
    assert moves.tolist() == [3 in row for row in rows]


@pytest.mark.parametrize("samples", [n, 400])
@pytest.mark.parametrize("rule", [mh.GradientDescent(0.2), mh.NormalizedGradientDescent(0.05)])
def test_runs_side_by_side_are_runs_alone(rule, samples):
    """Own orders and a shared one, own data and shared, in blocks of lanes and one by one."""
    R = 19 if samples == n else 2
    starts = mh.Classifier.gaussian(3, 4, 5, std=0.5, seed=0, runs=R)
    _, one = problem(samples)
    several = [problem(samples, seed=r)[1] for r in range(R)]
    own = mh.Dataset(np.stack([d.X for d in several]), np.stack([d.y for d in several]))
    for data, seed in ((one, range(R)), (own, 5), (own, range(R)), (one, 5)):
        options = {"steps": 8, "optimizer": rule, "batch": 6, "record": ("loss", "grad_norm", "W")}
        runs = mh.train(starts, data, seed=seed, **options)
        for r in (0, R - 1):
            alone = data.run(r) if data.runs else data
            of_run = seed if isinstance(seed, int) else seed[r]
            expected = mh.train(starts[r], alone, seed=of_run, **options)
            same_run(runs[r], expected, TOLERANCE[np.float64])
            assert runs[r].batches == expected.batches == Batches(6, "shuffle", of_run)
    branches = mh.train(starts[0], one, steps=4, optimizer=rule, batch=6, seed=(1, 2, 3))
    assert branches.runs == 3  # seeds alone make runs
    assert branches[1:].batches == Batches(6, "shuffle", (2, 3))
    assert branches[1:].segments[0].batches == branches[1:].batches


@pytest.mark.parametrize("order", ["shuffle", "replace"])
def test_a_run_goes_on_as_if_it_had_never_stopped(order, tmp_path):
    for runs in (None, 17):
        start, data = problem(runs=runs)
        seed = 9 if runs is None else range(runs)
        options = {"optimizer": mh.Adam(0.01), "test": problem(seed=8)[1]}
        record = {"loss": 2, "test_loss": 3, "grad_norm": 5, "attention_max": 4}
        whole = mh.train(
            start, data, steps=11, batch=B, order=order, seed=seed, record=record, **options
        )
        part = mh.train(
            start, data, steps=4, batch=B, order=order, seed=seed, record=record,
            checkpoint=(tmp_path / "run.npz", 2), **options,
        )  # fmt: skip
        assert mh.train(part, data, steps=7, **options) == whole
        loaded = mh.Run.load(tmp_path / "run.npz")
        assert loaded.batches == part.batches == pickle.loads(pickle.dumps(part)).batches
        assert mh.train(loaded, data, steps=7, **options) == whole
        hooked = mh.train(
            start, data, steps=11, batch=B, order=order, seed=seed, record=record,
            callback=lambda *_: None, **options,
        )  # fmt: skip
        assert hooked == whole


def test_records_are_of_all_samples():
    model, data = problem()
    test = problem(seed=3)[1]
    rule = mh.GradientDescent(0.3)
    record = {"loss": 2, "grad_norm": 3, "accuracy": 1, "test_margin": 2, "W": 1, "U": 1}
    run = mh.train(model, data, steps=7, optimizer=rule, batch=B, record=record, test=test)
    for name, every in record.items():
        assert run.steps[name].tolist() == sorted({*range(0, 8, every), 7})
        for row, k in enumerate(run.steps[name]):
            at = replace(model, W=run.history["W"][k], U=run.history["U"][k])
            known = mh.evaluate(at, data, record=name, test=test)[name]
            np.testing.assert_allclose(run.history[name][row], known, rtol=1e-12)
    bare = mh.train(model, data, steps=7, optimizer=rule, batch=B, record=())
    assert np.array_equal(bare.model.W, run.model.W)  # records change nothing
    assert mh.train(model, data, steps=7, optimizer=rule, batch=B).record == {"loss": 3}


def test_what_is_not_asked_for_takes_no_pass_over_all_samples():
    """A loss of ours counts the samples that it sees: those of the batches of θ_0, ..., θ_5."""
    model, data = problem()
    sizes = []

    def loss(F, y):
        sizes.append(len(F))
        return (F - y) ** 2, 2 * (F - y)

    options = {"steps": 5, "optimizer": mh.GradientDescent(0.01), "batch": 3, "loss": loss}
    mh.train(model, data, record=("param_norm",), **options)
    assert sum(sizes) == 6 * 3
    sizes.clear()
    mh.train(model, data, record={"loss": 5}, **options)
    assert sum(sizes) == 6 * 3 + 2 * len(data.y)


def test_thresholds_hold_once_an_epoch():
    model, data = problem()
    for stop in ({"loss": 0.5}, {"grad_norm": 0.15}):
        name, limit = next(iter(stop.items()))
        run = mh.train(
            model, data, steps=300, optimizer=mh.GradientDescent(0.5), batch=B, stop=stop,
            record={name: 1},
        )  # fmt: skip
        assert run.reason == name
        met = run.history[name] <= limit
        assert run.step == int(np.flatnonzero(met & (run.steps[name] % 3 == 0))[0])
        rest = mh.train(
            model, data, steps=300, optimizer=mh.GradientDescent(0.5), batch=B, stop=stop,
            record="accuracy",
        )  # fmt: skip
        assert rest.step == run.step
        assert np.array_equal(rest.model.W, run.model.W)


def test_a_run_ends_at_the_batch_that_is_not_finite():
    model, data = problem()
    X = data.X.copy()
    X[11] = math.nan
    order = mh.reference.batches(n, B, 40, seed=1)
    first = int(np.flatnonzero((order == 11).any(axis=1))[0])
    assert first > 0
    for record in ((), ("loss", "grad_norm"), {"loss": 1000, "grad_norm": 1000}):
        run = mh.train(
            model, mh.Dataset(X, data.y), steps=40, optimizer=mh.GradientDescent(0.1), batch=B,
            seed=1, record=record,
        )  # fmt: skip
        assert (run.reason, run.step) == ("nonfinite", first)
        assert np.isfinite(run.model.W).all()
        for name in run.history:  # a run that ends has its last values recorded
            assert run.steps[name][-1] == first
            assert np.isnan(run.history[name][-1])


def test_segments_and_certificates_know_of_batches():
    model, data = problem()
    run = mh.train(model, data, steps=3, optimizer=mh.GradientDescent(0.01))
    run = mh.train(run, data, steps=4, batch=B, seed=2)
    run = mh.train(run, data, steps=2, order="replace")
    run = mh.train(run, data, steps=2, batch="all")
    sizes = [(s.first, s.batches) for s in run.segments]
    assert sizes == [
        (0, None),
        (3, Batches(B, "shuffle", 2)),
        (7, Batches(B, "replace", 2)),
        (9, None),
    ]
    assert run.batches is None
    certificate = mh.theory.certify(run, data, hessian=False)
    assert "steps 4 to 7" in certificate.notes[0]
    assert "batches" in certificate.notes[0]
    run = mh.train(model, data, steps=3, optimizer=mh.GradientDescent(0.01), batch=B)
    certificate = mh.theory.certify(run, data, hessian=False)
    assert certificate.guarantee is None
    assert "batches of 6 samples" in certificate.notes[0]


def test_training_in_a_subspace_takes_the_same_batches():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((8, 3, 600))
    data = mh.Dataset(X, np.where(np.arange(8) % 2, 1.0, -1.0))
    model = mh.Classifier.gaussian(2, 3, 600, std=0.02, seed=1)
    run = mh.train(model, data, steps=5, optimizer=mh.GradientDescent(0.01), batch=3, seed=4)
    assert run.subspace is not None
    end, _ = mh.reference.train(
        model, X, data.y, steps=5, optimizer=mh.GradientDescent(0.01), batch=3, seed=4
    )
    assert abs(run.model.W - end.W).max() < 1e-12 * abs(end.W).max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 24}, "batch: expected at most the n = 23 samples, got 24"),
        ({"batch": 0}, "batch: expected an integer of at least 1, got 0"),
        ({"batch": 2.5}, "batch: expected an integer"),
        ({"batch": "none"}, "batch: expected a number of samples or 'all', got 'none'"),
        ({"seed": 1}, "seed: expected batch= with it"),
        ({"order": "replace"}, "order: expected batch= with it"),
        ({"batch": 2, "order": "cycle"}, "order: expected 'shuffle' or 'replace', got 'cycle'"),
        ({"batch": 2, "seed": -1}, "seed: expected an integer from 0 to"),
        ({"batch": 2, "seed": 2**64}, "seed: expected an integer from 0 to"),
        ({"batch": 2, "seed": ()}, "seed: expected at least one"),
        ({"batch": 2, "seed": (1, 2), "runs": 3}, "expected a run axis of length R"),
    ],
)
def test_refusals(options, message):
    model, data = problem(runs=options.pop("runs", None))
    with pytest.raises((TypeError, ValueError), match=message.replace("(", r"\(")):
        mh.train(model, data, steps=1, optimizer=mh.GradientDescent(0.1), **options)
    drawn = mh.train(
        model, data, steps=1, optimizer=mh.GradientDescent(0.1), batch=2,
        seed=np.random.default_rng(0),
    )  # fmt: skip
    assert 0 <= drawn.batches.seed < 2**64


def test_samples_are_counted_in_32_bits():
    assert chosen(2, None, 1, None, 2**32 - 1) == Batches(2, seed=1)
    with pytest.raises(ValueError, match=r"batch: .*less than 2\^32 samples, got 4294967296"):
        chosen(2, None, 1, None, 2**32)


def test_large_tokens_where_runs_multiply_factors_out():
    """Runs as lanes take Q Kᵀ of copies that are scaled with the tokens, those of every head."""
    rng = np.random.default_rng(0)
    runs, heads, tokens, dim, rank, size = 3, 3, 4, 5, 2, 2.0**200
    X = size * rng.standard_normal((7, tokens, dim))
    y = np.where(np.arange(7) % 3, 1.0, -1.0)
    models = [
        mh.Classifier(
            mh.LowRank(*(rng.standard_normal((2, heads, dim, rank)) / size)),
            rng.standard_normal((heads, tokens, dim)) / size,
        )
        for _ in range(runs)
    ]
    settings = {
        "steps": 4, "batch": 3, "wrt": "U", "optimizer": mh.GradientDescent(size**-2),
    }  # fmt: skip
    together = mh.train(mh.stack(models), X, y, **settings)
    for r, model in enumerate(models):
        alone = mh.train(model, X, y, **settings).model.U * size
        assert abs(alone - size * model.U).max() > 0.1
        # A few roundings in each of four steps of order one.
        np.testing.assert_allclose(together.model[r].U * size, alone, rtol=1e-13, atol=1e-13)
