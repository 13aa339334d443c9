"""The theorems about training and generalization where they say something; writes one figure.

Noiseless tokenized mixture of long tokens, from the random first step with balanced signs, gradient
descent of the step size and for the comparator with the least training bound. Start and step size
are those of other samples, so that expectations over the training samples mean something. Left: the
mean loss of steps 1 to k, measured and guaranteed (`mh.theory.best_bound`), each k with its own
step size. Right: the bounds of on-average stability and of the generalization gap, evaluated along
the trajectory (`mh.theory.trajectory_stability`), for n samples, and the stability measured by
leaving every sample out. Printed too: the smallest n from which the bounds are below log 2 and
below .1, found by halving, and the bound of the worst case (`mh.theory.stability_bound`).
"""

import argparse
import math

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures
from mhfast.figures import BLUE, ORANGE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, default=20, help="an even number")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--longest", type=int, default=1000, help="steps of the left panel")
parser.add_argument("--samples", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
parser.add_argument("--left-out", type=int, default=64, help="up to so many samples measured")
parser.add_argument("--most", type=int, default=512, help="samples of the search at most")
parser.add_argument("--norm", type=float, default=40.0, help="norm of a token")
parser.add_argument("--output", default="stability.png", help="the figure")
arguments = parser.parse_args()
K = arguments.steps


def problem(n):
    """Draw n samples, and a start and a step size from n others."""
    data = mh.data.tokenized_mixture(
        n, 4, 5, relevant_fraction=0.5, contexts=1, norm=arguments.norm, seed=0
    )
    others = data.sample(n, seed=2)
    start = mh.Classifier.random_step(others, arguments.heads, seed=0, balanced=True)
    return data, start, mh.theory.best_bound(others, K, start=start).lr


def bounded(n):
    """Return the bound along the trajectory for n samples, and the settings that it is for."""
    data, start, lr = problem(n)
    best = mh.theory.best_bound(data, K, start=start, lr=lr)
    direction = mh.theory.ntk_margin(start, data).direction
    comparator = start + (best.distance / math.sqrt(2)) * direction
    settings = {"comparator": comparator, "lr": lr, "steps": K}
    return mh.theory.trajectory_stability(start, data, **settings), settings


def measured(n):
    """Return the on-average stability and the test gap, by training."""
    data, start, lr = problem(n)
    test = data.sample(2000, seed=1)
    step = mh.GradientDescent(lr)
    run = mh.train(start, data, steps=K, optimizer=step, test=test, record={"test_loss": K})
    gap = run.history["test_loss"][-1] - run.model.loss(data)
    if n > arguments.left_out:
        return math.nan, gap
    found = mh.theory.leave_one_out(start, data, steps=K, lr=lr, every=K, divisor="n")
    return found.stability[-1], gap


def smallest(below):
    """Return the smallest n with below(n), by halving; None beyond the most."""
    high = 4
    while not below(high):
        high *= 2
        if high > arguments.most:
            return None
    low = high // 2 if high > 4 else 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if below(middle) else (middle, high)
    return high


data, start, _ = problem(arguments.samples[0])
ks = np.unique(np.geomspace(1, arguments.longest, 16).astype(int))
guaranteed, means = [], []
for k in ks:
    best = mh.theory.best_bound(data, int(k), start=start)
    run = mh.train(start, data, steps=int(k), optimizer=mh.GradientDescent(best.lr))
    guaranteed.append(best.bound if best.applies else math.nan)
    means.append(run.history["loss"][1:].mean())
print("   k  mean loss  guaranteed")
for row in zip(ks, means, guaranteed, strict=True):
    print("{:4d}  {:9.4f}  {:10.4f}".format(*row))

print(f"\n{arguments.heads} heads, {K} steps")
print("   n  stability: measured      bound  worst case   gap: measured    bound")
stability, of_gap, found = [], [], []
for n in arguments.samples:
    bound, settings = bounded(n)
    data, start, _ = problem(n)
    worst = mh.theory.stability_bound(start, data, **settings)
    told = f"{worst.bound:.3g}{'' if worst.applies else ' (not proved)'}"
    values = measured(n)
    found.append(values)
    stability.append(bound.bound)
    of_gap.append(bound.gap)
    shown = "" if math.isnan(values[0]) else f"{values[0]:.2g}"
    row = (n, shown, bound.bound, told, values[1], bound.gap)
    print("{:4d}  {:>19}  {:9.4f}  {:>10}   {:13.2g}  {:7.4f}".format(*row), flush=True)
found = np.array(found)

least = {}
for name, value in (("stability", "bound"), ("gap", "gap")):
    for told, limit in (("log 2", math.log(2)), (".1", 0.1)):
        n = smallest(lambda n, v=value, x=limit: getattr(bounded(n)[0], v) < x)
        shown = least[name, told] = f"more than {arguments.most}" if n is None else str(n)
        print(f"the bound of the {name} is below {told} from n = {shown} on", flush=True)

with rc_context(figures.STYLE):
    figure = figures.titled(
        f"Guarantees for {arguments.heads} heads on long tokens: the mean loss within a factor of "
        f"{max(np.divide(guaranteed, means)):.1f}\nof what is measured, and a test gap below log 2 "
        f"from n = {least['gap', 'log 2']} on",
        3.4,
    )
    left, right = figure.subplots(1, 2)
    left.plot(ks, guaranteed, "--", color=ORANGE, label="guaranteed")
    left.plot(ks, means, color=BLUE, label="measured")
    left.set(xlabel="steps k", ylabel="mean loss of steps 1 to k")
    n = np.array(arguments.samples)
    right.plot(n, of_gap, "-.", color=ORANGE, label="test gap,\nbound")
    right.plot(n, stability, "--", color=ORANGE, label="stability,\nbound")
    right.plot(n, found[:, 0], ".-", color=BLUE, label="stability,\nmeasured")
    right.set(xlabel="training samples n", ylabel="loss difference")
    for ax in (left, right):
        ax.axhline(math.log(2), color="gray", linestyle=":", linewidth=0.8, label="log 2")
        ax.set(xscale="log", yscale="log")
    left.set_xlim(1, arguments.longest)
    right.set_xticks(n, n, minor=False)
    right.minorticks_off()
    for ax in (left, right):
        figures.name_lines(ax)
    figure.savefig(arguments.output)
