"""Refinement of a layer that may have more heads than there are, and the test of each head.

With exact outputs a surplus head shows in the condition: something of it can be moved without a
change of the outputs.  With noise it fits noise, and the examples seem to determine it.  Then the
best layer with one head less fits equally well up to noise: by the Bayesian information criterion
(Schwarz, "Estimating the dimension of a model", Annals of Statistics 6, 1978) k parameters must
lower the square of the residual of m outputs by σ² k log m at least; by chance it is about σ² k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ..models import Layer
from .alignment import merge_heads
from .certificates import CLEARLY_IDENTIFIED, exact_limit
from .examples import Examples, Float64
from .refinement import OUTPUTS_PER_PARAMETER, Refinement, enough_examples, refine
from .values import solve_values
from .visible import Visible

AGAINST_NOISE = 64
"""Outputs for every parameter in a refinement that has to average noise."""

REDUCED = 2
"""Number of layers with one head less that are refined."""

MUCH_NOISE = 1.5
"""Residual over that of the noise above which no layer is learnt, and heads need no test."""

STEPS = 20
"""Steps of their refinement: with enough heads the minimum is reached soon, with too few never."""

SAMPLES = 1000
"""Number of examples on which they are chosen."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Examples to which layers of one and of fewer heads are fitted, the same for all.

    Attributes
    ----------
    examples : Examples
    X, Y : arrays
        The examples that samples are drawn from.
    count : int
        How many are drawn.
    seed : int
    num_threads : int or None
    visible : Visible or None
        What the tokens can see, where it is not everything.
    """

    examples: Examples
    X: Float64
    Y: Float64
    count: int
    seed: int
    num_threads: int | None
    visible: Visible | None

    @classmethod
    def of(
        cls,
        examples: Examples,
        heads: int,
        seed: int,
        num_threads: int | None,
        visible: Visible | None = None,
    ) -> Problem:
        """Return the problem for layers of at most that many heads."""
        most = AGAINST_NOISE if examples.noise > 0.0 else OUTPUTS_PER_PARAMETER
        count = _samples(examples, heads, most)
        X, Y = examples.first(4 * count).part(slice(None))
        if visible is not None and visible.everything:
            visible = None
        return cls(examples, X, Y, min(count, len(X)), seed, num_threads, visible)

    def fewest(self, heads: int) -> int:
        """Return how many examples are enough for exact outputs of that many heads."""
        return min(_samples(self.examples, heads, OUTPUTS_PER_PARAMETER), len(self.X))

    @property
    def outputs(self) -> int:
        """The number of outputs that are fitted."""
        return self.count * self.examples.tokens * self.examples.out_dim

    @property
    def of_a_head(self) -> int:
        """The number of parameters of one head."""
        return self.examples.dim * (self.examples.dim + self.examples.out_dim)

    def fitted(self, layer: Layer) -> float:
        """Return the number of parameters of a layer per output that they are fitted to."""
        return layer.heads * self.of_a_head / self.outputs

    def refined(self, layer: Layer, **settings: int) -> Refinement:
        """Return the layer refined, without what the tokens cannot see."""
        seen = self.visible
        found = refine(
            layer,
            self.X,
            self.Y,
            examples=self.count,
            seed=self.seed,
            unseen=0 if seen is None else seen.unseen(layer.heads, layer.out_dim),
            num_threads=self.num_threads,
            **settings,
        )
        return found if seen is None else replace(found, layer=seen.part(found.layer))

    def explains(self, found: Refinement) -> bool:
        """Return whether the residual is small enough for a test of the heads to matter."""
        return self.explains_all(found.residual)

    def explains_all(self, residual: float) -> bool:
        """Return the same of a residual of any of the examples."""
        if self.examples.noise > 0.0:
            return residual <= MUCH_NOISE * self.examples.noise_floor
        return residual <= exact_limit(self.examples)

    def judged(self, layer: Layer) -> tuple[Refinement, float | None]:
        """Return the layer as it is, and how much every head of it is needed."""
        found = self.refined(layer, steps=0)
        if self.examples.noise == 0.0 or layer.heads == 1 or not self.explains(found):
            return found, None
        return found, self.needed(found, self.reduced(layer))

    def reduced(self, layer: Layer) -> Refinement:
        """Return the best layer of one head less that is found, refined."""
        few = self.examples.first(SAMPLES)
        solved = [
            (solve_values(few, W, num_threads=self.num_threads), W) for W in _one_head_less(layer)
        ]
        solved.sort(key=lambda pair: pair[0].residual)
        tried = [self.refined(values.layer(W), steps=STEPS) for values, W in solved[:REDUCED]]
        return min(tried, key=lambda refinement: refinement.residual)

    def needed(self, found: Refinement, less: Refinement) -> float:
        """Return by how much a head lowers the squared residual, over what it must by the BIC."""
        examples, m = self.examples, self.outputs
        noise = max(found.residual, examples.noise_floor)
        gained = m * (less.residual**2 - found.residual**2) / noise**2
        return gained / (self.of_a_head * math.log(m))


def without_surplus(problem: Problem, layer: Layer) -> tuple[Refinement, float | None]:
    """Refine a layer, remove its superfluous heads, and refine the rest again.

    Returns
    -------
    found : Refinement
    needed : float or None
        `Problem.needed` of the heads that are left; None for exact outputs or one head.
    """
    found = problem.refined(layer)
    exact = problem.examples.noise == 0.0
    while found.layer.heads > 1:
        if exact and found.condition >= CLEARLY_IDENTIFIED:
            return found, None
        merged = merge_heads(found.layer)
        if merged.heads < found.layer.heads:
            found = problem.refined(merged)
            continue
        if not problem.explains(found):
            return found, None
        less = problem.reduced(found.layer)
        if exact:
            if not problem.explains(less):
                return found, None
        elif (needed := problem.needed(found, less)) >= 1.0:
            return found, needed
        found = problem.refined(less.layer)
    return found, None


def _samples(examples: Examples, heads: int, per_parameter: int) -> int:
    return enough_examples(heads, examples.tokens, examples.dim, examples.out_dim, per_parameter)


def _one_head_less(layer: Layer) -> list[Float64]:
    """Return key-query matrices (H - 1, d, d): one head dropped, or two of them as their mean."""
    W = np.asarray(layer.W)
    size = np.maximum(np.linalg.norm(layer.V, axis=(1, 2)), 1e-300)
    less = [np.delete(W, h, axis=0) for h in range(layer.heads)]
    for i, j in combinations(range(layer.heads), 2):
        mean = (size[i] * W[i] + size[j] * W[j]) / (size[i] + size[j])
        less.append(np.concatenate([np.delete(W, [i, j], axis=0), mean[None]]))
    return less
