"""Generators of data: their laws, their randomness, and the same arrays everywhere."""

from __future__ import annotations

import hashlib
import pickle
import sys
from typing import Any

import numpy as np
import pytest

import mhfast as mh
from mhfast.dataset import seeds as streams

NOISY: dict[str, Any] = {"relevant_fraction": 0.3, "contexts": 3, "norm": 2.0, "noise": 0.5}


def mixture(n: int = 7, seed: int = 0, **changes: Any) -> mh.Dataset:
    return mh.data.tokenized_mixture(n, 10, 12, seed=seed, **(NOISY | changes))


def digest(*arrays: Any) -> str:
    """Hash of the exact bits of arrays."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()[:16]


def arrays(data: mh.Dataset) -> tuple[Any, Any]:
    return data.X, data.y


def test_mixture_tokens() -> None:
    data = mixture(noise=0.0)
    truth = data.truth
    assert data.X.shape == (7, 10, 12)
    assert data.y.shape == (7,)
    kinds = np.stack([truth["mu_minus"], truth["mu_plus"], *truth["contexts"]])
    # Two projections leave orthogonality to a few rounding errors of 12 products.
    np.testing.assert_allclose(kinds @ kinds.T, 4.0 * np.eye(5), atol=1e-14)
    label = {1.0: "mu_plus", -1.0: "mu_minus"}
    groups = data.token_groups
    assert groups.names == ("context", "class")
    for X, y, is_class in zip(data.X, data.y, groups.index == 1, strict=True):
        assert is_class.sum() == 3
        assert (X[is_class] == truth[label[y]]).all()
        assert all((truth["contexts"] == x).all(axis=1).any() for x in X[~is_class])


def test_mixture_law() -> None:
    data = mixture(n=4000, noise=0.0, seed=1)
    # Binomial standard deviations: .008 of labels, .0009 · 5 of positions, .003 of contexts.
    assert abs((data.y == 1).mean() - 0.5) < 0.04
    class_share = (data.token_groups.index == 1).mean(axis=0)
    np.testing.assert_allclose(class_share, 0.3, atol=0.04)
    for context in data.truth["contexts"]:
        assert abs((context == data.X).all(axis=2).mean() - 0.7 / 3) < 0.015
    fixed = mixture(positions="fixed")
    assert (fixed.token_groups.index == ([1] * 3 + [0] * 7)).all()


@pytest.mark.parametrize("kind", ["gaussian", "bounded"])
def test_mixture_noise(kind: str) -> None:
    clean, noisy = mixture(n=900, noise=0.0), mixture(n=900, noise_kind=kind)
    z = noisy.X - clean.X  # the other streams do not move
    is_class = noisy.token_groups.index == 1
    assert (clean.y == noisy.y).all()
    assert not z[is_class].any()
    z = z[~is_class]
    norms = np.linalg.norm(z, axis=1)
    if kind == "bounded":
        np.testing.assert_allclose(norms, 0.5, rtol=1e-14)
    else:
        assert norms.std() > 0.05
    # 6300 rows: the mean square norm has a relative standard deviation of sqrt(2/12/6300) = .5 %,
    # covariances one of .04 · .25 / 12 / ... = 3e-4.
    assert abs((norms**2).mean() - 0.25) < 0.01
    np.testing.assert_allclose(z.T @ z / len(z), 0.25 / 12 * np.eye(12), atol=2e-3)


def test_mixture_samples_of_the_same_population() -> None:
    data = mixture()
    fresh = data.sample(5, seed=0)
    assert fresh.X.shape == (5, 10, 12)
    assert (fresh.truth["contexts"] == data.truth["contexts"]).all()
    # The seed of the data set itself brings new samples too.
    assert not any((fresh.X[i] == data.X[j]).all() for i in range(5) for j in range(7))
    changed = data.sample(5, seed=0, noise=0.0, tokens=20, relevant_fraction=0.25)
    assert changed.X.shape == (5, 20, 12)
    is_class = changed.token_groups.index == 1
    assert (is_class.sum(axis=1) == 5).all()
    # A sample remembers what it was drawn with.
    again = changed.sample(2, seed=4)
    assert again.X.shape == (2, 20, 12)
    for x in again.X[again.token_groups.index == 0]:
        assert (again.truth["contexts"] == x).all(axis=1).any()
    with pytest.raises(TypeError, match=r"sample: may change tokens, .*, got contexts"):
        data.sample(5, seed=0, contexts=2)


def test_planted_labels() -> None:
    data = mh.data.planted_attention(3000, 3, 5, 7, seed=2)
    teacher = data.truth["model"]
    assert teacher.W.shape == (7, 5, 5)
    assert teacher.U.shape == (7, 3, 5)
    for part in (data, data.sample(400, seed=2)):
        assert part.truth["model"] == teacher
        assert (part.y * teacher(part.X) > 0).all()
    assert not (data.X[:400] == data.sample(400, seed=2).X).any()
    assert abs(data.y.mean()) < 0.1  # standard deviation .018
    # Scores of distinct tokens have standard deviation 2; W has 7 · 25 entries: a few percent.
    scores = np.einsum("nqd,hde,nte->nhqt", data.X, teacher.W, data.X)[:, :, 0, 1]
    assert abs(scores.std() - 2.0) < 0.3
    with pytest.raises(TypeError, match="sample: may change nothing, got tokens"):
        data.sample(5, seed=0, tokens=4)


def test_digits() -> None:
    pytest.importorskip("sklearn")
    train, test = mh.data.digits(seed=0)
    assert train.X.shape == (250, 8, 16)
    assert test.X.shape == (107, 8, 16)
    index = np.concatenate([train.truth["index"], test.truth["index"]])
    assert len(np.unique(index)) == 357
    pixels, places = train.X[..., :8], train.X[..., 8:]
    assert pixels.min() == 0.0
    assert pixels.max() == 1.0
    assert (places == np.eye(8)).all()
    bare, _ = mh.data.digits(position=False, seed=0)
    assert (pixels == bare.X).all()
    other, _ = mh.data.digits(seed=1)
    assert sorted(other.truth["index"]) != sorted(train.truth["index"])

    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    assert (pixels[4].ravel() * 16 == images[train.truth["index"][4]]).all()
    assert (labels[train.truth["index"]] == np.where(train.y == 1, 8, 3)).all()
    ones, rest = mh.data.digits((7, 1), n_train=11, seed=0, dtype=np.float32)
    assert ones.X.dtype == rest.X.dtype == np.float32
    assert len(ones.y) == 11
    assert (labels[rest.truth["index"]] == np.where(rest.y == 1, 1, 7)).all()


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        mh.data.digits(seed=0)


def test_same_seed_same_arrays_on_every_platform() -> None:
    # Bits, not tolerances: a change of these hashes changes the data of every published seed.
    assert digest(*arrays(mixture())) == "8aeecbb497cea337"
    assert digest(*arrays(mixture(noise_kind="bounded"))) == "ed7a81cc822ac2d1"
    assert digest(*arrays(mixture().sample(3, seed=5))) == "55b9edfe8da68d9d"
    assert digest(*arrays(mixture(dtype=np.float32))) == "b18fdf775fdad8d6"
    planted = mh.data.planted_attention(6, 3, 5, 2, seed=3)
    assert digest(*arrays(planted), planted.truth["model"].W) == "80d3cbdf71bdf05a"
    pytest.importorskip("sklearn")
    train, test = mh.data.digits(seed=0)
    assert digest(*arrays(train), *arrays(test)) == "ca5e1abf8535c35f"


def test_seeds() -> None:
    assert digest(mixture(seed=1).X) != digest(mixture(seed=2).X)
    a, b = (mixture(seed=np.random.default_rng(5)) for _ in range(2))
    assert a == b
    assert a != mixture(seed=5)
    assert mixture(seed=np.int64(4)) == mixture(seed=4)
    rng = np.random.default_rng(5)
    assert mixture(seed=rng) != mixture(seed=rng)
    for seed in ([0, 1.0], None, 1.0, True):
        with pytest.raises(TypeError, match=r"seed: expected one integer or a numpy\.random\.Gen"):
            mixture(seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed: expected an integer of at least 0, got -1"):
        mixture(seed=-1)
    with pytest.raises(ValueError, match="seed: expected at least one seed, got an empty sequence"):
        mixture(seed=())  # type: ignore[arg-type]


def test_float32_is_the_rounded_float64() -> None:
    for make in (
        lambda dtype: mixture(dtype=dtype),
        lambda dtype: mh.data.planted_attention(9, 3, 5, 2, seed=3, dtype=dtype),
    ):
        single, double = make(np.float32), make(np.float64)
        assert single.X.dtype == single.y.dtype == np.float32
        assert (double.X.astype(np.float32) == single.X).all()
        assert (single.y == double.y).all()
    assert mixture(dtype=np.float32).truth["contexts"].dtype == np.float32


def test_data_sets_pickle_with_their_population() -> None:
    for data in (mixture(), mh.data.planted_attention(9, 3, 5, 2, seed=3)):
        copy = pickle.loads(pickle.dumps(data))
        assert copy == data
        assert copy.sample(4, seed=1) == data.sample(4, seed=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relevant_fraction": 0.25}, r"whole number from 1 to 10, got 0.25 \* 10 = 2.5"),
        ({"relevant_fraction": 0.0}, "relevant_fraction: expected"),
        ({"relevant_fraction": 1.1}, "relevant_fraction: expected"),
        ({"contexts": 11}, r"dim: expected at least contexts \+ 2 = 13 .*, got 12"),
        ({"contexts": 0}, "contexts: expected an integer of at least 1, got 0"),
        ({"norm": 0.0}, "norm: expected a number above 0, got 0.0"),
        ({"noise": -0.1}, "noise: expected a number of at least 0, got -0.1"),
        ({"noise_kind": "none"}, "noise: expected 0 with noise_kind='none', got 0.5"),
        ({"noise_kind": "uniform"}, "noise_kind: expected one of .*, got 'uniform'"),
        ({"positions": "last"}, "positions: expected one of .*, got 'last'"),
        ({"n": 0}, "n: expected an integer of at least 1, got 0"),
    ],
)
def test_mixture_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": (3, 3)}, "classes: expected two different digits from 0 to 9"),
        ({"classes": (3, 10)}, "classes: expected two different digits from 0 to 9"),
        ({"classes": (1, 2, 3)}, r"classes: expected two digits, got \(1, 2, 3\)"),
        ({"n_train": 357}, "n_train: expected fewer than the 357 images of 3 and 8, got 357"),
    ],
)
def test_digits_errors(arguments: dict[str, Any], message: str) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match=message):
        mh.data.digits(seed=0, **arguments)


def test_whole_fractions_are_recognised() -> None:
    for tokens in range(1, 200):
        for relevant in range(1, tokens + 1):
            data_relevant = mh.data.mixture._relevant_tokens(relevant / tokens, tokens)
            assert data_relevant == relevant


def test_streams() -> None:
    rng = streams.stream(0, 1)
    assert streams.stream(0, 1).random() == rng.random() != streams.stream(0, 2).random()
    orders = streams.permutations(rng, 500, 4)
    assert (np.sort(orders, axis=1) == np.arange(4)).all()
    # 24 orders, each about 21 times in 500.
    assert len({tuple(order) for order in orders}) == 24
    assert set(streams.choices(rng, 3, 200)) == {0, 1, 2}
    frame = streams.orthonormal_frame(rng, 30, 30)
    np.testing.assert_allclose(frame @ frame.T, np.eye(30), atol=1e-14)
    matrix = frame[:, :7].T @ frame[:, :7] + np.diag(np.arange(1.0, 8.0))
    root = streams.cholesky(matrix)
    assert (np.triu(root, 1) == 0.0).all()
    # Entries below ten, sums of seven products.
    np.testing.assert_allclose(root @ root.T, matrix, atol=1e-14)
    assert streams.cholesky(matrix - 2.0 * np.eye(7)) is None
