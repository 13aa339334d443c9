"""The inputs that every implementation gets, and whether their answers agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .shapes import Shape

Array: TypeAlias = NDArray[Any]

# Largest |a - b| / max |b| between two implementations. Each sums n T products of order one in its
# own order; observed on all listed shapes, loops included: 2e-14 in float64 and 3e-5 in float32.
TOLERANCE = {"float64": 1e-12, "float32": 1e-4}


class DisagreementError(Exception):
    """A peer computes something other than mhfast, so timing it would be meaningless."""


@dataclass(frozen=True)
class BenchProblem:
    """Tokens X (n,T,d), labels y (n,) of -1 and 1, weights W (H,d,d), U (H,T,d), of one dtype."""

    shape: Shape
    X: Array
    y: Array
    W: Array
    U: Array


@dataclass(frozen=True)
class Answer:
    """A loss with the gradients for W and U, or with the trained W and U.

    With several runs all of them, the loss too, have a leading run axis; U is V for a layer.
    """

    loss: float | Array
    W: Array
    U: Array


def draw(shape: Shape, dtype: str) -> BenchProblem:
    """Draw a problem whose logits and outputs are of order one, the same on every call."""
    random = np.random.default_rng(20240801)
    n, T, d, H = shape.n, shape.T, shape.d, shape.H
    X = random.standard_normal((n, T, d))
    y = random.choice((-1.0, 1.0), n)
    W = random.standard_normal((H, d, d)) / d
    U = random.standard_normal((H, T, d)) / np.sqrt(d)
    return BenchProblem(shape, *(array.astype(dtype) for array in (X, y, W, U)))


def difference(answer: Answer, truth: Answer) -> float:
    """Return the largest relative difference, max|a - b| / max|b|, of loss, W and U; NaN stays."""
    pairs = ((answer.loss, truth.loss), (answer.W, truth.W), (answer.U, truth.U))
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]))


def check_agreement(name: str, answer: Answer, truth: Answer, dtype: str) -> None:
    """Compare an answer with mhfast's.

    Raises
    ------
    DisagreementError
        They differ by more than rounding explains, or the answer is not finite.
    """
    tolerance = TOLERANCE[dtype]
    found = difference(answer, truth)
    if not found <= tolerance:
        raise DisagreementError(
            f"{name} and mhfast differ by {found:.1e} relative, expected at most {tolerance:.0e}"
        )
