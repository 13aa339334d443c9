"""The role of the number H of heads in training, on three kinds of data; writes one figure.

mixture: the tokenized mixture, 100 training and 300 test samples, zero start. From zero all heads
stay equal and act as one whose output is scaled by sqrt(H).
planted: labels of a random classifier of 4 heads, 1000 training and 3000 test samples, and digits:
handwritten 3 against 8, 250 training and about 110 test images, both from a random first step.
"""

import argparse

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.ticker import LogLocator, NullFormatter

import mhfast as mh
from mhfast import figures

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
NAMES = {"mixture": "Mixture", "planted": "Planted heads", "digits": "Digits"}


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


def title(ends):
    """Say what the last losses and errors tell of the most heads."""
    few, many = arguments.heads[0], arguments.heads[-1]
    (constant, _), (growing, errors) = ends.values()
    return (
        f"{NAMES[arguments.data]}: {many} heads end at {constant[many] / constant[few]:.2g} times "
        f"the training loss of {few} if all take steps of one size,\n"
        f"at {growing[many] / growing[few]:.2g} times if steps grow with √H, "
        f"with {errors[many]:.1f} % of test labels wrong ({errors[few]:.1f} % with {few})"
    )


train, test = sets()
k = np.arange(steps + 1)
shades = colormaps["viridis"](np.linspace(0, 0.85, len(arguments.heads)))
print(f"{arguments.data}: training loss and test error after {steps} steps, mean and range of")
print(f"{arguments.trials} trials, where the step size is " + " or ".join(CONVENTIONS))
found = {
    (heads, name): curves(heads, power)
    for heads in arguments.heads
    for name, power in CONVENTIONS.items()
}
for heads in arguments.heads:
    row = f"H = {heads:3d}"
    for name in CONVENTIONS:
        loss, error = (values[:, -1] for values in found[heads, name])
        row += f"   {loss.mean():8.4f}   {error.mean():5.1f} %"
        row += f" [{error.min():.1f}, {error.max():.1f}]"
    print(row)

ends = {
    name: [
        {heads: found[heads, name][part][:, -1].mean() for heads in arguments.heads}
        for part in (0, 1)
    ]
    for name in CONVENTIONS
}
with rc_context(figures.STYLE):
    figure = figures.titled(title(ends), 5.0)
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, name in zip(axes.T, CONVENTIONS, strict=True):
        for part, ax in enumerate(column):
            for heads, shade in zip(arguments.heads, shades, strict=True):
                y = found[heads, name][part][:, 1:]
                ax.fill_between(
                    k[1:], y.min(axis=0), y.max(axis=0), color=shade, alpha=0.08, linewidth=0
                )
                ax.plot(k[1:], y.mean(axis=0), color=shade, label=f"H = {heads}")
        size = f"{arguments.lr:g}" if name == "lr" else f"√H · {arguments.lr:g}"
        column[0].set_title(f"step size {size}")
        column[0].set_yscale("log")
        column[1].set(xlabel="step k", xscale="log", xlim=(1, steps))
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test error (%)")
    low, high = axes[1, 0].get_ylim()
    if low < high / 2:
        axes[1, 0].set_ylim(bottom=0)
    for ax in axes[0]:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    for ax in axes.flat:
        figures.name_lines(ax, apart=0.1)
    figure.savefig(arguments.output or f"heads_{arguments.data}.png")
