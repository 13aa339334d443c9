"""The body of key-query matrices that certified facts determine (second half of phase 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import frozen
from .examples import Float64
from .facts import Facts
from .sums import ROUNDING

MAX_HEADS = 12
"""Largest number of heads that is estimated."""

SURE = 2.0
"""Step of the spectrum, over the largest later one, below which a proposal is a guess."""

CERTAIN = 10.0
"""The same step, above which no other number of heads need be tried."""

FEW = 4
"""Largest number of heads of a proposal that is a guess."""


@dataclass(frozen=True, eq=False)
class Body:
    """The affine hull of the key-query matrices, as determined by the facts.

    Attributes
    ----------
    point : array (d, d)
        The point of the hull nearest to 0.
    directions : array (H - 1, d, d)
        Orthonormal; W_h = point + Σ_k c_hk directions_k.
    eigenvalues : array (2 MOST_HEADS,) or fewer
        The smallest of the second moment of the facts relative to that of random rows, ascending: H
        of them are small.
    gap : float
        Eigenvalue H + 1 over eigenvalue H.
    misfit : float
        Median of |⟨x_a (x_b - x_c)ᵀ, point⟩ - value| over the facts, in units of a logit.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> body = mh.learner.sculpt(facts, heads=2)
    >>> body.heads, body.point.shape, body.directions.shape
    (2, (5, 5), (1, 5, 5))
    >>> bool(np.allclose(body.at([[2.0]])[0], body.point + 2.0 * body.directions[0]))
    True
    """

    point: Float64
    directions: Float64
    eigenvalues: Float64
    gap: float
    misfit: float

    @property
    def heads(self) -> int:
        """The number H of heads."""
        return len(self.directions) + 1

    def at(self, coordinates: Float64) -> Float64:
        """Compute the matrices of the hull at given coordinates.

        Parameters
        ----------
        coordinates : array (..., H - 1)

        Returns
        -------
        float64 array (..., d, d)

        Raises
        ------
        ValueError
            The last axis has another length.
        """
        coordinates, k = np.asarray(coordinates), len(self.directions)
        if coordinates.shape[-1:] != (k,):
            raise ValueError(
                f"coordinates: expected shape (..., H - 1) = (..., {k}), got {coordinates.shape}"
            )
        return np.asarray(self.point + np.tensordot(coordinates, self.directions, axes=1))


def sculpt(facts: Facts, heads: int, *, num_threads: int | None = None) -> Body:
    """Find the affine hull of the heads' key-query matrices.

    Each fact holds for all heads, so combinations of differences of heads do not affect it: the
    H - 1 directions of the hull are those in which the facts vary least, compared with random rows
    (the smallest generalized eigenvectors).  The point is the least-squares solution of the facts
    without these directions. Facts are weighted by their tolerances, then reweighted by their
    residuals.

    Parameters
    ----------
    facts : Facts
    heads : int
        H, at least 1.
    num_threads : int, optional

    Returns
    -------
    Body
        The point and the H - 1 directions, each (d, d).

    Raises
    ------
    ValueError
        There are fewer facts than the d² unknowns of a key-query matrix, or H is more than d².

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", sculpting the body of the
    attention matrices from certified rows; the eigenvalue form is ours.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> body = mh.learner.sculpt(facts, heads=2)
    >>> mh.learner.hull_cosine(body.directions, truth.W) > 0.8
    True
    """
    checks.instance(facts, Facts, "facts")
    heads = checks.count(heads, "heads")
    d = facts.X.shape[2]
    if heads > d * d:
        raise ValueError(f"heads: expected at most d² = {d * d}, got {heads}")
    seen = _seen(facts.background)
    unknown = d * d if seen is None else seen.shape[1]
    if len(facts) < unknown:
        what = "d²" if seen is None else "those of W that tokens can see"
        raise ValueError(f"facts: expected at least {what} = {unknown}, got {len(facts)}")
    heads = min(heads, unknown)
    background = facts.background if seen is None else seen.T @ facts.background @ seen
    background = background + 1e-9 * np.trace(background) / unknown * np.eye(unknown)
    floor = max(float(np.median(facts.tolerance)), ROUNDING)
    trust = 1.0 / (facts.tolerance**2 + floor**2)
    error = np.zeros(len(facts))
    for _ in range(3):
        spread = max(float(np.median(np.abs(error))), ROUNDING)
        weight = trust / (1.0 + (error / spread) ** 2)
        moment = _within(seen, facts.moment(weight / weight.sum(), num_threads))
        directions = _flattest(moment[:-1, :-1], background, heads - 1)
        point = _shortest(moment, directions)
        if seen is not None:
            directions, point = seen @ directions, seen @ point
        error = facts.of(point.reshape(d, d)) - facts.value
    eigenvalues = _spectrum(moment, background, floor)
    return Body(
        point=frozen(point.reshape(d, d)),
        directions=frozen(directions.T.reshape(heads - 1, d, d)),
        eigenvalues=frozen(eigenvalues),
        gap=float(eigenvalues[heads] / eigenvalues[heads - 1])
        if heads < len(eigenvalues)
        else float("inf"),
        misfit=float(np.median(np.abs(error))),
    )


def _seen(background: Float64) -> Float64 | None:
    """Return a basis (d², rank) of the numbers of W that facts can determine; None if all."""
    values, vectors = np.linalg.eigh(background)
    large = values > ROUNDING * values[-1]
    return None if large.all() else vectors[:, large]


def _within(seen: Float64 | None, moment: Float64) -> Float64:
    """Return the moment of facts in coordinates of what they can determine; values are kept."""
    if seen is None:
        return moment
    rank = seen.shape[1]
    basis = np.zeros((len(moment), rank + 1))
    basis[:-1, :rank], basis[-1, rank] = seen, 1.0
    return np.asarray(basis.T @ moment @ basis)


def propose_heads(eigenvalues: npt.ArrayLike) -> tuple[int, float]:
    """Estimate the number H of heads, and the confidence in it.

    Parameters
    ----------
    eigenvalues : array (k,)
        `Body.eigenvalues`, positive and ascending; they do not depend on the H that the body was
        sculpted for.

    Returns
    -------
    heads : int
        The place of the step from one eigenvalue to the next that is largest compared with all
        later steps, which are due to chance.  Where no step is twice as large, at most 4.
    sureness : float
        That ratio over the largest later one; below 2 the estimate is a guess.

    Raises
    ------
    TypeError
        They are not real numbers.
    ValueError
        They are not one axis of numbers, at least one of them, positive and ascending.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> eigenvalues = np.array([1e-5, 2e-5, 3e-5, 0.4, 0.5, 0.6])
    >>> heads, confidence = mh.learner.propose_heads(eigenvalues)
    >>> heads, confidence > 100
    (3, True)
    """
    values = checks.numbers_of_shape(eigenvalues, "eigenvalues", "k", (None,))
    if not values.size:
        raise ValueError("eigenvalues: expected at least one number, got none")
    if not (values[0] > 0.0 and np.all(np.diff(values) >= 0.0)):
        raise ValueError("eigenvalues: expected positive numbers in ascending order, got others")
    steps = values[1:] / values[:-1]
    if len(steps) < 2:
        return 1, 1.0
    later = np.maximum.accumulate(steps[::-1])[::-1]
    sureness = steps[:-1] / later[1:]
    most = MAX_HEADS if sureness[:MAX_HEADS].max() >= SURE else FEW
    heads = int(np.argmax(sureness[:most])) + 1
    return heads, float(sureness[heads - 1])


def _flattest(moment: Float64, background: Float64, count: int) -> Float64:
    """Return an orthonormal basis (d², count) of the directions of smallest moment."""
    from scipy.linalg import eigh  # slow to import

    if count == 0:
        return np.zeros((len(moment), 0))
    vectors = eigh(moment, background, subset_by_index=(0, count - 1))[1]
    return np.asarray(np.linalg.qr(vectors)[0])


def _shortest(moment: Float64, directions: Float64) -> Float64:
    """Return the least-squares solution (d²) of the facts, orthogonal to the directions."""
    from scipy.linalg import lstsq, null_space  # slow to import

    rest = null_space(directions.T) if directions.shape[1] else np.eye(len(directions))
    A, b = rest.T @ moment[:-1, :-1] @ rest, rest.T @ moment[:-1, -1]
    return np.asarray(rest @ lstsq(A, b, cond=1e-12)[0])


def _spectrum(moment: Float64, background: Float64, least: float) -> Float64:
    """Return the smallest eigenvalues of facts with their values against rows at large.

    (W_h, -1) is in the kernel for every head h if the facts are exact: H small ones.  Without the
    value the direction of the point itself would look small too, because certified rows are those
    of moderate logits.

    Values are measured by their own root mean square, or by `least` where that is more: what is
    smaller is zero, as for heads of W = 0, and (0, -1) in the kernel.  By their own size such
    values would be of order one, and the spectrum one of rounding.
    """
    from scipy.linalg import eigh  # slow to import

    d2 = len(background)
    metric = np.zeros((d2 + 1, d2 + 1))
    metric[:d2, :d2] = background
    metric[d2, d2] = max(float(moment[d2, d2]), least**2)
    last = min(2 * MAX_HEADS, d2) - 1
    values = eigh(moment, metric, eigvals_only=True, subset_by_index=(0, last))
    return np.asarray(np.maximum(values, 1e-14))
