"""The samples that a stream draws from populations of `mhfast.data`, from NumPy's Philox.

They are functions of the seed, the number of the block of samples and that of the sample. Words are
the 64-bit numbers w_0, w_1, ... of Philox4x64-10 for the key (seed, 2), from the counter
(1, block, sample, part) on; the integer below m of a word is floor(w m / 2^64), and its sign is -1
where the highest bit is set. Sums run from the first to the last term, and every operation is
rounded by itself, so the core gives the same bits everywhere; in float32 they are these numbers
rounded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .attention import outputs

Array = NDArray[np.float64]

_LOG = tuple(1.0 / k for k in range(21, 0, -2))
_SINE = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(7, -1, -1))
_COSINE = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(8, -1, -1))
_FRACTION = np.uint64(2**52 - 1)


def normals(words: ArrayLike) -> Array:
    """Make standard normals of random words (m, 16): (16 m,), after Box and Muller.

    Of words b_0 .. b_7 and c_0 .. c_7, with u = 1 - floor(b / 2^12) / 2^52, r = sqrt(-2 log u),
    a = π/2 (floor(c / 2^10) mod 2^52 - 2^51) / 2^52 and q = floor(c / 2^62), come eight numbers
    r cos(a + q π/2), then eight r sin(a + q π/2). Logarithm, sine and cosine are series, whose
    errors are a few units in the last place.

    Examples
    --------
    >>> import mhfast as mh
    >>> mh.reference.normals([range(16)]).shape
    (16,)
    """
    bits = np.asarray(words, np.uint64).reshape(-1, 2, 8)
    b, c = bits[:, 0], bits[:, 1]
    u: Array = 1.0 - (b >> np.uint64(12)).astype(np.float64) * 2.0**-52
    r = np.sqrt(-2.0 * _log(u))
    a = math.pi / 2 * ((c >> np.uint64(10) & _FRACTION).astype(np.float64) * 2.0**-52 - 0.5)
    square = a * a
    sine, cosine = a * _horner(_SINE, square), _horner(_COSINE, square)
    quarter = (c >> np.uint64(62)).astype(np.int64)
    x = np.choose(quarter, [cosine, -sine, -cosine, sine])
    y = np.choose(quarter, [sine, cosine, -sine, -cosine])
    return np.stack([r * x, r * y], axis=1).ravel()


def sphere_samples(
    n: int, tokens: int, dim: int, *, external_query: bool = True, seed: int, block: int
) -> tuple[Array, Array, Array | None]:
    """Draw X (n,T,d), y (n,) and query (n,1,d) of `mhfast.data.sphere_tokens`.

    A token is z / |z| of normals z of part 0, the label the sign of part 1, the query like a token
    of part 2.

    Examples
    --------
    >>> import mhfast as mh
    >>> X, y, query = mh.reference.sphere_samples(3, 4, 5, seed=0, block=1)
    >>> X.shape, y.shape, query.shape
    ((3, 4, 5), (3,), (3, 1, 5))
    """
    drawn = [_Sample(seed, block, i) for i in range(n)]
    X = np.stack([_unit(s.normals(0, tokens * dim).reshape(tokens, dim)) for s in drawn])
    y = np.array([s.sign(1) for s in drawn])
    if not external_query:
        return X, y, None
    return X, y, np.stack([_unit(s.normals(2, dim).reshape(1, dim)) for s in drawn])


def mixture_samples(
    n: int,
    tokens: int,
    table: ArrayLike,
    relevant: int,
    *,
    noise: float = 0.0,
    noise_kind: str = "gaussian",
    positions: str = "random",
    seed: int,
    block: int,
) -> tuple[Array, Array]:
    """Draw X (n,T,d) and y (n,) of `mhfast.data.tokenized_mixture`.

    `table` has the rows μ₋, μ₊, ν_1 .. ν_M. The label is the sign of part 1. Slots t < `relevant`
    hold μ_y, slot t another context token, of the integer below M of word t of part 2, plus
    noise z / sqrt(d), or noise z / |z| where it is "bounded", with z the d normals of slot t of
    part 0. Random positions: position p holds the slot p of a permutation, the identity after entry
    i has changed places with i + (the integer below T - i of word i of part 3), i = 0, 1, ...

    Examples
    --------
    >>> import mhfast as mh
    >>> table = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    >>> X, y = mh.reference.mixture_samples(5, 4, table, 1, seed=0, block=1)
    >>> X.shape, y.shape
    ((5, 4, 3), (5,))
    """
    rows = np.asarray(table, np.float64)
    dim = rows.shape[1]
    X, y = np.empty((n, tokens, dim)), np.empty(n)
    for i in range(n):
        sample = _Sample(seed, block, i)
        y[i] = sample.sign(1)
        contexts = [w * (len(rows) - 2) >> 64 for w in sample.words(2, tokens)]
        z = sample.normals(0, tokens * dim).reshape(tokens, dim)
        z = noise * (_unit(z) if noise_kind == "bounded" else z / math.sqrt(dim))
        slots = list(range(tokens))
        if positions == "random":
            for p, word in enumerate(sample.words(3, tokens)):
                other = p + (word * (tokens - p) >> 64)
                slots[p], slots[other] = slots[other], slots[p]
        for p, slot in enumerate(slots):
            if slot < relevant:
                X[i, p] = rows[int(y[i] > 0)]
            else:
                X[i, p] = rows[2 + contexts[slot]] + z[slot]
    return X, y


def regression_samples(
    n: int, tokens: int, root: ArrayLike, *, noise: float = 0.0, seed: int, block: int
) -> tuple[Array, Array]:
    """Draw X (n,T,d) and y (n,1,1) of `mhfast.data.icl_regression`.

    `root` (d-1,d-1) is lower triangular, root rootᵀ the covariance of the features. The task are
    normals of part 0, the features of a token the root times normals of part 1, and the noise
    of responses are normals of part 2.

    Examples
    --------
    >>> import mhfast as mh
    >>> X, y = mh.reference.regression_samples(5, 4, [[2.0, 0.0], [1.0, 1.0]], seed=0, block=1)
    >>> X.shape, y.shape
    ((5, 4, 3), (5, 1, 1))
    """
    L = np.asarray(root, np.float64)
    features = len(L)
    X, y = np.empty((n, tokens, features + 1)), np.empty((n, 1, 1))
    for i in range(n):
        sample = _Sample(seed, block, i)
        task = sample.normals(0, features)
        z = sample.normals(1, tokens * features).reshape(tokens, features)
        rows = np.stack([_dot(z[:, : k + 1], L[k, : k + 1]) for k in range(features)], axis=1)
        response = _dot(rows, task)
        X[i, :, :-1] = rows
        X[i, :, -1] = response + noise * sample.normals(2, tokens)
        X[i, -1, -1] = 0.0
        y[i] = response[-1]
    return X, y


def planted_samples(n: int, teacher: Any, *, seed: int, block: int) -> tuple[Array, Array]:
    """Draw X (n,T,d) and y (n,) of `mhfast.data.planted_attention`.

    Tokens are normals of part 0, rounded to the dtype of the teacher. The label is the sign of its
    output, -1 where that is 0; in float64, whose last bits may differ.

    Examples
    --------
    >>> import mhfast as mh
    >>> teacher = mh.Classifier.gaussian(heads=2, tokens=4, dim=5, std=0.5, seed=0)
    >>> X, y = mh.reference.planted_samples(3, teacher, seed=0, block=1)
    >>> X.shape, y.shape
    ((3, 4, 5), (3,))
    """
    shape = np.shape(teacher.U)[1:]
    rows = [_Sample(seed, block, i).normals(0, math.prod(shape)).reshape(shape) for i in range(n)]
    X = np.stack(rows).astype(np.asarray(teacher.U).dtype).astype(np.float64)
    return X, np.where(outputs(teacher, X) > 0.0, 1.0, -1.0)


def markov_samples(
    n: int, tokens: int, transition: ArrayLike, *, seed: int, block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw words (n,T) and the next ones (n,T) of `mhfast.data.markov_chain`.

    `transition` (V,...,V) has an axis for each word before, and one for the next. With w_t the
    words of part 0, the first of the sample are the integers below V of w_t, and each further one
    is the number of sums of the probabilities, given the words before it, that are at most
    u = floor(w_t / 2^11) / 2^53; the sum of all is left out.

    Examples
    --------
    >>> import mhfast as mh
    >>> ids, following = mh.reference.markov_samples(3, 6, [[0, 1], [1, 0]], seed=0, block=1)
    >>> bool((ids + following == 1).all())
    True
    """
    table = np.asarray(transition, np.float64)
    V, order = table.shape[-1], table.ndim - 1
    sums = np.cumsum(table, axis=-1)[..., :-1]
    ids = np.empty((n, tokens + 1), np.int64)
    for i in range(n):
        for t, word in enumerate(_Sample(seed, block, i).words(0, tokens + 1)):
            u = (word >> 11) * 2.0**-53
            before = tuple(ids[i, t - order : t])
            ids[i, t] = word * V >> 64 if t < order else np.sum(sums[before] <= u)
    return ids[:, :-1], ids[:, 1:]


class _Sample:
    """Random numbers of one sample."""

    def __init__(self, seed: int, block: int, sample: int) -> None:
        self.key, self.counter = (seed, 2), (block, sample)

    def words(self, part: int, count: int) -> list[int]:
        # NumPy adds 1 to the first word before each block of four numbers.
        counter = np.array([0, *self.counter, part], np.uint64)
        philox: Any = np.random.Philox(key=np.array(self.key, np.uint64), counter=counter)
        return [int(word) for word in philox.random_raw(count)]

    def sign(self, part: int) -> float:
        return -1.0 if self.words(part, 1)[0] >> 63 else 1.0

    def normals(self, part: int, count: int) -> Array:
        words = np.array(self.words(part, -(-count // 16) * 16), np.uint64)
        return normals(words)[:count]


def _horner(coefficients: tuple[float, ...], x: Array) -> Array:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _log(u: Array) -> Array:
    """Logarithms of numbers in (0, 1]."""
    m, e = np.frexp(u)
    m, exponent = 2.0 * m, e - 1.0
    large = m > math.sqrt(2.0)
    m, exponent = np.where(large, 0.5 * m, m), np.where(large, exponent + 1.0, exponent)
    s = (m - 1.0) / (m + 1.0)
    return math.log(2.0) * exponent + 2.0 * s * _horner(_LOG, s * s)


def _dot(a: Array, b: Array) -> Array:
    """Sum products over the last axis from the first to the last."""
    total: Array = np.cumsum(a * b, axis=-1)[..., -1]
    return total


def _unit(z: Array) -> Array:
    return z / np.sqrt(_dot(z, z))[..., None]
