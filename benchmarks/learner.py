"""How often and how fast layers are learnt: a table over sizes and seeds.

    python -m benchmarks.learner
    python -m benchmarks.learner --sizes 2,8,3 3,8,3 --seeds 5 --json learner.json
    python -m benchmarks.learner --sizes 4,12,3 --first 4 --seeds 16

For every size: the examples, in how many seeds the hull of the key-query matrices had a cosine of
at least .95 before any refinement (for one head: a parameter error below .05), in how many the
layer was learnt with a parameter error below 1e-10, the median cosine and error before refinement,
and the seconds of a seed, median and largest, with the part of the certified rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np

import mhfast as mh


@dataclass(frozen=True)
class Size:
    """A size of the problem; examples None means all inputs there are."""

    heads: int
    dim: int
    tokens: int
    score_std: float
    examples: int | None


SIZES = (
    Size(1, 8, 6, 2.0, 20_000),
    Size(1, 16, 8, 2.0, 20_000),
    Size(2, 8, 3, 2.0, 100_000),
    Size(2, 12, 3, 2.0, 100_000),
    Size(2, 16, 3, 2.0, 100_000),
    Size(3, 12, 2, 2.0, 100_000),
    Size(2, 8, 4, 2.0, 200_000),
    Size(3, 16, 2, 2.0, 200_000),
    Size(3, 16, 3, 2.0, 400_000),
    Size(3, 8, 3, 2.0, 400_000),
    Size(2, 8, 8, 4.0, 200_000),
    Size(2, 6, 2, 2.0, None),
    Size(4, 16, 2, 2.0, 500_000),
    Size(4, 12, 3, 2.0, 500_000),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one seed."""

    cosine: float
    unrefined_error: float
    error: float
    learnt: bool
    seconds: float
    rows_seconds: float


def learn(size: Size, seed: int) -> Outcome:
    """Learn the layer of one seed."""
    data = mh.data.boolean_layer(
        size.examples or 2,
        size.tokens,
        size.dim,
        size.heads,
        score_std=size.score_std,
        seed=seed,
    )
    assert data.truth is not None
    truth, X, Y = data.truth["layer"], data.X, data.y
    if size.examples is None:
        signs = itertools.product((-1.0, 1.0), repeat=size.tokens * size.dim)
        X = np.array(list(signs)).reshape(-1, size.tokens, size.dim)
        X = np.random.default_rng(seed).permutation(X)
        Y = truth(X)
    begin = time.perf_counter()
    result = mh.learn_layer(X, Y, size.heads)
    seconds = time.perf_counter() - begin
    if result.layer is None:
        return Outcome(0.0, np.inf, np.inf, result.learnt, seconds, seconds)
    body = result["second sculpting"].parts[2]
    unrefined = result.unrefined
    assert unrefined is not None
    return Outcome(
        mh.learner.hull_cosine(body.directions, truth.W),
        mh.learner.align(unrefined, truth).error,
        mh.learner.align(result.layer, truth).error,
        result.learnt,
        seconds,
        sum(result[name].seconds for name in ("sculpting", "refined sum", "second sculpting")),
    )


def row(size: Size, outcomes: list[Outcome]) -> str:
    """Return the line of the table for a size."""
    near = [o.unrefined_error < 0.05 if size.heads == 1 else o.cosine >= 0.95 for o in outcomes]
    right = [o.learnt and o.error < 1e-10 for o in outcomes]
    wrong = sum(o.learnt and o.error >= 1e-10 for o in outcomes)
    count = len(outcomes)
    seconds = [o.seconds for o in outcomes]
    return (
        f"| ({size.heads},{size.dim},{size.tokens}) | {size.score_std:g} "
        f"| {size.examples or 2 ** (size.tokens * size.dim):,} "
        f"| {sum(near)} of {count} | {sum(right)} of {count} | {wrong} "
        f"| {np.median([o.cosine for o in outcomes]):.4f} "
        f"| {np.median([o.unrefined_error for o in outcomes]):.3f} "
        f"| {np.median(seconds):.1f} / {max(seconds):.1f} "
        f"| {np.median([o.rows_seconds for o in outcomes]):.1f} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", help="H,d,T; all of them by default")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", help="write every outcome to this file")
    options = parser.parse_args(arguments)
    chosen = [
        size
        for size in SIZES
        if not options.sizes or f"{size.heads},{size.dim},{size.tokens}" in options.sizes
    ]
    if not chosen:
        names = ", ".join(f"{s.heads},{s.dim},{s.tokens}" for s in SIZES)
        sys.exit(f"--sizes: expected some of {names}, got {options.sizes}")
    print(
        "| (H,d,T) | score s.d. | examples | near before refinement | learnt and right "
        "| learnt and wrong | cosine | error before | seconds, median / largest | rows |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    told = []
    for size in chosen:
        seeds = range(options.first, options.first + options.seeds)
        outcomes = [learn(size, seed) for seed in seeds]
        told.append({"size": asdict(size), "outcomes": [asdict(o) for o in outcomes]})
        print(row(size, outcomes), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)


if __name__ == "__main__":
    main()
