"""Refinement of a layer by least squares: where it ends, what it reports, what it takes."""

import signal
import sys

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core
from mhfast.learner.alignment import align
from mhfast.learner.refinement import refine


def perturbed(layer, size, seed=1):
    """The layer with every number moved by `size` root mean squares."""
    rng = np.random.default_rng(seed)

    def moved(a):
        return a + size * np.sqrt((a**2).mean()) * rng.standard_normal(a.shape)

    return mh.Layer(moved(layer.W), moved(layer.V))


def with_head(layer, W, V):
    return mh.Layer(np.concatenate([layer.W, W[None]]), np.concatenate([layer.V, V[None]]))


def problem(heads=2, dim=6, tokens=3, out_dim=4, *, n=400, **options):
    data = mh.data.boolean_layer(n, tokens, dim, heads, out_dim=out_dim, seed=3, **options)
    return data, data.truth["layer"]


@pytest.mark.parametrize("inputs", ["boolean", "gaussian"])
@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "out_dim"),
    [(1, 8, 6, 3), (2, 8, 3, 5), (3, 6, 4, 9), (4, 5, 2, 7), (2, 12, 3, 1), (3, 7, 5, 2)],
)
def test_reaches_the_truth(heads, dim, tokens, out_dim, inputs):
    data, truth = problem(heads, dim, tokens, out_dim, n=2000, inputs=inputs)
    refined = refine(perturbed(truth, 0.2), data.X, data.y)
    assert refined.reason == "converged"
    assert refined.condition > 1e-6  # measured from 1e-4 to 1e-2
    # Digits double with every step, as damping falls with the residual: measured at most 7.
    assert refined.steps < 10
    # The best float64 allows is rounding times the root of the inverse condition, below 1e-13.
    assert align(refined.layer, truth).error < 1e-10
    fresh = data.sample(50, seed=9)
    difference = refined.layer(fresh.X) - fresh.y
    assert np.linalg.norm(difference) / np.linalg.norm(fresh.y) < 1e-10


def test_a_random_start_may_do():
    data, truth = problem(2, 8, 3, 5)
    start = mh.Layer.gaussian(2, 8, 5, std=0.3, seed=2)
    refined = refine(start, data.X, data.y)
    assert refined.reason == "converged"
    assert align(refined.layer, truth).error < 1e-10


def test_history_falls_and_is_that_of_the_layers():
    data, truth = problem()
    start = perturbed(truth, 0.5)
    whole = refine(start, data.X, data.y, examples=data.n)
    assert whole.history.dtype == np.float64
    assert whole.history.shape == (whole.steps + 1,)
    assert (np.diff(whole.history) < 0).all()
    assert whole.history[-1] == whole.residual
    for steps in range(whole.steps):
        part = refine(start, data.X, data.y, examples=data.n, steps=steps)
        assert part.steps == steps
        assert np.array_equal(part.history, whole.history[: steps + 1])
        difference = part.layer(data.X) - data.y
        want = np.linalg.norm(difference) / np.linalg.norm(data.y)
        assert abs(part.residual - want) <= 1e-14 * want  # one sum in two orders
    assert part.reason == "converged"  # all but the step that polishes
    assert refine(start, data.X, data.y, steps=1).reason == "steps"


def test_zero_steps_only_evaluate():
    data, truth = problem()
    start = perturbed(truth, 0.5)
    refined = refine(start, data.X, data.y, steps=0)
    assert refined.layer == start
    assert (refined.steps, refined.reason, len(refined.history)) == (0, "steps", 1)


def test_a_tolerance_ends_early():
    data, truth = problem()
    start = perturbed(truth, 0.5)
    rough, fine = (refine(start, data.X, data.y, tolerance=t) for t in (1e-2, 1e-13))
    assert rough.reason == "converged"
    assert rough.steps < fine.steps
    # The step that gets there is followed by one that polishes.
    assert rough.history[-1] < rough.history[-2] <= 1e-2 < rough.history[-3]


def test_at_the_truth_there_is_nothing_to_do():
    data, truth = problem()
    refined = refine(truth, data.X, data.y)
    assert refined.reason == "converged"
    assert refined.steps <= 1
    assert align(refined.layer, truth).error < 1e-14  # rounding


def test_a_tolerance_below_rounding_stalls():
    data, truth = problem()
    refined = refine(perturbed(truth, 0.1), data.X, data.y, tolerance=0.0)
    assert refined.reason == "stalled"
    assert refined.residual < 1e-14  # rounding of outputs
    assert refined.steps < 20  # of 60: it has noticed


def test_condition_is_that_of_the_scaled_derivatives():
    data, truth = problem(2, 3, 4, 5, n=64)
    refined = refine(truth, data.X, data.y)
    step, columns = 1e-6, []
    for name in ("W", "V"):
        for k in range(getattr(truth, name).size):
            direction = np.zeros(getattr(truth, name).size)
            direction[k] = 1.0
            g = mh.Gradients(**{name: direction.reshape(getattr(truth, name).shape)})
            ahead, behind = ((truth + s * g)(data.X) for s in (step, -step))
            columns.append((ahead - behind).ravel() / (2 * step))
    J = np.stack(columns, axis=1)
    values = np.linalg.svd(J / np.linalg.norm(J, axis=0), compute_uv=False)
    want = (values[-1] / values[0]) ** 2
    # Differences are good to 1e-9; small singular values, of 1e-2 here, to 1e-6.
    assert abs(refined.condition - want) < 1e-5 * want


def extra_heads():
    rng = np.random.default_rng(5)
    _, truth = problem()
    W, V = rng.standard_normal((6, 6)) / 3, rng.standard_normal((6, 4)) / 3
    yield pytest.param(with_head(truth, W, V), id="one too many")
    yield pytest.param(with_head(truth, W, np.zeros_like(V)), id="one of V = 0")
    yield pytest.param(with_head(truth, truth.W[0], 0.3 * truth.V[0]), id="one twice")


@pytest.mark.parametrize("start", list(extra_heads()))
def test_a_head_too_many_shows_in_the_condition(start):
    data, truth = problem(n=1000)
    refined = refine(perturbed(start, 0.05), data.X, data.y, tolerance=1e-11)
    assert refined.reason == "converged"
    # The condition of the truth alone is above 1e-3; here directions are missing entirely.
    assert refined.condition < 1e-10
    # Along a family of solutions a head's V is found to no more than the root of the tolerance.
    alignment = align(refined.layer, truth, tolerance=1e-4)
    assert alignment.merged == (2, 2)
    assert alignment.error < 1e-3


def test_too_few_examples_show_in_the_condition():
    data, truth = problem()
    refined = refine(perturbed(truth, 0.1), data.X, data.y, examples=8)  # 96 outputs, 120 numbers
    assert refined.condition < 1e-10
    assert align(refined.layer, truth).error > 1e-4  # it fits, but not the truth


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_noise(noise):
    data, truth = problem(n=3000, noise=noise)
    P = truth.W.size + truth.V.size
    relative = noise / np.sqrt((data.y**2).mean())
    errors = []
    for examples in (None, data.n):
        refined = refine(perturbed(truth, 0.1), data.X, data.y, examples=examples)
        assert refined.reason == "stalled"
        # Fitting P numbers takes a share P/m of m outputs' noise away.  The sample's own noise
        # varies by about 1/sqrt(2 m) <= 0.04.
        m = 12 * max(64, P // 4) if examples is None else 12 * examples
        assert abs(refined.residual / relative - np.sqrt(1 - P / m)) < 0.12
        errors.append(align(refined.layer, truth, tolerance=0.0).error)
    assert errors[1] < errors[0] / 3  # 47 times the examples: about a seventh
    assert errors[1] < noise


def test_the_seed_chooses_the_examples():
    data, truth = problem(noise=0.1)
    one, again, other, every = (
        refine(truth, data.X, data.y, steps=0, seed=seed, examples=examples)
        for seed, examples in ((0, None), (0, None), (1, None), (1, data.n))
    )
    assert one.residual == again.residual
    assert one.residual != other.residual
    assert every.residual == refine(truth, data.X, data.y, steps=0, examples=data.n).residual


def test_equal_bits_for_any_number_of_threads():
    data, truth = problem(2, 8, 3, 5)
    start = perturbed(truth, 0.2)
    one, two = (refine(start, data.X, data.y, num_threads=k) for k in (1, 2))
    assert one.layer == two.layer


def test_inputs_are_not_written_and_any_layout_will_do():
    data, truth = problem()
    start = perturbed(truth, 0.2)
    X, Y = np.asfortranarray(data.X), data.y[::-1].copy()[::-1]
    before = X.copy(), Y.copy()
    assert refine(start, X, Y).layer == refine(start, data.X, data.y).layer
    assert np.array_equal(X, before[0])
    assert np.array_equal(Y, before[1])


def test_a_single_token_tells_nothing_about_attention():
    data, truth = problem(2, 6, 1, 4)
    start = mh.Layer(truth.W, 2 * truth.V)
    refined = refine(start, data.X, data.y)
    assert refined.reason == "converged"
    assert refined.condition < 1e-10
    assert np.array_equal(refined.layer.W, start.W)


def test_saturated_heads():
    """Logits of 1e6: derivatives by W vanish, V is found all the same."""
    data, truth = problem()
    sharp = mh.Layer(1e6 * truth.W, truth.V)
    start = mh.Layer(sharp.W, perturbed(truth, 0.2).V)
    refined = refine(start, data.X, sharp(data.X))
    assert refined.reason == "converged"
    assert np.abs(refined.layer.V - truth.V).max() < 1e-10


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is for POSIX")
def test_an_interrupt_ends_it(monkeypatch):
    data, truth = problem()
    equations, calls = _core.layer_equations, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return equations(*arguments)

    start = perturbed(truth, 0.5)
    monkeypatch.setattr(_core, "layer_equations", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refine(start, data.X, data.y)
    assert len(calls) == 2
    assert refine(start, data.X, data.y).reason == "converged"


def test_errors_of_the_layer():
    data, truth = problem()
    X, Y, W, V = data.X, data.y, truth.W, truth.V
    for error, match, layer in (
        (TypeError, "layer: expected a Layer, got tuple", (W, V)),
        (TypeError, "layer: expected a dense W, got LowRank", mh.Layer(mh.LowRank(W), V)),
        (
            TypeError,
            "layer: expected dtype float64, got float32",
            mh.Layer(W.astype(np.float32), V.astype(np.float32)),
        ),
        (ValueError, "layer: expected one run, .* got 3 runs", mh.stack([truth] * 3)),
        (ValueError, "layer: expected self-attention", mh.Layer(W, V, causal=True)),
        (ValueError, "layer: expected self-attention", mh.Layer(W, V, query=-1)),
        (ValueError, "layer: expected self-attention", mh.Layer(W, V, prompt=np.ones((5, 6)))),
        (ValueError, "layer: expected scale 1, got 0.5", mh.Layer(W, V, scale=0.5)),
        (ValueError, "layer: expected finite", mh.Layer(W * np.nan, V)),
    ):
        with pytest.raises(error, match=match):
            refine(layer, X, Y)


def test_errors_of_the_examples():
    data, layer = problem()
    X, Y = data.X, data.y
    with pytest.raises(TypeError, match="X: expected dtype float64, that of the layer, got float"):
        refine(layer, X.astype(np.float32), Y)
    with pytest.raises(ValueError, match=r"X: expected shape \(n, T, d\) = \(n, T, 6\), got"):
        refine(layer, X[..., :5], Y)
    with pytest.raises(ValueError, match=r"Y: expected shape \(n, T, p\) = \(400, 3, 4\), got"):
        refine(layer, X, Y[:, :2])
    with pytest.raises(ValueError, match="X: expected no axis of length 0"):
        refine(layer, X[:0], Y[:0])
    for name in ("X", "Y"):
        arrays = {"X": X.copy(), "Y": Y.copy()}
        arrays[name][-1, -1, -1] = np.nan
        with pytest.raises(ValueError, match=f"{name}: expected finite numbers"):
            refine(layer, **arrays)
    with pytest.raises(ValueError, match="Y: expected outputs other than zero"):
        refine(layer, X, np.zeros_like(Y))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"steps": -1}, ValueError, "steps: expected an integer of at least 0, got -1"),
        ({"steps": 2.5}, TypeError, "steps: expected an integer"),
        ({"tolerance": -1e-3}, ValueError, "tolerance: expected a number of at least 0"),
        ({"tolerance": np.nan}, ValueError, "tolerance: expected a number of at least 0"),
        ({"examples": 0}, ValueError, "examples: expected an integer of at least 1"),
        ({"examples": 401}, ValueError, "examples: expected at most n = 400, got 401"),
        ({"seed": -1}, ValueError, "seed: expected an integer of at least 0"),
        ({"num_threads": 0}, ValueError, "num_threads: expected an integer of at least 1"),
    ],
)
def test_errors_of_the_options(options, error, match):
    data, layer = problem()
    with pytest.raises(error, match=match):
        refine(layer, data.X, data.y, **options)


@pytest.mark.parametrize(("heads", "dim", "tokens"), [(2, 13, 2), (1, 12, 2), (2, 12, 3)])
def test_enough_examples_for_wide_tokens(heads, dim, tokens):
    """Outputs see W through T - 1 differences of scores a row, so that many outputs are not enough.

    At (2,13,2) three outputs a parameter are 78 samples: 156 rows with 312 differences for 338
    numbers of W.
    """
    data = mh.data.boolean_layer(2000, tokens, dim, heads, seed=0)
    truth = data.truth["layer"]
    found = refine(mh.Layer(1.02 * truth.W, 0.98 * truth.V), data.X, data.y)
    assert found.residual < 1e-12
    assert found.condition > 1e-12
    # It is the layer, and not one that agrees with it on the examples chosen.
    assert mh.learner.align(found.layer, truth).error < 1e-11


def test_wide_tokens_are_learnt():
    data = mh.data.boolean_layer(1000, 2, 12, 2, seed=0)
    result = mh.learn_layer(data, heads=2)
    assert result.learnt, result.verdict
    assert mh.learner.align(result.layer, data.truth["layer"]).error < 1e-11
