"""Tokens looked up in their dictionary, against the same calls with the array of tokens.

    python -m benchmarks.words
    python -m benchmarks.words 5000,32,64,4 --words 64 1024 --dtype float64

One process and by default one thread: the two are called in turn, and the lower decile of each
counts.  Times in milliseconds, and how many times faster words are: outputs, then loss and
gradient with respect to all parameters, then the gradient by the embedding too (of the array: by
X), of a classifier and of a layer of 16 outputs.  `*` marks dictionaries that are looked up; of the
others the array is computed with.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

import mhfast as mh
from mhfast import _core
from mhfast._bench.shapes import Shape, parse_shape

OUTPUTS = 16


def deciles(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the lower decile of the milliseconds of each call."""
    seconds = np.empty((len(calls), rounds))
    for k in range(rounds):
        for row, call in zip(seconds, calls, strict=True):
            start = time.perf_counter()
            call()
            row[k] = time.perf_counter() - start
    return [float(s) for s in np.quantile(seconds, 0.1, axis=1, method="lower") * 1e3]


def measure(shape: Shape, words: int, dtype: str, threads: int, rounds: int) -> list[str]:
    """Return a line for each kind of model."""
    rng = np.random.default_rng(0)
    ids = rng.integers(words, size=(shape.n, shape.T))
    X = mh.Tokens(ids, rng.standard_normal((words, shape.d)).astype(dtype))
    array = np.asarray(X)
    lines = []
    for kind in ("classifier", "layer"):
        if kind == "classifier":
            model: mh.Classifier | mh.Layer = mh.Classifier.gaussian(
                shape.H, shape.T, shape.d, std=0.1, seed=0, dtype=dtype
            )
            y, loss = rng.choice([-1.0, 1.0], shape.n).astype(dtype), "logistic"
        else:
            model = mh.Layer.gaussian(shape.H, shape.d, OUTPUTS, std=0.1, seed=0, dtype=dtype)
            y = rng.standard_normal((shape.n, shape.T, OUTPUTS)).astype(dtype)
            loss = "squared"

        def outputs(tokens, model=model):  # type: ignore[no-untyped-def]
            return lambda: model(tokens, num_threads=threads)

        def gradient(tokens, model=model, y=y, loss=loss):  # type: ignore[no-untyped-def]
            return lambda: mh.value_and_grad(model, tokens, y, loss=loss, num_threads=threads)

        def of_words(tokens, model=model, y=y, loss=loss):  # type: ignore[no-untyped-def]
            wrt = (*model.parameters, "embedding" if tokens is X else "X")
            return lambda: mh.value_and_grad(
                model, tokens, y, loss=loss, wrt=wrt, num_threads=threads
            )

        calls = [f(tokens) for f in (outputs, gradient, of_words) for tokens in (X, array)]
        found = deciles(calls, rounds)
        mark = "*" if mh.explain(model, X)["plan"] == "words" else " "
        pairs = (
            f"{looked_up:9.2f} {of_array:9.2f} {of_array / looked_up:6.1f}"
            for looked_up, of_array in (found[:2], found[2:4], found[4:])
        )
        lines.append(f"{words:6d}{mark} {kind:10s} {'   '.join(pairs)}")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", type=parse_shape, default=parse_shape("5000,32,64,4"))
    parser.add_argument("--words", type=int, nargs="*", default=[16, 64, 256, 1024])
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    s = given.shape
    print(f"{_core.active_isa()}, {given.dtype}, n,T,d,H = {s.n},{s.T},{s.d},{s.H}")
    columns = "    words     array  ratio   "
    print(" " * 20 + "outputs".ljust(29) + "loss and gradient".ljust(29) + "and by the embedding")
    print(f" words  model      {columns}{columns}{columns}".rstrip())
    for words in given.words:
        for line in measure(s, words, given.dtype, given.threads, given.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
