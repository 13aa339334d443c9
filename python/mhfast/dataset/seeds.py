"""Random numbers that are the same on every platform.

Only the raw stream of PCG64, uniform doubles and standard normals are taken from NumPy; choices and
permutations are made of uniform doubles here, and sums run in one fixed order without BLAS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# First entry of a stream's key: the population, the data set that a generator returns, the data
# sets of `Dataset.sample` (which thus never repeat the one it was called on), and initializers.
POPULATION, FIRST, SAMPLE, START = range(4)


def integer_seed(seed: object) -> int:
    """Return the seed as an integer; from a generator 128 random bits are drawn.

    Raises
    ------
    TypeError
        The seed is neither one integer nor a `numpy.random.Generator`.
    ValueError
        The seed is negative.
    """
    if isinstance(seed, np.random.Generator):
        return int.from_bytes(seed.bytes(16), "little")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"seed: expected one integer or a numpy.random.Generator, got {seed!r:.80}")
    if seed < 0:
        raise ValueError(f"seed: expected an integer of at least 0, got {seed}")
    return int(seed)


def stream(seed: int, *key: int) -> np.random.Generator:
    """Return the random stream `key` of a seed; streams of different keys are independent."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def signs(rng: np.random.Generator, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
    """Independent signs, 1 or -1 with equal probability."""
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def choices(
    rng: np.random.Generator, count: int, shape: int | tuple[int, ...]
) -> NDArray[np.int64]:
    """Independent uniform choices from 0 .. count-1."""
    return (rng.random(shape) * count).astype(np.int64)


def permutations(rng: np.random.Generator, rows: int, length: int) -> NDArray[np.int64]:
    """Independent uniform permutations of 0 .. length-1, (rows, length)."""
    return np.argsort(rng.random((rows, length)), axis=1, kind="stable").astype(np.int64)


def dot(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Inner products over the last axis, summed from first to last entry."""
    if a.shape[-1] == 0:
        return np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1])
    return np.cumsum(a * b, axis=-1)[..., -1]


def cholesky(matrix: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Lower triangular L with L Lᵀ = matrix; None if the symmetric matrix is not positive definite.

    Entries are sums in one fixed order, unlike those of LAPACK.
    """
    L = np.zeros_like(matrix)
    for i, row in enumerate(matrix):
        for k in range(i + 1):
            rest = row[k] - dot(L[i, :k], L[k, :k])
            if k < i:
                L[i, k] = rest / L[k, k]
            elif rest > 0.0:
                L[i, i] = np.sqrt(rest)
            else:
                return None
    return L


def orthonormal_frame(rng: np.random.Generator, count: int, dim: int) -> NDArray[np.float64]:
    """`count` orthonormal vectors in uniformly random position, rows of an array (count, dim).

    Gram-Schmidt on standard normal vectors, each projected twice, which is needed for orthogonality
    up to rounding error.
    """
    frame = np.empty((count, dim))
    for i in range(count):
        v = rng.standard_normal(dim)
        for _ in range(2):
            for u in frame[:i]:
                v = v - dot(u, v) * u
        frame[i] = v / np.sqrt(dot(v, v))
    return frame
