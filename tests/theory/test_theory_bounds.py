"""Curvature: the proved inequalities on random instances, and the ends of the spectrum."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import theory_instances as instances

import mhfast as mh
from mhfast import theory

ROUNDING = 1 + 1e-9  # of eigenvalues found to 1e-10


def random_instances(count: int) -> Iterator[tuple[mh.Classifier, mh.Dataset]]:
    """Odd sizes, H from 1 to 64, starts and tokens small and large, every kind of query."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        n, T, d = (int(rng.integers(1, high)) for high in (6, 8, 6))
        H = int(2 ** rng.integers(0, 7))
        X = rng.standard_normal((n, T, d)) * 10 ** rng.uniform(-1, 0.5) / math.sqrt(d)
        query, external, q = instances.query_side(rng, seed % 3, n, T, d)
        scale = 1.0 if seed % 2 else float(rng.uniform(-2, 2))
        model = instances.classifier(
            rng, H, d, q, 10 ** rng.uniform(-2, 1), query=query, scale=scale
        )
        yield model, mh.Dataset(X, instances.labels(rng, n), query=external)


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_no_inequality_is_violated_and_each_can_be(count: int) -> None:
    ratios = []
    for model, data in random_instances(count):
        bounds = theory.curvature_bounds(model, data)
        first = mh.Dataset(
            data.X[:1], data.y[:1], query=None if data.query is None else data.query[:1]
        )
        value, gradient = mh.value_and_grad(model, data)
        _, of_output = mh.value_and_grad(model, first, loss="linear")
        ends = theory.hessian_extremes(model, data)
        output = theory.hessian_extremes(model, first, loss="linear")
        ratios.append(
            [
                mh.norm(of_output) / bounds.b1,
                max(-output.smallest, output.largest) / bounds.weak_convexity,
                mh.norm(gradient) / bounds.gradient(value),
                max(-ends.smallest, ends.largest) / bounds.hessian,
                ends.smallest / bounds.smallest_eigenvalue(value),
            ]
        )
    worst = np.max(ratios, axis=0)
    assert (worst <= ROUNDING).all(), worst
    assert (worst >= 1 / 20).all(), worst


def test_bounds_are_the_formulas() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2, 3, 5))
    Z = rng.standard_normal((2, 4, 5))
    model = instances.classifier(rng, 7, 5, 4, 1.0, query=Z, scale=-0.5)
    bounds = theory.curvature_bounds(model, X, within=0.25)
    Rx, Rz = np.linalg.norm(X, axis=2).max(), np.linalg.norm(Z, axis=2).max()
    u = np.linalg.norm(model.U.reshape(7, -1), axis=1).max() + 0.25
    # The same few products and roots.
    assert bounds.b1 == pytest.approx(2 * Rx * (0.5 * Rz * Rx * u + 1), rel=1e-14)
    assert bounds.b3 == pytest.approx(Rz * Rx**2 * (Rz * Rx * u + 1), rel=1e-14)
    assert bounds.hessian == pytest.approx(bounds.b1**2 / 4 + bounds.b3 / math.sqrt(7), rel=1e-14)
    assert bounds.smallest_eigenvalue(0.5) == -0.5 * bounds.weak_convexity


def test_bounds_of_self_attention_and_the_recalled_form() -> None:
    rng = np.random.default_rng(1)
    X = rng.standard_normal((2, 3, 5))
    model = instances.classifier(rng, 7, 5, 3, 1.0)
    R = np.linalg.norm(X, axis=2).max()
    u = np.linalg.norm(model.U.reshape(7, -1), axis=1).max()
    both = np.concatenate([model.W.reshape(7, -1), model.U.reshape(7, -1)], axis=1)
    theta = np.linalg.norm(both, axis=1).max()
    proved, recalled = (
        theory.curvature_bounds(model, X, constants=which) for which in ("proved", "recalled")
    )
    assert proved.b1 == pytest.approx(math.sqrt(3) * R * (R**2 * u + 1), rel=1e-14)
    assert proved.b3 == pytest.approx(math.sqrt(3) * R**3 * (2 * R**2 * u + 1), rel=1e-14)
    assert recalled.b1 == pytest.approx(math.sqrt(3) * R * (2 * R**2 * theta + 1), rel=1e-14)
    assert recalled.b3 == proved.b3


@pytest.mark.parametrize(("H", "d", "T"), [(1, 2, 3), (3, 4, 2), (7, 5, 3), (9, 7, 2)])
def test_extremes_are_those_of_a_dense_eigensolver(H: int, d: int, T: int) -> None:
    rng = np.random.default_rng(d)
    data = mh.Dataset(rng.standard_normal((6, T, d)), instances.labels(rng, 6))
    model = instances.classifier(rng, H, d, T, 1.0)
    exact = np.linalg.eigvalsh(instances.dense_hessian(model, data))
    ends = theory.hessian_extremes(model, data)
    width = exact[-1] - exact[0]
    # Lanczos stops at 1e-10 of the width of the spectrum.
    assert ends.smallest == pytest.approx(exact[0], abs=1e-9 * width)
    assert ends.largest == pytest.approx(exact[-1], abs=1e-9 * width)
    assert ends.smallest < 0 < ends.largest
    for vector, value, residual in (
        (ends.smallest_vector, ends.smallest, ends.smallest_residual),
        (ends.largest_vector, ends.largest, ends.largest_residual),
    ):
        assert mh.norm(vector) == pytest.approx(1, rel=1e-12)
        moved = instances.hvp(model, data, None, vector)
        # The residual is itself a difference of nearly equal numbers.
        assert mh.norm(moved - value * vector) == pytest.approx(residual, abs=1e-12 * width)
        assert residual <= 1e-6 * width  # eigenvalues are the square of it better


def test_extremes_for_one_parameter() -> None:
    rng = np.random.default_rng(1)
    data = mh.Dataset(rng.standard_normal((6, 3, 5)), instances.labels(rng, 6))
    model = instances.classifier(rng, 4, 5, 3, 1.0)
    of_W = instances.dense_hessian(model, data)[: model.W.size, : model.W.size]
    exact = np.linalg.eigvalsh(of_W)
    ends = theory.hessian_extremes(model, data, wrt="W")
    width = exact[-1] - exact[0]
    assert ends.smallest == pytest.approx(exact[0], abs=1e-9 * width)  # as above
    assert ends.largest == pytest.approx(exact[-1], abs=1e-9 * width)
    assert ends.largest_vector.U is None


def test_extremes_for_a_layer_with_factors() -> None:
    rng = np.random.default_rng(0)
    Q, K = rng.standard_normal((2, 3, 5, 2)) / 3
    model = mh.Layer(mh.LowRank(Q, K), rng.standard_normal((3, 5, 4)) / 3)
    data = mh.Dataset(rng.standard_normal((6, 2, 5)), rng.integers(0, 4, (6, 2)))
    ends = theory.hessian_extremes(model, data, loss="cross_entropy")
    arrays = model.parameters
    columns = []
    for e in np.eye(sum(a.size for a in arrays.values())):
        parts = np.split(e, np.cumsum([a.size for a in arrays.values()])[:-1])
        tangent = {n: p.reshape(a.shape) for (n, a), p in zip(arrays.items(), parts, strict=True)}
        found = mh.reference.hvp(model, data.X, data.y, tangent, loss="cross_entropy")
        columns.append(np.concatenate([found[name].ravel() for name in arrays]))
    exact = np.linalg.eigvalsh(columns)
    width = exact[-1] - exact[0]
    assert ends.smallest == pytest.approx(exact[0], abs=1e-9 * width)  # as above
    assert ends.largest == pytest.approx(exact[-1], abs=1e-9 * width)


def test_runs_are_treated_one_by_one() -> None:
    rng = np.random.default_rng(0)
    data = mh.Dataset(rng.standard_normal((6, 3, 5)), instances.labels(rng, 6))
    models = mh.Classifier.gaussian(2, 3, 5, std=0.5, seed=[1, 2, 3, 4])
    ends = theory.hessian_extremes(models, data)
    bounds = theory.curvature_bounds(models, data)
    for r in range(4):
        own = theory.hessian_extremes(models[r], data)
        assert (ends.smallest[r], ends.largest[r]) == (own.smallest, own.largest)
        assert ends.smallest_vector[r] == own.smallest_vector
        assert bounds.b1[r] == theory.curvature_bounds(models[r], data).b1
        assert bounds.hessian[r] == theory.curvature_bounds(models[r], data).hessian


def test_extremes_of_a_faint_hessian() -> None:
    rng = np.random.default_rng(0)
    data = mh.Dataset(1e-60 * rng.standard_normal((6, 3, 5)), instances.labels(rng, 6))
    model = instances.classifier(rng, 7, 5, 3, 1.0)
    ends = theory.hessian_extremes(model, data)
    # Gradients of size 1e-60 times each other over 4: a squared norm of this would underflow.
    assert 1e-123 < ends.largest < 1e-118


def test_errors() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2, 3, 5))
    model = instances.classifier(rng, 7, 5, 3, 1.0)
    with pytest.raises(TypeError, match="model: expected a Classifier, got ndarray"):
        theory.curvature_bounds(X, X)  # type: ignore[arg-type]
    factors = mh.Classifier(mh.LowRank(rng.standard_normal((7, 5, 2))), model.U)
    with pytest.raises(TypeError, match=r"W: expected an array \(H, d, d\), got LowRank"):
        theory.curvature_bounds(factors, X)
    with pytest.raises(ValueError, match=r"within: expected a number of at least 0, got -1"):
        theory.curvature_bounds(model, X, within=-1)
    with pytest.raises(ValueError, match="constants: expected one of proved, recalled, got 'mine'"):
        theory.curvature_bounds(model, X, constants="mine")
    scaled = instances.classifier(rng, 7, 5, 3, 1.0, scale=2.0)
    with pytest.raises(ValueError, match="constants: expected 'proved' unless"):
        theory.curvature_bounds(scaled, X, constants="recalled")


def test_conditions_say_both_of_their_sides() -> None:
    for value, verdict in ((2.5, "met, with a factor of"), (4.5, "not met, short by a factor of")):
        told = str(theory.Condition("a ≤ b", value, 3.5, at_least=False))
        assert told.startswith(f"a ≤ b: {value} against 3.5, {verdict}")
    assert (
        str(theory.Condition("a ≤ b", math.nan, 3.5, at_least=False))
        == "a ≤ b: nan against 3.5, cannot be judged"
    )
