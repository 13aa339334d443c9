"""`Tokens`: the same results as the array of tokens, whatever looks them up."""

import pickle

import mpmath
import numpy as np
import pytest
from instances import TOLERANCE, case, exact_gradients, relative, to_float
from lists import LOSSES, targets
from trainings import OPTIMIZERS, draw

import mhfast as mh
from mhfast import _core
from mhfast._arguments.lists import ROW_MAPS
from mhfast.models import problem as arguments
from mhfast.models.problem import CoreWords

pytestmark = pytest.mark.usefixtures("use_words")

WORDS = 5
SIDES = {
    "tokens": {},
    "first": {"query": 0},
    "last": {"query": -1},
    "prompt": {"prompt": True},
    "causal": {"causal": True},
    "lengths": {"lengths": True},
    "causal, lengths": {"causal": True, "lengths": True},
}


def of_words(X, runs=(), seed=1):
    """Tokens whose words are rows of X (n, T, d) or (R, n, T, d); `runs` of "ids", "embedding"."""
    rng = np.random.default_rng(seed)
    *lead, n, T, d = X.shape
    ids = rng.integers(WORDS, size=(*(lead if "ids" in runs or not runs else ()), n, T))
    rows = X.reshape(*lead, n * T, d)
    embedding = rows if "embedding" in runs or not lead else rows[0]
    return mh.Tokens(ids, embedding[..., :WORDS, :])


def looks_up(model, X, **options):
    """Whether the core gets words."""
    seen = arguments.problem(model, X, words=True, **options)
    return isinstance(seen.data[0], CoreWords)


def assert_close(a, b, tolerance):
    """Up to a tolerance relative to the largest entry; of one word some gradients are zero."""
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def weighs(model, X):
    """Whether the core looks up weights, so that equal words are merged."""
    itself = model.query is None and model.prompt is None
    small = X.words <= 2 * X.shape[-2] and X.is_finite
    return itself and small and "U" in model.parameters and model._core.row_map_name == "softmax"


def assert_outputs_alike(model, X, outputs, expected):
    """Of looked up logits the same bits; of weights up to what docs/dictionaries.md states."""
    if isinstance(model, mh.Layer):
        tolerance = TOLERANCE[model.dtype] * np.abs(expected).max()
        np.testing.assert_allclose(outputs, expected, rtol=1e-7, atol=tolerance)
    elif not weighs(model, X):
        np.testing.assert_array_equal(outputs, expected)
    else:
        C = np.einsum("...vd,...hqd->...hqv", X.embedding, model.U, dtype=np.float64)
        largest = np.abs(C).max(axis=-1).sum(axis=(-2, -1)) / np.sqrt(model.heads)
        limit = 8 * np.finfo(model.dtype).eps * largest
        assert (np.abs(outputs - expected) <= limit[..., None]).all()


def check_alike(drawn, X, looked_up=True):
    """Outputs, attention, losses and gradients of the case with words X are those of the array."""
    model, dense, y = drawn.model, np.asarray(X), drawn.y
    seen, options = drawn.seen(), drawn.options
    assert looks_up(model, X, **seen) == looked_up
    tolerance = TOLERANCE[model.dtype]
    outputs, expected = model(X, **seen), model(dense, **seen)
    assert_outputs_alike(model, X, outputs, expected)
    np.testing.assert_array_equal(model.attention(X, **seen), model.attention(dense, **seen))
    value, g = mh.value_and_grad(model, X, y, **options)
    of_dense, expected_g = mh.value_and_grad(model, dense, y, **options)
    np.testing.assert_allclose(value, of_dense, rtol=tolerance)
    for name in model.parameters:
        assert_close(getattr(g, name), getattr(expected_g, name), 10 * tolerance)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_every_query_side(kind, side, dtype):
    loss = "logistic" if kind is mh.Classifier else "squared"
    drawn = case(kind, loss=loss, dtype=dtype, scale=0.7, **SIDES[side])
    check_alike(drawn, of_words(drawn.X))


@pytest.mark.parametrize("attention", [name for name in ROW_MAPS if name != "hardmax"])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_every_row_map(kind, attention):
    drawn = case(kind, loss="squared", attention=attention, lengths=True)
    check_alike(drawn, of_words(drawn.X))


@pytest.mark.parametrize(
    ("kind", "loss"), [(kind, loss) for kind, losses in LOSSES.items() for loss in losses], ids=str
)
def test_every_loss(kind, loss):
    drawn = case(kind, loss=loss, weight="samples")
    check_alike(drawn, of_words(drawn.X))


@pytest.mark.parametrize("factors", ["low rank", "tied"])
@pytest.mark.parametrize("prompt", [False, True])
def test_factors(factors, prompt):
    drawn = case(factors=factors, prompt=prompt)
    check_alike(drawn, of_words(drawn.X))


@pytest.mark.parametrize("runs", [("ids",), ("embedding",), ("ids", "embedding")])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_runs(kind, runs):
    drawn = case(kind, loss="squared", runs=("X", "W", "y"), lengths=True)
    X = of_words(drawn.X, runs)
    assert X.shape == drawn.X.shape
    check_alike(drawn, X)
    last = X[-1]
    np.testing.assert_array_equal(np.asarray(last), np.asarray(X)[-1])


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
@pytest.mark.parametrize(
    ("n", "T", "d", "V"),
    # One word, words and rows around whole registers and around what permutations are used for.
    [
        (9, 2, 4, 1),
        (70, 5, 6, 3),
        (40, 17, 9, 31),
        (60, 33, 8, 65),
        (90, 70, 5, 64),
        (70, 31, 7, 140),
    ],
)
def test_every_way_to_look_up(use_isa, isa, dtype, kind, n, T, d, V):
    use_isa(isa)
    rng = np.random.default_rng(V)
    X = mh.Tokens(rng.integers(V, size=(n, T)), rng.standard_normal((V, d)).astype(dtype))
    model, _ = draw(kind, "dense", dtype, n, T, d, 3)
    loss = "logistic" if kind is mh.Classifier else "squared"
    y = targets(loss, model(X).shape, rng, dtype)
    assert looks_up(model, X)
    _, g = mh.value_and_grad(model, X, y, loss=loss)
    _, expected = mh.value_and_grad(model, np.asarray(X), y, loss=loss)
    for name in model.parameters:
        # Sums of n T terms in another order.
        assert_close(getattr(g, name), getattr(expected, name), 20 * TOLERANCE[model.dtype])
    assert_outputs_alike(model, X, model(X), model(np.asarray(X)))


@pytest.mark.parametrize("gap", [1.0, 30.0, 400.0, 700.0])
def test_gradients_keep_their_accuracy_in_saturation(gap):
    """Against 60 digits; 1e-11 is what the gradients of arrays of tokens are promised to keep."""
    rng = np.random.default_rng(5)
    n, T, d, H, V = 7, 4, 3, 2, 5
    X = mh.Tokens(rng.integers(V, size=(n, T)), rng.standard_normal((V, d)))
    W = rng.standard_normal((H, d, d))
    dense = np.asarray(X)
    logits = np.einsum("nti,hij,nsj->nhts", dense, W, dense)
    ordered = np.sort(logits, axis=-1)
    W *= gap / np.median(ordered[..., -1] - ordered[..., 0])
    model = mh.Classifier(W, rng.standard_normal((H, T, d)))
    y = np.where(rng.random(n) > 0.5, 1.0, -1.0)
    assert looks_up(model, X)
    _, g = mh.value_and_grad(model, X, y)
    exact = exact_gradients(dense, y, model.W, model.U, dense, 60)
    with mpmath.workdps(60):
        assert relative(g.W, to_float(exact[0])) < 1e-11
        assert relative(g.U, to_float(exact[1])) < 1e-11


def saturated(dtype, gap, *, offset=0.0, repeated=True, n=9, T=6, d=5, H=2, V=11):
    """A classifier and words whose rows have logits up to `gap` apart, plus `offset`."""
    rng = np.random.default_rng(8)
    embedding = rng.standard_normal((V, d))
    embedding[:, 0] = 1.0  # W[0, 0] is then added to all logits
    W = rng.standard_normal((H, d, d))
    logits = np.einsum("vi,hij,wj->hvw", embedding, W, embedding)
    W *= gap / np.median(np.ptp(logits, axis=-1))
    W[:, 0, 0] += offset
    if repeated:
        ids = rng.integers(V, size=(n, T))
    else:
        ids = rng.permuted(np.tile(np.arange(V), (n, 1)), axis=1)[:, :T]
    X = mh.Tokens(ids, embedding.astype(dtype))
    model = mh.Classifier(W.astype(dtype), rng.standard_normal((H, T, d)).astype(dtype))
    y = np.where(rng.random(n) > 0.5, 1.0, -1.0).astype(dtype)
    return model, X, y


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("gap", "offset"),
    # Weights in the range of exponentials of logits; some and all samples outside of it, by their
    # largest weight (too large, too small) or by the second; nothing but the largest weight left.
    [(5.0, 0.0), (60.0, 0.0), (600.0, 0.0), (5.0, 1e3), (5.0, -1e3), (5e3, 0.0)],
)
def test_weights_of_any_size(use_isa, isa, dtype, gap, offset):
    use_isa(isa)
    model, X, y = saturated(dtype, gap, offset=offset, repeated=False)
    dense = np.asarray(X)
    assert weighs(model, X)
    outputs = model(X)
    assert_outputs_alike(model, X, outputs, model(dense))
    value, g = mh.value_and_grad(model, X, y)
    of_dense, expected = mh.value_and_grad(model, dense, y)
    # Logits of this size are rounded by up to half an ulp: of a weight, that much relative.
    tolerance = TOLERANCE[model.dtype] * max(10.0, abs(offset), gap)
    np.testing.assert_allclose(value, of_dense, rtol=tolerance)
    for name in ("W", "U"):
        assert_close(getattr(g, name), getattr(expected, name), tolerance)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("gap", [4.0, 150.0])
def test_a_sample_does_not_depend_on_its_batch(dtype, lengths, gap):
    """Nor on words of the dictionary that it has not, nor on the number of threads."""
    model, X, y = saturated(dtype, gap, n=150)
    ends = np.arange(150) % 6 + 1 if lengths else None
    outputs = model(X, lengths=ends)
    for batch in (slice(0, 1), slice(3, 5), slice(7, 120)):
        of_batch = None if ends is None else ends[batch]
        np.testing.assert_array_equal(model(X[batch], lengths=of_batch), outputs[batch])
    more = mh.Tokens(X.ids, np.concatenate([X.embedding, 1e3 * X.embedding[:1]]))
    assert weighs(model, more)
    np.testing.assert_array_equal(model(more, lengths=ends), outputs)
    np.testing.assert_array_equal(model(X, lengths=ends, num_threads=3), outputs)
    # The loss of a gradient, -y f, is that of these outputs before they are rounded to the dtype.
    for i in (0, 4):
        one = None if ends is None else ends[i : i + 1]
        value, _ = mh.value_and_grad(model, X[i : i + 1], y[:1], loss="linear", lengths=one)
        assert dtype(value) == -y[0] * outputs[i]


@pytest.mark.parametrize("gap", [3.0, 2e3])
def test_normalized_steps_with_equal_words(gap):
    """Against 900 digits; at the larger gap the gradients by W underflow and are scaled."""
    model, X, y = saturated(np.float64, gap, n=3, T=4, d=3, V=5)
    lr = 1e6
    optimizer = mh.NormalizedGradientDescent(lr, by="tensor")
    run = mh.train(model, X, y, steps=1, optimizer=optimizer, wrt="W")
    dense = np.asarray(X)
    with mpmath.workdps(900):
        exact = exact_gradients(dense, y, model.W, model.U, dense, 900)[0]
        norm = mpmath.sqrt(sum(x * x for x in np.ravel(exact)))
        direction = to_float(np.vectorize(lambda x: x / norm, otypes=[object])(exact))
    # W moves by 1e6 times the direction and keeps 1e-16 of 1e6; the gradient 1e-11, see above.
    np.testing.assert_allclose((model.W - run.model.W) / lr, direction, atol=1e-9)


def training(kind, parameter, seed=0):
    """A model, a data set of words and the same with the array."""
    model, data = draw(kind, parameter, np.float64, 24, 5, 7, 3, seed=seed)
    words = mh.Dataset(of_words(data.X), data.y)
    assert looks_up(model, words)
    return model, words, mh.Dataset(words.X, data.y)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_training(kind, optimizer):
    model, words, dense = training(kind, "prompt" if optimizer == "Polyak" else "dense")
    settings = {"steps": 6, "optimizer": OPTIMIZERS[optimizer]()}
    record = ("loss", "accuracy", "margin", "grad_norm", "attention_max")
    runs = [mh.train(model, data, record=record, **settings) for data in (words, dense)]
    for name in record:
        np.testing.assert_allclose(
            runs[0].history[name], runs[1].history[name], rtol=1e-9, atol=1e-12
        )
    for name, array in runs[0].model.parameters.items():
        # An optimizer of signs, or of moments, can turn a rounding of zero into a step.
        np.testing.assert_allclose(array, runs[1].model.parameters[name], atol=1e-9)


@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_threads_resuming_and_files(kind, tmp_path):
    model, words, _ = training(kind, "dense")
    settings = {"optimizer": mh.Momentum([0.1, 0.3, 0.2]), "record": ("loss", "attention")}
    whole = mh.train(model, words, steps=9, num_threads=1, **settings)
    for threads in (2, 4):
        assert mh.train(model, words, steps=9, num_threads=threads, **settings) == whole
    half = mh.train(model, words, steps=4, **settings)
    half.save(tmp_path / "run.npz")
    assert mh.train(mh.Run.load(tmp_path / "run.npz"), words, steps=5) == whole
    alone = mh.train(model, words, steps=9, optimizer=mh.Momentum(0.3))
    np.testing.assert_array_equal(alone.model.W, whole[1].model.W)


@pytest.mark.parametrize("parameter", ["dense", "prompt", "low rank"])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_calls_of_several_threads(kind, parameter):
    """With work enough for four, each of which makes the tables of its heads."""
    model, data = draw(kind, parameter, np.float64, 600, 12, 7, 5)
    X = of_words(data.X)
    loss = "logistic" if kind is mh.Classifier else "squared"
    for _ in range(5):
        found = [
            (model(X, num_threads=k), mh.value_and_grad(model, X, data.y, loss=loss, num_threads=k))
            for k in (1, 2, 4)
        ]
        for outputs, (value, gradient) in found[1:]:
            np.testing.assert_array_equal(outputs, found[0][0])
            assert (value, gradient) == found[0][1]


@pytest.mark.parametrize("runs", [2, 9])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
@pytest.mark.parametrize("lengths", [False, True])
def test_batches_and_test_sets(kind, lengths, runs):
    """Of so few runs that each goes alone, and of so many that they go side by side if they can."""
    model, words, dense = training(kind, "dense")
    if lengths:
        ends = np.arange(words.n) % 5 + 1
        words = mh.Dataset(words.words, words.y, lengths=ends)
        dense = mh.Dataset(dense.X, dense.y, lengths=ends)
    settings = {
        "steps": 8, "optimizer": mh.GradientDescent(0.1), "batch": 7, "seed": [*range(runs)],
    }  # fmt: skip
    record = ("loss", "test_loss")
    first, second = (
        mh.train(model, data, test=other, record=record, **settings)
        for data, other in ((words, dense[:9]), (dense, words[:9]))
    )
    for name in record:
        np.testing.assert_allclose(first.history[name], second.history[name], rtol=1e-10)
    np.testing.assert_allclose(first.model.W, second.model.W, atol=1e-11)


def test_a_test_set_of_words_beside_training_in_the_span():
    """Tokens with far more dimensions than there are: the words get coordinates of the span too."""
    rng = np.random.default_rng(2)
    embedding = rng.standard_normal((3, 400))
    ids = rng.integers(3, size=(40, 2))
    X, y = embedding[ids], np.where(rng.random(40) > 0.5, 1.0, -1.0)
    test = mh.Dataset(mh.Tokens(ids[:30], embedding), y[:30])
    model = mh.Classifier.zeros(heads=2, tokens=2, dim=400)
    settings = {"steps": 3, "optimizer": mh.GradientDescent(0.1), "record": ("test_loss",)}
    run = mh.train(model, X, y, test=test, **settings)
    assert run.subspace is not None
    expected = mh.train(model, X, y, test=(X[:30], y[:30]), **settings)
    np.testing.assert_allclose(run.history["test_loss"], expected.history["test_loss"], rtol=1e-12)


def test_what_is_not_looked_up_computes_with_the_array():
    drawn = case(loss="logistic")
    X, model, y = of_words(drawn.X), drawn.model, drawn.y
    dense = np.asarray(X)
    _, g = mh.value_and_grad(model, X, y, wrt=("W", "X"))
    _, expected = mh.value_and_grad(model, dense, y, wrt=("W", "X"))
    assert g == expected
    tangent = mh.Gradients(W=model.W, U=model.U)
    assert mh.hvp(model, X, y, tangent=tangent) == mh.hvp(model, dense, y, tangent=tangent)
    np.testing.assert_array_equal(mh.theory.ntk(model, X), mh.theory.ntk(model, dense))
    cotangent = np.arange(len(dense)) / 7
    for wrt in (None, "X"):
        g, expected = (mh.backward(model, tokens, cotangent, wrt=wrt) for tokens in (X, dense))
        for name in ("W", "X") if wrt else ("W", "U"):
            if getattr(expected, name) is not None:
                assert_close(getattr(g, name), getattr(expected, name), 1e-11)


def test_a_word_that_is_not_finite_spoils_only_what_sees_it():
    drawn = case()
    X = of_words(drawn.X)
    embedding = np.concatenate([X.embedding, np.full((1, 8), np.nan)])
    unseen = mh.Tokens(X.ids, embedding)
    check_alike(drawn, unseen, looked_up=False)
    ids = X.ids.copy()
    ids[2, 1] = WORDS
    assert np.isnan(drawn.model(mh.Tokens(ids, embedding))).nonzero()[0].tolist() == [2]


def test_a_query_token_beyond_the_end_of_its_sample_is_zero():
    drawn = case(query=2, lengths=True)
    check_alike(drawn, of_words(drawn.X), looked_up=False)


@pytest.mark.parametrize(
    ("V", "n", "looked_up"), [(7, 50, True), (3000, 5000, False), (400, 3, False)]
)
def test_large_dictionaries_are_not_looked_up(V, n, looked_up):
    X = mh.Tokens(np.arange(3 * n).reshape(n, 3) % V, np.ones((V, 4)))
    assert looks_up(mh.Classifier.zeros(heads=5, tokens=3, dim=4), X) == looked_up


def test_a_data_set_of_words():
    rng = np.random.default_rng(0)
    X = mh.Tokens(rng.integers(WORDS, size=(6, 4)), rng.standard_normal((WORDS, 3)))
    y, lengths = np.ones(6), np.array([4, 2, 3, 0, 1, 4])
    data = mh.Dataset(X, y, lengths=lengths)
    padded = np.where(np.arange(4)[:, None] < lengths[:, None, None], np.asarray(X), 0.0)
    assert (data.n, data.tokens, data.dim, data.dtype) == (6, 4, 3, np.float64)
    assert "X" not in vars(data)
    np.testing.assert_array_equal(data.X, padded)
    assert not data.X.flags.writeable
    same = mh.Dataset(padded, y, lengths=lengths)
    assert data == same
    copy = pickle.loads(pickle.dumps(data))
    assert copy == data
    assert copy.words == X
    part = data[1:3]
    assert part.words == X[1:3]
    np.testing.assert_array_equal(part.X, padded[1:3])
    model = mh.Classifier.zeros(heads=2, tokens=4, dim=3)
    runs = [mh.train(model, d, steps=1, optimizer=mh.GradientDescent(0.1)) for d in (data, same)]
    assert runs[0].segments == runs[1].segments  # of the same data


def test_runs_of_a_data_set_of_words():
    rng = np.random.default_rng(0)
    X = mh.Tokens(rng.integers(WORDS, size=(2, 6, 4)), rng.standard_normal((2, WORDS, 3)))
    data = mh.Dataset(X, np.ones(6))
    assert data.runs == 2
    assert data.run(1).words == X[1]
    assert data.subset([4, 0]).words.shape == (2, 2, 4, 3)
    np.testing.assert_array_equal(data.subset([4, 0]).X, data.X[:, [4, 0]])
    assert repr(X) == "Tokens(ids=<int32 (2, 6, 4)>, embedding=<float64 (2, 5, 3)>)"
    assert len(X[0]) == 6


@pytest.mark.parametrize(
    ("ids", "embedding", "error", "message"),
    [
        ([[0.0, 1.0]], np.ones((2, 3)), TypeError, "ids: expected integers, got dtype float64"),
        (
            [[0, 2]],
            np.ones((2, 3)),
            ValueError,
            r"ids: expected integers in \[0, 1\], got 2 at index 0, 1",
        ),
        ([[0, -1]], np.ones((2, 3)), ValueError, r"ids: expected integers in \[0, 1\], got -1"),
        ([0, 1], np.ones((2, 3)), ValueError, r"ids: expected shape \(n, T\), got \(2,\)"),
        ([[0]], np.ones(3), ValueError, r"embedding: expected shape \(V, d\), got \(3,\)"),
        ([[0]], np.ones((0, 3)), ValueError, "embedding: expected at least one word and feature"),
        ([[0]], np.ones((2, 3), int), TypeError, "embedding: expected dtype float32 or float64"),
        (
            np.zeros((2, 1, 1), int),
            np.ones((3, 2, 3)),
            ValueError,
            "embedding: expected R = 2 runs",
        ),
    ],
)
def test_refusals(ids, embedding, error, message):
    with pytest.raises(error, match=message):
        mh.Tokens(ids, embedding)


def test_words_of_another_dtype_or_shape_than_the_model_takes():
    X = mh.Tokens([[0, 1]], np.ones((2, 3), np.float32))
    with pytest.raises(
        TypeError, match="X: expected dtype float64, that of the model, got float32"
    ):
        mh.Classifier.zeros(heads=1, tokens=2, dim=3)(X)
    with pytest.raises(ValueError, match="X: expected shape"):
        mh.Classifier.zeros(heads=1, tokens=4, dim=3, dtype=np.float32)(X)
