"""The signs of heads, which inputs of two tokens do not determine.

tanh is odd: where both tokens stand equally often, (a_h, c_h) and (-a_h, -c_h) make the same y.
With T = 2 that is always so, and the sign shows in Σ_h c_h = δ S alone.  With T > 2 it shows in y.
"""

from __future__ import annotations

import itertools

import numpy as np

from ..examples import Float64

TOLD_APART = 1e-6
NOISY_SIGNS = 0.1
"""Relative misfits of a choice of signs that count as zero, without and with noise."""

MOST_SIGNS = 14
"""Largest number of heads for which all choices of signs are tried."""


def signs(
    C: Float64, target: Float64, rounding: float, *, noisy: bool
) -> tuple[Float64 | None, str]:
    """Choose signs of C (H, p) by which its rows add up to the target δ S.

    Returns
    -------
    tuple of (array (H,), str) or of (None, str)
        The signs; or None and the reason why they cannot be determined.
    """
    if len(C) > MOST_SIGNS:
        choices = np.sign(np.linalg.lstsq(C.T, target, rcond=None)[0])[None]
    else:
        choices = np.array(list(itertools.product((1.0, -1.0), repeat=len(C))))
    misfits = np.linalg.norm(choices @ C - target, axis=1) / (float(np.linalg.norm(C)) + 1e-300)
    order = np.argsort(misfits, kind="stable")
    limit = NOISY_SIGNS if noisy else max(TOLD_APART, 1e3 * rounding)
    if misfits[order[0]] > limit:
        hidden = ", or hidden by noise" if noisy else ""
        return None, (
            "with T = 2 the signs of the heads show in the sum of the values only, and no signs "
            f"give it: there are heads of W = 0 besides{hidden}"
        )
    if len(order) > 1 and misfits[order[1]] <= max(limit, 3.0 * misfits[order[0]]):
        return None, (
            "with T = 2 (W, V) and (-W, -V) of some heads give the same outputs, as their V add up "
            "to 0"
        )
    return choices[order[0]], ""
