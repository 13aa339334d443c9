"""How far training travels to reach a loss, against what realizability allows; writes one figure.

Lines: distance from the start when the training loss first is at most ε, from a random first step
on the noiseless tokenized mixture, one panel for each number of heads. Dashed: g0(ε), the distance
of the tangent construction with margin γ; dotted: the loss that is really found in its direction.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast._demo.figure import BLUE, ORANGE, STYLE, titled

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 4, 16, 64])
parser.add_argument("--n", type=int, default=100)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--output", default="distance.png", help="the figure")
arguments = parser.parse_args()

epsilon = np.geomspace(0.6, 1e-3, 40)
with rc_context(STYLE):
    figure = titled(
        "Training reaches a loss at about the distance g0 that theory states, or nearer:\n"
        "the more heads, the closer, as in the limit of infinitely many",
        3.4,
    )
    panels = figure.subplots(1, len(arguments.heads), sharey=True, squeeze=False)[0]
    print(
        "   H       γ      BΦ   sqrt(H) short by   needs H >=   g0(.01)   travelled to .01"
        "   largest travelled / g0"
    )
    for heads, ax in zip(arguments.heads, panels, strict=True):
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
        ax.plot(epsilon, curve.distance, "--", color=ORANGE)
        ax.plot(curve.loss, curve.distance, ":", color="gray")
        ax.plot(epsilon, reached, color=BLUE)
        ax.set(title=f"H = {heads}", xlabel="loss ε", xscale="log", xlim=(1, 1e-3), ylim=(0, 18))
        at = np.argmin(np.abs(epsilon - 0.01))
        way = f"{reached[at]:.2f}" if np.isfinite(reached[at]) else "not reached"
        print(
            f"{heads:4d} {curve.start.margin:7.4f} {curve.start.output:7.4f} "
            f"{1 / curve.heads_factor[at]:18.3g} {curve.heads_needed[at]:12.2g} "
            f"{curve.distance[at]:9.2f}   {way:>16s} "
            f"{np.nanmax(reached / curve.distance):24.4f}"
        )
    panels[0].set_ylabel("distance from the start")
    for height, name, color in (
        (0.94, "g0(ε), by theory", ORANGE),
        (0.86, "along its direction", "gray"),
        (0.78, "training", BLUE),
    ):
        panels[0].text(0.04, height, name, color=color, fontsize=8, transform=panels[0].transAxes)
    figure.savefig(arguments.output)
