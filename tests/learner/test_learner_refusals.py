"""What no layer explains is never called learnt; what cannot be read is refused in a sentence."""

import numpy as np
import pytest
from learner_instances import data, distance

import mhfast as mh
from mhfast.learner import as_examples

pytestmark = pytest.mark.verdict

SMALL = (4000, 2, 8, 2)


@pytest.fixture(scope="module")
def arrays():
    source = data(*SMALL)
    return source.X, source.y


@pytest.mark.parametrize("labels", ["normal", "permuted", "signs"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.slow
def test_labels_of_no_layer_are_not_learnt(arrays, labels, heads):
    X, Y = (array[:1000] for array in arrays)
    rng = np.random.default_rng(0)
    if labels == "permuted":
        Y = Y[rng.permutation(len(Y))]
    else:
        Y = rng.standard_normal(Y.shape)
        Y = np.sign(Y) if labels == "signs" else Y
    result = mh.learn_layer(X, Y, heads)
    assert not result.learnt
    assert result.held_out > 0.5
    assert result.verdict.startswith("not learnt: ")
    assert "held-out residual" in result.verdict


def test_labels_of_another_function_are_not_learnt(arrays):
    """Attention of squared tokens comes near, and is none of the tokens."""
    X, _ = arrays
    X = X + 0.5 * np.random.default_rng(0).standard_normal(X.shape)
    layer = mh.Layer.gaussian(1, 8, 5, std=0.3, seed=0)
    result = mh.learn_layer(X, layer(X + 0.1 * X**2), 1)
    assert not result.learnt
    assert "held-out residual" in result.verdict


@pytest.mark.parametrize("noise", [1.0, 10.0])
def test_noise_as_large_as_the_labels_certifies_nothing(noise):
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((600, 3, 4)), rng.standard_normal((600, 3, 5))
    result = mh.learn_layer(X, Y, 1, noise=noise)
    assert not result.learnt, result.verdict
    assert "outputs beyond noise" in result.verdict


def test_labels_that_are_zero_where_they_are_held_out(arrays):
    X, Y = arrays
    Y = Y.copy()
    Y[-len(Y) // 10 :] = 0.0
    result = mh.learn_layer(X, Y, 2)
    assert not result.learnt
    assert result.held_out > 1e-8


@pytest.mark.parametrize("tokens", ["constant", "normal"])
def test_constant_labels(tokens):
    X = np.ones((300, 3, 4))
    if tokens == "normal":
        X = np.random.default_rng(0).standard_normal(X.shape)
    result = mh.learn_layer(X, np.ones((300, 3, 2)), 1)
    assert result.verdict == "not learnt: the training outputs are the same for every query"
    assert result.layer is result.held_out is None
    assert result.phases == result.certificates == ()


def test_a_seed_by_position_is_deprecated():
    X, Y = np.random.default_rng(0).standard_normal((2, 300, 3, 4))
    examples = as_examples(X, Y)
    with pytest.warns(DeprecationWarning, match="split: seed is given by keyword, seed=..."):
        _, held_out = examples.split(30, 5)
    assert np.array_equal(held_out.index, examples.split(30, seed=5)[1].index)


def test_labels_that_vanish_where_they_are_held_out():
    X, Y = np.random.default_rng(0).standard_normal((2, 300, 3, 4))
    Y[as_examples(X, Y).split(30, seed=5)[1].index] = 0.0
    result = mh.learn_layer(X, Y, 1, seed=5)
    assert result.verdict == "not learnt: the held-out outputs are all zero"


def honest(source, heads, **settings):
    """Whether a layer that is called learnt predicts new examples."""
    result = mh.learn_layer(source, heads=heads, **settings)
    if not result.learnt:
        assert result.verdict.startswith("not learnt: ")
        assert any(not c.holds for c in result.certificates)
        return True
    fresh = source.sample(2000, seed=99)
    return distance(result.layer(fresh.X), fresh.y) < 1e-8


@pytest.mark.parametrize(("heads", "dim"), [(2, 6), pytest.param(3, 10, marks=pytest.mark.slow)])
def test_the_hard_instance_is_only_learnt_if_it_truly_is(heads, dim):
    assert honest(mh.data.parity_layer(10_000, dim, heads, 1.0, seed=0), heads)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dim"), [(2, 6), (3, 10), (4, 10)])
@pytest.mark.parametrize("beta", [1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_hard_instances_are_only_learnt_if_they_truly_are(heads, dim, beta, seed):
    assert honest(mh.data.parity_layer(30_000, dim, heads, beta, seed=seed), heads)


@pytest.mark.parametrize("seed", range(3))
def test_too_few_inputs_are_told_honestly(seed):
    """Of (2, 5, 2) there are 1024 inputs, too few for rows that certify much."""
    assert honest(mh.data.boolean_layer(3000, 2, 5, 2, seed=seed), 2)


# Errors.


@pytest.mark.parametrize(("heads", "dim", "tokens", "out_dim"), [(2, 8, 2, 7), (5, 4, 3, 6)])
def test_too_few_examples_are_refused_by_number(heads, dim, tokens, out_dim):
    source = data(1000, tokens, dim, heads, out_dim=out_dim)
    sentence = (
        rf"X: expected at least (\d+) examples for {heads} heads of d = {dim} "
        rf"and outputs of rank {out_dim}, got 20$"
    )
    with pytest.raises(ValueError, match=sentence) as caught:
        mh.learn_layer(source.X[:20], source.y[:20], heads)
    least = int(str(caught.value).split()[4])
    with pytest.raises(ValueError, match=rf"expected at least {least} .* got {least - 2}$"):
        mh.learn_layer(source.X[: least - 2], source.y[: least - 2], heads)
    # That many are enough to try.
    result = mh.learn_layer(source.X[:least], source.y[:least], heads)
    assert result.phases


@pytest.mark.parametrize("n", [1, 2, 19, 20, 21])
@pytest.mark.parametrize("heads", [2, None])
def test_the_number_of_examples_is_told_right(n, heads):
    X, Y = np.random.default_rng(0).standard_normal((2, n, 3, 8))
    with pytest.raises(ValueError, match=rf"X: expected at least \d+ examples .*, got {n}$"):
        mh.learn_layer(X, Y, heads)


def entry(array, value):
    array = array.copy()
    array[-1, 0, 2] = value
    return array


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda X, Y: (X[0], Y), ValueError, r"X: expected shape \(n, T, d\), got \(2, 8\)"),
        (lambda X, Y: (X, Y[:-1]), ValueError, r"Y: expected shape \(n, T, p\) = \(4000, 2, p\)"),
        (lambda X, Y: (X, Y[:, :1]), ValueError, r"Y: expected shape \(n, T, p\) = \(4000, 2, p\)"),
        (lambda X, Y: (X, Y[..., 0]), ValueError, r"Y: expected shape .* got \(4000, 2\)"),
        (lambda X, Y: (X[:0], Y[:0]), ValueError, "expected no empty axis"),
        (lambda X, Y: (X, Y[..., :0]), ValueError, "expected no empty axis"),
        (lambda X, Y: (X, 0.0 * Y), ValueError, "Y: expected outputs of a layer, got only zeros"),
        (lambda X, Y: (entry(X, np.nan), Y), ValueError, "X: expected finite numbers"),
        (lambda X, Y: (entry(X, -np.inf), Y), ValueError, "X: expected finite numbers"),
        (lambda X, Y: (X, entry(Y, np.nan)), ValueError, "Y: expected finite numbers"),
        (lambda X, Y: (X, entry(Y, np.inf)), ValueError, "Y: expected finite numbers"),
        (lambda X, Y: (X.astype(int), Y), TypeError, "X: expected dtype float32 or float64"),
        (lambda X, Y: (X, Y.astype(complex)), TypeError, "Y: expected dtype float32 or float64"),
        (lambda X, Y: (X, Y.astype("f4")), TypeError, "Y: expected dtype float64, that of X"),
        (lambda X, _: (X, None), TypeError, r"Y: expected an array \(n, T, p\) with the array"),
        (lambda X, Y: (mh.Dataset(X, Y), Y), ValueError, "Y: expected None with a Dataset"),
        (lambda X, Y: (np.ma.array(X, mask=X > 0), Y), TypeError, "X: expected .* without a mask"),
        (lambda X, Y: (X, np.ma.array(Y, mask=Y > 0)), TypeError, "Y: expected .* without a mask"),
        (lambda _, Y: ("tokens", Y), TypeError, "X: expected an array of numbers"),
    ],
)
def test_errors_name_the_array(arrays, change, error, sentence):
    with pytest.raises(error, match=sentence):
        mh.learn_layer(*change(*arrays), 2)


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"heads": 0}, ValueError, "heads: expected an integer of at least 1, got 0"),
        ({"heads": -3}, ValueError, "heads: expected an integer of at least 1, got -3"),
        ({"heads": 2.0}, TypeError, "heads: expected an integer, got float"),
        ({"heads": True}, TypeError, "heads: expected an integer, got bool"),
        ({"heads": 65}, ValueError, "heads: expected at most d² = 64, got 65"),
        ({"noise": -0.1}, ValueError, "noise: expected a standard deviation of at least 0"),
        ({"noise": np.nan}, ValueError, "noise: expected a finite number"),
        ({"noise": "loud"}, TypeError, "noise: expected a real number"),
        ({"seed": 1.5}, TypeError, "seed: expected an integer"),
        ({"seed": -1}, ValueError, "seed: expected an integer of at least 0, got -1"),
        ({"num_threads": 0}, ValueError, "num_threads: expected an integer of at least 1"),
        ({"num_threads": "two"}, TypeError, "num_threads: expected an integer"),
    ],
)
def test_errors_name_the_setting(arrays, settings, error, sentence):
    with pytest.raises(error, match=sentence):
        mh.learn_layer(*arrays, **settings)


@pytest.mark.parametrize(
    "extra",
    [
        {"lengths": np.full(4000, 2)},
        {"weight": np.ones(4000)},
        {"query": np.ones((4000, 2, 8))},
    ],
    ids=str,
)
def test_a_dataset_must_be_of_plain_self_attention(arrays, extra):
    (name,) = extra
    with pytest.raises(ValueError, match=f"X: expected a Dataset without {name}"):
        mh.learn_layer(mh.Dataset(*arrays, **extra), heads=2)


def test_a_dataset_must_be_of_layers_and_of_one_run(arrays):
    X, _ = arrays
    with pytest.raises(ValueError, match=r"Y: expected shape \(n, T, p\)"):
        mh.learn_layer(mh.Dataset(X, np.ones(len(X))), heads=2)
    with pytest.raises(ValueError, match=r"X: expected shape \(n, T, d\), got \(3, 500, 2, 8\)"):
        mh.learn_layer(mh.data.boolean_layer(500, 2, 8, 2, seed=[0, 1, 2]), heads=2)


def test_numbers_as_tokens_and_heads_unknown():
    """One number a token leaves one key-query number: there is no spectrum to look at."""
    source = mh.data.boolean_layer(2000, 3, 1, 1, inputs="gaussian", seed=0)
    result = mh.learn_layer(source)
    assert result.learnt
    assert result.heads == 1


def test_many_heads_need_outputs_for_each_of_their_parameters():
    # H (d d + d p) numbers, p of a token: 9 (9 + 6) / 2 = 68 tokens or 23 examples, 26 with a tenth
    # held out; 4 d d = 36 facts would need less.
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((20, 3, 3)), rng.standard_normal((20, 3, 2))
    with pytest.raises(ValueError, match="expected at least 26 examples for 9 heads"):
        mh.learn_layer(X, Y, heads=9)
