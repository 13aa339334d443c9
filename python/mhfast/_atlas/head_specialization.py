"""Heads of a student layer come to compute one head each of the teacher."""

from __future__ import annotations

import numpy as np

import mhfast as mh

from .experiment import Claim, Experiment, Outcome
from .figure import COLORS, band, label, panels, pixels

HEADS, DIM, TOKENS, OUT = 3, 6, 5, 4


def run(quick: bool) -> Outcome:
    """Train students with as many heads as the teacher, and compare head by head."""
    starts, steps, samples = (4, 400, 150) if quick else (20, 2500, 500)
    rng = np.random.default_rng(0)
    teacher = mh.Layer(
        1.5 * rng.standard_normal((HEADS, DIM, DIM)) / np.sqrt(DIM),
        rng.standard_normal((HEADS, DIM, OUT)) / np.sqrt(DIM),
    )
    X = rng.standard_normal((samples, TOKENS, DIM))
    every = steps // 50
    trained = mh.train(
        mh.Layer.gaussian(HEADS, DIM, OUT, std=0.1, seed=1, runs=starts),
        mh.Dataset(X, teacher(X)),
        steps=steps,
        optimizer=mh.Adam(0.01),
        loss="squared",
        record={"loss": every, "W": every},
    )
    W = trained.history["W"].reshape(starts, -1, HEADS, DIM * DIM)
    truth = np.asarray(teacher.W).reshape(HEADS, -1)
    cosine = W / np.linalg.norm(W, axis=-1, keepdims=True)
    cosine = cosine @ (truth / np.linalg.norm(truth, axis=1, keepdims=True)).T
    matched = np.sort(cosine.max(axis=-1), axis=-1)  # of each head to its nearest of the teacher
    nearest = cosine[:, -1].argmax(axis=-1)
    apart = np.array([len(set(heads)) == HEADS for heads in nearest])
    fitted = trained.history["loss"][:, -1] < 1e-2 * trained.history["loss"][:, 0]

    best = int(trained.history["loss"][:, -1].argmin())
    order = np.argsort(nearest[best])
    figure, (left, right) = panels("Each head comes to do the work of one head of the teacher")
    pixels(
        left,
        cosine[best, -1][order],
        rows=[f"student {k + 1}" for k in range(HEADS)],
        columns=[f"teacher {k + 1}" for k in range(HEADS)],
    )
    label(left, "", "", "cosine of W, start of the least loss")
    for k, name in enumerate(("head farthest from any", "second", "head nearest to one")):
        band(right, trained.steps["W"], matched[..., k], COLORS[k], name)
    label(right, "step of Adam", "cosine to the nearest head", "all starts", ylim=(-0.1, 1.03))
    share = float((apart & fitted).sum() / max(fitted.sum(), 1))
    return Outcome(
        ("starts", "fitted", "of these with one head for each", "least loss", "median loss"),
        [
            (
                str(starts),
                str(fitted.sum()),
                str((apart & fitted).sum()),
                trained.history["loss"][:, -1].min(),
                float(np.median(trained.history["loss"][:, -1])),
            )
        ],
        [
            Claim("share of starts that fit (loss below 1 % of the first)", fitted.mean(), 0.5),
            Claim("of these, share in which heads pair up one to one", share, 1.0),
            Claim(
                "start of the least loss: smallest cosine of a head to its partner",
                matched[best, -1].min(),
                0.99,
            ),
        ],
        figure,
    )


EXPERIMENT = Experiment(
    title="Heads specialize",
    paper="Chen, Sheen, Wang, Yang, Training Dynamics of Multi-Head Softmax Attention for "
    "In-Context Learning: Emergence, Convergence, and Optimality, 2024",
    says="Gradient training breaks the symmetry between the heads of a layer: each comes to serve "
    "one task of the target. Recalled from the abstract, which is about in-context regression with "
    "several tasks; here the tasks are the heads of a teacher.",
    setting="A Gaussian teacher layer of 3 heads, d = 6, T = 5, 4 outputs; students of 3 heads "
    "from Gaussian starts of standard deviation .1, full-batch Adam (.01) on the squared loss. All "
    "of it is our choice. Softmax rows only.",
    run=run,
)
