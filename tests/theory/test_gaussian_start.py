"""What is said of Gaussian starts holds as often as it is said to, and is what the formulas say."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mhfast as mh
from mhfast import theory


def short_tokens(norm: float = 0.01, *, n: int = 12) -> mh.Dataset:
    return mh.data.tokenized_mixture(n, 10, 7, relevant_fraction=0.5, norm=norm, seed=0)


def sample() -> mh.Dataset:
    """Two tokens, (3, 0) and (1, 2): the mean is (2, 1), and they are √8 apart."""
    return mh.Dataset(np.array([[[3.0, 0.0], [1.0, 2.0]]]), [-1.0])


def test_properties_by_hand() -> None:
    s, delta, H = 0.05, 0.2, 700
    found = theory.gaussian_start(sample(), H, std=s, delta=delta, scale=-0.8)
    # v = -sqrt(2) (1, 1) ⊗ (2, 1) / sqrt(10): m = sqrt(2) sqrt(10), tokens give 6 and 4.
    m, r = math.sqrt(20), 2 * 2 * math.sqrt(2) / math.sqrt(10)
    moved = 0.8**2 * s**2 * 2 * 9 * 8 * r / 16
    log = math.log(3 / delta)
    assert found.margin == pytest.approx(m - moved - r * math.sqrt(log / (2 * H)), rel=1e-9)
    assert found.output == pytest.approx(s * math.sqrt(2) * 3 * math.sqrt(2 * log), rel=1e-12)
    u = s * (2 + math.sqrt(2 * math.log(3 * H / delta)))
    assert found.readout == pytest.approx(u, rel=1e-12)
    assert (found.heads, found.std, found.delta) == (H, s, delta)
    # The last token alone asks: one row, of norm sqrt(5), and half of v.
    last = theory.gaussian_start(sample(), H, std=s, delta=delta, query=-1)
    r = math.sqrt(2) * 2 / math.sqrt(5)
    moved = s**2 * 2 * 5 * 8 * r / 16
    margin = math.sqrt(10) - moved - r * math.sqrt(log / (2 * H))
    assert last.margin == pytest.approx(margin, rel=1e-9)
    assert last.output == pytest.approx(found.output / math.sqrt(2), rel=1e-12)


def of_direction(start: mh.Classifier, data: mh.Dataset) -> float:
    """The margin of the direction that the statement is about."""
    zero = mh.Classifier.zeros(1, data.tokens, data.dim)
    v = theory.ntk_margin(zero, data).direction.U[0]
    means = (start.attention(data) @ data.X[:, None]).mean(axis=1)
    return float((data.y * (means * v).sum(axis=(1, 2))).min())


@pytest.mark.parametrize(("heads", "std"), [(5, 0.02), (40, 0.2), (40, 1.0), (3000, 0.5)])
def test_bounds_fail_no_more_often_than_they_may(heads: int, std: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2, 3, 4)) + np.array([2.0, -2.0])[:, None, None]
    data = mh.Dataset(X, [1.0, -1.0])
    draws, delta = 200 if heads < 1000 else 20, 0.5
    said = theory.gaussian_start(data, heads, std=std, delta=delta)
    failed = 0
    outputs, readouts, margins = [], [], []
    for seed in range(draws):
        start = mh.Classifier.gaussian(heads, 3, 4, std=std, seed=seed)
        outputs.append(np.abs(start(data)).max())
        readouts.append(np.linalg.norm(start.U.reshape(heads, -1), axis=1).max())
        margins.append(of_direction(start, data))
        failed += (
            outputs[-1] > said.output or readouts[-1] > said.readout or margins[-1] < said.margin
        )
    assert failed <= delta * draws
    # They are no more than a few times what happens, for outputs and readouts.
    assert max(outputs) > said.output / 3
    assert max(readouts) > said.readout / 1.6
    # The direction is one of those whose margin γ is largest.
    assert theory.ntk_margin(start, data).margin >= margins[-1] * (1 - 1e-12)


def test_mean_attention_moves_no_further_than_stated() -> None:
    """40,000 heads: what is left of chance is small beside the second-order term."""
    rng = np.random.default_rng(1)
    data = mh.Dataset(rng.standard_normal((1, 3, 2)) + 1.0, [1.0])
    at_zero = theory.ntk_margin(mh.Classifier.zeros(1, 3, 2), data).margin
    shares = []
    for std in (0.05, 0.2, 0.5):
        said = theory.gaussian_start(data, 10**12, std=std, delta=0.5)
        start = mh.Classifier.gaussian(40_000, 3, 2, std=std, seed=0)
        moved = at_zero - of_direction(start, data)
        shares.append(abs(moved) / (at_zero - said.margin))
    assert max(shares) < 1.0
    assert max(shares) > 0.01


def test_bounds_of_padded_samples_leave_the_padding_out() -> None:
    rng = np.random.default_rng(2)
    X = rng.standard_normal((3, 4, 2)) + np.array([2.0, -2.0, 2.0])[:, None, None]
    y = [1.0, -1.0, 1.0]
    padded = np.concatenate([X, np.zeros((3, 2, 2))], axis=1)
    given = {"std": 0.1, "delta": 0.1, "query": 0}
    short = theory.gaussian_start(mh.Dataset(X, y), 50, **given)
    long = theory.gaussian_start(mh.Dataset(padded, y, lengths=[4, 4, 4]), 50, **given)
    for name in ("margin", "output", "readout"):
        assert getattr(long, name) == pytest.approx(getattr(short, name), rel=1e-9), name


@pytest.mark.parametrize("epsilon", [0.06, 0.15])
def test_a_run_with_as_many_heads_is_covered(epsilon: float) -> None:
    data, steps, std = short_tokens(), 300, 0.1
    found = theory.gaussian_needed_heads(data, steps, std=std, delta=0.01, epsilon=epsilon)
    H = int(found.heads)
    assert found.heads == H < 100
    assert found.training.bound < math.log(2)
    said = theory.gaussian_start(data, H, std=std, delta=0.01)
    assert (found.margin, found.output, found.readout) == (said.margin, said.output, said.readout)
    assert max(found.training_heads, found.realizability_heads) <= H
    for seed in range(3):
        start = mh.Classifier.gaussian(H, 10, 7, std=std, seed=seed)
        zero = mh.Classifier.zeros(1, 10, 7)
        v = theory.ntk_margin(zero, data).direction.U[0]
        s = found.distance / math.sqrt(2)
        comparator = start + mh.Gradients(
            W=np.zeros_like(start.W), U=np.broadcast_to(s / math.sqrt(H) * v, start.U.shape)
        )
        comparison = theory.compare(start, data, comparator=comparator)
        assert comparison.loss <= epsilon
        bound = comparison.training(found.lr * (1 - 1e-9), steps)
        assert bound.applies, bound
        step = mh.GradientDescent(found.lr * (1 - 1e-9))
        run = mh.train(start, data, steps=steps, optimizer=step, record="loss")
        assert run.history["loss"][1:].mean() <= bound.bound <= found.training.bound


def test_it_is_the_smallest_number_and_larger_ones_are_enough() -> None:
    data, std, delta = short_tokens(), 0.3, 0.05
    found = theory.gaussian_needed_heads(data, 50, std=std, delta=delta, epsilon=0.1)

    def condition(heads: int) -> float:
        """Required heads by the formulas: b3 in the ball for these bounds."""
        said = theory.gaussian_start(data, heads, std=std, delta=delta)
        if said.margin <= 0.0:
            return math.inf
        B = max(said.output, 7 / 128)
        D0 = math.sqrt(2) * (2 * B + math.log(10)) / said.margin
        R = float(np.linalg.norm(data.X, axis=2).max())
        b3 = math.sqrt(10) * R**3 * (2 * R**2 * (said.readout + 3 * D0) + 1)
        return max(64 / 7 * b3 * D0**2, b3 * D0**2 / (2 * B)) ** 2

    H = int(found.heads)
    assert condition(H) <= H * (1 + 1e-12)
    assert condition(H - 1) > (H - 1) * (1 - 1e-12)
    for more in (H + 1, 2 * H, 50 * H):
        assert condition(more) <= more


def test_errors() -> None:
    data = short_tokens()
    with pytest.raises(ValueError, match=r"std: expected a number above 0, got 0\.0"):
        theory.gaussian_start(data, 3, std=0.0, delta=0.1)
    for delta in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"delta: expected a probability in \(0, 1\)"):
            theory.gaussian_start(data, 3, std=0.1, delta=delta)
    with pytest.raises(ValueError, match="heads: expected an integer of at least 1, got 0"):
        theory.gaussian_start(data, 0, std=0.1, delta=0.1)
    with pytest.raises(ValueError, match="std: expected a number for which the margin is above 0"):
        theory.gaussian_needed_heads(short_tokens(1.0), 9, std=1.0, delta=0.1)
    with pytest.raises(ValueError, match=r"epsilon: expected a loss in \(0, 1\), got 2"):
        theory.gaussian_needed_heads(data, 9, std=0.1, delta=0.1, epsilon=2.0)
    weighted = mh.Dataset(data.X, data.y, weight=np.ones(12))
    with pytest.raises(ValueError, match="weight: expected None"):
        theory.gaussian_needed_heads(weighted, 9, std=0.1, delta=0.1)
    runs = mh.Dataset(np.stack([data.X, data.X]), data.y)
    with pytest.raises(ValueError, match="data: expected one data set"):
        theory.gaussian_start(runs, 3, std=0.1, delta=0.1)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((4, 3, 2))
    both = mh.Dataset(np.concatenate([X, X]), np.repeat([1.0, -1.0], 4))
    with pytest.raises(ValueError, match="expected tangent features that separate the data"):
        theory.gaussian_start(both, 3, std=0.1, delta=0.1)
