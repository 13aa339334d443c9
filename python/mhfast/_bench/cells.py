"""The inputs of a cell of the map: what all implementations get."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from .grid import SHAPES, Cell, Kind, Sizes
from .problem import Array

# Steps of a training loop: so many that entering it does not count, and that it takes some ten
# milliseconds at most, by the operations of a step; of an identity, whose attention JAX computes
# before the first step, as many as of mhfast.
OPERATIONS = 1.5e9
LEAST_STEPS = 4

# Least steps of mhfast, which a step's share of is timed: `train` looks for a cheaper form of the
# problem first, and evaluates the records after the last step too.
OWN_STEPS = 100

# Of a classifier, and of a layer with one row: the gradient of its loss grows with the rows.
RATE = 0.05, 0.01

# Numbers of the Jacobian behind a tangent kernel, and rows of that of a layer, which has one for
# every output: samples are left out until there are no more.
KERNEL_NUMBERS, KERNEL_ROWS = 2**25, 1024


@dataclass(frozen=True)
class CellProblem:
    """Tokens X (n,T,d), targets y, parameters by name, and what operations need beside; one dtype.

    With runs X, y, the query and everything that has the shape of parameters or outputs have a
    leading R.  `query` (n,q,d) is None unless it is external, `lengths` (n,) unless samples have
    different ones.  `cotangent` has the shape of outputs, `tangent` and `direction` those of the
    parameters, `groups` (n,T) is the group, 0 or 1, of each token.
    """

    cell: Cell
    sizes: Sizes
    X: Array
    y: Array
    theta: dict[str, Array]
    query: Array | None
    lengths: Array | None
    cotangent: Array
    tangent: dict[str, Array]
    direction: dict[str, Array]
    groups: Array
    steps: int

    @property
    def kind(self) -> Kind:
        """What the model is."""
        return self.cell.kind

    @property
    def described(self) -> str:
        """The sizes n,T,d,H, of several runs with their number."""
        n, T, d = self.X.shape[-3:]
        several = f"{self.sizes.runs} x " if self.sizes.runs else ""
        return f"{several}{n},{T},{d},{self.sizes.H}"

    @property
    def last(self) -> bool:
        """Whether the query is the last token of each sample."""
        return self.sizes.q == 1 and self.query is None and not self.kind.prompt

    @property
    def wrt(self) -> tuple[str, ...]:
        """What the operation differentiates by."""
        parameters = tuple(self.theta)
        match self.cell.operation:
            case "gradient-W":
                return tuple(name for name in parameters if name in "WQK")
            case "gradient-readout":
                return ("A", "B") if self.kind.factors else (self.kind.readout,)
            case "gradient-X":
                return ("X",)
            case "gradient-query":
                return ("query",)
            case "gradient-everything":
                return (*parameters, "X")
        return parameters

    @property
    def rate(self) -> float:
        """The step size, at which training converges."""
        return RATE[0] if self.kind.readout == "U" else RATE[1] / self.y.shape[-2]

    @property
    def trains(self) -> bool:
        """Whether the operation is a step of training; `steps` of them are one call."""
        return self.cell.operation.startswith("step")

    @property
    def record(self) -> str | None:
        """What a step records beside the loss."""
        _, _, name = self.cell.operation.partition("step-")
        return name or None


def draw_cell(cell: Cell, sizes: Sizes | None = None) -> CellProblem:
    """Draw a problem whose logits and outputs are of order one, the same on every call."""
    sizes = sizes or SHAPES[cell.shape]
    kind = cell.kind
    random = np.random.default_rng(zlib.crc32(str(cell).encode()))
    n, T, d, H, p, r = sizes.n, sizes.T, sizes.d, sizes.H, sizes.p, sizes.r
    q = T if sizes.q is None else sizes.q
    if kind.prompt:
        q = sizes.prompt_rows
    if cell.operation == "ntk":
        rows = q * p if kind.readout == "V" else 1
        most = min(KERNEL_ROWS, KERNEL_NUMBERS // (H * d * (d + p)))
        n = max(1, min(n, sizes.kernel_samples, most // rows))
    lead = (sizes.runs,) if sizes.runs else ()

    def normal(*shape: int, std: float = 1.0) -> Array:
        return (std * random.standard_normal(lead + shape)).astype(cell.dtype)

    def parameters() -> dict[str, Array]:
        found = {}
        if kind.W == "dense":
            found["W"] = normal(H, d, d, std=1 / d)
        elif kind.W != "identity":
            for name in "Q" if kind.W == "tied" else "QK":
                found[name] = normal(H, d, r, std=(d * r**0.5) ** -0.5)
        if kind.readout == "U":
            found["U"] = normal(H, q, d, std=(q * d) ** -0.5)
        elif kind.factors:
            found["A"] = normal(H, d, r, std=(H * d) ** -0.5)
            found["B"] = normal(H, r, p, std=r**-0.5)
        else:
            found["V"] = normal(H, d, p, std=(H * d) ** -0.5)
        if kind.prompt:
            found["prompt"] = normal(q, d)
        return found

    theta, tangent, direction = parameters(), parameters(), parameters()
    # Tokens of an identity are smaller, so that logits Z Xᵀ are of order one.
    X = normal(n, T, d, std=d**-0.25 if kind.W == "identity" else 1.0)
    outputs = (n,) if kind.readout == "U" else (n, q, p)
    y = np.sign(normal(*outputs))
    lengths = random.integers(1 + T // 2, T + 1, n) if kind.lengths else None
    query = normal(n, q, d) if cell.operation == "gradient-query" else None
    groups = random.integers(2, size=(n, T))
    least = min(OWN_STEPS, sizes.most_steps) if kind.W == "identity" else LEAST_STEPS
    steps = int(np.clip(OPERATIONS // _operations(kind, sizes, n, q), least, sizes.most_steps))
    return CellProblem(
        cell,
        sizes,
        X,
        y,
        theta,
        query,
        lengths,
        normal(*outputs),
        tangent,
        direction,
        groups,
        steps,
    )


def _operations(kind: Kind, sizes: Sizes, n: int, q: int) -> int:
    """Return about how many operations a step of training takes, n samples of q rows."""
    T, d, H = sizes.T, sizes.d, sizes.H
    of_row = {"dense": 4 * d**2, "identity": 0}.get(kind.W, 8 * d * sizes.r)
    with_W = q if kind.prompt else n * q
    return max(1, sizes.runs) * H * (with_W * of_row + n * q * 8 * T * d)
