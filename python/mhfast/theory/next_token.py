"""The Graph-SVM: where attention ends that is trained to predict the next token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..gradients import Gradients
from .hull import CertifiedMargin
from .inputs import exponent, in_units
from .norms import Norm, checked_norm
from .programs import features, independent, solve, without

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class NextTokenSVM(CertifiedMargin):
    """The least-norm W that ranks tokens as the next tokens of the data require.

    Attributes
    ----------
    direction : Gradients
        W (1, d, d).  If no W ranks them, the hull point itself, which is zero up to rounding.
    margin : float
        1/‖direction‖, the margin of the unit direction; 0 if no W ranks the tokens.
    dual : float
        Dual norm of the hull point: no unit direction has a larger margin.
    priorities : int64 array (N, 3)
        Rows (last, winner, loser): e_lastᵀ W (e_winner - e_loser) ≥ 1.
    weights : float64 array (N,)
        Convex weights of the priorities.
    ties : int64 array (M, 3)
        Rows (last, i, j) of tokens of one component: e_lastᵀ W (e_i - e_j) = 0.  A spanning tree
        of each component is listed, which implies the rest.
    components : int64 array (V, V)
        Entry (last, i): the strongly connected component of token i in the graph of `last`, with
        the number of the smallest token in it; -1 where i is not in that graph.
    resolution : float
        A margin of this size is indistinguishable from 0: see `token_svm`.
    embedding : array (V, d)
        The vector of each token.

    Examples
    --------
    >>> import mhfast as mh
    >>> ids = [[1, 2, 0], [2, 1, 0], [1, 3, 0]]
    >>> svm = mh.theory.next_token_svm(ids, [1, 2, 3])
    >>> svm.ties.tolist()  # after token 0 some samples prefer 1 to 2, others 2 to 1
    [[0, 1, 2]]
    >>> W = svm.direction.W[0]
    >>> bool(abs(svm.without_ties(W) - W).max() < 1e-9)
    True
    >>> svm.separable, svm.inseparable, svm.gap < 1e-6
    (True, False, True)
    """

    direction: Gradients
    margin: float
    dual: float
    priorities: Integers
    weights: Array
    ties: Integers
    components: Integers
    resolution: float
    embedding: Array

    def without_ties(self, W: npt.ArrayLike) -> Array:
        """Project W on the matrices that satisfy the ties.

        In training the component along the ties stays finite, while the rest diverges in the
        direction of the solution: what remains can be compared with it.

        Parameters
        ----------
        W : array (..., d, d)

        Returns
        -------
        array (..., d, d)

        Raises
        ------
        ValueError
            The last axes are not (d, d).
        """
        d = self.embedding.shape[1]
        array = np.asarray(W, dtype=np.float64)
        if array.shape[-2:] != (d, d):
            raise ValueError(f"W: expected shape (..., {d}, {d}), got {array.shape}")
        if not len(self.ties):
            return array
        last, i, j = self.ties.T
        E = self.embedding
        tied = independent(features((E[last], E[i] - E[j])))
        return without(array.reshape(-1, d, d), tied).reshape(array.shape)


def next_token_svm(
    ids: npt.ArrayLike,
    next_tokens: npt.ArrayLike,
    *,
    embedding: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    norm: Norm = "fro",
) -> NextTokenSVM:
    """Find the least-norm W that gives the next token of each sample the highest priority.

        minimise ‖W‖   subject to   e_kᵀ W (e_i - e_j) ≥ 1   where i has priority over j,
                                    e_kᵀ W (e_i - e_j) = 0   where i and j are in one component.

    The graph of the last token k has an edge i → j for each sample that ends in k, has the next
    token i, and contains j ≠ i.  Tokens i, j of one strongly connected component, each of which
    is preferred to the other by some samples, are tied; on other edges i has priority over j.

    Parameters
    ----------
    ids : integers (n, T)
        The tokens of each sample, in [0, V); the last is the query.
    next_tokens : integers (n,)
        The token that follows, one of those of the sample.
    embedding : array (V, d), optional
        The vector e_i of each token; by default one-hot, with V one more than the largest id.
    lengths : integers (n,), optional
        The number of tokens of each sample, at least 1; the last one is then that before the
        padding.
    norm : "fro", "nuclear" or a number above 1
        As in `token_svm`.

    Returns
    -------
    NextTokenSVM

    Raises
    ------
    TypeError
        An array does not hold integers.
    ValueError
        A shape or a value does not fit, a next token is not in its sample, or no token has
        priority over another.
    ImportError
        The norm needs cvxpy, which is not installed.
    RuntimeError
        Clarabel found no solution.

    Notes
    -----
    Written for the logits zᵀ W x of this package; W is the transpose of that of the paper.  Edges
    alone suffice: what a path of several edges requires is implied.  With one-hot tokens
    some W always satisfies the constraints; with d < V it may not.  The component of a trained W
    along the ties stays finite; `NextTokenSVM.without_ties` removes it.

    References
    ----------
    Li, Huang, Ildiz, Rawat, Oymak, "Mechanics of Next Token Prediction with Self-Attention",
    AISTATS 2024, from which the problem is taken.

    Examples
    --------
    >>> import mhfast as mh
    >>> svm = mh.theory.next_token_svm([[1, 2, 0], [2, 0, 1]], [2, 0])
    >>> svm.priorities.tolist()  # rows (last, winner, loser)
    [[0, 2, 0], [0, 2, 1], [1, 0, 1], [1, 0, 2]]
    >>> W = svm.direction.W[0]
    >>> round(float(W[0, 2] - W[0, 1]), 6)
    1.0
    """
    checked = checked_norm(norm)
    tokens, following, counts = _samples(ids, next_tokens, lengths)
    V = int(tokens.max()) + 1
    E = np.eye(V) if embedding is None else _embedding(embedding, V)
    edges = _edges(tokens, following, counts)
    components = _components(edges, len(E))
    last, winner, loser = edges.T
    tied = components[last, winner] == components[last, loser]
    priorities, ties = edges[~tied], _spanning(components)
    if not len(priorities):
        raise ValueError("next_tokens: expected a token of higher priority than another, got none")
    unit = exponent(E)
    E = in_units(E, unit)
    factors = E[priorities[:, 0]], E[priorities[:, 1]] - E[priorities[:, 2]]
    equal = (E[ties[:, 0]], E[ties[:, 1]] - E[ties[:, 2]]) if len(ties) else None
    given = np.asarray(embedding).dtype if embedding is not None else np.dtype(np.float64)
    eps = float(np.finfo(given if given.kind == "f" else np.float64).eps)
    size = float(np.linalg.norm(E, axis=1).max())
    found = solve(*factors, checked, size=size, eps=eps, ties=equal)
    direction = in_units(found.direction, 2 * unit if found.separable else -2 * unit)[None]
    numbers = in_units(np.array([found.margin, found.dual, found.hidden]), -2 * unit).tolist()
    return NextTokenSVM(
        Gradients(W=direction), numbers[0], numbers[1], priorities, found.weights, ties,
        components, numbers[2], in_units(E, -unit),
    )  # fmt: skip


def _samples(
    ids: npt.ArrayLike, next_tokens: npt.ArrayLike, lengths: npt.ArrayLike | None
) -> tuple[Integers, Integers, Integers]:
    tokens = _integers(ids, "ids", "n T", (None, None))
    n, T = tokens.shape
    if not tokens.size:
        raise ValueError(f"ids: expected at least one token, got shape {tokens.shape}")
    following = _integers(next_tokens, "next_tokens", "n", (n,))
    counts = np.full(n, T) if lengths is None else _integers(lengths, "lengths", "n", (n,))
    if counts.min() < 1 or counts.max() > T:
        raise ValueError(f"lengths: expected 1 to {T}, got {counts.min()} to {counts.max()}")
    seen = np.arange(T) < counts[:, None]
    if tokens[seen].min() < 0:
        raise ValueError(f"ids: expected numbers of at least 0, got {tokens[seen].min()}")
    tokens = np.where(seen, tokens, tokens[:, :1])  # padding repeats a token, which adds nothing
    lacking = ~(tokens == following[:, None]).any(axis=1)
    if lacking.any():
        i = int(np.argmax(lacking))
        raise ValueError(
            f"next_tokens: expected a token of the sample, got {following[i]} at index {i}"
        )
    return tokens, following, counts


def _integers(
    values: npt.ArrayLike, name: str, letters: str, shape: tuple[int | None, ...]
) -> Integers:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype.name}")
    checks.shape(array, name, letters, shape)
    return array.astype(np.int64)


def _embedding(embedding: npt.ArrayLike, least: int) -> Array:
    E: Array = np.asarray(embedding, dtype=np.float64)
    checks.shape(E, "embedding", "V d", (None, None))
    if len(E) < least:
        raise ValueError(f"embedding: expected a row for each of {least} tokens, got {len(E)}")
    if not np.isfinite(E).all():
        raise ValueError("embedding: expected finite numbers, got NaN or inf")
    return E


def _edges(tokens: Integers, following: Integers, counts: Integers) -> Integers:
    """Return the edges (last, winner, loser), each once."""
    n, T = tokens.shape
    last = tokens[np.arange(n), counts - 1]
    rows = np.stack([np.repeat(last, T), np.repeat(following, T), tokens.ravel()], axis=1)
    unique: Integers = np.unique(rows[rows[:, 1] != rows[:, 2]].reshape(-1, 3), axis=0)
    return unique


def _components(edges: Integers, V: int) -> Integers:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    found = np.full((V, V), -1)
    for k in np.unique(edges[:, 0]):
        _, i, j = edges[edges[:, 0] == k].T
        graph = csr_array((np.ones(len(i)), (i, j)), shape=(V, V))
        labels = connected_components(graph, directed=True, connection="strong")[1]
        smallest = np.full(V, V)
        np.minimum.at(smallest, labels, np.arange(V))
        members = np.unique(np.concatenate([i, j]))
        found[k, members] = smallest[labels[members]]
    return found


def _spanning(components: Integers) -> Integers:
    """Return (last, smallest token, token) for all other tokens of a component."""
    last, token = np.nonzero((components >= 0) & (components != np.arange(len(components))))
    return np.stack([last, components[last, token], token], axis=1).astype(np.int64)
