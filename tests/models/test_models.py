"""`Classifier`: meaning, constructors, and that a frozen model stays as it is."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

import mhfast as mh

n, T, d, H = 2, 3, 5, 7

# Relative to the largest entry; the promise for results against the float64 reference.
TOLERANCE = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 3e-6}
QUERIES = {"self": None, "first": 0, "last": -1, "external": (n, 4, d)}


def relative_error(a, b):
    return np.max(np.abs(a - b)) / np.max(np.abs(b))


def tokens(dtype=np.float64, seed=1, samples=n):
    return np.random.default_rng(seed).standard_normal((samples, T, d)).astype(dtype)


def external_query(dtype=np.float64):
    return np.random.default_rng(2).standard_normal(QUERIES["external"]).astype(dtype)


def gaussian(dtype=np.float64, query=None, scale=1.0):
    return mh.Classifier.gaussian(H, T, d, std=0.5, seed=3, dtype=dtype, query=query, scale=scale)


def test_replace_checks_as_the_constructor_does():
    model = mh.Classifier.zeros(2, 3, 5)
    moved = model.replace(U=np.ones((2, 3, 5)), scale=2.0)
    assert moved == mh.Classifier(model.W, np.ones((2, 3, 5)), scale=2.0)
    assert model.scale == 1.0
    with pytest.raises(ValueError, match=r"U: expected shape \(H, q, d\)"):
        model.replace(U=np.ones((3, 3, 5)))


@pytest.mark.parametrize("scale", [1.0, -0.25])
@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_outputs_and_attention_follow_the_reference(dtype, kind, scale):
    X = tokens(dtype)
    query = external_query(dtype) if kind == "external" else QUERIES[kind]
    model = gaussian(dtype, query, scale)

    outputs, attention = model(X), model.attention(X)

    expected = mh.reference.outputs(model, X)
    weights = mh.reference.attention(model, X)
    assert outputs.dtype == attention.dtype == dtype
    assert outputs.shape == expected.shape == (n,)
    assert attention.shape == weights.shape == (n, H, model.U.shape[1], T)
    assert relative_error(outputs, expected) < TOLERANCE[model.dtype]
    assert relative_error(attention, weights) < TOLERANCE[model.dtype]


def test_a_query_of_the_call_or_the_data_overrides_that_of_the_model():
    X, Z = tokens(), external_query()
    own = gaussian(query=Z)
    other = gaussian(query=np.zeros_like(Z))
    data = mh.Dataset(X, np.ones(n), query=Z)

    np.testing.assert_array_equal(other(X, query=Z), own(X))
    np.testing.assert_array_equal(other(data), own(X))
    np.testing.assert_array_equal(other.attention(data), own.attention(X))
    assert not np.array_equal(other(X), own(X))


@pytest.mark.parametrize("length", [2, 3, 5, 11, 19])
def test_a_query_may_begin_where_the_tokens_do(length):
    X = np.random.default_rng(0).standard_normal((1, length, d))
    first = mh.Classifier.gaussian(H, length, d, std=0.5, seed=3, query=0)
    apart = X[:, :1].copy()
    for query in (None, X[:, :1]):
        np.testing.assert_array_equal(first(X, query=query), first(X, query=apart))
        np.testing.assert_array_equal(
            first.attention(X, query=query), first.attention(X, query=apart)
        )
        assert mh.value_and_grad(first, X, [1], query=query) == (
            mh.value_and_grad(first, X, [1], query=apart)
        )


def test_an_output_does_not_depend_on_the_batch():
    X = tokens(samples=41)
    model = gaussian()
    whole, attention = model(X), model.attention(X)
    for i in range(41):
        np.testing.assert_array_equal(model(X[i : i + 1]), whole[i : i + 1])
        np.testing.assert_array_equal(model.attention(X[i : i + 1]), attention[i : i + 1])


def test_no_samples_give_no_outputs():
    assert gaussian()(tokens(samples=0)).shape == (0,)
    assert gaussian().attention(tokens(samples=0)).shape == (0, H, T, T)


def test_zeros():
    model = mh.Classifier.zeros(H, T, d, dtype=np.float32, scale=2.0)
    assert (model.heads, model.dim, model.dtype) == (H, d, np.float32)
    assert model.U.shape == (H, T, d)
    assert model.scale == 2.0
    assert not model.W.any()
    assert not model.U.any()


@pytest.mark.parametrize(("query", "rows"), [(None, T), (0, 1), (-T, 1), (np.zeros((n, 4, d)), 4)])
def test_the_query_decides_the_rows_of_the_readout(query, rows):
    assert mh.Classifier.zeros(H, T, d, query=query).U.shape == (H, rows, d)


def test_gaussian_has_the_standard_deviation_asked_for():
    model = mh.Classifier.gaussian(70, 9, 50, std=3.0, seed=0)
    # 175000 and 31500 entries: the standard error of the deviation is std / sqrt(2 N) < 0.013.
    assert abs(model.W.std() - 3.0) < 0.06
    assert abs(model.U.std() - 3.0) < 0.06
    assert abs(np.corrcoef(model.W.ravel()[: model.U.size], model.U.ravel())[0, 1]) < 0.03


def test_gaussian_is_decided_by_its_seed():
    assert gaussian() == gaussian()
    assert gaussian() != mh.Classifier.gaussian(H, T, d, std=0.5, seed=4)
    rng = np.random.default_rng(3)
    assert mh.Classifier.gaussian(H, T, d, std=0.5, seed=rng) == gaussian()
    np.testing.assert_array_equal(gaussian(np.float32).W, gaussian().W.astype(np.float32))


def test_random_step_takes_query_and_scale():
    data = mh.Dataset(tokens(), np.array([1, -1]))
    model = mh.Classifier.random_step(data, H, seed=5, query=-1, scale=0.5)
    assert (model.query, model.scale, model.U.shape) == (-1, 0.5, (H, 1, d))


def test_a_model_cannot_change():
    W, U = np.ones((H, d, d)), np.ones((H, T, d))
    model = mh.Classifier(W, U)
    W[:], U[:] = 2.0, 2.0
    assert (model.W == 1).all()
    assert (model.U == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        model.W[0, 0, 0] = 3.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.W = W


def test_a_read_only_view_of_writeable_memory_is_copied():
    W = np.ones((H, d, d))
    view = W.view()
    view.flags.writeable = False
    model = mh.Classifier(view, np.ones((H, T, d)))
    W[:] = 2.0
    assert (model.W == 1).all()


def test_arrays_that_nobody_can_write_to_are_shared():
    model = gaussian(query=external_query())
    twin = dataclasses.replace(model, scale=2.0)
    assert twin.W is model.W
    assert twin.query is model.query
    assert twin.scale == 2.0


@pytest.mark.parametrize("query", [None, -1, np.zeros((n, 4, d))])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_are_equal_and_frozen(duplicate, query):
    model = gaussian(query=query, scale=0.5)
    twin = duplicate(model)
    assert twin is not model
    assert twin == model
    assert not twin.W.flags.writeable
    assert not twin.U.flags.writeable
    np.testing.assert_array_equal(twin(tokens()), model(tokens()))


def test_equality_is_by_value():
    model = gaussian()
    assert model == mh.Classifier(model.W.copy(), model.U.copy())
    assert model != dataclasses.replace(model, scale=2.0)
    assert model != dataclasses.replace(model, U=2.0 * model.U)
    assert mh.Classifier.zeros(H, 1, d) != mh.Classifier.zeros(H, 1, d, query=0)
    assert mh.Classifier.zeros(H, T, d) != mh.Classifier.zeros(H, T, d, dtype=np.float32)
    assert model != "model"
    with pytest.raises(TypeError, match="unhashable"):
        hash(model)


def test_repr_tells_shapes():
    assert repr(mh.Classifier.zeros(H, T, d, query=-1)) == (
        "Classifier(W=<float64 (7, 5, 5)>, U=<float64 (7, 1, 5)>, query=-1, scale=1.0)"
    )


def test_lists_of_python_numbers_adapt():
    X = tokens(np.float32)
    model = mh.Classifier([[[1, 0], [0, 1]]], [[[0.5, 2], [1, 1], [0, 3]]])
    assert model.dtype == np.float64
    assert model([[[1, 2], [3, 4], [5, 6]]]).shape == (1,)
    np.testing.assert_array_equal(gaussian(np.float32)(X.tolist()), gaussian(np.float32)(X))


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch_tensors_are_read_in_place(dtype):
    torch = pytest.importorskip("torch")
    from mhfast._arguments import checks

    X, model = tokens(dtype), gaussian(dtype)
    tensor = torch.from_numpy(X.copy())
    assert checks.real(tensor, "X", model.dtype).ctypes.data == tensor.data_ptr()
    np.testing.assert_array_equal(model(tensor), model(X))
    strided = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    np.testing.assert_array_equal(model(strided), model(X))


@pytest.mark.peers
def test_jax_arrays_are_read_in_place():
    jax = pytest.importorskip("jax")
    from mhfast._arguments import checks

    X, model = tokens(np.float32), gaussian(np.float32)
    array = jax.numpy.asarray(X)
    read = checks.real(array, "X", model.dtype)
    assert read.ctypes.data == array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(model(array), model(X))


def test_objects_with_dlpack_alone_are_read_in_place():
    class Exporter:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    from mhfast._arguments import checks

    X, model = tokens(), gaussian()
    assert np.shares_memory(checks.real(Exporter(X), "X", model.dtype), X)
    np.testing.assert_array_equal(model(Exporter(X)), model(X))


@pytest.mark.parametrize("scale", [1e300, -1e39, 1e-60])
def test_a_scale_beyond_the_dtype_is_refused(scale):
    W, U, V = np.ones((2, 3, 3)), np.ones((2, 4, 3)), np.ones((2, 3, 1))
    w, u, v = (array.astype(np.float32) for array in (W, U, V))
    for make in (lambda: mh.Classifier(w, u, scale=scale), lambda: mh.Layer(w, v, scale=scale)):
        with pytest.raises(ValueError, match=r"scale: expected 0 or a number between .* float32"):
            make()
    assert mh.Classifier(W, U, scale=scale).scale == scale
    assert mh.Classifier(w, u, scale=0.0).scale == 0.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", [*QUERIES, "prompt"])
def test_a_pooled_readout_is_the_mean_over_rows(kind, dtype):
    rng = np.random.default_rng(5)
    X, u = tokens(dtype), rng.standard_normal((H, d)).astype(dtype)
    W = rng.standard_normal((H, d, d)).astype(dtype)
    side = {"query": external_query(dtype) if kind == "external" else QUERIES.get(kind)}
    if kind == "prompt":
        side = {"prompt": rng.standard_normal((4, d)).astype(dtype)}
    model = mh.Classifier.pooled(W, u, T if kind == "self" else None, scale=0.5, **side)
    rows = model.attention(X).astype(float) @ X.astype(float)[:, None]  # (n, H, q, d)
    expected = np.einsum("nhd,hd->n", rows.mean(axis=2), u) / np.sqrt(H)
    assert relative_error(model(X), expected) < TOLERANCE[model.dtype]
    np.testing.assert_allclose(model.U.sum(axis=-2), u, rtol=10 * TOLERANCE[model.dtype])
    assert model.dtype == dtype


def test_a_pooled_readout_of_runs_and_what_it_refuses():
    W, u = np.zeros((H, d, d)), np.arange(2.0 * H * d).reshape(2, H, d)
    model = mh.Classifier.pooled(W, u, tokens=T, causal=True)
    assert model.runs == 2
    assert model.causal
    assert model[1] == mh.Classifier.pooled(W, u[1], tokens=T, causal=True)
    assert mh.Classifier.pooled(None, u[0], T).W is None
    for given, error, message in (
        ((W, u[0]), TypeError, "tokens: expected an integer"),
        ((W, u[0], 0), ValueError, "tokens: expected"),
        ((W, u[0, :2], T), ValueError, r"u: expected shape \(H, d\) = \(7, 5\), got \(2, 5\)"),
        ((W, u[0].astype(np.float32), T), TypeError, "u: expected"),
    ):
        with pytest.raises(error, match=message):
            mh.Classifier.pooled(*given)
