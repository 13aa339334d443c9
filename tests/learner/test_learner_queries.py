"""Layers learnt by queries: exactly, by the queries counted, or not at all and with the reason."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import check_grad

import mhfast as mh
from mhfast.learner.queries import fitting, learning, oracle, search, starts
from mhfast.learner.queries.signs import signs

learn = mh.learn_layer_by_queries
EXACT = 1e-10  # errors are some 1e-13; conditions of 1e-5 leave that of 1e-16


def random_layer(heads, dim, out_dim, seed=0):
    return mh.Layer.gaussian(heads, dim, out_dim, std=dim**-0.5, seed=seed)


def changed(layer, **changes):
    """The layer with some W or V put in place: changed(layer, V={1: ...})."""
    arrays = {"W": np.array(layer.W), "V": np.array(layer.V)}
    for name, places in changes.items():
        for head, value in places.items():
            arrays[name][head] = value
    return mh.Layer(**arrays)


class Counted:
    """An oracle that counts inputs itself."""

    def __init__(self, function):
        self.function, self.inputs = function, 0

    def __call__(self, X):
        self.inputs += len(X)
        assert X.dtype == np.float64
        # Tokens are the same numbers in float32.
        np.testing.assert_array_equal(X, X.astype(np.float32))
        return self.function(X)


@pytest.mark.parametrize(
    ("heads", "dim", "out_dim", "tokens"),
    [
        (1, 5, 3, 2),
        (3, 8, 7, 2),
        (2, 7, 5, 3),
        (3, 6, 2, 2),  # more heads than outputs
        (2, 6, 1, 5),
        (4, 3, 6, 2),  # more heads than dimensions
        (2, 1, 3, 4),
    ],
)
def test_a_layer_is_learnt_exactly(heads, dim, out_dim, tokens):
    truth = random_layer(heads, dim, out_dim)
    asked = Counted(truth)
    result = learn(asked, d=dim, T=tokens, heads=heads)
    assert result.learnt, result.verdict
    assert mh.learner.align(result.layer, truth).error < EXACT
    assert result.queries == asked.inputs == sum(result.asked.values())
    # 150 inputs find the size of tokens, the sum and the verdict, whatever there is to learn.
    assert result.queries < 4 * heads * dim**2 + 150
    assert result.noise == 0.0
    assert result.standard_error is None


def test_queries_are_few_where_outputs_are_many():
    """A row tells several numbers: the queries grow with H d (d + p) / p, not with H d²."""
    result = learn(random_layer(4, 16, 16), d=16, T=2, heads=4)
    assert result.learnt
    assert result.queries < 4 * 16 * (16 + 16) / 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_large_layer_is_learnt_exactly(dtype):
    truth = random_layer(12, 64, 64)
    asked = mh.Layer(np.asarray(truth.W, dtype), np.asarray(truth.V, dtype))
    result = learn(asked, d=64, T=2, heads=12)
    assert result.learnt, result.verdict
    assert mh.learner.align(result.layer, truth).error < (EXACT if dtype == "float64" else 1e-5)
    assert result.queries < 4 * 12 * 64**2 / 10


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_scores_of_any_size(scale):
    truth = random_layer(2, 6, 5)
    truth = mh.Layer(scale * truth.W, truth.V)
    result = learn(truth, d=6, T=3, heads=2)
    assert result.learnt, result.verdict
    assert mh.learner.align(result.layer, truth).W_error.max() < EXACT


@pytest.mark.parametrize("tokens", [2, 5])
def test_a_sharp_head_beside_flat_ones(tokens):
    truth = random_layer(3, 8, 7)
    truth = changed(truth, W={1: 100.0 * truth.W[1]}, V={0: 0.01 * truth.V[0]})
    result = learn(truth, d=8, T=tokens, heads=3)
    assert result.learnt, result.verdict
    found = mh.learner.align(result.layer, truth)
    # Errors of the outputs through the condition, and two digits more for a V of .01.
    told = {certificate.name: certificate.value for certificate in result.certificates}
    most = told["held-out residual"] / np.sqrt(told["identified"]) / 0.01
    assert max(found.W_error.max(), found.V_error.max()) < most < 1e-5


def test_values_that_are_proportional():
    truth = random_layer(3, 8, 7)
    truth = changed(truth, V={1: 2.0 * truth.V[0]})
    result = learn(truth, d=8, T=2, heads=3)
    assert result.learnt, result.verdict
    assert mh.learner.align(result.layer, truth).error < EXACT


def test_biases_are_those_of_one_more_coordinate():
    rng = np.random.default_rng(0)
    W, V = rng.standard_normal((2, 7, 7)), rng.standard_normal((2, 7, 4))
    W[:, :, 6] = 0.0  # adds the same to all scores of a query
    V[:, 6] = V[:, 6].mean(axis=0)  # only the sum shows
    truth = mh.Layer(W / np.sqrt(7), V)

    def with_biases(X):
        return truth(np.concatenate([X, np.ones((*X.shape[:2], 1))], axis=2))

    for tokens in (2, 3):
        result = learn(with_biases, d=6, T=tokens, heads=2, bias=True)
        assert result.learnt, result.verdict
        assert mh.learner.align(result.layer, truth).error < EXACT
    without = learn(with_biases, d=6, T=2, heads=2)
    assert not without.learnt
    assert without.verdict.endswith("bias=True if there are biases")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_float32_oracle(wrapped):
    truth = random_layer(3, 8, 7)
    single = mh.Layer(truth.W.astype("f4"), truth.V.astype("f4"))
    result = learn((lambda X: single(X.astype("f4"))) if wrapped else single, d=8, T=3, heads=3)
    assert result.learnt, result.verdict
    # Rounding of 6e-8, enlarged by the condition.
    assert mh.learner.align(result.layer, truth).error < 1e-5


def noisy(layer, noise, seed):
    rng = np.random.default_rng(seed)

    def ask(X):
        outputs = layer(X)
        return outputs + noise * rng.standard_normal(outputs.shape)

    return ask


def test_noise_and_its_standard_error():
    """Over seeds and sizes of the sample the error is what the standard error says."""
    ratios = []
    for seed in range(4):
        truth = random_layer(2, 6, 5, seed)
        for queries in (2000, 6000):
            result = learn(
                noisy(truth, 0.01, seed),
                d=6, T=2, heads=2, noise=(None, 0.01)[seed % 2], queries=queries, seed=seed,
            )  # fmt: skip
            assert result.learnt, result.verdict
            assert 0.9 * queries < result.queries <= 1.01 * queries + 50
            # 512 outputs measure it to 3 %; here four standard deviations.
            assert 0.88 < result.noise / 0.01 < 1.12
            ratios.append(mh.learner.align(result.layer, truth).error / result.standard_error)
    # The noise of the sum of the values is not in the standard error: some 10 % more.
    assert 0.85 < np.sqrt(np.mean(np.square(ratios))) < 1.4


def test_noise_as_large_as_the_outputs_is_not_learnt():
    result = learn(noisy(random_layer(2, 6, 5), 30.0, 0), d=6, T=3, heads=2)
    assert not result.learnt
    assert result.verdict.startswith("not learnt: ")


def test_an_oracle_that_rounds_in_another_order_is_exact():
    truth = random_layer(2, 6, 5)
    rng = np.random.default_rng(0)

    def ask(X):
        outputs = truth(X)
        return outputs * (1.0 + 1e-16 * rng.integers(-1, 2, outputs.shape))

    result = learn(ask, d=6, T=2, heads=2)
    assert result.learnt
    assert result.noise == 0.0


# What cannot be learnt.


def cases():
    truth = random_layer(3, 6, 5)
    W, V = truth.W, truth.V
    fewer = "the outputs are those of 2 heads, not 3"
    return [
        ("equal W", changed(truth, W={1: W[0]}), 2, fewer),
        ("V of zero", changed(truth, V={1: 0.0}), 4, fewer),
        ("V adds up to zero", changed(truth, V={2: -V[0] - V[1]}), 2, "their V add up to 0"),
        ("V opposite", changed(truth, V={2: -V[0]}), 2, "their V add up to 0"),
        ("one W of zero", changed(truth, W={0: 0.0}), 2, "heads of W = 0 besides"),
        ("all W of zero", mh.Layer(0.0 * W, V), 2, "attention has no effect"),
        ("one token", truth, 1, "with T = 1 attention has no effect"),
    ]


@pytest.mark.parametrize(("name", "truth", "tokens", "reason"), cases(), ids=lambda c: str(c)[:20])
def test_what_outputs_cannot_tell_is_not_learnt(name, truth, tokens, reason):
    del name
    result = learn(truth, d=6, T=tokens, heads=3)
    assert not result.learnt
    assert result.verdict.startswith("not learnt: ")
    assert reason in result.verdict
    if result.layer is not None:  # the outputs are right all the same
        X = np.random.default_rng(1).standard_normal((4, tokens, 6))
        np.testing.assert_allclose(result.layer(X), truth(X), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["V adds up to zero", "V opposite", "one W of zero"])
def test_a_third_token_tells_the_signs(name):
    (truth,) = (case[1] for case in cases() if case[0] == name)
    result = learn(truth, d=6, T=3, heads=3)
    assert result.learnt, result.verdict
    assert mh.learner.align(result.layer, truth).error < EXACT


def test_the_reason_for_the_signs_is_true():
    """The other signs are another layer, with the same outputs for two tokens and not for three."""
    (truth,) = (case[1] for case in cases() if case[0] == "V adds up to zero")
    other = mh.Layer(-truth.W, -truth.V)
    X = np.random.default_rng(0).standard_normal((4, 3, 6))
    np.testing.assert_allclose(other(X[:, :2]), truth(X[:, :2]), atol=1e-12)
    assert np.abs(other(X) - truth(X)).max() > 0.1


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, X: layer(X**2),
        lambda layer, X: layer(X) + X @ layer.V[0],
        lambda layer, X: mh.Layer(layer.W, layer.V, causal=True)(X),
        lambda layer, X: layer(X) * (1.0 + X[:, :1, :1]),
        lambda layer, X: layer(np.sort(X, axis=1)),
    ],
    ids=["squares", "residual connection", "causal", "product", "sorted"],
)
def test_functions_that_are_no_such_layer(change):
    layer = random_layer(1, 3, 4)
    result = learn(lambda X: change(layer, X), d=3, T=3, heads=1)
    assert not result.learnt, result.verdict
    assert result.verdict.startswith("not learnt: ")


def test_outputs_that_are_not_linear_are_refused_however_small_they_are():
    layer = random_layer(1, 3, 4)
    result = learn(lambda X: 1e-30 * layer(X**2), d=3, T=3, heads=1)
    assert "outputs of equal tokens are not linear" in result.verdict


def test_more_heads_than_are_asked_for():
    result = learn(random_layer(2, 4, 5), d=4, T=2, heads=1)
    assert not result.learnt
    assert "no 1 heads or fewer" in result.verdict


def test_a_head_too_many_is_told():
    truth = random_layer(2, 6, 5)
    result = learn(truth, d=6, T=2, heads=3)
    assert "the outputs are those of 2 heads, not 3" in result.verdict
    assert mh.learner.align(result.layer, truth).error < EXACT


def test_the_sum_alone_is_learnt_from_one_token():
    truth = random_layer(3, 6, 5)
    result = learn(truth, d=6, T=1, heads=3)
    np.testing.assert_allclose(result.layer.V[0], truth.V.sum(axis=0), atol=1e-13)


def test_a_layer_of_means():
    truth = mh.Layer(np.zeros((1, 4, 4)), random_layer(1, 4, 5).V)
    result = learn(truth, d=4, T=3, heads=1)
    assert result.learnt, result.verdict
    assert np.abs(result.layer.W).max() == 0.0


def test_a_result_tells_itself():
    truth = random_layer(2, 5, 4)
    result = learn(truth, d=5, T=2, heads=2)
    assert str(result).startswith(result.verdict)
    assert f"learnt, 2 heads, {result.queries} queries: " in result.verdict
    again = learn(truth, d=5, T=2, heads=2)
    np.testing.assert_array_equal(again.layer.W, result.layer.W)
    assert again.queries == result.queries


# Parts.


def rows_of(A, C, count, seed=0):
    rng = np.random.default_rng(seed)
    Q = rng.standard_normal((count, A.shape[1]))
    b = np.resize([0.0, 0.7], count)
    return oracle.Rows(Q, b, np.tanh(0.5 * (Q @ A.T + b[:, None])) @ C)


def jacobian(rows, A, C):
    """Derivatives of all outputs by A and C, dense."""
    tau = np.tanh(0.5 * (rows.Q @ A.T + rows.b[:, None]))
    by_A = np.einsum("nh,ni,hp->nphi", 0.5 * (1.0 - tau**2), rows.Q, C)
    by_C = np.einsum("ng,pq->npgq", tau, np.eye(C.shape[1]))
    n = rows.Y.size
    return by_A.reshape(n, -1), by_C.reshape(n, -1)


def test_the_condition_and_the_variances_are_those_of_the_jacobian():
    rng = np.random.default_rng(0)
    A, C = rng.standard_normal((3, 4)), rng.standard_normal((3, 2))
    rows = rows_of(A, C, 40)

    def outputs(a):
        tau = np.tanh(0.5 * (rows.Q @ a.reshape(A.shape).T + rows.b[:, None]))
        return float(np.sum(tau @ C))

    by_A, by_C = jacobian(rows, A, C)
    assert check_grad(outputs, lambda _: by_A.sum(axis=0), A.ravel()) < 1e-5
    J = np.hstack([by_A, by_C])
    inverse = np.linalg.inv(J.T @ J)
    of_A, of_C = fitting.variances(rows, fitting.Fit(A, C, 0.0))
    assert of_A == pytest.approx(np.trace(inverse[:12, :12]), rel=1e-9)
    assert of_C == pytest.approx(np.trace(inverse[12:, 12:]), rel=1e-9)
    left = by_A - by_C @ np.linalg.lstsq(by_C, by_A, rcond=None)[0]
    worst = 1.0
    for matrix in (left.T @ left, by_C.T @ by_C):
        scale = np.sqrt(np.diag(matrix))
        values = np.linalg.eigvalsh(matrix / np.outer(scale, scale))
        worst = min(worst, values[0] / values[-1])
    bound = fitting.identified(rows, fitting.Fit(A, C, 0.0))
    assert worst / 12 < bound <= worst  # a lower bound, by no more than the number of unknowns


@pytest.mark.parametrize("case", ["twice the same", "no value", "too few rows"])
def test_heads_that_are_not_determined_have_no_condition(case):
    rng = np.random.default_rng(0)
    A, C = rng.standard_normal((3, 4)), rng.standard_normal((3, 2))
    if case == "twice the same":
        A[1] = A[0]
    elif case == "no value":
        C[1] = 0.0
    rows = rows_of(A, C, 8 if case == "too few rows" else 40)
    assert fitting.identified(rows, fitting.Fit(A, C, 0.0)) < search.IDENTIFIED


def test_a_fit_returns_to_the_heads():
    rng = np.random.default_rng(0)
    A, C = rng.standard_normal((3, 4)), rng.standard_normal((3, 2))
    fit = fitting.fit_heads(rows_of(A, C, 40), A + 0.1 * rng.standard_normal(A.shape))
    np.testing.assert_allclose(fit.A, A, atol=1e-11)
    np.testing.assert_allclose(fit.C, C, atol=1e-11)


@pytest.mark.parametrize("shape", [(7, 5, 6), (2, 7, 8), (8, 3, 7)])
def test_a_sum_of_tensors_of_rank_one_is_decomposed(shape):
    rng = np.random.default_rng(0)
    factors = [rng.standard_normal((n, 4)) for n in shape]
    T = np.einsum("ah,bh,ch->abc", *factors)
    found = starts.decompose(T, 4, rng)
    np.testing.assert_allclose(np.einsum("ah,bh,ch->abc", *found), T, atol=1e-9)
    cosines = np.abs(
        (factors[1] / np.linalg.norm(factors[1], axis=0)).T
        @ (found[1] / np.linalg.norm(found[1], axis=0))
    )
    np.testing.assert_allclose(cosines.max(axis=1), 1.0, atol=1e-9)


def test_a_tensor_that_tells_too_little_is_not_decomposed():
    rng = np.random.default_rng(0)
    factors = [rng.standard_normal((n, 4)) for n in (2, 3, 7)]
    assert starts.decompose(np.einsum("ah,bh,ch->abc", *factors), 4, rng) is None
    assert starts.decompose(np.zeros((5, 6, 7)), 2, rng) is None


def test_lengths_of_directions_by_their_profiles():
    rng = np.random.default_rng(0)
    directions, lengths = rng.standard_normal((3, 2)), np.array([0.3, 5.0])
    A = directions / np.linalg.norm(directions, axis=0) * lengths
    centres = rng.standard_normal((11, 3))
    profile = starts._first_derivative(centres @ A) * [2.0, -7.0]
    pairs = SimpleNamespace(size=1.0, bias=False)
    found = starts._lengths(
        pairs, directions, profile, centres, np.zeros(11), starts._first_derivative
    )
    # Up to signs, which that derivative does not tell, and to the grid of lengths, of ratio 1.05.
    np.testing.assert_allclose(np.abs(found), np.abs(A.T), rtol=0.05)


def test_signs_by_the_sum():
    C = np.random.default_rng(0).standard_normal((4, 3))
    wanted = np.array([1.0, -1.0, -1.0, 1.0])
    found, _ = signs(C, wanted @ C, 1e-16, noisy=False)
    np.testing.assert_array_equal(found, wanted)


# Errors.


@pytest.mark.parametrize(
    ("function", "error", "sentence"),
    [
        (lambda X: X[:1], ValueError, r"oracle\(X\): expected shape \(n, T, p\) = \(4, 3, p\)"),
        (lambda X: X[..., 0], ValueError, r"oracle\(X\): expected shape .* got \(4, 3\)"),
        (lambda X: X[..., :0], ValueError, r"oracle\(X\): expected at least one output"),
        (lambda X: X * np.nan, ValueError, r"oracle\(X\): expected finite numbers"),
        (lambda X: X.astype(int), TypeError, r"oracle\(X\): expected real numbers, got int64"),
        (lambda X: X + 1j, TypeError, r"oracle\(X\): expected real numbers, got complex128"),
        (lambda _: "outputs", TypeError, r"oracle\(X\): expected an array of numbers"),
        (None, TypeError, "oracle: expected a callable, got NoneType"),
        (mh.Layer.zeros(2, 4, 5), ValueError, "oracle: expected a Layer of tokens of dimension 6"),
        (mh.Layer.zeros(2, 6, 5, query=0), ValueError, "oracle: expected a Layer without query"),
        (mh.Layer.zeros(2, 6, 5, causal=True), ValueError, "expected a Layer without causal"),
        (mh.Layer.zeros(2, 6, 5, runs=3), ValueError, "without a run axis"),
    ],
)
def test_errors_name_the_oracle(function, error, sentence):
    with pytest.raises(error, match=sentence):
        learn(function, d=6, T=3, heads=2)


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"d": 0}, ValueError, "d: expected an integer of at least 1, got 0"),
        ({"T": 2.0}, TypeError, "T: expected an integer, got float"),
        ({"heads": 0}, ValueError, "heads: expected an integer of at least 1, got 0"),
        ({"noise": -1.0}, ValueError, "noise: expected a standard deviation of at least 0"),
        ({"noise": np.inf}, ValueError, "noise: expected a finite number"),
        ({"queries": 0}, ValueError, "queries: expected an integer of at least 1"),
        ({"seed": -1}, ValueError, "seed: expected an integer of at least 0, got -1"),
    ],
)
def test_errors_name_the_setting(settings, error, sentence):
    with pytest.raises(error, match=sentence):
        learn(random_layer(2, 6, 5), **{"d": 6, "T": 2, "heads": 2, **settings})


# A layer of torch.


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_heads_of_a_module_of_torch(biased, dtype):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    d, heads, tokens = 12, 3, 5
    module = torch.nn.MultiheadAttention(d, heads, bias=biased, batch_first=True)
    with torch.no_grad():
        module.in_proj_weight.mul_(2.0)
        if biased:
            module.in_proj_bias.normal_()
            module.out_proj.bias.normal_()
    module = module.to(getattr(torch, dtype)).eval()

    def ask(X):
        with torch.no_grad():
            x = torch.from_numpy(X).to(getattr(torch, dtype))
            return module(x, x, x, need_weights=False)[0].numpy()

    result = learn(ask, d=d, T=tokens, heads=heads, bias=biased)
    assert result.learnt, result.verdict
    X = np.random.default_rng(0).standard_normal((20, tokens, d))
    Y = ask(X)
    if biased:
        X = np.concatenate([X, np.ones((20, tokens, 1))], axis=2)
    difference = np.linalg.norm(result.layer(X) - Y) / np.linalg.norm(Y)
    assert difference < (EXACT if dtype == "float64" else 1e-5)
    k = d // heads
    query, key, value = module.in_proj_weight.detach().numpy().reshape(3, heads, k, d)
    W = np.einsum("hki,hkj->hij", query, key) / np.sqrt(k)
    V = np.einsum(
        "hki,ohk->hio", value, module.out_proj.weight.detach().numpy().reshape(d, heads, k)
    )
    inside = mh.Layer(W.astype("f8"), V.astype("f8"))
    found = mh.Layer(result.layer.W[:, :d, :d], result.layer.V[:, :d])
    assert mh.learner.align(found, inside).error < (EXACT if dtype == "float64" else 1e-4)


def test_the_least_numbers_are_those_of_the_documentation():
    assert (learning.EXACT, learning.SINGLE, search.IDENTIFIED) == (1e-8, 3.6e-6, 1e-11)


class Asked(SimpleNamespace):
    """An oracle of a layer, with the attributes that are given."""

    def __call__(self, X):
        return self.layer(X)


def test_the_share_of_the_outputs_beyond_noise():
    layer = mh.Layer(np.zeros((1, 3, 3)), np.array([[[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]]))
    oracle = Asked(layer=layer, dim=3, tokens=1, rounding=0.0)
    rng, noise = np.random.default_rng(0), 1.5
    asked = SimpleNamespace(oracle=oracle, rng=rng, size=20.0, bias=False, noise=noise)
    residual, _, beyond = learning._Learner.judge(asked, layer)
    assert residual == 0.0
    # Of one token the outputs are those of V: entries of X have the variance 400 / 3, outputs the
    # mean square 25 / 2 of that, to a quarter with 24 inputs, of which noise is a thousandth.
    share = noise**2 / (25 / 2 * 400 / 3)
    assert 1 - 2 * share < beyond < 1 - share / 4


@pytest.mark.parametrize(
    ("heads", "d", "p", "points"),
    [
        (2, 3, 2, [3, 4, 6, 8, "hessians", "hessians", 3, 3]),
        (3, 3, 2, ["hessians", "hessians", 4, 4]),
        (3, 2, 3, [4, 4]),
        (4, 3, 2, []),
        (1, 3, 1, [3, 4, 6, 8, "hessians", "hessians"]),
    ],
)
def test_which_starts_are_tried(monkeypatch, heads, d, p, points):
    """Before random ones: by gradients at so many points, by Hessians."""
    tried = []

    def by_gradients(pairs, delta, heads, points, rng):  # noqa: ARG001
        tried.append(points)
        return iter(())

    def by_hessians(pairs, delta, heads, rng):  # noqa: ARG001
        tried.append("hessians")
        return iter(())

    monkeypatch.setattr(starts, "_by_gradients", by_gradients)
    monkeypatch.setattr(starts, "_by_hessians", by_hessians)
    pairs = SimpleNamespace(values=np.zeros((d, p)), bias=False, size=1.0)
    method, A = next(starts.starts(pairs, np.zeros(d), heads, np.random.default_rng(0)))
    assert (method, A.shape) == ("random", (heads, d))
    assert tried == points
