"""Gradients by tokens and query rows with rows or with samples as lanes, by the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from instances import TOLERANCE, case, relative

import mhfast as mh
from mhfast import _core

KINDS: dict[str, dict[str, Any]] = {
    "every token": {},
    "last token": {"query": -1},
    "of samples of other lengths": {"query": -1, "lengths": True},
    "a given query": {"query": "given"},
    "prompt": {"prompt": True},
    "low rank": {"factors": "low rank", "query": -1},
    "tied": {"factors": "tied", "scale": 0.7},
    "identity": {"identities": "W", "scale": 0.3},
    "lengths": {"lengths": True, "weight": "samples"},
    "causal": {"causal": True, "scale": 2.0},
    "sigmoid": {"attention": "sigmoid", "query": "given", "lengths": True},
}


@pytest.mark.parametrize("plan", ["rows", "samples"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", [mh.Classifier, mh.Layer])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_follow_the_reference(
    kind: str, model: Any, dtype: Any, plan: str, use_plan: Any
) -> None:
    loss = "squared" if model is mh.Layer else "logistic"
    given = case(model, loss=loss, dtype=dtype, **KINDS[kind])
    names = [name for name in given.names() if name in ("X", "query")]
    use_plan(plan)
    _, g = given.value_and_grad(wrt=names)
    _, expected = mh.reference.value_and_grad(
        given.model, given.X, given.y, wrt=names, **given.options
    )
    for name in names:
        assert relative(getattr(g, name), expected[name]) < TOLERANCE[np.dtype(dtype)]


@pytest.mark.parametrize("identities", ["", "V"])
def test_a_layer_with_identities_follows_the_reference(identities: str, use_plan: Any) -> None:
    given = case(mh.Layer, loss="squared", query="given", identities=identities)
    use_plan("samples")
    _, g = given.value_and_grad(wrt=("X", "query"))
    _, expected = mh.reference.value_and_grad(
        given.model, given.X, given.y, wrt=("X", "query"), **given.options
    )
    assert relative(g.X, expected["X"]) < 1e-12
    assert relative(g.query, expected["query"]) < 1e-12


@pytest.mark.parametrize(("T", "d", "H"), [(9, 40, 11), (16, 20, 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_more_heads_than_the_cache_holds_go_in_groups(
    kind: Any, causal: bool, T: int, d: int, H: int, use_plan: Any
) -> None:
    """Nine rows of eleven heads, in groups of which the last is smaller.

    And of four heads with sixteen rows two at a time: of four, keys would be 4 KiB apart in memory.
    """
    n, p = 19, 3
    rng = np.random.default_rng(0)
    arrays = {"W": rng.standard_normal((H, d, d)) / d}
    if kind is mh.Classifier:
        arrays["U"] = rng.standard_normal((H, T, d)) / d
    else:
        arrays["V"] = rng.standard_normal((H, d, p)) / d
    model = kind(**arrays, causal=causal)
    X = rng.standard_normal((n, T, d))
    cotangent = rng.standard_normal(model(X).shape)
    found = {}
    for plan in ("rows", "samples"):
        use_plan(plan)
        found[plan] = mh.backward(model, X, cotangent, wrt="X").X
    assert relative(found["samples"], found["rows"]) < 1e-13


def test_samples_without_derivatives_get_zeros_whatever_they_hold(use_plan: Any) -> None:
    n, T, d, H = 21, 4, 5, 3  # the last block has lanes without a sample
    rng = np.random.default_rng(0)
    model = mh.Classifier(rng.standard_normal((H, d, d)), rng.standard_normal((H, 1, d)), query=-1)
    X = rng.standard_normal((n, T, d))
    cotangent = rng.standard_normal(n)
    use_plan("samples")
    expected = mh.backward(model, X, cotangent, wrt="X").X
    cotangent[[2, 20]] = expected[[2, 20]] = 0
    X[2], X[20, 1, 3] = np.nan, np.inf
    np.testing.assert_array_equal(mh.backward(model, X, cotangent, wrt="X").X, expected)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("d", [1, 6, 17])
def test_every_instruction_set_follows_the_reference(
    isa: str, d: int, use_isa: Any, use_plan: Any
) -> None:
    n, T, H, p = 35, 4, 3, 2
    rng = np.random.default_rng(d)
    W, V = rng.standard_normal((H, d, d)) / d, rng.standard_normal((H, d, p))
    model = mh.Layer(W, V, query=-1)
    X, Y = rng.standard_normal((n, T, d)), rng.standard_normal((n, 1, p))
    use_isa(isa)
    use_plan("samples")
    _, g = mh.value_and_grad(model, X, Y, loss="squared", wrt="X")
    _, expected = mh.reference.value_and_grad(model, X, Y, loss="squared", wrt="X")
    assert relative(g.X, expected["X"]) < 1e-12


def test_every_number_of_threads_gives_the_same_inputs() -> None:
    n, T, d, H = 1000, 9, 20, 4
    rng = np.random.default_rng(0)
    model = mh.Classifier(
        rng.standard_normal((H, d, d)).astype("f"),
        rng.standard_normal((H, 1, d)).astype("f"),
        query=-1,
    )
    X, cotangent = rng.standard_normal((n, T, d)).astype("f"), rng.standard_normal(n).astype("f")
    one, *more = (
        mh.backward(model, X, cotangent, wrt="X", num_threads=threads).X for threads in (1, 2, 4)
    )
    for other in more:
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("plan", ["rows", "samples", "auto"])
@pytest.mark.parametrize(
    ("T", "query", "heads"), [(5, None, 3), (5, -1, 1), (5, -1, 3), (300, None, 2)]
)
@pytest.mark.parametrize("loss", ["logistic", "hinge"])
def test_outputs_of_a_classifier_are_found_on_the_way(loss, T, query, heads, plan, use_plan):
    """Without gradients by parameters there is no other pass; what is left out stays so."""
    use_plan(plan)
    n, d = 21, 4
    rng = np.random.default_rng(2)
    q = T if query is None else 1
    W, U = rng.standard_normal((heads, d, d)), rng.standard_normal((heads, q, d))
    model = mh.Classifier(W, 5 * U / q, query=query)
    X, weight = rng.standard_normal((n, T, d)), rng.uniform(0.5, 2.0, n)
    y = np.sign(rng.standard_normal(n))
    if loss == "hinge":  # some samples have a derivative of 0, all of which is
        y[:3] = np.sign(mh.reference.outputs(model, X))[:3]
        assert (y * mh.reference.outputs(model, X) > 1)[:3].any()
    weight[7] = 0
    want_value, want = mh.reference.value_and_grad(
        model, X, y, loss=loss, weight=weight, wrt=("X",)
    )
    X[7, 1, 2] = np.nan
    value, found = mh.value_and_grad(model, X, y, loss=loss, weight=weight, wrt="X")
    both_value, both = mh.value_and_grad(model, X, y, loss=loss, weight=weight, wrt=("U", "X"))
    # Sums of a few hundred terms.
    assert value == pytest.approx(want_value, rel=1e-12)
    assert both_value == pytest.approx(want_value, rel=1e-12)
    size = np.abs(want["X"]).max()
    assert np.abs(found.X - want["X"]).max() < 1e-12 * size
    assert np.abs(both.X - want["X"]).max() < 1e-12 * size
    untouched = ~want["X"].any(axis=(1, 2))
    assert untouched[7]
    assert not found.X[untouched].any()
    _, again = mh.value_and_grad(model, X, y, loss=loss, weight=weight, wrt="X", num_threads=3)
    np.testing.assert_array_equal(again.X, found.X)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("factors", ["dense", "low rank", "identity"])
@pytest.mark.parametrize(("p", "causal"), [(3, True), (7, False), (None, False)])
def test_outputs_of_a_layer_are_found_on_the_way(
    p: int | None, causal: bool, factors: str, isa: str, use_isa: Any, use_plan: Any
) -> None:
    """With rows as lanes; samples go several at a time, of which some are left out."""
    use_isa(isa)
    use_plan("rows")
    n, T, d, heads = 13, 5, 37, 3  # so many features that it pays
    rng = np.random.default_rng(2)
    W: Any = rng.standard_normal((heads, d, d)) / d
    if factors == "low rank":
        W = mh.LowRank(rng.standard_normal((heads, d, 2)), rng.standard_normal((heads, d, 2)))
    V = None if p is None else rng.standard_normal((heads, d, p))
    model = mh.Layer(None if factors == "identity" else W, V, causal=causal, scale=0.7)
    X, Y = rng.standard_normal((n, T, d)), rng.standard_normal((n, T, p or d))
    lengths = rng.integers(1, T + 1, n)
    weight = rng.uniform(0.5, 2.0, (n, T))
    weight[4, 1:] = weight[7] = 0
    given = {"weight": weight, "lengths": lengths}
    want_value, want = mh.reference.value_and_grad(model, X, Y, loss="squared", wrt=("X",), **given)
    X[7, 0, 2] = np.nan
    value, found = mh.value_and_grad(model, X, Y, loss="squared", wrt="X", **given)
    # Sums of a few hundred terms.
    assert value == pytest.approx(want_value, rel=1e-12)
    assert np.abs(found.X - want["X"]).max() < 1e-12 * np.abs(want["X"]).max()
    assert not found.X[7].any()
    _, again = mh.value_and_grad(model, X, Y, loss="squared", wrt="X", num_threads=3, **given)
    np.testing.assert_array_equal(again.X, found.X)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize(("T", "d"), [(3, 64), (3, 71), (20, 64), (300, 24)])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["classifier", "layer", "causal", "lengths", "query"])
def test_heads_of_identities_follow_the_reference(
    kind: str, scale: float, T: int, d: int, isa: str, use_isa: Any, use_plan: Any
) -> None:
    """Tokens are their own queries, D X the gradient by these; rows are whole vectors or not."""
    n, H, p = 5, 3, 2
    rng = np.random.default_rng(d)
    rows = 2 if kind == "query" else T
    X = rng.standard_normal((n, T, d)) / d**0.25
    rest: dict[str, Any] = {}
    if kind == "lengths":
        rest["lengths"] = rng.integers(1, T + 1, n)
    if kind == "query":
        rest["query"] = rng.standard_normal((n, rows, d)) / d**0.25
    model: Any
    if kind == "layer":
        model = mh.Layer(None, rng.standard_normal((H, d, p)), scale=scale)
        y, loss = rng.standard_normal((n, T, p)), "squared"
    else:
        U = rng.standard_normal((H, rows, d)) / d
        model = mh.Classifier(None, U, scale=scale, causal=kind == "causal")
        y, loss = np.where(rng.random(n) < 0.5, -1.0, 1.0), "logistic"
    wrt = ("X", "query") if kind == "query" else ("X",)
    use_isa(isa)
    use_plan("rows")
    names = (*wrt, *model.parameters)
    _, expected = mh.reference.value_and_grad(model, X, y, loss=loss, wrt=names, **rest)
    for chosen in (wrt, names):  # outputs are found on the way, or known
        _, g = mh.value_and_grad(model, X, y, loss=loss, wrt=chosen, **rest)
        for name in chosen:
            assert relative(getattr(g, name), expected[name]) < 1e-12, name
