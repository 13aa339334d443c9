"""A test of key-query matrices against the facts, with its power.

A fact ⟨x (x_b - x_c)ᵀ, W⟩ = value holds for all heads, hence for all of their affine hull, up to an
error of the order of its tolerance.  Facts with weights 1 / tolerance are a linear regression for a
matrix of that hull.  Let k be the rank of the facts, K their number and

    s = min over all W of ‖(facts(W) - value) / tolerance‖² / (K - k),
    ratio = (min over the hull of the heads of ‖...‖² - (K - k) s) / ((k - H + 1) s),

the F statistic of the hypothesis that the hull contains the solution.  It is of order one for the
true heads, and more where errors of the facts are not independent.  W with relative errors δ in
directions of their own adds δ² ‖W‖² times the mean square of the facts: this determines which
errors the facts can detect.  They cannot distinguish one point of the hull from another, nor tell
which value matrix belongs to which head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .examples import Float64
from .facts import Facts

LIMIT = 20.0
"""Largest ratio of heads that are accepted."""

POWER = 2.0
"""Expected ratio over `LIMIT` at the smallest error that the facts can detect."""

TOLD = 0.1
"""Relative error of W that the facts must be able to detect for a certificate to have meaning."""

LOST = 0.5
"""Resolution above which the facts are considered uninformative: many of them are false."""

RANK = 1e-9
"""Share of the largest entry of the triangle below which a direction has no facts."""


@dataclass(frozen=True)
class Agreement:
    """How far key-query matrices are from satisfying the facts.

    Attributes
    ----------
    ratio : float
        The squared misfit of the hull of the heads beyond the least of any matrix, for each degree
        of freedom, over what is left for each fact: of order one for true heads.
    resolution : float
        Relative error of W, random in each head, at which `ratio` is expected to reach twice its
        limit: the facts cannot detect smaller ones. Infinite if there are no more facts than
        unknowns.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> result = mh.learner.agreement(facts, truth.W)
    >>> result.verdict, result.ratio < 20, result.resolution < 0.1
    ('accepted', True, True)
    """

    ratio: float
    resolution: float

    @property
    def verdict(self) -> str:
        """Whether W is "rejected", or "accepted", or the facts "cannot tell" an error of 10 %."""
        if self.resolution <= LOST and not self.ratio <= LIMIT:
            return "rejected"
        return "accepted" if self.resolution <= TOLD else "cannot tell"


def agreement(facts: Facts, W: npt.ArrayLike) -> Agreement:
    """Test key-query matrices against facts.

    Parameters
    ----------
    facts : Facts
        Of `certify`.
    W : array (H, d, d)

    Returns
    -------
    Agreement

    Raises
    ------
    TypeError
        W is not of real numbers.
    ValueError
        It is of another shape or not finite, or there are no facts.

    Notes
    -----
    Takes 2 K d⁴ operations for K facts.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(3_000, 2, 5, 2, seed=0)
    >>> examples, truth = mh.learner.as_examples(data.X, data.y), data.truth["layer"]
    >>> known = mh.learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)  # by phase 3
    >>> facts = mh.learner.certify(examples, known)
    >>> mh.learner.agreement(facts, 1.2 * truth.W).verdict
    'rejected'
    """
    checks.instance(facts, Facts, "facts")
    d = facts.X.shape[2]
    heads = checks.numbers_of_shape(W, "W", "H d d", (None, d, d))
    if not len(heads):
        raise ValueError(f"W: expected at least one head, got shape {heads.shape}")
    if not len(facts):
        raise ValueError("facts: expected at least one fact, got none")
    triangle, target, left, seen = reduced(facts)
    flat = heads.reshape(len(heads), -1) @ seen
    k, spare = len(target), len(facts) - len(target)
    off = target - triangle @ flat[0]
    span = np.linalg.matrix_rank(flat[1:] - flat[0], tol=RANK * (np.abs(flat).max() or 1.0))
    if span:
        moves = triangle @ (flat[1:] - flat[0]).T
        off = off - moves @ np.linalg.lstsq(moves, off, rcond=RANK)[0]
    if spare <= 0 or span >= k:
        return Agreement(0.0, math.inf)
    each = left / spare
    beyond = float(off @ off) / (k - span)
    best = np.linalg.lstsq(triangle, target, rcond=RANK)[0]
    told = float(best @ best) * float(np.sum(triangle**2)) / k**2
    return Agreement(
        ratio=float(beyond / each) if each else (math.inf if beyond else 0.0),
        resolution=math.sqrt(POWER * LIMIT * each / told) if told else math.inf,
    )


def reduced(facts: Facts) -> tuple[Float64, Float64, float, Float64]:
    """Reduce the weighted regression to its unknowns.

    Returns
    -------
    triangle (k, k), target (k,) : arrays
        ‖(facts(W) - value) / tolerance‖² = ‖triangle seenᵀ W - target‖² + left.
    left : float
    seen : array (d², k)
        Orthonormal directions of W that the facts see.
    """
    from scipy.linalg import qr  # slow to import

    T, d = facts.X.shape[1:]
    sample, query = np.divmod(facts.rows, T)
    x = facts.X[sample, query]
    difference = facts.X[sample, facts.first] - facts.X[sample, facts.second]
    x = x / facts.tolerance[:, None]
    rows = (x[:, :, None] * difference[:, None]).reshape(len(x), d * d)
    values, directions = np.linalg.eigh(rows.T @ rows)
    seen = np.asarray(directions[:, values > RANK * values[-1]])
    both = np.column_stack([rows @ seen, facts.value / facts.tolerance])
    R = qr(both, mode="r", overwrite_a=True, check_finite=False)[0][: both.shape[1]]
    k = seen.shape[1]
    left = float(R[k, k]) ** 2 if len(R) > k else 0.0
    return R[:k, :k], R[:k, k], left, seen
