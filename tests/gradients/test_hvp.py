"""Products of the Hessian: against the reference's exact formula, jax and finite differences."""

import mpmath
import numpy as np
import pytest
from lists import LOSSES, targets, within_domain

import mhfast as mh
from mhfast import _core

N, T, D, HEADS, OUT, RANK, ROWS = 5, 6, 4, 3, 2, 7, 8

QUERIES = ("self", "token", "external", "prompt")


def instance(kind, loss, query, factors, *, dtype=np.float64, seed=0, lengths=False, causal=False):
    """Return a model, its data as keywords and a direction."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (0.5 * rng.standard_normal(shape)).astype(dtype)

    W = normal(HEADS, D, D)
    if factors:
        W = mh.LowRank(normal(HEADS, D, RANK), normal(HEADS, D, RANK) if factors == 2 else None)
    q = {"self": T, "token": 1, "external": ROWS, "prompt": ROWS}[query]
    options = {"scale": 0.7, "causal": causal}
    if query == "token":
        options["query"] = -2
    if query == "prompt":
        options["prompt"] = normal(ROWS, D)
    if kind == "classifier":
        model, shape = mh.Classifier(W, normal(HEADS, q, D), **options), (N,)
    else:
        model, shape = mh.Layer(W, normal(HEADS, D, OUT), **options), (N, q, OUT)
    data = {"X": normal(N, T, D)}
    if query == "external":
        data["query"] = normal(N, ROWS, D)
    if lengths:
        data["lengths"] = np.array([T, 2, 0, 3, 5])
    model, data["X"] = within_domain(loss, model, data["X"])
    data["y"] = targets(loss, shape, rng, dtype, OUT)
    data["weight"] = rng.uniform(0.5, 2.0, N).astype(dtype)
    tangent = mh.Gradients(**{name: normal(*x.shape) for name, x in model.parameters.items()})
    return model, data, tangent


def cases():
    for kind, losses in (("classifier", LOSSES[mh.Classifier]), ("layer", LOSSES[mh.Layer])):
        for k, loss in enumerate(losses):
            for j, query in enumerate(QUERIES):
                yield pytest.param(kind, loss, query, (j + k) % 3, id=f"{kind}-{loss}-{query}")


def compared(model, data, tangent, loss, product, tolerance):
    want = mh.reference.hvp(model, data["X"], data["y"], tangent, loss=loss, **rest(data))
    for name in model.parameters:
        size = max(np.abs(want[name]).max(), 1e-3)
        error = np.abs(getattr(product, name) - want[name]).max() / size
        assert error < tolerance, name


def rest(data):
    return {name: x for name, x in data.items() if name not in ("X", "y")}


@pytest.mark.parametrize("plan", ["rows", "samples"])
@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize(("kind", "loss", "query", "factors"), list(cases()))
def test_exact_formula(kind, loss, query, factors, isa, plan, use_isa, use_plan):
    use_isa(isa)
    use_plan(plan)
    model, data, tangent = instance(kind, loss, query, factors)
    product = mh.hvp(model, data["X"], data["y"], tangent=tangent, loss=loss, **rest(data))
    # Both sum a few hundred terms in float64.
    compared(model, data, tangent, loss, product, 1e-12)


@pytest.mark.parametrize("plan", ["rows", "samples"])
@pytest.mark.parametrize("kind", ["classifier", "layer"])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_and_causal(kind, causal, plan, use_plan):
    use_plan(plan)
    model, data, tangent = instance(kind, "squared", "self", 0, lengths=True, causal=causal)
    product = mh.hvp(model, data["X"], data["y"], tangent=tangent, loss="squared", **rest(data))
    compared(model, data, tangent, "squared", product, 1e-12)


@pytest.mark.parametrize("loss", LOSSES[mh.Layer])
def test_weights_of_rows(loss):
    """Each row's share of the loss is its own weight's, and so is its share of the product."""
    model, data, tangent = instance("layer", loss, "external", 0)
    weight = np.random.default_rng(4).uniform(0.5, 2.0, (N, ROWS))
    weight[1, 3] = weight[4] = 0.0
    data["weight"] = weight
    product = mh.hvp(model, data["X"], data["y"], tangent=tangent, loss=loss, **rest(data))
    compared(model, data, tangent, loss, product, 1e-12)
    # By hand: the product of a sum of losses is the sum of the products of row after row.
    summed = dict.fromkeys(model.parameters, 0.0)
    for row in range(ROWS):
        y, share = data["y"][:, [row]], weight[:, row].sum() / weight.sum()
        alone = mh.hvp(
            model, data["X"], y, tangent=tangent, loss=loss,
            query=data["query"][:, [row]], weight=weight[:, row],
        )  # fmt: skip
        for name in summed:
            summed[name] = summed[name] + share * getattr(alone, name)
    for name, expected in summed.items():
        # The same terms in another order.
        error = np.abs(getattr(product, name) - expected).max() / np.abs(expected).max()
        assert error < 1e-13


@pytest.mark.parametrize("gap", [0, 5, 40, 300])
def test_curvature_of_cross_entropy_in_saturation(gap):
    """P (v - ⟨P, v⟩), whose own class is a difference of nearly equal numbers if not centred.

    With one token of size one and W = 0 the outputs are V; the classes but one lie `gap` below.
    """
    V = np.array([0.3, 0.0, -0.2, 0.7])
    V[2] += gap
    v = np.array([0.5, -0.9, 0.4, 1.3])
    with mpmath.workdps(300):
        P = [mpmath.exp(mpmath.mpf(value)) for value in V]
        P = [part / sum(P) for part in P]
        mean = sum(part * mpmath.mpf(move) for part, move in zip(P, v, strict=True))
        exact = [float(part * (mpmath.mpf(move) - mean)) for part, move in zip(P, v, strict=True)]
    model = mh.Layer(np.zeros((1, 1, 1)), V[None, None])
    arguments, tangent = (model, np.ones((1, 1, 1)), [[2]]), mh.Gradients(V=v[None, None])
    for hvp in (mh.hvp, mh.reference.hvp):
        product = hvp(*arguments, tangent=tangent, loss="cross_entropy", wrt="V")
        found = (product["V"] if isinstance(product, dict) else product.V)[0, 0]
        # The exponent rounds to gap · 1e-16.
        assert np.abs(found / exact - 1).max() < 2e-16 * (gap + 30)


@pytest.mark.parametrize("kind", ["classifier", "layer"])
def test_float32(kind):
    model, data, tangent = instance(kind, "logistic", "self", 1, dtype=np.float32)
    product = mh.hvp(model, data["X"], data["y"], tangent=tangent, **rest(data))
    assert product.Q.dtype == np.float32
    # Rounding of inputs that the reference takes as they are: a few dozen units of float32.
    compared(model, data, tangent, "logistic", product, 1e-5)


def test_a_still_parameter_is_a_zero_direction():
    model, data, tangent = instance("classifier", "logistic", "prompt", 2)
    for name in model.parameters:
        alone = mh.Gradients(**{name: getattr(tangent, name)})
        product = mh.hvp(model, data["X"], data["y"], tangent=alone, **rest(data))
        compared(model, data, alone, "logistic", product, 1e-12)


def test_rows_of_some_parameters():
    model, data, tangent = instance("layer", "squared", "external", 2)
    whole = mh.hvp(model, data["X"], data["y"], tangent=tangent, loss="squared", **rest(data))
    some = mh.hvp(
        model, data["X"], data["y"], tangent=tangent, loss="squared", wrt="K", **rest(data)
    )
    assert some.Q is None
    assert np.array_equal(some.K, whole.K)


def test_finite_differences_of_the_gradient():
    model, data, tangent = instance("classifier", "logistic", "self", 0)
    product = mh.hvp(model, data["X"], data["y"], tangent=tangent, **rest(data))
    step = 1e-5
    ahead, behind = (
        mh.value_and_grad(model + s * tangent, data["X"], data["y"], **rest(data))[1]
        for s in (step, -step)
    )
    for name in ("W", "U"):
        loss_derivative = (getattr(ahead, name) - getattr(behind, name)) / (2 * step)
        # Truncation step^2 and rounding 1e-16 / step both are about 1e-10 here.
        assert np.abs(getattr(product, name) - loss_derivative).max() < 1e-8


@pytest.mark.peers
def test_jax():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy
    model, data, tangent = instance("classifier", "logistic", "self", 0)
    X, y, w = (jnp.asarray(data[name]) for name in ("X", "y", "weight"))

    def loss(W, U):
        S = 0.7 * jnp.einsum("ntd,hde,nse->nhts", X, W, X)
        A = jax.nn.softmax(S, axis=-1)
        phi = jnp.einsum("nhts,nsd,htd->n", A, X, U) / np.sqrt(HEADS)
        return (w * jax.nn.softplus(-y * phi)).sum() / w.sum()

    _, want = jax.jvp(jax.grad(loss, (0, 1)), (model.W, model.U), (tangent.W, tangent.U))
    product = mh.hvp(model, data["X"], data["y"], tangent=tangent, **rest(data))
    for got, expected in zip((product.W, product.U), want, strict=True):
        # jax subtracts the row sums without centring them: a few more roundings.
        assert np.abs(got - expected).max() / np.abs(expected).max() < 1e-11


@pytest.mark.parametrize("kind", ["classifier", "layer"])
def test_tiles_of_long_sequences(kind):
    rng = np.random.default_rng(3)
    tokens = 700
    X = rng.standard_normal((2, tokens, 3))
    if kind == "classifier":
        model, y = mh.Classifier.gaussian(2, tokens, 3, std=0.3, seed=1), np.array([1.0, -1.0])
    else:
        model = mh.Layer.gaussian(2, 3, OUT, std=0.3, seed=1)
        y = rng.standard_normal((2, tokens, OUT))
    loss = "logistic" if kind == "classifier" else "squared"
    parts = {name: rng.standard_normal(x.shape) for name, x in model.parameters.items()}
    tangent = mh.Gradients(**parts)
    want = mh.reference.hvp(model, X, y, tangent, loss=loss)
    got = mh.hvp(model, X, y, tangent=tangent, loss=loss)
    for name in model.parameters:
        # Sums of half a million terms.
        error = np.abs(getattr(got, name) - want[name]).max() / np.abs(want[name]).max()
        assert error < 1e-11


def test_threads_give_equal_bits():
    model, data, tangent = instance("classifier", "logistic", "self", 0)
    X, y = np.tile(data["X"], (40, 1, 1)), np.tile(data["y"], 40)
    products = [mh.hvp(model, X, y, tangent=tangent, num_threads=k) for k in (1, 2, 3)]
    for product in products[1:]:
        assert np.array_equal(product.W, products[0].W)
        assert np.array_equal(product.U, products[0].U)


@pytest.mark.parametrize("attention", ["softmax", "softmax1", "sigmoid"])
@pytest.mark.parametrize(
    ("rows", "identities"),
    [("last token", ""), ("last token", "W"), ("last token", "V"),
     ("prompt", ""), ("prompt", "W"), ("prompt", "V"), ("prompt", "WV")],
)  # fmt: skip
def test_blocks_of_samples_of_other_maps_and_identities(attention, identities, rows, use_plan):
    n, T, d, H, p = 131, 5, 7, 3, 4  # several chunks; the last block has lanes without a sample
    rng = np.random.default_rng(0)
    options = {"attention": attention}
    if rows == "prompt":
        options["prompt"] = rng.standard_normal((2, d))
    else:
        options["query"] = -1
    W = None if "W" in identities else rng.standard_normal((H, d, d)) / d
    V = None if "V" in identities else rng.standard_normal((H, d, p)) / d
    model = mh.Layer(W, V, **options)
    X = rng.standard_normal((n, T, d))
    y = rng.standard_normal(model(X).shape)
    lengths = rng.integers(0, T + 1, n)
    tangent = mh.Gradients(
        **{name: rng.standard_normal(x.shape) for name, x in model.parameters.items()}
    )
    use_plan("samples")
    data = {"X": X, "y": y, "lengths": lengths}
    product = mh.hvp(model, X, y, tangent=tangent, loss="squared", lengths=lengths)
    compared(model, data, tangent, "squared", product, 1e-12)


@pytest.mark.parametrize("kind", ["classifier", "layer"])
def test_blocks_of_samples_give_equal_bits_on_threads(kind, use_plan):
    rng = np.random.default_rng(0)
    n, T, d, H, p = 2000, 6, 9, 4, 3
    W, X = rng.standard_normal((H, d, d)), rng.standard_normal((n, T, d))
    if kind == "layer":
        model = mh.Layer(W, rng.standard_normal((H, d, p)), query=-1)
    else:
        model = mh.Classifier(W, rng.standard_normal((H, 1, d)), query=-1)
    y = np.sign(rng.standard_normal(model(X).shape))
    use_plan("samples")
    one, *more = (
        mh.hvp(model, X, y, tangent=model, loss="squared", num_threads=k) for k in (1, 2, 3)
    )
    for other in more:
        for name in model.parameters:
            np.testing.assert_array_equal(getattr(other, name), getattr(one, name))


def test_a_sample_that_is_not_finite_stays_in_its_lane(use_plan):
    rng = np.random.default_rng(0)
    n, T, d, H = 21, 4, 5, 3
    model = mh.Classifier(rng.standard_normal((H, d, d)), rng.standard_normal((H, 1, d)), query=-1)
    X, y, weight = rng.standard_normal((n, T, d)), np.ones(n), np.ones(n)
    weight[7] = 0
    use_plan("samples")
    expected = mh.hvp(model, X, y, tangent=model, weight=weight)
    X[7, 1, 2] = np.nan
    product = mh.hvp(model, X, y, tangent=model, weight=weight)
    np.testing.assert_array_equal(product.W, expected.W)
    np.testing.assert_array_equal(product.U, expected.U)


@pytest.mark.parametrize("kind", ["classifier", "layer"])
@pytest.mark.parametrize("query", [None, -1])
@pytest.mark.parametrize("factors", [0, 1, 2])
@pytest.mark.parametrize(("n", "d"), [(5, 37), (90, 261), (45, 272), (2001, 5)])
def test_samples_that_go_through_w_together(n, d, factors, query, kind):
    """Few rows of many features, whose D X is kept; groups of samples, the last one shorter."""
    rng = np.random.default_rng(3)
    tokens = 3
    q = tokens if query is None else 1

    def normal(*shape):
        return rng.standard_normal(shape) / d**0.5

    W = normal(HEADS, d, d) / d**0.5  # logits are of order 1
    if factors:
        rank = min(RANK, d // 2)
        W = mh.LowRank(normal(HEADS, d, rank), normal(HEADS, d, rank) if factors == 2 else None)
    if kind == "classifier":
        model = mh.Classifier(W, normal(HEADS, q, d), query=query)
    else:
        model = mh.Layer(W, normal(HEADS, d, OUT), query=query)
    data = {
        "X": rng.standard_normal((n, tokens, d)),
        "lengths": rng.integers(0, tokens + 1, n),
        "weight": rng.integers(0, 3, n).astype(float),
    }
    data["y"] = np.sign(rng.standard_normal(n if kind == "classifier" else (n, q, OUT)))
    tangent = mh.Gradients(**{name: normal(*x.shape) for name, x in model.parameters.items()})
    product = mh.hvp(model, data["X"], data["y"], tangent=tangent, num_threads=1, **rest(data))
    compared(model, data, tangent, "logistic", product, 1e-12)
    again = mh.hvp(model, data["X"], data["y"], tangent=tangent, num_threads=3, **rest(data))
    for name in model.parameters:
        np.testing.assert_array_equal(getattr(again, name), getattr(product, name))


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("plan", ["rows", "samples"])
@pytest.mark.parametrize("attention", ["softmax", "softmax1", "sigmoid"])
@pytest.mark.parametrize("kind", ["classifier", "layer", "factors"])
@pytest.mark.parametrize("W", ["dense", "identity"])
def test_directions_of_the_readout_alone(kind, W, attention, plan, isa, use_plan, use_isa):
    """Nothing moves the scores; and where W is an identity nothing else can."""
    use_isa(isa)
    use_plan(plan)
    n, tokens, d, heads = 21, 6, 5, 3  # with samples as lanes the last block is not full
    rng = np.random.default_rng(0)
    normal = rng.standard_normal
    w = normal((heads, d, d)) if W == "dense" else None
    options = {"attention": attention, "scale": 0.7}
    if kind == "classifier":
        model = mh.Classifier(w, normal((heads, tokens, d)), **options)
    elif kind == "layer":
        model = mh.Layer(w, normal((heads, d, OUT)), **options)
    else:
        values = mh.ValueOutput(normal((heads, d, 1)), normal((heads, 1, OUT)))
        model = mh.Layer(w, values, **options)
    readout = tuple(name for name in model.parameters if name != "W")
    data = {"X": normal((n, tokens, d)), "lengths": rng.integers(0, tokens + 1, n)}
    data["y"] = np.sign(normal(model(data["X"]).shape))
    along = mh.Gradients(**{name: normal(model.parameters[name].shape) for name in readout})
    want = mh.reference.hvp(model, data["X"], data["y"], along, lengths=data["lengths"])
    got = mh.hvp(model, data["X"], data["y"], tangent=along, wrt=readout, lengths=data["lengths"])
    for name in readout:
        # Both sum a few hundred terms in float64.
        error = np.abs(getattr(got, name) - want[name]).max() / np.abs(want[name]).max()
        assert error < 1e-12


@pytest.mark.parametrize("kind", ["classifier", "layer"])
def test_the_readout_alone_in_tiles_and_on_threads(kind):
    n, tokens, d, heads = 3, 700, 5, 2  # more rows than a tile has
    rng = np.random.default_rng(1)
    X, U = rng.standard_normal((n, tokens, d)), rng.standard_normal((heads, tokens, d))
    if kind == "classifier":
        model = mh.Classifier(None, U)
    else:
        model = mh.Layer(None, U[:, :OUT].transpose(0, 2, 1))
    y = np.sign(rng.standard_normal(model(X).shape))
    want = mh.reference.hvp(model, X, y, model)
    (name,) = model.parameters
    products = [getattr(mh.hvp(model, X, y, tangent=model, num_threads=k), name) for k in (1, 2, 3)]
    # Sums of half a million terms.
    assert np.abs(products[0] - want[name]).max() / np.abs(want[name]).max() < 1e-11
    for other in products[1:]:
        np.testing.assert_array_equal(other, products[0])


def test_runs():
    parts = [instance("layer", "squared", "self", 1, seed=seed) for seed in (1, 2, 3)]
    stacked = mh.stack([model for model, _, _ in parts])
    data = {name: np.stack([d[name] for _, d, _ in parts]) for name in parts[0][1]}
    tangent = mh.Gradients(
        Q=np.stack([t.Q for _, _, t in parts]), V=np.stack([t.V for _, _, t in parts])
    )
    product = mh.hvp(stacked, data["X"], data["y"], tangent=tangent, loss="squared", **rest(data))
    for r, (model, alone, along) in enumerate(parts):
        one = mh.hvp(model, alone["X"], alone["y"], tangent=along, loss="squared", **rest(alone))
        assert np.array_equal(product.Q[r], one.Q)
        assert np.array_equal(product.V[r], one.V)


def test_symmetry():
    model, data, v = instance("layer", "cross_entropy", "prompt", 2)
    _, _, w = instance("layer", "cross_entropy", "prompt", 2, seed=9)
    options = {"loss": "cross_entropy", **rest(data)}
    vHw = mh.dot(v, mh.hvp(model, data["X"], data["y"], tangent=w, **options))
    wHv = mh.dot(w, mh.hvp(model, data["X"], data["y"], tangent=v, **options))
    # Two orders of summing the same terms.
    assert abs(vHw - wHv) < 1e-12 * max(abs(vHw), 1.0)


def test_what_the_direction_may_be():
    model, data, _ = instance("classifier", "logistic", "self", 0)
    X, y = data["X"], data["y"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'tangent'"):
        mh.hvp(model, X, y)
    with pytest.raises(TypeError, match="tangent: expected Gradients, got NoneType"):
        mh.hvp(model, X, y, tangent=None)
    with pytest.warns(DeprecationWarning, match="hvp: tangent is given by keyword, tangent=..."):
        by_position = mh.hvp(model, X, y, model, **rest(data))
    assert np.array_equal(by_position.W, mh.hvp(model, X, y, tangent=model, **rest(data)).W)
    with pytest.raises(ValueError, match="tangent: expected parameters of the model, W, U, got V"):
        mh.hvp(model, X, y, tangent=mh.Gradients(V=np.zeros((HEADS, D, OUT))))
    with pytest.raises(ValueError, match=r"tangent.W: expected shape \(3, 4, 4\), got \(3, 4, 5\)"):
        mh.hvp(model, X, y, tangent=mh.Gradients(W=np.zeros((HEADS, D, D + 1))))
    with pytest.raises(TypeError, match=r"tangent.W: expected dtype float64"):
        mh.hvp(model, X, y, tangent=mh.Gradients(W=np.zeros((HEADS, D, D), np.float32)))
    as_model = mh.hvp(model, X, y, tangent=model, **rest(data))
    as_gradients = mh.hvp(model, X, y, tangent=mh.Gradients(W=model.W, U=model.U), **rest(data))
    assert np.array_equal(as_model.W, as_gradients.W)
