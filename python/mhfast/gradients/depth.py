"""Gradients of a `Stack`: the chain rule from layer to layer, each by its own call of the core.

    dL/dx_l = dL/dx_{l+1} + ∂F_l                 rows that are added
    dL/dx_l = dL/dx_{l+1}[.., :d_l] + ∂F_l       rows that are joined, G = dL/dx_{l+1}[.., d_l:]
    dL/dx_l = ∂F_l                               rows in place of x_l

with ∂F_l the gradient of Σ G · F_l(x_l) by x_l, and G = dL/dx_{l+1} unless it is said. Every x_l is
kept from the way forward, attention weights are not. Where x_0 are words of an embedding, the first
layer looks up scores of pairs of words, and ∂F_0 is the gradient by the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.checks import Wrt
from .._arguments.losses import Loss
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..dataset.words import Tokens
from ..models import Stack, depth_parameters, depth_samples
from ..models import problem as arguments
from ..models.depth_samples import Lengths
from . import single
from .record import Gradients


def of_loss(
    stack: Stack,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None,
    loss: Loss,
    wrt: Wrt,
    weight: npt.ArrayLike | None,
    lengths: npt.ArrayLike | None,
    num_threads: int | None,
) -> tuple[float, Gradients]:
    """Return what `mhfast.value_and_grad` does."""
    X, y, weight, lengths = depth_samples.labelled(X, y, weight, lengths)
    loss = arguments.loss(stack, loss, y)
    names = depth_parameters.wrt(stack, wrt, inputs=True)
    x, visible = depth_samples.samples(stack, X, lengths)
    reads_out = stack._residuals[-1] is False
    states = _forward(stack, x, visible, num_threads, stack.depth - reads_out)
    end = depth_samples.end_of(stack, states[-1], y, loss, weight, visible)
    lowest = _lowest(stack, names)
    found: dict[str, Array] = {}
    own = _of_layer(names, stack.depth - 1) if reads_out else ()
    goes_on = lowest < stack.depth - reads_out
    of_input = _of_input(end.X) if goes_on else ()
    value, g = single.of_loss(
        end.layer, end.X, end.y, loss, (*own, *of_input), None, end.weight, end.lengths,
        num_threads,
    )  # fmt: skip
    g = g if end.factor == 1.0 else end.factor * g
    found |= {f"{stack.depth - 1}.{name}": getattr(g, name) for name in own}
    if goes_on and isinstance(end.X, Tokens):
        found["embedding"] = g.embedding
    elif goes_on:
        back = g.X.reshape(states[-1].shape)
        _backward(stack, states, back, visible, names, lowest, found, num_threads)
    return end.factor * float(value), _gradients(stack, names, found)


def of_outputs(
    stack: Stack,
    X: npt.ArrayLike | Dataset,
    cotangent: npt.ArrayLike,
    wrt: Wrt,
    lengths: npt.ArrayLike | None,
    num_threads: int | None,
) -> Gradients:
    """Return what `mhfast.backward` does."""
    if cotangent is None:
        raise TypeError("cotangent: expected an array of the shape of the outputs, got None")
    names = depth_parameters.wrt(stack, wrt, inputs=True)
    x, visible = depth_samples.samples(stack, X, lengths)
    back = checks.real(cotangent, "cotangent", stack.dtype)
    rows = x.shape[1] if stack.layers[-1].query is None else 1
    checks.shape(back, "cotangent", "n q p", (len(x), rows, stack.out_dim))
    if visible is not None and stack.layers[-1].query is None:
        back = np.where((np.arange(rows) < visible[:, None])[..., None], back, back.dtype.type(0))
    states = _forward(stack, x, visible, num_threads, stack.depth - 1)
    found: dict[str, Array] = {}
    lowest = _lowest(stack, names)
    # _backward begins with the last state: the output, whose numbers it does not need.
    _backward(stack, [*states, x], back, visible, names, lowest, found, num_threads)
    return _gradients(stack, names, found)


def _forward(
    stack: Stack, x: Array | Tokens, lengths: Lengths, num_threads: int | None, count: int
) -> list[Array | Tokens]:
    """Return x_0, ..., x_count."""
    states = [x]
    for j in range(count):
        states.append(depth_samples.after(stack, j, states[-1], lengths, num_threads))
    return states


def _backward(
    stack: Stack,
    states: Sequence[Array | Tokens],
    back: Array,
    lengths: Lengths,
    names: Sequence[str],
    lowest: int,
    found: dict[str, Array],
    num_threads: int | None,
) -> None:
    """Go from the gradient by the last of `states` to layer `lowest`, or to x_0 where it is -1."""
    for j in reversed(range(max(lowest, 0), len(states) - 1)):
        x, layer, kind = states[j], stack.layers[j], stack._residuals[j]
        own = _of_layer(names, j)
        goes_on = j > lowest
        rows = back[..., layer.dim :] if kind == "concatenate" else back
        g = single.of_outputs(
            layer, x, rows, (*own, *_of_input(x)) if goes_on else own, None, lengths, num_threads
        )
        found |= {f"{j}.{name}": getattr(g, name) for name in own}
        if not goes_on:
            return
        beside = back[..., : layer.dim] if kind == "concatenate" else back
        if isinstance(x, Tokens):
            found["embedding"] = g.embedding
            if kind is not False:
                found["embedding"] = g.embedding + single.summed_by_word(beside, x)
            return
        back = g.X if kind is False else g.X + beside
    found["X"] = back


def _lowest(stack: Stack, names: Sequence[str]) -> int:
    """Return the first layer that has something to differentiate by, -1 for what it is given."""
    if "X" in names:
        return -1
    return min((depth_parameters.of_layer(name)[0] for name in names), default=stack.depth)


def _of_input(x: Array | Tokens) -> tuple[str]:
    """Return the name of what a layer is given."""
    return ("embedding" if isinstance(x, Tokens) else "X",)


def _of_layer(names: Sequence[str], j: int) -> tuple[str, ...]:
    pairs = map(depth_parameters.of_layer, names)
    return tuple(own for layer, own in pairs if layer == j)


def _gradients(stack: Stack, names: Sequence[str], found: dict[str, Array]) -> Gradients:
    own = depth_parameters.by_layer({name: found[name] for name in names})
    return Gradients(
        layers=tuple(Gradients(**own.get(j, {})) for j in range(stack.depth)),
        **{name: found[name] for name in ("X", "embedding") if name in names},
    )
