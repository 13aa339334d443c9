"""Arrays of any memory layout give the same bits, and inputs are never written."""

from __future__ import annotations

import numpy as np
import pytest

import mhfast as mh

n, T, d, H, q, p, r = 2, 3, 5, 7, 4, 6, 8


def fortran(a):
    return np.asfortranarray(a)


def transposed(a):
    return np.ascontiguousarray(a.T).T


def wrong(a):
    """A value that shows in every result if it is read."""
    return np.nan if a.dtype.kind == "f" else -1


def every_second(a):
    wide = np.full((*a.shape[:-1], 2 * a.shape[-1]), wrong(a), a.dtype)
    wide[..., ::2] = a
    return wide[..., ::2]


def inner_rows(a):
    """A slice of the first axis: contiguous, but not at the start of its memory."""
    wide = np.full((a.shape[0] + 2, *a.shape[1:]), wrong(a), a.dtype)
    wide[1:-1] = a
    return wide[1:-1]


def reversed_in_every_axis(a):
    flip = (slice(None, None, -1),) * a.ndim
    return np.ascontiguousarray(a[flip])[flip]


def unaligned(a):
    memory = np.zeros(a.nbytes + 1, np.uint8)
    shifted = memory[1:].view(a.dtype).reshape(a.shape)
    shifted[...] = a
    return shifted


def byte_swapped(a):
    return a.astype(a.dtype.newbyteorder("S"))


def read_only(a):
    fixed = a.copy()
    fixed.flags.writeable = False
    return fixed


def subclass(a):
    class Array(np.ndarray):
        pass

    return a.view(Array)


LAYOUTS = [
    fortran,
    transposed,
    every_second,
    inner_rows,
    reversed_in_every_axis,
    unaligned,
    byte_swapped,
    read_only,
    subclass,
]


def arrays(dtype):
    rng = np.random.default_rng(0)
    shapes = {
        "X": (n, T, d), "query": (n, q, d), "W": (H, d, d), "U": (H, q, d), "prompt": (q, d),
        "Q": (H, d, r), "K": (H, d, r), "V": (H, d, p), "Y": (n, q, p),
    }  # fmt: skip
    named = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    named["y"] = np.array([-1, 1], dtype)
    named["weight"] = np.array([1, 3], dtype)
    named["row_weight"] = rng.random((n, q)).astype(dtype)
    named["lengths"] = np.array([3, 2])
    named["classes"] = rng.integers(0, p, (n, q))
    return named


def results(given):
    """Every result that the arrays lead to, through plain arguments and through a Dataset."""
    model = mh.Classifier(given["W"], given["U"])
    X, query, rest = given["X"], given["query"], (given["y"], given["weight"])
    value, g = mh.value_and_grad(model, X, rest[0], query=query, weight=rest[1])
    data = mh.Dataset(X, rest[0], query=query, weight=rest[1])
    of_data, h = mh.value_and_grad(model, data)
    outputs, weights = model(X, query=query), model.attention(X, query=query)
    first = mh.Classifier(given["W"], given["U"][:, :1], query=0)
    classifier = [value, g.W, g.U, of_data, h.W, h.U, outputs, weights, model(data), first(X)]

    layer = mh.Layer(mh.LowRank(given["Q"], given["K"]), given["V"], prompt=given["prompt"])
    options = {"lengths": given["lengths"], "weight": given["row_weight"]}
    value, g = mh.value_and_grad(layer, X, given["Y"], loss="squared", **options)
    h = mh.backward(layer, X, given["Y"], lengths=given["lengths"], wrt=("Q", "prompt", "X"))
    classes, c = mh.value_and_grad(layer, X, given["classes"], loss="cross_entropy", **options)
    return [*classifier, value, g.Q, g.K, g.V, g.prompt, h.Q, h.prompt, h.X, classes, c.V]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_layout_does_not_matter(dtype, layout):
    plain = arrays(dtype)
    before = {name: array.copy() for name, array in plain.items()}
    given = {name: layout(array) for name, array in plain.items()}
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])

    for result, expected in zip(results(given), results(plain), strict=True):
        np.testing.assert_array_equal(result, expected)

    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name])


def test_the_layouts_are_what_they_are_called():
    X = arrays(np.float64)["X"]
    for layout in (fortran, transposed, every_second, reversed_in_every_axis):
        assert not layout(X).flags.c_contiguous
    assert all(stride < 0 for stride in reversed_in_every_axis(X).strides)
    assert not unaligned(X).flags.aligned
    assert not byte_swapped(X).dtype.isnative
    assert not read_only(X).flags.writeable


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_zero_strides(axis):
    plain = arrays(np.float64)
    one = plain["X"].take([0], axis)
    repeated = np.broadcast_to(one, (n, T, d))
    assert repeated.strides[axis] == 0
    for result, expected in zip(
        results({**plain, "X": repeated}), results({**plain, "X": repeated.copy()}), strict=True
    ):
        np.testing.assert_array_equal(result, expected)


def test_strides_of_axes_of_length_one_are_ignored():
    memory = np.random.default_rng(0).standard_normal(d)
    X = np.lib.stride_tricks.as_strided(memory, (1, 1, d), (-8, 24, 8))
    model = mh.Classifier.gaussian(H, 1, d, std=1.0, seed=0)
    np.testing.assert_array_equal(model(X), model(X.copy()))
    value, g = mh.value_and_grad(model, X, [1])
    assert (value, g) == mh.value_and_grad(model, X.copy(), [1])


def test_memory_maps(tmp_path):
    plain = arrays(np.float64)
    mapped = {}
    for name, array in plain.items():
        np.save(tmp_path / f"{name}.npy", array)
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    assert np.shares_memory(mh.Dataset(mapped["X"], mapped["y"]).X, mapped["X"])
    for result, expected in zip(results(mapped), results(plain), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_arrays_of_size_zero_are_refused_or_empty(axis):
    X = np.zeros([0 if a == axis else length for a, length in enumerate((n, T, d))])
    model = mh.Classifier.zeros(H, T, d)
    if axis == 0:
        assert model(X).shape == (0,)
        assert model.attention(X).shape == (0, H, T, T)
    else:
        with pytest.raises(ValueError, match="X: expected shape"):
            model(X)
    with pytest.raises(ValueError, match="X: expected"):
        mh.value_and_grad(model, X, np.zeros(len(X)))
    with pytest.raises(ValueError, match="X: expected"):
        mh.Dataset(X, np.zeros(len(X)))


@pytest.mark.parametrize(
    ("samples", "tokens", "dim", "heads"),
    [(1, 3, 5, 7), (2, 1, 5, 7), (2, 3, 1, 7), (2, 3, 5, 1), (1, 1, 1, 1)],
)
def test_axes_of_length_one(samples, tokens, dim, heads):
    X = np.random.default_rng(0).standard_normal((samples, tokens, dim))
    y = np.ones(samples)
    model = mh.Classifier.gaussian(heads, tokens, dim, std=1.0, seed=1)
    value, g = mh.value_and_grad(model, X, y)
    expected, gradients = mh.reference.value_and_grad(model, X, y)
    # Results are of order 1; with one token the gradient in W is exactly zero.
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(g.W, gradients["W"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(g.U, gradients["U"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        model.attention(X), mh.reference.attention(model, X), rtol=0, atol=1e-12
    )
