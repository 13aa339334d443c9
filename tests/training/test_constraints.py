"""Constraints on trained parameters: fixed entries, tied entries, and what refuses them."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from rooms import part, together
from trainings import MODELS, OPTIMIZERS, PARAMETERS, PROJECTIONS, constrained, draw

import mhfast as mh
from mhfast.models.problem import with_arrays
from mhfast.reference.constraints import project_scaled
from mhfast.training.partition import partition

n, T, d, H = 7, 3, 5, 4
# Sums in other orders than the reference's, over a few steps; "Muon" squares matrices ten times.
ROUNDING = 1e-10
NAMES = ("symmetric", "heads", "rows")


def shape_of(model, name):
    return model.parameters[name].shape[-(2 if name == "prompt" else 3) :]


def assert_kept(run, start, constraints):
    """Fixed entries have the bits of the start, tied ones those of each other."""
    for name, constraint in constraints.items():
        labels = mh.reference.labels(constraint, shape_of(start, name))
        end, before = run.model.parameters[name], start.parameters[name]
        assert_array_equal(end[..., labels < 0], before[..., labels < 0])
        for label in np.unique(labels[labels >= 0]):
            entries = end[..., labels == label]
            assert_array_equal(entries, np.broadcast_to(entries[..., :1], entries.shape))


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_trainings_agree_with_the_reference(rule):
    """Models, constraints, projections and batches drawn from the lists, for every optimizer."""
    rng = np.random.default_rng(list(OPTIMIZERS).index(rule))
    moved = 0
    for seed in range(12):
        kind, parameter = MODELS[rng.integers(2)], PARAMETERS[rng.integers(len(PARAMETERS))]
        optimizer = OPTIMIZERS[rule](**PROJECTIONS[rng.integers(len(PROJECTIONS))])
        if seed % 3 == 0 and rule not in ("Muon", "spectral"):
            optimizer = replace(optimizer, l2=0.1, clip=0.7)
        model, data = draw(kind, parameter, float, n, T, d, H, seed=seed)
        start, constraints = constrained(model, optimizer, rng)
        options = {
            "steps": 5, "optimizer": optimizer, "constraints": constraints,
            "batch": (None, 4)[seed % 2],
        }  # fmt: skip
        run = mh.train(start, data, record={"grad_norm": 1, "loss": 1}, **options)
        end, history = mh.reference.train(start, data.X, data.y, query=data.query, **options)
        assert_kept(run, start, constraints)
        for name, array in run.model.parameters.items():
            exact = getattr(end, name)
            assert_allclose(array, exact, rtol=0, atol=ROUNDING * np.abs(exact).max())
            moved += np.any(array != start.parameters[name])
        for name in ("grad_norm", "loss"):
            assert_allclose(run.history[name], history[name], rtol=1e-8)
    assert moved > 12


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_bits_are_kept_side_by_side_and_over_a_file(rule, dtype, tmp_path):
    """Run r has the bits of... its own start; a saved and resumed run those of one without."""
    rng = np.random.default_rng(7 + list(OPTIMIZERS).index(rule))
    for seed in range(4):
        optimizer = OPTIMIZERS[rule](**PROJECTIONS[rng.integers(len(PROJECTIONS))])
        kind, parameter = MODELS[rng.integers(2)], PARAMETERS[rng.integers(len(PARAMETERS))]
        model, data = draw(kind, parameter, dtype, n, T, d, H, runs=(None, 9)[seed % 2], seed=seed)
        start, constraints = constrained(model, optimizer, rng)
        options = {"optimizer": optimizer, "constraints": constraints, "record": "grad_norm"}
        run = mh.train(start, data, steps=24, **options)
        assert_kept(run, start, constraints)
        half = mh.train(start, data, steps=11, **options)
        half.save(tmp_path / "run.npz")
        assert mh.train(mh.Run.load(tmp_path / "run.npz"), data, until=24) == run
        assert mh.train(pickle.loads(pickle.dumps(half)), data, until=24) == run


@pytest.mark.parametrize("rule", ["Adam", "normalized by head", "AdamW", "spectral"])
def test_a_run_among_others_is_the_one_alone(rule):
    rng = np.random.default_rng(3)
    for parameter in ("dense", "low rank", "prompt"):
        optimizer = OPTIMIZERS[rule]()
        model, data = draw(mh.Classifier, parameter, float, n, T, d, H, runs=9)
        start, constraints = constrained(model, optimizer, rng)
        options = {"steps": 20, "optimizer": optimizer, "constraints": constraints}
        together_ = mh.train(start, data, **options)
        for r in (0, 8):
            alone = mh.train(start[r], data, **options)
            for name, array in alone.model.parameters.items():
                # As runs without constraints: plans differ in the order of their sums.
                assert_allclose(together_[r].model.parameters[name], array, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", MODELS)
def test_any_number_of_threads(kind):
    rng = np.random.default_rng(0)
    for parameter in ("dense", "prompt and factors", "token"):
        model, data = draw(kind, parameter, float, 300, 7, 9, 6)
        for rule in ("Adam", "normalized by tensor", "steepest in max"):
            optimizer = OPTIMIZERS[rule](**PROJECTIONS[rng.integers(3)])
            start, constraints = constrained(model, optimizer, rng)
            options = {
                "steps": 6, "optimizer": optimizer, "constraints": constraints,
                "record": ("loss", "grad_norm"),
            }  # fmt: skip
            one = mh.train(start, data, num_threads=1, **options)
            for threads in (2, 4):
                assert mh.train(start, data, num_threads=threads, **options) == one


@pytest.mark.parametrize("kind", ["heads", "heads and symmetric", "mask", "ties"])
@pytest.mark.parametrize(
    "optimizer",
    [
        mh.NormalizedGradientDescent(0.5),
        mh.NormalizedGradientDescent(0.5, by="all"),
        mh.NormalizedGradientDescent(0.5, by="head"),
        mh.MirrorDescent(0.01, 1.5, normalized=True),
    ],
)
def test_normalized_steps_in_saturation(optimizer, kind):
    """Gradients far below the range of float64, each head at its own distance."""
    model, data = draw(mh.Classifier, "token", float, n, T, d, H, size=1e5, seed=4)
    rng = np.random.default_rng(5)
    ties = rng.integers(-1, 30, model.W.shape)
    ties[-1] = 100 + np.arange(d * d).reshape(d, d)  # this head is tied to no other
    if getattr(optimizer, "by", "") == "head":
        ties += 1000 * np.arange(H)[:, None, None] * (ties >= 0)
    constraint = {
        "heads": "heads", "heads and symmetric": ("heads", "symmetric"),
        "mask": rng.random(model.W.shape) < 0.5, "ties": ties,
    }[kind]  # fmt: skip
    start = mh.tied(model, {"W": constraint})
    options = {"steps": 8, "optimizer": optimizer, "constraints": {"W": constraint}, "wrt": "W"}
    run = mh.train(start, data, record="grad_norm", **options)
    end, _ = mh.reference.train(start, data.X, data.y, **options)
    assert run.history["grad_norm"].max() < 1e-300
    size = np.abs(end.W - start.W).max()
    assert size > 0.1
    # Entries are of size 1e5, whose rounding is 1e-11.
    assert_allclose(run.model.W, end.W, rtol=0, atol=1e-9 * size + 1e-10)
    assert_kept(run, start, {"W": constraint})


@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_get_the_run_of_one(size):
    rng = np.random.default_rng(1)
    shards = (7, 6, 7, 9)
    model, data = draw(mh.Layer, "dense", float, sum(shards), T, d, H)
    optimizer = mh.Adam(0.01)
    start, _ = constrained(model, optimizer, rng)
    constraints = {"W": ("heads", "symmetric"), "V": rng.random(model.V.shape) < 0.5}
    start = mh.tied(start, constraints)
    options = {"steps": 8, "optimizer": optimizer, "constraints": constraints, "loss": "squared"}

    def on_ranks(count, **changes):
        results, _ = together(
            count,
            lambda rank, reduce: mh.train(
                start, part(data, shards, rank, count), reduce=reduce,
                **options | {key: value(rank) for key, value in changes.items()},
            ),
            shards=shards,
        )  # fmt: skip
        return results

    one = on_ranks(1)[0]
    assert_kept(one, start, constraints)
    for run in on_ranks(size):
        assert run.model == one.model
    differing = on_ranks(size, constraints=lambda rank: {} if rank else constraints)
    assert all("the same constraints" in str(error) for error in differing)


def test_partitions_are_those_of_the_definition():
    """Of names, arrays and several at once, by an algorithm of its own."""
    rng = np.random.default_rng(0)
    for shape in ((3, 4, 4), (2, 3, 5), (4, 6)):
        for _ in range(20):
            names = ["rows"] + ["heads"] * (len(shape) == 3) + ["symmetric"] * (shape[-1] == 4)
            parts = [
                names[rng.integers(len(names))],
                rng.random(shape) < 0.9,
                rng.integers(-1, 40, shape),
                rng.integers(0, 3, shape) * 7,
            ]
            some = tuple(parts[j] for j in rng.permutation(4)[: rng.integers(1, 4)])
            exact = mh.reference.labels(some, shape).ravel()
            found = partition(some, shape)
            assert_array_equal(found.labels == -1, exact == -1)
            pairs = {(a, b) for a, b in zip(found.labels, exact, strict=True)}
            assert len(pairs) == len(set(found.labels)) == len(set(exact))
            members, ends = found.groups
            for first, last in zip([0, *ends], ends, strict=False):
                assert len(set(exact[members[first:last]])) == 1
            counted = {label: (exact == label).sum() for label in set(exact) - {-1}}
            assert len(ends) == sum(count > 1 for count in counted.values())
            heads = np.arange(math.prod(shape)) // (math.prod(shape[1:]) if len(shape) == 3 else 99)
            assert found.over_heads == any(len(set(heads[exact == label])) > 1 for label in counted)


def test_projections_in_closed_form():
    G = np.random.default_rng(0).standard_normal((H, d, d))
    project = mh.reference.project
    assert_allclose(project("symmetric", G), (G + G.swapaxes(1, 2)) / 2, atol=1e-15)
    assert_allclose(project("heads", G), np.broadcast_to(G.mean(0), G.shape), atol=1e-15)
    rows = np.broadcast_to(G.mean(1, keepdims=True), G.shape)
    assert_allclose(project("rows", G), rows, atol=1e-15)
    mask = np.random.default_rng(1).random(G.shape) < 0.5
    assert_array_equal(project(mask, G), np.where(mask, G, 0))
    both = G.mean(0)
    both = np.broadcast_to((both + both.T) / 2, G.shape)
    assert_allclose(project(("heads", "symmetric"), G), both, atol=1e-15)
    whole = np.broadcast_to(G.mean((1, 2), keepdims=True), G.shape)
    assert_allclose(project(("rows", "symmetric"), G), whole, atol=1e-15)
    for constraint in (*NAMES, ("heads", "symmetric"), ("rows", "symmetric")):
        model = mh.tied(mh.Layer(G, None), {"W": constraint})
        assert_allclose(model.W, project(constraint, G), atol=1e-15)


def test_a_mask_starts_and_stays_anywhere():
    model, data = draw(mh.Layer, "dense", np.float32, n, T, d, H)
    mask = np.random.default_rng(0).random(model.W.shape) < 0.5
    model = replace(model, W=np.where(mask, model.W, np.float32(-0.0)))
    for rule in (mh.AdamW(0.1, weight_decay=0.5), mh.MirrorDescent(0.1, 3.0)):
        run = mh.train(model, data, steps=9, optimizer=rule, constraints={"W": mask})
        assert np.signbit(run.model.W[~mask]).all()  # the bits, not only the values
        assert (run.model.W[mask] != model.W[mask]).mean() > 0.9
    assert mh.tied(model, {"W": mask}) == model


def test_all_true_is_no_constraint():
    model, data = draw(mh.Classifier, "dense", float, n, T, d, H)
    options = {"steps": 5, "optimizer": mh.SteepestDescent(0.1, "spectral")}
    free = mh.train(model, data, **options)
    constraints = {"W": np.ones((H, d, d), bool), "U": np.arange(H * T * d).reshape(H, T, d)}
    assert mh.train(model, data, constraints=constraints, **options).model == free.model


def test_norms_and_thresholds_are_those_of_the_projection():
    model, data = draw(mh.Classifier, "dense", float, n, T, d, H)
    constraints = {"W": "symmetric", "U": ("rows", np.arange(d) % 2 * np.ones((H, T, d), int) - 1)}
    start = mh.tied(model, constraints)
    _, g = mh.value_and_grad(start, data)
    inside = {name: mh.reference.project(part, getattr(g, name)) for name, part in
              constraints.items()}  # fmt: skip
    norm = math.hypot(*(np.linalg.norm(array) for array in inside.values()))
    assert norm < 0.9 * mh.norm(g)
    assert_allclose(
        mh.evaluate(start, data, record="grad_norm", constraints=constraints)["grad_norm"], norm,
        rtol=1e-13,
    )  # fmt: skip
    seen = []
    run = mh.train(
        start, data, steps=3, optimizer=mh.GradientDescent(0.1), constraints=constraints,
        record=("grad_norm",), stop={"grad_norm": 1.01 * norm},
        callback=mh.Callback(lambda *at: seen.append(at[2]["grad_norm"]), record="grad_norm"),
    )  # fmt: skip
    assert (run.reason, run.step) == ("grad_norm", 0)
    assert seen == [run.history["grad_norm"][0]]
    # Clipping counts it, too.
    clipped = mh.GradientDescent(1.0, clip=norm / 2)
    run = mh.train(start, data, steps=1, optimizer=clipped, constraints=constraints)
    for name, array in inside.items():
        assert_allclose(run.model.parameters[name], start.parameters[name] - array / 2, atol=1e-14)


def test_other_constraints_begin_another_segment_without_state():
    model, data = draw(mh.Classifier, "dense", float, n, T, d, H)
    start = mh.tied(model, {"W": "heads"})
    mask = np.arange(d) % 2 == np.zeros((H, T, 1), int)
    run = mh.train(start, data, steps=4, optimizer=mh.Adam(0.1), constraints={"W": "heads"})
    assert run.segments[0].constraints == ("W: heads",)
    kept = mh.train(run, data, steps=2)
    assert (len(kept.segments), kept.since) == (1, 0)
    other = mh.train(run, data, steps=2, constraints={"W": ("heads", "symmetric"), "U": mask}
                     | {"W": "heads"})  # fmt: skip
    assert (len(other.segments), other.since) == (2, 4)
    assert other.segments[1].constraints[0] == "W: heads"
    assert other.segments[1].constraints[1].startswith("U: mask ")
    fresh = mh.train(
        run.model, data, steps=2, optimizer=mh.Adam(0.1), constraints={"W": "heads", "U": mask}
    )
    assert other.model == fresh.model
    free = mh.train(kept, data, steps=1, constraints={})
    assert free.constraints == {}
    assert np.ptp(free.model.W, axis=0).any()
    # Of a parameter that does not train there is nothing to see.
    only = mh.train(kept, data, steps=1, wrt="U")
    assert only.segments[-1].constraints == ()
    assert only.constraints == {"W": ("heads",)}


def test_guarantees_do_not_speak_about_constrained_steps():
    data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    options = {"steps": 5, "optimizer": mh.GradientDescent(0.1)}
    run = mh.train(model, data, constraints={"U": "rows"}, **options)
    notes = " ".join(mh.theory.certify(run, data).notes)
    assert "constrained (U: rows)" in notes
    assert "constrained" not in " ".join(
        mh.theory.certify(mh.train(model, data, **options), data).notes
    )


def test_the_span_of_the_tokens_is_left_alone():
    """Coordinates in the span are not those of the constraint."""
    rng = np.random.default_rng(0)
    wide = 400
    model = mh.Classifier(
        0.01 * rng.standard_normal((2, wide, wide)), rng.standard_normal((2, 3, wide))
    )
    data = mh.Dataset(rng.standard_normal((4, 3, wide)), [1, -1, 1, 1])
    mask = rng.random((2, wide, wide)) < 0.5
    options = {"steps": 2, "optimizer": mh.GradientDescent(0.1)}
    free = mh.train(model, data, **options)
    assert free.subspace is not None
    run = mh.train(model, data, constraints={"W": mask}, **options)
    assert run.subspace is None
    assert_array_equal(run.model.W[~mask], model.W[~mask])
    # A run that is inside leaves.
    left = mh.train(free, data, steps=2, constraints={"W": mask})
    assert left.subspace is None
    assert_array_equal(left.model.W[~mask], free.model.W[~mask])
    only_readout = mh.train(model, data, constraints={"W": mask}, wrt="U", **options)
    assert only_readout.subspace is not None


def test_solvers_stay_in_the_subspace():
    data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.3, seed=0)
    mask = np.random.default_rng(0).random((3, 9, 9)) < 0.5
    constraints = {"W": mask, "U": "rows"}
    start = mh.tied(model, constraints)
    run = mh.minimize(start, data, l2=0.01, gtol=1e-6, constraints=constraints)
    assert run.reason == "gtol"
    assert_kept(run, start, constraints)
    _, g = mh.value_and_grad(run.model, data)
    for name in constraints:
        whole = getattr(g, name) + 0.01 * run.model.parameters[name]
        inside = mh.reference.project(constraints[name], whole)
        assert np.linalg.norm(inside) <= 1e-6 < np.linalg.norm(whole)
    recorded = mh.minimize(start, data, constraints=constraints, steps=3, record="grad_norm")
    assert_allclose(
        recorded.history["grad_norm"][-1],
        mh.evaluate(recorded.model, data, record="grad_norm", constraints=constraints)["grad_norm"],
    )
    # The flow is what small steps of gradient descent approach.
    flow = mh.gradient_flow(start, data, until=1.0, constraints=constraints, rtol=1e-9, atol=1e-11)
    assert_kept(flow, start, constraints)
    steps = [
        mh.train(start, data, steps=k, optimizer=mh.GradientDescent(1 / k), constraints=constraints)
        for k in (400, 800)
    ]
    for name in constraints:
        end = flow.model.parameters[name]
        errors = [np.abs(run.model.parameters[name] - end).max() for run in steps]
        assert errors[1] < 1e-3
        assert_allclose(errors[0] / errors[1], 2.0, rtol=0.05)  # of first order
    # A run goes on in it.
    more = mh.train(run, data, steps=3, optimizer=mh.Adam(0.1))
    assert_kept(more, start, constraints)


def test_a_stack_of_layers():
    rng = np.random.default_rng(2)
    layers = [
        mh.Layer(rng.standard_normal((2, d, d)), rng.standard_normal((2, d, d)), causal=True),
        mh.Layer(rng.standard_normal((3, d, d)), rng.standard_normal((3, d, 2)), causal=True),
    ]
    stack = mh.Stack(layers, residual=(True, False))
    data = mh.Dataset(rng.standard_normal((n, T, d)), rng.standard_normal((n, T, 2)))
    mask = rng.random((3, d, 2)) < 0.5
    constraints = {"W": "symmetric", "1.W": ("heads", "symmetric"), "1.V": mask}
    start = mh.tied(stack, constraints)
    options = {"steps": 4, "constraints": constraints, "loss": "squared"}
    run = mh.train(start, data, optimizer=mh.AdamW(0.1), record=("loss", "grad_norm"), **options)
    assert run.constraints.keys() == {"0.W", "1.W", "1.V"}
    W = run.model.layers[0].W, run.model.layers[1].W
    for array in W:
        assert_array_equal(array, array.swapaxes(1, 2))
    assert np.ptp(W[0], axis=0).any()
    assert not np.ptp(W[1], axis=0).any()
    V = run.model.layers[1].V
    assert_array_equal(V[~mask], start.layers[1].V[~mask])
    assert (V[mask] != start.layers[1].V[mask]).all()
    # A step of gradient descent, by hand.
    step = mh.train(start, data, optimizer=mh.GradientDescent(0.1), **options | {"steps": 1})
    _, g = mh.value_and_grad(start, data, loss="squared")
    parts = {"0.W": "symmetric", "1.W": ("heads", "symmetric"), "1.V": mask}
    squares = 0.0
    for name, array in start.parameters.items():
        j, own = name.split(".")
        part = getattr(g.layers[int(j)], own)
        part = mh.reference.project(parts[name], part) if name in parts else part
        squares += (part**2).sum()
        assert_allclose(step.model.parameters[name], array - 0.1 * part, atol=1e-13)
    assert_allclose(run.history["grad_norm"][0], math.sqrt(squares), rtol=1e-12)
    recorded = mh.evaluate(
        start, data, record="grad_norm", constraints=constraints, loss="squared"
    )["grad_norm"]
    assert_allclose(recorded, math.sqrt(squares), rtol=1e-12)


@pytest.mark.peers
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_shared_parameters_of_torch(rule):
    """One tensor used in several places: its gradient is the sum, m times the mean over m."""
    torch = pytest.importorskip("torch")
    model, data = draw(mh.Classifier, "dense", float, n, T, d, H)
    start = mh.tied(model, {"W": ("heads", "symmetric"), "U": "rows"})
    mask = np.random.default_rng(0).random((H, d, d)) < 0.5
    X, y = torch.tensor(data.X), torch.tensor(data.y)

    def loss(W, U):
        A = torch.einsum("ntd,hde,nse->nhts", X, W, X).softmax(-1)
        F = torch.einsum("nhts,nsd,htd->n", A, X, U) / math.sqrt(H)
        return torch.nn.functional.softplus(-y * F).mean()

    def trained(parts, build, lrs, steps=12):
        parts = [torch.tensor(p, requires_grad=True) for p in parts]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(parts, lrs, strict=True)]
        optimizer = torch.optim.SGD(groups) if rule == "sgd" else torch.optim.Adam(groups, eps=0)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(*build(*parts)).backward()
            optimizer.step()
        return [array.detach().numpy() for array in build(*parts)]

    def expand(a, u):
        # a and aᵀ have the same gradient, half of that by W: as the projection has it.
        return ((a + a.T) / 2).expand(H, d, d), u[:, None].expand(H, T, d)

    # lr m for m copies: H heads share one W, T rows one vector. Adam does not see a factor.
    copies = (H, T) if rule == "sgd" else (1, 1)
    lr = (0.5, 0.25) if rule == "sgd" else (0.02, 0.03)
    here = mh.GradientDescent if rule == "sgd" else mh.Adam
    eps = {} if rule == "sgd" else {"eps": 0.0}
    run = mh.train(
        start, data, steps=12, constraints={"W": ("heads", "symmetric"), "U": "rows"},
        optimizer=here({"W": lr[0] * copies[0], "U": lr[1] * copies[1]}, **eps),
    )  # fmt: skip
    W, U = trained([start.W[0].copy(), start.U[:, 0].copy()], expand, lr)
    assert_allclose(run.model.W, W, rtol=0, atol=1e-11)
    assert_allclose(run.model.U, U, rtol=0, atol=1e-11)

    fixed = torch.tensor(model.W)

    def masked(w, U):
        return torch.where(torch.tensor(mask), w, fixed), U

    run = mh.train(
        model, data, steps=12, constraints={"W": mask},
        optimizer=here({"W": lr[0], "U": lr[1]}, **eps),
    )  # fmt: skip
    W, U = trained([model.W.copy(), model.U.copy()], masked, lr)
    assert_allclose(run.model.W, W, rtol=0, atol=1e-11)
    assert_allclose(run.model.U, U, rtol=0, atol=1e-11)


BALL = {"project": "ball", "radius": 1.0}
CROSSING = np.zeros((H, d, d), int)
CROSSING[1:] = np.arange((H - 1) * d * d).reshape(H - 1, d, d)


@pytest.mark.parametrize(
    ("constraints", "optimizer", "message"),
    [
        ({"W": "mask"}, mh.SteepestDescent(0.1, "spectral"), "norm: .*array on W.*whole matrices"),
        ({"W": "heads"}, mh.SteepestDescent(0.1, "l1"), "norm: .*tied entries of W"),
        ({"W": "mask"}, mh.GradientDescent(0.1, project_by="head", project_norm="nuclear", **BALL),
         "project_norm: .*'nuclear'.*array on W"),
        ({"W": "mask"}, mh.GradientDescent(0.1, **BALL), "project: .*entries of W.*fixed at 0"),
        ({"W": CROSSING}, mh.NormalizedGradientDescent(0.1, by="head"), "by: .*heads of W"),
        ({"W": CROSSING}, mh.MirrorDescent(0.1, 3.0, True, "head"), "by: .*heads of W"),
        ({"W": CROSSING}, mh.SteepestDescent(0.1, "fro", by="head"), "by: .*heads of W"),
        ({"W": CROSSING}, mh.SteepestDescent(0.1, "max", scaled=True, by="head"), "by: .*of W"),
        ({"W": CROSSING}, mh.GradientDescent(0.1, project_by="head", **BALL), "project_by: .*of W"),
    ],
)  # fmt: skip
def test_what_would_leave_the_subspace_is_refused(constraints, optimizer, message):
    model, data = draw(mh.Classifier, "dense", float, n, T, d, H)
    if constraints["W"] is not CROSSING and constraints["W"] == "mask":
        constraints = {"W": np.random.default_rng(0).random((H, d, d)) < 0.5}
    start = mh.tied(model, constraints)
    with pytest.raises(ValueError, match=message):
        mh.train(start, data, steps=1, optimizer=optimizer, constraints=constraints)
    # Where nothing of W trains, nothing can leave.
    mh.train(start, data, steps=1, optimizer=optimizer, constraints=constraints, wrt="U")
    # With a radius for U alone W is not projected.
    if optimizer.project:
        only = replace(optimizer, radius={"U": 1.0})
        run = mh.train(start, data, steps=1, optimizer=only, constraints=constraints)
        assert_kept(run, start, constraints)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("heads", TypeError, "constraints: expected a dict by parameter, got str"),
        ({"V": "heads"}, ValueError, "constraints: expected parameters among W, U, got 'V'"),
        ({"W": "diagonal"}, ValueError, r"constraints\['W'\]: .*'rows', got 'diagonal'"),
        ({"W": ["heads", "columns"]}, ValueError, r"constraints\['W'\]: .*got 'columns'"),
        ({"W": ()}, ValueError, r"constraints\['W'\]: expected a name or an array, got \(\)"),
        ({"W": None}, TypeError, "expected an array of numbers, got NoneType"),
        ({"W": np.ones((H, d, d))}, TypeError, r"constraints\['W'\]: .*dtype float64"),
        ({"W": np.ones((d, d), bool)}, ValueError, r"\(H, d, d\) = \(4, 5, 5\), got \(5, 5\)"),
        ({"W": np.full((H, d, d), -2)}, ValueError, "int64 of at least -1, got -2"),
        ({"W": np.full((H, d, d), 2**64 - 1, np.uint64)}, ValueError, "got 18446744073709551615"),
        ({"U": "symmetric"}, ValueError, r"square matrices for 'symmetric', got U of shape"),
        ({"U": "rows"}, ValueError, r"of U where.*\(0, 0, 0\) and .* at \(0, 1, 0\); mhfast.tied"),
        ({"W": np.zeros((H, d, d), bool), "U": np.full((H, T, d), -1)}, ValueError, "only fixed"),
    ],
)  # fmt: skip
def test_wrong_constraints(given, error, message):
    model, data = draw(mh.Classifier, "dense", float, n, T, d, H)
    with pytest.raises(error, match=message):
        mh.train(model, data, steps=1, optimizer=mh.GradientDescent(0.1), constraints=given)


def test_wrong_start_of_a_run_among_several():
    model, data = draw(mh.Classifier, "dense", float, n, T, d, H, runs=3)
    W = model.W.copy()
    W[:] = W[:, :1]
    W[2, 3, 1, 4] += 1.0
    with pytest.raises(ValueError, match=r"at \(2, 0, 1, 4\) and .* at \(2, 3, 1, 4\)"):
        mh.train(
            with_arrays(model, {"W": W}), data, steps=1, optimizer=mh.GradientDescent(0.1),
            constraints={"W": "heads"},
        )  # fmt: skip


def test_a_prompt_and_factors():
    model, data = draw(mh.Classifier, "prompt and factors", float, n, T, d, H)
    with pytest.raises(ValueError, match="constraint on a prompt, which has no heads"):
        mh.tied(model, {"prompt": "heads"})
    with pytest.raises(TypeError, match="model: expected a Classifier, Layer or Stack, got dict"):
        mh.tied(dict(model.parameters), {})
    constraints = {"prompt": "rows", "Q": "heads", "K": np.arange(2) == np.zeros((H, d, 1), int)}
    start = mh.tied(model, constraints)
    run = mh.train(
        start, data, steps=5, optimizer=mh.Momentum(0.1), constraints=constraints,
        record=("grad_norm",),
    )  # fmt: skip
    assert_kept(run, start, constraints)
    assert all(np.any(run.model.parameters[name] != start.parameters[name]) for name in constraints)


def with_positions(tokens):
    """Tokens with one-hot positions behind their features."""
    count = tokens.shape[1]
    return np.concatenate([tokens, np.broadcast_to(np.eye(count), (*tokens.shape[:2], count))], -1)


def test_ties_of_positions():
    ties = mh.position_ties(2, 3, 4)
    assert ties.shape == (2, 7, 7)
    assert (ties[:, :3, 3:] == -1).all()
    assert (ties[:, 3:, :3] == -1).all()
    assert len(np.unique(ties)) == 1 + 2 * (9 + 7)
    for h in range(2):
        for shift in range(-3, 4):
            assert len(np.unique(np.diagonal(ties[h, 3:, 3:], shift))) == 1
    near = mh.position_ties(1, 0, 6, farthest=2)[0]
    assert_array_equal(near[0], [2, 3, 4, 4, 4, 4])
    assert_array_equal(near[5], [0, 0, 0, 0, 1, 2])
    table = mh.position_ties(2, 1, 3, relative=False)
    assert len(np.unique(table)) == 1 + 2 * (1 + 9)
    for given, error, message in (
        ({"heads": 0}, ValueError, "heads: "),
        ({"dim": -1}, ValueError, "dim: expected an integer of at least 0, got -1"),
        ({"tokens": 2.5}, TypeError, "tokens: "),
        ({"farthest": 0}, ValueError, "farthest: "),
        ({"farthest": 2, "relative": False}, ValueError, "farthest: expected None without rel"),
    ):
        with pytest.raises(error, match=message):
            mh.position_ties(**{"heads": 2, "dim": 3, "tokens": 4} | given)


def test_relative_biases_reach_rows_that_no_label_trained():
    """As the page on constraints says: each row asks for the token before it."""
    rng = np.random.default_rng(0)
    words = np.eye(5)[rng.integers(0, 5, (60, 8))]
    row = np.broadcast_to(np.arange(8), (60, 8))
    early, late = (1.0 * ((row >= 1) & (row < 4)), 1.0 * (row >= 4))
    X, Y = with_positions(words), np.roll(words, 1, axis=1)
    start = mh.Layer(np.zeros((1, 13, 13)), np.eye(13)[None, :, :5], causal=True)
    ends = {}
    for relative in (True, False):
        ties = mh.position_ties(heads=1, dim=5, tokens=8, relative=relative)
        run = mh.train(
            start, mh.Dataset(X, Y, weight=early), steps=200, optimizer=mh.Adam(0.05),
            loss="squared", wrt="W", constraints={"W": ties}, record=("loss", "late_loss"),
            test={"late": mh.Dataset(X, Y, weight=late)},
        )  # fmt: skip
        assert run.history["loss"][-1] < 0.002
        ends[relative] = run.history["late_loss"][-1]
    before = run.history["late_loss"][0]
    assert ends[True] < 0.3 * before < before <= ends[False]


@pytest.mark.peers
def test_relative_biases_against_torch():
    """Scores with a bias by distance; Adam does not see that a group's gradient is a mean."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((n, T, d)), rng.choice([-1.0, 1.0], n)
    W, U = rng.standard_normal((H, d, d)), rng.standard_normal((H, T, d))
    b = rng.standard_normal((H, 2 * T - 1))
    distance = np.arange(T) - np.arange(T)[:, None] + T - 1
    whole = np.zeros((H, d + T, d + T))
    whole[:, :d, :d], whole[:, d:, d:] = W, b[:, distance]
    wide = np.concatenate([U, np.zeros((H, T, T))], -1)
    readout = np.broadcast_to(np.arange(d + T) < d, wide.shape)
    run = mh.train(
        mh.Classifier(whole, wide), with_positions(x), y, steps=10,
        optimizer=mh.Adam(0.02, eps=0.0),
        constraints={"W": mh.position_ties(H, d, T), "U": readout},
    )  # fmt: skip
    parts = [torch.tensor(a, requires_grad=True) for a in (W, b, U)]
    optimizer = torch.optim.Adam(parts, lr=0.02, eps=0)
    X, Y = torch.tensor(x), torch.tensor(y)
    for _ in range(10):
        optimizer.zero_grad()
        scores = torch.einsum("ntd,hde,nse->nhts", X, parts[0], X) + parts[1][:, distance]
        F = torch.einsum("nhts,nsd,htd->n", scores.softmax(-1), X, parts[2]) / math.sqrt(H)
        torch.nn.functional.softplus(-Y * F).mean().backward()
        optimizer.step()
    W, b, U = (part.detach().numpy() for part in parts)
    # Adam without eps divides by gradients that may be small, which magnifies their rounding.
    assert_allclose(run.model.W[:, :d, :d], W, rtol=0, atol=1e-9)
    assert_allclose(run.model.W[:, d:, d:], b[:, distance], rtol=0, atol=1e-9)
    assert_allclose(run.model.U[..., :d], U, rtol=0, atol=1e-9)
    assert not run.model.W[:, :d, d:].any()
    assert not run.model.U[..., d:].any()


@pytest.mark.parametrize("optimizer", [mh.SignDescent(1.0), mh.SteepestDescent(1.0, "max")])
def test_signs_of_means_over_heads_far_below_the_range(optimizer):
    """Of two heads that are tied, the one whose gradient is larger by many powers decides."""
    model, data = draw(mh.Classifier, "token", float, n, T, d, H, size=1e5, seed=0)
    a, b = 0, 3
    ties = np.arange(H * d * d).reshape(H, d, d)
    ties[b, :, 1:] = ties[a, :, 1:]  # not in the first column, so that heads attend differently
    start = mh.tied(model, {"W": ties})
    gradient = mh.reference.scaled_gradients(start, data.X, data.y, wrt="W")["W"]
    assert gradient.log.argmax() in (a, b)
    assert abs(gradient.log[a] - gradient.log[b]) > 1000
    assert gradient.log.max() < -1000
    exact = project_scaled(ties, gradient, start.W.shape).mantissa[[a, b], :, 1:]
    assert exact.all()
    run = mh.train(start, data, steps=1, optimizer=optimizer, wrt="W", constraints={"W": ties})
    assert_array_equal((run.model.W - start.W)[[a, b], :, 1:].round(), -np.sign(exact))
