"""Training with a guarantee where attention does the work; writes one figure.

Noiseless tokenized mixture of long tokens, from the random first step with balanced signs, at the
largest step size that the guarantee allows. Lines: the mean loss of steps 1 .. k, measured; its
bounds in one common ball and with radii of single heads, each for the best comparator along the
tangent direction; the loss of the same models with W = 0, and with U as it was at the start.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures
from mhfast.figures import BLUE, ORANGE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, default=300, help="an even number")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--n", type=int, default=20, help="samples")
parser.add_argument("--tokens", type=int, default=4)
parser.add_argument("--norm", type=float, default=40.0, help="norm of a token")
parser.add_argument("--output", default="guarantee.png", help="the figure")
arguments = parser.parse_args()

K = arguments.steps
data = mh.data.tokenized_mixture(
    arguments.n, arguments.tokens, 5, relevant_fraction=0.5, contexts=1, norm=arguments.norm,
    seed=0,
)  # fmt: skip
start = mh.Classifier.random_step(data, arguments.heads, seed=0, balanced=True)
tangent = mh.theory.ntk_margin(start, data)
comparisons = [
    mh.theory.compare(start, data, comparator=start + s * tangent.direction)
    for s in np.log(1 / np.geomspace(0.3, 0.01, 12)) / tangent.margin
]


def largest_rate(comparison):
    """Return the largest step size that meets the conditions of the common ball."""
    return min(condition.limit for condition in comparison.conditions(1.0, K)[1:])


def best(k):
    """Return the least bound of the common ball for k steps that applies."""
    found = [comparison.training(lr, k) for comparison in comparisons]
    return min((g for g in found if g.applies), key=lambda g: g.bound, default=None)


lr = max(map(largest_rate, comparisons))
at = np.unique(np.geomspace(1, K, 24).astype(int))
common = [best(int(k)) for k in at]
single = [mh.theory.best_bound(data, int(k), heads=arguments.heads, lr=lr) for k in at]
every = max(K // 100, 1)
run = mh.train(
    start,
    data,
    steps=K,
    optimizer=mh.GradientDescent(lr),
    test=data.sample(200, seed=1),
    record={"loss": 1, "test_loss": K, "W": every, "U": every},
)
mean = np.cumsum(run.history["loss"][1:]) / np.arange(1, K + 1)
losses = {"W = 0": [], "U of the start": []}
for W, U in zip(run.history["W"], run.history["U"], strict=True):
    for name, model in (
        ("W = 0", mh.Classifier(np.zeros_like(W), U)),
        ("U of the start", mh.Classifier(W, start.U)),
    ):
        losses[name].append(mh.value_and_grad(model, data)[0])
steps = run.steps["W"]

without = mh.Classifier(np.zeros_like(run.model.W), run.model.U)
ball = "none" if common[-1] is None else f"{common[-1].bound:.3f}"
print(f"H = {arguments.heads}, {K} steps of size {lr:.3g}; log 2 = {np.log(2):.3f}")
print(f"mean loss of all steps: {mean[-1]:.4f}; at the end {run.history['loss'][-1]:.4f}")
print(f"bound in the common ball: {ball}; with radii of single heads: {single[-1].bound:.4f}")
print(f"loss at W = 0: {losses['W = 0'][-1]:.6f}, largest output {np.abs(without(data)).max():.2g}")
print(f"loss with U of the start: {losses['U of the start'][-1]:.4f}")
print(f"test loss: {run.history['test_loss'][-1]:.4f}")
print(single[-1])

with rc_context(figures.STYLE):
    figure = figures.titled(
        f"{arguments.heads} heads, {arguments.n} samples: the training loss is guaranteed to fall "
        f"below log 2, and\nall of the fall is due to attention: without it, W = 0, the loss is "
        f"{losses['W = 0'][-1]:.3f}",
        3.8,
    )
    ax = figure.subplots()
    ax.plot(steps, losses["W = 0"], ":", color="black", label="loss with W = 0")
    ax.plot(at, [np.nan if g is None else g.bound for g in common], "--", color=ORANGE,
            label="guaranteed,\none ball for all heads")  # fmt: skip
    ax.plot(at, [b.bound if b.applies else np.nan for b in single], color=ORANGE,
            label="guaranteed,\nradii of single heads")  # fmt: skip
    ax.plot(np.arange(1, K + 1), mean, color=BLUE, label="mean loss\nof steps 1 to k")
    ax.plot(steps[1::8], losses["U of the start"][1::8], "x", color="gray", markersize=4,
            label="loss at step k with\nU of the start")  # fmt: skip
    ax.set(xlabel="step k", ylabel="training loss", xscale="log", yscale="log", ylim=(None, 3))
    ax.set_xlim(1, K)
    figures.name_lines(ax)
    figure.savefig(arguments.output)
