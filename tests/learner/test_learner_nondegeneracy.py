"""What `nondegeneracy` says of layers whose numbers are known."""

import numpy as np
import pytest

import mhfast as mh
from mhfast.learner import nondegeneracy

EXACT = 1e-12
"""Singular values of small matrices of order one, and their ratios."""

PHASES = [
    "crude sum",
    "sculpting",
    "refined sum",
    "second sculpting",
    "net",
    "values",
    "refinement",
]


def diagonal(*entries, rows=None):
    """A matrix with these numbers on its diagonal."""
    matrix = np.zeros((rows or len(entries), len(entries)))
    np.fill_diagonal(matrix, entries)
    return matrix


def layer():
    """Two heads, d = 3 and p = 2, of numbers that can be worked out by hand."""
    W = np.stack([diagonal(2.0, 2.0, 1.0), diagonal(0.0, 0.0, 4.0)])
    V = np.stack([diagonal(3.0, 1.0, rows=3), diagonal(1.0, -3.0, rows=3)])
    return mh.Layer(W, V)


def lacking(found):
    """The phases that lack something."""
    return [phase for phase in found.requirements if not found.supports(phase)]


def test_values_by_hand():
    found = nondegeneracy(layer())
    # ‖W‖² = 9 and 16, largest singular values 2 and 4.
    np.testing.assert_allclose(found.effective_rank, [2.25, 1.0], rtol=EXACT)
    # ⟨W_1, W_2⟩ = 4.
    np.testing.assert_allclose(found.coherence, [[1, 1 / 3], [1 / 3, 1]], rtol=EXACT)
    # Σ V = diag(4, -2), V_1 - V_2 = diag(2, 4).
    assert found.sum_condition == pytest.approx(0.5, rel=EXACT)
    np.testing.assert_allclose(found.difference_condition, [[0, 0.5], [0.5, 0]], rtol=EXACT)
    # ‖Σ V‖² = 20 = 10 + 10, as ⟨V_1, V_2⟩ = 0.
    assert found.sum_share == pytest.approx(1.0, rel=EXACT)
    assert found.value_independence == pytest.approx(1.0, rel=EXACT)
    # W_2 - W_1 = diag(-2, -2, 3) of norm √17; the line comes to within √(9 - 5²/17) of 0.
    assert found.hull_condition == pytest.approx(1.0, rel=EXACT)
    assert found.apart == pytest.approx(np.sqrt(17) / 4, rel=EXACT)
    assert found.hull_distance == pytest.approx(np.sqrt(9 - 25 / 17) / 4, rel=EXACT)
    assert list(found.requirements) == PHASES
    assert lacking(found) == []


def test_hull_of_three_heads():
    W = np.zeros((3, 2, 2))
    W[0, 0, 0], W[1, 0, 1], W[2, 1, 0] = 1.0, 1.0, 1.0
    found = nondegeneracy(mh.Layer(W, np.random.default_rng(0).standard_normal((3, 2, 4))))
    # Differences (-1, 1, 0) and (-1, 0, 1) have the squares of singular values 3 and 1.
    assert found.hull_condition == pytest.approx(1 / np.sqrt(3), rel=EXACT)
    assert found.hull_distance == pytest.approx(1 / np.sqrt(3), rel=EXACT)
    assert found.apart == pytest.approx(np.sqrt(2), rel=EXACT)
    np.testing.assert_allclose(found.coherence, np.eye(3), atol=EXACT)


@pytest.mark.parametrize(
    ("change", "name", "phases"),
    [
        # Every row is an average of tokens, and certifies what is wrong.
        (
            lambda W, V: (W, np.stack([V[0], 2 * V[0]])),
            "independence of values",
            ["sculpting", "refined sum", "second sculpting"],
        ),
        # There is no sum to begin with.
        (
            lambda W, V: (W, np.stack([V[0], -V[0]])),
            "share of the sum of values",
            ["crude sum", "sculpting", "refined sum", "second sculpting"],
        ),
        # Weights of one direction cannot be read from outputs.
        (
            lambda W, V: (W, np.stack([V[0], V[0] @ diagonal(1, 1e-5) - V[0]])),
            "condition of the sum of values",
            ["sculpting", "refined sum", "second sculpting"],
        ),
        # Rows in which heads differ leave nothing in one direction.
        (
            lambda W, V: (W, np.stack([V[0], V[0] + V[1] @ diagonal(1, 1e-5)])),
            "condition of differences of values",
            ["sculpting", "refined sum", "second sculpting"],
        ),
        # The point of the hull selects no token.
        (lambda W, V: (np.stack([W[0], -W[0]]), V), "hull distance", ["refined sum"]),
        # One head with the sum of both V.
        (
            lambda W, V: (np.stack([W[0], W[0]]), V),
            "key-query matrices apart",
            ["sculpting", "second sculpting", "net", "values", "refinement"],
        ),
    ],
)
def test_degenerate_layers_are_told(change, name, phases):
    given = layer()
    found = nondegeneracy(mh.Layer(*change(given.W, given.V)))
    assert lacking(found) == phases
    assert name in found.verdict
    assert "fails" in found.verdict
    kept = [phase for phase in PHASES if phase not in phases]
    assert found.verdict.startswith(f"conditions met for: {', '.join(kept)}")


def test_more_heads_than_a_hull_has_dimensions():
    rng = np.random.default_rng(0)
    found = nondegeneracy(mh.Layer(rng.standard_normal((6, 2, 2)), rng.standard_normal((6, 2, 9))))
    assert found.hull_condition == 0.0
    assert found.hull_distance < EXACT
    assert not found.supports("net")


def test_order_of_heads_scale_and_units_do_not_matter():
    given = mh.Layer.gaussian(3, 5, 4, std=0.6, seed=1)
    found = nondegeneracy(given)
    order = [2, 0, 1]
    moved = nondegeneracy(mh.Layer(4 * given.W[order], 0.25 * given.V[order], scale=0.5))
    np.testing.assert_allclose(moved.effective_rank, found.effective_rank[order], rtol=EXACT)
    np.testing.assert_allclose(
        moved.difference_condition, found.difference_condition[np.ix_(order, order)], rtol=1e-9
    )
    for name in ("hull_distance", "apart", "sum_condition", "sum_share", "value_independence"):
        assert getattr(moved, name) == pytest.approx(getattr(found, name), rel=1e-9)


@pytest.mark.parametrize("W", [np.zeros((1, 3, 3)), np.eye(3)[None]])
def test_one_head(W):
    found = nondegeneracy(mh.Layer(W, np.ones((1, 3, 2)) + np.eye(3, 2)))
    assert found.hull_condition == 1.0
    assert found.apart == np.inf
    assert found.sum_share == found.value_independence == pytest.approx(1.0)
    assert found.supports("sculpting")
    # W = 0 selects no token.
    assert found.supports("refined sum") == bool(W.any())
    assert str(found).startswith(found.verdict)


def test_zeros_are_degenerate_and_not_nan():
    found = nondegeneracy(mh.Layer(np.zeros((2, 3, 3)), np.zeros((2, 3, 2))))
    assert found.effective_rank.tolist() == [0.0, 0.0]
    assert found.sum_condition == found.sum_share == found.value_independence == 0.0
    assert lacking(found) == PHASES


def test_parity_layers_lack_independent_values():
    parity = mh.data.parity_layer(10, 6, 3, 1.0, seed=0).truth["layer"]
    found = nondegeneracy(parity)
    assert found.value_independence < EXACT
    assert not found.supports("sculpting")


def test_what_layers_learn_from_random_examples_can_count_on():
    for seed in range(20):
        drawn = mh.data.boolean_layer(1, 3, 12, 2, seed=seed).truth["layer"]
        assert lacking(nondegeneracy(drawn)) == []


def test_wrong_use():
    with pytest.raises(TypeError, match="layer: expected a Layer, got ndarray"):
        nondegeneracy(np.zeros((2, 3, 3)))
    with pytest.raises(ValueError, match="layer: expected one run"):
        nondegeneracy(mh.stack([layer(), layer()]))
    with pytest.raises(ValueError, match=r"phase: expected one of crude sum, .*, got 'first'"):
        nondegeneracy(layer()).supports("first")


def test_a_hull_of_as_many_heads_as_dimensions_is_not_degenerate():
    rng = np.random.default_rng(0)
    W = rng.standard_normal((5, 2, 2))  # H - 1 = d d differences
    report = nondegeneracy(mh.Layer(W, rng.standard_normal((5, 2, 3))))
    values = np.linalg.svd((W[1:] - W[0]).reshape(4, 4), compute_uv=False)
    np.testing.assert_allclose(report.hull_condition, values[-1] / values[0], rtol=EXACT)
