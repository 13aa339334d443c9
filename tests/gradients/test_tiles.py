"""Gradients by U alone of long sequences, whose readouts come from A X."""

from typing import Any

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

# Sums of up to 300 terms in another order than the reference's.
TOLERANCE = 1e-12


def difference(a: Any, b: Any) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize(("T", "d"), [(37, 5), (90, 24), (300, 33)])
@pytest.mark.parametrize("W", ["dense", "low rank", "identity", "softmax1"])
@pytest.mark.parametrize("rows", ["all", "causal", "lengths", "query"])
def test_gradients_by_the_readout_follow_the_reference(
    rows: str, W: str, T: int, d: int, isa: str, use_isa: Any, use_plan: Any
) -> None:
    n, H, rank = 3, 2, 4
    q = 19 if rows == "query" else T
    rng = np.random.default_rng(T)
    given: Any = None if W == "identity" else rng.standard_normal((H, d, d)) / d
    if W == "low rank":
        given = mh.LowRank(*(rng.standard_normal((2, H, d, rank)) / d**0.5))
    model = mh.Classifier(
        given, rng.standard_normal((H, q, d)), scale=0.7, causal=rows == "causal",
        attention="softmax1" if W == "softmax1" else "softmax",
    )  # fmt: skip
    X, y = rng.standard_normal((n, T, d)), np.array([1.0, -1.0, 1.0])
    rest: dict[str, Any] = {}
    if rows == "lengths":
        rest["lengths"] = np.array([T, 1, T // 2])
    if rows == "query":
        rest["query"] = rng.standard_normal((n, q, d))
    use_isa(isa)
    use_plan("tiles")
    value, g = mh.value_and_grad(model, X, y, wrt="U", **rest)
    expected, by_name = mh.reference.value_and_grad(model, X, y, wrt="U", **rest)
    assert abs(value - expected) < TOLERANCE * abs(expected)
    assert difference(g.U, by_name["U"]) < TOLERANCE
    c = rng.standard_normal(n)
    found = mh.backward(model, X, c, wrt="U", **rest)
    by_name = mh.reference.backward(model, X, c, wrt="U", **rest)
    assert difference(found.U, by_name["U"]) < TOLERANCE


@pytest.mark.parametrize("isa", _core.available_isas())
def test_samples_that_are_not_finite_say_nothing_about_others(
    isa: str, use_isa: Any, use_plan: Any
) -> None:
    n, T, d, H = 3, 70, 9, 2
    rng = np.random.default_rng(0)
    model = mh.Classifier(None, rng.standard_normal((H, T, d)))
    X, c = rng.standard_normal((n, T, d)), np.array([0.7, 0.0, -0.2])
    use_isa(isa)
    use_plan("tiles")
    expected = mh.backward(model, X, c, wrt="U").U
    X[1, 4] = np.nan
    np.testing.assert_array_equal(mh.backward(model, X, c, wrt="U").U, expected)
    c[1] = 1
    assert np.isnan(mh.backward(model, X, c, wrt="U").U).all()
