"""The compiled core of the learner: simplex fits of rows, and the second moments it sums."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy.optimize import nnls

import mhfast as mh
from mhfast import _core
from mhfast.learner import learning

EPS = np.finfo(np.float64).eps
ISAS = _core.available_isas()
INPUTS = ("gaussian", "boolean", "lattice", "repeated")
N, T, D, P, HEADS = 4, 3, 5, 2, 7


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def tokens_of(kind, shape, rng):
    """Tokens; all but the first kind hold coinciding tokens, ties and flat hulls."""
    if kind == "gaussian":
        return rng.standard_normal(shape)
    if kind == "boolean":
        return rng.choice([-1.0, 1.0], shape)
    if kind == "lattice":
        return rng.integers(-1, 2, shape).astype(float)
    several = rng.standard_normal(shape)[:, : (shape[1] + 1) // 2]
    return np.ascontiguousarray(np.tile(several, (1, 2, 1))[:, : shape[1]])


def rows_problem(kind, n, tokens, d, p, *, seed=0, noise=0.5):
    """X, Y, V_sum, and for every row its corners (rows, T, p) and target (rows, p)."""
    rng = np.random.default_rng(seed)
    X = tokens_of(kind, (n, tokens, d), rng)
    V_sum = rng.integers(-2, 3, (d, p)).astype(float)
    if kind == "gaussian":
        V_sum = rng.standard_normal((d, p))
    weights = rng.dirichlet(np.full(tokens, 0.7), (n, tokens))
    Y = weights @ X @ V_sum + noise * rng.standard_normal((n, tokens, p))
    return X, Y, V_sum, np.repeat(X @ V_sum, tokens, axis=0), Y.reshape(-1, p)


def rest(corners, target, weights):
    return target - np.einsum("rt,rtp->rp", weights, corners)


def scale_of(corners, target):
    """Length of the longest vector in a row's fit."""
    return np.linalg.norm(corners, axis=2).max(1) + np.linalg.norm(target, axis=1)


def on_plane(corners, target):
    """Weights of any sign that sum to one, of the nearest point; least norm if not unique."""
    edges = corners[:, 1:] - corners[:, :1]
    others = np.einsum("rp,rpt->rt", target - corners[:, 0], np.linalg.pinv(edges, rcond=1e-11))
    return np.concatenate([1 - others.sum(1, keepdims=True), others], axis=1)


def nearest(corners, target, most=None):
    """Weights of the nearest point with at most so many corners, by trying all of them.

    A nearest point of a hull is one of some affinely independent corners, and there the nearest
    point of their plane.
    """
    rows, T, _ = corners.shape
    found, least = np.zeros((rows, T)), np.full(rows, np.inf)
    for size in range(1, min(T, most or T) + 1):
        for some in itertools.combinations(range(T), size):
            weights = np.zeros((rows, T))
            weights[:, some] = on_plane(corners[:, some], target)
            left = np.linalg.norm(rest(corners, target, weights), axis=1)
            better = (weights.min(1) >= -1e-13) & (left < least)
            found[better], least[better] = weights[better], left[better]
    return found, least


def check_simplex(weights, support):
    assert weights.min() >= 0
    assert (weights > 0).sum(1).max() <= support
    # One rounded sum of at most 12 weights.
    assert np.abs(weights.sum(1) - 1).max() <= 12 * EPS


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("noise", [0.0, 0.5, 20.0])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
def test_fit_is_the_nearest_of_all_supports(tokens, noise, kind):
    for seed, (d, p) in enumerate([(1, 2), (2, 1), (4, 3), (7, 9), (9, 6)]):
        X, Y, V_sum, corners, target = rows_problem(kind, 8, tokens, d, p, seed=seed, noise=noise)
        _, exact = nearest(corners, target)
        for support in (tokens, tokens + 1, 99):
            weights, left = _core.fit_rows(X, Y, None, V_sum, support, 1)
            check_simplex(weights, tokens)
            scale = scale_of(corners, target) + EPS
            # Rounding, magnified by flat hulls: measured at most 2e-14.
            assert (np.abs(left - exact) / scale).max() < 1e-11
            direct = np.linalg.norm(rest(corners, target, weights), axis=1)
            assert (np.abs(left - direct) / scale).max() < 20 * EPS  # sums of at most 9 terms


@pytest.mark.parametrize("tokens", [2, 3, 4, 5])
def test_weights_of_a_hull_with_volume_are_the_exact_ones(tokens):
    X, Y, V_sum, corners, target = rows_problem("gaussian", 30, tokens, 9, 8, seed=tokens)
    weights, _ = _core.fit_rows(X, Y, None, V_sum, tokens, 1)
    exact, _ = nearest(corners, target)
    assert np.all((weights > 0) == (exact > 0))
    # Rounding times the condition of the edges' Gram matrix, at most a few thousand here.
    assert np.abs(weights - exact).max() < 1e-11


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("tokens", [2, 5, 8, 12])
def test_no_corner_descends_from_the_fit(tokens, kind):
    """Conditions of Karush, Kuhn and Tucker: all slopes equal where positive, none below."""
    for seed, (d, p) in enumerate([(3, 1), (6, 5), (11, 4), (13, 14)]):
        for noise in (0.0, 0.5, 20.0):
            X, Y, V_sum, corners, target = rows_problem(
                kind, 6, tokens, d, p, seed=seed, noise=noise
            )
            weights, _ = _core.fit_rows(X, Y, None, V_sum, tokens, 1)
            check_simplex(weights, tokens)
            slope = -np.einsum("rtp,rp->rt", corners, rest(corners, target, weights))
            excess = slope - (weights * slope).sum(1, keepdims=True)
            scale = scale_of(corners, target)[:, None] ** 2 + EPS
            # The stated bound on what counts as a slope is 1e-13 of the size of the terms.
            assert (excess / scale).min() > -2e-13
            assert np.abs(np.where(weights > 0, excess, 0) / scale).max() < 2e-13


@pytest.mark.parametrize("tokens", [6, 12])
def test_fit_agrees_with_nonnegative_least_squares(tokens):
    X, Y, V_sum, corners, target = rows_problem("gaussian", 3, tokens, 9, 7)
    _, left = _core.fit_rows(X, Y, None, V_sum, tokens, 1)
    heavy = 1e4
    for row, (g, y) in enumerate(zip(corners, target, strict=True)):
        weights, _ = nnls(np.vstack([g.T, np.full(tokens, heavy)]), np.append(y, heavy))
        # The sum is one only to heavy^-2 times the pull on it; a full hull leaves rounding.
        assert left[row] == pytest.approx(np.linalg.norm(y - weights @ g), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_few_corners_have_their_exact_weights(noise, kind):
    tokens = 9
    X, Y, V_sum, corners, target = rows_problem(kind, 5, tokens, 7, 6, seed=3, noise=noise)
    scale = scale_of(corners, target)
    before = np.full(len(target), np.inf)
    for support in range(1, tokens + 1):
        weights, left = _core.fit_rows(X, Y, None, V_sum, support, 1)
        check_simplex(weights, support)
        for row, weight in enumerate(weights):
            some = np.flatnonzero(weight)
            part, aim = corners[row : row + 1, some], target[row : row + 1]
            exact = rest(part, aim, on_plane(part, aim))
            assert abs(left[row] - np.linalg.norm(exact)) < 1e-11 * scale[row]  # rounding
        # One more corner is one more step of the same descent.
        assert np.all(left <= before + 1e-13 * scale)
        before = left


def test_which_corners_are_chosen():
    """One: the nearest. Two: also the one along which the error falls fastest from there."""
    X, Y, V_sum, corners, target = rows_problem("gaussian", 40, 5, 6, 4, seed=2, noise=5.0)
    rows = np.arange(200)
    distance = np.linalg.norm(corners - target[:, None], axis=2)
    start = distance.argmin(1)
    weights, left = _core.fit_rows(X, Y, None, V_sum, 1, 1)
    assert np.array_equal(weights, np.eye(5)[start])
    np.testing.assert_allclose(left, distance.min(1), rtol=1e-13)

    edges = corners - corners[rows, start][:, None]
    aim = target - corners[rows, start]
    fall = np.einsum("rtp,rp->rt", edges, aim)
    second = fall.argmax(1)
    # The nearest corner is the better end of the edge: the weight of the other is below one half.
    along = fall[rows, second] / ((edges[rows, second] ** 2).sum(1) + (second == start))
    expected = np.eye(5)[start] + along[:, None] * (np.eye(5)[second] - np.eye(5)[start])
    assert len(set(second == start)) == 2  # in some rows a corner is nearest of all
    weights, left = _core.fit_rows(X, Y, None, V_sum, 2, 1)
    assert np.abs(weights - expected).max() < 1e-12  # rounding
    direct = np.linalg.norm(rest(corners, target, expected), axis=1)
    assert np.abs(left - direct).max() < 1e-12 * distance.max()


@pytest.mark.parametrize(("tokens", "d", "p"), [(2, 3, 1), (3, 8, 2), (6, 7, 9), (8, 15, 7)])
def test_averages_of_tokens_are_explained(tokens, d, p):
    """Y_a = Σ_b p_b x_b V_sum of affinely independent corners (p >= T - 1) gives back p."""
    rng = np.random.default_rng(tokens)
    X, V_sum = rng.standard_normal((50, tokens, d)), rng.standard_normal((d, p))
    p_true = rng.dirichlet(np.ones(tokens), (50, tokens))
    weights, left = _core.fit_rows(X, p_true @ X @ V_sum, None, V_sum, tokens, 1)
    corners = np.repeat(X @ V_sum, tokens, axis=0)
    edges = corners[:, 1:] - corners[:, :1]
    # From Gram matrices: rounding by the square of the edges' condition.
    bound = 100 * EPS * np.linalg.cond(edges) ** 2 * scale_of(corners, corners[:, 0])
    assert np.all(np.abs(weights - p_true.reshape(-1, tokens)).max(1) < bound)
    assert np.all(left < bound)
    assert np.median(left) < 1e-14
    assert np.quantile(left, 0.9) < 1e-12


def test_one_token_has_all_the_weight():
    X, Y, V_sum = normal(N, 1, D), normal(N, 1, P, seed=1), normal(D, P, seed=2)
    weights, left = _core.fit_rows(X, Y, None, V_sum, 3, 1)
    assert np.array_equal(weights, np.ones((N, 1)))
    np.testing.assert_allclose(left, np.linalg.norm(Y - X @ V_sum, axis=2)[:, 0], rtol=1e-14)


def test_equal_tokens_share_one_weight():
    """Of tokens that coincide one is weighted, as if the others were not there."""
    X, Y, V_sum, *_ = rows_problem("gaussian", 10, 4, 6, 5)
    once, left = _core.fit_rows(X, Y, None, V_sum, 4, 1)
    twice = np.ascontiguousarray(np.concatenate([X, X[:, ::-1]], axis=1))
    targets = np.concatenate([Y, Y], axis=1)
    weights, again = _core.fit_rows(twice, targets, None, V_sum, 4, 1)
    folded = weights.reshape(10, 8, 8)
    folded = folded[:, :4, :4] + folded[:, :4, :3:-1]
    assert np.abs(folded.reshape(40, 4) - once).max() < 1e-12  # rounding
    assert np.abs(again.reshape(10, 8)[:, :4].ravel() - left).max() < 1e-12


def test_all_tokens_equal():
    X = np.repeat(normal(N, 1, D), T, axis=1)
    Y, V_sum = normal(N, T, P, seed=1), normal(D, P, seed=2)
    weights, left = _core.fit_rows(X, Y, None, V_sum, T, 1)
    assert np.array_equal(np.sort(weights, axis=1), np.tile([0.0, 0.0, 1.0], (N * T, 1)))
    np.testing.assert_allclose(left, np.linalg.norm(Y - X @ V_sum, axis=2).ravel(), rtol=1e-14)


def test_a_bad_sample_stays_alone():
    X, Y, V_sum = normal(N, T, D), normal(N, T, P, seed=1), normal(D, P, seed=2)
    weights, left = _core.fit_rows(X, Y, None, V_sum, T, 1)
    for bad in (np.nan, np.inf):
        spoilt, outputs = X.copy(), Y.copy()
        spoilt[1, 2, 3] = outputs[3, 0, 1] = bad
        worse, residuals = _core.fit_rows(spoilt, outputs, None, V_sum, T, 1)
        rows = [3, 4, 5, 9]
        assert not np.isfinite(residuals[rows]).any()
        assert np.array_equal(np.delete(residuals, rows), np.delete(left, rows))
        assert np.array_equal(np.delete(worse, rows, axis=0), np.delete(weights, rows, axis=0))


def test_listed_rows_are_those_of_all():
    X, Y, V_sum, *_ = rows_problem("gaussian", 9, 4, 6, 5)
    weights, left = _core.fit_rows(X, Y, None, V_sum, 3, 1)
    for rows in ([], [35], [7, 0, 7, 35, 34, 1], np.random.default_rng(0).permutation(36)):
        rows = np.array(rows, np.int64)
        some, residuals = _core.fit_rows(X, Y, rows, V_sum, 3, 1)
        assert np.array_equal(some, weights[rows])
        assert np.array_equal(residuals, left[rows])
        moment, again = _core.sum_equations(X, Y, rows, V_sum, 3, 0.4, 1)
        assert np.array_equal(again, residuals)
        close(moment, sum_moment(X, Y, rows, some, residuals, 0.4))


def close(moment, rows):
    """Compare with Σ r rᵀ, entry by entry, relative to what bounds it: sqrt(m_ii m_jj)."""
    rows = rows.reshape(-1, rows.shape[-1])
    size = np.linalg.norm(rows, axis=0)
    assert moment.shape == (len(size), len(size))
    assert np.array_equal(moment, moment.T)
    # Rounding of each number, a few units to tens, and of sums of at most 5000 terms.
    assert np.all(np.abs(moment - rows.T @ rows) <= 1e-13 * np.outer(size, size))


def sum_moment(X, Y, rows, weights, left, scale):
    sample, query = np.divmod(rows, X.shape[1])
    average = np.einsum("rt,rtd->rd", weights, X[sample])
    counts = 1 / (1 + (left / scale) ** 2)
    return counts[:, None] * np.concatenate([average, Y[sample, query]], axis=1)


@pytest.mark.parametrize("isa", ISAS)
def test_sum_equations_with_exact_weights(isa, use_isa):
    use_isa(isa)
    for tokens, d, p in [(1, 2, 3), (2, 4, 1), (3, 8, 9), (4, 7, 5), (4, 40, 37), (3, 90, 41)]:
        X, Y, V_sum, corners, target = rows_problem("gaussian", 7, tokens, d, p, seed=d)
        rows = np.arange(7 * tokens)
        weights, left = _core.fit_rows(X, Y, None, V_sum, tokens, 1)
        _, exact = nearest(corners, target)
        for scale in (0.3, 50.0, np.inf):
            moment, residuals = _core.sum_equations(X, Y, None, V_sum, tokens, scale, 1)
            assert np.array_equal(residuals, left)
            # Rounding, relative to the size of the terms.
            assert np.all(np.abs(residuals - exact) < 1e-12 * scale_of(corners, target))
            close(moment, sum_moment(X, Y, rows, weights, left, scale))


def test_sum_equations_at_the_truth_give_it_back():
    X, Y, V_sum, *_ = rows_problem("gaussian", 60, 3, 5, 4, noise=0)
    Y[::7] += 3  # these samples are left out: they count (residual / scale)^-4
    moment, _ = _core.sum_equations(X, Y, None, V_sum, 3, 1e-5, 1)
    again = np.linalg.solve(moment[:5, :5], moment[:5, 5:])
    assert np.abs(again - V_sum).max() < 1e-12


def facts_of(n, tokens, d, count, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, tokens, d))
    rows = rng.integers(0, n * tokens, count)
    first, second = rng.integers(0, tokens, (2, count))
    return X, rows, first, second, rng.standard_normal(count), rng.uniform(0, 3, count)


def fact_rows(X, rows, first, second, value, weight):
    sample, query = np.divmod(rows, X.shape[1])
    outer = np.einsum("rf,rg->rfg", X[sample, query], X[sample, first] - X[sample, second])
    made = np.concatenate([outer.reshape(len(rows), X.shape[2] ** 2), value[:, None]], axis=1)
    return np.sqrt(weight)[:, None] * made


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("d", range(1, 15))
def test_fact_moment(d, isa, use_isa):
    """Widths d² + 1 from 2 to 197: below, at and between multiples of registers and of 64."""
    use_isa(isa)
    for count in (0, 1, 2, 37):
        facts = facts_of(6, 4, d, count, seed=count)
        close(_core.fact_moment(*facts, 1), fact_rows(*facts))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("d", "count"), [(3, 5000), (8, 4100), (12, 3000)])
def test_fact_moment_of_more_rows_than_are_held(d, count, isa, use_isa):
    use_isa(isa)
    facts = facts_of(50, 4, d, count)
    close(_core.fact_moment(*facts, 1), fact_rows(*facts))


def test_facts_of_weight_zero_or_of_one_key_say_nothing():
    X, rows, first, second, value, weight = facts_of(6, 4, 3, 20)
    nothing = _core.fact_moment(X, rows, first, second, value, np.zeros(20), 1)
    assert np.array_equal(nothing, np.zeros((10, 10)))
    alike = _core.fact_moment(X, rows, first, first, value, weight, 1)
    assert alike[9, 9] == pytest.approx(weight @ value**2, rel=1e-14)
    alike[9, 9] = 0
    assert np.array_equal(alike, np.zeros((10, 10)))


def layer_outputs(X, W, V):
    """F, which may be complex: its real and imaginary parts differ by 1e-100 in size."""
    F = 0
    for w, v in zip(W, V, strict=True):
        logits = X @ w @ X.transpose(0, 2, 1)
        A = np.exp(logits - logits.real.max(-1, keepdims=True))
        F = F + (A / A.sum(-1, keepdims=True)) @ X @ v
    return F


def layer_rows(X, Y, W, V):
    """Derivatives by complex steps, exact but for rounding, and F - Y."""
    parameters, step = np.concatenate([W.ravel(), V.ravel()]), 1e-100
    columns = []
    for i in range(parameters.size):
        moved = parameters.astype(complex)
        moved[i] += 1j * step
        F = layer_outputs(X, moved[: W.size].reshape(W.shape), moved[W.size :].reshape(V.shape))
        columns.append(F.imag / step)
    return np.stack([*columns, layer_outputs(X, W, V) - Y], axis=-1)


def layer_problem(n, tokens, d, p, heads, *, size=1.0, seed=0):
    X, Y = normal(n, tokens, d, seed=seed), normal(n, tokens, p, seed=seed + 1)
    return X, Y, size * normal(heads, d, d, seed=seed + 2), normal(heads, d, p, seed=seed + 3)


LAYERS = [
    (4, 3, 5, 2, 1),
    (6, 1, 3, 2, 4),
    (2, 5, 1, 1, 3),
    (1, 2, 4, 12, 1),  # 65 numbers
    (3, 4, 7, 2, 2),  # 127
    (2, 4, 5, 3, 7),  # 281
    (2, 600, 2, 7, 1),  # more rows of a sample than are held at a time
    (90, 5, 3, 13, 1),  # samples in several portions
    (19, 2, 5, 3, 2),  # of two tokens; no whole number of groups
    (3, 2, 1, 2, 3),
    (8, 2, 9, 1, 4),
    (210, 2, 4, 3, 2),  # in several portions
    (2, 2, 33, 2, 1),  # of more numbers than a tile has
    (11, 3, 9, 5, 2),  # of three, several samples a group
    (3, 17, 5, 4, 2),  # of more tokens than queries are written at once
    (2, 3, 33, 20, 1),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", LAYERS)
def test_layer_equations(sizes, isa, use_isa):
    use_isa(isa)
    # Logits of less than 10, for complex steps lose the digits of weights near 0 or 1.
    the = layer_problem(*sizes, size=min(1.0, 5.0 / sizes[2]))
    close(_core.layer_equations(*the, 1), layer_rows(*the))


def test_layer_equations_have_the_gradient_of_the_loss():
    X, Y, W, V = layer_problem(N, T, D, P, HEADS)
    moment = _core.layer_equations(X, Y, W, V, 1)
    value, gradient = mh.reference.value_and_grad(mh.Layer(W, V), X, Y, loss="squared")
    want = np.concatenate([gradient["W"].ravel(), gradient["V"].ravel()])
    # The loss is the mean over samples of the squares. Sums of a few hundred rounded terms.
    assert moment[-1, -1] == pytest.approx(N * value, rel=1e-13)
    assert np.abs(moment[:-1, -1] - N / 2 * want).max() < 1e-12 * N * np.abs(want).max()


@pytest.mark.parametrize("tokens", [2, 4])
@pytest.mark.parametrize("size", [30.0, 1e3, 1e6])
def test_layer_equations_in_saturation(size, tokens):
    the = layer_problem(5, tokens, 3, 2, 2, size=size)
    moment, rows = _core.layer_equations(*the, 1), layer_rows(*the)
    assert np.isfinite(moment).all()
    # Logits of this size carry their rounding into the weights.
    want = np.einsum("ntpi,ntpj->ij", rows, rows)
    assert np.abs(moment - want).max() < 20 * EPS * size * np.abs(want).max()


def test_derivatives_by_two_tokens_far_in_saturation_keep_their_digits():
    """The weight of the other token is e = exp(-s), below one rounding error of 1 at s = 60."""
    d, s = 3, 60.0
    X = np.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    W, V = np.zeros((1, d, d)), np.arange(6.0).reshape(1, d, 2) ** 2
    W[0, 0, 0], W[0, 1, 1] = s, s  # each token attends to itself
    moment = _core.layer_equations(X, np.zeros((1, 2, 2)), W, V, 1)
    # By W[0, 0] the output of the first query changes by e (V[0] - V[1]), up to e itself; the
    # exponential and three products round.
    want = np.exp(-s) ** 2 * np.sum((V[0, 0] - V[0, 1]) ** 2)
    assert moment[0, 0] == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("tokens", [2, 3])
def test_layer_without_heads_leaves_the_outputs(tokens):
    X, Y, *_ = layer_problem(N, tokens, D, P, 1)
    moment = _core.layer_equations(X, Y, np.zeros((0, D, D)), np.zeros((0, D, P)), 1)
    np.testing.assert_allclose(moment, [[(Y**2).sum()]], rtol=1e-14)


def calls():
    """All functions of the number of threads, with work for several of them."""
    X, Y, V_sum, *_ = rows_problem("gaussian", 900, 6, 12, 5)
    rows = np.random.default_rng(0).permutation(5400)[:4999]
    facts = facts_of(50, 4, 12, 3001)
    return {
        "fit": lambda threads: _core.fit_rows(X, Y, None, V_sum, 5, threads),
        "listed": lambda threads: _core.fit_rows(X, Y, rows, V_sum, 5, threads),
        "sum": lambda threads: _core.sum_equations(X, Y, rows, V_sum, 5, 0.3, threads),
        "facts": lambda threads: [_core.fact_moment(*facts, threads)],
        "layer": lambda threads: [_core.layer_equations(*layer_problem(97, 5, 7, 2, 2), threads)],
        "pairs": lambda threads: [_core.layer_equations(*layer_problem(997, 2, 7, 3, 2), threads)],
    }


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", calls())
def test_thread_count_changes_nothing(name, isa, use_isa):
    use_isa(isa)
    call = calls()[name]
    expected = call(1)
    for threads in (1, 2, 3, 7, 0):
        for got, want in zip(call(threads), expected, strict=True):
            assert np.array_equal(got, want)


def test_calls_from_several_threads_at_once():
    work = calls()
    expected = {name: call(1) for name, call in work.items()}
    with ThreadPoolExecutor(4) as pool:
        results = [(name, pool.submit(call, 1)) for name, call in work.items() for _ in range(3)]
        for name, result in results:
            for got, want in zip(result.result(), expected[name], strict=True):
                assert np.array_equal(got, want)


def test_inputs_may_be_read_only_and_start_anywhere():
    def shifted(a):
        room = np.empty(a.size + 1, a.dtype)
        room[1:] = a.ravel()
        room.flags.writeable = False
        return room[1:].reshape(a.shape)

    X, Y, V_sum, *_ = rows_problem("gaussian", 20, 4, 7, 5)
    for function, arrays, options in [
        (_core.fit_rows, (X, Y, np.arange(30), V_sum), (3,)),
        (_core.sum_equations, (X, Y, np.arange(30), V_sum), (3, 0.5)),
        (_core.fact_moment, facts_of(9, 3, 7, 20), ()),
        (_core.layer_equations, layer_problem(N, T, D, P, HEADS), ()),
    ]:
        want = function(*arrays, *options, 1)
        got = function(*map(shifted, arrays), *options, 1)
        for a, b in zip(got, want, strict=True):
            assert np.array_equal(a, b)


def test_no_rows_give_empty_results_and_zero_moments():
    X, Y, V_sum = np.zeros((0, T, D)), np.zeros((0, T, P)), np.zeros((D, P))
    weights, left = _core.fit_rows(X, Y, None, V_sum, 2, 1)
    assert (weights.shape, left.shape) == ((0, T), (0,))
    moment, left = _core.sum_equations(X, Y, None, V_sum, 2, 1.0, 1)
    assert np.array_equal(moment, np.zeros((D + P, D + P)))
    assert left.shape == (0,)
    for tokens in (2, 3):
        X, Y = np.zeros((0, tokens, D)), np.zeros((0, tokens, P))
        moment = _core.layer_equations(X, Y, np.zeros((1, D, D)), np.zeros((1, D, P)), 1)
        assert np.array_equal(moment, np.zeros((D * (D + P) + 1,) * 2))


@pytest.mark.parametrize("sizes", [(0, 5, 2), (3, 5, 0), (3, 0, 2)])
def test_no_axis_but_the_first_may_be_empty(sizes):
    tokens, d, p = sizes
    X, Y, V_sum = np.zeros((4, tokens, d)), np.zeros((4, tokens, p)), np.zeros((d, p))
    expected = "X, Y: expected no empty axis but the first"
    with pytest.raises(ValueError, match=expected):
        _core.fit_rows(X, Y, None, V_sum, 2, 1)
    with pytest.raises(ValueError, match=expected):
        _core.sum_equations(X, Y, None, V_sum, 2, 1.0, 1)
    with pytest.raises(ValueError, match=expected):
        _core.layer_equations(X, Y, np.zeros((1, d, d)), V_sum[None], 1)


X0, Y0, S0 = np.zeros((N, T, D)), np.zeros((N, T, P)), np.zeros((D, P))
W0, V0 = np.zeros((HEADS, D, D)), np.zeros((HEADS, D, P))
FACTS = {
    "X": X0,
    "rows": np.array([0, 11]),
    "first": np.array([0, 2]),
    "second": np.array([1, 0]),
    "value": np.zeros(2),
    "weight": np.ones(2),
}
FUNCTIONS = {
    "fit_rows": {"X": X0, "Y": Y0, "rows": None, "sum": S0, "support": 2},
    "sum_equations": {"X": X0, "Y": Y0, "rows": None, "sum": S0, "support": 2, "scale": 1.0},
    "fact_moment": FACTS,
    "layer_equations": {"X": X0, "Y": Y0, "W": W0, "V": V0},
}


def strided(a):
    return np.zeros((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)[..., ::2]


def unaligned(a):
    return np.zeros(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)


def wrong_shapes():
    """One axis too long, and one axis too many, wherever a shape is known."""
    for name, arguments in FUNCTIONS.items():
        for key, a in arguments.items():
            if not isinstance(a, np.ndarray):
                continue
            yield name, key, np.zeros((*a.shape, 1), a.dtype)
            free = {"rows": [0], "X": [0, 1, 2], "Y": [2], "W": [0]}.get(key, [])
            for axis in set(range(a.ndim)) - set(free):
                yield name, key, np.zeros((*a.shape[:axis], 6, *a.shape[axis + 1 :]), a.dtype)


@pytest.mark.parametrize(("name", "key", "wrong"), list(wrong_shapes()))
def test_wrong_shapes_are_named(name, key, wrong):
    with pytest.raises(ValueError, match=rf"^{key}: expected shape \(.*\), got \(.*\)$") as error:
        getattr(_core, name)(*{**FUNCTIONS[name], key: wrong}.values(), 1)
    assert str(error.value).endswith(f"got {wrong.shape}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_layouts_and_types_are_not_converted(name):
    function, arguments = getattr(_core, name), FUNCTIONS[name]
    rows = {"rows": np.arange(4)} if arguments.get("rows", 0) is None else {}
    function(*{**arguments, **rows}.values(), 1)
    for key, a in {**arguments, **rows}.items():
        if not isinstance(a, np.ndarray):
            continue
        for wrong in (strided(a), unaligned(a)):
            with pytest.raises(ValueError, match=f"^{key}: expected a C-contiguous, aligned arr"):
                function(*{**arguments, **rows, key: wrong}.values(), 1)
        other = np.float32 if a.dtype == np.float64 else np.int32
        for dtype in (other, a.dtype.newbyteorder()):
            with pytest.raises(TypeError, match=f"^{key}: expected an array of {a.dtype}, got"):
                function(*{**arguments, **rows, key: a.astype(dtype)}.values(), 1)
        with pytest.raises(TypeError):
            function(*{**arguments, **rows, key: a.tolist()}.values(), 1)


@pytest.mark.parametrize(
    ("name", "key", "end"),
    [
        ("fit_rows", "rows", N * T),
        ("sum_equations", "rows", N * T),
        ("fact_moment", "rows", N * T),
        ("fact_moment", "first", T),
        ("fact_moment", "second", T),
    ],
)
def test_numbers_out_of_range(name, key, end):
    for number in (-1, end, 2**62):
        wrong = {**FUNCTIONS[name], key: np.array([0, number])}
        text = f"^{key}: expected numbers from 0 to {end - 1}, got {number}$"
        with pytest.raises(ValueError, match=text):
            getattr(_core, name)(*wrong.values(), 1)


@pytest.mark.parametrize("name", ["fit_rows", "sum_equations"])
@pytest.mark.parametrize("support", [0, -3])
def test_support_must_be_positive(name, support):
    wrong = {**FUNCTIONS[name], "support": support}
    with pytest.raises(ValueError, match=f"^support: expected at least 1, got {support}$"):
        getattr(_core, name)(*wrong.values(), 1)
    with pytest.raises(TypeError):
        getattr(_core, name)(*{**wrong, "support": 1.5}.values(), 1)


def test_facts_are_of_listed_rows():
    with pytest.raises(TypeError):
        _core.fact_moment(*{**FACTS, "rows": None}.values(), 1)


def test_a_fit_counts_the_parameters_of_all_heads(monkeypatch):
    """They divide what the residual may be; of each head d × d of W and d × p of V."""
    fits = []
    made = learning.Fit
    monkeypatch.setattr(learning, "Fit", lambda **rest: fits.append(rest) or made(**rest))
    examples = mh.data.boolean_layer(3000, 2, 6, 2, seed=1)
    found = mh.learn_layer(examples.X, examples.y, 2)
    assert found.learnt
    assert fits[-1]["parameters"] == 2 * 6 * (6 + found.layer.V.shape[-1])
