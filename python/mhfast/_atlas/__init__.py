"""`mhfast reproduce`: results of attention theory, each checked, tabled and drawn by one command.

One module an experiment, named as the command names it; `experiment.py` says what an experiment is,
`catalogue.py` lists them, `command.py` runs them, `report.py` writes what they found.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec


def main(arguments: Sequence[str] | None = None) -> int:
    """List the experiments, or run those named: see `mhfast reproduce --help`.

    Returns
    -------
    int
        0; 1 when a claim does not hold.

    Raises
    ------
    ImportError
        A package is not installed: matplotlib, or what an experiment needs beside it.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("experiments need matplotlib: pip install matplotlib")
    from .command import main as command

    return command(arguments)
