"""Errors of both kinds of the test of heads against the facts (`mh.learner.agreement`).

    python -m benchmarks.learner_facts
    python -m benchmarks.learner_facts --sizes 2,8,2,20000,0 --seeds 50

A size is H,d,T, the examples and the noise. For every size: how often the true key-query matrices
are accepted, or the facts cannot tell an error of 10 %; the largest ratio of them; how often others
are rejected: W with errors of 10 %, independent in each head, W = 0 and an independent W of equal
size; the least error that the facts can tell, median; and the share of the facts that true heads
satisfy within their tolerance.
"""

from __future__ import annotations

import argparse

import numpy as np

import mhfast as mh
from mhfast.learner.agreement import Agreement, agreement

SIZES = ("1,8,6,20000,0", "2,8,2,20000,0", "2,8,2,20000,.05", "2,8,3,30000,0")
SIZES += ("3,12,2,50000,0", "3,8,3,100000,0")


def errors(W: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return random matrices of the norms of W."""
    found = rng.standard_normal(W.shape)
    size = np.linalg.norm(W, axis=(1, 2), keepdims=True)
    return np.asarray(found * size / np.linalg.norm(found, axis=(1, 2), keepdims=True))


def tested(size: str, seed: int) -> tuple[Agreement, list[bool], float]:
    """Return the test of the true heads, which others are rejected, and the share of facts."""
    *shape, noise = size.split(",")
    heads, dim, tokens, n = map(int, shape)
    data = mh.data.boolean_layer(n, tokens, dim, heads, noise=float(noise), seed=seed)
    assert data.truth is not None
    W = data.truth["layer"].W
    result = mh.learn_layer(data, heads=heads, noise=float(noise), refinement=False, seed=seed)
    _, facts, _ = result["second sculpting"].parts
    rng = np.random.default_rng([seed, 5])
    others = (W + 0.1 * errors(W, rng), np.zeros_like(W), errors(W, rng))
    rejected = [agreement(facts, other).verdict == "rejected" for other in others]
    held = np.abs(facts.of(W) - facts.value) <= facts.tolerance
    return agreement(facts, W), rejected, float(np.mean(held))


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="H,d,T,examples,noise")
    parser.add_argument("--seeds", type=int, default=50)
    asked = parser.parse_args(arguments)
    print("| (H,d,T) | examples | noise | accepted | cannot tell | largest ratio | W + 10 % | 0 |")
    print("  another W | least error told | within tolerance |")
    for size in asked.sizes:
        heads, dim, tokens, n, noise = size.split(",")
        found = [tested(size, seed) for seed in range(asked.seeds)]
        verdicts = [true.verdict for true, _, _ in found]
        rejected = np.sum([others for _, others, _ in found], axis=0)
        print(
            f"| ({heads},{dim},{tokens}) | {int(n):,} | {noise} | {verdicts.count('accepted')} "
            f"| {verdicts.count('cannot tell')} | {max(true.ratio for true, _, _ in found):.1f} | "
            + " | ".join(map(str, rejected))
            + f" | {np.median([true.resolution for true, _, _ in found]):.2g} "
            f"| {np.mean([share for *_, share in found]):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
