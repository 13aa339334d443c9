"""Layers one after the other: x_0 = X or E[X], and x_{l+1} from x_l and F_l(x_l), see `joined`.

A. Vaswani et al., "Attention Is All You Need" (NeurIPS 2017) add the rows of a layer to what it was
given; E. Nichani, A. Damian, J. D. Lee, "How Transformers Learn Causal Structure with Gradient
Descent" (ICML 2024) put them beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .attention import outputs
from .gradients import Gradient, backward
from .losses import Loss, loss_terms, loss_weights, real_targets
from .model import Array, Model, double, inputs


def joined(x: Array, rows: Array, residual: Any) -> Array:
    """X + rows, or [x, rows] for "concatenate", or rows alone for False."""
    if residual == "concatenate":
        return np.concatenate([x, rows], axis=-1)
    return x + rows if residual else rows


def residuals(stack: Any) -> list[Any]:
    """Return what is done with the rows of each layer."""
    one = isinstance(stack.residual, bool | str)
    return [stack.residual] * len(stack.layers) if one else list(stack.residual)


def stack_outputs(stack: Any, X: ArrayLike, *, lengths: ArrayLike | None = None) -> list[Array]:
    """x_0, ..., x_L of a `mhfast.Stack`, or of anything with its fields.

    X are tokens (n, T, d), or with an embedding words (n, T). Rows beyond lengths (n,) are 0.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X = np.random.default_rng(0).standard_normal((20, 5, 9))
    >>> stack = mh.Stack([mh.Layer.gaussian(3, 9, 9, std=0.5, seed=j) for j in range(2)])
    >>> states = mh.reference.stack_outputs(stack, X)
    >>> bool(abs(states[-1] - stack(X)).max() < 1e-12)
    True
    """
    tokens = X if stack.embedding is None else double(stack.embedding)[np.asarray(X)]
    x = inputs(Model.of(stack.layers[0]), tokens, None, lengths).X
    states = [x]
    for layer, residual in zip(stack.layers, residuals(stack), strict=True):
        states.append(joined(states[-1], outputs(layer, states[-1], lengths=lengths), residual))
    return states


def stack_value_and_grad(
    stack: Any,
    X: ArrayLike,
    y: ArrayLike,
    *,
    loss: Loss = "logistic",
    weight: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
) -> tuple[float, Gradient]:
    """Compute the loss of x_L and its gradients by "0.W", "0.V", ..., and X or the embedding.

    Backwards, with G the derivative by x_{l+1} and G_F its part that belongs to F_l:
    the gradients of Σ G_F · F_l(x_l), and by x_l the part of G that belongs to x_l besides.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> X, y = rng.standard_normal((20, 5, 9)), rng.standard_normal((20, 5, 9))
    >>> stack = mh.Stack([mh.Layer.gaussian(3, 9, 9, std=0.5, seed=j) for j in range(2)])
    >>> exact, g = mh.reference.stack_value_and_grad(stack, X, y, loss="squared")
    >>> value, gradients = mh.value_and_grad(stack, X, y, loss="squared")
    >>> close = abs(gradients.layers[0].W - g["0.W"]).max() < 1e-10 * abs(g["0.W"]).max()
    >>> abs(value - exact) < 1e-10 * exact, bool(close)
    (True, True)
    """
    states = stack_outputs(stack, X, lengths=lengths)
    last = Model.of(stack.layers[-1])
    data = inputs(last, states[-2], None, lengths)
    factors = loss_weights(data, states[-1], weight, loss)
    values, slopes, _ = loss_terms(states[-1], real_targets(data, y), loss)
    G = double(factors * slopes)
    found: Gradient = {}
    layers = list(zip(stack.layers, residuals(stack), states, strict=False))
    for j, (layer, residual, x) in reversed(list(enumerate(layers))):
        d = x.shape[-1]
        of_rows = G[..., d:] if residual == "concatenate" else G
        names = (*Model.of(layer).parameters(), "X")
        own = backward(layer, x, of_rows, wrt=names, lengths=lengths)
        dx = own.pop("X")
        found |= {f"{j}.{name}": array for name, array in own.items()}
        G = dx + G[..., :d] if residual else dx  # all of it where rows are added
    value = float((factors * values).sum())
    if stack.embedding is None:
        return value, found | {"X": G}
    by_words = np.zeros(np.shape(stack.embedding))
    np.add.at(by_words, np.asarray(X), G)
    return value, found | {"embedding": by_words}
