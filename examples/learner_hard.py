"""Layers that compute a parity, beside random layers of the same size; a table and one figure.

Two Boolean tokens. Parity layers (`mh.data.parity_layer`, beta = 1) are hard to learn: what the
phases can certify does not lead to the heads, and the verdict must say so. Random layers
(`mh.data.boolean_layer`) have as many heads, tokens and examples. Left: eigen-gap above the H-th
eigenvalue; middle: residual of the best candidate of the net; right: held-out residual of what was
returned, learnt or not. Medians and seeds.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures
from mhfast.figures import BLUE, ORANGE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--n", type=int, default=100_000, help="examples")
parser.add_argument("--seeds", type=int, default=2)
parser.add_argument("--quick", action="store_true", help="the smallest size, few examples")
parser.add_argument("--output", default="learner_hard.png", help="the figure")
arguments = parser.parse_args()

SIZES = [(2, 8), (3, 10), (4, 10), (5, 12)]  # H, d
BETA = 1.0
if arguments.quick:
    SIZES, arguments.n, arguments.seeds = [(2, 5)], 2000, 1


def draw(kind, heads, dim, seed):
    """Draw the data of one instance."""
    if kind == "parity":
        return mh.data.parity_layer(arguments.n, dim, heads, BETA, seed=seed)
    return mh.data.boolean_layer(arguments.n, 2, dim, heads, seed=seed)


def learn(kind, heads, dim, seed):
    """Gap, net residual, held-out residual and whether learnt, of one instance; or None."""
    result = mh.learn_layer(draw(kind, heads, dim, seed), heads=heads, seed=seed)
    if seed == 0:
        verdicts.append(f"{kind} H = {heads}, d = {dim}: {result.verdict}")
    if result.layer is None:
        return None
    body, net = result["second sculpting"].parts[2], result["net"].parts[0]
    return body.gap, net.candidates[0].values.residual, result.held_out, result.learnt


verdicts = []
found, medians = {}, {}
print(f"{arguments.n:,} examples, medians of {arguments.seeds} seeds")
print("layer   H   d       gap  net residual  held-out  learnt")
for kind in ("parity", "random"):
    medians[kind] = []
    for heads, dim in SIZES:
        every = [learn(kind, heads, dim, seed) for seed in range(arguments.seeds)]
        found[kind, heads] = np.array([one for one in every if one is not None])
        if len(found[kind, heads]) == 0:
            print(f"{kind:6} {heads:2d} {dim:3d}  the phases ended early in every seed")
            continue
        medians[kind].append([heads, *np.median(found[kind, heads], axis=0)[:3]])
        print(f"{kind:6} {heads:2d} {dim:3d}", end=" ")
        print("{:9.3g} {:13.2g} {:9.2g}".format(*medians[kind][-1][1:]), end=" ")
        learnt = int(found[kind, heads][:, 3].sum())
        print(f"{learnt} of {arguments.seeds}".rjust(7), flush=True)

learnt = dict.fromkeys(medians, 0)
for (kind, _), values in found.items():
    learnt[kind] += int(values[:, 3].sum()) if len(values) else 0
with rc_context(figures.STYLE):
    figure = figures.titled(
        "Layers that compute a parity are hard, and the verdict says so: "
        f"{learnt['parity']} of {len(SIZES) * arguments.seeds} are called learnt,\n"
        f"of random layers of the same sizes {learnt['random']}",
        3.1,
    )
    axes = figure.subplots(1, 3)
    for kind, colour in (("parity", ORANGE), ("random", BLUE)):
        for heads, _ in SIZES:
            for ax, values in zip(axes, found[kind, heads].T, strict=False):
                ax.plot([heads] * len(values), values, ".", color=colour)
        for ax, values in zip(axes, np.array(medians[kind]).T[1:], strict=False):
            ax.plot(np.array(medians[kind]).T[0], values, color=colour, label=kind)
    titles = ("eigen-gap", "residual of the net", "held-out residual")
    for ax, title in zip(axes, titles, strict=True):
        ax.set(title=title, yscale="log", xlabel="heads H", xticks=[heads for heads, _ in SIZES])
        ax.set_xlim(SIZES[0][0] - 0.3, SIZES[-1][0] + 0.3)
        figures.name_lines(ax)
    axes[2].axhline(1e-8, color="gray", linestyle=":")
    axes[2].text(SIZES[0][0], 1e-8, "learnt below", va="bottom", fontsize=8, color="gray")
    figure.savefig(arguments.output)
print(*verdicts, sep="\n")
