"""What training records arrives at TensorBoard, Weights & Biases and MLflow under its step."""

from __future__ import annotations

import gc
import json
import struct
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
        self.closed = False

    def add_scalar(self, name, value, step):
        self.rows.setdefault(step, {})[name] = value

    def close(self):
        self.closed = True

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
    assert not sink.closed


def test_tensorboard_by_path(monkeypatch, tmp_path):
    sinks = {}
    writer = types.SimpleNamespace(SummaryWriter=lambda path: sinks.setdefault(path, Sink()))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", writer)
    callback = loggers.tensorboard(tmp_path, every=4)
    sink, run = sinks[str(tmp_path)], trained(callback)
    assert_arrived(sink, run)
    assert not sink.closed
    del callback
    gc.collect()
    assert sink.closed


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


def assert_read_back(read, run):
    """What a library gives back, {name: [(step, value)]}, is what was recorded, to float32."""
    assert read.keys() == {"loss", *(f"attention_max/{h}" for h in range(H))}
    for name, rows in read.items():
        assert [step for step, _ in rows] == [0, 4, 6]
        column = name.partition("/")[2]
        recorded = run.history[name.partition("/")[0]][[0, 4, 6]]
        expected = recorded[:, int(column)] if column else recorded
        # Half a unit in the last place of float32, in which TensorBoard keeps scalars.
        np.testing.assert_allclose([value for _, value in rows], expected, rtol=2.0**-24)


of_the_library = pytest.mark.filterwarnings("ignore")  # libraries warn of themselves


@of_the_library
@pytest.mark.peers
def test_a_file_of_tensorboard_is_read_by_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX: pip install tensorboardX")
    read = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs tensorboard: pip install tensorboard",
    )
    run = trained(loggers.tensorboard(tmp_path, every=4))
    gc.collect()  # the callback and its writer, which ends the file
    events = read.EventAccumulator(str(tmp_path)).Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    assert_read_back({k: [(e.step, e.value) for e in v] for k, v in scalars.items()}, run)


def leveldb_records(content):
    """Go through the records of a file of wandb: a log as LevelDB writes it."""
    block, at, parts = 32768, 7, b""  # the file begins with 7 bytes of wandb's own
    while at + 7 <= len(content):
        if block - at % block < 7:  # no room for the 7 bytes that begin a part
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)  # behind a checksum
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


@of_the_library
@pytest.mark.slow
def test_an_offline_run_of_wandb(tmp_path, monkeypatch):
    library = pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    with library.init(project="mhfast", dir=str(tmp_path), mode="offline"):
        run = trained(loggers.wandb(every=4))
    library.teardown()  # the process that writes the file has then ended
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    read = {}
    for content in leveldb_records(path.read_bytes()):
        record = Record.FromString(content)
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for name in row.keys() - {"_step", "_runtime", "_timestamp"}:
            read.setdefault(name, []).append((row["_step"], row[name]))
    assert_read_back(read, run)


@of_the_library
@pytest.mark.slow
def test_a_store_of_mlflow(tmp_path):
    library = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    before = library.get_tracking_uri()
    library.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    try:
        with library.start_run() as active:
            run = trained(loggers.mlflow(every=4))
        client = library.MlflowClient()
        other = client.create_run(active.info.experiment_id).info.run_id
        trained(loggers.mlflow(other, every=4))
        names = ["loss", *(f"attention_max/{h}" for h in range(H))]
        for run_id in (active.info.run_id, other):
            found = {name: client.get_metric_history(run_id, name) for name in names}
            assert client.get_run(run_id).data.metrics.keys() == set(names)
            assert_read_back({k: [(m.step, m.value) for m in v] for k, v in found.items()}, run)
    finally:
        library.set_tracking_uri(before)


def test_diverged_numbers_pass_through():
    sink = Sink()
    loggers.wandb(sink).function(3, START, {"loss": np.float64("nan"), "U": np.ones((2, 1))})
    assert np.isnan(sink.rows[3]["loss"])
    assert sink.rows[3].keys() == {"loss", "U/0/0", "U/1/0"}
