"""Examples that the phases need against the number of heads; prints a table, writes one figure.

Random layers on Boolean tokens (`mh.data.boolean_layer`), p = d, T = 2. Examples are doubled until
in most seeds the phases alone, without refinement, come near: for H > 1 a hull cosine of at least
.95; for H = 1, whose hull is a point, a parameter error of at most .05, which then takes the place
of the sine in the figure.
"""

import argparse

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

import mhfast as mh
from mhfast._demo.figure import STYLE

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
needed = {}
print(f"d = {arguments.dim}, T = {arguments.tokens}, {arguments.seeds} seeds: how many come near")
with rc_context(STYLE):
    figure = Figure(figsize=(8.0, 3.0), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    for heads, shade in zip(arguments.heads, shades, strict=True):
        limit = 0.05 if heads == 1 else np.sqrt(1.0 - 0.95**2)
        n, tried = arguments.first, {}
        while n <= arguments.last:
            tried[n] = [deviation(n, heads, seed) for seed in range(arguments.seeds)]
            near = np.count_nonzero(np.array(tried[n]) <= limit)
            median = np.median(tried[n])
            print(f"H = {heads}  n = {n:9,d}  near {near}  deviation {median:.3f}", flush=True)
            if 2 * near > arguments.seeds:
                needed[heads] = n
                break
            n *= 2
        counts, values = np.array(list(tried)), np.array(list(tried.values()))
        left.plot(counts, np.median(values, axis=1), color=shade, label=f"H = {heads}")
        left.plot(counts, values, ".", color=shade)
        right.plot(heads, counts[-1], "o" if heads in needed else "^", color=shade)
    right.plot(list(needed), list(needed.values()), color="gray", zorder=0, linewidth=0.8)
    left.axhline(np.sqrt(1.0 - 0.95**2), color="gray", linestyle=":", label="hull cosine .95")
    left.set(xscale="log", yscale="log", xlabel="examples n", ylabel="sine of the hull's angle")
    left.legend()
    if len(needed) < len(arguments.heads):
        right.plot([], [], "k^", label="more than that")
        right.legend(loc="upper left")
    right.set(yscale="log", xlabel="heads H", ylabel="examples needed", xticks=arguments.heads)
    figure.savefig(arguments.output)
for heads in arguments.heads:
    told = f"{needed[heads]:,}" if heads in needed else f"more than {arguments.last:,}"
    print(f"H = {heads} needs {told}")
