"""The regularization path: minimizers over balls turn towards the token separation; one figure.

Each instance has n = 6 samples of T = 8 tokens on the unit sphere in d = 10 dimensions, a query row
for every sample and a fixed readout. W minimises the logistic loss over the ball ‖W‖_F ≤ R, for
growing R, each time from the minimizer before. Left: cosine of W to the least-norm separation of
the tokens that it selects at the largest radius, mean and band of 5 to 95 %, and of the optimal
tokens, where these are selected. Right: stationarity of the points, the worst and the median.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures
from mhfast.figures import BLUE, ORANGE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--instances", type=int, default=40)
parser.add_argument("--largest", type=float, default=300.0, help="the largest radius")
parser.add_argument("--radii", type=int, default=10)
parser.add_argument("--output", default="regularization_path.png", help="the figure")
arguments = parser.parse_args()

data = mh.data.sphere_tokens(6, 8, 10, seed=range(arguments.instances))
radii = np.geomspace(1.0, arguments.largest, arguments.radii)
path = mh.theory.regularization_path(data, radii)

optimal = data.truth["optimal"]
selected = path.models[-1].attention(data)[:, :, 0, 0].argmax(axis=-1)
best = (selected == optimal).all(axis=1)
svm = mh.theory.token_svm(data, selected)
cosines = np.array([mh.theory.alignment(model, svm)[:, 0] for model in path.models])
print(f"{arguments.instances} instances, radii 1 to {arguments.largest:g}")
print(f"stationary to 1e-6: {path.converged.mean():.3f} of all points")
print(f"only optimal tokens selected in {best.sum()} instances")
print(
    f"cosine at the largest radius: mean {cosines[-1].mean():.4f}, smallest {cosines[-1].min():.4f}"
)

with rc_context(figures.STYLE):
    figure = figures.titled(
        f"As the ball grows, W turns towards the separation of the tokens that it selects:\n"
        f"mean cosine {cosines[-1].mean():.4f} at radius {arguments.largest:g}, at stationary "
        f"points ({100 * path.converged.mean():.0f} % to 1e-6)",
        3.2,
    )
    left, right = figure.subplots(1, 2, subplot_kw={"xscale": "log", "xlabel": "radius R"})
    low, high = np.quantile(cosines, (0.05, 0.95), axis=1)
    label = "selected tokens,\nall instances"
    left.plot(radii, cosines.mean(axis=1), color=BLUE, label=label)
    left.fill_between(radii, low, high, color=BLUE, alpha=0.18, linewidth=0)
    if best.any():
        mean = path.alignment[best, :, 0].mean(axis=0)
        left.plot(radii, mean, "--", color=ORANGE, label="optimal tokens,\nwhere selected")
    left.set(title="cosine of W to the separation", ylim=(0, 1.02))
    floor = 1e-12
    worst = np.maximum(path.stationarity.max(axis=0), floor)
    median = np.maximum(np.median(path.stationarity, axis=0), floor)
    right.plot(radii, worst, color=ORANGE, label="worst\ninstance")
    right.plot(radii, median, color=BLUE, label="median")
    right.set(title="stationarity", yscale="log")
    for ax in (left, right):
        ax.set_xlim(radii[0], radii[-1])
        figures.name_lines(ax)
    figure.savefig(arguments.output)
