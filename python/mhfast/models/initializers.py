"""The parameters of new models: zeros and Gaussian draws, for one run or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Seed, Seeds
from .low_rank import LowRank
from .value_output import ValueOutput

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def shapes(
    heads: int,
    dim: int,
    readout: Mapping[str, tuple[int, ...]],
    rank: int | None,
    tied: bool,
    prompt_rows: int | None,
) -> Shapes:
    """Return the shape of each parameter of one run, by name and in order."""
    if rank is None:
        if tied:
            raise ValueError("tied: expected False without a rank, got True")
        found: Shapes = {"W": (heads, dim, dim)}
    else:
        factor = (heads, dim, checks.count(rank, "rank"))
        found = {"Q": factor} if tied else {"Q": factor, "K": factor}
    found.update(readout)
    if prompt_rows is not None:
        found["prompt"] = (checks.count(prompt_rows, "prompt_rows"), dim)
    return found


def zeros(shapes: Shapes, runs: int | None, dtype: npt.DTypeLike) -> dict[str, Any]:
    """Return the arguments of a constructor with all parameters zero."""
    real = checks.float_dtype(dtype)
    lead = () if runs is None else (checks.count(runs, "runs"),)
    return _arguments({name: np.zeros(lead + shape, real) for name, shape in shapes.items()})


def gaussian(
    shapes: Shapes, std: float, seed: Seed | Seeds, runs: int | None, dtype: npt.DTypeLike
) -> dict[str, Any]:
    """Return the arguments of a constructor with independent entries N(0, std²).

    Parameters are drawn in their order and in float64, so that a float32 model is the float64 model
    of the same seed rounded.
    """
    real = checks.float_dtype(dtype)
    if checks.finite(std, "std") < 0:
        raise ValueError(f"std: expected a number of at least 0, got {std}")
    if runs is not None:
        runs = checks.count(runs, "runs")
    if runs is None and not checks.is_sequence(seed):
        return _arguments(_draw(shapes, std, checks.generator(seed), real))
    draws = [_draw(shapes, std, rng, real) for rng in checks.generators(seed, runs)]
    return _arguments({name: np.stack([draw[name] for draw in draws]) for name in shapes})


def _draw(
    shapes: Shapes, std: float, rng: np.random.Generator, dtype: np.dtype[Any]
) -> dict[str, Array]:
    return {
        name: (std * rng.standard_normal(shape)).astype(dtype, copy=False)
        for name, shape in shapes.items()
    }


def _arguments(arrays: dict[str, Any]) -> dict[str, Any]:
    if "Q" in arrays:
        arrays["W"] = LowRank(arrays.pop("Q"), arrays.pop("K", None))
    if "A" in arrays:
        arrays["V"] = ValueOutput(arrays.pop("A"), arrays.pop("B"))
    return arrays
