"""Libraries that train with the functions and modules of mhfast take the steps of `mh.train`."""

from __future__ import annotations

import numpy as np
import pytest

import mhfast as mh

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # libraries warn of themselves
]

LR, STEPS = 0.7, 5


def problem():
    data = mh.data.tokenized_mixture(24, 5, 9, seed=0)
    return data, mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.3, seed=1)


def assert_descended(W, U):
    """Compare parameters with those after the steps that `mh.train` takes."""
    data, start = problem()
    model = mh.train(start, data, steps=STEPS, optimizer=mh.GradientDescent(LR)).model
    # The derivative of the loss is rounded by another library, five times.
    for found, expected in ((W, model.W), (U, model.U)):
        assert np.abs(np.asarray(found) - expected).max() < 1e-13 * np.abs(expected).max()


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax", reason="pip install jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", before)


def jax_loss(jax, W, U):
    from mhfast.interop.jax import classifier

    data, _ = problem()
    return jax.nn.softplus(-data.y * classifier(data.X, W, U)).mean()


def test_optax(jax):
    optax = pytest.importorskip("optax", reason="pip install optax")
    _, start = problem()
    parameters = {"W": jax.numpy.asarray(start.W), "U": jax.numpy.asarray(start.U)}
    optimizer = optax.sgd(LR)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state):
        slopes = jax.grad(lambda p: jax_loss(jax, p["W"], p["U"]))(parameters)
        updates, state = optimizer.update(slopes, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for _ in range(STEPS):
        parameters, state = step(parameters, state)
    assert_descended(parameters["W"], parameters["U"])


def test_flax(jax):
    linen = pytest.importorskip("flax.linen", reason="pip install flax")
    _, start = problem()

    class Attention(linen.Module):
        @linen.compact
        def __call__(self):
            W = self.param("W", lambda _: jax.numpy.asarray(start.W))
            U = self.param("U", lambda _: jax.numpy.asarray(start.U))
            return jax_loss(jax, W, U)

    module = Attention()
    variables = module.init(jax.random.key(0))
    for _ in range(STEPS):
        slopes = jax.jit(jax.grad(module.apply))(variables)
        variables = jax.tree.map(lambda p, g: p - LR * g, variables, slopes)
    assert_descended(**variables["params"])


def test_equinox(jax):
    equinox = pytest.importorskip("equinox", reason="pip install equinox")
    _, start = problem()

    class Attention(equinox.Module):
        W: jax.Array
        U: jax.Array

        def __call__(self):
            return jax_loss(jax, self.W, self.U)

    module = Attention(jax.numpy.asarray(start.W), jax.numpy.asarray(start.U))
    for _ in range(STEPS):
        slopes = equinox.filter_jit(equinox.filter_grad(lambda module: module()))(module)
        updates = jax.tree.map(lambda g: -LR * g, slopes)
        module = equinox.apply_updates(module, updates)
    assert_descended(module.W, module.U)


def torch_module():
    from mhfast.interop.torch import MultiHeadClassifier

    return MultiHeadClassifier.from_model(problem()[1])


def torch_loss(torch, outputs, y):
    return torch.nn.functional.softplus(-y * outputs).mean()


def test_lightning(tmp_path):
    torch = pytest.importorskip("torch", reason="pip install torch")
    lightning = pytest.importorskip("lightning", reason="pip install lightning")
    data, _ = problem()

    class Attention(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.attention = torch_module()

        def training_step(self, batch, _):
            X, y = batch
            return torch_loss(torch, self.attention(X), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR)

    samples = torch.utils.data.TensorDataset(torch.tensor(data.X), torch.tensor(data.y))
    module = Attention()
    trainer = lightning.Trainer(
        max_epochs=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(samples, len(data)))
    model = module.attention.model()
    assert_descended(model.W, model.U)


def test_skorch():
    torch = pytest.importorskip("torch", reason="pip install torch")
    skorch = pytest.importorskip("skorch", reason="pip install skorch")
    data, _ = problem()

    class Loss(torch.nn.Module):
        def forward(self, outputs, y):
            return torch_loss(torch, outputs, y)

    net = skorch.NeuralNet(
        torch_module(), criterion=Loss, optimizer=torch.optim.SGD, lr=LR, max_epochs=STEPS,
        batch_size=len(data), train_split=None, verbose=0,
    )  # fmt: skip
    net.fit(data.X, data.y)
    model = net.module_.model()
    assert_descended(model.W, model.U)
