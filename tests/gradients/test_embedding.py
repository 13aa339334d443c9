"""Gradients by the embedding of `Tokens`, from tables of pairs or from those of the tokens."""

import math

import numpy as np
import pytest
from instances import TOLERANCE, case
from lists import LOSSES, targets

import mhfast as mh
from mhfast import _core
from mhfast._arguments.lists import ROW_MAPS

pytestmark = pytest.mark.usefixtures("use_words")

WORDS = 4
SIDES = {
    "tokens": {},
    "first": {"query": 0},
    "last": {"query": -1},
    "prompt": {"prompt": True},
    "causal": {"causal": True},
    "lengths": {"lengths": True},
    "last, lengths": {"query": -1, "lengths": True},
    "own": {"query": "own"},
    "given": {"query": "given"},
    "low rank": {"factors": "low rank"},
    "tied": {"factors": "tied"},
    "identity": {"identities": "W"},
    "scale": {"scale": 0.6},
}


def of_words(X, words=WORDS, seed=1):
    """Tokens whose words are the first rows of X (n, T, d)."""
    ids = np.random.default_rng(seed).integers(words, size=X.shape[:2])
    return mh.Tokens(ids, X.reshape(-1, X.shape[-1])[:words])


def by_words(X, of_tokens):
    """The chain rule: each word has the sum of the gradients by its tokens."""
    total = np.zeros(X.embedding.shape)
    np.add.at(total, X.ids, of_tokens)
    return total


def assert_close(a, b, tolerance):
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def check(drawn, X, looked_up=True):
    model, y, options = drawn.model, drawn.y, drawn.options
    query = options.get("query")
    explained = X if query is None else mh.Dataset(X, y, query=query)
    assert (mh.explain(model, explained)["plan"] == "words") == looked_up
    value, g = mh.value_and_grad(model, X, y, wrt="embedding", **options)
    expected_value, expected = mh.reference.value_and_grad(
        model, np.asarray(X), y, wrt="X", **options
    )
    tolerance = 10 * TOLERANCE[model.dtype]
    assert g.embedding.dtype == model.dtype
    np.testing.assert_allclose(value, expected_value, rtol=tolerance)
    assert_close(g.embedding, by_words(X, expected["X"]), tolerance)
    assert [name for name in vars(g) if getattr(g, name) is not None] == ["embedding"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_every_query_side(kind, side, dtype):
    loss = "logistic" if kind is mh.Classifier else "squared"
    drawn = case(kind, loss=loss, dtype=dtype, **SIDES[side])
    check(drawn, of_words(drawn.X), side not in ("own", "given", "identity"))


@pytest.mark.parametrize("attention", [name for name in ROW_MAPS if name != "hardmax"])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_every_row_map(kind, attention):
    drawn = case(kind, loss="squared", attention=attention, lengths=True)
    check(drawn, of_words(drawn.X))


@pytest.mark.parametrize(
    ("kind", "loss"), [(kind, loss) for kind, losses in LOSSES.items() for loss in losses], ids=str
)
def test_every_loss(kind, loss):
    drawn = case(kind, loss=loss, weight="samples")
    check(drawn, of_words(drawn.X))


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize(("n", "T", "d", "V"), [(40, 17, 9, 31), (60, 5, 33, 18), (9, 2, 20, 1)])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_sizes_around_whole_registers(use_isa, isa, kind, n, T, d, V):
    use_isa(isa)
    rng = np.random.default_rng(V)
    X = mh.Tokens(rng.integers(V, size=(n, T)), rng.standard_normal((V, d)))
    W = rng.standard_normal((3, d, d)) / d
    if kind is mh.Classifier:
        model = kind(W, rng.standard_normal((3, T, d)))
    else:
        model = kind(W, rng.standard_normal((3, d, 19)))
    y = targets("squared", model(X).shape, rng, np.float64)
    assert mh.explain(model, X)["plan"] == "words"
    g = mh.value_and_grad(model, X, y, loss="squared", wrt=("embedding", "W"))[1]
    again = [
        mh.value_and_grad(model, X, y, loss="squared", wrt=("embedding", "W"), num_threads=k)[1]
        for k in (1, 2, 4)
    ]
    assert all(other == g for other in again)
    expected = mh.value_and_grad(model, X, y, loss="squared", wrt=("X", "W"))[1]
    assert_close(g.embedding, by_words(X, expected.X), 1e-12)  # sums of n T terms, in another order
    assert_close(g.W, expected.W, 1e-12)


@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_against_differences(kind):
    drawn = case(kind, loss="squared")
    X, rng = of_words(drawn.X), np.random.default_rng(3)
    move, h = rng.standard_normal(X.embedding.shape), 1e-5

    def loss(step):
        moved = mh.Tokens(X.ids, X.embedding + step * move)
        return drawn.model.loss(moved, drawn.y, **drawn.options)

    g = mh.value_and_grad(drawn.model, X, drawn.y, wrt="embedding", **drawn.options)[1]
    slope = (loss(h) - loss(-h)) / (2 * h)
    # Central differences: h^2 of the third derivative, and rounding / h.
    assert (g.embedding * move).sum() == pytest.approx(slope, rel=1e-7)


def test_a_cotangent_and_other_names_beside_it():
    drawn = case()
    X, model = of_words(drawn.X), drawn.model
    cotangent = np.arange(len(X)) - 2.5
    g = mh.backward(model, X, cotangent, wrt=("embedding", "U"))
    both = mh.backward(model, X, cotangent, wrt=("U", "X", "embedding"))
    assert_close(g.embedding, by_words(X, both.X), 1e-12)
    assert_close(both.embedding, by_words(X, both.X), 1e-13)
    assert_close(g.U, both.U, 1e-12)
    data = mh.Dataset(X, drawn.y)
    of_data = mh.backward(model, data, cotangent, wrt="embedding")
    np.testing.assert_array_equal(of_data.embedding, g.embedding)
    assert mh.norm(2.0 * of_data) == pytest.approx(2 * np.linalg.norm(g.embedding), rel=1e-14)


@pytest.mark.parametrize("exponent", [-900, -1010])
@pytest.mark.parametrize("kind", [mh.Classifier, mh.Layer])
def test_tiny_cotangents_lose_no_digits(kind, exponent):
    """The gradient is linear in the cotangent; products of these alone would be flushed to zero."""
    drawn = case(kind, loss="squared")
    X, model = of_words(drawn.X), drawn.model
    cotangent = np.random.default_rng(2).standard_normal(model(X).shape)
    expected = mh.backward(model, X, cotangent, wrt="embedding").embedding
    g = mh.backward(model, X, np.ldexp(cotangent, exponent), wrt="embedding").embedding
    # What has been left out is put back as the exponential of a logarithm near -700.
    assert_close(np.ldexp(g, -exponent), expected, 700 * np.finfo(np.float64).eps)


def test_words_of_any_scale():
    """Embeddings from 1e-140 to 1e140, with W and U that make up for it."""
    drawn = case()
    X, model = of_words(drawn.X), drawn.model
    g = mh.value_and_grad(model, X, drawn.y, wrt="embedding")[1].embedding
    for factor in (2.0**-460, 2.0**460):
        scaled = mh.Classifier(model.W / factor / factor, model.U / factor)
        tokens = mh.Tokens(X.ids, X.embedding * factor)
        found = mh.value_and_grad(scaled, tokens, drawn.y, wrt="embedding")[1].embedding
        assert_close(found * factor, g, 1e-13)  # powers of two


@pytest.mark.parametrize("runs", [("W",), ("ids",), ("embedding", "W"), ("ids", "embedding", "y")])
@pytest.mark.parametrize("looked_up", [True, False])
def test_runs(runs, looked_up):
    drawn = case(runs=tuple({"W", "y"} & set(runs)), lengths=True)
    X, model, options = of_words(drawn.X), drawn.model, drawn.options
    R, rng = 2, np.random.default_rng(0)
    R = model.runs or (len(drawn.y) if "y" in runs else R)
    ids = rng.integers(WORDS, size=(R, *X.ids.shape)) if "ids" in runs else X.ids
    factors = rng.random((R, 1, 1)) if "embedding" in runs else 1.0
    X = mh.Tokens(ids, X.embedding * factors)
    wrt = "embedding" if looked_up else ("embedding", "X")
    g = mh.value_and_grad(model, X, drawn.y, wrt=wrt, **options)[1]
    assert g.embedding.shape == (R, WORDS, drawn.X.shape[-1])
    for r in range(R):
        of_run = X[r] if X.ndim == 4 else X
        one = drawn.run(r)
        alone = mh.value_and_grad(one.model, of_run, one.y, wrt=wrt, **one.options)[1]
        np.testing.assert_array_equal(g[r].embedding, alone.embedding)


@pytest.mark.peers
@pytest.mark.parametrize("query", [None, -1])
def test_against_an_embedding_of_torch(query):
    torch = pytest.importorskip("torch")
    drawn = case(query=query)
    X, model = of_words(drawn.X), drawn.model
    embedding = torch.nn.Embedding.from_pretrained(torch.tensor(X.embedding), freeze=False)
    tokens = embedding(torch.tensor(X.ids))
    rows = tokens if query is None else tokens[:, -1:]
    W, U, y = (torch.tensor(np.asarray(a)) for a in (model.W, model.U, drawn.y))
    A = torch.einsum("nqd,hde,nte->nhqt", rows, W, tokens).softmax(-1)
    outputs = torch.einsum("nhqt,nte,hqe->n", A, tokens, U) / math.sqrt(model.heads)
    torch.nn.functional.softplus(-y * outputs).mean().backward()
    g = mh.value_and_grad(model, X, drawn.y, wrt="embedding")[1]
    assert_close(g.embedding, embedding.weight.grad.numpy(), 1e-12)


def test_descent_by_the_embedding_and_the_parameters():
    drawn = case()
    X, model = of_words(drawn.X), drawn.model
    before = model.loss(X, drawn.y)
    for _ in range(20):
        _, g = mh.value_and_grad(model, X, drawn.y, wrt=("embedding", "W", "U"))
        X = mh.Tokens(X.ids, X.embedding - 0.1 * g.embedding)
        model = model - 0.1 * mh.Gradients(W=g.W, U=g.U)
    assert model.loss(X, drawn.y) < 0.9 * before


def test_refusals():
    drawn = case()
    X, model = of_words(drawn.X), drawn.model
    message = "wrt: expected Tokens to differentiate by their embedding, got an array"
    with pytest.raises(ValueError, match=message):
        mh.value_and_grad(model, drawn.X, drawn.y, wrt="embedding")
    with pytest.raises(ValueError, match="got list"):
        mh.backward(model, drawn.X.tolist(), np.ones(len(X)), wrt=("W", "embedding"))
    with pytest.raises(ValueError, match="wrt: expected names from W, U, got 'embedding'"):
        mh.train(model, X, drawn.y, steps=1, optimizer=mh.GradientDescent(0.1), wrt="embedding")
    with pytest.raises(ValueError, match="embedding: expected gradients by parameters"):
        model - mh.value_and_grad(model, X, drawn.y, wrt="embedding")[1]


def test_values_in_two_factors():
    drawn = case(mh.Layer, loss="squared")
    X, rng = of_words(drawn.X), np.random.default_rng(5)
    A, B = rng.standard_normal((7, 8, 2)), rng.standard_normal((7, 2, drawn.y.shape[-1]))
    model = mh.Layer(drawn.model.W, mh.ValueOutput(A, B))
    whole = mh.Layer(drawn.model.W, A @ B)
    wrt = ("embedding", "A", "B")
    g = mh.value_and_grad(model, X, drawn.y, loss="squared", wrt=wrt)[1]
    expected = mh.value_and_grad(whole, X, drawn.y, loss="squared", wrt=("embedding", "V"))[1]
    assert_close(g.embedding, expected.embedding, 1e-12)
    assert_close(g.A, expected.V @ B.swapaxes(1, 2), 1e-12)
