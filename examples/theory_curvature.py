"""Negative curvature of the loss against the number of heads; writes one figure.

-λ_min(∇²L) / L at a Gaussian start, at the random first step and after training from it, against
the bound b3/sqrt(H). The theory says that negative curvature fades like H^(-1/2), relative to the
loss.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures
from mhfast.figures import BLUE, GREEN, ORANGE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
parser.add_argument("--n", type=int, default=50)
parser.add_argument("--dim", type=int, default=8)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--trials", type=int, default=3)
parser.add_argument("--output", default="curvature.png", help="the figure")
arguments = parser.parse_args()

COLORS = {"Gaussian": BLUE, "random step": ORANGE, "trained": GREEN}


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
means = {name: np.mean(values, axis=1) for name, values in ratios.items()}
fits = {
    name: np.polyfit(np.log(H), np.log(mean), 1)[0] if len(H) > 1 else np.nan
    for name, mean in means.items()
}
for name, mean in means.items():
    tightest = np.max(mean / bounds[name])
    print(
        f"{name:12} exponent of -λ_min/L in H {fits[name]:6.2f}, up to {tightest:.3f} of the bound"
    )

above = [np.array(bounds[name]) / mean for name, mean in means.items()]
least, most = (float(f"{value:.2g}") for value in (np.min(above), np.max(above)))
with rc_context(figures.STYLE):
    figure = figures.titled(
        f"Negative curvature fades like H^{max(fits.values()):.2f} to H^{min(fits.values()):.2f}, "
        f"as theory says (H^-0.5);\nthe bound b3/√H, for the worst case, is {least:g} to {most:g} "
        "times larger",
        3.6,
    )
    ax = figure.subplots()
    for name, color in COLORS.items():
        ax.plot(H, ratios[name], ".", color=color)
        ax.plot(H, means[name], color=color, label=f"{name} start" if name != "trained" else name)
        ax.plot(H, bounds[name], "--", color=color, label=f"{name}, bound b3/√H")
    ax.plot(H, means["trained"][0] * H**-0.5, ":", color="gray", label="slope of $H^{-1/2}$")
    ax.set(xlabel="heads H", ylabel="-λ_min / L", yscale="log")
    ax.set_xscale("log", base=2)
    ax.set_xlim(H[0], H[-1])
    ax.set_xticks(H, H, minor=False)
    figures.name_lines(ax)
    figure.savefig(arguments.output)
