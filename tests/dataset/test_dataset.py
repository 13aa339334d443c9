"""`Dataset`: what it holds, what it shares with the caller, selecting, sampling, copying."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from functools import partial

import numpy as np
import pytest

import mhfast as mh
from mhfast.dataset.dataset import Groups

n, T, d, q = 4, 3, 5, 2


def coins(count, *, bias=0.5, seed):
    """A generator as those of mhfast.data: labels are +1 with probability `bias`."""
    rng = np.random.default_rng(seed)
    y = np.where(rng.random(count) < bias, 1, -1)
    X = rng.standard_normal((count, T, d))
    return mh.Dataset(X, y, truth={"bias": bias}, generator=partial(coins, bias=bias))


def full():
    rng = np.random.default_rng(0)
    return mh.Dataset(
        rng.standard_normal((n, T, d)),
        np.array([1, -1, -1, 1]),
        query=rng.standard_normal((n, q, d)),
        lengths=[3, 0, 2, 3],
        weight=[1, 2, 3, 4],
        token_groups=(np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 1]]), ["class", "context"]),
        sample_groups=[0, 1, 1, 0],
        truth={"mean": np.arange(d), "noise": {"kind": "none"}},
        generator=partial(coins, bias=0.25),
    )


def test_fields():
    data = full()
    assert (data.n, data.tokens, data.dim, data.dtype) == (n, T, d, np.float64)
    assert data.y.dtype == np.int64
    assert data.weight.dtype == np.float64
    assert data.token_groups.names == ("class", "context")
    assert data.token_groups.index.dtype == np.int64
    assert data.sample_groups == Groups(np.array([0, 1, 1, 0]), ("0", "1"))


def test_everything_but_tokens_and_labels_is_optional():
    data = mh.Dataset(np.zeros((n, T, d)), np.ones(n))
    optional = [field for field in dataclasses.fields(data)[2:] if field.init]
    assert len(optional) == 7
    assert all(getattr(data, field.name) is None for field in optional)


def test_arrays_are_shared_but_read_only():
    X, y = np.ones((n, T, d)), np.ones(n)
    data = mh.Dataset(X, y)
    assert np.shares_memory(data.X, X)
    assert np.shares_memory(data.y, y)
    assert X.flags.writeable
    for array in (data.X, data.y):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.X = X


def test_padding_is_held_as_zeros():
    X = np.ones((n, T, d))
    lengths = np.array([3, 0, 2, 1])
    data = mh.Dataset(X, np.ones(n), lengths=lengths)
    assert data.lengths.dtype == np.int64
    assert (X == 1).all()
    np.testing.assert_array_equal(data.X.sum(axis=(1, 2)), d * lengths)
    again = dataclasses.replace(data, y=-data.y)
    assert np.shares_memory(again.X, data.X)


def test_targets_of_a_layer_are_held():
    X = np.ones((n, T, d))
    for y in (np.ones((n, T, 2)), np.zeros((n, T), int), -np.ones((n, 1, 6), int)):
        data = mh.Dataset(X, y, weight=np.ones((n, T)))
        assert data.y.shape == y.shape
        assert data.runs is None
        np.testing.assert_array_equal(data.subset([2, 1]).y, y[[2, 1]])


def test_a_dataset_stands_for_its_arrays():
    data = full()
    model = mh.Classifier.gaussian(7, q, d, std=1.0, seed=1)
    value, gradients = mh.value_and_grad(model, data)
    options = {name: getattr(data, name) for name in ("query", "lengths", "weight")}
    assert mh.value_and_grad(model, data.X, data.y, **options) == (value, gradients)
    for name in ("lengths", "weight"):
        other, _ = mh.value_and_grad(model, data.X, data.y, **{**options, name: None})
        assert value != other


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, None, 2), [1, 3]),
        ([3, 0, 0], [3, 0, 0]),
        (np.array([True, False, False, True]), [0, 3]),
        (-1 - np.arange(2), [3, 2]),
    ],
)
def test_subset_selects_in_every_field(index, rows):
    data = full()
    part = data.subset(index)
    for name in ("X", "y", "query", "lengths", "weight"):
        np.testing.assert_array_equal(getattr(part, name), getattr(data, name)[rows])
    for name in ("token_groups", "sample_groups"):
        assert getattr(part, name).names == getattr(data, name).names
        np.testing.assert_array_equal(getattr(part, name).index, getattr(data, name).index[rows])
    assert part.truth == data.truth or part.truth.keys() == data.truth.keys()


def test_a_subset_by_slice_is_a_view():
    data = full()
    assert np.shares_memory(data.subset(slice(1, 3)).X, data.X)


def test_sample_draws_from_the_same_population():
    data = full()
    fresh = data.sample(1000, seed=2)
    assert fresh.n == 1000
    assert fresh.truth == {"bias": 0.25}
    # Standard error of the share: sqrt(.25 · .75 / 1000) = .014.
    assert abs(np.mean(fresh.y == 1) - 0.25) < 0.06
    assert fresh == data.sample(1000, seed=2)
    assert fresh != data.sample(1000, seed=3)


def test_sample_takes_changes_and_can_be_repeated():
    sure = full().sample(9, seed=0, bias=1.0)
    assert (sure.y == 1).all()
    assert (sure.sample(9, seed=1).y == 1).all()


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))]
)
def test_copies_are_equal_frozen_and_can_sample(duplicate):
    data = full()
    twin = duplicate(data)
    assert twin == data
    assert not twin.X.flags.writeable
    assert not twin.token_groups.index.flags.writeable
    assert twin.sample(9, seed=5) == data.sample(9, seed=5)


def test_equality_is_by_value():
    data = full()
    assert data == full()
    assert data != dataclasses.replace(data, y=-data.y)
    assert data != dataclasses.replace(data, truth=None)
    assert data != dataclasses.replace(data, token_groups=data.token_groups.index)
    assert data != data.X.tolist()


def test_replace_keeps_the_rest():
    data = full()
    clean = dataclasses.replace(data, weight=None)
    assert clean.weight is None
    assert clean == dataclasses.replace(full(), weight=None)


def test_as_dataset_passes_a_dataset_through():
    data = full()
    assert mh.as_dataset(data) is data
    assert mh.as_dataset(data.X, data.y) == mh.Dataset(data.X, data.y)
    options = {name: getattr(data, name) for name in ("query", "lengths", "weight")}
    assert mh.as_dataset(data.X, data.y, **options) == mh.Dataset(data.X, data.y, **options)


def test_length_and_slices_are_those_of_the_samples():
    data = full()
    assert len(data) == data.n
    assert data[1:3] == data.subset(slice(1, 3))
    assert data[[2, 0]] == data.subset([2, 0])
    with pytest.raises(IndexError, match=r"index: cannot select from 4 samples"):
        data[1]
    with pytest.raises(TypeError, match="not iterable"):
        iter(data)
    with pytest.raises(TypeError):
        np.asarray(data)


def test_repr_tells_shapes():
    data = mh.Dataset(np.zeros((n, T, d), np.float32), np.ones(n, int), weight=np.ones(n))
    assert "generator" not in repr(full())  # it holds the arrays of the population
    assert repr(data) == ("Dataset(X=<float32 (4, 3, 5)>, y=<int64 (4,)>, weight=<float32 (4,)>)")


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_tensors_are_held_in_place(dtype):
    torch = pytest.importorskip("torch")
    X = torch.ones((n, T, d), dtype=getattr(torch, dtype))
    data = mh.Dataset(X, torch.ones(n, dtype=torch.int32))
    assert data.X.ctypes.data == X.data_ptr()
    assert data.dtype == np.dtype(dtype)
