"""The number of heads that the training guarantee needs."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mhfast as mh
from mhfast import theory


def long_tokens(seed: int = 0, *, n: int = 12, norm: float = 40.0) -> mh.Dataset:
    """Tokens so long that attention separates with few heads."""
    return mh.data.tokenized_mixture(
        n, 4, 5, relevant_fraction=0.5, contexts=1, norm=norm, seed=seed
    )


def by_hand(
    margin: float, u: float, S: float, T: int, k: int, epsilon: float
) -> tuple[float, float, float, float]:
    """D0, b3, lr and H of the corollary for BΦ = 0, written out."""
    D0 = math.sqrt(2) * (7 / 64 + math.log(1 / epsilon)) / margin
    b3 = math.sqrt(T) * S**3 * (2 * S**2 * (u + 3 * D0) + 1)
    heads = math.ceil((64 / 7 * b3 * D0**2) ** 2)
    b1 = math.sqrt(T) * S * (S**2 * (u + 3 * D0) + 1)
    rho = b1**2 / 4 + b3 / math.sqrt(heads)
    return D0, b3, min(1 / rho, D0**2 / (k * epsilon), D0**2 / math.log(2)), heads


def test_mixture_by_hand() -> None:
    found = theory.mixture_needed_heads(50, 10, 300, relevant_fraction=0.2, norm=1, contexts=3)
    margin = 0.4472135955 + 0.0282842712  # γ_linear + γ_attention
    D0, b3, lr, heads = by_hand(margin, 0.2 * math.sqrt(10 / 8), 1.0, 10, 300, 1 / 300)
    assert found.margin == pytest.approx(margin, rel=1e-9)
    assert found.distance == pytest.approx(D0, rel=1e-9)
    assert found.b3 == pytest.approx(b3, rel=1e-9)
    assert found.lr == pytest.approx(lr, rel=1e-9)
    assert found.heads == pytest.approx(heads, rel=1e-8)
    assert found.training.bound == pytest.approx(5 / 3 / 300 + D0**2 / (lr * 300), rel=1e-9)
    assert found.training.applies
    assert found.generalization.applies
    assert f"needs H >= {heads:.2g}" in str(found)


def test_data_agree_with_the_closed_form() -> None:
    """Every context stands as often beside μ₊ as beside μ₋: the sample is the population."""
    frame = 2.0 * np.eye(4, 5)
    rows = [[label, 2 + j] for label in (0, 1) for j in (0, 1)]
    data = mh.Dataset(frame[np.array(rows)], np.repeat([-1.0, 1.0], 2))
    found = theory.needed_heads(data, 50, epsilon=0.1)
    closed = theory.mixture_needed_heads(
        4, 2, 50, relevant_fraction=0.5, norm=2, contexts=2, epsilon=0.1
    )
    assert found.readout == pytest.approx(closed.readout, rel=1e-12)
    assert found.output == 0.0
    assert found.margin >= closed.margin
    assert found.heads <= closed.heads
    D0, b3, lr, heads = by_hand(found.margin, 0.5, 2.0, 2, 50, 0.1)
    assert (found.distance, found.b3, found.lr) == pytest.approx((D0, b3, lr), rel=1e-9)
    assert found.heads == pytest.approx(heads, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.15, 0.06])
def test_a_run_with_as_many_heads_is_covered(epsilon: float) -> None:
    data = long_tokens()
    found = theory.needed_heads(data, 40, epsilon=epsilon)
    heads = 2 * math.ceil(found.heads / 2)
    assert heads < 60
    start = mh.Classifier.random_step(data, heads, seed=1, balanced=True)
    tangent = theory.ntk_margin(start, data)
    # Sums over other numbers of heads.
    assert tangent.margin == pytest.approx(found.margin, rel=1e-9)
    comparator = start + (found.distance / math.sqrt(2)) * tangent.direction
    comparison = theory.compare(start, data, comparator=comparator)
    assert comparison.loss <= epsilon
    assert comparison.bounds.b3 == pytest.approx(found.b3, rel=1e-9)
    lr = found.lr * (1 - 1e-9)
    bound = comparison.training(lr, 40)
    assert bound.applies, bound
    run = mh.train(start, data, steps=40, optimizer=mh.GradientDescent(lr), record="loss")
    assert run.history["loss"][1:].mean() <= bound.bound <= found.training.bound * (1 + 1e-8)
    few = mh.Classifier.random_step(data, heads - 4, seed=1, balanced=True)
    direction = theory.ntk_margin(few, data).direction
    short = theory.compare(few, data, comparator=few + (found.distance / math.sqrt(2)) * direction)
    assert not short.conditions(lr, 40)[0].met


def test_more_is_asked_for_more() -> None:
    def mixture(k: int, norm: float = 1.0, n: int = 50) -> theory.NeededHeads:
        return theory.mixture_needed_heads(n, 10, k, relevant_fraction=0.2, norm=norm, contexts=3)

    heads = [mixture(k).heads for k in (3, 30, 300, 3000)]
    assert heads == sorted(heads)
    assert heads[0] < heads[-1]
    assert mixture(300, norm=40.0).heads < mixture(300).heads
    assert mixture(300, n=100).generalization.bound == pytest.approx(
        mixture(300).generalization.bound / 2, rel=1e-12
    )


def test_outputs_at_the_start_cost_heads() -> None:
    data = long_tokens()
    start = mh.Classifier.random_step(data, 2, seed=0, balanced=True)
    uneven = mh.Classifier(start.W, start.U * np.array([1.0, 0.9])[:, None, None])
    ours, theirs = (theory.needed_heads(data, 50, start=s) for s in (start, uneven))
    assert ours.allowance == 7 / 128
    assert ours.realizability_heads == pytest.approx(ours.training_heads, rel=1e-9)
    assert theirs.allowance == theirs.output == np.abs(uneven(data)).max() > 1
    assert theirs.realizability_heads < theirs.training_heads == theirs.heads
    assert ours.heads < theirs.heads


def test_errors() -> None:
    data = long_tokens()
    with pytest.raises(ValueError, match=r"epsilon: expected a loss in \(0, 1\), got 1.5"):
        theory.needed_heads(data, 5, epsilon=1.5)
    with pytest.raises(ValueError, match=r"epsilon: expected a loss in .* for one step"):
        theory.needed_heads(data, 1)
    with pytest.raises(ValueError, match="steps: expected an integer of at least 1, got 0"):
        theory.needed_heads(data, 0, epsilon=0.1)
    with pytest.raises(ValueError, match="weight: expected None"):
        theory.needed_heads(mh.Dataset(data.X, data.y, weight=np.ones(12)), 5)
    runs = mh.Dataset(np.stack([data.X, data.X]), data.y)
    with pytest.raises(ValueError, match="data: expected one data set"):
        theory.needed_heads(runs, 5)
    both = mh.Dataset(np.concatenate([data.X, data.X]), np.concatenate([data.y, -data.y]))
    with pytest.raises(ValueError, match="expected tangent features that separate the data"):
        theory.needed_heads(both, 5)
    with pytest.raises(ValueError, match=r"got margin 2\.236e-80 at loss 0\.2"):
        theory.mixture_needed_heads(5, 10, 5, relevant_fraction=1e-80, norm=1, contexts=1)
