"""What the losses promise one by one: formulas, kinks, domains, targets, and where they may go."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from lists import LOSSES, WITH_PARAMETER, kind_of_targets, targets, within_domain

import mhfast as mh
from mhfast._arguments.losses import WITH_KINKS, name_of

n, T, d, H, p = 6, 3, 5, 2, 4
EVERY = [pytest.param(loss, id=str(loss)) for loss in LOSSES[mh.Layer]]


def drawn(loss, kind=mh.Layer, runs=None, seed=0):
    rng = np.random.default_rng(seed)
    lead = () if runs is None else (runs,)
    W = rng.standard_normal((*lead, H, d, d)) / d
    if kind is mh.Layer:
        model, shape = mh.Layer(W, rng.standard_normal((H, d, p)) / 2), (n, T, p)
    else:
        model, shape = mh.Classifier(W, rng.standard_normal((H, T, d))), (n,)
    model, X = within_domain(loss, model, rng.standard_normal((n, T, d)))
    return model, mh.Dataset(X, targets(loss, shape, rng, outputs=p))


def at_outputs(outputs, y, loss, what=mh.value_and_grad, **options):
    """A call of a layer whose only row has these outputs, and V whose gradient is theirs."""
    outputs = np.asarray(outputs, np.float64)
    model = mh.Layer(np.zeros((1, 1, 1)), outputs[None, None])
    return what(model, np.ones((1, 1, 1)), y, loss=loss, wrt="V", **options)


def torch_formulas(torch):
    one = torch.nn.functional
    return {
        "hinge": lambda F, y: (1 - y * F).clamp(min=0).sum((1, 2)).mean(),
        "squared_hinge": lambda F, y: (1 - y * F).clamp(min=0).square().sum((1, 2)).mean(),
        mh.PolynomialTail(2.5): lambda F, y: (
            torch.where(y * F < 0, 1 - 2.5 * y * F, (1 + (y * F).clamp(min=0)) ** -2.5)
            .sum((1, 2))
            .mean()
        ),
        "negative_log": lambda F, y: -(y * F.log()).sum((1, 2)).mean(),
        "correlation": lambda F, y: -(y * F).sum((1, 2)).mean(),
        mh.Huber(0.4): lambda F, y: one.huber_loss(F, y, reduction="sum", delta=0.4) / len(F),
        mh.Quantile(0.8): lambda F, y: (
            torch.maximum(0.8 * (y - F), 0.2 * (F - y)).sum((1, 2)).mean()
        ),
        mh.CrossEntropy(0.3): lambda F, y: one.cross_entropy(
            F.flatten(0, 1), y.flatten(), label_smoothing=0.3
        ),
        "soft_cross_entropy": lambda F, y: one.cross_entropy(F.flatten(0, 1), y.flatten(0, 1)),
    }


@pytest.mark.peers
def test_formulas_of_torch():
    torch = pytest.importorskip("torch", reason="pip install torch")
    for loss, formula in torch_formulas(torch).items():
        model, data = drawn(loss)
        W, V = (torch.tensor(a, requires_grad=True) for a in (model.W, model.V))
        X = torch.tensor(data.X)
        A = torch.einsum("nqd,hde,nte->nhqt", X, W, X).softmax(-1)
        expected = formula(torch.einsum("nhqt,nte,hep->nqp", A, X, V), torch.tensor(data.y))
        expected.backward()
        value, g = mh.value_and_grad(model, data, loss=loss)
        # Sums of a few hundred products in float64.
        assert value == pytest.approx(expected.item(), rel=1e-13), loss
        np.testing.assert_allclose(g.W, W.grad.numpy(), rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(g.V, V.grad.numpy(), rtol=1e-11, atol=1e-14)


def test_slopes_and_curvatures_at_kinks():
    """At the kink itself, and one rounding to either side of it."""
    up, down = np.nextafter(1.0, 2.0), np.nextafter(1.0, 0.0)
    cases = [
        ("hinge", [down, 1.0, up], np.ones(3), [-1, 0, 0], [0, 0, 0]),
        ("hinge", [-up, -1.0, -down], -np.ones(3), [0, 0, 1], [0, 0, 0]),
        ("squared_hinge", [1.0, up], np.ones(2), [0, 0], [0, 0]),
        (mh.Quantile(0.75), [down, 1.0, up], np.ones(3), [-0.75, 0, 0.25], [0, 0, 0]),
        (mh.Huber(0.5), [-0.6, -0.5, 0.5, 0.6], np.zeros(4), [-0.5, -0.5, 0.5, 0.5], [0, 1, 1, 0]),
        (mh.PolynomialTail(2.0), [-0.5, 0.0], np.ones(2), [-2, -2], [0, 6]),
    ]
    for loss, outputs, y, slopes, curvatures in cases:
        _, g = at_outputs(outputs, y[None, None], loss)
        assert g.V[0, 0].tolist() == slopes, loss
        V = np.ones((1, 1, len(y)))
        product = at_outputs(outputs, y[None, None], loss, mh.hvp, tangent=mh.Gradients(V=V))
        assert product.V[0, 0].tolist() == curvatures, loss


def test_the_losses_with_kinks_are_those_whose_slope_jumps():
    grid = np.linspace(-3.0, 3.0, 6001)
    jumping = set()
    for loss in mh.Classifier.losses:
        F = grid[grid > 0.01] if kind_of_targets(loss) == "nonnegative" else grid
        slope = mh.reference.loss_terms(F, np.ones_like(F), loss)[1]
        steps = np.abs(np.diff(slope))
        # Neighbours differ by .001 times the curvature, which is below 100 at f = .1.
        if np.any(steps[F[1:] > 0.1] > 0.2) or np.any(steps[F[1:] < 0.0] > 0.2):
            jumping.add(loss)
    assert jumping == set(WITH_KINKS)


def test_negative_log_outside_its_domain():
    value, g = at_outputs([0.5, -1.0, 0.0], [[[2.0, 0.0, 0.0]]], "negative_log")
    assert value == -2.0 * np.log(0.5)
    assert g.V[0, 0].tolist() == [-4.0, 0.0, 0.0]
    for output, slope in ((0.0, -np.inf), (-1.0, np.nan)):
        value, g = at_outputs([output, 1.0], [[[1.0, 0.0]]], "negative_log")
        assert value == np.inf
        np.testing.assert_array_equal(g.V[0, 0], [slope, 0.0])
    model, data = drawn("logistic", mh.Classifier)
    with pytest.warns(RuntimeWarning, match="step 0"):
        run = mh.train(
            model, data.X, np.ones(n), steps=5, loss="negative_log",
            optimizer=mh.GradientDescent(0.1),
        )  # fmt: skip
    assert run.reason == "nonfinite"
    assert np.isinf(run.history["loss"]).all()


def test_what_is_not_finite_shows():
    for loss in mh.Layer.losses:
        y = {"classes": np.zeros((1, 1), int), "probabilities": np.full((1, 1, 3), 1 / 3)}.get(
            kind_of_targets(loss), np.ones((1, 1, 3))
        )
        value, g = at_outputs([0.5, np.nan, 0.5], y, loss)
        assert np.isnan(value), loss
        assert np.isnan(g.V[0, 0, 1]) or loss in ("linear", "correlation"), loss  # slope -y


def test_soft_labels():
    rng = np.random.default_rng(1)
    model, data = drawn("cross_entropy")
    one_hot = np.eye(p)[data.y]
    for other, loss, same in (
        (one_hot, "soft_cross_entropy", "cross_entropy"),
        (one_hot, "cross_entropy", "cross_entropy"),
        (0.7 * one_hot + 0.3 / p, "cross_entropy", mh.CrossEntropy(0.3)),
        (data.y, mh.CrossEntropy(0), "cross_entropy"),
    ):
        tangent = mh.Gradients(W=rng.standard_normal(model.W.shape), V=model.V)
        value, g = mh.value_and_grad(model, data, loss=same)
        found, gradient = mh.value_and_grad(model, data.X, other, loss=loss)
        product = mh.hvp(model, data.X, other, tangent=tangent, loss=loss)
        expected = mh.hvp(model, data, tangent=tangent, loss=same)
        # The same sums in another order.
        assert found == pytest.approx(value, rel=1e-14)
        for name in ("W", "V"):
            for a, b in ((gradient, g), (product, expected)):
                np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=0, atol=1e-14)
    record = ("loss", "accuracy", "margin")
    classes = mh.evaluate(model, data, loss="cross_entropy", record=record)
    soft = mh.evaluate(model, data.X, one_hot, loss="cross_entropy", record=record)
    assert soft == pytest.approx(classes, rel=1e-14)
    run = mh.train(
        model, data.X, one_hot, steps=1, loss="cross_entropy", optimizer=mh.GradientDescent(0.1)
    )
    assert run.loss == "soft_cross_entropy"


@pytest.mark.parametrize("gap", [1.0, 30.0, 300.0, 700.0])
def test_soft_labels_in_saturation(gap):
    """Where the labels are those of a class, the loss is exp(-gap) and keeps its digits."""
    value, g = at_outputs([gap, 0.0], [[[1.0, 0.0]]], "soft_cross_entropy")
    assert value == pytest.approx(np.log1p(np.exp(-gap)), rel=1e-15)
    small = np.exp(-gap) / (1 + np.exp(-gap))
    np.testing.assert_allclose(g.V[0, 0], [-small, small], rtol=1e-15)
    value, g = at_outputs([-gap, 0.0], [[0]], mh.CrossEntropy(0.5))
    assert value == pytest.approx(0.75 * gap + np.log1p(np.exp(-gap)), rel=1e-15)
    np.testing.assert_allclose(g.V[0, 0], [small - 0.75, 0.75 - small], rtol=1e-15)


@pytest.mark.parametrize("loss", EVERY)
def test_runs_side_by_side_saved_and_resumed(loss, tmp_path):
    models, data = drawn(loss, runs=3)
    options = {"optimizer": mh.Momentum(0.02), "loss": loss, "record": ("loss", "grad_norm")}
    runs = mh.train(models, data, steps=5, **options)
    for r in range(3):
        single = mh.train(models[r], data, steps=5, **options)
        np.testing.assert_allclose(runs[r].model.W, single.model.W, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(runs[r].history["loss"], single.history["loss"], rtol=1e-12)
    part = mh.train(models, data, steps=2, **options)
    part.save(tmp_path / "run.npz")
    loaded = mh.Run.load(tmp_path / "run.npz")
    assert loaded.loss == part.loss == loss
    assert [segment.loss for segment in loaded.segments] == [loss]
    resumed = mh.train(loaded, data, steps=3)
    assert resumed.model == runs.model
    assert resumed.loss == loss
    np.testing.assert_array_equal(resumed.history["loss"], runs.history["loss"])
    values = mh.evaluate(runs.model, data, loss=loss, record=("loss",))
    np.testing.assert_array_equal(values["loss"], runs.history["loss"][:, -1])


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge", mh.Huber(0.3)])
def test_polyak_steps_end_at_the_lower_bound(loss):
    """Losses that are 0 at separable or fitted data are minimized, and then nothing moves."""
    data = mh.Dataset(np.eye(5)[:, None], np.array([1.0, -1.0, 1.0, 1.0, -1.0]))
    model = mh.Classifier.zeros(2, 1, 5)
    run = mh.train(
        model, data, steps=300, loss=loss, optimizer=mh.PolyakStep(factor=1.0),
        record=("loss", "grad_norm"),
    )  # fmt: skip
    assert run.history["loss"][0] > 0.1
    assert run.history["loss"][-1] < 1e-12


def test_normalized_steps_rest_where_no_sample_is_inside_the_margin():
    model, data = drawn("hinge", mh.Classifier)
    data = dataclasses.replace(data, y=np.sign(model(data)))
    wide = dataclasses.replace(model, U=1e3 * model.U)
    run = mh.train(wide, data, steps=3, loss="hinge", optimizer=mh.NormalizedGradientDescent(0.1))
    assert run.model == wide
    assert run.reason == "steps"


@pytest.mark.parametrize("loss", [mh.PolynomialTail(3), mh.Huber(), mh.CrossEntropy(0.1)])
def test_losses_are_values(loss):
    for same in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), eval(repr(loss), vars(mh))):
        assert same == loss
        assert hash(same) == hash(loss)
    assert loss != dataclasses.replace(loss, **{dataclasses.fields(loss)[0].name: 0.7})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mh.PolynomialTail(0), ValueError,
         "exponent: expected a finite number above 0, got 0"),
        (lambda: mh.Huber(np.inf), ValueError, "delta: expected a finite number above 0, got inf"),
        (lambda: mh.Huber("1"), TypeError, "delta: expected a number, got '1'"),
        (lambda: mh.Quantile(1.0), ValueError,
         r"level: expected a number above 0 and below 1, got 1\.0"),
        (lambda: mh.CrossEntropy(np.nan), ValueError,
         "smoothing: expected a number of at least 0 and below 1, got nan"),
        (lambda: at_outputs([1.0, 2.0], [[[1.0, -2.0]]], "negative_log"), ValueError,
         r"y: expected finite targets >= 0, got -2\.0 at index 0, 1"),
        (lambda: at_outputs([1.0, 2.0], [[[0.5, 0.6]]], "cross_entropy"), ValueError,
         r"y: expected probabilities that sum to 1 in each row, got the sum 1\.1 at index 0"),
        (lambda: at_outputs([1.0, 2.0], [[[1.5, -0.5]]], "soft_cross_entropy"), ValueError,
         r"y: expected finite targets >= 0, got -0\.5 at index 0, 1"),
        (lambda: at_outputs([1.0, 2.0], [[[0.5, 0.5]]], mh.CrossEntropy(0.2)), ValueError,
         "loss: expected no smoothing of targets that are probabilities, got "
         r"CrossEntropy\(smoothing=0\.2\); \(1 - s\) \* y \+ s / p smooths them"),
        (lambda: mh.value_and_grad(*drawn("logistic", mh.Classifier), loss=mh.CrossEntropy(0.2)),
         ValueError, r"loss: expected one of .*, got CrossEntropy\(smoothing=0\.2\), a loss of"),
        (lambda: mh.value_and_grad(*drawn("logistic", mh.Classifier), loss=mh.Adam(0.1)),
         ValueError, r"loss: expected one of .*, got Adam\(lr=0\.1\)"),
    ],
    ids=range(11),
)  # fmt: skip
def test_wrong_values(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_theory_takes_the_losses_that_it_is_about():
    model, data = drawn("hinge", mh.Classifier)
    for loss in (*LOSSES[mh.Classifier],):
        if kind_of_targets(loss) == "signs" and loss != "logistic":
            run = mh.train(model, data, steps=1, loss=loss, optimizer=mh.GradientDescent(0.1))
            with pytest.raises(ValueError, match="run: expected training on the logistic loss"):
                mh.theory.certify(run, data)
    last = mh.Dataset(data.X, data.y, query=data.X[:, -1:])
    start = mh.Classifier(model.W[:1], model.U[:1, :1])
    for loss in ("hinge", mh.Quantile(0.3)):
        with pytest.raises(ValueError, match="loss: expected one with a continuous derivative"):
            mh.theory.regularization_path(last, [1.0], start=start, loss=loss)
    path = mh.theory.regularization_path(
        last, [1.0], start=start, loss=mh.PolynomialTail(2.0), steps=50
    )
    assert path.losses[0] < mh.evaluate(start, last, loss=mh.PolynomialTail(2.0))["loss"]


@pytest.mark.parametrize("loss", WITH_PARAMETER, ids=str)
def test_the_name_stands_for_the_default(loss):
    model, data = drawn(loss)
    plain, _ = mh.value_and_grad(model, data, loss=name_of(loss))
    assert plain == mh.value_and_grad(model, data, loss=type(loss)())[0]
    assert plain != mh.value_and_grad(model, data, loss=loss)[0]
