"""`mhfast.Stack`: outputs, activations and attention, the value that it is, what it refuses."""

import copy
import pickle

import numpy as np
import pytest

import mhfast as mh

# No two axes of one length: n, T, d, H of the two layers, p of the two.
SAMPLES, TOKENS, DIM, FIRST, SECOND, WIDE, OUT = 7, 5, 6, 3, 2, 4, 8


def layers(residual, dtype=np.float64, **options):
    dims = {True: (DIM, DIM), "concatenate": (WIDE, OUT), False: (WIDE, OUT)}[residual]
    given = DIM + WIDE if residual == "concatenate" else dims[0]
    first = mh.Layer.gaussian(FIRST, DIM, dims[0], std=0.4, seed=0, dtype=dtype, **options)
    second = mh.Layer.gaussian(SECOND, given, dims[1], std=0.4, seed=1, dtype=dtype, **options)
    return [first, second]


def tokens(dtype=np.float64):
    return np.random.default_rng(0).standard_normal((SAMPLES, TOKENS, DIM)).astype(dtype)


LENGTHS = np.array([5, 0, 3, 1, 4, 5, 2])
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}  # rounding of two layers, of the largest entry


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("residual", [True, "concatenate", False])
def test_outputs_and_attention_are_those_of_the_reference(residual, lengths, causal, dtype):
    stack = mh.Stack(layers(residual, dtype, causal=causal), residual=residual)
    X = tokens(dtype)
    states = stack.activations(X, lengths=lengths)
    expected = mh.reference.stack_outputs(stack, X, lengths=lengths)
    assert [x.shape for x in states] == [x.shape for x in expected]
    for x, y in zip(states, expected, strict=True):
        assert x.dtype == dtype
        assert abs(x - y).max() < TOLERANCE[dtype] * abs(y).max()
    np.testing.assert_array_equal(stack(X, lengths=lengths), states[-1])
    for weights, layer, x in zip(
        stack.attention(X, lengths=lengths), stack.layers, expected, strict=False
    ):
        exact = mh.reference.attention(layer, x, lengths=lengths)
        assert weights.shape == (SAMPLES, layer.heads, TOKENS, TOKENS)
        assert abs(weights - exact).max() < 10 * TOLERANCE[dtype]
    assert (stack.dim, stack.out_dim, stack.depth) == (DIM, states[-1].shape[-1], 2)


def test_a_residual_for_each_layer():
    first = mh.Layer.gaussian(FIRST, DIM, DIM, std=0.4, seed=0)
    second = mh.Layer.gaussian(SECOND, DIM, WIDE, std=0.4, seed=1)
    third = mh.Layer.gaussian(1, DIM + WIDE, OUT, std=0.4, seed=2, query=-1)
    stack = mh.Stack([first, second, third], residual=(True, "concatenate", False))
    X = tokens()
    x = X + first(X)
    x = np.concatenate([x, second(x)], axis=-1)
    np.testing.assert_array_equal(stack(X), third(x))
    assert stack(X).shape == (SAMPLES, 1, OUT)
    assert [a.shape[2] for a in stack.attention(X)] == [TOKENS, TOKENS, 1]


def test_what_is_beyond_the_lengths_has_no_influence():
    stack = mh.Stack(layers(True), residual=True)
    X, noise = tokens(), tokens()
    noise[np.arange(TOKENS) >= LENGTHS[:, None]] = np.nan
    expected = stack(X, lengths=LENGTHS)
    np.testing.assert_array_equal(stack(noise, lengths=LENGTHS), expected)
    assert not expected[np.arange(TOKENS) >= LENGTHS[:, None]].any()


def test_a_sample_does_not_depend_on_the_others():
    stack = mh.Stack(layers("concatenate"), residual="concatenate")
    X = tokens()
    np.testing.assert_array_equal(stack(X[2:3])[0], stack(X)[2])
    X[4, 1, 0] = np.nan
    outputs = stack(X)
    assert np.isnan(outputs[4]).any()
    assert np.isfinite(np.delete(outputs, 4, axis=0)).all()


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_are_equal(duplicate):
    stack = mh.Stack(layers("concatenate"), residual=("concatenate", False))
    twin = duplicate(stack)
    assert twin == stack
    assert twin is not stack
    assert twin != stack.replace(residual="concatenate")
    assert twin != stack.replace(layers=[stack.layers[0], stack.layers[1].replace(scale=2.0)])
    np.testing.assert_array_equal(twin(tokens()), stack(tokens()))


def test_parameters_are_named_by_layer_and_cannot_change():
    first = mh.Layer.gaussian(FIRST, DIM, DIM, std=0.4, seed=0, rank=2)
    stack = mh.Stack([first, mh.Layer.zeros(SECOND, DIM, DIM)])
    assert list(stack.parameters) == ["0.Q", "0.K", "0.V", "1.W", "1.V"]
    assert stack.parameters["0.Q"] is first.Q
    with pytest.raises(TypeError):
        stack.parameters["0.V"] = first.V
    with pytest.raises(AttributeError):
        stack.residual = False


def test_repr_shows_what_it_is_made_of():
    stack = mh.Stack([mh.Layer.zeros(1, 2, 2)] * 2, residual=False)
    layer = "Layer(W=<float64 (1, 2, 2)>, V=<float64 (1, 2, 2)>, scale=1.0)"
    assert repr(stack) == f"Stack(layers=[{layer}, {layer}], residual=False)"


def test_what_does_not_fit_is_refused():
    layer = mh.Layer.zeros(FIRST, DIM, DIM)

    def refused(kind, message, *arguments, **options):
        with pytest.raises(kind, match=message):
            mh.Stack(*arguments, **options)

    refused(TypeError, "layers: expected a sequence of Layer, got Layer", layer)
    refused(ValueError, "layers: expected at least one, got none", [])
    classifier = mh.Classifier.zeros(FIRST, TOKENS, DIM)
    refused(TypeError, r"layers\[1\]: expected a Layer, got Classifier", [layer, classifier])
    single = mh.Layer.zeros(FIRST, DIM, DIM, dtype=np.float32)
    refused(TypeError, r"layers\[1\]: expected dtype float64.*got float32", [layer, single])
    runs = mh.Layer.zeros(FIRST, DIM, DIM, runs=4)
    refused(ValueError, r"layers\[0\]: expected a layer without a run axis, got R = 4", [runs])
    prompt = mh.Layer.zeros(FIRST, DIM, DIM, prompt_rows=2)
    refused(ValueError, r"layers\[0\]: expected self-attention.*got a prompt", [prompt])
    external = layer.replace(query=np.ones((SAMPLES, 1, DIM)))
    refused(ValueError, r"layers\[0\]: .*got an external query", [external])
    last = layer.replace(query=-1)
    refused(ValueError, r"layers\[1\]: expected query None but for a last", [layer, last])
    refused(ValueError, r"layers\[0\]: expected query None", [last, layer], residual=False)
    other = mh.Layer.zeros(FIRST, WIDE, WIDE)
    refused(ValueError, r"layers\[1\]: expected dimension d = 6.*got 4", [layer, other])
    wide = mh.Layer.zeros(FIRST, DIM, WIDE)
    refused(ValueError, r"layers\[0\]: expected p = d = 6.*got p = 4", [wide])
    refused(ValueError, "residual: expected True, False or 'concatenate', got 'add'",
            [layer], residual="add")  # fmt: skip
    refused(TypeError, "residual: expected .*, got int", [layer], residual=1)
    refused(ValueError, "residual: expected one for each of the 1 layers, got 2",
            [layer], residual=(True, False))  # fmt: skip

    stack = mh.Stack([layer, layer])
    with pytest.raises(ValueError, match=r"X: expected shape \(n, T, d\) = \(n, T, 6\), got"):
        stack(np.ones((SAMPLES, TOKENS, WIDE)))
    with pytest.raises(TypeError, match=r"X: expected"):
        stack(tokens(np.float32))
    with pytest.raises(ValueError, match="X: expected at least one token"):
        stack(np.ones((SAMPLES, 0, DIM)))
    data = mh.Dataset(tokens(), np.ones(SAMPLES), query=np.ones((SAMPLES, 2, DIM)))
    with pytest.raises(ValueError, match="query: expected None, since a Stack is self-attention"):
        stack(data)
    with pytest.raises(TypeError, match="y: expected labels beside the array X, got None"):
        stack.loss(tokens())


def test_what_only_single_models_have_is_refused_by_name():
    stack, X = mh.Stack([mh.Layer.zeros(FIRST, DIM, DIM)] * 2), tokens()
    data = mh.Dataset(X, np.zeros((SAMPLES, TOKENS, DIM)))
    for call in (
        lambda: mh.hvp(stack, data, tangent=stack, loss="squared"),
        lambda: mh.explain(stack, data),
        lambda: mh.stack([stack, stack]),
        lambda: mh.theory.ntk(stack, X),
        lambda: mh.theory.hessian_extremes(stack, data, loss="squared"),
        lambda: mh.theory.ntk_margin(stack, data),
    ):
        with pytest.raises(TypeError, match=r"expected a .*, got (a )?Stack"):
            call()
