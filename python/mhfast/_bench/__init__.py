"""`mhfast bench`: one loss and gradient, and training loops, compared with NumPy, PyTorch and JAX.

Imported on request only. `mhfast._bench.shapes` lists what is measured, `mhfast._bench.peers` what
mhfast is compared with, and `mhfast._bench.measure` does the timing.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison given by the arguments (None: those of the process)."""
    from .command import run

    return run(argv)
