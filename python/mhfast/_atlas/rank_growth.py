"""From a tiny start, the rank of Q Kᵀ grows one by one."""

from __future__ import annotations

import numpy as np

import mhfast as mh

from .experiment import Claim, Experiment, Outcome
from .figure import COLORS, label, panels

TEACHER = np.array([1.2, 0.7, 0.4, 0.2, 0.0, 0.0])
RANK = int(np.count_nonzero(TEACHER))


def run(quick: bool) -> Outcome:
    """Train factors towards a teacher of rank 4, and follow singular values."""
    starts, steps, samples = (4, 800, 200) if quick else (20, 1200, 1000)
    dim = len(TEACHER)
    rng = np.random.default_rng(0)
    X, new = rng.standard_normal((samples, 4, dim)), rng.standard_normal((500, 4, dim))
    teacher = mh.Layer(np.diag(TEACHER)[None], np.eye(dim)[None])
    Q, K = 1e-10 * rng.standard_normal((2, starts, 1, dim, dim))
    every = 4
    trained = mh.train(
        mh.Layer(mh.LowRank(Q, K), np.eye(dim)[None]),
        mh.Dataset(X, teacher(X)),
        steps=steps,
        optimizer=mh.GradientDescent(0.005),
        loss="squared",
        wrt=("Q", "K"),
        test=mh.Dataset(new, teacher(new)),
        record={"loss": every, "test_loss": every, "Q": every, "K": every},
    )
    W = trained.history["Q"][:, :, 0] @ np.swapaxes(trained.history["K"][:, :, 0], -1, -2)
    values = np.linalg.svd(W, compute_uv=False)  # (starts, records, dim)
    arrival = (values[..., :RANK] >= TEACHER[:RANK] / 2).argmax(axis=1)  # (starts, RANK)
    # What the next singular value has reached when one arrives, relative to where it is to go.
    behind = [
        np.take_along_axis(values[..., k + 1], arrival[:, [k]], axis=1)[:, 0] / TEACHER[k + 1]
        for k in range(RANK - 1)
    ]
    at = trained.steps["Q"]
    figure, (left, right) = panels("From a tiny start the rank grows one by one")
    for k in range(dim):
        name = f"singular value {k + 1}" if k < RANK else None
        color = COLORS[k] if k < RANK else "0.7"
        left.plot(at, values[0, :, k], color=color, label=name)
        left.axhline(TEACHER[k], color=color, linestyle=":", linewidth=0.8)
    label(left, "step", "singular value of Q Kᵀ", "one start (dotted: the teacher's)",
          ylim=(-0.05, 1.9))  # fmt: skip
    loss = trained.history["loss"]
    right.plot(at, loss[0], color=COLORS[0], label="training loss")
    right.plot(at, trained.history["test_loss"][0], "--", color=COLORS[1], label="test loss")
    label(right, "step", "", "loss of that start", yscale="log")
    return Outcome(
        ("singular value", "teacher", "at the end, mean", "step of its half, mean"),
        [
            (f"{k + 1}", TEACHER[k], values[:, -1, k].mean(), at[arrival[:, k]].mean())
            for k in range(RANK)
        ],
        [
            Claim(
                "share of starts whose singular values arrive in order",
                float((np.diff(arrival, axis=1) > 0).all(axis=1).mean()),
                1.0,
            ),
            Claim(
                "largest part of the next one at the arrival of one",
                float(np.max(behind)),
                0.45,
                at_least=False,
            ),
            Claim(
                "largest singular value beyond the teacher's rank",
                float(values[..., RANK:].max()),
                1e-6,
                at_least=False,
            ),
            Claim(
                "largest error of a singular value at the end",
                float(np.abs(values[:, -1] - TEACHER).max()),
                0.02,
                at_least=False,
            ),
        ],
        figure,
    )


EXPERIMENT = Experiment(
    title="Attention weights grow in rank one step at a time",
    paper="Boix-Adsera, Littwin, Abbe, Bengio, Susskind, Transformers Learn through Gradual Rank "
    "Increase, 2023",
    says="Trained from small weights, the product of query and key matrices gains rank "
    "incrementally. Recalled from the abstract; its proof is for diagonal weights and small "
    "initialization.",
    setting="A teacher layer of one head with W diagonal, entries 1.2, .7, .4, .2, 0, 0, and V the "
    "identity; Gaussian tokens, T = 4. Full factors Q and K of 6 x 6 start from Gaussian entries "
    "of standard deviation 1e-10 and are trained by gradient descent of step .005 on the squared "
    "loss. "
    "All of it is our choice; the paper trains deep models.",
    run=run,
)
