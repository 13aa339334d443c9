"""Local refinement: from a layer near the truth to the truth, by nonlinear least squares.

Levenberg-Marquardt over all H d (d + p) numbers of a layer at once.  With J the derivatives of all
outputs, r = F - Y and D² the diagonal of JᵀJ, a step s solves

    (D⁻¹ JᵀJ D⁻¹ + λ 1) D s = -D⁻¹ Jᵀr.

The damping λ is raised until a step lowers the residual, and lowered again according to the ratio
of the actual to the predicted decrease (Nielsen, "Damping parameter in Marquardt's method", 1999).

Not a phase of Chen, Li, "Provably learning a multi-head attention layer", but a step that may
follow them. It often succeeds from random initializations too, so its success says nothing about
the phases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .. import _core, config
from .._arguments import checks
from .._blas import one_blas_thread
from ..dataset.dataset import Seed
from ..models import Layer
from .examples import Float64, Int64

FIRST_DAMPING = 1e-3
"""The initial λ, relative to a diagonal of ones."""

MAX_DAMPING = 1e8
"""λ at which a step is negligible, so that the residual cannot decrease."""

POLISH_DAMPING = 1e-12
"""λ of the last step: above the rounding error of JᵀJ, below the threshold of identifiability."""

QUICKEST = 0.1
"""The factor by which a step that achieves the predicted decrease lowers λ."""

MIN_DECREASE = 1e-12
"""Relative to the squared residual: at a smaller predicted decrease the layer is at a minimum."""

MIN_SCALE = 1e-8
"""Least entry of D relative to the largest, so that parameters without influence stay bounded."""

MIN_EXAMPLES = 64
OUTPUTS_PER_PARAMETER = 3

SCORES_PER_NUMBER = 2
"""Of W: outputs see it only through the T - 1 differences of scores of a row.  With H = T = 2 and
d >= 12 three outputs per parameter were fitted exactly by layers that are wrong everywhere else: 0
of 10 layers of d = 12 learnt; with 2 differences per number 4 of 4 of d = 12 and of 16."""


@dataclass(frozen=True, eq=False)
class Refinement:
    """The result of a refinement.

    Attributes
    ----------
    layer : Layer
    residual : float
        ‖F(X) - Y‖ / ‖Y‖ of `layer` on the examples used.
    history : float64 array (steps + 1,)
        The initial residual and that after every accepted step.
    steps : int
        Accepted steps.
    reason : {"converged", "steps", "stalled"}
        The residual has reached the tolerance, the steps were used up, or the layer is at a local
        minimum, which is the best possible result with noise.
    condition : float
        Smallest over largest eigenvalue of D⁻¹ JᵀJ D⁻¹ at the end, without the `unseen` smallest
        ones.  About 1e-14 or less, which is rounding, means that the examples do not determine the
        layer: there is a superfluous head, two heads that should be one, or too few examples.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 4, 2, seed=0)
    >>> truth = data.truth["layer"]
    >>> found = mh.learner.refine(mh.Layer(1.1 * truth.W, 1.1 * truth.V), data.X, data.y)
    >>> found.reason, found.residual < 1e-12, len(found.history) > 1
    ('converged', True, True)
    """

    layer: Layer
    residual: float
    history: Float64
    steps: int
    reason: Literal["converged", "steps", "stalled"]
    condition: float


@dataclass(frozen=True, eq=False)
class Restarts:
    """The result of refinements from other layers.

    Attributes
    ----------
    refinement : Refinement
        Of the smallest residual, on as many examples as exact outputs need.
    starts : int
        How many layers were refined.
    """

    refinement: Refinement
    starts: int


@one_blas_thread()
def refine(
    layer: Layer,
    X: npt.ArrayLike,
    Y: npt.ArrayLike,
    *,
    steps: int = 60,
    tolerance: float = 1e-13,
    examples: int | None = None,
    seed: Seed = 0,
    unseen: int = 0,
    num_threads: int | None = None,
) -> Refinement:
    """Fit all parameters of a layer to examples, starting from it.

    Parameters
    ----------
    layer : Layer
        In float64, self-attention with a dense W and scale 1.
    X : float64 array (n, T, d)
    Y : float64 array (n, T, p)
        The outputs that the layer should have.
    steps : int
        The largest number of accepted steps; 0 only evaluates the given layer.
    tolerance : float
        The residual to reach. Then one more step is taken, almost without damping, which brings the
        parameters as close as rounding allows.
    examples : int, optional
        The number of samples used. None means enough for 3 outputs per parameter and 2 differences
        of scores per number of W, at least 64 and at most all; more help only against noise.
    seed : int or numpy.random.Generator
        Chooses the samples.
    unseen : int
        How many numbers of a layer the tokens cannot see: the condition is that of the others.
    num_threads : int, optional

    Returns
    -------
    Refinement

    Raises
    ------
    TypeError
        `layer` is not a dense Layer, or an array is not float64.
    ValueError
        `layer` has a run axis or another query side; shapes or sizes do not fit; a number is not
        finite, or all of Y is zero.

    Notes
    -----
    A step takes about n T d (H d)² (min(p, d / 2) + d / 4) products for n examples, 5/8 n d² (H d)²
    if T = 2, and P³ / 3 for its solution with P = H d (d + p) parameters; memory is a few arrays
    (P, P).

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 4, 2, seed=0)
    >>> truth = data.truth["layer"]
    >>> found = mh.learner.refine(mh.Layer(1.1 * truth.W, 1.1 * truth.V), data.X, data.y)
    >>> mh.learner.align(found.layer, truth).error < 1e-9
    True
    """
    point = layer_numbers(layer)
    fit = _fit(layer, X, Y, examples, seed, num_threads)
    point = fit.start(point)
    if checks.integer(steps, "steps") < 0:
        raise ValueError(f"steps: expected an integer of at least 0, got {steps}")
    if not 0 <= checks.integer(unseen, "unseen") < len(point):
        raise ValueError(f"unseen: expected an integer from 0 to {len(point) - 1}, got {unseen}")
    if not tolerance >= 0.0:
        raise ValueError(f"tolerance: expected a number of at least 0, got {tolerance}")
    equations = fit.equations(point)
    history, damping = [equations.residual], FIRST_DAMPING
    reason: Literal["converged", "steps", "stalled"] = "steps"
    while len(history) <= steps:
        done = history[-1] <= tolerance
        lower = _lower(fit, point, equations, [POLISH_DAMPING] if done else _rising(damping))
        if lower is not None:
            point, damping = lower
            equations = fit.equations(point)
            history.append(equations.residual)
        elif not done:
            reason = "stalled"
        if lower is None or done:
            break
    if history[-1] <= tolerance:
        reason = "converged"
    return Refinement(
        layer=fit.layer(point),
        residual=history[-1],
        history=np.array(history),
        steps=len(history) - 1,
        reason=reason,
        condition=equations.condition(unseen),
    )


@dataclass(frozen=True, eq=False)
class _Equations:
    """D⁻¹ JᵀJ D⁻¹ (P, P), D⁻¹ Jᵀr (P,) and D (P,) at a point of this residual.

    In units in which ‖Y‖ = 1.
    """

    matrix: Float64
    gradient: Float64
    scale: Float64
    residual: float

    def step(self, damping: float) -> tuple[Float64, float] | None:
        """Return the step and its predicted decrease of ‖r‖²; None if rounding prevents it."""
        from scipy.linalg import cho_factor, cho_solve  # takes as long to import as all of mhfast

        damped = self.matrix.copy()
        damped.flat[:: len(damped) + 1] += damping
        try:
            factor = cho_factor(damped, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            return None
        scaled: Float64 = cho_solve(factor, -self.gradient, check_finite=False)
        return scaled / self.scale, float(scaled @ (damping * scaled - self.gradient))

    def condition(self, unseen: int) -> float:
        """Return the smallest eigenvalue but `unseen` over the largest, 0 for a zero matrix."""
        values = np.linalg.eigvalsh(self.matrix)
        return max(float(values[unseen]), 0.0) / float(values[-1]) if values[-1] > 0.0 else 0.0


@dataclass(frozen=True, eq=False)
class _Fit:
    """A least-squares problem in all numbers of a layer of H heads: W, then V, flat (P,).

    Y and V are in a unit, a power of two, in which Y is of order one.
    """

    X: Float64
    Y: Float64
    heads: int
    unit: float
    threads: int | None

    def layer(self, point: Float64) -> Layer:
        """Return the layer of these numbers."""
        return self._layer(point, self.unit)

    def _layer(self, point: Float64, unit: float) -> Layer:
        W, V = self._parts(point)
        return Layer(W, unit * V)

    def _parts(self, point: Float64) -> tuple[Float64, Float64]:
        H, d = self.heads, self.X.shape[2]
        W, V = np.split(point, [H * d * d])
        return W.reshape(H, d, d), V.reshape(H, d, -1)

    def start(self, point: Float64) -> Float64:
        """Return W and V of a layer, flat, in the unit of this problem."""
        W, V = self._parts(point)
        return np.concatenate([W.ravel(), V.ravel() / self.unit])

    def residual(self, point: Float64) -> float:
        F = self._layer(point, 1.0)(self.X, num_threads=self.threads)
        return float(np.linalg.norm(F - self.Y) / np.linalg.norm(self.Y))

    def equations(self, point: Float64) -> _Equations:
        threads = config.threads(self.threads)
        moment = _core.layer_equations(self.X, self.Y, *self._parts(point), threads)
        moment /= np.linalg.norm(self.Y) ** 2
        scale = np.sqrt(moment.diagonal()[:-1])
        scale = np.maximum(scale, MIN_SCALE * (scale.max() or 1.0))
        return _Equations(
            moment[:-1, :-1] / scale[:, None] / scale,
            moment[:-1, -1] / scale,
            scale,
            self.residual(point),
        )


def _lower(
    fit: _Fit, point: Float64, equations: _Equations, dampings: Iterable[float]
) -> tuple[Float64, float] | None:
    """Return a point of lower residual and the next λ, or None if there is none."""
    square = equations.residual**2
    for damping in dampings:
        step = equations.step(damping)
        if step is None:
            continue
        change, predicted = step
        if predicted < MIN_DECREASE * square:
            return None
        reached = fit.residual(point + change)
        if reached < equations.residual:
            gain = (square - reached**2) / predicted
            return point + change, damping * max(QUICKEST, 1 - (2 * gain - 1) ** 3)
    return None


def _rising(damping: float) -> Iterator[float]:
    growth = 2.0
    while damping < MAX_DAMPING:
        yield damping
        damping *= growth
        growth *= 2


def _fit(
    layer: Layer,
    X: npt.ArrayLike,
    Y: npt.ArrayLike,
    examples: int | None,
    seed: Seed,
    num_threads: int | None,
) -> _Fit:
    """Check the examples and choose those to use."""
    double = np.dtype(np.float64)
    X, Y = checks.real(X, "X", double, "the layer"), checks.real(Y, "Y", double, "the layer")
    checks.shape(X, "X", "n T d", (None, None, layer.dim))
    checks.shape(Y, "Y", "n T p", (*X.shape[:2], layer.out_dim))
    for name, array in (("X", X), ("Y", Y)):
        if array.size == 0:
            raise ValueError(f"{name}: expected no axis of length 0, got shape {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: expected finite numbers, got NaN or inf")
    enough = enough_examples(layer.heads, X.shape[1], layer.dim, layer.out_dim)
    rng = checks.generator(seed)
    chosen = _chosen(len(X), enough, examples, rng)
    X, Y = X[chosen].astype(double, copy=False), Y[chosen].astype(double, copy=False)
    if not Y.any():
        raise ValueError("Y: expected outputs other than zero")
    unit = 2.0 ** round(math.log2(np.abs(Y).max()))
    return _Fit(X, Y / unit, layer.heads, unit, num_threads)


def layer_numbers(layer: Layer) -> Float64:
    """Return W and V, flat (P,), of a layer that can be refined.

    Parameters
    ----------
    layer : Layer

    Returns
    -------
    float64 array (P,)

    Raises
    ------
    TypeError
        `layer` is not a dense Layer of float64.
    ValueError
        It has a run axis or another query side, or is not finite.
    """
    if not isinstance(layer, Layer):
        raise TypeError(f"layer: expected a Layer, got {type(layer).__name__}")
    if not isinstance(layer.W, np.ndarray):
        raise TypeError(f"layer: expected a dense W, got {type(layer.W).__name__}")
    if not isinstance(layer.V, np.ndarray):
        got = "None, an identity" if layer.V is None else type(layer.V).__name__
        raise TypeError(f"layer: expected an array V, got {got}")
    if layer.dtype != np.float64:
        raise TypeError(f"layer: expected dtype float64, got {layer.dtype.name}")
    if layer.runs is not None:
        raise ValueError(f"layer: expected one run, as layer[0] is, got {layer.runs} runs")
    if layer.query is not None or layer.prompt is not None or layer.causal:
        raise ValueError("layer: expected self-attention without query, prompt or causal")
    if layer.attention != "softmax":
        raise ValueError(f"layer: expected attention 'softmax', got {str(layer.attention)!r}")
    if layer.scale != 1.0:
        raise ValueError(f"layer: expected scale 1, got {layer.scale}")
    point: Float64 = np.concatenate([layer.W.ravel(), layer.V.ravel()]).astype(np.float64)
    if not np.isfinite(point).all():
        raise ValueError("layer: expected finite parameters, got NaN or inf")
    return point


def enough_examples(
    heads: int, tokens: int, dim: int, out_dim: int, each: int = OUTPUTS_PER_PARAMETER
) -> int:
    """Return how many samples determine a layer with room: `each` outputs for a parameter."""
    outputs = math.ceil(each * heads * dim * (dim + out_dim) / (tokens * out_dim))
    scores = math.ceil(SCORES_PER_NUMBER * dim**2 / (tokens * max(tokens - 1, 1)))
    return max(MIN_EXAMPLES, outputs, scores)


def _chosen(n: int, enough: int, examples: int | None, rng: np.random.Generator) -> Int64:
    if examples is None:
        examples = min(n, enough)
    elif checks.count(examples, "examples") > n:
        raise ValueError(f"examples: expected at most n = {n}, got {examples}")
    return np.sort(rng.choice(n, examples, replace=False))
