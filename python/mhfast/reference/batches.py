"""The samples of each step of training on batches, from the random numbers of NumPy's Philox.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011) define the generator Philox4x64-10. Its numbers are a function of a key and a counter, so
that the batch of any step is known without those of the steps before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def batches(
    n: int, size: int, steps: int, *, order: str = "shuffle", seed: int = 0, first: int = 0
) -> NDArray[np.int64]:
    """Return the samples of the batches of steps `first`, `first` + 1, ...: (steps, size).

    With b_0, b_1, ... the 64-bit numbers of Philox4x64-10 for the key (seed, 0), from the counter
    (1, c, 0, 0) on, sample i of a batch is

    - ``replace``: floor(b_i n / 2^64) with c = k, the step.
    - ``shuffle``: entry (k mod floor(n / size)) size + i of a permutation of the epoch
      c = floor(k / floor(n / size)). It is the identity after entry j has changed places with
      entry j + floor(b_j (n - j) / 2^64), j = 0, 1, ..., n - 1 (Fisher and Yates).

    Every sample has the probability 1/n up to 2^-64.

    Raises
    ------
    ValueError
        For an unknown order, or a size that is not from 1 to n.

    Examples
    --------
    >>> import mhfast as mh
    >>> rows = mh.reference.batches(10, 3, steps=3, seed=0)
    >>> rows.shape, len(set(rows.ravel()))  # an epoch takes no sample twice
    ((3, 3), 9)
    """
    if order not in ("shuffle", "replace") or not 1 <= size <= n:
        raise ValueError(
            f"order, size: expected 'shuffle' or 'replace' and 1 to n = {n}, got {order!r}, {size}"
        )
    epoch = n // size
    rows = []
    for k in range(first, first + steps):
        if order == "replace":
            rows.append([b * n >> 64 for b in _numbers(seed, k, size)])
            continue
        begin = k % epoch * size
        permutation = list(range(n))
        for j, b in enumerate(_numbers(seed, k // epoch, begin + size)):
            other = j + (b * (n - j) >> 64)
            permutation[j], permutation[other] = permutation[other], permutation[j]
        rows.append(permutation[begin : begin + size])
    return np.array(rows, np.int64).reshape(steps, size)


def sample_seed(seed: int, block: int) -> int:
    """Return the seed from which a stream draws its samples number `block`, from 0 to 2^63 - 1.

    The upper 63 bits of the first number of Philox4x64-10 for the key (seed, 1), from the counter
    (1, block, 0, 0) on. Step k of a stream that is drawn from every m steps has the block
    floor(k / m).

    Examples
    --------
    >>> import mhfast as mh
    >>> mh.reference.sample_seed(0, 1) < 2**63
    True
    """
    return _numbers(seed, block, 1, stream=1)[0] >> 1


def _numbers(seed: int, counter: int, count: int, stream: int = 0) -> list[int]:
    # NumPy adds 1 to the first word before each block of four numbers.
    words = np.array([0, counter, 0, 0], np.uint64)
    philox = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=words)
    return [int(b) for b in philox.random_raw(count)]
