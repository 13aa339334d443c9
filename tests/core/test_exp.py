"""The kernels' exponential: error bound, range, every instruction set."""

import csv
from pathlib import Path

import numpy as np
import pytest

from mhfast import _core

# What csrc/simd/exp.hpp states and derives; half of it is the rounding of the result itself.
BOUND = 1.25


def ulps(result, exact):
    """Distance of `result` from `exact` (of a wider type) in units of the last place."""
    rounded = np.abs(exact).astype(result.dtype)
    finfo = np.finfo(result.dtype)
    spacing = np.maximum(np.spacing(np.minimum(rounded, finfo.max)), finfo.smallest_subnormal)
    return np.abs(result.astype(np.longdouble) - exact) / spacing.astype(np.longdouble)


def every_float32_step(step):
    """Float32 numbers of both signs, every `step`-th bit pattern of those below 2^7 in size."""
    bits = np.arange(0, 0x43000000, step, dtype=np.uint32)
    positive = bits.view(np.float32)
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("isa", _core.available_isas())
def test_float32_error(isa, use_isa):
    use_isa(isa)
    x = every_float32_step(499)
    exact = np.exp(x.astype(np.longdouble))
    finite = exact < np.finfo(np.float32).max
    assert ulps(_core.exp(x)[finite], exact[finite]).max() <= BOUND
    # Results beyond the largest number by less than half its spacing may round either way.
    assert np.all(np.isinf(_core.exp(x)[exact > 2.0**128]))


@pytest.mark.parametrize("isa", _core.available_isas())
def test_float64_error(isa, use_isa):
    use_isa(isa)
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(-746, 709.7, 200_000),
            rng.uniform(-1, 1, 50_000),
            np.geomspace(1e-300, 700, 20_001),
            -np.geomspace(1e-300, 745, 20_001),
        ]
    )
    # The x87 long double has eleven more bits: its own error is below 0.001 of our ULP.
    assert ulps(_core.exp(x), np.exp(x.astype(np.longdouble))).max() <= BOUND


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize(("dtype", "kind"), [(np.float32, "u4"), (np.float64, "u8")])
def test_numpy_validation_table(isa, dtype, kind, use_isa):
    use_isa(isa)
    table = Path(np.__file__).parent / "_core/tests/data/umath-validation-set-exp.csv"
    if not table.exists():
        pytest.skip("this numpy ships without its validation tables")
    name = f"np.{np.dtype(dtype).name}"
    with table.open() as lines:
        rows = [row for row in csv.reader(lines) if row and row[0] == name]
    numbers = [np.array([int(row[i], 16) for row in rows], dtype=kind).view(dtype) for i in (1, 2)]
    x, expected = numbers
    result = _core.exp(np.ascontiguousarray(x))
    special = ~np.isfinite(expected)
    np.testing.assert_array_equal(result[special], expected[special])
    # The table is correctly rounded, half an ULP from the exact value.
    error = ulps(result[~special], expected[~special].astype(np.longdouble))
    assert len(rows) > 100
    assert error.max() <= BOUND + 0.5


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(isa, dtype, use_isa):
    use_isa(isa)
    x = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30], dtype=dtype)
    expected = np.array([1, 1, np.inf, 0, np.nan, np.inf, 0], dtype=dtype)
    np.testing.assert_array_equal(_core.exp(x), expected)


@pytest.mark.parametrize("isa", _core.available_isas())
def test_denormal_results_are_kept(isa, use_isa):
    use_isa(isa)
    for x in (np.array([-88.5, -103.2], np.float32), np.array([-720.0, -744.9])):
        result = _core.exp(x)
        assert np.all((result > 0) & (result < np.finfo(x.dtype).tiny))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 8, 9, 17, 31, 33])
def test_any_length(length):
    x = np.linspace(-3, 2, 40)[:length].copy()
    # Two roundings apart from numpy's own, each at most one ULP.
    np.testing.assert_allclose(_core.exp(x), np.exp(x), rtol=4.5e-16)
