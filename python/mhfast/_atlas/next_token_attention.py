"""Attention trained for the next token: priorities set its direction, cycles its finite part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

import mhfast as mh

from ..figures import BLUE, ORANGE
from .experiment import Claim, Experiment, Outcome
from .figure import Array, band, label, panels

SAMPLES, TOKENS, WORDS, DIM = 30, 5, 6, 8


@dataclass(frozen=True)
class Sentences:
    """The tokens of SAMPLES sentences (n, T), what follows each (n,), vectors of words (V, d)."""

    ids: npt.NDArray[np.int64]
    following: npt.NDArray[np.int64]
    embedding: Array


def sentences(seed: int, level: int) -> Sentences:
    """Draw sentences and next tokens.

    For each last token the words have an order of their own, `level` of them at a time being
    equal; the next token is one of the first words of the sentence in that order, at random.
    """
    rng = np.random.default_rng(seed)
    E = rng.standard_normal((WORDS, DIM))
    order = rng.permuted(np.tile(np.arange(WORDS) // level, (WORDS, 1)), axis=1)
    ids = rng.integers(WORDS, size=(SAMPLES, TOKENS))
    place = order[ids[:, -1:], ids]
    chance = rng.random(place.shape) * (place == place.min(axis=1, keepdims=True))
    following = ids[np.arange(SAMPLES), chance.argmax(axis=1)]
    return Sentences(ids, following, E / np.linalg.norm(E, axis=1, keepdims=True))


def finite_part(text: Sentences, svm: mh.theory.NextTokenSVM) -> tuple[Array, float]:
    """Return the W along the ties (d, d) that training tends to, and the infimum of the loss.

    As the rest of W diverges, only tokens of the component of the next token keep attention; the
    loss of attention among these is minimized, a convex problem.
    """
    E, X = text.embedding, text.embedding[text.ids]
    last, i, j = svm.ties.T
    tied = (E[last][:, :, None] * (E[i] - E[j])[:, None, :]).reshape(len(last), -1)
    basis = np.linalg.svd(tied, full_matrices=False)[2].reshape(-1, DIM, DIM)
    logits = np.einsum("na,rab,ntb->rnt", X[:, -1], basis, X)
    component = svm.components[text.ids[:, -1:], text.ids]
    target = svm.components[text.ids[:, -1], text.following]
    kept = np.where(component == target[:, None], 0.0, -np.inf)
    right = np.where(text.ids == text.following[:, None], 0.0, -np.inf)

    def value_and_slope(c: Array) -> tuple[float, Array]:
        S = np.tensordot(c, logits, 1)  # (n, T)
        value = (logsumexp(S + kept, axis=1) - logsumexp(S + right, axis=1)).mean()
        change = softmax(S + kept, axis=1) - softmax(S + right, axis=1)
        return float(value), np.tensordot(logits, change, 2) / len(S)

    found = minimize(
        value_and_slope, np.zeros(len(basis)), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    return np.tensordot(found.x, basis, 1), float(found.fun)


def run(quick: bool) -> Outcome:
    """Train W on sentences without and with cycles; compare direction and finite part."""
    instances = 4 if quick else 12
    settings = {
        "no cycles": (1, mh.NormalizedGradientDescent(0.05), 3000 if quick else 10_000),
        "cycles": (WORDS // 2, mh.GradientDescent(4.0), 30_000 if quick else 200_000),
    }
    figure, (left, right) = panels("Priorities set the direction of W, cycles its finite part")
    rows: list[tuple[str | float, ...]] = []
    cosines, growths = {}, {}
    distance = np.empty(0)
    for (name, (level, rule, steps)), color in zip(settings.items(), (BLUE, ORANGE), strict=True):
        texts = [sentences(seed, level) for seed in range(instances)]
        svms = [mh.theory.next_token_svm(t.ids, t.following, embedding=t.embedding) for t in texts]
        data = mh.Dataset(
            np.stack([t.embedding[t.ids] for t in texts]),
            np.stack([np.eye(WORDS)[t.following][:, None] for t in texts]),
        )
        # With X V one-hot the output of the layer is the attention that each word receives.
        V = np.stack([np.linalg.pinv(t.embedding)[None] for t in texts])
        start, every = mh.Layer(np.zeros((1, DIM, DIM)), V, query=-1), steps // 100
        trained = mh.train(
            start, data, steps=steps, optimizer=rule, wrt="W", loss="negative_log",
            record={"W": every, "loss": every},
        )  # fmt: skip
        at, W = trained.steps["W"], trained.history["W"][:, :, 0]  # (instances, records, d, d)
        free = np.stack([svm.without_ties(w) for svm, w in zip(svms, W, strict=True)])
        cosines[name] = np.stack([_cosines(w, svm) for w, svm in zip(free, svms, strict=True)])
        tenth = int(np.searchsorted(at, steps // 10))
        growths[name] = np.array(
            [_cosines(w[-1:] - w[[tenth]], svm)[0] for w, svm in zip(free, svms, strict=True)]
        )
        band(left, at[1:], cosines[name][:, 1:], color, name)
        loss, end = trained.history["loss"], cosines[name][:, -1]
        ties = np.array([len(svm.ties) for svm in svms])
        if not ties.any():
            rows.append((name, ties.mean(), end.mean(), end.min(), growths[name].mean(), "",
                         loss[:, -1].mean()))  # fmt: skip
            continue
        finite = [finite_part(t, svm) for t, svm in zip(texts, svms, strict=True)]
        least = np.array([infimum for _, infimum in finite])
        target = np.stack([part for part, _ in finite])[:, None]
        size = np.linalg.norm(target, axis=(2, 3))
        distance = np.linalg.norm(W - free - target, axis=(2, 3)) / size
        excess = loss - least[:, None]
        band(right, at[1:], distance[:, 1:], color, "W along the cycles, relative")
        band(right, at[1:], excess[:, 1:], "0.3", "loss, to its infimum", "--")
        rows.append((name, ties.mean(), end.mean(), end.min(), growths[name].mean(),
                     distance[:, -1].mean(), excess[:, -1].mean()))  # fmt: skip
    label(left, "step", "", "cosine to the Graph-SVM, without the finite part", xscale="log",
          ylim=(0.8, 1.005))  # fmt: skip
    label(right, "step", "", "cycles: distance to the limit", xscale="log", yscale="log")
    return Outcome(
        ("next tokens", "ties, mean", "mean cosine", "smallest", "of the last nine tenths",
         "distance along the cycles", "loss above infimum"),
        rows,
        [
            Claim("no cycles: mean cosine of W to the Graph-SVM",
                  cosines["no cycles"][:, -1].mean(), 0.99),
            Claim("cycles: mean cosine of W, without its part along them, to the Graph-SVM",
                  cosines["cycles"][:, -1].mean(), 0.97 if quick else 0.99),
            Claim("cycles: mean cosine of what the last nine tenths of the steps add",
                  growths["cycles"].mean(), 0.99 if quick else 0.995),
            Claim("cycles: largest relative distance of that part to its limit",
                  distance[:, -1].max(), 0.1 if quick else 0.02, at_least=False),
        ],
        figure,
    )  # fmt: skip


def _cosines(W: Array, svm: mh.theory.NextTokenSVM) -> Array:
    """Return the cosine of matrices (k, d, d), each a run of a model, to the solution."""
    model = mh.Layer(W[:, None], np.zeros((1, DIM, 1)))
    return mh.theory.alignment(model, svm)[:, 0]


EXPERIMENT = Experiment(
    title="Attention trained for the next token follows a graph of priorities",
    paper="Li, Huang, Ildiz, Rawat, Oymak, Mechanics of Next Token Prediction with "
    "Self-Attention, 2024",
    says="Which tokens were next in which sentences makes a directed graph for each last token. "
    "Gradient descent on W diverges in the direction of the Graph-SVM, which separates the "
    "strongly connected components by priority (hard retrieval), plus a finite part along the "
    "cycles, which shares attention inside a component (soft composition). Taken from the "
    "abstract.",
    setting="Twelve instances, each 30 sentences of T = 5 words of a vocabulary of 6, with random "
    "unit vectors in 8 dimensions; the last is the query, and X V is one-hot, so that the "
    "loss is minus the log of the attention on the next token. It is the word of the "
    "sentence that comes first in an order drawn for each last token (no cycles), or one "
    "of those in the first half of that order that the sentence has, at random (cycles). "
    "W from zero by normalized steps of .05, or with cycles by gradient descent of step "
    "4, as normalized steps do not converge where a part of W stays finite. Under gradient "
    "descent W grows with the logarithm of the steps, and its cosine approaches 1 as "
    "slowly; its late increments are closer in direction. The finite part is compared with the "
    "minimum of the loss among the tokens of the component, found by SciPy. Data, sizes "
    "and steps are our choice.",
    run=run,
)
