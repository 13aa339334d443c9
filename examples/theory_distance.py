"""How far training travels to reach a loss, against what realizability allows; writes one figure.

Lines: distance from the start when the training loss first is at most ε, from a random first step
on the noiseless tokenized mixture, one panel for each number of heads; g0(ε), the distance of the
tangent construction with margin γ; and, dotted, that at which its direction really has the loss.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 4, 16, 64])
parser.add_argument("--n", type=int, default=100)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--output", default="distance.png", help="the figure")
arguments = parser.parse_args()

epsilon = np.geomspace(0.6, 1e-3, 40)
at = np.argmin(np.abs(epsilon - 0.01))
print(
    "   H       γ      BΦ   sqrt(H) short by   H short by   needs H >=   g0(.01)"
    "   travelled to .01   largest travelled / g0"
)
curves, travelled = [], []
for heads in arguments.heads:
    data = mh.data.tokenized_mixture(arguments.n, 10, 20, seed=0)
    start = mh.Classifier.random_step(data, heads, seed=0)
    curve = mh.theory.realizability(start, data, epsilon=epsilon)
    run = mh.train(
        start,
        data,
        steps=arguments.steps,
        optimizer=mh.GradientDescent(arguments.lr * heads**0.5),
        record=("loss", "distance"),
    )
    reached = mh.theory.travelled(run, epsilon)
    curves.append(curve)
    travelled.append(reached)
    way = f"{reached[at]:.2f}" if np.isfinite(reached[at]) else "not reached"
    print(
        f"{heads:4d} {curve.start.margin:7.4f} {curve.start.output:7.4f} "
        f"{1 / curve.heads_factor[at]:18.3g} {curve.heads_factor[at] ** -2:12.2g} "
        f"{curve.heads_needed[at]:12.2g} "
        f"{curve.distance[at]:9.2f}   {way:>16s} "
        f"{np.nanmax(reached / curve.distance):24.4f}"
    )

# The loss of the title: .01, or what every training has reached.
of_all = np.flatnonzero(np.isfinite(travelled).all(axis=0))
of_all = max(of_all[of_all <= at], default=0)
shares = [
    f"{100 * way[of_all] / curve.distance[of_all]:.0f} % of it with {heads} "
    f"head{'s' if heads > 1 else ''}"
    for heads, curve, way in zip(arguments.heads, curves, travelled, strict=True)
]
with rc_context(figures.STYLE):
    figure = figures.titled(
        f"By theory a model of loss {epsilon[of_all]:.1g} lies within the distance g0:\n"
        f"training goes {shares[0]} and {shares[-1]}",
        3.4,
    )
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for ax, heads, curve, way in zip(panels, arguments.heads, curves, travelled, strict=True):
        ax.plot(epsilon, curve.distance, color=figures.ORANGE, label="g0, by theory")
        ax.plot(curve.loss, curve.distance, ":", color="gray", label="along the\ntangent")
        ax.plot(epsilon, way, color=figures.BLUE, label="training")
        ax.set(title=f"H = {heads}", xlabel="loss ε", xscale="log", xlim=(1, 1e-3), ylim=(0, None))
        ax.minorticks_off()
        ax.grid(axis="y", color="0.92")
    panels[0].set_ylabel("distance from the start")
    figures.name_lines(panels[-1])
    figure.savefig(arguments.output)
