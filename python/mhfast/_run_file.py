"""The file of a saved run: an .npz archive of plain arrays and one JSON text, without pickle.

| entry                       | content                                            |
|-----------------------------|----------------------------------------------------|
| about                       | JSON text: everything that is not an array         |
| W, U, start.W, start.U      | parameters at the step reached and at step 0       |
| query, schedule             | where the model or the optimizer has such an array |
| history.j, steps.j          | rows and steps of the j-th record named in `about` |
"""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .models import Classifier
from .optimizers import GradientDescent, NormalizedGradientDescent
from .recording import MissingFunction

_FORMAT = "mhfast run 1"
_OPTIMIZERS = {kind.name: kind for kind in (GradientDescent, NormalizedGradientDescent)}


def write(path: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
    """Write the fields of a run; the file appears under ``path`` complete or not at all."""
    model, start, optimizer = run["model"], run["start"], run["optimizer"]
    arrays = {"W": model.W, "U": model.U, "start.W": start.W, "start.U": start.U}
    if isinstance(model.query, np.ndarray):
        arrays["query"] = model.query
    settings = {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}
    if optimizer.schedule is not None:
        arrays["schedule"] = np.array(settings.pop("schedule"))
    for j, name in enumerate(run["history"]):
        arrays[f"history.{j}"] = run["history"][name]
        arrays[f"steps.{j}"] = run["steps"][name]
    about = {
        "format": _FORMAT,
        "query": None if "query" in arrays else model.query,
        "scale": model.scale,
        "optimizer": [optimizer.name, settings],
        "names": list(run["history"]),
        "record": [[*_code(what), every] for what, every in run["record"].items()],
        "stop": _code(run["stop"]),
        **{name: run[name] for name in ("step", "reason", "loss", "wrt")},
    }
    _write_at_once(Path(path), {"about": np.array(json.dumps(about)), **arrays})


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the fields of a run.

    Raises
    ------
    OSError
        If the file cannot be opened.
    ValueError
        If it is not the file of a run.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
        about = json.loads(str(arrays["about"]))
        if about["format"] != _FORMAT:
            raise ValueError(f"the format is {about['format']!r}, not {_FORMAT!r}")
        return _fields(about, arrays)
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"path: expected a file of Run.save, got {path}: {error}") from error


def _fields(about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    query, scale = arrays.get("query", about["query"]), about["scale"]
    names = about["names"]
    kind, settings = about["optimizer"]
    return {
        "model": Classifier(arrays["W"], arrays["U"], query, scale=scale),
        "start": Classifier(arrays["start.W"], arrays["start.U"], query, scale=scale),
        "history": {name: arrays[f"history.{j}"] for j, name in enumerate(names)},
        "steps": {name: arrays[f"steps.{j}"] for j, name in enumerate(names)},
        "optimizer": _OPTIMIZERS[kind](**settings | {"schedule": arrays.get("schedule")}),
        "record": {_decode(kind, what): every for kind, what, every in about["record"]},
        "stop": _decode(*about["stop"]),
        "wrt": tuple(about["wrt"]),
        **{name: about[name] for name in ("step", "reason", "loss")},
    }


def _code(value: object) -> tuple[str, object]:
    """Return a value of `record` or `stop` as JSON can hold it: a function by its name."""
    if isinstance(value, MissingFunction):
        return "function", value.name
    return "value", value


def _decode(kind: str, value: Any) -> Any:
    return MissingFunction(value) if kind == "function" else value


def _write_at_once(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a neighbour of the file, force it to disk and rename it."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(draft, "xb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
