"""How many queries a layer takes, and how exactly it is learnt: a table over sizes and seeds.

    python -m benchmarks.learner_queries
    python -m benchmarks.learner_queries --sizes 12,64,64,2 --seeds 3 --json queries.json
    python -m benchmarks.learner_queries --noise

For every size (H, d, p, T): how many seeds were learnt with a parameter error below 1e-8 (float32:
1e-4), how many were learnt and wrong, the queries beside the 4 H d² of the yardstick and the
numbers of parameters H d (d + p), the parameter error, the least condition, and seconds.  With
`--noise`: noise on the outputs, the queries allowed, the error beside the standard error, and how
often the layer was called learnt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

import mhfast as mh


@dataclass(frozen=True)
class Size:
    """A size of the problem, and the dtype of the oracle."""

    heads: int
    dim: int
    out_dim: int
    tokens: int
    dtype: str = "float64"

    def __str__(self) -> str:
        return f"{self.heads},{self.dim},{self.out_dim},{self.tokens}" + (
            ",float32" if self.dtype == "float32" else ""
        )


SIZES = (
    Size(1, 8, 8, 2),
    Size(3, 8, 8, 2),
    Size(3, 8, 8, 5),
    Size(3, 8, 8, 2, "float32"),
    Size(2, 8, 1, 2),
    Size(6, 16, 3, 2),
    Size(5, 4, 8, 3),
    Size(4, 16, 16, 2),
    Size(12, 16, 16, 2),
    Size(8, 32, 32, 2),
    Size(8, 32, 32, 8),
    Size(12, 64, 64, 2),
    Size(12, 64, 64, 2, "float32"),
)

NOISY = Size(3, 8, 8, 2)
NOISES = ((1e-6, None), (1e-3, None), (1e-2, None), (1e-2, 20_000), (1e-2, 80_000), (5e-2, 20_000))


@dataclass(frozen=True)
class Outcome:
    """What became of one seed."""

    learnt: bool
    error: float
    standard_error: float
    held_out: float
    queries: int
    identified: float
    method: str
    seconds: float


def random_layer(size: Size, seed: int) -> mh.Layer:
    """Draw W and V with independent entries N(0, 1/d)."""
    std = size.dim**-0.5
    return mh.Layer.gaussian(size.heads, size.dim, size.out_dim, std=std, seed=seed)


def learn(size: Size, seed: int, noise: float = 0.0, queries: int | None = None) -> Outcome:
    """Learn the layer of one seed."""
    truth = random_layer(size, seed)
    asked = mh.Layer(np.asarray(truth.W, size.dtype), np.asarray(truth.V, size.dtype))
    rng = np.random.default_rng(seed)

    def noisy(X: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        outputs = truth(X)
        return np.asarray(outputs + noise * rng.standard_normal(outputs.shape))

    begin = time.perf_counter()
    result = mh.learn_layer_by_queries(
        noisy if noise else asked,
        d=size.dim,
        T=size.tokens,
        heads=size.heads,
        queries=queries,
        seed=seed,
    )
    seconds = time.perf_counter() - begin
    told = [c.value for c in result.certificates if c.name == "identified"]
    return Outcome(
        result.learnt,
        np.inf if result.layer is None else mh.learner.align(result.layer, truth).error,
        result.standard_error or 0.0,
        np.inf if result.held_out is None else result.held_out,
        result.queries,
        told[0] if told else 0.0,
        result.method or "none",
        seconds,
    )


def row(size: Size, outcomes: list[Outcome]) -> str:
    """Return the line of the table for a size."""
    limit = 1e-8 if size.dtype == "float64" else 1e-4
    right = sum(o.learnt and o.error < limit for o in outcomes)
    wrong = sum(o.learnt and o.error >= limit for o in outcomes)
    errors = [o.error for o in outcomes]
    return (
        f"| ({size}) | {right} of {len(outcomes)} | {wrong} "
        f"| {np.median([o.queries for o in outcomes]):,.0f} | {4 * size.heads * size.dim**2:,} "
        f"| {size.heads * size.dim * (size.dim + size.out_dim):,} "
        f"| {np.median(errors):.0e} | {max(errors):.0e} "
        f"| {min(o.identified for o in outcomes):.0e} "
        f"| {np.median([o.seconds for o in outcomes]):.2f} |"
    )


def noisy_row(noise: float, outcomes: list[Outcome]) -> str:
    """Return the line of the table for a noise."""
    ratio = np.sqrt(np.mean([(o.error / o.standard_error) ** 2 for o in outcomes if o.learnt]))
    return (
        f"| {noise:g} | {sum(o.learnt for o in outcomes)} of {len(outcomes)} "
        f"| {np.median([o.queries for o in outcomes]):,.0f} "
        f"| {np.median([o.held_out for o in outcomes]):.2g} "
        f"| {np.median([o.error for o in outcomes]):.2g} "
        f"| {np.median([o.standard_error for o in outcomes]):.2g} | {ratio:.2f} |"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", help="H,d,p,T or H,d,p,T,float32; all by default")
    parser.add_argument("--noise", action="store_true", help="the table of noisy oracles")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", help="write every outcome to this file")
    options = parser.parse_args(arguments)
    told = []
    if options.noise:
        print("| noise | learnt | queries | held-out | error | standard error | ratio, rms |")
        print("|--:|--:|--:|--:|--:|--:|--:|")
        for noise, queries in NOISES:
            outcomes = [learn(NOISY, seed, noise, queries) for seed in range(options.seeds)]
            told.append({"noise": noise, "outcomes": [asdict(o) for o in outcomes]})
            print(noisy_row(noise, outcomes), flush=True)
    else:
        chosen = [size for size in SIZES if not options.sizes or str(size) in options.sizes]
        if not chosen:
            names = " ".join(str(size) for size in SIZES)
            sys.exit(f"--sizes: expected some of {names}, got {options.sizes}")
        print(
            "| (H,d,p,T) | learnt and right | learnt and wrong | queries | 4 H d² | parameters "
            "| median error | largest | least condition | seconds |"
        )
        print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        for size in chosen:
            outcomes = [learn(size, seed) for seed in range(options.seeds)]
            told.append({"size": asdict(size), "outcomes": [asdict(o) for o in outcomes]})
            print(row(size, outcomes), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)


if __name__ == "__main__":
    main()
