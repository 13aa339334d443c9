"""What JAX asks of the host: outputs, gradients and their derivatives, computed from arrays.

With f the outputs as a function x of all arrays, directions d_1 ... d_k and a cotangent c, a `Call`
is one of

    D^k f(x)[d_1, ..., d_k]            ∇ ⟨c, D^k f(x)[d_1, ..., d_k]⟩

so that derivatives and transposes of calls are calls. Derivatives of f up to the second are known:
k is at most 2, with a cotangent at most 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..._arguments.names import AttentionName
from ..._arguments.values import Array
from ...gradients import backward
from ...models import Classifier, Layer
from ..borrowed import borrowed
from ..tangents import directional, second

Shape = tuple[int, ...]

LETTERS = {
    "X": "n T d", "W": "H d d", "U": "H q d", "V": "H d p",
    "query": "n q d", "prompt": "q d", "lengths": "n",
}  # fmt: skip
"""The axes of each array without those that vmap adds."""


@dataclass(frozen=True)
class Call:
    """A call without its arrays.

    Parameters
    ----------
    names : tuple of str
        The arrays x, in their order.
    directions : tuple of tuples of str
        For each direction the arrays that move along it, in their order.
    wanted : tuple of str
        The arrays by which there is a gradient; empty without a cotangent.
    """

    is_layer: bool
    names: tuple[str, ...]
    query: int | None
    scale: float
    causal: bool
    attention: AttentionName
    normalize: bool | None
    num_threads: int | None
    directions: tuple[tuple[str, ...], ...] = ()
    wanted: tuple[str, ...] = ()

    @property
    def order(self) -> int:
        """How often f is differentiated."""
        return len(self.directions) + bool(self.wanted)

    @cached_property
    def operands(self) -> tuple[tuple[str | int, str], ...]:
        """What each operand is: the group "arrays", the number of a direction or "cotangent"."""
        given: list[tuple[str | int, str]] = [("arrays", name) for name in self.names]
        for k, names in enumerate(self.directions):
            given += [(k, name) for name in names]
        return (*given, *([("cotangent", "outputs")] if self.wanted else []))

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The number of axes of each operand, without those that vmap adds."""
        return tuple(self.axes_of(name) for _, name in self.operands)

    def axes_of(self, name: str) -> int:
        """Return the number of axes of an array or the outputs, without those that vmap adds."""
        if name == "outputs":
            return 3 if self.is_layer else 1
        return len(LETTERS[name].split())

    def lead(self, shapes: Sequence[Shape]) -> Shape:
        """Return the axes that vmap has added, of which operands that it does not map have 1."""
        added = (shape[: len(shape) - own] for shape, own in zip(shapes, self.axes, strict=True))
        return np.broadcast_shapes(*added)

    def results(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of the results from those of the operands."""
        lead = self.lead(shapes)
        own = {
            name: tuple(shapes[i][-self.axes_of(name) :]) for i, name in enumerate(self.names)
        }  # fmt: skip
        if self.wanted:
            return [lead + own[name] for name in self.wanted]
        n = own["X"][0]
        if not self.is_layer:
            return [(*lead, n)]
        asking = next(own[name] for name in ("prompt", "query", "X") if name in own)
        return [(*lead, n, 1 if self.query is not None else asking[-2], own["V"][-1])]

    @property
    def text(self) -> str:
        """The call as text, which a compiled computation can hold."""
        return json.dumps(asdict(self))

    def compute(self, operands: Sequence[Array]) -> Sequence[Array]:
        """Compute the results, of the shapes of `results`."""
        if all(array.ndim == own for array, own in zip(operands, self.axes, strict=True)):
            return self._of_runs(operands)
        shapes = [array.shape for array in operands]
        lead, results = self.lead(shapes), self.results(shapes)
        if 0 in lead:
            return [np.zeros(shape) for shape in results]
        pairs = zip(operands, self.axes, strict=True)
        found = self._of_runs([self._with_runs(*pair, lead) for pair in pairs])
        return [array.reshape(shape) for array, shape in zip(found, results, strict=True)]

    @staticmethod
    def _with_runs(array: Array, own: int, lead: Shape) -> Array:
        """Make one run axis of the axes that vmap has added, none if it does not map the array."""
        added, shape = array.shape[: array.ndim - own], array.shape[array.ndim - own :]
        if all(length == 1 for length in added):
            return array.reshape(shape)
        return np.broadcast_to(array, lead + shape).reshape(math.prod(lead), *shape)

    def _of_runs(self, operands: Sequence[Array]) -> Sequence[Array]:
        given = iter(operands)
        arrays, *along = (
            {name: next(given) for name in names} for names in (self.names, *self.directions)
        )
        model, X = self._model(arrays), arrays["X"]
        query, lengths = arrays.get("query"), arrays.get("lengths")
        if not self.wanted:
            if not along:
                return [model(X, query=query, lengths=lengths, num_threads=self.num_threads)]
            if len(along) == 1:
                return [directional(model, X, along[0], query=query, lengths=lengths)[0]]
            return [second(model, X, *along, query=query, lengths=lengths)]
        cotangent = next(given)
        if along:
            _, gradients = directional(model, X, along[0], cotangent, query=query, lengths=lengths)
            return [gradients[name] for name in self.wanted]
        found = backward(
            model, X, cotangent, wrt=self.wanted, query=query, lengths=lengths,
            num_threads=self.num_threads,
        )  # fmt: skip
        return [getattr(found, name) for name in self.wanted]

    def _model(self, arrays: Mapping[str, Array]) -> Any:
        kind = Layer if self.is_layer else Classifier
        own = {n: a for n, a in arrays.items() if n not in ("X", "query", "lengths")}
        return borrowed(
            kind, own, self.query, self.scale, self.causal, self.attention, self.normalize
        )


@lru_cache(maxsize=256)
def read(text: str) -> Call:
    """Return the call of a `Call.text`."""
    fields = json.loads(text)
    fields |= {name: tuple(fields[name]) for name in ("names", "wanted")}
    return Call(**fields | {"directions": tuple(tuple(names) for names in fields["directions"])})


def serve(text: str, operands: Sequence[Array], results: Sequence[Array]) -> None:
    """Compute a call from arrays, and into arrays, that are XLA's own."""
    for result, found in zip(results, read(text).compute(operands), strict=True):
        result[...] = found
