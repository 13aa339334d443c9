"""Optimizers are values that refuse what makes no sense."""

import copy
import dataclasses
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from lists import plain

import mhfast as mh
from mhfast import _core
from mhfast._arguments.lists import PARAMETERS
from mhfast.optimizers import OPTIMIZERS, StepRule, core_settings, of_runs

WITH_RATE = [kind for kind in OPTIMIZERS if kind is not mh.PolyakStep]


def make(kind, **fields):
    """An optimizer of the kind with what it must have."""
    return plain(kind, **({"lr": 0.5} if kind is not mh.PolyakStep else {}) | fields)


def test_fields_become_plain_numbers_and_compare():
    a = mh.GradientDescent(np.float32(0.5), schedule=np.array([1, 2]), clip=3)
    b = mh.GradientDescent(0.5, schedule=[1.0, 2.0], clip=3.0)
    assert a == b
    assert hash(a) == hash(b)
    assert a.schedule == (1.0, 2.0)
    assert type(a.lr) is float
    assert a != mh.NormalizedGradientDescent(0.5, schedule=[1.0, 2.0], clip=3.0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_number_is_kept_as_a_plain_one(kind):
    """Whatever type it came with; so are truth values."""
    bools = {"nesterov", "normalized", "scaled"}
    chosen = {"norm": "max"} if kind is mh.SteepestDescent else {}
    others = {"name", "schedule", "by", "norm", "polar", *bools}
    others |= {"project", "project_by", "project_norm"}
    numbers = {field.name for field in dataclasses.fields(kind)} - others
    values = {name: np.float32(1.5) for name in numbers} | {"project": "ball"}
    fractions = {name for name in numbers if name.startswith("beta") or name == "momentum"}
    values |= dict.fromkeys(fractions, np.float32(0.25)) | chosen
    flags = dict.fromkeys(bools & set(kind.__dataclass_fields__), np.True_)
    optimizer = kind(**values, **flags)
    assert {name: type(getattr(optimizer, name)) for name in numbers} == dict.fromkeys(
        numbers, float
    )
    assert all(getattr(optimizer, name) is True for name in flags)


def test_no_memory_of_gradients_is_allowed():
    assert mh.Momentum(1.0, 0.0).beta == 0.0
    assert mh.Adam(1.0, beta1=0.0, beta2=0.0).beta1 == 0.0


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pickling_and_defaults(kind):
    optimizer = make(kind, project="ball", radius=2)
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    plain = make(kind)
    assert (plain.schedule, plain.l2, plain.clip) == (None, 0.0, math.inf)
    assert (plain.project, plain.radius, plain.project_by) == (None, None, "tensor")


def test_step_sizes_of_runs():
    a = mh.Adam(np.array([0.1, 0.2, 0.3], np.float32))
    assert a.lr == tuple(float(np.float32(x)) for x in (0.1, 0.2, 0.3))
    b = mh.GradientDescent([1, 2, 4], clip=3.0)
    assert b.lr == (1.0, 2.0, 4.0)
    assert of_runs(b, 2) == mh.GradientDescent(4.0, clip=3.0)
    assert of_runs(b, np.array([2, 0])) == mh.GradientDescent([4.0, 1.0], clip=3.0)
    assert of_runs(b, slice(1, None)) == mh.GradientDescent([2.0, 4.0], clip=3.0)
    shared = mh.PolyakStep()
    assert of_runs(shared, 2) is shared
    assert mh.Momentum(np.array(0.5)) == mh.Momentum(0.5)  # one number without axes


def test_what_is_positional():
    optimizer = mh.NormalizedGradientDescent(0.1, 1e-3, "head")
    assert (optimizer.lr, optimizer.eps, optimizer.by) == (0.1, 1e-3, "head")
    assert mh.MirrorDescent(0.1, 3, True, "all").by == "all"
    assert mh.Momentum(0.1, 0.5, True).nesterov is True
    assert mh.PolyakStep(10.0, 0.25, 1.0).factor == 1.0
    with pytest.raises(TypeError, match=r"positional"):
        mh.GradientDescent(0.1, [1.0])


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (mh.GradientDescent(0.3), "GradientDescent(lr=0.3)"),
        (mh.PolyakStep(), "PolyakStep()"),
        (mh.Adam([1, 2], clip=2, beta2=0.99), "Adam(lr=(1.0, 2.0), beta2=0.99, clip=2.0)"),
        (
            mh.MirrorDescent(0.1, 3, project="ball", radius=2),
            "MirrorDescent(lr=0.1, p=3.0, project='ball', radius=2.0)",
        ),
    ],
)
def test_repr_is_the_shortest_call(optimizer, text):
    assert repr(optimizer) == text
    assert eval(text, vars(mh)) == optimizer


def test_repr_of_many_numbers_is_short():
    optimizer = mh.GradientDescent(np.linspace(0.25, 1.0, 10_000), schedule=np.ones(9))
    assert repr(optimizer) == (
        "GradientDescent(lr=<10000 numbers, 0.25 to 1.0>, schedule=<9 numbers, 1.0 to 1.0>)"
    )


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"l2": np.nan}, ValueError, "l2: .*nan"),
        ({"l2": "much"}, TypeError, "l2: .*'much'"),
        ({"l2": np.inf}, ValueError, "l2: .*finite.*inf"),
        ({"clip": 0}, ValueError, r"clip: expected a number above 0, got 0\.0"),
        ({"clip": None}, TypeError, "clip: .*None"),
        ({"schedule": 0.5}, ValueError, r"schedule: .*\(steps,\).*\(\)"),
        ({"schedule": "cosine"}, TypeError, "schedule: .*cosine"),
        ({"schedule": [1.0, -2.0]}, ValueError, "schedule: .*-2.0 at index 1"),
        ({"project": "cube", "radius": 1.0}, ValueError, "project: .*'ball' or 'sphere'.*'cube'"),
        ({"project": "ball"}, TypeError, "radius: .*project='ball', got None"),
        (
            {"project": "ball", "radius": 0},
            ValueError,
            r"radius: expected a finite number above 0, got 0\.0",
        ),
        ({"project": "ball", "radius": np.inf}, ValueError, "radius: .*finite"),
        ({"radius": 1.0}, ValueError, r"radius: expected None without project=, got 1\.0"),
        (
            {"project_norm": "nuclear"},
            ValueError,
            "project_norm: expected 'fro' without project=, got 'nuclear'",
        ),
        (
            {"project": "ball", "radius": 1, "project_norm": "nuclear"},
            ValueError,
            "project_by: expected 'head' with project_norm='nuclear'.*got 'tensor'",
        ),
        (
            {"project": "ball", "radius": 1, "project_norm": 1, "project_by": "all"},
            ValueError,
            "project_by: expected 'tensor' or 'head' with project_norm=1.0, got 'all'",
        ),
        (
            {"project": "ball", "radius": 1, "project_norm": 0.5},
            ValueError,
            r"project_norm: .*at least 1, got 0\.5",
        ),
        (
            {"project": "ball", "radius": 1, "project_norm": "l1"},
            ValueError,
            "project_norm: expected 'fro', 'nuclear' or 'spectral', got 'l1'",
        ),
        (
            {"project_by": "row"},
            ValueError,
            "project_by: expected 'tensor', 'head' or 'all', got 'row'",
        ),
    ],
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_wrong_common_fields(kind, fields, error, message):
    with pytest.raises(error, match=message):
        make(kind, **fields)


@pytest.mark.parametrize(
    ("lr", "error", "message"),
    [
        ("fast", TypeError, "lr: .*number"),
        (True, TypeError, "lr: .*number"),
        (None, TypeError, "lr: .*number"),
        (-0.1, ValueError, r"lr: .*-0\.1"),
        (np.inf, ValueError, "lr: .*finite.*inf"),
        ([0.1, np.nan, 0.2], ValueError, "lr: .*nan at index 1"),
        ([[0.1], [0.2]], ValueError, r"lr: expected shape \(R,\), got \(2, 1\)"),
        (["a"], TypeError, "lr: .*numbers"),
    ],
)
@pytest.mark.parametrize("kind", WITH_RATE)
def test_wrong_step_sizes(kind, lr, error, message):
    with pytest.raises(error, match=message):
        make(kind, lr=lr)


@pytest.mark.parametrize(
    ("kind", "fields", "error", "message"),
    [
        (mh.NormalizedGradientDescent, {"by": "row"}, ValueError, "by: .*or 'all', got 'row'"),
        (mh.NormalizedGradientDescent, {"eps": -1}, ValueError, "eps: .*-1"),
        (mh.PolyakStep, {"max_lr": 0}, ValueError, "max_lr: .*above 0"),
        (mh.PolyakStep, {"target": np.inf}, ValueError, "target: .*finite"),
        (mh.PolyakStep, {"target": "low"}, TypeError, "target: .*'low'"),
        (mh.Momentum, {"beta": "much"}, TypeError, "beta: .*'much'"),
        (mh.MirrorDescent, {"p": "two"}, TypeError, "p: .*'two'"),
        (mh.PolyakStep, {"factor": np.inf}, ValueError, "factor: .*finite"),
        (mh.Momentum, {"beta": 1.0}, ValueError, r"beta: .*\[0, 1\), got 1\.0"),
        (mh.Momentum, {"nesterov": 1}, TypeError, "nesterov: expected a bool, got 1"),
        (mh.SteepestDescent, {"nesterov": 1}, TypeError, "nesterov: expected a bool, got 1"),
        (mh.Adam, {"beta1": -0.1}, ValueError, r"beta1: .*-0\.1"),
        (mh.Adam, {"beta2": 1.0}, ValueError, "beta2: "),
        (mh.Adam, {"eps": np.nan}, ValueError, "eps: .*nan"),
        (mh.Adam, {"weight_decay": -1}, ValueError, "weight_decay: .*-1"),
        (mh.MirrorDescent, {"p": 1}, ValueError, r"p: .*above 1, got 1\.0"),
        (mh.MirrorDescent, {"p": np.inf}, ValueError, "p: .*finite"),
        (mh.MirrorDescent, {"normalized": "yes"}, TypeError, "normalized: .*'yes'"),
        (mh.MirrorDescent, {"by": "row"}, ValueError, "by: .*'row'"),
        (mh.AdamW, {"weight_decay": -1}, ValueError, "weight_decay: .*-1"),
        (mh.AdaGrad, {"eps": -1}, ValueError, "eps: .*-1"),
        (mh.RMSProp, {"momentum": 1.0}, ValueError, r"momentum: .*\[0, 1\), got 1\.0"),
        (mh.ExponentiatedGradient, {"scale": -1}, ValueError, "scale: .*-1"),
        (mh.SteepestDescent, {"norm": "l3"}, ValueError, "norm: .*or 'spectral', got 'l3'"),
        (
            mh.SteepestDescent,
            {"by": "all"},
            ValueError,
            "by: expected 'tensor' or 'head', got 'all'",
        ),
        (mh.SteepestDescent, {"scaled": 1}, TypeError, "scaled: expected a bool, got 1"),
        (mh.SteepestDescent, {"polar": "svd"}, ValueError, "polar: .*'newton_schulz', got 'svd'"),
        (
            mh.SteepestDescent,
            {"polar": "newton_schulz"},
            ValueError,
            "polar: expected 'exact' with norm='max', got 'newton_schulz'",
        ),
    ],
)
def test_wrong_fields_of_one_kind(kind, fields, error, message):
    with pytest.raises(error, match=message):
        make(kind, **fields)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_field_is_named_where_it_is_wrong(kind):
    for field in dataclasses.fields(kind):
        with pytest.raises((TypeError, ValueError), match=f"^{field.name}: expected "):
            make(kind, **{field.name: object()})
        if isinstance(getattr(make(kind), field.name), float):
            with pytest.raises((TypeError, ValueError), match=f"^{field.name}: expected .* nan$"):
                make(kind, **{field.name: np.nan})


def test_schedule_covers_all_steps():
    optimizer = mh.GradientDescent(1.0, schedule=[1.0, 0.5, 0.25])
    assert core_settings(optimizer, 3).schedule[0].tolist() == [1.0, 0.5, 0.25]
    with pytest.raises(ValueError, match=r"schedule: .*each of the 4 steps.*got 3"):
        core_settings(optimizer, 4)
    optimizer = mh.GradientDescent(1.0, schedule={"U": [1.0, 0.5, 0.25]})
    with pytest.raises(ValueError, match=r"schedule\['U'\]: .*each of the 4 steps.*got 3"):
        core_settings(optimizer, 4)
    core_settings(optimizer, 4, wrt=("W",))  # U has none to take


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_core_gets_all_settings(kind):
    one = core_settings(make(kind), 3)
    three = core_settings(make(kind), 3, runs=3)
    assert len(one.lr) == len(three.lr) == len(PARAMETERS)
    for single, several in zip(one.lr, three.lr, strict=True):
        assert single.tolist() == [0.5 if hasattr(make(kind), "lr") else 1.0]
        assert several.tolist() == single.tolist() * 3
    rule = one.rule
    assert rule.type == kind.__name__
    common = {field.name for field in dataclasses.fields(StepRule)} | {"lr"}
    own = [field.name for field in dataclasses.fields(kind) if field.name not in common]
    assert sorted(rule.fields) == sorted(own)
    for name, value in rule.fields.items():
        assert getattr(value, "name", value) == getattr(make(kind), name)


@pytest.mark.parametrize(
    ("arguments", "fields", "error", "message"),
    [
        (("Sgd",), {}, ValueError, "rule: expected the name of an optimizer, got 'Sgd'"),
        (("Momentum",), {}, TypeError, "beta: expected a value by name, got none"),
        (("Momentum",), {"beta": "x"}, TypeError, "beta: expected a value of its kind, got 'x'"),
        (("SignDescent",), {"x": 0.5}, TypeError, "expected only the fields .* got {'x': 0.5}"),
        (("SteepestDescent",), {"norm": 1}, TypeError, "norm: expected a value of its kind, got 1"),
    ],
)
def test_the_core_refuses_other_fields(arguments, fields, error, message):
    with pytest.raises(error, match=message):
        _core.Rule(*arguments, **fields)


def test_the_core_gets_a_step_size_for_each_run():
    optimizer = mh.GradientDescent([0.1, 0.2])
    assert [lr.tolist() for lr in core_settings(optimizer, 3, runs=2).lr] == [[0.1, 0.2]] * len(
        PARAMETERS
    )
    optimizer = mh.GradientDescent({"U": [0.1, 0.2], "W": 0.3})
    given = dict(
        zip(PARAMETERS, core_settings(optimizer, 3, runs=2, wrt=("W", "U")).lr, strict=True)
    )
    assert (given.pop("W").tolist(), given.pop("U").tolist()) == ([0.3, 0.3], [0.1, 0.2])
    assert set(given.values()) == {None}


def test_settings_of_parameters_are_values():
    rates = {"U": np.float32(0.5), "W": [1, 2]}
    a = mh.Adam(
        rates, l2={"W": 1}, schedule={"U": np.array([1, 2])}, project="ball", radius={"U": 3}
    )  # fmt: skip
    b = mh.Adam(
        {"W": (1.0, 2.0), "U": 0.5}, l2={"W": 1.0}, schedule={"U": [1.0, 2.0]},
        project="ball", radius={"U": 3.0},
    )  # fmt: skip
    assert a == b
    assert hash(a) == hash(b)
    assert a.lr == {"W": (1.0, 2.0), "U": 0.5}
    assert [type(value) for value in a.lr.values()] == [tuple, float]
    assert pickle.loads(pickle.dumps(a)) == copy.deepcopy(a) == a
    assert repr(a) == (
        "Adam(lr={'W': (1.0, 2.0), 'U': 0.5}, schedule={'U': (1.0, 2.0)}, l2={'W': 1.0}, "
        "project='ball', radius={'U': 3.0})"
    )
    assert eval(repr(a), vars(mh)) == a
    assert of_runs(a, 1) == replace(a, lr={"W": 2.0, "U": 0.5})
    rates["U"] = 7.0
    assert a.lr["U"] == 0.5
    with pytest.raises(TypeError, match="item assignment"):
        a.lr["U"] = 7.0
    assert mh.Adam({"W": 1.0}) != mh.Adam({"W": 1.0, "U": 1.0})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"lr": {}}, ValueError, r"lr: expected values by the names of parameters.*got none"),
        (
            {"lr": {"w": 0.1}},
            ValueError,
            r"lr: .*W, Q, K, U, V, A, B, prompt, embedding, got the name 'w'",
        ),
        ({"lr": {"W": -0.1}}, ValueError, r"lr\['W'\]: .*at least 0, got -0\.1"),
        ({"lr": {"W": "fast"}}, TypeError, r"lr\['W'\]: expected a number, got 'fast'"),
        ({"lr": {"W": [[0.1]]}}, ValueError, r"lr\['W'\]: expected shape \(R,\)"),
        ({"l2": {"U": None}}, TypeError, r"l2\['U'\]: .*None"),
        ({"l2": {3: 0.1}}, ValueError, r"l2: .*got the name 3"),
        ({"schedule": {"U": 0.5}}, ValueError, r"schedule\['U'\]: .*\(steps,\)"),
        (
            {"project": "ball", "radius": {"U": 0}},
            ValueError,
            r"radius\['U'\]: expected a finite number above 0",
        ),
        (
            {"project": "ball", "radius": {"U": 1}, "project_by": "all"},
            ValueError,
            r"radius: expected one number with project_by='all', got \{'U': 1\.0\}",
        ),
        ({"radius": {"U": 1.0}}, ValueError, "radius: expected None without project="),
    ],
)
def test_wrong_settings_of_parameters(fields, error, message):
    with pytest.raises(error, match=message):
        mh.GradientDescent(**{"lr": 0.1} | fields)


def test_settings_must_fit_what_is_trained():
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((5, 3, 4)), [1, -1, 1, 1, -1]
    model = mh.Classifier.zeros(2, 3, 4)

    def train(lr, wrt=None, **fields):
        mh.train(model, X, y, steps=2, optimizer=mh.GradientDescent(lr, **fields), wrt=wrt)

    with pytest.raises(ValueError, match=r"lr: expected a step size.*none for U; 0.0 leaves it"):
        train({"W": 0.1})
    train({"W": 0.1}, wrt="W")
    train({"W": 0.1, "U": 0.1}, wrt="W", schedule={"U": [1.0]})
    with pytest.raises(ValueError, match=r"lr: .*of the model, W, U, got 'V'"):
        train({"W": 0.1, "V": 0.1}, wrt="W")
    with pytest.raises(ValueError, match=r"l2: .*of the model, W, U, got 'prompt'"):
        train(0.1, l2={"prompt": 0.1})
    with pytest.raises(ValueError, match=r"lr: expected a run axis of length R = 2"):
        train({"W": [0.1, 0.2], "U": [0.1, 0.2, 0.3]})


@pytest.mark.parametrize("by", ["tensor", "head"])
def test_scaled_spectral_steps_of_runs_side_by_side(by):
    """Each head of each run has a norm of its own."""
    data = mh.data.tokenized_mixture(23, 4, 7, relevant_fraction=0.25, seed=0)
    models = mh.Classifier.gaussian(3, 4, 7, std=0.5, seed=0, runs=19)
    rule = mh.SteepestDescent(0.02, "spectral", 0.5, scaled=True, by=by)
    runs = mh.train(models, data, steps=3, optimizer=rule, record=())
    for r in (0, 7, 18):
        alone = mh.train(models[r], data, steps=3, optimizer=rule, record=()).model
        for name in ("W", "U"):
            one, other = (getattr(m, name) for m in (runs.model[r], alone))
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())
