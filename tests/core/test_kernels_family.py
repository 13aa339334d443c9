"""Kernels of layers, masks, prompts, runs and steps in every instruction set, at all axis lengths.

Against the reference, as `tests/core/test_kernels.py` does it for the classifier with one run.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from kernel_problems import (
    LAYER_PLANS,
    PLANS,
    TOLERANCE,
    attention_of,
    check,
    lengths,
    outputs_of,
    problem,
    relative,
)
from lists import with_every

import mhfast as mh
from mhfast import _core, reference

every_isa = pytest.mark.parametrize("isa", _core.available_isas())
both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def walk(axis, dtype, **sizes):
    """Problems in which one axis has every length, and the others have small ones."""
    for length in lengths(dtype):
        yield length, problem(**sizes | {axis: length}, dtype=dtype)


@every_isa
@both_types
@pytest.mark.parametrize("plan", LAYER_PLANS)
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("axis", ["n", "tokens", "rows", "dim", "heads", "outputs"])
def test_layers(isa, dtype, plan, loss, axis, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    for length, the in walk(axis, dtype, outputs=3, loss=loss):
        if loss == "cross_entropy" and the.V.shape[-1] == 1:
            value, gradients = the.value_and_grad()  # a single class: always right
            assert value == 0
            assert not any(g.any() for g in gradients.values())
            continue
        check(the, TOLERANCE[dtype])
        assert relative(the.outputs(), outputs_of(the)) <= TOLERANCE[dtype], length


@every_isa
@both_types
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("masks", ["lengths", "causal", "lengths, causal"])
@pytest.mark.parametrize("axis", ["n", "tokens", "rows", "dim"])
def test_masks(isa, plan, dtype, masks, axis, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    for _, the in walk(axis, dtype, n=4, masks=masks):
        check(the, TOLERANCE[dtype])
        # Each weight carries the rounding of its logit, whose size is a few units here.
        A, expected = the.attention(), attention_of(the)
        assert np.abs(A - expected).max() <= 20 * np.finfo(dtype).eps
        assert not A[expected == 0].any()


@every_isa
@both_types
@pytest.mark.parametrize("plan", LAYER_PLANS)
@pytest.mark.parametrize("axis", ["n", "tokens", "rows"])
def test_masks_of_layers(isa, dtype, plan, axis, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    for _, the in walk(axis, dtype, n=4, outputs=3, masks="lengths, causal", loss="squared"):
        check(the, TOLERANCE[dtype])


@every_isa
@both_types
@pytest.mark.parametrize("masks", ["", "causal", "lengths"])
def test_layers_of_long_samples(isa, dtype, masks, use_isa, use_plan):
    """Samples of several tiles of query rows, some of which see few of the keys."""
    use_isa(isa)
    use_plan("rows")
    the = problem(2, 700, None, 5, 3, outputs=2, masks=masks, loss="squared", dtype=dtype)
    # The mean over hundreds of keys: rounding grows with the square root of their number.
    check(the, 3 * TOLERANCE[dtype])
    value, gradients = the.value_and_grad(1)
    for threads in (2, 3):
        again, other = the.value_and_grad(threads)
        assert again == value
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(other[name], gradient)


@every_isa
@both_types
@pytest.mark.parametrize("plan", ["samples", "hybrid", "rows"])
@pytest.mark.parametrize("outputs", [0, 3])
@pytest.mark.parametrize("axis", ["n", "tokens", "rows", "dim", "heads"])
def test_prompts(isa, plan, dtype, outputs, axis, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    for _, the in walk(axis, dtype, rows=2, outputs=outputs, prompt=True):
        check(the, TOLERANCE[dtype])


def train(the, steps, lr=0.1):
    kind, readout = (mh.Classifier, the.U) if the.V is None else (mh.Layer, the.V)
    model = kind(the.W, readout, prompt=the.prompt, causal=the.causal)
    data = mh.Dataset(the.X, the.y, query=the.Z, lengths=the.lengths, weight=the.weight)
    return mh.train(model, data, steps=steps, optimizer=mh.GradientDescent(lr), loss=the.loss)


def check_step(the, tolerance):
    """Compare losses and a step so long that the parameters show the gradient."""
    run = train(the, 1, lr=1e3)
    expected, exact = the.expected
    np.testing.assert_allclose(run.history["loss"][:, 0], expected, rtol=tolerance)
    for name, after in run.model.parameters.items():
        assert relative(after, getattr(the, name) - 1e3 * exact[name]) <= tolerance, name


@every_isa
@both_types
@pytest.mark.parametrize("outputs", [0, 3])
@pytest.mark.parametrize("shared", ["", "X y", "W", "U V weight"])
@pytest.mark.parametrize("axis", ["runs", "n", "tokens", "dim"])
def test_runs_as_lanes(isa, dtype, outputs, shared, axis, use_isa, use_plan):
    use_isa(isa)
    use_plan("runs")
    for length, the in walk(axis, dtype, runs=3, outputs=outputs, shared=shared):
        if length % 3 == 1 or axis == "runs":  # the reference goes run by run, and slowly
            check_step(the, TOLERANCE[dtype])


@every_isa
@both_types
@pytest.mark.parametrize("outputs", [0, 3])
@pytest.mark.parametrize("query", ["masks", "external", "prompt"])
def test_query_sides_and_masks_of_runs_as_lanes(isa, dtype, outputs, query, use_isa, use_plan):
    use_isa(isa)
    use_plan("runs")
    options = {
        "masks": {"masks": "lengths, causal"},
        "external": {"rows": 2},
        "prompt": {"rows": 2, "prompt": True},
    }[query]
    for runs in (2, 7, 17, 34):
        check_step(problem(runs=runs, outputs=outputs, **options, dtype=dtype), TOLERANCE[dtype])


@every_isa
@both_types
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("outputs", [0, 3])
@pytest.mark.parametrize("shared", ["", "X", "W"])
def test_runs_by_one_plan_are_bitwise_those_alone(
    isa, plan, dtype, outputs, shared, use_isa, use_plan
):
    use_isa(isa)
    use_plan(plan)
    the = problem(runs=5, outputs=outputs, shared=shared, dtype=dtype)
    products = the.hvp({"W": the.W})
    trained = train(the, 3)
    for r in range(5):
        arrays = {name: getattr(the, name) for name in ("X", "W", "U", "V", "y", "weight")}
        has = {name: a for name, a in arrays.items() if a is not None and name not in shared}
        one = replace(the, runs=0, **{name: a[r] for name, a in has.items()})
        np.testing.assert_array_equal(the.outputs()[r], one.outputs())
        np.testing.assert_array_equal(the.attention()[r], one.attention())
        value, gradients = one.value_and_grad()
        assert the.value_and_grad()[0][r] == value
        for name, g in gradients.items():
            np.testing.assert_array_equal(the.value_and_grad()[1][name][r], g)
        for name, product in one.hvp({"W": one.W}).items():
            if product is not None:
                np.testing.assert_array_equal(products[name][r], product)
        alone = train(one, 3)
        np.testing.assert_array_equal(trained.history["loss"][r], alone.history["loss"])
        for name, after in alone.model.parameters.items():
            np.testing.assert_array_equal(trained.model.parameters[name][r], after)


def tangent_of(the):
    """A direction in the space of the parameters."""
    rng = np.random.default_rng(1)
    names = ("W", "U" if the.V is None else "V")
    return {n: rng.standard_normal(getattr(the, n).shape).astype(the.W.dtype) for n in names}


@functools.cache
def hvp_of(the):
    """The Hessian times that direction by the reference, once for all instruction sets."""
    model, options = the.reference()
    return reference.hvp(
        model, the.X, the.y, tangent_of(the), loss=the.loss, weight=the.weight, **options
    )


@every_isa
@both_types
@pytest.mark.parametrize("outputs", [0, 3])
@pytest.mark.parametrize("axis", ["n", "tokens", "rows", "dim", "heads"])
def test_products_of_the_hessian(isa, dtype, outputs, axis, use_isa):
    use_isa(isa)
    for _, the in walk(axis, dtype, outputs=outputs, masks="lengths"):
        products = the.hvp(tangent_of(the))
        exact = hvp_of(the)
        for name, true in exact.items():
            # As for gradients, of twice as many products, and at least of order one: with one key
            # the rows by W are zero.
            error = np.abs(products[name] - true).max()
            assert error <= 2 * TOLERANCE[dtype] * max(np.abs(true).max(), 1), name


RULES = with_every(
    [
        mh.NormalizedGradientDescent(0.1, by="head", clip=0.5),
        mh.PolyakStep(0.5, target=0.1),
        mh.Momentum(0.1, 0.8, nesterov=True, l2=0.1),
        # An eps that keeps these from enlarging the rounding of entries near zero.
        mh.Adam(0.02, eps=0.01, weight_decay=0.1),
        mh.AdamW(0.02, eps=0.01),
        mh.AdaGrad(0.02, eps=0.01),
        mh.RMSProp(0.02, eps=0.01),
        # s^(1/(p-1)) enlarges the rounding of entries near zero where p is above 2.
        mh.MirrorDescent(0.02, p=1.5),
        mh.GradientDescent(0.1, project="sphere", radius=1.5, project_by="head"),
    ]
)


@functools.cache
def trained_of(the, rule):
    """Three steps by the reference, once for all instruction sets."""
    model = mh.Classifier(the.W, the.U)
    return reference.train(model, the.X, the.y, steps=3, optimizer=rule)[0]


@every_isa
@both_types
@pytest.mark.parametrize("runs", [0, 3])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_steps(isa, dtype, runs, rule, use_isa, use_plan):
    use_isa(isa)
    use_plan("runs")
    for dim, the in walk("dim", dtype, runs=runs, shared="X y"):
        model = mh.Classifier(the.W, the.U)
        run = mh.train(model, the.X, the.y, steps=3, optimizer=rule)
        end = trained_of(the, rule)
        # Three steps, each with the errors of a gradient.
        assert relative(run.model.W, end.W) <= 3 * TOLERANCE[dtype], dim
        assert relative(run.model.U, end.U) <= 3 * TOLERANCE[dtype], dim
