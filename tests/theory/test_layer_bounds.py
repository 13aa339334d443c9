"""Layers in the theory: bounds on random instances, the tangent kernel, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import theory_instances as instances

import mhfast as mh
from mhfast import theory
from mhfast.theory.inputs import spread

ROUNDING = 1 + 1e-9  # of eigenvalues found to 1e-10
LOSSES = ("squared", "logistic", "cross_entropy")


def random_instances(count: int) -> Iterator[tuple[mh.Layer, mh.Dataset, str]]:
    """Odd sizes, layers and tokens small and large, every kind of query, weights, all losses."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        n, d = (int(rng.integers(1, 6)) for _ in range(2))
        T, p = int(rng.integers(2, 8)), int(rng.integers(2, 5))
        H = int(2 ** rng.integers(0, 4))
        X = rng.standard_normal((n, T, d)) * 10 ** rng.uniform(-1, 0.5) / math.sqrt(d)
        query, external, q = instances.query_side(rng, seed % 3, n, T, d)
        W, V = rng.standard_normal((H, d, d)), rng.standard_normal((H, d, p))
        size = 10 ** rng.uniform(-2, 0.5)
        scale = 1.0 if seed % 2 else float(rng.uniform(-2, 2))
        layer = mh.Layer(size * W / d, size * V, query=query, scale=scale)
        loss = LOSSES[seed // 3 % 3]
        if loss == "cross_entropy":
            y: Any = rng.integers(0, p, (n, q))
        elif loss == "logistic":
            y = np.where(rng.random((n, q, p)) < 0.5, -1.0, 1.0)
        else:
            y = size * rng.standard_normal((n, q, p))
        weight = rng.uniform(0.1, 1.0, n) if seed % 5 == 0 else None
        yield layer, mh.Dataset(X, y, query=external, weight=weight), loss


def second_derivative(layer: mh.Layer, X: Any, query: Any, tangent: mh.Gradients) -> Any:
    """D²F along a direction, for one sample, by central differences."""
    h = 1e-4
    data = mh.Dataset(X, np.zeros((1, 1, 1)), query=query)
    ahead, here, back = (
        dataclasses.replace(layer, W=layer.W + s * tangent.W, V=layer.V + s * tangent.V)(data)
        for s in (h, 0.0, -h)
    )
    return (ahead - 2 * here + back) / h**2, (ahead - back) / (2 * h)


@pytest.mark.parametrize("count", [45, pytest.param(200, marks=pytest.mark.slow)])
def test_no_inequality_is_violated_and_each_can_be(count: int) -> None:
    ratios: dict[str, list[list[float]]] = {loss: [] for loss in LOSSES}
    of_outputs = []
    for seed, (layer, data, loss) in enumerate(random_instances(count)):
        bounds = theory.layer_bounds(layer, data)
        value, gradient = mh.value_and_grad(layer, data, loss=loss)
        ends = theory.hessian_extremes(layer, data, loss=loss)
        ratios[loss].append(
            [
                mh.norm(gradient) / bounds.gradient(value, loss),
                ends.smallest / bounds.smallest_eigenvalue(value, loss),
                ends.largest / bounds.largest_eigenvalue(value, loss),
            ]
        )
        rng = np.random.default_rng([seed, 1])
        W, V = rng.standard_normal(layer.W.shape), rng.standard_normal(layer.V.shape)
        size = math.sqrt(np.sum(W**2) + np.sum(V**2))
        tangent = mh.Gradients(W / size, V=V / size)
        query = None if data.query is None else data.query[:1]
        bend, slope = second_derivative(layer, data.X[:1], query, tangent)
        out = np.linalg.norm(layer(data), axis=(1, 2)).max()
        # The error of central differences with h = 1e-4, of second and of first derivatives.
        assert np.linalg.norm(bend) <= bounds.curvature * (1 + 1e-3) + 1e-6 * bounds.output
        assert np.linalg.norm(slope) <= bounds.jacobian * (1 + 1e-6)
        of_outputs.append(out / bounds.output)
    assert max(of_outputs) <= ROUNDING
    assert max(of_outputs) > 0.3
    for loss, found in ratios.items():
        worst = np.max(found, axis=0)
        assert (worst <= ROUNDING).all(), (loss, worst)
        # Not by far: they would fail with constants a few dozen times smaller.
        assert (worst >= 1 / 40).all(), (loss, worst)


def test_bounds_are_the_formulas() -> None:
    rng = np.random.default_rng(0)
    X, Z = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 4, 5))
    layer = mh.Layer(
        rng.standard_normal((7, 5, 5)), rng.standard_normal((7, 5, 6)), query=Z, scale=-0.5
    )
    bounds = theory.layer_bounds(layer, X, within=0.25)
    Rx, Rz = np.linalg.norm(X, axis=2).max(), np.linalg.norm(Z, axis=2).max()
    apart = max(np.linalg.norm(x[s] - x[t]) for x in X for s in range(3) for t in range(3))
    v = np.linalg.norm(layer.V, ord=2, axis=(1, 2)) + 0.25
    j = math.sqrt(np.sum(Rx**2 + (0.5 * Rz * apart**2 * v / 4) ** 2))
    w = 0.5 * Rz * apart * v.max()
    c = 0.5 * Rz * apart**2 / 8 * (w / 2 + math.sqrt(w**2 / 4 + 4))
    # The same few products and roots.
    assert bounds.jacobian == pytest.approx(2 * j, rel=1e-13)
    assert bounds.curvature == pytest.approx(2 * c, rel=1e-13)
    assert bounds.output == pytest.approx(2 * Rx * v.sum(), rel=1e-13)
    expected = {
        "squared": (2 * 0.3 * 2 * j, 2 * 0.3 * 2 * c, 2 * (2 * j) ** 2),
        "logistic": (0.09 * 2 * j, 0.09 * 2 * c, (2 * j) ** 2 / 4),
        "cross_entropy": (math.sqrt(2) * 0.09 * j, math.sqrt(2) * 0.09 * c, j**2 / 2),
    }
    for loss, (gradient, below, convex) in expected.items():
        assert bounds.gradient(0.09, loss) == pytest.approx(gradient, rel=1e-13)
        assert bounds.smallest_eigenvalue(0.09, loss) == pytest.approx(-below, rel=1e-13)
        assert bounds.largest_eigenvalue(0.09, loss) == pytest.approx(convex + below, rel=1e-13)


def test_padding_weights_and_runs() -> None:
    rng = np.random.default_rng(3)
    layer = mh.Layer.gaussian(2, 5, 4, std=0.5, seed=0)
    X = rng.standard_normal((3, 6, 5))
    y = rng.standard_normal((3, 6, 4))
    want = theory.layer_bounds(layer, X[:2, :4])
    padded = X.copy()
    padded[:, 4:] = np.nan
    padded[2] = np.inf
    given = mh.Dataset(padded, y, lengths=np.array([4, 4, 4]), weight=np.array([1.0, 2.0, 0.0]))
    got = theory.layer_bounds(layer, given)
    assert (got.token_norm, got.spread) == (want.token_norm, want.spread)
    other = mh.Layer.gaussian(2, 5, 4, std=1.5, seed=1)
    both = theory.layer_bounds(mh.stack([layer, other]), X)
    assert both.values.shape == (2, 2)
    assert both.values[1] == pytest.approx(theory.layer_bounds(other, X).values)


@pytest.mark.parametrize("query", [None, -1, "external", "causal", "lengths"])
def test_kernel_of_a_layer_is_that_of_its_gradients(query: Any) -> None:
    rng = np.random.default_rng(5)
    n, T, d, p, H = 3, 4, 5, 2, 3
    X = rng.standard_normal((n, T, d))
    y = np.zeros((n, T, p))
    external = None
    if query == "external":
        external = rng.standard_normal((n, 2, d))
    layer = mh.Layer(
        rng.standard_normal((H, d, d)) / d, rng.standard_normal((H, d, p)),
        query=-1 if query == -1 else None, causal=query == "causal", scale=1.3,
    )  # fmt: skip
    data = mh.Dataset(X, y, query=external, lengths=[4, 2, 3] if query == "lengths" else None)
    shape = layer(data).shape
    for names in (None, "W", ("V",)):
        rows = []
        for at in np.ndindex(*shape):
            cotangent = np.zeros(shape)
            cotangent[at] = 1.0
            g = mh.backward(layer, data, cotangent=cotangent, wrt=names)
            parts = [x.ravel() for x in (g.W, g.V) if x is not None]
            rows.append(np.concatenate(parts))
        J = np.array(rows)
        want = (J @ J.T).reshape(*shape, *shape)
        got = theory.ntk(layer, data, wrt=names)
        assert got.shape == (*shape, *shape)
        # Sums of some hundred products of numbers of order one.
        assert np.abs(got - want).max() < 1e-12 * np.abs(want).max()
        part = theory.ntk(layer, data.subset(np.array([2, 0])), data, wrt=names)
        assert np.abs(part - want[[2, 0]]).max() < 1e-12 * np.abs(want).max()


@pytest.mark.parametrize("identities", ["", "W", "V"])
def test_the_kernel_of_a_layer_does_not_depend_on_its_blocks(
    identities: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    W, V = rng.standard_normal((4, 5, 5)) / 3, rng.standard_normal((4, 5, 2))
    layer = mh.Layer(None if "W" in identities else W, None if "V" in identities else V)
    X = rng.standard_normal((3, 6, 5))
    whole = theory.ntk(layer, X)
    if "W" in identities:  # every head has the gradient A X by its V
        P = layer.attention(X)[:, 0] @ X
        expected = 4 * np.einsum("ite,jse,or->itojsr", P, P, np.eye(2))
        np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-13 * whole.max())
    monkeypatch.setattr("mhfast.theory.layer_kernel.BLOCK", 500)  # one or two heads
    np.testing.assert_allclose(theory.ntk(layer, X), whole, rtol=0, atol=1e-13 * whole.max())


def test_the_kernel_of_a_layer_in_float32_and_far_from_one() -> None:
    rng = np.random.default_rng(6)
    W, V, X = (rng.standard_normal(s) for s in ((3, 5, 5), (3, 5, 2), (4, 6, 5)))
    exact = theory.ntk(mh.Layer(W, V), X, wrt="W")
    W, V, X = (a.astype(np.float32) for a in (W, V, X))
    single = theory.ntk(mh.Layer(W, V), X, wrt="W")
    assert single.dtype == np.float32
    # Logits of size ten, rounded to 6e-8, and sums of a hundred products.
    assert np.abs(single - exact).max() < 2e-5 * np.abs(exact).max()
    # V² X⁴ is out of range, V² X⁶ is not; powers of two change no digit.
    far = mh.Layer(np.ldexp(W, 50), np.ldexp(V, 115))
    found = theory.ntk(far, np.ldexp(X, -25), wrt="W")
    assert np.abs(np.ldexp(found, -80) - single).max() < 1e-6 * np.abs(single).max()
    # Of V it is A X twice: X² is in range, X⁴ is not.
    found = theory.ntk(mh.Layer(np.ldexp(W, 90), V), np.ldexp(X, -45), wrt="V")
    near = theory.ntk(mh.Layer(W, V), X, wrt="V")
    # Numbers in units are added up by NumPy, others by the core: sums of six rounded products.
    assert np.abs(np.ldexp(found, 90) - near).max() < 1e-6 * np.abs(near).max()


def test_bounds_of_float32_are_computed_in_float64() -> None:
    rng = np.random.default_rng(6)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 5), (3, 5, 2), (4, 6, 5))]
    found, double = (
        theory.layer_bounds(mh.Layer(*of_layer), X).gradient(1.0, "squared")
        for *of_layer, X in (arrays, [np.float64(a) for a in arrays])
    )
    assert found == double


def test_the_kernel_of_a_layer_in_saturation() -> None:
    """Two tokens whose logits differ by a gap: M[o] is (x_0 - x_1) c_o / (2 + 2 cosh gap)."""
    rng = np.random.default_rng(5)
    X = rng.standard_normal((2, 2, 5))
    X[:, :, 0] = 1
    X[:, :, 1] = [1, 0]
    W = np.zeros((1, 5, 5))
    W[0, 0, 1] = 200.0
    V = rng.standard_normal((1, 5, 3))
    apart = X[:, 0] - X[:, 1]
    slopes = apart @ V[0] / (2 + 2 * np.cosh(200.0))
    features = np.einsum("io,ia,ib->ioab", slopes, X[:, 1], apart)
    exact = np.einsum("ioab,jrab->iojr", features, features)
    found = theory.ntk(mh.Layer(W, V, query=-1), X, wrt="W")[:, 0, :, :, 0]
    # exp and a few products; the textbook formula has no digit right here.
    np.testing.assert_allclose(found, exact, rtol=1e-11)


def test_what_layers_do_not_have_is_refused_with_the_reason() -> None:
    layer = mh.Layer.gaussian(2, 5, 4, std=0.5, seed=0)
    X, y = np.ones((3, 6, 5)), np.ones(3)
    step = {"lr": 1.0, "steps": 3}
    targets = mh.Dataset(X, np.zeros((3, 6, 4)))
    run = mh.train(layer, targets, steps=2, optimizer=mh.GradientDescent(0.1), loss="squared")
    calls = [
        lambda: theory.curvature_bounds(layer, X),
        lambda: theory.ntk_margin(layer, X, y),
        lambda: theory.good_initialization(layer, X, y),
        lambda: theory.realizability(layer, X, y, epsilon=0.1),
        lambda: theory.training_bound(layer, X, y, comparator=layer, **step),
        lambda: theory.stability_bound(layer, X, y, comparator=layer, **step),
        lambda: theory.generalization_bound(layer, X, y, comparator=layer, **step),
        lambda: theory.per_head_bound(layer, X, y, comparator=layer, **step),
        lambda: theory.leave_one_out(layer, X, y, **step),
        lambda: theory.needed_heads(mh.Dataset(X, y), 10, start=layer),
        lambda: theory.best_bound(mh.Dataset(X, y), 10, start=layer),
        lambda: theory.certify(run, targets),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"expected a Classifier, got Layer: .*layer_bounds"):
            call()


def test_wrong_use() -> None:
    layer = mh.Layer.gaussian(2, 5, 4, std=0.5, seed=0)
    X = np.ones((3, 6, 5))
    classifier = mh.Classifier.zeros(2, 6, 5)
    with pytest.raises(TypeError, match="model: expected a Layer, got Classifier"):
        theory.layer_bounds(classifier, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="within: expected a number of at least 0"):
        theory.layer_bounds(layer, X, within=-1.0)
    with pytest.raises(TypeError, match="X: expected dtype float64"):
        theory.layer_bounds(layer, X.astype(np.float32))
    with pytest.raises(ValueError, match="loss: expected one of squared, logistic, cross_entropy"):
        theory.layer_bounds(layer, X).gradient(1.0, "hinge")
    with pytest.raises(TypeError, match=r"W: expected an array .* got None, an identity"):
        theory.layer_bounds(layer.replace(W=None), X)
    with pytest.raises(TypeError, match=r"W: expected an array .* got LowRank"):
        theory.ntk(layer.replace(W=mh.LowRank(np.ones((2, 5, 3)))), X)
    prompted = mh.Layer.gaussian(2, 5, 4, std=0.5, seed=0, prompt_rows=2)
    with pytest.raises(TypeError, match="prompt: expected None"):
        theory.layer_bounds(prompted, X)
    with pytest.raises(ValueError, match="wrt: expected names from W, V, got 'U'"):
        theory.ntk(layer, X, wrt="U")


def test_the_spread_of_padded_samples_leaves_the_padding_out() -> None:
    rng = np.random.default_rng(0)
    X = 100.0 + rng.standard_normal((3, 5, 4))
    lengths = np.array([5, 2, 3])
    data = mh.Dataset(X, np.ones(3), lengths=lengths)
    distances = [
        np.linalg.norm(x[:k, None] - x[None, :k], axis=-1).max()
        for x, k in zip(X, lengths, strict=True)
    ]
    assert spread(data) == pytest.approx(max(distances), rel=1e-13)
