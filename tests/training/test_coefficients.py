"""Training of U in coefficients of the samples, where these are fewer than the features."""

import signal

import numpy as np
import pytest
from lists import LOSSES, targets, within_domain
from trainings import PARAMETERS, draw

import mhfast as mh
from mhfast import _core

# Other sums than those of steps of U, whose rounding of some units in the last place tens of steps
# of these sizes amplify by about ten; coefficients of float32 models are double.
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}
N, T, D, H = 7, 5, 6, 3
RECORDS = ("loss", "accuracy", "margin", "param_norm", "distance", "cosine", "U", "attention_max")
OPTIMIZERS = (mh.GradientDescent(0.3), mh.Momentum(0.05, 0.8), mh.Momentum(0.05, nesterov=True))


def difference(a, b):
    return np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


def drawn(parameter="identity", dtype=np.float64, *, seed=0, **rest):
    """A classifier, and data with a weight of 0 and lengths."""
    model, data = draw(mh.Classifier, parameter, dtype, N, T, D, H, seed=seed, **rest)
    rng = np.random.default_rng(seed + 1)
    weight = rng.uniform(0.5, 2.0, N).astype(dtype)
    weight[3] = 0
    lengths = rng.integers(1, T + 1, N)
    return model, mh.Dataset(data.X, data.y, query=data.query, weight=weight, lengths=lengths)


def settings(model, **rest):
    along = np.random.default_rng(9).standard_normal(model.U.shape[-3:]).astype(model.dtype)
    directions = {"one": mh.Gradients(U=along), "start": {"U": model.U}}
    return {
        "steps": 12, "optimizer": OPTIMIZERS[0], "wrt": "U", "record": RECORDS,
        "directions": directions,
    } | rest  # fmt: skip


def close(run, other, tolerance):
    assert difference(run.model.U, other.model.U) < tolerance
    for slot, expected in zip(run.state.get("U", ()), other.state.get("U", ()), strict=True):
        assert difference(slot, expected) < tolerance
    for name, values in other.history.items():
        assert difference(run.history[name], values) < tolerance, name


def same(run, other):
    assert run == other
    assert run.model == other.model
    assert [array.tobytes() for array in run.coefficients] == [
        array.tobytes() for array in other.coefficients
    ]
    for name, values in other.history.items():
        np.testing.assert_array_equal(run.history[name], values, name)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_against_steps_of_the_readout(dtype, optimizer, isa, use_plan, use_isa):
    use_isa(isa)
    model, data = drawn(dtype=dtype)
    given = settings(model, optimizer=optimizer, steps=30)
    run = mh.train(model, data, **given)
    use_plan("attended")
    other = mh.train(model, data, **given)
    assert [array.shape for array in run.coefficients] == [(N,)] * (1 + optimizer.slots)
    assert other.coefficients == ()
    assert run.model.U.dtype == dtype
    close(run, other, TOLERANCE[dtype])


@pytest.mark.parametrize("parameter", [p for p in PARAMETERS if p != "value factors"])
def test_every_kind_of_attention_against_the_reference(parameter):
    """Heads that attend alike and others; records of models with tensors that are not trained."""
    model, data = drawn(parameter)
    given = settings(model, directions=None, record=("loss", "margin", "param_norm", "distance"))
    run = mh.train(model, data, **given)
    assert len(run.coefficients) == 1
    end, history = mh.reference.train(
        model, data.X, data.y, steps=given["steps"], optimizer=given["optimizer"], wrt=("U",),
        query=data.query, weight=data.weight, lengths=data.lengths,
    )  # fmt: skip
    assert difference(run.model.U, end.U) < 1e-12
    for name in given["record"]:
        assert difference(run.history[name], history[name]) < 1e-12, name


@pytest.mark.parametrize("loss", LOSSES[mh.Classifier], ids=str)
def test_losses(loss, use_plan):
    model, data = draw(mh.Classifier, "identity", np.float64, N, T, D, H)
    model, X = within_domain(loss, model, data.X)
    data = mh.Dataset(X, targets(loss, (N,), np.random.default_rng(4)))
    given = settings(model, loss=loss, optimizer=mh.GradientDescent(0.01))
    run = mh.train(model, data, **given)
    use_plan("attended")
    close(run, mh.train(model, data, **given), 1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_training_in_parts_is_one(optimizer, tmp_path):
    model, data = drawn(dtype=np.float32)
    given = settings(model, optimizer=optimizer)
    whole = mh.train(model, data, **given)
    part = mh.train(model, data, **(given | {"steps": 1}))
    part.save(tmp_path / "run.npz")
    more = {"directions": given["directions"]}
    part = mh.train(mh.Run.load(tmp_path / "run.npz"), data, steps=4, **more)
    part = mh.train(part, data, steps=0, **more)
    same(mh.train(part, data, until=12, **more), whole)


def test_a_checkpoint_goes_on(tmp_path):
    model, data = drawn()
    given = settings(model, optimizer=OPTIMIZERS[1], directions=None, record=("loss", "U"))
    path = tmp_path / "run.npz"

    def stop(k, _):
        if k == 9:
            raise KeyError(k)

    with pytest.raises(KeyError) as caught:
        mh.train(model, data, checkpoint=(path, 4), callback=stop, **given)
    whole = mh.train(model, data, **given)
    for part in (mh.Run.load(path), caught.value.run):
        assert part.step in (8, 9)
        same(mh.train(part, data, until=12), whole)


@pytest.mark.parametrize("shared", [False, True])
def test_runs_are_those_alone(shared):
    """Data of each run, and data that all share, whose products are computed once."""
    models = [drawn(seed=seed)[0] for seed in range(3)]
    sets = [draw(mh.Classifier, "identity", np.float64, N, T, D, H, seed=s)[1] for s in range(3)]
    if shared:
        data = [sets[0]] * 3
        together = sets[0]
    else:
        data = sets
        together = mh.Dataset(np.stack([s.X for s in sets]), np.stack([s.y for s in sets]))
    rates = [0.1, 0.3, 0.2]
    given = settings(models[0], optimizer=mh.GradientDescent(rates))
    runs = mh.train(mh.stack(models), together, **given)
    assert runs.coefficients[0].shape == (3, N)
    for r in range(3):
        alone = {"optimizer": mh.GradientDescent(rates[r])}
        same(runs[r], mh.train(models[r], data[r], **(given | alone)))
    one = mh.train(runs[1], data[1], steps=5, directions=given["directions"])
    both = mh.train(runs[:2], together if shared else mh.Dataset(
        np.stack([s.X for s in sets[:2]]), np.stack([s.y for s in sets[:2]])
    ), steps=5, directions=given["directions"])  # fmt: skip
    same(both[1], one)


def test_one_run_goes_on_as_several():
    model, data = drawn()
    first = mh.train(model, data, steps=4, optimizer=OPTIMIZERS[1], wrt="U")
    rates = mh.Momentum([0.05, 0.02], 0.8)
    runs = mh.train(first, data, steps=3, optimizer=rates)
    alone = mh.train(first, data, steps=3, optimizer=mh.Momentum(0.02, 0.8))
    assert runs.coefficients[0].shape == (2, N)
    np.testing.assert_array_equal(runs[1].model.U, alone.model.U)


def test_bits_do_not_depend_on_threads():
    model, data = drawn()
    given = settings(model)
    same(mh.train(model, data, num_threads=4, **given), mh.train(model, data, **given))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": mh.Adam(0.01)},
        {"optimizer": mh.GradientDescent(0.1, l2=0.01)},
        {"optimizer": mh.GradientDescent(0.1, clip=0.01)},
        {"wrt": ("U", "W")},
        {"record": ("loss", "grad_norm")},
        {"stop": {"grad_norm": 1e-9}},
        {"average": 4},
        {"batch": 2},
        {"test": "data"},
    ],
    ids=str,
)
def test_what_is_trained_otherwise_goes_on_from_the_readout(changes):
    model, data = drawn("dense")
    changes = {key: data if value == "data" else value for key, value in changes.items()}
    part = mh.train(model, data, steps=4, optimizer=mh.GradientDescent(0.1), wrt="U")
    assert part.coefficients
    first = mh.Classifier(part.model.W, part.model.U)
    given = {"steps": 3, "optimizer": mh.GradientDescent(0.1), "wrt": "U", "seed": 3}
    if "batch" not in changes:
        del given["seed"]
    given |= changes
    # The steps of batches are drawn by their number: those after step 4 differ from the first.
    run = mh.train(part, data, **given)
    assert run.coefficients == ()
    if "batch" not in changes:
        expected = mh.train(first, data, **given)
        assert difference(run.model.U, expected.model.U) < 1e-12
    again = mh.train(run, data, steps=2)  # not in coefficients: they belong to step 0
    assert again.coefficients == ()


def test_other_data_go_on_from_the_readout(use_plan):
    model, data = drawn()
    other = drawn(seed=5)[1]
    optimizer = mh.Momentum(0.05)
    part = mh.train(model, data, steps=4, optimizer=optimizer)
    run = mh.train(part, other, steps=3)
    assert run.coefficients == ()
    use_plan("attended")
    expected = mh.train(mh.train(model, data, steps=4, optimizer=optimizer), other, steps=3)
    assert difference(run.model.U, expected.model.U) < 1e-12


def test_another_optimizer_begins_without_velocity(use_plan):
    model, data = drawn()

    def trained():
        part = mh.train(model, data, steps=4, optimizer=mh.Momentum(0.05, 0.8))
        return mh.train(mh.train(part, data, steps=3, optimizer=OPTIMIZERS[0]), data, steps=3,
                        optimizer=mh.Momentum(0.05, 0.8))  # fmt: skip

    run = trained()
    assert len(run.coefficients) == 2
    use_plan("attended")
    close(run, trained(), 1e-12)


def test_sizes_of_which_little_is_left():
    """Steps of two samples of the same features that cancel: U stays where it is."""
    rng = np.random.default_rng(3)
    X = rng.standard_normal((4, T, D))
    X[1] = X[0]
    X[3] = X[2]
    model = mh.Classifier(None, np.zeros((H, T, D)))
    run = mh.train(
        model, X, [1, -1, 1, -1], steps=9, optimizer=mh.GradientDescent(0.3),
        record=("distance", "param_norm", "cosine"), directions=mh.Gradients(U=np.ones((H, T, D))),
    )  # fmt: skip
    assert np.abs(run.coefficients[0]).min() > 0.1
    # Coefficients are equal but for their sign, up to the rounding of sums over samples.
    assert run.history["distance"].max() < 1e-15
    np.testing.assert_array_equal(run.history["distance"], run.history["param_norm"])
    assert np.abs(run.history["cosine"]).max() <= 1 + 1e-12


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sample_that_is_not_finite(bad):
    model, data = drawn()
    X = np.array(data.X)
    X[0] = bad
    weight = np.ones(N)

    def trained():
        samples = mh.Dataset(X, data.y, weight=weight)
        return mh.train(model, samples, steps=5, optimizer=OPTIMIZERS[0])

    with pytest.warns(RuntimeWarning, match="finite"):
        run = trained()
    assert (run.reason, run.step) == ("nonfinite", 0)
    assert run.model == model
    weight[0] = 0
    run = trained()
    X[0] = 1
    assert difference(run.model.U, trained().model.U) < 1e-12


def test_callbacks_see_what_is_recorded():
    model, data = drawn()
    seen = []
    run = mh.train(
        model, data, steps=6, optimizer=OPTIMIZERS[0], record={"U": 2},
        callback=lambda _, at: seen.append(at.U),
    )  # fmt: skip
    np.testing.assert_array_equal(seen[::2], run.history["U"])
    np.testing.assert_array_equal(seen[0], model.U)
    np.testing.assert_array_equal(seen[-1], run.model.U)


def test_runs_end_by_thresholds():
    models = [drawn(seed=seed)[0] for seed in range(2)]
    data = drawn()[1]
    rates = mh.GradientDescent([0.5, 0.01])
    run = mh.train(mh.stack(models), data, steps=40, optimizer=rates, stop={"loss": 0.4})
    assert run.coefficients[0].shape == (2, N)
    assert run.reason == ["loss", "steps"]
    alone = mh.train(
        models[0], data, steps=40, optimizer=mh.GradientDescent(0.5), stop={"loss": 0.4}
    )
    assert run[0].step == alone.step
    same(run[0], alone)


@pytest.mark.parametrize("runs", [1, 3])
def test_ctrl_c_ends_it_where_it_goes_on(runs):
    model, data = drawn()
    model = mh.stack([model] * runs) if runs > 1 else model
    rates = mh.GradientDescent(1e-4)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(mh.Interrupted) as caught:
            mh.train(model, data, steps=10**12, optimizer=rates, record={"loss": 10**11})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    part = caught.value.run
    assert part.step > 0
    assert len(part.coefficients) == 1
    part = mh.train(part, data, steps=10, record="loss")
    whole = mh.train(model, data, steps=part.step, optimizer=rates, record={"loss": 10**11})
    np.testing.assert_array_equal(part.model.U, whole.model.U)


def test_many_samples_are_not_trained_so():
    model, data = draw(mh.Classifier, "identity", np.float64, T * D + 1, T, D, H)
    assert mh.train(model, data.X, data.y, steps=2, optimizer=OPTIMIZERS[0]).coefficients == ()


@pytest.mark.parametrize("change", [lambda c: c.astype(np.float32), lambda c: c[None]])
def test_a_file_with_other_coefficients(change, tmp_path):
    model, data = drawn()
    run = mh.train(model, data, steps=2, optimizer=OPTIMIZERS[0])
    path = tmp_path / "run.npz"
    run.save(path)
    arrays = dict(np.load(path))
    arrays["coefficients.0"] = change(arrays["coefficients.0"])
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="coefficients do not fit"):
        mh.Run.load(path)
