"""Training on arrays with few distinct tokens or samples, with and without looking for them.

    python -m benchmarks.distinct
    python -m benchmarks.distinct --dtype float32 --lookups

One process and by default one thread: training that looks (`mhfast.models.distinct`) and training
that does not are called in turn, and the lower decile of each counts. Columns: what is found, words
V and samples n; the milliseconds of ten steps without it; how many times faster a call of ten steps
becomes, and one of a single step, which bears the whole look. `--lookups` prints what looking up
words gains in ten steps of self-attention, by kind, T, d and V, wherever tables are small beside
the samples: the constants of `mhfast.models.distinct` summarize it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

import mhfast as mh
from mhfast.models import distinct

from .words import deciles

OPTIMIZER = mh.GradientDescent(1e-3)
OUTPUTS = 4
STEPS = 10


class Case(NamedTuple):
    """A kind of model, n, T, d, H, V words, and how many words of a sample vary."""

    kind: str
    n: int
    T: int
    d: int
    H: int
    V: int
    vary: int | None = None


CASES = (
    Case("classifier", 5000, 32, 64, 4, 64),
    Case("classifier", 5000, 32, 64, 4, 1024),
    Case("classifier", 1000, 16, 32, 4, 32),
    Case("classifier", 2000, 10, 20, 4, 8),
    Case("classifier", 5000, 8, 4, 2, 2),
    Case("classifier", 5000, 8, 32, 4, 16, vary=2),
    Case("layer", 1000, 32, 64, 4, 64),
    Case("layer", 5000, 8, 4, 2, 2),
    # Nothing to be found.
    Case("classifier", 1000, 32, 64, 4, 32000),
    Case("classifier", 1000, 8, 16, 2, 8000),
    Case("layer", 500, 32, 64, 4, 16000),
)


def problem(case: Case, dtype: str) -> tuple[mh.Classifier | mh.Layer, mh.Dataset, mh.Tokens, str]:
    """Return a model, data with X as an array, the same X as words, and a loss."""
    _, n, T, d, H, V, vary = case
    rng = np.random.default_rng(0)
    ids = rng.integers(V, size=(n, T))
    if vary is not None:
        ids[:, vary:] = ids[0, vary:]
    X = mh.Tokens(ids, rng.standard_normal((V, d)).astype(dtype))
    sign = np.where(ids[:, 0] % 2 == 1, 1.0, -1.0).astype(dtype)
    if case.kind == "classifier":
        model = mh.Classifier.gaussian(H, T, d, std=0.1, seed=0, dtype=dtype)
        return model, mh.Dataset(np.asarray(X), sign), X, "logistic"
    y = np.broadcast_to(sign[:, None, None], (n, T, OUTPUTS))
    layer = mh.Layer.gaussian(H, d, OUTPUTS, std=0.1, seed=0, dtype=dtype)
    return layer, mh.Dataset(np.asarray(X), y), X, "squared"


def trained(
    model: mh.Classifier | mh.Layer, data: mh.Dataset, loss: str, threads: int, *, looks: bool
) -> Callable[[int], object]:
    """Return a training of some steps, which looks at the data or does not."""
    least = distinct.LEAST_WORK

    def way(steps: int) -> object:
        distinct.LEAST_WORK = least if looks else 1 << 100
        try:
            return mh.train(
                model, data, steps=steps, optimizer=OPTIMIZER, loss=loss, record={},  # type: ignore[arg-type]
                num_threads=threads,
            )  # fmt: skip
        finally:
            distinct.LEAST_WORK = least

    return way


def looked(case: Case, dtype: str, threads: int, rounds: int) -> str:
    """Return a line of what is found and gained."""
    model, data, _, loss = problem(case, dtype)
    found = distinct.compact(model, data).data
    words = "-" if found.words is None else str(found.words.words)
    plain, looks = (trained(model, data, loss, threads, looks=looks) for looks in (False, True))
    calls = [partial(way, steps) for steps in (STEPS, 1) for way in (plain, looks)]
    a, b, one, one_looked = deciles(calls, rounds)
    return (
        f"{case.kind:10s} {case.n:5d} {case.T:3d} {case.d:3d} {case.H:2d} {case.V:6d}   "
        f"{words:>4s} {found.n:6d} {a:9.2f} ms {a / b:8.2f} {one / one_looked:8.2f}"
    )


def lookups(dtype: str, threads: int, rounds: int) -> None:
    """Print what words gain, over kinds and shapes of about a million multiply-adds."""
    for kind in ("classifier", "layer"):
        for T in (4, 8, 16, 32, 64):
            for d in (8, 16, 32, 48, 64):
                n = max(16, int(4e7 / (2 * T * d * (d + 2 * T))))
                line = []
                for V in (4, 16, 64, 128, 256):
                    case = Case(kind, n, T, d, 2, V)
                    model, data, X, loss = problem(case, dtype)
                    if not distinct.pays(model, data, X):
                        continue
                    calls = [
                        partial(trained(model, one, loss, threads, looks=False), STEPS)
                        for one in (data, mh.Dataset(X, data.y))
                    ]
                    a, b = deciles(calls, rounds)
                    line.append(f"V={V}: {a / b:5.2f}")
                print(f"{kind:10s} T={T:2d} d={d:2d}   {'   '.join(line)}", flush=True)


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lookups", action="store_true")
    args = parser.parse_args()
    if args.lookups:
        lookups(args.dtype, args.threads, args.rounds)
        return
    print("kind           n   T   d  H      V  found: V   n    without       10        1")
    for case in CASES:
        print(looked(case, args.dtype, args.threads, args.rounds), flush=True)


if __name__ == "__main__":
    main()
