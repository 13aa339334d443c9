"""The NumPy specification against finite differences, torch, extended precision, closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from instances import exact_gradients, problem, relative, saturated, to_float

from mhfast import reference

LOSSES = ("logistic", "exponential", "linear", "squared")


def variants() -> list[Any]:
    rng = np.random.default_rng(5)
    external = rng.standard_normal((6, 4, 5))
    weight = np.array([1.0, 0.0, 2.5, 0.5, 3.0, 1.0])
    cases: list[Any] = [pytest.param(None, {"loss": loss}, id=loss) for loss in LOSSES]
    cases += [
        pytest.param(1, {"query": 0}, id="first token"),
        pytest.param(1, {"query": -1, "scale": 0.7}, id="last token, scaled"),
        pytest.param(4, {"query": external}, id="external query"),
        pytest.param(None, {"weight": weight}, id="weighted"),
    ]
    return cases


@pytest.mark.parametrize(("q", "options"), variants())
def test_gradients_match_finite_differences(q: int | None, options: dict[str, Any]) -> None:
    instance = problem(q=q)
    _, gW, gU = reference.value_and_grad(**instance, **options)
    rng = np.random.default_rng(1)
    for name, gradient in (("W", gW), ("U", gU)):
        direction = rng.standard_normal(gradient.shape)
        values = []
        for h in (1e-5, -1e-5):
            moved = instance | {name: instance[name] + h * direction}
            values.append(reference.value_and_grad(**moved, **options)[0])
        # Truncation h² and rounding 1e-16 / h both stay below 1e-10 of values of order one.
        assert math.isclose(
            (values[0] - values[1]) / 2e-5, (gradient * direction).sum(), rel_tol=1e-7, abs_tol=1e-9
        )


@pytest.mark.parametrize(("q", "options"), variants())
def test_gradients_match_torch(q: int | None, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    instance = problem(q=q)
    value, gW, gU = reference.value_and_grad(**instance, **options)
    X, y, W, U = (torch.tensor(instance[name]) for name in ("X", "y", "W", "U"))
    W.requires_grad_(), U.requires_grad_()
    query = options.get("query")
    Z = X if query is None else torch.tensor(reference.queries(instance["X"], query))
    A = torch.softmax(options.get("scale", 1.0) * (Z[:, None] @ W @ X[:, None].mT), dim=-1)
    phi = (U * (A @ X[:, None])).sum(dim=(1, 2, 3)) / math.sqrt(len(W))
    terms = {
        "logistic": torch.nn.functional.softplus(-y * phi),
        "exponential": torch.exp(-y * phi),
        "linear": -y * phi,
        "squared": (phi - y) ** 2,
    }[options.get("loss", "logistic")]
    weight = torch.tensor(options.get("weight", np.ones(len(y))))
    loss = (weight * terms).sum() / weight.sum()
    loss.backward()
    # Sums of about a hundred products of order one, rounded in another order.
    assert math.isclose(value, loss.item(), rel_tol=1e-13)
    assert relative(gW, W.grad.numpy()) < 1e-13
    assert relative(gU, U.grad.numpy()) < 1e-13


@pytest.mark.parametrize("gap", [1, 5, 20, 40, 100, 300, 500, 700])
def test_centred_gradients_are_right_in_saturation(gap: int) -> None:
    instance = saturated(gap)
    gW, gU = exact_gradients(**instance, digits=350)
    _, W, U = reference.value_and_grad(**instance)
    # A logit of size `gap` is off by a few units in its last place, and so exp(-gap) by as many
    # relative units of gap · 2e-16; the constant counts d² + d + T rounded operations.
    tolerance = 2.3e-16 * 40 * max(gap, 1)
    assert relative(W, to_float(gW)) < tolerance
    assert relative(U, to_float(gU)) < tolerance


def test_textbook_gradients_are_wrong_in_saturation() -> None:
    instance = saturated(40)
    exact = to_float(exact_gradients(**instance, digits=60)[0])
    assert relative(reference.textbook_value_and_grad(**instance)[1], exact) > 0.1
    mild = problem()
    for a, b in zip(
        reference.value_and_grad(**mild), reference.textbook_value_and_grad(**mild), strict=True
    ):
        assert relative(a, b) < 1e-14  # the same function, rounded differently


def test_repeated_tokens_keep_the_gradient_in_saturation() -> None:
    instance = saturated(60)
    # Every token three times: the largest weight is shared, and centring must not see noise.
    repeated = instance | {"X": np.tile(instance["X"], (1, 3, 1))}
    exact = to_float(exact_gradients(**instance, digits=80)[0])
    assert relative(reference.value_and_grad(**repeated)[1], exact) < 1e-12


def test_losses_at_large_margins() -> None:
    y = np.array([1.0, 1.0, -1.0, -1.0])
    phi = np.array([1e3, -1e3, 700.0, -700.0])
    value, slope, log_slope = reference.loss_terms(phi, y)
    assert value.tolist() == [0.0, 1000.0, 700.0, math.exp(-700.0)]
    assert slope.tolist() == [-0.0, -1.0, 1.0, math.exp(-700.0)]
    assert log_slope.tolist() == [-1000.0, 0.0, -math.exp(-700.0), -700.0]
    assert math.copysign(1.0, slope[0]) == -1.0  # the sign outlives the underflow


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_derivatives(loss: str) -> None:
    phi, y = np.array([-2.0, -0.3, 0.4, 3.0]), np.array([1.0, -1.0, -1.0, 1.0])
    _, slope, log_slope = reference.loss_terms(phi, y, loss)
    above, below = (reference.loss_terms(phi + h, y, loss)[0] for h in (1e-6, -1e-6))
    # Central differences: truncation 1e-12, rounding 1e-10.
    np.testing.assert_allclose((above - below) / 2e-6, slope, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(np.exp(log_slope), np.abs(slope), rtol=1e-14)


def test_unknown_loss_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="logistic, exponential, linear, squared, got 'hinge'"):
        reference.loss_terms(np.zeros(2), np.ones(2), "hinge")


def test_uniform_attention_at_zero_scores() -> None:
    instance = problem() | {"W": np.zeros((7, 5, 5))}
    X, U = instance["X"], instance["U"]
    assert (reference.attention(X, instance["W"]) == 1 / 3).all()
    expected = np.einsum("hqd,nd->n", U, X.mean(axis=1)) / math.sqrt(7)
    # Sums of 105 products.
    np.testing.assert_allclose(reference.outputs(X, instance["W"], U), expected, rtol=1e-13)


def test_two_tokens_give_the_sigmoid() -> None:
    x, w, u = np.array([[1.0, 2.0], [0.5, -1.0]]), np.array([[0.3, -0.2], [0.1, 0.4]]), [2.0, -1.0]
    z = x[1]
    gap = z @ w @ (x[0] - x[1])
    sigmoid = 1 / (1 + math.exp(-gap))
    slope = sigmoid * (1 - sigmoid) * (np.array(u) @ (x[0] - x[1]))
    _, gW, gU = reference.value_and_grad(x[None], [1.0], w[None], [[u]], query=-1, loss="linear")
    # Three products; only the order of rounding differs.
    np.testing.assert_allclose(gW[0], -slope * np.outer(z, x[0] - x[1]), rtol=1e-14)
    np.testing.assert_allclose(gU[0, 0], -(sigmoid * x[0] + (1 - sigmoid) * x[1]), rtol=1e-14)


def test_huge_logits_and_bad_samples() -> None:
    instance = problem()
    A = reference.attention(instance["X"], 1e8 * instance["W"])
    assert ((A == 0) | (A == 1)).all()
    assert (A.sum(axis=-1) == 1).all()
    X = instance["X"].copy()
    X[4, 1, 2] = np.nan
    with np.errstate(invalid="ignore"):
        phi = reference.outputs(X, instance["W"], instance["U"])
    clean = reference.outputs(instance["X"], instance["W"], instance["U"])
    assert np.isnan(phi[4])
    assert (np.delete(phi, 4) == np.delete(clean, 4)).all()


def test_symmetries() -> None:
    instance = problem()
    value, gW, gU = reference.value_and_grad(**instance)
    order, tokens, heads = [3, 5, 0, 1, 4, 2], [2, 0, 1], [6, 0, 5, 1, 4, 2, 3]
    permuted = {
        "X": instance["X"][order][:, tokens],
        "y": instance["y"][order],
        "W": instance["W"][heads],
        "U": instance["U"][heads][:, tokens],
    }
    other = reference.value_and_grad(**permuted)
    # The same sums in another order.
    assert math.isclose(other[0], value, rel_tol=1e-13)
    assert relative(other[1], gW[heads]) < 1e-13
    assert relative(other[2], gU[heads][:, tokens]) < 1e-13
    scaled = reference.value_and_grad(**(instance | {"W": 2.0 * instance["W"]}), scale=0.5)
    assert scaled[0] == value  # powers of two are exact
    assert (scaled[1] == 0.5 * gW).all()


def test_weights_count_samples() -> None:
    instance = problem()
    weighted = reference.value_and_grad(**instance, weight=[1, 0, 2, 1, 0, 3])
    rows = [0, 2, 2, 3, 5, 5, 5]
    repeated = reference.value_and_grad(
        **(instance | {"X": instance["X"][rows], "y": instance["y"][rows]})
    )
    for a, b in zip(weighted, repeated, strict=True):
        assert relative(a, b) < 1e-13  # the same sums in another order


def test_gradient_bound_of_self_attention() -> None:
    for seed in range(20):
        instance = problem(seed)
        value, gW, gU = reference.value_and_grad(**instance)
        radius = np.linalg.norm(instance["X"], axis=-1).max()
        u = np.linalg.norm(instance["U"], axis=(1, 2)).max()
        b1 = math.sqrt(3) * radius * (radius**2 * u + 1)
        assert math.hypot(np.linalg.norm(gW), np.linalg.norm(gU)) <= b1 * value
