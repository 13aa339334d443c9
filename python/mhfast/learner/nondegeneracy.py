"""How far a layer is from those that cannot be learnt, and which phases depend on it.

Chen, Li, "Provably learning a multi-head attention layer", prove that layers can be learnt if they
are not degenerate: key-query matrices of large effective rank that are incoherent, and value
matrices with a well-conditioned sum and well-conditioned differences.  Their constants are unknown
to us.  The numbers here are those quantities, and three more on which the phases of `learn_layer`
rely; the limits are where the phases were observed to fail: `examples/learner_degenerate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .._arguments.values import frozen
from ..models import Layer
from .alignment import dense_parameters
from .examples import Float64
from .result import Certificate

CONDITION = 1e-4
"""Condition of Σ_h V_h below which weights are not read accurately from outputs, and of V_i - V_j
below which heads that attend differently leave too small a residual."""

SUM_SHARE = 0.1
"""Size of Σ_h V_h, relative to independent V_h, below which heads cancel."""

INDEPENDENCE = 1e-7
"""Least eigenvalue of the cosines of the V_h below which false rows may be certified."""

HULL_CONDITION = 1e-2
"""Least over largest singular value of the differences of the W_h that a body resolves."""

HULL_DISTANCE = 0.1
"""Distance of the hull of the W_h from 0, relative to the W_h, above which it selects tokens."""

APART = 0.03
"""Distance of two W_h, relative to the largest, above which the phases can distinguish V_h."""

MERGED = 1e-6
"""Distance at which refinement merges them."""

ROUNDING = 1e-12
"""Length of a difference of W, relative to the largest W, that is rounding."""


@dataclass(frozen=True, eq=False, repr=False)
class Nondegeneracy:
    """What can be said of a layer without examples of it; H heads, W (d, d), V (d, p) each.

    Norms are Frobenius norms.  Conditions are the smallest over the largest of the min(d, p)
    singular values, from 0 (degenerate) to 1.

    Attributes
    ----------
    effective_rank : float64 array (H,)
        ‖W_h‖² over the square of its largest singular value: from 1 to d, 0 if W_h = 0.  For tokens
        of independent signs scores are nearly normal if it is large.
    coherence : float64 array (H, H)
        Cosines ⟨W_i, W_j⟩ / (‖W_i‖ ‖W_j‖), 0 where a W is 0; the heads are incoherent if those of
        different heads are small.
    hull_condition : float
        Of the differences W_i - W_1, as H - 1 vectors: the affine hull has less than H - 1
        dimensions at 0.  1 for one head.
    hull_distance : float
        Norm of the point of the affine hull of the W_h that is nearest to 0, relative to the
        largest ‖W_h‖; 1/√H if the W_h are orthogonal and of the same norm.
    apart : float
        Least ‖W_i - W_j‖ of two heads, relative to the largest ‖W_h‖; infinite for one head.
    sum_condition : float
        Condition of Σ_h V_h.
    sum_share : float
        ‖Σ_h V_h‖ / √(Σ_h ‖V_h‖²): 1 for orthogonal V_h, 0 if they cancel.
    difference_condition : float64 array (H, H)
        Conditions of V_i - V_j; 0 for i = j.
    value_independence : float
        Smallest eigenvalue of the matrix of the cosines of the V_h: 0 if some combination of the
        V_h vanishes, 1 if they are orthogonal.
    requirements : mapping of str to tuple of Certificate
        For each phase of `mhfast.learn_layer`, by its name, the conditions that it relies on.

    Examples
    --------
    >>> import mhfast as mh
    >>> layer = mh.Layer.gaussian(2, 6, 4, std=0.5, seed=0)
    >>> proportional = mh.Layer(layer.W, layer.V[:1].repeat(2, axis=0))
    >>> numbers = mh.learner.nondegeneracy(proportional)
    >>> numbers.supports("crude sum"), numbers.supports("sculpting")
    (True, False)
    >>> print(numbers.verdict.partition(";")[0])
    conditions met for: crude sum, net, values, refinement
    """

    effective_rank: Float64
    coherence: Float64
    hull_condition: float
    hull_distance: float
    apart: float
    sum_condition: float
    sum_share: float
    difference_condition: Float64
    value_independence: float
    requirements: Mapping[str, tuple[Certificate, ...]]

    def supports(self, phase: str) -> bool:
        """Return whether the conditions that a phase relies on are met.

        Parameters
        ----------
        phase : str
            One of the names in `requirements`.

        Returns
        -------
        bool

        Raises
        ------
        ValueError
            There is no such phase.
        """
        if phase not in self.requirements:
            names = ", ".join(self.requirements)
            raise ValueError(f"phase: expected one of {names}, got {phase!r}")
        return all(requirement.holds for requirement in self.requirements[phase])

    @property
    def verdict(self) -> str:
        """The phases whose conditions are met, and what the others lack."""
        lacking = {
            phase: [str(each) for each in wanted if not each.holds]
            for phase, wanted in self.requirements.items()
        }
        kept = ", ".join(phase for phase, missing in lacking.items() if not missing)
        parts = [f"conditions met for: {kept or 'no phase'}"]
        parts += [f"{phase}: {', '.join(missing)}" for phase, missing in lacking.items() if missing]
        return "; ".join(parts)

    def __str__(self) -> str:
        off = ~np.eye(len(self.coherence), dtype=bool)
        numbers = {
            "effective rank, least": float(self.effective_rank.min()),
            "coherence, largest": float(np.abs(self.coherence[off]).max(initial=0.0)),
            "hull condition": self.hull_condition,
            "hull distance": self.hull_distance,
            "key-query matrices apart": self.apart,
            "condition of the sum of values": self.sum_condition,
            "share of the sum of values": self.sum_share,
            "independence of values": self.value_independence,
        }
        if off.any():
            numbers["condition of differences of values, least"] = float(
                self.difference_condition[off].min()
            )
        return "\n".join(
            [self.verdict, *(f"{name:42s} {value:.3g}" for name, value in numbers.items())]
        )

    def __repr__(self) -> str:
        return f"<Nondegeneracy: {self.verdict}>"


def nondegeneracy(layer: Layer) -> Nondegeneracy:
    """Measure how well a layer meets the conditions under which layers can be learnt.

    Parameters
    ----------
    layer : Layer
        A single run, as learnt or as true.  A `scale` is treated as part of W.  For tokens that
        cannot see all of it, give its `mhfast.learner.visible_part`; what they cannot see has
        singular values of 0.

    Returns
    -------
    Nondegeneracy
        The quantities, and the conditions of each phase of `mhfast.learn_layer`.

    Raises
    ------
    TypeError
        `layer` is not a Layer.
    ValueError
        It has a run axis or holds NaN or inf.

    Notes
    -----
    The conditions do not depend on examples and guarantee nothing: with few examples, many tokens
    or much noise the phases fail on layers that meet all of them, and refinement from random layers
    often learns what the phases cannot.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", for effective rank, incoherence and
    the conditions of the sum and the differences of the value matrices; the limits, hull, share and
    independence are ours.

    Examples
    --------
    >>> import mhfast as mh
    >>> layer = mh.Layer.gaussian(2, 6, 4, std=0.5, seed=0)
    >>> mh.learner.nondegeneracy(layer).supports("second sculpting")
    True
    """
    W, V = dense_parameters(layer, "layer")
    size = np.linalg.norm(W, axis=(1, 2))
    largest = float(size.max()) or 1.0
    hull_condition, hull_distance = _hull(W, largest)
    differences = _condition(_singular(V[:, None] - V))
    other = ~np.eye(len(W), dtype=bool)
    values = _singular(V.sum(axis=0))
    total = float(np.sqrt(np.sum(V**2)))
    apart = np.linalg.norm(W[:, None] - W, axis=(2, 3))[other]
    numbers = {
        "hull_condition": hull_condition,
        "hull_distance": hull_distance,
        "apart": float(apart.min(initial=np.inf)) / largest,
        "sum_condition": float(_condition(values)),
        "sum_share": float(np.linalg.norm(values)) / (total or 1.0),
        "value_independence": float(max(np.linalg.eigvalsh(_cosines(V))[0], 0.0)),
    }
    return Nondegeneracy(
        effective_rank=frozen(_effective_rank(W, size)),
        coherence=frozen(_cosines(W)),
        difference_condition=frozen(differences),
        requirements=_requirements(
            numbers | {"difference_condition": float(differences[other].min(initial=1.0))}
        ),
        **numbers,
    )


def _requirements(numbers: Mapping[str, float]) -> Mapping[str, tuple[Certificate, ...]]:
    def wanted(name: str, key: str, limit: float) -> Certificate:
        return Certificate(name, numbers[key], limit, above=True)

    share = wanted("share of the sum of values", "sum_share", SUM_SHARE)
    rows = (
        share,
        wanted("condition of the sum of values", "sum_condition", CONDITION),
        wanted("condition of differences of values", "difference_condition", CONDITION),
        wanted("independence of values", "value_independence", INDEPENDENCE),
    )
    hull = wanted("hull condition", "hull_condition", HULL_CONDITION)
    apart = wanted("key-query matrices apart", "apart", APART)
    return {
        "crude sum": (share,),
        "sculpting": (*rows, hull),
        "refined sum": (*rows, wanted("hull distance", "hull_distance", HULL_DISTANCE)),
        "second sculpting": (*rows, hull),
        "net": (hull, apart),
        "values": (apart,),
        "refinement": (wanted("key-query matrices apart", "apart", MERGED),),
    }


def _effective_rank(W: Float64, size: Float64) -> Float64:
    largest = np.linalg.norm(W, 2, axis=(1, 2))
    return np.asarray((size / np.where(largest > 0.0, largest, 1.0)) ** 2)


def _cosines(matrices: Float64) -> Float64:
    """Return the cosines (H, H) of matrices (H, d, e); 0 where one is 0."""
    flat = matrices.reshape(len(matrices), -1)
    size = np.linalg.norm(flat, axis=1, keepdims=True)
    unit = flat / np.where(size > 0.0, size, 1.0)
    return np.asarray(unit @ unit.T)


def _singular(matrices: Float64) -> Float64:
    return np.asarray(np.linalg.svd(matrices, compute_uv=False))


def _condition(values: Float64) -> Float64:
    """Return the smallest over the largest singular value, the last axis; 0 of zeros."""
    largest = values[..., 0]
    return np.asarray(values[..., -1] / np.where(largest > 0.0, largest, 1.0))


def _hull(W: Float64, largest: float) -> tuple[float, float]:
    """Return the condition of the affine hull of W (H, d, d), and its relative distance from 0."""
    flat = W.reshape(len(W), -1)
    if len(flat) == 1:
        return 1.0, float(np.linalg.norm(flat)) / largest
    _, values, rows = np.linalg.svd(flat[1:] - flat[0], full_matrices=False)
    span = rows[values > ROUNDING * largest]
    point = flat[0] - (flat[0] @ span.T) @ span
    condition = float(_condition(values)) if len(flat) - 1 <= flat.shape[1] else 0.0
    return condition, float(np.linalg.norm(point)) / largest
