"""What each phase of learning a layer leaves to the next, by size; prints a table, one figure.

Random layers on Boolean tokens (`mh.data.boolean_layer`), p = d, a few seeds. Left: error of the
sum of the value matrices after phases 1, 3 and 4. Middle: how far the true key-query matrices lie
from the hull that was sculpted in phases 2 and 4. Right: error of all parameters, after the best
order of the heads, when the phases are done and after refinement. All are norms relative to the
truth; lines are medians, dots seeds.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--quick", action="store_true", help="two small sizes, one seed")
parser.add_argument("--output", default="learner_phases.png", help="the figure")
arguments = parser.parse_args()

SIZES = [  # H, d, T, examples
    (1, 8, 6, 20_000),
    (2, 8, 3, 100_000),
    (2, 12, 3, 100_000),
    (3, 12, 2, 100_000),
    (3, 8, 3, 200_000),
]
PANELS = {
    "sum of value matrices": ("1 crude", "3 refined", "4 again"),
    "key-query matrices off the hull": ("2 sculpted", "4 again"),
    "all parameters": ("6 values", "refined"),
}
if arguments.quick:
    SIZES, arguments.seeds = [(1, 6, 3, 2000), (2, 5, 2, 2000)], 1


def relative(error, truth):
    """Norm of an error, relative to that of the truth."""
    return np.linalg.norm(error) / np.linalg.norm(truth)


def off_hull(body, W):
    """Distance of W (H, d, d) from a hull."""
    coordinates = np.tensordot(W - body.point, body.directions, axes=((1, 2), (1, 2)))
    return relative(W - body.at(coordinates), W)


def learn(size, seed):
    """Errors of one layer in every panel, and the hull cosines; inf where nothing was found."""
    heads, dim, tokens, n = size
    data = mh.data.boolean_layer(n, tokens, dim, heads, seed=seed)
    truth = data.truth["layer"]
    result = mh.learn_layer(data, heads=heads, seed=seed)
    parts = {phase.name: phase.parts for phase in result.phases}
    sums = ("crude sum", "refined sum", "second sculpting")
    bodies = [parts[name][-1] for name in ("sculpting", "second sculpting") if name in parts]
    V_sum = truth.V.sum(axis=0)
    errors = (
        [relative(parts[name][0].V_sum - V_sum, V_sum) for name in sums if name in parts],
        [off_hull(body, truth.W) for body in bodies],
        [mh.learner.align(x, truth).error for x in (result.unrefined, result.layer) if x],
    )
    cosines = [mh.learner.hull_cosine(body.directions, truth.W) for body in bodies]
    filled = [
        found + [np.inf] * (len(names) - len(found))
        for found, names in zip(errors, PANELS.values(), strict=True)
    ]
    return [*filled, cosines + [0.0] * (2 - len(cosines))]


COLOURS = {1: figures.GREEN, 2: figures.BLUE, 3: figures.ORANGE}  # of H
found = []
print(f"medians of {arguments.seeds} seeds: relative errors, and the hull cosine")
print("                    error of the sum, after    off the hull     hull cosine      parameters")
print(f"{'H':>2}{'d':>4}{'T':>3}{'examples':>10}", end="")
print("{:>10}{:>9}{:>9}{:>10}{:>9}{:>8}{:>7}{:>10}{:>9}".format(*"134", *"24", *"24", 6, "refined"))
for size in SIZES:
    seeds = [learn(size, seed) for seed in range(arguments.seeds)]
    *errors, cosines = (np.array(column) for column in zip(*seeds, strict=True))
    found.append(errors)
    row = [np.median(values, axis=0) for values in (*errors, cosines)]
    print("{:2d} {:3d} {:2d} {:9,d}".format(*size), end="  ")
    print(" ".join(f"{value:8.2g}" for value in row[0]), end="  ")
    print(" ".join(f"{value:8.2g}" for value in row[1]), end="  ")
    print(" ".join(f"{value:6.3f}" for value in row[3]), end="  ")
    print(" ".join(f"{value:8.2g}" for value in row[2]), flush=True)

last = np.array([np.median(parameters, axis=0) for _, _, parameters in found])
with rc_context(figures.STYLE):
    figure = figures.titled(
        f"Each phase brings the layer nearer: parameters are off by {last[:, 0].min():.1g} to "
        f"{last[:, 0].max():.1g} after the last,\n"
        f"by at most {last[:, 1].max():.0e} after refinement",
        3.4,
    )
    axes = figure.subplots(1, 3, width_ratios=[3, 2, 2])
    for (heads, dim, tokens, _), errors in zip(SIZES, found, strict=True):
        for ax, values in zip(axes, errors, strict=True):
            x = np.arange(values.shape[1])
            label = f"H = {heads}\nd = {dim}, T = {tokens}"
            ax.plot(x, np.median(values, axis=0), color=COLOURS[heads], label=label)
            ax.plot(x, values.T, ".", color=COLOURS[heads])
    for ax, (title, names) in zip(axes, PANELS.items(), strict=True):
        ax.set(title=title, yscale="log", xlim=(-0.25, len(names) - 0.9))
        ax.set_xticks(range(len(names)), names)
        ax.set_xlabel("after phase")
    axes[0].set_ylabel("relative error")
    for ax in axes[:2]:  # in the last panel all lines end together
        figures.name_lines(ax)
    figure.savefig(arguments.output)
