"""The certificates of a learnt layer and of each phase."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .examples import Examples
from .result import Certificate, Phase

EXACT = 1e-8
"""Largest held-out residual of a learnt layer, for exact float64 outputs."""

IDENTIFIED = 1e-9
"""Least condition of the normal equations with which the examples determine the layer."""

GAP = 2.0
"""Eigen-gap below which the number of heads of a body is a guess."""

NET_RESIDUAL = 0.3
"""Largest residual with which the best point of the net explains the outputs."""

SIGNAL = 0.5
"""Least relative size of the outputs without their noise from which a layer can be learnt."""


def certificates(
    phases: Sequence[Phase], examples: Examples, held_out: Examples, residual: float | None
) -> list[Certificate]:
    """Return the certificates in the order in which they are obtained.

    Parameters
    ----------
    phases : sequence of Phase
        The finished phases.
    examples, held_out : Examples
        The examples used for learning, and the others.
    residual : float or None
        That of the layer on the held-out examples; None if there is no layer.
    """
    found: list[Certificate] = []
    parts = {phase.name: phase.parts for phase in phases}
    if "second sculpting" in parts:
        (crude,), (refined,) = parts["crude sum"], parts["refined sum"]
        estimate, _, body = parts["second sculpting"]
        # With fewer outputs any row is an average of that many tokens, whatever the heads do.
        spare = examples.out_dim - (estimate.support - 1)
        found += [
            Certificate("outputs a row can spare", spare, 1, above=True),
            Certificate("sum of values", refined.certificate, crude.certificate),
            Certificate("eigen-gap", body.gap, GAP, above=True),
        ]
    if "net" in parts:
        (net,) = parts["net"]
        best = net.candidates[0]
        found += [
            Certificate("facts at the heads", float(best.stretch.max()), net.allowed_stretch),
            Certificate("net residual", best.values.residual, NET_RESIDUAL),
        ]
    if residual is not None:
        condition = phases[-1].parts[0].condition
        limit = _held_out_limit(held_out)
        if held_out.noise > 0.0:
            beyond = float(np.sqrt(max(0.0, 1.0 - held_out.noise_floor**2)))
            found.append(Certificate("outputs beyond noise", beyond, SIGNAL, True, decisive=True))
        found += [
            Certificate("identified", condition, IDENTIFIED, above=True, decisive=True),
            Certificate("held-out residual", residual, limit, decisive=True),
        ]
    return found


def _held_out_limit(examples: Examples) -> float:
    """Return the value of relative_residual that a correct layer has."""
    if examples.noise == 0.0:
        return max(EXACT, 30.0 * float(np.finfo(examples.X.dtype).eps))
    # Of m entries of noise σ the mean square is σ² (1 ± √(2 / m)); the parameters, fitted to
    # noise as well, add to it.
    entries = examples.rows * examples.out_dim
    return examples.noise_floor * float(1.05 + 4.0 / np.sqrt(2.0 * entries))
