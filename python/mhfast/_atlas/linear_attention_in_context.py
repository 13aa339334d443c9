"""Linear attention learns preconditioned gradient descent in context."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import mhfast as mh

from ..figures import BLUE, ORANGE
from .experiment import Claim, Experiment, Outcome
from .figure import label, panels

VARIANCES = np.array([2.0, 1.0, 0.5, 0.25])
PAIRS = 15
GAMMA = (1 + 1 / PAIRS) * VARIANCES + VARIANCES.sum() / PAIRS
"""The diagonal of Γ."""


def run(quick: bool) -> Outcome:
    """Train linear and softmax layers of one head on prompts of linear tasks."""
    samples, steps = (2000, 400) if quick else (10000, 1000)
    d = len(VARIANCES)
    data = mh.data.icl_regression(samples, PAIRS + 1, d + 1, covariance=VARIANCES, seed=0)
    test = data.sample(samples, seed=1)
    runs = {}
    for name in ("linear", "softmax"):
        # Divides by the pairs of the prompt, as the paper does, not by these and the question.
        scale = (PAIRS + 1) / PAIRS if name == "linear" else 1.0
        start = mh.Layer.gaussian(
            1, d + 1, 1, std=0.05, seed=1, query=-1, scale=scale, attention=name
        )
        runs[name] = mh.train(
            start,
            data,
            steps=steps,
            optimizer=mh.Adam(0.01),
            loss="squared",
            test=test,
            record={"test_loss": 10},
        )
    best = loss_of_best(test)
    learnt = learnt_matrix(runs["linear"].model)
    known = np.diag(1 / GAMMA)
    cosine = float((learnt * known).sum() / np.linalg.norm(learnt) / np.linalg.norm(known))
    figure, (left, right) = panels("Linear attention learns Γ⁻¹ in context", columns=2)
    for (name, one), color in zip(runs.items(), (BLUE, ORANGE), strict=True):
        left.plot(one.steps["test_loss"], one.history["test_loss"], color=color, label=name)
    left.axhline(best, color="gray", linestyle="--", label="best matrix")
    label(left, "step of Adam", "test loss", f"prompts of {PAIRS} pairs", yscale="log")
    right.plot(1 / GAMMA, np.diag(learnt), "o", color=BLUE)
    right.text(1 / GAMMA[0], learnt[0, 0], "diagonal  ", color=BLUE, ha="right", va="bottom")
    right.plot(np.zeros(d * (d - 1)), learnt[~np.eye(d, dtype=bool)], ".", color=ORANGE)
    right.text(0.0, 0.0, "   off the diagonal", color=ORANGE, va="center")
    right.plot([0, 1 / GAMMA.min()], [0, 1 / GAMMA.min()], "--", color="gray")
    label(right, "entry of Γ⁻¹", "learnt entry", "the learnt matrix")
    final = {name: float(one.history["test_loss"][-1]) for name, one in runs.items()}
    return Outcome(
        ("attention", "test loss", "relative to the best matrix"),
        [(name, value, value / best) for name, value in final.items()],
        [
            Claim("linear attention: test loss relative to the best matrix",
                  final["linear"] / best, 1.05 if quick else 1.02, at_least=False),
            Claim("cosine of the learnt matrix to Γ⁻¹", cosine, 0.98 if quick else 0.995),
        ],
        figure,
    )  # fmt: skip


def loss_of_best(data: mh.Dataset) -> float:
    """Return the loss of ⟨x, Γ⁻¹ (1/N) Σ y_j x_j⟩ on the prompts of a data set."""
    pairs, question = data.X[:, :-1], data.X[:, -1, :-1]
    step = np.einsum("it,itk->ik", pairs[..., -1], pairs[..., :-1]) / PAIRS
    assert data.y is not None
    error = (question * step / GAMMA).sum(axis=1) - data.y[:, 0, 0]
    return float(np.square(error).mean())


def learnt_matrix(model: mh.Layer) -> npt.NDArray[Any]:
    """Return A of the prediction ⟨x, A (1/N) Σ y_j x_j⟩: the block of W times the entry of V."""
    matrix: npt.NDArray[Any] = model.W[0, :-1, :-1] * model.V[0, -1, 0]
    return matrix


EXPERIMENT = Experiment(
    title="Linear attention learns regression in context",
    paper="Zhang, Frei, Bartlett, Trained Transformers Learn Linear Models In-Context, JMLR 2024",
    says="Gradient flow on linear self-attention from a small start reaches the global minimum of "
    "the population loss, which predicts ⟨x, Γ⁻¹ (1/N) Σ y_j x_j⟩ with "
    "Γ = (1 + 1/N) Λ + tr(Λ)/N I. Recalled from the abstract and the main theorem.",
    setting="Prompts of 15 pairs of a linear task in four dimensions with variances 2, 1, 1/2, 1/4 "
    "and a question, read by a layer of one head at the last token; Adam (.01) from N(0, .05²) on "
    "the squared loss of a fixed set of prompts, where the theorem has gradient flow on the "
    "population. Dashed: the loss of Γ⁻¹ on the same prompts, and equality. Sizes and Adam "
    "are our choice; softmax attention of one head for comparison.",
    run=run,
)
