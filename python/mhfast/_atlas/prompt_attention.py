"""A prompt finds the few relevant tokens; averaging them away costs accuracy."""

from __future__ import annotations

import numpy as np

import mhfast as mh

from ..figures import BLUE, ORANGE
from .experiment import Claim, Experiment, Outcome
from .figure import band, label, panels

DIM, TOKENS, FRACTION = 20, 40, 0.05


def run(quick: bool) -> Outcome:
    """Train a prompt with its readout, and the readout of the mean token, on the same data."""
    trials, steps, new = (3, 200, 300) if quick else (10, 400, 2000)
    data = mh.data.tokenized_mixture(
        200, TOKENS, DIM, relevant_fraction=FRACTION, noise=1.0, seed=range(trials)
    )
    start = mh.Classifier(np.eye(DIM)[None], np.zeros((1, 1, DIM)), prompt=np.zeros((1, DIM)))
    every = steps // 50
    runs = {
        name: mh.train(
            start,
            data,
            steps=steps,
            optimizer=mh.Adam(0.05),
            wrt=wrt,
            test=data.sample(new, seed=1),
            record={"loss": every, "test_accuracy": every, "attention_groups": every},
        )
        for name, wrt in (("prompt and readout", ("prompt", "U")), ("readout of the mean", "U"))
    }
    figure, (left, right) = panels("A prompt learns to read the relevant tokens, 2 of 40")
    accuracy, rows = {}, []
    relevant = data.token_groups.names.index("class") if data.token_groups else 0
    for (name, trained), color in zip(runs.items(), (BLUE, ORANGE), strict=True):
        at = trained.steps["loss"]
        accuracy[name] = trained.history["test_accuracy"]
        groups = trained.history["attention_groups"]
        weight = groups.reshape(trials, len(at), -1, groups.shape[-1])[..., relevant].mean(axis=2)
        band(left, at[1:], 1.0 - accuracy[name][:, 1:], color, name)
        band(right, at, weight, color, name)
        loss = trained.history["loss"][:, -1].mean()
        rows.append((name, loss, accuracy[name][:, -1].mean(), weight[:, -1].mean()))
    label(left, "step", "test error", ylim=(0, None))
    label(right, "step", "softmax weight of relevant tokens", ylim=(0, 1.03))
    prompt, mean = (found[:, -1] for found in accuracy.values())
    return Outcome(
        ("trained", "training loss", "test accuracy", "weight of relevant tokens"),
        rows,
        [
            Claim("prompt: smallest test accuracy of a trial", prompt.min(), 0.99),
            Claim(
                "prompt: mean weight of the relevant tokens, uniform .05", float(rows[0][3]), 0.8
            ),
            Claim("mean token: largest test accuracy of a trial", mean.max(), 0.95, at_least=False),
        ],
        figure,
    )


EXPERIMENT = Experiment(
    title="Prompt attention reads the relevant tokens",
    paper="Oymak, Rawat, Soltanolkotabi, Thrampoulidis, On the Role of Attention in "
    "Prompt-tuning, 2023",
    says="On contextual data, where few tokens of a sample carry its label, attention with a "
    "trained prompt finds these tokens and separates what a linear readout of the averaged tokens "
    "does not. Recalled from the abstract.",
    setting="Tokenized mixture of 200 samples, T = 40, d = 20, one token in twenty relevant, unit "
    "class and context tokens, noise of standard deviation 1 on the irrelevant ones. W is the "
    "identity; prompt and readout start from zero and take steps of Adam (.05), in the comparison "
    "the readout alone, with uniform attention. The paper proves three steps of gradient descent; "
    "sizes and Adam are our choice.",
    run=run,
)
