"""Textbook gradients against mhfast's where attention saturates; writes one figure.

Left: relative error of the gradient in W at two tokens whose logits differ by a gap, where a closed
form is exact. Right: relative change of W along normalized gradient descent when the tokens of
every sample are reversed, which in exact arithmetic changes nothing. Medians over instances.
"""

import argparse

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.experiments import Saturation, run_saturation
from mhfast._demo.figure import BLUE, ORANGE, STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--instances", type=int, default=20, help="random problems in each panel")
parser.add_argument("--steps", type=int, default=500, help="normalized steps of the right panel")
parser.add_argument("--output", default="saturation.png", help="the figure")
arguments = parser.parse_args()


def errors(gap, seed):
    """Relative errors of ∂L/∂W, linear loss: textbook, mhfast in float64, mhfast in float32."""
    rng = np.random.default_rng(seed)
    X = np.ones((1, 2, 5), np.float32)  # float32 numbers, so that both types see the same problem
    X[0, :, 1:] = rng.standard_normal((2, 4))
    X[0, :, 1] = [1, 0]  # Z W Xᵀ = gap · X[:, 1]: the first token wins by the gap
    W, U = np.zeros((1, 5, 5)), np.float32(rng.standard_normal((1, 1, 5)))
    W[0, 0, 1] = gap
    apart = X[0, 0].astype(float) - X[0, 1]
    exact = np.outer(X[0, 1], -apart) * (U[0, 0] @ apart) / (2 + 2 * np.cosh(gap))
    models = [mh.Classifier(W.astype(t), U.astype(t), query=-1) for t in (np.float64, np.float32)]
    found = [mh.reference.textbook_value_and_grad(models[0], X, [1], loss="linear")[1]["W"]]
    for model in models:
        found.append(mh.value_and_grad(model, X.astype(model.dtype), [1], loss="linear")[1].W)
    return [np.abs(g[0] - exact).max() / np.abs(exact).max() for g in found]


gaps = np.arange(1, 81)  # as far as the gradient is a normal number of float32
table = np.array([[errors(gap, seed) for gap in gaps] for seed in range(arguments.instances)])
textbook, double, single = np.median(table, axis=0).T
change = run_saturation(Saturation(arguments.instances, steps=arguments.steps), lambda _: None)
steps = np.arange(1, arguments.steps + 1)
with rc_context(STYLE):
    figure = Figure(figsize=(8, 2.8), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, subplot_kw={"yscale": "log", "ylim": (1e-17, 10)})
    left.plot(gaps, textbook, color=ORANGE, label="textbook, float64")
    left.plot(gaps, single, "--", color=BLUE, label="mhfast, float32")
    left.plot(gaps, double, color=BLUE, label="mhfast, float64")
    left.set(xlabel="gap of the logits", ylabel="relative error of ∂L/∂W")
    right.plot(steps, np.median(change.textbook, 0), color=ORANGE, label="textbook, float64")
    right.plot(steps, np.median(change.mhfast, 0), color=BLUE, label="mhfast, float64")
    right.set(xlabel="normalized step", ylabel="change of W, tokens reversed")
    for ax in (left, right):
        ax.legend(loc="center right", bbox_to_anchor=(1, 0.3))
    figure.savefig(arguments.output)
