"""`learn_layer`: the six phases one after the other, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._blas import one_blas_thread
from ..dataset.dataset import Dataset
from ..models import Layer
from ..training.progress import progress_bar
from .certificates import Fit, Judged, certificates, fits, judge
from .covariance import Covariance
from .estimate import estimate
from .examples import Examples, as_examples
from .facts import Facts, certify
from .net import search_net
from .numbers import NumberOfHeads
from .refinement import Refinement
from .restarts import STARTS, restart
from .result import Learning, LearningInterrupted, Phase
from .sculpting import Body, propose_heads, sculpt
from .sums import POPULATION, SumEstimate, crude_sum, one_hot_sum, refine_sum, with_support
from .surplus import Problem, without_surplus
from .values import solve_values
from .visible import Visible, visible_of

Parts = TypeVar("Parts", bound=tuple[object, ...])

MOST_HELD_OUT = 2000
"""Largest number of held-out examples if outputs are exact; with noise a tenth is held out."""

FEW_STARTS = 6
"""Random layers that are refined for each number of heads if none is given, and for one head more
if that many do not fit."""

FINE = ((0.02, 0.01), (0.005, 0.002), (0.001,))
"""Fractions of the rows that the rounds of phase 4 use."""


@one_blas_thread()
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

    Six phases: a crude estimate of Σ_h V_h; rows in which all heads attend alike, certified by that
    sum, and the affine hull of the W_h that they determine; the sum again, by robust regression;
    the hull again, a few times; a net over the hull; the value matrices by least squares. Then,
    reported separately, a local refinement of all numbers together; with noise, finally, also a fit
    to all examples.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64, or Dataset
        Tokens, independent and uniform on {±1} or Gaussian.  Memory maps are read in portions.
    Y : array (n, T, p) of the same dtype
        F(X), exact or with noise. None with a Dataset, which contains it.
    heads : int, optional
        The number of heads H.  None means that it is found: numbers are tried upward from 1, at
        most 8, until a fit is confirmed by examples set aside for it, or two numbers in a row make
        no progress.  A number that stands out in the spectrum of the certified facts comes first.
    noise : float
        Standard deviation of the noise on every entry of Y, to about one percent: residuals that
        are too small for it are rejected like those that are too large.
    refinement : bool
        Whether to refine the result of the phases, and random layers if that is not learnt: at most
        20 of 40 steps each, fewer if these would take more than 3e10 operations.
    seed : int
        Seed of the held-out examples and of all other random choices.
    progress : bool
        Show a progress bar on stderr (that of tqdm if it is installed).
    num_threads : int, optional

    Returns
    -------
    Learning
        `.layer`, `.learnt`, `.verdict`, `.phases` and more; with noise also `.covariance`, whose
        intervals hold for the layer.  A layer is *learnt* only if the examples determine it and it
        predicts each of them, and of those that were held out at random: to 1e-8 relative, or to
        the noise.  What such tokens cannot see of W and V is
        projected out (`mhfast.learner.visible_part`); of single tokens, T = 1, only the sum of the
        V_h is left, as one head with W = 0.

    Raises
    ------
    TypeError
        X or Y is not float32 or float64, or their dtypes differ.
    ValueError
        Shapes do not fit, a number is not finite, there are fewer examples than the method needs, a
        setting is out of range.
    LearningInterrupted
        After Ctrl-C; its `.learning` holds the finished phases.

    Notes
    -----
    All arithmetic is in float64.  The time grows with (d T)^O(H): certified rows become rare with
    each head.  Hard instances exist; on them the verdict is *not learnt*.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", for the phases; the documentation
    describes how they are carried out, and which parts are ours.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 1, seed=0)
    >>> result = mh.learn_layer(data.X, data.y, heads=1)
    >>> result.learnt, mh.learner.align(result.layer, data.truth["layer"]).error < 1e-9
    (True, True)
    """
    examples = _examples(X, Y, noise)
    if heads is not None:
        heads = checks.count(heads, "heads")
    if checks.integer(seed, "seed") < 0:
        raise ValueError(f"seed: expected an integer of at least 0, got {seed}")
    _enough(examples, heads)
    phases = 6 + int(refinement)
    with progress_bar(0, phases, "learning", "phase") if progress else nullcontext() as on_progress:
        learner = _Learner(examples, examples, heads, seed, num_threads, refinement, on_progress)
        try:
            learner.run()
        except _NotToLearnError as missing:
            return learner.result(str(missing))
        except KeyboardInterrupt:
            raise LearningInterrupted(learner.result("interrupted by Ctrl-C")) from None
    return learner.result()


def _examples(X: npt.ArrayLike | Dataset, Y: npt.ArrayLike | None, noise: float) -> Examples:
    if isinstance(X, Dataset):
        if Y is not None:
            raise ValueError("Y: expected None with a Dataset, which holds its own")
        for name in ("query", "lengths", "weight"):
            if getattr(X, name) is not None:
                raise ValueError(f"X: expected a Dataset without {name}, of plain self-attention")
        return as_examples(X.X, X.y, noise, fewest_tokens=1)
    if Y is None:
        raise TypeError("Y: expected an array (n, T, p) with the array X, got None")
    return as_examples(X, Y, noise, fewest_tokens=1)


def _held_out(n: int, noise: float = 0.0) -> int:
    """Return how many of n examples are held out from all phases."""
    return n // 10 if noise > 0.0 else min(MOST_HELD_OUT, n // 10)


def _least(examples: Examples, heads: int) -> int:
    """Return the smallest number of examples that can be learnt from."""
    T, d, p = examples.tokens, examples.dim, examples.out_dim
    if T == 1:
        return 2 * d  # of the sum of values alone
    unknown = -(-heads * d * (d + p) // p)
    return -(-max(4 * d * d, unknown) // T)


def _enough(examples: Examples, heads: int | None) -> None:
    """Check that there are enough examples for the unknowns."""
    least = _least(examples, heads or 1)
    if examples.n - _held_out(examples.n, examples.noise) < least:
        raise ValueError(
            f"X: expected at least {max(least * 10 // 9 + 1, 10)} examples for {heads or 1} heads "
            f"of d = {examples.dim} and outputs of rank {examples.out_dim}, got {examples.n}"
        )


class _NotToLearnError(Exception):
    """There is nothing to learn from: outputs that do not vary, or too few facts."""


class _TooFewFactsError(_NotToLearnError):
    """There are too few facts to sculpt from."""


@dataclass(frozen=True)
class _Attempt:
    """The result for one number of heads."""

    phases: tuple[Phase, ...]
    unrefined: Layer | None
    layer: Layer
    fit: Fit
    covariance: Covariance | None = None


@dataclass
class _Learner:
    """The state of learning: the results of the phases so far."""

    examples: Examples
    held_out: Examples
    heads: int | None
    seed: int
    num_threads: int | None
    refinement: bool
    on_progress: Callable[[int], None] | None
    phases: list[Phase] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    best: _Attempt | None = None
    unrefined: Layer | None = None
    sureness: float | None = None
    choosing: Examples | None = None
    few_facts: str | None = None
    visible: Visible = field(init=False)

    def run(self) -> None:
        """Run the phases, the last ones for each candidate number of heads.

        Raises
        ------
        _NotToLearnError
            Outputs do not vary, or without refinement there are too few facts to continue.
        """
        held_out = _held_out(self.examples.n, self.examples.noise)
        self.examples, self.held_out = self.examples.split(held_out, seed=self.seed)
        self._varying()
        self.visible = visible_of(self.examples)
        if not self.visible.differences.size:
            self.tried.append(1)
            self.best = self._sum_of_values()
            return
        if self.heads is None and self.held_out.n > 1:
            self.held_out, self.choosing = self.held_out.split(self.held_out.n // 2, seed=self.seed)
        sculpted = self._sculpted()
        done = tuple(self.phases)
        numbers = self._numbers(None if sculpted is None else sculpted[2])
        for heads in numbers:
            self.phases[:] = done
            self.unrefined = None
            body = None
            if sculpted is not None:
                estimate, facts, body = sculpted
                if heads != body.heads:
                    body = sculpt(facts, heads, num_threads=self.num_threads)
                last = done[-1]
                self.phases[-1] = Phase(last.name, last.seconds, (estimate, facts, body))
            self.tried.append(heads)
            attempt = self._attempt(heads, None if sculpted is None else sculpted[1], body)
            confirmed, residual = self._confirmed(attempt)
            if numbers.take(residual) or confirmed:
                self.best = attempt
            if confirmed:
                break

    def result(self, missing: str | None = None) -> Learning:
        """Return what was learnt; `missing` says what ended it early."""
        best, phases = self.best, self.phases
        fit, unrefined, layer, held_out = None, self.unrefined, self.unrefined, None
        if best is not None:
            fit, unrefined, layer, phases = best.fit, best.unrefined, best.layer, list(best.phases)
        if layer is not None:
            held_out = self._judge(self.held_out, layer)
        found = certificates(phases, self.examples, self.held_out, fit, held_out, layer)
        learnt = missing is None and fit is not None and all(c.holds for c in found if c.decisive)
        return Learning(
            layer=self._whole(layer),
            unrefined=self._whole(unrefined),
            learnt=learnt,
            heads=self.heads if layer is None else layer.heads,
            asked=self.heads,
            sureness=self.sureness,
            tried=tuple(self.tried),
            held_out=None if held_out is None else held_out.residual,
            unseen=self._unseen(layer),
            covariance=None if best is None else self._whole_covariance(best.covariance),
            certificates=tuple(found),
            phases=tuple(phases),
            missing=missing if learnt or missing is not None else self.few_facts,
        )

    def _varying(self) -> None:
        for name, part in (("training", self.examples), ("held-out", self.held_out)):
            if part.scale == 0.0:
                raise _NotToLearnError(f"the {name} outputs are all zero")
            if part.constant and part.rows > 1:
                raise _NotToLearnError(f"the {name} outputs are the same for every query")

    def _sculpted(self) -> tuple[SumEstimate, Facts, Body] | None:
        """Run phases 1 to 4; None if there are too few facts, and refinement may do without."""
        try:
            return self._sculpt_twice()
        except _TooFewFactsError as few:
            if not self.refinement:
                raise
            self.few_facts = str(few)
            return None

    def _sculpt_twice(self) -> tuple[SumEstimate, Facts, Body]:
        (crude,) = self._phase("crude sum", lambda: (self._crude(),))
        _, body = self._phase(
            "sculpting", lambda: self._sculpt(self.examples.first(POPULATION), crude)
        )
        (refined,) = self._phase("refined sum", lambda: (self._refine_sum(crude, body),))
        return self._phase("second sculpting", lambda: self._sculpt_again(refined))

    def _numbers(self, body: Body | None) -> NumberOfHeads:
        """Return the numbers of heads to try."""
        if self.heads is not None:
            return NumberOfHeads.given(self.heads)
        d, n = self.examples.dim, self.examples.n
        most = next(
            H for H in range(1, d * d + 1) if d * d == H or _least(self.examples, H + 1) > n
        )
        return NumberOfHeads(None if body is None else body.heads, self.sureness, most)

    def _confirmed(self, attempt: _Attempt) -> tuple[bool, float]:
        """Return whether an attempt fits, and its residual where the number is chosen."""
        training = attempt.fit.training
        if self.choosing is None or not self.choosing.scale:
            return fits(self.examples, attempt.fit), training.residual
        judged = self._judge(self.choosing, attempt.layer)
        return fits(self.examples, attempt.fit, (self.choosing, judged)), judged.residual

    def _attempt(self, heads: int, facts: Facts | None, body: Body | None) -> _Attempt:
        """Run phases 5 and 6, and refinement; if the layer does not fit, refine others."""
        problem = Problem.of(self.examples, heads, self.seed, self.num_threads, self.visible)
        fit, layer, unrefined = None, None, None
        if facts is not None and body is not None:
            unrefined = self.unrefined = self._searched(facts, body)
            if not self.refinement:
                found, needed = problem.judged(unrefined)
            else:
                (found, needed) = self._phase(
                    "refinement", lambda: without_surplus(problem, unrefined)
                )
            fit, layer = self._fit(problem, found, needed), found.layer
        if self.refinement and (fit is None or not fits(self.examples, fit)):
            fit, layer = self._restarted(problem, heads, fit, layer)
        assert fit is not None
        assert layer is not None
        covariance = None
        if self.refinement and self.examples.noise and problem.explains_all(fit.training.residual):
            fit, layer, covariance = self._estimated(fit, layer)
        return _Attempt(tuple(self.phases), unrefined, layer, fit, covariance)

    def _estimated(self, fit: Fit, layer: Layer) -> tuple[Fit, Layer, Covariance | None]:
        """Fit all examples, if they determine the layer."""
        (found,) = self._phase(
            "all examples",
            lambda: (
                estimate(self.examples, layer, visible=self.visible, num_threads=self.num_threads),
            ),
        )
        if found is None:
            return fit, layer, None
        fit = replace(
            fit,
            condition=found.condition,
            fitted=fit.parameters / found.covariance.outputs,
            training=self._judge(self.examples, found.layer),
        )
        return fit, found.layer, found.covariance

    def _searched(self, facts: Facts, body: Body) -> Layer:
        """Run phases 5 and 6."""
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
        return values.layer(W)

    def _restarted(
        self, problem: Problem, heads: int, fit: Fit | None, layer: Layer | None
    ) -> tuple[Fit, Layer]:
        """Refine from other layers; if that does not fit either, try one head more."""
        most = STARTS if self.heads is not None else FEW_STARTS
        (restarts,) = self._phase("restarts", lambda: (restart(problem, heads, layer, most=most),))
        near = restarts.refinement.layer
        if fit is None or restarts.refinement.residual < fit.training.residual:
            found, needed = without_surplus(problem, near)
            again = self._fit(problem, found, needed)
            if fit is None or again.training.residual < fit.training.residual:
                fit, layer = again, found.layer
        assert layer is not None
        if self.heads is not None and not problem.explains_all(fit.training.residual):
            more = restart(problem, heads + 1, layer, most=FEW_STARTS).refinement.residual
            fit = replace(fit, another=more / fit.training.residual)
        return fit, layer

    def _sum_of_values(self) -> _Attempt:
        """Solve for Σ_h V_h, which is all there is to learn if no two tokens of a sample differ."""
        problem = Problem.of(self.examples, 1, self.seed, self.num_threads, self.visible)
        d = self.examples.dim
        W = np.zeros((1, d, d))
        (values,) = self._phase(
            "values", lambda: (solve_values(self.examples, W, num_threads=self.num_threads),)
        )
        found, needed = problem.judged(values.layer(W))
        fit = self._fit(problem, found, needed)
        return _Attempt(tuple(self.phases), values.layer(W), found.layer, fit)

    def _fit(self, problem: Problem, found: Refinement, needed: float | None) -> Fit:
        return Fit(
            condition=found.condition,
            fitted=problem.fitted(found.layer),
            needed=needed,
            training=self._judge(self.examples, found.layer),
            parameters=found.layer.heads * problem.of_a_head,
        )

    def _judge(self, examples: Examples, layer: Layer) -> Judged:
        return judge(examples, self.examples.whole_layer(layer), self.num_threads)

    def _unseen(self, layer: Layer | None) -> int:
        if layer is None:
            return 0
        return self.visible.unseen(layer.heads, int(self.examples.Y.shape[2]))

    def _whole(self, layer: Layer | None) -> Layer | None:
        if layer is None:
            return None
        layer = self.examples.whole_layer(layer)
        return layer if self.visible.everything else self.visible.part(layer)

    def _whole_covariance(self, covariance: Covariance | None) -> Covariance | None:
        basis = self.examples.basis
        if covariance is None or basis is None:
            return covariance
        return covariance.with_outputs(basis)

    def _phase(self, name: str, work: Callable[[], Parts]) -> Parts:
        begin = time.perf_counter()
        parts = work()
        self.phases.append(Phase(name, time.perf_counter() - begin, parts))
        if self.on_progress is not None and len(self.tried) < 2:
            self.on_progress(len(self.phases))
        return parts

    def _crude(self) -> SumEstimate:
        return crude_sum(self.examples, support=2, num_threads=self.num_threads)

    def _sculpt(self, examples: Examples, estimate: SumEstimate) -> tuple[Facts, Body]:
        facts = certify(examples, estimate, seed=self.seed, num_threads=self.num_threads)
        unknown = self.visible.key_query
        if len(facts) < unknown:
            raise _TooFewFactsError(
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
        """Refine the sum in rounds, each kept only if the certificate decreases; sculpt with it."""
        # With one head every row is exactly an average, of all tokens.
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
        return estimate, facts, body
