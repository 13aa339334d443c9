"""A `Run` of several trainings: going on, taking some out, functions, files, tables, figures."""

import copy
import pickle

import numpy as np
import pytest
from side_by_side import H, R, T, d, same_run, samples, starts

import mhfast as mh

# The first two runs meet the threshold within a dozen steps, the third does not.
STOPPING = {
    "optimizer": mh.Momentum([0.4, 0.1, 0.005]),
    "record": {"loss": 1, "U": 7, "attention_max": 4},
    "stop": {"loss": 0.3},
}


@pytest.mark.parametrize("split", [(10, 20), (3, 0, 27), (7, 1, 1, 21), (12, 0, 18)])
def test_going_on_is_bitwise_as_if_never_stopped(split, tmp_path):
    model, data = starts(), samples()
    whole = mh.train(model, data, steps=30, **STOPPING)
    assert whole.reason == ["loss", "loss", "steps"]
    run = mh.train(model, data, steps=split[0], **STOPPING)
    for steps in split[1:]:
        run.save(tmp_path / "run.npz")
        run = mh.train(mh.Run.load(tmp_path / "run.npz"), data, steps=steps)
    assert run == whole


def test_checkpoints_go_on_bitwise(tmp_path):
    model, data = starts(), samples()
    path = tmp_path / "run.npz"
    whole = mh.train(model, data, steps=30, **STOPPING)
    copies = {}

    def keep(k, _):
        if path.exists():
            copies[k] = path.read_bytes()

    run = mh.train(model, data, steps=30, checkpoint=(path, 8), callback=keep, **STOPPING)
    assert run == whole == mh.Run.load(path)
    for k in (8, 16, 24):
        path.write_bytes(copies[k])
        saved = mh.Run.load(path)
        assert saved.step == k
        for r, end in enumerate(whole.stopped):
            expected = ("loss", end) if 0 <= end < k else ("checkpoint", k)
            assert (saved.reason[r], saved.stopped[r]) == expected
        assert mh.train(saved, data, steps=30 - k) == whole


def test_an_exception_carries_the_runs():
    model, data = starts(), samples()
    whole = mh.train(model, data, steps=30, **STOPPING)

    def fail(k, _):
        if k == 25:
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake") as e:
        mh.train(model, data, steps=30, callback=fail, **STOPPING)
    run = e.value.run
    assert run.step == 25
    assert run.stopped.tolist() == [*whole.stopped[:2], 25]
    assert run.reason == ["loss", "loss", "exception"]
    assert mh.train(run, data, steps=5) == whole


def test_stop_given_anew_lets_runs_go_on():
    model, data = starts(), samples()
    run = mh.train(model, data, steps=30, **STOPPING)
    kept = mh.train(run, data, steps=5)
    assert kept.stopped.tolist() == run.stopped.tolist()
    assert np.array_equal(kept.model.U[0], run.model.U[0])
    freed = mh.train(run, data, steps=5, stop={})
    assert freed.stopped.tolist() == [-1] * R
    assert not np.array_equal(freed.model.U[0], run.model.U[0])


def test_one_run_taken_out_goes_on():
    model, data = starts(), samples()
    run = mh.train(model, data, steps=10, optimizer=mh.Adam([0.02, 0.1, 0.05]))
    whole = mh.train(model, data, steps=25, optimizer=mh.Adam([0.02, 0.1, 0.05]))
    same_run(mh.train(run[1], data, steps=15), whole[1], 1e-12)


@pytest.mark.parametrize("index", [slice(1, None), [2, 0], np.array([True, False, True])])
def test_some_runs(index):
    model, data = starts(), samples()
    run = mh.train(model, data, steps=30, **STOPPING)
    some = run[index]
    numbers = np.arange(R)[index]
    assert some.runs == len(numbers)
    assert some.optimizer.lr == tuple(run.optimizer.lr[r] for r in numbers)
    for j, r in enumerate(numbers):
        assert some[j] == run[r]
    assert mh.train(some, data, steps=3).step == some.step + 3


def test_what_all_have_ended_is_cut_there():
    """Without the run that goes on, the history ends where the later of the two stopped."""
    run = mh.train(starts(), samples(), steps=30, **STOPPING)
    ended = run[:2]
    assert ended.step == max(run.stopped[:2]) == ended.steps["U"][-1] < 30
    assert ended.history["U"].shape[1] == len(ended.steps["U"])
    assert np.array_equal(ended.history["U"][:, -1], ended.model.U)


def test_selection_errors():
    data = samples()
    run = mh.train(starts(), data, steps=1, optimizer=mh.GradientDescent(0.1))
    assert run[-1] == run[R - 1]
    with pytest.raises(IndexError, match="3 runs"):
        run[R]
    with pytest.raises(IndexError, match="3 runs"):
        run[np.zeros((2, 2), int)]
    with pytest.raises(TypeError, match="run axis"):
        run[0][0]
    with pytest.raises(TypeError, match="not iterable"):
        list(run)


def test_one_training_branches_into_several():
    """A run without the axis goes on with several step sizes."""
    model, data = starts()[0], samples()
    rates = [0.01, 0.1, 0.3]
    run = mh.train(model, data, steps=6, optimizer=mh.Momentum(0.1), record={"loss": 4, "W": 5})
    several = mh.train(run, data, steps=9, optimizer=mh.Momentum(rates))
    for r, lr in enumerate(rates):
        alone = mh.train(run, data, steps=9, optimizer=mh.Momentum(lr))
        same_run(several[r], alone, 1e-12)


def norms_of(U):
    return np.sqrt((U**2).sum(axis=(1, 2, 3)))


def test_functions_of_stacked_models():
    seen = []

    def size(model):
        seen.append(model.runs)
        return norms_of(model.U)

    def heads(model):
        return np.linalg.norm(model.U, axis=(2, 3))

    def constant(_):
        return 2.5

    record = {size: 4, heads: 3, constant: 6, "U": 1}
    run = mh.train(starts(), samples(), steps=7, optimizer=mh.GradientDescent(0.3), record=record)
    assert seen == [R] * 3
    assert run.steps["size"].tolist() == [0, 4, 7]
    assert run.history["heads"].shape == (R, 4, H)
    assert np.array_equal(run.history["constant"], np.full((R, 3), 2.5))
    for r in range(R):
        norms = norms_of(run.history["U"][r, [0, 4, 7]])
        assert run.history["size"][r] == pytest.approx(norms, rel=1e-14)
    going_on = mh.train(run, samples(), steps=3)
    assert going_on.steps["heads"].tolist() == [0, 3, 6, 9, 10]


def test_functions_that_forget_the_runs():
    def total(_):
        return np.ones(R + 1)

    with pytest.raises(ValueError, match=r"'total': .*\(R, ...\) = \(3, ...\), got \(4,\)"):
        mh.train(starts(), samples(), steps=7, optimizer=mh.GradientDescent(0.3), record=total)


def test_callback_and_stop_function_see_all_runs():
    model, data = starts(), samples()
    steps = []

    def stop(k, model):
        assert model.runs == R
        return norms_of(model.U) > (0.0 if k == 5 else np.inf)

    run = mh.train(
        model, data, steps=20, optimizer=mh.GradientDescent(0.3), stop=stop,
        callback=lambda k, theta: steps.append((k, theta.runs)) and None,
    )  # fmt: skip
    assert steps == [(k, R) for k in range(6)]
    assert run.reason == ["stop"] * R
    assert run.stopped.tolist() == [5] * R
    run = mh.train(
        model, data, steps=20, optimizer=mh.GradientDescent(0.3), callback=lambda k, _: k == 3
    )
    assert (run.step, run.reason) == (3, ["callback"] * R)


def test_pickle_and_copies():
    run = mh.train(starts(), samples(), steps=30, **STOPPING)
    assert copy.copy(run) == copy.deepcopy(run) == pickle.loads(pickle.dumps(run)) == run
    assert repr(run).startswith("Run(runs=3, step=30, reason={'loss': 2, 'steps': 1}, ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": mh.GradientDescent([0.1, 0.2])}, r"lr: .*R = 3, that of W, got 2"),
        ({"test": samples(runs=2)}, r"test set 'test': X: .*R = 3.*got 2"),
        (
            {"record": "cosine", "directions": {"U": np.ones((2, H, T, d))}},
            r"directions.U: .*R = 3.*got 2",
        ),
        (
            {
                "record": "cosine",
                "directions": {"U": np.array([1, 0, 1])[:, None, None, None] * starts().U},
            },
            "directions: expected an entry other than zero",
        ),
    ],
)
def test_run_axes_that_do_not_fit(options, message):
    given = {"optimizer": mh.GradientDescent(0.1)} | options
    with pytest.raises(ValueError, match=message):
        mh.train(starts(), samples(), steps=1, **given)


def test_records_that_take_too_much_room_count_the_runs():
    with pytest.raises(ValueError, match=r"'W' takes 3\.35 GiB"):
        mh.train(
            starts(), samples(), steps=3 * 10**6 - 1, record="W", optimizer=mh.GradientDescent(1.0)
        )


def test_dataframe():
    pandas = pytest.importorskip("pandas")
    run = mh.train(
        starts(), samples(), steps=6, optimizer=mh.GradientDescent(0.3),
        record={"loss": 1, "accuracy": 4, "attention_max": 3, "W": 2},
    )  # fmt: skip
    frame = run.to_dataframe()
    assert frame.index.names == ["run", "step"]
    assert len(frame) == R * 7
    assert list(frame.columns) == ["loss", "accuracy", "attention_max[0]", "attention_max[1]"]
    for r in range(R):
        pandas.testing.assert_frame_equal(frame.loc[r], run[r].to_dataframe())


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    run = mh.train(
        starts(), samples(), steps=6, optimizer=mh.GradientDescent(0.3), test=samples(seed=5),
        record={"loss": 1, "test_loss": 2, "accuracy": 3},
    )  # fmt: skip
    figure = run.plot()
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss", "accuracy"]
    train, test = figure.axes[0].get_lines()
    assert np.array_equal(train.get_ydata(), run.history["loss"].mean(axis=0))
    assert test.get_xdata().tolist() == [0, 2, 4, 6]
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    low, high = np.quantile(run.history["loss"], [0.1, 0.9], axis=0)
    assert (band.min(), band.max()) == pytest.approx((low.min(), high.max()))
    figure.canvas.draw()
    pyplot.close(figure)
