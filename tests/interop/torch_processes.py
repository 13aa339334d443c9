"""Programs with processes for `test_torch_transforms`: a data loader, and DDP on gloo."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from mhfast.interop.torch import MultiHeadClassifier

HEADS, TOKENS, DIM, SAMPLES = 3, 5, 7, 64


def module() -> MultiHeadClassifier:
    torch.manual_seed(1)
    return MultiHeadClassifier(HEADS, TOKENS, DIM, dtype=torch.float64)


class Outputs(Dataset):
    """Samples beside the outputs of a module, which the workers compute."""

    def __init__(self, of: MultiHeadClassifier, X: torch.Tensor) -> None:
        self.of, self.X = of, X

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, i: int) -> torch.Tensor:
        with torch.no_grad():
            return self.of(self.X[i : i + 1])[0]


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    X = torch.randn(SAMPLES, TOKENS, DIM, dtype=torch.float64)
    return X, torch.sign(X[:, 0, 0])


def loader(method: str) -> None:
    of, (X, y) = module(), samples()
    torch.nn.functional.softplus(-y * of(X)).mean().backward()  # threads are running
    batches = DataLoader(Outputs(of, X), 8, num_workers=2, multiprocessing_context=method)
    found = torch.cat(list(batches))
    print(len(found), torch.equal(found, of(X).detach()))


def step(of: torch.nn.Module, X: torch.Tensor, y: torch.Tensor, factor: float) -> None:
    of.zero_grad()
    (torch.nn.functional.softplus(-y * of(X)).sum() * factor).backward()
    with torch.no_grad():
        for parameter in of.parameters():
            parameter -= 0.5 * parameter.grad


def rank(index: int, ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=ranks)
    of, (X, y) = module(), samples()
    begin, end = ((0, 19), (19, SAMPLES))[index]
    together = DistributedDataParallel(of)
    alone = module()
    for _ in range(10):
        # DDP takes the mean of the gradients of the ranks: ranks / n turns sums into the mean.
        step(together, X[begin:end], y[begin:end], ranks / SAMPLES)
        step(alone, X, y, 1 / SAMPLES)
    if index == 0:
        worst = max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(of.parameters(), alone.parameters(), strict=True)
        )
        print(worst)
    dist.barrier()  # a rank that leaves while another still receives ends that one
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "loader":
        loader(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            torch.multiprocessing.spawn(rank, (2, store), nprocs=2)
