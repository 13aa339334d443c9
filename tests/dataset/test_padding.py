"""Zeros beyond the lengths of samples, as the core writes them, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mhfast import _core
from mhfast._arguments import sample_checks


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("lead", [(7,), (3, 7)])
def test_tokens_beyond_the_lengths_become_zeros(dtype: Any, lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((*lead, 4, 5)).astype(dtype)
    lengths = rng.integers(0, 5, lead)
    X[lengths < 4, -1, 2] = np.nan
    given = X.copy()
    seen = np.arange(4) < lengths[..., None]
    padded = sample_checks.padded(X, lengths)
    np.testing.assert_array_equal(padded, np.where(seen[..., None], given, 0))
    np.testing.assert_array_equal(X, given)
    assert padded.dtype == X.dtype
    assert sample_checks.padded(padded, lengths) is padded  # nothing to do, no copy


def test_shared_tokens_are_repeated_for_the_lengths_of_runs() -> None:
    X = np.arange(1.0, 31.0).reshape(2, 3, 5)
    lengths = np.array([[3, 1], [0, 2]])
    padded = sample_checks.padded(X, lengths)
    assert padded.shape == (2, 2, 3, 5)
    for run, of_run in zip(padded, lengths, strict=True):
        for tokens, given, length in zip(run, X, of_run, strict=True):
            np.testing.assert_array_equal(tokens[:length], given[:length])
            assert not tokens[length:].any()


def test_a_last_token_is_that_of_each_sample() -> None:
    X = np.arange(1.0, 31.0).reshape(2, 3, 5)
    np.testing.assert_array_equal(
        sample_checks.picked(X, np.array([[2, 0], [-1, 1]])),
        [[X[0, 2:], X[1, :1]], [np.zeros((1, 5)), X[1, 1:2]]],
    )


def test_what_is_no_array_of_tokens_is_named() -> None:
    X = np.zeros((2, 3, 5))
    with pytest.raises(ValueError, match=r"X: expected C-contiguous tokens of \(3,\) samples"):
        _core.with_padding(X, np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"lengths: expected integers in \[0, 3\]"):
        _core.with_padding(X, np.array([1, 4]))
