"""Sequences of words: the laws that the generators promise, seeds, and that models learn them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_data import digest

import mhfast as mh

MAKERS: dict[str, Callable[..., Any]] = {
    "chain": lambda n=7, **rest: mh.data.markov_chain(n, 6, 4, **rest),
    "second order": lambda n=7, **rest: mh.data.markov_chain(n, 6, 3, order=2, **rest),
    "in context": lambda n=7, **rest: mh.data.markov_chain(n, 6, 3, in_context=True, **rest),
    "triggers": lambda n=7, **rest: mh.data.bigram_triggers(n, 12, 5, triggers=2, **rest),
    "priorities": lambda n=7, **rest: mh.data.word_priorities(n, 4, 6, **rest),
    "recall": lambda n=7, **rest: mh.data.associative_recall(n, 3, 5, 4, **rest),
    "copying": lambda n=7, **rest: mh.data.copying(n, 4, 5, **rest),
    "parity": lambda n=7, **rest: mh.data.sparse_parity(n, 8, 3, **rest),
}
every_generator = pytest.mark.parametrize("name", MAKERS)


def frequencies(data: mh.Dataset, order: int, V: int) -> tuple[Any, Any]:
    """How often each word follows each combination, and how often that occurs."""
    ids = np.concatenate([data.words.ids, data.y[:, -1:]], axis=1)
    counts = np.zeros((V,) * (order + 1))
    for t in range(order, ids.shape[1]):
        np.add.at(counts, tuple(ids[:, t - order : t + 1].T), 1)
    totals = counts.sum(axis=-1, keepdims=True)
    return counts / totals, totals


@pytest.mark.parametrize("order", [1, 2])
def test_words_follow_the_transitions(order: int) -> None:
    data = mh.data.markov_chain(3000, 9, 3, order=order, seed=1)
    P = data.truth["transition"]
    np.testing.assert_allclose(P.sum(axis=-1), 1.0, rtol=1e-14)
    found, totals = frequencies(data, order, 3)
    assert (np.abs(found - P) < 5 * np.sqrt(P * (1 - P) / totals) + 1e-12).all()
    np.testing.assert_array_equal(data.y[:, :-1], data.words.ids[:, 1:])
    # The first words are uniform: a third of 3000, 5 standard deviations.
    assert np.abs(np.bincount(data.words.ids[:, 0]) - 1000).max() < 5 * np.sqrt(3000 * 2 / 9)
    again = data.sample(5, seed=2, tokens=30)
    assert again.words.ids.shape == (5, 30)
    np.testing.assert_array_equal(again.truth["transition"], P)


def test_transitions_are_uniform_among_distributions() -> None:
    """Of 3 words the largest probability has the mean (1 + 1/2 + 1/3) / 3."""
    P = mh.data.markov_chain(4000, 2, 3, in_context=True, seed=0).truth["transition"]
    assert P.shape == (4000, 3, 3)
    largest = P.max(axis=-1)
    assert abs(largest.mean() - 11 / 18) < 5 * largest.std() / np.sqrt(largest.size)


def test_in_context_every_sample_has_its_own_chain() -> None:
    data = mh.data.markov_chain(3, 20_000, 2, in_context=True, seed=5)
    for i in range(3):
        found, totals = frequencies(data[i : i + 1], 1, 2)
        P = data.truth["transition"][i]
        assert (np.abs(found - P) < 6 * np.sqrt(P * (1 - P) / totals) + 1e-12).all()
    assert not np.array_equal(data.sample(3, seed=1).truth["transition"], data.truth["transition"])


def test_triggers() -> None:
    data = MAKERS["triggers"](400, seed=0)
    ids, follows = data.words.ids, data.truth["follows"]
    weight = np.zeros(ids.shape)
    for i, sample in enumerate(ids):
        for t, word in enumerate(sample):
            if word < 2:
                assert data.y[i, t] == follows[i, word]
                weight[i, t] = word in sample[:t]
    np.testing.assert_array_equal(data.weight, weight)
    # What follows the other words is the chain's.
    others = ids >= 2
    P = data.truth["transition"]
    for word in range(2, 5):
        drawn = data.y[others & (ids == word)]
        found = np.bincount(drawn, minlength=5) / len(drawn)
        assert (np.abs(found - P[word]) < 5 * np.sqrt(P[word] * (1 - P[word]) / len(drawn))).all()


def test_priorities() -> None:
    data = MAKERS["priorities"](200, seed=3)
    order = data.truth["order"]
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(6), (6, 1)))
    for sample, (y,) in zip(data.words.ids.tolist(), data.y, strict=True):
        assert y == next(word for word in order[sample[-1]] if word in sample)


def test_priorities_with_cycles() -> None:
    """The next word is that of any token of the highest component, each as often."""
    data = mh.data.word_priorities(20_000, 4, 5, component=2, seed=5)
    place = np.argsort(data.truth["order"], axis=1)
    ids, y = data.words.ids, data.y[:, 0]
    component = place[ids[:, -1:], ids] // 2
    first = component == component.min(axis=1, keepdims=True)
    assert (place[ids[:, -1], y] // 2 == component.min(axis=1)).all()
    assert (np.sort(place, axis=1) == np.arange(5)).all()  # the last component has one word
    # Where two of four tokens come first and are different words, the earlier one is next half
    # the time; five standard deviations.
    two = first.sum(axis=1) == 2
    places = np.argsort(~first[two], axis=1, kind="stable")[:, :2]
    pairs = np.take_along_axis(ids[two], places, axis=1)
    differ = pairs[:, 0] != pairs[:, 1]
    earlier = (y[two] == pairs[:, 0])[differ]
    assert abs(earlier.mean() - 0.5) < 2.5 / np.sqrt(len(earlier))
    svm = mh.theory.next_token_svm(ids, y)
    for last, order in enumerate(data.truth["order"]):
        # The last word is a token: what has a lower priority never comes next.
        pairs = [order[:2], order[2:4]][: place[last, last] // 2 + 1]
        assert all(set(svm.components[last, pair]) == {pair.min()} for pair in pairs)


def test_recall() -> None:
    data = MAKERS["recall"](300, seed=0)
    ids = data.words.ids
    keys, values = ids[:, 0:-1:2], ids[:, 1:-1:2]
    assert keys.max() < 5 <= values.min()
    assert all(len(set(row)) == 3 for row in keys.tolist())
    asked = keys == ids[:, -1:]
    assert (asked.sum(axis=1) == 1).all()
    np.testing.assert_array_equal(values[asked] - 5, data.y[:, 0])
    assert np.abs(asked.sum(axis=0) - 100).max() < 5 * np.sqrt(300 * 2 / 9)
    assert np.unique(data.y).tolist() == [0, 1, 2, 3]


def test_copying() -> None:
    data = MAKERS["copying"](300, seed=0)
    ids = np.concatenate([data.words.ids, data.y[:, -1:]], axis=1)
    assert (ids[:, 4] == 5).all()
    np.testing.assert_array_equal(ids[:, :4], ids[:, 5:])
    np.testing.assert_array_equal(data.weight, np.tile([0.0] * 4 + [1.0] * 4, (300, 1)))
    assert np.unique(ids[:, :4]).tolist() == [0, 1, 2, 3, 4]


def test_parity() -> None:
    data = MAKERS["parity"](500, seed=0)
    ids, positions = data.words.ids, data.truth["relevant"]
    np.testing.assert_array_equal(ids // 2, np.tile(np.arange(8), (500, 1)))
    np.testing.assert_array_equal(data.y, np.prod(1.0 - 2.0 * (ids[:, positions] % 2), axis=1))
    assert (np.diff(positions) > 0).all()
    np.testing.assert_array_equal(data.token_groups.index[0].nonzero()[0], positions)
    np.testing.assert_array_equal(data.sample(4, seed=1).truth["relevant"], positions)


@every_generator
def test_seeds_runs_and_copies(name: str) -> None:
    make = MAKERS[name]
    data = make(seed=0)
    assert make(seed=0) == data
    assert make(seed=1) != data
    assert data.words is not None
    double = make(40, seed=0)
    fresh = double.sample(40, seed=0)
    assert not np.array_equal(fresh.words.ids, double.words.ids)
    runs = make(seed=[3, 0])
    assert runs.words.shape == (2, *data.words.shape)
    assert runs.run(1) == data
    assert runs.sample(4, seed=9).run(1) == data.sample(4, seed=9)
    copy = pickle.loads(pickle.dumps(runs))
    assert copy == runs
    assert copy.words == runs.words
    assert copy.sample(4, seed=1) == runs.sample(4, seed=1)
    single = make(seed=0, dtype=np.float32)
    assert single.dtype == np.float32
    np.testing.assert_array_equal(single.words.ids, data.words.ids)


@every_generator
def test_an_embedding_of_the_callers_own(name: str) -> None:
    one_hot = MAKERS[name](seed=0)
    V = one_hot.words.words
    np.testing.assert_array_equal(one_hot.words.embedding, np.eye(V))
    embedding = np.random.default_rng(0).standard_normal((V, 3))
    data = MAKERS[name](seed=0, embedding=embedding)
    np.testing.assert_array_equal(data.X, embedding[one_hot.words.ids])
    np.testing.assert_array_equal(data.sample(2, seed=1).words.embedding, embedding)


DIGESTS = {
    "chain": "da38d6a6d47e09fd",
    "second order": "cb4d437c411a2377",
    "in context": "d66cd0fb4d918fd0",
    "triggers": "f7ec5f3a9e799020",
    "priorities": "5bc129ae2dbe34dd",
    "recall": "74131d6972bc99bc",
    "copying": "75fd932da2536739",
    "parity": "7cc342c44b71cc2b",
}


@every_generator
def test_the_same_arrays_on_every_platform(name: str) -> None:
    assert digest(MAKERS[name](50, seed=0).words.ids) == DIGESTS[name]


def test_a_causal_layer_learns_the_chain() -> None:
    """Every row sees its own word: the loss tends to the entropy of what follows it."""
    data = mh.data.markov_chain(400, 8, 4, seed=0)
    layer = mh.Layer.gaussian(heads=1, dim=4, out_dim=4, std=0.1, seed=0, causal=True)
    run = mh.train(layer, data, steps=400, optimizer=mh.Adam(0.1), loss="cross_entropy")
    counts = np.zeros((4, 4))
    np.add.at(counts, (data.words.ids.ravel(), data.y.ravel()), 1)
    entropy = -np.sum(counts * np.log(counts / counts.sum(axis=1, keepdims=True))) / counts.sum()
    assert run.history["loss"][0] > 1.3
    # Softmax cannot see its own word alone with finite weights, and words before it tell nothing.
    assert 0.97 * entropy < run.history["loss"][-1] < 1.03 * entropy


def test_weights_leave_rows_out() -> None:
    data = mh.data.copying(60, 3, 4, seed=0)
    layer = mh.Layer.gaussian(heads=2, dim=5, out_dim=5, std=0.3, seed=1, causal=True)
    value, _ = mh.value_and_grad(layer, data, loss="cross_entropy")
    F = layer(data)[:, 3:]
    logs = F - np.log(np.exp(F).sum(axis=-1, keepdims=True))
    rows = np.take_along_axis(logs, data.y[:, 3:, None], axis=-1)
    assert value == pytest.approx(-rows.mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mh.data.markov_chain(5, 2, 3, order=3, seed=0), ValueError,
         "order: expected at most tokens = 2, got 3"),
        (lambda: mh.data.markov_chain(5, 2, 3, in_context=1, seed=0), TypeError,
         "in_context: expected a bool, got 1"),
        (lambda: mh.data.markov_chain(5, 2, 3, embedding=np.eye(2), seed=0), ValueError,
         r"embedding: expected shape \(V, d\) = \(3, d\), got \(2, 2\)"),
        (lambda: mh.data.bigram_triggers(5, 9, 3, triggers=4, seed=0), ValueError,
         "triggers: expected at most words = 3, got 4"),
        (lambda: mh.data.bigram_triggers(5, 1, 3, seed=0), ValueError,
         "tokens: expected enough that some trigger occurs twice in a sample, got 1"),
        (lambda: mh.data.word_priorities(5, 4, 3, component=4, seed=0), ValueError,
         "component: expected at most words = 3, got 4"),
        (lambda: mh.data.associative_recall(5, 4, 3, 2, seed=0), ValueError,
         "pairs: expected at most keys = 3, got 4"),
        (lambda: mh.data.sparse_parity(5, 4, 5, seed=0), ValueError,
         "relevant: expected at most tokens = 4, got 5"),
        (lambda: mh.data.word_priorities(5, 4, 3, seed=0).sample(2, seed=0, words=3), TypeError,
         "sample: may change tokens, dtype, got words"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
