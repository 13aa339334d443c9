"""Derivatives of saturated attention: against extended precision, and beyond underflow."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import mpmath
import numpy as np
import pytest
from instances import exact_gradients, problem, relative, to_float
from lists import targets

import mhfast as mh
from mhfast import reference
from mhfast.optimizers import MirrorDescent, NormalizedGradientDescent
from mhfast.reference import Model


class Saturated(NamedTuple):
    """Two samples, three heads, one external query row."""

    model: Model
    X: Any
    y: Any

    def exact(self, digits: int) -> dict[str, Any]:
        query = self.model.query
        gW, gU = exact_gradients(self.X, self.y, self.model.W, self.model.U, query, digits)
        return {"W": gW, "U": gU}


def saturated(gap: float) -> Saturated:
    """An instance in which the smallest logit gap of each head is `gap`."""
    instance = problem(seed=3, n=2, T=4, d=5, H=3, q=1)
    query = np.random.default_rng(4).standard_normal((2, 1, 5))
    model = Model(W=instance["W"], U=instance["U"], query=query)
    ordered = np.sort(np.log(reference.attention(model, instance["X"])), axis=-1)
    smallest = (ordered[..., -1] - ordered[..., -2]).min(axis=(0, 2))
    W = instance["W"] * (gap / smallest)[:, None, None]
    return Saturated(replace(model, W=W), instance["X"], instance["y"])


GAPS = [1, 5, 20, 40, 100, 300, 500, 700]


def tolerance(gap: float) -> float:
    # A logit of size `gap` is off by a few units in its last place, and so exp(-gap) by as many
    # relative units of gap · 2e-16; the constant counts d² + d + T rounded operations.
    return 2.3e-16 * 40 * max(gap, 1.0)


@pytest.mark.parametrize("gap", GAPS)
def test_gradients_are_right(gap: int) -> None:
    the = saturated(gap)
    exact = the.exact(digits=350)
    _, gradient = reference.value_and_grad(*the)
    for name in ("W", "U"):
        assert relative(gradient[name], to_float(exact[name])) < tolerance(gap)


@pytest.mark.parametrize("gap", GAPS)
def test_layers_and_factors_follow(gap: int) -> None:
    # A layer with cotangent G is the classifier with H^(-1/2) U_h = G V_hᵀ, sample by sample.
    model, X, _ = saturated(gap)
    rng = np.random.default_rng(0)
    V, G = rng.standard_normal((3, 5, 4)), rng.standard_normal((1, 1, 4))
    layer = Model(W=model.W, V=V, query=model.query[:1])
    classifier = Model(W=model.W, U=math.sqrt(3) * G[0] @ np.swapaxes(V, 1, 2))
    names = ("W", "X", "query")
    of_layer = reference.backward(layer, X[:1], G, wrt=names)
    expected = reference.backward(classifier, X[:1], [1.0], query=layer.query, wrt=names)
    for name in names:
        assert relative(of_layer[name], expected[name]) < tolerance(gap)
    prompt = replace(layer, prompt=layer.query[0], query=None)
    found = reference.backward(prompt, X[:1], G)
    assert (found["W"] == of_layer["W"]).all()
    assert (found["prompt"] == of_layer["query"][0]).all()
    square = rng.standard_normal((3, 5, 5))
    factored = replace(layer, W=None, Q=model.W @ square, K=np.linalg.inv(square).mT)
    found = reference.backward(factored, X[:1], G)
    # The factors make W up to a condition number of ten.
    assert relative(found["Q"], of_layer["W"] @ factored.K) < 100 * tolerance(gap)
    assert relative(found["K"], np.swapaxes(of_layer["W"], 1, 2) @ factored.Q) < 100 * tolerance(
        gap
    )


@pytest.mark.parametrize("gap", [5, 40, 300])
def test_hessian_is_right(gap: int) -> None:
    the = saturated(gap)
    rng = np.random.default_rng(1)
    tangent = {n: rng.standard_normal(a.shape) for n, a in the.model.parameters().items()}
    with mpmath.workdps(600):
        step = mpmath.mpf(10) ** -200
        sides = []
        for h in (step, -step):
            moved = {n: getattr(the.model, n) + h * tangent[n] for n in tangent}
            sides.append(the._replace(model=replace(the.model, **moved)).exact(digits=600))
        exact = {n: (sides[0][n] - sides[1][n]) / (2 * step) for n in tangent}
    product = reference.hvp(*the, tangent)
    for name, array in product.items():
        assert relative(array, to_float(exact[name])) < tolerance(gap)


def test_textbook_gradients_are_wrong() -> None:
    the = saturated(40)
    exact = to_float(the.exact(digits=60)["W"])
    assert relative(reference.textbook_value_and_grad(*the)[1]["W"], exact) > 0.1
    mild = the._replace(model=replace(the.model, W=the.model.W / 40))
    centred, textbook = (
        f(*mild)[1] for f in (reference.value_and_grad, reference.textbook_value_and_grad)
    )
    for name in ("W", "U"):
        # The same function, rounded differently.
        assert relative(centred[name], textbook[name]) < 1e-14


def test_repeated_tokens_keep_the_gradient() -> None:
    the = saturated(60)
    # Every token three times: the largest weight is shared, and centring must not see noise.
    repeated = the._replace(X=np.tile(the.X, (1, 3, 1)))
    exact = to_float(the.exact(digits=80)["W"])
    assert relative(reference.value_and_grad(*repeated)[1]["W"], exact) < 1e-12


def rebuilt(scaled: Any) -> Any:
    mantissa = scaled.mantissa
    return np.exp(scaled.log).reshape(-1, *(1,) * (mantissa.ndim - 1)) * mantissa


def test_scaled_gradients_are_the_gradients() -> None:
    rng = np.random.default_rng(2)
    X, prompt = rng.standard_normal((6, 3, 5)), rng.standard_normal((2, 5))
    Q, K = rng.standard_normal((2, 7, 5, 3)) / 2
    V, U = rng.standard_normal((7, 5, 4)), rng.standard_normal((7, 2, 5))
    weight = np.array([0.0, 1.0, 2.0, 0.5, 0.0, 3.0])
    for model in (Model(Q=Q, K=K, V=V, prompt=prompt), Model(Q=Q, U=U, prompt=prompt)):
        for loss in mh.Classifier.losses if model.V is None else mh.Layer.losses:
            if loss == "negative_log":  # of tokens and readouts above 0
                readout = {"U": np.abs(U)} if model.V is None else {"V": np.abs(V)}
                model, X = replace(model, **readout), np.abs(X)
            y = targets(loss, (6, 2, 4) if model.U is None else (6,), rng, outputs=4)
            if loss == "negative_log":
                y[2] = 0.0  # a sample of length 0, whose outputs are 0
            options = {"loss": loss, "weight": weight, "lengths": [3, 2, 0, 1, 3, 2]}
            _, gradient = reference.value_and_grad(model, X, y, **options)
            scaled = reference.scaled_gradients(model, X, y, **options)
            assert list(scaled) == list(gradient)
            for name, array in gradient.items():
                # One more exponential each way.
                found = rebuilt(scaled[name]).reshape(array.shape)
                assert relative(found, array) < 1e-13, (loss, name)


def test_scaled_gradients_do_not_underflow() -> None:
    the = saturated(900)
    # Margins grow along, so that the loss derivative underflows too.
    outputs = reference.outputs(the.model, the.X)
    the = Saturated(replace(the.model, U=5000 * the.model.U), the.X, np.sign(outputs))
    assert not reference.value_and_grad(*the)[1]["W"].any()
    scaled = reference.scaled_gradients(*the)["W"]
    mild = replace(the.model, W=the.model.W / 900)
    gaps = -np.log(reference.attention(mild, the.X))
    cancelled = int(900 * gaps.max() / math.log(10))
    exact = the.exact(digits=cancelled + 40)["W"]
    for h, log in enumerate(scaled.log):
        assert log < -2000
        with mpmath.workdps(40):
            expected = to_float(exact[h] / mpmath.exp(mpmath.mpf(float(log))))
        # Logits and margins of up to about 1e5 in the exponent, each off by a few rounding errors.
        assert relative(scaled.mantissa[h], expected) < 2.3e-16 * 40 * 1e5


def test_the_prompt_does_not_underflow() -> None:
    model, X, y = saturated(900)
    model = replace(model, prompt=model.query[0], query=None, U=None, V=model.U.mT)
    options = {"loss": "linear", "wrt": ("prompt",)}
    arguments = (model, X[:1], y[:1, None, None])
    assert not reference.value_and_grad(*arguments, **options)[1]["prompt"].any()
    scaled = reference.scaled_gradients(*arguments, **options)["prompt"]
    # Halving the scale halves the logarithm; here the gradient itself can still be formed.
    assert scaled.log[0] < -800
    half = replace(model, scale=0.5)
    found = reference.scaled_gradients(half, *arguments[1:], **options)["prompt"]
    direct = reference.value_and_grad(half, *arguments[1:], **options)[1]["prompt"]
    assert relative(rebuilt(found)[0], direct) < tolerance(450)


def test_order_of_tokens_does_not_matter_in_saturation() -> None:
    instance = problem(seed=2, n=6, T=8, d=10, H=1, q=1)
    query = instance["X"][:, :1]
    ends = []
    for order in (slice(None), slice(None, None, -1)):
        model, history = reference.train(
            Model(W=0 * instance["W"], U=instance["U"]),
            instance["X"][:, order],
            instance["y"],
            steps=500,
            optimizer=NormalizedGradientDescent(0.1),
            query=query,
            wrt="W",
        )
        ends.append(model.W)
        assert history["grad_norm"][-1] < 1e-50  # deep in saturation
    assert relative(ends[0], ends[1]) < 1e-12  # the promise; measured below 1e-14


@pytest.mark.parametrize(
    "optimizer",
    [
        NormalizedGradientDescent(0.1, by="head"),
        MirrorDescent(0.1, p=2.0, normalized=True, by="head"),
    ],
)
def test_normalized_steps_go_on_where_gradients_underflow(optimizer: Any) -> None:
    the = saturated(900)
    model, history = reference.train(*the, steps=3, optimizer=optimizer, wrt="W")
    assert not history["grad_norm"].any()
    # Three steps of length .1 for each of three heads, all in about the same direction.
    moved = np.linalg.norm(model.W - the.model.W, axis=(1, 2))
    np.testing.assert_allclose(moved, 0.3, rtol=1e-6)
