"""A task in which more heads generalize better, and why; prints a table, writes one figure.

Labels are the sign of a teacher: a classifier of random heads with sharp attention, which looks
from the first token at all (q = 1).  Students of 1 to 16 heads train on the same samples by Adam.
With a teacher of four heads a label adds four look-ups, of different tokens by different rules; a
student of one head has one set of weights for a sample, and errs on training samples as on new
ones.  With a teacher of one head, the control, more heads have nothing to add.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures
from mhfast.figures import BLUE, ORANGE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 16])
parser.add_argument("--teachers", type=int, nargs="+", default=[4, 1], help="the teacher's H")
parser.add_argument("--n", type=int, default=5000, help="training samples")
parser.add_argument("--test", type=int, default=10_000, help="test samples")
parser.add_argument("--tokens", type=int, default=4)
parser.add_argument("--dim", type=int, default=5)
parser.add_argument("--sharpness", type=float, default=4.0, help="entries of W are N(0, (s/d)²)")
parser.add_argument("--trials", type=int, default=5)
parser.add_argument("--steps", type=int, default=1500)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--output", default="more_heads.png", help="the figure")
arguments = parser.parse_args()
T, d, n = arguments.tokens, arguments.dim, arguments.n


def random(rng, heads, of_scores, of_readout):
    """Make a classifier that looks from the first token."""
    W = of_scores / d * rng.standard_normal((heads, d, d))
    return mh.Classifier(W, of_readout * rng.standard_normal((heads, 1, d)), query=0)


def task(heads, trial):
    """Draw training and test set of one teacher."""
    rng = np.random.default_rng([trial, heads])
    teacher = random(rng, heads, arguments.sharpness, 1.0)
    X = rng.standard_normal((n + arguments.test, T, d))
    y = np.where(teacher(X) > 0, 1.0, -1.0)
    return mh.Dataset(X[:n], y[:n]), mh.Dataset(X[n:], y[n:])


def errors(heads, students, trial):
    """Return training and test error in percent after training, (students, 2)."""
    train, test = task(heads, trial)
    found = []
    for H in students:
        start = random(np.random.default_rng([trial, 100]), H, 0.5, 0.1)
        run = mh.train(start, train, steps=arguments.steps, optimizer=mh.Adam(arguments.lr))
        found.append([100 * (1 - run.model.accuracy(part)) for part in (train, test)])
    return found


tables = {}
for teacher in arguments.teachers:
    trials = [errors(teacher, arguments.heads, trial) for trial in range(arguments.trials)]
    tables[teacher] = np.array(trials)  # (trials, students, 2)
    print(f"teacher of {teacher} heads: error in %, mean of {arguments.trials} trials")
    print("  H  training   test   (smallest to largest)")
    for k, H in enumerate(arguments.heads):
        mean, of_test = tables[teacher][:, k].mean(axis=0), tables[teacher][:, k, 1]
        row = (H, *mean, of_test.min(), of_test.max())
        print("{:3d}  {:8.2f}  {:5.2f}   ({:.2f} to {:.2f})".format(*row), flush=True)

best = []  # for the title: the least test error for each teacher, and with how many heads
for teacher, table in tables.items():
    means = table[:, :, 1].mean(axis=0)
    H = arguments.heads[int(means.argmin())]
    look_ups, heads = f"{teacher} look-up{'s' * (teacher > 1)}", f"{H} head{'s' * (H > 1)}"
    best.append(f"{means.min():.1f} % for {look_ups} ({heads})")

with rc_context(figures.STYLE):
    figure = figures.titled(
        f"Least test error: {' and '.join(best)} in a label; fewer heads than look-ups cannot "
        "represent the label, more fit training samples only",
        3.3,
    )
    panels = np.ravel(figure.subplots(1, len(tables), sharey=True))
    for ax, (teacher, table) in zip(panels, tables.items(), strict=True):
        for part, (name, color) in enumerate((("training", ORANGE), ("test", BLUE))):
            values = table[:, :, part]
            ax.plot(arguments.heads, values.mean(axis=0), "o-", color=color, label=name)
            band = values.min(axis=0), values.max(axis=0)
            ax.fill_between(arguments.heads, *band, color=color, alpha=0.15, linewidth=0)
        ax.axvline(teacher, color="gray", linestyle=":", linewidth=0.8)
        ax.annotate(
            "the teacher's heads", (teacher, 0.98), (4, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", color="gray", fontsize=8,
        )  # fmt: skip
        ax.set(xscale="log", xlabel="heads H of the student")
        ax.set_xticks(arguments.heads, arguments.heads, minor=False)
        ax.minorticks_off()
        ax.set_title(f"labels by {teacher} look-up{'s' * (teacher > 1)}")
    panels[0].set(ylabel="error (%)", ylim=(0, None))
    for ax in panels:
        figures.name_lines(ax)
    figure.savefig(arguments.output)
