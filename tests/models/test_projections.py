"""Wide tokens that meet the factors of W and the readout before the scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from instances import TOLERANCE, relative

import mhfast as mh

T, q, H, p, r = 6, 4, 2, 3, 5
SIDES = ["self", "causal", "lengths", "external"]


def problem(
    kind: type, n: int, d: int, *, tied: bool = False, side: str = "self", dtype: Any = np.float64
) -> tuple[Any, mh.Dataset]:
    """A model whose logits and outputs are of order one, and data for it."""
    rng = np.random.default_rng(n + d)

    def new(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    rows = q if side == "external" else T
    W = mh.LowRank(new(H, d, r) / d**0.5, None if tied else new(H, d, r) / (d * r) ** 0.5)
    of_classifier = kind is mh.Classifier
    readout = new(*((H, rows, d) if of_classifier else (H, d, p))) / d**0.5
    model = kind(W, readout, scale=0.5, causal=side == "causal")
    y = rng.choice([-1.0, 1.0], (n,) if of_classifier else (n, rows, p)).astype(dtype)
    options: dict[str, Any] = {}
    if side == "external":
        options["query"] = new(n, rows, d)
    if side == "lengths":
        options["lengths"] = rng.integers(2 if n == 1 else 0, T + 1, n)
    return model, mh.Dataset(new(n, T, d), y, **options)


def padded(model: Any, data: mh.Dataset, tokens: int = 21) -> tuple[Any, mh.Dataset]:
    """The same problem with tokens beyond `lengths`, which is computed in another way."""
    more = tokens - T
    X = np.pad(data.X, ((0, 0), (0, more), (0, 0)))
    y = data.y if data.y.ndim == 1 else np.pad(data.y, ((0, 0), (0, more), (0, 0)))
    if isinstance(model, mh.Classifier):
        model = model.replace(U=np.pad(model.U, ((0, 0), (0, more), (0, 0))))
    return model, mh.Dataset(X, y, lengths=np.full(data.n, T))


# One sample, lanes that would be empty, whole ones, and chunks of several slabs; whole vectors of
# features and a rest.
@pytest.mark.parametrize(("n", "d"), [(1, 130), (19, 24), (13, 64), (700, 21)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_values_and_gradients_follow_the_reference(
    kind: type, tied: bool, side: str, dtype: Any, n: int, d: int
) -> None:
    model, data = problem(kind, n, d, tied=tied, side=side, dtype=dtype)
    predicted: Any = mh.explain(model, data)["predicted_cycles"]
    assert [plan for plan in predicted if np.isfinite(predicted[plan])] == ["hybrid", "runs"]
    given = {"query": data.query, "lengths": data.lengths}
    outputs = model(data)
    tolerance = TOLERANCE[np.dtype(dtype)]
    assert relative(outputs, mh.reference.outputs(model, data.X, **given)) < tolerance
    value, g = mh.value_and_grad(model, data, num_threads=1)
    expected, want = mh.reference.value_and_grad(model, data.X, data.y, **given)
    assert value == pytest.approx(expected, rel=tolerance)
    for name in model.parameters:
        assert relative(getattr(g, name), want[name]) < tolerance, name
    # A sample's outputs do not depend on the others, and nothing does on the number of threads.
    last = {name: None if at is None else at[-1:] for name, at in given.items()}
    np.testing.assert_array_equal(model(data.X[-1:], **last), outputs[-1:])
    again, h = mh.value_and_grad(model, data, num_threads=3)
    assert again == value
    for name in model.parameters:
        np.testing.assert_array_equal(getattr(h, name), getattr(g, name))
    # Gradients by inputs are found in the same pass, with those by parameters or alone.
    inputs = ("X", "query") if side == "external" else ("X",)
    _, want = mh.reference.value_and_grad(model, data.X, data.y, wrt=inputs, **given)
    value, g = mh.value_and_grad(model, data, wrt=(*model.parameters, *inputs), num_threads=1)
    assert value == again
    for name in model.parameters:
        np.testing.assert_array_equal(getattr(h, name), getattr(g, name))
    for name in inputs:
        assert relative(getattr(g, name), want[name]) < tolerance, name
        for threads in (1, 3):
            _, alone = mh.value_and_grad(model, data, wrt=name, num_threads=threads)
            np.testing.assert_array_equal(getattr(alone, name), getattr(g, name))


@pytest.mark.parametrize("rule", [mh.GradientDescent(0.1), mh.Adam(0.01)])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("n", [11, 300])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_training_follows_the_reference(kind: type, n: int, side: str, rule: Any) -> None:
    model, data = problem(kind, n, 17, side=side)
    run = mh.train(model, data, steps=4, optimizer=rule)
    given = {"query": data.query, "lengths": data.lengths}
    want, _ = mh.reference.train(model, data.X, data.y, steps=4, optimizer=rule, **given)
    for name in model.parameters:
        # Adam divides by the root of the second moment, which amplifies the rounding of small ones.
        assert relative(getattr(run.model, name), getattr(want, name)) < 1e-9, name


@pytest.mark.parametrize("attention", ["linear", "relu", "sigmoid", "softmax1"])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_every_row_map(kind: type, attention: Any) -> None:
    model, data = problem(kind, 19, 33, side="lengths")
    model = model.replace(attention=attention)
    value, g = mh.value_and_grad(model, data)
    expected, want = mh.reference.value_and_grad(model, data.X, data.y, lengths=data.lengths)
    assert value == pytest.approx(expected, rel=1e-12)
    for name in model.parameters:
        assert np.abs(getattr(g, name) - want[name]).max() < 1e-12, name


@pytest.mark.parametrize("by", ["all", "head", "tensor"])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_normalized_steps_in_saturation(kind: type, by: Any) -> None:
    """Gradients that underflow are computed again from factors of each sample.

    Logits of 1e5 are rounded by 1e-11, and so are the exponents of the weights.
    """
    model, data = problem(kind, 21, 23)
    model = model.replace(W=mh.LowRank(1e5 * model.Q, model.K))
    if kind is mh.Classifier:
        data = dataclasses.replace(data, y=np.where(model(data) > 0, 1.0, -1.0))
    optimizer = mh.NormalizedGradientDescent(0.1, by=by)
    run = mh.train(model, data, steps=9, optimizer=optimizer)
    other = mh.train(*padded(model, data), steps=9, optimizer=optimizer).model
    for name in model.parameters:
        want = getattr(other, name)
        assert relative(getattr(run.model, name), want[:, :T] if name == "U" else want) < 1e-9
    if by != "all":  # with one norm for all the readout alone moves
        assert relative(run.model.K, model.K) > 1e-3


@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_samples_of_weight_zero_have_no_gradient(kind: type) -> None:
    """Whatever their tokens are; and those whose derivatives are given as zeros."""
    model, data = problem(kind, 19, 26)
    weight = np.where(np.arange(19) % 3, 0.5, 0.0)
    X = np.array(data.X)
    X[0, 2, 3] = np.nan
    _, g = mh.value_and_grad(model, mh.Dataset(X, data.y, weight=weight), wrt=("Q", "X"))
    kept = weight > 0
    part = mh.Dataset(data.X[kept], data.y[kept], weight=weight[kept])
    _, want = mh.value_and_grad(model, part, wrt=("Q", "X"))
    assert relative(g.Q, want.Q) < 1e-12
    assert relative(g.X[kept], want.X) < 1e-12
    assert not g.X[~kept].any()
    by = mh.backward(model, X, data.y * np.expand_dims(weight, tuple(range(1, data.y.ndim))),
                     wrt="X").X  # fmt: skip
    assert np.isfinite(by).all()
    assert not by[~kept].any()


@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_a_loss_of_ones_own(kind: type) -> None:
    model, data = problem(kind, 40, 20)
    wrt = (*model.parameters, "X")
    own = lambda F, y: ((F - y) ** 2, 2 * (F - y))  # noqa: E731
    found = mh.value_and_grad(model, data, loss=own, wrt=wrt)
    value, g = mh.value_and_grad(model, data, loss="squared", wrt=wrt)
    assert found[0] == pytest.approx(value, rel=1e-12)
    for name in wrt:
        assert relative(getattr(found[1], name), getattr(g, name)) < 1e-12
