"""`learn_layer`: the six phases one after the other, and an honest verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .. import _checks
from ..dataset import Dataset
from ..models import Layer
from ..progress import progress_bar
from .alignment import merge_heads
from .examples import Examples, as_examples
from .facts import Facts, certify
from .net import search_net
from .refinement import OUTPUTS_PER_PARAMETER, Refinement, refine
from .result import Certificate, Learning, LearningInterrupted, Phase
from .sculpting import Body, propose_heads, sculpt
from .sums import (
    POPULATION,
    SumEstimate,
    crude_sum,
    one_hot_sum,
    refine_sum,
    with_support,
)
from .values import Values, relative_residual, solve_values

Result = TypeVar("Result")

FINE = ((0.02, 0.01), (0.005, 0.002), (0.001,))
"""Shares of the rows that the rounds of phase 4 trust."""

EXACT = 1e-8
"""Held-out residual, relative, of a layer that is learnt, where outputs are exact."""

IDENTIFIED = 1e-9
"""Condition of the normal equations above which the examples determine the layer."""

GAP = 2.0
"""Eigen-gap below which the heads of a body are a guess."""

NET_RESIDUAL = 0.3
"""Residual above which the best point of the net explains the outputs badly."""


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
    seed = _checks.integer(seed, "seed")
    training, held_out = examples.split(min(2000, max(1, examples.n // 10)))
    _enough(training, heads)
    phases = 6 + int(refinement)
    with progress_bar(0, phases, "learning", "phase") if progress else nullcontext() as tick:
        learner = _Learner(training, held_out, heads, seed, num_threads, tick)
        try:
            learner.run_phases()
            if refinement and learner.layer is not None:
                learner.refine()
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


def _enough(examples: Examples, heads: int | None) -> None:
    """Check that there is more to learn from than there is to learn."""
    T, d, p = examples.tokens, examples.dim, examples.out_dim
    rows = max(4 * d * d, ((heads or 1) * d * (d + p) + p - 1) // p)
    if examples.rows < rows:
        least = -(-rows // T) * 10 // 9 + 1
        raise ValueError(
            f"X: expected at least {least} examples to learn {heads or 'any'} heads of d = {d}, "
            f"p = {p} from T = {T} tokens each, got {examples.n + min(2000, examples.n // 9)}"
        )


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
    missing: str | None = None

    def run_phases(self) -> None:
        """Run the six phases; without enough facts to go on, stop and tell so in `missing`."""
        crude = self._phase("crude sum", self._crude)
        sculpted = self._phase("sculpting", lambda: self._sculpt(crude, whole=False))
        if sculpted is None:
            return
        refined = self._phase("refined sum", lambda: self._refine_sum(crude, sculpted[1]))
        again = self._phase("second sculpting", lambda: self._sculpt_again(refined))
        if again is None:
            return
        _, facts, body = again
        net = self._phase("net", lambda: search_net(self.examples, body, facts, seed=self.seed))
        W = np.array(net.candidates[0].W)
        values = self._phase("values", lambda: solve_values(self.examples, W))
        self.layer = self.unrefined = values.layer(W)

    def refine(self) -> None:
        """Refine the layer."""
        layer = self.layer
        assert layer is not None
        d, p, T = layer.dim, layer.out_dim, self.examples.tokens
        most = 64 if self.examples.noise > 0.0 else OUTPUTS_PER_PARAMETER
        unknown = layer.heads * d * (d + p)
        count = min(self.examples.n, max(64, -(-most * unknown // (T * p))))
        X, Y = self.examples.first(4 * count).part(slice(None))

        def work() -> Refinement:
            start = layer
            while True:
                found = refine(
                    start,
                    X,
                    Y,
                    examples=min(count, len(X)),
                    seed=self.seed,
                    num_threads=self.num_threads,
                )
                # Heads too many end as copies of others or without values: then they must go.
                start = merge_heads(found.layer)
                if found.condition >= IDENTIFIED or start.heads == found.layer.heads:
                    return found

        self.layer = self._phase("refinement", work).layer
        self.heads = self.layer.heads

    def result(self, missing: str | None = None) -> Learning:
        """Return what was learnt; `missing` tells what stopped it."""
        missing = missing or self.missing
        layer = None if self.layer is None else self.examples.whole_layer(self.layer)
        residual = None if layer is None else relative_residual(self.held_out, layer)
        certificates = self._certificates(residual)
        decisive = [c for c in certificates if c.decisive]
        learnt = missing is None and bool(decisive) and all(c.holds for c in decisive)
        return Learning(
            layer=layer,
            unrefined=None if self.unrefined is None else self.examples.whole_layer(self.unrefined),
            learnt=learnt,
            heads=self.heads,
            sureness=self.sureness,
            held_out=residual,
            certificates=tuple(certificates),
            phases=tuple(self.phases),
            missing=missing,
        )

    def _phase(self, name: str, work: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        found = work()
        estimate = found[-1] if isinstance(found, tuple) else found
        parts = found if isinstance(found, tuple) else (found,)
        self.phases.append(
            Phase(name, time.perf_counter() - begin, parts if estimate is not None else ())
        )
        if self.tick is not None:
            self.tick(len(self.phases))
        return found

    def _crude(self) -> SumEstimate:
        return crude_sum(self.examples, support=2, num_threads=self.num_threads)

    def _sculpt(self, estimate: SumEstimate, *, whole: bool) -> tuple[Facts, Body] | None:
        population = self.examples if whole else self.examples.first(POPULATION)
        facts = certify(population, estimate, seed=self.seed, num_threads=self.num_threads)
        unknown = self.examples.dim**2
        if len(facts) < unknown:
            self.missing = (
                f"{len(facts)} facts could be certified, a key-query matrix has {unknown} unknowns"
            )
            return None
        heads = self.heads
        if heads is None:
            spectrum = sculpt(facts, 1, num_threads=self.num_threads).eigenvalues
            heads, _ = propose_heads(spectrum)
        return facts, sculpt(facts, heads, num_threads=self.num_threads)

    def _refine_sum(self, crude: SumEstimate, body: Body) -> SumEstimate:
        start = one_hot_sum(
            self.examples, body.point, support=crude.support, num_threads=self.num_threads
        )
        if crude.certificate <= start.certificate:
            start = crude
        return refine_sum(self.examples, start, seed=self.seed, num_threads=self.num_threads)

    def _sculpt_again(self, refined: SumEstimate) -> tuple[SumEstimate, Facts, Body] | None:
        """Better the sum in rounds, each kept only if the certificate falls; sculpt with it."""
        # One head explains every row exactly, by as many tokens as there are.
        support = self.examples.tokens if self.heads == 1 else None
        estimate = with_support(self.examples, refined, support, num_threads=self.num_threads)
        for shares in FINE:
            tried = refine_sum(
                self.examples, estimate, shares=shares, seed=self.seed, num_threads=self.num_threads
            )
            if tried.certificate >= estimate.certificate:
                break
            estimate = tried
        found = self._sculpt(estimate, whole=True)
        if found is None:
            return None
        facts, body = found
        if self.heads is None:
            self.heads, self.sureness = propose_heads(body.eigenvalues)
            if self.heads != body.heads:
                body = sculpt(facts, self.heads, num_threads=self.num_threads)
        return estimate, facts, body

    def _certificates(self, residual: float | None) -> list[Certificate]:
        """Return the certificates in the order in which they are had."""
        certificates: list[Certificate] = []
        by_name = {phase.name: phase.parts for phase in self.phases}
        if by_name.get("second sculpting"):
            estimate, _, body = by_name["second sculpting"]
            spare = self.examples.out_dim - (estimate.support - 1)
            certificates.append(Certificate("outputs a row can spare", spare, 1, above=True))
            crude = by_name["crude sum"][0]
            refined = by_name["refined sum"][0]
            certificates.append(
                Certificate("sum of values", refined.certificate, crude.certificate)
            )
            certificates.append(Certificate("eigen-gap", body.gap, GAP, above=True))
        if "net" in by_name:
            net = by_name["net"][0]
            certificates.append(
                Certificate("net residual", net.candidates[0].values.residual, NET_RESIDUAL)
            )
        if residual is not None:
            last: Values | Refinement = self.phases[-1].parts[0]
            certificates.append(
                Certificate("identified", last.condition, IDENTIFIED, above=True, decisive=True)
            )
            certificates.append(
                Certificate(
                    "held-out residual",
                    residual,
                    self._held_out_limit(),
                    decisive=True,
                )
            )
        return certificates

    def _held_out_limit(self) -> float:
        """Return the residual of a layer that is right, as relative_residual tells it."""
        examples = self.held_out
        if examples.noise == 0.0:
            return max(EXACT, 30.0 * float(np.finfo(examples.X.dtype).eps))
        # Of m entries of noise σ the mean square is σ² (1 ± √(2 / m)); the parameters, fitted to
        # noise as well, add to it.
        entries = examples.rows * examples.out_dim
        return examples.noise_floor * float(1.05 + 4.0 / np.sqrt(2.0 * entries))
