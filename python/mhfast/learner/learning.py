"""`learn_layer`: the six phases one after the other, and an honest verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks as _checks
from ..dataset.dataset import Dataset
from ..models import Layer
from ..training.progress import progress_bar
from .alignment import merge_heads
from .certificates import IDENTIFIED, certificates
from .examples import Examples, as_examples
from .facts import Facts, certify
from .net import search_net
from .refinement import LEAST_EXAMPLES, OUTPUTS_PER_PARAMETER, Refinement, refine
from .result import Learning, LearningInterrupted, Phase
from .sculpting import Body, propose_heads, sculpt
from .sums import POPULATION, SumEstimate, crude_sum, one_hot_sum, refine_sum, with_support
from .values import relative_residual, solve_values

Parts = TypeVar("Parts", bound=tuple[object, ...])

AGAINST_NOISE = 64
"""Outputs for every parameter in a refinement that has to average noise."""

FINE = ((0.02, 0.01), (0.005, 0.002), (0.001,))
"""Shares of the rows that the rounds of phase 4 trust."""


def learn_layer(
    X: npt.ArrayLike | Dataset,
    Y: npt.ArrayLike | None = None,
    heads: int | None = None,
    *,
    noise: float = 0.0,
    refinement: bool = True,
    seed: int = 0,
    progress: bool = False,
    num_threads: int | None = None,
) -> Learning:
    """Learn a multi-head attention layer F(X) = Σ_h softmax(X W_h Xᵀ) X V_h from examples.

    Six phases: a crude estimate of Σ_h V_h; rows at which all heads attend alike, certified by that
    sum, and the affine hull of the W_h that they leave; the sum again, by robust regression; the
    hull again, a few times; a net over the hull; the value matrices by least squares.  Then, and
    reported apart, a local refinement of all numbers together.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64, or Dataset
        Tokens, independent and uniform on {±1} or Gaussian.  Memory maps are read in portions.
    Y : array (n, T, p) of the same dtype
        F(X), exact or with noise.  Not with a Dataset, which has it.
    heads : int, optional
        The number of heads H.  None means that the spectrum of the certified facts proposes it.
    noise : float
        Standard deviation of the noise on every entry of Y.
    refinement : bool
        Whether to refine what the phases found.
    seed : int
    progress : bool
        Show a progress bar on stderr (that of tqdm where it is installed).
    num_threads : int, optional

    Returns
    -------
    Learning
        `.layer`, `.learnt`, `.verdict`, `.phases` and more.  A layer is *learnt* only if it
        predicts examples that were held out: to 1e-8 relative, or to the noise.

    Raises
    ------
    TypeError
        X or Y is not float32 or float64, or their dtypes differ.
    ValueError
        Shapes do not fit, a number is not finite, there are fewer examples than the method can
        work with, a setting is out of range.
    LearningInterrupted
        By Ctrl-C; its `.learning` holds the finished phases.

    Notes
    -----
    All arithmetic is in float64.  The time grows with (d T)^O(H): certified rows become rare with
    each head.  Hard instances exist; on them the verdict is *not learnt*.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", for the phases; what they do inside
    is told in the documentation, with what is ours.

    Examples
    --------
    >>> data = mh.data.boolean_layer(100_000, 3, 8, 2, seed=0)
    >>> result = mh.learn_layer(data.X, data.y, heads=2)
    >>> result.learnt
    True
    """
    examples = _examples(X, Y, noise)
    if heads is not None:
        heads = _checks.count(heads, "heads")
    if _checks.integer(seed, "seed") < 0:
        raise ValueError(f"seed: expected an integer of at least 0, got {seed}")
    _enough(examples, heads)
    training, held_out = examples.split(_held_out(examples.n))
    phases = 6 + int(refinement)
    with progress_bar(0, phases, "learning", "phase") if progress else nullcontext() as tick:
        learner = _Learner(training, held_out, heads, seed, num_threads, tick)
        try:
            learner.run_phases()
            if refinement and learner.layer is not None:
                learner.refine(learner.layer)
        except _FactsMissingError as missing:
            return learner.result(str(missing))
        except KeyboardInterrupt:
            raise LearningInterrupted(learner.result("interrupted by Ctrl-C")) from None
    return learner.result()


def _examples(X: npt.ArrayLike | Dataset, Y: npt.ArrayLike | None, noise: float) -> Examples:
    if isinstance(X, Dataset):
        if Y is not None:
            raise ValueError("Y: expected none beside a Dataset, which has it")
        for name in ("query", "lengths", "weight"):
            if getattr(X, name) is not None:
                raise ValueError(f"X: expected a Dataset without {name}, of plain self-attention")
        return as_examples(X.X, X.y, noise)
    if Y is None:
        raise TypeError("Y: expected an array (n, T, p) beside the array X")
    return as_examples(X, Y, noise)


def _held_out(n: int) -> int:
    """Return how many of n examples no phase sees."""
    return min(2000, n // 10)


def _enough(examples: Examples, heads: int | None) -> None:
    """Check that there is more to learn from than there is to learn."""
    T, d, p = examples.tokens, examples.dim, examples.out_dim
    unknown = -(-(heads or 1) * d * (d + p) // p)
    least = -(-max(4 * d * d, unknown) // T)
    if examples.n - _held_out(examples.n) < least:
        raise ValueError(
            f"X: expected at least {max(least * 10 // 9 + 1, 10)} examples for {heads or 1} heads "
            f"of d = {d} and outputs of rank {p}, got {examples.n}"
        )


class _FactsMissingError(Exception):
    """Too few facts could be certified."""


@dataclass
class _Learner:
    """The state of learning: what the phases have found so far."""

    examples: Examples
    held_out: Examples
    heads: int | None
    seed: int
    num_threads: int | None
    tick: Callable[[int], None] | None
    phases: list[Phase] = field(default_factory=list)
    layer: Layer | None = None
    unrefined: Layer | None = None
    sureness: float | None = None

    def run_phases(self) -> None:
        """Run the six phases.

        Raises
        ------
        _FactsMissingError
            There are too few facts to go on.
        """
        (crude,) = self._phase("crude sum", lambda: (self._crude(),))
        _, body = self._phase(
            "sculpting", lambda: self._sculpt(self.examples.first(POPULATION), crude)
        )
        (refined,) = self._phase("refined sum", lambda: (self._refine_sum(crude, body),))
        _, facts, body = self._phase("second sculpting", lambda: self._sculpt_again(refined))
        (net,) = self._phase(
            "net",
            lambda: (
                search_net(
                    self.examples, body, facts, seed=self.seed, num_threads=self.num_threads
                ),
            ),
        )
        W = np.array(net.candidates[0].W)
        (values,) = self._phase(
            "values", lambda: (solve_values(self.examples, W, num_threads=self.num_threads),)
        )
        self.layer = self.unrefined = values.layer(W)

    def refine(self, layer: Layer) -> None:
        """Refine a layer."""
        (refined,) = self._phase("refinement", lambda: (self._refine(layer),))
        self.layer, self.heads = refined.layer, refined.layer.heads

    def result(self, missing: str | None = None) -> Learning:
        """Return what was learnt; `missing` tells what ended it early."""
        layer, unrefined = self._whole(self.layer), self._whole(self.unrefined)
        residual = (
            None if layer is None else relative_residual(self.held_out, layer, self.num_threads)
        )
        found = certificates(self.phases, self.examples, self.held_out, residual)
        return Learning(
            layer=layer,
            unrefined=unrefined,
            learnt=missing is None
            and residual is not None
            and all(c.holds for c in found if c.decisive),
            heads=self.heads,
            sureness=self.sureness,
            held_out=residual,
            certificates=tuple(found),
            phases=tuple(self.phases),
            missing=missing,
        )

    def _whole(self, layer: Layer | None) -> Layer | None:
        return None if layer is None else self.examples.whole_layer(layer)

    def _phase(self, name: str, work: Callable[[], Parts]) -> Parts:
        begin = time.perf_counter()
        parts = work()
        self.phases.append(Phase(name, time.perf_counter() - begin, parts))
        if self.tick is not None:
            self.tick(len(self.phases))
        return parts

    def _crude(self) -> SumEstimate:
        return crude_sum(self.examples, support=2, num_threads=self.num_threads)

    def _sculpt(self, examples: Examples, estimate: SumEstimate) -> tuple[Facts, Body]:
        facts = certify(examples, estimate, seed=self.seed, num_threads=self.num_threads)
        unknown = examples.dim**2
        if len(facts) < unknown:
            raise _FactsMissingError(
                f"{len(facts)} facts could be certified, a key-query matrix has {unknown} unknowns"
            )
        body = sculpt(facts, self.heads or 1, num_threads=self.num_threads)
        if self.heads is None:
            proposed, self.sureness = propose_heads(body.eigenvalues)
            body = sculpt(facts, proposed, num_threads=self.num_threads)
        return facts, body

    def _refine_sum(self, crude: SumEstimate, body: Body) -> SumEstimate:
        start = one_hot_sum(
            self.examples, body.point, support=crude.support, num_threads=self.num_threads
        )
        if crude.certificate <= start.certificate:
            start = crude
        return refine_sum(self.examples, start, seed=self.seed, num_threads=self.num_threads)

    def _sculpt_again(self, estimate: SumEstimate) -> tuple[SumEstimate, Facts, Body]:
        """Better the sum in rounds, each kept only if the certificate falls; sculpt with it."""
        # One head explains every row exactly, by as many tokens as there are.
        support = self.examples.tokens if self.heads == 1 else None
        estimate = with_support(self.examples, estimate, support, num_threads=self.num_threads)
        for shares in FINE:
            tried = refine_sum(
                self.examples, estimate, shares=shares, seed=self.seed, num_threads=self.num_threads
            )
            if tried.certificate >= estimate.certificate:
                break
            estimate = tried
        facts, body = self._sculpt(self.examples, estimate)
        self.heads = body.heads
        return estimate, facts, body

    def _refine(self, layer: Layer) -> Refinement:
        """Refine; heads too many end as copies of others or without values, and then must go."""
        d, p, T = layer.dim, layer.out_dim, self.examples.tokens
        most = AGAINST_NOISE if self.examples.noise > 0.0 else OUTPUTS_PER_PARAMETER
        count = max(LEAST_EXAMPLES, -(-most * layer.heads * d * (d + p) // (T * p)))
        X, Y = self.examples.first(4 * count).part(slice(None))
        while True:
            found = refine(
                layer,
                X,
                Y,
                examples=min(count, len(X)),
                seed=self.seed,
                num_threads=self.num_threads,
            )
            layer = merge_heads(found.layer)
            if found.condition >= IDENTIFIED or layer.heads == found.layer.heads:
                return found
