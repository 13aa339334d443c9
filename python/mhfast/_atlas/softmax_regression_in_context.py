"""Several softmax heads do one step of gradient descent in context; one head cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps

import mhfast as mh

from .experiment import Claim, Experiment, Outcome
from .figure import label, panels

FEATURES, PAIRS = 4, 31


def one_step(pairs: Any) -> Any:
    """Test loss of ⟨x, w⟩ with w = size/N Σ y x, the best first step from zero, for N pairs."""
    return FEATURES * (FEATURES + 1) / (pairs + FEATURES + 1)


def run(quick: bool) -> Outcome:
    """Train layers of 1, 2, 4, 8 heads on prompts of linear tasks; test on other lengths."""
    starts, samples, steps = (2, 500, 300) if quick else (5, 4000, 500)
    heads = (1, 4) if quick else (1, 2, 4, 8)
    data = mh.data.icl_regression(samples, PAIRS + 1, FEATURES + 1, seed=0, dtype="float32")
    test = data.sample(samples, seed=0)
    lengths = np.array([4, 8, 16, 31, 64, 128])
    longer = [data.sample(samples, seed=1, tokens=n + 1) for n in lengths]
    losses, reach = {}, {}
    for count in heads:
        start = mh.Layer.gaussian(
            count, data.dim, 1, std=0.1, seed=0, runs=starts, query=-1, dtype="float32"
        )
        trained = mh.train(
            start,
            data,
            steps=steps,
            optimizer=mh.Adam(0.02),
            loss="squared",
            test=test,
            record={"test_loss": 10},
        )
        losses[count] = trained.history["test_loss"]
        reach[count] = np.array([_mean_square(trained.model, one) for one in longer])
    figure, (left, right) = panels(
        "Two or more softmax heads learn a step of gradient descent in context", columns=2
    )
    at = trained.steps["test_loss"]
    for k, count in enumerate(heads):
        color = colormaps["viridis"](0.9 * k / (len(heads) - 1))
        name = f"{count} heads" if count > 1 else "1 head"
        for ax, x, y in ((left, at, losses[count].T), (right, lengths, reach[count])):
            ax.fill_between(x, y.min(axis=1), y.max(axis=1), color=color, alpha=0.18, linewidth=0)
            ax.plot(x, y.mean(axis=1), color=color, label=name)
    left.axhline(one_step(PAIRS), color="gray", linestyle="--")
    right.plot(lengths, one_step(lengths), "--", color="gray", label="one gradient step")
    label(left, "step of Adam", "test loss", f"prompts of {PAIRS} pairs", yscale="log")
    label(right, "pairs in the prompt", "test loss", "other lengths", xscale="log", yscale="log")
    right.set_xticks(lengths, lengths)
    right.minorticks_off()
    final = {count: losses[count][:, -1] for count in heads}
    best = one_step(PAIRS)
    many = heads[-1]
    return Outcome(
        ("heads", "test loss, mean of starts", "best start", "relative to one gradient step"),
        [(str(n), f.mean(), f.min(), f.min() / best) for n, f in final.items()],
        [
            Claim("one head: best test loss relative to one gradient step",
                  final[1].min() / best, 1.4),
            Claim(f"{many} heads: worst test loss relative to one gradient step",
                  final[many].max() / best, 2.1 if quick else 1.3, at_least=False),
        ],
        figure,
    )  # fmt: skip


def _mean_square(model: mh.Layer, data: mh.Dataset) -> npt.NDArray[Any]:
    """Return the test loss of every start."""
    error: npt.NDArray[Any] = ((model(data) - data.y) ** 2).mean(axis=(1, 2, 3))
    return error


EXPERIMENT = Experiment(
    title="Regression in context needs more than one softmax head",
    paper="Chen, Sheen, Wang, Yang, Training Dynamics of Multi-Head Softmax Attention for "
    "In-Context Learning, 2024; Cui, Ren, He, Tang, Superiority of Multi-Head Attention in "
    "In-Context Linear Regression, 2024",
    says="Multi-head softmax attention learns linear regression in context with a smaller loss "
    "than one head, close to one step of gradient descent. Recalled from the abstracts.",
    setting="Prompts of 31 pairs of a linear task in four dimensions and a question, read by a "
    "layer at the last token; Adam (.02) on the squared loss, all prompts in each step, in "
    "float32; bands from the smallest to the largest start. Dashed: one step of gradient descent "
    "with the best step size, in closed form. Sizes and Adam are our choice.",
    run=run,
)
