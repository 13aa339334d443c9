"""Real images: scikit-learn's handwritten digits, read row by row."""

from __future__ import annotations

from importlib import import_module

import numpy as np
from numpy.typing import DTypeLike

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import FIRST, integer_seed, permutations, stream
from .runs import over_seeds


@over_seeds
def digits(
    classes: tuple[int, int] = (3, 8),
    *,
    position: bool = True,
    n_train: int = 250,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> tuple[Dataset, Dataset]:
    """Split the images of two handwritten digits into a training and a test set.

    A sample is an 8 x 8 image; its T = 8 tokens are the rows of the image, pixels in [0, 1].

    Parameters
    ----------
    classes : tuple of two digits
        The first gets label -1, the second label 1.
    position : bool
        Append the one-hot position of the row to each token, so that d is 16 instead of 8.
    n_train : int
        Training samples; the rest is the test set.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Every seed gives another random split of the same images.  A sequence gives a run axis.
    dtype : float64 or float32

    Returns
    -------
    train, test : Dataset
        X (n,8,16) or (n,8,8), y (n,).  `truth`: "classes", and "index" (n,), the number of each
        image in `sklearn.datasets.load_digits()`.

    Raises
    ------
    ImportError
        scikit-learn, which contains the images, is not installed.
    ValueError
        The classes are not two different digits, or the split leaves a set empty.
    TypeError
        A seed is neither an integer nor a generator.

    Examples
    --------
    >>> import mhfast as mh
    >>> train, test = mh.data.digits((3, 8), seed=0)
    >>> train.n, train.tokens, train.dim
    (250, 8, 16)
    """
    try:
        load_digits = import_module("sklearn.datasets").load_digits
    except ImportError as error:
        raise ImportError(
            "mhfast.data.digits reads the images that come with scikit-learn: "
            "pip install scikit-learn"
        ) from error
    first, second = _two_digits(classes)
    dtype = checks.float_dtype(dtype)
    images, labels = load_digits(return_X_y=True)
    index = np.flatnonzero((labels == first) | (labels == second))
    n_train = checks.count(n_train, "n_train")
    if n_train >= len(index):
        raise ValueError(
            f"n_train: expected fewer than the {len(index)} images of {first} and {second}, "
            f"got {n_train}"
        )
    index = index[permutations(stream(integer_seed(seed), FIRST), 1, len(index))[0]]
    tokens = images[index].reshape(-1, 8, 8) / 16.0
    if position:
        places = np.broadcast_to(np.eye(8), tokens.shape)
        tokens = np.concatenate([tokens, places], axis=2)
    X = tokens.astype(dtype)
    y = np.where(labels[index] == second, 1.0, -1.0).astype(dtype)
    parts = (slice(None, n_train), slice(n_train, None))
    train, test = (
        Dataset(X[part], y[part], truth={"classes": (first, second), "index": index[part]})
        for part in parts
    )
    return train, test


def _two_digits(classes: tuple[int, int]) -> tuple[int, int]:
    try:
        first, second = (checks.integer(c, "classes") for c in classes)
    except (TypeError, ValueError):
        raise ValueError(f"classes: expected two digits, got {classes!r}") from None
    if first == second or not (0 <= first <= 9 and 0 <= second <= 9):
        raise ValueError(f"classes: expected two different digits from 0 to 9, got {classes!r}")
    return first, second
