"""A `mhfast.Stack` of words: outputs, gradients and training of its embedding."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

import mhfast as mh

# No two axes of one length.
SAMPLES, TOKENS, DIM, WORDS, FIRST, SECOND, WIDE, OUT = 11, 5, 6, 9, 3, 2, 4, 8
RESIDUALS = (True, "concatenate", False, (True, False), ("concatenate", False))
LENGTHS = np.array([5, 0, 3, 1, 4, 5, 2, 5, 5, 3, 1])
TOLERANCE = {np.float64: 1e-11, np.float32: 1e-4}  # of the largest entry, two layers deep


def stack(residual=("concatenate", False), dtype=np.float64, **options):
    kinds = residual if isinstance(residual, tuple) else (residual,) * 2
    out = DIM if kinds[0] is True else WIDE
    given = DIM + WIDE if kinds[0] == "concatenate" else out
    common = {"std": 0.4, "dtype": dtype, **options}
    first = mh.Layer.gaussian(FIRST, DIM, out, seed=0, causal=True, **common)
    last = mh.Layer.gaussian(SECOND, given, given if kinds[1] is True else OUT, seed=1, **common)
    embedding = np.random.default_rng(2).standard_normal((WORDS, DIM)).astype(dtype)
    return mh.Stack([first, last], residual, embedding=embedding)


def words(n=SAMPLES, seed=0):
    """Words and a class of each of them, with one that is not there."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, WORDS - 1, (n, TOKENS))
    return ids, rng.integers(0, OUT, (n, TOKENS))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_outputs_are_those_of_the_rows(residual, lengths, dtype):
    model, (ids, _) = stack(residual, dtype), words()
    of_rows, X = model.replace(embedding=None), model.embedding[ids]
    options = {"lengths": lengths}
    for found, expected in zip(
        model.activations(ids, **options), of_rows.activations(X, **options), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=10 * TOLERANCE[dtype])
    for found, expected in zip(
        model.attention(ids, **options), of_rows.attention(X, **options), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=10 * TOLERANCE[dtype])
    data = mh.Dataset(mh.Tokens(ids, 1 + model.embedding), np.ones(SAMPLES), **options)
    assert (model(data) == model(ids, **options)).all()  # of tokens, the ids


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_are_those_of_the_reference(residual, loss, lengths, dtype):
    model, (ids, y) = stack(residual, dtype), words()
    y = y % model.out_dim
    if loss == "squared":
        y = np.random.default_rng(3).standard_normal((*y.shape, model.out_dim)).astype(dtype)
    weight = np.random.default_rng(4).random(SAMPLES).astype(dtype)
    options = {"loss": loss, "weight": weight, "lengths": lengths}
    value, g = mh.value_and_grad(model, ids, y, **options)
    exact, expected = mh.reference.stack_value_and_grad(model, ids, y, **options)
    assert value == pytest.approx(exact, rel=TOLERANCE[dtype])
    assert value == pytest.approx(model.loss(ids, y, **options), rel=1e-6)
    found = {f"{j}.{n}": a for j, part in enumerate(g.layers) for n, a in vars(part).items()}
    for name, array in expected.items():
        of_name = g.embedding if name == "embedding" else found[name]
        assert of_name.dtype == dtype
        atol = TOLERANCE[dtype] * abs(array).max()
        np.testing.assert_allclose(of_name, array, rtol=0, atol=atol)
    assert not g.embedding[WORDS - 1].any()  # the word that is not there


@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_agree_with_finite_differences(residual):
    model, (ids, _) = stack(residual), words()
    y = np.random.default_rng(3).standard_normal((SAMPLES, TOKENS, model.out_dim))
    _, g = mh.value_and_grad(model, ids, y, loss="squared", wrt="embedding")
    assert all(array is None for part in g.layers for array in vars(part).values())
    along, step = (
        mh.Gradients(
            layers=g.layers, embedding=np.random.default_rng(5).standard_normal((WORDS, DIM))
        ),
        1e-5,
    )
    ahead = (model + step * along).loss(ids, y, loss="squared")
    behind = (model - step * along).loss(ids, y, loss="squared")
    # The third derivative times step², and rounding over step.
    assert (ahead - behind) / (2 * step) == pytest.approx(mh.dot(g, along), rel=1e-5)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_backward_is_the_gradient_of_a_product_with_the_outputs(residual, lengths):
    model, (ids, _) = stack(residual), words()
    cotangent = np.random.default_rng(3).standard_normal((SAMPLES, TOKENS, model.out_dim))
    found = mh.backward(model, ids, cotangent, lengths=lengths, wrt=("embedding", "1.W"))
    # Σ cotangent · outputs is a loss: half of the squared one has the derivative F - y.
    targets = model(ids, lengths=lengths) - 0.5 * SAMPLES * cotangent
    _, expected = mh.reference.stack_value_and_grad(
        model, ids, targets, loss="squared", lengths=lengths
    )
    np.testing.assert_allclose(found.embedding, expected["embedding"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.layers[1].W, expected["1.W"], rtol=0, atol=1e-10)
    assert found.layers[0].W is None


def test_a_layer_alone_has_gradients_by_its_inputs():
    layer = mh.Layer.gaussian(FIRST, DIM, OUT, std=0.4, seed=0)
    ids, y = words()
    E = stack().embedding
    for model, X, name in (
        (mh.Stack([layer], False), E[ids], "X"),
        (mh.Stack([layer], False, embedding=E), ids, "embedding"),
    ):
        _, g = mh.value_and_grad(model, X, y, loss="cross_entropy", wrt=name)
        _, expected = mh.reference.stack_value_and_grad(model, X, y, loss="cross_entropy")
        np.testing.assert_allclose(getattr(g, name), expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", [mh.GradientDescent(0.3), mh.Momentum(0.1), mh.Adam(0.02)])
@pytest.mark.parametrize("batch", [None, 4])
def test_training_resumes_and_is_saved(tmp_path, optimizer, batch):
    model, (ids, y) = stack(), words()
    given = {
        "optimizer": optimizer, "loss": "cross_entropy", "batch": batch,
        "record": {"loss": 1, "embedding": 3, "test_accuracy": 4}, "test": words(7, seed=1),
    }  # fmt: skip
    whole = mh.train(model, ids, y, steps=11, **given)
    mh.train(model, ids, y, steps=5, **given).save(tmp_path / "run.npz")
    half = mh.Run.load(tmp_path / "run.npz")
    assert (half.model.embedding != model.embedding).any()
    assert mh.train(half, ids, y, until=11, test=given["test"]) == whole
    assert len(whole.segments) == 1  # the data are the words, whatever their rows are
    assert whole.history["embedding"].shape == (5, WORDS, DIM)
    assert (whole.history["embedding"][0] == model.embedding).all()
    # The word that is not there has no gradient.
    assert (whole.model.embedding[WORDS - 1] == model.embedding[WORDS - 1]).all()
    tokens = mh.Dataset(mh.Tokens(ids, 2 + model.embedding), y)
    assert mh.train(model, tokens, steps=11, **given) == whole


def test_norms_and_thresholds_count_the_embedding():
    model, (ids, y) = stack(), words()
    run = mh.train(
        model, ids, y, steps=3, optimizer=mh.GradientDescent(0.3), loss="cross_entropy",
        record=("grad_norm", "param_norm", "distance"),
    )  # fmt: skip
    _, g = mh.value_and_grad(run.model, ids, y, loss="cross_entropy")
    assert run.history["grad_norm"][-1] == pytest.approx(mh.norm(g), rel=1e-12)
    of_layers = mh.norm(mh.Gradients(layers=g.layers))
    assert mh.norm(g) ** 2 == pytest.approx(of_layers**2 + (g.embedding**2).sum(), rel=1e-12)
    before, after = model.parameters, run.model.parameters
    moved = sum(((after[name] - array) ** 2).sum() for name, array in before.items())
    assert run.history["distance"][-1] == pytest.approx(moved**0.5, rel=1e-12)
    size = sum((array**2).sum() for array in after.values())
    assert run.history["param_norm"][-1] == pytest.approx(size**0.5, rel=1e-12)
    with pytest.warns(RuntimeWarning, match="finite"):
        mh.train(
            model.replace(embedding=model.embedding * np.inf), ids, y, steps=1,
            optimizer=mh.GradientDescent(0.3), loss="cross_entropy",
        )  # fmt: skip


def test_settings_and_constraints_of_the_embedding():
    model, (ids, y) = stack(), words()
    kept = np.arange(WORDS) % 2 == 0
    trained = np.broadcast_to(~kept[:, None], (WORDS, DIM))
    run = mh.train(
        model, ids, y, steps=4, loss="cross_entropy", constraints={"embedding": trained},
        optimizer=mh.GradientDescent({"W": 0.0, "V": 0.0, "embedding": 0.3}),
    )  # fmt: skip
    assert (run.model.embedding[kept] == model.embedding[kept]).all()
    assert (run.model.embedding[1] != model.embedding[1]).all()
    assert run.model.layers == model.layers
    one = mh.train(
        model, ids, y, steps=1, loss="cross_entropy", wrt="embedding",
        optimizer=mh.GradientDescent(0.3, l2=0.1),
    )  # fmt: skip
    _, g = mh.value_and_grad(model, ids, y, loss="cross_entropy", wrt="embedding")
    expected = model.embedding - 0.3 * (g.embedding + 0.1 * model.embedding)
    np.testing.assert_allclose(one.model.embedding, expected, rtol=0, atol=1e-13)


def test_samples_of_a_stream_are_words():
    model = stack().replace(embedding=np.random.default_rng(0).standard_normal((WORDS, DIM)))

    def draw(n, seed):
        ids, y = words(n, seed)
        return mh.Dataset(mh.Tokens(ids, np.eye(WORDS)), y)

    ids, y = words()
    run = mh.train(
        model, ids, y, steps=3, optimizer=mh.GradientDescent(0.3), loss="cross_entropy",
        batch=4, stream=draw, wrt="embedding",
    )  # fmt: skip
    assert (run.model.embedding != model.embedding).any()


def test_any_number_of_threads_gives_the_same_bits():
    model, (ids, y) = stack(), words(200)
    runs = [
        mh.train(
            model, ids, y, steps=4, optimizer=mh.Adam(0.02), loss="cross_entropy", num_threads=k
        )
        for k in (1, 2, 4)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_a_stack_of_words_is_a_value():
    model = stack()
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), replace(model)):
        assert same == model
    assert model != model.replace(embedding=model.embedding + 1)
    assert list(model.parameters)[-1] == "embedding"
    assert (model.words, model.replace(embedding=None).words) == (WORDS, None)
    assert not model.embedding.flags.writeable
    assert repr(model).endswith("embedding=<float64 (9, 6)>)")


def test_what_does_not_fit_is_refused():
    model, (ids, y) = stack(), words()
    with pytest.raises(
        TypeError, match="embedding: expected dtype float64, that of the layers, got"
    ):
        model.replace(embedding=model.embedding.astype(np.float32))
    with pytest.raises(ValueError, match=r"embedding: expected shape \(V, d\) = \(V, 6\)"):
        model.replace(embedding=np.zeros((WORDS, DIM + 1)))
    with pytest.raises(ValueError, match="embedding: expected at least one word"):
        model.replace(embedding=np.zeros((0, DIM)))
    with pytest.raises(TypeError, match="X: expected integers, got dtype float64"):
        model(model.embedding[ids])
    with pytest.raises(ValueError, match=r"X: expected integers in \[0, 8\], got 9"):
        model(ids + WORDS - ids.max())
    with pytest.raises(ValueError, match="X: expected the 9 words of the embedding, got 4"):
        model(mh.Tokens(ids % 4, np.eye(4)))
    with pytest.raises(ValueError, match=r"X: expected shape \(n, T\)"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"wrt: expected names from .*embedding, .*got 'X'"):
        mh.value_and_grad(model, ids, y, loss="cross_entropy", wrt="X")
    with pytest.raises(ValueError, match=r"wrt: expected names from .*got 'embedding'"):
        mh.train(
            model.replace(embedding=None), model.embedding[ids], y, steps=1, wrt="embedding",
            optimizer=mh.GradientDescent(0.1), loss="cross_entropy",
        )  # fmt: skip
