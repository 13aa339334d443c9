"""The Gaussian start: its properties with high probability, and the heads that it needs.

Let the entries of all W_h and U_h be independent N(0, s²), and v (q, d) the direction of norm
sqrt(2) with the largest margin min_i m_i, m_i = y_i Σ_t ⟨v_t, x̄_i⟩, for the mean tokens x̄_i: that
of the tangent features at θ = 0.  With Rz_i, δ_i the largest query row and distance of two tokens
of sample i and r_i = Σ_t (max_s - min_s) ⟨v_t, x_is⟩, with probability at least 1 - δ

    max_i |Φ_i| ≤ BΦ = s sqrt(q) Rx sqrt(2 log(3n/δ)),
    max_h ‖U_h‖ ≤ u = s (sqrt(q d) + sqrt(2 log(3H/δ))),
    γ ≥ min_i (m_i - σ² s² d Rz_i² δ_i² r_i / 16 - r_i sqrt(log(3n/δ) / (2H))).

The proof is in docs/theory.md.  The margin is that of a direction in U alone, so that nothing is
said of what attention adds.

The properties are those of the good initialization of Deora, Ghaderi, Taheri, Thrampoulidis, "On
the Optimization and Generalization of Multi-head Attention" (TMLR 2024), with constants of our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Classifier
from .bounds import CurvatureBounds, curvature_bounds
from .inputs import no_weights, norms, one_data_set, query_side, settled, spread
from .margin import ntk_margin
from .needed_heads import NeededHeads, required, solved
from .realizability import check_separable

MOST_HEADS = 2.0**1000


@dataclass(frozen=True)
class GaussianStart:
    """What holds at a Gaussian start with probability at least 1 - δ.

    Attributes
    ----------
    heads : int
        H.
    std, delta : float
        s and δ.
    margin : float
        A lower bound of the tangent margin γ; nothing is known of γ where it is not above 0.
    output, readout : float
        Upper bounds of max_i |Φ_i| and max_h ‖U_h‖.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, norm=0.1, seed=0)
    >>> said = mh.theory.gaussian_start(data, 2000, std=0.5, delta=0.01)
    >>> start = mh.Classifier.gaussian(2000, 5, 8, std=0.5, seed=0)
    >>> found = mh.theory.good_initialization(start, data)
    >>> said.margin <= found.margin, found.output <= said.output
    (True, True)
    """

    heads: int
    std: float
    delta: float
    margin: float
    output: float
    readout: float


def gaussian_start(
    data: Dataset,
    heads: int,
    *,
    std: float,
    delta: float,
    query: int | None = None,
    scale: float = 1.0,
) -> GaussianStart:
    """Bound margin, outputs and readouts of a Gaussian start with high probability.

    Parameters
    ----------
    data : Dataset
        X (n, T, d), y (n,) of -1 and 1, without a run axis.
    heads : int
        H, at least 1.
    std : float
        s above 0, as in `Classifier.gaussian`, for W and U.
    delta : float
        δ in (0, 1), the probability with which a bound may fail.
    query, scale
        As in `Classifier`; `query` is None or the index of a token.

    Returns
    -------
    GaussianStart

    Raises
    ------
    ValueError
        If a number is out of range or not finite, data have a run axis, or mean tokens do not
        separate them.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, norm=0.1, seed=0)
    >>> few, many = (mh.theory.gaussian_start(data, H, std=0.5, delta=0.01) for H in (30, 3000))
    >>> few.margin < 0 < many.margin  # with few heads attention may differ by chance
    True
    """
    ours = _Start.of(data, std, delta, query, scale)
    return ours.at(checks.count(heads, "heads"))


def gaussian_needed_heads(
    data: Dataset,
    steps: int,
    *,
    std: float,
    delta: float,
    epsilon: float | None = None,
    query: int | None = None,
    scale: float = 1.0,
) -> NeededHeads:
    """Compute from how many heads on the training guarantee applies at a Gaussian start.

    Parameters
    ----------
    data : Dataset
        X (n, T, d), y (n,) of -1 and 1, without a run axis or weights.
    steps : int
        k, at least 1.
    std : float
        s above 0, as in `Classifier.gaussian`, for W and U.
    delta : float
        δ in (0, 1), the probability with which a start may not have the properties.
    epsilon : float, optional
        ε in (0, 1), the loss of the comparator; 1/k by default.
    query, scale
        As in `Classifier`; `query` is None or the index of a token.

    Returns
    -------
    NeededHeads
        For each H from `heads` on all conditions are met with probability at least 1 - δ. Margin,
        outputs and readouts are the bounds of `gaussian_start` for that H.

    Raises
    ------
    ValueError
        If a number is out of range or not finite, data have a run axis or weights, mean tokens do
        not separate them, or `std` is so large that attention might undo that however many heads
        there are.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 8, norm=0.01, seed=0)
    >>> needed = mh.theory.gaussian_needed_heads(data, 100, std=1.0, delta=0.01)
    >>> needed.training.applies, needed.heads < 1e6
    (True, True)
    """
    one_data_set(data)
    no_weights(data)
    steps = checks.count(steps, "steps")
    ours = _Start.of(data, std, delta, query, scale)
    if not ours.limit > 0.0:
        raise ValueError(
            f"std: expected a number for which the margin is above 0 with many heads, got {std}, "
            f"for which its bound is {ours.limit:.4g}"
        )

    def enough(heads: int) -> bool:
        start = ours.at(heads)
        if not start.margin > 0.0:
            return False
        bounds = replace(ours.bounds, readout=start.readout)
        loss = float(np.logaddexp(0.0, start.output))
        found = required(start.margin, start.output, loss, bounds, steps, epsilon, data.n)
        return found.heads <= heads

    high = 1
    while not enough(high):
        high *= 4
        if high > MOST_HEADS:
            raise ValueError(
                "data: expected a margin for which the number of heads is finite in float64, got "
                f"margin {ours.limit:.4g}"
            )
    low = high // 4  # it is not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    start = ours.at(high)
    found = solved(
        margin=start.margin,
        output=start.output,
        start_loss=float(np.logaddexp(0.0, start.output)),
        bounds=replace(ours.bounds, readout=start.readout),
        readouts=start.readout,
        steps=steps,
        epsilon=epsilon,
        n=data.n,
    )
    return replace(found, heads=float(high))


@dataclass(frozen=True, eq=False)
class _Start:
    """What the properties for any number of heads are made of."""

    bounds: CurvatureBounds
    margins: Array
    ranges: Array
    std: float
    delta: float
    n: int
    dim: int

    @classmethod
    def of(
        cls, given: Dataset, std: float, delta: float, query: int | None, scale: float
    ) -> _Start:
        """Measure the data."""
        one_data_set(given)
        if not checks.finite(std, "std") > 0.0:
            raise ValueError(f"std: expected a number above 0, got {std}")
        if not 0.0 < checks.finite(delta, "delta") < 1.0:
            raise ValueError(f"delta: expected a probability in (0, 1), got {delta}")
        zero = Classifier.zeros(
            1, given.tokens, given.dim, dtype=given.dtype, query=query, scale=scale
        )
        zero, data, _ = settled(zero, given, dense=True)
        tangent = ntk_margin(zero, data)
        check_separable(tangent)
        v = tangent.direction.U
        assert v is not None
        ranges = np.array([_range(data.subset([i]), v[0]) for i in range(data.n)])
        z = norms(query_side(zero, data), 1).max(axis=1)
        apart = np.array([spread(data.subset([i])) for i in range(data.n)])
        moved = (scale * std * z * apart) ** 2 * data.dim / 16 * ranges
        return cls(
            bounds=curvature_bounds(zero, data),
            margins=tangent.margins - moved,
            ranges=ranges,
            std=float(std),
            delta=float(delta),
            n=data.n,
            dim=data.dim,
        )

    @property
    def limit(self) -> float:
        """The bound of the margin for infinitely many heads."""
        return float(self.margins.min())

    def at(self, heads: int) -> GaussianStart:
        """Return the properties for H heads."""
        rows, std = self.bounds.rows, self.std
        log = math.log(3 * self.n / self.delta)
        chance = math.sqrt(log / 2 / heads)
        return GaussianStart(
            heads=heads,
            std=std,
            delta=self.delta,
            margin=float((self.margins - chance * self.ranges).min()),
            output=std * math.sqrt(rows) * self.bounds.token_norm * math.sqrt(2 * log),
            readout=std
            * (math.sqrt(rows * self.dim) + math.sqrt(2 * math.log(3 * heads / self.delta))),
        )


def _range(sample: Dataset, v: Array) -> float:
    """Return Σ_t (max_s - min_s) ⟨v_t, x_s⟩ of one sample."""
    length = sample.tokens if sample.lengths is None else int(sample.lengths[0])
    values = sample.X[0, :length] @ v.T
    return float(np.ptp(values, axis=0).sum())
