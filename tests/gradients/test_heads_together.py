"""One query row, whose heads go together where samples are lanes, by the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from instances import TOLERANCE, relative

import mhfast as mh
from mhfast import _core

T, D, HEADS, RANK, OUTPUTS = 5, 8, 7, 2, 3

KINDS = ("last token", "lengths", "external", "prompt", "low rank", "tied", "identity", "sigmoid")
LAYERS = (*KINDS, "linear", "identity values", "value-output")
MODELS = [*(("classifier", kind) for kind in KINDS), *(("layer", kind) for kind in LAYERS)]


def problem(
    readout: str, kind: str, n: int, dtype: Any = np.float64, d: int = D
) -> tuple[Any, Any, Any, Any]:
    """Return a classifier or a layer with one query row, X, y and options."""
    rng = np.random.default_rng(n)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    W: Any = draw(HEADS, d, d) / d
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {"query": -1, "scale": 0.7}
    match kind:
        case "low rank":
            W = mh.LowRank(draw(HEADS, d, RANK) / 2, draw(HEADS, d, RANK) / 2)
        case "tied":
            W = mh.LowRank(draw(HEADS, d, RANK) / 2)
        case "identity":
            W = None
        case "prompt":
            settings = {"prompt": draw(1, d), "scale": 1.3}
        case "external":
            options["query"], settings["query"] = draw(n, 1, d), None
        case "lengths":
            options["lengths"] = rng.integers(0, T + 1, n)
        case "sigmoid" | "linear":
            settings["attention"] = kind
    if readout == "classifier":
        model: Any = mh.Classifier(W, draw(HEADS, 1, d), **settings)
        y = np.where(rng.random(n) < 0.5, -1.0, 1.0).astype(dtype)
        return model, draw(n, T, d), y, options
    V: Any = draw(HEADS, d, OUTPUTS) / d
    if kind == "identity values":
        V = None
    elif kind == "value-output":
        V = mh.ValueOutput(draw(HEADS, d, RANK) / d, draw(HEADS, RANK, OUTPUTS))
    model = mh.Layer(W, V, **settings)
    return model, draw(n, T, d), draw(n, 1, d if V is None else OUTPUTS), options


def compare(model: Any, X: Any, y: Any, options: Any, dtype: Any) -> None:
    names = tuple(model.parameters)
    if isinstance(model, mh.Layer):
        options = options | {"loss": "squared"}
    value, g = mh.value_and_grad(model, X, y, **options)
    expected, gradients = mh.reference.value_and_grad(model, X, y, wrt=names, **options)
    tolerance = TOLERANCE[np.dtype(dtype)]
    assert value == pytest.approx(expected, rel=tolerance)
    for name in names:
        assert relative(getattr(g, name), gradients[name]) < tolerance


@pytest.mark.parametrize("plan", ["samples", "hybrid", "rows"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [3, 37])
@pytest.mark.parametrize(("readout", "kind"), MODELS)
def test_gradients_follow_the_reference(
    readout: str, kind: str, n: int, dtype: Any, plan: str, use_plan: Any
) -> None:
    use_plan(plan)
    model, X, y, options = problem(readout, kind, n, dtype)
    compare(model, X, y, options, dtype)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("plan", ["samples", "hybrid"])
@pytest.mark.parametrize("kind", ["last token", "low rank"])
@pytest.mark.parametrize("d", [9, 40])
@pytest.mark.parametrize("readout", ["classifier", "layer"])
def test_every_instruction_set_follows_the_reference(
    readout: str, d: int, kind: str, plan: str, isa: str, use_isa: Any, use_plan: Any
) -> None:
    """Of d = 9 more rows than a chunk keeps D X of, of d = 40 fewer."""
    use_isa(isa)
    use_plan(plan)
    compare(*problem(readout, kind, 70, d=d), np.float64)


@pytest.mark.parametrize(("readout", "kind"), MODELS)
def test_outputs_are_equal_in_every_plan(readout: str, kind: str, use_plan: Any) -> None:
    model, X, _, options = problem(readout, kind, 37)
    found = []
    for plan in ("samples", "hybrid", "rows"):
        use_plan(plan)
        found.append(model(X, **options))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize("kind", ["last token", "lengths", "prompt", "low rank"])
@pytest.mark.parametrize("by", ["tensor", "head", "all"])
@pytest.mark.parametrize("readout", ["classifier", "layer"])
def test_normalized_steps_in_saturation_are_those_of_other_plans(
    readout: str, by: Any, kind: str, use_plan: Any
) -> None:
    """Gradients that underflow are computed again, head by head, from factors of each sample.

    Logits of 1e5 are rounded by 1e-11, and so are the exponents of the weights.
    """
    model, X, y, options = problem(readout, kind, 21)
    first = next(name for name in model.parameters if name in "WQ")
    model = model + mh.Gradients(**{first: 1e5 * getattr(model, first)})
    data = mh.Dataset(X, y, **options)
    found = {}
    for plan in ("samples", "rows"):
        use_plan(plan)
        optimizer = mh.NormalizedGradientDescent(0.1, by=by)
        loss: Any = "logistic" if readout == "classifier" else "squared"
        found[plan] = mh.train(model, data, steps=9, optimizer=optimizer, loss=loss).model
    for name in model.parameters:
        one, other = (getattr(found[plan], name) for plan in ("samples", "rows"))
        assert relative(one, other) < 1e-9
    moves = "U" if readout == "classifier" else "V"
    assert relative(getattr(found["samples"], moves), getattr(model, moves)) > 1e-3


@pytest.mark.parametrize("readout", ["classifier", "layer"])
def test_every_number_of_threads_gives_the_same_bits(readout: str, use_plan: Any) -> None:
    model, X, y, _ = problem(readout, "last token", 1500)
    loss: Any = "logistic" if readout == "classifier" else "squared"
    use_plan("samples")
    one, *more = (mh.value_and_grad(model, X, y, loss=loss, num_threads=k)[1] for k in (1, 2, 4))
    for other in more:
        for name in model.parameters:
            np.testing.assert_array_equal(getattr(other, name), getattr(one, name))


@pytest.mark.parametrize("optimizer", [mh.GradientDescent(0.1), mh.NormalizedGradientDescent(0.1)])
@pytest.mark.parametrize("plan", ["samples", "hybrid"])
def test_steps_with_a_loss_of_the_callers_are_those_with_it_built_in(
    plan: str, optimizer: Any, use_plan: Any
) -> None:
    """Several slabs of a chunk wait for one call of it, with weights of all of their heads."""

    def squared(outputs: Any, targets: Any) -> tuple[Any, Any]:
        return (outputs - targets) ** 2, 2 * (outputs - targets)

    use_plan(plan)
    model, X, y, _ = problem("layer", "last token", 6000)
    found = [
        mh.train(model, mh.Dataset(X, y), steps=3, optimizer=optimizer, loss=loss).model
        for loss in (squared, "squared")
    ]
    for name in model.parameters:
        assert relative(getattr(found[0], name), getattr(found[1], name)) < 1e-12
        assert relative(getattr(found[0], name), getattr(model, name)) > 1e-3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [3, 37])
@pytest.mark.parametrize(("readout", "kind"), MODELS)
def test_attention_is_equal_in_every_plan(
    readout: str, kind: str, n: int, dtype: Any, use_plan: Any
) -> None:
    model, X, _, options = problem(readout, kind, n, dtype)
    expected = mh.reference.attention(model, X, **options)
    found = []
    for plan in ("samples", "hybrid", "rows"):
        use_plan(plan)
        found.append(model.attention(X, **options))
    assert relative(found[0], expected) < TOLERANCE[np.dtype(dtype)]
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
