"""The token-separation SVM against a general solver and its own certificates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

import mhfast as mh
from mhfast import theory


def tokens(seed: int, n: int = 4, T: int = 3, d: int = 6) -> mh.Dataset:
    X = np.random.default_rng(seed).standard_normal((n, T, d))
    return mh.Dataset(X, np.ones(n))


def constraints(data: mh.Dataset, best: Any, Z: Any) -> Any:
    """Features f with ⟨f, W⟩ = zᵀ W (x_best - x_t), one row a constraint."""
    rows = []
    for i, x in enumerate(data.X):
        for row, z in enumerate(Z[i]):
            b = best[i][row]
            rows += [np.outer(z, x[b] - x[t]).ravel() for t in range(len(x)) if t != b]
    return np.array(rows)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_solution_of_a_general_solver(seed: int) -> None:
    data = tokens(seed)
    best = [[i % 3] for i in range(4)]
    F = constraints(data, best, data.X[:, -1:])
    found = theory.token_svm(data, np.array(best)[:, 0], query=-1)
    W = found.direction.W.ravel()
    assert found.direction.W.shape == (1, 6, 6)
    # Feasible, complementary and of the norm that the dual allows: optimal by its own certificate.
    assert (F @ W).min() == pytest.approx(1, rel=1e-10)
    assert np.linalg.norm(W) == pytest.approx(1 / found.margin, rel=1e-12)
    assert abs(found.gap) < 1e-10 * found.margin
    solved = minimize(
        lambda w: (w @ w / 2, w), np.zeros(36), jac=True, method="SLSQP",
        constraints={"type": "ineq", "fun": lambda w: F @ w - 1, "jac": lambda _: F},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    # SLSQP stops at about the root of its tolerance.
    np.testing.assert_allclose(W, solved.x, rtol=0, atol=1e-5 * np.abs(W).max())


def test_every_row_of_self_attention_and_external_queries() -> None:
    data = tokens(5, n=2, T=3, d=6)
    best = np.array([[0, 1, 1], [2, 0, 1]])
    found = theory.token_svm(data, best)
    assert (constraints(data, best, data.X) @ found.direction.W.ravel()).min() == pytest.approx(1)
    assert found.weights.shape == (2, 3, 3)
    assert found.weights.sum() == pytest.approx(1, rel=1e-14)
    assert (np.take_along_axis(found.weights, best[:, :, None], axis=2) == 0).all()
    external = mh.Dataset(data.X, data.y, query=data.X[:, 1:])
    with_rows = theory.token_svm(external, best[:, 1:])
    assert with_rows.margin > found.margin  # fewer constraints


def test_training_goes_there() -> None:
    """Normalized gradient descent on W alone aligns with it; `direction` serves as a direction."""
    rng = np.random.default_rng(3)
    X = rng.standard_normal((4, 3, 6))
    u = np.zeros(6)
    u[0] = 1
    X[:, 0, 0] = 3  # token 0 has the largest score for U
    X[:, 1:, 0] = [[-1, -1.5]]
    data = mh.Dataset(X, np.ones(4), query=X[:, :1])
    found = theory.token_svm(data, np.zeros(4, int))
    start = mh.Classifier(np.zeros((1, 6, 6)), u[None, None], query=0)
    run = mh.train(
        start, data, steps=3000, optimizer=mh.NormalizedGradientDescent(0.1), wrt="W",
        record={"cosine": 3000}, directions={"svm": found.direction},
    )  # fmt: skip
    assert run.history["cosine_svm"][-1] > 0.97


@pytest.mark.verdict
def test_tokens_that_cannot_be_separated() -> None:
    data = tokens(6, n=1, T=4)
    X = np.array(data.X)
    X[0, 0] = X[0, 1:].mean(axis=0)  # inside the hull of the others
    found = theory.token_svm(mh.Dataset(X, [1.0]), [0], query=-1)
    assert found.margin == 0
    assert not found.separable
    # The hull point is the origin up to rounding, with weights 1/3.
    np.testing.assert_allclose(found.weights[0, 0], [0, 1 / 3, 1 / 3, 1 / 3], atol=1e-7)
    assert found.dual < 1e-7


@pytest.mark.verdict
def test_copies_of_the_best_token_are_no_rivals() -> None:
    X = np.array(tokens(7, n=2, T=3).X)
    X[:, 2] = X[:, 0]
    twin = theory.token_svm(mh.Dataset(X, [1.0, 1.0]), [0, 2], query=1)
    alone = theory.token_svm(mh.Dataset(X[:, :2], [1.0, 1.0]), [0, 0], query=1)
    assert twin.margin == pytest.approx(alone.margin, rel=1e-12)


def test_prompt() -> None:
    data = tokens(8, n=3, T=3, d=6)
    W = np.random.default_rng(9).standard_normal((6, 6))
    best = np.array([0, 2, 1])
    found = theory.token_svm(data, best, wrt="prompt", W=W)
    z = found.direction.prompt[0]
    scores = data.X @ (W.T @ z)
    gaps = np.take_along_axis(scores, best[:, None], axis=1) - scores
    gaps[np.arange(3), best] = np.inf
    assert gaps.min() == pytest.approx(1, rel=1e-10)
    assert np.linalg.norm(z) * found.margin == pytest.approx(1, rel=1e-12)
    assert abs(found.gap) < 1e-10 * found.margin
    plain = theory.token_svm(data, best, wrt="prompt")
    assert plain.margin == theory.token_svm(data, best, wrt="prompt", W=np.eye(6)).margin


def ragged(query: int | None, lengths: list[int], seed: int = 10) -> tuple[mh.Dataset, Any, Any]:
    """Samples with lengths; the query rows, and the features of all constraints by hand."""
    X = np.random.default_rng(seed).standard_normal((len(lengths), 4, 7))
    data = mh.Dataset(X, np.ones(len(lengths)), lengths=lengths)
    best = np.array([[(i + t) % max(lengths[i], 1) for t in range(4)] for i in range(len(lengths))])
    rows = []
    for i, length in enumerate(lengths):
        asking = range(length) if query is None else [query + length if query < 0 else query]
        for t in asking:
            b = best[i, t if query is None else 0]
            rows += [np.outer(X[i, t], X[i, b] - X[i, s]).ravel() for s in range(length) if s != b]
    return data, best if query is None else best[:, 0], np.array(rows)


@pytest.mark.parametrize("query", [None, -1, 0])
def test_tokens_beyond_the_length_neither_ask_nor_compete(query: int | None) -> None:
    data, best, F = ragged(query, [4, 2, 3, 1])
    found = theory.token_svm(data, best, query=query)
    W = found.direction.W.ravel()
    assert found.separable
    # Feasible and of the norm that the dual allows: the solution for these constraints.
    assert (F @ W).min() == pytest.approx(1, rel=1e-10)
    dual = found.weights[found.weights > 0]
    assert found.dual == pytest.approx(1 / np.linalg.norm(W), rel=1e-10)
    assert dual.sum() == pytest.approx(1, rel=1e-14)
    assert not found.weights[1, :, 2:].any()
    if query is None:
        assert not found.weights[1, 2:].any()
    lacking = theory.token_svm(mh.Dataset(data.X, data.y), best, query=query)
    assert lacking.margin < 0.9 * found.margin  # padding would compete


def test_what_lengths_refuse() -> None:
    data, best, _ = ragged(1, [4, 2, 3, 1])
    with pytest.raises(
        ValueError, match="query: expected a token that every sample has, got 1, wh"
    ):
        theory.token_svm(data, best, query=1)
    with pytest.raises(ValueError, match="best: expected a token that the row sees, got 2 at ind"):
        theory.token_svm(data, [0, 2, 0, 0], query=0)


@pytest.mark.parametrize("query", [None, 2, "external"])
def test_causal_rows_see_no_later_token(query: Any) -> None:
    rng = np.random.default_rng(11)
    X, Z = rng.standard_normal((2, 4, 7)), rng.standard_normal((2, 3, 7))
    data = mh.Dataset(X, np.ones(2), query=Z if query == "external" else None)
    best = np.array([[0, 1, 0, 2], [0, 0, 2, 1]])[:, : 3 if query == "external" else 4]
    rows = []
    for i in range(2):
        for t in range(best.shape[1]):
            if query == 2 and t != 2:
                continue
            z = Z[i, t] if query == "external" else X[i, t]
            b = best[i, t]
            rows += [np.outer(z, X[i, b] - X[i, s]).ravel() for s in range(t + 1) if s != b]
    asked = best[:, 2] if query == 2 else best
    found = theory.token_svm(data, asked, query=2 if query == 2 else None, causal=True)
    W = found.direction.W.ravel()
    assert (np.array(rows) @ W).min() == pytest.approx(1, rel=1e-10)
    assert abs(found.gap) < 1e-10 * found.margin
    assert theory.token_svm(data, asked, query=2 if query == 2 else None).margin < found.margin
    both = mh.Dataset(np.stack([X, X]), np.ones(2), query=Z if query == "external" else None)
    of_runs = theory.token_svm(both, asked, query=2 if query == 2 else None, causal=True)
    assert of_runs.margin.tolist() == [found.margin] * 2
    if query is None:
        with pytest.raises(ValueError, match="best: expected a token that the row sees, got 1 at"):
            theory.token_svm(data, np.ones((2, 4), int), causal=True)
        with pytest.raises(ValueError, match="causal: expected False for a prompt"):
            theory.token_svm(data, best[:, 0], wrt="prompt", causal=True)


def test_samples_and_rows_of_weight_0_are_no_constraints() -> None:
    data = tokens(12, n=3)
    X = data.X.copy()
    X[1] = np.nan
    best = [0, 1, 2]
    rest = theory.token_svm(data.subset([0, 2]), [0, 2], query=-1)
    weighted = mh.Dataset(X, data.y, weight=[0.5, 0.0, 3.0])
    found = theory.token_svm(weighted, best, query=-1)
    assert found.margin == pytest.approx(rest.margin, rel=1e-12)
    assert not found.weights[1].any()
    with pytest.raises(ValueError, match="X: expected finite numbers, got nan at index 1, 0, 0"):
        theory.token_svm(mh.Dataset(X, data.y), best, query=-1)
    rows = mh.Dataset(data.X, np.ones((3, 3, 1)), weight=[[1, 0, 2], [1, 1, 1], [0, 0, 1]])
    everywhere = np.array([[0, 1, 1], [2, 0, 1], [0, 0, 1]])
    F = constraints(data, everywhere, data.X).reshape(3, 3, 2, 36)
    counting = np.array(rows.weight) > 0
    W = theory.token_svm(rows, everywhere).direction.W.ravel()
    assert (F[counting] @ W).min() == pytest.approx(1, rel=1e-10)
    assert (F[~counting] @ W).min() < 0.9
    with pytest.raises(
        ValueError, match=r"weight: expected shape \(n,\) or \(n, 1\), got \(3, 3\)"
    ):
        theory.token_svm(rows, best, query=-1)


def test_a_margin_in_two_dimensions() -> None:
    """By hand: z = (2, 0), x_best = (0, 3), x_t = (0, 0): zᵀ W (0, 3) = 6 W_12 ≥ 1."""
    data = mh.Dataset([[[0.0, 3.0], [0.0, 0.0]]], [1.0], query=[[[2.0, 0.0]]])
    found = theory.token_svm(data, [0])
    np.testing.assert_allclose(found.direction.W, [[[0, 1 / 6], [0, 0]]], atol=1e-15)
    assert found.margin == pytest.approx(6, rel=1e-14)
    # r² = 10 (N + d) 2⁻⁵² c, N = 1, d = 2, c = 1, of the longest constraint 6.
    assert found.resolution == pytest.approx(6 * np.sqrt(30 * 2.0**-52), rel=1e-12)
    nothing = theory.token_svm(mh.Dataset(data.X, [1.0], query=[[[0.0, 0.0]]]), [0])
    assert (nothing.margin, nothing.dual) == (0, 0)
    assert nothing.inseparable


def test_runs_are_treated_one_by_one() -> None:
    parts = [tokens(seed, n=4) for seed in range(2)]
    data = mh.Dataset(np.stack([part.X for part in parts]), np.ones(4))
    best = np.array([[0, 1, 2, 0], [2, 2, 1, 0]])
    found = theory.token_svm(data, best, query=-1)
    assert found.direction.W.shape == (2, 1, 6, 6)
    for r, part in enumerate(parts):
        own = theory.token_svm(part, best[r], query=-1)
        assert found.margin[r] == own.margin
        assert found.direction[r] == own.direction


def test_errors() -> None:
    data = tokens(0)
    with pytest.raises(ValueError, match="norm: expected 'fro'"):
        theory.token_svm(data, np.zeros(4, int), query=0, norm="nuc")
    with pytest.raises(ValueError, match="wrt: expected 'W' or 'prompt', got 'Q'"):
        theory.token_svm(data, np.zeros(4, int), query=0, wrt="Q")
    with pytest.raises(ValueError, match=r"best: expected shape \(n, q\) = \(4, 3\), got \(4,\)"):
        theory.token_svm(data, np.zeros(4, int))
    with pytest.raises(TypeError, match="best: expected integers, got dtype float64"):
        theory.token_svm(data, np.zeros(4), query=0)
    with pytest.raises(ValueError, match=r"best: expected tokens in \[0, 3\)"):
        theory.token_svm(data, np.full(4, 3), query=0)
    with pytest.raises(ValueError, match=r"query: expected a token in \[-3, 3\), got 3"):
        theory.token_svm(data, np.zeros(4, int), query=3)
    with pytest.raises(ValueError, match="W: expected None unless"):
        theory.token_svm(data, np.zeros(4, int), query=0, W=np.eye(6))
    with pytest.raises(ValueError, match="data: expected two different tokens"):
        theory.token_svm(mh.Dataset(np.ones((2, 3, 5)), np.ones(2)), [0, 0], query=0)
