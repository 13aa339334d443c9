"""What training records arrives at TensorBoard, Weights & Biases and MLflow under its step."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import mhfast as mh
from mhfast.interop import loggers

n, T, d, H, R = 20, 5, 9, 3, 2
DATA = mh.data.tokenized_mixture(n, T, d, seed=0)
START = mh.Classifier.gaussian(H, T, d, std=0.3, seed=2)


class Sink:
    """Takes what each of the three libraries is given."""

    def __init__(self):
        self.rows = {}
        self.options = []

    def add_scalar(self, name, value, step):
        self.rows.setdefault(step, {})[name] = value

    def log(self, numbers, step):
        self.rows[step] = dict(numbers)

    def log_metrics(self, numbers, step, **options):
        self.rows[step] = dict(numbers)
        self.options.append(options)


def trained(callback, start=START, **options):
    settings = {"record": ("loss", "attention_max"), "optimizer": mh.GradientDescent(0.2)}
    return mh.train(start, DATA, steps=6, callback=callback, **settings | options)


def assert_arrived(sink, run):
    assert list(sink.rows) == [0, 4, 6]
    for k, row in sink.rows.items():
        assert row.keys() == {"loss", *(f"attention_max/{h}" for h in range(H))}
        assert row["loss"] == run.history["loss"][k]
        assert [row[f"attention_max/{h}"] for h in range(H)] == list(
            run.history["attention_max"][k]
        )
        assert all(type(value) is float for value in row.values())


def test_tensorboard():
    sink = Sink()
    assert_arrived(sink, trained(loggers.tensorboard(sink, every=4)))


def test_tensorboard_by_path(monkeypatch, tmp_path):
    sinks = {}
    writer = types.SimpleNamespace(SummaryWriter=lambda path: sinks.setdefault(path, Sink()))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", writer)
    run = trained(loggers.tensorboard(tmp_path, every=4))
    assert_arrived(sinks[str(tmp_path)], run)


def test_a_file_of_tensorboard(tmp_path):
    package = pytest.importorskip("tensorboardX", reason="pip install tensorboardX")
    writer = package.SummaryWriter(str(tmp_path))
    trained(loggers.tensorboard(writer, every=3))
    writer.close()
    (file,) = tmp_path.iterdir()
    assert b"attention_max/1" in file.read_bytes()


def test_wandb(monkeypatch):
    sink = Sink()
    assert_arrived(sink, trained(loggers.wandb(sink, every=4)))
    active = Sink()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=active))
    assert_arrived(active, trained(loggers.wandb(every=4)))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))
    with pytest.raises(ValueError, match=r"run: expected an active run, as after wandb.init\(\)"):
        loggers.wandb()


def test_mlflow(monkeypatch):
    sink = Sink()
    monkeypatch.setitem(sys.modules, "mlflow", sink)
    assert_arrived(sink, trained(loggers.mlflow(every=4)))
    assert sink.options == [{}] * 3
    loggers.mlflow("abc").function(0, START, {"loss": 1.0})
    assert sink.options[-1] == {"run_id": "abc"}


def test_runs_side_by_side():
    sink = Sink()
    several = mh.stack([START, START.replace(scale=1.0, U=-START.U)])
    run = trained(loggers.wandb(sink, record="loss", every=6), several)
    assert sink.rows[6] == {f"loss/{r}": run.history["loss"][r, -1] for r in range(R)}


def test_what_is_missing_is_named(monkeypatch):
    for name in ("torch.utils.tensorboard", "tensorboardX", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        loggers.tensorboard("folder")
    for name in ("wandb", "mlflow"):
        with pytest.raises(ImportError, match=f"loggers.{name} needs {name}: pip install {name}"):
            getattr(loggers, name)()
    with pytest.raises(TypeError, match="writer: expected a path or an object with add_scalar"):
        loggers.tensorboard(3)
    with pytest.raises(TypeError, match="run: expected a run of wandb, got int"):
        loggers.wandb(3)
    with pytest.raises(ValueError, match="every: expected an integer of at least 1, got 0"):
        loggers.tensorboard(Sink(), every=0)


def test_diverged_numbers_pass_through():
    sink = Sink()
    loggers.wandb(sink).function(3, START, {"loss": np.float64("nan"), "U": np.ones((2, 1))})
    assert np.isnan(sink.rows[3]["loss"])
    assert sink.rows[3].keys() == {"loss", "U/0/0", "U/1/0"}
