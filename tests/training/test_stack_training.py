"""Training of `mhfast.Stack`: against a loop in NumPy, resumed, saved, recorded, refused."""

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
from trainings import OPTIMIZERS, PROJECTIONS

import mhfast as mh
from mhfast import _core
from mhfast._arguments.lists import PARAMETERS
from mhfast.models.depth import with_arrays
from mhfast.optimizers import core_settings
from mhfast.reference.normalized import norm
from mhfast.reference.optimizers import STEPS, At

# No two axes of one length.
SAMPLES, TOKENS, DIM, FIRST, SECOND, OUT = 11, 5, 6, 3, 2, 4


def stack(dtype=np.float64, residual=("concatenate", False), embedding=None):
    first = mh.Layer.gaussian(FIRST, DIM, 3, std=0.5, seed=0, causal=True, dtype=dtype)
    second = mh.Layer.gaussian(SECOND, DIM + 3, OUT, std=0.5, seed=1, causal=True, dtype=dtype)
    return mh.Stack([first, second], residual=residual, embedding=embedding)


def classes(dtype=np.float64, lengths=False, weight=None, n=SAMPLES, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, TOKENS, DIM)).astype(dtype)
    y = rng.integers(0, OUT, (n, TOKENS))
    weights = {None: None, "rows": rng.random((n, TOKENS)).astype(dtype)}[weight]
    sizes = rng.integers(1, TOKENS + 1, n) if lengths else None
    return mh.Dataset(X, y, lengths=sizes, weight=weights)


def by_numpy(model, data, steps, optimizer, batch=None):
    """θ_k, k = 0 ... steps, of plain optimizers, with gradients of the reference."""
    theta = {name: array.astype(np.float64) for name, array in model.parameters.items()}
    X = data.X if model.embedding is None else data.words.ids
    kept = {name: [np.zeros_like(array)] * 2 for name, array in theta.items()}
    losses = []
    for k in range(steps + 1):
        options = {"weight": data.weight, "lengths": data.lengths, "loss": "cross_entropy"}
        now = with_arrays(model, theta)
        value, g = mh.reference.stack_value_and_grad(now, X, data.y, **options)
        losses.append(value)
        if batch is not None:
            rows = mh.reference.batches(data.n, batch, 1, first=k)[0]
            part = {name: None if options[name] is None else np.asarray(options[name])[rows]
                    for name in ("weight", "lengths")}  # fmt: skip
            _, g = mh.reference.stack_value_and_grad(
                now, X[rows], data.y[rows], loss="cross_entropy", **part
            )
            counted = np.ones((data.n, TOKENS)) if data.weight is None else data.weight
            if data.lengths is not None:
                counted = counted * (np.arange(TOKENS) < data.lengths[:, None])
            share = counted[rows].sum() / counted.sum() * data.n / batch
            g = {name: share * array for name, array in g.items()}
        length = norm(g[name] for name in theta)
        for name in theta:
            at = At(k, optimizer.lr, value, length, 1.0)
            theta[name] = STEPS[optimizer.name](optimizer, theta[name], g[name], kept[name], at)
    return now, np.array(losses)


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize(
    "optimizer", [mh.GradientDescent(0.3), mh.Momentum(0.1), mh.Adam(0.02), mh.RMSProp(0.01)]
)
@pytest.mark.parametrize("options", [{}, {"lengths": True, "weight": "rows"}])
@pytest.mark.parametrize("of_words", [False, True])
def test_steps_are_those_of_a_numpy_loop(optimizer, batch, options, of_words):
    data, E = classes(**options), None
    if of_words:
        rng = np.random.default_rng(7)
        E = rng.standard_normal((8, DIM))
        data = replace(data, X=mh.Tokens(rng.integers(0, 8, (SAMPLES, TOKENS)), E))
    model = stack(embedding=E)
    run = mh.train(
        model, data, steps=12, optimizer=optimizer, loss="cross_entropy", batch=batch,
        record="loss",
    )  # fmt: skip
    expected, losses = by_numpy(model, data, 12, optimizer, batch)
    # Twelve steps of a smooth loss: rounding of 1e-16 grows by less than 10 a step.
    np.testing.assert_allclose(run.history["loss"], losses, rtol=1e-10)
    for name, array in run.model.parameters.items():
        np.testing.assert_allclose(array, expected.parameters[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_of_one_layer_takes_the_steps_of_the_layer(name, projection):
    """Every optimizer and projection, through the step of the core alone and in its loop."""
    try:
        optimizer = OPTIMIZERS[name](**projection)
    except (TypeError, ValueError):
        pytest.skip("the optimizer does not project")
    layer = mh.Layer.gaussian(FIRST, DIM, OUT, std=0.5, seed=0)
    data = classes()
    given = {"steps": 5, "optimizer": optimizer, "loss": "cross_entropy", "record": "loss"}
    alone = mh.train(layer, data, **given)
    stacked = mh.train(mh.Stack([layer], residual=False), data, **given)
    # In the loop the gradient is summed by another plan.
    np.testing.assert_allclose(stacked.history["loss"], alone.history["loss"], rtol=1e-9)
    np.testing.assert_allclose(stacked.model.layers[0].V, alone.model.V, rtol=1e-6, atol=1e-8)


def test_settings_by_parameter_are_those_of_every_layer():
    model, data = stack(), classes()
    optimizer = mh.GradientDescent({"W": 0.0, "V": 0.1}, l2={"V": 0.1})
    run = mh.train(model, data, steps=3, optimizer=optimizer, loss="cross_entropy")
    for layer, before in zip(run.model.layers, model.layers, strict=True):
        np.testing.assert_array_equal(layer.W, before.W)
        assert (layer.V != before.V).any()
    wrong = mh.GradientDescent({"W": 0.1, "V": 0.1, "U": 0.1})
    with pytest.raises(ValueError, match=r"lr: expected names of parameters of the model, W, V"):
        mh.train(model, data, steps=1, optimizer=wrong, loss="cross_entropy")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("batch", [None, 3])
def test_a_resumed_run_is_the_run_in_one(tmp_path, dtype, batch):
    data = classes(dtype, lengths=True)
    given = {
        "optimizer": mh.Adam(0.02),
        "loss": "cross_entropy",
        "batch": batch,
        "record": {"loss": 2, "0.W": 3, "test_accuracy": 4},
        "test": classes(dtype, n=7),
    }
    whole = mh.train(stack(dtype), data, steps=11, **given)
    half = mh.train(stack(dtype), data, steps=5, **given)
    half.save(tmp_path / "run.npz")
    loaded = mh.Run.load(tmp_path / "run.npz")
    assert loaded == half
    assert loaded.model.layers[0].causal
    twice = mh.train(loaded, data, until=11, test=given["test"])
    assert twice == whole
    assert whole.step == 11
    assert whole.history["0.W"].shape == (5, FIRST, DIM, DIM)
    assert whole.history["0.W"].dtype == dtype


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_any_number_of_threads_gives_the_same_bits(dtype):
    data = classes(dtype, n=301)
    runs = [
        mh.train(stack(dtype), data, steps=4, optimizer=mh.Momentum(0.1), loss="cross_entropy",
                 num_threads=threads)
        for threads in (1, 2)
    ]  # fmt: skip
    assert runs[0] == runs[1]


def test_records_are_those_of_evaluate():
    model, data, test = stack(), classes(lengths=True, weight="rows"), classes(n=7, seed=1)
    names = ["loss", "accuracy", "margin", "grad_norm", "param_norm", "distance", "1.V",
             "held_loss", "held_accuracy", "held_margin"]  # fmt: skip

    def largest(model):
        return [weights.max() for weights in model.attention(data)]

    run = mh.train(
        model, data, steps=3, optimizer=mh.GradientDescent(0.1), loss="cross_entropy",
        record=[*names, largest], test={"held": test},
    )  # fmt: skip
    last = mh.evaluate(
        run.model, data, loss="cross_entropy", record=[*names, largest], test={"held": test},
        start=model,
    )  # fmt: skip
    for name, value in last.items():
        np.testing.assert_array_equal(run.history[name][-1], value)
    assert run.history["largest"].shape == (4, 2)
    first = {name: rows[0] for name, rows in run.history.items()}
    # The same arithmetic, in another order of sums.
    assert first["loss"] == pytest.approx(model.loss(data, loss="cross_entropy"), rel=1e-14)
    assert first["accuracy"] == pytest.approx(model.accuracy(data, loss="cross_entropy"))
    _, g = mh.value_and_grad(model, data, loss="cross_entropy")
    assert first["grad_norm"] == pytest.approx(mh.norm(g), rel=1e-14)
    assert first["param_norm"] == pytest.approx(mh.norm(model), rel=1e-14)
    assert first["distance"] == 0.0
    moved = [a - model.parameters[name] for name, a in run.model.parameters.items()]
    assert run.history["distance"][-1] == pytest.approx(norm(moved), rel=1e-12)
    outputs = model(test)
    own = np.take_along_axis(outputs, test.y[..., None], axis=-1)
    others = np.where(np.arange(OUT) == test.y[..., None], -np.inf, outputs).max(axis=-1)
    assert first["held_margin"] == pytest.approx((own[..., 0] - others).min(), rel=1e-12)


def test_loss_with_a_residual_at_the_end_is_recorded_as_it_is():
    layers = [mh.Layer.gaussian(FIRST, DIM, DIM, std=0.3, seed=j) for j in range(2)]
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((SAMPLES, TOKENS, DIM)), rng.standard_normal((SAMPLES, TOKENS, DIM))
    data = mh.Dataset(X, y, lengths=rng.integers(1, TOKENS + 1, SAMPLES))
    run = mh.train(
        mh.Stack(layers), data, steps=2, optimizer=mh.GradientDescent(1e-3), loss="squared"
    )
    expected, _ = mh.reference.stack_value_and_grad(
        mh.Stack(layers), X, y, loss="squared", lengths=data.lengths
    )
    assert run.history["loss"][0] == pytest.approx(expected, rel=1e-12)
    assert run.history["loss"][-1] < expected


def test_batches_of_a_stream_are_its_samples():
    seeds = []

    def draw(n, seed):
        seeds.append(seed)
        return classes(n=n, seed=seed, weight="rows")

    given = {"optimizer": mh.GradientDescent(0.1), "loss": "cross_entropy", "batch": 6, "seed": 3}
    run = mh.train(stack(), classes(), steps=4, stream=mh.Stream(draw, every=2), **given)
    assert seeds == [mh.reference.sample_seed(3, k // 2) for k in range(4)]
    model = stack()
    for k in range(4):
        _, g = mh.value_and_grad(
            model, draw(6, mh.reference.sample_seed(3, k // 2)), loss="cross_entropy"
        )
        model = model - 0.1 * g
    for name, array in model.parameters.items():
        np.testing.assert_allclose(run.model.parameters[name], array, rtol=1e-12)


@pytest.mark.parametrize("order", ["shuffle", "replace"])
def test_an_epoch_takes_the_batches_of_the_reference(order):
    data = classes(n=10)
    models = []
    given = {"optimizer": mh.GradientDescent(0.1), "loss": "cross_entropy", "seed": 5}
    run = mh.train(
        stack(), data, steps=7, batch=3, order=order, record="loss",
        callback=lambda _, model: models.append(model), **given
    )  # fmt: skip
    rows = mh.reference.batches(10, 3, 7, order=order, seed=5)
    for before, after, chosen in zip(models[:-1], models[1:], rows, strict=True):
        _, g = mh.value_and_grad(before, data.subset(chosen), loss="cross_entropy")
        np.testing.assert_allclose(after.layers[0].W, (before - 0.1 * g).layers[0].W, rtol=1e-12)
    assert run.batches.order == order


def test_wrt_trains_a_part():
    model = stack()
    run = mh.train(
        model, classes(), steps=3, optimizer=mh.Adam(0.1), loss="cross_entropy", wrt=("0.W", "V")
    )
    assert run.wrt == ("0.W", "0.V", "1.V")
    assert run.state.keys() == {"0.W", "0.V", "1.V"}
    np.testing.assert_array_equal(run.model.layers[1].W, model.layers[1].W)


def test_training_ends_where_it_is_told():
    data = classes()
    given = {"optimizer": mh.GradientDescent(0.5), "loss": "cross_entropy"}
    whole = mh.train(stack(), data, steps=30, record=("loss", "accuracy", "grad_norm"), **given)
    level = float(whole.history["loss"][9])
    run = mh.train(stack(), data, steps=30, stop={"loss": level}, **given)
    assert (run.reason, run.stopped, run.step) == ("loss", 9, 9)
    limit = float(whole.history["grad_norm"].min())
    run = mh.train(stack(), data, steps=30, stop={"grad_norm": limit}, **given)
    assert run.reason == "grad_norm"
    assert run.step == int(whole.history["grad_norm"].argmin())
    best = float(whole.history["accuracy"].max())
    run = mh.train(stack(), data, steps=30, stop={"accuracy": best}, **given)
    assert (run.reason, run.step) == ("accuracy", int(whole.history["accuracy"].argmax()))
    run = mh.train(stack(), data, steps=30, stop=lambda k, _: k == 4, **given)
    assert (run.reason, run.step) == ("stop", 4)
    run = mh.train(stack(), data, steps=30, callback=lambda k, _: k == 6, **given)
    assert (run.reason, run.step) == ("callback", 6)
    assert run.history["loss"].shape == (7,)


def test_a_run_that_becomes_infinite_stops():
    with np.errstate(all="ignore"):
        run = mh.train(
            stack(), classes(), steps=50, optimizer=mh.GradientDescent(1e200), loss="cross_entropy"
        )
    assert run.reason == "nonfinite"
    assert run.stopped == run.step < 50
    X = classes().X.copy()
    X[1, 2, 3] = np.nan
    with pytest.warns(RuntimeWarning, match=r"no step was taken.*X holds nan at index 1, 2, 3"):
        mh.train(stack(), X, classes().y, steps=2, optimizer=mh.Adam(0.1), loss="cross_entropy")


def test_checkpoints_and_errors_lose_nothing(tmp_path):
    path = tmp_path / "run.npz"
    given = {"optimizer": mh.Adam(0.02), "loss": "cross_entropy"}

    def fails(k, _):
        if k == 5:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught:
        mh.train(stack(), classes(), steps=9, checkpoint=(path, 2), callback=fails, **given)
    assert (caught.value.run.step, caught.value.run.reason) == (5, "exception")
    saved = mh.Run.load(path)
    assert (saved.step, saved.reason) == (4, "checkpoint")
    whole = mh.train(stack(), classes(), steps=9, **given)
    assert mh.train(saved, classes(), until=9) == whole
    assert mh.train(caught.value.run, classes(), until=9) == whole


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
def test_ctrl_c_keeps_the_run():
    def press(k, _):
        if k == 3:
            os.kill(os.getpid(), signal.SIGINT)

    given = {"optimizer": mh.Adam(0.02), "loss": "cross_entropy"}
    with pytest.raises(mh.Interrupted) as caught:
        mh.train(stack(), classes(), steps=1000, callback=press, **given)
    run = caught.value.run
    assert run.reason == "interrupted"
    whole = mh.train(stack(), classes(), steps=run.step + 2, **given)
    assert mh.train(run, classes(), until=run.step + 2) == whole


def test_another_optimizer_begins_anew():
    data = classes()
    run = mh.train(stack(), data, steps=3, optimizer=mh.Adam(0.02), loss="cross_entropy")
    there = mh.train(run, data, steps=4, optimizer=mh.Momentum(0.1))
    fresh = mh.train(run.model, data, steps=4, optimizer=mh.Momentum(0.1), loss="cross_entropy")
    assert there.model == fresh.model
    assert [segment.first for segment in there.segments] == [0, 3]
    again = mh.train(there, data, steps=2, optimizer=mh.Adam(0.02))
    new = mh.train(there.model, data, steps=2, optimizer=mh.Adam(0.02), loss="cross_entropy")
    assert again.model == new.model  # the moments are corrected from step 7 on


def test_what_a_stack_does_not_have_is_refused():
    model, data = stack(), classes()
    given = {"steps": 1, "optimizer": mh.GradientDescent(0.1), "loss": "cross_entropy"}

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            mh.train(model, data, **(given | changes))

    refused(r"lr: expected one number beside a Stack", optimizer=mh.GradientDescent([0.1, 0.2]))
    refused(r"seed: expected one integer beside a Stack", batch=2, seed=[0, 1])
    refused(r"directions: expected None beside a Stack", directions=model)
    refused(r"record: a Stack has no record 'attention_max'; .*function", record="attention_max")
    refused(r"wrt: expected names from 0.W, 0.V, 1.W, 1.V", wrt="2.W")
    refused(r"loss: expected one of", loss="crossentropy")
    refused(r"test set 'test': y: expected shape \(n, q\)", test=(data.X, data.y[:, :-1]))
    pair = mh.Dataset(np.stack([data.X] * 2), np.stack([data.y] * 2))
    with pytest.raises(ValueError, match="the data without a run axis beside a Stack"):
        mh.train(model, pair, **given)
    with pytest.raises(ValueError, match="the data without a run axis beside a Stack"):
        mh.evaluate(model, pair, loss="cross_entropy")
    for function in (mh.minimize, mh.gradient_flow):
        with pytest.raises(
            TypeError, match=r"expected a Classifier, a Layer or a Run of one, got a Stack"
        ):
            function(model, data, **({} if function is mh.minimize else {"until": 1.0}))
    zero = replace(data, weight=np.r_[np.ones(1), np.zeros(SAMPLES - 1)])
    with pytest.raises(ValueError, match="batch: expected a sample of weight above 0"):
        mh.train(model, zero, **(given | {"steps": 9}), batch=2)


@pytest.mark.parametrize("attention", ["linear", "relu", "sigmoid", "softmax1"])
def test_factored_layers_and_other_row_maps_train_and_are_saved(tmp_path, attention):
    given = {"std": 0.4, "causal": True, "attention": attention}
    first = mh.Layer.gaussian(FIRST, DIM, 3, seed=0, rank=2, scale=2.0, **given)
    second = mh.Layer.gaussian(SECOND, DIM + 3, OUT, seed=1, rank=4, tied=True, query=-1, **given)
    model = mh.Stack([first, second], residual=("concatenate", False))
    X, y = classes().X, classes().y[:, :1]
    run = mh.train(model, X, y, steps=1, optimizer=mh.GradientDescent(0.1), loss="cross_entropy")
    assert run.wrt == ("0.Q", "0.K", "0.V", "1.Q", "1.V")
    _, g = mh.reference.stack_value_and_grad(model, X, y, loss="cross_entropy")
    for name, array in run.model.parameters.items():
        expected = model.parameters[name] - 0.1 * g[name]
        np.testing.assert_allclose(array, expected, rtol=1e-10, atol=1e-12)
    run.save(tmp_path / "run.npz")
    loaded = mh.Run.load(tmp_path / "run.npz")
    assert loaded == run
    assert loaded.model.layers[0].scale == 2.0
    assert loaded.model.layers[1].query == -1
    assert str(loaded.model.layers[1].attention) == attention


def test_hard_attention_trains_what_has_a_derivative():
    layers = [layer.replace(attention="hardmax") for layer in stack().layers]
    model = mh.Stack(layers[1:], residual=False)
    X = np.random.default_rng(0).standard_normal((SAMPLES, TOKENS, DIM + 3))
    given = {"steps": 1, "optimizer": mh.GradientDescent(0.1), "loss": "cross_entropy"}
    run = mh.train(model, X, classes().y, wrt="V", **given)
    assert (run.model.layers[0].V != layers[1].V).any()
    with pytest.raises(ValueError, match="'hardmax' has no derivative by the logits"):
        mh.train(model, X, classes().y, **given)


def test_progress_is_shown(capsys):
    given = {"optimizer": mh.GradientDescent(0.1), "loss": "cross_entropy"}
    mh.train(stack(), classes(), steps=5, progress=True, **given)
    assert "5" in capsys.readouterr().err


def test_the_step_of_the_core_checks_what_it_is_given():
    optimizer = core_settings(mh.Adam(0.1), 1, None, np.zeros(1, np.int64))
    theta = np.ones((2, 3, 4))

    def refused(kind, message, **changes):
        given = {"names": [0], "parameters": [theta.copy()], "gradients": [theta.copy()],
                 "state": [(theta.copy(), theta.copy())], "constraints": [None],
                 "step": 0, "loss": 1.0}  # fmt: skip
        with pytest.raises(kind, match=message):
            _core.step(optimizer, **(given | changes))

    refused(ValueError, "names: expected one for each", names=[])
    refused(ValueError, "names: expected one for each", gradients=[])
    refused(ValueError, "names: expected one for each", constraints=[])
    ends, none = np.array([2, 4]), np.zeros(0, np.int64)
    for kept, members in (([24], [0, 1, 2, 3]), ([-1], [0, 1, 2, 3]), ([5, 4], [0, 1, 2, 3]),
                          ([5], [0, 1, 2, 24]), ([5], [0, 1, 2])):  # fmt: skip
        arrays = (np.array(kept), np.array(members), ends, False)
        refused(ValueError, "constraints: expected entries", constraints=[arrays])
    refused(TypeError, "constraints", constraints=[(none, none, none.astype(float), False)])
    refused(ValueError, "names: expected parameters", names=[len(PARAMETERS)])
    refused(ValueError, "state: expected 2 arrays of each", state=[(theta,)])
    refused(ValueError, r"gradients: expected shape \(2, 3, 4\)", gradients=[theta[:1].copy()])
    refused(TypeError, "gradients: expected an array of float64",
            gradients=[theta.astype(np.float32)])  # fmt: skip
