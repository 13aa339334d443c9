"""Word order in real text: heads, attention and W = 0; prints a table, writes one figure.

The text is that of Python's own language reference, which every Python ships for `help()`
(`pydoc_data.topics`, 64,000 words of plain English); versions of Python differ a little in it.  A
sample is a window of T words, label 1 as written and label -1 with its words in random order, so
that no count of words tells the classes apart.  A token is the vector of its word (words beyond the
400 most frequent share one), from the singular vectors of the positive pointwise mutual information
of neighbors in the training text, and its place.  Training windows are of the first 80 % of the
words, test windows of the rest.
"""

import argparse
import re
from collections import Counter
from pydoc_data import topics

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures
from mhfast.figures import BLUE, ORANGE

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
parser.add_argument("--words", type=int, default=400, help="size of the dictionary")
parser.add_argument("--dim", type=int, default=32, help="of the vector of a word")
parser.add_argument("--tokens", type=int, default=8, help="words of a window")
parser.add_argument("--n", type=int, default=20_000, help="training windows")
parser.add_argument("--test", type=int, default=5000, help="test windows")
parser.add_argument("--trials", type=int, default=3)
parser.add_argument("--steps", type=int, default=300, help="steps of 500 samples")
parser.add_argument("--output", default="text.png", help="the figure")
arguments = parser.parse_args()
V, T = arguments.words, arguments.tokens

text = " ".join(topics.topics[name] for name in sorted(topics.topics)).lower()
words = re.findall(r"[a-z]+", text)
known = int(0.8 * len(words))
frequent = [word for word, _ in Counter(words[:known]).most_common(V - 1)]
number = {word: k + 1 for k, word in enumerate(frequent)}
first, rest = np.split(np.array([number.get(word, 0) for word in words]), [known])


def vectors():
    """Vectors (V, dim) of words, from the words before and after them in the training text."""
    pairs = np.zeros((V, V))
    np.add.at(pairs, (first[:-1], first[1:]), 1.0)
    alone = np.outer(pairs.sum(axis=1), pairs.sum(axis=0)) / pairs.sum()
    information = np.log(np.maximum(pairs, 1.0) / np.maximum(alone, 1.0))
    left, size, right = np.linalg.svd(np.maximum(information, 0.0))
    half = arguments.dim // 2
    both = np.concatenate([left[:, :half], right[:half].T], axis=1) * np.sqrt(
        np.tile(size[:half], 2)
    )
    return both / np.sqrt(np.mean(np.sum(both**2, axis=1)))


def windows(part, n, seed):
    """Draw n windows, every second one in random order."""
    rng = np.random.default_rng(seed)
    at = rng.integers(0, len(part) - T, n)
    found = part[at[:, None] + np.arange(T)]
    found[1::2] = rng.permuted(found[1::2], axis=1)
    places = np.broadcast_to(np.eye(T), (n, T, T))
    X = np.concatenate([embedding[found], places], axis=2).astype(np.float32)
    return mh.Dataset(X, np.where(np.arange(n) % 2, -1.0, 1.0))


embedding = vectors()
print(f"{len(words):,} words, {len(set(words)):,} different ones")
every = max(arguments.steps // 10, 1)
curves, ends = {}, {}
print("  H  training  test  test with W = 0   (accuracy in %, mean of trials)")
for H in arguments.heads:
    curves[H], ends[H] = [], []
    for trial in range(arguments.trials):
        train, test = windows(first, arguments.n, trial), windows(rest, arguments.test, trial)
        start = mh.Classifier.gaussian(
            H, T, arguments.dim + T, std=0.05, seed=trial, dtype=np.float32
        )
        run = mh.train(
            start, train, steps=arguments.steps, optimizer=mh.Adam(0.01), seed=trial,
            batch=min(500, arguments.n), test=test, record={"test_accuracy": every},
        )  # fmt: skip
        without = mh.Classifier(np.zeros_like(run.model.W), run.model.U)
        curves[H].append(100 * run.history["test_accuracy"])
        ends[H].append([100 * run.model.accuracy(train), curves[H][-1][-1],
                        100 * without.accuracy(test)])  # fmt: skip
    print("{:3d}  {:8.1f}  {:4.1f}  {:15.1f}".format(H, *np.mean(ends[H], axis=0)), flush=True)

table = np.array([ends[H] for H in arguments.heads])
few, many = table[[0, -1], :, 1].mean(axis=1)
with rc_context(figures.STYLE):
    figure = figures.titled(
        f"Attention tells English text from its words in random order: {few:.1f} % right with "
        f"{arguments.heads[0]} head,\n{many:.1f} % with {arguments.heads[-1]}; "
        f"without attention, W = 0, {table[-1, :, 2].mean():.1f} %",
        3.3,
    )
    left, right = figure.subplots(1, 2)
    steps = run.steps["test_accuracy"]
    for H, color in ((arguments.heads[0], ORANGE), (arguments.heads[-1], BLUE)):
        left.plot(steps, np.mean(curves[H], axis=0), color=color, label=f"H = {H}")
    left.set(xlabel="step", ylabel="test accuracy (%)", xlim=(0, arguments.steps))
    names = ("training", "test", "test, W := 0")
    for k, (name, color) in enumerate(zip(names, (ORANGE, BLUE, "black"), strict=True)):
        right.plot(arguments.heads, table[:, :, k], ".", color=color)
        right.plot(arguments.heads, table[:, :, k].mean(axis=1), color=color, label=name)
    right.set(xscale="log", xlabel="heads H", ylabel="accuracy after training (%)")
    right.set_xticks(arguments.heads, arguments.heads, minor=False)
    right.minorticks_off()
    for ax in (left, right):
        ax.axhline(50, color="gray", linestyle=":", linewidth=0.8)
        figures.name_lines(ax)
    figure.savefig(arguments.output)
