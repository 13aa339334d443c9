"""Labels planted by a random multi-head classifier."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import FIRST, POPULATION, integer_seed, stream
from ..models import Classifier
from .population import Population
from .runs import over_seeds
from .teachers import outputs


@over_seeds
def planted_attention(
    n: int,
    tokens: int,
    dim: int,
    heads: int,
    *,
    score_std: float = 2.0,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw Gaussian tokens, labelled by the sign of a random multi-head classifier.

    Tokens are N(0, I_d).  The teacher has Gaussian parameters: W such that the score of two
    independent tokens has standard deviation `score_std`, and U with entries N(0, 1/(T d)).  Since
    Φ(-X) = -Φ(X), both labels are equally likely.

    Parameters
    ----------
    n, tokens, dim, heads : int
        Samples n, tokens T, dimension d of a token, heads H of the teacher.
    score_std : float
        Standard deviation of the logits of the teacher; 0 means uniform attention, a linear
        teacher.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same teacher and samples.  A sequence gives a run axis.
    dtype : float64 or float32
        Drawn in float64 and rounded; labels are computed in float64 from the rounded numbers.

    Returns
    -------
    Dataset
        X (n,T,d), y (n,).  `truth["model"]` is the teacher, a `Classifier`.  `.sample` draws
        from the same teacher.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A seed is neither an integer nor a generator.

    Notes
    -----
    The planted model of the experiments of Deora, Ghaderi, Taheri, Thrampoulidis, "On the
    Optimization and Generalization of Multi-head Attention".  The exact distribution of tokens and
    teacher is our choice.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.planted_attention(10, 5, 4, 2, seed=0)
    >>> data.X.shape, sorted(data.truth)
    ((10, 5, 4), ['model'])
    """
    tokens, dim = checks.count(tokens, "tokens"), checks.count(dim, "dim")
    heads = checks.count(heads, "heads")
    if checks.finite(score_std, "score_std") < 0.0:
        raise ValueError(f"score_std: expected a number of at least 0, got {score_std}")
    dtype = checks.float_dtype(dtype)
    seed = integer_seed(seed)
    rng = stream(seed, POPULATION)
    W = rng.standard_normal((heads, dim, dim)) * (score_std / dim)
    U = rng.standard_normal((heads, tokens, dim)) / math.sqrt(tokens * dim)
    teacher = Classifier(W.astype(dtype), U.astype(dtype))
    return _draw(n, seed=seed, role=FIRST, teacher=teacher)


def _draw(n: int, *, seed: int, role: int, teacher: Classifier) -> Dataset:
    n = checks.count(n, "n")
    dtype = teacher.U.dtype
    X = stream(seed, role).standard_normal((n, *teacher.U.shape[1:])).astype(dtype)
    y = np.where(outputs(teacher, X.astype(np.float64)) > 0.0, 1.0, -1.0).astype(dtype)
    return Dataset(
        X,
        y,
        truth={"model": teacher},
        generator=Population(_draw, {"teacher": teacher}, {}, _in_core),
    )


def _in_core(*, teacher: Classifier) -> tuple[object, ...]:
    W, U = (teacher.parameters[name].astype(np.float64) for name in ("W", "U"))
    rows = (array.reshape(-1, array.shape[-1]) for array in (W, U))
    return ("planted_attention", *rows, teacher.heads)
