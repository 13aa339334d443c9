"""The certificates of a learnt layer and of each phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..models import Layer
from .agreement import LIMIT, LOST, TOLD, agreement
from .examples import Examples, Float64
from .facts import Facts
from .result import Certificate, Phase

EXACT = 1e-8
"""Relative residual of a layer that is learnt, where outputs are exact and in float64."""

CLEARLY_IDENTIFIED = 1e-9
"""Condition of the normal equations above which no head can be superfluous."""

IDENTIFIED = 1e-13
"""Smallest condition that is distinguishable from rounding, of some 1e-15."""

DETERMINED = 1e-3
"""Error, in parts of the outputs, that the residual may leave in the direction of parameters that
the outputs depend on least."""

DETERMINED_IN_NOISE = 0.5
"""The same, standard deviation, where the residual is noise."""

MISSING = 0.5
"""Share of the residual that another head leaves, below which a head is missing."""

GAP = 2.0
"""Eigen-gap below which the number of heads of a body is a guess."""

NET_RESIDUAL = 0.3
"""Largest residual with which the best point of the net explains the outputs."""

SIGNAL = 0.5
"""Least relative size of the outputs without their noise from which a layer can be learnt."""

HIDDEN = 0.2
"""Error of a layer, relative to the outputs without noise, that noise may hide at most."""

DEVIATIONS = 5.0
"""Standard deviations by which the mean square of a residual of noise may be off."""

MOST_FITTED = 0.1
"""Share of the noise's mean square that fitting the parameters to noise may account for."""

CHANCE = 1e-6
"""Probability that the worst sample of normal noise exceeds its limit before that is doubled."""


@dataclass(frozen=True)
class Judged:
    """The residuals of a layer on some examples.

    Attributes
    ----------
    residual : float
        ‖F(X) - Y‖ / ‖Y‖.
    worst : float
        Over the samples the largest ‖F(X_i) - Y_i‖ / max(‖Y_i‖, the median of all ‖Y_i‖ > 0).
    worst_noise : float
        Over the samples the largest ‖F(X_i) - Y_i‖², per entry, in units of the noise; 0 if none.
    """

    residual: float
    worst: float
    worst_noise: float


@dataclass(frozen=True)
class Fit:
    """What is known of a layer besides the results of its phases.

    Attributes
    ----------
    condition : float
        Of the normal equations of all its parameters.
    fitted : float
        Parameters per output number that they were fitted to.
    needed : float or None
        How much worse the best layer with one head less is, relative to what chance explains; None
        where outputs are exact or there is one head.
    training : Judged
        Its residuals on the examples that the phases saw.
    another : float or None
        Residual of a layer of one head more over that of this one; None where that is not tried.
    parameters : int
        Of the layer.
    """

    condition: float
    fitted: float
    needed: float | None
    training: Judged
    another: float | None = None
    parameters: int = 1


def judge(examples: Examples, layer: Layer, num_threads: int | None = None) -> Judged:
    """Return the residuals of a layer of all outputs on the examples."""
    left, size = (
        np.sqrt(np.concatenate(squares))
        for squares in zip(
            *(
                (
                    np.sum((layer(X, num_threads=num_threads) - Y) ** 2, axis=(1, 2)),
                    np.sum(Y**2, axis=(1, 2)),
                )
                for _, X, Y in examples.portions(whole=True)
            ),
            strict=True,
        )
    )
    typical = float(np.median(size[size > 0.0]))
    entries = examples.tokens * examples.Y.shape[2]
    return Judged(
        residual=float(np.linalg.norm(left) / np.linalg.norm(size)),
        worst=float(np.max(left / np.maximum(size, typical))),
        worst_noise=float(left.max()) ** 2 / (entries * examples.noise**2)
        if examples.noise > 0.0
        else 0.0,
    )


def exact_limit(examples: Examples) -> float:
    """Return the largest relative residual of a layer that is right, of outputs without noise."""
    return max(EXACT, 30.0 * float(np.finfo(examples.X.dtype).eps))


def fits(examples: Examples, fit: Fit, also: tuple[Examples, Judged] | None = None) -> bool:
    """Return whether a layer is determined by examples and explains them, and others `also`."""
    found = [_identified(examples, fit), *_residuals("training", examples, fit.training, fit)]
    if also is not None:
        found += _residuals("other", *also, fit)
    return all(c.holds for c in found)


def certificates(
    phases: Sequence[Phase],
    examples: Examples,
    held_out: Examples,
    fit: Fit | None,
    judged: Judged | None,
    layer: Layer | None = None,
) -> list[Certificate]:
    """Return the certificates in the order in which they are obtained.

    Parameters
    ----------
    phases : sequence of Phase
        The finished phases.
    examples, held_out : Examples
        Those learnt from, and those held out.
    fit : Fit or None
        Of the layer; None if there is no layer, or an interruption left it unjudged.
    judged : Judged or None
        What the layer leaves of `held_out`.
    layer : Layer or None
        The layer; None means that the best candidate of the net is tested against the facts.
    """
    found = _of_phases({phase.name: phase for phase in phases}, examples, layer)
    if fit is None:
        return found
    if held_out.noise > 0.0:
        noise = _relative_noise(held_out)
        beyond = float(np.sqrt(max(0.0, 1.0 - noise**2)))
        found.append(Certificate("outputs beyond noise", beyond, SIGNAL, True, decisive=True))
        hidden = noise * float(np.sqrt(_allowance(held_out, fit))) / max(beyond, 1e-300)
        found.append(Certificate("error that noise may hide", hidden, HIDDEN, decisive=True))
    if fit.needed is not None:
        found.append(Certificate("every head needed", fit.needed, 1.0, True, decisive=True))
    if fit.another is not None:
        found.append(Certificate("no head missing", fit.another, MISSING, above=True))
    found.append(_identified(examples, fit))
    found += _residuals("training", examples, fit.training, fit)
    if judged is not None:
        found += _residuals("held-out", held_out, judged, fit)
    return found


def _of_phases(
    phases: dict[str, Phase], examples: Examples, layer: Layer | None
) -> list[Certificate]:
    found: list[Certificate] = []
    if "second sculpting" in phases:
        (crude,), (refined,) = phases["crude sum"].parts, phases["refined sum"].parts
        estimate, _, body = phases["second sculpting"].parts
        # With fewer, any row is an average of that many tokens, whatever the heads do.
        spare = examples.out_dim - (estimate.support - 1)
        found += [
            Certificate("outputs a row can spare", spare, 1, above=True),
            Certificate("sum of values", refined.certificate, crude.certificate),
            Certificate("eigen-gap", body.gap, GAP, above=True),
        ]
    if "net" in phases:
        (net,) = phases["net"].parts
        best = net.candidates[0]
        _, facts, _ = phases["second sculpting"].parts
        found += [
            _facts(facts, best.W if layer is None else np.asarray(layer.W)),
            Certificate("net residual", best.values.residual, NET_RESIDUAL),
        ]
    return found


def _facts(facts: Facts, W: Float64) -> Certificate:
    test = agreement(facts, W)
    blind = "" if test.resolution <= TOLD else f"cannot tell errors below {test.resolution:.2g}"
    limit = LIMIT if test.resolution <= LOST else float("inf")
    return Certificate("facts at the heads", test.ratio, limit, blind=blind)


def _identified(examples: Examples, fit: Fit) -> Certificate:
    """Return the certificate of the condition, relative to what the examples can tell.

    In units in which the outputs, and what each parameter contributes, are of size one, a residual
    r allows errors r / √λ in the direction of eigenvalue λ; if it is noise in M numbers their
    standard deviation is r / √(M λ).
    """
    residual, allowed = fit.training.residual, DETERMINED
    if examples.noise > 0.0:
        residual *= float(np.sqrt(fit.fitted / fit.parameters))
        allowed = DETERMINED_IN_NOISE
    limit = max(IDENTIFIED, min((residual / allowed) ** 2, 1.0))
    return Certificate("identified", fit.condition, limit, above=True, decisive=True)


def _residuals(name: str, examples: Examples, judged: Judged, fit: Fit) -> list[Certificate]:
    """Return the certificates of the residual of all examples, and of the worst one.

    Over m entries of noise σ the mean square is σ² (1 ± √(2 / m)), normal noise; P parameters
    fitted to M outputs add about P/M of it elsewhere, and take as much away where they were fitted.
    Of one sample of k entries it is with probability 1 - q at most 1 + 2 √(x/k) + 2 x/k, x =
    log(1/q) (Laurent, Massart, "Adaptive estimation of a quadratic functional by model selection",
    Annals of Statistics 28, 2000, lemma 1); the limit is twice that, so that noise may have heavier
    tails.
    """
    if examples.noise == 0.0:
        limit = exact_limit(examples)
        return [
            Certificate(f"{name} residual", judged.residual, limit, decisive=True),
            Certificate(f"worst {name} sample", judged.worst, limit, decisive=True),
        ]
    noise, allowed = _relative_noise(examples), _allowance(examples, fit)
    x = np.log(examples.n / CHANCE) / (examples.tokens * examples.Y.shape[2])
    return [
        Certificate(
            f"{name} residual",
            judged.residual,
            noise * float(np.sqrt(1.0 + allowed)),
            least=noise * float(np.sqrt(max(0.0, 1.0 - allowed))),
            decisive=True,
        ),
        Certificate(
            f"worst {name} sample",
            judged.worst_noise,
            2.0 * float(1.0 + 2.0 * np.sqrt(x) + 2.0 * x),
            decisive=True,
        ),
    ]


def _relative_noise(examples: Examples) -> float:
    """Return the noise in all outputs, relative to their size."""
    return examples.noise * float(np.sqrt(examples.Y.shape[2])) / examples.scale


def _allowance(examples: Examples, fit: Fit) -> float:
    """Return by what share the mean square of a residual may differ from that of the noise."""
    entries = examples.rows * examples.Y.shape[2]
    return min(fit.fitted, MOST_FITTED) + DEVIATIONS * float(np.sqrt(2.0 / entries))
