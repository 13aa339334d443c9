"""Linear attention beside torch and jax, which take the products in the best order too.

    python -m benchmarks.linear
    python -m benchmarks.linear --threads 2 --json linear.json
    python -m benchmarks.linear --peers jax  # the faster one alone

A layer of linear attention with squared loss. "steps" is gradient descent on all samples, in
microseconds a step, for which every way computes XᵀX once, before the first step, and is not
charged for it; "call" is one loss and gradient with XᵀX. The peers have Z W (XᵀX) V in both orders,
from the left and from the right, with autodiff and with gradients written out; jax takes the steps
in one compiled lax.scan, torch eagerly and through torch.compile. The best way of each counts. The
ways are timed in turn, lower deciles are compared, and the results of all must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import mhfast as mh

# n samples, T tokens, d dimensions, H heads, p outputs, query.
SHAPES: tuple[tuple[int, int, int, int, int, int | None], ...] = (
    (1000, 40, 6, 1, 1, -1),
    (300, 40, 20, 8, 1, -1),
    (100, 40, 10, 2, 10, None),
)
LR, STEPS, ROUNDS = 1e-3, 20, 15

Array = npt.NDArray[Any]
Way = Callable[[], tuple[Array, Array]]  # trains, and returns W and V, or their gradients


class Problem:
    """Data and initial parameters."""

    def __init__(
        self, shape: tuple[int, int, int, int, int, int | None], dtype: str, threads: int
    ) -> None:
        n, T, d, H, p, self.query = shape
        rng = np.random.default_rng(0)
        self.X = rng.standard_normal((n, T, d)).astype(dtype)
        q = T if self.query is None else 1
        self.Z = self.X if self.query is None else np.ascontiguousarray(self.X[:, -1:])
        self.y = rng.standard_normal((n, q, p)).astype(dtype)
        self.W = (0.3 * rng.standard_normal((H, d, d))).astype(dtype)
        self.V = (0.3 * rng.standard_normal((H, d, p))).astype(dtype)
        self.threads = threads


def own(p: Problem) -> dict[str, Way]:
    """Train and differentiate with mhfast."""
    model = mh.Layer(p.W, p.V, p.query, attention="linear")
    data = mh.Dataset(p.X, p.y)
    rule = mh.GradientDescent(LR)
    options: dict[str, Any] = {"loss": "squared", "num_threads": p.threads}

    def train(steps: int) -> Way:
        def way() -> tuple[Array, Array]:
            run = mh.train(model, data, steps=steps, optimizer=rule, record=(), **options)
            return run.model.W, run.model.V

        return way

    def call() -> tuple[Array, Array]:
        _, found = mh.value_and_grad(model, data, **options)
        return found.W, found.V

    return {"steps": train(11 * STEPS), "start": train(STEPS), "call": call}


def from_the_left(lib: Any, W: Any, V: Any, Z: Any, G: Any) -> tuple[Any, Any]:
    """Return F = ((Z W) G) V and (Z W) G, (n, q, H, d), by three products of matrices."""
    n, q, d = Z.shape
    H = len(W)
    P = Z.reshape(n * q, d) @ W.swapaxes(0, 1).reshape(d, H * d)
    Y = lib.matmul(P.reshape(n, q * H, d), G)
    F = Y.reshape(n * q, H * d) @ V.reshape(H * d, -1)
    return F.reshape(n, q, -1), Y


def left(lib: Any, W: Any, V: Any, Z: Any, G: Any, y: Any) -> tuple[Any, Any, Any]:
    """Loss and gradients from the left."""
    n, q, d = Z.shape
    H, _, p = V.shape
    F, Y = from_the_left(lib, W, V, Z, G)
    R = (F - y).reshape(n * q, p)
    g = (2.0 / n) * R
    gV = Y.reshape(n * q, H * d).T @ g
    D = lib.matmul((g @ V.reshape(H * d, p).T).reshape(n, q * H, d), G)
    gW = Z.reshape(n * q, d).T @ D.reshape(n * q, H * d)
    return (R * R).sum() / n, gW.reshape(d, H, d).swapaxes(0, 1), gV.reshape(H, d, p)


def right(lib: Any, W: Any, V: Any, Z: Any, G: Any, y: Any) -> tuple[Any, Any, Any]:
    """Loss and gradients of F = Z M, M = the sum of W (G V) over heads, (n, d, p)."""
    n, _, d = Z.shape
    H, _, p = V.shape
    B = lib.matmul(G, V.swapaxes(0, 1).reshape(d, H * p))  # (n, d, H p)
    B = B.reshape(n, d, H, p).swapaxes(1, 2).reshape(n, H * d, p)
    M = lib.matmul(W.swapaxes(0, 1).reshape(d, H * d), B)
    R = lib.matmul(Z, M) - y
    g = lib.matmul(Z.swapaxes(1, 2), (2.0 / n) * R)  # by M
    rows = g.swapaxes(0, 1).reshape(d, n * p)
    gW = rows @ B.swapaxes(0, 1).reshape(H * d, n * p).T
    E = W.swapaxes(0, 1).reshape(d, H * d).T @ rows  # (H d, n p)
    E = E.reshape(H, d, n, p).swapaxes(0, 2).swapaxes(2, 3).reshape(n, d, p * H)
    gV = lib.matmul(G, E).sum(0).reshape(d, p, H)
    return (R * R).sum() / n, gW.reshape(d, H, d).swapaxes(0, 1), gV.swapaxes(1, 2).swapaxes(0, 1)


def torch_ways(p: Problem) -> Iterator[tuple[str, str, Way]]:
    """Train with torch, in place."""
    import torch

    torch.set_num_threads(p.threads)
    X, y, Z = (torch.from_numpy(a) for a in (p.X, p.y, p.Z))
    W0, V0 = torch.from_numpy(p.W), torch.from_numpy(p.V)

    def gram() -> Any:
        return X.transpose(1, 2) @ X / X.shape[1]

    known = gram()

    def autograd(_: Any, W: Any, V: Any, Z: Any, G: Any, y: Any) -> tuple[Any, Any, Any]:
        W, V = W.detach().requires_grad_(), V.detach().requires_grad_()
        with torch.enable_grad():
            loss = ((from_the_left(torch, W, V, Z, G)[0] - y) ** 2).sum() / len(y)
            return (loss, *torch.autograd.grad(loss, (W, V)))

    def steps(gradient: Any) -> Way:
        def way() -> tuple[Array, Array]:
            W, V = W0.clone(), V0.clone()
            with torch.no_grad():
                for _ in range(STEPS):
                    _, gW, gV = gradient(torch, W, V, Z, known, y)
                    W.sub_(gW, alpha=LR)
                    V.sub_(gV, alpha=LR)
            return W.numpy(), V.numpy()

        return way

    def call(gradient: Any) -> Way:
        def way() -> tuple[Array, Array]:
            with torch.no_grad():
                _, gW, gV = gradient(torch, W0, V0, Z, gram(), y)
            return gW.numpy(), gV.numpy()

        return way

    gradients = {"autograd": autograd, "left": left, "right": right}
    gradients |= {f"compile, {name}": torch.compile(gradients[name]) for name in ("left", "right")}
    for name, gradient in gradients.items():
        yield "steps", f"torch, {name}", steps(gradient)
        yield "call", f"torch, {name}", call(gradient)


def jax_ways(p: Problem) -> Iterator[tuple[str, str, Way]]:
    """Train with jax: one lax.scan over the steps."""
    from mhfast._bench.peers.jax_config import configure

    configure()
    import jax
    import jax.numpy as jnp

    X, y, Z, W0, V0 = (jax.device_put(a) for a in (p.X, p.y, p.Z, p.W, p.V))

    def gram(X: Any) -> Any:
        return X.swapaxes(1, 2) @ X / X.shape[1]

    def value(theta: Any, Z: Any, G: Any, y: Any) -> Any:
        return ((from_the_left(jnp, *theta, Z, G)[0] - y) ** 2).sum() / len(y)

    def differentiated(lib: Any, W: Any, V: Any, Z: Any, G: Any, y: Any) -> tuple[Any, Any, Any]:
        del lib
        loss, (gW, gV) = jax.value_and_grad(value)((W, V), Z, G, y)
        return loss, gW, gV

    known = jax.jit(gram)(X)
    for name, gradient in (("grad", differentiated), ("left", left), ("right", right)):

        def train(W: Any, V: Any, G: Any, gradient: Any = gradient) -> Any:
            def step(theta: Any, _: Any) -> Any:
                _, gW, gV = gradient(jnp, *theta, Z, G, y)
                return (theta[0] - LR * gW, theta[1] - LR * gV), None

            return jax.lax.scan(step, (W, V), None, STEPS)[0]

        def call(W: Any, V: Any, X: Any, gradient: Any = gradient) -> Any:
            return gradient(jnp, W, V, Z, gram(X), y)[1:]

        yield "steps", f"jax, {name}", _compiled(jax, train, (W0, V0, known))
        yield "call", f"jax, {name}", _compiled(jax, call, (W0, V0, X))


def _compiled(jax: Any, function: Any, arguments: Any) -> Way:
    compiled = jax.jit(function)

    def way() -> tuple[Array, Array]:
        W, V = jax.block_until_ready(compiled(*arguments))
        return np.asarray(W), np.asarray(V)

    return way


PEERS = {"torch": torch_ways, "jax": jax_ways}


def measured(
    p: Problem, kind: str, own_ways: dict[str, Way], libraries: list[str]
) -> dict[str, Any]:
    """Time every way of one kind, "steps" or "call", and compare what they find."""
    ways = {"mhfast": own_ways[kind]}
    for library in libraries:
        ways |= {name: way for of, name, way in PEERS[library](p) if of == kind}
    model = mh.Layer(p.W, p.V, p.query, attention="linear")
    expected = own_ways["call"]()
    if kind == "steps":
        run = mh.train(
            model, p.X, p.y, steps=STEPS, optimizer=mh.GradientDescent(LR), loss="squared"
        )
        expected = run.model.W, run.model.V
        ways["start"] = own_ways["start"]
    tolerance = 1e-9 if p.X.dtype == np.float64 else 1e-3
    for name, way in ways.items():
        if kind == "steps" and name in ("mhfast", "start"):
            continue  # of other numbers of steps
        for a, b in zip(way(), expected, strict=True):
            error = abs(a - b).max() / abs(b).max()
            if not error < tolerance:
                raise AssertionError(f"{name} differs from mhfast by {error:.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    clock = time.process_time if p.threads == 1 else time.perf_counter
    for k in range(ROUNDS):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            begin = clock()
            ways[name]()
            seconds[name].append(clock() - begin)
    steps = STEPS if kind == "steps" else 1
    micro = {name: 1e6 * float(np.quantile(s, 0.1)) / steps for name, s in seconds.items()}
    if kind == "steps":  # without what a training costs before its first step
        micro["mhfast"] = (micro["mhfast"] - micro.pop("start")) / 10
    best = {
        library: min((time, name) for name, time in micro.items() if name.startswith(library))
        for library in libraries
    }
    return {
        "kind": kind,
        "mhfast": micro["mhfast"],
        **{library: time for library, (time, _) in best.items()},
        "best": min(best.values())[1],
        "ratio": min(best.values())[0] / micro["mhfast"],
        "ways": micro,
    }


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    rows = []
    names = "".join(f"{name:>9}" for name in ("mhfast", *options.peers))
    print(f"dtype       n   T  d H  p    q  kind {names}  best/mhfast  best")
    for dtype in options.dtype:
        for shape in SHAPES:
            p = Problem(shape, dtype, options.threads)
            ways = own(p)
            n, T, d, H, out, _ = shape
            for kind in ("steps", "call"):
                row = measured(p, kind, ways, options.peers)
                rows.append({"dtype": dtype, "shape": shape, **row})
                times = "".join(f"{row[name]:9.1f}" for name in ("mhfast", *options.peers))
                print(
                    f"{dtype} {n:5d} {T:3d} {d:2d} {H} {out:2d} {p.Z.shape[1]:4d}  {kind:5s}"
                    f"{times} {row['ratio']:12.2f}  {row['best']}",
                    flush=True,
                )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
