"""Linear next-token prediction: log-odds in a subspace, the largest margin outside of it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

import mhfast as mh

from ..figures import BLUE, ORANGE
from .experiment import Claim, Experiment, Outcome
from .figure import Array, band, label, panels, pixels

CONTEXTS, DIM, WORDS = 5, 7, 6
NORMS = ("Frobenius", "largest entry", "spectral")


@dataclass(frozen=True)
class Contexts:
    """Unit vectors of contexts (m, d) and the probabilities of the next word in each (m, V)."""

    vectors: Array
    chances: Array


def contexts(seed: int, support: int) -> Contexts:
    """Draw contexts, each followed by `support` of the words."""
    rng = np.random.default_rng(seed)
    H = rng.standard_normal((CONTEXTS, DIM))
    P = np.zeros((CONTEXTS, WORDS))
    for row in P:
        row[rng.permutation(WORDS)[:support]] = rng.dirichlet(np.full(support, 2.0))
    return Contexts(H / np.linalg.norm(H, axis=1, keepdims=True), P)


def log_odds(one: Contexts) -> tuple[Array, Array]:
    """Return the projection on the data subspace (dV, dV), and the W (d, V) in it.

    The subspace is spanned by h_j (e_z - e_w)ᵀ with both words z and w seen after context j; in it
    the logits of one W differ by the logarithms of the probabilities.
    """
    features, values = [], []
    for h, p in zip(one.vectors, one.chances, strict=True):
        first, *others = np.flatnonzero(p)
        for word in others:
            features.append(np.outer(h, np.eye(WORDS)[word] - np.eye(WORDS)[first]).ravel())
            values.append(np.log(p[word] / p[first]))
    F = np.array(features)
    inverse = np.linalg.pinv(F)
    return inverse @ F, (inverse @ np.array(values)).reshape(DIM, WORDS)


def separation(one: Contexts, norm: str) -> Array:
    """Return the W (d, V) of least norm for which words seen after a context win by 1, and tie."""
    try:
        import cvxpy as cp
    except ImportError as error:
        raise ImportError(
            "next_token_bias needs cvxpy with Clarabel: pip install 'mhfast[programs]'"
        ) from error
    W = cp.Variable((DIM, WORDS))
    sizes = {
        "Frobenius": cp.norm(W, "fro"),
        "largest entry": cp.max(cp.abs(W)),
        "spectral": cp.sigma_max(W),
    }
    logits, conditions = one.vectors @ W, []
    for j, p in enumerate(one.chances):
        (first, *others), unseen = np.flatnonzero(p), np.flatnonzero(p == 0.0)
        conditions += [logits[j, word] == logits[j, first] for word in others]
        conditions.append(logits[j, first] - logits[j, unseen] >= 1.0)
    problem = cp.Problem(cp.Minimize(sizes[norm]), conditions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cvxpy, about other packages
        problem.solve(solver="CLARABEL")
    if W.value is None:
        raise RuntimeError(f"Clarabel found no solution, status {problem.status!r}")
    found: Array = np.asarray(W.value)
    return found


def normalized_margin(W: Array, one: Contexts, norm: str) -> float:
    """Return the least lead of the word seen over another one, for W of norm 1; one word each."""
    logits, seen = one.vectors @ W, one.chances > 0.0
    lead = logits[seen] - np.where(seen, -np.inf, logits).max(axis=1)
    sizes = {
        "Frobenius": np.linalg.norm(W),
        "largest entry": np.abs(W).max(),
        "spectral": np.linalg.norm(W, 2),
    }
    return float(lead.min() / sizes[norm])


def train(many: list[Contexts], steps: int, optimizer: Any) -> mh.Run[mh.Layer]:
    """Train the decoder V of a layer whose only token is the context, so that W is idle."""
    return mh.train(
        mh.Layer(np.zeros((1, DIM, DIM)), np.zeros((1, DIM, WORDS))),
        mh.Dataset(
            np.stack([one.vectors for one in many])[:, :, None],
            np.stack([one.chances for one in many])[:, :, None],
        ),
        steps=steps,
        optimizer=optimizer,
        loss="soft_cross_entropy",
        wrt="V",
        record={"V": steps // 100, "loss": steps // 100},
    )


def run(quick: bool) -> Outcome:
    """Train on two words for each context by gradient descent, on one by three kinds of steps."""
    instances, steps = (4, 10_000) if quick else (12, 100_000)
    soft = [contexts(seed, 2) for seed in range(instances)]
    trained = train(soft, steps, mh.GradientDescent(4.0))
    at, V = trained.steps["V"], trained.history["V"][:, :, 0]  # (instances, records, d, V)
    tenth = int(np.searchsorted(at, steps // 10))
    cosine, distance = np.empty((2, *V.shape[:2]))
    late = np.empty(instances)
    for i, one in enumerate(soft):
        projection, target = log_odds(one)
        inside = (V[i].reshape(len(at), -1) @ projection).reshape(V[i].shape)
        distance[i] = np.linalg.norm(inside - target, axis=(1, 2)) / np.linalg.norm(target)
        outside, svm = V[i] - inside, separation(one, "Frobenius")
        cosine[i] = _cosines(outside, svm)
        late[i] = _cosines(outside[-1:] - outside[[tenth]], svm)[0]
    P = np.stack([one.chances for one in soft])
    entropy = -(P * np.log(np.where(P > 0.0, P, 1.0))).sum(axis=(1, 2)) / CONTEXTS
    excess = trained.history["loss"] - entropy[:, None]

    hard = [contexts(seed, 1) for seed in range(instances)]
    rules = {
        "normalized": mh.NormalizedGradientDescent(0.1),
        "sign": mh.SignDescent(0.01),
        "spectral": mh.SteepestDescent(0.1, norm="spectral"),
    }
    best = np.array([
        [normalized_margin(separation(one, norm), one, norm) for norm in NORMS] for one in hard
    ])  # fmt: skip
    shares = {}
    for name, rule in rules.items():
        model = train(hard, 4000 if quick else 20_000, rule).model
        margins = [
            [normalized_margin(W, one, norm) for norm in NORMS]
            for W, one in zip(model.V[:, 0], hard, strict=True)
        ]
        shares[name] = np.array(margins) / best  # (instances, norms)

    figure, (left, right) = panels(
        "Words seen get their log-odds, others lose by the largest margin of the norm",
        width_ratios=(1.15, 1),
    )
    band(left, at[1:], distance[:, 1:], BLUE, "log-odds: relative distance")
    band(left, at[1:], 1.0 - cosine[:, 1:], ORANGE, "1 - cosine to the separation")
    band(left, at[1:], excess[:, 1:], "0.3", "loss above the entropy", "--")
    label(left, "step", "", "gradient descent, two words seen", xscale="log", yscale="log")
    mean = np.array([share.mean(axis=0) for share in shares.values()])
    pixels(right, mean, rows=list(rules), columns=NORMS)
    label(right, "norm of the margin", "", "one word seen: share of the largest margin")
    own = np.stack([share[:, k] for k, share in enumerate(shares.values())])
    every = np.stack(list(shares.values()))  # (rules, instances, norms)
    nearest = every.argmax(axis=0) == np.arange(len(NORMS))
    return Outcome(
        ("steps, one word seen", *(f"{norm} margin" for norm in NORMS), "smallest of its own"),
        [(name, *mean[k], own[k].min()) for k, name in enumerate(rules)],
        [
            Claim("two words: largest loss above the entropy", excess[:, -1].max(),
                  2e-3 if quick else 1e-3, at_least=False),
            Claim("two words: largest relative distance to the log-odds in the data subspace",
                  distance[:, -1].max(), 0.01, at_least=False),
            Claim("two words: mean cosine of the rest to the separation",
                  cosine[:, -1].mean(), 0.98 if quick else 0.99),
            Claim("two words: mean cosine of what the last nine tenths of the steps add",
                  late.mean(), 0.995),
            Claim("one word: smallest share of the largest margin in the norm of the steps",
                  own.min(), 0.97 if quick else 0.99),
            Claim("one word: share of instances and norms whose own steps have the largest margin",
                  float(nearest.mean()), 1.0),
        ],
        figure,
    )  # fmt: skip


def _cosines(W: Array, svm: Array) -> Array:
    """Return the cosine of matrices (k, d, V), each a run of a model, to the solution."""
    model = mh.Layer(np.zeros((1, DIM, DIM)), W[:, None])
    return mh.theory.alignment(model, mh.Gradients(V=svm[None]))[:, 0]


EXPERIMENT = Experiment(
    title="Linear next-token prediction: log-odds inside, a largest margin outside",
    paper="Thrampoulidis, Implicit Optimization Bias of Next-token Prediction in Linear Models, "
    "2024; for the norms: Fan, Schmidt, Thrampoulidis, Implicit Bias of Spectral Descent and "
    "Muon on Multiclass Separable Data, 2025",
    says="Of distinct contexts with sparse probabilities of the next word, the cross-entropy "
    "reaches the entropy of the data. In the subspace of words seen after one context, gradient "
    "descent ends where differences of logits are log-odds; the rest diverges in the direction of "
    "least Frobenius norm that separates words seen from the others. Steps of steepest descent "
    "maximize the margin in their own norm: sign descent in the largest entry, spectral descent "
    "in the spectral norm. Taken from the abstracts.",
    setting="Twelve instances, each five contexts, equally frequent unit vectors in 7 dimensions, "
    "so that the conditions hold; a vocabulary of 6. A layer with one token is the linear "
    "model, trained from zero. Two words seen: gradient descent of step 4, under which W grows "
    "with the logarithm of the steps, and its cosine approaches 1 as slowly; its late "
    "increments are closer in direction. One word seen, for the norms: normalized steps .1, "
    "sign .01, spectral .1; steps of constant length do not converge to log-odds. Largest "
    "margins need not be unique, so that margins are compared, not directions. Programs "
    "are solved by Clarabel through cvxpy. Sizes and steps are our choice.",
    run=run,
)
