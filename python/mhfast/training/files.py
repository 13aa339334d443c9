"""The file of a saved run: an .npz archive of plain arrays and one JSON text, without pickle.

| entry                  | content                                              |
|------------------------|------------------------------------------------------|
| about                  | JSON text: everything that is not an array           |
| model.W, start.W, ...  | parameters at the step reached and at step 0; a      |
| model.j.W, ...         | W or V that is not there is the identity; those of   |
|                        | layer j of a stack are model.j.W, ...                |
| query, schedule, lr    | if the model or the optimizer has such an array      |
| stopped                | with a run axis                                      |
| constraints.W.j, ...   | parts of constraints that are arrays                 |
| state.W.j, ...         | state of the optimizer, such as moments              |
| average.W, ...,        | means over steps, and how many iterates each run     |
| averaged               | has in them                                          |
| history.j, steps.j     | rows and steps of the j-th record named in `about`   |
| coefficients.j         | if U is trained in coefficients of the samples       |
| subspace.basis, ...    | if training continues in the span of the tokens:     |
|                        | its basis, and the model, initial model and state    |
"""

from __future__ import annotations

import io
import json
import os
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .._arguments import losses
from .._arguments.lists import PARAMETERS
from .._arguments.values import frozen, same
from ..models import AnyModel, Classifier, Layer, Model, Stack
from ..models.problem import of_arrays
from ..optimizers import OPTIMIZERS, SOLVERS, fields_of
from . import segments
from .averages import Averages
from .constraints import checked
from .quantities import MissingFunction
from .subspace import Subspace

_FORMAT = "mhfast run 3"
_MODELS: dict[str, type[Any]] = {"classifier": Classifier, "layer": Layer}
_OPTIMIZERS: dict[str, Any] = {kind.name: kind for kind in OPTIMIZERS}
_OPTIMIZERS |= {kind.name: kind for kind in SOLVERS}
_PLAIN = ("step", "reason", "wrt", "since")


def write(path: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
    """Write the fields of a run; the file appears under ``path`` complete or not at all."""
    model, optimizer = run["model"], run["optimizer"]
    arrays: dict[str, Any] = _parts(model, run["start"], run["state"])
    if run["subspace"] is not None:
        inside = run["subspace"]
        parts = _parts(inside.model, inside.start, inside.state) | {"basis": inside.basis}
        arrays |= {f"subspace.{name}": array for name, array in parts.items()}
    arrays |= {f"coefficients.{j}": array for j, array in enumerate(run["coefficients"])}
    averages: Averages | None = run["averages"]
    if averages is not None:
        arrays |= {f"average.{name}": mean for name, mean in averages.means.items()}
        arrays["averaged"] = averages.counts
    for j, name in enumerate(run["history"]):
        arrays |= {f"history.{j}": run["history"][name], f"steps.{j}": run["steps"][name]}
    if isinstance(run["stopped"], np.ndarray):
        arrays["stopped"] = run["stopped"]
    for name, parts in run["constraints"].items():
        arrays |= {
            f"constraints.{name}.{j}": part
            for j, part in enumerate(parts)
            if not isinstance(part, str)
        }
    settings = fields_of(optimizer)
    for name in ("schedule", "lr"):
        if isinstance(settings.get(name), tuple):
            arrays[name] = np.array(settings.pop(name))
    about = {
        "format": _FORMAT,
        **_settings(model, "query" in arrays),
        "optimizer": [optimizer.name, settings],
        "arrays": list(arrays),
        "names": list(run["history"]),
        "record": [[*_code(what), every] for what, every in run["record"].items()],
        "stop": _code(run["stop"]),
        "stopped": None if "stopped" in arrays else run["stopped"],
        **{name: run[name] for name in _PLAIN},
        "loss": losses.stored(run["loss"]),
        "segments": segments.stored(run["segments"]),
        "batches": segments.stored_batches(run["batches"]),
        "constraints": {
            name: [part if isinstance(part, str) else None for part in parts]
            for name, parts in run["constraints"].items()
        },
        "average": None if averages is None else averages.first,
    }
    write_at_once(Path(path), {"about": np.array(json.dumps(about)), **arrays})


def _settings(model: AnyModel, has_queries: bool) -> dict[str, Any]:
    """Return what a model has beside its arrays."""
    if isinstance(model, Stack):
        layers = [_settings(layer, has_queries) for layer in model.layers]
        return {"model": "stack", "residual": model.residual, "layers": layers}
    return {
        "model": next(name for name, kind in _MODELS.items() if isinstance(model, kind)),
        "query": None if has_queries else model.query,
        "scale": model.scale,
        "causal": model.causal,
        "attention": str(model.attention),
        "normalize": model.normalize,
    }


def _parts(
    model: AnyModel, start: AnyModel, state: Mapping[str, tuple[npt.NDArray[Any], ...]]
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a run, or of the run in its subspace, by their names in the file."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for role, of_role in (("model", model), ("start", start)):
        arrays |= {f"{role}.{name}": array for name, array in of_role.parameters.items()}
    for name, slots in state.items():
        arrays |= {f"state.{name}.{j}": slot for j, slot in enumerate(slots)}
    if isinstance(model, Model) and isinstance(model.query, np.ndarray):
        arrays["query"] = model.query
    return arrays


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the fields of a run.

    Raises
    ------
    OSError
        If the file cannot be opened.
    ValueError
        If it is not the file of a run.
    """
    with open(path, "rb") as file:
        try:
            arrays = _arrays(file)
            about = json.loads(str(arrays.pop("about")))
            if about["format"] != _FORMAT:
                raise ValueError(f"the format is {about['format']!r}, not {_FORMAT!r}")
            if about["arrays"] != list(arrays):
                raise ValueError("an array is missing, or is there that should not be")
            run = _fields(about, arrays)
            _check(run)
            return run
        # A damaged file raises whatever zipfile, zlib, NumPy, json or a constructor make of it.
        except Exception as error:
            cause = str(error) or type(error).__name__
            raise ValueError(
                f"path: expected a file of Run.save, got {os.fspath(path)}, which cannot be "
                f"read: {cause}"
            ) from error


def _arrays(file: BinaryIO) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an archive in their order, each checked by its sum before it is read."""
    arrays = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            content = io.BytesIO(archive.read(name))
            array: npt.NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
            arrays[name.removesuffix(".npy")] = array
    return arrays


def _check(run: Mapping[str, Any]) -> None:
    """Raise unless the fields of a run fit each other, as those of every saved run do."""
    model, runs = run["model"], run["model"].runs
    layout = _layout(model)
    if _layout(run["start"]) != layout:
        raise ValueError("the parameters at the start and at the end differ in shape or dtype")
    for name, slots in run["state"].items():
        if [(slot.shape, slot.dtype) for slot in slots] != [layout[name]] * run["optimizer"].slots:
            raise ValueError(f"the state of the optimizer does not fit {name}")
    averages = run["averages"]
    if averages is not None:
        shapes = {name: (layout[name][0], np.float64) for name in run["wrt"]}
        found = {name: (mean.shape, mean.dtype) for name, mean in averages.means.items()}
        counts = averages.counts
        if found != shapes or counts.shape != (runs or 1,) or counts.dtype != np.int64:
            raise ValueError("its averages do not fit what is trained")
    lead = () if runs is None else (runs,)
    for array in run["coefficients"]:
        if array.dtype != np.float64 or array.ndim != 1 + len(lead) or array.shape[:-1] != lead:
            raise ValueError("its coefficients do not fit its runs")
    for name, k in run["steps"].items():
        rows = run["history"][name]
        if rows.dtype.kind != "f" or k.dtype != np.int64 or np.any(np.diff(k) <= 0):
            raise ValueError(f"the record {name!r} is not one of numbers and steps")
        expected = k.shape if runs is None else (runs, *k.shape)
        if rows.shape[: len(expected)] != expected:
            raise ValueError(f"the record {name!r} does not have one row per step")
    if runs is None:
        fits = isinstance(run["reason"], str) and isinstance(run["stopped"], int | None)
    else:
        ends = np.asarray(run["stopped"])
        fits = len(run["reason"]) == runs and ends.shape == (runs,) and ends.dtype == np.int64
    since = run["since"] if isinstance(run["since"], tuple) else (run["since"],)
    counts = (run["step"] + 1, *(k + 1 for k in since), *run["record"].values())
    if not fits or not all(type(number) is int and number >= 1 for number in counts):
        raise ValueError("its steps and reasons do not fit each other")
    stop = run["stop"]
    if not callable(stop) and not all(type(value) is float for value in stop.values()):
        raise ValueError("its thresholds are not numbers")
    known = losses.name_of(run["loss"]) in (*model.losses, "own")
    if not known or not set(run["wrt"]) <= set(model.parameters):
        raise ValueError("its loss and what it trained do not fit the model")
    if not same(checked(model, run["constraints"]), run["constraints"]):
        raise ValueError("its constraints do not fit the model")


def _layout(model: AnyModel) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    return {name: (array.shape, array.dtype) for name, array in model.parameters.items()}


def _fields(about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    names, since = about["names"], about["since"]
    if sum(key.startswith("history.") for key in arrays) != len(names):
        raise ValueError("there are more or fewer records than names")
    kind, settings = about["optimizer"]
    own = {name: arrays[name] for name in ("schedule", "lr") if name in arrays}
    return {
        "model": _model("model", about, arrays),
        "start": _model("start", about, arrays),
        "state": _state(arrays),
        "history": {name: arrays[f"history.{j}"] for j, name in enumerate(names)},
        "steps": {name: arrays[f"steps.{j}"] for j, name in enumerate(names)},
        "optimizer": _OPTIMIZERS[kind](**settings | own),
        "record": {_decode(kind, what): every for kind, what, every in about["record"]},
        "stop": _decode(*about["stop"]),
        "stopped": arrays.get("stopped", about["stopped"]),
        **{name: about[name] for name in _PLAIN},
        "loss": losses.restored(about["loss"]),
        "since": tuple(since) if isinstance(since, list) else since,
        "wrt": tuple(about["wrt"]),
        "subspace": _subspace(about, arrays),
        "segments": segments.restored(about.get("segments", [])),
        "batches": segments.restored_batches(about.get("batches")),
        "constraints": {
            name: tuple(
                arrays[f"constraints.{name}.{j}"] if part is None else part
                for j, part in enumerate(parts)
            )
            for name, parts in about.get("constraints", {}).items()
        },
        "coefficients": tuple(
            array for name, array in arrays.items() if name.startswith("coefficients.")
        ),
        "averages": _averages(about.get("average"), arrays),
    }


def _averages(first: int | None, arrays: Mapping[str, npt.NDArray[Any]]) -> Averages | None:
    if first is None:
        return None
    head = "average."
    means = {key.removeprefix(head): a for key, a in arrays.items() if key.startswith(head)}
    return Averages(first, arrays["averaged"], means)


def _subspace(about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Subspace | None:
    head = "subspace."
    inside = {key.removeprefix(head): a for key, a in arrays.items() if key.startswith(head)}
    if not inside:
        return None
    return Subspace(
        frozen(inside["basis"]),
        _model("start", about, inside),
        _model("model", about, inside),
        _state(inside),
    )


def _model(role: str, about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    if about["model"] == "stack":
        layers = [_model(f"{role}.{j}", of, arrays) for j, of in enumerate(about["layers"])]
        return Stack(layers, about["residual"], embedding=arrays.get(f"{role}.embedding"))
    given: dict[str, Any] = {
        name: arrays[f"{role}.{name}"] for name in PARAMETERS if f"{role}.{name}" in arrays
    }
    query = arrays.get("query", about["query"])
    return of_arrays(
        _MODELS[about["model"]], given, query=query, scale=about["scale"], causal=about["causal"],
        attention=about.get("attention", "softmax"), normalize=about.get("normalize"),
    )  # fmt: skip


def _state(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[npt.NDArray[Any], ...]]:
    state: dict[str, tuple[npt.NDArray[Any], ...]] = {}
    for key, array in arrays.items():  # in the order in which they were written
        if key.startswith("state."):
            name = key.removeprefix("state.").rpartition(".")[0]
            state[name] = (*state.get(name, ()), array)
    return state


def _code(value: object) -> tuple[str, object]:
    """Return a value of `record` or `stop` that JSON can represent: for a function, its name."""
    if isinstance(value, MissingFunction):
        return "function", value.name
    return "value", value


def _decode(kind: str, value: Any) -> Any:
    return MissingFunction(value) if kind == "function" else value


def write_at_once(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a temporary file in the same directory, flush it to disk and rename it."""
    # Not from the name of the file, which may already be as long as a name can be.
    draft = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with open(draft, "xb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
