"""Normalized and Polyak steps reach loss and direction sooner than gradient descent."""

from __future__ import annotations

import numpy as np

import mhfast as mh

from .experiment import Claim, Experiment, Outcome
from .figure import COLORS, band, label, panels

DIM = 10
RULES = {
    "gradient descent": mh.GradientDescent(1.0),
    "normalized": mh.NormalizedGradientDescent(0.1),
    "Polyak": mh.PolyakStep(max_lr=1e6),
}


def run(quick: bool) -> Outcome:
    """Train W and readout for the loss, and W alone for its direction."""
    instances, steps = (10, 1000) if quick else (100, 2000)
    data = mh.data.sphere_tokens(6, 8, DIM, seed=range(instances))
    zero, readout = np.zeros((1, DIM, DIM)), data.truth["readout"][:, None, None]
    every = steps // 100
    losses, cosines, rows = {}, {}, []
    for name, rule in RULES.items():
        both = mh.train(
            mh.Classifier(zero, 0.1 * readout), data, steps=steps, optimizer=rule,
            record={"loss": every},
        )  # fmt: skip
        losses[name] = both.history["loss"]
    for name in ("gradient descent", "normalized"):
        alone = mh.train(
            mh.Classifier(zero, readout), data, steps=steps, optimizer=RULES[name], wrt="W",
            record={"W": every},
        )  # fmt: skip
        chosen = alone.model.attention(data)[:, :, 0, 0].argmax(axis=-1)
        cosines[name] = mh.theory.alignment(alone, mh.theory.token_svm(data, chosen))[..., 0]
    figure, (left, right) = panels("Steps that do not shrink with the gradient arrive sooner")
    at = np.arange(0, steps + 1, every)
    for (name, loss), color in zip(losses.items(), COLORS, strict=False):
        left.plot(at[1:], np.median(loss, axis=0)[1:], color=color, label=name)
        cosine = cosines.get(name)
        end = np.nan if cosine is None else float(cosine[:, -1].mean())
        rows.append((name, float(np.median(loss[:, -1])), "" if np.isnan(end) else end))
        if cosine is not None:
            band(right, at[1:], cosine[:, 1:], color, name)
    label(left, "step", "median training loss", "W and readout", xscale="log", yscale="log",
          ylim=(1e-16, 1))  # fmt: skip
    label(right, "step", "cosine of W", "W alone, to its separation", xscale="log", ylim=(0, 1.03))
    slow, fast = (
        np.median(losses["gradient descent"][:, -1]),
        np.median(losses["normalized"][:, -1]),
    )
    return Outcome(
        ("step", "median loss, W and readout", "mean cosine, W alone"),
        rows,
        [
            Claim("normalized steps: mean cosine", cosines["normalized"][:, -1].mean(), 0.99),
            Claim("mean cosine of normalized steps above that of gradient descent",
                  (cosines["normalized"] - cosines["gradient descent"])[:, -1].mean(), 0.05),
            Claim("normalized steps: loss relative to that of gradient descent", fast / slow, 1e-6,
                  at_least=False),
            Claim("Polyak steps: loss relative to that of gradient descent",
                  np.median(losses["Polyak"][:, -1]) / slow, 1e-3, at_least=False),
        ],
        figure,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Normalized and Polyak steps are faster than gradient descent",
    paper="Vasudeva, Deora, Thrampoulidis, Implicit Bias and Fast Convergence Rates for "
    "Self-attention, 2024",
    says="Normalized gradient descent and Polyak steps drive the loss down, and W towards its "
    "max-margin separation, faster than gradient descent with a constant step. Recalled from the "
    "abstract.",
    setting="n = 6 samples of T = 8 tokens on the unit sphere of 10 dimensions with a query of "
    "their own. For the loss, W and readout are trained from W = 0 and a tenth of the readout; for "
    "the direction W alone, with the readout fixed. Constant steps of 1, normalized steps of .1, "
    "Polyak steps with target 0 (not for W alone, whose least loss is above 0). Sizes and steps "
    "are our choice.",
    run=run,
)
