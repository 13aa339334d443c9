"""The directory of a sweep: one file for each finished call, written whole or not at all.

| file              | content                                                             |
|-------------------|---------------------------------------------------------------------|
| sweep.json        | the format and the name of the function                             |
| lock              | held by the process that works in the directory                     |
| <digest>.npz      | a finished call: its columns, and as JSON its points or its failure |

The digest is that of the values of the points and of the seeds that the sweep draws for them, so
that a larger grid finds what a smaller one has computed, and another root finds nothing. A process
that is killed leaves no part of a file under such a name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..training.files import write_at_once
from .table import Columns

_FORMAT = "mhfast sweep 1"


class Store:
    """The files of one sweep. To be used inside `locked`."""

    def __init__(self, directory: str | os.PathLike[str], function: str) -> None:
        self.path = Path(directory)
        self.path.mkdir(parents=True, exist_ok=True)
        about = self.path / "sweep.json"
        wanted = {"format": _FORMAT, "function": function}
        if not about.exists():
            others = [p.name for p in self.path.iterdir() if p.name != "lock"]
            if others:
                raise ValueError(
                    f"directory: expected an empty directory or that of a sweep, got {self.path} "
                    f"with {others[0]!r} in it"
                )
            partial = self.path / f"sweep.json.{os.getpid()}"
            partial.write_text(json.dumps(wanted), "utf-8")
            partial.replace(about)
        try:
            found = json.loads(about.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"directory: cannot read {about}: {error}") from error
        if found != wanted:
            raise ValueError(
                f"directory: expected the sweep of {function}, got that of "
                f"{found.get('function') if isinstance(found, dict) else found} in {self.path}"
            )

    def read(self, key: str) -> Columns | None:
        """Return the columns of a finished call, None if there is no such file or it had failed.

        Raises
        ------
        ValueError
            If the file is damaged.
        """
        path = self.path / f"{key}.npz"
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = dict(archive)
            about = json.loads(str(arrays.pop("about")))
            if about["failure"] is not None:
                return None
            return {name: arrays[f"column.{j}"] for j, name in enumerate(about["columns"])}
        except FileNotFoundError:
            return None
        except Exception as error:
            raise ValueError(f"directory: {path} is damaged and can be deleted: {error}") from error

    def write(self, key: str, columns: Columns | None, failure: dict[str, Any] | None) -> None:
        """Keep the columns of a call, or how it failed."""
        columns = {name: rows for name, rows in (columns or {}).items() if name != "point"}
        about = {"failure": failure, "columns": list(columns)}
        arrays = {f"column.{j}": rows for j, rows in enumerate(columns.values())}
        write_at_once(self.path / f"{key}.npz", {"about": np.array(json.dumps(about)), **arrays})


@contextmanager
def locked(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the directory for this process; the lock ends with the process, however that ends.

    Raises
    ------
    RuntimeError
        If another process works in it.
    """
    try:
        import fcntl
    except ImportError:  # not on this platform
        yield
        return
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"directory: expected one that no other process works in, got {path}"
            ) from error
        yield
