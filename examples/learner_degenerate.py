"""Layers that come near to what cannot be learnt, and where the phases lose their way; a table.

Random layers of two heads on three Boolean tokens (`mh.data.boolean_layer`) are changed step by
step until one of the conditions of `mh.learner.nondegeneracy` fails. For each step: the number in
question, the cosine between the true hull of the key-query matrices and the one that was sculpted,
its eigen-gap, the error of the sum of the value matrices, and that of all parameters after the
phases and after refinement. Medians of the seeds.
"""

import argparse

import numpy as np

import mhfast as mh

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--n", type=int, default=30_000, help="examples")
parser.add_argument("--dim", type=int, default=8)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--quick", action="store_true", help="one step each, few examples")
arguments = parser.parse_args()
if arguments.quick:
    arguments.n, arguments.dim, arguments.seeds = 2000, 5, 1

TOKENS = 3
STEPS = {
    "value_independence": (0.3, 0.03, 1e-3, 1e-4, 0.0),
    "sum_condition": (0.1, 1e-2, 1e-3, 1e-4, 1e-5),
    "sum_share": (0.3, 0.1, 0.03, 0.01),
    "apart": (0.3, 0.1, 0.03, 0.01),
    "hull_distance": (0.3, 0.1, 0.03, 0.0),
    "difference_condition": (0.1, 1e-3, 1e-5),
    "effective_rank": (0.3, 0.03, 1e-3),
}


def spectrum(matrix, ratio):
    """Return a matrix of the same directions and norm, with singular values down to a ratio."""
    left, values, right = np.linalg.svd(matrix)
    steps = np.geomspace(1.0, ratio, len(values))
    return np.linalg.norm(values) / np.linalg.norm(steps) * (left * steps) @ right


def changed(name, step, seed):
    """Return a layer with a condition moved by so much from a random layer, and the number."""
    dim = arguments.dim
    layer = mh.data.boolean_layer(1, TOKENS, dim, 2, seed=seed).truth["layer"]
    W, V = layer.W.copy(), layer.V.copy()
    rng = np.random.default_rng([seed, 7])
    moved = [rng.standard_normal((dim, dim)) * np.linalg.norm(a[0]) / dim * step for a in (W, V)]
    if name == "value_independence":
        V[1] = 0.7 * V[0] + moved[1]
    elif name == "sum_condition":
        V[1] = spectrum(V[0] + V[1], step) - V[0]
    elif name == "sum_share":
        V[1] = moved[1] - V[0]
    elif name == "apart":
        W[1] = W[0] + moved[0]
    elif name == "hull_distance":
        W[1] = moved[0] - W[0]
    elif name == "difference_condition":
        middle, apart = V.mean(axis=0), spectrum(V[0] - V[1], step) / 2
        V = np.stack([middle + apart, middle - apart])
    else:
        W = np.stack([spectrum(w, step) for w in W])
    layer = mh.Layer(W, V)
    numbers = getattr(mh.learner.nondegeneracy(layer), name)
    if name == "difference_condition":
        return layer, numbers[0, 1]
    return layer, np.min(numbers)


def learnt(layer, seed):
    """Return how far the phases came, and what refinement made of it."""
    shape = (arguments.n, TOKENS, arguments.dim)
    X = np.random.default_rng([seed, 8]).choice([-1.0, 1.0], shape)
    result = mh.learn_layer(X, layer(X), 2, seed=seed)
    cosine, gap, sum_error, error = 0.0, 1.0, 1.0, np.inf
    if any(phase.name == "second sculpting" for phase in result.phases):
        estimate, _, body = result["second sculpting"].parts
        true = layer.V.sum(axis=0)
        cosine, gap = mh.learner.hull_cosine(body.directions, layer.W), body.gap
        sum_error = np.linalg.norm(estimate.V_sum - true) / np.linalg.norm(true)
        error = mh.learner.align(result.unrefined, layer).error
    refined = mh.learner.align(result.layer, layer).error
    return cosine, gap, sum_error, error, refined, result.learnt


print(f"(2,{arguments.dim},{TOKENS}), {arguments.n:,} examples, medians of {arguments.seeds} seeds")
print(f"{'condition':22s}   value  cosine      gap     sum  phases refined  learnt")
for name, steps in STEPS.items():
    for step in steps[:1] if arguments.quick else steps:
        rows = []
        for seed in range(arguments.seeds):
            layer, value = changed(name, step, seed)
            rows.append((value, *learnt(layer, seed)))
        value, cosine, gap, *errors, _ = np.median(np.array(rows, dtype=float), axis=0)
        print(f"{name:22s} {value:7.2g} {cosine:7.3f} {gap:8.3g}", end=" ")
        print(" ".join(f"{error:7.2g}" for error in errors), end="  ")
        print(f"{sum(row[-1] for row in rows)} of {arguments.seeds}", flush=True)
