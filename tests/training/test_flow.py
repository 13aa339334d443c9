"""`gradient_flow`: closed forms, the limit of small steps, what it conserves, and its Run."""

from __future__ import annotations

import numpy as np
import pytest

import mhfast as mh
from mhfast.optimizers.solvers import GradientFlow

n, T, d, H, p, r, R = 13, 4, 5, 3, 2, 2, 6
METHODS = ("DOP853", "RK45", "RK23", "LSODA")


def data_set(seed=1, dtype=np.float64):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, T, d)).astype(dtype)
    return mh.Dataset(X, np.where(rng.random(n) < 0.5, 1.0, -1.0))


def classifier(dtype=np.float64, runs=None):
    return mh.Classifier.gaussian(H, T, d, std=0.5, seed=0, runs=runs, dtype=dtype)


def factored(dtype=np.float64):
    rng = np.random.default_rng(5)
    Q, K = (rng.standard_normal((H, d, r)).astype(dtype) for _ in range(2))
    return mh.Classifier(mh.LowRank(Q, K), rng.standard_normal((H, T, d)).astype(dtype))


def regression(dtype=np.float64):
    """A layer that sees the mean token m, of targets y, and the flow of its V in closed form.

    The loss is the mean of ‖Vᵀm - y‖², so V' = -A V + B with A = 2 Σ mmᵀ/n and B = 2 Σ myᵀ/n.
    """
    rng = np.random.default_rng(3)
    data = mh.Dataset(
        rng.standard_normal((n, T, d)).astype(dtype),
        rng.standard_normal((n, 1, p)).astype(dtype),
    )
    V0 = rng.standard_normal((1, d, p)).astype(dtype)
    layer = mh.Layer(np.zeros((1, d, d), dtype), V0, query=0)
    M = data.X.mean(axis=1, dtype=float)

    def exact(t, l2=0.0):
        rates, basis = np.linalg.eigh(2 * M.T @ M / n + l2 * np.eye(d))
        B = basis.T @ (2 * M.T @ data.y[:, 0] / n)
        decay = np.exp(-np.multiply.outer(t, rates))[..., None]
        limit = B / rates[:, None]
        return basis @ (limit + decay * (basis.T @ V0[0] - limit))

    return layer, data, exact


@pytest.mark.parametrize("method", METHODS)
def test_linear_regression_in_closed_form(method):
    layer, data, exact = regression()
    times = [0.1, 0.45, 1.0, 2.5]
    run = mh.gradient_flow(
        layer, data, until=4.0, times=times, method=method, wrt="V", loss="squared", l2=0.2,
        record=("V", "loss"),
    )  # fmt: skip
    np.testing.assert_array_equal(run.history["time"], [0.0, *times, 4.0])
    np.testing.assert_array_equal(run.steps["V"], np.arange(6))
    # Some hundred steps, each with an error of at most 1e-8 in the root mean square.
    expected = exact(run.history["time"], 0.2)
    np.testing.assert_allclose(run.history["V"][:, 0], expected, atol=1e-6)
    assert (run.reason, run.stopped, run.step) == ("steps", None, 5)
    np.testing.assert_array_equal(run.model.V, run.history["V"][-1])
    assert run.history["loss"][-1] == mh.evaluate(run.model, data, loss="squared")["loss"]


def test_the_error_follows_the_tolerance():
    layer, data, exact = regression()
    options = {"until": 3.0, "wrt": "V", "loss": "squared"}
    errors = [
        np.abs(mh.gradient_flow(layer, data, rtol=tol, atol=tol, **options).model.V[0] - exact(3.0))
        for tol in (1e-4, 1e-7, 1e-10)
    ]
    for error, tol in zip(errors, (1e-4, 1e-7, 1e-10), strict=True):
        assert error.max() < 30 * tol  # at most some dozen steps of the tolerance each
    assert errors[2].max() < 1e-3 * errors[0].max()


def test_it_is_the_limit_of_small_steps():
    model, data = classifier(), data_set()
    flow = mh.gradient_flow(model, data, until=2.0).model
    gaps = []
    for steps in (1000, 2000):
        end = mh.train(model, data, steps=steps, optimizer=mh.GradientDescent(2.0 / steps)).model
        gaps.append(max(abs(end.W - flow.W).max(), abs(end.U - flow.U).max()))
    assert gaps[0] < 1e-3  # of order lr
    assert gaps[0] / gaps[1] == pytest.approx(2.0, rel=0.01)


def test_factors_keep_their_difference():
    """d/dt (QᵀQ - KᵀK) = 0, since Q' = -G K and K' = -Gᵀ Q with G the gradient by W."""

    def invariant(model):
        return np.swapaxes(model.Q, 1, 2) @ model.Q - np.swapaxes(model.K, 1, 2) @ model.K

    options = {"record": invariant, "wrt": ("Q", "K")}
    run = mh.gradient_flow(factored(), data_set(), until=10.0, **options)
    kept = run.history["invariant"]
    assert np.abs(run.model.Q - factored().Q).max() > 0.3
    np.testing.assert_allclose(kept, np.broadcast_to(kept[0], kept.shape), atol=1e-6)
    rule = mh.GradientDescent(0.5)  # steps of gradient descent do not
    steps = mh.train(factored(), data_set(), steps=20, optimizer=rule, **options)
    assert np.abs(np.ptp(steps.history["invariant"], axis=0)).max() > 1e-3


def test_tolerances_are_those_of_the_solver_by_itself():
    run = mh.gradient_flow(classifier(), data_set(), until=0.1)
    assert run.optimizer == GradientFlow()


def test_float32_models_have_tolerances_of_their_own():
    layer, data, exact = regression(np.float32)
    run = mh.gradient_flow(layer, data, until=3.0, wrt="V", loss="squared")
    assert (run.optimizer.rtol, run.optimizer.atol) == (1e-5, 1e-7)
    assert run.model.V.dtype == np.float32
    np.testing.assert_allclose(run.model.V[0], exact(3.0), atol=1e-4)


def test_a_flow_goes_on(tmp_path):
    model, data = classifier(), data_set()
    options = {"record": {"loss": 1, "grad_norm": 4}}
    first = mh.gradient_flow(model, data, until=1.0, times=[0.2, 0.4, 0.9], **options)
    assert first.steps["grad_norm"].tolist() == [0, 4]
    run = mh.gradient_flow(first, data, until=2.0, times=[1.5])
    np.testing.assert_array_equal(run.history["time"], [0, 0.2, 0.4, 0.9, 1.0, 1.5, 2.0])
    assert (run.step, run.steps["grad_norm"].tolist()) == (6, [0, 4, 6])
    whole = mh.gradient_flow(model, data, until=2.0)
    np.testing.assert_allclose(run.model.W, whole.model.W, atol=1e-7)
    run.save(tmp_path / "run.npz")
    assert mh.Run.load(tmp_path / "run.npz") == run
    more = mh.train(run, data, steps=3, optimizer=mh.GradientDescent(0.1))
    assert (more.step, len(more.history["time"]), len(more.history["loss"])) == (9, 7, 10)
    again = mh.gradient_flow(more, data, until=2.5, times=[])
    assert again.history["time"][-2:].tolist() == [2.0, 2.5]
    assert [s.first for s in again.segments] == [0, 6, 9]


def test_a_flow_is_drawn_against_time():
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    run = mh.gradient_flow(classifier(), data_set(), until=1.0, record={"loss": 1, "margin": 10})
    figure = run.plot()
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss", "margin"]
    assert figure.axes[-1].get_xlabel() == "time t"
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xdata(), run.history["time"])
    np.testing.assert_array_equal(figure.axes[1].lines[0].get_xdata(), run.history["time"][::10])
    mixed = mh.train(run, data_set(), steps=2, optimizer=mh.GradientDescent(0.1))
    assert mixed.plot().axes[-1].get_xlabel() == "step k"


def test_a_sweep_of_flows_has_their_times():
    def flow(seed):
        model = mh.Classifier.gaussian(H, T, d, std=0.5, seed=seed)
        return mh.gradient_flow(model, data_set(), until=1.0, times=[0.5])

    frame = mh.sweep(flow, {"seed": [0, 1]})
    assert frame.columns["time"].tolist() == [0.0, 0.5, 1.0] * 2


def test_a_flow_without_a_limit_ends():
    """Products of three parameters against a loss without a lower bound grow in finite time."""
    rng = np.random.default_rng(7)
    W = mh.LowRank(rng.standard_normal((H, d, r)), rng.standard_normal((H, d, r)))
    layer = mh.Layer(W, rng.standard_normal((H, d, p)), attention="linear")
    data = mh.Dataset(data_set().X, np.ones((n, T, p)))
    with np.errstate(all="ignore"):
        run = mh.gradient_flow(layer, data, until=50.0, loss="correlation", method="RK45")
    assert (run.reason, run.stopped) == ("solver", run.step)
    assert run.history["time"][-1] < 50.0
    assert np.all(np.diff(run.history["loss"]) < 0)


def test_what_is_not_finite_does_not_flow():
    infinite = classifier().replace(U=np.full((H, T, d), np.inf))
    with pytest.warns(RuntimeWarning, match="no step was taken: .* U holds inf"):
        run = mh.gradient_flow(infinite, data_set(), until=1.0)
    assert (run.reason, run.stopped, run.history["time"].tolist()) == ("nonfinite", 0, [0.0])


def test_no_time_is_no_step():
    run = mh.gradient_flow(classifier(), data_set(), until=0.0)
    assert (run.step, run.reason) == (0, "steps")
    np.testing.assert_array_equal(run.model.W, classifier().W)


def named(name, value=0.0):
    def function(_):
        return value

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"model": "model"},
            TypeError,
            "model: expected a Classifier, Layer, Stack or Run, got str",
        ),
        (
            {"model": classifier(runs=R)},
            ValueError,
            "gradient_flow: expected one model .* length 6",
        ),
        ({"until": -1.0}, ValueError, "until: expected at least 0, the time of the run, got -1"),
        ({"until": np.inf}, ValueError, "until: "),
        ({"times": [0.5, 0.2]}, ValueError, "times: expected increasing finite numbers"),
        (
            {"times": [0.5, 2.0]},
            ValueError,
            "times: expected numbers from 0 to until = 1, got 0.5 to 2",
        ),
        ({"times": [1j]}, TypeError, "times: expected real numbers, got dtype complex128"),
        ({"method": "Euler"}, ValueError, "method: expected 'DOP853', 'RK45', 'RK23' or 'LSODA'"),
        ({"rtol": 0.0}, ValueError, "rtol: expected a finite number above 0"),
        ({"atol": -1.0}, ValueError, "atol: expected a finite number above 0"),
        ({"l2": -0.1}, ValueError, "l2: expected a finite number of at least 0"),
        ({"record": named("time")}, ValueError, "record: expected no function named 'time'"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        mh.gradient_flow(**{"model": classifier(), "X": data_set(), "until": 1.0} | options)
