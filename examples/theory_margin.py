"""The tangent-kernel margin on the tokenized mixture, against its closed form; writes one figure.

Points: the largest margin γ at the random first step on n samples, by ntk_margin. Lines: the bound
γ_linear + γ_attention of the population's first step, γ_linear alone, and γ_saturated. The noise is
uniform on a sphere of the stated radius; γ_linear uses the largest |⟨z, μ⟩| in the data (mean over
trials), and γ_attention is that of no noise, so that beyond radius 0 only γ_linear is a guarantee.
"""

import argparse

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import BLUE, ORANGE, STYLE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--n", type=int, default=100, help="samples")
parser.add_argument("--trials", type=int, default=5)
parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
parser.add_argument("--output", default="margin.png", help="the figure")
arguments = parser.parse_args()

TOKENS, DIM, NORM = 10, 20, 2.0
USUAL = {"heads": 16, "relevant_fraction": 0.3, "noise": 0.0, "contexts": 4}
SWEEPS = {
    "heads": arguments.heads,
    "relevant_fraction": np.arange(1, 10) / 10,
    "noise": np.linspace(0, 2, 9),
    "contexts": [1, 2, 4, 8, 16],
}
LABELS = {
    "heads": "heads H",
    "relevant_fraction": "relevant fraction ζ",
    "noise": "noise radius",
    "contexts": "contexts M",
}


def measured(point):
    """γ at the random first step in every trial, and the margins in closed form."""
    trials = range(arguments.trials)
    mixture = {name: value for name, value in point.items() if name != "heads"}
    data = mh.data.tokenized_mixture(
        arguments.n, TOKENS, DIM, norm=NORM, noise_kind="bounded" if point["noise"] else "none",
        seed=trials, **mixture,
    )  # fmt: skip
    start = mh.Classifier.random_step(data, point["heads"], seed=trials)
    classes = np.stack([data.truth["mu_plus"], data.truth["mu_minus"]], axis=-1)
    # Context tokens are orthogonal to class tokens but for their noise.
    products = np.abs(data.X @ classes[:, None]).max(axis=-1)
    products[data.token_groups.index == 1] = 0
    form = mh.theory.mixture_margins(
        TOKENS, relevant_fraction=point["relevant_fraction"], norm=NORM,
        contexts=point["contexts"], noise=products.max(axis=(1, 2)).mean(),
    )  # fmt: skip
    return mh.theory.ntk_margin(start, data).margin, form


with rc_context(STYLE):
    figure = Figure(figsize=(9.6, 2.8), layout="constrained", dpi=120)
    for ax, (name, values) in zip(figure.subplots(1, 4, sharey=True), SWEEPS.items(), strict=True):
        points = [USUAL | {name: value} for value in values]
        margins, forms = zip(*map(measured, points), strict=True)
        gamma = np.array(margins)
        total, linear, saturated = (
            [getattr(form, part) for form in forms] for part in ("total", "linear", "saturated")
        )
        ax.plot(values, saturated, ":", color="gray", label=r"$\gamma_\mathrm{saturated}$")
        both = r"$\gamma_\mathrm{linear} + \gamma_\mathrm{attention}$"
        ax.plot(values, total, color=ORANGE, label=both)
        ax.plot(values, linear, "--", color=ORANGE, label=r"$\gamma_\mathrm{linear}$")
        ax.plot(values, gamma[:, 0], ".", color=BLUE, label=r"$\gamma$")
        ax.plot(values, gamma[:, 1:], ".", color=BLUE)
        ax.set_xlabel(LABELS[name])
        if name in ("heads", "contexts"):
            ax.set_xscale("log", base=2)
        print(f"{LABELS[name]}: mean γ and γ_linear + γ_attention")
        for row in zip(values, gamma.mean(axis=1), total, strict=True):
            print("  {:5.3g} {:8.4f} {:8.4f}".format(*row))
    figure.axes[0].set(ylabel="margin", ylim=(0, None))
    figure.axes[0].legend(loc="upper left", bbox_to_anchor=(0, 0.93))
    figure.savefig(arguments.output)
