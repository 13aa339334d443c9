"""Callbacks with a period and with values of recorded quantities; training up to a step."""

from __future__ import annotations

import numpy as np
import pytest

import mhfast as mh

n, T, d, H, R = 17, 5, 9, 3, 2
DATA = mh.data.tokenized_mixture(n, T, d, seed=0)
TEST = DATA.sample(11, seed=1)
START = mh.Classifier.gaussian(H, T, d, std=0.3, seed=2)
OPTIONS = {"optimizer": mh.Momentum(0.1), "test": TEST}


def largest(model):
    return np.abs(model.U).max()


def test_values_are_those_of_the_history():
    seen = []
    record = {"loss": 1, "test_accuracy": 1, "distance": 1, "U": 1, largest: 1}
    callback = mh.Callback(lambda *call: seen.append(call) and None, every=4)
    run = mh.train(START, DATA, steps=10, record=record, callback=callback, **OPTIONS)
    assert [k for k, *_ in seen] == [0, 4, 8, 10]
    for k, model, metrics in seen:
        assert metrics.keys() == run.history.keys()
        for name, value in metrics.items():
            np.testing.assert_array_equal(value, run.history[name][k])
        assert largest(model) == metrics["largest"]
    assert run == mh.train(START, DATA, steps=10, record=record, **OPTIONS)


def test_a_resumed_run_calls_at_the_step_where_it_goes_on():
    run = mh.train(START, DATA, steps=1, **OPTIONS)
    seen = []
    mh.train(run, DATA, steps=2, test=TEST, callback=lambda k, _: seen.append(k))
    assert seen == [1, 2, 3]


def test_it_may_have_quantities_of_its_own():
    seen = []
    callback = mh.Callback(lambda k, _, m: seen.append((k, m)) and None, 5, ("test_loss", "margin"))
    models = mh.stack([START, START.replace(U=-START.U)])
    mh.train(models, DATA, steps=5, record=(), callback=callback, **OPTIONS)
    assert [k for k, _ in seen] == [0, 5]
    expected = mh.evaluate(models, DATA, record=("test_loss", "margin"), test=TEST)
    for name, value in seen[0][1].items():
        assert value.shape == (R,)
        np.testing.assert_array_equal(value, expected[name])


def test_several_and_the_end():
    calls = {"a": [], "b": [], "c": []}
    callbacks = [
        mh.Callback(lambda k, *_: calls["a"].append(k), every=2),
        mh.Callback(lambda k, *_: calls["b"].append(k) or k == 6, every=3),
        lambda k, _: calls["c"].append(k),
    ]
    run = mh.train(START, DATA, steps=20, callback=callbacks, **OPTIONS)
    assert (run.step, run.reason) == (6, "callback")
    assert calls == {"a": [0, 2, 4, 6], "b": [0, 3, 6], "c": [0, 1, 2, 3, 4, 5, 6]}
    for each in calls.values():
        each.clear()
    ended = mh.train(START, DATA, steps=2000, stop={"loss": 0.3}, callback=callbacks[0], **OPTIONS)
    assert ended.reason == "loss"
    assert calls["a"][-1] == ended.step  # the last one, too


def test_in_the_span_of_the_tokens():
    wide = mh.Dataset(np.random.default_rng(0).standard_normal((3, T, 180)), np.array([1, -1, 1]))
    seen = []
    run = mh.train(
        mh.Classifier.zeros(13, T, 180), wide, steps=6, optimizer=mh.GradientDescent(0.1),
        callback=mh.Callback(lambda k, _, m: seen.append((k, m["loss"])) and None, every=3),
    )  # fmt: skip
    assert run.subspace is not None
    for k, loss in seen:
        # The whole space and the span round differently.
        np.testing.assert_allclose(loss, run.history["loss"][k], rtol=1e-12)


def test_until():
    once = mh.train(START, DATA, steps=9, **OPTIONS)
    assert mh.train(START, DATA, until=9, **OPTIONS) == once
    part = mh.train(START, DATA, until=4, **OPTIONS)
    assert mh.train(part, DATA, until=9, test=TEST) == once
    assert mh.train(once, DATA, until=9, test=TEST).step == 9


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: mh.Callback(3), TypeError, "function: expected a function, got int"),
        (lambda: mh.Callback(print, every=0), ValueError, "every: expected an integer of at least"),
        (
            lambda: mh.train(START, DATA, steps=1, callback=[print, "x"], **OPTIONS),
            TypeError,
            "callback: expected a function, a Callback or a list of them, got str",
        ),
        (
            lambda: mh.train(START, DATA, **OPTIONS),
            TypeError,
            "steps, until: expected one of them, got neither",
        ),
        (
            lambda: mh.train(START, DATA, steps=1, until=1, **OPTIONS),
            TypeError,
            "steps, until: expected one of them, got both",
        ),
        (
            lambda: mh.train(mh.train(START, DATA, steps=3, **OPTIONS), DATA, until=2),
            ValueError,
            "until: expected at least 3, the step of the run, got 2",
        ),
    ],
)
def test_wrong_use(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
