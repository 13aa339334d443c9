"""Every parallel pass, on more threads than are good for it: for a build with the thread sanitizer.

Not a test by itself: what is looked for are the sanitizer's reports (docs/development.md). Kinds of
training are drawn from the lists of `trainings.py`: every model, kind of parameters and plan with
each other, and every optimizer with each of these at least once; the rest from cycles of their own,
whose lengths have no common factor.
"""

import os
from dataclasses import replace
from itertools import cycle, product

import numpy as np
from trainings import MODELS, OPTIMIZERS, PARAMETERS, PLANS, PROJECTIONS, constrained, draw

import mhfast as mh
from mhfast import _core
from mhfast.models import problem

THREADS = 3
n, T, d, H = 90, 7, 9, 6
LAYER_PLANS = ("samples", "hybrid", "rows", "auto")
RULES = tuple(OPTIMIZERS.values())
RECORDS = (
    ("loss",),
    ("accuracy", "margin", "grad_norm", "distance", "param_norm", "cosine"),
    ("attention_max", "attention_groups", "parameters"),
    (),
    ("test_loss", "loss"),
    ("test_accuracy", "other_margin", "attention"),
    ("parameters", "test_margin", "other_loss", "grad_norm"),
)
STOPS = (None, {"loss": 1e-9, "grad_norm": 1e-9}, {"margin": 1e9}, None, None)
REST = zip(
    cycle(PROJECTIONS), cycle(RECORDS), cycle(STOPS),
    # Types, sizes (the large one so that gradients must be scaled), and whether Python is asked.
    cycle(product((np.float32, np.float64), (0.3, 0.3, 40.0), (False, False, True))),
    # All samples, batches for several threads, batches that the first thread takes alone.
    cycle((None, 0.8, None, 0.05, 0.4)),
    cycle((False, True, False)),  # whether they are new samples
)  # fmt: skip


def train(model, data, rule, projection, record, stop, calls, batch, fresh):
    """A training of few steps with all that may go on beside it."""
    names = [
        name for key in record for name in (model.parameters if key == "parameters" else [key])
    ]
    tests = {"test": data, "other": replace(data, token_groups=None)[:7]}
    used = [name for name in tests if any(key.startswith(name) for key in record)]
    fresh = fresh and batch is not None and data.weight is None
    optimizer, held = rule(**projection), {}
    if stop is None and not calls:
        model, held = constrained(model, optimizer, np.random.default_rng(len(record)))
    mh.train(
        model, data, steps=3, optimizer=optimizer, loss="squared", record=names, constraints=held,
        stream=(lambda size, seed: data[np.arange(size) * seed % data.n]) if fresh else None,
        test={name: tests[name] for name in used} or None, stop=stop,
        directions=model if "cosine" in record else None,
        callback=(lambda *_: None) if calls else None,
        batch=batch and max(1, int(batch * data.n)), seed=None if batch is None else 1,
        average=1 if stop is None else None,
    )  # fmt: skip


def passes(model, data):
    """Outputs, attention, gradients of parameters and inputs, curvature."""
    model(data)
    model.attention(data)
    wrt = (*model.parameters, "X", *(("query",) if data.query is not None else ()))
    mh.value_and_grad(model, data, loss="squared", wrt=wrt)
    mh.hvp(model, data, tangent=model, loss="squared")
    mh.train(
        model, data, steps=2, optimizer=mh.GradientDescent(0.1), loss=residuals, test=data,
        record=("loss", "test_loss"),
    )  # fmt: skip


def residuals(outputs, targets):
    """The squared loss as a function of the caller's own."""
    return (outputs - targets) ** 2, 2 * (outputs - targets)


def with_groups(data):
    """The same with groups of tokens and of samples."""
    return replace(
        data,
        token_groups=np.broadcast_to(np.arange(T) % 2, (len(data.X), T)),
        sample_groups=np.arange(len(data.X)) % 3,
    )


def place(kind, parameter):
    """A number that differs by one between neighbours in the lists."""
    return MODELS.index(kind) + PARAMETERS.index(parameter)


def trainings(plan):
    """Kinds of training with one plan; layers have not every plan."""
    for kind, parameter in product(MODELS, PARAMETERS):
        if kind is mh.Layer and plan not in LAYER_PLANS:
            continue
        samples = n if parameter != "token" else 4 * n  # else too little work for a team
        for dtype in (np.float32, np.float64):
            passes(*draw(kind, parameter, dtype, samples, T, d, H))
        # A third of them, another third for the next plan.
        for rule in RULES[(PLANS.index(plan) + place(kind, parameter)) % 3 :: 3]:
            projection, record, stop, (dtype, size, calls), batch, fresh = next(REST)
            model, data = draw(kind, parameter, dtype, samples, T, d, H, size=size)
            train(model, with_groups(data), rule, projection, record, stop, calls, batch, fresh)


def side_by_side():
    """Blocks of runs on threads of their own, and runs whose own passes are shared."""
    for kind, parameter in product(MODELS, PARAMETERS):
        # A half of them for classifiers, the other for layers.
        for rule in RULES[place(kind, parameter) % 2 :: 2]:
            projection, record, stop, (dtype, size, calls), batch, fresh = next(REST)
            for samples, runs in ((12, 17), (n, 2)):
                model, data = draw(kind, parameter, dtype, samples, T, d, H, runs=runs, size=size)
                few = tuple(name for name in record if "groups" not in name)
                train(model, data, rule, projection, few, stop, calls, batch, fresh)


def readouts():
    """Readouts alone, whose steps are taken from the attended tokens."""
    for kind, parameter, dtype in product(MODELS, PARAMETERS, (np.float32, np.float64)):
        model, data = draw(kind, parameter, dtype, 8 * n, T, d, H)
        names = tuple(name for name in model.parameters if name in "UVAB")
        if names:
            mh.train(
                model, data, steps=3, optimizer=mh.NormalizedGradientDescent(0.1), wrt=names,
                loss="squared", test=data, record=("loss", "grad_norm", "test_loss", *names),
            )  # fmt: skip


def products():
    """Linear attention, whose steps are from products of the tokens."""
    _core.force_plan("products")
    for parameter, dtype in product(PARAMETERS, (np.float32, np.float64)):
        model, data = draw(mh.Layer, parameter, dtype, 8 * n, T, d, H)
        mh.train(
            model.replace(attention="linear"), data, steps=3, loss="squared", test=data,
            optimizer=mh.NormalizedGradientDescent(0.1),
            record=("loss", "grad_norm", "test_loss", *model.parameters),
        )  # fmt: skip
    _core.force_plan("auto")


def wide():
    """Few rows of many features, whose gradients by W members share by features."""
    for kind, parameter, dtype in product(MODELS, PARAMETERS, (np.float32, np.float64)):
        model, data = draw(kind, parameter, dtype, 50, 4, 64, H)
        passes(model, data)
        mh.train(
            model, data, steps=3, optimizer=mh.Momentum(0.1), loss="squared",
            record=("grad_norm", "param_norm", "cosine"), directions=model,
        )  # fmt: skip


def shards():
    """Gradients of shards of different sizes, which a team leaves one after another."""
    apart = mh.Reduction(lambda sums: sums, shards=(4 * n, 3 * n, n))
    for kind, parameter, size in product(MODELS, PARAMETERS, (0.3, 40.0)):
        model, data = draw(kind, parameter, np.float32, 8 * n, T, d, H, size=size)
        mh.train(
            model, data, steps=3, optimizer=mh.NormalizedGradientDescent(0.1), loss="squared",
            record=("loss", "margin", "grad_norm"), reduce=apart,
        )  # fmt: skip


def new_samples():
    """Samples that members of a team draw themselves, for a team and for one thread alone."""
    for dtype, every, size in product((np.float32, np.float64), (1, 2), (4 * n, 5)):
        data = mh.data.sphere_tokens(4 * n, T, d, seed=0, dtype=dtype)
        model = mh.Classifier.gaussian(H, 1, d, std=0.5, seed=0, dtype=dtype)
        mh.train(
            model, data, steps=5, optimizer=mh.Adam(0.01), batch=size,
            stream=mh.Stream(data, every=every), record={"loss": 2},
        )  # fmt: skip


def words():
    """Tokens of a dictionary, whose tables and gradients members make by head."""
    rng = np.random.default_rng(0)
    problem.words_pay = lambda *_: True  # as `use_words` of the tests
    for kind, parameter in product(MODELS, ("dense", "low rank", "prompt", "token")):
        for rule in RULES[place(kind, parameter) % 3 :: 3]:
            projection, record, stop, (dtype, size, calls), batch, _ = next(REST)
            model, data = draw(kind, parameter, dtype, 4 * n, T, d, H, size=size)
            tokens = mh.Tokens(rng.integers(5, size=(4 * n, T)), data.X.reshape(-1, d)[:5])
            assert mh.explain(model, tokens)["plan"] == "words"
            looked_up = mh.Dataset(
                tokens, data.y, token_groups=tokens.ids % 2, sample_groups=tokens.ids[:, 0]
            )
            model(looked_up)
            model.attention(looked_up)
            mh.value_and_grad(model, looked_up, loss="squared")
            train(model, looked_up, rule, projection, record, stop, calls, batch, fresh=False)


def learner() -> None:
    data = mh.data.boolean_layer(4000, 3, 8, 2, seed=1)
    mh.learn_layer(data.X, data.y, 2)


def main() -> None:
    mh.set_num_threads(THREADS)
    for plan in PLANS:
        _core.force_plan(plan)
        trainings(plan)
        if plan == "tiles":  # heads enough for several slabs
            passes(*draw(mh.Classifier, "dense", np.float64, 13, 12, 21, 601))
        print(plan, "done", flush=True)
    side_by_side()
    readouts()
    products()
    wide()
    shards()
    new_samples()
    words()
    learner()


if __name__ == "__main__":
    assert "libtsan" in os.environ.get("LD_PRELOAD", ""), (
        "without the sanitizer nothing is looked for"
    )
    main()
