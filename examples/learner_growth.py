"""Growth of examples and time with the dimension and the tokens; prints a table, writes one figure.

Random layers on Boolean tokens (`mh.data.boolean_layer`), p = d.  A number n of examples is enough
if `mh.learn_layer` learns at least 9 of 10 layers (--seeds, --allowed failures) with a parameter
error below 1e-10.  Numbers from --first on are doubled until one is enough; that or the one smaller
by sqrt(2), if it is enough too, counts.  d grows at fixed T, and T at fixed d; seconds are those of
a processor for one layer, the median at that number.  Exponents are fitted by least squares to
logarithms; the uncertainty is the standard error of the slope, at least the one that the grid
leaves, on which log n is known to log(2)/2, uniformly.
"""

import argparse
import time
from functools import cache

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast.figures import BLUE, ORANGE, STYLE, titled

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--dims", type=int, nargs="+", default=[6, 8, 10, 12])
parser.add_argument("--tokens", type=int, nargs="+", default=[2, 3, 4])
parser.add_argument("--fixed-dim", type=int, default=8, help="d where T grows")
parser.add_argument("--fixed-tokens", type=int, default=2, help="T where d grows")
parser.add_argument("--seeds", type=int, default=10)
parser.add_argument("--allowed", type=int, default=1, help="seeds that may fail")
parser.add_argument("--first", type=int, default=64, help="fewest examples")
parser.add_argument("--last", type=int, default=128_000, help="most examples")
parser.add_argument("--quick", action="store_true", help="two small sizes each, two seeds")
parser.add_argument("--output", default="learner_growth.png", help="the figure")
arguments = parser.parse_args()
if arguments.quick:
    arguments.dims, arguments.tokens, arguments.fixed_dim = [4, 5], [2, 3], 5
    arguments.seeds, arguments.last = 2, 1000


def learnt(n, dim, tokens):
    """Return how many of the layers are learnt, and the median of the processor seconds.

    It stops, with 0, where more fail than are allowed.
    """
    failed, seconds = 0, []
    for seed in range(arguments.seeds):
        data = mh.data.boolean_layer(n, tokens, dim, arguments.heads, seed=seed)
        begin = time.process_time()
        try:
            result = mh.learn_layer(data, heads=arguments.heads, seed=seed)
        except ValueError:  # fewer examples than unknowns
            return 0, np.nan
        seconds.append(time.process_time() - begin)
        truth = data.truth["layer"]
        failed += not (result.learnt and mh.learner.align(result.layer, truth).error < 1e-10)
        if failed > arguments.allowed:
            return 0, np.nan
    return arguments.seeds - failed, np.median(seconds)


@cache
def needed(dim, tokens):
    """Return the smallest n that is enough, how many are learnt, and the seconds; or NaN."""
    n = arguments.first
    while n <= arguments.last:
        found, seconds = learnt(n, dim, tokens)
        if found:
            fewer = int(n / 2**0.5)
            less, quicker = learnt(fewer, dim, tokens)
            return (fewer, less, quicker) if less else (n, found, seconds)
        n *= 2
    return np.nan, 0, np.nan


def exponent(x, values, grid):
    """Return the exponent of a power law and its standard error."""
    known = np.isfinite(values)
    x, y = np.log(np.array(x)[known]), np.log(np.array(values)[known])
    if len(x) < 2:
        return np.nan, np.nan
    away = x - x.mean()
    slope = (away @ y) / (away @ away)
    rest = y - y.mean() - slope * away
    variance = max(rest @ rest / max(len(x) - 2, 1), grid)
    return slope, np.sqrt(variance / (away @ away))


rows = {}
print(f"H = {arguments.heads}\n (d,T)  examples  learnt  seconds")
for name, sizes in (
    ("d", [(dim, arguments.fixed_tokens) for dim in arguments.dims]),
    ("T", [(arguments.fixed_dim, tokens) for tokens in arguments.tokens]),
):
    rows[name] = np.array([needed(*size) for size in sizes])
    for (dim, tokens), (n, found, seconds) in zip(sizes, rows[name], strict=True):
        told = f"{n:,.0f}" if np.isfinite(n) else f"more than {arguments.last:,}"
        print(f"({dim},{tokens})  {told:>9}  {found:.0f} of {arguments.seeds}  {seconds:.2f}",
              flush=True)  # fmt: skip
grid = np.log(2**0.5) ** 2 / 12
axes = {"d": np.array(arguments.dims), "T": np.array(arguments.tokens)}
fits = {}
for name, x in axes.items():
    for what, column, limit in (("examples", 0, grid), ("seconds", 2, 0.0)):
        fits[name, what] = exponent(x, rows[name][:, column], limit)
        slope, error = fits[name, what]
        print(f"{what} grow like {name}^{slope:.1f}, ± {error:.1f}")

with rc_context(STYLE):
    figure = titled(
        f"{arguments.heads} heads: the examples that the learner needs grow like "
        f"d^{fits['d', 'examples'][0]:.1f} (T = {arguments.fixed_tokens})\n"
        f"and like T^{fits['T', 'examples'][0]:.1f} (d = {arguments.fixed_dim}), as measured on "
        "these few sizes",
        4.4,
    )
    for column, (name, fixed) in zip(
        figure.subplots(2, 2).T,
        (("d", f"T = {arguments.fixed_tokens}"), ("T", f"d = {arguments.fixed_dim}")),
        strict=True,
    ):
        x, found = axes[name], rows[name]
        for ax, values, what, color in zip(
            column, (found[:, 0], found[:, 2]), ("examples", "seconds"), (BLUE, ORANGE), strict=True
        ):
            slope, error = fits[name, what]
            ax.plot(x, values, "o", color=color)
            middle = np.exp(np.nanmean(np.log(values[np.isfinite(values)])))
            centre = np.exp(np.log(x[np.isfinite(values)]).mean())
            ax.plot(x, middle * (x / centre) ** slope, "--", color="gray", linewidth=0.8)
            ax.text(0.04, 0.88, f"{name}^{slope:.1f} ± {error:.1f},  {fixed}",
                    transform=ax.transAxes, fontsize=8)  # fmt: skip
            ax.set(xscale="log", yscale="log", xlabel=name, ylabel=f"{what} needed")
            ax.set_xticks(x, x, minor=False)
            ax.tick_params(axis="x", which="minor", bottom=False)
            ax.minorticks_off()
    figure.savefig(arguments.output)
