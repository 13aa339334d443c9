"""The test of heads against facts: its value by hand, and its errors of both kinds."""

from dataclasses import replace

import numpy as np
import pytest
from learner_instances import data, true_facts

import mhfast as mh
from mhfast.learner import agreement

SIZE = (20_000, 2, 6, 2)


def layer(heads=3, dim=5, seed=0):
    return mh.Layer.gaussian(heads, dim, 4, std=0.4, seed=seed)


def spoilt(facts, size, seed=2):
    """The facts with normal errors of their values, of the size of the tolerance."""
    errors = size * np.random.default_rng(seed).standard_normal(len(facts))
    return replace(facts, value=facts.value + errors, tolerance=np.full(len(facts), size))


def first(facts, count):
    names = ("rows", "first", "second", "value", "tolerance")
    return replace(facts, **{name: getattr(facts, name)[:count] for name in names})


def errors(W, seed=3):
    found = np.random.default_rng(seed).standard_normal(W.shape)
    size = np.linalg.norm(W, axis=(1, 2), keepdims=True)
    return found * size / np.linalg.norm(found, axis=(1, 2), keepdims=True)


def design(facts):
    """The facts as rows (k, d²), by their definition."""
    T = facts.X.shape[1]
    rows = []
    for row, b, c in zip(facts.rows, facts.first, facts.second, strict=True):
        X = facts.X[row // T]
        rows.append(np.outer(X[row % T], X[b] - X[c]).ravel())
    return np.array(rows)


def test_ratio_is_the_statistic_of_a_regression():
    given = layer()
    facts = spoilt(true_facts(given, 300), 0.05)
    # Exact facts say nothing along the hull: these are facts of other tokens.
    X = np.random.default_rng(4).standard_normal(facts.X.shape)
    facts = replace(facts, X=X, tolerance=np.linspace(0.01, 0.1, 300))
    W = given.W + 0.1 * errors(given.W)
    A = design(facts) / facts.tolerance[:, None]
    y = facts.value / facts.tolerance
    left = float(np.linalg.lstsq(A, y, rcond=None)[1][0])
    flat = W.reshape(3, -1)
    moves = A @ (flat[1:] - flat[0]).T
    of_hull = float(np.linalg.lstsq(moves, y - A @ flat[0], rcond=None)[1][0])
    want = (of_hull - left) / (25 - 2) / (left / (300 - 25))
    assert agreement(facts, W).ratio == pytest.approx(want, rel=1e-8)


def test_independent_errors_give_the_f_distribution():
    given = layer()
    true = true_facts(given, 300)
    ratios = [agreement(spoilt(true, 0.05, seed), given.W).ratio for seed in range(30)]
    # F with 23 and 275 degrees of freedom: mean 1.01, standard deviation .31, of 30 draws .06.
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.25)
    assert max(ratios) < 3.0


def test_resolution_is_the_error_at_which_twice_the_limit_is_expected():
    given = layer()
    facts = spoilt(true_facts(given, 300), 0.05)
    told = agreement(facts, given.W).resolution
    ratios = [agreement(facts, given.W + told * errors(given.W, seed)).ratio for seed in range(40)]
    # The hull of wrong heads is moved by more or less than that of one matrix.
    assert 20.0 < np.mean(ratios) < 80.0


def test_any_point_of_the_hull_and_any_order_of_heads_are_the_same():
    given = layer()
    facts = spoilt(true_facts(given, 300), 0.05)
    want = agreement(facts, given.W).ratio
    mixed = np.array([[0.5, 0.5, 0.0], [2.0, -3.0, 2.0], [0.0, 0.0, 1.0]])
    for change in (np.eye(3)[[2, 0, 1]], mixed):
        got = agreement(facts, np.einsum("ij,jfg->ifg", change, given.W)).ratio
        assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("power", [-40, 40])
def test_units_of_the_tokens_do_not_matter(power):
    """Powers of two change no bit: tokens in another unit, and W in that unit to the power -2."""
    given = layer()
    facts = spoilt(true_facts(given, 300), 0.05)
    W = given.W + 0.1 * errors(given.W)
    other = agreement(replace(facts, X=np.ldexp(facts.X, power)), np.ldexp(W, -2 * power))
    assert other == agreement(facts, W)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_errors_of_both_kinds(noise):
    source = mh.data.boolean_layer(20_000, 2, 8 if noise else 6, 2, noise=noise, seed=0)
    W = source.truth["layer"].W
    result = mh.learn_layer(source, heads=2, noise=noise, refinement=False)
    _, facts, _ = result["second sculpting"].parts
    true = agreement(facts, W)
    assert true.verdict == "accepted", true
    for wrong in (W + 0.1 * errors(W), 0 * W, errors(W), 1.2 * W):
        assert agreement(facts, wrong).verdict == "rejected"
    # Facts hold for all heads: they cannot say which value matrix belongs to which, but outputs do.
    assert agreement(facts, W[::-1]).ratio == pytest.approx(true.ratio, rel=1e-6)
    swapped = mh.Layer(W[::-1], source.truth["layer"].V)(source.X) - source.y
    assert np.sqrt(np.mean(swapped**2)) > 2.0 * noise + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "tells"), [((50_000, 2, 12, 3), True), ((100_000, 3, 8, 3), False)]
)
def test_wrong_heads_of_three_are_rejected(size, tells):
    """A limit on the stretch of facts once let all of these pass."""
    source = data(*size)
    W = source.truth["layer"].W
    result = mh.learn_layer(source, heads=3, refinement=False)
    _, facts, _ = result["second sculpting"].parts
    assert agreement(facts, W).verdict == ("accepted" if tells else "cannot tell")
    for wrong in (0 * W, errors(W), W + 0.3 * errors(W)):
        assert agreement(facts, wrong).verdict == "rejected"


@pytest.mark.parametrize("share", [0.1, 0.01])
def test_heads_of_small_values_pass(share):
    """Facts are about all heads; a head that hardly counts once failed although it was right."""
    given = data(*SIZE).truth["layer"]
    X = data(*SIZE).X
    small = mh.Layer(given.W, given.V * np.array([1.0, share])[:, None, None])
    result = mh.learn_layer(X, small(X), 2)
    assert result.learnt
    (certificate,) = [c for c in result.certificates if c.name == "facts at the heads"]
    assert certificate.holds, str(certificate)


def test_facts_that_cannot_tell_say_so():
    given = layer()
    facts = spoilt(true_facts(given, 60), 3.0)
    found = agreement(facts, given.W)
    assert found.resolution > 0.1
    assert found.verdict == "cannot tell"
    assert agreement(first(facts, 20), given.W).resolution == np.inf
    source = data(2000, 3, 6, 3)
    result = mh.learn_layer(source, heads=3)
    (certificate,) = [c for c in result.certificates if c.name == "facts at the heads"]
    _, facts, _ = result["second sculpting"].parts
    assert agreement(facts, result.layer.W).resolution > 0.1
    assert "cannot tell errors below" in str(certificate)
    assert certificate.holds  # the layer is right, the facts are not
    assert mh.learner.align(result.layer, source.truth["layer"]).error < 1e-10


def test_wrong_use():
    facts = true_facts(layer(), 60)
    with pytest.raises(ValueError, match=r"W: expected shape \(H, d, d\)"):
        agreement(facts, np.zeros((2, 4, 4)))
    with pytest.raises(ValueError, match="W: expected finite numbers"):
        agreement(facts, np.full((1, 5, 5), np.nan))
    with pytest.raises(ValueError, match="facts: expected at least one fact"):
        agreement(first(facts, 0), layer().W)
