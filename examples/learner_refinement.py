"""How often the phases, refinement after them and refinement alone succeed; table and one figure.

Random layers on Boolean tokens (`mh.data.boolean_layer`), p = d. The phases succeed with a hull
cosine of at least .95; refinement, after them or alone, with a parameter error below 1e-10. Alone
it starts from Gaussian layers of the true standard deviations, 2/d for W and d^(-1/2) for V.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument(
    "--sizes", nargs="+", default=["2,8,3,100000", "3,8,2,100000", "3,8,3,200000"],
    help="H,d,T,examples",
)  # fmt: skip
parser.add_argument("--seeds", type=int, default=20)
parser.add_argument("--starts", type=int, default=4, help="random starts of refinement alone")
parser.add_argument("--quick", action="store_true", help="one small size, two seeds")
parser.add_argument("--output", default="learner_refinement.png", help="the figure")
arguments = parser.parse_args()
if arguments.quick:
    arguments.sizes, arguments.seeds, arguments.starts = ["2,5,2,2000"], 2, 2

BARS = (
    "the phases",
    "refinement after them",
    "alone, one start",
    f"alone, best of {arguments.starts}",
)
NAMES = (
    "phases come near",
    "refined after them",
    "refined, random start",
    f"refined, best of {arguments.starts} starts",
)
COLOURS = (figures.BLUE, figures.BLUE, figures.ORANGE, figures.ORANGE)


def right(layer, truth):
    """Whether a layer is the true one."""
    return mh.learner.align(layer, truth).error < 1e-10


def alone(data, heads, seed):
    """Whether refinement alone finds the layer from the first start, and from the best of all."""
    truth, dim = data.truth["layer"], data.dim
    found = []
    for start in range(arguments.starts):
        unit = mh.Layer.gaussian(heads, dim, dim, std=1.0, seed=1000 * seed + start)
        scaled = mh.Layer(unit.W * (2 / dim), unit.V / np.sqrt(dim))
        found.append(mh.learner.refine(scaled, data.X, data.y, seed=seed))
        if found[-1].residual < 1e-10:
            break  # nothing can be better
    best = min(found, key=lambda one: one.residual)
    return right(found[0].layer, truth), right(best.layer, truth)


def successes(size, seed):
    """Whether each of the bars succeeds, and whether the layer is called learnt, and wrongly so."""
    heads, dim, tokens, n = size
    data = mh.data.boolean_layer(n, tokens, dim, heads, seed=seed)
    truth = data.truth["layer"]
    result = mh.learn_layer(data, heads=heads, seed=seed)
    near = exact = False
    if result.layer is not None:
        directions = result["second sculpting"].parts[2].directions
        near = mh.learner.hull_cosine(directions, truth.W) >= 0.95
        exact = right(result.layer, truth)
    return near, exact, *alone(data, heads, seed), result.learnt, result.learnt and not exact


def draw(counts):
    """Draw the successes of each way to learn, one panel for each size."""
    total = np.sum(counts, axis=0)
    layers = arguments.seeds * len(counts)
    message = (
        f"Refinement finds {total[1]} of {layers} layers if it starts from the phases,\n"
        f"{total[2]} from one random start and {total[3]} from the best of {arguments.starts}"
    )
    with rc_context(figures.STYLE):
        figure = figures.titled(message, 2.8)
        panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
        for ax, size, count in zip(panels, sizes, counts, strict=True):
            ax.barh(NAMES, count[: len(BARS)], color=COLOURS, height=0.6)
            for place, successes in enumerate(count[: len(BARS)]):
                ax.text(successes, place, f" {successes}", va="center", fontsize=8)
            ax.set(xlabel=f"layers of {arguments.seeds}", xlim=(0, 1.15 * arguments.seeds))
            ax.set_xticks([0, arguments.seeds // 2, arguments.seeds])
            ax.set_title("{} heads, d = {}, {} tokens".format(*size))
            ax.tick_params(axis="y", length=0)
        panels[0].invert_yaxis()
    return figure


sizes = [tuple(map(int, size.split(","))) for size in arguments.sizes]
counts = []
print(f"successes of {arguments.seeds} seeds")
print(f"{'H,d,T':>7} {'examples':>9}  " + "  ".join(BARS) + "  learnt  learnt and wrong")
for size in sizes:
    found = np.array([successes(size, seed) for seed in range(arguments.seeds)])
    counts.append(found.sum(axis=0))
    columns = (*BARS, "learnt", "learnt and wrong")
    row = "  ".join(f"{k:{len(b)}d}" for b, k in zip(columns, counts[-1], strict=True))
    print("{},{},{}".format(*size[:3]).rjust(7), f"{size[3]:9,d} ", row, flush=True)
draw(counts).savefig(arguments.output)
