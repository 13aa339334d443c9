"""`minimize`: small gradients, the minimum that SciPy finds with the reference, and its Run."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

import mhfast as mh
from mhfast.optimizers import LBFGS, GradientFlow
from mhfast.training.objective import Objective

n, T, d, H, p, R = 17, 4, 5, 3, 2, 6
l2 = {"W": 0.05, "U": 0.02}


def data_set(seed=1, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return mh.Dataset(
        rng.standard_normal((n, T, d)).astype(dtype),
        np.where(rng.random(n) < 0.5, 1.0, -1.0),
        weight=rng.random(n).astype(dtype),
    )


def classifier(dtype=np.float64, runs=None):
    return mh.Classifier.gaussian(H, T, d, std=0.5, seed=0, runs=runs, dtype=dtype)


def gradient(model, data, l2):
    g = mh.value_and_grad(model, data, wrt=tuple(l2))[1]
    return g + mh.Gradients(**{name: l2[name] * model.parameters[name] for name in l2})


def test_the_gradient_gets_as_small_as_asked():
    model, data = classifier(), data_set()
    run = mh.minimize(model, data, l2=l2, gtol=1e-8, record=("loss", "grad_norm", "distance"))
    assert (run.reason, run.stopped) == ("gtol", run.step)
    assert mh.norm(gradient(run.model, data, l2)) <= 1e-8
    before = run.step - 1  # it ends at the first such step
    again = mh.minimize(model, data, l2=l2, gtol=1e-8, steps=before)
    assert (again.reason, again.stopped, again.step) == ("steps", None, before)
    assert mh.norm(gradient(again.model, data, l2)) > 1e-8
    f = run.history["loss"] + 0  # the recorded loss has no l2 term
    assert f[-1] == mh.evaluate(run.model, data)["loss"]
    np.testing.assert_array_equal(run.steps["loss"], np.arange(run.step + 1))
    assert run.history["distance"][0] == 0.0 < run.history["distance"][-1]


def test_the_minimum_is_that_of_the_reference():
    model, data = classifier(), data_set()

    def of_reference(u):
        U = u.reshape(H, T, d)
        loss, g = mh.reference.value_and_grad(
            model.replace(U=U), data.X, data.y, weight=data.weight, wrt="U"
        )
        return loss + 0.02 / 2 * u @ u, g["U"].ravel() + 0.02 * u

    options = {"gtol": 1e-10, "ftol": 0.0}
    found = scipy.optimize.minimize(
        of_reference, model.U.ravel(), jac=True, method="L-BFGS-B", options=options
    )
    run = mh.minimize(model, data, wrt="U", l2=0.02, gtol=1e-9)
    # f is .02-convex: a gradient of 1e-9 is within 1e-9 / .02 of the minimum.
    np.testing.assert_allclose(run.model.U.ravel(), found.x, atol=2e-7)
    np.testing.assert_array_equal(run.model.W, model.W)


def test_ridge_regression_in_closed_form():
    """With W = 0 a layer sees the mean token m: V is a least-squares solution."""
    rng = np.random.default_rng(3)
    data = mh.Dataset(rng.standard_normal((n, T, d)), rng.standard_normal((n, 1, p)))
    layer = mh.Layer.zeros(1, d, p, query=0)
    run = mh.minimize(layer, data, wrt="V", loss="squared", l2=0.3, gtol=1e-9, memory=4)
    M = data.X.mean(axis=1)
    V = np.linalg.solve(2 * M.T @ M / n + 0.3 * np.eye(d), 2 * M.T @ data.y[:, 0] / n)
    np.testing.assert_allclose(run.model.V[0], V, atol=1e-8)  # 1e-9 over the curvature .3


def test_float32_models_stay_float32():
    data = data_set(dtype=np.float32)
    run = mh.minimize(classifier(np.float32), data, l2=l2, gtol=1e-3, record=("loss", "W"))
    assert run.reason == "gtol"
    assert run.model.W.dtype == run.history["W"].dtype == np.float32
    double = mh.Dataset(data.X.astype(float), data.y, weight=data.weight.astype(float))
    exact = run.model.replace(W=run.model.W.astype(float), U=run.model.U.astype(float))
    assert mh.norm(gradient(exact, double, l2)) <= 1e-3 + 1e-5  # of rounding to float32


def test_where_no_lower_value_is_found_it_ends():
    run = mh.minimize(classifier(), data_set(), l2=l2, gtol=0.0)
    assert run.reason == "line_search"
    assert mh.norm(gradient(run.model, data_set(), l2)) < 1e-7
    assert run.step < 1000


def test_records_are_those_of_evaluate():
    model, data, test = classifier(), data_set(), data_set(2)

    def trace(model):
        return np.trace(model.W, axis1=1, axis2=2)

    options = {"test": test, "directions": {"one": classifier()}}
    record = {"loss": 1, "test_accuracy": 4, "attention_max": 3, "cosine": 2, trace: 5}
    run = mh.minimize(model, data, steps=6, record=record, **options)
    assert run.steps["test_accuracy"].tolist() == [0, 4, 6]
    assert run.steps["trace"].tolist() == [0, 5, 6]
    assert run.history["attention_max"].shape == (3, H)
    last = mh.evaluate(run.model, data, record=tuple(record), start=model, **options)
    for name, rows in run.history.items():
        np.testing.assert_array_equal(rows[-1], last[name], name)
    assert run.history["loss"][-1] < run.history["loss"][0]


def test_a_run_goes_on_both_ways(tmp_path):
    data = data_set()
    first = mh.train(classifier(), data, steps=5, optimizer=mh.Adam(0.01), wrt="U")
    run = mh.minimize(first, data, steps=3, l2={"U": 0.1})
    assert (run.step, run.wrt, run.state) == (8, ("U",), {})
    assert run.steps["loss"].tolist() == list(range(9))
    np.testing.assert_array_equal(run.history["loss"][:5], first.history["loss"][:5])
    assert [(s.first, type(s.optimizer).__name__) for s in run.segments] == [
        (0, "Adam"),
        (5, "LBFGS"),
    ]
    run.save(tmp_path / "run.npz")
    assert mh.Run.load(tmp_path / "run.npz") == run
    assert repr(run.optimizer) == "LBFGS(l2={'U': 0.1}, memory=10, gtol=1e-06)"
    with pytest.raises(TypeError, match=r"optimizer: expected one of .*GradientDescent.*LBFGS"):
        mh.train(run, data, steps=2)
    after = mh.train(run, data, steps=2, optimizer=mh.Adam(0.01))
    alone = mh.train(run.model, data, steps=2, optimizer=mh.Adam(0.01), wrt="U")
    np.testing.assert_array_equal(after.model.U, alone.model.U)
    assert after.steps["loss"].tolist() == list(range(11))


def test_no_guarantee_is_claimed():
    data = mh.data.tokenized_mixture(12, 5, 6, seed=0)
    run = mh.minimize(mh.Classifier.zeros(2, 5, 6), data, steps=3)
    assert any(
        "LBFGS is not gradient descent" in note for note in mh.theory.certify(run, data).notes
    )


def test_solvers_get_float64_of_models_of_float32():
    start = mh.Classifier.gaussian(2, 3, 5, std=0.5, seed=0, dtype=np.float32)
    data = mh.Dataset(np.ones((4, 3, 5), np.float32), np.float32([1, -1, 1, 1]))
    objective = Objective(start, data, "logistic", ("W", "U"), {"W": 0.0, "U": 0.0}, 1, {})
    value, gradient = objective(objective.vector(start))
    assert isinstance(value, float)
    assert gradient.dtype == np.float64


def test_ends_at_once():
    data = data_set()
    run = mh.minimize(classifier(), data, gtol=100.0)
    assert (run.reason, run.step, len(run.history["loss"])) == ("gtol", 0, 1)
    run = mh.minimize(classifier(), data, steps=0)
    assert (run.reason, run.step, run.stopped) == ("steps", 0, None)
    infinite = classifier().replace(U=np.full((H, T, d), np.inf))
    with pytest.warns(RuntimeWarning, match="no step was taken: .* U holds inf"):
        run = mh.minimize(infinite, data)
    assert (run.reason, run.stopped) == ("nonfinite", 0)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (KeyboardInterrupt(), mh.Interrupted, "interrupted"),
        (RuntimeError(), RuntimeError, "exception"),
    ],
)
def test_what_is_recorded_survives_an_exception(error, kind, reason):
    calls = []

    def impatient(_):
        calls.append(1)
        if len(calls) == 4:
            raise error
        return 0.0

    with pytest.raises(kind) as caught:
        mh.minimize(classifier(), data_set(), record=("loss", impatient))
    run = caught.value.run
    assert (run.step, run.reason) == (3, reason)
    assert run.steps["loss"].tolist() == [0, 1, 2, 3]
    assert run.steps["impatient"].tolist() == [0, 1, 2]


def test_functions_keep_their_shape():
    sizes = iter([2, 2, 3])

    def growing(_):
        return np.zeros(next(sizes))

    with pytest.raises(ValueError, match=r"'growing': expected shape \(2,\) .* \(3,\) at step 2"):
        mh.minimize(classifier(), data_set(), record=growing)
    first = mh.train(classifier(), data_set(), steps=1, optimizer=mh.Adam(0.1), record="attention")
    with pytest.raises(ValueError, match=r"'attention': .*\(17, 3, 4, 4\).*\(9, 3, 4, 4\)"):
        mh.minimize(first, data_set()[:9])


def test_records_have_room():
    with pytest.raises(ValueError, match="record: the limit is 2 GiB"):
        mh.minimize(classifier(), data_set(), steps=10**6, record="attention")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"model": "model"},
            TypeError,
            "model: expected a Classifier, Layer, Stack or Run, got str",
        ),
        ({"model": classifier(runs=R)}, ValueError, "minimize: expected one model .* length 6"),
        ({"steps": -1}, ValueError, "steps: expected an integer of at least 0"),
        ({"gtol": -1.0}, ValueError, "gtol: expected a finite number of at least 0"),
        ({"memory": 0}, ValueError, "memory: "),
        ({"l2": {"V": 0.1}}, ValueError, "l2: expected names of parameters of the model, W, U"),
        ({"record": "los"}, ValueError, "record: expected one of loss"),
        ({"wrt": "V"}, ValueError, "wrt: expected names from W, U"),
        ({"loss": "hunge"}, ValueError, "loss: expected one of"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        mh.minimize(**{"model": classifier(), "X": data_set()} | options)


def test_solvers_have_no_l2_unless_told():
    assert LBFGS().l2 == GradientFlow().l2 == 0.0
