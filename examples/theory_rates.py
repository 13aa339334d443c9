"""Rates in samples and steps, and the theorem's own bounds where it applies; writes one figure.

Above, the noisy tokenized mixture with tokens of norm 1, about which no theorem speaks: test loss
minus training loss after training on n samples; training loss at step k; and the on-average
stability, measured exactly by training n + 1 classifiers, each without one sample, next to the
test gap, on several data sets.  Below, the same with long tokens, balanced signs and the step size
of `mh.theory.best_bound`: stability against n and against k with the bound of
`mh.theory.local_stability`, and the mean loss of steps 1 to k with that of `best_bound`.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast.figures import BLUE, ORANGE, STYLE, titled

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--samples", type=int, nargs="+", default=[25, 50, 100, 200, 400, 800])
parser.add_argument("--test", type=int, default=20000, help="test samples")
parser.add_argument("--left-out", type=int, default=50, help="samples of the panels on the right")
parser.add_argument("--data-sets", type=int, default=7, help="data sets left out from")
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--trials", type=int, default=5)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--long-heads", type=int, default=20, help="an even number, for long tokens")
parser.add_argument("--long-samples", type=int, default=100, help="up to so many are left out")
parser.add_argument("--long-sets", type=int, default=3, help="data sets of long tokens")
parser.add_argument("--output", default="rates.png", help="the figure")
arguments = parser.parse_args()
K = arguments.steps


def slope(x, y):
    """Exponent of the power law that fits best."""
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def short(n, seeds):
    """Training set, test set of the same population, and a start."""
    train = mh.data.tokenized_mixture(n, 10, 20, noise=2.0, seed=seeds)
    start = mh.Classifier.random_step(train, arguments.heads, seed=seeds)
    return train, train.sample(arguments.test, seed=seeds), start


def long(n, seed):
    """Training set and start where the theorem applies, and its bound for all steps."""
    data = mh.data.tokenized_mixture(
        n, 4, 5, relevant_fraction=0.5, contexts=1, norm=40.0, noise=10.0, seed=seed
    )
    start = mh.Classifier.random_step(data, arguments.long_heads, seed=seed, balanced=True)
    return data, start, mh.theory.best_bound(data, K, start=start)


def stability_bound(data, start, lr, steps):
    """Return the theorem's bound of the stability after so many steps."""
    return mh.theory.local_stability(start, data, lr=lr, steps=steps).bound


record = {"loss": 1, "test_loss": K}
losses, tests = [], []
for n in arguments.samples:
    train, test, start = short(n, range(arguments.trials))
    step = mh.GradientDescent(arguments.lr)
    run = mh.train(start, train, steps=K, optimizer=step, test=test, record=record)
    losses.append(run.history["loss"])
    tests.append(run.history["test_loss"][:, -1])
losses, tests = np.array(losses), np.array(tests)
gaps = tests - losses[:, :, -1]
found = []
for seed in range(arguments.data_sets):
    train, test, start = short(arguments.left_out, seed)
    given = {"steps": K, "lr": arguments.lr, "every": 10, "test": test}
    found.append(mh.theory.leave_one_out(start, train, **given))
stability, gap = (np.array([getattr(f, name) for f in found]) for name in ("stability", "gap"))
n, k = np.array(arguments.samples), np.arange(1, K + 1)
curve = losses[-1].mean(axis=0)[1:]
late = k >= K / 4
of_n, of_k = slope(n, np.abs(gaps.mean(axis=1))), slope(k[late], curve[late])
print("tokens of norm 1\n   n  training loss  test loss      gap")
for row in zip(n, losses[:, :, -1].mean(1), tests.mean(1), gaps.mean(1), strict=True):
    print("{:4d}  {:13.4f}  {:9.4f}  {:7.4f}".format(*row))
print(f"exponent of the gap in n: {of_n:.2f}")
print(f"exponent of the training loss in k, last three quarters: {of_k:.2f}")
ratio = stability[:, -1] / gap[:, -1]
print(f"n = {arguments.left_out}, {len(ratio)} data sets: stability {stability[:, -1].mean():.4f}, "
      f"gap {gap[:, -1].mean():.4f} in the mean")  # fmt: skip
print(f"stability / gap: {', '.join(f'{r:.2f}' for r in ratio)}; mean {ratio.mean():.2f}")

print(f"\ntokens of norm 40, H = {arguments.long_heads}, {K} steps: means of "
      f"{arguments.long_sets} data sets")  # fmt: skip
print("   n  stability: measured     bound")
seeds = range(arguments.long_sets)
by_n, left_out = {"measured": [], "bound": []}, []
for size in arguments.samples:
    measured, bounds = [], []
    for seed in seeds:
        data, start, best = long(size, seed)
        bounds.append(stability_bound(data, start, best.lr, K))
        if size > arguments.long_samples:
            continue
        given = {"steps": K, "lr": best.lr, "every": max(K // 20, 1), "divisor": "n"}
        one = mh.theory.leave_one_out(start, data, **given)
        measured.append(one.stability[-1])
        if size == arguments.left_out:
            left_out.append((one, data, start, best.lr))
    by_n["measured"].append(np.mean(measured) if measured else np.nan)
    by_n["bound"].append(np.mean(bounds))
    shown = f"{by_n['measured'][-1]:.2g}" if measured else ""
    print(f"{size:4d}  {shown:>19}  {by_n['bound'][-1]:8.2g}", flush=True)
many = ~np.isnan(by_n["measured"])
print(f"exponents in n: measured {slope(n[many], np.array(by_n['measured'])[many]):.2f}, "
      f"bound {slope(n, by_n['bound']):.2f}")  # fmt: skip

data, start, best = long(arguments.samples[-1], 0)
run = mh.train(start, data, steps=K, optimizer=mh.GradientDescent(best.lr))
mean = np.cumsum(run.history["loss"][1:]) / k
at = np.unique(np.geomspace(1, K, 16).astype(int))
each = [mh.theory.best_bound(data, int(j), start=start, lr=best.lr) for j in at]
guaranteed = np.array([b.bound if b.applies else np.nan for b in each])
print(f"\nn = {n[-1]}, step size {best.lr:.3g}\n   k  mean loss  guaranteed")
for row in zip(at, mean[at - 1], guaranteed, strict=True):
    print("{:4d}  {:9.4f}  {:10.4f}".format(*row))
print(f"exponents in k, last three quarters: measured {slope(k[late], mean[late]):.2f}, guaranteed "
      f"{slope(at[at >= K / 4], guaranteed[at >= K / 4]):.2f}")  # fmt: skip

steps, curves, bounds_by_k = [], [], []
if left_out:
    steps = left_out[0][0].steps[1:]
    curves = np.array([one.stability[1:] for one, *_ in left_out])
    ends = steps[:: max(len(steps) // 5, 1)]
    bounds_by_k = np.array([
        [stability_bound(data, start, lr, int(j)) for j in ends] for _, data, start, lr in left_out
    ])  # fmt: skip
    print(f"\nn = {arguments.left_out}\n   k  stability: measured     bound")
    for j, bound in zip(ends, bounds_by_k.mean(axis=0), strict=True):
        print(f"{j:4d}  {curves.mean(axis=0)[list(steps).index(j)]:19.2g}  {bound:8.2g}")


def name(ax, x, y, text, color, **settings):
    """Write the name of a line beside it."""
    ax.text(x, y, text, color=color, fontsize=8, **settings)


with rc_context(STYLE):
    near = guaranteed[-1] / mean[-1]
    close = np.nanmax(np.divide(by_n["bound"], by_n["measured"]))
    figure = titled(
        f"Tokens of norm 1: gap like n^{of_n:.2f}, loss like k^{of_k:.2f}; no theorem applies\n"
        f"Tokens of norm 40: the theorems bound the loss within a factor of {near:.1f}, "
        f"stability of {close:.1f}",
        4.8,
    )
    panels = figure.subplots(2, 3)
    (left, middle, right), (left_long, middle_long, right_long) = panels
    left.plot(n, gaps, ".", color=BLUE)
    left.plot(n, gaps.mean(axis=1), color=BLUE)
    left.plot(n, gaps.mean(axis=1)[-1] * n[-1] / n, "--", color="gray")
    name(left, 0.03, 0.06, "test gap, mean of trials", BLUE, transform=left.transAxes)
    name(left, n[0] * 1.3, gaps.mean(axis=1)[-1] * n[-1] / n[0], "1/n", "gray")
    left.set(ylabel="test loss - training loss")
    middle.plot(k, curve, color=BLUE)
    middle.plot(k, curve[-1] * k[-1] / k, "--", color="gray")
    middle.set(ylabel="training loss", ylim=(curve.min() / 2, 2 * curve.max()))
    name(middle, 0.03, 0.06, f"training loss, n = {n[-1]}", BLUE, transform=middle.transAxes)
    name(middle, curve[-1] * k[-1] / curve[0], curve[0], "  1/k", "gray")
    for values, color in ((gap, ORANGE), (stability, BLUE)):
        right.plot(found[0].steps, values.T, color=color, linewidth=0.5, alpha=0.4)
        right.plot(found[0].steps, values.mean(axis=0), color=color)
    top = max(gap.max(), stability.max())
    name(right, 0, 0.95 * top, "stability, measured", BLUE)
    name(right, 0, 0.85 * top, "test gap", ORANGE)
    right.set(ylabel=f"loss difference, n = {arguments.left_out}")

    left_long.plot(n, by_n["bound"], "--", color=ORANGE)
    left_long.plot(n, by_n["measured"], ".-", color=BLUE)
    name(left_long, n[len(n) // 2], by_n["bound"][len(n) // 2], "  theorem", ORANGE)
    name(left_long, 0.03, 0.06, "measured", BLUE, transform=left_long.transAxes)
    left_long.set(ylabel="stability")
    middle_long.plot(at, guaranteed, "--", color=ORANGE)
    middle_long.plot(k, mean, color=BLUE)
    name(middle_long, at[len(at) // 2], guaranteed[len(at) // 2], "  theorem", ORANGE)
    told = f"mean loss of steps 1 to k,\nmeasured, n = {n[-1]}"
    name(middle_long, 0.03, 0.06, told, BLUE, transform=middle_long.transAxes)
    middle_long.set(ylabel="training loss")
    if len(steps):
        right_long.plot(ends, bounds_by_k.T, ".", color=ORANGE, markersize=3, alpha=0.4)
        right_long.plot(steps, curves.T, color=BLUE, linewidth=0.5, alpha=0.4)
        right_long.plot(ends, bounds_by_k.mean(axis=0), "D", color=ORANGE, markersize=4)
        right_long.plot(steps, curves.mean(axis=0), color=BLUE)
        name(right_long, ends[-1], bounds_by_k.max(), "theorem", ORANGE, ha="right")
        name(right_long, 0.03, 0.06, "measured", BLUE, transform=right_long.transAxes)
        right_long.set_ylim(bottom=0.0)
    right_long.set(ylabel=f"stability, n = {arguments.left_out}")
    for ax in (left, middle, left_long, middle_long):
        ax.set(xscale="log", yscale="log")
    for ax in (left, left_long):
        ax.set_xticks(n, n, minor=False)
        ax.minorticks_off()
    for row in panels:
        for ax, label in zip(row, ("training samples n", "step k", "step k"), strict=True):
            ax.set_xlabel(label)
    figure.savefig(arguments.output)
