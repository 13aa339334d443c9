"""The segments that a run is made of: steps, settings and data."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

import mhfast as mh


def problem(seed: int = 0, runs: int | None = None) -> tuple[mh.Classifier, mh.Dataset]:
    rng = np.random.default_rng(seed)
    lead = () if runs is None else (runs,)
    data = mh.Dataset(rng.standard_normal((*lead, 6, 3, 5)), np.where(np.arange(6) % 2, 1.0, -1.0))
    return mh.Classifier.gaussian(2, 3, 5, std=0.5, seed=seed), data


def told(run: mh.Run) -> list[tuple[Any, ...]]:
    return [(s.first, s.optimizer, s.loss, s.wrt) for s in run.segments]


def test_what_changes_on_the_way_begins_a_segment(tmp_path: Path) -> None:
    start, data = problem()
    _, other = problem(1)
    slow, fast = mh.GradientDescent(0.1), mh.GradientDescent(0.2, schedule=(1.0, 0.5) * 9)
    both, only = ("W", "U"), ("U",)
    run = mh.train(start, data, steps=0, optimizer=slow)
    assert run.segments == ()
    run = mh.train(run, data, steps=4)
    run = mh.train(run, data, steps=3)
    assert told(run) == [(0, slow, "logistic", both)]
    assert run == mh.train(start, data, steps=7, optimizer=slow)
    run = mh.train(run, data, steps=2, optimizer=fast)
    run = mh.train(run, other, steps=1)
    run = mh.train(run, other, steps=1, wrt="U", loss="exponential")
    assert told(run) == [
        (0, slow, "logistic", both), (7, fast, "logistic", both),
        (9, fast, "logistic", both), (10, fast, "exponential", only),
    ]  # fmt: skip
    assert [s.data == run.segments[0].data for s in run.segments] == [True, True, False, False]
    run.save(tmp_path / "run.npz")
    assert mh.Run.load(tmp_path / "run.npz").segments == run.segments
    assert pickle.loads(pickle.dumps(run)).segments == run.segments


def test_each_run_has_the_segments_of_its_own_training() -> None:
    start, data = problem(runs=3)
    run = mh.train(start, data, steps=2, optimizer=mh.GradientDescent((0.1, 0.2, 0.3)))
    run = mh.train(run, data, steps=2, optimizer=mh.GradientDescent(0.4))
    for r in range(3):
        alone = mh.train(start, data.run(r), steps=2, optimizer=mh.GradientDescent(0.1 * (r + 1)))
        alone = mh.train(alone, data.run(r), steps=2, optimizer=mh.GradientDescent(0.4))
        assert [s.data for s in run[r].segments] == [s.data for s in alone.segments]
        assert [s.first for s in run[r].segments] == [0, 2]
        assert run[r].segments[0].optimizer.lr == (0.1, 0.2, 0.3)[r]
    assert run[1:].segments[0].data == run.segments[0].data[1:]
    assert len(set(run.segments[0].data)) == 3


def test_data_that_differ_in_anything_have_other_fingerprints() -> None:
    start, data = problem()
    X = data.X.copy()
    X[3, 1, 2] = np.nextafter(X[3, 1, 2], 9)
    kinds = [
        data, mh.Dataset(X, data.y), mh.Dataset(data.X, data.y[::-1]),
        mh.Dataset(data.X[::-1], data.y), mh.Dataset(data.X, data.y, weight=[1, 2, 1, 1, 1, 1]),
        mh.Dataset(data.X, data.y, lengths=[3, 3, 2, 3, 3, 3]),
        mh.Dataset(data.X, data.y, query=data.X), mh.Dataset(data.X, data.y, query=data.X[::-1]),
    ]  # fmt: skip
    plain = mh.GradientDescent(0.1)
    found = [mh.train(start, of, steps=1, optimizer=plain).segments[0].data for of in kinds]
    assert len(set(found)) == len(kinds)
    by_arrays = mh.train(start, data.X, data.y.astype(int), steps=1, optimizer=plain)
    assert by_arrays.segments[0].data == found[0]
