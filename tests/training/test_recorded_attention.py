"""Attention recorded by training: the weights that a step's pass computes are those of a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core

N, T, D, HEADS, OUTPUTS = 37, 6, 20, 3, 4

KINDS = ("softmax", "lengths", "low rank", "external", "sigmoid", "softmax1", "relu", "rows")
RECORDS = ("attention", "attention_max", "attention_groups")


def problem(readout: str, kind: str, n: int = N, dtype: Any = np.float64) -> tuple[Any, Any]:
    """Return a model, of one query row but for the kind "rows", and data with groups."""
    rng = np.random.default_rng(n)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    q = T if kind == "rows" else 1
    settings: dict[str, Any] = {"query": None if kind in ("rows", "external") else -1}
    W: Any = draw(HEADS, D, D) / D
    options: dict[str, Any] = {}
    if kind == "low rank":
        W = mh.LowRank(draw(HEADS, D, 2) / 2, draw(HEADS, D, 2) / 2)
    elif kind == "external":
        options["query"] = draw(n, 1, D)
    elif kind == "lengths":
        options["lengths"] = rng.integers(0, T + 1, n)
    elif kind in ("sigmoid", "softmax1", "relu"):
        settings["attention"] = kind
    if readout == "classifier":
        model: Any = mh.Classifier(W, draw(HEADS, q, D), **settings)
        y = np.where(rng.random(n) < 0.5, -1.0, 1.0).astype(dtype)
    else:
        model = mh.Layer(W, draw(HEADS, D, OUTPUTS) / D, **settings)
        y = draw(n, q, OUTPUTS)
    groups = {
        "token_groups": rng.integers(3, size=(n, T)),
        "sample_groups": rng.integers(2, size=n),
    }
    return model, mh.Dataset(draw(n, T, D), y, **groups, **options)


def trained(model: Any, data: Any, **options: Any) -> Any:
    loss: Any = "logistic" if isinstance(model, mh.Classifier) else "squared"
    settings = {"steps": 4, "optimizer": mh.GradientDescent(0.1), "loss": loss}
    return mh.train(model, data, **(settings | options))


def attention_at(run: Any, model: Any, data: Any, row: int) -> Any:
    """The attention (n, H, q, T) of the parameters that a row of the history holds."""
    names = model.parameters
    at = model + mh.Gradients(
        **{name: run.history[name][row] - names[name] for name in names if name in run.history}
    )
    seen = {name: getattr(data, name) for name in ("query", "lengths")}
    return at.attention(data.X, **{k: v for k, v in seen.items() if v is not None})


def summaries(weights: Any, data: Any) -> tuple[Any, Any]:
    """The means of largest weights (H,), and of weights of groups (H, sample groups, groups)."""
    n, heads, q, _ = weights.shape
    lengths = data.lengths if data.lengths is not None else np.full(n, T)
    counts = np.repeat(lengths > 0, q).reshape(n, q)
    largest = (weights.max(axis=-1) * counts[:, None]).sum(axis=(0, 2)) / counts.sum()
    shares = np.zeros((heads, 2, 3))
    for a in range(2):
        of = counts & (data.sample_groups.index == a)[:, None]
        for b in range(3):
            on = weights * (data.token_groups.index == b)[:, None, None] * of[:, None, :, None]
            shares[:, a, b] = on.sum(axis=(0, 2, 3)) / of.sum()
    return largest, shares


@pytest.mark.parametrize("plan", ["samples", "hybrid", "rows"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("readout", ["classifier", "layer"])
def test_records_are_of_the_attention_of_a_call(
    readout: str, kind: str, dtype: Any, plan: str, use_plan: Any
) -> None:
    """To the last bit at the start, where the parameters are known to it; then up to rounding.

    The parameters of later steps are recorded and put back by an addition, which rounds.
    """
    use_plan(plan)
    model, data = problem(readout, kind, dtype=dtype)
    run = trained(model, data, record=(*RECORDS, *model.parameters))
    first = attention_at(run, model, data, 0)
    np.testing.assert_array_equal(run.history["attention"][0], first)
    rounding = 1e-12 if dtype == np.float64 else 1e-4
    for row in range(5):
        weights = attention_at(run, model, data, row)
        np.testing.assert_allclose(run.history["attention"][row], weights, atol=rounding)
        largest, shares = summaries(run.history["attention"][row].astype(float), data)
        np.testing.assert_allclose(run.history["attention_max"][row], largest, rtol=1e-12)
        np.testing.assert_allclose(run.history["attention_groups"][row], shares, rtol=1e-12)
    assert np.abs(run.history["attention"][4] - first).max() > 1e-3  # it moves


@pytest.mark.parametrize("record", [*RECORDS, {"attention": 3, "attention_max": 2}, RECORDS])
@pytest.mark.parametrize("readout", ["classifier", "layer"])
def test_records_do_not_depend_on_what_else_is_recorded(
    readout: str, record: Any, use_plan: Any
) -> None:
    use_plan("samples")
    model, data = problem(readout, "softmax")
    every = dict.fromkeys(RECORDS, 1)
    run, whole = (trained(model, data, record=names) for names in (record, every))
    for name in RECORDS:
        if name in run.history:
            rows = run.steps[name]
            np.testing.assert_array_equal(run.history[name], whole.history[name][rows])
            assert rows[-1] == 4  # the end is recorded, whatever the step


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("readout", ["classifier", "layer"])
def test_every_number_of_threads_records_the_same_bits(
    readout: str, isa: str, use_isa: Any, use_plan: Any
) -> None:
    use_isa(isa)
    use_plan("samples")
    model, data = problem(readout, "lengths", n=1500)
    runs = [trained(model, data, record=RECORDS, num_threads=k) for k in (1, 2, 4)]
    for run in runs[1:]:
        for name in RECORDS:
            np.testing.assert_array_equal(run.history[name], runs[0].history[name])


@pytest.mark.parametrize("readout", ["classifier", "layer"])
def test_normalized_steps_in_saturation_record_attention(readout: str, use_plan: Any) -> None:
    """Their gradients underflow and are computed again without their largest factors."""
    use_plan("samples")
    model, data = problem(readout, "softmax")
    model = model + mh.Gradients(W=1e5 * model.W)
    optimizer = mh.NormalizedGradientDescent(0.1)
    run = trained(model, data, record=(*RECORDS, "W"), optimizer=optimizer)
    weights = model.attention(data.X)
    assert weights.max(axis=-1).min() > 0.999
    np.testing.assert_allclose(run.history["attention"][0], weights, atol=1e-300)
    for row in range(5):
        largest, shares = summaries(run.history["attention"][row], data)
        np.testing.assert_allclose(run.history["attention_max"][row], largest, rtol=1e-12)
        np.testing.assert_allclose(run.history["attention_groups"][row], shares, atol=1e-12)


def test_a_loss_of_the_callers_changes_no_record(use_plan: Any) -> None:
    def squared(outputs: Any, targets: Any) -> tuple[Any, Any]:
        return (outputs - targets) ** 2, 2 * (outputs - targets)

    use_plan("samples")
    model, data = problem("layer", "softmax", n=3000)
    own, known = (trained(model, data, loss=loss, record=RECORDS) for loss in (squared, "squared"))
    for name in RECORDS:
        np.testing.assert_array_equal(own.history[name][0], known.history[name][0])
        np.testing.assert_allclose(own.history[name], known.history[name], atol=1e-12)


def test_rows_of_no_weight_are_recorded_as_they_are(use_plan: Any) -> None:
    """Steps leave out samples of weight 0, whatever their tokens, and records of weights do not."""
    use_plan("samples")
    model, data = problem("classifier", "softmax")
    weight = np.ones(N)
    weight[::3] = 0
    run = trained(model, mh.Dataset(data.X, data.y, weight=weight), record=RECORDS[:2])
    weights = model.attention(data.X)
    np.testing.assert_array_equal(run.history["attention"][0], weights)
    largest = weights[weight > 0].max(axis=-1).mean(axis=(0, 2))
    np.testing.assert_allclose(run.history["attention_max"][0], largest, rtol=1e-12)


def test_runs_side_by_side_record_what_they_do_alone() -> None:
    models, data = [], None
    for seed in range(5):
        model, data = problem("layer", "softmax")
        models.append(model + mh.Gradients(W=0.1 * seed * model.W))
    together = trained(mh.stack(models), data, record=RECORDS)
    for r, model in enumerate(models):
        alone = trained(model, data, record=RECORDS)
        for name in RECORDS:
            np.testing.assert_array_equal(together[r].history[name], alone.history[name])


def test_a_resumed_run_records_as_if_never_stopped(use_plan: Any) -> None:
    use_plan("samples")
    model, data = problem("layer", "lengths")
    whole = trained(model, data, record=RECORDS)
    run = mh.train(trained(model, data, steps=1, record=RECORDS), data, steps=3)
    for name in RECORDS:
        np.testing.assert_array_equal(run.history[name], whole.history[name])


def test_a_run_that_stops_records_its_end(use_plan: Any) -> None:
    use_plan("samples")
    model, data = problem("layer", "softmax")
    losses = trained(model, data).history["loss"]
    record = dict.fromkeys(RECORDS, 10)
    run = trained(model, data, record=record, stop={"loss": losses[2]})
    every = trained(model, data, record=RECORDS)
    for name in RECORDS:
        np.testing.assert_array_equal(run.steps[name], [0, 2])
        np.testing.assert_array_equal(run.history[name], every.history[name][[0, 2]])


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value_rank", [None, 2])
def test_long_samples_record_the_same_whatever_else_is_recorded(
    value_rank: int | None, causal: bool, lengths: bool
) -> None:
    """Rows go a tile at a time, other tiles in a pass than in a call, and keys beyond are zero."""
    n, tokens, d = 3, 203, 9
    rng = np.random.default_rng(1)
    layer = mh.Layer.gaussian(2, d, OUTPUTS, std=0.3, value_rank=value_rank, causal=causal, seed=0)
    options: dict[str, Any] = {"lengths": rng.integers(1, tokens, n)} if lengths else {}
    data = mh.Dataset(
        rng.standard_normal((n, tokens, d)),
        rng.standard_normal((n, tokens, OUTPUTS)),
        token_groups=rng.integers(3, size=(n, tokens)),
        **options,
    )
    assert mh.explain(layer, data.X)["plan"] == "rows"
    whole = trained(layer, data, record=RECORDS, steps=2)
    np.testing.assert_array_equal(whole.history["attention"][0], layer.attention(data.X, **options))
    for name in RECORDS:
        one = trained(layer, data, record=name, steps=2)
        np.testing.assert_array_equal(one.history[name], whole.history[name])
