"""Every record equals its definition, at the steps it is due, and fits in the room it may take."""

from dataclasses import replace

import numpy as np
import pytest

import mhfast as mh
from mhfast.training.quantities import OF_ANY_SET, names

# Both sides work in float64 on numbers of order one; float32 kernels round their results.
TOLERANCE = {np.float64: 1e-12, np.float32: 3e-6}
NAMES = names(("W", "U"))
STEPS = 13


def data_set(dtype, n, seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 3, 5)).astype(dtype)
    y = rng.choice([-1, 1], n)
    return mh.Dataset(
        X,
        y,
        query=rng.standard_normal((n, 4, 5)).astype(dtype),
        weight=(0.5 + rng.random(n)).astype(dtype),
        # The last sample group stays empty.
        sample_groups=(rng.integers(0, 2, n), ("common", "rare", "none")),
        token_groups=(rng.integers(0, 4, (n, 3)), ("a", "b", "c", "d")),
    )


def trained(dtype, record, **options):
    model = mh.Classifier.gaussian(2, 4, 5, std=0.5, seed=3, dtype=dtype)
    rng = np.random.default_rng(4)
    directions = {
        "both": mh.Gradients(
            **{
                name: rng.standard_normal(array.shape).astype(dtype)
                for name, array in model.parameters.items()
            }
        ),
        "only_U": mh.Gradients(U=rng.standard_normal(model.U.shape).astype(dtype)),
    }
    run = mh.train(
        model,
        data_set(dtype, 7, 1),
        steps=STEPS,
        optimizer=mh.GradientDescent(0.3),
        test={"new": data_set(dtype, 11, 2), "plain": data_set(dtype, 2, 5)},
        directions=directions,
        record=record,
        **options,
    )
    return model, directions, run


def expected_of(name, data, W, U):
    """Row of a record from the data and the parameters in float64."""
    share = data.weight.astype(np.float64) / data.weight.sum(dtype=np.float64)
    model = mh.Classifier(W, U)
    margins = data.y * mh.reference.outputs(model, data.X, query=data.query)
    A = mh.reference.attention(model, data.X, query=data.query)
    if name == "attention":
        return A
    if name == "attention_max":
        return np.einsum("nht,n->h", A.max(axis=3), share) / A.shape[2]
    if name == "attention_groups":
        rows = np.zeros((2, 3, 4))
        for a in range(2):
            members = data.sample_groups.index == a
            for b in range(4):
                inside = A * (data.token_groups.index == b)[:, None, None, :]
                of_rows = inside.sum(axis=3).mean(axis=2)
                counts = share * members / max(share[members].sum(), 1e-300)
                rows[:, a, b] = counts @ of_rows
        return rows
    return {
        "loss": (share * np.log1p(np.exp(-margins))).sum(),
        "accuracy": (share * (margins > 0)).sum(),
        "margin": margins.min(),
    }[name]


def length(*arrays):
    return np.sqrt(sum((np.asarray(a, np.float64) ** 2).sum() for a in arrays))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_record_equals_its_definition(dtype):
    tests = [f"{test}_{name}" for test in ("new", "plain") for name in OF_ANY_SET]
    start, directions, run = trained(dtype, (*NAMES, *tests))
    sets = {
        "": data_set(dtype, 7, 1),
        "new_": data_set(dtype, 11, 2),
        "plain_": data_set(dtype, 2, 5),
    }
    cosines = [f"cosine_{name}" for name in directions]
    keys = {*NAMES, *tests, *cosines} - {"cosine"}
    assert set(run.history) == set(run.steps) == keys

    for k in range(STEPS + 1):
        W, U = (run.history[name][k].astype(np.float64) for name in ("W", "U"))
        data = sets[""]
        summaries = ("attention", "attention_max", "attention_groups")
        expected = {name: expected_of(name, data, W, U) for name in summaries}
        for prefix, other in sets.items():
            for name in OF_ANY_SET:
                expected[prefix + name] = expected_of(name, other, W, U)
        _, g = mh.reference.value_and_grad(
            mh.Classifier(W, U), data.X, data.y, query=data.query, weight=data.weight
        )
        expected["grad_norm"] = length(*g.values())
        expected["param_norm"] = length(W, U)
        expected["distance"] = length(W - start.W, U - start.U)
        for key, direction in zip(cosines, directions.values(), strict=True):
            pairs = [(U, direction.U)] + [(W, direction.W)] * (direction.W is not None)
            dot = sum((a * b).sum() for a, b in pairs)
            norms = length(*(a for a, _ in pairs)) * length(*(b for _, b in pairs))
            expected[key] = dot / norms
        assert set(expected) == keys - {"W", "U"}
        for key, value in expected.items():
            got = run.history[key][k]
            assert got.shape == np.shape(value), key
            scale = max(np.abs(value).max(), 1e-3)
            assert np.abs(got - value).max() < TOLERANCE[dtype] * scale, (key, k)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_dtypes(dtype):
    _, _, run = trained(dtype, ("loss", "W", "U", "attention", "attention_max", "cosine"))
    assert {name: rows.dtype.type for name, rows in run.history.items()} == {
        "loss": np.float64,
        "W": dtype,
        "U": dtype,
        "attention": dtype,
        "attention_max": np.float64,
        "cosine_both": np.float64,
        "cosine_only_U": np.float64,
    }


def test_one_direction_or_several():
    """A model, gradients, arrays by parameter: one alone, several by name or by number."""
    model = mh.Classifier.gaussian(2, 4, 5, std=0.5, seed=3)
    U = np.random.default_rng(4).standard_normal(model.U.shape)

    def cosines(directions):
        run = mh.train(
            model, data_set(np.float64, 7, 1), steps=3, optimizer=mh.GradientDescent(0.3),
            record=("cosine", "U"), directions=directions,
        )  # fmt: skip
        return run.history

    expected = [
        (snapshot * U).sum() / np.linalg.norm(snapshot) / np.linalg.norm(U)
        for snapshot in cosines({"U": U})["U"]
    ]
    for one in (mh.Gradients(U=U), {"U": U}, {"U": U.tolist()}):
        history = cosines(one)
        assert set(history) == {"cosine", "U"}
        assert history["cosine"] == pytest.approx(expected, rel=1e-12)
        assert cosines({"a": one, "b": model})["cosine_a"].tolist() == history["cosine"].tolist()
        assert cosines([model, one])["cosine_1"].tolist() == history["cosine"].tolist()
    assert cosines(model)["cosine"][0] == pytest.approx(1.0, abs=1e-15)


def test_the_cosine_of_zero_parameters_is_zero():
    model = mh.Classifier.zeros(2, 4, 5)
    run = mh.train(
        model, data_set(np.float64, 7, 1), steps=0, optimizer=mh.GradientDescent(0.3),
        record="cosine", directions={"U": np.ones((2, 4, 5))},
    )  # fmt: skip
    assert run.history["cosine"].tolist() == [0.0]


def test_grad_norm_is_that_of_what_is_trained():
    model = mh.Classifier.gaussian(2, 4, 5, std=0.5, seed=3)
    data = data_set(np.float64, 7, 1)
    for wrt in ("W", "U"):
        run = mh.train(
            model, data, steps=0, wrt=wrt, optimizer=mh.GradientDescent(1.0), record="grad_norm"
        )
        _, g = mh.value_and_grad(model, data, wrt=wrt)
        assert run.history["grad_norm"][0] == pytest.approx(mh.norm(g), rel=1e-14)


def test_without_sample_groups_all_samples_are_one_group():
    model = mh.Classifier.gaussian(2, 4, 5, std=0.5, seed=3)
    full = data_set(np.float64, 7, 1)
    data = mh.Dataset(full.X, full.y, query=full.query, token_groups=full.token_groups)
    run = mh.train(
        model, data, steps=0, optimizer=mh.GradientDescent(1.0),
        record=("attention_groups", "attention"),
    )  # fmt: skip
    (weights,), (shares,) = run.history["attention"], run.history["attention_groups"]
    assert shares.shape == (2, 1, 4)
    second = (weights * (full.token_groups.index == 1)[:, None, None, :]).sum(axis=3)
    assert shares[:, 0, 1] == pytest.approx(second.mean(axis=(0, 2)), rel=1e-14)


def test_due_steps():
    record = {"loss": 1, "new_loss": 4, "W": 13, "U": 100, "margin": 5}
    _, _, run = trained(np.float64, record)
    assert run.steps["loss"].tolist() == list(range(14))
    assert run.steps["new_loss"].tolist() == [0, 4, 8, 12, 13]
    assert run.steps["W"].tolist() == [0, 13]
    assert run.steps["U"].tolist() == [0, 13]
    assert run.steps["margin"].tolist() == [0, 5, 10, 13]
    every_step = trained(np.float64, tuple(record))[2].history
    for name, k in run.steps.items():
        assert k.dtype == np.int64
        assert np.array_equal(run.history[name], every_step[name][k])


def test_functions():
    calls = []

    def heads(model):
        calls.append(model)
        return np.linalg.norm(model.U, axis=(1, 2))

    def loss_again(model):
        return mh.value_and_grad(model, data_set(np.float64, 7, 1))[0]

    def positive(model):
        return bool(model.W.sum() > 0)

    record = {heads: 5, loss_again: 2, positive: 1, "loss": 1, "U": 1}
    _, _, run = trained(np.float64, record)
    assert run.steps["heads"].tolist() == [0, 5, 10, 13]
    assert len(calls) == 4
    norms = np.linalg.norm(run.history["U"][[0, 5, 10, 13]], axis=(2, 3))
    assert np.array_equal(run.history["heads"], norms)
    assert run.steps["loss_again"].tolist() == [0, 2, 4, 6, 8, 10, 12, 13]
    # The same sum, at most in another order.
    same = run.history["loss"][run.steps["loss_again"]]
    assert run.history["loss_again"] == pytest.approx(same, rel=1e-14)
    assert run.history["positive"].dtype == np.float64
    assert set(run.history["positive"]) <= {0.0, 1.0}


def test_functions_of_single_precision():
    def trace(model):
        return np.trace(model.W, axis1=1, axis2=2)

    def entry(model):
        return model.W[0, 0, 0]

    _, _, run = trained(np.float32, (trace, entry))
    assert run.history["trace"].dtype == np.float32
    assert run.history["entry"].dtype == np.float64  # a recorded scalar


def test_function_that_changes_its_shape_keeps_the_run():
    sizes = iter(range(1, 100))

    def growing(_):
        return np.zeros(next(sizes))

    with pytest.raises(
        ValueError, match=r"'growing': expected shape \(1,\).*\(2,\) at step 1"
    ) as e:
        trained(np.float64, (growing, "loss"))
    assert e.value.run.step == 1
    assert e.value.run.history["growing"].shape == (1, 1)


def test_function_of_a_wrong_kind():
    def words(_):
        return "many"

    with pytest.raises(TypeError, match="'words': expected real values"):
        trained(np.float64, words)


def test_threshold_end_is_recorded():
    def norm(model):
        return np.linalg.norm(model.U)

    _, _, run = trained(np.float64, {"loss": 4, norm: 5}, stop={"accuracy": 0.0})
    assert (run.step, run.reason) == (0, "accuracy")
    _, _, run = trained(np.float64, {"loss": 4, norm: 5}, callback=lambda k, _: k == 6)
    assert run.steps["loss"].tolist() == [0, 4, 6]
    assert run.steps["norm"].tolist() == [0, 5, 6]
    assert run.history["norm"][-1] == np.linalg.norm(run.model.U)


def test_nothing_is_recorded_on_request():
    _, _, run = trained(np.float64, ())
    assert run.history == run.steps == {}


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ("los", ValueError, r"record: expected one of loss, .*after 'new_' also .*got 'los'"),
        ("test_loss", ValueError, r"got 'test_loss'"),
        ("new_W", ValueError, r"got 'new_W'"),
        (("loss", "loss"), ValueError, r"record: .*'loss' twice"),
        ((lambda _: 0, lambda _: 1), ValueError, r"record: .*'<lambda>' twice"),
        ({"loss": 0}, ValueError, r"record 'loss': .*at least 1, got 0"),
        ({"loss": 1.5}, TypeError, r"record 'loss': .*float"),
        (7, TypeError, r"record: .*got 7"),
        ((7,), TypeError, r"record: .*got 7"),
    ],
)
def test_wrong_records(record, error, message):
    with pytest.raises(error, match=message):
        trained(np.float64, record)


def test_missing_ingredients():
    model = mh.Classifier.zeros(2, 3, 5)
    X = np.ones((7, 3, 5))
    options = {"steps": 1, "optimizer": mh.GradientDescent(1.0)}
    y = np.ones(7)
    with pytest.raises(ValueError, match=r"'cosine': expected directions="):
        mh.train(model, X, y, record="cosine", **options)
    with pytest.raises(ValueError, match=r"'attention_groups': expected a Dataset with token"):
        mh.train(model, X, y, record="attention_groups", **options)
    with pytest.raises(ValueError, match=r"record: expected test= with 'test_loss', got no test"):
        mh.train(model, X, y, record="test_loss", **options)


@pytest.mark.parametrize(
    ("directions", "error", "message"),
    [
        ({"a": mh.Gradients()}, ValueError, r"directions\['a'\]: expected an entry"),
        ({"a": mh.Gradients(W=np.zeros((2, 5, 5)))}, ValueError, r"directions\['a'\]: .*zero"),
        ({"a": mh.Gradients(U=np.ones((2, 5, 3)))}, ValueError, r"\['a'\].U: .*\(2, 3, 5\)"),
        ({"a": mh.Gradients(U=np.ones((2, 3, 5), "f4"))}, TypeError, r"\['a'\].U: .*float64"),
        ({"a": np.ones(3)}, TypeError, r"directions\['a'\]: expected Gradients, got ndarray"),
        ([1], TypeError, r"directions\['0'\]: expected Gradients, got int"),
        (1, TypeError, r"directions: expected Gradients, or a dict or sequence .*got int"),
        ({"V": np.ones((2, 5, 3))}, ValueError, r"directions: .*among W, U, got 'V'"),
        (mh.Gradients(X=np.ones((7, 3, 5))), ValueError, r"directions: .*among W, U, got 'X'"),
        ({"U": np.ones((2, 5, 3))}, ValueError, r"directions.U: .*\(2, 3, 5\)"),
    ],
)
def test_wrong_directions(directions, error, message):
    model = mh.Classifier.zeros(2, 3, 5)
    with pytest.raises(error, match=message):
        mh.train(
            model, np.ones((7, 3, 5)), np.ones(7), steps=1,
            optimizer=mh.GradientDescent(1.0), record="cosine", directions=directions,
        )  # fmt: skip


def test_records_that_take_too_much_room():
    # 1e9 steps would run for hours: the error comes before the start.
    model = mh.Classifier.zeros(2, 3, 5)
    options = {"steps": 10**9, "optimizer": mh.GradientDescent(1.0)}
    X, y = np.ones((7, 3, 5)), np.ones(7)
    message = r"limit is 2 GiB, .*these records take 380 GiB, of which 'W' takes 373 GiB"
    with pytest.raises(ValueError, match=message):
        mh.train(model, X, y, record=("loss", "W"), **options)

    def many(_):
        return np.broadcast_to(1.0, (1000, 1000))

    with pytest.raises(ValueError, match=r"'many' takes 7.45e\+06 GiB"):
        mh.train(model, X, y, record=many, **options)


def test_means_over_attention_by_hand():
    """W = 0 spreads evenly over the keys seen: 1 for a single key, 1/2 for two."""
    data = mh.Dataset(
        np.ones((2, 2, 3)), [1, -1], lengths=[1, 2], weight=[3.0, 1.0],
        token_groups=[[0, 1], [0, 1]], sample_groups=[0, 0],
    )  # fmt: skip
    options = {"steps": 0, "optimizer": mh.GradientDescent(0.0)}
    options["record"] = ("attention_max", "attention_groups")

    def means(model, data):
        history = mh.train(model, data, **options).history
        return history["attention_max"][0].tolist(), history["attention_groups"][0].tolist()

    # Rows: (1, 0) with weight 3, and twice (1/2, 1/2) with weight 1; the fourth is padding.
    model = mh.Classifier.zeros(1, 2, 3)
    assert means(model, data) == ([0.8], [[[0.8, 0.2]]])
    each = replace(data, sample_groups=[0, 1], weight=[1.0, 0.0])
    assert means(model, each) == ([1.0], [[[1.0, 0.0], [0.0, 0.0]]])
    # A causal layer with weights of rows: (1, 0), padding; (1, 0), (1/2, 1/2).
    layer = mh.Layer(np.zeros((1, 3, 3)), np.ones((1, 3, 1)), causal=True)
    rows = replace(data, y=np.ones((2, 2, 1)), weight=np.array([[2.0, 9.0], [1.0, 5.0]]))
    assert means(layer, rows) == ([0.6875], [[[0.6875, 0.3125]]])  # (2 + 1 + 5/2) / 8
    # Rows of an external query see the keys of their sample, and none where it has length 0.
    query = replace(data, query=np.ones((2, 1, 3)), lengths=[0, 2], weight=None)
    assert means(mh.Classifier(np.zeros((1, 3, 3)), np.zeros((1, 1, 3))), query) == (
        [0.5], [[[0.5, 0.5]]],
    )  # fmt: skip


def test_a_direction_is_compared_with_the_parameters_that_there_are():
    """With factors these are Q and K, each on its own; a direction of W is refused."""
    rng = np.random.default_rng(0)
    Q, K, U = rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 5, 3)), np.ones((2, 4, 5))
    model, data = mh.Classifier(mh.LowRank(Q, K), U), data_set(np.float64, 7, 1)
    options = {"steps": 0, "optimizer": mh.GradientDescent(0.0), "record": "cosine"}
    with pytest.raises(ValueError, match="expected parts among Q, K, U, got 'W'"):
        mh.train(model, data, directions={"W": np.ones((2, 5, 5))}, **options)
    run = mh.train(model, data, directions={"Q": 2 * Q, "K": K}, **options)
    want = (2 * (Q**2).sum() + (K**2).sum()) / (length(2 * Q, K) * length(Q, K))
    assert run.history["cosine"][0] == pytest.approx(want, rel=1e-14)


def test_a_test_set_too_small_for_the_team():
    """Each thread of the team that trains may be the one that evaluates a chunk."""
    data = mh.data.tokenized_mixture(60, 5, 12, seed=5)
    start = mh.Classifier.random_step(data, 3, seed=0)
    alone, together = (
        mh.train(
            start, data, steps=900, optimizer=mh.GradientDescent(1.7), record="test_loss",
            test=data.sample(20, seed=1), num_threads=threads,
        )
        for threads in (1, 2)
    )  # fmt: skip
    assert alone == together


@pytest.mark.parametrize("place", [0, 1, 15, 16, 33, 34])
def test_the_largest_weight_may_be_that_of_any_token(place):
    X = np.ones((2, 35, 3))
    X[:, place] = 2.0
    model = mh.Classifier(np.eye(3)[None], np.ones((1, 35, 3)))
    options = {"steps": 1, "optimizer": mh.GradientDescent(0.1), "record": "attention_max"}
    found = mh.train(model, X, np.array([1.0, -1.0]), **options).history["attention_max"][0]
    assert found == pytest.approx(model.attention(X).max(axis=-1).mean(), rel=1e-14)
