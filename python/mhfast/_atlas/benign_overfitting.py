"""Flipped labels are learnt without harm where the signal is strong."""

from __future__ import annotations

import numpy as np

import mhfast as mh

from ..figures import BLUE, ORANGE
from .experiment import Claim, Experiment, Outcome
from .figure import GRAY, label, panels

SIGNALS = (20.0, 2.0)
KINDS, TOKENS = ("clean", "flipped"), ("signal", "weak", "noise")


def run(quick: bool) -> Outcome:
    """Train prompts on data of a strong and of a weak signal, flipped labels among both."""
    dim, steps, new = (1000, 250, 100) if quick else (2000, 250, 1000)
    seeds = range(1 if quick else 5)
    figure, axes = panels(
        "Flipped labels are fitted by attention to noise; only a weak signal suffers",
        2, 3, height=4.6, sharex=True, sharey=True,
    )  # fmt: skip
    rows: list[tuple[str | float, ...]] = []
    found = {}
    for signal, row in zip(SIGNALS, np.reshape(np.array(axes), (2, 3)), strict=True):
        trained, flipped = [], 0
        for seed in seeds:
            data = mh.data.signal_noise(
                20, 8, dim, signal=signal, flip=0.2, seed=seed + 5, dtype="float32"
            )
            if data.sample_groups is not None:
                flipped += int(data.sample_groups.index.sum())
            apart = data.truth["mu_plus"] - data.truth["mu_minus"]
            # The signal token of a class alone gives the output 2 or -2.
            readout = 4 * apart / (apart @ apart)
            start = mh.Classifier(
                np.eye(dim, dtype="float32")[None],
                readout[None, None],
                prompt=np.zeros((1, dim), "float32"),
            )
            trained.append(
                mh.train(
                    start,
                    data,
                    steps=steps,
                    optimizer=mh.GradientDescent(0.005),
                    wrt="prompt",
                    test=data.sample(new, seed=0, flip=0.0),
                    record={"loss": 1, "accuracy": 1, "test_accuracy": 15, "attention_groups": 1},
                )
            )
        last = {
            name: np.array([one.history[name][-1] for one in trained])
            for name in ("loss", "accuracy", "test_accuracy")
        }
        found[signal] = last
        rows.append((f"{signal:g}", str(flipped), *(float(last[name].mean()) for name in last)))
        first = trained[0]
        left, *rest = row
        steps_of = first.steps
        left.plot(steps_of["loss"], first.history["loss"], color=GRAY, label="training\nloss")
        left.plot(steps_of["loss"], first.history["accuracy"], color=BLUE,
                  label="training\naccuracy")  # fmt: skip
        left.plot(steps_of["test_accuracy"], first.history["test_accuracy"], color=ORANGE,
                  label="test\naccuracy")  # fmt: skip
        label(left, "step", f"signal of norm {signal:g}", ylim=(0, 1.05))
        for k, (ax, kind) in enumerate(zip(rest, KINDS, strict=True)):
            for j, color in enumerate((BLUE, GRAY, ORANGE)):
                weight = first.history["attention_groups"][:, 0, k, j]
                ax.plot(steps_of["loss"], weight, color=color,
                        label=TOKENS[j])  # fmt: skip
            label(ax, "step", "", f"weights of tokens, {kind} samples")
    strong, weak = (found[signal] for signal in SIGNALS)
    return Outcome(
        ("norm of the signal", "flipped labels", "training loss", "training accuracy",
         "test accuracy"),
        rows,
        [
            Claim("both signals: smallest training accuracy",
                  float(min(strong["accuracy"].min(), weak["accuracy"].min())), 1.0),
            Claim("strong signal: smallest test accuracy", strong["test_accuracy"].min(), 0.99),
            Claim("weak signal: largest test accuracy", weak["test_accuracy"].max(), 0.9,
                  at_least=False),
        ],
        figure,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Benign overfitting in token selection",
    paper="Sakamoto, Sato, Benign Overfitting in Token Selection of Attention Mechanism, 2024; "
    "Magen, Shang, Xu, Frei, Hu, Vardi, Benign Overfitting in Single-Head Attention, 2024",
    says="In high dimension, attention trained on data with flipped labels fits all of them, clean "
    "samples by attending to their signal and flipped ones by attending to noise tokens, and still "
    "classifies new samples correctly if the signal is strong. Recalled from the abstracts.",
    setting="20 samples of 8 tokens: one with the signal of the class, one weak, the rest noise; "
    "each label flipped with probability .2. A prompt is trained with W = I and a fixed readout "
    "along the difference of the signals, by gradient descent of step .005 in float32. Signals of "
    "norm 20 and 2, sizes and steps are our choice. The figure shows the first data set.",
    run=run,
)
