"""The result of `learn_layer`: a layer, how it was found, and its certificates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models import Layer
from .covariance import Covariance
from .estimate import Estimate
from .facts import Facts
from .figures import draw
from .net import Net
from .refinement import Refinement, Restarts
from .sculpting import Body
from .sums import SumEstimate
from .values import Values

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Certificate:
    """A number that is required to be at least or at most a limit.

    Attributes
    ----------
    name : str
    value, limit : float
    above : bool
        Whether the value must be at least the limit; else at most.
    decisive : bool
        Whether a layer can only be learnt if this holds.  The others show whether the phases
        succeeded.
    least : float or None
        What the value must be at least, where it must not be too small either.
    blind : str
        What a value within the limit does not exclude, if that is too much; else empty.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 1, seed=0)
    >>> result = mh.learn_layer(data, heads=1)
    >>> certificate = result.certificates[0]
    >>> certificate.name, certificate.value > certificate.limit, certificate.holds
    ('outputs a row can spare', True, True)
    """

    name: str
    value: float
    limit: float
    above: bool = False
    decisive: bool = False
    least: float | None = None
    blind: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value meets the limit; NaN never does."""
        if self.above:
            return self.value >= self.limit
        return self.value <= self.limit and (self.least is None or self.value >= self.least)

    def __str__(self) -> str:
        wanted = f"{'>=' if self.above else '<='} {self.limit:.2g}"
        value = f"{self.value:.2g}"
        if self.least is not None:
            wanted, value = f"{self.least:.3g} to {self.limit:.3g}", f"{self.value:.3g}"
        verdict = (self.blind or "holds") if self.holds else "fails"
        return f"{self.name} {value}, wanted {wanted}: {verdict}"


@dataclass(frozen=True, eq=False)
class Phase:
    """A finished phase.

    Attributes
    ----------
    name : str
    seconds : float
    parts : tuple
        Its results: a SumEstimate, Facts and Body, a Net, Values, a Refinement, Restarts or an
        Estimate.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 1, seed=0)
    >>> result = mh.learn_layer(data, heads=1)
    >>> phase = result["crude sum"]
    >>> phase.name, sorted(phase.numbers), phase.seconds > 0
    ('crude sum', ['certificate', 'level', 'tokens a row'], True)
    """

    name: str
    seconds: float
    parts: tuple[Any, ...]

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that describe the result of the phase."""
        numbers: dict[str, float] = {}
        for part in self.parts:
            numbers |= _numbers(part)
        return numbers

    def __str__(self) -> str:
        text = ", ".join(f"{name} {value:.3g}" for name, value in self.numbers.items())
        return f"{self.name:17s} {self.seconds:7.2f} s   {text or 'nothing found'}"


@dataclass(frozen=True, eq=False, repr=False)
class Learning:
    """The result of `mhfast.learn_layer`.

    Attributes
    ----------
    layer : Layer or None
        The best layer that was found, learnt or not; None if the phases ended earlier.
    unrefined : Layer or None
        The result of the six phases, before any refinement.
    learnt : bool
        Whether the layer is certified: it is determined by the examples and predicts held-out ones.
    heads : int or None
        H, as given or estimated; smaller if refinement removed superfluous heads.
    asked : int or None
        H as given; None if it was to be found.
    sureness : float or None
        Of the H that the spectrum proposes where none is given: its step there over the largest
        later one.
    tried : tuple of int
        The numbers of heads that were tried.
    held_out : float or None
        ‖F(X) - Y‖ / ‖Y‖ of the layer on held-out examples.
    unseen : int
        How many of the H d (d + p) numbers of the layer such tokens cannot see: the layer is its
        `mhfast.learner.visible_part`.
    certificates : tuple of Certificate
    phases : tuple of Phase
    missing : str or None
        What ended the phases early.
    covariance : Covariance or None
        Of the numbers of the layer, where outputs are noisy and the layer explains them.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 1, seed=0)
    >>> result = mh.learn_layer(data, heads=1)
    >>> result.verdict.partition(":")[0]
    'learnt, 1 head'
    >>> [phase.name for phase in result.phases][:4]
    ['crude sum', 'sculpting', 'refined sum', 'second sculpting']
    >>> result["second sculpting"].numbers["gap"] > 2
    True
    """

    layer: Layer | Any
    unrefined: Layer | Any
    learnt: bool
    heads: int | None
    asked: int | None
    sureness: float | None
    tried: tuple[int, ...]
    held_out: float | None
    unseen: int
    certificates: tuple[Certificate, ...]
    phases: tuple[Phase, ...]
    missing: str | None
    covariance: Covariance | None = None

    def __getitem__(self, name: str) -> Phase:
        """Return the phase of this name."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(name)

    @property
    def verdict(self) -> str:
        """*Learnt* with what certifies it, or *not learnt* with what is missing."""
        if self.learnt:
            text = ", ".join(f"{c.name} {c.value:.2g}" for c in self.certificates if c.decisive)
            doubts = [c for c in self.certificates if not c.holds]
            if doubts:
                text += "; by refinement, though " + ", ".join(str(c) for c in doubts)
            return f"learnt, {self._heads}: {text}{self._unseen}"
        failing = [str(c) for c in self.certificates if not c.holds]
        return "not learnt: " + "; ".join(([self.missing] if self.missing else []) + failing)

    @property
    def _heads(self) -> str:
        text = f"{self.heads} heads" if self.heads != 1 else "1 head"
        too_many = self.asked is not None and self.heads is not None and self.heads < self.asked
        return f"{text}, fewer than the {self.asked} requested" if too_many else text

    @property
    def _unseen(self) -> str:
        if not self.unseen:
            return ""
        if not np.any(self.layer.W):
            return "; of W = 0 and V, only the sum of all V_h can be seen by such tokens"
        return f"; W and V projected on what such tokens can see, without {self.unseen} numbers"

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.asked is None and self.tried:
            tried, step = ", ".join(map(str, self.tried)), self.sureness
            text = "" if step is None else f", step {step:.3g} of the spectrum"
            lines.append(f"{self.heads} heads, of {tried} tried{text}")
        lines += [str(phase) for phase in self.phases]
        lines += [str(certificate) for certificate in self.certificates]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Learning: {self.verdict}>"

    def plot(self) -> Figure:
        """Draw the phases: spectrum and gap, certificates, candidates, residual by phase.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            matplotlib is not installed.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.boolean_layer(500, 2, 3, 1, seed=0)
        >>> result = mh.learn_layer(data, heads=1)
        >>> figure = result.plot()
        >>> figure.axes[0].get_title()
        'spectrum of the facts'
        """
        return draw(self)


class LearningInterrupted(KeyboardInterrupt):
    """Learning was interrupted by Ctrl-C.

    Attributes
    ----------
    learning : Learning
        The result with the finished phases.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.boolean_layer(500, 2, 3, 1, seed=0)
    >>> try:
    ...     result = mh.learn_layer(data, heads=1)
    ... except mh.learner.LearningInterrupted as interrupted:  # by Ctrl-C
    ...     result = interrupted.result
    >>> result.learnt
    True
    """

    def __init__(self, learning: Learning) -> None:
        super().__init__(learning)
        self.learning = learning

    def __str__(self) -> str:
        done = len(self.learning.phases)
        return f"learning was interrupted after {done} phases; .learning holds them"


def _numbers(part: object) -> dict[str, float]:
    if isinstance(part, SumEstimate):
        return {"certificate": part.certificate, "level": part.level, "tokens a row": part.support}
    if isinstance(part, Facts):
        return {
            "rows": part.certified_rows,
            "facts": len(part),
            "of": part.seen,
            "tolerance": float(part.tolerance[len(part) // 2]),
        }
    if isinstance(part, Body):
        return {"heads": part.heads, "gap": part.gap, "misfit": part.misfit}
    if isinstance(part, Net):
        best = part.candidates[0]
        return {
            "tried": part.tried,
            "residual": best.values.residual,
            "stretch": float(best.stretch.max()),
            "least": part.least_stretch,
        }
    if isinstance(part, Values):
        return {"residual": part.residual, "condition": part.condition}
    if isinstance(part, Restarts):
        return {"starts": part.starts, "residual": part.refinement.residual}
    if isinstance(part, Estimate):
        return {"residual": part.residual, "steps": part.steps, "condition": part.condition}
    if isinstance(part, Refinement):
        return {"residual": part.residual, "steps": part.steps, "condition": part.condition}
    return {}
