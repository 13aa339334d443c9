"""How often `learn_layer` finds the number of heads, learnt or not, and what its spectrum proposes.

    python -m benchmarks.learner_heads
    python -m benchmarks.learner_heads --draws 50 --first 9000 --json heads.json

Draws of random layers on Boolean tokens: 1 to 4 heads, d = 5 or 6, two or three tokens, 150 to
20,000 examples (uniform in the logarithm), noise 0, .05 or .2 that is told.  Two tables: how
often the number is right where the layer is learnt and where it is not; and how often the number
that the spectrum proposes is right, by its step over the largest later one (`sureness`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import asdict, dataclass

import numpy as np

import mhfast as mh
from mhfast.learner import propose_heads

FIRST = 5000
NOISE = (0.0, 0.05, 0.2)
BINS = (1.0, 2.0, 5.0, 10.0, np.inf)


@dataclass(frozen=True)
class Draw:
    """One draw and what became of it; `proposed` is the number of the spectrum, 0 without one."""

    seed: int
    heads: int
    dim: int
    tokens: int
    examples: int
    noise: float
    found: int
    learnt: bool
    proposed: int
    sureness: float
    tried: tuple[int, ...]
    seconds: float


def draw(seed: int) -> Draw:
    """Learn the layer of one draw without its number of heads."""
    rng = np.random.default_rng([seed, 1])
    heads, dim, tokens = (int(rng.integers(*span)) for span in ((1, 5), (5, 7), (2, 4)))
    n, noise = int(np.exp(rng.uniform(np.log(150), np.log(20_000)))), NOISE[rng.integers(3)]
    data = mh.data.boolean_layer(n, tokens, dim, heads, noise=noise, seed=seed)
    begin = time.perf_counter()
    result = mh.learn_layer(data, noise=noise, seed=seed)
    seconds = time.perf_counter() - begin
    proposed, sureness = 0, 1.0
    if any(phase.name == "second sculpting" for phase in result.phases):
        proposed, sureness = propose_heads(result["second sculpting"].parts[2].eigenvalues)
    return Draw(
        seed, heads, dim, tokens, n, noise, result.heads or 0, result.learnt,
        proposed, sureness, result.tried, seconds,
    )  # fmt: skip


def rows(draws: list[Draw]) -> list[str]:
    """Return the lines of both tables."""
    lines = [
        "| | noise | draws | number right | too small | too large |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for learnt in (True, False):
        for noise in NOISE:
            some = [d for d in draws if d.learnt == learnt and d.noise == noise]
            name = "learnt" if learnt else "not learnt"
            right, less = (
                sum(d.found == d.heads for d in some),
                sum(d.found < d.heads for d in some),
            )
            more = len(some) - right - less
            lines.append(f"| {name} | {noise:g} | {len(some)} | {right} | {less} | {more} |")
    lines += ["", "| sureness of the spectrum | draws | number right |", "|---|--:|--:|"]
    for low, high in itertools.pairwise(BINS):
        some = [d for d in draws if d.proposed and low <= d.sureness < high]
        right = sum(d.proposed == d.heads for d in some)
        name = f"{low:g} to {high:g}" if np.isfinite(high) else f"from {low:g}"
        lines.append(f"| {name} | {len(some)} | {right} |")
    lines.append(f"| too few facts | {sum(not d.proposed for d in draws)} | |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=FIRST, help="the first seed")
    parser.add_argument("--json", help="write every draw to this file")
    asked = parser.parse_args(arguments)
    draws = [draw(seed) for seed in range(asked.first, asked.first + asked.draws)]
    print("\n".join(rows(draws)))
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump([asdict(d) for d in draws], file, indent=1)


if __name__ == "__main__":
    main()
