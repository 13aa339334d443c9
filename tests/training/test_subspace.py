"""Training inside the span of the tokens: the same as training without, and bitwise resumable."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import mhfast as mh
from mhfast.training import quantities
from mhfast.training import subspace as _subspace

# Rounding of the basis and of both ways, times ten for the steps; float32 as the kernels promise.
TOLERANCE = {np.float64: 1e-12, np.float32: 3e-5}
N, T, D, H, Q, P, RANK = 3, 4, 37, 2, 2, 3, 5
MOMENTUM = mh.Momentum(0.3, 0.8)


def draw(*shape, seed, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def labels(*shape, seed=3):
    return np.random.default_rng(seed).choice([-1.0, 1.0], shape)


def classifier(rows=T, dtype=np.float64, **settings):
    W, U = 0.2 * draw(H, D, D, seed=0), draw(H, rows, D, seed=1)
    return mh.Classifier(W.astype(dtype), U.astype(dtype), scale=0.7, **settings)


def samples(n=N, dtype=np.float64, seed=2, **more):
    X = draw(n, T, D, seed=seed, dtype=dtype)
    return mh.Dataset(X, labels(n, seed=seed).astype(dtype), **more)


def low_rank(*, tied):
    factors = 0.4 * draw(2, H, D, RANK, seed=4)
    return mh.LowRank(factors[0], None if tied else factors[1])


def layer(**settings):
    return mh.Layer(0.2 * draw(H, D, D, seed=5), draw(H, D, P, seed=6), **settings)


def of_rows(kind):
    classes = np.random.default_rng(7).integers(0, P, (N, T))
    return mh.Dataset(samples().X, classes if kind == "cross_entropy" else draw(N, T, P, seed=8))


# The last number: distinct tokens, those of padding being one.
PROBLEMS = {
    "classifier": (classifier(), samples(), {}, 12),
    "float32": (classifier(dtype=np.float32), samples(dtype=np.float32), {}, 12),
    "only W": (classifier(), samples(), {"wrt": "W"}, 12),
    "causal": (classifier(causal=True), samples(), {}, 12),
    "lengths": (classifier(), samples(lengths=[4, 1, 3]), {}, 9),
    "a token asks": (classifier(1, query=-1), samples(lengths=[4, 1, 3]), {}, 9),
    "rows ask": (classifier(Q), samples(query=draw(N, Q, D, seed=9)), {}, 18),
    "the model asks": (classifier(Q, query=draw(N, Q, D, seed=9)), samples(), {}, 18),
    "factors": (mh.Classifier(low_rank(tied=False), draw(H, T, D, seed=1)), samples(), {}, 12),
    "tied": (mh.Classifier(low_rank(tied=True), draw(H, T, D, seed=1)), samples(), {}, 12),
    "fixed prompt": (classifier(1, prompt=draw(1, D, seed=10)), samples(), {"wrt": "W"}, 13),
    "layer": (layer(), of_rows("squared"), {"loss": "squared"}, 12),
    "classes": (layer(), of_rows("cross_entropy"), {"loss": "cross_entropy"}, 12),
}
# The span of a trained prompt has H keys for each token beside the tokens. Logits of order one:
# with W five times as large a unit in the last place of the start is a thousand at the end.
PROMPTS = {
    "prompt": ("prompt", 0.2 * draw(H, D, D, seed=0)),
    "all with a prompt": (None, 0.2 * draw(H, D, D, seed=0)),
    "factors with a prompt": (None, low_rank(tied=False)),
}


@pytest.fixture
def small(monkeypatch):
    """Let small problems enter their span."""
    pays(monkeypatch, True)


def pays(monkeypatch, always):
    """Whether training enters the span however small it is and however few steps are left."""
    monkeypatch.setattr(_subspace, "MIN_SIZE", 0 if always else 1 << 60)
    monkeypatch.setattr(_subspace, "_pays", lambda *_: True)


def both(monkeypatch, *arguments, **settings):
    """Train inside the span and without it."""
    pays(monkeypatch, True)
    inside = mh.train(*arguments, **settings)
    pays(monkeypatch, False)
    plain = mh.train(*arguments, **settings)
    assert inside.subspace is not None
    assert plain.subspace is None
    return inside, plain


def close(a, b, tolerance):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert np.abs(a - b).max(initial=0.0) <= tolerance * max(np.abs(b).max(initial=0.0), 1e-3)


def same_runs(inside, plain):
    """Compare parameters, what the optimizer carries and the history."""
    tolerance = TOLERANCE[inside.model.dtype.type]
    assert set(inside.history) == set(plain.history)
    assert inside.step == plain.step
    assert inside.reason == plain.reason
    for name, array in plain.model.parameters.items():
        close(inside.model.parameters[name], array, tolerance)
        assert inside.model.parameters[name].dtype == array.dtype
    for name, slots in plain.state.items():
        for slot, other in zip(inside.state[name], slots, strict=True):
            close(slot, other, tolerance)
    for name, rows in plain.history.items():
        close(inside.history[name], rows, tolerance)
        assert inside.history[name].dtype == rows.dtype
        assert np.array_equal(inside.steps[name], plain.steps[name])


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(monkeypatch, name):
    model, data, settings, dimensions = PROBLEMS[name]
    record = ("loss", "grad_norm", "param_norm", "distance", "attention")
    inside, plain = both(
        monkeypatch, model, data, steps=7, optimizer=MOMENTUM, record=record, **settings
    )
    same_runs(inside, plain)
    assert plain.history["loss"][-1] != plain.history["loss"][0]
    assert inside.subspace.basis.shape == (D, dimensions)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(monkeypatch, name):
    wrt, W = PROMPTS[name]
    model = mh.Classifier(W, draw(H, 1, D, seed=1), prompt=draw(1, D, seed=10))
    data = mh.Dataset(draw(2, 2, D, seed=2), labels(2))
    inside, plain = both(monkeypatch, model, data, steps=9, optimizer=MOMENTUM, wrt=wrt)
    same_runs(inside, plain)
    more = H * RANK if "factors" in name else H * 4
    assert inside.subspace.basis.shape == (D, 4 + 1 + more)


@pytest.mark.parametrize(
    "optimizer",
    [
        mh.GradientDescent(0.5, schedule=1.0 / np.arange(1, 10)),
        mh.GradientDescent(0.5, clip=0.2),
        mh.NormalizedGradientDescent(0.1, by="head"),
        mh.NormalizedGradientDescent(0.1, by="all"),
        mh.PolyakStep(max_lr=2.0),
        mh.Momentum(0.2, 0.9, nesterov=True),
    ],
    ids=repr,
)
def test_optimizers(monkeypatch, optimizer):
    same_runs(*both(monkeypatch, classifier(), samples(), steps=8, optimizer=optimizer))


def mean_of_w(model):
    """Record a number of the whole model."""
    return model.W.mean()


@pytest.mark.parametrize("start", ["zeros", "random"])
def test_records(monkeypatch, start):
    model = mh.Classifier.zeros(H, T, D, dtype=np.float64) if start == "zeros" else classifier()
    tests = {"seen": samples(5, seed=11), "other": samples(4, seed=12)}
    named = {
        name: every + 1
        for every, name in enumerate(quantities.names(("W", "U")))
        if name not in ("attention_groups",)
    }
    record = named | {"seen_loss": 1, "seen_margin": 3, "other_accuracy": 4, mean_of_w: 2}
    inside, plain = both(
        monkeypatch, model, samples(), steps=10, optimizer=mh.GradientDescent(0.3), test=tests,
        record=record, directions={"a": {"W": draw(H, D, D, seed=13)}, "b": classifier()},
    )  # fmt: skip
    same_runs(inside, plain)
    assert {"cosine_a", "cosine_b", "mean_of_w", "seen_loss"} <= set(inside.history)


@pytest.mark.parametrize("power", [0, 600])
def test_cosines_of_runs_and_their_readouts_over_time(monkeypatch, power):
    """Of a direction for each run and one for all; also where squares exceed the range."""
    runs = 5
    model = classifier()
    model = mh.stack([model.replace(W=k * model.W) for k in range(runs)])
    each, of_all = draw(runs, H, D, D, seed=15), draw(H, T, D, seed=16)
    directions = {
        "each": {"W": np.ldexp(each, power)},
        "all": {"U": of_all},
        "both": {"W": each, "U": np.ldexp(of_all, -power)},
    }
    inside, plain = both(
        monkeypatch, model, samples(), steps=4, optimizer=mh.GradientDescent(0.3),
        record={"cosine": 1, "U": 2}, directions=directions,
    )  # fmt: skip
    same_runs(inside, plain)
    assert inside.history["cosine_each"][0, 0] == 0.0  # its W is 0
    assert inside.history["cosine_both"].shape == (runs, 5)


@pytest.mark.usefixtures("small")
def test_room_is_known_before_the_start(monkeypatch):
    monkeypatch.setattr(quantities, "LIMIT", 10_000)
    with pytest.raises(ValueError, match=r"record: the limit is .* 'W' takes"):
        mh.train(
            classifier(), samples(), steps=9, optimizer=MOMENTUM, record="W",
            callback=lambda *_: pytest.fail("training began"),
        )  # fmt: skip


def test_groups(monkeypatch):
    groups = np.random.default_rng(14).integers(0, 2, (N, T))
    data = samples(token_groups=groups, sample_groups=[0, 1, 0])
    settings = {"steps": 5, "optimizer": MOMENTUM, "record": "attention_groups"}
    same_runs(*both(monkeypatch, classifier(), data, **settings))


@pytest.mark.parametrize("shared", [True, False])
def test_runs(monkeypatch, shared):
    runs = 3
    X = draw(N, T, D, seed=2) if shared else draw(runs, N, T, D, seed=2)
    data = mh.Dataset(X, labels(N) if shared else labels(runs, N))
    model = mh.Classifier(0.2 * draw(runs, H, D, D, seed=0), draw(H, T, D, seed=1))
    test = samples(4, seed=12)
    settings = {
        "steps": 6, "optimizer": mh.GradientDescent([0.1, 0.2, 0.3]), "test": test,
        "record": {"loss": 1, "param_norm": 1, "test_loss": 2, "W": 3},
    }  # fmt: skip
    inside, plain = both(monkeypatch, model, data, **settings)
    same_runs(inside, plain)
    assert inside.subspace.basis.ndim == (2 if shared else 3)
    pays(monkeypatch, True)
    one = data if shared else data.run(1)
    alone = mh.train(inside[1], one, steps=2, test=test)
    together = mh.train(inside, data, steps=2, test=test)
    same_runs(together[1], alone)
    assert alone.subspace is not None


def test_one_training_goes_on_as_several(monkeypatch):
    settings = {"optimizer": MOMENTUM, "record": ("loss", "distance")}
    begun = both(monkeypatch, classifier(), samples(), steps=3, **settings)
    rates = mh.Momentum([0.1, 0.2], 0.8)
    pays(monkeypatch, True)
    several = [mh.train(run, samples(), steps=3, optimizer=rates) for run in begun]
    assert several[0].subspace is not None
    same_runs(*several)


def whole_path(run, tmp_path):
    run.save(tmp_path / "run.npz")
    return mh.Run.load(tmp_path / "run.npz")


@pytest.mark.parametrize("way", ["as it is", "file", "pickle", "copy"])
@pytest.mark.usefixtures("small")
def test_resumed_bitwise(tmp_path, way):
    """Also in the middle of steps that only the span distinguishes: several calls, some of 0."""
    test = samples(5, seed=11, query=draw(5, Q, D, seed=15))
    settings = {"test": test, "record": {"loss": 1, "test_loss": 2, "W": 5, "param_norm": 1}}
    data = samples(query=draw(N, Q, D, seed=9))
    model = classifier(Q)
    once = mh.train(model, data, steps=12, optimizer=MOMENTUM, **settings)
    run = mh.train(model, data, steps=0, optimizer=MOMENTUM, **settings)
    for steps in (1, 5, 0, 6):
        run = mh.train(run, data, steps=steps, test=test)
        if way == "file":
            run = whole_path(run, tmp_path)
        elif way == "pickle":
            run = pickle.loads(pickle.dumps(run))
        elif way == "copy":
            run = copy.deepcopy(run)
    assert run == once
    assert run.subspace is not None


@pytest.mark.usefixtures("small")
def test_checkpoint_and_exception(tmp_path):
    path = tmp_path / "run.npz"
    once = mh.train(classifier(), samples(), steps=9, optimizer=MOMENTUM)

    def fail(k, _):
        if k == 7:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError) as caught:
        mh.train(
            classifier(), samples(), steps=9, optimizer=MOMENTUM, callback=fail,
            checkpoint=(path, 4),
        )  # fmt: skip
    for stopped in (mh.Run.load(path), caught.value.run):
        resumed = mh.train(stopped, samples(), steps=9 - stopped.step)
        assert resumed.model == once.model
        assert np.array_equal(resumed.history["loss"], once.history["loss"])


def test_callback_sees_the_whole_model(monkeypatch):
    seen = {True: [], False: []}
    for inside, models in seen.items():
        pays(monkeypatch, inside)
        mh.train(
            classifier(), samples(), steps=4, optimizer=MOMENTUM,
            callback=lambda _, model, models=models: models.append(model),
        )  # fmt: skip
    for model, plain in zip(*seen.values(), strict=True):
        close(model.W, plain.W, 1e-12)
        assert model.dim == D


@pytest.mark.parametrize(
    "optimizer",
    [
        mh.Adam(0.1),
        mh.MirrorDescent(0.1, 3.0),
        mh.GradientDescent(0.1, l2=0.1),
        mh.GradientDescent(0.1, project="ball", radius=1.0),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("small")
def test_other_optimizers_train_outside(optimizer):
    assert mh.train(classifier(), samples(), steps=3, optimizer=optimizer).subspace is None


@pytest.mark.usefixtures("small")
def test_where_it_does_not_pay(monkeypatch):
    many = mh.train(classifier(), samples(n=5), steps=3, optimizer=MOMENTUM)
    assert many.subspace is None  # 20 tokens, 37 dimensions
    few = mh.Dataset(np.tile(samples(n=1).X, (30, 1, 1)), labels(30))
    assert mh.train(classifier(), few, steps=3, optimizer=MOMENTUM).subspace.basis.shape == (D, T)
    monkeypatch.setattr(_subspace, "MAX_TOKENS", few.X.size - 1)
    assert mh.train(classifier(), few, steps=3, optimizer=MOMENTUM).subspace is None
    monkeypatch.setattr(_subspace, "MIN_SIZE", 1 << 60)
    assert mh.train(classifier(), samples(), steps=3, optimizer=MOMENTUM).subspace is None


def test_where_the_basis_takes_too_long():
    """That of 300 tokens takes as long as more than 100 steps of rank 1; distinct ones count."""
    d, n = 600, 150
    W = mh.LowRank(draw(1, d, 1, seed=2) / d**0.5)
    model = mh.Classifier(W, draw(1, 1, d, seed=3), query=0)
    data = mh.Dataset(draw(n, 2, d, seed=1), labels(n))
    few = mh.Dataset(np.tile(data.X[:5], (30, 1, 1)), labels(n))
    runs = [mh.train(model, each, steps=4, optimizer=MOMENTUM) for each in (data, few)]
    assert [run.subspace is not None for run in runs] == [False, True]
    # Whatever the steps of a call: runs are continued to the bit.
    for run, each in zip(runs, (data, few), strict=True):
        assert mh.train(run, each, steps=150) == mh.train(
            model, each, steps=154, optimizer=MOMENTUM
        )
    # Tokens whose first coordinates are equal are told apart by the others.
    X = np.array(data.X)
    X[..., : _subspace.FIRST] = 1.0
    run = mh.train(model, mh.Dataset(X, data.y), steps=4, optimizer=MOMENTUM)
    assert run.subspace is None


@pytest.mark.parametrize("tied", [False, True])
def test_factors_count_as_their_product(tied):
    """A step of rank 1 grows with the dimension of the tokens as one of a full W does."""
    d = 513  # the least with d² above MIN_SIZE
    X = draw(N, T, d, seed=1)
    factors = draw(2, 1, d, 1, seed=2) / d**0.5
    W = mh.LowRank(factors[0], None if tied else factors[1])
    model = mh.Classifier(W, draw(1, 1, d, seed=3), query=0)
    data = mh.Dataset(X, labels(N))
    run = mh.train(model, data, steps=2, optimizer=MOMENTUM)
    assert run.subspace.basis.shape == (d, N * T)
    want, _ = mh.reference.train(model, X, data.y, steps=2, optimizer=MOMENTUM)
    for name in model.parameters:
        close(getattr(run.model, name), getattr(want, name), 1e-12)


def test_other_data_leave_the_span(monkeypatch):
    """A run goes on with data outside as one that never was inside."""
    settings = {"optimizer": MOMENTUM, "record": ("loss", "param_norm", "distance")}
    inside, plain = both(monkeypatch, classifier(), samples(), steps=4, **settings)
    for optimizer in (None, mh.Adam(0.1)):
        left = mh.train(inside, samples(seed=20), steps=4, optimizer=optimizer)
        assert left.subspace is None
        same_runs(left, mh.train(plain, samples(seed=20), steps=4, optimizer=optimizer))
    fewer = mh.train(inside, samples().subset([0, 2]), steps=4)
    assert fewer.subspace is not None
    same_runs(fewer, mh.train(plain, samples().subset([0, 2]), steps=4))


@pytest.mark.usefixtures("small")
def test_short_tokens_of_float32_stay_in_their_span():
    """Their squares of 1e-50 are 0 in float32."""
    data = samples(dtype=np.float32)
    data = mh.Dataset(np.float32(1e-25) * data.X, data.y)
    run = mh.train(classifier(dtype=np.float32), data, steps=2, optimizer=MOMENTUM)
    assert run.subspace is not None
    assert mh.train(run, data, steps=2).subspace is not None


def test_another_rule_begins_anew_inside(monkeypatch):
    """What one rule carried is not handed to the next."""
    inside, plain = both(monkeypatch, classifier(), samples(), steps=4, optimizer=MOMENTUM)
    for _ in range(2):
        inside, plain = (
            mh.train(mh.train(run, samples(), steps=2, optimizer=mh.GradientDescent(0.1)),
                     samples(), steps=3, optimizer=MOMENTUM)
            for run in (inside, plain)
        )  # fmt: skip
    assert inside.subspace is not None
    same_runs(inside, plain)


@pytest.mark.usefixtures("small")
def test_numbers_that_are_not_finite_stay_outside():
    W = np.array(classifier().W)
    W[0, 1, 2] = np.nan
    with pytest.warns(RuntimeWarning, match=r"W holds nan at index 0, 1, 2$"):
        run = mh.train(mh.Classifier(W, classifier().U), samples(), steps=3, optimizer=MOMENTUM)
    assert run.subspace is None
    assert run.reason == "nonfinite"


@pytest.mark.parametrize("wrt", ["W", ("W", "U")])
def test_large_dimensions_enter(wrt):
    """Without a hand in it: d = 700, 12 tokens, against steps of the reference."""
    dim = 700
    model = mh.Classifier(draw(1, dim, dim, seed=0) / dim, draw(1, 3, dim, seed=1) / np.sqrt(dim))
    data = mh.Dataset(draw(4, 3, dim, seed=2) / 5, labels(4))
    run = mh.train(model, data, steps=5, optimizer=mh.GradientDescent(0.4), wrt=wrt)
    assert run.subspace.basis.shape == (dim, 12)
    expected = model
    for _ in range(5):
        _, gradient = mh.reference.value_and_grad(expected, data.X, data.y, wrt=wrt)
        expected = mh.Classifier(
            expected.W - 0.4 * gradient["W"], expected.U - 0.4 * gradient.get("U", 0.0)
        )
    close(run.model.W, expected.W, 1e-12)
    close(run.model.U, expected.U, 1e-12)


def test_which_models_the_span_holds():
    run = mh.train(mh.Classifier.zeros(3, 2, 400), *far(), steps=1, optimizer=mh.GradientDescent(1))
    inside = run.subspace
    assert inside.holds(mh.Classifier.zeros(3, 2, 400))
    assert not inside.holds(mh.Classifier.gaussian(3, 2, 400, std=0.1, seed=0))


def far():
    """Three distinct tokens in 400 dimensions, and labels."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 400))[rng.integers(3, size=(9, 2))], np.ones(9)


def test_the_part_outside_is_a_difference_of_squares_or_summed(monkeypatch):
    pays(monkeypatch, True)
    model = classifier()
    inside = mh.train(model, samples(), steps=1, optimizer=mh.GradientDescent(0.3)).subspace
    rest = float(inside.rest(model))
    monkeypatch.setattr(_subspace, "LEFT", np.inf)
    # The difference loses at most two of sixteen digits.
    assert float(inside.rest(model)) == pytest.approx(rest, rel=1e-12)
    B = inside.basis
    held = model.replace(W=B @ B.T @ model.W @ B @ B.T, U=model.U @ B @ B.T)
    monkeypatch.undo()
    # Little is left: a difference would be wrong in its first digit.
    assert float(inside.rest(held)) < 1e-13 * float(mh.norm(held))


@pytest.mark.parametrize("zeros", [0, 1, H])
def test_many_products_are_counted_before_they_are_computed(zeros):
    """For a trained prompt, where some heads of W are zero."""
    W = draw(H, D, D, seed=0)
    W[:zeros] = 0
    model = classifier(2, prompt=draw(2, D, seed=10)).replace(W=W)
    for n in range(1, 8):
        data = samples(n)
        problem = SimpleNamespace(data=(data.X, None), token=None)
        names = ("W", "U", "prompt")
        computed = _subspace._distinct(_subspace._tokens(problem, model, names))
        # The prompt's rows, and zero where W has zeros, are few.
        if _subspace._has_many_products(problem, model, names):
            assert _subspace.MIN_RATIO * len(computed) > D
        elif _subspace.MIN_RATIO * (len(computed) - 3) > D:
            pytest.fail(f"{n} samples: not counted")
        assert not _subspace._has_many_products(problem, model, ("W", "U"))
