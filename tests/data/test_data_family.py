"""Data for the whole model family: the laws of the generators, and seeds as the run axis."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_data import digest

import mhfast as mh
from mhfast import _core
from mhfast.data import teachers


def signal(n: int = 7, seed: Any = 0, **changes: Any) -> mh.Dataset:
    settings = {"signal": 3.0, "rho": 0.25, "flip": 0.2, "weak": 2} | changes
    return mh.data.signal_noise(n, 5, 6, seed=seed, **settings)


def regression(n: int = 7, seed: Any = 0, **changes: Any) -> mh.Dataset:
    return mh.data.icl_regression(n, 5, 3, seed=seed, **changes)


def sphere(n: int = 7, seed: Any = 0, **changes: Any) -> mh.Dataset:
    return mh.data.sphere_tokens(n, 5, 4, seed=seed, **changes)


def boolean(n: int = 7, seed: Any = 0, **changes: Any) -> mh.Dataset:
    return mh.data.boolean_layer(n, 3, 5, 2, out_dim=4, seed=seed, **changes)


def parity(n: int = 7, seed: Any = 0, **changes: Any) -> mh.Dataset:
    return mh.data.parity_layer(n, 6, 3, 8.0, seed=seed, **changes)


def mixture(n: int = 7, seed: Any = 0, **changes: Any) -> mh.Dataset:
    return mh.data.tokenized_mixture(n, 10, 8, noise=0.5, seed=seed, **changes)


def planted(n: int = 7, seed: Any = 0, **changes: Any) -> mh.Dataset:
    return mh.data.planted_attention(n, 3, 5, 2, seed=seed, **changes)


GENERATORS = [signal, regression, sphere, boolean, parity, mixture, planted]
every_generator = pytest.mark.parametrize("make", GENERATORS, ids=lambda make: make.__name__)
Make = Callable[..., Any]


def test_signal_tokens_without_noise() -> None:
    data = signal(n=400, noise=0.0)
    mu_minus, mu_plus = data.truth["mu_minus"], data.truth["mu_plus"]
    # Two projections leave orthogonality to a few rounding errors.
    np.testing.assert_allclose([mu_minus @ mu_plus, mu_plus @ mu_plus], [0.0, 9.0], atol=1e-14)
    assert data.token_groups.names == ("signal", "weak", "noise")
    assert data.sample_groups.names == ("clean", "flipped")
    weak_signs = []
    for X, y, kind, flipped in zip(
        data.X, data.y, data.token_groups.index, data.sample_groups.index, strict=True
    ):
        assert sorted(kind) == [0, 1, 1, 2, 2]
        own = mu_plus if y * (1 - 2 * flipped) == 1 else mu_minus
        assert (X[kind == 0] == own).all()
        for x in X[kind == 1]:
            assert (x == 0.25 * mu_plus).all() or (x == 0.25 * mu_minus).all()
            weak_signs.append(np.sign(x @ (mu_plus - mu_minus)))
        assert not X[kind == 2].any()
    # Binomial standard deviations .02, .05, .035 and .02.
    assert abs(data.sample_groups.index.mean() - 0.2) < 0.08
    assert abs(data.y.mean()) < 0.2
    assert abs(np.mean(weak_signs)) < 0.15
    np.testing.assert_allclose((data.token_groups.index == 0).mean(axis=0), 0.2, atol=0.08)
    fixed = signal(positions="fixed", weak=0)
    assert (fixed.token_groups.index == [0, 2, 2, 2, 2]).all()


def test_signal_noise_is_added_to_every_token() -> None:
    clean, noisy = signal(n=900, noise=0.0), signal(n=900, noise=0.5)
    z = (noisy.X - clean.X).reshape(-1, 6)  # the other streams do not move
    assert (clean.y == noisy.y).all()
    # 4500 rows: covariances have a standard deviation of .25 / sqrt(4500) = .004, sqrt(2) more on
    # the diagonal.
    np.testing.assert_allclose(z.T @ z / len(z), 0.25 * np.eye(6), atol=0.025)
    assert signal(flip=0.0).sample_groups.index.sum() == 0
    assert signal(flip=1.0).sample_groups.index.sum() == 7
    test = noisy.sample(200, seed=0, flip=0.0, weak=0)
    assert not test.sample_groups.index.any()
    assert (test.truth["mu_plus"] == noisy.truth["mu_plus"]).all()
    assert test.truth["flip"] == 0.0


def test_regression_prompts() -> None:
    covariance = np.array([[2.0, 0.6], [0.6, 0.5]])
    data = regression(n=3000, covariance=covariance)
    assert data.X.shape == (3000, 5, 3)
    assert data.y.shape == (3000, 1, 1)
    x, response = data.X[..., :-1], data.X[..., -1]
    assert not response[:, -1].any()
    # Two pairs without noise determine the task, and with it the answer; the condition number of
    # two features is up to 1e5 in 3000 samples.
    w = np.linalg.solve(x[:, :2], response[:, :2, None])[..., 0]
    np.testing.assert_allclose((w * x[:, -1]).sum(axis=1), data.y[:, 0, 0], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose((w[:, None] * x[:, :-1]).sum(axis=2), response[:, :-1], atol=1e-8)
    # Standard deviations: entries of w'w .026, of x'x .023.
    np.testing.assert_allclose(w.T @ w / 3000, np.eye(2), atol=0.12)
    rows = x.reshape(-1, 2)
    np.testing.assert_allclose(rows.T @ rows / len(rows), covariance, atol=0.12)
    assert (data.truth["covariance"] == covariance).all()
    assert (data.token_groups.index == [0, 0, 0, 0, 1]).all()

    noisy = regression(n=3000, covariance=covariance, noise=0.5)
    assert (noisy.X[..., :-1] == x).all()
    assert (noisy.y == data.y).all()
    added = noisy.X[:, :-1, -1] - response[:, :-1]
    assert abs(added.std() - 0.5) < 0.02  # standard deviation .003
    for given, matrix in (
        (None, np.eye(2)),
        (3, 3.0 * np.eye(2)),
        ([2.0, 0.5], np.diag([2.0, 0.5])),
    ):
        assert (regression(covariance=given).truth["covariance"] == matrix).all()
    assert (data.sample(4, seed=1).truth["covariance"] == covariance).all()
    assert data.sample(4, seed=1, tokens=9, covariance=2.0).X.shape == (4, 9, 3)


def test_regression_is_a_task_of_a_layer() -> None:
    data = regression()
    layer = mh.Layer(np.zeros((2, 3, 3)), np.zeros((2, 3, 1)), query=-1)
    value, gradient = mh.value_and_grad(layer, data, loss="squared")
    # Seven squares in another order.
    assert math.isclose(value, (data.y**2).mean(), rel_tol=1e-14)
    assert gradient.V.shape == (2, 3, 1)


def test_sphere_tokens() -> None:
    data = sphere(n=2000)
    for points in (data.X, data.query, data.truth["readout"]):
        # The square root and three roundings.
        np.testing.assert_allclose(np.linalg.norm(points, axis=-1), 1.0, atol=1e-15)
    assert data.query.shape == (2000, 1, 4)
    rows = data.X.reshape(-1, 4)
    # Of 10000 unit vectors in four dimensions: standard deviations .005 and about .002.
    np.testing.assert_allclose(rows.mean(axis=0), 0.0, atol=0.025)
    np.testing.assert_allclose(rows.T @ rows / len(rows), np.eye(4) / 4, atol=0.012)
    assert abs(data.y.mean()) < 0.1  # standard deviation .022
    scores = data.y[:, None] * (data.X @ data.truth["readout"])
    best = data.truth["optimal"]
    assert (np.take_along_axis(scores, best[:, None], axis=1)[:, 0] == scores.max(axis=1)).all()
    assert data.token_groups.names == ("other", "optimal")
    assert (data.token_groups.index == (np.arange(5) == best[:, None])).all()
    bare = sphere(external_query=False)
    assert bare.query is None
    assert (bare.X == sphere().X).all()
    assert (bare.sample(3, seed=1).truth["readout"] == sphere().truth["readout"]).all()
    assert bare.sample(3, seed=1, external_query=True).query.shape == (3, 1, 4)


@pytest.mark.parametrize("inputs", ["boolean", "gaussian"])
def test_boolean_layer(inputs: str) -> None:
    data = mh.data.boolean_layer(500, 3, 16, 6, score_std=3.0, inputs=inputs, seed=1)
    layer = data.truth["layer"]
    assert layer.W.shape == (6, 16, 16)
    assert layer.V.shape == (6, 16, 16)
    assert ((np.abs(data.X) == 1.0).all()) == (inputs == "boolean")
    # Standard deviations .006 and .01.
    assert abs(data.X.mean()) < 0.04
    assert abs(data.X.std() - 1.0) < 0.04
    logits = np.einsum("id,hde,ie->ih", data.X[:, 0], layer.W, data.X[:, 1])
    # W has 6 · 256 entries: two percent.
    assert abs(logits.std() - 3.0) < 0.3
    expected = mh.reference.outputs(layer, data.X)
    # The promise for outputs against the reference.
    np.testing.assert_allclose(data.y, expected, rtol=0, atol=1e-12 * np.abs(expected).max())

    noisy = mh.data.boolean_layer(500, 3, 16, 6, score_std=3.0, inputs=inputs, noise=0.5, seed=1)
    assert (noisy.X == data.X).all()
    assert abs((noisy.y - data.y).std() - 0.5) < 0.02  # standard deviation .0023
    assert noisy.sample(4, seed=0).truth["layer"] == layer
    assert noisy.sample(4, seed=0, tokens=5, inputs="boolean", noise=0.0).y.shape == (4, 5, 16)
    assert boolean().y.shape == (7, 3, 4)


@pytest.mark.parametrize("heads", [2, 3, 4])
def test_parity_layer(heads: int) -> None:
    data = mh.data.parity_layer(300, 7, heads, 8.0, seed=heads)
    support, layer = data.truth["support"], data.truth["layer"]
    assert len(set(support)) == heads
    assert 1 <= support.min() <= support.max() <= 6
    assert data.X.shape == data.y.shape == (300, 2, 7)
    assert (np.abs(data.X) == 1.0).all()
    assert not data.y[..., 1:].any()
    for j in range(heads):
        u, e = np.isin(np.arange(7), support), np.eye(7)[0]
        t = heads - 1 - 2 * j
        assert (layer.W[j] == 8.0 * (np.outer(u, e) - t * np.outer(e, e))).all()
        assert (layer.V[j] == (-1) ** j * np.outer(e, e)).all()
    differ = data.X[:, 0, 0] != data.X[:, 1, 0]
    assert 100 < differ.sum() < 200
    for row in (0, 1):
        x = data.X[differ, row]
        P = x[:, support].prod(axis=1)
        expected = P if heads % 2 else x[:, 0] * (P - 1.0)
        # Every head is 1 - tanh(8) = 2e-7 away from its limit.
        np.testing.assert_allclose(data.y[differ, row, 0], expected, rtol=0, atol=2.5e-7 * heads)
    # More sets than one.
    assert len({tuple(parity(seed=s).truth["support"]) for s in range(9)}) > 3
    with pytest.raises(TypeError, match="sample: may change nothing, got tokens"):
        data.sample(3, seed=0, tokens=3)
    assert (data.sample(3, seed=0).truth["support"] == support).all()


@pytest.mark.parametrize("isa", _core.available_isas())
def test_targets_do_not_depend_on_the_instruction_set(isa: str, use_isa: Any) -> None:
    def generated() -> tuple[mh.Dataset, ...]:
        return (
            mh.data.boolean_layer(40, 5, 11, 3, inputs="gaussian", noise=0.1, seed=2),
            mh.data.parity_layer(9, 6, 3, 2.0, seed=4),
            mh.data.planted_attention(9, 6, 7, 3, seed=0),
            regression(),
        )

    expected = generated()
    use_isa(isa)
    assert generated() == expected


def test_the_exponential_of_the_targets() -> None:
    x = -np.concatenate([np.geomspace(1e-12, 708, 4001), [0.0, 750.0, 1e6]])
    ours, theirs = teachers.exp(x), np.array([math.exp(number) for number in x])
    # Less than 2 units in the last place; math.exp itself is within 1.
    np.testing.assert_allclose(ours, theirs, rtol=3 * 2.0**-53, atol=0)
    assert ours[-3:].tolist() == [1.0, 0.0, 0.0]


def test_same_seed_same_arrays_on_every_platform() -> None:
    # Bits, not tolerances: a change of these hashes changes the data of every published seed.
    def of(data: mh.Dataset, *more: Any) -> str:
        return digest(data.X, data.y, *more)

    assert of(signal()) == "95a76ac5115e3813"
    assert of(regression(covariance=[[2.0, 0.6], [0.6, 0.5]], noise=0.1)) == "45dd18f2fd7c4968"
    assert of(sphere(), sphere().query, sphere().truth["readout"]) == "da3d274e56a3e7ba"
    layer = boolean().truth["layer"]
    assert digest(boolean().X, layer.W, layer.V) == "5f8473a5804df83a"
    assert digest(parity().X, parity().truth["support"]) == "6f560f0cbb008910"
    assert digest(mh.data.boolean_layer(7, 3, 4, 2, noise=0.5, seed=1).y) == "379f040570ad4b69"
    gaussian = mh.data.boolean_layer(40, 5, 11, 3, inputs="gaussian", seed=2)
    assert digest(gaussian.y) == "819d37a01abce109"
    assert digest(mh.data.parity_layer(9, 6, 3, 2.0, seed=4).y) == "a6c4cd8000fce6e5"
    assert digest(mh.data.planted_attention(400, 6, 7, 3, seed=0).y) == "d6c50e92dfdb0b92"
    assert of(signal().sample(3, seed=5)) == "66e3d160afecd1f9"


@every_generator
def test_seeds_are_the_run_axis(make: Make) -> None:
    seeds = [3, 0, 3]
    data = make(seed=seeds)
    assert data.runs == 3
    assert data.X.shape[0] == data.y.shape[0] == 3
    for r, seed in enumerate(seeds):
        single = make(seed=seed)
        assert data.run(r) == single
        assert data.run(r).sample(4, seed=9) == single.sample(4, seed=9)
    # The same populations; one seed for all runs, or one each.
    for given in (5, [5, 7, 8], np.array([5, 7, 8])):
        fresh = data.sample(2, seed=given)
        for r, seed in enumerate(np.broadcast_to(given, 3)):
            assert fresh.run(r) == data.run(r).sample(2, seed=int(seed))
        assert fresh.sample(1, seed=0).runs == 3
    with pytest.raises(ValueError, match="seed: expected one seed or a sequence of R = 3, got 2"):
        data.sample(2, seed=[1, 2])
    rng = np.random.default_rng(1)
    parts = [make(seed=s) for s in (np.random.default_rng(0), 4)]
    both = make(seed=(np.random.default_rng(0), 4))
    assert [both.run(0), both.run(1)] == parts
    assert not (make(seed=[rng, rng]).X[0] == make(seed=[rng, rng]).X[1]).all()


def test_what_runs_share_is_repeated() -> None:
    data = regression(seed=[0, 1])
    assert data.token_groups.index.shape == (2, 7, 5)
    assert data.truth["covariance"].shape == (2, 2, 2)
    assert data.truth["noise"] == 0.0
    assert sphere(seed=[0, 1]).query.shape == (2, 7, 1, 4)
    assert boolean(seed=[0, 1]).truth["layer"].runs == 2
    assert planted(seed=range(2)).truth["model"].runs == 2


def test_digits_with_runs() -> None:
    pytest.importorskip("sklearn")
    train, test = mh.data.digits(seed=[0, 1])
    assert train.X.shape == (2, 250, 8, 16)
    for r in range(2):
        one, other = mh.data.digits(seed=r)
        assert train.run(r) == one
        assert test.run(r) == other
    with pytest.raises(ValueError, match="sample: expected a Dataset made by a generator"):
        train.sample(3, seed=0)


@every_generator
def test_float32_is_the_rounded_float64(make: Make) -> None:
    single, double = make(dtype=np.float32), make()
    assert single.X.dtype == single.y.dtype == np.float32
    assert (double.X.astype(np.float32) == single.X).all()
    # Layers are rounded too: 1e-7 in logits of up to twenty.
    np.testing.assert_allclose(single.y, double.y, rtol=1e-6, atol=1e-5)


@every_generator
def test_data_sets_pickle_with_their_population(make: Make) -> None:
    for data in (make(), make(seed=[0, 1])):
        copy = pickle.loads(pickle.dumps(data))
        assert copy == data
        assert copy.sample(4, seed=1) == data.sample(4, seed=1)
    # The seed of the data set itself brings new samples too.
    fresh = make().sample(7, seed=0)
    assert not any((fresh.X[i] == x).all() for i in range(7) for x in make().X)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (signal, {"signal": 0.0}, "signal: expected a number above 0, got 0.0"),
        (signal, {"rho": -1.0}, "rho: expected a number of at least 0, got -1.0"),
        (signal, {"noise": -1.0}, "noise: expected a number of at least 0, got -1.0"),
        (signal, {"flip": 1.5}, "flip: expected a probability, got 1.5"),
        (signal, {"weak": 5}, "weak: expected an integer from 0 to tokens - 1 = 4, got 5"),
        (signal, {"positions": "last"}, "positions: expected one of .*, got 'last'"),
        (regression, {"noise": -1.0}, "noise: expected a number of at least 0, got -1.0"),
        (regression, {"covariance": [1.0]}, r"covariance: expected a number, 2 .*, got shape \(1,"),
        (regression, {"covariance": [[1.0, 2.0], [0.0, 1.0]]}, "covariance: .* symmetric"),
        (regression, {"covariance": [[1.0, 2.0], [2.0, 1.0]]}, "got one with the eigenvalue -1$"),
        (regression, {"covariance": 0.0}, "covariance: expected a positive definite matrix"),
        (boolean, {"score_std": -1.0}, "score_std: expected a number of at least 0, got -1.0"),
        (boolean, {"inputs": "ternary"}, "inputs: expected one of .*, got 'ternary'"),
        (boolean, {"noise": -1.0}, "noise: expected a number of at least 0, got -1.0"),
        (sphere, {"n": 0}, "n: expected an integer of at least 1, got 0"),
    ],
)
def test_values_out_of_range(make: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_shapes_out_of_range() -> None:
    with pytest.raises(ValueError, match="dim: expected at least 2 for two orthogonal directions"):
        mh.data.signal_noise(3, 4, 1, seed=0)
    with pytest.raises(ValueError, match="dim: expected at least 2, a feature and the response"):
        mh.data.icl_regression(3, 4, 1, seed=0)
    with pytest.raises(ValueError, match="tokens: expected at least 2, a pair and the question"):
        mh.data.icl_regression(3, 1, 4, seed=0)
    with pytest.raises(ValueError, match="heads: expected at most dim - 1 = 3, got 4"):
        mh.data.parity_layer(3, 4, 4, 1.0, seed=0)
    with pytest.raises(TypeError, match="external_query: expected a bool, got 1"):
        sphere(external_query=1)
    with pytest.raises(TypeError, match="covariance: expected real numbers, got dtype bool"):
        regression(covariance=True)
