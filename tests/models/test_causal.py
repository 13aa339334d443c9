"""Causal models over several tiles of query rows, each of which goes through the keys it sees."""

from __future__ import annotations

import numpy as np
import pytest
from instances import TOLERANCE, relative

import mhfast as mh

# Tiles have two registers of rows, at most 32; 70 rows are several, the last one with a rest.
n, T, d, H, p = 3, 70, 9, 2, 4
PLANS = {
    mh.Classifier: ("samples", "hybrid", "rows", "tiles"),
    mh.Layer: ("samples", "hybrid", "rows"),
}
EVERY_PLAN = [(kind, plan) for kind, plans in PLANS.items() for plan in plans]


def draw(kind, *, dtype=np.float64, **settings):
    rng = np.random.default_rng(2)
    W = rng.standard_normal((H, d, d)).astype(dtype) / d
    readout = rng.standard_normal((H, T, d) if kind is mh.Classifier else (H, d, p)).astype(dtype)
    model = kind(W, readout, **{"causal": True, **settings})
    y = rng.choice([-1.0, 1.0], (n,) if kind is mh.Classifier else (n, T, p)).astype(dtype)
    return model, rng.standard_normal((n, T, d)).astype(dtype), y


@pytest.mark.parametrize("lengths", [None, [70, 1, 37]])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("kind", "plan"), EVERY_PLAN)
def test_values_and_gradients(kind, plan, dtype, lengths, use_plan):
    model, X, y = draw(kind, dtype=dtype)
    lengths = None if lengths is None else np.array(lengths)
    chosen = model(X, lengths=lengths)
    use_plan(plan)
    np.testing.assert_array_equal(model(X, lengths=lengths), chosen)
    tolerance = TOLERANCE[np.dtype(dtype)]
    assert relative(chosen, mh.reference.outputs(model, X, lengths=lengths)) < tolerance
    value, g = mh.value_and_grad(model, X, y, lengths=lengths, num_threads=1)
    expected, want = mh.reference.value_and_grad(model, X, y, lengths=lengths)
    assert value == pytest.approx(expected, rel=tolerance)
    _, again = mh.value_and_grad(model, X, y, lengths=lengths, num_threads=3)
    for name in model.parameters:
        assert relative(getattr(g, name), want[name]) < tolerance, name
        np.testing.assert_array_equal(getattr(again, name), getattr(g, name))


def test_a_row_is_the_last_one_of_a_shorter_sample():
    model, X, _ = draw(mh.Layer)
    outputs = model(X)
    for t in (0, 7, 8, 31, 32, 33, 69):
        np.testing.assert_array_equal(model(X[:, : t + 1])[:, t], outputs[:, t])


@pytest.mark.parametrize("plan", PLANS[mh.Classifier])
def test_normalized_steps_in_saturation(plan, use_plan):
    """Gaps of the logits are above 745, where all weights but one of a row underflow."""
    model, X, y = draw(mh.Classifier, scale=1e4)
    rule = mh.NormalizedGradientDescent(0.5)
    want, _ = mh.reference.train(model, X, y, steps=3, optimizer=rule)
    use_plan(plan)
    run = mh.train(model, X, y, steps=3, optimizer=rule)
    # Logits near 1e4 have an error of 1e-12, which is that of a weight.
    for name in model.parameters:
        assert relative(getattr(run.model, name), getattr(want, name)) < 1e-10, name


@pytest.mark.verdict
@pytest.mark.parametrize("kind", PLANS)
def test_what_no_row_sees_is_predicted_to_cost_little(kind):
    sizes = (4, 1024, 64) if kind is mh.Classifier else (4, 64, 64)
    full = kind.zeros(*sizes)
    cycles = [
        mh.explain(model, (2, 1024, 64))["predicted_cycles"]
        for model in (full, full.replace(causal=True))
    ]
    best = [min(value for name, value in of.items() if name != "runs") for of in cycles]
    # Half of all pairs, those on the edges of tiles, and products with W and V, which are the same.
    assert 0.5 < best[1] / best[0] < 0.6  # 0.58 in the baseline, where products take longest
    if (
        kind is mh.Classifier
    ):  # where a sample is not cut into tiles, each row goes through all keys
        assert cycles[0]["rows"] == cycles[1]["rows"]
