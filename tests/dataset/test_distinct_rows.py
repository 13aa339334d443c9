"""Which rows of arrays are bitwise the same, against a dict of their bytes."""

import numpy as np
import pytest

from mhfast import _core


def by_dict(arrays):
    """Return what `_core.distinct_rows` returns, without limits."""
    known, numbers, first = {}, [], []
    for row in range(len(arrays[0])):
        key = b"|".join(array[row].tobytes() for array in arrays)
        if key not in known:
            known[key] = len(first)
            first.append(row)
        numbers.append(known[key])
    return numbers, first


def check(arrays, **limits):
    numbers, first = _core.distinct_rows(arrays, most=len(arrays[0]), probe=0, **limits)
    expected = by_dict(arrays)
    assert numbers.tolist() == expected[0]
    assert first.tolist() == expected[1]
    return len(first)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 31, 32, 33, 67])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "int64"])
def test_random_rows(dtype, width):
    rng = np.random.default_rng(width)
    table = rng.integers(0, 100, size=(7, width)).astype(dtype)
    assert check([table[rng.integers(7, size=50)]]) == len(np.unique(table, axis=0))


def test_rows_that_differ_in_one_place():
    """One-hot rows, whose bits agree but for the highest of two numbers."""
    assert check([np.repeat(np.eye(90), 2, axis=0)]) == 90
    assert check([np.concatenate([np.eye(33), -np.eye(33), np.eye(33)])]) == 66


def test_all_sequences_of_two_words_are_told_apart():
    words = np.array([[1.0, 0.0], [0.0, 1.0]])
    ids = (np.arange(4096)[:, None] >> np.arange(12)) & 1
    assert check([words[ids]]) == 4096


def test_several_arrays_of_other_types():
    rng = np.random.default_rng(0)
    X, y = rng.integers(2, size=(60, 2, 2)).astype(np.float32), rng.integers(3, size=60)
    assert check([X, y]) == len({(a.tobytes(), int(b)) for a, b in zip(X, y, strict=True)})
    assert check([X, y]) > check([X])


def test_zeros_of_both_signs_differ_and_equal_nans_do_not():
    other = np.array([0x7FF8000000000001]).view(np.float64)[0]
    column = np.array([0.0, -0.0, np.nan, np.nan, other, 0.0])
    numbers, first = _core.distinct_rows([column], most=6, probe=0)
    assert numbers.tolist() == [0, 1, 2, 2, 3, 0]
    assert first.tolist() == [0, 1, 2, 4]


def test_limits():
    rows = np.arange(30) % 6
    assert _core.distinct_rows([rows], most=6, probe=0) is not None
    assert _core.distinct_rows([rows], most=5, probe=0) is None
    assert _core.distinct_rows([rows], most=0, probe=0) is None


@pytest.mark.parametrize("count", [9, 40, 41, 1000])
def test_probe(count):
    """The look at some rows ends it if these differ; it misses no row of its own."""
    different = np.arange(count)
    assert _core.distinct_rows([different], most=count, probe=8) is None
    assert _core.distinct_rows([different], most=count, probe=count) is not None
    for same in (different // 2, different % (count // 3), np.zeros(count)):  # side by side, far
        assert _core.distinct_rows([same], most=count, probe=max(8, count // 3)) is not None


def test_refusals():
    with pytest.raises(ValueError, match="expected C-contiguous ones of 4 rows, got"):
        _core.distinct_rows([np.ones((4, 6))[:, ::2]], most=4, probe=0)
    with pytest.raises(ValueError, match="of 4 rows, got"):
        _core.distinct_rows([np.ones(4), np.ones(3)], most=4, probe=0)
    with pytest.raises(ValueError, match="expected at least one"):
        _core.distinct_rows([], most=4, probe=0)
