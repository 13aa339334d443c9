"""The classifier's kernels in every instruction set: all axis lengths and plans, by the reference.

Those of layers, masks, prompts and runs are in `tests/core/test_kernels_family.py`.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from kernel_problems import PLANS, TOLERANCE, attention_of, check, lengths, problem

from mhfast import _core


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", ["n", "tokens", "rows", "dim", "heads"])
def test_every_axis_length(isa, plan, dtype, axis, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    for length in lengths(dtype):
        check(problem(**{axis: length}, dtype=dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_several_slabs_and_chunks(isa, plan, dtype, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    for sizes in [
        (131, 6, None, 7, 3),
        (70, 9, 1, 33, 5),
        (2, 65, 3, 34, 1),
        (3, 600, None, 2, 1),
    ]:
        check(problem(*sizes, dtype=dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unaligned_inputs(isa, dtype, use_isa):
    """Arrays that start one number after a vector boundary, as slices of larger buffers do."""
    use_isa(isa)

    def shift(a):
        room = np.empty(a.size + 1, dtype=a.dtype)
        room[1:] = a.ravel()
        return room[1:].reshape(a.shape)

    for outputs in (0, 3):
        the = problem(11, 6, None, 9, 2, outputs, dtype=dtype)
        arrays = {name: getattr(the, name) for name in ("X", "y", "W", "U", "V", "weight")}
        shifted = {name: shift(a) for name, a in arrays.items() if a is not None}
        check(replace(the, **shifted), TOLERANCE[dtype])


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("outputs", [0, 2])
def test_outputs_are_bitwise_the_same_in_every_plan(isa, dtype, outputs, use_isa, use_plan):
    use_isa(isa)
    for tokens, rows, dim in [(3, None, 5), (10, None, 17), (13, 1, 8), (9, 4, 3), (33, None, 6)]:
        the = problem(19, tokens, rows, dim, 3, outputs, loss="linear", dtype=dtype)
        results = []
        for plan in PLANS:
            use_plan(plan)
            results.append(the.outputs())
            np.testing.assert_array_equal(the.part(4, 5).outputs()[0], results[-1][4])
        for other in results[1:]:
            np.testing.assert_array_equal(results[0], other)
        if outputs:
            continue
        value, _ = the.value_and_grad()
        # The mean of float64 sums of these very outputs, up to its own rounding.
        assert value == pytest.approx(-np.mean(the.y * results[0].astype(np.float64)), rel=1e-6)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_attention_weights(isa, dtype, use_isa):
    use_isa(isa)
    for tokens, rows, dim in itertools.product([1, 7, 17], [None, 1, 9], [2, 19]):
        the = problem(3, tokens, rows, dim, 4, dtype=dtype)
        A = the.attention()
        assert A.shape == (3, 4, rows or tokens, tokens)
        # Each weight carries the rounding of its logit, whose size is a few units here.
        assert np.abs(A - attention_of(the)).max() <= 20 * np.finfo(dtype).eps
        # A sum of T rounded weights.
        assert np.abs(A.sum(-1, dtype=np.float64) - 1).max() <= tokens * np.finfo(dtype).eps


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_attention_is_the_same_by_samples_and_by_rows(rows, dtype, isa, use_isa, use_plan):
    """Whether samples are the lanes (a block of them and a part of one) or query rows."""
    use_isa(isa)
    for outputs in (0, 2):
        the = problem(21, 4, rows, 19, 3, outputs, dtype=dtype, masks="lengths")
        use_plan("samples")
        by_samples = the.attention()
        use_plan("rows")
        np.testing.assert_array_equal(by_samples, the.attention())
        # Each weight carries the rounding of its logit, whose size is a few units here.
        assert np.abs(by_samples - attention_of(the)).max() <= 20 * np.finfo(dtype).eps


def same_bits(the, counts):
    """Assert that loss and gradients on so many threads are those on one."""
    expected, exact = the.value_and_grad(1)
    for threads in counts:
        value, gradients = the.value_and_grad(threads)
        assert value == expected
        for name, array in exact.items():
            np.testing.assert_array_equal(gradients[name], array)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("outputs", [0, 2])
def test_thread_count_changes_nothing(plan, dtype, outputs, use_plan):
    use_plan(plan)
    the = problem(150, 12, None, 21, 6, outputs, dtype=dtype)  # large enough for several threads
    same_bits(the, (2, 3, 4, 7))


def test_threads_may_be_at_different_slabs(use_plan):
    """Of heads so many that tiles take several slabs a pass, one thread always ends first."""
    use_plan("tiles")
    the = problem(13, 12, None, 21, 601)
    same_bits(the, (2, 3) * 10)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("outputs", [0, 2])
def test_huge_logits(size, dtype, outputs):
    the = problem(5, 7, None, 6, 2, outputs, dtype=dtype)
    the = replace(the, W=the.W * dtype(size))
    A = the.attention()
    assert np.all(np.isfinite(A))
    assert np.abs(A.sum(-1, dtype=np.float64) - 1).max() <= 7 * np.finfo(dtype).eps
    value, gradients = the.value_and_grad()
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients.values())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("outputs", [0, 2])
def test_a_bad_sample_stays_alone(plan, bad, outputs, use_plan):
    use_plan(plan)
    the = problem(21, 5, None, 6, 3, outputs)
    clean = the.outputs()
    X = the.X.copy()
    X[7, 2, 3] = bad
    the = replace(the, X=X)
    spoilt = the.outputs()
    assert np.isnan(spoilt[7]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 7, axis=0), np.delete(clean, 7, axis=0))
    weights = the.attention()
    assert np.all(np.isfinite(np.delete(weights, 7, axis=0)))
    assert np.any(np.isnan(weights[7]))


def test_attention_keeps_denormal_weights():
    the = replace(
        problem(1, 2, None, 1, 1), X=np.array([[[1.0], [0.0]]]), W=np.full((1, 1, 1), 720.0)
    )
    assert 0 < the.attention()[0, 0, 0, 1] < np.finfo(np.float64).tiny


@pytest.mark.parametrize("outputs", [0, 2])
def test_floating_point_mode_is_restored(outputs):
    problem(40, 8, None, 9, 3, outputs).value_and_grad(2)
    tiny = np.array([np.finfo(np.float64).tiny])
    assert (tiny / 8)[0] > 0  # flush-to-zero would make this 0
