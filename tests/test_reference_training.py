"""The specification of training: its steps, its symmetries, and steps beyond underflow."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from instances import exact_gradients, problem, relative, saturated, to_float

from mhfast import GradientDescent, NormalizedGradientDescent, reference


def test_scaled_gradients_are_the_gradients() -> None:
    for options in ({}, {"loss": "squared"}, {"loss": "linear"}, {"loss": "exponential"}):
        instance = problem()
        _, gW, gU = reference.value_and_grad(**instance, **options)
        scaled = reference.scaled_gradients(**instance, **options)
        for gradient, name in ((gW, "W"), (gU, "U")):
            rebuilt = np.exp(scaled[name].log)[:, None, None] * scaled[name].mantissa
            assert relative(rebuilt, gradient) < 1e-13  # one more exponential each way


def test_scaled_gradients_do_not_underflow() -> None:
    instance = saturated(900)
    # Margins grow along, so that the loss derivative underflows too.
    outputs = reference.outputs(**{name: instance[name] for name in ("X", "W", "U", "query")})
    instance |= {"U": 5000 * instance["U"], "y": np.sign(outputs)}
    assert not np.array(reference.value_and_grad(**instance)[1]).any()
    scaled = reference.scaled_gradients(**instance)["W"]
    gaps = -np.log(reference.attention(instance["X"], instance["W"] / 900, instance["query"]))
    cancelled = int(900 * gaps.max() / math.log(10))
    gW, _ = exact_gradients(**instance, digits=cancelled + 40)
    for h, log in enumerate(scaled.log):
        assert log < -2000
        with mpmath.workdps(40):
            exact = to_float(gW[h] / mpmath.exp(mpmath.mpf(float(log))))
        # Logits and margins of up to about 1e5 in the exponent, each off by a few rounding errors.
        assert relative(scaled.mantissa[h], exact) < 2.3e-16 * 40 * 1e5


def test_identical_heads_act_as_one() -> None:
    instance = problem() | {"W": np.zeros((7, 5, 5)), "U": np.zeros((7, 3, 5))}
    W, U, _ = reference.train(**instance, steps=1, optimizer=GradientDescent(lr=0.5))
    assert not W.any()
    assert U.any()
    W, U, _ = reference.train(**instance, steps=20, optimizer=GradientDescent(lr=0.5))
    assert W.any()
    assert (W[0] == W).all()
    assert (U[0] == U).all()
    outputs = reference.outputs(instance["X"], W, U)
    single = math.sqrt(7) * reference.outputs(instance["X"], W[:1], U[:1])
    np.testing.assert_allclose(outputs, single, rtol=1e-12)  # after 20 steps of rounding


def test_training_is_the_written_recursion() -> None:
    instance = problem()
    optimizer = GradientDescent(lr=0.3, schedule=[1.0, 0.5, 2.0], l2=0.1, clip=0.4)
    W, U, history = reference.train(**instance, steps=3, optimizer=optimizer)
    w, u = instance["W"], instance["U"]
    clipped = 0
    for k, factor in enumerate([1.0, 0.5, 2.0]):
        value, gW, gU = reference.value_and_grad(instance["X"], instance["y"], w, u)
        assert math.isclose(history["loss"][k], value, rel_tol=1e-13)
        assert math.isclose(
            history["grad_norm"][k],
            math.hypot(np.linalg.norm(gW), np.linalg.norm(gU)),
            rel_tol=1e-13,
        )
        gW, gU = gW + 0.1 * w, gU + 0.1 * u
        length = math.hypot(np.linalg.norm(gW), np.linalg.norm(gU))
        clipped += length > 0.4
        shrink = min(1.0, 0.4 / length)
        w, u = w - 0.3 * factor * shrink * gW, u - 0.3 * factor * shrink * gU
    assert clipped > 0
    assert relative(W, w) < 1e-14
    assert relative(U, u) < 1e-14
    margins = instance["y"] * reference.outputs(instance["X"], W, U)
    assert history["margin"][-1] == margins.min()
    assert history["accuracy"][-1] == pytest.approx((margins > 0).mean(), rel=1e-15)
    moved = math.hypot(np.linalg.norm(W - instance["W"]), np.linalg.norm(U - instance["U"]))
    assert history["distance"][-1] == pytest.approx(moved, rel=1e-13)
    assert history["distance"][0] == 0.0
    assert history["param_norm"][-1] == pytest.approx(
        math.hypot(np.linalg.norm(W), np.linalg.norm(U)), rel=1e-13
    )


def test_normalized_steps_have_the_length_of_the_step_size() -> None:
    instance = problem()
    _, gW, gU = reference.value_and_grad(**instance)
    everything = math.hypot(np.linalg.norm(gW), np.linalg.norm(gU))
    norms: dict[str, tuple[Any, Any]] = {
        "tensor": (np.linalg.norm(gW), np.linalg.norm(gU)),
        "head": tuple(np.linalg.norm(g, axis=(1, 2), keepdims=True) for g in (gW, gU)),
        "all": (everything, everything),
    }
    for by, (norm_W, norm_U) in norms.items():
        for eps, clip in ((0.0, None), (0.02, None), (0.02, 0.1 * everything)):
            optimizer = NormalizedGradientDescent(0.25, eps, by, clip=clip)
            W, U, _ = reference.train(**instance, steps=1, optimizer=optimizer)
            slack = eps if clip is None else eps * everything / clip
            # One exponential and one norm more than the formula.
            assert relative(instance["W"] - W, 0.25 * gW / (norm_W + slack)) < 1e-12
            assert relative(instance["U"] - U, 0.25 * gU / (norm_U + slack)) < 1e-12


def test_normalized_decay() -> None:
    instance = problem()
    _, gW, gU = reference.value_and_grad(**instance)
    optimizer = NormalizedGradientDescent(0.25, l2=3.0)
    W, U, _ = reference.train(**instance, steps=1, optimizer=optimizer)
    for new, gradient, name in ((W, gW, "W"), (U, gU, "U")):
        decayed = gradient + 3.0 * instance[name]
        step = 0.25 * decayed / np.linalg.norm(decayed)
        assert relative(instance[name] - new, step) < 1e-12


def test_zero_gradients_make_no_step() -> None:
    instance = problem() | {"U": np.zeros((7, 3, 5))}
    optimizer = NormalizedGradientDescent(0.25)
    W, U, history = reference.train(**instance, steps=1, optimizer=optimizer)
    assert (instance["W"] == W).all()
    assert np.linalg.norm(U) == pytest.approx(0.25, rel=1e-13)
    W, U, history = reference.train(**instance, steps=4, optimizer=optimizer, wrt=("W",))
    assert (instance["W"] == W).all()
    assert not U.any()
    assert not history["grad_norm"].any()


def test_token_order_does_not_matter() -> None:
    instance = problem(seed=8, n=6, T=8, d=10, H=1, q=1) | {"W": np.zeros((1, 10, 10))}
    ends = []
    for tokens in (np.arange(8), np.arange(8)[::-1]):
        W, _, history = reference.train(
            **(instance | {"X": instance["X"][:, tokens]}),
            steps=500,
            optimizer=NormalizedGradientDescent(0.1),
            query=instance["X"][:, :1],
            wrt=("W",),
        )
        ends.append(W)
        assert history["grad_norm"][-1] < 1e-50  # deep in saturation
    assert relative(ends[0], ends[1]) < 1e-12  # the promise; measured below 1e-14


def test_normalized_descent_goes_on_where_gradients_underflow() -> None:
    instance = saturated(900)
    query = instance.pop("query")
    W, _, history = reference.train(
        **instance,
        steps=3,
        optimizer=NormalizedGradientDescent(0.1, by="head"),
        query=query,
        wrt=("W",),
    )
    assert not history["grad_norm"].any()
    # Three steps of length .1 for each of three heads, all in about the same direction.
    np.testing.assert_allclose(np.linalg.norm(W - instance["W"], axis=(1, 2)), 0.3, rtol=1e-6)
