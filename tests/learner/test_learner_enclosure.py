"""The body around the key-query matrices: its geometry, and that it contains them."""

from dataclasses import replace

import numpy as np
import pytest
from learner_instances import data, true_facts

import mhfast as mh
from mhfast.learner import enclose
from mhfast.learner.enclosure import ACROSS, ALONG


def facts_of(heads, count=400, dim=5, error=0.05, blur=0.01):
    """Facts of a random layer with normal errors, and the layer."""
    layer = mh.Layer.gaussian(heads, dim, 4, std=0.4, seed=0)
    facts = true_facts(layer, count)
    errors = error * np.random.default_rng(2).standard_normal(count)
    # Exact facts say nothing along the hull: these are facts of other queries.
    X = facts.X + blur * np.random.default_rng(4).standard_normal(facts.X.shape)
    value = np.einsum("kf,fg,kg->k", X[:, 0], layer.W[0], X[:, 1] - X[:, 2])
    tolerance = np.full(count, error)
    return replace(facts, X=X, value=value + errors, tolerance=tolerance), layer


def weighted_square(facts, W):
    return float(np.sum(((facts.of(W) - facts.value) / facts.tolerance) ** 2))


def test_boundary_across_is_that_of_the_weighted_misfit():
    facts, _ = facts_of(1)
    body = enclose(facts, 1)
    k, K = len(body.radii), len(facts)
    left = weighted_square(facts, body.center)
    for direction, radius in zip(body.directions, body.radii, strict=True):
        W = body.center + radius * direction
        assert body.levels(W) == pytest.approx(1.0, rel=1e-9)
        # (1 / k) of the misfit beyond the least is ACROSS of what is left for each fact.
        beyond = (weighted_square(facts, W) - left) / k / (left / (K - k))
        assert beyond == pytest.approx(ACROSS, rel=1e-6)
        assert body.contains(body.center + 0.999 * radius * direction)
        assert not body.contains(body.center - 1.001 * radius * direction)
    assert body.length == 0.0
    assert body.width == pytest.approx(np.median(body.radii))


def test_ends_along_the_hull_are_errors_of_four_tolerances():
    facts, _ = facts_of(3)
    body = enclose(facts, 3)
    left = weighted_square(facts, body.center)
    for direction, radius in zip(body.directions[:2], body.radii[:2], strict=True):
        beyond = weighted_square(facts, body.center + radius * direction) - left
        assert np.sqrt(beyond / len(facts)) == pytest.approx(ALONG, rel=1e-6)
    assert body.length == max(body.radii[:2])
    flat = body.directions.reshape(len(body.radii), -1)
    assert np.allclose(flat @ flat.T, np.eye(len(flat)), atol=1e-12)


def test_the_flat_directions_are_those_of_the_hull():
    facts, layer = facts_of(3)
    flat = enclose(facts, 3).directions[:2].reshape(2, -1)
    apart = np.linalg.qr((layer.W[1:] - layer.W[0]).reshape(2, -1).T)[0]
    # The facts are blurred by one hundredth, which enters squared.
    assert np.linalg.svd(flat @ apart, compute_uv=False).min() > 0.99


def test_directions_that_facts_do_not_see_are_open():
    facts, layer = facts_of(3, blur=0.0)
    body = enclose(facts, 3)
    assert body.along == 0
    assert len(body.radii) == 25 - 2
    far = layer.W[0] + 1e3 * (layer.W[1] - layer.W[0])
    assert body.contains(np.array([*layer.W, far])).all()
    assert not body.contains(2.0 * layer.W).any()


def test_it_contains_the_heads_and_not_others():
    source = data(20_000, 2, 6, 2)
    W = source.truth["layer"].W
    result = mh.learn_layer(source, heads=2, refinement=False)
    body = enclose(result["second sculpting"].parts[1], 2)
    norm = np.linalg.norm(W) / np.sqrt(2)
    assert body.contains(W).all()
    assert body.width < 0.1 * norm
    rng = np.random.default_rng(1)
    others = rng.standard_normal((50, 6, 6))
    others *= norm / np.linalg.norm(others, axis=(1, 2), keepdims=True)
    assert not body.contains(others).any()
    assert not body.contains(W + 0.5 * others[:2]).any()
    assert not body.contains(np.zeros((6, 6)))


def test_wrong_use():
    facts, _ = facts_of(1)
    names = ("rows", "first", "second", "value", "tolerance")

    def first(count):
        return replace(facts, **{name: getattr(facts, name)[:count] for name in names})

    with pytest.raises(ValueError, match="facts: expected at least one fact"):
        enclose(first(0), 1)
    with pytest.raises(ValueError, match="facts: expected more than their rank 20, got 20"):
        enclose(first(20), 1)
    with pytest.raises(ValueError, match="heads: expected at most the rank"):
        enclose(facts, 26)
    with pytest.raises(ValueError, match=r"W: expected shape \(..., d, d\) with d = 5"):
        enclose(facts, 1).contains(np.zeros((4, 4)))
