"""`mhfast.train(..., reduce=)`: processes that train together, with threads in their place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from rooms import part, together
from trainings import MODELS, OPTIMIZERS, PARAMETERS, PROJECTIONS, draw

import mhfast as mh
from mhfast.interop import reduce as adapters
from mhfast.training.reduction import shard_sizes

SHARDS = (7, 6, 7, 9)
N, T, D, H = sum(SHARDS), 5, 6, 3
SCALARS = ("loss", "accuracy", "margin", "grad_norm", "param_norm")
SETTINGS = {"steps": 12, "record": SCALARS}
ROUNDING = 1e-12
"""Relative, in float64: other orders of sums over 29 samples differ by some units of 1e-16 a step,
which 12 steps of these sizes do not increase a hundredfold."""


def loss_of(kind):
    return "logistic" if kind is mh.Classifier else "squared"


def same(a, b):
    """Two runs are the same to the last bit, with their records and their states."""
    assert a.model == b.model
    assert a.reason == b.reason
    assert a.step == b.step
    for name in a.history:
        assert_array_equal(a.history[name], b.history[name], name)
    for name, slots in a.state.items():
        for slot, other in zip(slots, b.state[name], strict=True):
            assert_array_equal(slot, other)


def close(a, b, rtol=ROUNDING):
    for name, array in a.model.parameters.items():
        other = b.model.parameters[name]
        assert_allclose(array, other, rtol=0, atol=rtol * np.abs(other).max())
    for name in a.history:
        assert_allclose(a.history[name], b.history[name], rtol=100 * rtol, err_msg=name)


def on_ranks(size, model, data, shards=SHARDS, **settings):
    """The runs of all ranks, which are the same, and how often they added up."""
    results, room = together(
        size,
        lambda rank, reduce: mh.train(
            model, part(data, shards, rank, size), reduce=reduce, **settings
        ),
        shards=shards,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
        same(result, results[0])
        assert result == results[0]  # with its segments
    return results[0], room.calls


def weighed(data, lengths=False):
    rng = np.random.default_rng(3)
    weight = rng.uniform(0.5, 2.0, data.n).astype(data.X.dtype)
    weight[[0, 11]] = 0
    return mh.Dataset(
        data.X, data.y, query=data.query, weight=weight,
        lengths=rng.integers(1, T + 1, data.n) if lengths else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("kind", MODELS)
def test_one_process_alone_changes_no_bit(kind, parameter, dtype, use_plan):
    model, data = draw(kind, parameter, dtype, N, T, D, H)
    data = weighed(data, lengths=parameter == "dense")
    settings = {**SETTINGS, "loss": loss_of(kind), "optimizer": mh.NormalizedGradientDescent(0.1)}
    if set(model.parameters) <= {"U", "V"}:  # processes keep no attended tokens
        use_plan("rows")
    same(
        mh.train(model, data, reduce=lambda sums: sums, **settings),
        mh.train(model, data, **settings),
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_number_of_ranks_changes_no_bit(kind, parameter, dtype):
    model, data = draw(kind, parameter, dtype, N, T, D, H, seed=1)
    data = weighed(data, lengths=parameter == "dense")
    settings = {
        **SETTINGS,
        "loss": loss_of(kind),
        "optimizer": mh.Momentum(0.1 if kind is mh.Classifier else 1e-3),
    }
    one, calls = on_ranks(1, model, data, **settings)
    for size in (2, 4):
        run, more = on_ranks(size, model, data, **settings)
        same(run, one)
        assert more == calls
    # Before the first step settings and weights; after the last its loss, and that all have ended.
    assert calls == 2 + 12 + 2
    close(one, mh.train(model, data, **settings), 1e-5 if dtype is np.float32 else ROUNDING)


@pytest.mark.parametrize(
    ("name", "rest"), list(zip(OPTIMIZERS, itertools.cycle(PROJECTIONS), strict=False))
)
def test_every_optimizer(name, rest):
    if name.startswith(("mirror", "Exponentiated")):
        rest = {}  # these take no projection, or only their own
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H, seed=2)
    rule = OPTIMIZERS[name]
    if name == "ExponentiatedGradient":
        model = mh.Classifier(np.abs(model.W) + 0.1, np.abs(model.U) + 0.1)
    settings = {**SETTINGS, "optimizer": rule(clip=0.9, l2=1e-3, **rest)}
    runs = [on_ranks(size, model, data, **settings)[0] for size in (1, 2, 4)]
    same(runs[1], runs[0])
    same(runs[2], runs[0])
    # Signs, and roots of squares near zero, multiply what rounding differs by.
    close(runs[0], mh.train(model, data, **settings), 1e-7)


def test_three_shards_each_and_uneven_ranks_agree_to_rounding():
    model, data = draw(mh.Layer, "tied", np.float64, N, T, D, H, seed=3)
    settings = {**SETTINGS, "loss": "squared", "optimizer": mh.Adam(0.01)}
    one = mh.train(model, data, **settings)
    six, _ = on_ranks(2, model, data, shards=(3, 5, 4, 8, 2, 7), **settings)
    uneven, _ = on_ranks(3, model, data, shards=(3, 17, 9), **settings)
    close(six, one)
    close(uneven, one)


@pytest.mark.parametrize("by", ["tensor", "head", "all"])
@pytest.mark.parametrize(
    ("parameter", "size"), [("token", 2e3), ("low rank", 200.0), ("prompt", 2e3)]
)
def test_saturated_attention_takes_its_factors_from_all_ranks(parameter, size, by):
    """Gradients below the range of float32 in one rank, of which others know only by the sums."""
    model, data = draw(mh.Classifier, parameter, np.float32, N, T, D, H, size=size, seed=4)
    grow = np.ones((N, 1, 1), np.float32)
    grow[:13] = 4.0
    data = mh.Dataset(data.X * grow, data.y)
    settings = {"steps": 10, "record": SCALARS, "wrt": [n for n in model.parameters if n != "U"]}
    settings["optimizer"] = mh.NormalizedGradientDescent(0.05, by=by)
    one, calls = on_ranks(1, model, data, **settings)
    assert calls > 2 + 10 + 2  # passes for factors
    for ranks in (2, 4):
        same(on_ranks(ranks, model, data, **settings)[0], one)
    alone = mh.train(model, data, **settings)
    same(mh.train(model, data, reduce=lambda sums: sums, **settings), alone)
    # float32, and steps whose direction is that of a few tokens near a tie
    assert_allclose(one.history["loss"], alone.history["loss"], rtol=1e-4)
    assert_allclose(one.history["param_norm"], alone.history["param_norm"], rtol=1e-5)


def test_data_out_of_range_in_one_rank_are_rescaled_in_all():
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H, seed=5)
    large = np.ones((N, 1, 1))
    large[16:] = 2.0**300
    model = mh.Classifier(model.W * 2.0**-600, model.U * 2.0**-300)
    data = mh.Dataset(data.X * large, data.y)
    settings = {"steps": 4, "optimizer": mh.GradientDescent(2.0**-600), "wrt": "U"}
    runs = [on_ranks(size, model, data, **settings)[0] for size in (1, 2, 4)]
    same(runs[1], runs[0])
    same(runs[2], runs[0])
    alone = mh.train(model, data, **settings)
    assert alone.history["loss"][-1] < 0.99 * alone.history["loss"][0]
    close(runs[0], alone)


@pytest.mark.parametrize("kind", MODELS)
def test_words_of_a_dictionary(kind):
    model, data = draw(kind, "dense", np.float64, N, T, D, H, seed=14)
    rng = np.random.default_rng(14)
    tokens = mh.Tokens(rng.integers(0, 11, (N, T)), rng.standard_normal((11, D)))
    data = mh.Dataset(tokens, data.y)
    settings = {**SETTINGS, "loss": loss_of(kind), "optimizer": mh.GradientDescent(0.02)}
    runs = [on_ranks(size, model, data, **settings)[0] for size in (1, 2, 4)]
    same(runs[1], runs[0])
    same(runs[2], runs[0])
    close(runs[0], mh.train(model, data, **settings))


def test_threads_change_no_bit():
    model, data = draw(mh.Classifier, "prompt", np.float64, 4 * 300, T, 9, H, seed=6)
    settings = {"steps": 5, "optimizer": mh.GradientDescent(0.1)}
    a, b = (
        on_ranks(2, model, data, shards=(300,) * 4, num_threads=k, **settings)[0] for k in (1, 2)
    )
    same(a, b)


def test_runs_side_by_side():
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H, seed=7)
    settings = {**SETTINGS, "stop": {"loss": 0.6}}
    rates = [0.01, 0.2, 0.9]
    runs, _ = on_ranks(2, model, data, optimizer=mh.GradientDescent(rates), **settings)
    assert runs.reason[0] == "steps"
    assert runs.reason[2] == "loss"
    for r, lr in enumerate(rates):
        alone, _ = on_ranks(2, model, data, optimizer=mh.GradientDescent(lr), **settings)
        assert runs[r].model == alone.model
        rows = len(alone.history["loss"])
        assert_array_equal(runs[r].history["loss"][:rows], alone.history["loss"])


def test_thresholds_and_what_is_not_finite_end_all():
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H, seed=8)
    settings = {"steps": 50, "record": SCALARS, "optimizer": mh.GradientDescent(0.5)}
    for stop in ({"loss": 0.5}, {"accuracy": 0.9}, {"grad_norm": 0.1}, {"margin": -0.5}):
        run, _ = on_ranks(2, model, data, stop=stop, **settings)
        alone = mh.train(model, data, stop=stop, **settings)
        assert run.reason == alone.reason == next(iter(stop))
        assert 0 < run.step == alone.step < 50
    X = data.X.copy()
    X[20, 0, 0] = np.nan  # of the last rank only
    with pytest.warns(RuntimeWarning, match="no step was taken"):
        run, _ = on_ranks(2, model, mh.Dataset(X, data.y), **settings)
    assert (run.reason, run.step) == ("nonfinite", 0)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("what", ["callback", "stop"])
def test_one_rank_ends_training_of_all(what, every):
    """At a step whose loss is recorded only because it is the last, too."""
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H, seed=9)
    settings = {
        **SETTINGS, "record": dict.fromkeys(SCALARS, every), "optimizer": mh.GradientDescent(0.1),
    }  # fmt: skip

    def training(rank, reduce):
        end = {what: (lambda step, _: step == 7)} if rank == 1 else {}
        return mh.train(
            model, part(data, SHARDS, rank, 2), reduce=reduce, **settings, **end
        )  # fmt: skip

    runs, _ = together(2, training, shards=SHARDS)
    alone = mh.train(model, data, **{what: lambda step, _: step == 7}, **settings)
    for run in runs:
        assert (run.reason, run.step, run.stopped) == (what, 7, 7)
        assert_array_equal(run.steps["loss"], [*range(0, 7, every), 7])
        close(run, alone)
    assert runs[0].model == runs[1].model


def test_callbacks_get_the_metrics_of_all_samples():
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H, seed=10)
    settings = {**SETTINGS, "optimizer": mh.GradientDescent(0.1)}
    seen = {}

    def training(rank, reduce):
        def note(step, _, metrics):
            seen[rank, step] = metrics

        return mh.train(
            model, part(data, SHARDS, rank, 2), reduce=reduce,
            callback=mh.Callback(note, every=5, record=SCALARS), **settings,
        )  # fmt: skip

    runs, _ = together(2, training, shards=SHARDS)
    assert sorted(seen) == [(rank, step) for rank in (0, 1) for step in (0, 5, 10, 12)]
    for (_, step), metrics in seen.items():
        for name in SCALARS:
            assert metrics[name] == runs[0].history[name][step]


def test_a_run_is_saved_and_resumed_bit_for_bit(tmp_path):
    model, data = draw(mh.Classifier, "low rank", np.float64, N, T, D, H, seed=11)
    settings = {"optimizer": mh.Adam(0.02), "record": SCALARS}
    whole, _ = on_ranks(2, model, data, steps=20, **settings)
    file = tmp_path / "run.npz"

    def training(rank, reduce):
        return mh.train(
            model, part(data, SHARDS, rank, 2), steps=9, reduce=reduce, **settings,
            checkpoint=(file, 4) if rank == 0 else None,
        )  # fmt: skip

    together(2, training, shards=SHARDS)
    resumed, _ = on_ranks(2, mh.Run.load(file), data, until=20)
    assert resumed == whole
    same(on_ranks(4, mh.Run.load(file), data, until=20)[0], whole)


def test_own_losses():
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H, seed=12)

    def exponential(outputs, targets):
        values = np.exp(-targets * outputs)
        return values, -targets * values

    settings = {**SETTINGS, "optimizer": mh.NormalizedGradientDescent(0.1)}
    run, _ = on_ranks(4, model, data, loss=exponential, **settings)
    close(run, mh.train(model, data, loss="exponential", **settings))

    def training(rank, reduce):
        def own(outputs, targets):
            if rank == 1:
                raise ZeroDivisionError("a loss")
            return exponential(outputs, targets)

        return mh.train(
            model, part(data, SHARDS, rank, 2), reduce=reduce, loss=own, **settings
        )  # fmt: skip

    (other, own), _ = together(2, training, shards=SHARDS)
    assert isinstance(own, ZeroDivisionError)
    assert str(other) == (
        "reduce: process 1 failed before the sums of step 0 were added up; the error there says why"
    )


def test_plain_functions_find_their_places():
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H, seed=13)
    settings = {**SETTINGS, "optimizer": mh.NormalizedGradientDescent(0.2)}
    named, _ = on_ranks(4, model, data, **settings)

    def training(rank, reduce):
        return mh.train(model, part(data, SHARDS, rank, 4), reduce=reduce.function, **settings)

    for run in together(4, training, shards=SHARDS, named=False)[0]:
        same(run, named)

    def in_place(sums):
        sums *= 1

    same(
        mh.train(model, data, reduce=in_place, **settings),
        mh.train(model, data, **settings),
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda sums: sums / 2, "of a one in one of them and zeros in the others it returned 0.5"),
        (lambda sums: sums[:-1], r"the shape of its argument, \(4096,\), got float64 .*\(4095,\)"),
        (lambda sums: sums.astype(int), "expected the function to return a floating-point array"),
    ],
)
def test_functions_that_do_not_add_up(function, message):
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H)
    with pytest.raises(ValueError, match=rf"^reduce: .*{message}"):
        mh.train(model, data, reduce=function, steps=1, optimizer=mh.GradientDescent(0.1))


def test_a_function_that_fails_names_the_step_and_keeps_the_run():
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H)
    calls = itertools.count()

    def breaks(sums):
        if next(calls) == 10:
            raise ConnectionError("closed by peer")
        return sums

    with pytest.raises(RuntimeError, match="closed by peer") as caught:
        mh.train(
            model, data, reduce=mh.Reduction(breaks, rank=0, size=1), **SETTINGS,
            optimizer=mh.GradientDescent(0.1),
        )  # fmt: skip
    assert str(caught.value).splitlines()[0] == (
        "reduce: process 0 of 1: the function failed before the sums of step 8 were added up, as "
        "it does where another process has died or cannot be reached: ConnectionError: closed by "
        "peer"
    )
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert caught.value.run.step == 8
    assert next(calls) == 11  # nothing is sent after that
    same_steps = mh.train(model, data, steps=8, optimizer=mh.GradientDescent(0.1))
    assert caught.value.run.model == same_steps.model


def fails_at(step):
    def callback(k, _):
        if k == step:
            raise ZeroDivisionError("in a callback")

    return callback


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({"optimizer": None}, "the settings were compared"),
        ({"record": "nothing"}, "the settings were compared"),
        ({"batch": 3}, "the settings were compared"),
        ({"callback": fails_at(0)}, "the sums of step 1 were added up"),
        ({"callback": fails_at(5)}, "the sums of step 6 were added up"),
        ({"callback": fails_at(12)}, "all had ended"),
    ],
    ids=["optimizer", "record", "batch", "first", "callback", "last"],
)
@pytest.mark.parametrize("named", [True, False])
def test_what_fails_in_one_rank_ends_the_others(options, when, named):
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H)
    settings = {**SETTINGS, "optimizer": mh.GradientDescent(0.1)}

    def training(rank, reduce):
        rest = {**settings, **options} if rank == 1 else settings
        return mh.train(model, part(data, SHARDS, rank, 4), reduce=reduce, **rest)

    errors, _ = together(4, training, shards=SHARDS, named=named)
    assert not str(errors[1]).startswith("reduce: process")
    who = "process 1" if named else "another process"
    for rank in (0, 2, 3):
        text = str(errors[rank]).splitlines()[0]
        assert text == f"reduce: {who} failed before {when}; the error there says why"


def test_an_interrupt_in_one_rank_ends_the_others():
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H)

    def training(rank, reduce):
        def callback(step, _):
            if rank == 1 and step == 5:
                raise KeyboardInterrupt

        return mh.train(
            model, part(data, SHARDS, rank, 2), reduce=reduce, callback=callback, **SETTINGS,
            optimizer=mh.GradientDescent(0.1),
        )  # fmt: skip

    (other, interrupted), _ = together(2, training, shards=SHARDS)
    assert isinstance(interrupted, mh.Interrupted)
    assert interrupted.run.step == 5
    assert str(other).startswith("reduce: process 1 failed before the sums of step 6")
    assert other.run.step == 6


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"optimizer": mh.GradientDescent(0.2)}, "optimizer"),
        ({"optimizer": mh.Adam(0.1)}, "optimizer"),
        ({"steps": 13}, "steps"),
        ({"loss": "exponential"}, "loss"),
        ({"wrt": "W"}, "wrt"),
        ({"record": {"loss": 2}}, "record"),
        ({"stop": {"loss": 0.1}}, "thresholds in stop"),
        ({"callback": None}, "Callbacks and their quantities"),
        ({"callback": mh.Callback(lambda *_: None, every=2)}, "Callbacks and their quantities"),
        ({"callback": mh.Callback(lambda *_: None, 4, "loss")}, "Callbacks and their quantities"),
        ({"model": 1}, "model"),
    ],
)
def test_other_settings_in_one_rank_are_refused_in_all(options, name):
    model, data = draw(mh.Classifier, "dense", np.float64, N, T, D, H)
    settings = {
        **SETTINGS,
        "optimizer": mh.GradientDescent(0.1),
        "callback": mh.Callback(lambda *_: None, 4, "margin"),
        "model": model,
    }

    def training(rank, reduce):
        rest = {**settings, **options} if rank == 1 else dict(settings)
        start = rest.pop("model")
        start = model if start is model else mh.Classifier(model.W + 1e-16, model.U)
        return mh.train(start, part(data, SHARDS, rank, 2), reduce=reduce, **rest)

    for error in together(2, training, shards=SHARDS)[0]:
        assert isinstance(error, ValueError)
        assert str(error) == (
            f"reduce: expected every process to have the same {name}, but process 1 differs from "
            "process 0"
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduce": 3}, TypeError, "reduce: expected a function or a Reduction, got int"),
        ({"batch": 4}, ValueError, "reduce: expected steps on all samples .*, got batch=4"),
        ({"stream": True}, ValueError, "reduce: expected steps on all samples .*, got stream="),
        ({"record": "attention_max"}, ValueError, "record: expected none of .*'attention_max'"),
        (
            {"callback": mh.Callback(lambda *_: None, record="attention")},
            ValueError,
            "record: expected none of attention",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, error, message):
    data = mh.data.tokenized_mixture(20, T, D + 3, seed=0)
    model = mh.Classifier.zeros(heads=H, tokens=T, dim=D + 3)
    if options.get("stream"):
        options = {"stream": data}
    settings = {"reduce": lambda sums: sums, "optimizer": mh.GradientDescent(0.1), **options}
    with pytest.raises(error, match=f"^{message}"):
        mh.train(model, data, steps=2, **settings)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"function": 3}, TypeError, "function: expected a function, got int"),
        ({"shards": 0}, ValueError, "shards: expected an integer of at least 1, got 0"),
        ({"shards": ()}, ValueError, "shards: expected at least one, got none"),
        ({"shards": (3, 0)}, ValueError, "shards: expected an integer of at least 1, got 0"),
        ({"rank": 1}, TypeError, "rank, size: expected both or none, got rank=1, size=None"),
        ({"rank": 2, "size": 2}, ValueError, "rank: expected 0 to 1, below size, got 2"),
        ({"rank": 0, "size": 0}, ValueError, "size: expected an integer of at least 1, got 0"),
    ],
)
def test_arguments_of_a_reduction(arguments, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        mh.Reduction(**{"function": lambda sums: sums, **arguments})


def test_shards_are_parts_of_the_samples():
    def one(shards):
        return mh.Reduction(lambda sums: sums, shards)

    assert shard_sizes(one(4), 14) == (4, 4, 3, 3)
    assert shard_sizes(one((2, 5)), 7) == (2, 5)
    with pytest.raises(ValueError, match="shards: expected at most the n = 3 samples, got 4"):
        shard_sizes(one(4), 3)
    with pytest.raises(ValueError, match=r"shards: expected numbers that add up to .* 8 .* got 7"):
        shard_sizes(one((2, 5)), 8)


def test_parts_have_the_same_shards_for_any_number_of_processes():
    data = mh.Dataset(np.arange(14.0).reshape(14, 1, 1), np.ones(14))
    expected = [(0, 4), (4, 4), (8, 3), (11, 3)]
    for size in (1, 2, 4):
        found = []
        for rank in range(size):
            one = mh.Reduction(lambda sums: sums, 4 // size, rank, size)
            own = one.part(data)
            begins = np.cumsum([own.X[0, 0, 0], *shard_sizes(one, own.n)])
            found += zip(begins, shard_sizes(one, own.n), strict=False)
        assert found == expected
    with pytest.raises(TypeError, match=r"part: expected a rank and .*, got rank=None, shards=1"):
        mh.Reduction(lambda sums: sums).part(data)
    with pytest.raises(TypeError, match=r"part: expected .*, got rank=0, shards=\(7, 7\)"):
        mh.Reduction(lambda sums: sums, (7, 7), 0, 1).part(data)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_pairwise_sums(count):
    rows = np.random.default_rng(count).standard_normal((count, 3))
    sums = adapters.pairwise_sum(rows)
    assert_allclose(sums, rows.sum(axis=0), rtol=0, atol=1e-15 * count)
    # Of eight rows, the sums of four each, of two each, and all at once are the same bits.
    if count == 8:
        for each in (2, 4):
            parts = [adapters.pairwise_sum(some) for some in rows.reshape(-1, each, 3)]
            assert_array_equal(adapters.pairwise_sum(np.stack(parts)), sums)
    assert_allclose(adapters.pairwise_sum(rows[:, 0]), sums[0], rtol=0)
