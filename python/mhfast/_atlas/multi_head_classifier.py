"""The training guarantee of a multi-head classifier, beside the run that it is about."""

from __future__ import annotations

import numpy as np

import mhfast as mh

from ..figures import BLUE, ORANGE
from .experiment import Claim, Experiment, Outcome
from .figure import GRAY, label, panels


def run(quick: bool) -> Outcome:
    """Train with the step size of the guarantee, and compare losses with the bound at each step."""
    heads, steps, n = (300, 400, 8) if quick else (300, 1000, 20)
    data = mh.data.tokenized_mixture(n, 4, 5, relevant_fraction=0.5, contexts=1, norm=40.0, seed=0)
    start = mh.Classifier.random_step(data, heads, seed=0, balanced=True)
    end = mh.theory.best_bound(data, steps, heads=heads)
    at = np.unique(np.geomspace(1, steps, 8 if quick else 24).astype(int))
    bounds = [mh.theory.best_bound(data, int(k), heads=heads, lr=end.lr) for k in at]
    bound = np.array([one.bound if one.applies else np.nan for one in bounds])
    every = max(steps // 100, 1)
    trained = mh.train(
        start,
        data,
        steps=steps,
        optimizer=mh.GradientDescent(end.lr),
        test=data.sample(1000, seed=1),
        record={"loss": 1, "test_loss": steps, "test_accuracy": steps, "W": every, "U": every},
    )
    mean = np.cumsum(trained.history["loss"][1:]) / np.arange(1, steps + 1)
    without = [
        float(mh.value_and_grad(mh.Classifier(np.zeros_like(W), U), data)[0])
        for W, U in zip(trained.history["W"], trained.history["U"], strict=True)
    ]
    figure, (ax,) = panels(
        f"{heads} heads, {n} samples: the loss is guaranteed to fall, and attention does it",
        columns=1, height=4.0,
    )  # fmt: skip
    ax.plot(trained.steps["W"][1:], without[1:], ":", color="black", label="loss with W = 0")
    ax.plot(at, bound, "-.", color=ORANGE, label="guarantee for the mean of steps 1 to k")
    ax.plot(np.arange(1, steps + 1), mean, color=BLUE, label="mean loss of steps 1 to k")
    ax.axhline(np.log(2), color=GRAY, linewidth=0.8)
    label(ax, "step k", "training loss", xscale="log", yscale="log")
    covered = np.isfinite(bound)
    return Outcome(
        ("steps", "guarantee", "mean loss", "last loss", "loss with W = 0", "test accuracy"),
        [
            (f"{steps} of size {end.lr:.3g}", bound[-1], mean[-1], trained.history["loss"][-1],
             without[-1], trained.history["test_accuracy"][-1])
        ],
        [
            Claim("guarantee after all steps", bound[-1], float(np.log(2)), at_least=False),
            Claim("largest ratio of measured mean loss to guarantee",
                  float((mean[at - 1] / bound)[covered].max()), 1.0, at_least=False),
            Claim("loss of the trained classifier with W = 0", without[-1], 0.99 * np.log(2)),
            Claim("test accuracy", trained.history["test_accuracy"][-1], 0.99),
        ],
        figure,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Gradient descent trains a multi-head classifier, with a guarantee",
    paper="Deora, Ghaderi, Taheri, Thrampoulidis, On the Optimization and Generalization of "
    "Multi-head Attention, 2023",
    says="With enough heads, realizable data and a good start, gradient descent on all weights "
    "drives the logistic loss down at a rate that a bound states, and generalizes. The bound run "
    "here is the per-head form that docs/theory.md proves, not the paper's own.",
    setting="Noiseless tokenized mixture of long tokens (norm 40), T = 4, d = 5; 300 heads from "
    "one random first step with balanced signs; the largest step size that the guarantee allows. "
    "The generator's options are chosen such that the guarantee says something.",
    run=run,
)
