"""Tokens on the unit sphere with random labels, as in studies of the implicit bias."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .._arguments import checks
from ..dataset.dataset import Dataset, Seed, Seeds
from ..dataset.seeds import FIRST, POPULATION, dot, integer_seed, orthonormal_frame, signs, stream
from .population import Population
from .runs import over_seeds


@over_seeds
def sphere_tokens(
    n: int,
    tokens: int,
    dim: int,
    *,
    external_query: bool = True,
    seed: Seed | Seeds,
    dtype: DTypeLike = np.float64,
) -> Dataset:
    """Draw independent uniform tokens on the unit sphere, with random signs as labels.

    A random unit vector v is the population's readout.  If attention is trained with a fixed
    readout v, token t of sample i has the score y_i ⟨v, x_it⟩, and the token of largest score is
    optimal: attention that selects it has the smallest loss.

    Parameters
    ----------
    n, tokens, dim : int
        Samples n, tokens T, dimension d of a token.
    external_query : bool
        Give each sample its own query row, uniform on the sphere and independent of the rest.
        Otherwise the `query` of the model selects a token.
    seed : int or numpy.random.Generator, or a sequence of R of them
        Same seed, same arrays.  Readout, labels, tokens and queries are separate streams.  A
        sequence gives a run axis.
    dtype : float64 or float32
        Drawn in float64 and rounded.

    Returns
    -------
    Dataset
        X (n,T,d), y (n,), query (n,1,d) or None.  Token groups "other" and "optimal".  `truth`:
        "readout" v (d,) and "optimal" (n,), the position of each sample's optimal token.
        `.sample` keeps v; it may change tokens, external_query and dtype.

    Raises
    ------
    ValueError
        A parameter is out of range.
    TypeError
        A seed is neither an integer nor a generator, or external_query is not a bool.

    Notes
    -----
    The setting of Tarzanagh, Li, Thrampoulidis, Oymak, "Transformers as Support Vector Machines",
    and of later work; typical sizes are n = 6, T = 8, d = 10.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.sphere_tokens(10, 5, 8, seed=0)
    >>> data.X.shape
    (10, 5, 8)
    """
    seed = integer_seed(seed)
    readout = orthonormal_frame(stream(seed, POPULATION), 1, checks.count(dim, "dim"))[0]
    return _draw(
        n,
        seed=seed,
        role=FIRST,
        readout=readout,
        tokens=tokens,
        external_query=external_query,
        dtype=dtype,
    )


def _draw(
    n: int,
    *,
    seed: int,
    role: int,
    readout: NDArray[np.float64],
    tokens: int,
    external_query: bool,
    dtype: DTypeLike,
) -> Dataset:
    n, tokens = checks.count(n, "n"), checks.count(tokens, "tokens")
    if not isinstance(external_query, bool | np.bool_):
        raise TypeError(f"external_query: expected a bool, got {external_query!r}")
    dtype = checks.float_dtype(dtype)
    dim = len(readout)
    y = signs(stream(seed, role, 0), n)
    X = _on_sphere(stream(seed, role, 1), (n, tokens, dim))
    query = _on_sphere(stream(seed, role, 2), (n, 1, dim)) if external_query else None
    optimal = (y[:, None] * dot(X, readout)).argmax(axis=1)
    return Dataset(
        X.astype(dtype, copy=False),
        y.astype(dtype),
        query=None if query is None else query.astype(dtype, copy=False),
        token_groups=((optimal[:, None] == np.arange(tokens)).astype(int), ("other", "optimal")),
        truth={"readout": readout.astype(dtype), "optimal": optimal},
        generator=Population(
            _draw,
            {"readout": readout},
            {"tokens": tokens, "external_query": external_query, "dtype": dtype},
            _in_core,
        ),
    )


def _in_core(**_settings: object) -> tuple[str]:
    return ("sphere_tokens",)


def _on_sphere(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Independent uniform unit vectors along the last axis."""
    z = rng.standard_normal(shape)
    lengths: NDArray[np.float64] = np.sqrt(dot(z, z))[..., None]
    return z / lengths
