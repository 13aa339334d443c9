"""A body around the key-query matrices: a tube along the hull that the facts leave open.

With weights 1 / tolerance the K facts, of rank k, are a regression for a matrix W.  In the
orthonormal coordinates z of its normal equations the weighted squared misfit is left + ‖z‖², with
z = 0 at the least-squares solution, and s = left / (K - k) estimates the size of an error.  Facts
of heads that attend differently are wrong by amounts that grow along the hull of the heads: in the
H - 1 directions of W that the facts see least.  The body therefore is the set of all W with

    mean of z² over the other k - H + 1 directions  ≤  ACROSS s,
    sum of z² over the H - 1 flattest directions    ≤  (ALONG)² K.

It is estimated and not proved: facts are wrong without bound for some layers, such as those with
V_2 = 2 V_1, in which all rows pass for certified.  How often the body contains all W_h is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import frozen
from .agreement import RANK, reduced
from .examples import Float64
from .facts import Facts
from .sums import ROUNDING

ACROSS = 100.0
"""Mean square of the misfit across the hull, over that of an error, at the boundary."""

ALONG = 4.0
"""Root mean square error of a fact, in tolerances, at the ends along the hull."""


@dataclass(frozen=True, eq=False)
class Enclosure:
    """A body, of two ellipsoids at right angles, that is estimated to contain every W_h.

    Attributes
    ----------
    center : array (d, d)
        The matrix that satisfies the facts best.
    directions : array (k, d, d)
        Orthonormal directions of W that the facts see, the flattest first.
    radii : array (k,)
        Half lengths of the body in these directions, descending in each of its two parts; in
        directions that the facts do not see it is unbounded.
    along : int
        How many of the directions, from the first on, are those along the hull: H - 1, less those
        that the facts do not see although the tokens do.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(8_000, 2, 6, 2, seed=0)
    >>> result = mh.learn_layer(data, heads=2, refinement=False)
    >>> body = mh.learner.enclose(result["second sculpting"].parts[1], 2)
    >>> body.contains(data.truth["layer"].W)
    array([ True,  True])
    >>> bool(body.levels(0 * body.center) > 1), body.width < 0.2, body.length > 1
    (True, True, True)
    """

    center: Float64
    directions: Float64
    radii: Float64
    along: int

    def levels(self, W: npt.ArrayLike) -> Float64:
        """Compute how far out matrices are: at most 1 inside the body, 1 on its boundary.

        Parameters
        ----------
        W : array (..., d, d)

        Returns
        -------
        float64 array (...)
            The larger of the distances from the center along and across the hull, each over that of
            the boundary.

        Raises
        ------
        ValueError
            W is of another shape.
        """
        given = np.asarray(checks.real(W, "W"), dtype=np.float64)
        d = self.center.shape[0]
        if given.ndim < 2 or given.shape[-2:] != (d, d):
            raise ValueError(f"W: expected shape (..., d, d) with d = {d}, got {given.shape}")
        k = len(self.radii)
        flat = (given - self.center).reshape(*given.shape[:-2], d * d)
        out = (flat @ self.directions.reshape(k, d * d).T / self.radii) ** 2
        along = out[..., : self.along].sum(axis=-1)
        across = out[..., self.along :].sum(axis=-1)
        return np.asarray(np.sqrt(np.maximum(along, across)))

    def contains(self, W: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which matrices are in the body.

        Parameters
        ----------
        W : array (..., d, d)

        Returns
        -------
        bool array (...)

        Raises
        ------
        ValueError
            W is of another shape.
        """
        return np.asarray(self.levels(W) <= 1.0)

    @property
    def width(self) -> float:
        """The median half length across the hull, in the Frobenius norm."""
        return float(np.median(self.radii[self.along :]))

    @property
    def length(self) -> float:
        """The largest half length along the hull, in the Frobenius norm; 0 if there is none."""
        return float(self.radii[: self.along].max(initial=0.0))


def enclose(facts: Facts, heads: int) -> Enclosure:
    """Compute a body that is estimated to contain the key-query matrices.

    Parameters
    ----------
    facts : Facts
        Of `certify`.
    heads : int
        H, at least 1.

    Returns
    -------
    Enclosure
        Its containment is measured, not proved: the documentation has the rates.

    Raises
    ------
    ValueError
        There are not more facts than unknowns, or H is more than the rank of the facts.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", for a body that contains the
    attention matrices; this form of it is ours.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(8_000, 2, 6, 2, seed=0)
    >>> result = mh.learn_layer(data, heads=2, refinement=False)
    >>> body = mh.learner.enclose(result["second sculpting"].parts[1], 2)
    >>> body.along, body.radii.shape
    (1, (36,))
    """
    checks.instance(facts, Facts, "facts")
    heads = checks.count(heads, "heads")
    d = facts.X.shape[2]
    if not len(facts):
        raise ValueError("facts: expected at least one fact, got none")
    triangle, target, left, seen = reduced(facts)
    K, k = len(facts), len(target)
    if k >= K:
        raise ValueError(f"facts: expected more than their rank {k}, got {K}")
    visible = np.linalg.eigvalsh(facts.background)
    along = max(0, heads - 1 - (int(np.sum(visible > ROUNDING * visible[-1])) - k))
    if along >= k:
        raise ValueError(f"heads: expected at most the rank of the facts, {k}, got {heads}")
    _, sizes, directions = np.linalg.svd(triangle)
    center = seen @ np.linalg.lstsq(triangle, target, rcond=RANK)[0]
    across = np.sqrt(ACROSS * (k - along) * left / (K - k))
    size = np.where(np.arange(k) < along, ALONG * np.sqrt(K), across)
    return Enclosure(
        center=frozen(center.reshape(d, d)),
        directions=frozen((directions[::-1] @ seen.T).reshape(k, d, d)),
        radii=frozen(size / sizes[::-1]),
        along=along,
    )
