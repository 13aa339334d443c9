"""Problems in the form of the core, and what the reference says about them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mhfast import _core, reference
from mhfast._arguments.lists import AXES, LOSSES, PARAMETERS, TARGETS

PLANS = ("samples", "hybrid", "rows", "tiles")  # of a single run
LAYER_PLANS = ("samples", "hybrid", "rows")

# Relative errors (max|a-b| / max|b|) allowed against the float64 reference: about a hundred
# roundings of the type. Most come from C[s] - C[m] with two or three keys, where readouts nearly
# cancel.
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}

SOFTMAX = _core.RowMap(_core.RowMapName.softmax)
NAMES = tuple(AXES)  # in the order of the bits of wrt


@dataclass(frozen=True, eq=False)
class Problem:
    """A model and its samples: fields as in `_core.pyi`, None for what there is not.

    `runs` 0 means that no array has a run axis.
    """

    X: Any
    W: Any
    y: Any = None
    Z: Any = None
    U: Any = None
    V: Any = None
    prompt: Any = None
    weight: Any = None
    lengths: Any = None
    runs: int = 0
    causal: bool = False
    loss: str = "logistic"

    @property
    def model(self) -> tuple[Any, ...]:
        """What every function of the core takes first."""
        data = (self.X, self.Z, self.y, self.weight, self.lengths)
        return data, tuple(getattr(self, name, None) for name in PARAMETERS)

    def options(self, threads: int = 0) -> dict[str, Any]:
        """What every function of the core takes by name."""
        return {
            "runs": self.runs,
            "scale": 1.0,
            "causal": self.causal,
            "row_map": SOFTMAX,
            "threads": threads,
        }

    def outputs(self, threads: int = 0) -> Any:
        data, parameters = self.model
        return _core.outputs((*data[:2], None, None, data[4]), parameters, **self.options(threads))

    def attention(self, threads: int = 0) -> Any:
        data, parameters = self.model
        samples = (*data[:2], None, None, data[4])
        return _core.attention(samples, parameters, **self.options(threads))

    def value_and_grad(self, threads: int = 0) -> tuple[Any, dict[str, Any]]:
        """The loss, and its gradients by all that it depends on."""
        bits = sum(1 << j for j, name in enumerate(NAMES) if name in self.names())
        value, gradients = _core.value_and_grad(
            *self.model, **self.options(threads), loss=LOSSES[self.loss], wrt=bits
        )
        found = zip(NAMES, gradients, strict=True)
        return value, {name: g for name, g in found if g is not None}

    def hvp(self, tangent: dict[str, Any]) -> dict[str, Any]:
        """The Hessian of the loss times a direction, by parameter."""
        bits = sum(1 << j for j, name in enumerate(PARAMETERS) if name in self.names())
        moves = tuple(map(tangent.get, PARAMETERS))
        products = _core.hvp(*self.model, moves, **self.options(), loss=LOSSES[self.loss], wrt=bits)
        return dict(zip(PARAMETERS, products, strict=True))

    def names(self) -> list[str]:
        parts = {"W": self.W, "U": self.U, "V": self.V, "prompt": self.prompt, "query": self.Z}
        return ["X", *(name for name, part in parts.items() if part is not None)]

    def reference(self) -> tuple[Any, Any]:
        """The model and the options by which `mhfast.reference` sees the same problem."""
        parameters = {"W": self.W, "U": self.U, "V": self.V, "prompt": self.prompt}
        exact = {n: reference.model.double(a) for n, a in parameters.items() if a is not None}
        options = {"query": self.Z, "lengths": self.lengths}
        return reference.Model(**exact, causal=self.causal), options

    @functools.cached_property
    def expected(self) -> tuple[Any, dict[str, Any]]:
        """What `value_and_grad` gives by the reference."""
        model, options = self.reference()
        return reference.value_and_grad(
            model, self.X, self.y, loss=self.loss, weight=self.weight, wrt=self.names(), **options
        )

    def part(self, start: int, stop: int) -> Problem:
        """The problem of some of the samples, without a run axis."""
        names = ("X", "Z", "y", "weight", "lengths")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{n: a if a is None else a[start:stop] for n, a in given.items()})


@functools.cache
def problem(
    n: int = 3,
    tokens: int = 4,
    rows: int | None = None,
    dim: int = 5,
    heads: int = 2,
    outputs: int = 0,
    *,
    runs: int = 0,
    shared: str = "",
    prompt: bool = False,
    masks: str = "",
    loss: str = "logistic",
    dtype: Any = np.float64,
    seed: int = 0,
) -> Problem:
    """Draw a problem with logits of order one; the same arguments give the same object.

    `rows` None: self-attention. `outputs` 0: a classifier. `shared` names arrays that all runs
    share. `masks` may hold the words lengths and causal.
    """
    rng = np.random.default_rng(seed)

    def normal(name: str, *shape: int) -> Any:
        lead = (runs,) if runs and name not in shared else ()
        return rng.standard_normal(lead + shape)

    q = tokens if rows is None else rows
    arrays = {"X": normal("X", n, tokens, dim), "W": normal("W", heads, dim, dim) / dim}
    if rows is not None:
        arrays |= {"prompt": normal("prompt", q, dim)} if prompt else {"Z": normal("Z", n, q, dim)}
    if outputs:
        arrays["V"] = normal("V", heads, dim, outputs) / np.sqrt(dim)
        target = normal("y", n, q, outputs)
        arrays["weight"] = np.abs(normal("weight", n, q)) + 0.1
    else:
        arrays["U"] = normal("U", heads, q, dim)
        target = normal("y", n)
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    if TARGETS[loss] == "classes":
        arrays["y"] = rng.integers(0, outputs, target.shape[:-1])
    elif TARGETS[loss] == "probabilities":
        odds = np.exp(target)
        arrays["y"] = (odds / odds.sum(axis=-1, keepdims=True)).astype(dtype)
    else:
        signs = np.where(target < 0, -1, 1)
        arrays["y"] = (target if TARGETS[loss] == "reals" else signs).astype(dtype)
    if "lengths" in masks:
        lead = (runs,) if runs and "lengths" not in shared else ()
        lengths = rng.integers(0, tokens + 1, (*lead, n))
        lengths[..., -1] = tokens  # one row at least must count
        seen = np.arange(tokens) < lengths[..., None]
        arrays["X"] = np.ascontiguousarray(arrays["X"] * seen[..., None].astype(dtype))
        arrays["lengths"] = lengths
    return Problem(**arrays, runs=runs, causal="causal" in masks, loss=loss)


REGISTER = {"baseline": 16, "neon": 16, "avx2": 32, "avx512": 64}  # bytes


def lengths(dtype: Any) -> range:
    """From 1 to beyond two registers of the active instruction set, and two tiles of rows."""
    lanes = REGISTER[_core.active_isa()] // np.dtype(dtype).itemsize
    return range(1, max(2 * lanes + 3, 10))


def relative(result: Any, exact: Any) -> float:
    return float(np.abs(result - exact).max() / max(np.abs(exact).max(), 1e-300))


def outputs_of(the: Problem) -> Any:
    model, options = the.reference()
    return reference.outputs(model, the.X, **options)


def attention_of(the: Problem) -> Any:
    model, options = the.reference()
    return reference.attention(model, the.X, **options)


def check(the: Problem, tolerance: float) -> None:
    """Compare loss and gradients with the reference."""
    value, gradients = the.value_and_grad()
    expected, exact = the.expected
    assert np.abs(value - expected).max() <= tolerance * np.abs(expected).max()
    assert gradients.keys() == exact.keys()
    for name, true in exact.items():
        assert gradients[name].dtype == the.X.dtype
        assert gradients[name].shape == true.shape
        if the.X.shape[-2] == 1 and name in ("W", "query", "prompt"):
            assert not gradients[name].any(), name  # one key: the weights cannot move
        else:
            assert relative(gradients[name], true) <= tolerance, name
