"""Alignment of a learnt layer with the true one, and of hull directions with the true hull."""

import math

import numpy as np
import pytest

import mhfast as mh
from mhfast.learner.alignment import align, hull_cosine

HEADS, D, P = 4, 5, 3


def truth():
    return mh.Layer.gaussian(HEADS, D, P, std=1.0, seed=0)


def moved(layer, size, seed=1):
    rng = np.random.default_rng(seed)
    W, V = (size * rng.standard_normal(a.shape) for a in (layer.W, layer.V))
    return mh.Layer(layer.W + W, layer.V + V)


def chosen(layer, heads):
    return mh.Layer(layer.W[heads], layer.V[heads])


def test_a_layer_and_itself():
    result = align(truth(), truth())
    assert result.permutation.tolist() == [0, 1, 2, 3]
    assert result.error == 0.0
    assert result.merged == (HEADS, HEADS)
    assert not result.W_error.any()
    assert not result.V_error.any()


@pytest.mark.parametrize("order", [[2, 0, 3, 1], [3, 2, 1, 0], [1, 2, 3, 0]])
def test_permuted_heads(order):
    learnt = chosen(moved(truth(), 0.1), order)
    result = align(learnt, truth())
    assert result.permutation.tolist() == np.argsort(order).tolist()
    W, V = learnt.W[result.permutation], learnt.V[result.permutation]
    dW, dV = W - truth().W, V - truth().V
    norms = {"axis": (1, 2)}
    want_W = np.linalg.norm(dW, **norms) / np.linalg.norm(truth().W, **norms)
    want_V = np.linalg.norm(dV, **norms) / np.linalg.norm(truth().V, **norms)
    size = np.sqrt((truth().W ** 2).sum() + (truth().V ** 2).sum())
    want = np.sqrt((dW**2).sum() + (dV**2).sum()) / size
    # Sums of a hundred terms in another order.
    np.testing.assert_allclose(result.W_error, want_W, rtol=1e-13)
    np.testing.assert_allclose(result.V_error, want_V, rtol=1e-13)
    assert abs(result.error - want) < 1e-13 * want


def test_small_errors_keep_their_digits():
    layer = truth()
    W = layer.W.copy()
    W[1, 2, 3] += 2.0**-48
    result = align(mh.Layer(W, layer.V), layer)
    moved_by = W[1, 2, 3] - layer.W[1, 2, 3]
    # No digits are lost to squares of the layers themselves: one division and one root.
    assert abs(result.W_error[1] - moved_by / np.linalg.norm(layer.W[1])) < 1e-14 * moved_by
    assert np.count_nonzero(result.W_error) == 1


def test_pairs_weigh_each_matrix_by_its_size_in_the_truth():
    """V a million times smaller than W still tells heads apart, where their W are nearly alike."""
    layer = truth()
    W = layer.W[:1] + 1e-3 * layer.W
    true = mh.Layer(W, 1e-6 * layer.V)
    learnt = mh.Layer(W[[1, 0, 2, 3]], 1e-6 * layer.V)
    assert align(learnt, true).permutation.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("split", [(0.3, 0.7), (1.5, -0.5)])
def test_a_learnt_head_in_two(split):
    layer = truth()
    V = layer.V[[0, 1, 2, 2, 3]]
    V[2:4] *= np.array(split)[:, None, None]
    result = align(mh.Layer(layer.W[[0, 1, 2, 2, 3]], V), layer)
    larger = 2 + int(abs(split[1]) > abs(split[0]))
    assert result.permutation.tolist() == [0, 1, larger, 4]
    assert result.merged == (HEADS, HEADS)
    assert result.error < 1e-15  # rounding of the sum


def test_a_true_head_in_two():
    layer = truth()
    true = mh.Layer(layer.W[[0, 1, 1, 2, 3]], layer.V[[0, 1, 2, 2, 3]])
    summed = layer.V[[0, 1, 2, 3]]
    summed[1] += layer.V[2]
    learnt = mh.Layer(layer.W[[3, 2, 1, 0]], summed[::-1])
    result = align(learnt, true)
    assert result.merged == (HEADS, HEADS)
    assert result.error < 1e-15
    kept, other = (1, 2) if np.linalg.norm(layer.V[1]) > np.linalg.norm(layer.V[2]) else (2, 1)
    assert result.permutation[kept] == 2
    assert result.permutation[other] == -1
    assert np.isnan(result.W_error).nonzero()[0].tolist() == [other]
    assert np.isnan(result.V_error).nonzero()[0].tolist() == [other]
    assert result.permutation[[0, 3, 4]].tolist() == [3, 1, 0]


def test_heads_that_vanish():
    layer = truth()
    V = layer.V[[0, 1, 2, 3, 3]]
    V[1] = 0.0
    true = mh.Layer(np.concatenate([layer.W, 2 * layer.W[:1]]), V)
    result = align(chosen(true, [4, 0, 2, 3]), true)
    assert result.permutation.tolist() == [1, -1, 2, 3, 0]
    assert result.merged == (HEADS, HEADS)
    assert result.error == 0.0
    assert np.isnan(result.W_error).nonzero()[0].tolist() == [1]


def test_heads_that_cancel():
    layer = truth()
    learnt = mh.Layer(
        np.concatenate([layer.W, [np.eye(D), np.eye(D)]]),
        np.concatenate([layer.V, [np.ones((D, P)), -np.ones((D, P))]]),
    )
    result = align(learnt, layer)
    assert result.merged == (HEADS, HEADS)
    assert result.error == 0.0


def test_the_tolerance_of_merging():
    layer = truth()
    near = layer.W[:1] + 1e-4 * layer.W[1:2]
    learnt = mh.Layer(
        np.concatenate([layer.W, near]), np.concatenate([layer.V, 1e-4 * layer.V[:1]])
    )
    assert align(learnt, layer).merged == (HEADS + 1, HEADS)
    merged = align(learnt, layer, tolerance=1e-2)
    assert merged.merged == (HEADS, HEADS)
    assert 0.0 < merged.error < 1e-4


@pytest.mark.parametrize("heads", [[2, 0, 3], [1], [0, 1, 2, 3, 4]])
def test_other_numbers_of_heads(heads):
    layer = truth()
    larger = mh.Layer(
        np.concatenate([layer.W, np.eye(D)[None]]), np.concatenate([layer.V, np.ones((1, D, P))])
    )
    result = align(chosen(larger, heads), layer)
    assert result.error == math.inf
    assert result.merged == (len(heads), HEADS)
    want = [heads.index(h) if h in heads else -1 for h in range(HEADS)]
    assert result.permutation.tolist() == want
    assert np.isnan(result.V_error).tolist() == [h == -1 for h in want]
    assert np.nansum(result.V_error) == 0.0


def test_layers_that_are_zero():
    zero, layer = mh.Layer.zeros(2, D, P), truth()
    both = align(zero, mh.Layer.zeros(3, D, P))
    assert (both.error, both.merged, both.permutation.tolist()) == (0.0, (0, 0), [-1] * 3)
    assert align(zero, layer).error == align(layer, zero).error == math.inf
    assert align(zero, layer).permutation.tolist() == [-1] * HEADS


def test_a_head_of_zero_key_query_counts_absolutely():
    W, V = np.zeros((1, D, D)), np.ones((1, D, P))
    result = align(mh.Layer(W + 0.25, V), mh.Layer(W, V))
    assert abs(result.W_error[0] - 0.25 * D) < 1e-15 * D


def test_scale_dtype_and_factors_do_not_matter():
    rng = np.random.default_rng(2)
    Q, K = (rng.standard_normal((HEADS, D, 2)).astype(np.float32) for _ in range(2))
    V = rng.standard_normal((HEADS, D, P)).astype(np.float32)
    factored = mh.Layer(mh.LowRank(Q, K), V, scale=0.5)
    W = 0.5 * Q.astype(float) @ K.astype(float).transpose(0, 2, 1)
    assert align(factored, mh.Layer(W, V.astype(float))).error < 1e-6  # products in float32


def test_errors():
    layer = truth()
    with pytest.raises(TypeError, match="learnt: expected a Layer, got ndarray"):
        align(layer.W, layer)
    with pytest.raises(ValueError, match=r"truth: expected one run, .* got 2 runs"):
        align(layer, mh.stack([layer, layer]))
    with pytest.raises(ValueError, match=r"learnt.W: expected shape \(H, d, d\) = \(H, 5, 5\)"):
        align(mh.Layer.zeros(HEADS, D + 1, P), layer)
    with pytest.raises(ValueError, match=r"learnt.V: expected shape \(H, d, p\) = \(H, 5, 3\)"):
        align(mh.Layer.zeros(HEADS, D, P + 1), layer)
    with pytest.raises(ValueError, match="learnt: expected finite parameters"):
        align(mh.Layer(layer.W, layer.V * np.inf), layer)
    with pytest.raises(ValueError, match="tolerance: expected a number of at least 0"):
        align(layer, layer, tolerance=-1.0)


def units(*places):
    """Matrices (k, 3, 3) with a single one."""
    matrices = np.zeros((len(places), 3, 3))
    for k, place in enumerate(places):
        matrices[k].flat[place] = 1.0
    return matrices


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.2, math.pi / 2])
def test_hull_cosine_of_a_known_angle(angle):
    a, b, c = units(0, 4, 7)
    W = np.stack([c, c + 2 * a])
    direction = 3 * (math.cos(angle) * a + math.sin(angle) * b)
    # The cosine of a right angle is rounding itself.
    assert abs(hull_cosine(direction[None], W) - math.cos(angle)) < 1e-15


def test_hull_cosine_is_that_of_the_largest_angle():
    a, b, c, d = units(0, 4, 7, 2)
    W = np.stack([c, c + a, c + a + 5 * b])  # the hull is parallel to a and b
    tilted = math.cos(0.7) * b + math.sin(0.7) * d
    assert abs(hull_cosine(np.stack([a, tilted]), W) - math.cos(0.7)) < 1e-15
    assert abs(hull_cosine(np.stack([a - 3 * tilted, a]), W) - math.cos(0.7)) < 1e-15


def test_hull_cosine_of_any_basis_and_order_of_heads():
    rng = np.random.default_rng(3)
    W = rng.standard_normal((HEADS, D, D))
    D_span = W[:3] - W[3]
    mixed = np.tensordot(rng.standard_normal((3, 3)), D_span, 1)
    value = hull_cosine(mixed, W)
    assert 1 - 1e-14 < value <= 1.0  # cosines of small angles are good to rounding


def test_hull_cosine_of_float32_is_computed_in_float64():
    a, b, _, _ = units(0, 4, 7, 2)
    # Integers are the same numbers in both; 3 / 5 and 4 / 5 are not.
    one, other = (np.stack([0 * a, x]).astype(np.float32) for x in (3 * a + 4 * b, a))
    assert abs(hull_cosine(other[1:], one) - 0.6) < 1e-15
    assert abs(hull_cosine(one[1:], other) - 0.6) < 1e-15


def test_hull_cosine_of_other_dimensions():
    a, b, c, d = units(0, 4, 7, 2)
    W = np.stack([c, c + a, c + b])
    assert hull_cosine(a[None], W) == 0.0
    assert hull_cosine(np.stack([a, b, d]), W) == 0.0
    assert hull_cosine(np.stack([a, 2 * a]), W) == 0.0  # they span a line
    assert hull_cosine(np.stack([a, 2 * a]), np.stack([c, c + a, c])) == 1.0  # so does the hull
    assert hull_cosine(np.zeros((0, 3, 3)), W) == 0.0
    rng = np.random.default_rng(4)
    line = rng.standard_normal((2, 1, 1)) * rng.standard_normal((3, 3))
    assert hull_cosine(line, W) == 0.0  # up to rounding, a line


def test_hull_cosine_of_one_head():
    assert hull_cosine(np.zeros((0, 3, 3)), units(4)) == 1.0
    assert hull_cosine(units(1), units(4)) == 0.0


def test_errors_of_hull_cosine():
    with pytest.raises(ValueError, match=r"truth: expected shape \(H, d, d\)"):
        hull_cosine(units(0), np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match="truth: expected at least one head"):
        hull_cosine(units(0), np.zeros((0, 3, 3)))
    with pytest.raises(ValueError, match=r"directions: expected shape \(k, d, d\) = \(k, 3, 3\)"):
        hull_cosine(np.zeros((1, 4, 4)), units(0, 1))
    with pytest.raises(TypeError, match="truth: expected dtype float"):
        hull_cosine(units(0), np.zeros((2, 3, 3), np.int64))


def test_hull_cosine_does_not_depend_on_the_scale():
    W = np.random.default_rng(0).standard_normal((HEADS, D, D))
    other = np.random.default_rng(1).standard_normal((HEADS - 1, D, D))
    expected = hull_cosine(other, W)
    assert 0.0 < expected < 1.0
    assert abs(hull_cosine(other * 2.0**-60, W * 2.0**-60) - expected) < 1e-12
