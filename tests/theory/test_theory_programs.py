"""The programs that say where training ends: closed forms, second solvers and certificates."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

import mhfast as mh
from mhfast import theory
from mhfast.theory import regularization
from mhfast.theory.norms import dual_size, longest_product
from mhfast.theory.programs import _dense, _in_spans, independent, solve
from mhfast.theory.projected import Descent, Point, nearest_in_ball

NORMS = ["fro", "nuclear", 1.5, 3.0]


def needs_cvxpy(norm: Any) -> None:
    if norm != "fro":
        pytest.importorskip("cvxpy", reason="pip install 'mhfast[programs]'")


def instance(seed: int, n: int = 3, T: int = 4, d: int = 5) -> tuple[mh.Dataset, Any, Any]:
    """Samples with one external query row, their best tokens, and the features by hand."""
    rng = np.random.default_rng(seed)
    X, Z = rng.standard_normal((n, T, d)), rng.standard_normal((n, 1, d))
    best = rng.integers(T, size=n)
    F = np.array(
        [np.outer(Z[i, 0], X[i, best[i]] - X[i, t])
         for i in range(n) for t in range(T) if t != best[i]]
    )  # fmt: skip
    return mh.Dataset(X, rng.choice([-1.0, 1.0], n), query=Z), best, F


def length(W: Any, norm: Any) -> float:
    if norm == "nuclear":
        return float(np.linalg.svd(W)[1].sum())
    p = 2.0 if norm == "fro" else norm
    return float((np.abs(W) ** p).sum() ** (1 / p))


@pytest.mark.parametrize("norm", NORMS)
def test_the_certificate_is_that_of_the_returned_numbers(norm: Any) -> None:
    needs_cvxpy(norm)
    data, best, F = instance(0)
    found = theory.token_svm(data, best, norm=norm)
    W = found.direction.W[0]
    assert np.tensordot(F, W, 2).min() == pytest.approx(1, rel=1e-12)
    assert length(W, norm) * found.margin == pytest.approx(1, rel=1e-12)
    weights = found.weights[found.weights > 0]
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    assert -1e-12 * found.margin < found.gap < 1e-8 * found.margin
    # Tokens and queries in other units: powers of two, so that rounding is the same.
    scaled = mh.Dataset(data.X * 2.0**90, data.y, query=data.query * 2.0**-30)
    assert theory.token_svm(scaled, best, norm=norm).margin == found.margin * 2.0**60


@pytest.mark.parametrize("norm", [1.5, 3.0])
def test_p_norms_agree_with_a_second_solver(norm: float) -> None:
    needs_cvxpy(norm)
    data, best, F = instance(1)
    found = theory.token_svm(data, best, norm=norm).direction.W.ravel()
    rows = F.reshape(len(F), -1)
    solved = minimize(
        lambda w: ((np.abs(w) ** norm).sum() / norm, np.sign(w) * np.abs(w) ** (norm - 1)),
        theory.token_svm(data, best).direction.W.ravel(), jac=True, method="SLSQP",
        constraints={"type": "ineq", "fun": lambda w: rows @ w - 1, "jac": lambda _: rows},
        options={"ftol": 1e-15, "maxiter": 1000},
    )  # fmt: skip
    # SLSQP stops at about the root of its tolerance.
    np.testing.assert_allclose(found, solved.x, rtol=0, atol=1e-4 * np.abs(found).max())
    assert length(found, norm) <= length(solved.x, norm) * (1 + 1e-9) / min(
        1, (rows @ solved.x).min()
    )


def test_the_nuclear_norm_agrees_with_a_second_solver() -> None:
    cp = pytest.importorskip("cvxpy", reason="pip install 'mhfast[programs]'")
    data, best, F = instance(2)
    found = theory.token_svm(data, best, norm="nuclear")
    # The dual, by another kind of method: the shortest combination in the spectral norm.
    weights = cp.Variable(len(F), nonneg=True)
    point = sum(weights[i] * F[i] for i in range(len(F)))
    problem = cp.Problem(cp.Minimize(cp.sigma_max(point)), [cp.sum(weights) == 1])
    problem.solve(solver="SCS", eps=1e-9, max_iters=100_000)
    assert found.margin == pytest.approx(problem.value, rel=1e-6)  # SCS is of first order


@pytest.mark.parametrize("norm", NORMS)
def test_one_constraint_has_a_closed_form(norm: Any) -> None:
    """W attains the dual norm of z (x_best - x_t)ᵀ, which is the product of those of its sides."""
    needs_cvxpy(norm)
    z, x = np.array([1.0, -2.0, 0.5]), np.array([3.0, 0.0, -1.0])
    data = mh.Dataset([[x, 0 * x]], [1.0], query=[[z]])
    found = theory.token_svm(data, [0], norm=norm)
    q = 2.0 if isinstance(norm, str) else norm / (norm - 1)
    expected = (np.abs(z) ** q).sum() ** (1 / q) * (np.abs(x) ** q).sum() ** (1 / q)
    assert found.margin == pytest.approx(expected, rel=1e-8)
    W = np.sign(np.outer(z, x)) * np.abs(np.outer(z, x)) ** (q - 1)
    W /= (W * np.outer(z, x)).sum()
    # The solver is accurate to about 1e-10 in the norm, to its root in the solution.
    np.testing.assert_allclose(found.direction.W[0], W, rtol=0, atol=2e-4 * np.abs(W).max())


@pytest.mark.verdict
@pytest.mark.parametrize("norm", NORMS)
def test_tokens_that_no_norm_separates(norm: Any) -> None:
    needs_cvxpy(norm)
    data, _, _ = instance(3, n=1)
    X = data.X.copy()
    X[0, 0] = X[0, 1:].mean(axis=0)
    found = theory.token_svm(mh.Dataset(X, [1.0], query=data.query), [0], norm=norm)
    assert not found.separable
    assert found.inseparable
    assert found.margin == 0


def test_a_prompt_in_a_p_norm() -> None:
    needs_cvxpy(3.0)
    data, best, _ = instance(4)
    found = theory.token_svm(data, best, wrt="prompt", norm=3.0)
    z = found.direction.prompt[0]
    gaps = (data.X[np.arange(3), best][:, None] - data.X) @ z
    gaps[np.arange(3), best] = np.inf
    assert gaps.min() == pytest.approx(1, rel=1e-12)
    assert length(z, 3.0) * found.margin == pytest.approx(1, rel=1e-12)
    assert found.gap < 1e-8 * found.margin


def test_norms_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    data, best, _ = instance(0)
    assert theory.token_svm(data, best, norm=2).margin == theory.token_svm(data, best).margin
    for norm in ("nuc", 1.0, True, np.inf):
        with pytest.raises(ValueError, match="norm: expected 'fro', 'nuclear' or a number above 1"):
            theory.token_svm(data, best, norm=norm)
    with pytest.raises(ValueError, match="norm: expected 'fro' or a number above 1, got 'nuclear'"):
        theory.token_svm(data, best, wrt="prompt", norm="nuclear")
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    text = "norm='nuclear' needs cvxpy with Clarabel: pip install 'mhfast[programs]'"
    with pytest.raises(ImportError, match=re.escape(text)):
        theory.token_svm(data, best, norm="nuclear")


def test_priorities_and_ties_of_next_tokens() -> None:
    """Last token 0: 1 and 2 are preferred to each other (a cycle), both to 3; closed form."""
    ids = [[1, 2, 3, 0], [2, 1, 3, 0], [1, 3, 3, 0]]
    found = theory.next_token_svm(ids, [1, 2, 1])
    assert found.ties.tolist() == [[0, 1, 2]]
    assert found.components[0].tolist() == [0, 1, 1, 3]
    assert (found.components[1:] == -1).all()
    expected = [[0, i, j] for i in (1, 2) for j in (0, 3)]
    assert found.priorities.tolist() == expected
    # Row 0 of W: tokens 1 and 2 at 1/2, tokens 0 and 3 at -1/2, the least norm with differences 1.
    W = np.zeros((4, 4))
    W[0] = [-0.5, 0.5, 0.5, -0.5]
    np.testing.assert_allclose(found.direction.W[0], W, atol=1e-12)
    assert found.margin == pytest.approx(1, rel=1e-12)
    assert abs(found.gap) < 1e-12
    cycle = np.zeros((4, 4))
    cycle[0] = [0, 3.0, -3.0, 0]
    np.testing.assert_allclose(found.without_ties(5 * W + cycle), 5 * W, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_next_tokens_with_an_embedding(norm: Any) -> None:
    needs_cvxpy(norm)
    rng = np.random.default_rng(5)
    V, d = 5, 7
    E = rng.standard_normal((V, d))
    ids = np.array([[1, 2, 0], [2, 1, 0], [3, 1, 0], [4, 2, 3], [1, 4, 9]])
    found = theory.next_token_svm(
        ids, [1, 2, 3, 4, 4], embedding=E, lengths=[3, 3, 3, 3, 2], norm=norm
    )
    W = found.direction.W[0]

    def products(edges: Any) -> Any:
        k, i, j = edges.T
        return np.einsum("na,ab,nb->n", E[k], W, E[i] - E[j])

    assert products(found.priorities).min() == pytest.approx(1, rel=1e-10)
    np.testing.assert_allclose(products(found.ties), 0, atol=1e-10)
    assert len(found.ties) == 1
    assert length(W, norm) * found.margin == pytest.approx(1, rel=1e-10)
    assert -1e-10 < found.gap / found.margin < 1e-7


def test_training_of_next_tokens_goes_there() -> None:
    """A layer with one-hot tokens and V = I, trained on the classes, tends to the Graph-SVM."""
    ids = np.array([[1, 2, 3, 0], [2, 3, 3, 0], [3, 2, 0, 1]])
    following = np.array([1, 2, 2])  # no cycles, of which the log-loss of the weights is the theory
    E = np.eye(4)
    found = theory.next_token_svm(ids, following)
    start = mh.Layer(np.zeros((1, 4, 4)), 8 * E[None], query=-1)
    run = mh.train(
        start, E[ids], following[:, None], steps=4000, wrt="W", loss="cross_entropy",
        optimizer=mh.NormalizedGradientDescent(0.05), record={"loss": 4000},
    )  # fmt: skip
    assert not len(found.ties)
    assert theory.alignment(run, found) > 0.95


def test_what_next_tokens_refuse() -> None:
    with pytest.raises(ValueError, match="next_tokens: expected a token of the sample, got 5 at"):
        theory.next_token_svm([[0, 1]], [5])
    with pytest.raises(ValueError, match="next_tokens: expected a token of higher priority"):
        theory.next_token_svm([[1, 0], [1, 0]], [1, 0])
    with pytest.raises(TypeError, match="ids: expected integers, got dtype float64"):
        theory.next_token_svm([[0.0, 1.0]], [1])
    with pytest.raises(ValueError, match="embedding: expected a row for each of 3 tokens, got 2"):
        theory.next_token_svm([[2, 1]], [1], embedding=np.eye(2))
    with pytest.raises(ValueError, match="lengths: expected 1 to 2, got 0 to 0"):
        theory.next_token_svm([[2, 1]], [1], lengths=[0])


@pytest.mark.parametrize("wrt", ["W", "prompt"])
def test_readout_and_attention_together(wrt: str) -> None:
    data, best, _ = instance(6, n=5, d=9)
    found = theory.joint_svm(data, best, wrt=wrt)
    margins = data.y * (data.X[np.arange(5), best] @ found.readout)
    assert margins.min() == pytest.approx(1, rel=1e-10)
    assert abs(found.gap) < 1e-10 * found.margin
    assert (found.support == (margins < 1 + 1e-6)).all()
    assert found.support.sum() > 0
    apart = data.X[np.arange(5), best][:, None] - data.X
    direction = found.attention.direction
    keys = data.query[:, 0] @ direction.W[0] if wrt == "W" else np.tile(direction.prompt, (5, 1))
    wins = np.einsum("id,itd->it", keys, apart)
    wins[np.arange(5), best] = np.inf
    assert wins[found.support].min() == pytest.approx(1, rel=1e-10)
    assert wins.min() > -1e-10
    assert abs(found.attention.gap) < 1e-10 * found.attention.margin
    assert found.separable
    assert found.direction.U.shape == (1, 1, 9)


def test_samples_outside_of_the_support_are_relaxed() -> None:
    """By hand: v = (1, 0, 0), sample 1 has the margin 5: z·(0, 2, 0) ≥ 1 and z·(0, -1, 1) ≥ 0."""
    X = [[[1.0, 0.0, 0.0], [1.0, -2.0, 0.0]], [[5.0, 0.0, 1.0], [5.0, 1.0, 0.0]]]
    found = theory.joint_svm(mh.Dataset(X, [1.0, 1.0]), [0, 0], wrt="prompt")
    np.testing.assert_allclose(found.readout, [1.0, 0.0, 0.0], atol=1e-12)
    assert found.support.tolist() == [True, False]
    np.testing.assert_allclose(found.attention.direction.prompt, [[0, 0.5, 0.5]], atol=1e-12)


def test_optimal_tokens_by_hand() -> None:
    """d = 2, z = e1: W acts by its first row w, and the SVM is w·(x_best - x_t) ≥ 1."""
    X = np.array([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-9.0, -9.0]]])
    data = mh.Dataset(X, [1.0], query=[[[1.0, 0.0]]])
    found = theory.token_optimality(data, [1], [3.0, 4.0])
    np.testing.assert_allclose(found.scores, [[[0, 3, 4, -63]]])
    assert theory.optimal_tokens(data, [3.0, 4.0]).tolist() == [[2]]
    # w·(1,0) ≥ 1, w·(1,-1) ≥ 1, w·(10,9) ≥ 1: w = (1,0), active for tokens 0 and 2.
    np.testing.assert_allclose(found.slack[0, 0, [0, 2, 3]], [0, 0, 9], atol=1e-12)
    assert found.neighbours[0, 0].tolist() == [True, False, True, False]
    assert not found.is_local  # token 2 has a larger score than token 1
    assert theory.token_optimality(data, [1], [5.0, 4.0]).is_global
    assert theory.token_optimality(data, [2], [3.0, 4.0]).is_local
    # With token 2 far behind along w it is no neighbour, whatever its score: locally optimal only.
    X[0, 2] = [-5.0, 0.5]
    locally = theory.token_optimality(mh.Dataset(X, [1.0], query=data.query), [1], [3.0, 40.0])
    assert locally.is_local
    assert not locally.is_global


def test_the_regularization_path_tends_to_the_separation() -> None:
    data = mh.data.sphere_tokens(5, 6, 8, seed=range(2))
    path = theory.regularization_path(data, [1.0, 10.0, 100.0])
    assert path.alignment.shape == (2, 3, 1)
    assert path.converged.all()
    assert (np.diff(path.losses) < 0).all()
    np.testing.assert_allclose(path.norms, np.tile(path.radii, (2, 1)), rtol=1e-12)
    # Stationary: the gradient points against W; by an independent call.
    for r in range(2):
        model = path.models[1][r]
        g = mh.value_and_grad(model, data.run(r), wrt="W")[1].W
        cosine = -(g * model.W).sum() / np.linalg.norm(g) / np.linalg.norm(model.W)
        assert cosine > 1 - 1e-10
        alone = theory.regularization_path(data.run(r), [1.0, 10.0, 100.0])
        np.testing.assert_allclose(path.losses[r], alone.losses, rtol=1e-12)
    tokens = path.models[-1].attention(data)[:, :, 0, 0].argmax(axis=-1)
    svm = theory.token_svm(data, tokens)
    assert (theory.alignment(path.models[-1], svm) > 0.99).all()


def test_the_path_in_the_nuclear_norm() -> None:
    needs_cvxpy("nuclear")
    data = mh.data.sphere_tokens(3, 4, 5, seed=1)
    path = theory.regularization_path(data, [1.0, 10.0, 60.0], norm="nuclear")
    assert path.converged.all()
    for model, radius in zip(path.models, path.radii, strict=True):
        assert length(model.W[0], "nuclear") == pytest.approx(radius, rel=1e-12)
    assert path.alignment[-1, 0] > 0.97


def test_a_minimizer_inside_the_ball_and_several_starts() -> None:
    """Squared loss: the best W is finite, and larger balls do not change it."""
    rng = np.random.default_rng(7)
    X, Z = rng.standard_normal((6, 3, 2)), rng.standard_normal((6, 1, 2))
    teacher = mh.Classifier(rng.standard_normal((1, 2, 2)), [[[1.0, -0.5]]])
    data = mh.Dataset(X, teacher(mh.Dataset(X, np.ones(6), query=Z)), query=Z)
    start = mh.Classifier(np.zeros((1, 2, 2)), teacher.U)
    path = theory.regularization_path(
        data, [0.1, 9.0], start=start, loss="squared", starts=2, tolerance=1e-5
    )
    assert path.norms[0] == pytest.approx(0.1)
    assert path.norms[1] < 8
    assert path.losses[1] < 0.1 * path.losses[0]
    if path.converged[1]:
        assert path.grad_norms[1] * 9.0 <= 1e-5 * path.losses[1]


def test_each_branch_falls_by_itself() -> None:
    """The loss falls beyond a point where the step goes against the gradient of that branch."""
    before = mh.stack([mh.Classifier.zeros(1, 3, 2)] * 3)
    after = before.replace(W=np.ones((3, 1, 2, 2)))
    numbers = np.zeros(3)
    points = [
        Point(model, *[numbers] * 4, numbers > 0, np.zeros(3, np.int64), pull)
        for model, pull in ((before, None), (after, np.ones((3, 1, 2, 2))))
    ]
    points[1].pull[1] = -5.0
    data = mh.Dataset(np.ones((2, 3, 2)), [1.0, -1.0])
    descent = Descent(data, "logistic", "W", "fro", 10, 1e-3, None)
    assert descent._falls_beyond(*points).tolist() == [False, True, False]


def test_a_prompt_of_models_with_a_run_axis_has_no_separation() -> None:
    rng = np.random.default_rng(2)
    data = mh.Dataset(rng.standard_normal((5, 3, 4)), [1.0, -1.0, 1.0, 1.0, -1.0])
    one = mh.Classifier(
        rng.standard_normal((1, 4, 4)), rng.standard_normal((1, 1, 4)),
        prompt=rng.standard_normal((1, 4)),
    )  # fmt: skip
    path = theory.regularization_path(data, [1.0], start=one, wrt="prompt", steps=3)
    assert path.solution is not None
    path = theory.regularization_path(data, [1.0], start=mh.stack([one]), wrt="prompt", steps=3)
    assert path.solution is None


def test_the_projection_on_the_ball_of_the_nuclear_norm() -> None:
    W = np.random.default_rng(8).standard_normal((3, 2, 4, 4))
    near = nearest_in_ball(W, 2.0)
    np.testing.assert_allclose(np.linalg.svd(near)[1].sum(axis=(1, 2)), 2.0, rtol=1e-12)
    # Nearest: W - P is in the normal cone, ⟨W - P, P⟩ = 2 times the largest singular value.
    rest = W - near
    inner = (rest * near).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(inner, 2.0 * np.linalg.svd(rest)[1].max(axis=(1, 2)), rtol=1e-10)
    assert np.array_equal(nearest_in_ball(W / 100, 2.0), W / 100)


def test_alignment_by_head_step_and_run() -> None:
    data, best, _ = instance(9)
    svm = theory.token_svm(data, best)
    start = mh.Classifier.gaussian(2, 1, 5, std=0.1, seed=0, runs=3)
    start = start.replace(query=None)
    run = mh.train(start, data, steps=4, optimizer=mh.GradientDescent(0.5), record={"W": 2})
    by_step = theory.alignment(run, svm, wrt="W")
    assert by_step.shape == (3, 3, 2)
    W, D = run.model.W, svm.direction.W[0]
    expected = (W * D).sum(axis=(2, 3)) / np.linalg.norm(W, axis=(2, 3)) / np.linalg.norm(D)
    np.testing.assert_allclose(by_step[:, -1], expected, rtol=1e-12)
    np.testing.assert_allclose(theory.alignment(run.model, svm), expected, rtol=1e-12)
    np.testing.assert_allclose(theory.alignment(run.model[1], svm), expected[1], rtol=1e-12)
    assert np.isnan(theory.alignment(mh.Classifier.zeros(2, 1, 5), svm)).all()
    factored = mh.Classifier(mh.LowRank(D[None], np.eye(5)[None]), np.ones((1, 1, 5)))
    assert theory.alignment(factored, svm) == pytest.approx(1)
    with pytest.raises(ValueError, match="wrt: expected one of W, got 'U'"):
        theory.alignment(run, svm, wrt="U")
    with pytest.raises(TypeError, match="trained: expected a model or a Run, got int"):
        theory.alignment(3, svm)
    with pytest.raises(TypeError, match="solution: expected the solution of a program, got int"):
        theory.alignment(run, 3)


def test_what_a_path_refuses() -> None:
    data = mh.data.sphere_tokens(3, 4, 5, seed=1)
    with pytest.raises(ValueError, match="radii: expected increasing numbers above 0"):
        theory.regularization_path(data, [2.0, 1.0])
    with pytest.raises(ValueError, match="norm: expected 'fro' or 'nuclear', got 3"):
        theory.regularization_path(data, [1.0], norm=3)
    with pytest.raises(ValueError, match="wrt: expected 'W' or 'prompt', got 'U'"):
        theory.regularization_path(data, [1.0], wrt="U")
    with pytest.raises(ValueError, match="start: expected a model for data without a readout"):
        theory.regularization_path(mh.Dataset(data.X, data.y), [1.0])


@pytest.mark.parametrize("norm", ["fro", "nuclear", 1.5, 3.0])
def test_the_longest_product_is_that_of_the_matrices_themselves(norm: Any) -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((6, 3)), rng.standard_normal((6, 4))
    products = [dual_size(np.outer(a, b), norm) for a, b in zip(left, right, strict=True)]
    assert longest_product(left, right, norm) == pytest.approx(max(products), rel=1e-12)


def test_ties_outside_of_the_span_of_the_constraints_in_the_nuclear_norm() -> None:
    """The least W lies in the span of constraints and ties together, not in that of the former."""
    needs_cvxpy("nuclear")
    rng = np.random.default_rng(3)
    d = 6
    left, right = rng.standard_normal((2, d)), rng.standard_normal((2, d))
    ties = rng.standard_normal((2, d)), np.concatenate([right[:1], rng.standard_normal((1, d))])
    strict = np.ones(2, bool)
    inside = _in_spans(left, right, 1e-14, strict, ties)
    whole = _dense((left, right), "nuclear", 1e-14, strict, ties)
    assert inside.margin == pytest.approx(whole.margin, rel=1e-6)
    np.testing.assert_allclose(
        np.einsum("na,ab,nb->n", ties[0], inside.direction, ties[1]), 0.0, atol=1e-6
    )


def test_alignment_along_a_factored_run() -> None:
    data, best, _ = instance(9)
    svm = theory.token_svm(data, best)
    rng = np.random.default_rng(0)
    factors = (rng.standard_normal((2, 5, 3)) for _ in range(2))
    start = mh.Classifier(mh.LowRank(*factors), rng.standard_normal((2, 1, 5)))
    settings = {"steps": 4, "optimizer": mh.GradientDescent(0.1)}
    run = mh.train(start, data, record={"Q": 2, "K": 2}, **settings)
    by_step = theory.alignment(run, svm)
    assert by_step.shape == (3, 2)
    for place, steps in enumerate((0, 2, 4)):
        model = mh.train(start, data, **settings | {"steps": steps}).model
        np.testing.assert_allclose(by_step[place], theory.alignment(model, svm), rtol=1e-10)


def test_tokens_that_are_all_zero_separate_nothing() -> None:
    found = _dense((np.zeros((2, 3)), np.zeros((2, 4))), "fro", 1e-14, np.ones(2, bool), None)
    assert (found.margin, found.dual, found.hidden) == (0.0, 0.0, 0.0)
    np.testing.assert_array_equal(found.weights, [0.5, 0.5])
    np.testing.assert_array_equal(found.direction, np.zeros((3, 4)))


def test_scores_of_a_prompt_are_of_one_row() -> None:
    data, readout = instance(4)[0], np.arange(5.0)
    scores = theory.token_scores(data, readout, wrt="prompt")
    assert scores.shape == (data.n, 1, data.tokens)
    np.testing.assert_allclose(scores[:, 0], data.y[:, None] * (data.X @ readout), rtol=1e-12)


def test_every_branch_of_a_path_begins_in_the_norm_of_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    begun = regularization._begun

    def recorded(model: Any, wrt: str, norm: str, *rest: Any) -> Any:
        asked.append((wrt, norm))
        return begun(model, wrt, norm, *rest)

    monkeypatch.setattr(regularization, "_begun", recorded)
    data = mh.data.sphere_tokens(3, 4, 5, seed=0)
    theory.regularization_path(data, [1.0], norm="nuclear", starts=2, steps=3)
    assert asked == [("W", "nuclear")] * 2


def test_optimality_of_runs_is_in_the_norm_that_is_asked_for() -> None:
    needs_cvxpy("nuclear")
    first, second = instance(11), instance(12)
    both = mh.Dataset(
        *(np.stack([getattr(data, name) for data, *_ in (first, second)]) for name in ("X", "y")),
        query=np.stack([data.query for data, *_ in (first, second)]),
    )
    best, u = np.stack([first[1], second[1]]), np.arange(5.0)
    together = theory.token_optimality(both, best, u, norm="nuclear")
    for r, (data, tokens, _) in enumerate((first, second)):
        alone = theory.token_optimality(data, tokens, u, norm="nuclear")
        np.testing.assert_allclose(together.slack[r], alone.slack, atol=1e-7)
    in_fro = theory.token_optimality(both, best, u)
    assert np.nanmax(np.abs(in_fro.slack - together.slack)) > 1e-3


def test_readout_and_attention_of_runs() -> None:
    first, second = instance(21), instance(22)
    both = mh.Dataset(
        *(np.stack([getattr(data, name) for data, *_ in (first, second)]) for name in ("X", "y")),
        query=np.stack([data.query for data, *_ in (first, second)]),
    )
    together = theory.joint_svm(both, np.stack([first[1], second[1]]))
    for r, (data, tokens, _) in enumerate((first, second)):
        alone = theory.joint_svm(data, tokens)
        np.testing.assert_allclose(together.readout[r], alone.readout, atol=1e-12)
        W = together.attention.direction.W
        np.testing.assert_allclose(W[r], alone.attention.direction.W, atol=1e-9)


def test_constraints_that_say_nothing_span_nothing() -> None:
    assert independent(np.zeros((2, 3, 5))).shape == (0, 3, 5)


def test_the_readout_of_labels_that_are_not_separable_is_the_hull_point() -> None:
    """By hand: best tokens 2 and -6 of label 1 have the hull point 0, and 4 and 1 the point 1."""
    far = 2.0**60  # so that units matter
    for tokens, point in (([4.0, 1.0], 1.0), ([2.0, -6.0], 0.0)):
        X = far * np.array([[[t], [0.5]] for t in tokens])
        data = mh.Dataset(X, np.ones(2), query=np.ones((2, 1, 1)))
        found = theory.joint_svm(data, [0, 0])
        if point:
            assert found.separable or found.margin > 0
            assert found.readout[0] * far == pytest.approx(1.0)
        else:
            assert found.margin == 0.0
            assert abs(found.readout[0]) <= 1e-12 * far


def test_a_program_with_ties_and_constraints_that_are_not_strict():
    """2 w1 + w3 >= 1 and w2 >= w1 with w3 = 0: the shortest w is (1/2, 1/2, 0)."""
    found = solve(
        None, np.array([[2.0, 0.0, 1.0], [-1.0, 1.0, 0.0]]), "fro", size=2.0, eps=2.0**-52,
        strict=np.array([True, False]), ties=(None, np.array([[0.0, 0.0, 3.0]])),
    )  # fmt: skip
    # A square root of the products by eigenvectors keeps twelve digits.
    np.testing.assert_allclose(found.direction, [0.5, 0.5, 0.0], rtol=0, atol=1e-12)
    assert found.margin == pytest.approx(np.sqrt(2.0), rel=1e-12)
    assert found.dual == pytest.approx(np.sqrt(2.0), rel=1e-12)
    assert found.weights == pytest.approx([1.0, 1.0], rel=1e-12)


def test_what_a_path_measures():
    """Of its points, which few steps leave far from stationary, by their definitions."""
    rng = np.random.default_rng(3)
    data = mh.Dataset(rng.standard_normal((6, 4, 5)), rng.choice([-1.0, 1.0], 6))
    start = mh.Classifier(np.zeros((2, 5, 5)), rng.standard_normal((2, 4, 5)))
    path = theory.regularization_path(data, [0.5, 3.0, 7.0], start=start, steps=3)
    for k, (radius, model) in enumerate(zip(path.radii, path.models, strict=True)):
        loss, gradient = mh.value_and_grad(model, data, wrt="W")
        length = np.linalg.norm(gradient.W)
        far = model.W - radius * gradient.W / length
        moved = far * min(1.0, radius / np.linalg.norm(far)) - model.W
        assert path.losses[k] == pytest.approx(loss, rel=1e-12)
        assert path.grad_norms[k] == pytest.approx(length, rel=1e-12)
        assert path.norms[k] == pytest.approx(np.linalg.norm(model.W), rel=1e-12)
        # The difference of two matrices of the length of the radius.
        stationarity = np.linalg.norm(moved) / radius
        assert path.stationarity[k] == pytest.approx(stationarity, rel=1e-9)
        assert not path.converged[k]
        assert path.steps[k] <= 3
    assert path.stationarity.min() > 1e-4
