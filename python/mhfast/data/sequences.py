"""Sequences of words: chains, triggers, priorities, recall, copying and parity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import FIRST, POPULATION, choices, integer_seed, permutations, stream
from ..dataset.words import Tokens
from .population import Population
from .runs import over_seeds

Integers = NDArray[np.int64]
Doubles = NDArray[np.float64]


@over_seeds
def markov_chain(
    n: int,
    tokens: int,
    words: int,
    *,
    order: int = 1,
    in_context: bool = False,
    embedding: ArrayLike | None = None,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw sequences in which the distribution of a word depends on the words before it.

    The first `order` words are independent and uniform.  The distribution of the next word, for
    each combination of the `order` words before it, is drawn uniformly from all distributions.

    Parameters
    ----------
    n, tokens, words : int
        Samples n, tokens T, words V of the dictionary.
    order : int
        How many words the next one depends on; an n-gram has the order n - 1.
    in_context : bool
        Draw new distributions for each sample, so that they can be learnt in context only.
    embedding : array (V, d), optional
        The tokens of the words; the identity by default, which makes them one-hot.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  A sequence gives a run axis.
    dtype : float64 or float32
        Of the tokens.

    Returns
    -------
    Dataset
        X (n,T,d) as `Tokens`, y (n,T) the next word at every position, for a causal `Layer` of V
        outputs and "cross_entropy".  `truth`: "transition" (V,...,V), with an axis n in front in
        context.  `.sample` keeps it, or draws others in context; it may change tokens and dtype.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A parameter is of the wrong kind.

    Notes
    -----
    In context with order 1 the setting of Edelman et al., "The Evolution of Statistical Induction
    Heads: In-Context Learning Markov Chains".

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.markov_chain(10, 6, 3, seed=0)
    >>> data.words.ids.shape, data.y.shape, data.truth["transition"].shape
    ((10, 6), (10, 6), (3, 3))
    >>> bool((data.y[:, :-1] == data.words.ids[:, 1:]).all())
    True
    """
    seed, V = integer_seed(seed), checks.count(words, "words")
    order = checks.count(order, "order")
    if not isinstance(in_context, bool | np.bool_):
        raise TypeError(f"in_context: expected a bool, got {in_context!r}")
    shared = None if in_context else _simplex(stream(seed, POPULATION), (V,) * order, V)
    return _markov_chain(
        n, seed=seed, role=FIRST, transition=shared, order=order,
        embedding=_embedding(embedding, V), tokens=tokens, dtype=dtype,
    )  # fmt: skip


def _markov_chain(
    n: int,
    *,
    seed: int,
    role: int,
    transition: Doubles | None,
    order: int,
    embedding: Doubles,
    tokens: int,
    dtype: DTypeLike,
) -> Dataset:
    n, T, V = checks.count(n, "n"), checks.count(tokens, "tokens"), len(embedding)
    if order > T:
        raise ValueError(f"order: expected at most tokens = {T}, got {order}")
    of_sample = transition
    if of_sample is None:
        of_sample = _simplex(stream(seed, role, 1), (n, *(V,) * order), V)
    ids = np.empty((n, T + 1), np.int64)
    ids[:, :order] = choices(stream(seed, role, 0), V, (n, order))
    drawn = stream(seed, role, 2).random((n, T + 1))
    for t in range(order, T + 1):
        before = tuple(ids[:, t - order : t].T)
        at = before if transition is not None else (np.arange(n), *before)
        ids[:, t] = _chosen(of_sample[at], drawn[:, t])
    fixed = {"transition": transition, "order": order, "embedding": embedding}
    return _dataset(
        ids[:, :-1], ids[:, 1:], embedding, dtype, truth={"transition": of_sample},
        generator=Population(_markov_chain, fixed, {"tokens": T, "dtype": dtype}, _in_core),
    )  # fmt: skip


def _in_core(
    *, transition: Doubles | None, order: int, embedding: Doubles, **_others: object
) -> tuple[object, ...] | None:
    if transition is None:  # of each sample
        return None
    sums = np.cumsum(transition, axis=-1)[..., :-1].reshape(len(embedding) ** order, -1)
    return ("markov_chain", embedding, sums, order)


@over_seeds
def bigram_triggers(
    n: int,
    tokens: int,
    words: int,
    *,
    triggers: int = 2,
    embedding: ArrayLike | None = None,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw sequences of a Markov chain in which each sample fixes what follows a trigger.

    The words 0 ... triggers - 1 are triggers. In each sample one word, drawn uniformly, follows
    every occurrence of a trigger; all other words follow a chain of order 1 that all samples share.
    What follows a trigger that has occurred before can be read from the sequence: a task for an
    induction head.

    Parameters
    ----------
    n, tokens, words : int
        Samples n, tokens T, words V of the dictionary.
    triggers : int
        How many words are triggers, from 1 to V.
    embedding : array (V, d), optional
        The tokens of the words; the identity by default, which makes them one-hot.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  A sequence gives a run axis.
    dtype : float64 or float32
        Of the tokens.

    Returns
    -------
    Dataset
        X (n,T,d) as `Tokens`, y (n,T) the next words.  `weight` (n,T) is 1 at the triggers that
        have occurred before in the sample, else 0.  `truth`: "transition" (V,V) and "follows"
        (n,triggers), the word after each trigger.  `.sample` keeps the chain; it may change tokens
        and dtype.

    Raises
    ------
    ValueError
        A parameter is out of range, or no trigger occurs twice in any sample.
    TypeError
        A parameter is of the wrong kind.

    Notes
    -----
    The setting of Bietti, Cabannes, Bouchacourt, Jegou, Bottou, "Birth of a Transformer: A Memory
    Viewpoint", with uniformly drawn triggers, chains and outputs.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.bigram_triggers(10, 20, 5, triggers=1, seed=0)
    >>> seen = data.weight == 1
    >>> bool((data.words.ids[seen] == 0).all())
    True
    """
    seed, V = integer_seed(seed), checks.count(words, "words")
    K = checks.count(triggers, "triggers")
    if K > V:
        raise ValueError(f"triggers: expected at most words = {V}, got {K}")
    return _bigram_triggers(
        n, seed=seed, role=FIRST, transition=_simplex(stream(seed, POPULATION), (V,), V),
        triggers=K, embedding=_embedding(embedding, V), tokens=tokens, dtype=dtype,
    )  # fmt: skip


def _bigram_triggers(
    n: int,
    *,
    seed: int,
    role: int,
    transition: Doubles,
    triggers: int,
    embedding: Doubles,
    tokens: int,
    dtype: DTypeLike,
) -> Dataset:
    n, T, V = checks.count(n, "n"), checks.count(tokens, "tokens"), len(embedding)
    follows = choices(stream(seed, role, 1), V, (n, triggers))
    ids = np.empty((n, T + 1), np.int64)
    ids[:, 0] = choices(stream(seed, role, 0), V, n)
    drawn, rows = stream(seed, role, 2).random((n, T + 1)), np.arange(n)
    for t in range(1, T + 1):
        last = ids[:, t - 1]
        by_chain = _chosen(transition[last], drawn[:, t])
        of_trigger = follows[rows, np.minimum(last, triggers - 1)]
        ids[:, t] = np.where(last < triggers, of_trigger, by_chain)
    X = ids[:, :-1]
    same = X[:, :, None] == X[:, None, :]
    again = np.tril(same, -1).any(axis=2) & (triggers > X)
    if not again.any():
        raise ValueError(
            f"tokens: expected enough that some trigger occurs twice in a sample, got {T}"
        )
    fixed = {"transition": transition, "triggers": triggers, "embedding": embedding}
    return _dataset(
        X, ids[:, 1:], embedding, dtype, weight=again.astype(np.float64),
        truth={"transition": transition, "follows": follows},
        generator=Population(_bigram_triggers, fixed, {"tokens": T, "dtype": dtype}),
    )  # fmt: skip


@over_seeds
def word_priorities(
    n: int,
    tokens: int,
    words: int,
    *,
    component: int = 1,
    embedding: ArrayLike | None = None,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw sequences whose next word is the one of highest priority among their words.

    Words are independent and uniform.  Every word v that may be the last one has a random order of
    all words, of which `component` at a time have the same priority.  The next word is that of a
    token of the highest priority in the sample, each of these tokens with equal probability.

    Parameters
    ----------
    n, tokens, words : int
        Samples n, tokens T, words V of the dictionary.
    component : int
        The words of equal priority, from 1 to V: the first ones in the order, the next ones, and
        so on; the last may be fewer.  With enough samples those that come next are a strongly
        connected component of the graph of priorities, a cycle; with 1 there are no cycles.
    embedding : array (V, d), optional
        The tokens of the words; the identity by default, which makes them one-hot.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  A sequence gives a run axis.
    dtype : float64 or float32
        Of the tokens.

    Returns
    -------
    Dataset
        X (n,T,d) as `Tokens`, y (n,1) the next word, for a `Layer` with query=-1.  `truth`: "order"
        (V,V), for each last word all words, the highest priority first.  `.sample` keeps it; it may
        change tokens and dtype.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A parameter is of the wrong kind.

    Notes
    -----
    The token-priority graphs of Li, Huang, Ildiz, Rawat, Oymak, "Mechanics of Next Token Prediction
    with Self-Attention".  `mhfast.theory.next_token_svm` has what attention tends to.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.word_priorities(10, 4, 6, seed=0)
    >>> data.y.shape
    (10, 1)
    >>> tied = mh.data.word_priorities(100, 4, 6, component=3, seed=0)
    >>> svm = mh.theory.next_token_svm(tied.words.ids, tied.y[:, 0])
    >>> cycle = tied.truth["order"][0, :3]  # the words of highest priority after word 0
    >>> bool((svm.components[0, cycle] == cycle.min()).all())
    True
    """
    seed, V = integer_seed(seed), checks.count(words, "words")
    component = checks.count(component, "component")
    if component > V:
        raise ValueError(f"component: expected at most words = {V}, got {component}")
    return _word_priorities(
        n, seed=seed, role=FIRST, order=permutations(stream(seed, POPULATION), V, V),
        component=component, embedding=_embedding(embedding, V), tokens=tokens, dtype=dtype,
    )  # fmt: skip


def _word_priorities(
    n: int,
    *,
    seed: int,
    role: int,
    order: Integers,
    component: int,
    embedding: Doubles,
    tokens: int,
    dtype: DTypeLike,
) -> Dataset:
    n, T, V = checks.count(n, "n"), checks.count(tokens, "tokens"), len(embedding)
    ids = choices(stream(seed, role, 0), V, (n, T))
    place = np.argsort(order, axis=1, kind="stable")  # of each word in the order of a last word
    of_tokens = np.take_along_axis(place[ids[:, -1]], ids, axis=1) // component
    first = of_tokens == of_tokens.min(axis=1, keepdims=True)
    # The k-th of these tokens, k from 1.
    k = 1 + (stream(seed, role, 1).random(n) * first.sum(axis=1)).astype(np.int64)
    next_one = (first.cumsum(axis=1) == k[:, None]).argmax(axis=1)
    y = np.take_along_axis(ids, next_one[:, None], axis=1)
    fixed = {"order": order, "component": component, "embedding": embedding}
    return _dataset(
        ids, y, embedding, dtype, truth={"order": order},
        generator=Population(_word_priorities, fixed, {"tokens": T, "dtype": dtype}),
    )  # fmt: skip


@over_seeds
def associative_recall(
    n: int,
    pairs: int,
    keys: int,
    values: int,
    *,
    embedding: ArrayLike | None = None,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw sequences of pairs of a key and a value, and a key whose value is the target.

    The keys of a sample are distinct, its values independent and uniform; the last token is one of
    its keys, uniformly.

    Parameters
    ----------
    n, pairs, keys, values : int
        Samples n, pairs of a sample (at most the number of keys), keys and values of the
        dictionary, which are its words 0 ... keys - 1 and keys ... keys + values - 1.
    embedding : array (keys + values, d), optional
        The tokens of the words; the identity by default, which makes them one-hot.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  A sequence gives a run axis.
    dtype : float64 or float32
        Of the tokens.

    Returns
    -------
    Dataset
        X (n, 2 pairs + 1, d) as `Tokens`, y (n,1) the number of the value, from 0, for a `Layer`
        with query=-1 and as many outputs as values.  `.sample` may change pairs and dtype.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A parameter is of the wrong kind.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.associative_recall(10, 3, 5, 4, seed=0)
    >>> data.X.shape, data.y.shape
    ((10, 7, 9), (10, 1))
    """
    K, V = checks.count(keys, "keys"), checks.count(values, "values")
    return _associative_recall(
        n, seed=integer_seed(seed), role=FIRST, keys=K, embedding=_embedding(embedding, K + V),
        pairs=pairs, dtype=dtype,
    )  # fmt: skip


def _associative_recall(
    n: int, *, seed: int, role: int, keys: int, embedding: Doubles, pairs: int, dtype: DTypeLike
) -> Dataset:
    n, P, V = checks.count(n, "n"), checks.count(pairs, "pairs"), len(embedding) - keys
    if keys < P:
        raise ValueError(f"pairs: expected at most keys = {keys}, got {P}")
    ids = np.empty((n, 2 * P + 1), np.int64)
    ids[:, 0:-1:2] = permutations(stream(seed, role, 0), n, keys)[:, :P]
    value = choices(stream(seed, role, 1), V, (n, P))
    ids[:, 1:-1:2] = keys + value
    asked = choices(stream(seed, role, 2), P, n)
    ids[:, -1] = ids[np.arange(n), 2 * asked]
    fixed = {"keys": keys, "embedding": embedding}
    return _dataset(
        ids, value[np.arange(n), asked][:, None], embedding, dtype,
        generator=Population(_associative_recall, fixed, {"pairs": P, "dtype": dtype}),
    )  # fmt: skip


@over_seeds
def copying(
    n: int,
    length: int,
    words: int,
    *,
    embedding: ArrayLike | None = None,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw sequences that repeat themselves after a separator.

    A sample is L independent uniform words, the separator, and the first L - 1 of them again; the
    next words from the separator on are the L words.

    Parameters
    ----------
    n, length, words : int
        Samples n, length L of what is copied, words V; the separator is the word V.
    embedding : array (V + 1, d), optional
        The tokens of the words; the identity by default, which makes them one-hot.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  A sequence gives a run axis.
    dtype : float64 or float32
        Of the tokens.

    Returns
    -------
    Dataset
        X (n, 2 L, d) as `Tokens`, y (n, 2 L) the next words.  `weight` (n, 2 L) is 1 from the
        separator on, else 0.  `.sample` may change length and dtype.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A parameter is of the wrong kind.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.copying(10, 3, 5, seed=0)
    >>> data.words.ids[0, 3]  # the separator
    np.int32(5)
    >>> bool((data.y[:, 3:] == data.words.ids[:, :3]).all())
    True
    """
    V = checks.count(words, "words")
    return _copying(
        n, seed=integer_seed(seed), role=FIRST, embedding=_embedding(embedding, V + 1),
        length=length, dtype=dtype,
    )  # fmt: skip


def _copying(
    n: int, *, seed: int, role: int, embedding: Doubles, length: int, dtype: DTypeLike
) -> Dataset:
    n, L, V = checks.count(n, "n"), checks.count(length, "length"), len(embedding) - 1
    copied = choices(stream(seed, role, 0), V, (n, L))
    ids = np.concatenate([copied, np.full((n, 1), V), copied], axis=1)
    weight = np.zeros((n, 2 * L))
    weight[:, L:] = 1.0
    return _dataset(
        ids[:, :-1], ids[:, 1:], embedding, dtype, weight=weight,
        generator=Population(_copying, {"embedding": embedding}, {"length": L, "dtype": dtype}),
    )  # fmt: skip


@over_seeds
def sparse_parity(
    n: int,
    tokens: int,
    relevant: int,
    *,
    embedding: ArrayLike | None = None,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw random bits, one per token, with the parity of some of them as label.

    Token t is the word 2t of a bit 0, or 2t + 1 of a bit 1, so that words know their position.

    Parameters
    ----------
    n, tokens, relevant : int
        Samples n, tokens T, bits of the parity, from 1 to T.
    embedding : array (2 T, d), optional
        The tokens of the words; the identity by default, which makes them one-hot.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  A sequence gives a run axis.
    dtype : float64 or float32
        Of the tokens.

    Returns
    -------
    Dataset
        X (n,T,d) as `Tokens`, y (n,) 1 for an even number of relevant ones and -1 for an odd one.
        Token groups "other" and "relevant".  `truth`: "relevant", their positions, ascending.
        `.sample` keeps them; it may change dtype.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A parameter is of the wrong kind.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.sparse_parity(10, 6, 2, seed=0)
    >>> bits = data.words.ids % 2
    >>> bool((data.y == (-1.0) ** bits[:, data.truth["relevant"]].sum(axis=1)).all())
    True
    """
    seed, T = integer_seed(seed), checks.count(tokens, "tokens")
    k = checks.count(relevant, "relevant")
    if k > T:
        raise ValueError(f"relevant: expected at most tokens = {T}, got {k}")
    positions = np.sort(permutations(stream(seed, POPULATION), 1, T)[0, :k])
    return _sparse_parity(
        n, seed=seed, role=FIRST, relevant=positions, embedding=_embedding(embedding, 2 * T),
        dtype=dtype,
    )  # fmt: skip


def _sparse_parity(
    n: int, *, seed: int, role: int, relevant: Integers, embedding: Doubles, dtype: DTypeLike
) -> Dataset:
    n, T = checks.count(n, "n"), len(embedding) // 2
    bits = choices(stream(seed, role, 0), 2, (n, T))
    y = np.where(bits[:, relevant].sum(axis=1) % 2 == 0, 1.0, -1.0)
    groups = np.broadcast_to(np.isin(np.arange(T), relevant).astype(int), (n, T))
    return _dataset(
        2 * np.arange(T) + bits, y.astype(checks.float_dtype(dtype)), embedding, dtype,
        token_groups=(groups, ("other", "relevant")), truth={"relevant": relevant},
        generator=Population(
            _sparse_parity, {"relevant": relevant, "embedding": embedding}, {"dtype": dtype}
        ),
    )  # fmt: skip


def _dataset(
    ids: Integers, y: NDArray[Any], embedding: Doubles, dtype: DTypeLike, **rest: Any
) -> Dataset:
    dtype = checks.float_dtype(dtype)
    if rest.get("weight") is not None:
        rest["weight"] = rest["weight"].astype(dtype)
    return Dataset(Tokens(ids, embedding.astype(dtype)), np.ascontiguousarray(y), **rest)


def _embedding(embedding: ArrayLike | None, words: int) -> Doubles:
    if embedding is None:
        return np.eye(words)
    array = checks.real(embedding, "embedding")
    checks.shape(array, "embedding", "V d", (words, None))
    return array.astype(np.float64)


def _simplex(rng: np.random.Generator, rows: tuple[int, ...], words: int) -> Doubles:
    """Distributions drawn uniformly from all: the spacings of ordered uniform numbers."""
    cuts = np.sort(rng.random((*rows, words - 1)), axis=-1)
    zero, one = np.zeros((*rows, 1)), np.ones((*rows, 1))
    spacings: Doubles = np.diff(np.concatenate([zero, cuts, one], axis=-1), axis=-1)
    return spacings


def _chosen(distributions: Doubles, drawn: Doubles) -> Integers:
    """One word of each distribution (n, V), by a uniform number each."""
    below = np.cumsum(distributions, axis=-1)[:, :-1] <= drawn[:, None]
    words: Integers = below.sum(axis=-1)
    return words
