"""Tangent kernel, its margin with certificates, good initialization and realizability."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import theory_instances as instances

import mhfast as mh
from mhfast import theory
from mhfast.theory.tangent_rows import RowsOfModel


def problem(seed: int, q: int | None = None, **keywords: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((6, 3, 5))
    data = mh.Dataset(X, np.where(np.arange(6) % 3 == 0, 1.0, -1.0))
    return instances.classifier(rng, 7, 5, q or 3, 1.0, **keywords), data


def jacobian(model: mh.Classifier, data: mh.Dataset) -> Any:
    Z = instances.side(model, data)
    return instances.outputs_and_jacobian(model.W, model.U, data.X, Z, model.scale)[1]


@pytest.mark.parametrize(
    ("q", "keywords"),
    [(None, {}), (None, {"scale": -0.7}), (1, {"query": -1}), (1, {"query": 1, "scale": 2.0})],
)
def test_kernel_is_the_jacobian_times_itself(q: int | None, keywords: dict[str, Any]) -> None:
    model, data = problem(0, q, **keywords)
    J = jacobian(model, data)
    K = theory.ntk(model, data.X)
    np.testing.assert_allclose(K, J @ J.T, rtol=0, atol=1e-12 * np.abs(K).max())  # rounding
    assert (K == K.T).all()
    of_W = J[:, : model.W.size]
    np.testing.assert_allclose(
        theory.ntk(model, data.X, wrt="W"), of_W @ of_W.T, rtol=0, atol=1e-12 * np.abs(K).max()
    )
    other = mh.Dataset(data.X[:4] + 1, np.ones(4))
    K2 = theory.ntk(model, data.X, other.X)
    J2 = jacobian(model, other)
    np.testing.assert_allclose(K2, J @ J2.T, rtol=0, atol=1e-12 * np.abs(K2).max())


@pytest.mark.peers
def test_kernel_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    model, data = problem(2)
    X = torch.tensor(np.array(data.X))

    def outputs(W: Any, U: Any) -> Any:
        S = torch.einsum("nqd,hde,nte->nhqt", X, W, X)
        pooled = torch.einsum("nhqt,nte->nhqe", torch.softmax(S, -1), X)
        return torch.einsum("nhqe,hqe->n", pooled, U) / 7**0.5

    parameters = tuple(torch.tensor(np.array(a)) for a in (model.W, model.U))
    jacobians = torch.autograd.functional.jacobian(outputs, parameters)
    J = np.concatenate([j.reshape(data.n, -1).numpy() for j in jacobians], axis=1)
    K = theory.ntk(model, data)
    np.testing.assert_allclose(K, J @ J.T, rtol=0, atol=1e-12 * np.abs(K).max())  # rounding


def test_kernel_with_external_queries() -> None:
    model, data = problem(1, 4)
    Z = np.random.default_rng(2).standard_normal((6, 4, 5))
    own = mh.Dataset(data.X, data.y, query=Z)
    J = jacobian(model, own)
    asked = mh.Classifier(model.W, model.U, query=Z)
    for K in (theory.ntk(model, own), theory.ntk(asked, data.X)):
        np.testing.assert_allclose(K, J @ J.T, rtol=0, atol=1e-12 * np.abs(K).max())


def test_kernel_of_another_row_map_with_external_queries() -> None:
    model, data = problem(1, 4)
    own = mh.Dataset(data.X, data.y, query=np.random.default_rng(2).standard_normal((6, 4, 5)))
    model = model.replace(attention="sigmoid")
    J = own_jacobian(model, own, ("W", "U"))
    K = theory.ntk(model, own)
    np.testing.assert_allclose(K, J @ J.T, rtol=0, atol=1e-12 * np.abs(K).max())  # rounding


def own_jacobian(model: mh.Classifier, data: mh.Dataset, names: tuple[str, ...]) -> Any:
    """Gradients of every output, one call a sample: minus those of the linear loss."""
    rows = []
    for i in range(data.n):
        _, g = mh.value_and_grad(model, data.subset([i]), loss="linear", wrt=names)
        rows.append(np.concatenate([getattr(g, name).ravel() for name in names]))
    return -data.y[:, None] * np.array(rows)


@pytest.mark.parametrize(
    "kind", ["factors", "one row", "tied", "prompt", "tied prompt", "causal", "lengths"]
)
def test_kernel_of_the_whole_family(kind: str) -> None:
    rng = np.random.default_rng(3)
    X = rng.standard_normal((6, 3, 5))
    lengths = [3, 1, 2, 0, 3, 2] if kind == "lengths" else None
    data = mh.Dataset(X, np.where(np.arange(6) % 3 == 0, 1.0, -1.0), lengths=lengths)
    U, W = rng.standard_normal((7, 3, 5)), rng.standard_normal((7, 5, 5)) / 3
    Q, K = rng.standard_normal((2, 7, 5, 2)) / 2
    factors, prompt = mh.LowRank(Q, K), rng.standard_normal((3, 5))
    model = {
        "factors": mh.Classifier(factors, U, scale=1.5),
        "one row": mh.Classifier(factors, U[:, :1], query=1, causal=True),
        "tied": mh.Classifier(mh.LowRank(Q), U),
        "prompt": mh.Classifier(W, U, prompt=prompt, scale=-0.5),
        "tied prompt": mh.Classifier(mh.LowRank(Q), U, prompt=prompt),
        "causal": mh.Classifier(W, U, causal=True),
        "lengths": mh.Classifier(W, U),
    }[kind]
    names = tuple(model.parameters)
    for wrt in (None, *names):
        J = own_jacobian(model, data, names if wrt is None else (wrt,))
        K = theory.ntk(model, data, wrt=wrt)
        np.testing.assert_allclose(K, J @ J.T, rtol=0, atol=1e-12 * np.abs(K).max())  # rounding


@pytest.mark.parametrize("rows", [4, 9])  # fewer than features, and more
def test_kernel_of_a_prompt_is_that_of_its_rows(rows: int) -> None:
    rng = np.random.default_rng(12)
    X, X2 = rng.standard_normal((6, 3, 5)), rng.standard_normal((1, 3, 5))
    W, U = rng.standard_normal((2, 5, 5)), rng.standard_normal((2, rows, 5))
    model = mh.Classifier(W, U, prompt=rng.standard_normal((rows, 5)))
    J, J2 = (own_jacobian(model, mh.Dataset(x, np.ones(len(x))), ("W",)) for x in (X, X2))
    for K, want in (
        (theory.ntk(model, X, wrt="W"), J @ J.T),
        (theory.ntk(model, X, X2, wrt="W"), J @ J2.T),
        (theory.ntk(model, X2, X, wrt="W"), J2 @ J.T),
    ):
        np.testing.assert_allclose(K, want, rtol=0, atol=1e-12 * np.abs(want).max())  # rounding


def test_kernel_of_samples_of_several_tiles_of_rows() -> None:
    rng = np.random.default_rng(13)
    X = rng.standard_normal((2, 150, 5))  # 450 rows; some 200 fit a tile
    W, U = rng.standard_normal((3, 5, 5)), rng.standard_normal((3, 150, 5))
    model = mh.Classifier(W, U, causal=True)
    J = own_jacobian(model, mh.Dataset(X, np.ones(2)), ("W", "U"))
    K = theory.ntk(model, X)
    np.testing.assert_allclose(K, J @ J.T, rtol=0, atol=1e-12 * np.abs(K).max())  # rounding


def in_dtype(dtype: str, model: mh.Classifier, data: mh.Dataset) -> tuple[Any, Any]:
    """Return both in another dtype, by arrays of it."""
    cast = {name: array.astype(dtype) for name, array in model.parameters.items()}
    W = mh.LowRank(cast["Q"], cast["K"]) if "Q" in cast else cast.get("W")
    query = None if data.query is None else data.query.astype(dtype)
    samples = mh.Dataset(
        data.X.astype(dtype), data.y.astype(dtype), query=query, lengths=data.lengths
    )
    return model.replace(W=W, U=cast["U"]), samples


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["last", "external", "factors", "lengths", "identity"])
def test_kernel_of_many_samples_of_one_row(kind: str, dtype: str) -> None:
    """More samples than lanes, which they then are; of three heads where registers are wide."""
    rng = np.random.default_rng(15)
    for H, d in ((1, 5), (3, 16)):
        X, Z = rng.standard_normal((19, 7, d)), rng.standard_normal((19, 1, d))
        Q, K = rng.standard_normal((2, H, d, 2)) / d**0.5
        W: Any = rng.standard_normal((H, d, d)) / d
        W = {"factors": mh.LowRank(Q, K), "identity": None}.get(kind, W)
        query, lengths = (Z, None) if kind == "external" else (None, None)
        if kind == "lengths":
            lengths = rng.integers(1, 8, 19)
        asking = None if kind == "external" else -1
        model = mh.Classifier(W, rng.standard_normal((H, 1, d)), query=asking, scale=0.7)
        data = mh.Dataset(X, np.ones(19), query=query, lengths=lengths)
        J = own_jacobian(model, data, tuple(model.parameters))
        found = theory.ntk(*in_dtype(dtype, model, data))
        tolerance = 1e-12 if dtype == "float64" else 1e-5  # rounding of inputs, and of sums
        assert np.abs(found - J @ J.T).max() < tolerance * np.abs(J @ J.T).max()


@pytest.mark.parametrize("rows", [1, 6])
def test_rows_of_kernels_do_not_depend_on_threads(rows: int) -> None:
    rng = np.random.default_rng(16)
    X = rng.standard_normal((700, 6, 20))
    model = mh.Classifier(
        rng.standard_normal((2, 20, 20)) / 20, rng.standard_normal((2, rows, 20)),
        query=-1 if rows == 1 else None,
    )  # fmt: skip
    of_model = RowsOfModel(model, mh.Dataset(X, np.ones(700)))
    found = []
    for threads in (1, 3):
        with mh.num_threads(threads):
            found.append(of_model.of_heads(slice(0, 2), derivative=True))
    np.testing.assert_array_equal(found[0].pooled, found[1].pooled)
    np.testing.assert_array_equal(found[0].moved, found[1].moved)


def test_rows_of_kernels_are_their_own_while_they_live() -> None:
    """Memory of those that are released serves the next ones."""
    rng = np.random.default_rng(17)
    X = rng.standard_normal((90, 4, 20))
    models = [mh.Classifier.gaussian(2, 4, 20, std=1.0, seed=seed) for seed in range(4)]
    sources = [RowsOfModel(model, mh.Dataset(X, np.ones(90))) for model in models]
    alive = [source.of_heads(slice(0, 2), derivative=True) for source in sources]
    kept = [(rows.pooled.copy(), rows.moved.copy()) for rows in alive]
    pooled = alive.pop(1).pooled[3:]  # a view keeps them
    for _ in range(3):
        sources[3].of_heads(slice(0, 1), derivative=True)
    np.testing.assert_array_equal(pooled, kept.pop(1)[0][3:])
    for rows, (of_A, of_D) in zip(alive, kept, strict=True):
        np.testing.assert_array_equal(rows.pooled, of_A)
        np.testing.assert_array_equal(rows.moved, of_D)


@pytest.mark.parametrize("kind", ["dense", "factors", "prompt", "last"])
@pytest.mark.parametrize("name", ["X", "U"])
def test_kernel_of_numbers_far_from_one_is_that_of_numbers_near_it(kind: str, name: str) -> None:
    """Powers of two change no digit; where numbers are far from 1 another code computes A and D."""
    rng = np.random.default_rng(14)
    Q, K = rng.standard_normal((2, 3, 5, 2))
    shapes = {"X": (6, 4, 5), "U": (3, 1 if kind == "last" else 4, 5)}
    arrays = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    options = {
        "dense": {"W": rng.standard_normal((3, 5, 5)), "causal": True},
        "factors": {"W": mh.LowRank(Q, K)},
        "prompt": {"W": mh.LowRank(Q), "prompt": rng.standard_normal((4, 5))},
        "last": {"W": rng.standard_normal((3, 5, 5)), "query": -1},
    }[kind]

    def kernel(exponent: int) -> Any:
        far = arrays | {name: np.ldexp(arrays[name], exponent)}
        times = 0 if name == "U" else 1 if kind == "prompt" else 2  # that X is in the logits
        model = mh.Classifier(**{**options, "U": far["U"], "scale": 2.0 ** (-times * exponent)})
        names = tuple(key for key in model.parameters if key != "U")  # linear in U, and X then
        return np.ldexp(theory.ntk(model, far["X"], wrt=names), -2 * exponent)

    near, far = kernel(0), kernel(300)
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-12 * np.abs(near).max())  # rounding


def test_runs_are_treated_one_by_one() -> None:
    models = mh.Classifier.gaussian(2, 3, 5, std=0.5, seed=[1, 2, 3])
    _, data = problem(0)
    K, margins = theory.ntk(models, data), theory.ntk_margin(models, data)
    assert K.shape == (3, 6, 6)
    assert margins.gap.shape == (3,)
    for r in range(3):
        own = theory.ntk_margin(models[r], data)
        np.testing.assert_array_equal(K[r], theory.ntk(models[r], data))
        assert margins.margin[r] == own.margin
        assert margins.direction[r] == own.direction
        report = theory.good_initialization(models, data)
        assert report.output[r] == theory.good_initialization(models[r], data).output
    two = mh.data.tokenized_mixture(6, 5, 7, seed=[1, 2])
    with pytest.raises(ValueError, match="X: expected the R = 3 runs of the model, got 2"):
        theory.ntk(mh.Classifier.zeros(2, 5, 7, runs=3), two)
    each = theory.ntk(mh.Classifier.zeros(2, 5, 7), two)
    np.testing.assert_array_equal(each[1], theory.ntk(mh.Classifier.zeros(2, 5, 7), two.run(1)))


BLOCK_KINDS = ("dense", "factors", "tied", "one row", "prompt", "identity")


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("block", [40, 300, 900])  # one head and a row of W; a few heads; all
def test_kernel_does_not_depend_on_its_blocks(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = problem(3)
    rng = np.random.default_rng(7)
    Q, K = rng.standard_normal((2, 7, 5, 2)) / 2
    model = {
        "dense": model,
        "factors": model.replace(W=mh.LowRank(Q, K)),
        "tied": model.replace(W=mh.LowRank(Q)),
        "one row": mh.Classifier(mh.LowRank(Q), model.U[:, :1], query=-1),
        "prompt": model.replace(prompt=rng.standard_normal((3, 5))),
        "identity": model.replace(W=None, prompt=rng.standard_normal((3, 5))),
    }[kind]
    few = mh.Dataset(data.X[:4] + 0.5, np.ones(4))
    whole, between = theory.ntk(model, data.X), theory.ntk(model, data, few)
    J, J2 = (own_jacobian(model, samples, tuple(model.parameters)) for samples in (data, few))
    np.testing.assert_allclose(between, J @ J2.T, rtol=0, atol=1e-12 * np.abs(between).max())
    monkeypatch.setattr("mhfast.theory.kernel.BLOCK", block)
    # The same products, summed in another order.
    tolerance = {"rtol": 0, "atol": 1e-13 * np.abs(whole).max()}
    np.testing.assert_allclose(theory.ntk(model, data.X), whole, **tolerance)
    np.testing.assert_allclose(theory.ntk(model, data, few), between, **tolerance)


@pytest.mark.parametrize("kind", ["dense", "tied", "identity"])
def test_kernels_of_runs_are_exact_whatever_their_sizes(kind: str) -> None:
    """A readout times c has a kernel by W, or by the prompt, of c² times the size."""
    c = np.array([1.0, 2.0**-300, 2.0**400])
    rng = np.random.default_rng(8)
    U = rng.standard_normal((2, 3, 5))
    W = rng.standard_normal((3, 2, 5, 5)) if kind == "dense" else None
    models = mh.Classifier(
        mh.LowRank(rng.standard_normal((3, 2, 5, 4))) if kind == "tied" else W,
        c[:, None, None, None] * U,
        prompt=rng.standard_normal((3, 3, 5)),
    )
    names = tuple(name for name in models.parameters if name != "U")
    data = mh.Dataset(rng.standard_normal((3, 4, 6, 5)), np.ones((3, 4)))
    found = theory.ntk(models, data, wrt=names)
    for r, of_run in enumerate(found):
        alone = models[r].replace(U=U)
        J = own_jacobian(alone, data.run(r), names)
        expected = J @ J.T
        atol = 1e-12 * np.abs(expected).max()  # rounding
        np.testing.assert_allclose(of_run / c[r] / c[r], expected, rtol=0, atol=atol)


def test_gradients_of_all_samples_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    X = rng.standard_normal((60, 2, 100))
    model = instances.classifier(rng, 3, 100, 2, 1.0)
    monkeypatch.setattr("mhfast.theory.kernel.BLOCK", 1 << 14)
    theory.ntk(model, X[:2])  # what the first call imports and keeps does not count
    tracemalloc.start()
    theory.ntk(model, X)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One head's gradients by W take 4.8 MB; X takes .1 MB, K .03 MB and a block .13 MB.
    assert peak < 2e6


def test_kernel_in_float32() -> None:
    model, data = problem(4)
    single = mh.Classifier(model.W.astype(np.float32), model.U.astype(np.float32))
    K = theory.ntk(single, data.X.astype(np.float32))
    assert K.dtype == np.float32
    exact = theory.ntk(model, data.X)
    # A few hundred products of numbers rounded to 6e-8.
    np.testing.assert_allclose(K, exact, rtol=0, atol=3e-6 * np.abs(exact).max())


def test_kernel_in_saturation() -> None:
    """Two tokens whose logits differ by a gap: ∂Φ/∂W is z (x_0 - x_1)ᵀ c / (2 + 2 cosh gap)."""
    rng = np.random.default_rng(5)
    X = rng.standard_normal((2, 2, 5))
    X[:, :, 0] = 1
    X[:, :, 1] = [1, 0]
    W = np.zeros((1, 5, 5))
    W[0, 0, 1] = 200.0
    U = rng.standard_normal((1, 1, 5))
    model = mh.Classifier(W, U, query=-1)
    apart = X[:, 0] - X[:, 1]
    slopes = (U[0, 0] @ apart.T) / (2 + 2 * np.cosh(200.0))
    features = slopes[:, None, None] * X[:, 1, :, None] * apart[:, None]
    exact = np.tensordot(features, features, axes=([1, 2], [1, 2]))
    # exp and a few products; the textbook formula has no digit right here.
    np.testing.assert_allclose(theory.ntk(model, X, wrt="W"), exact, rtol=1e-12)


def test_margin_is_that_of_a_support_vector_machine() -> None:
    svm = pytest.importorskip("sklearn.svm")
    for seed in range(5):
        model, data = problem(seed)
        found = theory.ntk_margin(model, data)
        features = jacobian(model, data)
        G = data.y[:, None] * (features @ features.T) * data.y
        # No bias: all constraints y_i ⟨f_i, w⟩ ≥ 1 become one class against its mirror image.
        K = np.block([[G, -G], [-G, G]])
        machine = svm.SVC(kernel="precomputed", C=1e8, tol=1e-8)
        machine.fit(K, np.repeat([1, -1], data.n))
        a = np.zeros(2 * data.n)
        a[machine.support_] = machine.dual_coef_[0]
        margin = math.sqrt(2) / math.sqrt(a @ K @ a)
        assert found.margin == pytest.approx(margin, rel=1e-4)
        assert found.separable
        assert 0 <= found.gap + 1e-12 <= 1e-9 * found.margin + 1e-12


def test_margin_certifies_itself() -> None:
    model, data = problem(7)
    found = theory.ntk_margin(model, data)
    J = data.y[:, None] * jacobian(model, data)
    direction = np.concatenate([found.direction.W.ravel(), found.direction.U.ravel()])
    assert np.linalg.norm(direction) == pytest.approx(math.sqrt(2), rel=1e-13)
    np.testing.assert_allclose(J @ direction, found.margins, rtol=1e-10)
    assert found.margin == found.margins.min()
    assert found.weights.min() >= 0
    assert found.weights.sum() == pytest.approx(1, rel=1e-14)
    assert found.dual == pytest.approx(math.sqrt(2) * np.linalg.norm(found.weights @ J), rel=1e-10)
    assert abs(found.gap) < 1e-10 * found.margin
    only_U = theory.ntk_margin(model, data, wrt="U")
    assert only_U.direction.W is None
    assert 0 < only_U.margin < found.margin


@pytest.mark.verdict
def test_features_that_are_not_separable() -> None:
    model, data = problem(8)
    twice = mh.Dataset(np.concatenate([data.X, data.X[:1]]), np.append(data.y, -data.y[0]))
    found = theory.ntk_margin(model, twice)
    assert found.margin == 0
    assert not found.separable
    J = twice.y[:, None] * jacobian(model, twice)
    # The two copies of a sample with both labels cancel: 0 is in the hull, up to rounding of K.
    assert np.linalg.norm(found.weights @ J) < 1e-7 * np.linalg.norm(J, axis=1).max()
    assert found.weights.sum() == pytest.approx(1, rel=1e-14)
    assert found.weights.min() >= 0
    assert found.dual < 1e-6


def test_margin_with_lengths_certifies_itself() -> None:
    model, data = problem(9)
    short = mh.Dataset(data.X, data.y, lengths=[3, 1, 2, 2, 3, 1])
    found = theory.ntk_margin(model, short)
    J = short.y[:, None] * own_jacobian(model, short, ("W", "U"))
    direction = np.concatenate([found.direction.W.ravel(), found.direction.U.ravel()])
    np.testing.assert_allclose(J @ direction, found.margins, rtol=1e-10)  # as above
    assert found.margin < theory.ntk_margin(model, data).margin
    assert abs(found.gap) < 1e-10 * found.margin


@pytest.mark.parametrize("query", [None, "external"])
def test_a_sample_of_weight_0_is_no_constraint(query: Any) -> None:
    model, data = problem(9)
    if query:
        model = mh.Classifier(model.W, model.U, query=np.array(data.X))
    X = np.array(data.X)
    X[[1, 4]] = np.nan
    if query:
        model = mh.Classifier(model.W, model.U, query=np.where(np.isnan(X), np.inf, X))
    weighted = mh.Dataset(X, data.y, weight=[1.0, 0.0, 5.0, 0.25, 0.0, 1.0])
    rest = data.subset([0, 2, 3, 5])
    own = mh.Classifier(model.W, model.U)
    found, expected = theory.ntk_margin(model, weighted), theory.ntk_margin(own, rest)
    assert found.margin == pytest.approx(expected.margin, rel=1e-12)
    assert found.weights[[1, 4]].tolist() == [0, 0]
    np.testing.assert_allclose(found.weights[[0, 2, 3, 5]], expected.weights, atol=1e-10)
    assert np.isnan(found.margins).tolist() == [False, True, False, False, True, False]
    report = theory.good_initialization(model, weighted)
    assert report.output == np.abs(own(rest)).max()
    curve = theory.realizability(model, weighted, epsilon=[0.3])
    plain = theory.realizability(own, rest, epsilon=[0.3])
    assert curve.distance[0] == pytest.approx(plain.distance[0], rel=1e-10)
    # The loss measured is the weighted one.
    moved = own + float(curve.distance[0] / math.sqrt(2)) * curve.start.tangent.direction
    each = np.logaddexp(0, -rest.y * moved(rest))
    assert curve.loss[0] == pytest.approx(each @ [1, 5, 0.25, 1] / 7.25, rel=1e-10)


@pytest.mark.parametrize("what", ["X", "W", "U", "query"])
def test_numbers_that_are_not_finite_are_named(what: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"X": (4, 3, 5), "W": (2, 5, 5), "U": (2, 3, 5), "query": (4, 3, 5)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays[what][1, 2, 4] = np.nan
    model = mh.Classifier(arrays["W"], arrays["U"])
    data = mh.Dataset(arrays["X"], [1, -1, 1, -1.0], query=arrays["query"])
    functions: list[Any] = [
        theory.ntk, theory.ntk_margin, theory.good_initialization, theory.hessian_extremes,
        theory.curvature_bounds, lambda m, d: theory.realizability(m, d, epsilon=[0.1]),
        lambda m, d: theory.training_bound(m, d, comparator=m, lr=1.0, steps=1),
    ]  # fmt: skip
    for function in functions:
        with pytest.raises(
            ValueError, match=f"{what}: expected finite numbers, got nan at index 1, 2"
        ):
            function(model, data)
    layer = mh.Layer(arrays["W"], rng.standard_normal((2, 5, 4)))
    if what in ("X", "W"):
        with pytest.raises(
            ValueError, match=f"{what}: expected finite numbers, got nan at index 1"
        ):
            theory.hessian_extremes(layer, arrays["X"], np.zeros((4, 3), int), loss="cross_entropy")
    Y = rng.standard_normal((4, 3, 4))
    Y[3, 2, 1] = np.inf
    if what == "query":
        with pytest.raises(
            ValueError, match="y: expected finite numbers, got inf at index 3, 2, 1"
        ):
            theory.hessian_extremes(layer, arrays["X"], Y, loss="squared")
        with pytest.raises(ValueError, match="G: expected finite inner products"):
            theory.nearest_point(Y[3, :3, :3])
        with pytest.raises(ValueError, match=r"G: expected an array \(n, n\), got shape \(3, 4\)"):
            theory.nearest_point(Y[0])


def test_kernel_beyond_the_range_of_its_products() -> None:
    """One head saturated by a gap of 400, whose features are about e^-400: squares underflow."""
    X = np.array([[[1.0, 0.0], [1.0, 1.0]]])
    W = np.array([[[0.0, 400.0], [0.0, 0.0]]])
    model = mh.Classifier(W, np.array([[[0.0, 1.0]]]), query=0)
    found = theory.ntk_margin(model, mh.Dataset(X, [1.0]), wrt="W")
    # ∂Φ/∂W = z (x_1 - x_0)ᵀ c A(1-A): its norm is e^-400 / (1 + e^-400)².
    assert found.margin == pytest.approx(math.sqrt(2) * math.exp(-400), rel=1e-10)
    assert found.separable


def test_margin_in_float32() -> None:
    model, data = problem(7)
    single = mh.Classifier(model.W.astype(np.float32), model.U.astype(np.float32))
    few = mh.Dataset(data.X.astype(np.float32), data.y)
    found, exact = theory.ntk_margin(single, few), theory.ntk_margin(model, data)
    # Arrays are rounded to 6e-8; what follows is float64.
    assert found.margin == pytest.approx(exact.margin, rel=1e-5)
    assert abs(found.gap) < 1e-10 * found.margin
    assert (single + 0.5 * found.direction).dtype == np.float32
    with pytest.raises(TypeError, match="X: expected dtype float32, that of the model"):
        theory.ntk_margin(single, data)


def test_margin_at_a_dead_start() -> None:
    X = np.zeros((3, 2, 5))
    found = theory.ntk_margin(mh.Classifier.zeros(2, 2, 5), mh.Dataset(X, [1, -1, 1]))
    assert (found.margin, found.dual) == (0, 0)


@pytest.mark.parametrize("n", [90, pytest.param(1000, marks=pytest.mark.slow)])
def test_gap_on_many_samples(n: int) -> None:
    data = mh.data.planted_attention(n, 10, 20, 4, seed=0)
    model = mh.Classifier.gaussian(16, 10, 20, std=0.1, seed=1)
    found = theory.ntk_margin(model, data)
    assert abs(found.gap) < 1e-6 * found.margin


def test_good_initialization_of_three_starts() -> None:
    data = mh.data.tokenized_mixture(30, 10, 9, seed=0)
    zeros = theory.good_initialization(mh.Classifier.zeros(4, 10, 9), data)
    assert (zeros.head_norm, zeros.output) == (0, 0)
    # At zero only the linear part separates, with the U direction alone: sqrt(2) times its part.
    margins = theory.mixture_margins(10, relevant_fraction=0.2, norm=1, contexts=4)
    assert zeros.margin >= math.sqrt(2) * margins.linear * (1 - 1e-12)
    for start in (
        mh.Classifier.gaussian(4, 10, 9, std=0.3, seed=1),
        mh.Classifier.random_step(data, 4, seed=1),
    ):
        report = theory.good_initialization(start, data)
        both = np.concatenate([start.W.reshape(4, -1), start.U.reshape(4, -1)], axis=1)
        assert report.head_norm == pytest.approx(np.linalg.norm(both, axis=1).max(), rel=1e-14)
        assert report.output == np.abs(start(data)).max()
        assert report.margin == theory.ntk_margin(start, data).margin > 0


def small_tokens(H: int) -> tuple[mh.Classifier, mh.Dataset]:
    """Tokens so short and heads so many that the guarantees apply."""
    data = mh.data.tokenized_mixture(12, 10, 7, relevant_fraction=0.5, norm=0.1, seed=0)
    return mh.Classifier.random_step(data, H, seed=0), data


def test_realizability_holds_where_its_condition_is_met() -> None:
    model, data = small_tokens(2000)
    epsilon = [0.5, 0.2, 0.05]
    curve = theory.realizability(model, data, epsilon=epsilon)
    assert curve.met.all()
    assert (curve.loss <= curve.epsilon).all()
    # Not by far: with B < log(1/ε) the margin is at most 3 log(1/ε) + BΦ along a straight line.
    assert (curve.loss >= curve.epsilon**4 / 2).all()
    step = curve.distance / math.sqrt(2)
    tangent = curve.start.tangent
    moved = model + float(step[1]) * tangent.direction
    assert mh.value_and_grad(moved, data)[0] == pytest.approx(curve.loss[1], rel=1e-12)
    heads = np.sqrt((tangent.direction.U**2).sum((1, 2)) + (tangent.direction.W**2).sum((1, 2)))
    np.testing.assert_allclose(curve.head_distance, step * heads.max(), rtol=1e-12)
    assert (np.diff(curve.distance) > 0).all()


def test_realizability_is_never_violated_in_two_hundred_instances() -> None:
    met = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        norm, H = 10 ** rng.uniform(-2.0, -1.0), int(10 ** rng.uniform(0.5, 3.0))
        data = mh.data.tokenized_mixture(
            6, 4, 7, relevant_fraction=0.5, norm=norm, noise=0.1 * norm, seed=seed
        )
        if seed % 2:
            model = mh.Classifier.random_step(data, H, seed=seed)
        else:
            model = mh.Classifier.gaussian(H, 4, 7, std=0.3, seed=seed)
        curve = theory.realizability(model, data, epsilon=10 ** rng.uniform(-2.0, -0.2, 3))
        assert (curve.loss <= curve.epsilon)[curve.met].all()
        met += int(curve.met.sum())
    assert met > 200


@pytest.mark.parametrize(("H", "epsilon"), [(1, 0.1), (37, 0.2), (300, 0.5), (2000, 0.05)])
def test_the_condition_of_realizability_is_the_formula(H: int, epsilon: float) -> None:
    """sqrt(H) ≥ s² ‖θ*‖² b3 / (2B), ‖θ*‖² = 2, b3 that of the far end; B by a finer search."""
    data = mh.data.tokenized_mixture(12, 10, 7, relevant_fraction=0.5, norm=0.1, seed=0)
    model = mh.Classifier.random_step(data, H, seed=0)
    curve = theory.realizability(model, data, epsilon=[epsilon])
    gamma, U = curve.start.margin, curve.start.tangent.direction.U
    B = max(np.abs(model(data)).max(), 1e-3) * np.geomspace(1, 1e6, 200_001)
    s = (2 * B + math.log(1 / epsilon)) / gamma
    R = np.linalg.norm(data.X, axis=2).max()
    u = np.linalg.norm(model.U.reshape(H, -1), axis=1).max()
    u = u + s * np.linalg.norm(U.reshape(H, -1), axis=1).max()
    b3 = math.sqrt(10) * R**3 * (2 * R**2 * u + 1)
    root = s**2 * 2 * b3 / (2 * B)
    # 601 candidates for B, two percent apart, at a flat minimum; the smallest that is good enough.
    assert curve.heads_needed[0] == pytest.approx(max(root.min() ** 2, 1), rel=0.01, abs=1)
    met = root <= math.sqrt(H)
    assert curve.met[0] == met.any()
    if met.any():
        assert curve.distance[0] == pytest.approx(math.sqrt(2) * s[met][0], rel=0.05)
        assert 1 <= curve.heads_factor[0] == pytest.approx(1, rel=0.05) or met[0]
    else:
        assert curve.heads_factor[0] == pytest.approx(math.sqrt(H) / root.min(), rel=0.01)
        assert f"needs H >= {curve.heads_needed[0]:.0f}, " in str(curve)
        assert f", {curve.heads_factor[0] ** -2:.3g} times as many" in str(curve)


def test_realizability_of_runs_as_a_table() -> None:
    model, data = small_tokens(3)
    both = mh.stack([model, mh.Classifier(2 * model.W, 2 * model.U)])
    curve = theory.realizability(both, data, epsilon=[0.3, 0.1])
    assert curve.heads_needed.shape == (2, 2)
    lines = str(curve).splitlines()
    assert len(lines) == 5
    own = theory.realizability(both[1], data, epsilon=[0.3, 0.1])
    assert lines[3:] == str(own).splitlines()[1:]


def test_realizability_says_where_it_promises_nothing() -> None:
    model, data = small_tokens(1)
    curve = theory.realizability(model, data, epsilon=[0.1])
    assert not curve.met.any()
    assert curve.heads_factor[0] < 1
    B = max(curve.start.output, 1e-3)
    expected = math.sqrt(2) * (2 * B + math.log(10)) / curve.start.margin
    assert curve.distance[0] == pytest.approx(expected, rel=1e-13)


def test_travelled() -> None:
    model, data = small_tokens(3)
    run = mh.train(
        model, data, steps=30, optimizer=mh.GradientDescent(20.0), record=("loss", "distance")
    )
    loss, distance = run.history["loss"], run.history["distance"]
    asked = [(loss[4] + loss[5]) / 2, loss[-1] / 2]
    found = theory.travelled(run, asked)
    assert found[0] == distance[5]
    assert np.isnan(found[1])


@pytest.mark.parametrize("runs", [None, 2])
def test_travelled_by_the_head_that_went_farthest(runs: int | None) -> None:
    model, data = small_tokens(3)
    if runs:
        model = mh.stack([model, model])
    lr = 20.0 if runs is None else [20.0, 10.0]
    run = mh.train(
        model, data, steps=30, optimizer=mh.GradientDescent(lr), record=("loss", "W", "U")
    )
    for alone in [run] if runs is None else [run[0], run[1]]:
        loss, W, U = (alone.history[name] for name in ("loss", "W", "U"))
        asked = [(loss[4] + loss[5]) / 2, loss[-1] / 2]
        heads = [
            np.sqrt(((W[5, h] - W[0, h]) ** 2).sum() + ((U[5, h] - U[0, h]) ** 2).sum())
            for h in range(model.heads)
        ]
        found = theory.travelled(alone, asked, per_head=True)
        assert found[0] == pytest.approx(max(heads), rel=1e-14)
        assert np.isnan(found[1])
    if runs:
        together = theory.travelled(run, asked, per_head=True)
        np.testing.assert_array_equal(together[1], found)
    with pytest.raises(ValueError, match="run: expected loss and distance recorded"):
        theory.travelled(run, asked)


def test_errors() -> None:
    model, data = problem(0)
    with pytest.raises(ValueError, match="wrt: expected names from W, U, got 'V'"):
        theory.ntk(model, data, wrt="V")
    with pytest.raises(ValueError, match=r"y: expected -1 or 1, got 0\.5 at index 1"):
        theory.ntk_margin(model, data.X[:2], [1.0, 0.5])
    with pytest.raises(ValueError, match=r"epsilon: expected a sequence of losses in \(0, 1\)"):
        theory.realizability(model, data, epsilon=[2.0])
    twice = mh.Dataset(np.concatenate([data.X, data.X]), np.concatenate([data.y, -data.y]))
    with pytest.raises(ValueError, match="got margin 0"):
        theory.realizability(model, twice, epsilon=[0.1])
    run = mh.train(model, data, steps=2, optimizer=mh.GradientDescent(0.1))
    with pytest.raises(ValueError, match="run: expected loss and distance"):
        theory.travelled(run, [0.1])
