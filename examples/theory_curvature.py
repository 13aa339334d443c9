"""Negative curvature of the loss against the number of heads; writes one figure.

-λ_min(∇²L) / L at a Gaussian start, at the random first step and after training from it, against
the bound b3/sqrt(H). The theory says that negative curvature fades like H^(-1/2), relative to the
loss.
"""

import argparse

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import BLUE, ORANGE, STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
parser.add_argument("--n", type=int, default=50)
parser.add_argument("--dim", type=int, default=8)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--trials", type=int, default=3)
parser.add_argument("--output", default="curvature.png", help="the figure")
arguments = parser.parse_args()

COLORS = {"Gaussian": BLUE, "random step": ORANGE, "trained": "#009E73"}


def models(heads):
    """Return the data of all trials and the models of each kind, side by side on the run axis."""
    trials = range(arguments.trials)
    data = mh.data.tokenized_mixture(arguments.n, 10, arguments.dim, noise=0.5, seed=trials)
    first = mh.Classifier.random_step(data, heads, seed=trials)
    step = mh.GradientDescent(float(heads) ** 0.5)
    run = mh.train(first, data, steps=arguments.steps, optimizer=step)
    gaussian = mh.Classifier.gaussian(heads, 10, arguments.dim, std=0.3, seed=trials)
    return data, {"Gaussian": gaussian, "random step": first, "trained": run.model}


ratios = {name: [] for name in COLORS}
bounds = {name: [] for name in COLORS}
for heads in arguments.heads:
    data, group = models(heads)
    for name, model in group.items():
        loss, _ = mh.value_and_grad(model, data)
        ratios[name].append(-mh.theory.hessian_extremes(model, data).smallest / loss)
        bounds[name].append(mh.theory.curvature_bounds(model, data).weak_convexity.mean())

H = np.array(arguments.heads)
with rc_context(STYLE):
    figure = Figure(figsize=(6, 3.6), layout="constrained", dpi=120)
    ax = figure.subplots()
    for name, color in COLORS.items():
        mean = np.mean(ratios[name], axis=1)
        ax.plot(H, ratios[name], ".", color=color)
        ax.plot(H, mean, color=color, label=name)
        ax.plot(H, bounds[name], "--", color=color)
        fit = np.polyfit(np.log(H), np.log(mean), 1)[0] if len(H) > 1 else np.nan
        tightest = np.max(mean / bounds[name])
        print(f"{name:12} exponent of -λ_min/L in H {fit:6.2f}, up to {tightest:.3f} of the bound")
    ax.plot(H, mean[0] * H**-0.5, ":", color="gray", label="$H^{-1/2}$")
    ax.plot([], [], "--", color="gray", label="bound b3/√H")
    ax.set(xlabel="heads H", ylabel="-λ_min / L", yscale="log")
    ax.set_xscale("log", base=2)
    ax.legend()
    figure.savefig(arguments.output)
