"""Examples that the phases need against the number of heads; prints a table, writes one figure.

Random layers on Boolean tokens (`mh.data.boolean_layer`), p = d, T = 2. Examples are doubled until
in most seeds the phases alone, without refinement, come near: for H > 1 a hull cosine of at least
.95; for H = 1, whose hull is a point, a parameter error of at most .05, which then takes the place
of the sine in the figure.
"""

import argparse

import numpy as np
from matplotlib import colormaps, rc_context

import mhfast as mh
from mhfast import figures

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 3, 4])
parser.add_argument("--dim", type=int, default=10)
parser.add_argument("--tokens", type=int, default=2)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--first", type=int, default=250, help="fewest examples")
parser.add_argument("--last", type=int, default=256_000, help="most examples")
parser.add_argument("--quick", action="store_true", help="two heads at most, few examples")
parser.add_argument("--output", default="learner_examples.png", help="the figure")
arguments = parser.parse_args()
if arguments.quick:
    arguments.heads, arguments.dim, arguments.seeds = [1, 2], 5, 1
    arguments.first, arguments.last = 1000, 2000


def deviation(n, heads, seed):
    """How far from near: sine of the hull's angle, or for one head the parameter error."""
    data = mh.data.boolean_layer(n, arguments.tokens, arguments.dim, heads, seed=seed)
    truth = data.truth["layer"]
    result = mh.learn_layer(data, heads=heads, refinement=False, seed=seed)
    if result.unrefined is None:
        return 1.0
    if heads == 1:
        return min(1.0, mh.learner.align(result.unrefined, truth).error)
    cosine = mh.learner.hull_cosine(result["second sculpting"].parts[2].directions, truth.W)
    return np.sqrt(1.0 - cosine**2)


shades = colormaps["viridis"](np.linspace(0, 0.9, len(arguments.heads)))
needed, tried = {}, {}
limit = np.sqrt(1.0 - 0.95**2)  # the sine at a hull cosine of .95
print(f"d = {arguments.dim}, T = {arguments.tokens}, {arguments.seeds} seeds: how many come near")
for heads in arguments.heads:
    n, tried[heads] = arguments.first, {}
    while n <= arguments.last:
        found = [deviation(n, heads, seed) for seed in range(arguments.seeds)]
        tried[heads][n] = found
        near = np.count_nonzero(np.array(found) <= (0.05 if heads == 1 else limit))
        print(
            f"H = {heads}  n = {n:9,d}  near {near}  deviation {np.median(found):.3f}", flush=True
        )
        if 2 * near > arguments.seeds:
            needed[heads] = n
            break
        n *= 2
told = {
    heads: f"{needed[heads]:,}" if heads in needed else f"more than {arguments.last:,}"
    for heads in arguments.heads
}
with rc_context(figures.STYLE):
    figure = figures.titled(
        "Each further head needs several times as many examples: "
        + ", ".join(f"{count} with {heads}" for heads, count in told.items()),
        3.2,
    )
    left, right = figure.subplots(1, 2)
    for (heads, results), shade in zip(tried.items(), shades, strict=True):
        counts, values = np.array(list(results)), np.array(list(results.values()))
        left.plot(counts, np.median(values, axis=1), color=shade)
        left.plot(counts, values, ".", color=shade)
        left.annotate(f"H = {heads}", (counts[-1], np.median(values[-1])), xytext=(0, -7),
                      textcoords="offset points", ha="center", va="top", color=shade,
                      fontsize=8)  # fmt: skip
        right.plot(heads, counts[-1], "o" if heads in needed else "^", color=shade)
        right.annotate(told[heads], (heads, counts[-1]), xytext=(0, 7), ha="center",
                       textcoords="offset points", color=shade, fontsize=8)  # fmt: skip
    right.plot(list(needed), list(needed.values()), color="gray", zorder=0, linewidth=0.8)
    left.axhline(limit, color="gray", linestyle=":", label="near: hull\ncosine .95")
    left.set(xscale="log", yscale="log", xlabel="examples n", ylabel="sine of the hull's angle")
    left.margins(x=0.12, y=0.1)
    right.set(yscale="log", xlabel="heads H", ylabel="examples needed", xticks=arguments.heads)
    right.margins(0.15)
    figures.name_lines(left)
    figure.savefig(arguments.output)
for heads in arguments.heads:
    print(f"H = {heads} needs {told[heads]}")
