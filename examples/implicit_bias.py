"""Implicit bias: normalized gradient descent turns W towards a support vector machine; one figure.

Each instance has n = 6 samples of T = 8 tokens on the unit sphere in d = 10 dimensions, a query row
for every sample, a fixed readout v, and W trained from zero; all instances in one call. The optimal
token of a sample has the largest y ⟨v, x⟩. W tends to the least-norm matrix that separates the
tokens which it comes to select from the others by 1; these need not all be optimal. Left: cosine of
W to the separation of the tokens named, mean and band of 5 to 95 % of the instances, dotted in
float32. Right: softmax weight of the optimal tokens, mean over samples.
"""

import argparse

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import BLUE, ORANGE, STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--instances", type=int, default=100)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--output", default="implicit_bias.png", help="the figure")
arguments = parser.parse_args()


def train(data, **options):
    """Train all instances at once, from W = 0 with the readout v."""
    readout = data.truth["readout"][:, None, None]
    return mh.train(
        mh.Classifier(np.zeros((1, data.dim, data.dim), data.dtype), readout),
        data,
        steps=arguments.steps,
        optimizer=mh.NormalizedGradientDescent(arguments.lr),
        wrt="W",
        **options,
    )


def separation(data, tokens):
    """Solve the support vector machine of every instance."""
    instances = zip(data.X, data.y, data.query, tokens, strict=True)
    found = [mh.theory.token_svm(mh.Dataset(X, y, query=z), best) for X, y, z, best in instances]
    return mh.Gradients(W=np.array([one.direction.W for one in found], data.dtype))


def experiment(dtype):
    """Return steps, both cosines, weight of the optimal tokens, and where W selects only these."""
    data = mh.data.sphere_tokens(6, 8, 10, seed=range(arguments.instances), dtype=dtype)
    optimal = data.truth["optimal"]
    selected = train(data).model.attention(data)[..., 0, 0, :].argmax(axis=-1)
    directions = {"optimal": separation(data, optimal), "selected": separation(data, selected)}
    run = train(data, directions=directions, record={"cosine": 10, "attention": 10})
    attention = run.history["attention"][..., 0, 0, :]  # (instances, records, n, T)
    weight = np.take_along_axis(attention, optimal[:, None, :, None], axis=-1).mean(axis=(2, 3))
    cosines = {name: run.history[f"cosine_{name}"] for name in directions}
    return run.steps["attention"], cosines, weight, (selected == optimal).all(axis=1)


double, single = experiment("float64"), experiment("float32")
print(f"{arguments.instances} instances, {arguments.steps} normalized steps of {arguments.lr}")
for dtype, (_, cosines, weight, best) in (("float64", double), ("float32", single)):
    found, wanted = cosines["selected"][:, -1], cosines["optimal"][best, -1]
    print(f"{dtype}: cosine to the separation of the selected tokens, all instances:")
    print(f"  mean {found.mean():.4f}, smallest {found.min():.4f}")
    print(f"  of the optimal tokens, where only these are selected ({best.sum()} instances):")
    print(
        f"  mean {wanted.mean():.4f}, softmax weight of these tokens {weight[best, -1].mean():.4f}"
    )

with rc_context(STYLE):
    figure = Figure(figsize=(8, 2.8), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, subplot_kw={"xscale": "log", "xlabel": "normalized step"})
    for (steps, cosines, weight, best), style in ((double, "-"), (single, ":")):
        curves = [
            (left, cosines["optimal"][best], BLUE, "optimal; W selects only these"),
            (left, cosines["selected"][~best], "gray", "selected; other instances"),
            (left, cosines["optimal"][~best], ORANGE, "optimal; other instances"),
            (right, weight[best], BLUE, "W selects only optimal tokens"),
            (right, weight[~best], ORANGE, "other instances"),
        ]
        for ax, curve, color, label in curves:
            if not len(curve):
                continue
            line = {"color": color, "label": label if style == "-" else None}
            ax.plot(steps[1:], curve[:, 1:].mean(axis=0), style, **line)
            if style == "-":
                low, high = np.quantile(curve[:, 1:], (0.05, 0.95), axis=0)
                ax.fill_between(steps[1:], low, high, color=color, alpha=0.18, linewidth=0)
    left.set(ylabel="cosine of W to the separation", ylim=(0, 1.02))
    right.set(ylabel="weight of the optimal tokens", ylim=(0, 1.02))
    for ax in (left, right):
        ax.legend(loc="lower right")
    figure.savefig(arguments.output)
