"""Examples in portions, and the facts that certified rows state of every head."""

import numpy as np
import pytest
from learner_instances import data, distance, examples_of, stretches, true_sum

import mhfast as mh
from mhfast.learner import as_examples, certify, crude_sum, one_hot_sum, refine_sum, solve_values
from mhfast.learner import examples as examples_module
from mhfast.learner import facts as facts_module
from mhfast.learner.certificates import judge


@pytest.fixture(scope="module")
def three_tokens():
    """Two heads on three normal tokens: examples, the layer, and the facts by its true sum."""
    source = data(10_000, 3, 6, 2, out_dim=7, inputs="gaussian")
    examples, layer = examples_of(source), source.truth["layer"]
    return examples, layer, certify(examples, true_sum(examples, layer))


def test_facts_hold_of_every_head(three_tokens):
    _, layer, facts = three_tokens
    overstepped = stretches(layer.W, facts)
    # The tolerance is of first order: what nearly all facts keep to a small factor.
    assert np.quantile(overstepped, 0.5) < 2.0
    assert np.quantile(overstepped, 0.95) < 5.0
    assert overstepped.max() < 100.0
    # They say something: at rows at large the heads are apart by a standard deviation of 4.
    assert np.median(np.abs(facts.of(layer.W) - facts.value)) < 0.4


def test_what_facts_are(three_tokens):
    examples, _, facts = three_tokens
    assert len(facts) == 16 * 36
    assert np.all(np.diff(facts.tolerance) >= 0.0)
    # A row of three tokens states two facts at most, both against the same token.
    assert len(facts) / 2 <= facts.certified_rows <= len(facts)
    assert len(facts) < facts.seen <= 2 * examples.rows
    assert np.all(facts.first != facts.second)
    assert np.all(facts.value >= 0.0)  # against the largest weight
    quantiles = facts.residual_quantiles
    assert quantiles.shape == (101,)
    assert np.all(np.diff(quantiles) >= 0.0)
    for name in ("X", "rows", "value", "tolerance", "background"):
        assert not getattr(facts, name).flags.writeable


@pytest.mark.parametrize("count", [1, 50, 575])
def test_the_best_facts_are_kept(three_tokens, count):
    examples, layer, facts = three_tokens
    fewer = certify(examples, true_sum(examples, layer), count=count)
    assert len(fewer) == count
    for name in ("value", "tolerance", "first", "second"):
        assert np.array_equal(getattr(fewer, name), getattr(facts, name)[:count])


def test_facts_against_a_direction(three_tokens):
    examples, layer, facts = three_tokens
    sample, query = np.divmod(facts.rows, 3)
    functional = np.array(
        [
            np.outer(facts.X[s, a], facts.X[s, b] - facts.X[s, c])
            for s, a, b, c in zip(sample, query, facts.first, facts.second, strict=True)
        ]
    )
    want = np.einsum("kfg,hfg->hk", functional, layer.W)
    np.testing.assert_allclose(facts.of(layer.W), want, atol=1e-12)
    np.testing.assert_allclose(facts.of(layer.W[1]), want[1], atol=1e-12)
    stacked = np.column_stack([functional.reshape(-1, 36), facts.value])
    weight = np.random.default_rng(0).random(len(facts))
    moment = (stacked * weight[:, None]).T @ stacked
    np.testing.assert_allclose(facts.moment(weight), moment, atol=1e-12 * moment.max())
    # Every kept sample is one of the examples.
    found = {x.tobytes() for x in examples.X}
    assert all(x.tobytes() in found for x in facts.X)


def test_the_background_is_of_rows_at_large(three_tokens):
    examples, _, facts = three_tokens
    assert np.all(np.linalg.eigvalsh(facts.background) > 0.0)
    # E ‖x_a‖² ‖x_b - x_c‖² of normal tokens; more by 2 d where a is b or c, two times in three.
    want = 2.0 * 36 + 2.0 * 6 * 2 / 3
    assert abs(np.trace(facts.background) - want) < 0.05 * want  # 20 000 rows
    other = certify(examples, true_sum(examples, three_tokens[1]), seed=1)
    assert np.array_equal(other.value, facts.value)
    assert not np.array_equal(other.background, facts.background)


def test_the_background_is_of_all_rows():
    """Of three tokens that are axes, moments of x_a ⊗ (x_b - x_c) for every a."""
    X = np.tile(np.eye(3), (5, 1, 1))
    moment = facts_module._background(as_examples(X, X), 0, 1)
    # Each row is drawn one time in three, and ‖x_b - x_c‖² = 2; of 20 000 draws.
    of_rows = np.trace(moment.reshape(3, 3, 3, 3), axis1=1, axis2=3).diagonal()
    np.testing.assert_allclose(of_rows, 2 / 3, rtol=0.05)


def test_facts_of_one_head_are_exact():
    source = data(3000, 4, 6, 1, out_dim=5, inputs="gaussian")
    layer, examples = source.truth["layer"], examples_of(source)
    facts = certify(examples, true_sum(examples, layer, support=4))
    # Rounding of a simplex fit, where no weight is small.
    assert np.abs(facts.of(layer.W[0]) - facts.value).max() < 1e-9


@pytest.mark.parametrize("coincidence", ["twins", "midpoint"])
def test_tokens_that_tell_nothing_apart_state_no_fact(coincidence):
    """Where other weights have the same average, no weights can be read off."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((3000, 4, 6))
    half = X[::2]
    half[:, 3] = half[:, 1] if coincidence == "twins" else (half[:, 0] + half[:, 1]) / 2
    layer = mh.Layer.gaussian(1, 6, 5, std=0.3, seed=0)
    examples = as_examples(X, layer(X))
    facts = certify(examples, true_sum(examples, layer, support=4))
    error = np.abs(facts.of(layer.W[0]) - facts.value)
    assert error.max() < 1e-9, f"{np.mean(error > 1e-9):.0%} of the facts are false"


def test_equal_tokens_state_no_fact():
    X = np.repeat(np.random.default_rng(0).standard_normal((500, 1, 6)), 3, axis=1)
    layer = mh.Layer.gaussian(2, 6, 5, std=1.0, seed=0)
    examples = as_examples(X, layer(X))
    facts = certify(examples, true_sum(examples, layer))
    assert len(facts) == 0
    assert facts.certified_rows == 0


def test_noise_floors_the_tolerance(three_tokens):
    examples, layer, exact = three_tokens
    noisy = as_examples(examples.X, examples.Y, noise=0.3)
    assert noisy.noise_floor == pytest.approx(0.3 * 7**0.5 / examples.scale)
    facts = certify(noisy, true_sum(noisy, layer))
    assert facts.tolerance.min() == noisy.noise_floor
    assert exact.tolerance.min() < noisy.noise_floor
    assert np.array_equal(facts.tolerance, np.maximum(exact.tolerance, noisy.noise_floor))


# Examples.


def test_examples_are_told_in_their_own_terms():
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((7, 3, 5)), rng.standard_normal((7, 3, 2))
    examples = as_examples(X, Y)
    sizes = (examples.n, examples.tokens, examples.dim, examples.out_dim, examples.rows)
    assert sizes == (7, 3, 5, 2, 21)
    assert examples.basis is None
    assert examples.scale == pytest.approx(np.sqrt((Y**2).sum() / 21))
    assert np.shares_memory(examples.first(5).X, X)
    x, y = examples.part(np.array([6, 0]))
    assert np.array_equal(x, X[[6, 0]])
    assert np.array_equal(y, Y[[6, 0]])


def test_examples_are_held_out_at_random():
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((40, 3, 5)), rng.standard_normal((40, 3, 4))
    Y[:, :, 3] = Y[:, :, 1]
    examples = as_examples(X, Y)
    drawn = []
    for seed in (0, 0, 1):
        rest, held_out = examples.split(9, seed=seed)
        assert (rest.n, held_out.n) == (31, 9)
        assert sorted([*rest.index, *held_out.index]) == list(range(40))
        drawn.append(tuple(held_out.index))
        for part in (rest, held_out):
            # Each part is described by its own outputs, and reads its own samples.
            assert part.scale == pytest.approx(np.sqrt((Y[part.index] ** 2).sum() / (3 * part.n)))
            assert part.out_dim == 3
            ((_, x, y),) = part.portions(whole=True)
            assert np.array_equal(x, X[part.index])
            assert np.array_equal(y, Y[part.index])
            assert np.array_equal(part.part(np.array([4, 1]))[0], X[part.index[[4, 1]]])
            assert np.array_equal(part.first(2).part(slice(None))[0], X[part.index[:2]])
            assert np.array_equal(part.gather(np.array([7]))[0], X[part.index[[2]]])
    assert drawn[0] == drawn[1] != drawn[2]
    # By chance the nine are none of a kind: neither the first nor the last.
    assert max(drawn[0]) - min(drawn[0]) > 20


@pytest.mark.parametrize(("dtype", "rounding"), [(np.float32, 3e-7), (np.float64, 1e-16)])
def test_directions_of_rounding_are_no_outputs(dtype, rounding):
    """Outputs that follow from others up to rounding do not count, ten times as large ones do."""
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((2, 500, 3, 4)).astype(dtype)
    for size, kept in ((rounding, 3), (max(30.0 * rounding, 1e-6), 4)):
        Y[:, :, 3] = Y[:, :, 1] + size * rng.standard_normal((500, 3))
        assert as_examples(X, Y).out_dim == kept


def test_outputs_that_follow_from_others_are_left_out():
    rng = np.random.default_rng(0)
    X, mixing = rng.standard_normal((40, 3, 5)), rng.standard_normal((2, 4))
    layer = mh.Layer.gaussian(2, 5, 2, std=1.0, seed=0)
    Y = layer(X) @ mixing
    examples = as_examples(X, Y)
    assert examples.out_dim == 2
    y = examples.part(slice(None))[1]
    assert y.shape == (40, 3, 2)
    np.testing.assert_allclose(y @ examples.basis.T, Y, atol=1e-12)
    found = examples.whole_layer(solve_values(examples, layer.W).layer(layer.W))
    assert found.out_dim == 4
    assert judge(examples, found).residual < 1e-12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_portions_are_all_examples_in_order(monkeypatch, dtype):
    monkeypatch.setattr(examples_module, "PORTION", 50)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((11, 3, 5)).astype(dtype)
    Y = rng.standard_normal((11, 3, 2)).astype(dtype)
    portions = list(as_examples(X, Y).portions())
    assert [begin for begin, _, _ in portions] == [0, 3, 6, 9]
    assert all(part.dtype == np.float64 for _, x, y in portions for part in (x, y))
    assert np.array_equal(np.concatenate([x for _, x, _ in portions]), X)
    assert np.array_equal(np.concatenate([y for _, _, y in portions]), Y)


def test_phases_do_not_see_the_portions(three_tokens, monkeypatch):
    whole, layer, facts = three_tokens
    examples = whole.first(600)
    truth = true_sum(examples, layer)

    def results():
        crude = crude_sum(examples)
        found = certify(examples, truth)
        return {
            "crude": crude.V_sum,
            "certificate": crude.certificate,
            "one-hot": one_hot_sum(examples, layer.W.mean(axis=0)).V_sum,
            "refined": refine_sum(examples, crude, shares=[0.1, 0.005]).V_sum,
            "values": solve_values(examples, layer.W).V,
        }, found

    at_once, facts = results()
    monkeypatch.setattr(examples_module, "PORTION", 1)
    in_portions, same = results()
    for name, value in at_once.items():
        # Sums in another order; iterations pass it on.
        assert distance(in_portions[name], value) < 1e-9, name
    for name in ("X", "rows", "first", "second", "value", "tolerance", "background"):
        assert np.array_equal(getattr(same, name), getattr(facts, name)), name


def test_rows_explained_to_rounding_are_ordered_by_their_weights_alone():
    """One head: every row is explained, and what rounding leaves of it says nothing."""
    source = data(400, 3, 5, 1, inputs="gaussian")
    examples = examples_of(source)
    facts = certify(examples, true_sum(examples, source.truth["layer"], support=3), count=60)
    x, T = examples.X, 3
    weights = source.truth["layer"].attention(x)[:, 0].reshape(-1, T)
    sizes = 1.0 / weights.max(axis=1, keepdims=True) + 1.0 / weights
    sizes[np.arange(len(sizes)), weights.argmax(axis=1)] = np.inf
    # The weights are those of the layer to 1e-12 or so, and the residual counts as 1e-12.
    np.testing.assert_allclose(facts.tolerance[0], 1e-12 * sizes.min(), rtol=1e-9)
    assert (np.diff(facts.tolerance) >= 0.0).all()
    assert facts.tolerance[-1] < 1e-12 * np.median(sizes[np.isfinite(sizes)])


def test_facts_of_equal_differences_are_one():
    """Of tokens x, a, b and x, a + s, b + s the same x ⊗ (a - b)."""
    kept = facts_module._SmallestTolerances(3, 3)
    x, a, b, s = np.random.default_rng(0).standard_normal((4, 3))
    one_of_three, two_of_three = [0.0, 1.0, 0.0], [0.0, 0.75, 0.25]
    weights = np.array([two_of_three, one_of_three, one_of_three] * 2)
    kept.take(np.array([[x, a, b], [x, a + s, b + s]]), weights, np.full(6, 1e-6), 0)
    rows, first, second, value, _ = kept.sorted()
    assert (rows.tolist(), first.tolist(), second.tolist()) == ([0], [1], [2])
    assert value == pytest.approx(np.log(3.0))


def test_equal_facts_leave_room_for_others():
    """Of two facts that come again and again there is room for a third, however uncertain it is."""
    kept = facts_module._SmallestTolerances(3, 3)
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((2, 1, 2, 3))
    weights = np.tile([0.75, 0.25], (2, 1))
    for k in range(7):
        kept.take(one, weights, np.full(2, 1e-6), 2 * k)
    kept.take(other, weights, np.full(2, 1e-2), 100)
    rows, first, second, value, tolerance = kept.sorted()
    assert (np.unique(rows // 100)).tolist() == [0, 1]
    np.testing.assert_array_equal(first, 0)
    np.testing.assert_array_equal(second, 1)
    np.testing.assert_allclose(value, np.log(3.0))
    assert (np.diff(tolerance) >= 0).all()
