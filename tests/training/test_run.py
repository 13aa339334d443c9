"""Runs go on bitwise as if never stopped, survive files, pickling and copying, and can be drawn."""

import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from lists import plain, with_every

import mhfast as mh
from mhfast.optimizers import OPTIMIZERS
from mhfast.training.history import joined

SCHEDULE = np.linspace(1.0, 0.2, 40)
RECORD = {
    "loss": 1, "test_loss": 4, "grad_norm": 3, "distance": 5, "cosine": 2, "U": 7,
    "attention_max": 6,
}  # fmt: skip


def setting(dtype=np.float64, query=None):
    """A model, its data, and the options that are given again when a run goes on."""
    rng = np.random.default_rng(5)

    def data_set(n):
        X = rng.standard_normal((n, 3, 5)).astype(dtype)
        external = rng.standard_normal((n, 4, 5)).astype(dtype)
        return mh.Dataset(X, rng.choice([-1, 1], n), query=external if query == "data" else None)

    rows = {None: 3, 1: 1, "data": 4}[query]
    model = mh.Classifier(
        rng.standard_normal((2, 5, 5)).astype(dtype),
        rng.standard_normal((2, rows, 5)).astype(dtype),
        query if query == 1 else None,
        scale=0.5,
    )
    direction = mh.Gradients(U=np.ones_like(model.U))
    inputs = {"X": data_set(7), "test": data_set(11), "directions": {"ones": direction}}
    return model, inputs


def start(model, inputs, steps, **changes):
    options = {"optimizer": mh.GradientDescent(0.3, schedule=SCHEDULE, l2=0.01), "record": RECORD}
    return mh.train(model, **inputs, steps=steps, **options | changes)


def readout_norm(model):
    return np.linalg.norm(model.U, axis=(1, 2))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("query", [None, 1, "data"])
@pytest.mark.parametrize("split", [(10, 20), (12, 0, 18), (7, 1, 1, 21), (30, 0)])
def test_going_on_is_bitwise_as_if_never_stopped(dtype, query, split, tmp_path):
    model, inputs = setting(dtype, query)
    whole = start(model, inputs, 30)
    run = start(model, inputs, split[0])
    for steps in split[1:]:
        run.save(tmp_path / "run.npz")
        run = mh.train(mh.Run.load(tmp_path / "run.npz"), **inputs, steps=steps)
    assert run == whole
    assert run.history.keys() == whole.history.keys() == whole.steps.keys()
    assert run.model == whole.model


@pytest.mark.parametrize(
    "optimizer",
    with_every(
        [
            mh.GradientDescent(0.3, clip=0.2),
            mh.NormalizedGradientDescent(0.1, 0.01, "head", schedule=SCHEDULE, l2=0.02, clip=3.0),
            mh.PolyakStep(0.5, factor=1.0),
            mh.Momentum(0.1, 0.8, True, schedule=SCHEDULE),
            mh.Adam(0.02, weight_decay=0.1, l2=0.02),
            mh.MirrorDescent(0.02, 3, project="ball", radius=2.0, project_by="head"),
        ]
    ),
    ids=repr,
)
def test_settings_survive_a_file(optimizer, tmp_path):
    model, inputs = setting()
    changes = {"optimizer": optimizer, "loss": "exponential", "wrt": "W", "stop": {"loss": 0.1}}
    whole = start(model, inputs, 20, **changes)
    run = start(model, inputs, 9, **changes)
    run.save(tmp_path / "run.npz")
    loaded = mh.Run.load(tmp_path / "run.npz")
    assert loaded == run
    assert loaded.optimizer == optimizer
    assert (loaded.loss, loaded.wrt, loaded.stop) == ("exponential", ("W",), {"loss": 0.1})
    assert mh.train(loaded, **inputs, steps=11) == whole


def test_functions_go_on_in_the_process_and_are_missed_after_a_file(tmp_path):
    model, inputs = setting()
    record = {"loss": 1, readout_norm: 4}
    whole = start(model, inputs, 30, record=record)
    run = start(model, inputs, 11, record=record)
    assert run.steps["readout_norm"].tolist() == [0, 4, 8, 11]
    assert mh.train(run, **inputs, steps=19) == whole
    run.save(tmp_path / "run.npz")
    loaded = mh.Run.load(tmp_path / "run.npz")
    assert np.array_equal(loaded.history["readout_norm"], run.history["readout_norm"])
    with pytest.raises(
        ValueError, match=r"record: the function 'readout_norm' .*give record= again"
    ):
        mh.train(loaded, **inputs, steps=19)
    assert mh.train(loaded, **inputs, steps=19, record=record) == whole


def test_stop_functions_are_missed_after_a_file(tmp_path):
    model, inputs = setting()
    run = start(model, inputs, 5, stop=lambda k, _: k == 20)
    assert mh.train(run, **inputs, steps=30).step == 20
    run.save(tmp_path / "run.npz")
    loaded = mh.Run.load(tmp_path / "run.npz")
    with pytest.raises(ValueError, match=r"stop: the function '<lambda>' .*give stop= again"):
        mh.train(loaded, **inputs, steps=5)
    assert mh.train(loaded, **inputs, steps=25, stop={}).step == 30


def test_a_threshold_stays_until_it_is_removed():
    model, inputs = setting()
    run = start(model, inputs, 30, stop={"margin": -1e9})
    assert (run.step, run.reason) == (0, "margin")
    assert mh.train(run, **inputs, steps=30).step == 0
    assert mh.train(run, **inputs, steps=30, stop={}).step == 30


@pytest.mark.parametrize(
    ("reached", "new", "rows"),
    [
        (3, {}, {0: 0.5, 2: 0.4, 3: 0.3}),  # no step, no row: what there was
        (3, {3: 0.9}, {0: 0.5, 2: 0.4, 3: 0.9}),  # measured anew
        (5, {}, {0: 0.5, 2: 0.4}),  # recorded only because the call ended at 3
        (5, {4: 0.2, 5: 0.1}, {0: 0.5, 2: 0.4, 4: 0.2, 5: 0.1}),
    ],
)
def test_rows_of_two_calls_are_joined(reached, new, rows):
    def arrays(rows):
        return {"loss": np.array([*rows.values()])}, {"loss": np.array([*rows], np.int64)}

    before = arrays({0: 0.5, 2: 0.4, 3: 0.3})
    history, steps = joined(*before, 3, reached, [arrays(new)], 0)
    assert dict(zip(steps["loss"].tolist(), history["loss"].tolist(), strict=True)) == rows


def test_steps_are_integers_where_nothing_is_recorded():
    model, inputs = setting()
    calls = iter([1.0, 0.5])

    def own(_):
        value = next(calls, None)
        if value is None:
            raise KeyboardInterrupt
        return value

    run = start(model, inputs, 1, record={own: 1})
    with pytest.raises(mh.Interrupted) as caught:
        mh.train(run, **inputs, steps=3)
    (steps,) = caught.value.run.steps.values()
    assert steps.dtype == np.int64
    assert steps.tolist() == [0, 1]


def test_new_settings_hold_from_there_on():
    model, inputs = setting()
    run = start(model, inputs, 10)
    run = mh.train(
        run, **inputs, steps=8, optimizer=mh.GradientDescent(0.1), record={"loss": 4, "margin": 3}
    )
    assert run.steps["loss"].tolist() == [*range(10), 12, 16, 18]
    assert run.steps["margin"].tolist() == [12, 15, 18]
    assert run.steps["distance"].tolist() == [0, 5, 10]  # no longer recorded, kept
    assert run.optimizer == mh.GradientDescent(0.1)
    assert run.record == {"loss": 4, "margin": 3}


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind.slots])
def test_another_kind_of_optimizer_begins_anew(kind):
    model, inputs = setting()
    run = start(model, inputs, 6, record="loss", optimizer=mh.GradientDescent(0.3))
    changed = mh.train(run, **inputs, steps=5, optimizer=plain(kind, lr=0.02))
    alone = start(run.model, inputs, 5, optimizer=plain(kind, lr=0.02), record="loss")
    assert changed.model == alone.model
    # Another step size of the same kind keeps what the optimizer carries.
    half = mh.train(run, **inputs, steps=3, optimizer=plain(kind, lr=0.01))
    more = mh.train(half, **inputs, steps=4, optimizer=plain(kind, lr=0.02))
    factors = [1.0] * 9 + [2.0] * 4
    scheduled = mh.train(run, **inputs, steps=7, optimizer=plain(kind, lr=0.01, schedule=factors))
    assert np.allclose(more.model.W, scheduled.model.W, rtol=1e-14)  # 0.01 * 2 is 0.02 exactly
    saved = pickle.loads(pickle.dumps(half))
    assert (saved.since, half.state.keys()) == (6, {"W", "U"})
    assert all(len(slots) == kind.slots for slots in half.state.values())


def test_what_begins_to_train_has_no_momentum():
    model, inputs = setting()
    options = {"optimizer": mh.Momentum(0.1), "record": "loss"}
    run = start(model, inputs, 5, wrt="W", **options)
    assert run.state.keys() == {"W"}
    both = mh.train(run, **inputs, steps=1, wrt=("W", "U"))
    g = mh.value_and_grad(run.model, inputs["X"])[1]
    assert np.allclose(both.state["U"][0], g.U, rtol=1e-13)  # the same sums in another order
    assert np.allclose(both.state["W"][0], 0.9 * run.state["W"][0] + g.W, rtol=1e-13)


@pytest.mark.parametrize(
    "optimizer", [mh.GradientDescent(0.1), mh.Momentum(0.1), mh.Adam(0.01)], ids=repr
)
def test_layer_by_layer(optimizer):
    """Training U, then W, then U is three trainings, each from the end of the one before."""
    model, inputs = setting()
    run, single = start(model, inputs, 5, wrt="U", optimizer=optimizer), None
    for steps, wrt in ((5, "U"), (3, "W"), (4, "U")):
        if wrt == "W" or single is not None:
            run = mh.train(run, **inputs, steps=steps, wrt=wrt)
        single = mh.train(model, **inputs, steps=steps, optimizer=optimizer, wrt=wrt)
        model = single.model
        assert np.array_equal(run.model.W, model.W)
        assert np.array_equal(run.model.U, model.U)
    assert [(part.first, part.wrt) for part in run.segments] == [
        (0, ("U",)),
        (5, ("W",)),
        (8, ("U",)),
    ]
    assert run.steps["loss"].tolist() == list(range(13))
    more = mh.train(mh.train(run, **inputs, steps=2), **inputs, steps=1)
    assert np.array_equal(more.model.U, mh.train(run, **inputs, steps=3).model.U)


def test_rows_of_another_shape_cannot_follow():
    model, inputs = setting()
    run = start(model, inputs, 3, record="attention")
    more = mh.Dataset(np.ones((9, 3, 5)), np.ones(9))
    with pytest.raises(ValueError, match=r"'attention': .*\(7, 2, 3, 3\).*\(9, 2, 3, 3\)"):
        mh.train(run, more, steps=1)

    sizes = iter([2, 3])

    def growing(_):
        return np.zeros(next(sizes))

    run = start(model, inputs, 0, record=growing)
    with pytest.raises(ValueError, match=r"'growing': .*\(2,\) as in the run so far, got \(3,\)"):
        mh.train(run, **inputs, steps=1)


def test_schedule_must_reach_over_further_steps():
    model, inputs = setting()
    run = start(model, inputs, 30)
    with pytest.raises(ValueError, match=r"schedule: .*each of the 41 steps.*got 40"):
        mh.train(run, **inputs, steps=11)
    assert mh.train(run, **inputs, steps=10).step == 40


def test_checkpoints_go_on_bitwise(tmp_path):
    """Every file that was on disk at some time continues to the same end."""
    model, inputs = setting()
    path = tmp_path / "run.npz"
    copies = {}

    def keep(k, _):
        if path.exists():
            copies[k] = path.read_bytes()

    whole = start(model, inputs, 30)
    run = start(model, inputs, 30, checkpoint=(path, 8), callback=keep)
    assert run == whole
    assert mh.Run.load(path) == whole
    assert os.listdir(tmp_path) == ["run.npz"]
    assert sorted(copies) == list(range(8, 31))
    for k in (8, 15, 16, 24, 29):
        path.write_bytes(copies[k])
        saved = mh.Run.load(path)
        assert (saved.step, saved.reason, saved.stopped) == (k // 8 * 8, "checkpoint", k // 8 * 8)
        assert saved.steps["loss"].tolist() == list(range(saved.step))
        assert np.array_equal(saved.history["loss"], whole.history["loss"][: saved.step])
        assert mh.train(saved, **inputs, steps=30 - saved.step) == whole


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    model, inputs = setting()
    path = tmp_path / "run.npz"
    run = start(model, inputs, 3)
    run.save(path)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full") as e:
        start(model, inputs, 30, checkpoint=(path, 5))
    assert os.listdir(tmp_path) == ["run.npz"]
    assert mh.Run.load(path) == run
    assert e.value.run.step == 5


def test_what_is_not_a_run(tmp_path):
    path = tmp_path / "other"
    model, inputs = setting()
    start(model, inputs, 1).save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    changed = json.loads(str(arrays["about"])) | {"format": "mhfast run 99"}
    for content in (b"", b"text", b"PK\x03\x04 broken"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"path: expected a file of Run.save, got .*other"):
            mh.Run.load(path)
    for wrong in (
        {"x": np.zeros(3)},
        {"about": np.array([object()])},
        arrays | {"about": np.array(json.dumps(changed))},
    ):
        with open(path, "wb") as file:
            np.savez(file, **wrong)
        with pytest.raises(ValueError, match=r"path: expected a file of Run.save"):
            mh.Run.load(path)
    with pytest.raises(FileNotFoundError):
        mh.Run.load(tmp_path / "missing")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "3"}, {"since": -1}, {"loss": "hunge"}, {"wrt": ["V"]}, {"names": ["loss"]},
        {"loss": ["huber", -1.0]}, {"loss": ["logistic", 1.0]},
        {"stop": ["value", 3]}, {"stop": ["value", {"loss": "x"}]}, {"reason": 5}, {"stopped": [1]},
        {"record": [["value", "loss", 0]]}, {"optimizer": ["adam", {}]}, {"model": "layer"},
        {"optimizer": ["momentum", {"lr": "fast"}]}, {"arrays": []}, {"scale": "x"}, {"query": [0]},
        {"reason": ["steps"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_whose_parts_do_not_fit(changes, tmp_path):
    path = tmp_path / "run"
    model = mh.Classifier.zeros(2, 3, 5, runs=2 if changes == {"reason": ["steps"]} else None)
    start(model, setting()[1], 3, optimizer=mh.Momentum(0.1)).save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    about = json.loads(str(arrays["about"]))
    about = np.array(json.dumps(about | changes))
    with open(path, "wb") as file:
        np.savez(file, **arrays | {"about": about})
    with pytest.raises(ValueError, match=r"path: expected a file of Run.save, got .*run, which"):
        mh.Run.load(path)


def damaged(content, rng):
    """Flip bits, cut the end off, overwrite the directory at the end, or leave a part out."""
    result = bytearray(content)
    match rng.integers(4):
        case 0:
            for place in rng.integers(len(result), size=rng.integers(1, 4)):
                result[place] ^= 1 << rng.integers(8)
        case 1:
            del result[rng.integers(len(result)) :]
        case 2:
            place = len(result) - 2 - rng.integers(900)
            result[place : place + 2] = rng.bytes(2)
        case 3:
            first, last = sorted(rng.integers(len(result), size=2))
            del result[first:last]
    return bytes(result)


def test_a_damaged_file_is_named_or_gives_the_run(tmp_path):
    """Some bytes, such as times of entries, do not matter."""
    rng = np.random.default_rng(0)
    factors = rng.standard_normal((2, 1, 2, 1))
    model = mh.Classifier(mh.LowRank(*factors), rng.standard_normal((1, 3, 2)))
    X, y = rng.standard_normal((4, 3, 2)), [-1, 1, 1, -1]
    run = mh.train(model, X, y, steps=3, optimizer=mh.Momentum(0.1, schedule=np.ones(9)))
    path = tmp_path / "run.npz"
    run.save(path)
    content = path.read_bytes()
    refused = []
    for _ in range(1000):
        path.write_bytes(damaged(content, rng))
        try:
            assert mh.Run.load(path) == run
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 800
    assert all("run.npz" in message for message in refused)


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path):
    model, inputs = setting()
    path = tmp_path / ("r" * 255)
    run = start(model, inputs, 2, checkpoint=(path, 1))
    assert mh.Run.load(path) == run
    assert os.listdir(tmp_path) == [path.name]


def test_another_process_goes_on(tmp_path):
    model, inputs = setting()
    path = tmp_path / "run.npz"
    start(model, inputs, 10).save(path)
    np.savez(tmp_path / "data.npz", X=inputs["X"].X, y=inputs["X"].y)
    script = f"""
import numpy as np, mhfast as mh
data = np.load({str(tmp_path / "data.npz")!r})
run = mh.train(mh.Run.load({str(path)!r}), data["X"], data["y"], steps=20, record="loss")
run.save({str(path)!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    whole = start(model, inputs, 30)
    run = mh.Run.load(path)
    assert run.model == whole.model
    assert np.array_equal(run.history["loss"], whole.history["loss"])


def test_pickle_and_copies():
    model, inputs = setting()
    run = start(model, inputs, 5, record={"loss": 1, readout_norm: 1})
    assert copy.copy(run) == run
    twin = copy.deepcopy(run)
    assert twin == run
    twin.history["loss"][0] = 0.0
    assert twin != run
    restored = pickle.loads(pickle.dumps(run))
    assert restored.model == run.model
    assert restored.record.keys() != run.record.keys()  # the function is a placeholder
    assert np.array_equal(restored.history["readout_norm"], run.history["readout_norm"])
    twice = pickle.loads(pickle.dumps(restored))
    assert twice == restored
    going_on = {"steps": 3, "record": run.record}
    assert mh.train(restored, **inputs, **going_on) == mh.train(run, **inputs, **going_on)


def test_what_holds_nan_equals_its_copies(tmp_path):
    model, inputs = setting()
    X = np.array(inputs["X"].X)
    X[0, 0, 0] = np.nan
    with pytest.warns(RuntimeWarning, match="nan"):
        run = mh.train(model, X, inputs["X"].y, steps=3, optimizer=mh.GradientDescent(1.0))
    assert np.isnan(run.history["loss"]).any()
    assert copy.deepcopy(run) == run == pickle.loads(pickle.dumps(run))
    run.save(tmp_path / "run")
    assert mh.Run.load(tmp_path / "run") == run
    other = copy.deepcopy(run)
    other.history["loss"][-1] = 0.0
    assert other != run


def test_interrupted_pickles():
    model, inputs = setting()
    error = mh.Interrupted(start(model, inputs, 5))
    assert isinstance(error, KeyboardInterrupt)
    assert str(error) == "training was interrupted at step 5; .run holds the run so far"
    assert pickle.loads(pickle.dumps(error)).run == error.run


def test_inputs_are_not_written():
    model, inputs = setting()
    before = copy.deepcopy((model, inputs["X"].X, inputs["X"].y))
    run = start(model, inputs, 5)
    history = copy.deepcopy(run.history)
    mh.train(run, **inputs, steps=5)
    assert model == before[0]
    assert np.array_equal(inputs["X"].X, before[1])
    assert all(np.array_equal(run.history[name], history[name]) for name in history)


def test_repr_is_short():
    model, inputs = setting()
    run = start(model, inputs, 5, record=("loss", "W"), optimizer=mh.GradientDescent(0.3))
    assert repr(run) == (
        "Run(step=5, reason='steps', optimizer=GradientDescent(lr=0.3), history=<loss, W>)"
    )


def test_dataframe():
    pandas = pytest.importorskip("pandas")
    model, inputs = setting()
    frame = start(model, inputs, 8).to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.name == "step"
    assert frame.index.tolist() == list(range(9))
    assert list(frame.columns) == [
        "loss", "test_loss", "grad_norm", "distance", "cosine_ones",
        "attention_max[0]", "attention_max[1]",
    ]  # fmt: skip
    run = start(model, inputs, 8)
    assert frame["test_loss"].dropna().index.tolist() == [0, 4, 8]
    assert np.array_equal(frame["test_loss"].dropna(), run.history["test_loss"])
    assert np.array_equal(frame["attention_max[1]"].dropna(), run.history["attention_max"][:, 1])
    assert start(model, inputs, 3, record=()).to_dataframe().empty


def test_plot():
    pytest.importorskip("matplotlib")
    model, inputs = setting()
    run = start(model, inputs, 8)
    figure = run.plot()
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels == ["loss", "grad_norm", "distance", "cosine"]
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log", "linear", "linear"]
    train, test = figure.axes[0].get_lines()
    assert (train.get_label(), test.get_label()) == ("loss", "test_loss")
    assert test.get_xdata().tolist() == [0, 4, 8]
    assert np.array_equal(test.get_ydata(), run.history["test_loss"])
    figure.canvas.draw()
    with pytest.raises(ValueError, match=r"plot: expected a run with a scalar record, .* with W"):
        start(model, inputs, 3, record="W").plot()


def test_a_figure_is_shown_once():
    """Known to pyplot, a notebook would show it once more at the end of a cell."""
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    figure = start(*setting(), 8).plot()
    assert pyplot.get_fignums() == before
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_plot_on_given_axes():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    run = start(*setting(), 8, record=("loss", "test_loss", "distance"))
    figure = Figure()
    upper, lower = figure.subplots(2)
    assert run.plot([upper, lower]) is figure
    assert [len(ax.get_lines()) for ax in (upper, lower)] == [2, 1]
    with pytest.raises(ValueError, match=r"ax: expected 2 Axes, one for each of loss, distance"):
        run.plot(upper)
    with pytest.raises(TypeError, match=r"ax: expected matplotlib Axes, got str"):
        run.plot(["upper", "lower"])
    assert start(*setting(), 8, record="loss").plot(ax=upper) is figure


def visible(ax):
    """Return the values of the lines that lie within the limits of the axes."""
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    values = np.concatenate([line.get_ydata() for line in ax.get_lines()])
    return values[(values >= low) & (values <= high)]


def test_a_negative_loss_is_visible():
    pytest.importorskip("matplotlib")
    run = start(*setting(), 8, loss="linear", record="loss")
    assert (run.history["loss"] < 0).any()
    (ax,) = run.plot().axes
    assert np.array_equal(visible(ax), run.history["loss"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", ["squared", "linear"])
def test_runs_beside_one_that_diverged_are_visible(loss):
    pytest.importorskip("matplotlib")
    model, inputs = setting()
    optimizer = mh.GradientDescent([1e-3, 1e200, 2e-3], l2=1.0)
    run = start(model, inputs, 8, optimizer=optimizer, record="loss", loss=loss)
    assert [reason == "nonfinite" for reason in run.reason] == [False, True, False]
    (ax,) = run.plot().axes
    expected = run.history["loss"][[0, 2]].mean(axis=0)
    assert visible(ax) == pytest.approx(expected, rel=1e-14)
    assert ax.get_legend().get_texts()[0].get_text() == "loss of 2 runs; 1 diverged"
    alone = run[1].plot().axes[0]
    assert len(visible(alone)) >= 1


@pytest.mark.parametrize(
    ("module", "method"), [("pandas", "to_dataframe"), ("matplotlib.figure", "plot")]
)
def test_missing_extras(module, method, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    model, inputs = setting()
    package = module.split(".")[0]
    with pytest.raises(ImportError, match=rf"Run\.{method} needs {package}: pip install"):
        getattr(start(model, inputs, 1), method)()


def curves(run):
    """The points of the lines that a notebook shows, and the words below them."""
    text = run._repr_html_()
    root = ElementTree.fromstring(text.replace("<br>", "<br/>"))
    lines = [
        np.array([pair.split(",") for pair in line.get("points").split()], float)
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    words = root.find("small")
    return lines, None if words is None else words.text, text


def test_html():
    model, inputs = setting()
    run = start(model, inputs, 8)
    (line,), words, text = curves(run)
    losses = run.history["loss"]
    assert line.shape == (9, 2)
    # Down the picture is down the loss, in logarithms; one digit behind the point is kept.
    heights = np.log(losses / losses.min()) / np.log(losses.max() / losses.min())
    np.testing.assert_allclose(line[:, 1], 76 - 72 * heights, atol=0.051)
    assert (np.diff(line[:, 0]) > 0).all()
    assert words.startswith("loss: ")
    assert words.endswith("logarithmic, steps 0 to 8")
    assert "Run(step=8" in text
    many = start(model, inputs, 3000, record="loss", optimizer=mh.GradientDescent(0.1))
    assert len(many._repr_html_()) < 4000


def test_html_without_a_curve():
    model, inputs = setting()
    run = start(model, inputs, 3, record="W")
    assert curves(run)[:2] == ([], None)
    negative = replace(run, history={"a<b": np.array([-1.0, np.nan, 1.0, 2.0])},
                       steps={"a<b": np.arange(4)})  # fmt: skip
    lines, words, _ = curves(negative)
    assert [len(line) for line in lines] == [1, 2]
    assert words == "a<b: -1 to 2, steps 0 to 3"
    nothing = replace(negative, history={"a": np.full(4, np.nan)}, steps={"a": np.arange(4)})
    assert curves(nothing)[:2] == ([], None)


def test_html_of_runs():
    model, inputs = setting()
    lr = np.linspace(0.01, 0.1, 30)
    run = start(model, inputs, 3, optimizer=mh.GradientDescent(lr))
    lines, words, _ = curves(run)
    assert len(lines) == 12
    assert "(12 of 30 runs)" in words
