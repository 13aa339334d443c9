"""The efficient estimate from noisy outputs: least squares over all examples, with its covariance.

Refinement against noise works on a part of the examples.  From there a few Gauss-Newton steps lead
to the least-squares layer of all of them; with J the derivatives of all outputs, r = F - Y and
normal noise of standard deviation σ that is the maximum likelihood estimate θ, and

    (JᵀJ) step = -Jᵀr,        covariance of θ ≈ σ² (JᵀJ)⁻¹,

the Cramér-Rao bound, to first order in σ.  JᵀJ and Jᵀr are sums over the examples, which are read
in portions and in order, so J is never stored and the result does not depend on the number of
threads.  What the tokens cannot see of a layer is left as it is, and has covariance 0.

JᵀJ takes seven times as long as Jᵀr for T = 2, and some fifteen times for more tokens.  Many
examples are therefore fitted first by steps with the JᵀJ of a part of them, at the start, and Jᵀr
of all of them,

    (n / m) (JᵀJ of m examples) step = -Jᵀr,

each of which leaves a fixed fraction of the distance to the same minimum.  JᵀJ of all examples is
then computed once, at the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from .. import _core
from .._arguments import checks
from .._arguments.values import frozen
from .._blas import one_blas_thread
from ..config import threads
from ..gradients import value_and_grad
from ..models import Layer
from .covariance import Covariance
from .examples import Examples, Float64
from .refinement import MIN_SCALE, enough_examples, layer_numbers
from .visible import Visible, visible_of

NEGLIGIBLE = 1e-2
"""Length of a step, in standard errors, at which the layer is the least-squares layer: what is left
adds the square of this to the mean square of the errors, which is the number of parameters."""

STEPS = 10
"""Largest number of steps with JᵀJ of all examples; a refined layer needs two or three."""

PART = 6
"""A sixth of the examples gives the JᵀJ of the first steps: (2, 8, 2) with n = 72,000 then needs
five or six of them, with a sixteenth ten, and with an eightieth they do not converge."""

OUTPUTS_OF_PART = 256
"""For each parameter, at least, in that part; less than two such parts are not divided."""

PART_STEPS = 40
"""Largest number of these steps."""

SHORTER = 0.5
"""What each of these steps must be shorter by for the part to be good enough."""

MIN_CONDITION = 1e-13
"""Smallest condition of the scaled JᵀJ that is distinguishable from rounding, of some 1e-15."""

DAMPINGS = (0.0, 1e-3, 1e-1, 10.0)
"""Added to the diagonal of the scaled JᵀJ, one after the other, until a step lowers ‖r‖."""


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
        Accepted steps, including those with JᵀJ of a part of the examples.
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
    JᵀJ takes about n T d (H d)² (min(p, d / 2) + d / 4) products, 5/8 n d² (H d)² if T = 2, and
    each solution P³ / 3.

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
    checks.instance(visible, Visible, "visible")
    return _Squares(examples, layer, visible, num_threads).least()


@dataclass(frozen=True, eq=False)
class _Equations:
    """D⁻¹ BᵀJᵀJB D⁻¹ (k, k), BᵀJᵀr (k,), D (k,), and ‖r‖² at a point."""

    matrix: Float64
    gradient: Float64
    scale: Float64
    square: float

    def solver(self, damping: float) -> Callable[[Float64], Float64] | None:
        """Return the function from a gradient to the step, in the coordinates of B.

        None if rounding prevents it.
        """
        from scipy.linalg import cho_factor, cho_solve  # as slow to import as all of mhfast

        damped = self.matrix.copy()
        damped.flat[:: len(damped) + 1] += damping
        try:
            factor = cho_factor(damped, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            return None
        return lambda gradient: np.asarray(
            cho_solve(factor, -gradient / self.scale, check_finite=False) / self.scale
        )

    def step(self, damping: float) -> Float64 | None:
        """Return the step in the coordinates of B; None if rounding prevents it."""
        solve = self.solver(damping)
        return None if solve is None else solve(self.gradient)

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
        self._start: Float64 = np.concatenate([start.W.ravel(), start.V.ravel() / self._unit])
        self._only: list[tuple[Float64, Float64]] = []

    def least(self) -> Estimate | None:
        """Return the minimum near the start, or None if it is not determined."""
        noise = self._examples.noise / self._unit
        point, before = self._near()
        equations, steps = self._equations(point, self._portions()), 0
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
        return self._estimate(point, equations, before + steps, left)

    def _near(self) -> tuple[Float64, int]:
        """Return a point near the minimum, and the number of steps with JᵀJ of a part to it."""
        every = self._every()
        if every < 2:
            return self._start, 0
        X, Y = self._examples.part(slice(0, None, every))
        part = self._equations(self._start, [(X, Y / self._unit)])
        solve = part.solver(0.0)
        if solve is None:
            return self._start, 0
        share = len(X) / self._examples.n
        noise = self._examples.noise / self._unit * math.sqrt(share)
        point, best, lowest, last = self._start, self._start, math.inf, math.inf
        for steps in range(PART_STEPS):
            square, gradient = self._gradient(point)
            if not square <= lowest:
                return best, steps - 1
            best, lowest = point, square
            step = solve(share * gradient)
            length = part.length(step) / noise
            if not length <= SHORTER * last:
                return best, steps
            point = self._moved(point, step)
            # The next step would be shorter by about as much.
            if length * (length / last if steps else 1.0) < 0.5 * NEGLIGIBLE:
                return point, steps + 1
            last = length
        return point, PART_STEPS

    def _every(self) -> int:
        """Return k if every k-th example belongs to the part that gives JᵀJ."""
        examples, (heads, dim, out_dim) = self._examples, self._shapes[1]
        enough = enough_examples(heads, examples.tokens, dim, out_dim, OUTPUTS_OF_PART)
        return max(min(PART, examples.n // enough), -(-examples.n // examples.portion))

    def _lower(self, point: Float64, equations: _Equations) -> tuple[Float64, _Equations] | None:
        for damping in DAMPINGS:
            step = equations.step(damping)
            if step is not None:
                moved = self._moved(point, step)
                reached = self._equations(moved, self._portions())
                if reached.square < equations.square:
                    return moved, reached
        return None

    def _moved(self, point: Float64, step: Float64) -> Float64:
        return point + (step if self._basis is None else self._basis @ step)

    def _portions(self) -> Iterable[tuple[Float64, Float64]]:
        """Return X and Y in the unit, a portion at a time; a single portion is read once."""
        if self._only:
            return self._only
        portions = ((X, Y / self._unit) for _, X, Y in self._examples.portions())
        if self._examples.n > self._examples.portion:
            return portions
        self._only = list(portions)
        return self._only

    def _equations(self, point: Float64, portions: Iterable[tuple[Float64, Float64]]) -> _Equations:
        W, V = self._parts(point)
        total: Float64 = np.zeros((len(point) + 1,) * 2)
        for X, Y in portions:
            total += _core.layer_equations(X, Y, W, V, threads(self._threads))
        matrix, gradient = total[:-1, :-1], total[:-1, -1]
        if self._basis is not None:
            matrix, gradient = self._basis.T @ matrix @ self._basis, self._basis.T @ gradient
        scale = np.sqrt(matrix.diagonal())
        scale = np.maximum(scale, MIN_SCALE * (scale.max() or 1.0))
        return _Equations(matrix / scale[:, None] / scale, gradient, scale, float(total[-1, -1]))

    def _gradient(self, point: Float64) -> tuple[float, Float64]:
        """Return ‖r‖² and BᵀJᵀr."""
        layer = Layer(*self._parts(point))
        square, total = 0.0, np.zeros(len(point))
        for X, Y in self._portions():
            value, g = value_and_grad(layer, X, Y, loss="squared", num_threads=self._threads)
            square += len(X) * float(value)
            total += 0.5 * len(X) * np.concatenate([g.W.ravel(), g.V.ravel()])
        return square, total if self._basis is None else self._basis.T @ total

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
