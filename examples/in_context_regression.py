"""In-context linear regression by layers of several softmax heads; writes one figure.

A prompt holds pairs (x, y) of a linear task of its own and a question; a layer of H heads answers
at the last token. One head averages the y of the pairs by their likeness to the question. Two heads
can take a difference of such averages, which for small weights is one step of gradient descent on
the pairs. Left: test loss along training by Adam, mean over starts with the band of all. Right:
test loss of the trained layers on prompts of other lengths, and that of one gradient step of the
best size, in closed form.
"""

import argparse

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8])
parser.add_argument("--samples", type=int, default=4000, help="prompts to train on, and to test")
parser.add_argument("--pairs", type=int, default=31, help="pairs of a training prompt")
parser.add_argument("--features", type=int, default=4)
parser.add_argument("--starts", type=int, default=5)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--output", default="in_context_regression.png", help="the figure")
arguments = parser.parse_args()


def one_step(pairs):
    """Test loss of <x, w> with w = size/N Σ y x, the best first step from zero, for N pairs."""
    k = arguments.features
    return k * (k + 1) / (pairs + k + 1)


def mean_square(model, data):
    """Test loss of every start."""
    return ((model(data) - data.y) ** 2).mean(axis=(1, 2, 3))


train = mh.data.icl_regression(
    arguments.samples, arguments.pairs + 1, arguments.features + 1, seed=0, dtype="float32"
)
test = train.sample(arguments.samples, seed=0)
lengths = np.array([4, 8, 16, 31, 64, 128])
longer = [train.sample(arguments.samples, seed=1, tokens=n + 1) for n in lengths]
losses, reach = {}, {}
print(f"one gradient step of the best size: test loss {one_step(arguments.pairs):.3f}")
print("heads  training loss  test loss  best start")
for heads in arguments.heads:
    start = mh.Layer.gaussian(
        heads, train.dim, 1, std=0.1, seed=0, runs=arguments.starts, query=-1, dtype="float32"
    )
    run = mh.train(
        start,
        train,
        steps=arguments.steps,
        optimizer=mh.Adam(arguments.lr),
        loss="squared",
        test=test,
        record={"loss": 10, "test_loss": 10},
    )
    losses[heads] = run.history["test_loss"]
    reach[heads] = np.array([mean_square(run.model, data) for data in longer])
    final = losses[heads][:, -1]
    mean = run.history["loss"][:, -1].mean()
    print(f"{heads:5d} {mean:14.3f} {final.mean():10.3f} {final.min():11.3f}")

with rc_context(STYLE):
    figure = Figure(figsize=(8, 2.8), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, subplot_kw={"yscale": "log", "ylabel": "test loss"})
    steps = run.steps["test_loss"]
    for k, heads in enumerate(arguments.heads):
        color = colormaps["viridis"](0.9 * k / max(1, len(arguments.heads) - 1))
        name = f"{heads} heads" if heads > 1 else "1 head"
        for ax, x, y in ((left, steps, losses[heads].T), (right, lengths, reach[heads])):
            ax.fill_between(x, y.min(1), y.max(1), color=color, alpha=0.18, linewidth=0)
            ax.plot(x, y.mean(axis=1), color=color, label=name)
    left.axhline(one_step(arguments.pairs), color="gray", linestyle="--")
    right.plot(lengths, one_step(lengths), "--", color="gray", label="one gradient step")
    left.set(xlabel="step of Adam")
    right.set(xlabel="pairs in the prompt", xscale="log")
    right.set_xticks(lengths, lengths)
    for ax, ticks in ((left, (0.5, 1, 2, 4)), (right, (0.2, 0.5, 1, 2, 4))):
        ax.set_yticks(ticks, ticks)
        ax.minorticks_off()
    right.legend()
    figure.savefig(arguments.output)
