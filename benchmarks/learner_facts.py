"""Errors of both kinds of the test of heads against the facts (`mh.learner.agreement`).

    python -m benchmarks.learner_facts
    python -m benchmarks.learner_facts --sizes 2,8,2,20000,0 --seeds 50 --first 2000

A size is H,d,T, the examples and the noise. For every size: how often the true key-query matrices
are accepted, or the facts cannot tell an error of 10 %, or they are rejected; the largest ratio of
them; how often others are rejected, of the seeds in which the facts can tell: W with errors of
10 %, independent in each head, W = 0 and an independent W of equal size; how often the true layer
with its heads swapped (each W with the V of the next head) is refused by the residual of its
outputs; the least error that the facts can tell, median; and the share of the facts that true heads
satisfy within their tolerance.  Then the body of `mh.learner.enclose`: in how many seeds it
contains all W_h, how far out the farthest of them is, and its half width and half length, median,
over the norm of W.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

import mhfast as mh
from mhfast.learner.agreement import Agreement, agreement

SIZES = ("1,8,6,20000,0", "2,8,2,5000,0", "2,8,2,20000,0", "2,8,2,20000,.05", "2,12,2,20000,0")
SIZES += ("2,8,3,30000,0", "2,8,4,100000,0", "3,8,2,50000,0", "3,12,2,50000,0", "3,8,3,100000,0")
SIZES += ("4,12,2,100000,0",)

FIRST = 1000
"""The first seed: limits were chosen on smaller ones."""

CAN_TELL = {"W + 10 %": 0.1, "0": 0.5, "another W": 0.5}
"""The resolution up to which facts are said to be able to tell a matrix from the true one."""


@dataclass(frozen=True)
class Tested:
    """What the facts of one seed say.

    Parameters
    ----------
    true : Agreement
        Of the true key-query matrices.
    rejected : list of bool
        Which of the others are rejected.
    swapped : bool
        Whether the residual of the true layer with swapped heads refuses it.
    within : float
        Share of the facts that true heads satisfy.
    level, width, length : float
        Of the body.
    """

    true: Agreement
    rejected: list[bool]
    swapped: bool
    within: float
    level: float
    width: float
    length: float


def errors(W: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return random matrices of the norms of W."""
    found = rng.standard_normal(W.shape)
    size = np.linalg.norm(W, axis=(1, 2), keepdims=True)
    return np.asarray(found * size / np.linalg.norm(found, axis=(1, 2), keepdims=True))


def tested(size: str, seed: int) -> Tested:
    """Return what the facts of one seed say."""
    *shape, noise = size.split(",")
    heads, dim, tokens, n = map(int, shape)
    data = mh.data.boolean_layer(n, tokens, dim, heads, noise=float(noise), seed=seed)
    assert data.truth is not None
    layer = data.truth["layer"]
    result = mh.learn_layer(data, heads=heads, noise=float(noise), refinement=False, seed=seed)
    _, facts, _ = result["second sculpting"].parts
    rng = np.random.default_rng([seed, 5])
    W = layer.W
    others = (W + 0.1 * errors(W, rng), np.zeros_like(W), errors(W, rng))
    body = mh.learner.enclose(facts, heads)
    norm = float(np.linalg.norm(W)) / heads**0.5
    swapped = mh.Layer(W, np.roll(layer.V, 1, axis=0))(data.X[:2000]) - data.y[:2000]
    return Tested(
        true=agreement(facts, W),
        rejected=[agreement(facts, other).verdict == "rejected" for other in others],
        swapped=float(np.sqrt(np.mean(swapped**2))) > 1.2 * float(noise) + 1e-8,
        within=float(np.mean(np.abs(facts.of(W) - facts.value) <= facts.tolerance)),
        level=float(body.levels(W).max()),
        width=body.width / norm,
        length=body.length / norm,
    )


def row(size: str, found: list[Tested]) -> str:
    """Return the line of the table for a size."""
    heads, dim, tokens, n, noise = size.split(",")
    verdicts = [one.true.verdict for one in found]
    counts = " | ".join(
        str(verdicts.count(verdict)) for verdict in ("accepted", "cannot tell", "rejected")
    )
    others = []
    for k, limit in enumerate(CAN_TELL.values()):
        telling = [one.rejected[k] for one in found if one.true.resolution <= limit]
        others.append(f"{sum(telling)} of {len(telling)}" if telling else "-")
    swapped = f"{sum(one.swapped for one in found)}" if int(heads) > 1 else "-"
    return (
        f"| ({heads},{dim},{tokens}) | {int(n):,} | {noise} | {counts} "
        f"| {max(one.true.ratio for one in found):.1f} | {' | '.join(others)} | {swapped} "
        f"| {np.median([one.true.resolution for one in found]):.2g} "
        f"| {np.mean([one.within for one in found]):.2f} "
        f"| {sum(one.level <= 1 for one in found)} | {max(one.level for one in found):.2f} "
        f"| {np.median([one.width for one in found]):.2g} "
        f"| {np.median([one.length for one in found]):.2g} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="H,d,T,examples,noise")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=FIRST, help="the first seed")
    asked = parser.parse_args(arguments)
    columns = ("(H,d,T)", "examples", "noise", "accepted", "cannot tell", "rejected")
    columns += ("largest ratio", *CAN_TELL, "swapped", "least error told", "within tolerance")
    columns += ("all heads in the body", "farthest", "half width", "half length")
    print(f"| {' | '.join(columns)} |")
    for size in asked.sizes:
        found = [tested(size, seed) for seed in range(asked.first, asked.first + asked.seeds)]
        print(row(size, found), flush=True)


if __name__ == "__main__":
    main()
