"""Rates: generalization gap against n, training loss against k, and stability; writes one figure.

Left: test loss minus training loss on the noisy tokenized mixture after training on n samples.
Middle: training loss at step k. Right: the on-average stability, measured exactly by training n + 1
classifiers, each without one sample, next to the test gap, on several data sets.
"""

import argparse

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import BLUE, ORANGE, STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--samples", type=int, nargs="+", default=[25, 50, 100, 200, 400, 800])
parser.add_argument("--test", type=int, default=20000, help="test samples")
parser.add_argument("--left-out", type=int, default=50, help="samples of the right panel")
parser.add_argument("--data-sets", type=int, default=7, help="data sets left out from")
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--trials", type=int, default=5)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--output", default="rates.png", help="the figure")
arguments = parser.parse_args()


def sets(n, trials):
    """Training set, test set of the same population, and a start."""
    train = mh.data.tokenized_mixture(n, 10, 20, noise=2.0, seed=trials)
    start = mh.Classifier.random_step(train, arguments.heads, seed=trials)
    return train, train.sample(arguments.test, seed=trials), start


record = {"loss": 1, "test_loss": arguments.steps}
losses, tests = [], []
for n in arguments.samples:
    train, test, start = sets(n, range(arguments.trials))
    step = mh.GradientDescent(arguments.lr)
    run = mh.train(start, train, steps=arguments.steps, optimizer=step, test=test, record=record)
    losses.append(run.history["loss"])
    tests.append(run.history["test_loss"][:, -1])
losses, tests = np.array(losses), np.array(tests)
gaps = tests - losses[:, :, -1]
found = []
for seed in range(arguments.data_sets):
    train, test, start = sets(arguments.left_out, seed)
    found.append(
        mh.theory.leave_one_out(
            start, train, steps=arguments.steps, lr=arguments.lr, every=10, test=test
        )
    )
stability, gap = (np.array([getattr(f, name) for f in found]) for name in ("stability", "gap"))


def slope(x, y):
    """Exponent of the power law that fits best."""
    return np.polyfit(np.log(x), np.log(y), 1)[0]


n, k = np.array(arguments.samples), np.arange(1, arguments.steps + 1)
curve = losses[-1].mean(axis=0)[1:]
late = k >= arguments.steps / 4
print("   n  training loss  test loss      gap")
for row in zip(n, losses[:, :, -1].mean(1), tests.mean(1), gaps.mean(1), strict=True):
    print("{:4d}  {:13.4f}  {:9.4f}  {:7.4f}".format(*row))
if len(n) > 1 and (gaps.mean(axis=1) > 0).all():
    print(f"exponent of the gap in n: {slope(n, gaps.mean(axis=1)):.2f}")
print(f"exponent of the training loss in k, last three quarters: {slope(k[late], curve[late]):.2f}")
ratio = stability[:, -1] / gap[:, -1]
print(f"n = {arguments.left_out}, {len(ratio)} data sets: stability {stability[:, -1].mean():.4f}, "
      f"gap {gap[:, -1].mean():.4f} in the mean")  # fmt: skip
print(f"stability / gap: {', '.join(f'{r:.2f}' for r in ratio)}; mean {ratio.mean():.2f}")

with rc_context(STYLE):
    figure = Figure(figsize=(9.6, 2.8), layout="constrained", dpi=120)
    left, middle, right = figure.subplots(1, 3)
    left.plot(n, gaps, ".", color=BLUE)
    left.plot(n, gaps.mean(axis=1), color=BLUE, label="gap, mean of trials")
    left.plot(n, gaps.mean(axis=1)[-1] * n[-1] / n, "--", color="gray", label="1/n")
    left.set(xlabel="training samples n", ylabel="test loss - training loss")
    middle.plot(k, curve, color=BLUE, label=f"training loss, n = {n[-1]}")
    middle.plot(k, curve[-1] * k[-1] / k, "--", color="gray", label="1/k")
    middle.set(xlabel="step k", ylabel="training loss", ylim=(curve.min() / 2, 2 * curve.max()))
    for ax in (left, middle):
        ax.set(xscale="log", yscale="log")
    left.set_xticks(n, n, minor=False)
    left.minorticks_off()
    for values, color, label in ((gap, ORANGE, "test gap"), (stability, BLUE, "stability")):
        right.plot(found[0].steps, values.T, color=color, linewidth=0.5, alpha=0.5)
        right.plot(found[0].steps, values.mean(axis=0), color=color, label=f"{label}, mean")
    right.set(xlabel="step k", ylabel=f"loss difference, n = {arguments.left_out}")
    for ax in (left, middle, right):
        ax.legend()
    figure.savefig(arguments.output)
