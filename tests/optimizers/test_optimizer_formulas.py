"""Every optimizer takes the steps of its formula: NumPy, torch, and cases with a closed form."""

import math
from dataclasses import replace

import numpy as np
import pytest
from lists import with_every
from step_rules import length, transcribed

import mhfast as mh

STEPS = 12
SCHEDULE = np.linspace(1.0, 0.2, STEPS)
# A step rounds numbers of order one a few times; a dozen steps amplify that by about ten.
TOLERANCE = 1e-12

OPTIMIZERS = with_every(
    [
        mh.GradientDescent(0.3),
        mh.GradientDescent(0.3, l2=0.05, clip=0.2, schedule=SCHEDULE),
        mh.GradientDescent(0.3, project="ball", radius=1.5),
        mh.GradientDescent(0.3, project="ball", radius=0.8, project_by="head"),
        mh.GradientDescent(0.3, project="sphere", radius=2.0, project_by="all"),
        mh.GradientDescent(0.3, project="ball", radius=4.0, project_norm=1),
        mh.GradientDescent(0.3, project="ball", radius=0.6, project_norm=np.inf),
        mh.GradientDescent(
            0.3, project="ball", radius=0.9, project_norm="spectral", project_by="head"
        ),
        mh.GradientDescent(
            0.3, project="ball", radius=1.5, project_norm="nuclear", project_by="head"
        ),
        mh.GradientDescent(
            0.3, project="sphere", radius=2.0, project_norm="nuclear", project_by="head"
        ),
        mh.Momentum(0.1, project="ball", radius=1.0, project_norm=3, project_by="head"),
        mh.NormalizedGradientDescent(0.05),
        mh.NormalizedGradientDescent(0.05, by="head", schedule=SCHEDULE),
        mh.NormalizedGradientDescent(0.05, 0.3, "all", l2=0.02, clip=0.1),
        mh.NormalizedGradientDescent(0.05, project="sphere", radius=1.0, project_by="head"),
        mh.PolyakStep(0.3),
        mh.PolyakStep(0.4, target=-0.1, factor=1.0, schedule=SCHEDULE),
        mh.PolyakStep(0.2, target=0.4),
        mh.PolyakStep(9.0, target=0.1, factor=0.2, l2=0.3, clip=0.2),
        mh.Momentum(0.1),
        mh.Momentum(0.1, 0.7, l2=0.05, clip=0.2, schedule=SCHEDULE),
        mh.Momentum(0.1, 0.7, True),
        mh.Momentum(0.1, 0.7, True, l2=0.05, clip=0.2, schedule=SCHEDULE),
        mh.Momentum(0.1, 0.7, True, project="ball", radius=1.5, project_by="all"),
        mh.Adam(0.02),
        mh.Adam(0.02, 0.5, 0.9, 1e-3, l2=0.05, clip=0.2, schedule=SCHEDULE),
        mh.Adam(0.02, weight_decay=0.3, schedule=SCHEDULE),
        mh.MirrorDescent(0.02, 3),
        mh.MirrorDescent(0.02, 1.75, l2=0.05, clip=0.2, schedule=SCHEDULE),
        mh.MirrorDescent(0.02, 2, project="ball", radius=1.5),
        mh.MirrorDescent(0.02, 3, True),
        mh.MirrorDescent(0.02, 1.5, True, "head"),
        mh.MirrorDescent(0.02, 2.5, True, "all", schedule=SCHEDULE),
        mh.AdamW(0.02, schedule=SCHEDULE, weight_decay=0.3),
        mh.AdaGrad(0.05, 1e-3, l2=0.05, clip=0.2, schedule=SCHEDULE),
        mh.RMSProp(0.02, 0.7, 1e-3, 0.5, l2=0.05, clip=0.2, schedule=SCHEDULE),
        mh.ExponentiatedGradient(0.3),
        mh.ExponentiatedGradient(0.3, 0.2, l2=0.05, clip=0.2, schedule=SCHEDULE),
        mh.SteepestDescent(0.03, "max", scaled=True, by="head", schedule=SCHEDULE),
        mh.SteepestDescent(0.2, "l1"),
        mh.SteepestDescent(0.2, "l1", 0.7, scaled=True, by="head", clip=0.2, l2=0.05),
        mh.SteepestDescent(0.05, "fro", 0.7, by="head"),
        mh.SteepestDescent(0.05, "fro", 0.7, True, scaled=True, clip=0.2),
        mh.SteepestDescent(0.05, "spectral", polar="newton_schulz"),
    ]
)

# U Vᵀ is as exact as the smallest singular value is large, so that float32 has few digits of it.
SPECTRAL = [
    mh.SteepestDescent(0.05, "spectral"),
    mh.SteepestDescent(0.05, "spectral", 0.9, True, schedule=SCHEDULE),
    mh.SteepestDescent(0.02, "spectral", 0.5, scaled=True, l2=0.05, clip=0.2),
    mh.SteepestDescent(0.02, "spectral", scaled=True, by="head"),
    mh.SteepestDescent(0.02, "spectral", 0.9, scaled=True, polar="newton_schulz"),
]


def problem(kind="classifier", dtype=np.float64):
    """A model and a data set of random numbers, small enough for many steps."""
    rng = np.random.default_rng(8)

    def draw(*shape):
        return (0.5 * rng.standard_normal(shape)).astype(dtype)

    X = 2 * draw(7, 3, 5)
    if kind == "classifier":
        return mh.Classifier(draw(2, 5, 5), draw(2, 3, 5)), mh.Dataset(X, rng.choice([-1, 1], 7))
    model = mh.Layer(mh.LowRank(draw(2, 5, 4), draw(2, 5, 4)), draw(2, 5, 6), prompt=draw(8, 5))
    return model, mh.Dataset(X, rng.choice([-1, 1], (7, 8, 6)))


def difference(a, b):
    return max(
        float(abs(a.parameters[name] - b.parameters[name]).max() / abs(b.parameters[name]).max())
        for name in a.parameters
    )


@pytest.mark.parametrize("kind", ["classifier", "layer"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS + SPECTRAL, ids=repr)
def test_transcription(optimizer, kind):
    model, data = problem(kind)
    run = mh.train(model, data, steps=STEPS, optimizer=optimizer)
    expected = transcribed(optimizer, model, data, STEPS)
    assert difference(expected, model) > 1e-3  # something happened
    assert difference(run.model, expected) < TOLERANCE


def by_name(optimizer, names):
    """The optimizer with other settings for each parameter."""
    rate = getattr(optimizer, "lr", None)
    changes = {} if rate is None else {
        "lr": {name: rate * (1 + j) / 2 for j, name in enumerate(names)}
    }  # fmt: skip
    return replace(
        optimizer, l2={names[-1]: 0.05}, schedule={names[0]: SCHEDULE, names[1]: SCHEDULE[::-1]},
        project="ball", radius={names[0]: 1.2, names[1]: 0.9}, **changes,
    )  # fmt: skip


BY_NAME = [*with_every([]), mh.NormalizedGradientDescent(0.05, 0.3, "all", clip=0.1)]


@pytest.mark.parametrize("kind", ["classifier", "layer"])
@pytest.mark.parametrize("optimizer", BY_NAME, ids=repr)
def test_settings_of_parameters(optimizer, kind):
    model, data = problem(kind)
    names = tuple(model.parameters)
    optimizer = by_name(optimizer, names)
    run = mh.train(model, data, steps=STEPS, optimizer=optimizer)
    expected = transcribed(optimizer, model, data, STEPS)
    assert difference(expected, model) > 1e-3
    assert difference(run.model, expected) < TOLERANCE
    reference, _ = mh.reference.train(
        model, data.X, data.y, steps=STEPS, optimizer=optimizer
    )  # fmt: skip
    for name in names:
        assert close(run.model.parameters[name], getattr(reference, name), TOLERANCE)


@pytest.mark.parametrize("kind", ["classifier", "layer"])
@pytest.mark.parametrize("optimizer", with_every([]), ids=repr)
def test_equal_settings_of_parameters_are_one(optimizer, kind):
    """Bit for bit, whichever way they are given."""
    model, data = problem(kind)
    settings = {"l2": 0.05, "project": "ball", "radius": 1.2, "schedule": SCHEDULE}
    one = replace(optimizer, **settings)
    fields = {"l2", "radius", "schedule"} | {"lr"} & set(vars(one))
    each = replace(
        one, **{field: dict.fromkeys(model.parameters, getattr(one, field)) for field in fields}
    )
    a, b = (mh.train(model, data, steps=STEPS, optimizer=o) for o in (one, each))
    for name, array in a.model.parameters.items():
        assert np.array_equal(array, b.model.parameters[name])


@pytest.mark.parametrize("optimizer", [o for o in with_every([]) if hasattr(o, "lr")], ids=repr)
def test_a_step_size_of_zero_leaves_a_parameter(optimizer):
    model, data = problem()
    optimizer = replace(optimizer, lr={"W": 0.05, "U": 0.0})
    run = mh.train(model, data, steps=STEPS, optimizer=optimizer)
    assert not np.array_equal(run.model.W, model.W)
    # Mirror descent goes to powers of the entries and back.
    assert close(run.model.U, model.U, 1e-14)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_single_precision(optimizer):
    model, data = problem("layer", np.float32)
    double, same = problem("layer")
    run = mh.train(model, data, steps=STEPS, optimizer=optimizer)
    exact = mh.train(double, same, steps=STEPS, optimizer=optimizer)
    assert run.model.dtype == np.float32
    # float32 rounds to 6e-8; roots of mirror descent and quotients of Adam lose up to a hundredfold
    # where an entry is near zero.
    assert difference(run.model, exact.model) < 1e-4


@pytest.mark.parametrize("wrt", ["Q", "K", "V", "prompt", ("K", "prompt"), ("Q", "V")])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS[7], OPTIMIZERS[14], OPTIMIZERS[-1]], ids=repr)
def test_norms_are_those_of_what_is_trained(optimizer, wrt):
    model, data = problem("layer")
    run = mh.train(model, data, steps=STEPS, optimizer=optimizer, wrt=wrt)
    expected = transcribed(optimizer, model, data, STEPS, wrt)
    assert difference(run.model, expected) < TOLERANCE
    for name, array in run.model.parameters.items():
        assert np.array_equal(array, model.parameters[name]) == (name not in wrt)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("optimizer", "rule", "options"),
    [
        (mh.GradientDescent(0.1, l2=0.05), "SGD", {"weight_decay": 0.05}),
        (mh.Momentum(0.1, 0.8, l2=0.05), "SGD", {"momentum": 0.8, "weight_decay": 0.05}),
        (mh.Momentum(0.1, 0.8, True), "SGD", {"momentum": 0.8, "nesterov": True}),
        (mh.Adam(0.1), "Adam", {}),
        (
            mh.Adam(0.1, 0.7, 0.95, 1e-4, l2=0.2),
            "Adam",
            {"betas": (0.7, 0.95), "eps": 1e-4, "weight_decay": 0.2},
        ),
        (mh.Adam(0.1, weight_decay=0.2), "AdamW", {"weight_decay": 0.2}),
        (mh.AdamW(0.1), "AdamW", {}),
        (mh.AdaGrad(0.1), "Adagrad", {}),
        (mh.RMSProp(0.1), "RMSprop", {}),
        (
            mh.RMSProp(0.1, 0.8, 1e-3, 0.6, l2=0.05),
            "RMSprop",
            {"alpha": 0.8, "eps": 1e-3, "momentum": 0.6, "weight_decay": 0.05},
        ),
    ],
    ids=repr,
)
def test_torch(optimizer, rule, options):
    torch = pytest.importorskip("torch")
    model, data = problem()
    theta = [torch.tensor(model.parameters[name], requires_grad=True) for name in ("W", "U")]
    theirs = getattr(torch.optim, rule)(theta, lr=0.1, **options)
    for _ in range(STEPS):
        now = mh.Classifier(*(part.detach().numpy().copy() for part in theta))
        _, g = mh.value_and_grad(now, data)
        theta[0].grad, theta[1].grad = torch.tensor(g.W), torch.tensor(g.U)
        theirs.step()
    run = mh.train(model, data, steps=STEPS, optimizer=optimizer)
    assert difference(run.model, mh.Classifier(*(p.detach().numpy() for p in theta))) < TOLERANCE


# With the linear loss, W = 0 and U trained, the gradient g is the same at every step and the loss
# is ⟨g, U⟩: every rule has a closed form.


def linear(optimizer, steps, **options):
    """U after training from zero, the gradient, and the recorded losses."""
    _, data = problem()
    start = mh.Classifier.zeros(2, 3, 5)
    run = mh.train(start, data, steps=steps, loss="linear", wrt="U", optimizer=optimizer, **options)
    _, g = mh.value_and_grad(start, data, loss="linear", wrt="U")
    return run.model.U, g.U, run.history.get("loss")


def close(a, b, tolerance=1e-13):  # tens of roundings of 1e-16
    return float(abs(a - b).max()) <= tolerance * float(abs(b).max())


def test_closed_form_gradient_descent():
    U, g, _ = linear(mh.GradientDescent(0.5, schedule=[1, 2, 4, 0]), 4)
    assert close(U, -3.5 * g)
    U, g, _ = linear(mh.GradientDescent(0.5, l2=0.2), 9)
    assert close(U, -(1 - 0.9**9) / 0.2 * g)  # the geometric sum of θ ← 0.9 θ - 0.5 g
    U, g, _ = linear(mh.GradientDescent(0.5, clip=1e-3), 9)
    assert close(U, -9 * 0.5e-3 * g / length([g]))


def test_closed_form_normalized():
    U, g, _ = linear(mh.NormalizedGradientDescent(0.5), 9)
    assert close(U, -4.5 * g / length([g]))
    U, g, _ = linear(mh.NormalizedGradientDescent(0.5, by="head"), 9)
    for part, loss_derivative in zip(U, g, strict=True):
        assert close(part, -4.5 * loss_derivative / length([loss_derivative]))


def test_closed_form_polyak():
    _, _, loss = linear(mh.PolyakStep(target=-2.0), 9)
    assert loss == pytest.approx(-2.0 + 2.0 * 0.5 ** np.arange(10), abs=1e-14)
    _, _, loss = linear(mh.PolyakStep(target=-2.0, factor=1.0), 3)
    assert loss == pytest.approx([0, -2, -2, -2], abs=1e-14)
    U, g, _ = linear(mh.PolyakStep(0.25, target=-1e9), 9)
    assert close(U, -9 * 0.25 * g)  # the cap holds
    U, _, _ = linear(mh.PolyakStep(target=0.0), 9)
    assert not U.any()  # the loss at zero is the target


def test_closed_form_polyak_divides_by_the_norm_after_decay_and_clipping():
    """From U the gradient is g + l2 U; the excess is that of the loss alone, ⟨g, U⟩."""
    U, g, _ = linear(mh.PolyakStep(target=-2.0, clip=1e-3), 1)
    # factor (loss - target) / clip² = 0.5 · 2 / clip², times the clipped gradient.
    assert close(U, -1e3 * g / length([g]))
    _, data = problem()
    start = mh.Classifier(np.zeros((2, 5, 5)), np.linspace(-1, 2, 30).reshape(2, 3, 5))
    options = {"steps": 1, "loss": "linear", "wrt": "U"}
    for clip in (math.inf, 0.5):
        optimizer = mh.PolyakStep(target=-2.0, l2=0.7, clip=clip)
        U = mh.train(start, data, optimizer=optimizer, **options).model.U
        loss_derivative = g + 0.7 * start.U
        assert length([loss_derivative]) > 0.5
        loss_derivative *= min(1.0, clip / length([loss_derivative]))
        excess = (g * start.U).sum() + 2.0
        assert close(U, start.U - 0.5 * excess / length([loss_derivative]) ** 2 * loss_derivative)


def test_closed_form_momentum():
    U, g, _ = linear(mh.Momentum(0.5, 0.8), 9)
    velocities = (1 - 0.8 ** np.arange(1, 10)) / 0.2
    assert close(U, -0.5 * velocities.sum() * g)
    nesterov = 0.5 * (1 + 0.8 * velocities).sum()
    U, g, _ = linear(mh.Momentum(0.5, 0.8, True), 9)
    assert close(U, -nesterov * g)
    U, g, _ = linear(mh.Momentum(0.5, 0.8, True, clip=1e-3), 9)
    assert close(U, -nesterov * 1e-3 * g / length([g]))


def test_closed_form_adam():
    """Both moments of a constant gradient are exact after the correction: a step is lr sign g."""
    U, g, _ = linear(mh.Adam(0.5, eps=0.0), 9)
    assert close(U, -4.5 * np.sign(g), 1e-12)  # 1 - beta2^k cancels three digits
    U, g, _ = linear(mh.Adam(0.5, eps=0.0, weight_decay=0.2), 9)
    assert close(U, -(1 - 0.9**9) / 0.2 * np.sign(g), 1e-12)


def test_closed_form_adagrad_and_rmsprop():
    """Of a constant gradient v is k g², or (1 - beta^k) g²: a step is lr sign g over a root."""
    k = np.arange(1, 10)
    U, g, _ = linear(mh.AdaGrad(0.5, eps=0.0), 9)
    assert close(U, -0.5 * (k**-0.5).sum() * np.sign(g))
    U, g, _ = linear(mh.RMSProp(0.5, 0.6, eps=0.0), 9)
    assert close(U, -0.5 * ((1 - 0.6**k) ** -0.5).sum() * np.sign(g))


@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_closed_form_exponentiated_gradient(scale):
    """Of the linear loss steps add up in the mirror: θ exp(-sign θ lr Σg), or in arcsinh."""
    _, data = problem()
    U = np.linspace(-1, 2, 30).reshape(2, 3, 5)
    start = mh.Classifier(np.zeros((2, 5, 5)), U)
    _, g = mh.value_and_grad(start, data, loss="linear", wrt="U")
    optimizer = mh.ExponentiatedGradient(2.0, scale)
    run = mh.train(start, data, steps=9, loss="linear", wrt="U", optimizer=optimizer)
    sum_of_steps = 9 * 2.0 * g.U
    expected = (
        scale * np.sinh(np.arcsinh(U / scale) - sum_of_steps)
        if scale
        else U * np.exp(-np.sign(U) * sum_of_steps)
    )
    assert abs(sum_of_steps).max() > 1.0
    assert close(run.model.U, expected, 1e-12)  # roundings of the exponent grow with it
    assert scale or np.array_equal(np.sign(run.model.U), np.sign(U))


def test_exponentiated_gradient_of_a_large_scale_is_gradient_descent():
    model, data = problem()
    a = mh.train(model, data, steps=STEPS, optimizer=mh.ExponentiatedGradient(1e-6, 1e5))
    b = mh.train(model, data, steps=STEPS, optimizer=mh.GradientDescent(0.1))
    assert difference(a.model, b.model) < 1e-9  # θ/scale squared, and roundings times the scale


@pytest.mark.parametrize("by", ["tensor", "head"])
@pytest.mark.parametrize("norm", ["max", "l1", "fro", "spectral"])
def test_steepest_descent_is_the_best_step_of_its_length(norm, by):
    """The step D has norm 1, and ⟨D, g⟩ is the dual norm, by which scaled steps are longer."""
    model, data = problem("layer")
    V = model.V
    _, g = mh.value_and_grad(model, data, wrt="V")
    options = {"steps": 1, "wrt": "V"}
    plain, scaled = (
        V - mh.train(
            model, data, optimizer=mh.SteepestDescent(1.0, norm, scaled=s, by=by), **options
        ).model.V
        for s in (False, True)
    )  # fmt: skip
    groups = [slice(0, 1), slice(1, 2)] if by == "head" else [slice(None)]
    for group in groups:
        D, m = plain[group], g.V[group]
        s = np.linalg.svd(m, compute_uv=False)
        size = {
            "max": abs(D).max(), "l1": abs(D).sum(), "fro": length([D]),
            "spectral": np.linalg.svd(D, compute_uv=False).max(),
        }[norm]  # fmt: skip
        dual = {"max": abs(m).sum(), "l1": abs(m).max(), "fro": length([m]), "spectral": s.sum()}
        assert size == pytest.approx(1.0, rel=1e-13)
        assert (D * m).sum() == pytest.approx(dual[norm], rel=1e-12)
        assert close(scaled[group], dual[norm] * D, 1e-12)


def test_steepest_descent_without_momentum_is_what_it_is_called():
    model, data = problem()
    pairs = [
        (mh.SteepestDescent(0.02, "max"), mh.SignDescent(0.02)),
        (mh.SteepestDescent(0.02, "fro"), mh.NormalizedGradientDescent(0.02)),
        (mh.SteepestDescent(0.02, "fro", scaled=True), mh.GradientDescent(0.02)),
        (mh.SteepestDescent(0.02, "fro", 0.8, True, True), mh.Momentum(0.02, 0.8, True)),
    ]
    for a, b in pairs:
        first, second = (mh.train(model, data, steps=STEPS, optimizer=o).model for o in (a, b))
        assert difference(first, second) < TOLERANCE


def test_steepest_descent_where_the_gradient_underflows():
    """A factor of the gradient, here below exp(-1000), does not change a normalized step."""
    rng = np.random.default_rng(2)
    X, u = rng.standard_normal((5, 3, 4)), rng.standard_normal(4)
    y = np.sign(X.mean(axis=1) @ u)
    least = abs(X.mean(axis=1) @ u).min()
    for norm in ("max", "l1", "fro", "spectral"):
        moved = []
        for size in (1000.0, 4000.0):  # every margin is this or more
            start = mh.Classifier(np.zeros((1, 4, 4)), np.tile(u, (1, 3, 1)) * size / 3 / least)
            _, g = mh.value_and_grad(start, X, y, loss="exponential", wrt="W")
            assert not g.W.any()
            run = mh.train(
                start, X, y, steps=1, loss="exponential", wrt="W",
                optimizer=mh.SteepestDescent(0.1, norm),
            )  # fmt: skip
            moved.append(run.model.W)
        assert moved[0].any()
        assert close(moved[1], moved[0], 1e-12)


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (8, 2), (1, 6), (4, 1)])
def test_spectral_steps_of_low_rank_leave_the_rest(shape):
    """Of U S Vᵀ with fewer singular values the step is U Vᵀ of these; of zero there is none."""
    rng = np.random.default_rng(5)
    rows, columns = shape
    d, p = rows, columns
    X = rng.standard_normal((6, 1, d))
    for rank in range(min(shape) + 1):
        # The gradient of the linear loss in V is -Σ_i x_i y_iᵀ / n.
        left = np.linalg.qr(rng.standard_normal((6, 6)))[0][:, :rank]
        Y = left @ rng.standard_normal((rank, p)) if rank else np.zeros((6, p))
        V = np.zeros((1, d, p))
        start = mh.Layer(np.zeros((1, d, d)), V)
        data = (X, Y[:, None, :])
        _, g = mh.value_and_grad(start, *data, loss="squared", wrt="V")
        optimizer = mh.SteepestDescent(1.0, "spectral")
        run = mh.train(start, *data, steps=1, loss="squared", wrt="V", optimizer=optimizer)
        D = -run.model.V[0]
        s = np.linalg.svd(D, compute_uv=False)
        found = min(rank, np.linalg.matrix_rank(g.V[0]))
        assert s == pytest.approx([1.0] * found + [0.0] * (len(s) - found), abs=1e-12)
        nuclear = np.linalg.svd(g.V[0], compute_uv=False).sum()
        assert (D * g.V[0]).sum() == pytest.approx(nuclear, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("p", [1.5, 2, 3])
def test_closed_form_mirror_descent(p):
    U, g, _ = linear(mh.MirrorDescent(0.5, p), 9)
    assert close(U, -np.sign(g) * abs(4.5 * g) ** (1 / (p - 1)), 1e-12)  # powers of powers
    U, g, _ = linear(mh.MirrorDescent(0.5, p, True), 9)
    dual = p / (p - 1)
    g /= (abs(g) ** dual).sum() ** (1 / dual)
    assert close(U, -np.sign(g) * abs(4.5 * g) ** (1 / (p - 1)), 1e-12)


@pytest.mark.parametrize("by", ["tensor", "head"])
@pytest.mark.parametrize("norm", [1, 1.3, 2, 2.5, 7, 40, np.inf, "nuclear", "spectral"])
@pytest.mark.parametrize("size", [1e-150, 1.0, 1e150])
def test_the_projection_is_the_nearest_point(norm, by, size):
    """From θ it goes to x of norm r with ⟨θ - x, x⟩ = r ‖θ - x‖ in the dual norm."""
    if isinstance(norm, str) and by == "tensor":
        return
    model, data = problem("layer")
    p = {"nuclear": 1, "spectral": np.inf}.get(norm, norm)
    q = np.inf if p == 1 else 1 if p == np.inf else p / (p - 1)

    def length(x, power):
        if isinstance(norm, str):
            x = np.linalg.svd(x, compute_uv=False)
        top = abs(x).max()
        return top * np.linalg.norm(x.ravel() / top, power) if top else 0.0

    def project(V, radius, **options):
        optimizer = mh.GradientDescent(
            0.0, project=options.get("project", "ball"), radius=radius, project_norm=norm,
            project_by=by,
        )  # fmt: skip
        start = model.replace(V=V)
        return mh.train(start, data, steps=1, wrt="V", optimizer=optimizer).model.V

    V = size * model.V
    parts = [V[:1], V[1:]] if by == "head" else [V]
    radius = 0.4 * min(length(part, p) for part in parts)
    x = project(V, radius)
    for before, after in zip(parts, [x[:1], x[1:]] if by == "head" else [x], strict=True):
        assert length(after, p) == pytest.approx(radius, rel=1e-12)
        rest = (before - after) / size
        assert (rest * (after / size)).sum() == pytest.approx(
            radius / size * length(rest, q), rel=1e-11
        )
    assert np.array_equal(project(V, 2.0 * length(V, p) if by == "tensor" else size * 1e3), V)
    on_sphere = project(V, radius, project="sphere")
    for before, after in zip(parts, [on_sphere[:1], on_sphere[1:]], strict=False):
        if by == "head":
            assert close(after, before * (radius / length(before, p)), 1e-13)


@pytest.mark.parametrize("project", ["ball", "sphere"])
def test_closed_form_projection(project):
    U, g, _ = linear(mh.GradientDescent(1.0, project=project, radius=1e-3), 9)
    assert close(U, -1e-3 * g / length([g]))
    U, g, _ = linear(mh.GradientDescent(1.0, project=project, radius=1e3), 9)
    assert length([U]) == pytest.approx(1e3 if project == "sphere" else 9 * length([g]), rel=1e-13)


def test_mirror_descent_with_p_2_is_gradient_descent():
    model, data = problem()
    a = mh.train(model, data, steps=STEPS, optimizer=mh.MirrorDescent(0.3, 2))
    b = mh.train(model, data, steps=STEPS, optimizer=mh.GradientDescent(0.3))
    assert difference(a.model, b.model) < TOLERANCE


ZERO_STAYS = [
    mh.NormalizedGradientDescent(0.3),
    mh.NormalizedGradientDescent(0.3, by="head"),
    mh.NormalizedGradientDescent(0.3, by="all"),
    mh.PolyakStep(),
    mh.MirrorDescent(0.3, 3, True),
    mh.MirrorDescent(0.3, 1.5, True, "head"),
    mh.GradientDescent(0.3, project="sphere", radius=1.0),
    mh.AdaGrad(0.3),
    mh.RMSProp(0.3),
    mh.ExponentiatedGradient(0.3, 0.5),
    *(mh.SteepestDescent(0.3, norm) for norm in ("max", "l1", "fro", "spectral")),
    mh.SteepestDescent(0.3, "spectral", polar="newton_schulz"),
]


@pytest.mark.parametrize("optimizer", ZERO_STAYS, ids=repr)
def test_a_zero_gradient_does_not_move(optimizer):
    """At zero the gradient in W is zero."""
    _, data = problem()
    start = mh.Classifier.zeros(2, 3, 5)
    run = mh.train(start, data, steps=3, wrt="W", optimizer=optimizer, record=("loss", "W"))
    assert run.reason == "steps"
    assert not run.history["W"].any()


@pytest.mark.parametrize("by", ["tensor", "head", "all"])
@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_projection_scales_norms_that_a_sum_of_squares_cannot_hold(by, size):
    """Squares of these entries under- or overflow in float64."""
    _, data = problem()
    model = mh.Classifier(np.zeros((2, 5, 5)), np.full((2, 3, 5), size))
    optimizer = mh.GradientDescent(0.0, project="sphere", radius=1.0, project_by=by)
    run = mh.train(model, data, steps=1, loss="linear", wrt="U", optimizer=optimizer)
    expected = 1.0 / math.sqrt(15 if by == "head" else 30)
    assert abs(run.model.U / expected - 1).max() < 1e-14


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_adam_without_eps_leaves_what_has_no_gradient(dtype):
    """A feature that no token has gives W rows and columns, and U columns, of gradient zero."""
    model, data = problem(dtype=dtype)
    X = data.X.copy()
    X[..., 3] = 0
    run = mh.train(model, X, data.y, steps=4, optimizer=mh.Adam(0.02, eps=0.0, weight_decay=0.5))
    assert run.reason == "steps"
    kept = (1 - dtype(0.02 * 0.5)) ** 4  # four roundings of the decay, and of the power
    tolerance = 8 * np.finfo(dtype).eps
    close = TOLERANCE if dtype is np.float64 else 1e-4  # Adam divides by roots of small numbers
    np.testing.assert_allclose(run.model.U[..., 3], kept * model.U[..., 3], rtol=tolerance)
    np.testing.assert_allclose(run.model.W[:, 3], kept * model.W[:, 3], rtol=tolerance)
    want = transcribed(run.optimizer, model, mh.Dataset(X, data.y), 4)
    assert difference(run.model, want) < close
    end, _ = mh.reference.train(model, X, data.y, steps=4, optimizer=run.optimizer)
    assert difference(run.model, mh.Classifier(end.W, end.U)) < (
        TOLERANCE if dtype is np.float64 else 1e-4
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_adam_without_eps_makes_no_step_where_squares_vanish(dtype):
    """A gradient of 1e-30 in float32, of 1e-200 in float64, has a square of zero."""
    model, data = problem(dtype=dtype)
    X = data.X * dtype(1e-30 if dtype is np.float32 else 1e-200)
    assert 0 < mh.norm(mh.value_and_grad(model, X, data.y, wrt="U")[1]) < 1e-29
    run = mh.train(model, X, data.y, steps=2, optimizer=mh.Adam(0.02, eps=0.0))
    assert run.reason == "steps"
    assert run.model == model


def test_sign_descent_leaves_what_has_no_gradient():
    """Rows of U beyond the tokens of every sample, where the gradient is exactly zero."""
    rng = np.random.default_rng(4)
    heads, tokens, dim = 2, 5, 3
    model = mh.Classifier(
        0.3 * rng.standard_normal((heads, dim, dim)), rng.standard_normal((heads, tokens, dim))
    )
    X, y = rng.standard_normal((6, tokens, dim)), np.where(np.arange(6) % 2, 1.0, -1.0)
    data = mh.Dataset(X, y, lengths=[2, 3, 1, 3, 2, 3])
    for optimizer in (mh.SignDescent(0.25), mh.SteepestDescent(0.25, "max")):
        U = mh.train(model, data, steps=1, optimizer=optimizer).model.U
        assert (U[:, 3:] == model.U[:, 3:]).all()
        np.testing.assert_allclose(abs(U[:, :3] - model.U[:, :3]), 0.25, rtol=1e-14)
