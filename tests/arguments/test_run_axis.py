"""The run axis of models, data and gradients: run r equals the call on run r alone."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from instances import DIM, HEADS, OUTPUTS, RUNS, SAMPLES, TOKENS, TOLERANCE, case, relative

import mhfast as mh
from mhfast import Gradients

KINDS = [mh.Classifier, mh.Layer]
CASES = {
    "W": {"runs": ("W",)},
    "readout": {"runs": ("U", "V")},
    "X": {"runs": ("X",)},
    "y": {"runs": ("y",)},
    "weight": {"runs": ("weight",), "weight": "samples"},
    "lengths": {"runs": ("lengths",), "lengths": True},
    "query given": {"runs": ("query",), "query": "given"},
    "query of the model": {"runs": ("query",), "query": "own"},
    "everything": {
        "runs": ("W", "U", "V", "X", "y", "weight", "lengths"),
        "weight": "samples",
        "lengths": True,
    },
    "integer query": {"runs": ("X", "lengths"), "query": -2, "lengths": True, "causal": True},
    "token of a shared X": {"runs": ("lengths",), "query": -2, "lengths": True},
    "Q": {"runs": ("Q",), "factors": "low rank"},
    "prompt": {"runs": ("prompt", "X"), "prompt": True},
    "identity W": {"runs": ("U", "V"), "identities": "W"},
    "identity V": {"runs": ("W", "U"), "identities": "V"},
    "both": {"runs": ("prompt",), "identities": "WV", "prompt": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_run_equals_the_call_on_it_alone(dtype, kind, name):
    the = case(kind, dtype=dtype, **CASES[name])
    close = TOLERANCE[the.model.dtype]
    value, g = the.value_and_grad(wrt=the.names())
    assert value.dtype == np.float64
    assert value.shape == (RUNS,)
    assert g.runs == RUNS
    sees = not {"y", "weight"} >= set(CASES[name]["runs"])
    outputs = the.model(the.X, **the.seen())
    for r in range(RUNS):
        alone = the.run(r)
        expected, h = alone.value_and_grad(wrt=the.names())
        assert value[r] == pytest.approx(expected, rel=close)
        for which in the.names():
            part, whole = getattr(g[r], which), getattr(h, which)
            assert part.shape == whole.shape
            assert np.abs(part - whole).max() <= close * max(np.abs(whole).max(), 1)
        assert (
            relative(outputs[r] if sees else outputs, alone.model(alone.X, **alone.seen())) < close
        )
        if r == 0:
            A = the.model.attention(the.X, **the.seen())
            weights = alone.model.attention(alone.X, **alone.seen())
            assert relative(A if A.ndim == 4 else A[r], weights) < close


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_threads_gives_the_same_bits(kind):
    the = case(kind, runs=("W", "X"), lengths=True)
    value, g = the.value_and_grad(wrt=the.names(), num_threads=1)
    outputs = the.model(the.X, **the.seen(), num_threads=1)
    for threads in (2, 3, 7):
        again, h = the.value_and_grad(wrt=the.names(), num_threads=threads)
        np.testing.assert_array_equal(again, value)
        assert g == h
        np.testing.assert_array_equal(the.model(the.X, **the.seen(), num_threads=threads), outputs)


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("weight", ["samples", "rows"])
def test_targets_and_weights_of_a_layer_may_have_runs(loss, weight):
    the = case(mh.Layer, loss=loss, weight=weight, runs=("y", "weight"))
    value, g = the.value_and_grad()
    for r in range(RUNS):
        expected, h = (
            the.run(r)
            ._replace(options=the.options | {"weight": the.options["weight"][r]})
            .value_and_grad()
        )
        assert value[r] == pytest.approx(expected, rel=1e-13)
        assert relative(g.V[r], h.V) < 1e-12


def test_leaving_one_out_is_one_call():
    the = case()
    value, g = the.value_and_grad(weight=1 - np.eye(SAMPLES))
    for i in range(SAMPLES):
        rest = np.arange(SAMPLES) != i
        expected, h = mh.value_and_grad(the.model, the.X[rest], the.y[rest])
        assert value[i] == pytest.approx(expected, rel=1e-13)
        assert relative(g.W[i], h.W) < 1e-12


def test_what_fits_the_rows_of_a_layer_belongs_to_them():
    X = np.random.default_rng(0).standard_normal((3, 3, DIM))
    y = np.ones((3, 3, OUTPUTS))
    layer = mh.Layer.gaussian(HEADS, DIM, OUTPUTS, std=0.3, seed=0)
    weight = 1 - np.eye(3)
    rows, _ = mh.value_and_grad(layer, X, y, weight=weight)
    assert isinstance(rows, float)
    runs, _ = mh.value_and_grad(layer, X, y, weight=np.repeat(weight[:, :, None], 3, axis=2))
    # Weight 1 in all rows of a sample, here taken for the mean over rows.
    expected, _ = mh.value_and_grad(layer, X[1:], y[1:])
    assert runs.shape == (3,)
    assert runs[0] == pytest.approx(expected / 3, rel=1e-13)


def test_one_run_has_a_run_axis_too():
    the = case(runs=("W",))
    one = dataclasses.replace(the.model, W=the.model.W[:1])
    assert one.runs == 1
    assert one(the.X).shape == (1, SAMPLES)


def test_indexing_a_model():
    model = case(runs=("W", "query"), query="own").model
    assert model.runs == RUNS
    assert model[2] == dataclasses.replace(model, W=model.W[2], query=model.query[2])
    assert model[2].runs is None
    assert model[-1] == model[RUNS - 1]
    assert model[2].U is model.U
    for index, rows in (
        (slice(1, 7, 2), [1, 3, 5]),
        ([3, 0], [3, 0]),
        (np.arange(RUNS) == 4, [4]),
    ):
        some = model[index]
        assert some.runs == len(rows)
        np.testing.assert_array_equal(some.W, model.W[rows])
        np.testing.assert_array_equal(some.query, model.query[rows])
    assert [one.runs for one in model] == [None] * RUNS
    with pytest.raises(TypeError):
        len(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"factors": "low rank"},
        {"prompt": True},
        {"identities": "W"},
        {"identities": "WV", "prompt": True},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_stacking_and_indexing_are_inverse(kind, options):
    models = [case(kind, seed=seed, **options).model for seed in range(RUNS)]
    side_by_side = mh.stack(models)
    assert side_by_side.runs == RUNS
    assert [side_by_side[r] for r in range(RUNS)] == models
    assert mh.stack([side_by_side[:4], side_by_side[4], side_by_side[5:]]) == side_by_side


def test_stacking_models_with_external_queries():
    first, second = (case(query="own", seed=seed).model for seed in (0, 1))
    assert mh.stack([first, second])[1] == second
    shared = dataclasses.replace(second, query=first.query)
    assert mh.stack([first, shared]).query is first.query
    assert mh.stack([first, shared])[1] == shared


@pytest.mark.parametrize("rank", [None, 2])
def test_drawing_several_models(rank):
    def drawn(**options):
        return mh.Classifier.gaussian(HEADS, TOKENS, DIM, std=0.5, rank=rank, **options)

    seeds = [4, 8, 4]
    model = drawn(seed=seeds, runs=3)
    assert model == drawn(seed=np.array(seeds))
    for r, seed in enumerate(seeds):
        assert model[r] == drawn(seed=seed)
    children = drawn(seed=4, runs=RUNS)
    assert children == drawn(seed=4, runs=RUNS)
    assert drawn(seed=4, runs=2) == children[:2]
    assert len({np.asarray(one.U).tobytes() for one in children}) == RUNS
    rng = np.random.default_rng(0)
    assert drawn(seed=rng, runs=2) != drawn(seed=rng, runs=2)


def test_zeros_with_runs():
    layer = mh.Layer.zeros(HEADS, DIM, OUTPUTS, runs=RUNS, prompt_rows=2, rank=1)
    for name, axes in (("Q", 3), ("K", 3), ("V", 3), ("prompt", 2)):
        assert layer.parameters[name].shape[0] == RUNS
        assert layer.parameters[name].ndim == axes + 1


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_are_equal(duplicate):
    the = case(runs=("W", "X"))
    assert duplicate(the.model) == the.model
    data = mh.Dataset(the.X, the.y)
    assert duplicate(data) == data
    assert duplicate(data).runs == RUNS
    assert the.model != the.model[:2]


def test_gradients_move_models_run_by_run():
    the = case(runs=("W", "X"))
    _, g = the.value_and_grad()
    rates = np.linspace(0.1, 1.0, RUNS)
    moved = the.model - rates * g
    assert (moved.runs, moved.U.shape[0]) == (RUNS, RUNS)
    for r, rate in enumerate(rates):
        alone = the.model[r] - rate * g[r]
        np.testing.assert_array_equal(moved[r].W, alone.W)
        np.testing.assert_array_equal(moved[r].U, alone.U)
    assert (g / rates)[2] == g[2] / rates[2]
    assert (g + g)[3] == 2 * g[3]
    shared = Gradients(W=np.ones_like(g.W[0]), U=np.ones_like(g.U[0]))
    assert (g - shared)[1] == g[1] - shared
    assert (rates * shared)[4] == rates[4] * shared


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_factors_of_runs_keep_the_dtype(dtype):
    g = Gradients(W=np.ones((RUNS, HEADS, DIM, DIM), dtype), U=np.ones((HEADS, 1, DIM), dtype))
    scaled = np.arange(RUNS) * g
    assert scaled.W.dtype == scaled.U.dtype == dtype
    np.testing.assert_array_equal(scaled.U[:, 0, 0, 0], np.arange(RUNS))


def test_dot_and_norm_are_per_run():
    the = case(runs=("W", "X"))
    _, g = the.value_and_grad()
    norms, products = mh.norm(g), mh.dot(g, g)
    assert norms.shape == products.shape == (RUNS,)
    for r in range(RUNS):
        assert norms[r] == mh.norm(g[r])
        # The same products, in another order for arrays of another shape.
        assert products[r] == pytest.approx(mh.dot(g[r], g[r]), rel=1e-14)
    far_apart = Gradients(W=np.array([1e-300, 1e300])[:, None, None, None] * np.ones((2, 1, 2, 2)))
    np.testing.assert_allclose(mh.norm(far_apart), [2e-300, 2e300], rtol=1e-15)
    shared = Gradients(W=np.ones((1, 2, 2)))
    np.testing.assert_allclose(mh.dot(far_apart, shared), [4e-300, 4e300], rtol=1e-15)


def full():
    rng = np.random.default_rng(0)
    return mh.Dataset(
        rng.standard_normal((RUNS, SAMPLES, TOKENS, DIM)),
        np.where(rng.random((RUNS, SAMPLES)) < 0.5, 1, -1),
        query=rng.standard_normal((RUNS, SAMPLES, 2, DIM)),
        lengths=rng.integers(0, TOKENS + 1, (RUNS, SAMPLES)),
        weight=rng.random((RUNS, SAMPLES)),
        token_groups=rng.integers(0, 2, (RUNS, SAMPLES, TOKENS)),
        sample_groups=np.array([0, 1, 1, 0, 1, 0]),
        truth={
            "mean": rng.standard_normal((RUNS, DIM)),
            "noise": 0.5,
            "deep": {"a": np.ones(RUNS)},
        },
    )


def test_a_run_of_a_dataset():
    data = full()
    assert data.runs == RUNS
    assert (data.n, data.tokens, data.dim) == (SAMPLES, TOKENS, DIM)
    one = data.run(2)
    assert one.runs is None
    for name in ("X", "y", "query", "lengths", "weight"):
        np.testing.assert_array_equal(getattr(one, name), getattr(data, name)[2])
    np.testing.assert_array_equal(one.token_groups.index, data.token_groups.index[2])
    assert one.sample_groups == data.sample_groups
    np.testing.assert_array_equal(one.truth["mean"], data.truth["mean"][2])
    assert one.truth["noise"] == 0.5
    assert one.truth["deep"]["a"] == 1.0
    assert data.run(-1) == data.run(RUNS - 1)


def test_a_run_has_the_generator_of_that_run():
    class Generators:
        def __call__(self, *_, **__):
            raise AssertionError

        def run(self, r):
            return lambda n, *, seed: (r, n, seed)

    data = dataclasses.replace(full(), generator=Generators())
    assert data.run(3).sample(4, seed=5) == (3, 4, 5)


def test_a_subset_of_a_dataset_with_runs():
    data = full()
    part = data.subset([4, 1])
    assert (part.n, part.runs) == (2, RUNS)
    for name in ("X", "y", "query", "lengths", "weight"):
        np.testing.assert_array_equal(getattr(part, name), getattr(data, name)[:, [4, 1]])
    np.testing.assert_array_equal(part.token_groups.index, data.token_groups.index[:, [4, 1]])
    np.testing.assert_array_equal(part.sample_groups.index, data.sample_groups.index[[4, 1]])


# n = 3 and a third axis or run axis of 3 as well: what y and weight are then is told by their kind.
LABELS, CLASSES = np.array([[1, -1, 1]] * 3), np.array([[0, 2, 1]] * 3)


@pytest.mark.parametrize(
    ("y", "weight", "runs"),
    [
        (np.ones(3), None, None),
        (np.ones((5, 3)), None, 5),
        (np.ones((3, 5, 2)), None, None),
        (np.ones((5, 3, 4, 2)), None, 5),
        (np.zeros((3, 5), int), None, None),
        (np.zeros((5, 3, 4), int), None, 5),
        (LABELS, None, 3),
        (LABELS.astype(float), None, 3),
        (CLASSES, None, None),
        (np.ones((3, 3, 2)), None, None),
        (CLASSES[None].repeat(3, axis=0), None, 3),
        (np.ones(3), np.ones((5, 3)), 5),
        (np.ones(3), 1 - np.eye(3), 3),
        (CLASSES, np.ones((3, 3)), None),
        (CLASSES, np.ones((5, 3)), 5),
        (CLASSES, np.ones((5, 3, 3)), 5),
        (np.ones((3, 4, 2)), np.ones((3, 4)), None),
    ],
)
def test_targets_and_weights_tell_whether_they_have_runs(y, weight, runs):
    assert mh.Dataset(np.ones((3, 4, 2)), y, weight=weight).runs == runs


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_stands_for_its_arrays(kind):
    the = case(kind, runs=("X", "y", "weight", "lengths"), weight="samples", lengths=True)
    options = {name: value for name, value in the.options.items() if name != "loss"}
    data = mh.Dataset(the.X, the.y, **options)
    value, g = mh.value_and_grad(the.model, data)
    expected, h = the.value_and_grad()
    np.testing.assert_array_equal(value, expected)
    assert g == h
    alone = mh.value_and_grad(the.model, data.run(3))
    assert alone == the.run(3).value_and_grad()


def test_a_random_step_of_each_run():
    data = full()
    model = mh.Classifier.random_step(data, HEADS, seed=range(RUNS))
    for r in range(RUNS):
        assert model[r] == mh.Classifier.random_step(data.run(r), HEADS, seed=r)
    shared = mh.Classifier.random_step(data.run(0), HEADS, seed=[3, 5])
    assert shared[1] == mh.Classifier.random_step(data.run(0), HEADS, seed=5)
    signs = np.sign(mh.Classifier.random_step(data, HEADS, seed=7).U[:, :, 0, 0])
    assert len(np.unique(np.abs(signs @ signs.T), axis=0)) > 1


WRONG = [
    (
        lambda: mh.Classifier(np.ones((3, 1, 2, 2)), np.ones((4, 1, 1, 2))),
        "U: expected a run axis of length R = 3, that of W, got 4 (shape (4, 1, 1, 2))",
    ),
    (
        lambda: mh.LowRank(np.ones((3, 1, 2, 2)), np.ones((4, 1, 2, 2))),
        "K: expected a run axis of length R = 3, that of Q, got 4 (shape (4, 1, 2, 2))",
    ),
    (
        lambda: mh.Layer(np.ones((3, 1, 2, 2)), np.ones((1, 2, 2)), np.ones((4, 5, 1, 2))),
        "query: expected a run axis of length R = 3, that of W, got 4 (shape (4, 5, 1, 2))",
    ),
    (
        lambda: mh.Layer.zeros(1, 2, 2, runs=3)(np.ones((4, 5, 6, 2))),
        "X: expected a run axis of length R = 3, that of W, got 4 (shape (4, 5, 6, 2))",
    ),
    (
        lambda: mh.Layer.zeros(1, 2, 2)(np.ones((3, 5, 6, 2)), lengths=np.ones((4, 5), int)),
        "lengths: expected a run axis of length R = 3, that of X, got 4 (shape (4, 5))",
    ),
    (
        lambda: mh.value_and_grad(
            mh.Layer.zeros(1, 2, 2, runs=3), np.ones((5, 6, 2)), np.ones((4, 5, 6, 2))
        ),
        "y: expected a run axis of length R = 3, that of W, got 4 (shape (4, 5, 6, 2))",
    ),
    (
        lambda: mh.value_and_grad(
            mh.Layer.zeros(1, 2, 2), np.ones((5, 6, 2)), np.ones((3, 5, 6, 2)),
            weight=np.ones((4, 5)),
        ),
        "weight: expected a run axis of length R = 3, that of y, got 4 (shape (4, 5))",
    ),
    (
        lambda: mh.Dataset(np.ones((3, 5, 6, 2)), np.ones((4, 5))),
        "y: expected a run axis of length R = 3, that of X, got 4 (shape (4, 5))",
    ),
    (
        lambda: np.ones(4) * Gradients(W=np.ones((3, 1, 2, 2))),
        "factor: expected a run axis of length R = 3, that of W, got 4 (shape (4,))",
    ),
    (
        lambda: mh.Layer.gaussian(1, 2, 2, std=1.0, seed=[0, 1], runs=3),
        "seed: expected R = 3 of them, got 2",
    ),
    (
        lambda: mh.value_and_grad(
            mh.Classifier.zeros(1, 6, 2), np.ones((5, 6, 2)), np.ones(5),
            weight=np.array([[1.0] * 5, [0.0] * 5]),
        ),
        "weight: expected at least one positive number in every run, got none",
    ),
    (
        lambda: mh.Layer(np.ones((0, 1, 2, 2)), np.ones((1, 2, 2))),
        "W, V: expected no axis of length 0, got shapes (0, 1, 2, 2) and (1, 2, 2)",
    ),
    (
        lambda: mh.stack([]),
        "models: expected at least one, got none",
    ),
    (
        lambda: mh.stack([mh.Layer.zeros(1, 2, 3), mh.Layer.zeros(1, 2, 4)]),
        "models[1]: expected parameters W (1, 2, 2), V (1, 2, 3) like the first, "
        "got W (1, 2, 2), V (1, 2, 4)",
    ),
    (
        lambda: mh.stack([mh.Layer.zeros(1, 2, 3), mh.Layer.zeros(1, 2, 3, query=0)]),
        "models[1]: expected query None like the first, got 0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_length_is_named(call, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole message is compared)
        call()
    assert str(caught.value) == message


def test_what_has_no_runs_cannot_be_indexed():
    the = case()
    for call in (
        lambda: the.model[0],
        lambda: mh.Dataset(the.X, the.y).run(0),
        lambda: Gradients(W=np.ones((1, 2, 2)))[0],
    ):
        with pytest.raises(TypeError, match=r"with a run axis, got (one|some) without"):
            call()
    model = case(runs=("W",)).model
    for index in (RUNS, [], slice(0, 0), [[0]], np.ones(2, bool)):
        with pytest.raises(IndexError, match=f"^index: cannot select from {RUNS} runs"):
            model[index]
    with pytest.raises(TypeError, match=r"^models\[1\]: expected a Classifier like the first"):
        mh.stack([the.model, case(mh.Layer).model])
    with pytest.raises(TypeError, match=r"^models\[0\]: expected a model, got int"):
        mh.stack([1])
