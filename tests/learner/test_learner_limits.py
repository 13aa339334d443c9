"""Layers that certified rows say nothing about, or that tokens cannot see all of."""

import numpy as np
import pytest

import mhfast as mh
from mhfast.learner import align, as_examples, learning, restarts, visible_part
from mhfast.learner.surplus import Problem
from mhfast.learner.visible import visible_of

pytestmark = pytest.mark.verdict

D = 5


def signs(seed, n=1500):
    return np.random.default_rng(seed).choice([-1.0, 1.0], (n, 3, D))


def random_layer(seed, heads):
    rng = np.random.default_rng(seed)
    return 0.4 * rng.standard_normal((heads, D, D)), rng.standard_normal((heads, D, D))


def special(kind, seed):
    W, V = random_layer(seed, 3 if kind == "sum zero" else 2)
    if kind == "sum zero":
        V[2] = -V[0] - V[1]
    elif kind == "identity":
        V[:] = np.eye(D)
    else:
        V[1] = {"equal": 1.0, "double": 2.0}[kind] * V[0]
    return mh.Layer(W, V)


@pytest.mark.parametrize("kind", ["equal", "double", "identity", "sum zero"])
def test_values_that_certify_nothing_are_learnt_by_restarts(kind):
    layer, X = special(kind, 1), signs(1)
    result = mh.learn_layer(X, layer(X), layer.heads)
    assert result.learnt, result.verdict
    assert align(result.layer, layer).error < 1e-10


def test_heads_that_almost_agree_are_told_apart():
    """The condition is 1e-10: far above rounding, which is what exact outputs leave."""
    W, V = random_layer(0, 2)
    E = np.random.default_rng(5).standard_normal((D, D))
    W[1] = W[0] + 0.01 * np.linalg.norm(W[0]) * E / np.linalg.norm(E)
    layer, X = mh.Layer(W, V), signs(0)
    result = mh.learn_layer(X, layer(X), 2)
    assert result.learnt, result.verdict
    # Rounding of 1e-16 over the root of the condition.
    assert align(result.layer, layer).error < 1e-9


def test_the_budget_of_restarts():
    """40 steps of 10/3 P³ operations: 3e10 of them are 13 at P = 256, and at least 2 starts."""
    assert [restarts.starts_for(P) for P in (50, 256, 5000)] == [20, 13, 2]


def tokens_of(kind):
    rng = np.random.default_rng(3)
    if kind == "one-hot":
        return np.eye(D)[rng.integers(0, D, (1500, 3))]
    X = rng.standard_normal((1500, 3, D))
    if kind == "hyperplane":
        X[..., 0] = 1.0
    else:
        X[..., 4] = X[..., 3]
    return X


@pytest.mark.parametrize(
    ("kind", "unseen"),
    # Of each W a column, and one row of V2 - V1; in a subspace a row and a column of each W, and a
    # row of each V.
    [("one-hot", 2 * 5 + 4), ("hyperplane", 2 * 5 + 4), ("subspace", 2 * 9 + 2 * 4)],
)
def test_what_tokens_can_see_is_learnt(kind, unseen):
    rng = np.random.default_rng(4)
    layer = mh.Layer(rng.standard_normal((2, D, D)), rng.standard_normal((2, D, 4)))
    X = tokens_of(kind)
    seen = visible_part(layer, X)
    assert np.allclose(seen(X), layer(X), rtol=0.0, atol=1e-12)
    result = mh.learn_layer(X, layer(X), 2)
    assert result.learnt, result.verdict
    assert result.unseen == unseen
    assert f"without {unseen} numbers" in result.verdict
    assert align(result.layer, seen).error < 1e-10


def test_refinement_leaves_out_what_tokens_cannot_see():
    rng = np.random.default_rng(4)
    layer = mh.Layer(rng.standard_normal((2, D, D)), rng.standard_normal((2, D, 4)))
    examples = as_examples(tokens_of("hyperplane"), layer(tokens_of("hyperplane")))
    problem = Problem.of(examples, 2, 0, None, visible_of(examples))
    found = problem.refined(layer).layer  # whose start has it
    seen = visible_part(found, examples.X)
    np.testing.assert_allclose(found.W, seen.W, atol=1e-12)
    np.testing.assert_allclose(found.V, seen.V, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("heads", [2, None])
def test_of_equal_tokens_only_the_sum_of_values_exists(tokens, heads):
    layer = mh.Layer.gaussian(2, D, 4, std=1.0, seed=0)
    X = np.repeat(np.random.default_rng(0).standard_normal((200, 1, D)), tokens, axis=1)
    result = mh.learn_layer(X, layer(X), heads)
    assert result.learnt, result.verdict
    assert "only the sum of all V_h" in result.verdict
    assert ("fewer than the 2 requested" in result.verdict) == (heads == 2)
    assert not result.layer.W.any()
    assert np.allclose(result.layer.V, [layer.V.sum(axis=0)], rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("heads", [3, 4])
def test_the_number_of_heads_is_found_with_few_examples(heads, seed):
    """The spectrum proposes 1 to 3, for a step of 1.6 to 8."""
    source = mh.data.boolean_layer(600, 2, D, heads, seed=seed)
    result = mh.learn_layer(source)
    assert result.learnt, result.verdict
    assert (result.heads, result.tried) == (heads, tuple(range(1, heads + 1)))


def test_a_head_too_few_is_told():
    source = mh.data.boolean_layer(600, 2, D, 2, seed=0)
    result = mh.learn_layer(source, heads=1)
    (missing,) = [c for c in result.certificates if c.name == "no head missing"]
    assert not missing.holds
    assert missing.value < 1e-10


def test_of_two_heads_too_few_one_more_leaves_a_share():
    source = mh.data.boolean_layer(600, 2, D, 4, seed=0)
    result = mh.learn_layer(source, heads=1)
    value = {c.name: c.value for c in result.certificates}
    examples, _ = as_examples(source.X, source.y).split(learning._held_out(600), seed=0)
    problem = Problem.of(examples, 1, 0, None)
    more = restarts.restart(problem, 2, result.layer, most=learning.FEW_STARTS).refinement.residual
    assert value["no head missing"] == pytest.approx(more / value["training residual"], rel=0.01)


def test_errors_of_each_head_and_number():
    """By hand: the second head off by 3 in W and 4 in V."""
    W, V = random_layer(0, 2)
    dW, dV = np.zeros_like(W), np.zeros_like(V)
    dW[1, 0, 2], dV[1, 3, 1] = 3.0, -4.0
    found = align(mh.Layer(W + dW, V + dV), mh.Layer(W, V))
    size = np.hypot(np.linalg.norm(W[1]), np.linalg.norm(V[1]))
    assert np.allclose(found.head_error, [0.0, 5.0 / size])
    assert np.allclose(found.W_difference, dW)
    assert np.allclose(found.V_difference, dV)
