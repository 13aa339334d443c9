"""A process of `test_reduce_adapters`: trains together with others, by gloo or MPI.

python reduce_processes.py gloo TASK FOLDER RANK SIZE
mpiexec -n SIZE python reduce_processes.py mpi TASK FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import mhfast as mh
from mhfast.interop import reduce as adapters

SHARDS = (6, 7, 5, 6)
LAST = 25


def problem():
    data = mh.data.tokenized_mixture(sum(SHARDS), 5, 9, seed=0)
    return mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.3, seed=1), data


def share(rank, size):
    """The samples and the shards of a rank."""
    _, data = problem()
    each = len(SHARDS) // size
    shards = SHARDS[rank * each : (rank + 1) * each]
    first = sum(SHARDS[: rank * each])
    return data[first : first + sum(shards)], shards


def training(together, data, **rest):
    start, _ = problem()
    return mh.train(
        start, data, steps=LAST, optimizer=mh.NormalizedGradientDescent(0.1),
        record=("loss", "accuracy", "margin", "grad_norm"), reduce=together, **rest,
    )  # fmt: skip


def dies(rank):
    def callback(step, _):
        if rank == 1 and step == 17:
            os.kill(os.getpid(), signal.SIGKILL)

    return callback


def fails(rank):
    def callback(step, _):
        if rank == 1 and step == 17:
            raise ZeroDivisionError("in a callback")

    return callback


def work(task, folder, rank, size, adapter):
    data, shards = share(rank, size)
    checkpoint = (folder / "checkpoint.npz", 5) if rank == 0 else None
    if task == "train":
        run = training(adapter(shards=shards), data)
        adapters.SMALL = 0  # in slices
        assert training(adapter(shards=shards), data) == run
        run.save(folder / f"{rank}.npz")
        return
    callback = {"die": dies, "fail": fails}[task](rank)
    try:
        training(adapter(shards=shards), data, callback=callback, checkpoint=checkpoint)
    except (RuntimeError, ZeroDivisionError) as error:
        (folder / f"{rank}.txt").write_text(str(error))


def main():
    kind, task, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if kind == "mpi":
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        work(task, folder, rank, size, adapters.mpi)
        return
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    rank, size = map(int, sys.argv[4:6])
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    work(task, folder, rank, size, adapters.torch_distributed)
    if task == "die":
        os._exit(
            0
        )  # PyTorch would end the group, of which the other process is missing, by a signal
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
