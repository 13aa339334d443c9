"""The role of the number H of heads in training, on three kinds of data; writes one figure.

mixture: the tokenized mixture, 100 training and 300 test samples, zero start. From zero all heads
stay equal and act as one whose output is scaled by sqrt(H).
planted: labels of a random classifier of 4 heads, 1000 training and 3000 test samples, and digits:
handwritten 3 against 8, 250 training and about 110 test images, both from a random first step.
"""

import argparse

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--data", choices=("mixture", "planted", "digits"), default="mixture")
parser.add_argument("--heads", type=int, nargs="+", default=[1, 4, 16, 64])
parser.add_argument("--lr", type=float, default=1.0, help="step size of one head")
parser.add_argument("--trials", type=int, default=5)
parser.add_argument("--steps", type=int, help="200 by default, 100 for planted")
parser.add_argument("--n", type=int, help="training samples, in place of those above")
parser.add_argument("--output", help="the figure, heads_<data>.png by default")
arguments = parser.parse_args()
steps = arguments.steps or (100 if arguments.data == "planted" else 200)

CONVENTIONS = {"lr": 0.0, "lr √H": 0.5}  # the power of H in the step size


def sets():
    """Training and test sets of all trials, side by side on the run axis."""
    common = {"seed": range(arguments.trials), "dtype": np.float32}
    if arguments.data == "digits":
        return mh.data.digits(n_train=arguments.n or 250, **common)
    if arguments.data == "planted":
        train = mh.data.planted_attention(arguments.n or 1000, 10, 10, 4, **common)
    else:
        train = mh.data.tokenized_mixture(arguments.n or 100, 10, 20, noise=2.0, **common)
    return train, train.sample(3 * train.n, seed=common["seed"])


def curves(heads, power):
    """Training loss and test error along training, (trials, steps + 1) each."""
    if arguments.data == "mixture":
        start = mh.Classifier.zeros(heads, train.tokens, train.dim, dtype=train.dtype)
    else:
        start = mh.Classifier.random_step(train, heads, seed=range(arguments.trials))
    run = mh.train(
        start,
        train,
        steps=steps,
        optimizer=mh.GradientDescent(arguments.lr * heads**power),
        test=test,
        record=("loss", "test_accuracy"),
    )
    return run.history["loss"], 100 * (1 - run.history["test_accuracy"])


train, test = sets()
k = np.arange(steps + 1)
shades = colormaps["viridis"](np.linspace(0, 0.85, len(arguments.heads)))
print(f"{arguments.data}: training loss and test error after {steps} steps, mean and range of")
print(f"{arguments.trials} trials, where the step size is " + " or ".join(CONVENTIONS))
with rc_context(STYLE):
    figure = Figure(figsize=(8, 4.6), layout="constrained", dpi=120)
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    for heads, shade in zip(arguments.heads, shades, strict=True):
        row = f"H = {heads:3d}"
        for (top, bottom), power in zip(axes.T, CONVENTIONS.values(), strict=True):
            loss, error = curves(heads, power)
            for ax, y in ((top, loss), (bottom, error)):
                low, high = y.min(axis=0), y.max(axis=0)
                ax.fill_between(k[1:], low[1:], high[1:], color=shade, alpha=0.15, linewidth=0)
                ax.plot(k[1:], y.mean(axis=0)[1:], color=shade, label=f"H = {heads}")
            row += f"   {loss[:, -1].mean():8.4f}   {error[:, -1].mean():5.1f} %"
            row += f" [{error[:, -1].min():.1f}, {error[:, -1].max():.1f}]"
        print(row)
    for (top, bottom), name in zip(axes.T, CONVENTIONS, strict=True):
        top.set(title=name.replace("lr", f"step size {arguments.lr:g}", 1), yscale="log")
        bottom.set(xlabel="step k", xscale="log")
    axes[0, 0].set_ylabel("training loss")
    axes[0, 0].legend(loc="lower left")
    axes[1, 0].set(ylabel="test error (%)", ylim=(0, None))
    figure.savefig(arguments.output or f"heads_{arguments.data}.png")
