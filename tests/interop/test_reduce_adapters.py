"""`mhfast.interop.reduce`: gloo, MPI and dask, with processes on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import reduce_processes as processes

import mhfast as mh
from mhfast.interop import reduce as adapters

HERE = Path(__file__).parent
SECONDS = 240
"""How long processes may take: a hang fails the test."""


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def gloo(task, folder, size):
    """Run processes of torch.distributed; return their codes and what they said."""
    pytest.importorskip("torch", reason="pip install torch")
    folder.mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, HERE / "reduce_processes.py", "gloo", task, folder, str(rank),
             str(size)], stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [process.communicate(timeout=SECONDS)[1] for process in started]
    return [process.returncode for process in started], said


def mpi(task, folder, size):
    """The same by mpiexec, which has one code for all."""
    pytest.importorskip("mpi4py", reason="apt-get install libopenmpi-dev; pip install mpi4py")
    if shutil.which("mpiexec") is None:
        pytest.skip("apt-get install openmpi-bin")
    folder.mkdir()
    done = subprocess.run(
        ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", str(size), sys.executable,
         HERE / "reduce_processes.py", "mpi", task, folder],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    return [done.returncode], [done.stderr]


def alone():
    """The same shards in one process."""
    _, data = processes.problem()
    return processes.training(mh.Reduction(lambda sums: sums, processes.SHARDS), data)


def agrees(run, other):
    assert run.model == other.model
    for name in other.history:
        np.testing.assert_array_equal(run.history[name], other.history[name])


LAUNCHERS = [pytest.param(gloo, marks=pytest.mark.peers), mpi]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_two_and_four_processes_are_one(launcher, tmp_path):
    one = alone()
    plain = processes.training(None, processes.problem()[1])
    # The order of a sum of 24 terms, in 25 steps of a length that does not shrink.
    np.testing.assert_allclose(one.model.W, plain.model.W, atol=1e-12, rtol=0)
    for size in (1, 2, 4):
        codes, said = launcher("train", tmp_path / str(size), size)
        assert not any(codes), said
        for rank in range(size):
            agrees(mh.Run.load(tmp_path / str(size) / f"{rank}.npz"), one)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_error_in_one_process_is_told_to_the_other(launcher, tmp_path):
    codes, said = launcher("fail", tmp_path / "run", 2)
    assert not any(codes), said
    text = (tmp_path / "run" / "0.txt").read_text()
    assert text.startswith("reduce: process 1 failed before the sums of step 18 were added up")
    assert (tmp_path / "run" / "1.txt").read_text().startswith("in a callback")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_process_that_dies_ends_the_other_and_leaves_a_whole_checkpoint(launcher, tmp_path):
    codes, said = launcher("die", tmp_path / "run", 2)
    if launcher is gloo:
        assert codes == [0, -9]
        text = (tmp_path / "run" / "0.txt").read_text()
        assert text.startswith(
            "reduce: process 0 of 2: the function failed before the sums of step 17 were added up, "
            "as it does where another process has died or cannot be reached: RuntimeError: "
        )
    else:  # mpiexec ends the other, and says so
        assert codes != [0]
        assert "exited on signal 9" in said[0]
    saved = mh.Run.load(tmp_path / "run" / "checkpoint.npz")
    assert (saved.step, saved.reason) == (15, "checkpoint")
    _, data = processes.problem()
    resumed = mh.train(
        saved, data, until=processes.LAST,
        reduce=mh.Reduction(lambda sums: sums, processes.SHARDS),
    )  # fmt: skip
    agrees(resumed, alone())


def on_worker(rank, together, callback=None):
    """What a dask worker does; `dask` takes the same shards for all, and these differ."""
    data, shards = processes.share(rank, together.size)
    own = mh.Reduction(together.function, shards, together.rank, together.size)
    return processes.training(own, data, callback=callback and callback(rank))


@pytest.fixture
def client(monkeypatch):
    distributed = pytest.importorskip("distributed", reason="pip install dask distributed")
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    cluster = distributed.LocalCluster(
        n_workers=4, threads_per_worker=1, processes=True, dashboard_address=None
    )
    with cluster, distributed.Client(cluster) as client:
        yield client


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_dask_workers_are_one_training(client):
    one = alone()
    for size in (1, 2, 4):
        for run in adapters.dask(client, on_worker, range(size)):
            agrees(run, one)
    with pytest.raises(ValueError, match="parts: expected at most one for each worker, 4, got 5"):
        adapters.dask(client, on_worker, range(5))
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        adapters.dask(client, partial(on_worker, callback=processes.fails), range(2))
    with pytest.raises(
        RuntimeError, match=r"dask: the worker tcp://.* was lost, and training ended"
    ):
        adapters.dask(client, partial(on_worker, callback=processes.dies), range(2))


@pytest.mark.peers
def test_one_process_of_gloo(monkeypatch):
    torch = pytest.importorskip("torch", reason="pip install torch")
    distributed = torch.distributed
    with pytest.raises(RuntimeError, match="expected init_process_group"):
        adapters.torch_distributed()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        _, data = processes.problem()
        for small in (adapters.SMALL, 0):
            monkeypatch.setattr(adapters, "SMALL", small)
            run = processes.training(adapters.torch_distributed(shards=processes.SHARDS), data)
            agrees(run, alone())
    finally:
        distributed.destroy_process_group()
