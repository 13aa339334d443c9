"""`mhfast bench`: one loss and gradient, and training loops, beside NumPy, PyTorch and JAX.

Imported on request only. `mhfast.bench.shapes` says what is measured, `mhfast.bench.peers` against
what, `mhfast.bench.measure` how.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison that the arguments ask for (None: those of the process)."""
    from .command import run

    return run(argv)
