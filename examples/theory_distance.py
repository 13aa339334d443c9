"""How far training travels to reach a loss, against what realizability allows; writes one figure.

Lines: distance from the start when the training loss first is at most ε, from a random first step
on the noiseless tokenized mixture. Dashed: g0(ε), the distance of the tangent construction with
margin γ; dotted: the loss that is really found along its direction.
"""

import argparse

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 4, 16, 64])
parser.add_argument("--n", type=int, default=100)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--output", default="distance.png", help="the figure")
arguments = parser.parse_args()

epsilon = np.geomspace(0.6, 1e-3, 40)
shades = colormaps["viridis"](np.linspace(0, 0.85, len(arguments.heads)))
with rc_context(STYLE):
    figure = Figure(figsize=(6, 3.6), layout="constrained", dpi=120)
    ax = figure.subplots()
    print(
        "   H       γ      BΦ   sqrt(H) short by   needs H >=   g0(.01)   travelled to .01"
        "   largest travelled / g0"
    )
    for heads, shade in zip(arguments.heads, shades, strict=True):
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
        ax.plot(epsilon, reached, color=shade, label=f"H = {heads}")
        ax.plot(epsilon, curve.distance, "--", color=shade)
        ax.plot(curve.loss, curve.distance, ":", color=shade)
        at = np.argmin(np.abs(epsilon - 0.01))
        way = f"{reached[at]:.2f}" if np.isfinite(reached[at]) else "not reached"
        print(
            f"{heads:4d} {curve.start.margin:7.4f} {curve.start.output:7.4f} "
            f"{1 / curve.heads_factor[at]:18.3g} {curve.heads_needed[at]:12.2g} "
            f"{curve.distance[at]:9.2f}   {way:>16s} "
            f"{np.nanmax(reached / curve.distance):24.4f}"
        )
    ax.plot([], [], "--", color="gray", label="g0(ε)")
    ax.plot([], [], ":", color="gray", label="loss along the direction")
    ax.set(xlabel="loss ε", ylabel="distance from the start", xscale="log", ylim=(0, None))
    ax.set_xlim(1, 1e-3)
    ax.legend()
    figure.savefig(arguments.output)
