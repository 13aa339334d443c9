"""Ctrl-C and exceptions end training soon, lose nothing and leave everything usable."""

import sys

import interruption
import numpy as np
import pytest

import mhfast as mh

# The child announces that it is about to train, is interrupted in the middle, and reports the time
# at which it got the exception and whether all that it holds is right.
CHILD = """
import sys, time
import numpy as np
import mhfast as mh

rng = np.random.default_rng(0)
X = rng.standard_normal(({n}, 10, 20)) / 20**0.5
y = rng.choice([-1, 1], {n})
model = mh.Classifier.zeros(16, 10, 20)
options = dict(record={{"loss": 1, "W": 1000}}, {options})
optimizer = mh.GradientDescent({lr})
print("ready", flush=True)
try:
    mh.train(model, X, y, steps=10**6, optimizer=optimizer, **options)
except mh.Interrupted as error:
    caught = time.time()
    run = error.run
assert run.reason in ("interrupted", ["interrupted"] * 3), run
assert np.all(run.stopped == run.step), run
# A step that was cut short is not recorded.
rows = run.history["loss"].shape[-1]
assert rows in (run.step, run.step + 1)
assert run.steps["loss"].tolist() == list(range(rows))
more = mh.train(run, X, y, steps=3)
whole = mh.train(model, X, y, steps=run.step + 3, optimizer=optimizer, record=options["record"])
assert more == whole
assert np.array_equal(run.history["loss"], whole.history["loss"][..., :rows])
print(caught, run.step, flush=True)
"""


def interrupted(n, options="", *, after, lr=0.01):
    """Seconds from SIGINT to the exception in a child that trains on n samples; step reached."""
    seconds, step = interruption.interrupted(CHILD.format(n=n, options=options, lr=lr), after)
    return seconds, int(step)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is for POSIX")
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (7, ""),  # microseconds a step: signals must be looked for between many steps
        (100, "num_threads=2"),
        (4000, "num_threads=2"),  # tens of milliseconds a step
        (7, "progress=True"),
        (7, "callback=lambda k, model: None"),
    ],
)
def test_ctrl_c_ends_training_within_a_second(n, options):
    delay, step = interrupted(n, options, after=0.4)
    assert delay < 1.0
    assert step > 0


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is for POSIX")
@pytest.mark.parametrize("n", [7, 1000])
def test_ctrl_c_ends_trainings_side_by_side(n):
    delay, step = interrupted(n, after=0.4, lr=[0.01, 0.02, 0.005])
    assert delay < 1.0
    assert step > 0


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is for POSIX")
@pytest.mark.slow
def test_ctrl_c_ends_training_in_the_middle_of_a_long_step():
    delay, _ = interrupted(20_000, "num_threads=1", after=1.5)
    assert delay < 1.0


def problem():
    rng = np.random.default_rng(2)
    model = mh.Classifier.gaussian(2, 3, 5, std=0.5, seed=2)
    return model, mh.Dataset(rng.standard_normal((7, 3, 5)), rng.choice([-1, 1], 7))


def fail_at(step, error):
    """A callback that raises when it sees the step."""

    def callback(k, _):
        if k == step:
            raise error

    return callback


OPTIONS = {"optimizer": mh.GradientDescent(0.3), "record": {"loss": 1, "margin": 3, "U": 5}}


@pytest.mark.parametrize("step", [0, 1, 9, 10, 20])
def test_an_exception_of_the_callback_carries_the_run(step):
    model, data = problem()
    whole = mh.train(model, data, steps=20, **OPTIONS)
    mistake = RuntimeError("a mistake")
    with pytest.raises(RuntimeError, match="a mistake") as e:
        mh.train(model, data, steps=20, callback=fail_at(step, mistake), **OPTIONS)
    assert e.value is mistake
    run = mistake.run
    assert (run.step, run.reason, run.stopped) == (step, "exception", step)
    for name, every in OPTIONS["record"].items():
        # The end is recorded before the callback sees it.
        due = [k for k in range(step + 1) if k % every == 0 or k == 20]
        assert run.steps[name].tolist() == due
        known = np.isin(whole.steps[name], run.steps[name])
        assert np.array_equal(run.history[name], whole.history[name][known])
    if sys.version_info >= (3, 11):
        assert mistake.__notes__ == [f"Training ended at step {step}; .run holds the run so far."]
    assert mh.train(run, data, steps=20 - step) == whole


@pytest.mark.parametrize("step", [7, 8, 12])
def test_an_exception_in_a_continued_run(step):
    """The end point of the earlier call is kept until a step is taken, and then given up."""

    def metric(model):
        return model.U[0, 0, 0]

    model, data = problem()
    options = {"optimizer": mh.GradientDescent(0.3), "record": {"loss": 1, "margin": 5, metric: 5}}
    whole = mh.train(model, data, steps=20, **options)
    run = mh.train(model, data, steps=7, **options)
    with pytest.raises(RuntimeError) as e:
        mh.train(run, data, steps=13, callback=fail_at(step, RuntimeError()))
    run = e.value.run
    assert run.step == step
    assert run.steps["loss"].tolist() == list(range(step + 1))
    due = {7: [0, 5, 7], 8: [0, 5], 12: [0, 5, 10]}[step]
    assert run.steps["margin"].tolist() == run.steps["metric"].tolist() == due
    assert mh.train(run, data, steps=20 - step) == whole


def test_an_exception_of_a_function_carries_the_run():
    model, data = problem()
    sizes = []

    def metric(model):
        sizes.append(model.heads)
        return 1 / (len(sizes) - 4)

    record = {"loss": 1, metric: 5}
    with pytest.raises(ZeroDivisionError) as e:
        mh.train(model, data, steps=20, optimizer=mh.GradientDescent(0.3), record=record)
    run = e.value.run
    assert run.step == 15
    assert run.steps["metric"].tolist() == [0, 5, 10]
    assert run.steps["loss"].tolist() == list(range(16))


def test_an_exception_at_the_very_end_carries_the_run():
    """The end point of a function that is due at no multiple is evaluated after the core."""
    model, data = problem()
    seen = []

    def metric(model):
        seen.append(model)
        return 1 / (len(seen) - 4)

    with pytest.raises(ZeroDivisionError) as e:
        mh.train(
            model, data, steps=12, optimizer=mh.GradientDescent(0.3), record={metric: 5, "loss": 1}
        )
    assert e.value.run.step == 12
    assert e.value.run.steps["loss"].tolist() == list(range(13))


def test_an_exception_of_the_stop_function_carries_the_run():
    model, data = problem()
    with pytest.raises(KeyError) as e:
        mh.train(model, data, steps=20, stop=fail_at(7, KeyError("stop")), **OPTIONS)
    assert e.value.run.step == 7


def test_keyboard_interrupt_in_a_callback():
    model, data = problem()
    whole = mh.train(model, data, steps=20, **OPTIONS)
    with pytest.raises(mh.Interrupted) as e:
        mh.train(model, data, steps=20, callback=fail_at(9, KeyboardInterrupt), **OPTIONS)
    assert (e.value.run.step, e.value.run.reason) == (9, "interrupted")
    assert mh.train(e.value.run, data, steps=11) == whole


def test_no_run_before_the_start():
    model, data = problem()
    y = data.y.astype(float)
    y[3] = 2.0
    with pytest.raises(ValueError, match=r"y: .*2.*index 3") as e:
        mh.train(model, data.X, y, steps=5, **OPTIONS)
    assert not hasattr(e.value, "run")
