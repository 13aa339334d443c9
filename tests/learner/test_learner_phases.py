"""Each phase of the learner alone, on inputs of which the right outcome is known."""

import numpy as np
import pytest
from learner_instances import (
    coordinates,
    data,
    distance,
    examples_of,
    stretches,
    true_body,
    true_facts,
    true_sum,
)

import mhfast as mh
from mhfast.learner import (
    SumEstimate,
    as_examples,
    certify,
    crude_sum,
    hull_cosine,
    one_hot_sum,
    propose_heads,
    refine_sum,
    sculpt,
    search_net,
    solve_values,
    with_support,
)
from mhfast.learner import sculpting as sculpting_module
from mhfast.learner.certificates import judge
from mhfast.learner.net import _points
from mhfast.learner.result import Phase
from mhfast.learner.sums import certificate_level, default_support
from mhfast.learner.surplus import Problem

EXACT = 1e-12  # least squares of well-conditioned problems, in float64


@pytest.fixture(scope="module")
def two():
    """Two heads on pairs of signs, an easy instance."""
    source = data(10_000, 2, 8, 2, out_dim=7)
    return examples_of(source), source.truth["layer"]


# Phase 1.


@pytest.mark.parametrize("heads", [1, 3])
def test_crude_sum_is_exact_where_attention_does_not_depend_on_x(heads):
    rng = np.random.default_rng(0)
    layer = mh.Layer(np.zeros((heads, 6, 6)), rng.standard_normal((heads, 6, 4)))
    X = rng.standard_normal((50, 5, 6))
    found = crude_sum(as_examples(X, layer(X)))
    assert distance(found.V_sum, layer.V.sum(axis=0)) < EXACT
    assert found.support == default_support(as_examples(X, layer(X)))


def test_crude_sum_regresses_means_on_means(two):
    examples, layer = two
    found = crude_sum(examples, support=2)
    want = np.linalg.lstsq(examples.X.mean(axis=1), examples.Y.mean(axis=1), rcond=None)[0]
    assert distance(found.V_sum, want) < EXACT
    # Of the right size, but with the bias of the method.
    assert 0.01 < distance(found.V_sum, layer.V.sum(axis=0)) < 0.5


def test_crude_sum_of_too_few_directions():
    """What no token shows is left at zero."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 3, 5))
    X[..., 2] = 0.0
    V = rng.standard_normal((1, 5, 4))
    found = crude_sum(as_examples(X, mh.Layer(np.zeros((1, 5, 5)), V)(X)))
    V[0, 2] = 0.0
    assert distance(found.V_sum, V[0]) < EXACT


# Phase 2, second half.


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_sculpting_exact_facts(heads):
    layer = mh.Layer.gaussian(heads, 6, 5, std=1.0, seed=heads)
    truth = true_body(layer)
    body = sculpt(true_facts(layer, 16 * 36), heads)
    # Square roots of rounding appear: the eigenvectors are those of a second moment.
    assert hull_cosine(body.directions, layer.W) > 1 - 1e-12
    assert distance(body.point, truth.point) < 1e-9
    assert body.heads == heads
    assert body.misfit < 1e-9
    assert body.gap > 1e6
    assert np.all(np.diff(body.eigenvalues) >= 0.0)
    k = heads - 1
    flat = body.directions.reshape(k, 36)
    np.testing.assert_allclose(flat @ flat.T, np.eye(k), atol=EXACT)
    # The point nearest to 0 is at right angles to the hull.
    np.testing.assert_allclose(flat @ body.point.ravel(), 0.0, atol=1e-9)
    c = np.random.default_rng(0).standard_normal((3, heads, k))
    want = body.point + np.einsum("ahk,kfg->ahfg", c, body.directions)
    np.testing.assert_allclose(body.at(c), want, atol=EXACT)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_the_number_of_heads_is_read_off_the_spectrum(heads):
    layer = mh.Layer.gaussian(heads, 6, 5, std=1.0, seed=heads)
    facts = true_facts(layer, 16 * 36)
    for sculpted_for in (1, 2, 5):  # the spectrum does not depend on it
        proposed, sureness = propose_heads(sculpt(facts, sculpted_for).eigenvalues)
        assert proposed == heads
        assert sureness > 1e3


def test_a_proposal_is_as_sure_as_its_step_stands_out():
    assert propose_heads(np.array([1.0, 2.0, 8.0, 12.0, 15.0])) == (2, 4.0 / 1.5)
    # The sixth step stands out most; it is only proposed if it is twice as large as later ones.
    for step, heads, sureness in ((1.8, 1, 1.0), (2.3, 6, 2.3 / 1.1)):
        steps = np.array([1.3] + [1.1] * 4 + [step] + [1.1] * 5)
        found = propose_heads(np.cumprod([1.0, *steps]))
        assert found == (heads, pytest.approx(sureness if heads == 6 else 1.3 / step))


def test_the_net_of_many_heads_is_bounded():
    points = _points(np.array([[-1.0, 1.0]] * 7), 8, np.random.default_rng(0))
    assert len(points) == 1000  # 40 · 7² = 1960
    assert len(_points(np.array([[-1.0, 1.0]] * 3), 4, np.random.default_rng(0))) == 360


def test_the_one_hot_sum_is_a_minimum_of_its_robust_loss():
    """Of the surest rows Σ r²/(1 + r²) is stationary, r in units of the median residual."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((3000, 3, 5))
    layer = mh.Layer(rng.standard_normal((2, 5, 5)), rng.standard_normal((2, 5, 4)))
    point, Y = layer.W.mean(axis=0), layer(X)
    V = one_hot_sum(as_examples(X, Y), point).V_sum
    scores = np.sort(np.einsum("nad,de,nbe->nab", X, point, X), axis=2)
    winner = np.einsum("nad,de,nbe->nab", X, point, X).argmax(axis=2)
    margin = scores[..., -1] - scores[..., -2]
    sample, query = np.nonzero(margin >= np.quantile(margin, 0.9))
    x, y = X[sample, winner[sample, query]], Y[sample, query]
    rest = y - x @ V
    residual = np.linalg.norm(rest, axis=1)
    weight = 1.0 / (1.0 + (residual / np.median(residual)) ** 2) ** 2
    gradient, size = (x.T @ (weight[:, None] * r) for r in (rest, np.abs(rest)))
    # Twenty iterations end it to rounding.
    assert np.abs(gradient).max() < 1e-10 * np.abs(size).max()


def test_the_shortest_solution_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    facts, value = rng.standard_normal((20, 6)), rng.standard_normal(20)
    rows = np.column_stack([facts, value])
    directions = np.linalg.qr(rng.standard_normal((6, 2)))[0]
    found = sculpting_module._shortest(rows.T @ rows, directions)
    np.testing.assert_allclose(found @ directions, 0.0, atol=1e-12)
    # The residual is orthogonal to every fact's part beside the directions.
    beside = facts - facts @ directions @ directions.T
    np.testing.assert_allclose((facts @ found - value) @ beside, 0.0, atol=1e-12)


def test_uncertain_facts_count_for_little():
    layer = mh.Layer.gaussian(2, 6, 5, std=1.0, seed=0)
    facts = true_facts(layer, 16 * 36)
    facts.value[::5] += 3.0
    facts.tolerance[::5] = 3.0
    body = sculpt(facts, 2)
    assert hull_cosine(body.directions, layer.W) > 1 - 1e-12
    assert distance(body.point, true_body(layer).point) < 1e-9


def test_sculpting_needs_facts_and_room():
    layer = mh.Layer.gaussian(1, 3, 2, std=1.0, seed=0)
    with pytest.raises(ValueError, match="facts: expected at least d² = 9, got 8"):
        sculpt(true_facts(layer, 8), 1)
    with pytest.raises(ValueError, match="heads: expected at most d² = 9, got 10"):
        sculpt(true_facts(layer, 90), 10)
    with pytest.raises(ValueError, match="heads: expected an integer of at least 1"):
        sculpt(true_facts(layer, 90), 0)


# Phases 3 and 4.


def test_one_hot_sum_of_sharp_attention_is_exact():
    """A head of logits of hundreds gives the winner all of the weight."""
    source = data(3000, 4, 5, 1, out_dim=3, score_std=200.0, inputs="gaussian")
    layer = source.truth["layer"]
    found = one_hot_sum(examples_of(source), layer.W[0])
    assert distance(found.V_sum, layer.V[0]) < EXACT


def test_one_hot_sum_by_the_true_point(two):
    examples, layer = two
    crude = crude_sum(examples)
    found = one_hot_sum(examples, true_body(layer).point)
    truth = layer.V.sum(axis=0)
    assert distance(found.V_sum, truth) < 0.5 * distance(crude.V_sum, truth)
    assert found.certificate < crude.certificate


def test_refining_lowers_the_certificate_and_the_error(two):
    examples, layer = two
    crude = crude_sum(examples)
    found = refine_sum(examples, crude)
    truth = layer.V.sum(axis=0)
    assert distance(found.V_sum, truth) < 0.05 * distance(crude.V_sum, truth)
    assert found.certificate < 0.5 * crude.certificate
    assert [share for share, _ in found.rounds] == [0.2, 0.1, 0.05, 0.02, 0.01, 0.005]
    assert found.certificate == min(certificate for _, certificate in found.rounds)
    again = refine_sum(examples, found, shares=[0.01])
    assert again.rounds[:-1] == found.rounds


@pytest.mark.parametrize("start", ["truth", "chance", "zero"])
@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.002)])
def test_refining_never_returns_a_worse_certificate(two, start, shares):
    examples, layer = two
    V_sum = layer.V.sum(axis=0)
    if start == "chance":
        V_sum = np.random.default_rng(1).standard_normal(V_sum.shape)
    if start == "zero":
        V_sum = np.zeros_like(V_sum)
    before = with_support(examples, SumEstimate(V_sum, np.inf, 0.0, 0))
    after = refine_sum(examples, before, shares=shares)
    assert after.certificate <= before.certificate
    judged = with_support(examples, after, after.support)
    assert judged.certificate == after.certificate


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_shares_are_shares(two, share):
    with pytest.raises(ValueError, match="shares: expected numbers above 0 and at most 1"):
        refine_sum(two[0], crude_sum(two[0]), shares=[share])


def test_more_tokens_explain_more():
    source = data(2000, 5, 6, 2)
    examples = examples_of(source)
    estimate = crude_sum(examples)
    certificates = [with_support(examples, estimate, s).certificate for s in (1, 2, 3, 5)]
    assert certificates == sorted(certificates, reverse=True)
    assert certificates[0] > certificates[-1]


def test_the_true_sum_explains_all_rows_of_one_head():
    source = data(2000, 5, 6, 1)
    examples = examples_of(source)
    exact = true_sum(examples, source.truth["layer"], support=5)
    assert exact.certificate < 1e-12  # a simplex fit, to rounding


# Phase 5.


@pytest.mark.parametrize(("heads", "tokens", "tried"), [(2, 2, 136), (3, 2, 160), (2, 4, 136)])
def test_the_net_finds_the_heads_in_the_true_hull(heads, tokens, tried):
    source = data(10_000, tokens, 8, heads, out_dim=7, inputs="gaussian")
    layer, examples = source.truth["layer"], examples_of(source)
    body, facts = true_body(layer), true_facts(layer, 1000)
    net = search_net(examples, body, facts, seed=3, samples=500)
    best = net.candidates[0]
    # A residual is the root of a difference of sums of squares: half of the digits.
    assert best.values.residual < 1e-6
    order = [int(np.argmin([distance(W, true) for W in best.W])) for true in layer.W]
    assert sorted(order) == list(range(heads))
    assert distance(best.W[order], layer.W) < 1e-6
    left = [candidate.values.residual for candidate in net.candidates]
    assert left == sorted(left)
    assert net.tried == tried
    for candidate in net.candidates:
        np.testing.assert_allclose(candidate.W, body.at(candidate.coordinates), atol=EXACT)


@pytest.mark.parametrize(("heads", "tokens"), [(2, 2), (3, 2), (2, 3)])
def test_linear_programs_over_the_true_hull(heads, tokens):
    source = data(10_000, tokens, 8, heads, out_dim=7, inputs="gaussian")
    layer, examples = source.truth["layer"], examples_of(source)
    body = true_body(layer)
    facts = certify(examples, true_sum(examples, layer))
    net = search_net(examples, body, facts, samples=200)
    inside = coordinates(body, layer.W)
    assert np.all(net.box[:, 0] <= inside.min(axis=0))
    assert np.all(inside.max(axis=0) <= net.box[:, 1])
    # No matrix of the hull, so no head and no candidate, obeys the facts better than the best.
    slack = 1 - 1e-7  # of the linear programs
    assert slack * net.least_stretch <= stretches(layer.W, facts).max(axis=1).min()
    for candidate in net.candidates:
        overstepped = stretches(candidate.W, facts)
        assert slack * net.least_stretch <= overstepped.max(axis=1).min()
        want = np.quantile(overstepped, 0.95, axis=1)
        np.testing.assert_allclose(candidate.stretch, want, rtol=1e-9)


def test_the_net_of_one_head_is_a_point():
    source = data(2000, 3, 6, 1, inputs="gaussian")
    layer = source.truth["layer"]
    net = search_net(examples_of(source), true_body(layer), true_facts(layer, 400))
    (only,) = net.candidates
    assert np.array_equal(only.W, layer.W)
    assert net.box.shape == (0, 2)
    assert net.tried == 1
    # Facts without error: the last digit, in units of a tolerance of 1e-9.
    assert net.least_stretch < 1e-4


# Phase 6.


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_values_of_the_true_heads(heads):
    source = data(2000, 3, 6, heads, out_dim=4)
    layer, examples = source.truth["layer"], examples_of(source)
    found = solve_values(examples, layer.W, samples=900)
    assert distance(found.V, layer.V) < 1e-11  # normal equations square a condition of ten
    assert found.residual < 1e-6  # the root of rounding
    assert 1e-3 < found.condition <= 1.0
    again = found.layer(layer.W)
    assert np.array_equal(again.V, found.V)
    assert judge(examples, again).residual < 1e-11


def test_values_of_heads_that_attend_alike():
    source = data(500, 3, 6, 2)
    layer, examples = source.truth["layer"], examples_of(source)
    found = solve_values(examples, layer.W[[0, 1, 1]])
    assert found.condition < 1e-14
    assert distance(found.V[1] + found.V[2], layer.V[1]) < 1e-11


def test_values_of_heads_that_attend_nearly_alike():
    source = data(500, 3, 6, 2)
    W = source.truth["layer"].W[[0, 0]]
    W[1] *= 1.0 + 1e-3
    layer = mh.Layer(W, source.truth["layer"].V)
    found = solve_values(as_examples(source.X, layer(source.X)), W)
    assert 1e-10 < found.condition < 1e-5
    assert distance(found.V, layer.V) < 1e-15 / found.condition * 100


def test_noise_is_averaged_over_all_samples():
    source = data(20_000, 2, 5, 1, noise=0.1)
    layer = source.truth["layer"]
    exact, noisy = examples_of(source), as_examples(source.X, source.y, 0.1)
    few, every = solve_values(exact, layer.W), solve_values(noisy, layer.W)
    # Five times the samples: the error falls by √5, give or take chance.
    assert distance(every.V, layer.V[:1]) < 0.7 * distance(few.V, layer.V[:1])


def test_residual_of_a_layer(two):
    examples, layer = two
    assert judge(examples, layer).residual < 1e-14
    nothing = judge(examples, mh.Layer(layer.W, 0.0 * layer.V)).residual
    assert nothing == pytest.approx(1.0, rel=1e-13)  # sums of 2e5 squares, in another order
    assert abs(judge(examples, mh.Layer(layer.W, 1.25 * layer.V)).residual - 0.25) < 1e-14


def test_numbers_of_facts_have_the_median_tolerance(two):
    examples, layer = two
    facts = certify(examples, true_sum(examples, layer))
    numbers = Phase("sculpting", 0.0, (facts,)).numbers
    assert numbers["facts"] == len(facts)
    assert numbers["tolerance"] == np.sort(facts.tolerance)[len(facts) // 2]


@pytest.mark.parametrize(("n", "level"), [(10, 0.2), (1000, 8 * 16 / 5000), (100_000, 0.002)])
def test_certificate_level_is_eight_facts_a_row_within_limits(n, level):
    examples = as_examples(np.ones((n, 5, 4)), np.ones((n, 5, 2)))
    assert certificate_level(examples) == level


def test_surplus_heads_are_judged_from_more_outputs_where_there_is_noise():
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((9000, 3, 4)), rng.standard_normal((9000, 3, 2))
    counts = [Problem.of(as_examples(X, Y, noise), 2, 0, None).count for noise in (0.0, 0.1)]
    assert counts[0] == Problem.of(as_examples(X, Y), 2, 0, None).fewest(2)
    assert counts[1] > counts[0]
