"""The grid of the map: operations, models, shape classes, dtypes, and the cells that are measured.

The whole grid would take hours.  `design` chooses cells so that every pair of levels of two
different axes occurs in one of them (a covering design of strength two), as far as the pair is
possible: each operation on each model, on each shape class and in each dtype, each model in each
shape class and dtype, and each shape class in each dtype.  It is greedy and deterministic.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

DTYPES = ("float32", "float64")

RECORDS = (
    "accuracy", "margin", "grad_norm", "param_norm", "distance", "cosine", "snapshot",
    "attention", "attention_max", "attention_groups",
)  # fmt: skip
"""What a training step records; "snapshot" is the readout, U, V or the A of its factors."""

BRIDGES = ("torch", "jax", "sklearn")

OPERATIONS: dict[str, str] = {
    "forward": "outputs",
    "attention": "attention weights",
    "gradient": "loss and gradient by all parameters",
    "gradient-W": "loss and gradient by W, or by its factors",
    "gradient-readout": "loss and gradient by U or V, or by its factors",
    "gradient-X": "loss and gradient by X",
    "gradient-query": "loss and gradient by an external query",
    "gradient-everything": "loss and gradient by all parameters and X",
    "backward": "gradient by all parameters, given that by the outputs",
    "hvp": "product of the Hessian with a direction of all parameters",
    "ntk": "tangent kernel of all parameters",
    "step": "a step of gradient descent, the loss recorded",
    **{f"step-{name}": f"a step, {name} recorded too" for name in RECORDS},
    **{f"predict-{name}": f"outputs through the bridge to {name}" for name in BRIDGES},
}


@dataclass(frozen=True)
class Kind:
    """What a model is: its form of W (dense, low rank, tied or identity), and what it has.

    `factors`: the V of a layer is a product A B.
    """

    readout: str  # "U" of a classifier, "V" of a layer
    W: str = "dense"
    factors: bool = False
    prompt: bool = False
    causal: bool = False
    lengths: bool = False


MODELS: dict[str, Kind] = {
    "classifier": Kind("U"),
    "layer": Kind("V"),
    "low-rank": Kind("U", W="low rank"),
    "tied": Kind("V", W="tied"),
    "identity": Kind("U", W="identity"),
    "value-output": Kind("V", factors=True),
    "prompt": Kind("U", prompt=True),
    "causal": Kind("V", causal=True),
    "causal-classifier": Kind("U", causal=True),
    "lengths": Kind("U", lengths=True),
    "lengths-layer": Kind("V", lengths=True),
}


@dataclass(frozen=True)
class Sizes:
    """Samples n, tokens T, dimension d, heads H, outputs p of layers, rank r of factors, rows q.

    q is 1 or, where that is None, the number of tokens; prompts then have `prompt_rows`.  `runs` is
    0 without a run axis.  Tangent kernels are of `kernel_samples` samples, those of layers, which
    have a row for every output, of fewer.  Training takes at most `most_steps`.
    """

    n: int
    T: int
    d: int
    H: int
    p: int
    r: int
    q: int | None = None
    runs: int = 0
    prompt_rows: int = 2
    kernel_samples: int = 100
    most_steps: int = 1000


SHAPES: dict[str, Sizes] = {
    "tiny": Sizes(6, 4, 5, 2, p=3, r=2),
    "samples": Sizes(2000, 8, 16, 4, p=5, r=3),
    "long": Sizes(2, 512, 64, 3, p=4, r=8, prompt_rows=16),
    "wide": Sizes(60, 4, 512, 2, p=8, r=6),
    "heads": Sizes(48, 8, 20, 64, p=5, r=3, kernel_samples=48),
    "query": Sizes(500, 32, 24, 4, p=5, r=3, q=1, prompt_rows=1),
    "runs": Sizes(20, 8, 10, 2, p=3, r=4, runs=30, kernel_samples=20),
}

TINY: dict[str, Sizes] = {
    name: Sizes(
        n=6, T=4, d=5, H=3, p=2, r=2, q=sizes.q, runs=2 * bool(sizes.runs),
        prompt_rows=1, kernel_samples=6, most_steps=20,
    )
    for name, sizes in SHAPES.items()
}  # fmt: skip
"""The shape classes at sizes at which a cell takes no time, for tests."""


@dataclass(frozen=True)
class Cell:
    """An operation on a model of a shape class, in a dtype."""

    operation: str
    model: str
    shape: str
    dtype: str

    def __str__(self) -> str:
        return "/".join(self.levels)

    @property
    def levels(self) -> tuple[str, str, str, str]:
        """The level on each axis."""
        return self.operation, self.model, self.shape, self.dtype

    @property
    def kind(self) -> Kind:
        """What the model is."""
        return MODELS[self.model]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The six pairs of levels that the cell covers."""
        return list(itertools.combinations(self.levels, 2))


def parse_cell(text: str) -> Cell:
    """Read "operation/model/shape/dtype".

    Raises
    ------
    ValueError
        A level is unknown, or there is no such cell.
    """
    parts = text.split("/")
    if len(parts) != 4:
        raise ValueError(f"cell: expected operation/model/shape/dtype, got {text!r}")
    for name, part, known in zip(
        ("operation", "model", "shape", "dtype"), parts, AXES, strict=True
    ):
        if part not in known:
            raise ValueError(f"cell: expected {name} {', '.join(known)}, got {part!r}")
    cell = Cell(*parts)
    if not possible(cell):
        raise ValueError(f"cell: there is no {cell.operation} of {cell.model}, {cell.shape}")
    return cell


AXES: tuple[Sequence[str], ...] = (tuple(OPERATIONS), tuple(MODELS), tuple(SHAPES), DTYPES)


def possible(cell: Cell) -> bool:
    """Whether the operation exists.

    An identity has no gradient by W, a prompt is no external query, and a causal row of an external
    query of one row sees a single token, so that its gradient is zero.  `theory.ntk` has no layer
    with factors.  Predictions through
    scikit-learn are those of a classifier without anything else, one model at a time.
    """
    kind = cell.kind
    match cell.operation:
        case "gradient-W":
            return kind.W != "identity"
        case "gradient-query":
            return not kind.prompt and not (kind.causal and SHAPES[cell.shape].q == 1)
        case "ntk":
            return kind.readout == "U" or (kind.W == "dense" and not kind.factors)
        case "predict-sklearn":
            return cell.model == "classifier" and not SHAPES[cell.shape].runs
    return True


def design(
    operations: Sequence[str] = AXES[0],
    models: Sequence[str] = AXES[1],
    shapes: Sequence[str] = AXES[2],
    dtypes: Sequence[str] = AXES[3],
) -> list[Cell]:
    """Return cells in which every possible pair of levels occurs.

    Each operation meets each model once, with the shape class and dtype that cover most pairs that
    did not occur yet, of equal ones those that are rarest so far.  What is left then gets a cell of
    its own.
    """
    every = itertools.starmap(Cell, itertools.product(operations, models, shapes, dtypes))
    grid = [cell for cell in every if possible(cell)]
    missing = {pair for cell in grid for pair in cell.pairs}
    used: Counter[tuple[str, str]] = Counter()
    chosen: list[Cell] = []

    def take(candidates: Sequence[Cell]) -> None:
        best = max(candidates, key=lambda cell: _gain(cell, missing, used))
        chosen.append(best)
        missing.difference_update(best.pairs)
        used.update(best.pairs)

    by_pair: dict[tuple[str, str], list[Cell]] = {}
    for cell in grid:
        by_pair.setdefault((cell.operation, cell.model), []).append(cell)
    for candidates in by_pair.values():
        take(candidates)
    while missing:
        take([cell for cell in grid if missing.intersection(cell.pairs)])
    return chosen


def sample(cells: Sequence[Cell]) -> set[Cell]:
    """Return some of the cells, with every level of every axis.

    Every shape class is there with every kind of readout, and in every dtype.
    """
    left = list(cells)
    missing = {level for cell in cells for level in _levels(cell)}
    found: set[Cell] = set()
    while missing:
        best = max(left, key=lambda cell: len(missing.intersection(_levels(cell))))
        found.add(best)
        left.remove(best)
        missing.difference_update(_levels(best))
    return found


def _levels(cell: Cell) -> set[str]:
    return {*cell.levels, f"{cell.shape} {cell.kind.readout}", f"{cell.shape} {cell.dtype}"}


def _gain(
    cell: Cell, missing: set[tuple[str, str]], used: Counter[tuple[str, str]]
) -> tuple[int, int]:
    return len(missing.intersection(cell.pairs)), -sum(used[pair] for pair in cell.pairs)
