"""How near to the Cramér-Rao bound noisy examples bring the learner, and whether intervals cover.

    python -m benchmarks.learner_noise
    python -m benchmarks.learner_noise --examples 5000 --draws 200 --json noise.json

For every number of examples n, over draws of tokens and noise for one layer of boolean_layer: the
error of W and of all parameters, root mean square over the draws, relative to the layer, beside the
Cramér-Rao bound of all n examples (a tenth of which the learner holds out: 1.05 at best); the
shares of true numbers within their intervals of 50, 90 and 95 %; how many draws were learnt; and
seconds of the refinement and of the fit of all examples.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

import numpy as np

import mhfast as mh

LEVELS = (0.5, 0.9, 0.95)


@dataclass(frozen=True)
class Row:
    """What came of a number of examples."""

    n: int
    draws: int
    learnt: int
    key_query_error: float
    key_query_bound: float
    error: float
    bound: float
    coverage: tuple[float, ...]
    seconds_refined: float
    seconds_all: float


def bounds(data: mh.Dataset, truth: mh.Layer, noise: float) -> tuple[float, float]:
    """Return the Cramér-Rao bounds of the relative errors of W and of all parameters."""
    # At the truth the noise does not matter to the covariance.
    examples = mh.learner.as_examples(data.X, data.y, noise)
    found = mh.learner.estimate(examples, truth)
    assert found is not None
    variance = found.covariance.matrix.diagonal()
    W, V = np.split(variance, [truth.W.size])
    size = float(np.sum(truth.W**2)), float(np.sum(truth.V**2))
    return float(np.sqrt(W.sum() / size[0])), float(np.sqrt((W.sum() + V.sum()) / sum(size)))


def measured(data: mh.Dataset, n: int, draws: int, noise: float) -> Row:
    """Learn from `draws` data sets of n examples."""
    assert data.truth is not None
    truth = data.truth["layer"]
    errors, inside, seconds, limits = [], [], [], []
    for draw in range(draws):
        noisy = data.sample(n, noise=noise, seed=np.random.default_rng([n, draw]))
        if draw < 3:
            limits.append(bounds(noisy, truth, noise))
        result = mh.learn_layer(noisy, heads=truth.heads, noise=noise, seed=draw)
        if not result.learnt or result.covariance is None:
            continue
        of = mh.learner.align(result.layer, truth)
        W, V = (result.layer.W[of.permutation], result.layer.V[of.permutation])
        sizes = np.sum((W - truth.W) ** 2), np.sum((V - truth.V) ** 2)
        errors.append((sizes[0], sum(sizes)))
        true = mh.Layer(*(a[np.argsort(of.permutation)] for a in (truth.W, truth.V)))
        inside.append([within(result.covariance, true, level) for level in LEVELS])
        seconds.append([result[name].seconds for name in ("refinement", "all examples")])
    size = float(np.sum(truth.W**2)), float(np.sum(truth.W**2) + np.sum(truth.V**2))
    key_query_error, error = np.sqrt(np.mean(errors, axis=0) / size)
    key_query_bound, bound = np.mean(limits, axis=0)
    refined, everything = np.median(seconds, axis=0)
    return Row(
        n=n,
        draws=draws,
        learnt=len(errors),
        key_query_error=float(key_query_error),
        key_query_bound=float(key_query_bound),
        error=float(error),
        bound=float(bound),
        coverage=tuple(float(share) for share in np.mean(inside, axis=0)),
        seconds_refined=float(refined),
        seconds_all=float(everything),
    )


def within(covariance: mh.learner.Covariance, truth: mh.Layer, level: float) -> float:
    """Return the share of the numbers of the true layer that are in their intervals."""
    lower, upper = covariance.interval(level)
    return float(
        np.mean(
            [
                (low <= a) & (a <= high)
                for low, a, high in zip(
                    (lower.W, lower.V), (truth.W, truth.V), (upper.W, upper.V), strict=True
                )
            ]
        )
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, nargs="+", default=[5000, 20_000, 80_000])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--size", default="2,8,2", help="H,d,T")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--json", help="a file for the rows")
    asked = parser.parse_args(arguments)
    heads, dim, tokens = map(int, asked.size.split(","))
    data = mh.data.boolean_layer(2, tokens, dim, heads, seed=0)
    print(f"({asked.size}), noise {asked.noise:g}, {asked.draws} draws")
    print("| n | learnt | error of W | bound | ratio | error | ratio | within 50, 90, 95 % | s |")
    print("|--:|--:|--:|--:|--:|--:|--:|---|---|")
    rows = []
    for n in asked.examples:
        rows.append(row := measured(data, n, asked.draws, asked.noise))
        told = " ".join(f"{100 * share:.1f}" for share in row.coverage)
        print(
            f"| {n:,} | {row.learnt} of {row.draws} "
            f"| {row.key_query_error:.2g} | {row.key_query_bound:.2g} "
            f"| {row.key_query_error / row.key_query_bound:.3f} | {row.error:.2g} "
            f"| {row.error / row.bound:.3f} | {told} "
            f"| {row.seconds_refined:.3f} + {row.seconds_all:.3f} |",
            flush=True,
        )
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
