"""Training takes the steps of the reference, ends where it should, and calls back as promised."""

import dataclasses
import io
import sys

import numpy as np
import pytest
from lists import LOSSES, targets, with_every, within_domain

import mhfast as mh

# Rounding of one step is a few units in the last place of the parameters; tens of steps at these
# step sizes amplify it by about ten.
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


def problem(dtype=np.float64, *, n=7, tokens=3, dim=5, heads=2, query=None, std=0.5, seed=1):
    """A model with parameters of ordinary size and a weighted data set with noisy labels."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, tokens, dim)).astype(dtype)
    y = np.where(rng.random(n) < 0.5, -1, 1)
    y[:2] = [-1, 1]
    weight = (0.5 + rng.random(n)).astype(dtype)
    rows = 4 if query == "external" else None
    external = rng.standard_normal((n, 4, dim)).astype(dtype) if rows else None
    model = mh.Classifier.gaussian(
        heads, rows or tokens, dim, std=std, seed=seed, dtype=dtype,
        query=None if rows else query,
    )  # fmt: skip
    return model, mh.Dataset(X, y, query=external, weight=weight)


def difference(a, b):
    return np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


OPTIMIZERS = with_every(
    [
        mh.GradientDescent(0.3),
        mh.GradientDescent(0.3, schedule=np.linspace(1.0, 0.1, 40)),
        mh.GradientDescent(0.3, l2=0.05),
        mh.GradientDescent(0.3, clip=0.1),
        mh.GradientDescent(0.3, l2=0.05, clip=0.1, schedule=np.linspace(0.0, 2.0, 40)),
        mh.NormalizedGradientDescent(0.05),
        mh.NormalizedGradientDescent(0.05, by="head"),
        mh.NormalizedGradientDescent(0.05, by="all"),
        mh.NormalizedGradientDescent(0.05, eps=0.3, by="head"),
        mh.NormalizedGradientDescent(0.05, eps=0.3, by="all", clip=0.1, l2=0.02),
        mh.NormalizedGradientDescent(0.05, l2=0.05, schedule=np.linspace(1.0, 0.1, 40)),
    ]
)


def check_against_reference(model, data, optimizer, steps, **options):
    names = ("loss", "accuracy", "margin", "grad_norm", "param_norm", "distance")
    run = mh.train(model, data, steps=steps, optimizer=optimizer, record=names, **options)
    end, history = mh.reference.train(
        model, data.X, data.y, steps=steps, optimizer=optimizer,
        query=data.query, weight=data.weight, **options,
    )  # fmt: skip
    tolerance = TOLERANCE[model.dtype.type]
    assert run.reason == "steps"
    assert run.model.dtype == model.dtype
    assert difference(run.model.W, end.W) < tolerance
    assert difference(run.model.U, end.U) < tolerance
    for name in names:
        assert run.history[name].dtype == np.float64
        assert run.steps[name].tolist() == list(range(steps + 1))
        assert difference(run.history[name], history[name]) < tolerance, name


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_optimizers_against_the_reference(optimizer, dtype):
    check_against_reference(*problem(dtype), optimizer, 20)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("query", [None, 0, -2, "external"])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS[0], OPTIMIZERS[5]], ids=["plain", "normalized"])
def test_queries_against_the_reference(optimizer, query, dtype):
    check_against_reference(*problem(dtype, query=query, n=11, heads=3), optimizer, 20)


@pytest.mark.parametrize("loss", LOSSES[mh.Classifier])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS[4], OPTIMIZERS[5]], ids=["plain", "normalized"])
def test_losses_against_the_reference(optimizer, loss):
    model, data = problem(std=0.2)
    y = data.y if loss == "logistic" else targets(loss, data.y.shape, np.random.default_rng(3))
    model, X = within_domain(loss, model, data.X)
    check_against_reference(model, dataclasses.replace(data, X=X, y=y), optimizer, 20, loss=loss)


@pytest.mark.parametrize("wrt", [("W",), ("U",), ("W", "U")])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS[0], OPTIMIZERS[7]], ids=["plain", "normalized"])
def test_wrt_against_the_reference(optimizer, wrt):
    model, data = problem()
    check_against_reference(model, data, optimizer, 20, wrt=wrt)
    run = mh.train(model, data, steps=3, optimizer=optimizer, wrt=wrt)
    for name in ("W", "U"):
        moved = not np.array_equal(getattr(run.model, name), getattr(model, name))
        assert moved == (name in wrt)


def test_plain_transcription():
    """Three steps written out, independent of the reference's training loop."""
    model, data = problem()
    run = mh.train(
        model, data, steps=3,
        optimizer=mh.GradientDescent(0.7, l2=0.1, clip=0.2, schedule=[1.0, 0.5, 0.25]),
    )  # fmt: skip
    theta = model
    for factor in (1.0, 0.5, 0.25):
        _, g = mh.value_and_grad(theta, data)
        g = g + mh.Gradients(W=0.1 * theta.W, U=0.1 * theta.U)
        theta = theta - 0.7 * factor * min(1.0, 0.2 / mh.norm(g)) * g
    assert difference(run.model.W, theta.W) < 1e-14  # three roundings of numbers of order one
    assert difference(run.model.U, theta.U) < 1e-14


@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_thread_count_changes_nothing(dtype, steps):
    model, data = problem(dtype, n=100, tokens=10, dim=20, heads=16, std=0.02)
    record = {
        "loss": 1, "grad_norm": 1, "margin": 1, "accuracy": 1, "distance": 1, "param_norm": 1,
        "attention_max": 20, "W": steps, "U": steps,
    }  # fmt: skip
    runs = [
        mh.train(
            model, data, steps=steps, optimizer=mh.GradientDescent(1.0), record=record,
            num_threads=threads,
        )
        for threads in (1, 2, 3, 4, 7, 1)
    ]  # fmt: skip
    for run in runs[1:]:
        assert run == runs[0]


def test_arrays_and_lists_in_place_of_a_dataset():
    model, data = problem()
    data = mh.Dataset(data.X, data.y)
    options = {"steps": 4, "optimizer": mh.GradientDescent(0.3)}
    expected = mh.train(model, data, **options)
    layouts = (np.asfortranarray(data.X), data.X.tolist(), np.flip(np.flip(data.X, 1).copy(), 1))
    for X in layouts:
        assert mh.train(model, X, data.y.tolist(), **options) == expected


def test_no_steps():
    model, data = problem()
    run = mh.train(model, data, steps=0, optimizer=mh.GradientDescent(0.3))
    assert run.model == model
    assert run.steps["loss"].tolist() == [0]
    value, _ = mh.value_and_grad(model, data)
    # A sum in another order at most.
    assert abs(run.history["loss"][0] - value) < 1e-15
    assert (run.step, run.reason, run.stopped) == (0, "steps", None)


@pytest.mark.parametrize("by", ["tensor", "head", "all"])
def test_a_zero_gradient_does_not_move(by):
    _, data = problem()
    model = mh.Classifier.zeros(2, 3, 5)
    run = mh.train(model, data, steps=1, optimizer=mh.NormalizedGradientDescent(0.1, by=by))
    assert not run.model.W.any()
    # One step of length lr for what has a norm of its own; two heads under "head".
    assert abs(np.linalg.norm(run.model.U) - 0.1 * (2**0.5 if by == "head" else 1.0)) < 1e-15


@pytest.mark.parametrize("name", ["loss", "grad_norm", "accuracy", "margin"])
def test_thresholds_end_training_at_the_first_step_that_meets_them(name):
    model, data = problem()
    options = {"optimizer": mh.GradientDescent(0.3), "record": ("W", name)}
    full = mh.train(model, data, steps=60, **options)
    values = full.history[name]
    threshold = values[45]
    meets = values <= threshold if name in ("loss", "grad_norm") else values >= threshold
    first = int(np.argmax(meets))
    run = mh.train(model, data, steps=60, stop={name: threshold, "loss": -1.0} | {name: threshold},
                   **options)  # fmt: skip
    assert (run.step, run.reason, run.stopped) == (first, name, first)
    assert np.array_equal(run.model.W, full.history["W"][first])
    assert np.array_equal(run.history[name], values[: first + 1])


def test_stop_function():
    model, data = problem()
    asked = []

    def stop(k, model):
        asked.append(k)
        return np.linalg.norm(model.U) > 2.4

    options = {"optimizer": mh.GradientDescent(0.3), "record": {"U": 1, "loss": 10}}
    full = mh.train(model, data, steps=60, **options)
    norms = np.linalg.norm(full.history["U"].reshape(61, -1), axis=1)
    first = int(np.argmax(norms > 2.4))
    assert 0 < first < 60
    run = mh.train(model, data, steps=60, stop=stop, **options)
    assert (run.step, run.reason, run.stopped) == (first, "stop", first)
    assert asked == list(range(first + 1))
    assert run.steps["loss"].tolist() == sorted({*range(0, first, 10), first})


def test_callback_sees_every_model():
    model, data = problem()
    seen = []
    run = mh.train(
        model, data, steps=6, optimizer=mh.GradientDescent(0.3), record=("W", "U"),
        callback=lambda k, model: seen.append((k, model)),
    )  # fmt: skip
    assert [k for k, _ in seen] == list(range(7))
    for k, theta in seen:
        assert np.array_equal(theta.W, run.history["W"][k])
        assert np.array_equal(theta.U, run.history["U"][k])
        assert not theta.W.flags.writeable
    assert seen[-1][1] == run.model


def test_callback_ends_training():
    model, data = problem()
    run = mh.train(
        model, data, steps=50, optimizer=mh.GradientDescent(0.3), record={"loss": 4},
        callback=lambda k, _: k == 6,
    )  # fmt: skip
    assert (run.step, run.reason, run.stopped) == (6, "callback", 6)
    assert run.steps["loss"].tolist() == [0, 4, 6]
    shorter = mh.train(model, data, steps=6, optimizer=mh.GradientDescent(0.3))
    assert shorter.model == run.model


def test_the_library_may_be_used_in_a_callback():
    model, data = problem()
    values = []
    run = mh.train(
        model, data, steps=3, optimizer=mh.GradientDescent(0.3),
        callback=lambda _, model: values.append(mh.value_and_grad(model, data)[0]) and None,
    )  # fmt: skip
    assert difference(values, run.history["loss"]) < 1e-15  # a sum in another order at most


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_run_that_turns_non_finite_keeps_its_last_point(dtype):
    model, data = problem(dtype)
    run = mh.train(
        model, data, steps=50, loss="squared",
        optimizer=mh.GradientDescent(1e3), record=("loss", "W"),
    )  # fmt: skip
    assert (run.reason, run.stopped) == ("nonfinite", run.step)
    assert 0 < run.step < 50
    assert np.isfinite(run.history["loss"][:-1]).all()
    assert np.array_equal(run.history["W"][-1], run.model.W, equal_nan=True)


def test_data_that_are_not_finite_take_no_step():
    model, data = problem()
    X = data.X.copy()
    X[3, 1, 2] = np.nan
    with pytest.warns(RuntimeWarning, match=r"at step 0; X holds nan at index 3, 1, 2$") as w:
        run = mh.train(model, X, data.y, steps=5, optimizer=mh.GradientDescent(0.3))
    assert len(w) == 1
    assert w[0].filename == __file__
    assert (run.step, run.reason) == (0, "nonfinite")
    assert run.model == model
    assert np.isnan(run.history["loss"]).tolist() == [True]


def test_a_polyak_step_has_its_loss_whether_or_not_it_is_recorded():
    model, data = problem()
    recorded, silent = (
        mh.train(model, data, steps=5, optimizer=mh.PolyakStep(10.0), record=record).model
        for record in ("loss", ())
    )
    assert silent == recorded != model


@pytest.mark.parametrize("runs", [None, 9])  # alone, and as lanes side by side
def test_a_gradient_that_is_not_finite_ends_a_run_whose_loss_is(runs):
    """The output is 5e153: its square 2.5e307 is a number, and 2 · 5e153 · 1e156 is not."""
    X = np.full((1, 1, 1), 1e156)
    model = mh.Classifier(np.zeros((1, 1, 1)), np.full((1, 1, 1), 5e-3))
    start = model if runs is None else mh.stack([model] * runs)
    options = {"steps": 5, "loss": "squared", "wrt": "U"}
    with pytest.warns(RuntimeWarning, match="the loss or its gradient is not finite at step 0"):
        run = mh.train(start, X, np.ones(1), optimizer=mh.GradientDescent(0.1), **options)
    assert np.all(np.asarray(run.reason) == "nonfinite")
    assert np.all(np.asarray(run.stopped) == 0)
    assert run.model == start
    assert run.history["loss"] == pytest.approx(2.5e307, rel=1e-14)


def test_a_loss_too_large_at_the_start_is_told():
    model, data = problem()
    with pytest.warns(RuntimeWarning, match=r"data and parameters are finite, so it is too large"):
        run = mh.train(
            dataclasses.replace(model, U=1e300 * model.U), data, steps=2, loss="squared",
            optimizer=mh.GradientDescent(0.3),
        )  # fmt: skip
    assert run.reason == "nonfinite"


def test_a_test_set_that_is_not_finite_disturbs_nothing():
    model, data = problem()
    options = {"steps": 5, "optimizer": mh.GradientDescent(0.3)}
    X = data.X.copy()
    X[3, 1, 2] = np.nan
    run = mh.train(model, data, test=(X, data.y), record=("loss", "test_loss"), **options)
    assert np.isnan(run.history["test_loss"]).all()
    alone = mh.train(model, data, **options)
    assert np.array_equal(run.history["loss"], alone.history["loss"])
    assert run.model == alone.model


def test_progress_with_tqdm(capsys):
    pytest.importorskip("tqdm")
    model, data = problem()
    mh.train(model, data, steps=30, optimizer=mh.GradientDescent(0.3), progress=True)
    assert "30/30" in capsys.readouterr().err


def test_progress_without_tqdm(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    model, data = problem()
    mh.train(model, data, steps=30, optimizer=mh.GradientDescent(0.3), progress=True)
    assert capsys.readouterr().err.endswith("training: step 30 of 30\n")


class BrokenPipe(io.StringIO):
    def write(self, _):
        raise BrokenPipeError


@pytest.mark.parametrize("with_tqdm", [True, False])
@pytest.mark.parametrize("state", ["none", "closed", "closed on the way", "broken"])
def test_progress_without_a_stream_to_show_it(state, with_tqdm, monkeypatch):
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    stream = {"none": None, "broken": BrokenPipe()}.get(state, io.StringIO())
    if state == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    callback = (lambda k, _: k == 3 and stream.close()) if "way" in state else None
    model, data = problem()
    run = mh.train(
        model, data, steps=5, optimizer=mh.GradientDescent(0.3), progress=True, callback=callback
    )
    assert run.step == 5


def test_no_progress_is_silent(capsys):
    model, data = problem()
    mh.train(model, data, steps=30, optimizer=mh.GradientDescent(0.3))
    assert capsys.readouterr() == ("", "")


def wrong(**changes):
    return {"steps": 1, "optimizer": mh.GradientDescent(0.1)} | changes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (wrong(optimizer=None), TypeError, "optimizer: .*got None"),
        (wrong(optimizer=0.1), TypeError, r"optimizer: .*got 0\.1"),
        (wrong(steps=-1), ValueError, "steps: .*-1"),
        (wrong(steps=1.5), TypeError, "steps: .*float"),
        (wrong(loss="hunge"), ValueError, "loss: .*logistic.*'hunge'"),
        (wrong(wrt="V"), ValueError, "wrt: .*W, U.*'V'"),
        (wrong(wrt=()), ValueError, "wrt: .*at least one"),
        (wrong(stop={"accuracies": 1.0}), ValueError, "stop: .*accuracy.*'accuracies'"),
        (wrong(stop={"loss": "low"}), TypeError, "stop.*loss.*real number"),
        (wrong(stop=0.1), TypeError, r"stop: .*0\.1"),
        (wrong(callback=3), TypeError, "callback: .*function.*, got int"),
        (wrong(checkpoint="run.npz"), TypeError, r"checkpoint: .*\(path, every\)"),
        (wrong(checkpoint=("no/such/dir/run.npz", 5)), ValueError, "checkpoint: .*no/such/dir"),
        (wrong(num_threads=0), ValueError, "num_threads: .*0"),
        (wrong(test=3), TypeError, "test: .*int"),
        (wrong(test={1: None}), TypeError, "test: .*names.*1"),
        (wrong(optimizer=mh.GradientDescent(1.0, schedule=[])), ValueError, "schedule: .*1 steps"),
    ],
)
def test_wrong_arguments(options, error, message):
    model, data = problem()
    with pytest.raises(error, match=message):
        mh.train(model, data, **options)


def test_wrong_data():
    model, data = problem()
    with pytest.raises(TypeError, match=r"model: .*Classifier, Layer, Stack or Run, got str"):
        mh.train("model", data, **wrong())
    with pytest.raises(TypeError, match=r"y: .*None"):
        mh.train(model, data.X, **wrong())
    with pytest.raises(TypeError, match=r"y: .*Dataset"):
        mh.train(model, data, data.y, **wrong())
    with pytest.raises(TypeError, match=r"X: .*float64.*float32"):
        mh.train(model, data.X.astype(np.float32), data.y, **wrong())
    with pytest.raises(ValueError, match=r"X: .*\(n, 3, 5\).*\(7, 3, 4\)"):
        mh.train(model, data.X[:, :, :4], data.y, **wrong())
    labels = np.ones(7)
    labels[4] = 0.5
    with pytest.raises(ValueError, match=r"y: .*0\.5 at index 4"):
        mh.train(model, data.X, labels, **wrong())
    with pytest.raises(ValueError, match=r"test set 'clean': X: .*\(7, 2, 5\)"):
        mh.train(model, data, test={"clean": (data.X[:, :2], data.y)}, **wrong())
