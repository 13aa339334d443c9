"""`mhfast reproduce`: results of attention theory, each checked and drawn by one command.

Each experiment is a module of the same name; `experiment.py` defines what an experiment is,
`catalogue.py` lists them, `command.py` runs them, and `report.py` writes their results.
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
        matplotlib, or another package that an experiment needs, is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("experiments need matplotlib: pip install matplotlib")
    from .command import main as command

    return command(arguments)
