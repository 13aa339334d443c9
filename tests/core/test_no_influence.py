"""What has weight 0 or is masked changes no bit, whatever it holds."""

from dataclasses import replace

import numpy as np
import pytest
from lists import targets, within_domain

import mhfast as mh

PLANS = ("samples", "hybrid", "rows", "tiles", "runs")
LAYER_PLANS = ("samples", "hybrid", "rows")
# 1e200 and 1e30 are finite, their products are not.
FILLINGS = {np.float64: (np.nan, np.inf, -np.inf, 1e200), np.float32: (np.nan, np.inf, 1e30)}
# One at least for each kind of targets: what has no part has none whatever the formula is.
OF_OUTPUTS = ("logistic", "exponential", "linear", "squared", "negative_log")
LOSSES = {
    mh.Classifier: OF_OUTPUTS,
    mh.Layer: (*OF_OUTPUTS, "cross_entropy", "soft_cross_entropy"),
}
n, T, d, H, p, q = 19, 5, 6, 3, 4, 2


def draw(kind, loss, dtype=np.float64, query="self", factored=False, causal=False, runs=None):
    """A model and a data set, and whether rows have weights of their own is the caller's."""
    rng = np.random.default_rng(1)

    def new(*shape):
        return rng.standard_normal(shape).astype(dtype)

    rows = {"self": T, "token": 1}.get(query, q)
    lead = () if runs is None else (runs,)
    W = mh.LowRank(new(*lead, H, d, 2), new(*lead, H, d, 2)) if factored else new(*lead, H, d, d)
    rest = {"prompt": new(*lead, q, d)} if query == "prompt" else {}
    if query == "token":
        rest["query"] = 2
    readout = new(H, rows, d) if kind is mh.Classifier else new(H, d, p)
    model = kind(W, readout, scale=0.5, causal=causal, **rest)
    shape = (n,) if kind is mh.Classifier else (n, rows, p)
    y = targets(loss, shape, rng, dtype, p)
    external = {"query": new(n, q, d)} if query == "external" else {}
    model, X = within_domain(loss, model, new(n, T, d))
    return model, mh.Dataset(X, y, **external)


def results(model, data, loss):
    """Value, all gradients, a product of the Hessian and a training."""
    wrt = tuple(model.parameters)
    if model.runs is None:
        wrt += ("X", *(("query",) if data.query is not None else ()))
    value, g = mh.value_and_grad(model, data, loss=loss, wrt=wrt)
    product = mh.hvp(model, data, tangent=model, loss=loss)
    # The large step saturates, so that gradients are taken with their largest factors left out.
    run = mh.train(
        model, data, steps=3, loss=loss, optimizer=mh.NormalizedGradientDescent(9.0), wrt=None,
        record=("loss", "accuracy", "margin", "grad_norm", "attention_max"),
    )  # fmt: skip
    return [
        np.asarray(value), *(getattr(g, name) for name in wrt),
        *(getattr(product, name) for name in model.parameters),
        *run.model.parameters.values(), *run.history.values(),
    ]  # fmt: skip


def filled(data, filling):
    """The data with something else in the samples 4, 11 and n - 1."""
    X = data.X.copy()
    X[4] = X[11, 3, 2] = X[n - 1, 0] = filling
    if data.query is None:
        return replace(data, X=X)
    Z = data.query.copy()
    Z[4, 1] = filling
    return replace(data, X=X, query=Z)


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_array_equal(a, b)


CASES = [(kind, loss, "self", False) for kind, losses in LOSSES.items() for loss in losses]
CASES += [
    (kind, "squared", query, factored)
    for kind in LOSSES
    for query in ("token", "external", "prompt")
    for factored in (False, True)
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("kind", "loss", "query", "factored"), CASES)
def test_samples_of_weight_zero(kind, loss, query, factored, plan, dtype, use_plan):
    use_plan(plan)
    runs = 3 if plan == "runs" else None
    model, data = draw(kind, loss, dtype, query, factored, runs=runs)
    weight = np.ones(n, dtype)
    weight[[4, 11, n - 1]] = 0
    data = replace(data, weight=weight)
    want = results(model, data, loss)
    for filling in FILLINGS[dtype]:
        spoilt = filled(data, filling)
        same(results(model, spoilt, loss), want)
        if not np.isfinite(filling):  # outputs know no weights
            outputs = model(spoilt) if runs is None else model(spoilt)[1]
            assert np.isnan(outputs[4]).all()
            assert np.isnan(outputs[11]).any()


@pytest.mark.parametrize("plan", LAYER_PLANS)
@pytest.mark.parametrize("loss", LOSSES[mh.Layer])
def test_rows_of_weight_zero(loss, plan, use_plan):
    """Of an external query, the rows themselves; of a causal layer the last token, too."""
    use_plan(plan)
    model, data = draw(mh.Layer, loss, query="external")
    weight = np.ones((n, q))
    weight[3, 1] = 0
    data = replace(data, weight=weight)
    want = results(model, data, loss)
    for filling in FILLINGS[np.float64]:
        Z = data.query.copy()
        Z[3, 1] = filling
        same(results(model, replace(data, query=Z), loss), want)
    model, data = draw(mh.Layer, loss, causal=True)
    weight = np.ones((n, T))
    weight[3, T - 1] = 0
    data = replace(data, weight=weight)
    want = results(model, data, loss)
    for filling in FILLINGS[np.float64]:
        X = data.X.copy()
        X[3, T - 1] = filling
        same(results(model, replace(data, X=X), loss), want)


def pulled_back(model, data, cotangent):
    """The gradients of Σ cotangent · model(X) by all that it depends on."""
    wrt = tuple(model.parameters)
    if model.runs is None:
        wrt += ("X", *(("query",) if data.query is not None else ()))
    g = mh.backward(model, data, cotangent, wrt=wrt)
    return [getattr(g, name) for name in wrt]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("plan", PLANS[:-1])
@pytest.mark.parametrize("query", ["self", "token", "external", "prompt"])
@pytest.mark.parametrize("kind", LOSSES)
def test_samples_of_cotangent_zero(kind, query, plan, dtype, use_plan):
    use_plan(plan)
    model, data = draw(kind, "squared", dtype, query, factored=query == "external")
    cotangent = np.random.default_rng(2).standard_normal(data.y.shape).astype(dtype)
    cotangent[[4, 11, n - 1]] = 0
    want = pulled_back(model, data, cotangent)
    for filling in FILLINGS[dtype]:
        spoilt = filled(data, filling)
        same(pulled_back(model, spoilt, cotangent), want)
        if not np.isfinite(filling):
            some = cotangent.copy()
            some.reshape(n, -1)[4, -1] = 1e-3  # one output is enough
            assert all(np.isnan(g).any() for g in pulled_back(model, spoilt, some))


@pytest.mark.parametrize("at", [0, n - 1])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_first_or_last_sample_alone(kind, at):
    """Whether there are samples without influence is asked of each of them."""
    model, data = draw(kind, "squared")
    X = data.X.copy()
    X[at, 1, 2] = np.nan
    weighted = replace(data, weight=np.where(np.arange(n) == at, 0.0, 1.0))
    same(results(model, replace(weighted, X=X), "squared"), results(model, weighted, "squared"))
    cotangent = np.random.default_rng(2).standard_normal(data.y.shape)
    cotangent[at] = 0
    same(pulled_back(model, replace(data, X=X), cotangent), pulled_back(model, data, cotangent))


@pytest.mark.parametrize("plan", LAYER_PLANS)
def test_rows_of_cotangent_zero(plan, use_plan):
    """Of an external query, the rows themselves; of a causal layer the last token, too."""
    use_plan(plan)
    model, data = draw(mh.Layer, "squared", query="external")
    causal, tokens = draw(mh.Layer, "squared", causal=True)
    rng = np.random.default_rng(2)
    of_rows, of_tokens = rng.standard_normal((n, q, p)), rng.standard_normal((n, T, p))
    of_rows[3, 1] = of_tokens[3, T - 1] = 0
    want = pulled_back(model, data, of_rows), pulled_back(causal, tokens, of_tokens)
    for filling in FILLINGS[np.float64]:
        Z, X = data.query.copy(), tokens.X.copy()
        Z[3, 1] = X[3, T - 1] = filling
        same(pulled_back(model, replace(data, query=Z), of_rows), want[0])
        same(pulled_back(causal, replace(tokens, X=X), of_tokens), want[1])


@pytest.mark.parametrize("kind", LOSSES)
def test_cotangents_of_runs_are_zero_each_for_itself(kind):
    model, data = draw(kind, "squared", runs=2)
    X = data.X.copy()
    X[5, 2] = np.nan
    cotangent = np.random.default_rng(2).standard_normal((2, *data.y.shape))
    cotangent[1, 5] = 0
    g = mh.backward(model, X, cotangent)
    one = mh.backward(model[1], data.X, cotangent[1])
    for name in model.parameters:
        assert np.isnan(getattr(g, name)[0]).any()
        np.testing.assert_array_equal(getattr(g, name)[1], getattr(one, name))


@pytest.mark.parametrize("plan", LAYER_PLANS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rows_that_do_not_see_a_token(dtype, plan, use_plan):
    use_plan(plan)
    model, data = draw(mh.Layer, "squared", dtype, causal=True)
    outputs, weights = model(data), model.attention(data)
    for filling in (np.nan, np.inf):
        X = data.X.copy()
        X[3, T - 2, 1] = filling
        spoilt = model(X)
        assert np.isnan(spoilt[3, T - 2 :]).all()
        spoilt[3, T - 2 :] = outputs[3, T - 2 :]
        np.testing.assert_array_equal(spoilt, outputs)
        attention = model.attention(X)
        assert np.isnan(attention[3, :, T - 2 :]).any()
        np.testing.assert_array_equal(attention[3, :, : T - 2], weights[3, :, : T - 2])
        _, g = mh.value_and_grad(model, X, data.y, loss="squared", wrt=("V", "X"))
        assert np.isnan(g.V).any()  # the loss counts the rows that see it
        assert np.isfinite(np.delete(g.X, 3, axis=0)).all()


@pytest.mark.parametrize("plan", PLANS[:-1])
def test_a_causal_token_and_what_comes_after_it(plan, use_plan):
    use_plan(plan)
    model, data = draw(mh.Classifier, "logistic", query="token", causal=True)
    want = [model(data), *results(model, data, "logistic")]
    X = data.X.copy()
    X[3, 3:] = np.nan
    X[5, 4] = np.inf
    spoilt = replace(data, X=X)
    same([model(spoilt), *results(model, spoilt, "logistic")], want)
    X[3, 2, 1] = np.nan  # the token itself
    assert np.flatnonzero(np.isnan(model(X))).tolist() == [3]


@pytest.mark.parametrize("plan", PLANS[:-1])
def test_a_causal_classifier_of_a_bad_token(plan, use_plan):
    """Its output is a sum over all rows, so it is NaN; no other sample's is."""
    use_plan(plan)
    model, data = draw(mh.Classifier, "logistic", causal=True)
    outputs, X = model(data), data.X.copy()
    X[3, T - 1] = np.nan
    spoilt = model(X)
    assert np.isnan(spoilt[3])
    np.testing.assert_array_equal(np.delete(spoilt, 3), np.delete(outputs, 3))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("query", ["self", "external"])
@pytest.mark.parametrize("kind", LOSSES)
def test_runs_whose_data_differ_are_runs_alone(kind, query, plan, use_plan):
    """Each has left-out samples, weights and bad tokens of its own; the first has no bad ones."""
    use_plan(plan)
    runs = 3
    model, data = draw(kind, "squared", query=query, runs=runs)
    rng = np.random.default_rng(6)
    parts = []
    for r in range(runs):
        weight = rng.uniform(0.5, 2.0, data.y.shape[: 1 if kind is mh.Classifier else 2])
        weight[[r, 4 + r]] = 0.0
        arrays = {"X": data.X + r, "y": data.y - r, "weight": weight}
        if query == "external":
            arrays["query"] = data.query * (1 + r)
        parts.append(replace(data, **arrays))
    names = ["X", "y", "weight", *(("query",) if query == "external" else ())]
    stacked = {name: np.stack([getattr(part, name) for part in parts]) for name in names}
    for name in ("X", "query"):
        if name in stacked:
            for r in range(1, runs):
                stacked[name][r, [r, 4 + r]] = np.nan
    together = results(model, mh.Dataset(**stacked), "squared")
    first = 1 + len(model.parameters)  # behind the value and these gradients: those by the data
    for r, part in enumerate(parts):
        alone = results(model[r], part, "squared")
        del alone[first : first + (2 if query == "external" else 1)]
        for one, of_run in zip(alone, together, strict=True):
            # The plan, and so the order of sums, may be another; three steps amplify that.
            np.testing.assert_allclose(of_run[r], one, rtol=0, atol=1e-12 * np.abs(one).max())
