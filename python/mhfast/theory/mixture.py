"""The tokenized mixture in closed form: margins, population first step, separating direction.

With T tokens of which ζT are the class token, class and context tokens of norm S, M contexts, and
u* = μ₊ - μ₋, W* = μ₊μ₊ᵀ + μ₋μ₋ᵀ + Σ_l ν_l (μ₊ + μ₋)ᵀ:

    γ_linear    = S sqrt(T) (ζ - 2 (1-ζ) Zμ/S²) / sqrt(2)      if |⟨z, μ⟩| ≤ Zμ for the noise z
    γ_attention = T ζ² (1-ζ) S⁴ / (4 sqrt(2 (M+1)))             without noise
    γ_saturated = S sqrt(T) / sqrt(2)                           (U, Γ W*), U ∝ 1 u*ᵀ, Γ → ∞

The first two are the margins of the two parts of the separating direction at the population's
random first step, and the tangent margin there is at least their sum.

The data model DM1 of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization
of Multi-head Attention" (TMLR 2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..gradients import Gradients
from ..models import Classifier
from .inputs import exponent, in_units


@dataclass(frozen=True)
class MixtureMargins:
    """Margins of the tokenized mixture.

    Attributes
    ----------
    linear, attention : float
        γ_linear and γ_attention, of the U part and the W part of the separating direction.
    saturated : float
        γ_saturated, of unit U with attention on class tokens only; 1/ζ times γ_linear.

    Examples
    --------
    >>> import mhfast as mh
    >>> given = {"relevant_fraction": 0.5, "contexts": 1, "norm": 4.0}
    >>> margins = mh.theory.mixture_margins(10, **given)
    >>> margins.total == margins.linear + margins.attention
    True
    >>> margins.saturated == 2 * margins.linear  # 1/ζ times
    True
    """

    linear: float
    attention: float
    saturated: float

    @property
    def total(self) -> float:
        """γ_linear + γ_attention, a lower bound of the tangent margin without noise."""
        return self.linear + self.attention


def mixture_margins(
    tokens: int, *, relevant_fraction: float, norm: float, contexts: int, noise: float = 0.0
) -> MixtureMargins:
    """Return the margins of the tokenized mixture in closed form.

    Parameters
    ----------
    tokens : int
        T.
    relevant_fraction : float
        ζ in (0, 1].
    norm : float
        S > 0.
    contexts : int
        M.
    noise : float
        Zμ, a bound of |⟨z, μ⟩| for the noise z of a context token.  It enters γ_linear only:
        γ_attention is that of the mixture without noise.

    Returns
    -------
    MixtureMargins

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> import mhfast as mh
    >>> short = mh.theory.mixture_margins(10, relevant_fraction=0.5, contexts=1, norm=1.0)
    >>> long = mh.theory.mixture_margins(10, relevant_fraction=0.5, contexts=1, norm=2.0)
    >>> round(long.linear / short.linear, 6), round(long.attention / short.attention, 6)
    (2.0, 16.0)
    """
    T, M = checks.count(tokens, "tokens"), checks.count(contexts, "contexts")
    zeta, S = checks.finite(relevant_fraction, "relevant_fraction"), checks.finite(norm, "norm")
    noise = checks.finite(noise, "noise")
    if not 0.0 < zeta <= 1.0:
        raise ValueError(f"relevant_fraction: expected a number in (0, 1], got {zeta}")
    if not S > 0.0:
        raise ValueError(f"norm: expected a number above 0, got {norm}")
    if not noise >= 0.0:
        raise ValueError(f"noise: expected a number of at least 0, got {noise}")
    saturated = S * math.sqrt(T) / math.sqrt(2)
    return MixtureMargins(
        linear=saturated * (zeta - 2 * (1 - zeta) * (noise / S / S)),
        attention=T * zeta**2 * (1 - zeta) * (S * S) * (S * S) / (4 * math.sqrt(2 * (M + 1))),
        saturated=saturated,
    )


def population_first_step(data: Dataset, signs: npt.ArrayLike) -> Classifier:
    """Return the random first step of the whole population: W_h = 0, U_h = α_h (ζ/4) 1_T u*ᵀ.

    `Classifier.random_step` is the same with the means of the samples.

    Parameters
    ----------
    data : Dataset
        Made by `mhfast.data.tokenized_mixture`.
    signs : array (H,) of -1 and 1
        α.

    Returns
    -------
    Classifier
        Of the dtype of the data.

    Raises
    ------
    ValueError
        The data set is not a tokenized mixture, or a sign is not -1 or 1.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20_000, 5, 8, seed=0)
    >>> exact = mh.theory.population_first_step(data, [1, -1])
    >>> bool(exact.W.any()), bool((exact.U[0] == -exact.U[1]).all())
    (False, True)
    >>> step = mh.Classifier.random_step(data, heads=2, seed=0, balanced=True)
    >>> bool(abs(abs(step.U) - abs(exact.U)).max() < 0.05 * abs(exact.U).max())  # up to signs
    True
    """
    truth, alpha = _truth(data), _signs(signs)
    step = truth["relevant_fraction"] / 4 * (truth["mu_plus"] - truth["mu_minus"])
    U = alpha[:, None, None] * np.broadcast_to(step, (data.tokens, data.dim))
    W = np.zeros((len(alpha), data.dim, data.dim))
    return Classifier(W.astype(data.dtype), U.astype(data.dtype))


def separating_direction(data: Dataset, signs: npt.ArrayLike) -> Gradients:
    """Return the direction that separates the mixture: U_h ∝ 1_T u*ᵀ, W_h ∝ α_h W*.

    Each of its two parts has norm 1 over all heads, so that it has norm sqrt(2).

    Parameters
    ----------
    data : Dataset
        Made by `mhfast.data.tokenized_mixture`.
    signs : array (H,) of -1 and 1
        α, the signs of the heads of the initialization.

    Returns
    -------
    Gradients
        W (H, d, d) and U (H, T, d) of the dtype of the data.

    Raises
    ------
    ValueError
        The data set is not a tokenized mixture, or a sign is not -1 or 1.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(50, 5, 8, relevant_fraction=0.4, seed=0)
    >>> direction = mh.theory.separating_direction(data, [1, -1])
    >>> start = mh.theory.population_first_step(data, [1, -1])
    >>> moved = start + 100.0 * direction
    >>> bool((data.y * moved(data) > 0).all())
    True
    """
    truth, alpha = _truth(data), _signs(signs)
    unit = exponent(truth["mu_plus"])  # only the direction matters, and squares must be numbers
    plus, minus, contexts = (
        in_units(truth[name], unit) for name in ("mu_plus", "mu_minus", "contexts")
    )
    W = np.outer(plus, plus) + np.outer(minus, minus)
    W = W + np.outer(contexts.sum(axis=0), plus + minus)
    U = np.broadcast_to(plus - minus, (len(alpha), data.tokens, data.dim))
    W = alpha[:, None, None] * W
    return Gradients(
        W=(W / np.linalg.norm(W)).astype(data.dtype), U=(U / np.linalg.norm(U)).astype(data.dtype)
    )


def _truth(data: Dataset) -> Mapping[str, Any]:
    checks.instance(data, Dataset, "data")
    names = {"mu_plus", "mu_minus", "contexts", "relevant_fraction"}
    if data.truth is None or not names <= data.truth.keys():
        raise ValueError("data: expected a Dataset of tokenized_mixture, got one without its truth")
    return {name: np.asarray(data.truth[name], dtype=np.float64) for name in names}


def _signs(signs: npt.ArrayLike) -> Array:
    alpha: Array = np.asarray(signs, dtype=np.float64)
    if alpha.ndim != 1 or not (np.abs(alpha) == 1.0).all():
        raise ValueError(f"signs: expected an array (H,) of -1 and 1, got {signs!r:.80}")
    return alpha
