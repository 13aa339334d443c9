"""The specification of training: its rules written out, torch.optim, closed forms, symmetries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from instances import problem, relative

from mhfast import reference
from mhfast.optimizers import (
    Adam,
    GradientDescent,
    MirrorDescent,
    Momentum,
    NormalizedGradientDescent,
    PolyakStep,
)
from mhfast.reference import Model


def instance(**changes: Any) -> tuple[Model, Any, Any]:
    arrays = problem() | changes
    return Model(W=arrays["W"], U=arrays["U"]), arrays["X"], arrays["y"]


def layer(**fields: Any) -> tuple[Model, Any, Any]:
    """A layer with factors and a prompt, and classes for it."""
    rng = np.random.default_rng(3)
    Q, K = rng.standard_normal((2, 7, 5, 2)) / 2
    model = Model(
        Q=Q, K=K, V=rng.standard_normal((7, 5, 4)) / 2, prompt=rng.standard_normal((2, 5))
    )
    return replace(model, **fields), rng.standard_normal((6, 3, 5)), rng.integers(0, 4, (6, 2))


def length(*arrays: Any) -> float:
    return math.sqrt(sum((a**2).sum() for a in arrays))


def test_identical_heads_act_as_one() -> None:
    model, X, y = instance(W=np.zeros((7, 5, 5)), U=np.zeros((7, 3, 5)))
    end, _ = reference.train(model, X, y, steps=1, optimizer=GradientDescent(lr=0.5))
    assert not end.W.any()
    assert end.U.any()
    end, _ = reference.train(model, X, y, steps=20, optimizer=GradientDescent(lr=0.5))
    assert end.W.any()
    assert (end.W[0] == end.W).all()
    assert (end.U[0] == end.U).all()
    single = replace(end, W=end.W[:1], U=end.U[:1])
    # After 20 steps of rounding.
    expected = math.sqrt(7) * reference.outputs(single, X)
    np.testing.assert_allclose(reference.outputs(end, X), expected, rtol=1e-12)


def test_training_is_the_written_recursion() -> None:
    model, X, y = instance()
    optimizer = GradientDescent(lr=0.3, schedule=[1.0, 0.5, 2.0], l2=0.1, clip=0.4)
    end, history = reference.train(model, X, y, steps=3, optimizer=optimizer)
    w, u = model.W, model.U
    clipped = 0
    for k, factor in enumerate([1.0, 0.5, 2.0]):
        value, g = reference.value_and_grad(Model(W=w, U=u), X, y)
        assert math.isclose(history["loss"][k], value, rel_tol=1e-13)
        assert math.isclose(history["grad_norm"][k], length(g["W"], g["U"]), rel_tol=1e-13)
        gW, gU = g["W"] + 0.1 * w, g["U"] + 0.1 * u
        clipped += length(gW, gU) > 0.4
        shrink = min(1.0, 0.4 / length(gW, gU))
        w, u = w - 0.3 * factor * shrink * gW, u - 0.3 * factor * shrink * gU
    assert clipped > 0
    assert relative(end.W, w) < 1e-14
    assert relative(end.U, u) < 1e-14
    margins = y * reference.outputs(end, X)
    assert history["margin"][-1] == margins.min()
    assert history["accuracy"][-1] == pytest.approx((margins > 0).mean(), rel=1e-15)
    moved = length(end.W - model.W, end.U - model.U)
    assert history["distance"][-1] == pytest.approx(moved, rel=1e-13)
    assert history["distance"][0] == 0.0
    assert history["param_norm"][-1] == pytest.approx(length(end.W, end.U), rel=1e-13)


def test_accuracy_and_margin_of_a_layer() -> None:
    model, X, classes = layer()
    weight = np.array([[1.0, 0.0], [2.0, 1.0], [0.0, 0.0], [0.5, 3.0], [1.0, 1.0], [0.0, 2.0]])
    F = reference.outputs(model, X)
    options: dict[str, Any] = {"steps": 0, "optimizer": GradientDescent(1.0)}
    _, history = reference.train(model, X, classes, loss="cross_entropy", weight=weight, **options)
    right, margins = 0.0, []
    for i, t in zip(*np.nonzero(weight), strict=True):
        others = np.delete(F[i, t], classes[i, t])
        margins.append(F[i, t, classes[i, t]] - others.max())
        right += weight[i, t] * (F[i, t].argmax() == classes[i, t])
    assert 0 < right < weight.sum()
    assert math.isclose(history["accuracy"][0], right / weight.sum(), rel_tol=1e-14)
    assert history["margin"][0] == min(margins)
    y = np.sign(np.random.default_rng(0).standard_normal(F.shape))
    _, history = reference.train(model, X, y, loss="logistic", weight=weight, **options)
    expected = (weight[..., None] * (y * F > 0)).sum() / weight.sum() / 4
    assert math.isclose(history["accuracy"][0], expected, rel_tol=1e-14)
    assert history["margin"][0] == (y * F)[weight > 0].min()


def test_normalized_steps_have_the_length_of_the_step_size() -> None:
    model, X, y = instance()
    _, g = reference.value_and_grad(model, X, y)
    everything = length(g["W"], g["U"])
    norms: dict[str, dict[str, Any]] = {
        "tensor": {name: length(part) for name, part in g.items()},
        "head": {n: np.linalg.norm(part, axis=(1, 2), keepdims=True) for n, part in g.items()},
        "all": {"W": everything, "U": everything},
    }
    for by, of in norms.items():
        for eps, clip in ((0.0, math.inf), (0.02, math.inf), (0.02, 0.1 * everything)):
            optimizer = NormalizedGradientDescent(0.25, eps, by, clip=clip)
            end, _ = reference.train(model, X, y, steps=1, optimizer=optimizer)
            slack = eps * max(1.0, everything / clip)
            for name, part in g.items():
                step = getattr(model, name) - getattr(end, name)
                # One exponential and one norm more than the formula.
                assert relative(step, 0.25 * part / (of[name] + slack)) < 1e-12


def test_normalized_decay() -> None:
    model, X, classes = layer()
    options = {"loss": "cross_entropy"}
    _, g = reference.value_and_grad(model, X, classes, **options)
    optimizer = NormalizedGradientDescent(0.25, l2=3.0)
    end, _ = reference.train(model, X, classes, steps=1, optimizer=optimizer, **options)
    for name, theta in model.parameters().items():
        decayed = g[name] + 3.0 * theta
        assert relative(theta - getattr(end, name), 0.25 * decayed / length(decayed)) < 1e-12


def test_zero_gradients_make_no_step() -> None:
    model, X, y = instance(U=np.zeros((7, 3, 5)))
    optimizer = NormalizedGradientDescent(0.25)
    end, _ = reference.train(model, X, y, steps=1, optimizer=optimizer)
    assert (model.W == end.W).all()
    assert np.linalg.norm(end.U) == pytest.approx(0.25, rel=1e-13)
    for rule in (optimizer, MirrorDescent(0.25, 3.0, normalized=True), PolyakStep()):
        end, history = reference.train(model, X, y, steps=4, optimizer=rule, wrt=("W",))
        assert relative(end.W, model.W) < 1e-15  # mirror descent goes there and back
        assert not end.U.any()
        assert not history["grad_norm"].any()


def test_polyak_steps() -> None:
    model, X, y = instance()
    value, g = reference.value_and_grad(model, X, y)
    square = length(g["W"], g["U"]) ** 2
    own = (value - 0.1) / square
    rules = [
        (PolyakStep(target=0.1), 0.5 * own),
        (PolyakStep(target=0.1, factor=1.0, schedule=[0.25]), 0.25 * own),
        (PolyakStep(0.01, target=0.1), 0.01),
        (PolyakStep(target=value), 0.0),
    ]
    assert own > 0.02
    for rule, rate in rules:
        end, _ = reference.train(model, X, y, steps=1, optimizer=rule)
        # The square of a norm against a norm divided by twice.
        np.testing.assert_allclose(end.W, model.W - rate * g["W"], rtol=0, atol=1e-14)


def test_mirror_descent() -> None:
    model, X, y = instance()
    _, g = reference.value_and_grad(model, X, y)
    plain = reference.train(model, X, y, steps=3, optimizer=GradientDescent(0.2))[0]
    for normalized in (False, True):
        rule = MirrorDescent(0.2, 3.0, normalized=normalized)
        end, _ = reference.train(model, X, y, steps=1, optimizer=rule)
        for name, theta in model.parameters().items():
            part = g[name] / ((np.abs(g[name]) ** 1.5).sum() ** (2 / 3) if normalized else 1.0)
            s = theta * np.abs(theta) - 0.2 * part
            # One power of three halves in sums of a hundred, and a root.
            assert relative(getattr(end, name), np.sign(s) * np.sqrt(np.abs(s))) < 1e-13
    two = reference.train(model, X, y, steps=3, optimizer=MirrorDescent(0.2, 2.0))[0]
    assert relative(two.W, plain.W) < 1e-15
    # On a linear loss with fixed attention the gradient is constant: θ_k^(p-1) grows by -lr g.
    still = replace(model, W=np.zeros_like(model.W), U=np.zeros_like(model.U))
    rule = MirrorDescent(0.2, 1.5)
    end, _ = reference.train(still, X, y, steps=5, optimizer=rule, loss="linear", wrt="U")
    loss_derivative = reference.value_and_grad(still, X, y, loss="linear")[1]["U"]
    assert (
        relative(end.U, -np.sign(loss_derivative) * loss_derivative**2) < 1e-13
    )  # (5 · .2 g)^(1 / (p - 1))


@pytest.mark.peers
@pytest.mark.parametrize(
    ("optimizer", "torch_name", "options"),
    [
        (GradientDescent(0.1, l2=0.3), "SGD", {"weight_decay": 0.3}),
        (Momentum(0.1, 0.7), "SGD", {"momentum": 0.7}),
        (Momentum(0.1, 0.7, nesterov=True), "SGD", {"momentum": 0.7, "nesterov": True}),
        (Adam(0.1, 0.8, 0.95, 1e-3, l2=0.3), "Adam", {"weight_decay": 0.3}),
        (Adam(0.1, 0.8, 0.95, 1e-3, weight_decay=0.3), "AdamW", {"weight_decay": 0.3}),
    ],
)
@pytest.mark.parametrize("schedule", [None, (1.0, 0.5, 2.0, 0.25, 1.0)])
def test_rules_match_torch(optimizer: Any, torch_name: str, options: Any, schedule: Any) -> None:
    torch = pytest.importorskip("torch")
    model, X, classes = layer()
    optimizer = replace(optimizer, schedule=schedule)
    if torch_name.startswith("Adam"):
        options = options | {"betas": (0.8, 0.95), "eps": 1e-3}
    end, _ = reference.train(model, X, classes, steps=5, optimizer=optimizer, loss="cross_entropy")
    tensors = {n: torch.tensor(a) for n, a in model.parameters().items()}
    rule = getattr(torch.optim, torch_name)(list(tensors.values()), lr=0.1, **options)
    for k in range(5):
        rule.param_groups[0]["lr"] = 0.1 if schedule is None else 0.1 * schedule[k]
        moved = Model(**{name: tensor.numpy() for name, tensor in tensors.items()})
        gradient = reference.value_and_grad(moved, X, classes, loss="cross_entropy")[1]
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradient[name])
        rule.step()
    for name, tensor in tensors.items():
        assert relative(getattr(end, name), tensor.numpy()) < 1e-13  # five steps of rounding


def test_projections() -> None:
    model, X, classes = layer()
    options: dict[str, Any] = {"steps": 1, "loss": "cross_entropy", "wrt": ("K", "V", "prompt")}
    free, _ = reference.train(model, X, classes, optimizer=GradientDescent(0.2), **options)
    theta = {name: getattr(free, name) for name in ("K", "V", "prompt")}
    for by in ("tensor", "head", "all"):
        norms: dict[str, Any] = {name: length(a) for name, a in theta.items()}
        if by == "head":
            norms |= {n: np.linalg.norm(theta[n], axis=(1, 2), keepdims=True) for n in ("K", "V")}
        if by == "all":
            norms = dict.fromkeys(theta, length(*theta.values()))
        radius = 1.2 * float(np.mean(norms["K"]))
        for kind in ("ball", "sphere"):
            rule = GradientDescent(0.2, project=kind, radius=radius, project_by=by)
            end, _ = reference.train(model, X, classes, optimizer=rule, **options)
            assert (end.Q == model.Q).all()  # it is not trained
            for name, a in theta.items():
                scale = radius / norms[name]
                if kind == "ball":
                    scale = np.minimum(1.0, scale)
                # One more norm and one more product.
                assert relative(getattr(end, name), scale * a) < 1e-14
    zero = replace(model, V=np.zeros_like(model.V))
    rule = GradientDescent(0.0, project="sphere", radius=2.0)
    end, _ = reference.train(zero, X, classes, optimizer=rule, **options)
    assert not end.V.any()
    assert length(end.K) == pytest.approx(2.0, rel=1e-14)


def test_runs_are_single_trainings() -> None:
    model, X, classes = layer()
    many = replace(model, V=np.stack([model.V, -model.V]))
    options: dict[str, Any] = {"steps": 4, "loss": "cross_entropy", "wrt": ("Q", "prompt")}
    for rule, rate in ((Adam, 0.1), (NormalizedGradientDescent, 0.3)):
        ends, history = reference.train(many, X, classes, optimizer=rule([rate, 0.2]), **options)
        assert ends.Q.shape == (2, 7, 5, 2)
        assert history["loss"].shape == (2, 5)
        for r, lr in enumerate([rate, 0.2]):
            one = replace(model, V=many.V[r])
            end, single = reference.train(one, X, classes, optimizer=rule(lr), **options)
            assert (ends.Q[r] == end.Q).all()
            assert (ends.prompt[r] == end.prompt).all()
            assert all((history[name][r] == single[name]).all() for name in single)


def test_the_attributes_of_models_are_read() -> None:
    class LowRank:
        Q = np.ones((7, 5, 2), np.float32)
        K = None

    class Layer:
        W = LowRank()
        V = np.ones((7, 5, 4), np.float32)
        query = -1
        prompt = None
        scale = 0.5
        causal = True

    model = Model.of(Layer())
    assert list(model.parameters()) == ["Q", "V"]
    assert model.V.dtype == np.float64
    assert (model.dense() == 2.0).all()
    assert (model.query, model.scale, model.causal) == (-1, 0.5, True)
    assert Model.of(model) is model
