"""What a learnt layer, and each phase on the way to it, must show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .examples import Examples
from .result import Certificate, Phase

EXACT = 1e-8
"""Held-out residual of a layer that is learnt, where outputs are exact and in float64."""

IDENTIFIED = 1e-9
"""Condition of the normal equations above which the examples determine the layer."""

GAP = 2.0
"""Eigen-gap below which the heads of a body are a guess."""

NET_RESIDUAL = 0.3
"""Residual above which the best point of the net explains the outputs badly."""

SIGNAL = 0.5
"""Size of the outputs without their noise, relative, below which nothing can be told."""


def certificates(
    phases: Sequence[Phase], examples: Examples, held_out: Examples, residual: float | None
) -> list[Certificate]:
    """Return the certificates in the order in which they are had.

    Parameters
    ----------
    phases : sequence of Phase
        Those that are finished.
    examples, held_out : Examples
        What was learnt from, and what was not.
    residual : float or None
        Of the layer over the held-out examples; None if there is no layer.
    """
    found: list[Certificate] = []
    parts = {phase.name: phase.parts for phase in phases}
    if "second sculpting" in parts:
        (crude,), (refined,) = parts["crude sum"], parts["refined sum"]
        estimate, _, body = parts["second sculpting"]
        # With fewer any row is an average of so many tokens, whatever the heads do.
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
    """Return the residual of a layer that is right, as relative_residual tells it."""
    if examples.noise == 0.0:
        return max(EXACT, 30.0 * float(np.finfo(examples.X.dtype).eps))
    # Of m entries of noise σ the mean square is σ² (1 ± √(2 / m)); the parameters, fitted to
    # noise as well, add to it.
    entries = examples.rows * examples.out_dim
    return examples.noise_floor * float(1.05 + 4.0 / np.sqrt(2.0 * entries))
