"""Few distinct tokens, and identical samples, in data given as arrays: what training makes of them.

Where X holds few distinct rows it becomes `Tokens`, and identical samples become one each with the
sum of their weights, if that saves time. Rows are the same if all of their bits are: zeros of
different sign, and numbers that differ by a rounding, are different. The look is decided by shapes
and by what it finds, never by the number of steps, so that a run in several calls goes the same way
in each. It is left out where a step takes hardly longer, and ends at once where some tokens or
samples, spread over all, are all different.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._arguments.losses import Loss
from .._arguments.own_losses import is_own
from ..dataset.dataset import Dataset
from ..dataset.words import Tokens
from .model import Model
from .problem import looks_up

# Chosen: multiply-adds of outputs from which on a step takes longer than the look at all data.
LEAST_WORK = 1 << 20
# Chosen: softmax and what belongs to it, of one weight, in multiply-adds.
SOFTMAX_WORK = 16
# Chosen: of 256 tokens two are the same, but for one case in 1e13, if there are 1000 words equally
# often; and of 4 √n samples, but for one in 3000, if half of n are different.
PROBED_TOKENS, PROBED_SAMPLES = 256, 4
# Chosen: merging copies samples and adds weights, which at least half of them must make up for.
MOST_SAMPLES = 0.5
# Measured, `python -m benchmarks.distinct`: where looking up words is faster than the array, in
# self-attention. Dimensions of a classifier, of one with V <= 2 T words, and of a layer; numbers
# T d of a sample; words for each dimension, of which more no longer fit into the cache.
DIMENSIONS, FEW_WORDS_DIMENSIONS, LAYER_DIMENSIONS = 32, 16, 48
SAMPLE_NUMBERS = 256
WORDS_OF_DIMENSION = 4
# Chosen: tables may take this part of the multiply-adds of the samples, so that they do not matter.
TABLES_PAY = 0.125


class Compact(NamedTuple):
    """A data set as training goes over it.

    Attributes
    ----------
    data : Dataset
        The given one, or one with `Tokens` in place of the array and with merged samples.
    places : integers (n,) or None
        Which of its samples each given one is; None if none are merged.
    """

    data: Dataset
    places: npt.NDArray[np.int32] | None = None


def compact(model: Model, data: Dataset, loss: Loss | None = None) -> Compact:
    """Return the data set as training goes over it.

    Parameters
    ----------
    model : Classifier or Layer
        That goes over it, of a smaller dimension where training takes place in the tokens' span.
    data : Dataset
        It must fit the model, but for that.
    loss : str, a loss with a parameter, or a function, optional
        Of a function of the caller's, which sees the samples, none are merged.
    """
    n, T, d = data._given.shape[-3:]
    q = model._query_rows(T) if data.query is None else data.query.shape[-2]
    if model.heads * n * q * (d * (d + 2 * T) + T * SOFTMAX_WORK) < LEAST_WORK:
        return Compact(data)
    of_samples = isinstance(model.query, np.ndarray)  # the model has query rows for each
    if of_samples or data._run_axes["X"] or data._run_axes.get("query"):
        return Compact(data)
    few, most = data, most_words(model, data)
    if most > 0:
        few = data._in_words(most, probe=PROBED_TOKENS)
    places = None
    if not is_own(loss):
        few, places = few._merged(int(MOST_SAMPLES * n), probe=PROBED_SAMPLES * math.isqrt(n))
    if few.words is not None and data.words is None and not pays(model, few, few.words):
        few = data if places is None else dataclasses.replace(few, X=few.X)
    return Compact(few, places)


def most_words(model: Model, data: Dataset) -> int:
    """Return the largest number of words that are faster than an array, by shape; 0 if none are."""
    itself = model.query is None and model.prompt is None and data.query is None
    if not itself or "W" not in model.parameters or model._core.row_map_name != "softmax":
        return 0
    T, d = data.tokens, model.dim
    most = WORDS_OF_DIMENSION * d
    if T * d < SAMPLE_NUMBERS:
        return 0
    if "U" in model.parameters and d >= FEW_WORDS_DIMENSIONS:
        return most if d >= DIMENSIONS else min(2 * T, most)
    narrow = "V" in model.parameters and 2 * model._out_dim <= d
    return most if narrow and d >= LAYER_DIMENSIONS and 2 * d >= T else 0


def pays(model: Model, data: Dataset, words: Tokens) -> bool:
    """Return whether the tables of the words found are small beside the products of the samples."""
    V, d, T = words.words, model.dim, data.tokens
    samples = data.n * T * d * (d + 2 * T)
    return V * d * (V + d) <= TABLES_PAY * samples and looks_up(model, words)
