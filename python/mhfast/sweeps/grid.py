"""The points of a sweep: their order, the calls that they make, their names on disk, their seeds.

A point is one value for each name of the grid. Points come in the order of the grid, the last name
fastest. A call computes one point, or, where some names are batched, one for each combination of
the values of those names: these are the runs side by side of that call.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Point: TypeAlias = dict[str, Any]
Grid: TypeAlias = Mapping[str, Sequence[Any] | npt.NDArray[Any]] | Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the function.

    Parameters
    ----------
    arguments : dict
        What the function is called with; a batched name has an array of R values.
    points : tuple of int
        The points that the call computes, by their place in the sweep.
    batched : bool
        Whether the result has a run axis with one run for each of the points.
    seeds : tuple of int
        The seeds of the points where the sweep draws them, otherwise empty.
    """

    arguments: Point
    points: tuple[int, ...]
    batched: bool
    seeds: tuple[int, ...] = ()


def points_of(grid: Grid) -> list[Point]:
    """Return the points of a grid in order.

    Raises
    ------
    TypeError
        If the grid is neither a dict of sequences nor a sequence of dicts.
    ValueError
        If it has no point, or its dicts do not have the same names.
    """
    if isinstance(grid, Mapping):
        values = {_name(name): _values(name, given) for name, given in grid.items()}
        return [
            dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
        ]
    if isinstance(grid, str) or not isinstance(grid, Sequence):
        raise TypeError(
            f"grid: expected a dict of sequences or a sequence of dicts, got {type(grid).__name__}"
        )
    points = []
    for point in grid:
        if not isinstance(point, Mapping):
            raise TypeError(f"grid: expected a sequence of dicts, got {type(point).__name__} in it")
        points.append({_name(name): value for name, value in point.items()})
        if points[0].keys() != points[-1].keys():
            raise ValueError(
                f"grid: expected the same names in every dict, got {', '.join(points[0])} "
                f"and {', '.join(points[-1])}"
            )
    if not points:
        raise ValueError("grid: expected at least one point, got none")
    return points


def _name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"grid: expected names of arguments, got {name!r}")
    return name


def _values(name: str, given: Any) -> list[Any]:
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
        raise TypeError(f"grid: expected a sequence of values for {name!r}, got {given!r}")
    # Python numbers, so that a point is the same whether its values came in a list or an array.
    values = given.tolist() if isinstance(given, np.ndarray) else list(given)
    if not values:
        raise ValueError(f"grid: expected at least one value for {name!r}, got none")
    return values


def calls_of(points: Sequence[Point], batch: Sequence[str], seed: int | None) -> list[Call]:
    """Return the calls that compute the points.

    Parameters
    ----------
    points : sequence of dicts with the same names
    batch : sequence of str
        The names that arrive as arrays: points that differ in these only are computed by one call.
    seed : int, optional
        The root of the seeds that the function gets under the name ``seed``.

    Raises
    ------
    ValueError
        If a name of ``batch`` is not in the grid, the grid has its own ``seed``, or points repeat.
    """
    names = tuple(points[0])
    if isinstance(batch, str):
        batch = (batch,)
    for name in batch:
        if name not in names:
            raise ValueError(f"batch: expected names from {', '.join(names)}, got {name!r}")
    if seed is not None and "seed" in names:
        raise ValueError("seed: expected None for a grid with its own seed, got an integer")
    groups: dict[Any, list[int]] = {}
    alone = tuple(name for name in names if name not in batch)
    seen: dict[str, int] = {}
    for j, point in enumerate(points):
        text = _text(point)
        if text in seen:
            raise ValueError(f"grid: expected different points, got {point} twice")
        seen[text] = j
        key = _text({name: point[name] for name in alone}) if batch else j
        groups.setdefault(key, []).append(j)
    calls = []
    for members in groups.values():
        first = points[members[0]]
        arguments = dict(first)
        for name in batch:
            arguments[name] = np.array([points[j][name] for j in members])
        seeds: tuple[int, ...] = ()
        if seed is not None:
            seeds = tuple(seed_of(points[j], seed) for j in members)
            arguments["seed"] = np.array(seeds) if batch else seeds[0]
        calls.append(Call(arguments, tuple(members), bool(batch), seeds))
    return calls


def seed_of(point: Point, root: int) -> int:
    """Return the seed of a point: that of a `numpy.random.SeedSequence` spawned by its values.

    It depends on the root and the values alone: not on the executor, nor on the other points.
    """
    digest = hashlib.sha256(_text(point).encode()).digest()
    words = tuple(int(word) for word in np.frombuffer(digest, "<u4"))
    return int(np.random.SeedSequence(root, spawn_key=words).generate_state(1, np.uint64)[0] >> 1)


def key_of(call: Call, points: Sequence[Point]) -> str:
    """Return the name of a call on disk: a digest of the values of its points, and their seeds.

    Raises
    ------
    TypeError
        If a value cannot be identified by its content.
    """
    lines = [_text(points[j], strict=True) for j in call.points]
    text = "\n".join([*lines, *map(str, call.seeds)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _text(point: Point, strict: bool = False) -> str:
    """Return the values of a point as text, the same in every process."""
    return json.dumps({name: _plain(point[name], name, strict) for name in sorted(point)})


def _plain(value: Any, name: str, strict: bool) -> Any:
    if value is None or isinstance(value, str | bool | np.bool_):
        return bool(value) if isinstance(value, np.bool_) else value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, tuple | list):
        return [_plain(item, name, strict) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name, strict) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return ["array", value.dtype.str, list(value.shape), content]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return [type(value).__qualname__, _plain(parts, name, strict)]
    if callable(value) and hasattr(value, "__qualname__"):
        return [value.__module__, value.__qualname__]
    if strict:
        raise TypeError(
            f"grid: with directory= expected numbers, strings, arrays, dataclasses or functions "
            f"as values of {name!r}, got {type(value).__name__}"
        )
    return [type(value).__qualname__, id(value)]
