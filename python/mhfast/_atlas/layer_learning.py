"""A multi-head attention layer is recovered from random examples."""

from __future__ import annotations

import time

import numpy as np

import mhfast as mh

from .experiment import Claim, Experiment, Outcome
from .figure import COLORS, label, panels

SIZES = ((1, 8, 4, 5000), (2, 8, 3, 50_000), (2, 12, 3, 50_000), (3, 8, 3, 100_000))


def run(quick: bool) -> Outcome:
    """Learn layers of several sizes from random Boolean examples, a few seeds each."""
    sizes = ((1, 6, 3, 3000), (2, 5, 2, 8000)) if quick else SIZES
    seeds = range(1 if quick else 3)
    rows, learnt, held_out = [], [], []
    errors: dict[str, list[float]] = {}
    for heads, dim, tokens, n in sizes:
        name = f"H = {heads}, d = {dim}, T = {tokens}"
        errors[name] = []
        begin = time.perf_counter()
        for seed in seeds:
            data = mh.data.boolean_layer(n, tokens, dim, heads, seed=seed)
            found = mh.learn_layer(data, heads=heads, seed=seed)
            fresh = data.sample(1000, seed=seed + 100)
            learnt.append(found.learnt)
            wrong = np.linalg.norm(found.layer(fresh) - fresh.y) / np.linalg.norm(fresh.y)
            held_out.append(wrong)
            errors[name].append(mh.learner.align(found.layer, data.truth["layer"]).error)
        seconds = (time.perf_counter() - begin) / len(seeds)
        rows.append((name, str(n), float(np.max(errors[name])), seconds))
    figure, (ax,) = panels("Layers are recovered to rounding from random examples", columns=1)
    for k, values in enumerate(errors.values()):
        ax.plot([k] * len(values), np.maximum(values, 1e-17), "o", color=COLORS[k % len(COLORS)])
    ax.set_xticks(range(len(errors)), list(errors))
    label(ax, "size", "largest error of a parameter, relative", yscale="log", ylim=(1e-17, 1))
    return Outcome(
        ("size", "examples", "largest error of W and V", "seconds"),
        rows,
        [
            Claim("share of layers reported as learnt", float(np.mean(learnt)), 1.0),
            Claim("largest error of W and V", float(max(map(max, errors.values()))), 1e-8,
                  at_least=False),
            Claim("largest error of outputs on fresh examples", float(max(held_out)), 1e-8,
                  at_least=False),
        ],
        figure,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="A multi-head attention layer can be learnt from random examples",
    paper="Chen, Li, Provably learning a multi-head attention layer, 2024",
    says="From labelled random examples of F(X) = Σ softmax(XΘXᵀ)XW with few heads, an algorithm "
    "recovers all parameters in time (dT)^O(H³). Recalled from the abstract; the constants and "
    "worst-case assumptions of the proof are not tested.",
    setting="Random layers on Boolean tokens; `mhfast.learn_layer` follows the phases of the paper "
    "and refines their result. Sizes are our choice.",
    run=run,
)
