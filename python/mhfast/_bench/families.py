"""Training problems of the model family: runs side by side, one query, layers; and their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .problem import Array
from .shapes import Shape


@dataclass(frozen=True)
class Training:
    """`steps` steps on W and the readout, U or V, of `runs` models; the loss recorded at each.

    A classifier has the logistic loss, a layer with `outputs` outputs the squared one. The queries
    are all tokens, or the last one. Steps of size `lr` are along the gradient, `normalized` ones
    along the gradient over its norm, for each run and tensor. `dtypes` are those to measure.
    """

    shape: Shape
    steps: int
    model: Literal["classifier", "layer"] = "classifier"
    outputs: int = 0
    runs: int = 1
    last: bool = False
    normalized: bool = False
    lr: float = 0.1
    dtypes: tuple[str, ...] = ("float32", "float64")

    def __str__(self) -> str:
        several = f"{self.runs} x " if self.runs > 1 else ""
        kind = f" {self.model}" if self.model == "layer" else ""
        rows = " last token" if self.last else ""
        return f"{several}{self.shape}{kind}{rows}{' normalized' if self.normalized else ''}"

    @property
    def rows(self) -> int:
        """The number q of queries."""
        return 1 if self.last else self.shape.T

    @property
    def flops(self) -> int:
        """Operations of one step, R n H (4 q d² + 8 q T d); for a layer R n H 6 q p d more."""
        n, T, d, H = self.shape.n, self.shape.T, self.shape.d, self.shape.H
        row = 4 * d**2 + 8 * T * d + 6 * self.outputs * d
        return self.runs * n * H * self.rows * row


@dataclass(frozen=True)
class Trainees:
    """X (R,n,T,d), queries Z (R,n,q,d), targets y, W (R,H,d,d) and readout, all of one dtype.

    For classifiers y is (R,n) and the readout U (R,H,q,d), for layers y is (R,n,q,p) and the
    readout V (R,H,d,p).
    """

    X: Array
    Z: Array
    y: Array
    W: Array
    readout: Array


def draw(training: Training, dtype: str) -> Trainees:
    """Draw problems whose logits and outputs are of order one, the same on every call."""
    random = np.random.default_rng(20240802)
    R, q, p = training.runs, training.rows, training.outputs
    n, T, d, H = training.shape.n, training.shape.T, training.shape.d, training.shape.H
    X = random.standard_normal((R, n, T, d))
    W = random.standard_normal((R, H, d, d)) / d
    if training.model == "classifier":
        y = random.choice((-1.0, 1.0), (R, n))
        readout = random.standard_normal((R, H, q, d)) / np.sqrt(d)
    else:
        y = random.standard_normal((R, n, q, p))
        readout = random.standard_normal((R, H, d, p)) / np.sqrt(d)
    X, y, W, readout = (array.astype(dtype) for array in (X, y, W, readout))
    return Trainees(X, X[:, :, -q:], y, W, readout)


# Enough steps that entering and leaving the loop is negligible, at most some seconds for the peers.
FAMILIES: dict[str, Training] = {
    "hundred": Training(
        Shape(6, 8, 10, 1), 2000, runs=100, last=True, normalized=True, dtypes=("float64",)
    ),
    "five-hundred": Training(
        Shape(6, 8, 10, 1), 2000, runs=500, last=True, normalized=True, dtypes=("float64",)
    ),
    "all-rows": Training(Shape(6, 8, 10, 1), 500, runs=100, dtypes=("float64",)),
    "heads": Training(Shape(100, 10, 20, 4), 100, runs=30, dtypes=("float32",)),
    "last-token": Training(
        Shape(5000, 32, 5, 4), 50, "layer", outputs=1, last=True, dtypes=("float32",)
    ),
    "layer": Training(Shape(500, 16, 16, 4), 50, "layer", outputs=16, lr=1e-3),
}


def chosen(names: Sequence[str]) -> list[Training]:
    """Return the training problems with these names; "main" stands for all, "none" for none.

    Raises
    ------
    ValueError
        A name is unknown.
    """
    found: list[Training] = []
    for name in names:
        if name == "main":
            found += FAMILIES.values()
        elif name in FAMILIES:
            found.append(FAMILIES[name])
        elif name != "none":
            raise ValueError(f"families: expected main, none or {', '.join(FAMILIES)}, got {name}")
    return found
