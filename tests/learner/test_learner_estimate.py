"""The least-squares layer of all noisy examples: efficient, with a covariance that is right."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mhfast as mh
from mhfast.learner import as_examples, estimate, learn_layer, visible_part

# The name of the module is that of its function.
MODULE = importlib.import_module("mhfast.learner.estimate")
REFINEMENT = importlib.import_module("mhfast.learner.refinement")

NOISE = 0.05
H, D, T, P = 2, 5, 3, 4


def noisy(n, *, noise=NOISE, seed=1, **options):
    data = mh.data.boolean_layer(2, T, D, H, out_dim=P, seed=0, **options)
    return data.sample(n, noise=noise, seed=seed), data.truth["layer"]


def moved(layer, size=0.02, seed=3):
    """The layer a little off, as refinement of a part of the examples leaves it."""
    rng = np.random.default_rng(seed)
    W, V = (size * rng.standard_normal(a.shape) for a in (layer.W, layer.V))
    return mh.Layer(layer.W + W, layer.V + V)


def flat(layer):
    return np.concatenate([layer.W.ravel(), layer.V.ravel()])


def jacobian(layer, X):
    """Derivatives of all outputs by all numbers, (n T p, P), by the specification."""
    rows = []
    for i in range(len(X)):
        for a in range(X.shape[1]):
            for o in range(layer.V.shape[2]):
                G = np.zeros((1, X.shape[1], layer.V.shape[2]))
                G[0, a, o] = 1.0
                g = mh.reference.backward(layer, X[i : i + 1], G)
                rows.append(np.concatenate([g["W"].ravel(), g["V"].ravel()]))
    return np.array(rows)


def test_covariance_is_that_of_least_squares():
    data, truth = noisy(60)
    found = estimate(as_examples(data.X, data.y, NOISE), moved(truth))
    J = jacobian(found.layer, data.X)
    want = NOISE**2 * np.linalg.inv(J.T @ J)
    got = found.covariance.matrix
    assert got.shape == (len(want),) * 2
    # The condition of JᵀJ is some 1e4, and its rounding 1e-15.
    assert np.abs(got - want).max() < 1e-9 * np.abs(want).max()
    assert np.array_equal(got, got.T)
    W, V = np.split(np.sqrt(want.diagonal()), [truth.W.size])
    np.testing.assert_allclose(found.covariance.W_error.ravel(), W, rtol=1e-8)
    np.testing.assert_allclose(found.covariance.V_error.ravel(), V, rtol=1e-8)
    assert found.covariance.outputs == data.y.size
    assert found.covariance.noise == NOISE


def test_the_estimate_is_a_minimum_near_by():
    data, truth = noisy(400)
    found = estimate(as_examples(data.X, data.y, NOISE), moved(truth))
    assert 1 <= found.steps <= 4
    assert found.left <= 1e-2
    difference = found.layer(data.X) - data.y
    want = np.linalg.norm(difference) / np.linalg.norm(data.y)
    assert found.residual == pytest.approx(want, rel=1e-12)
    gradient = mh.reference.backward(found.layer, data.X, difference)
    J_r = np.concatenate([gradient["W"].ravel(), gradient["V"].ravel()])
    # The step that is left, in standard errors.
    left = np.sqrt(J_r @ found.covariance.matrix @ J_r) / NOISE**2
    assert left == pytest.approx(found.left, rel=1e-3, abs=1e-9)
    # The start does not matter, to the length of that step.
    other = estimate(as_examples(data.X, data.y, NOISE), moved(truth, seed=4))
    apart = flat(other.layer) - flat(found.layer)
    assert np.abs(apart / np.sqrt(found.covariance.matrix.diagonal())).max() < 2e-2


def test_noise_below_rounding_ends_where_rounding_does():
    """No step lowers the residual then, though the step left is larger than that noise."""
    data, truth = noisy(400, noise=0.0)
    found = estimate(as_examples(data.X, data.y, 1e-15), moved(truth))
    assert found.left > 1.0
    assert found.residual < 1e-15


def test_errors_shrink_with_the_examples_as_the_bound_does():
    errors, bounds = [], []
    for n in (150, 2400):
        squares = []
        for seed in range(12):
            data, truth = noisy(n, seed=seed)
            found = estimate(as_examples(data.X, data.y, NOISE), moved(truth))
            squares.append(np.sum((found.layer.W - truth.W) ** 2))
        errors.append(np.sqrt(np.mean(squares)))
        bounds.append(np.sqrt(np.sum(found.covariance.W_error**2)))
    # 50 numbers, 12 draws: about 600 squares of normal numbers, of which the root mean square is
    # within 1 ± 4 / √1200, or less sharply if few directions matter; 1.2 is what is promised.
    for error, bound in zip(errors, bounds, strict=True):
        assert 0.8 < error / bound < 1.2
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.3)


MANY = 4200
"""Examples of which a part gives the first steps: two parts of 256 outputs a parameter are 3840."""


@pytest.fixture
def sizes(monkeypatch):
    """The numbers of examples in the calls for JᵀJ."""
    told, equations = [], mh._core.layer_equations

    def counted(X, *rest):
        told.append(len(X))
        return equations(X, *rest)

    monkeypatch.setattr("mhfast._core.layer_equations", counted)
    return told


def by_newton(monkeypatch, examples, start):
    """The estimate by steps with JᵀJ of all examples only."""
    with monkeypatch.context() as patched:
        patched.setattr(MODULE, "PART", 1)
        return estimate(examples, start)


def same(one, other):
    """Whether two estimates differ by less than the lengths of the steps that they leave."""
    error = np.sqrt(other.covariance.matrix.diagonal())
    assert one.left <= 1e-2
    assert other.left <= 1e-2
    assert np.abs((flat(one.layer) - flat(other.layer))[error > 0] / error[error > 0]).max() < 2e-2
    # JᵀJ is that at the one layer or the other, two hundredths of a standard error apart.
    np.testing.assert_allclose(one.covariance.W_error, other.covariance.W_error, rtol=1e-3)
    np.testing.assert_allclose(one.covariance.V_error, other.covariance.V_error, rtol=1e-3)


def test_many_examples_are_fitted_by_the_equations_of_a_part(sizes, monkeypatch):
    data, truth = noisy(MANY)
    examples = as_examples(data.X, data.y, NOISE)
    found = estimate(examples, moved(truth))
    # Half of them at the start; all of them once, at the minimum.
    assert sizes == [MANY // 2, MANY]
    assert 2 <= found.steps < 20
    sizes.clear()
    newton = by_newton(monkeypatch, examples, moved(truth))
    assert sizes == [MANY] * (newton.steps + 1)
    same(found, newton)
    # Fewer than two such parts.
    few = noisy(3800)[0]
    sizes.clear()
    estimate(as_examples(few.X, few.y, NOISE), moved(truth))
    assert set(sizes) == {3800}


def test_a_sixth_of_more_examples(sizes):
    data, truth = noisy(16_003)
    found = estimate(as_examples(data.X, data.y, NOISE), moved(truth))
    assert sizes == [2668, 16_003]
    assert found.left <= 1e-2


def test_a_part_that_is_too_small(sizes, monkeypatch):
    """With few more outputs than the 90 parameters steps do not become shorter."""
    data, truth = noisy(MANY)
    examples = as_examples(data.X, data.y, NOISE)
    newton = by_newton(monkeypatch, examples, moved(truth))
    monkeypatch.setattr(REFINEMENT, "MIN_EXAMPLES", 4)
    monkeypatch.setattr(REFINEMENT, "SCORES_PER_NUMBER", 0)
    monkeypatch.setattr(MODULE, "OUTPUTS_OF_PART", 1)
    for part, few in ((525, 8), (210, 20)):
        monkeypatch.setattr(MODULE, "PART", part)
        sizes.clear()
        found = estimate(examples, moved(truth))
        assert sizes[0] == few
        assert sizes.count(MANY) >= 2
        same(found, newton)


def test_a_part_that_determines_nothing(sizes, monkeypatch):
    data, truth = noisy(MANY)
    X, Y = data.X.copy(), data.y.copy()
    X[::2], Y[::2] = X[0], Y[0]
    examples = as_examples(X, Y, NOISE)
    found = estimate(examples, moved(truth))
    assert sizes[:2] == [MANY // 2, MANY]
    same(found, by_newton(monkeypatch, examples, moved(truth)))


@pytest.mark.parametrize("tokens", ["signs", "one-hot"])
def test_many_examples_in_portions(tokens, monkeypatch):
    if tokens == "signs":
        data, truth = noisy(MANY)
        X, Y, noise = data.X, data.y, NOISE
    else:
        rng = np.random.default_rng(0)
        X, noise = np.eye(4)[rng.integers(4, size=(MANY, T))], 0.01
        truth = visible_part(mh.Layer.gaussian(2, 4, 3, std=1.0, seed=2), X)
        Y = truth(X) + noise * rng.standard_normal((MANY, T, 3))
    examples, start = as_examples(X, Y, noise), moved(truth, 0.005)
    whole = estimate(examples, start)
    same(whole, by_newton(monkeypatch, examples, start))
    monkeypatch.setattr("mhfast.learner.examples.PORTION", 1500 * T * X.shape[2])
    assert len(list(examples.portions())) == 3
    # A part of every third example, because a portion does not hold every other one.
    same(estimate(examples, start), whole)


@pytest.mark.parametrize("n", [900, MANY])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads, n):
    data, truth = noisy(n)
    examples = as_examples(data.X, data.y, NOISE)
    one, more = (estimate(examples, moved(truth), num_threads=k) for k in (1, threads))
    assert np.array_equal(flat(one.layer), flat(more.layer))
    assert np.array_equal(one.covariance.matrix, more.covariance.matrix)
    assert one.steps == more.steps


def test_portions_change_no_more_than_rounding(monkeypatch):
    data, truth = noisy(500)
    examples = as_examples(data.X, data.y, NOISE)
    whole = estimate(examples, moved(truth))
    monkeypatch.setattr("mhfast.learner.examples.PORTION", 37 * T * D)
    assert len(list(examples.portions())) > 10
    parts = estimate(examples, moved(truth))
    np.testing.assert_allclose(flat(parts.layer), flat(whole.layer), atol=1e-11)
    np.testing.assert_allclose(parts.covariance.matrix, whole.covariance.matrix, atol=1e-13)


def test_units_of_the_outputs_do_not_matter():
    data, truth = noisy(300)
    one = estimate(as_examples(data.X, data.y, NOISE), moved(truth))
    # A power of two, so that nothing is rounded.
    unit = 2.0**-40
    start = mh.Layer(moved(truth).W, unit * moved(truth).V)
    small = estimate(as_examples(data.X, unit * data.y, unit * NOISE), start)
    np.testing.assert_allclose(small.layer.W, one.layer.W, rtol=1e-9)
    np.testing.assert_allclose(small.layer.V, unit * one.layer.V, rtol=1e-9)
    np.testing.assert_allclose(small.covariance.V_error, unit * one.covariance.V_error, rtol=1e-9)


def test_what_tokens_cannot_see_has_no_variance():
    rng = np.random.default_rng(0)
    X = np.eye(4)[rng.integers(4, size=(800, T))]  # one-hot: W + c 1ᵀ is as good as W
    truth = visible_part(mh.Layer.gaussian(2, 4, 3, std=1.0, seed=2), X)
    Y = truth(X) + 0.01 * rng.standard_normal((800, T, 3))
    found = estimate(as_examples(X, Y, 0.01), moved(truth, 0.005))
    unseen = np.zeros(truth.W.shape)
    unseen[0, 1] = 1.0  # W_0[1] + c for all tokens
    direction = np.concatenate([unseen.ravel(), np.zeros(truth.V.size)])
    matrix = found.covariance.matrix
    assert abs(direction @ matrix @ direction) < 1e-12 * matrix.trace()
    assert np.abs(found.layer.W.sum(axis=2)).max() < 1e-12
    # The pseudo-inverse of JᵀJ, which has rank 2 · 4 · 3 + 2 · 3 · 3 + 3.
    J = jacobian(found.layer, X[:300])
    few = estimate(as_examples(X[:300], Y[:300], 0.01), found.layer)
    J = jacobian(few.layer, X[:300])
    assert np.linalg.matrix_rank(J, tol=1e-6) == 45
    want = 1e-4 * np.linalg.pinv(J.T @ J, rcond=1e-9, hermitian=True)
    assert np.abs(few.covariance.matrix - want).max() < 1e-6 * np.abs(want).max()


def test_examples_that_do_not_determine_the_layer():
    data, truth = noisy(200)
    twice = mh.Layer(
        truth.W[[0, 1, 1]], truth.V[[0, 1, 1]] * np.array([1, 0.5, 0.5])[:, None, None]
    )
    assert estimate(as_examples(data.X, data.y, NOISE), twice) is None


def test_intervals():
    data, truth = noisy(300)
    covariance = estimate(as_examples(data.X, data.y, NOISE), moved(truth)).covariance
    lower, upper = covariance.interval(0.9)
    # 1.6449 is the normal quantile of .95.
    np.testing.assert_allclose(upper.W - lower.W, 2 * 1.6448536 * covariance.W_error, rtol=1e-7)
    np.testing.assert_allclose(0.5 * (upper.V + lower.V), covariance.layer.V, rtol=1e-12)
    assert covariance.interval() == covariance.interval(0.95)
    for level in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="level: expected a probability between 0 and 1"):
            covariance.interval(level)


def test_wrong_use():
    data, truth = noisy(50)
    with pytest.raises(ValueError, match="examples: expected a noise above 0"):
        estimate(as_examples(data.X, data.y), truth)
    examples = as_examples(data.X, data.y, NOISE)
    with pytest.raises(ValueError, match=r"layer\.W: expected shape \(H, d, d\)"):
        estimate(examples, mh.Layer.gaussian(2, D + 1, P, std=1.0, seed=0))
    with pytest.raises(ValueError, match=r"layer\.V: expected shape \(H, d, p\)"):
        estimate(examples, mh.Layer.gaussian(2, D, P + 1, std=1.0, seed=0))
    with pytest.raises(TypeError, match="layer: expected a Layer"):
        estimate(examples, truth.W)


def test_learn_layer_returns_it():
    data, truth = noisy(2000)
    result = learn_layer(data, heads=H, noise=NOISE)
    assert result.learnt
    assert result["all examples"].numbers["steps"] >= 1
    assert np.array_equal(result.covariance.layer.W, result.layer.W)
    of = mh.learner.align(result.layer, truth).permutation
    z = (result.layer.W[of] - truth.W) / result.covariance.W_error[of]
    # The mean square of 50 normal numbers, were they independent, is 1 ± .2.
    assert 0.4 < np.mean(z**2) < 2.0
    # The condition in the verdict is that of all examples, too.
    train, _ = as_examples(data.X, data.y, NOISE).split(200, seed=0)
    (identified,) = (c for c in result.certificates if c.name == "identified")
    of_all = estimate(train, result.layer).condition
    assert identified.value == pytest.approx(of_all, rel=1e-4)
    assert abs(result["refinement"].numbers["condition"] / of_all - 1.0) > 1e-3
    # A tenth of the examples is held out.
    assert result.covariance.outputs == 1800 * T * P
    exact, _ = noisy(2000, noise=0.0)
    assert learn_layer(exact, heads=H).covariance is None


def test_float32():
    data, truth = noisy(2000)
    single = learn_layer(data.X.astype(np.float32), data.y.astype(np.float32), H, noise=NOISE)
    assert single.learnt
    assert mh.learner.align(single.layer, truth).error < 0.02


def test_dependent_outputs():
    data, _ = noisy(1000)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((P + 2, P)))[0]
    result = learn_layer(data.X, data.y @ basis.T, H, noise=NOISE)
    # Two of the outputs are without the noise that is told, but the layer is found.
    covariance = result.covariance
    assert covariance.layer.V.shape == (H, D, P + 2)
    np.testing.assert_allclose(covariance.layer.V, result.layer.V, atol=1e-12)
    alone = learn_layer(data.X, data.y, H, noise=NOISE).covariance
    of = mh.learner.align(covariance.layer, mh.Layer(alone.layer.W, alone.layer.V @ basis.T))
    np.testing.assert_allclose(covariance.W_error[of.permutation], alone.W_error, rtol=1e-2)
    at = 2 * D * D
    of_V = alone.matrix[at:, at:].reshape(H, D, P, H, D, P)
    want = np.einsum("hdpgeq,op,oq,hg,de->hdo", of_V, basis, basis, np.eye(H), np.eye(D))
    np.testing.assert_allclose(covariance.V_error[of.permutation] ** 2, want, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("n", [5000, 20_000])
def test_error_and_intervals_over_draws(tmp_path, n):
    """`python -m benchmarks.learner_noise --examples 5000 20000 --draws 200` takes 200 draws."""
    command = [sys.executable, "-m", "benchmarks.learner_noise", "--examples", str(n)]
    command += ["--draws", "12", "--json", str(tmp_path / "noise.json")]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    (row,) = json.loads((tmp_path / "noise.json").read_text("utf-8"))
    assert row["learnt"] == row["draws"] == 12
    assert row["key_query_error"] / row["key_query_bound"] < 1.2
    # 256 numbers and 12 draws: four standard deviations of a share, were about a fourth of the
    # numbers of a draw independent.
    for share, level in zip(row["coverage"], (0.5, 0.9, 0.95), strict=True):
        assert abs(share - level) < 4 * np.sqrt(level * (1 - level) / (12 * 64))
