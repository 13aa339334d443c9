"""Benign overfitting in token selection: flipped labels are learnt without harm; one figure.

n = 20 samples of T = 8 tokens in d = 2000 dimensions: a signal token of the sample's class, a weak
one and noise; some labels are flipped. A prompt is trained by gradient descent at W = I and a fixed
readout along the difference of the two signals. Clean samples come to attend to their signal,
flipped ones to noise tokens that happen to fit the label. Upper row: with a strong signal the model
fits all labels, flipped ones too, and classifies new samples rightly. Lower row: with a weak signal
it fits all labels as well, and does not.
"""

import argparse

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import BLUE, ORANGE, STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--signals", type=float, nargs=2, default=(20.0, 2.0), help="their norms")
parser.add_argument("--dim", type=int, default=2000)
parser.add_argument("--flip", type=float, default=0.2, help="probability of a flipped label")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--seed", type=int, default=5)
parser.add_argument("--output", default="benign_overfitting.png", help="the figure")
arguments = parser.parse_args()


def train(signal):
    """Training data, and the run with everything recorded at every step."""
    data = mh.data.signal_noise(
        20, 8, arguments.dim, signal=signal, flip=arguments.flip, seed=arguments.seed,
        dtype="float32",
    )  # fmt: skip
    apart = data.truth["mu_plus"] - data.truth["mu_minus"]
    readout = 4 * apart / (apart @ apart)  # the signal token of a class alone gives the output ±2
    start = mh.Classifier(
        np.eye(arguments.dim, dtype="float32")[None],
        readout[None, None],
        prompt=np.zeros((1, arguments.dim), "float32"),
    )
    run = mh.train(
        start,
        data,
        steps=arguments.steps,
        optimizer=mh.GradientDescent(arguments.lr),
        wrt="prompt",
        test=data.sample(300, seed=0, flip=0.0),
        record={"loss": 1, "accuracy": 1, "test_accuracy": 20, "attention_groups": 1},
    )
    return data, run


runs = [train(signal) for signal in arguments.signals]
print("signal  training loss  training accuracy  test accuracy  flipped labels")
for signal, (data, run) in zip(arguments.signals, runs, strict=True):
    loss, right, new = (run.history[name][-1] for name in ("loss", "accuracy", "test_accuracy"))
    flipped = int(data.sample_groups.index.sum())
    print(f"{signal:6g} {loss:14.3f} {right:18.2f} {new:14.3f} {flipped:15d}")

with rc_context(STYLE):
    figure = Figure(figsize=(8, 4.6), layout="constrained", dpi=120)
    for signal, (data, run), axes in zip(
        arguments.signals, runs, figure.subplots(2, 3, sharex=True, sharey=True), strict=True
    ):
        steps = run.steps["loss"]
        left, *rest = axes
        left.plot(steps, run.history["loss"], color="gray", label="training loss")
        left.plot(steps, run.history["accuracy"], color=BLUE, label="training accuracy")
        left.plot(
            run.steps["test_accuracy"], run.history["test_accuracy"], color=ORANGE,
            label="test accuracy",
        )  # fmt: skip
        left.set(ylabel=f"signal of norm {signal:g}", ylim=(0, 1.05))
        for k, (ax, sort) in enumerate(zip(rest, data.sample_groups.names, strict=True)):
            for j, color in enumerate((BLUE, "gray", ORANGE)):
                weight = run.history["attention_groups"][:, 0, k, j]
                ax.plot(steps, weight, color=color, label=f"{data.token_groups.names[j]} tokens")
            if ax.get_subplotspec().is_first_row():
                ax.set(title=f"softmax weights, {sort} samples")
    for ax in figure.axes[:2]:
        ax.legend()
    for ax in figure.axes[3:]:
        ax.set(xlabel="step")
    figure.savefig(arguments.output)
