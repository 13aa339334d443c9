"""Every kernel in every instruction set: all axis lengths, all plans, against the reference."""

import itertools

import numpy as np
import pytest

from mhfast import _core, reference

PLANS = ("samples", "hybrid", "rows", "tiles")

# Relative errors (max|a-b| / max|b|) allowed against the float64 reference: about a hundred
# roundings of the type. Most come from C[s] - C[m] with two or three keys, where readouts nearly
# cancel.
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}


def problem(n, tokens, rows, dim, heads, dtype, seed=0):
    """Random inputs with logits of order one; rows None: self-attention."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, tokens, dim)).astype(dtype)
    Z = None if rows is None else rng.standard_normal((n, rows, dim)).astype(dtype)
    W = (rng.standard_normal((heads, dim, dim)) / dim).astype(dtype)
    U = rng.standard_normal((heads, tokens if rows is None else rows, dim)).astype(dtype)
    y = np.where(rng.random(n) < 0.5, -1, 1).astype(dtype)
    return X, Z, y, W, U


def relative(result, exact):
    return np.abs(result - exact).max() / max(np.abs(exact).max(), 1e-300)


def check(X, Z, y, W, U, tolerance):
    value, gW, gU = _core.value_and_grad(X, Z, y, None, W, U, 1.0, "logistic", True, True, 0)
    exact = [a if a is None else a.astype(np.float64) for a in (X, Z, y, W, U)]
    expected, eW, eU = reference.value_and_grad(
        exact[0], exact[2], exact[3], exact[4], query=exact[1]
    )
    assert abs(value - expected) <= tolerance * abs(expected)
    assert relative(gU, eU) <= tolerance
    if X.shape[1] == 1:
        assert np.all(gW == 0)  # one key: the weights cannot move
    else:
        assert relative(gW, eW) <= tolerance


def lengths(dtype):
    """From 1 to beyond two registers of the widest instruction set here."""
    return range(1, 2 * 64 // np.dtype(dtype).itemsize + 3)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", ["samples", "tokens", "rows", "dim", "heads"])
def test_every_axis_length(isa, plan, dtype, axis, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    for length in lengths(dtype):
        sizes = {"n": 3, "tokens": 4, "rows": None, "dim": 5, "heads": 2}
        if axis == "rows":
            sizes["rows"] = length
        else:
            sizes["n" if axis == "samples" else axis] = length
        check(*problem(**sizes, dtype=dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_several_slabs_and_chunks(isa, plan, dtype, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    for n, tokens, rows, dim, heads in [
        (131, 6, None, 7, 3),
        (70, 9, 1, 33, 5),
        (2, 65, 3, 34, 1),
        (3, 600, None, 2, 1),
    ]:
        check(*problem(n, tokens, rows, dim, heads, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unaligned_inputs(isa, dtype, use_isa):
    """Arrays that start one number after a vector boundary, as slices of larger buffers do."""
    use_isa(isa)

    def shift(a):
        room = np.empty(a.size + 1, dtype=a.dtype)
        room[1:] = a.ravel()
        return room[1:].reshape(a.shape)

    X, _, y, W, U = problem(11, 6, None, 9, 2, dtype)
    check(shift(X), None, shift(y), shift(W), shift(U), TOLERANCE[dtype])


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_outputs_are_bitwise_the_same_in_every_plan(isa, dtype, use_isa, use_plan):
    use_isa(isa)
    for tokens, rows, dim in [(3, None, 5), (10, None, 17), (13, 1, 8), (9, 4, 3), (33, None, 6)]:
        X, Z, y, W, U = problem(19, tokens, rows, dim, 3, dtype)
        results = []
        for plan in PLANS:
            use_plan(plan)
            results.append(_core.outputs(X, Z, W, U, 1.0, 0))
            alone = _core.outputs(X[4:5], None if Z is None else Z[4:5], W, U, 1.0, 0)
            assert alone[0] == results[-1][4]
        for other in results[1:]:
            np.testing.assert_array_equal(results[0], other)
        value, _, _ = _core.value_and_grad(X, Z, y, None, W, U, 1.0, "linear", True, True, 0)
        # The mean of float64 sums of these very outputs, up to its own rounding.
        assert value == pytest.approx(-np.mean(y * results[0].astype(np.float64)), rel=1e-6)


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_attention_weights(isa, dtype, use_isa):
    use_isa(isa)
    for tokens, rows, dim in itertools.product([1, 7, 17], [None, 1, 9], [2, 19]):
        X, Z, _, W, _ = problem(3, tokens, rows, dim, 4, dtype)
        A = _core.attention(X, Z, W, 1.0, 0)
        expected = reference.attention(X, W, query=Z)
        assert A.shape == (3, 4, rows or tokens, tokens)
        # Each weight carries the rounding of its logit, whose size is a few units here.
        assert np.abs(A - expected).max() <= 20 * np.finfo(dtype).eps
        # A sum of T rounded weights.
        assert np.abs(A.sum(-1, dtype=np.float64) - 1).max() <= tokens * np.finfo(dtype).eps


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_thread_count_changes_nothing(plan, dtype, use_plan):
    use_plan(plan)
    X, _, y, W, U = problem(150, 12, None, 21, 6, dtype)  # large enough for several threads
    results = [
        _core.value_and_grad(X, None, y, None, W, U, 1.0, "logistic", True, True, threads)
        for threads in (1, 2, 3, 4, 7)
    ]
    for value, gW, gU in results[1:]:
        assert value == results[0][0]
        np.testing.assert_array_equal(gW, results[0][1])
        np.testing.assert_array_equal(gU, results[0][2])


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_logits(size, dtype):
    X, _, y, W, U = problem(5, 7, None, 6, 2, dtype)
    W = (W * dtype(size)).astype(dtype)
    A = _core.attention(X, None, W, 1.0, 0)
    assert np.all(np.isfinite(A))
    assert np.abs(A.sum(-1, dtype=np.float64) - 1).max() <= 7 * np.finfo(dtype).eps
    value, gW, gU = _core.value_and_grad(X, None, y, None, W, U, 1.0, "logistic", True, True, 0)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gW))
    assert np.all(np.isfinite(gU))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_sample_stays_alone(plan, bad, use_plan):
    use_plan(plan)
    X, _, _, W, U = problem(21, 5, None, 6, 3, np.float64)
    clean = _core.outputs(X, None, W, U, 1.0, 0)
    X[7, 2, 3] = bad
    spoilt = _core.outputs(X, None, W, U, 1.0, 0)
    assert np.isnan(spoilt[7])
    np.testing.assert_array_equal(np.delete(spoilt, 7), np.delete(clean, 7))
    weights = _core.attention(X, None, W, 1.0, 0)
    assert np.all(np.isfinite(np.delete(weights, 7, axis=0)))
    assert np.any(np.isnan(weights[7]))


def test_attention_keeps_denormal_weights():
    X = np.array([[[1.0], [0.0]]])
    A = _core.attention(X, None, np.array([[[720.0]]]), 1.0, 0)
    assert 0 < A[0, 0, 0, 1] < np.finfo(np.float64).tiny


def test_floating_point_mode_is_restored():
    X, _, y, W, U = problem(40, 8, None, 9, 3, np.float64)
    _core.value_and_grad(X, None, y, None, W, U, 1.0, "logistic", True, True, 2)
    tiny = np.array([np.finfo(np.float64).tiny])
    assert (tiny / 8)[0] > 0  # flush-to-zero would make this 0
