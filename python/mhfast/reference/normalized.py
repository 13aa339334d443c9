"""Gradients as mantissa and logarithm, for steps that divide by the gradient's norm.

A normalized step needs the direction of the gradient also where the gradient itself underflows:
saturated attention has weights such as exp(-1000), a well classified sample a loss derivative such
as exp(-2000).  Every gradient is a sum of terms that carry these two factors; here the largest
product of the two is taken out in the log domain, before anything is exponentiated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .attention import of_entries, read_out, scores
from .gradients import (
    Wrt,
    asked,
    balanced,
    centre,
    cotangent_of_attended,
    logit_gradient,
    matrix_gradient,
    query_gradient,
    readout_gradient,
    through_factors,
)
from .losses import Loss, loss_terms, loss_weights, real_targets
from .model import Array, Inputs, Model, Query, inputs
from .row_maps import ENTRIES, with_zero

Part: TypeAlias = tuple[str, int]


class Scaled(NamedTuple):
    """An array with one exponent per head: exp(log[h]) · mantissa[h]; mantissa (H,...), log (H,).

    The prompt, which has no heads, has a single one: mantissa (1,q,d), log (1,).
    """

    mantissa: Array
    log: Array


def scaled_gradients(
    model: Any,
    X: ArrayLike,
    y: ArrayLike,
    *,
    loss: Loss = "logistic",
    wrt: Wrt = None,
    query: Query = None,
    weight: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
) -> dict[str, Scaled]:
    """Gradients of `value_and_grad` in the parameters, free of underflow.

    With log A = S - logsumexp(S) and the cotangent G of a row split into its size and what is left,
    G_it = exp(log g_it) Ĝ_it, all gradients are sums of terms

        exp(log g_iq + log A_ihqs) · (a factor of ordinary size),

    for W, its factors and the prompt over the keys s other than the row's largest.  The largest
    exponent of a head, among the terms whose factor is not zero, becomes its `log`.  A head
    without such a term has gradient 0.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X, y = np.array([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]]), [1.0]
    >>> W, U = np.zeros((1, 3, 3)), np.array([[[0.0, 0.3, 0.7]]])
    >>> W[0, 0, 1] = 1000.0  # exp(-1000) underflows in float64
    >>> g = mh.reference.scaled_gradients(mh.Classifier(W, U, query=-1), X, y, loss="linear")["W"]
    >>> log_of_entry = g.log[0] + np.log(abs(g.mantissa[0, 0, 1]))
    >>> round(float(log_of_entry - np.log(0.4)), 6)
    -1000.0
    """
    model = Model.of(model)
    data = inputs(model, X, query, lengths)
    tokens, Z = data.X, data.Z
    if model.attention in ENTRIES:
        return _of_entries(model, data, y, loss, weight, wrt)
    S = scores(model, data)
    total = np.exp(S).sum(axis=-1, keepdims=True)
    log_A = S - np.log(np.where(total == 0.0, 1.0, total))
    A, T = np.exp(log_A), tokens.shape[1]
    G, log_g = _split_cotangent(data, read_out(model, tokens, A[..., -T:]), y, loss, weight)
    log_terms = log_g[:, None, :, None] + log_A

    C = logit_gradient(tokens, cotangent_of_attended(model, G))
    centred, m = centre(A, C if A.shape == C.shape else with_zero(C))
    factor = centred.copy()
    np.put_along_axis(factor, m, 0.0, axis=-1)
    terms, log_W = _factor_out(log_terms, factor * np.abs(Z).max(axis=-1)[:, None, :, None])
    D = balanced(terms, centred, m)[..., -T:]
    matrices = through_factors(model, matrix_gradient(model.scale, Z, D, tokens))

    terms, log_U = _factor_out(log_terms[..., -T:], np.abs(tokens).max(axis=-1)[:, None, None, :])
    readouts = readout_gradient(model, terms, tokens, G)

    found = {name: Scaled(part, log_W) for name, part in matrices.items()}
    found |= {name: Scaled(part, log_U) for name, part in readouts.items()}
    if model.prompt is not None:
        terms, log = _factor_out(log_terms, factor, by_head=False)
        D = balanced(terms, centred, m)[..., -T:]
        dZ = query_gradient(model.scale, D, tokens, model.dense())
        found["prompt"] = Scaled(dZ.sum(axis=0)[None], log)
    return {name: found[name] for name in asked(model, wrt, also=())}


def _of_entries(
    model: Model, data: Inputs, y: ArrayLike, loss: Loss, weight: ArrayLike | None, wrt: Wrt
) -> dict[str, Scaled]:
    """Take the sizes of the cotangents out: no weight is taken out of a map of entries."""
    tokens, A = data.X, of_entries(model, data, "value")
    G, log_g = _split_cotangent(data, read_out(model, tokens, A), y, loss, weight)
    logs = np.broadcast_to(log_g[:, None, :, None], A.shape)
    C = logit_gradient(tokens, cotangent_of_attended(model, G))
    D = of_entries(model, data, "derivative") * C
    terms, log_W = _factor_out(logs, D * np.abs(data.Z).max(axis=-1)[:, None, :, None])
    matrices = through_factors(model, matrix_gradient(model.scale, data.Z, terms * D, tokens))
    terms, log_U = _factor_out(logs, A * np.abs(tokens).max(axis=-1)[:, None, None, :])
    found = {name: Scaled(part, log_W) for name, part in matrices.items()}
    readouts = readout_gradient(model, terms * A, tokens, G)
    found |= {name: Scaled(part, log_U) for name, part in readouts.items()}
    if model.prompt is not None:
        terms, log = _factor_out(logs, D, by_head=False)
        dZ = query_gradient(model.scale, terms * D, tokens, model.dense())
        found["prompt"] = Scaled(dZ.sum(axis=0)[None], log)
    return {name: found[name] for name in asked(model, wrt, also=())}


def _split_cotangent(
    data: Inputs, F: Array, y: ArrayLike, loss: Loss, weight: ArrayLike | None
) -> tuple[Array, Array]:
    """Ĝ of the shape of F with entries of size up to 1, and log g (n,q), or (n,1) if F is (n,)."""
    _, loss_derivative, log_slope = loss_terms(F, real_targets(data, y), loss)
    with np.errstate(divide="ignore"):
        log_G = np.log(loss_weights(data, F, weight, loss)) + log_slope
    log_g = log_G[:, None] if F.ndim == 1 else log_G.max(axis=-1)
    size = np.where(log_g == -np.inf, 0.0, log_g)
    G = np.copysign(np.exp(log_G - size.reshape((*log_G.shape[:-1], -1))), loss_derivative)
    return G, log_g


def _factor_out(logs: Array, factor: Array, by_head: bool = True) -> tuple[Array, Array]:
    """exp(logs - largest), (n,H,q,T), 0 where factor is; and the largest by head (H,) or of all."""
    logs = np.where(factor == 0.0, -np.inf, logs)
    largest = logs.max(axis=(0, 2, 3) if by_head else None, keepdims=True)
    largest = np.where(largest == -np.inf, 0.0, largest)
    return np.exp(logs - largest), largest.ravel()


def add_decay(gradient: Scaled, l2: float, theta: Array) -> Scaled:
    """Add l2 · theta to a gradient whose mantissa is shaped like theta."""
    theta = theta.reshape(gradient.mantissa.shape)
    H = len(theta)
    with np.errstate(divide="ignore"):
        log_decay = np.log(l2 * np.abs(theta).reshape(H, -1).max(axis=1))
    log = np.where(log_decay > gradient.log, log_decay, gradient.log)
    column = (H,) + (1,) * (theta.ndim - 1)
    mantissa = gradient.mantissa * np.exp(gradient.log - log).reshape(column)
    return Scaled(mantissa + l2 * theta * np.exp(-log).reshape(column), log)


def norm(arrays: Iterable[Array], order: float = 2.0) -> float:
    """(Σ |a|^order)^(1/order) over all entries, of rescaled ones: their powers may underflow."""
    entries = np.abs(np.concatenate([np.ravel(a) for a in arrays]))
    largest = entries.max()
    if largest == 0.0 or not np.isfinite(largest):
        return float(largest)
    return float(largest * ((entries / largest) ** order).sum() ** (1.0 / order))


def normalized(
    gradients: dict[str, Scaled],
    by: str = "tensor",
    eps: float = 0.0,
    clip: float = np.inf,
    order: float = 2.0,
) -> dict[str, Array]:
    """Return g / (‖g‖ + eps), after clipping all of g to norm `clip`; zero where g is zero.

    `by` says over what norms are taken: every "tensor", every "head" of every tensor, or "all".
    """
    parts = [
        (name, h) for name, g in gradients.items() for h in range(len(g.log)) if g.mantissa[h].any()
    ]
    slack = eps
    if eps > 0.0 and clip < np.inf and parts:
        scaled, log = _common_exponent(gradients, parts)
        slack = eps * np.exp(max(0.0, log + np.log(norm(scaled.values())) - np.log(clip)))
    steps = {name: np.zeros_like(g.mantissa) for name, g in gradients.items()}
    for group in groups(parts, by):
        scaled, log = _common_exponent(gradients, group)
        with np.errstate(over="ignore"):
            length = norm(scaled.values(), order) + (slack * np.exp(-log) if slack > 0.0 else 0.0)
        for (name, h), part in scaled.items():
            steps[name][h] = part / length
    return steps


def groups(parts: list[Part], by: str) -> list[list[Part]]:
    """Group the parts (tensor, head) that share a norm."""
    if by == "all":
        return [parts] if parts else []
    if by == "head":
        return [[part] for part in parts]
    if by == "tensor":
        return [[p for p in parts if p[0] == name] for name in sorted({p[0] for p in parts})]
    raise ValueError(f"by: expected 'tensor', 'head' or 'all', got {by!r}")


def _common_exponent(
    gradients: dict[str, Scaled], parts: list[Part]
) -> tuple[dict[Part, Array], float]:
    """Divide the parts by exp(log), log the largest exponent among them; return log too."""
    log = max(float(gradients[name].log[h]) for name, h in parts)
    return {
        (name, h): gradients[name].mantissa[h] * np.exp(gradients[name].log[h] - log)
        for name, h in parts
    }, log
