"""Steps on batches beside torch and jax, which take the same samples: microseconds a step.

    python -m benchmarks.batches
    python -m benchmarks.batches --threads 2 --json batches.json
    python -m benchmarks.batches --peers jax  # the faster one alone

B = 32 of n = 1000 samples, T = 10 tokens of d = 20 dimensions, H = 8 heads, gradient descent: one
run, and 100 runs side by side, each with its own order. The peers get the numbers of the samples
from outside; mhfast draws them. jax takes all steps in one compiled lax.scan, torch eagerly and
through torch.compile, both with autodiff and with gradients written out; the best way of each
counts. The ways are timed in turn, and the final parameters of all must agree. The process is bound
to as many processors as there are threads; on one of them what is measured is processor time, which
other processes disturb less, else the time that passes.

The last columns are of one run, and leave out what a whole training costs: a step is the
difference of trainings with three and one times the steps. "beside" is the step on a batch minus a
full-batch step on 32 samples; the rest are ratios of a step on new samples of a population, which
are drawn at every step, to the step on a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import mhfast as mh

N, B, T, D, H = 1000, 32, 10, 20, 8
LR = 0.1
STEPS = {1: 400, 100: 40}  # more than the 31 of an epoch
ROUNDS = 9

Array = npt.NDArray[Any]
Way = Callable[[], tuple[Array, Array]]  # trains, and returns W and U


class Problem:
    """Data, initial parameters and the samples of every step, (steps, R, B)."""

    def __init__(self, dtype: str, runs: int, threads: int) -> None:
        self.dtype = dtype
        rng = np.random.default_rng(0)
        self.X = rng.standard_normal((N, T, D)).astype(dtype)
        self.y = np.where(rng.random(N) < 0.5, -1, 1).astype(dtype)
        self.W = (0.3 * rng.standard_normal((runs, H, D, D))).astype(dtype)
        self.U = (0.3 * rng.standard_normal((runs, H, T, D))).astype(dtype)
        self.runs, self.steps, self.threads = runs, STEPS[runs], threads
        orders = [mh.reference.batches(N, B, self.steps, seed=r) for r in range(runs)]
        self.samples = np.stack(orders, axis=1)


POPULATIONS = ("mixture", "sphere", "planted")  # whose new samples are timed


def own(p: Problem, data: mh.Dataset, *, times: int = 1, **options: Any) -> Way:
    """Train with mhfast, `times` the steps."""
    model = mh.Classifier(p.W, p.U) if p.runs > 1 else mh.Classifier(p.W[0], p.U[0])
    rule = mh.GradientDescent(LR)

    def way() -> tuple[Array, Array]:
        run = mh.train(
            model,
            data,
            steps=times * p.steps,
            optimizer=rule,
            record=(),
            num_threads=p.threads,
            **options,
        )
        return run.model.W, run.model.U

    return way


def steps_alone(p: Problem, data: mh.Dataset) -> dict[str, Callable[[int], Way]]:
    """Return trainings of whose steps the costs are wanted, by the factor of their number."""
    settings: dict[str, Any] = {"dtype": p.dtype, "seed": 0}
    populations = {
        "mixture": mh.data.tokenized_mixture(B, T, D, noise=1.0, **settings),
        "sphere": mh.data.sphere_tokens(B, T, D, external_query=False, **settings),
        "planted": mh.data.planted_attention(B, T, D, 2, **settings),
    }
    return {
        "batch": lambda times: own(p, data, times=times, batch=B),
        "full": lambda times: own(p, data[:B], times=times),
        **{
            name: lambda times, drawn=drawn: own(p, data, times=times, batch=B, stream=drawn)
            for name, drawn in populations.items()
        },
    }


def torch_ways(p: Problem) -> Iterator[tuple[str, Way]]:
    """Train with torch, in place."""
    import torch

    from mhfast._bench.peers import torch_families as several
    from mhfast._bench.peers import torch_formulas as one

    torch.set_num_threads(p.threads)
    X, y = torch.from_numpy(p.X), torch.from_numpy(p.y)
    samples = torch.from_numpy(p.samples)

    def way(gradient: Any, grad: bool = False) -> Way:
        def trained() -> tuple[Array, Array]:
            W, U = (torch.from_numpy(a if p.runs > 1 else a[0]).clone() for a in (p.W, p.U))
            W.requires_grad_(grad)
            U.requires_grad_(grad)
            for k in range(p.steps):
                drawn = samples[k] if p.runs > 1 else samples[k, 0]
                x = X[drawn]
                _, gW, gU = gradient(W, U, *((x, x) if p.runs > 1 else (x,)), y[drawn])
                with torch.no_grad():
                    W.sub_(gW, alpha=LR)
                    U.sub_(gU, alpha=LR)
            return W.detach().numpy(), U.detach().numpy()

        return trained

    if p.runs > 1:
        yield "torch, written out", way(torch.no_grad()(several.written_out))
        return
    yield "torch, autograd", way(one.differentiated(one.keys_first), True)
    for name, closed in (("keys", one.closed_keys_first), ("queries", one.closed_queries_first)):
        yield f"torch, written out, {name} first", way(one.without_autograd(closed))
    compiled = torch.compile(one.closed_keys_first)
    yield "torch.compile, written out", way(one.without_autograd(compiled))


def jax_ways(p: Problem) -> Iterator[tuple[str, Way]]:
    """Train with jax: one lax.scan over the steps, runs by vmap or one after the other."""
    from mhfast._bench.peers.jax_config import configure

    configure()
    import jax

    from mhfast._bench.peers import jax_formulas as formulas

    X, y = jax.device_put(p.X), jax.device_put(p.y)
    samples = jax.device_put(p.samples.astype(np.int32))

    def train(gradient: Any, theta: Any, drawn: Any) -> Any:
        def step(theta: Any, drawn: Any) -> Any:
            _, g = gradient(theta, X[drawn], y[drawn])
            return jax.tree.map(lambda a, b: a - LR * b, theta, g), None

        return jax.lax.scan(step, theta, drawn)[0]

    gradients = {
        "value_and_grad": jax.value_and_grad(formulas.keys_first),
        "written out, keys first": formulas.closed_keys_first,
        "written out, queries first": formulas.closed_queries_first,
    }
    for name, gradient in gradients.items():

        def one(theta: Any, drawn: Any, gradient: Any = gradient) -> Any:
            return train(gradient, theta, drawn)

        if p.runs == 1:
            yield f"jax, {name}", _compiled(jax, one, (p.W[0], p.U[0]), samples[:, 0])
            continue
        together = jax.vmap(one, in_axes=(0, 1))
        in_turn = _in_turn(jax, one)
        yield f"jax, vmap, {name}", _compiled(jax, together, (p.W, p.U), samples)
        yield f"jax, lax.map, {name}", _compiled(jax, in_turn, (p.W, p.U), samples)


def _in_turn(jax: Any, one: Any) -> Any:
    return lambda theta, drawn: jax.lax.map(
        lambda args: one(*args), (theta, drawn.transpose(1, 0, 2))
    )


def _compiled(jax: Any, train: Any, theta: Any, samples: Any) -> Way:
    theta = jax.device_put(theta)
    compiled = jax.jit(train)

    def way() -> tuple[Array, Array]:
        W, U = jax.block_until_ready(compiled(theta, samples))
        return np.asarray(W), np.asarray(U)

    return way


PEERS = {"torch": torch_ways, "jax": jax_ways}


def measured(dtype: str, runs: int, threads: int, libraries: list[str]) -> dict[str, Any]:
    """Time every way of one problem, and compare the final parameters."""
    p = Problem(dtype, runs, threads)
    data = mh.Dataset(p.X, p.y)
    ways = {"mhfast": own(p, data, batch=B, seed=range(runs) if runs > 1 else 0)}
    for library in libraries:
        ways |= dict(PEERS[library](p))
    expected = ways["mhfast"]()
    tolerance = 1e-9 if dtype == "float64" else 1e-3
    for name, way in ways.items():
        found = way()
        for a, b in zip(found, expected, strict=True):
            error = abs(np.asarray(a).reshape(b.shape) - b).max() / abs(b).max()
            if not error < tolerance:
                raise AssertionError(f"{name} differs from mhfast by {error:.1e}")
    alone = steps_alone(p, data) if runs == 1 else {}
    ways |= {f"{name} {times}": way(times) for name, way in alone.items() for times in (1, 3)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    clock = time.process_time if threads == 1 else time.perf_counter
    for k in range(ROUNDS):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            begin = clock()
            ways[name]()
            seconds[name].append(clock() - begin)
    micro = {name: 1e6 * statistics.median(times) / p.steps for name, times in seconds.items()}
    step = {name: (micro.pop(f"{name} 3") - micro.pop(f"{name} 1")) / 2 for name in alone}
    peers = {
        library: min((time, name) for name, time in micro.items() if name.startswith(library))
        for library in libraries
    }
    return {
        "dtype": dtype,
        "runs": runs,
        "mhfast": micro["mhfast"],
        **{library: time for library, (time, _) in peers.items()},
        "ratio": min(time for time, _ in peers.values()) / micro["mhfast"],
        "beside": step["batch"] - step["full"] if step else None,
        "new": {name: step[name] / step["batch"] for name in POPULATIONS if step},
        "ways": micro,
    }


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    rows = []
    names = "".join(f"{name:>9}" for name in ("mhfast", *options.peers))
    print(f"dtype    runs{names}  best/mhfast   beside {''.join(f'{p:>8}' for p in POPULATIONS)}")
    for dtype in ("float32", "float64"):
        for runs in STEPS:
            row = measured(dtype, runs, options.threads, options.peers)
            rows.append(row)
            beside = "" if row["beside"] is None else f"{row['beside']:7.1f}"
            new = "".join(f"{ratio:8.2f}" for ratio in row["new"].values())
            times = "".join(f"{row[name]:9.1f}" for name in ("mhfast", *options.peers))
            print(
                f"{dtype} {runs:5d}{times} {row['ratio']:11.2f}  {beside} {new}",
                flush=True,
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
