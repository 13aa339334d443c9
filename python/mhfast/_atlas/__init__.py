"""`mhfast reproduce`: results of attention theory, each checked, tabled and drawn by one command.

One module an experiment, named as the command names it; `experiment.py` says what an experiment is,
`catalogue.py` lists them, `command.py` runs them, `report.py` writes what they found.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

NEEDED = ("matplotlib", "cvxpy", "clarabel")
"""Packages of what only the experiments need."""


def main(arguments: Sequence[str] | None = None) -> int:
    """List the experiments, or run those named: see `mhfast reproduce --help`.

    Returns
    -------
    int
        0; 1 when a claim does not hold.

    Raises
    ------
    ImportError
        A package that experiments need is not installed.
    """
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ImportError(
            f"experiments need {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    from .command import main as command

    return command(arguments)
