"""Optimizers are values that refuse what makes no sense."""

import pickle

import numpy as np
import pytest

import mhfast as mh
from mhfast.optimizers import core_settings


def test_fields_become_plain_numbers_and_compare():
    a = mh.GradientDescent(np.float32(0.5), schedule=np.array([1, 2]), clip=3)
    b = mh.GradientDescent(0.5, schedule=[1.0, 2.0], clip=3.0)
    assert a == b
    assert hash(a) == hash(b)
    assert a.schedule == (1.0, 2.0)
    assert type(a.lr) is float
    assert a != mh.NormalizedGradientDescent(0.5, schedule=[1.0, 2.0], clip=3.0)
    assert pickle.loads(pickle.dumps(a)) == a


def test_eps_and_by_are_positional():
    optimizer = mh.NormalizedGradientDescent(0.1, 1e-3, "head")
    assert (optimizer.lr, optimizer.eps, optimizer.by) == (0.1, 1e-3, "head")
    with pytest.raises(TypeError, match=r"positional"):
        mh.GradientDescent(0.1, [1.0])


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"lr": "fast"}, TypeError, "lr: .*number"),
        ({"lr": True}, TypeError, "lr: .*number"),
        ({"lr": -0.1}, ValueError, r"lr: .*-0\.1"),
        ({"lr": np.inf}, ValueError, "lr: .*finite.*inf"),
        ({"lr": 1.0, "l2": np.nan}, ValueError, "l2: .*nan"),
        ({"lr": 1.0, "clip": 0}, ValueError, "clip: .*above 0"),
        ({"lr": 1.0, "schedule": 0.5}, ValueError, r"schedule: .*\(steps,\).*\(\)"),
        ({"lr": 1.0, "schedule": "cosine"}, TypeError, "schedule: .*cosine"),
        ({"lr": 1.0, "schedule": [1.0, -2.0]}, ValueError, "schedule: .*-2.0 at index 1"),
    ],
)
@pytest.mark.parametrize("kind", [mh.GradientDescent, mh.NormalizedGradientDescent])
def test_wrong_fields(kind, fields, error, message):
    with pytest.raises(error, match=message):
        kind(**fields)


def test_wrong_fields_of_normalized():
    with pytest.raises(ValueError, match=r"by: .*'tensor', 'head' or 'all', got 'row'"):
        mh.NormalizedGradientDescent(0.1, by="row")
    with pytest.raises(ValueError, match=r"eps: .*-1"):
        mh.NormalizedGradientDescent(0.1, eps=-1)


def test_schedule_covers_all_steps():
    optimizer = mh.GradientDescent(1.0, schedule=[1.0, 0.5, 0.25])
    assert core_settings(optimizer, 3)["schedule"].tolist() == [1.0, 0.5, 0.25]
    with pytest.raises(ValueError, match=r"schedule: .*each of the 4 steps.*got 3"):
        core_settings(optimizer, 4)


def test_optimizer_of_another_kind():
    with pytest.raises(TypeError, match=r"optimizer: expected GradientDescent or .*, got 'adam'"):
        core_settings("adam", 1)
