"""The efficient estimate from noisy outputs: least squares over all examples, with its covariance.

Refinement against noise works on a part of the examples.  From there a few Gauss-Newton steps lead
to the least-squares layer of all of them; with J the derivatives of all outputs, r = F - Y and
normal noise of standard deviation σ that is the maximum likelihood estimate θ, and

    (JᵀJ) step = -Jᵀr,        covariance of θ ≈ σ² (JᵀJ)⁻¹,

the Cramér-Rao bound, to first order in σ.  JᵀJ and Jᵀr are sums over the examples, which are read
in portions and in order, so J is never stored and the result does not depend on the number of
threads.  What the tokens cannot see of a layer is left as it is, and has covariance 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .. import _core
from .._arguments import checks
from .._arguments.values import frozen
from .._blas import one_blas_thread
from ..config import threads
from ..models import Layer
from .examples import Examples, Float64
from .refinement import MIN_SCALE, layer_numbers
from .visible import Visible, visible_of

NEGLIGIBLE = 1e-3
"""Length of a step, in standard errors, at which the layer is the least-squares layer."""

STEPS = 10
"""Largest number of steps: from a refined layer two or three are enough."""

MIN_CONDITION = 1e-13
"""Smallest condition of the scaled JᵀJ that is distinguishable from rounding, of some 1e-15."""

DAMPINGS = (0.0, 1e-3, 1e-1, 10.0)
"""Added to the diagonal of the scaled JᵀJ, one after the other, until a step lowers ‖r‖."""


@dataclass(frozen=True, eq=False)
class Covariance:
    """How far an estimated layer may be from the true one, to first order in the noise.

    The order of the heads is that of the estimate, and the true layer means its visible part
    (`mhfast.learner.visible_part`).

    Attributes
    ----------
    layer : Layer
        The estimate.
    matrix : float64 array (P, P)
        Covariance of its P = H d (d + p) numbers, W before V, each in memory order; 0 in
        directions that the tokens cannot see.
    noise : float
        Standard deviation σ of the noise, as given.
    outputs : int
        The numbers that were fitted, n T p.
    W_error, V_error : float64 arrays (H, d, d) and (H, d, p)
        Standard errors of W and V, the roots of the diagonal of `matrix`.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 2, noise=0.05, seed=0)
    >>> examples = mh.learner.as_examples(data.X, data.y, noise=0.05)
    >>> truth = data.truth["layer"]
    >>> covariance = mh.learner.estimate(examples, truth).covariance
    >>> lower, upper = covariance.interval(0.95)
    >>> inside = (lower.W <= truth.W) & (truth.W <= upper.W)
    >>> bool(inside.mean() > 0.8), covariance.W_error.shape
    (True, (2, 3, 3))
    """

    layer: Layer
    matrix: Float64
    noise: float
    outputs: int
    W_error: Float64 = field(init=False)
    V_error: Float64 = field(init=False)

    def __post_init__(self) -> None:
        """Split the roots of the diagonal."""
        errors = np.sqrt(np.maximum(self.matrix.diagonal(), 0.0))
        W, V = np.split(errors, [self.layer.W.size])
        object.__setattr__(self, "W_error", frozen(W.reshape(self.layer.W.shape)))
        object.__setattr__(self, "V_error", frozen(V.reshape(self.layer.V.shape)))

    def interval(self, level: float = 0.95) -> tuple[Layer, Layer]:
        """Return intervals that contain each true number with this probability.

        Parameters
        ----------
        level : float
            Between 0 and 1. It holds for each number separately, not for all of them jointly.

        Returns
        -------
        lower, upper : Layer

        Raises
        ------
        TypeError
            `level` is not a number.
        ValueError
            `level` is not between 0 and 1.
        """
        from scipy.special import ndtri  # slow to import

        level = checks.finite(level, "level")
        if not 0.0 < level < 1.0:
            raise ValueError(f"level: expected a probability between 0 and 1, got {level}")
        half = float(ndtri(0.5 + 0.5 * level))
        W, V = half * self.W_error, half * self.V_error
        return (
            Layer(self.layer.W - W, self.layer.V - V),
            Layer(self.layer.W + W, self.layer.V + V),
        )

    def with_outputs(self, basis: Float64) -> Covariance:
        """Return the same for a layer of which these p outputs are coordinates in a basis.

        Parameters
        ----------
        basis : array (q, p)
            Orthonormal columns.

        Returns
        -------
        Covariance
            Of a layer with q outputs.

        Raises
        ------
        ValueError
            `basis` does not have p columns.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> data = mh.data.boolean_layer(500, 2, 3, 2, noise=0.05, seed=0)
        >>> examples = mh.learner.as_examples(data.X, data.y, noise=0.05)
        >>> covariance = mh.learner.estimate(examples, data.truth["layer"]).covariance
        >>> turned = covariance.with_outputs(np.eye(3)[::-1])  # the outputs in the opposite order
        >>> bool(np.allclose(turned.V_error, covariance.V_error[..., ::-1]))
        True
        """
        H, d, p = self.layer.V.shape
        checks.shape(basis, "basis", "q p", (None, p))
        of_W, of_V = self.layer.W.size, np.kron(np.eye(H * d), basis)
        change = np.zeros((of_W + len(of_V), of_W + H * d * p))
        change[:of_W, :of_W] = np.eye(of_W)
        change[of_W:, of_W:] = of_V
        layer = Layer(self.layer.W, self.layer.V @ basis.T)
        matrix = frozen(change @ self.matrix @ change.T)
        return Covariance(layer, matrix, self.noise, self.outputs)


@dataclass(frozen=True, eq=False)
class Estimate:
    """The least-squares layer of all examples.

    Attributes
    ----------
    layer : Layer
    covariance : Covariance
    residual : float
        ‖F(X) - Y‖ / ‖Y‖ of `layer`.
    steps : int
        Accepted steps.
    left : float
        Length of the step that remained, in standard errors: √(stepᵀ JᵀJ step) / σ.
    condition : float
        Smallest over largest eigenvalue of JᵀJ with a unit diagonal, without what cannot be seen.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 2, noise=0.05, seed=0)
    >>> examples = mh.learner.as_examples(data.X, data.y, noise=0.05)
    >>> truth = data.truth["layer"]
    >>> found = mh.learner.estimate(examples, truth)
    >>> found.steps > 0, 0.01 < found.residual < 0.2, found.condition > 1e-6
    (True, True, True)
    """

    layer: Layer
    covariance: Covariance
    residual: float
    steps: int
    left: float
    condition: float


@one_blas_thread()
def estimate(
    examples: Examples,
    layer: Layer,
    *,
    visible: Visible | None = None,
    num_threads: int | None = None,
) -> Estimate | None:
    """Move a layer near the truth to the least-squares layer of all examples.

    Parameters
    ----------
    examples : Examples
        With the standard deviation of their noise.
    layer : Layer
        A refined layer: float64, self-attention with a dense W and scale 1.
    visible : Visible, optional
        What the tokens can see; None means that it is found.
    num_threads : int, optional

    Returns
    -------
    Estimate or None
        None if the examples do not determine the layer.

    Raises
    ------
    TypeError
        `layer` is not a dense Layer of float64.
    ValueError
        The noise is 0, or `layer` is not one that can be refined or does not fit the examples.

    Notes
    -----
    A step takes about n T d (H d)² (p + d / 4) products for the sums and P³ / 3 for its solution.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 2, noise=0.05, seed=0)
    >>> examples = mh.learner.as_examples(data.X, data.y, noise=0.05)
    >>> truth = data.truth["layer"]
    >>> start = mh.Layer(1.01 * truth.W, 1.01 * truth.V)
    >>> found = mh.learner.estimate(examples, start)
    >>> error = mh.learner.align(found.layer, truth).error
    >>> bool(error < 10 * max(found.covariance.W_error.max(), found.covariance.V_error.max()))
    True
    """
    checks.instance(examples, Examples, "examples")
    checks.instance(layer, Layer, "layer")
    if examples.noise <= 0.0:
        raise ValueError("examples: expected a noise above 0, as_examples(X, Y, noise), got 0")
    layer_numbers(layer)
    checks.shape(layer.W, "layer.W", "H d d", (None, examples.dim, examples.dim))
    checks.shape(layer.V, "layer.V", "H d p", (None, examples.dim, examples.out_dim))
    if visible is None:
        visible = visible_of(examples)
    return _Squares(examples, layer, visible, num_threads).least()


@dataclass(frozen=True, eq=False)
class _Equations:
    """D⁻¹ BᵀJᵀJB D⁻¹ (k, k), its right-hand side, D, and ‖r‖² at a point."""

    matrix: Float64
    gradient: Float64
    scale: Float64
    square: float

    def step(self, damping: float) -> Float64 | None:
        """Return the step in the coordinates of B; None if rounding prevents it."""
        from scipy.linalg import cho_factor, cho_solve  # as slow to import as all of mhfast

        damped = self.matrix.copy()
        damped.flat[:: len(damped) + 1] += damping
        try:
            factor = cho_factor(damped, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            return None
        return np.asarray(cho_solve(factor, -self.gradient, check_finite=False)) / self.scale

    def length(self, step: Float64) -> float:
        """Return ‖J B step‖."""
        scaled = self.scale * step
        return math.sqrt(max(float(scaled @ self.matrix @ scaled), 0.0))

    def condition(self) -> float:
        values = np.linalg.eigvalsh(self.matrix)
        return max(float(values[0]), 0.0) / float(values[-1]) if values[-1] > 0.0 else 0.0

    def inverse(self) -> Float64:
        from scipy.linalg import cho_factor, cho_solve  # as above

        inverse = cho_solve(cho_factor(self.matrix), np.eye(len(self.matrix)))
        return np.asarray(inverse / self.scale[:, None] / self.scale)


class _Squares:
    """‖F(X) - Y‖² over all examples as a function of a layer, with Y and V in a unit.

    The unit is a power of two in which Y is of order one.
    """

    def __init__(
        self, examples: Examples, layer: Layer, visible: Visible, num_threads: int | None
    ) -> None:
        self._examples, self._threads = examples, num_threads
        self._shapes = layer.W.shape, layer.V.shape
        self._unit = 2.0 ** round(math.log2(examples.scale))
        self._basis = visible.basis(layer.heads, layer.out_dim)
        start = layer if visible.everything else visible.part(layer)
        self._point: Float64 = np.concatenate([start.W.ravel(), start.V.ravel() / self._unit])

    def least(self) -> Estimate | None:
        """Return the minimum near the start, or None if it is not determined."""
        noise = self._examples.noise / self._unit
        point, steps = self._point, 0
        equations = self._equations(point)
        while True:
            if equations.condition() < MIN_CONDITION:
                return None
            step = equations.step(0.0)
            left = math.inf if step is None else equations.length(step) / noise
            if left <= NEGLIGIBLE or steps == STEPS:
                break
            lower = self._lower(point, equations)
            if lower is None:
                break
            point, equations = lower
            steps += 1
        return self._estimate(point, equations, steps, left)

    def _lower(self, point: Float64, equations: _Equations) -> tuple[Float64, _Equations] | None:
        for damping in DAMPINGS:
            step = equations.step(damping)
            if step is not None:
                moved = point + (step if self._basis is None else self._basis @ step)
                reached = self._equations(moved)
                if reached.square < equations.square:
                    return moved, reached
        return None

    def _equations(self, point: Float64) -> _Equations:
        W, V = self._parts(point)
        total: Float64 = np.zeros((len(point) + 1,) * 2)
        for _, X, Y in self._examples.portions():
            total += _core.layer_equations(X, Y / self._unit, W, V, threads(self._threads))
        matrix, gradient = total[:-1, :-1], total[:-1, -1]
        if self._basis is not None:
            matrix, gradient = self._basis.T @ matrix @ self._basis, self._basis.T @ gradient
        scale = np.sqrt(matrix.diagonal())
        scale = np.maximum(scale, MIN_SCALE * (scale.max() or 1.0))
        return _Equations(
            matrix / scale[:, None] / scale, gradient / scale, scale, float(total[-1, -1])
        )

    def _estimate(self, point: Float64, equations: _Equations, steps: int, left: float) -> Estimate:
        examples = self._examples
        W, V = self._parts(point)
        layer = Layer(W, self._unit * V)
        matrix = (examples.noise / self._unit) ** 2 * equations.inverse()
        if self._basis is not None:
            matrix = self._basis @ matrix @ self._basis.T
        units = np.repeat([1.0, self._unit], [W.size, V.size])
        matrix = units[:, None] * (0.5 * (matrix + matrix.T)) * units
        size = examples.scale / self._unit * math.sqrt(examples.rows)
        return Estimate(
            layer=layer,
            covariance=Covariance(
                layer,
                frozen(matrix),
                examples.noise,
                examples.rows * examples.out_dim,
            ),
            residual=math.sqrt(equations.square) / size,
            steps=steps,
            left=left,
            condition=equations.condition(),
        )

    def _parts(self, point: Float64) -> tuple[Float64, Float64]:
        W, V = np.split(point, [math.prod(self._shapes[0])])
        return W.reshape(self._shapes[0]), V.reshape(self._shapes[1])
