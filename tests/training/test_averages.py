"""Means of the iterates: records, the model of them, and what a resumed run keeps."""

import copy
import pickle

import numpy as np
import pytest
from side_by_side import same_run
from trainings import draw

import mhfast as mh

n, T, d, H = 19, 4, 5, 2
# Means of tens of numbers near 1, summed in another order.
TOLERANCE = 1e-13


def problem(kind=mh.Classifier, parameter="dense", runs=None, dtype=np.float64):
    return draw(kind, parameter, dtype, n, T, d, H, runs=runs)


def settings(kind=mh.Classifier, **more):
    loss = "logistic" if kind is mh.Classifier else "squared"
    return {"optimizer": mh.Momentum(0.05), "loss": loss} | more


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
@pytest.mark.parametrize("parameter", ["dense", "low rank", "tied", "prompt"])
def test_records_are_means_of_the_iterates(kind, parameter, dtype):
    model, data = problem(kind, parameter, dtype=dtype)
    for first in (0, 4):
        names = tuple(model.parameters)
        averages = [f"{name}_average" for name in names]
        record = dict.fromkeys(names, 1) | dict.fromkeys(averages, 3)
        run = mh.train(
            model, data, steps=11, average=first, record=record, batch=7, **settings(kind)
        )
        for name, average in zip(names, averages, strict=True):
            iterates = run.history[name].astype(np.float64)
            assert run.steps[average].tolist() == [0, 3, 6, 9, 11]
            assert run.history[average].dtype == np.float64
            for k, row in zip(run.steps[average], run.history[average], strict=True):
                if k < first:
                    assert np.isnan(row).all()
                else:
                    known = iterates[first : k + 1].mean(axis=0)
                    assert abs(row - known).max() < TOLERANCE * abs(known).max()
            of_model = run.average.parameters[name]
            assert of_model.dtype == dtype
            last = run.history[average][-1].astype(dtype)
            # One is rounded after a flush of denormal numbers, the other is not.
            assert abs(of_model - last).max() <= np.finfo(dtype).eps * abs(last).max()


def test_against_the_reference():
    model, data = problem()
    options = {"steps": 9, "optimizer": mh.Adam(0.02), "average": 2}
    run = mh.train(model, data, record=("U_average", "W_average"), **options)
    _, known = mh.reference.train(model, data.X, data.y, **options)
    for name in ("U_average", "W_average"):
        assert np.array_equal(np.isnan(run.history[name]), np.isnan(known[name]))
        error = abs(run.history[name] - known[name])[2:].max()
        assert error < 1e-12 * abs(known[name][2:]).max()  # nine steps of Adam


@pytest.mark.parametrize("plan", ["runs", "auto", "rows"])
def test_runs_side_by_side_are_runs_alone(plan, use_plan):
    """On 1 and 2 threads; one run ends early and keeps the mean up to its end."""
    use_plan(plan)
    R = 5
    model, data = problem(runs=R)
    options = settings(
        optimizer=mh.GradientDescent(np.linspace(0.1, 1.5, R)), average=3, batch=6, seed=range(R),
        record={"U_average": 4, "W": 5}, stop={"loss": 0.55},
    )  # fmt: skip
    run = mh.train(model, data, steps=30, num_threads=1, **options)
    again = mh.train(model, data, steps=30, num_threads=2, **options)
    assert np.array_equal(run.history["U_average"], again.history["U_average"], equal_nan=True)
    assert run.averages == again.averages
    assert len(set(run.stopped.tolist())) > 1
    for r in range(R):
        rule = mh.GradientDescent(float(options["optimizer"].lr[r]))
        alone = mh.train(model[r], data, steps=30, **options | {"optimizer": rule, "seed": r})
        same_run(run[r], alone, 1e-12)
        assert run[r].averages.counts.tolist() == alone.averages.counts.tolist()
        for name in ("W", "U"):
            mine, known = run.average[r].parameters[name], alone.average.parameters[name]
            assert abs(mine - known).max() < 1e-12 * abs(known).max()


@pytest.mark.parametrize("runs", [None, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_run_goes_on_as_if_it_had_never_stopped(runs, stream, tmp_path):
    model, data = problem(runs=runs)
    rng = np.random.default_rng(1)
    size = data.X.shape[1:]

    def fresh(count, seed):
        X = np.random.default_rng(seed).standard_normal((count, *size))
        return mh.Dataset(X, np.sign(X[:, 0, 0]))

    options = settings(
        batch=6, record={"U_average": 5, "loss": 4}, seed=int(rng.integers(99)), average=4
    )
    given = {"stream": fresh} if stream else {}
    whole = mh.train(model, data, steps=23, **options, **given)
    for stop in (3, 4, 5, 10):
        half = mh.train(
            model, data, steps=stop, checkpoint=(tmp_path / "run.npz", 2), **options, **given
        )
        half.save(tmp_path / "half.npz")
        for kept in (half, mh.Run.load(tmp_path / "half.npz"), pickle.loads(pickle.dumps(half)),
                     copy.deepcopy(half), mh.Run.load(tmp_path / "run.npz")):  # fmt: skip
            run = mh.train(kept, data, until=23, **given)
            assert run.averages == whole.averages
            assert run.history["U_average"].tobytes() == whole.history["U_average"].tobytes()
            assert run.average == whole.average


def test_a_checkpoint_and_an_exception_keep_the_means(tmp_path):
    model, data = problem()

    def fail(k, _):
        if k == 7:
            raise OSError("at seven")

    options = settings(average=2, record={"W_average": 5})
    path = tmp_path / "run.npz"
    with pytest.raises(OSError, match="at seven") as caught:
        mh.train(model, data, steps=12, callback=fail, checkpoint=(path, 3), **options)
    whole = mh.train(model, data, steps=12, **options)
    for run in (caught.value.run, mh.Run.load(path)):
        assert run.step in (6, 7)
        assert mh.train(run, data, until=12).average == whole.average


def test_one_run_becomes_several():
    model, data = problem()
    run = mh.train(model, data, steps=5, average=1, **settings())
    several = mh.train(run, data, steps=4, optimizer=mh.Momentum([0.05, 0.01]))
    alone = mh.train(run, data, steps=4)
    assert several.averages.counts.tolist() == [8, 8]
    error = abs(several.average.W[0] - alone.average.W).max()
    assert error < 1e-13
    assert abs(several.average.W[1] - alone.average.W).max() > 1e-6


def test_a_record_begins_where_it_is_asked_for_and_a_first_step_can_move():
    model, data = problem()
    run = mh.train(model, data, steps=6, record=("U",), **settings())
    assert run.averages is None
    more = mh.train(run, data, steps=5, record=("U", "U_average"))
    assert more.averages.first == 6
    assert abs(more.history["U"][6:].mean(axis=0) - more.average.U).max() < TOLERANCE
    later = mh.train(more, data, steps=5, average=13)
    assert abs(later.history["U"][13:].mean(axis=0) - later.average.U).max() < TOLERANCE
    assert np.isnan(later.history["U_average"][later.steps["U_average"].tolist().index(12)]).all()
    readout = mh.train(later, data, steps=4, wrt="U", record=("U", "U_average"))
    assert readout.averages.first == 16
    assert set(readout.averages.means) == {"U"}
    assert np.array_equal(readout.average.W, later.model.W)


def test_a_solver_that_goes_on_with_a_run_has_no_means():
    model, data = problem()
    run = mh.train(model, data, steps=3, average=1, **settings())
    assert mh.minimize(run, data, wrt="U", l2=0.1).averages is None
    assert mh.gradient_flow(run, data, until=0.1).averages is None


def test_large_models_do_not_leave_their_whole():
    """A model that would train in the span of its tokens is averaged as a whole."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((6, 3, 400))
    data = mh.Dataset(X, np.sign(rng.standard_normal(6)))
    model = mh.Classifier.gaussian(2, 3, 400, std=0.01, seed=0)
    rule = mh.GradientDescent(0.1)
    assert mh.train(model, data, steps=2, optimizer=rule).subspace is not None
    run = mh.train(model, data, steps=4, optimizer=rule, average=0, record=("U", "U_average"))
    assert run.subspace is None
    assert abs(run.history["U"].mean(axis=0) - run.average.U).max() < TOLERANCE


def test_refusals():
    model, data = problem()
    options = settings(steps=4)
    with pytest.raises(TypeError, match=r"average: expected the number of a step, got float"):
        mh.train(model, data, average=0.5, **options)
    with pytest.raises(ValueError, match=r"average: expected a step from 0 on, .* got -1"):
        mh.train(model, data, average=-1, **options)
    run = mh.train(model, data, **options)
    with pytest.raises(ValueError, match=r"average: expected a step from 4 on, .* got 3"):
        mh.train(run, data, steps=1, average=3)
    with pytest.raises(ValueError, match="expected a run trained with average=, got one without"):
        run.average  # noqa: B018
    early = mh.train(model, data, average=10, **options)
    with pytest.raises(ValueError, match=r"expected a run that has reached step 10, .* at step 4"):
        early.average  # noqa: B018
    with pytest.raises(ValueError, match="'W_average': expected the average of a parameter that"):
        mh.train(model, data, wrt="U", record="W_average", **options)
    with pytest.raises(ValueError, match=r"record: expected one of .* got 'W_average'"):
        mh.evaluate(model, data, record="W_average")
    stack = mh.Stack([mh.Layer.gaussian(2, 5, 5, std=0.1, seed=0)])
    X = data.X
    with pytest.raises(ValueError, match="average: expected None for a Stack"):
        mh.train(stack, X, np.zeros_like(X), average=0, loss="squared", steps=1,
                 optimizer=mh.Adam(0.1))  # fmt: skip
