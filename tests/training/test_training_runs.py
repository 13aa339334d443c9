"""Trainings side by side: every run goes as it would alone, and stops by itself."""

from dataclasses import replace

import numpy as np
import pytest
from lists import with_every
from side_by_side import (
    TOLERANCE,
    H,
    R,
    T,
    close,
    d,
    draw,
    n,
    one_data_set,
    same_run,
    samples,
    starts,
)  # fmt: skip

import mhfast as mh

OPTIMIZERS = with_every(
    [
        mh.GradientDescent(0.3, l2=0.02, clip=0.4),
        mh.NormalizedGradientDescent(0.05, by="all"),
        mh.NormalizedGradientDescent(0.05, project="ball", radius=1.5, project_by="all"),
        mh.PolyakStep(0.5, target=0.2),
        mh.Momentum(0.1, 0.8, True),
        mh.Adam(0.02, weight_decay=0.1),
        mh.MirrorDescent(0.02, 3, True, "head"),
        mh.GradientDescent(
            0.3, project="ball", radius=0.8, project_by="head", project_norm="nuclear"
        ),
        mh.GradientDescent(0.3, project="ball", radius=1.5, project_norm=1.5),
        mh.SteepestDescent(0.02, "l1", 0.8),
        mh.SteepestDescent(0.02, "fro", 0.8, by="head", scaled=True),
        mh.SteepestDescent(0.02, "spectral", 0.8, polar="newton_schulz"),
    ]
)


RECORD = {
    "loss": 1, "accuracy": 2, "margin": 1, "grad_norm": 3, "param_norm": 1, "distance": 1,
    "test_loss": 4, "U": 5, "attention": 6, "attention_max": 6,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_runs_over_starts_go_as_alone(optimizer, dtype):
    model, data = starts(dtype), samples(dtype)
    test = samples(dtype, size=11, seed=5)
    options = {"steps": 15, "optimizer": optimizer, "record": RECORD, "test": test}
    run = mh.train(model, data, **options)
    assert run.runs == R
    assert run.reason == ["steps"] * R
    assert run.stopped.tolist() == [-1] * R
    for r in range(R):
        same_run(run[r], mh.train(model[r], data, **options), TOLERANCE[dtype])


@pytest.mark.parametrize("optimizer", with_every([]), ids=repr)
def test_runs_with_settings_of_parameters_go_as_alone_and_on_from_a_file(optimizer, tmp_path):
    model, data = starts(), samples()
    of_W = [0.01 * (r + 1) for r in range(R)]
    if hasattr(optimizer, "lr"):
        optimizer = replace(optimizer, lr={"W": of_W, "U": 0.03})
    optimizer = replace(
        optimizer, schedule={"U": np.linspace(1.0, 0.3, 13)}, l2={"W": 0.1}, project="ball",
        radius={"U": 1.1},
    )  # fmt: skip
    run = mh.train(model, data, steps=13, optimizer=optimizer)
    for r in range(R):
        alone = optimizer
        if hasattr(optimizer, "lr"):
            alone = replace(optimizer, lr={"W": of_W[r], "U": 0.03})
        assert run[r].optimizer == alone
        same_run(run[r], mh.train(model[r], data, steps=13, optimizer=alone), TOLERANCE[np.float64])
    half = mh.train(model, data, steps=6, optimizer=optimizer)
    half.save(tmp_path / "run.npz")
    saved = mh.Run.load(tmp_path / "run.npz")
    assert saved == half
    assert mh.train(saved, data, steps=7) == run


@pytest.mark.parametrize("query", [None, -1])
@pytest.mark.parametrize("shared_start", [False, True])
def test_runs_over_data_sets_go_as_alone(shared_start, query):
    model = starts(query=query)
    model = model[0] if shared_start else model
    data, test = samples(runs=R), samples(runs=R, size=11, seed=5)
    options = {"steps": 15, "optimizer": mh.GradientDescent(0.3), "record": RECORD}
    run = mh.train(model, data, test=test, **options)
    assert run.model.W.shape == (R, H, d, d)
    for r in range(R):
        start = model if shared_start else model[r]
        alone = mh.train(start, one_data_set(data, r), test=one_data_set(test, r), **options)
        same_run(run[r], alone, 1e-12)


def test_runs_over_all_that_data_may_hold():
    """Query, weights and lengths per run, on shared tokens."""
    rng = np.random.default_rng(6)
    X, y = samples().X, samples().y
    per_run = {
        "query": draw(np.float64, R, n, 2, d, seed=7),
        "weight": rng.random((R, n)),
        "lengths": rng.integers(0, T + 1, (R, n)),
    }
    model = mh.Classifier(draw(np.float64, H, d, d), draw(np.float64, H, 2, d, seed=1))
    options = {"steps": 10, "optimizer": mh.GradientDescent(0.3)}
    for names in (["query"], ["query", "weight"], ["query", "lengths"], list(per_run)):
        given = {name: per_run[name] for name in names}
        run = mh.train(model, mh.Dataset(X, y, **given), **options)
        for r in range(R):
            alone = mh.Dataset(X, y, **{name: array[r] for name, array in given.items()})
            same_run(run[r], mh.train(model, alone, **options), 1e-12)


@pytest.mark.parametrize(
    "kind", [mh.GradientDescent, mh.NormalizedGradientDescent, mh.Momentum, mh.Adam]
)
def test_runs_over_step_sizes_go_as_alone(kind):
    model, data = starts()[0], samples()
    rates = [0.01, 0.1, 0.3]
    run = mh.train(model, data, steps=15, optimizer=kind(rates), record=("loss", "distance"))
    for r, lr in enumerate(rates):
        alone = mh.train(model, data, steps=15, optimizer=kind(lr), record=("loss", "distance"))
        same_run(run[r], alone, 1e-12)
    assert len({float(x) for x in run.history["distance"][:, -1]}) == R


def test_layers_side_by_side():
    lead = np.float64
    model = mh.Layer(
        mh.LowRank(draw(lead, H, d, 3), draw(lead, R, H, d, 3, seed=1)),
        draw(lead, R, H, d, 6, seed=2),
        prompt=draw(lead, 8, d, seed=3),
    )
    data = mh.Dataset(samples().X, draw(lead, n, 8, 6, seed=4))
    options = {
        "steps": 10, "optimizer": mh.Momentum(0.05), "loss": "squared",
        "record": {"loss": 1, "Q": 4, "prompt": 5},
    }  # fmt: skip
    for wrt in (None, ("K", "V"), ("Q", "prompt")):
        run = mh.train(model, data, wrt=wrt, **options)
        for name, array in run.model.parameters.items():
            repeated = name in run.wrt or model.parameters[name].shape[0] == R
            axes = 2 if name == "prompt" else 3
            assert array.ndim == axes + repeated  # what is not trained stays shared
        assert run.history["Q"].shape == (R, 4, H, d, 3)
        for r in range(R):
            same_run(run[r], mh.train(model[r], data, wrt=wrt, **options), 1e-12)


def test_shapes_of_the_history():
    groups = np.random.default_rng(8).integers(0, 3, (n, T))
    data = mh.Dataset(samples().X, samples().y, token_groups=groups)
    run = mh.train(
        starts(), data, steps=6, optimizer=mh.GradientDescent(0.3),
        record=dict.fromkeys((*RECORD, "W", "attention_groups", "cosine"), 4),
        test=samples(size=11), directions={"start": starts()[0], "own": starts()},
    )  # fmt: skip
    shapes = {name: rows.shape for name, rows in run.history.items()}
    assert all(k.tolist() == [0, 4, 6] for k in run.steps.values())
    assert shapes == {
        **dict.fromkeys(RECORD, (R, 3)),
        "cosine_start": (R, 3),
        "cosine_own": (R, 3),
        "W": (R, 3, H, d, d),
        "U": (R, 3, H, T, d),
        "attention": (R, 3, n, H, T, T),
        "attention_max": (R, 3, H),
        "attention_groups": (R, 3, H, 1, 3),
    }
    assert run.history["cosine_own"][:, 0] == pytest.approx(np.ones(R), abs=1e-14)
    assert run.history["cosine_start"][0, 0] == pytest.approx(1.0, abs=1e-14)
    assert (run.history["cosine_start"][1:, 0] < 0.9).all()


@pytest.mark.parametrize("per_run", ["tokens", "samples", "both"])
def test_groups_of_each_run(per_run):
    rng = np.random.default_rng(9)
    tokens, members = rng.integers(0, 3, (R, n, T)), rng.integers(0, 2, (R, n))
    members[:, :2] = [0, 1]
    tokens = tokens[0] if per_run == "samples" else tokens
    members = members[0] if per_run == "tokens" else members
    names = {"token_groups": ("a", "b", "c"), "sample_groups": ("x", "y")}

    def data_set(tokens, members):
        given = {"token_groups": tokens, "sample_groups": members}
        pairs = {name: (index, names[name]) for name, index in given.items()}
        return mh.Dataset(samples().X, samples().y, **pairs)

    options = {
        "steps": 5, "optimizer": mh.GradientDescent(0.3), "record": {"attention_groups": 2}
    }  # fmt: skip
    run = mh.train(starts(), data_set(tokens, members), **options)
    for r in range(R):
        own = (
            tokens[r] if tokens.ndim == 3 else tokens,
            members[r] if members.ndim == 2 else members,
        )
        same_run(run[r], mh.train(starts()[r], data_set(*own), **options), 1e-12)


def test_thread_count_changes_nothing():
    runs = [
        mh.train(
            starts(), samples(size=40), steps=30, optimizer=mh.NormalizedGradientDescent(0.05),
            record=("loss", "grad_norm", "W"), num_threads=threads,
        )
        for threads in (1, 2, 3, 5, 1)
    ]  # fmt: skip
    assert all(run == runs[0] for run in runs[1:])


def test_norms_of_all_sizes_side_by_side():
    """Squares of some gradients overflow or underflow; with a linear loss all are multiples."""
    sizes = np.array([1e-170, 1.0, 1e170])
    U = draw(np.float64, H, T, d, seed=8)
    model = mh.Classifier(W=np.zeros((3, H, d, d)), U=sizes[:, None, None, None] * U)
    run = mh.train(
        model, samples(), steps=3, loss="linear", wrt="W",
        optimizer=mh.NormalizedGradientDescent(0.1), record=("grad_norm", "W"),
    )  # fmt: skip
    norms = run.history["grad_norm"] / sizes[:, None]
    assert norms[1].min() > 0
    for r in (0, 2):  # as far as rounding, and the steps that it moves
        np.testing.assert_allclose(norms[r], norms[1], rtol=1e-12)
        np.testing.assert_allclose(run.history["W"][r], run.history["W"][1], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "accuracy", "margin"])
def test_each_run_stops_at_its_own_threshold_and_is_frozen(name):
    model, data = starts(), samples()
    options = {"optimizer": mh.GradientDescent([0.5, 0.1, 0.02]), "record": {name: 1, "U": 7}}
    full = mh.train(model, data, steps=60, **options)
    values = full.history[name]
    sign = 1 if name in ("loss", "grad_norm") else -1
    least = sorted((sign * values).min(axis=1))[1]  # two of the three runs get there
    threshold = sign * (least + 1e-9)  # also alone, where the values differ by rounding
    meets = sign * values <= sign * threshold
    ends = [int(row.argmax()) if row.any() else -1 for row in meets]
    assert sum(k >= 0 for k in ends) == 2
    run = mh.train(model, data, steps=60, stop={name: threshold}, **options)
    assert run.step == 60
    assert run.stopped.tolist() == ends
    assert run.reason == ["steps" if k < 0 else name for k in ends]
    for r, k in enumerate(ends):
        k = 60 if k < 0 else k
        assert np.array_equal(run.history[name][r, : k + 1], values[r, : k + 1])
        assert (run.history[name][r, k:] == run.history[name][r, k]).all()
        alone = mh.train(
            model[r], data, steps=60, stop={name: threshold},
            **options | {"optimizer": run[r].optimizer},
        )  # fmt: skip
        same_run(run[r], alone, 1e-12)
        assert run[r].step == k


@pytest.mark.parametrize("plan", ["runs", "samples"])
@pytest.mark.parametrize(
    "optimizer",
    [
        mh.Momentum((0.5, 0.1, 0.02), l2=0.1),
        mh.Momentum((0.5, 0.1, 0.02), 0.6, nesterov=True, clip=0.2),
        mh.Adam((0.2, 0.02, 0.01), weight_decay=0.1),
        mh.Adam((0.2, 0.02, 0.01), project="sphere", radius=2.0),
    ],
)
def test_every_number_of_a_frozen_run_stays(optimizer, plan, use_plan):
    """Also what the optimizer keeps; let go again, the run goes on as it would have alone."""
    use_plan(plan)
    model, data = starts(), samples()
    losses = mh.train(model, data, steps=4, optimizer=optimizer).history["loss"][0]
    end = int(losses.argmin())
    assert end > 0
    stop = {"loss": losses[end]}
    there = mh.train(model, data, steps=end, optimizer=optimizer)
    run = mh.train(model, data, steps=25, optimizer=optimizer, stop=stop)
    assert (run.stopped[0], run.step) == (end, 25)
    for name, slots in run.state.items():
        assert np.array_equal(run.model.parameters[name][0], there.model.parameters[name][0])
        for slot, before in zip(slots, there.state[name], strict=True):
            assert np.array_equal(slot[0], before[0])
            assert before[0].any()
            assert not np.array_equal(slot[1], before[1])
    released, alone = (mh.train(r, data, steps=5, stop={}) for r in (run, run[0]))
    close(released.model.W[0], alone.model.W, 1e-12)
    close(released.model.U[0], alone.model.U, 1e-12)
    assert alone.model != run[0].model
    # Twice frozen: the steps that others took are counted once.
    again = mh.train(mh.train(run, data, steps=3), data, steps=5, stop={})
    close(again.model.W[0], alone.model.W, 1e-12)


def test_a_changed_optimizer_counts_from_where_each_run_stands(tmp_path):
    model, data = starts(), samples()
    plain = mh.GradientDescent((0.5, 0.1, 0.02))
    run = mh.train(model, data, steps=20, optimizer=plain, stop={"loss": 0.5})
    assert run.stopped[0] > 0
    adam = mh.Adam(0.05)
    waiting = mh.train(run, data, steps=4, optimizer=adam)
    waiting.save(tmp_path / "run.npz")
    released = mh.train(mh.Run.load(tmp_path / "run.npz"), data, steps=5, stop={})
    alone = mh.train(run[0], data, steps=5, optimizer=adam, stop={})
    close(released.model.W[0], alone.model.W, 1e-12)


def test_training_ends_when_all_runs_have_stopped():
    run = mh.train(
        starts(), samples(), steps=10**9, stop={"loss": 0.2},
        optimizer=mh.GradientDescent([0.5, 0.4, 0.3]), record={"loss": 10**6},
    )  # fmt: skip
    assert run.reason == ["loss"] * R
    assert run.step == run.stopped.max()
    assert run.stopped.min() < run.stopped.max()
    assert run.steps["loss"].tolist() == [0, run.step]
    assert (run.history["loss"][:, -1] <= 0.2).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_run_that_turns_non_finite_disturbs_nobody(dtype):
    model, data = starts(dtype), samples(dtype)
    options = {"steps": 40, "loss": "squared", "record": {"loss": 1, "W": 9}}
    run = mh.train(model, data, optimizer=mh.GradientDescent([0.01, 1e3, 0.02]), **options)
    assert run.reason == ["steps", "nonfinite", "steps"]
    assert run.stopped[[0, 2]].tolist() == [-1, -1]
    assert 0 < run.stopped[1] < 40
    for r, lr in enumerate((0.01, 1e3, 0.02)):
        with np.errstate(all="ignore"):
            alone = mh.train(model[r], data, optimizer=mh.GradientDescent(lr), **options)
        if r != 1:  # chaos on the way to infinity
            same_run(run[r], alone, TOLERANCE[dtype])
    assert (run[1].step, run[1].reason) == (run.stopped[1], "nonfinite")


def test_data_of_one_run_that_are_not_finite():
    data = samples(runs=R)
    X = data.X.copy()
    X[1, 3, 2, 0] = np.nan
    with pytest.warns(RuntimeWarning, match=r"X holds nan at index 1, 3, 2, 0$"):
        run = mh.train(starts(), X, data.y, steps=5, optimizer=mh.GradientDescent(0.3))
    assert run.reason == ["steps", "nonfinite", "steps"]
    assert run.stopped.tolist() == [-1, 0, -1]
    assert np.isnan(run.history["loss"]).all(axis=1).tolist() == [False, True, False]
    clean = mh.train(starts(), data, steps=5, optimizer=mh.GradientDescent(0.3))
    for r in (0, 2):
        assert np.array_equal(run.history["loss"][r], clean.history["loss"][r])
