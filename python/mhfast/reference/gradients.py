"""Losses and gradients, centred so that they keep their relative accuracy in saturation.

With G the derivative of the loss in the output, (n,) for a classifier and (n,q,p) for a layer,

    B_ih = G_i H^(-1/2) U_h  or  G_i V_hᵀ          derivative in the attended rows A_ih X_i
    C_ih = B_ih X_iᵀ                               derivative in the weights A_ih
    D_ih = A_ih∘(C_ih - rowsum(A_ih∘C_ih))         derivative in the logits

    ∂U_h = H^(-1/2) Σ_i G_i A_ih X_i               ∂V_h = Σ_i (A_ih X_i)ᵀ G_i
    ∂W_h = scale Σ_i Z_iᵀ D_ih X_i                 ∂Q_h = ∂W_h K_h,  ∂K_h = ∂W_hᵀ Q_h
    ∂Z_i = scale Σ_h D_ih X_i W_hᵀ                 ∂X_i = Σ_h A_ihᵀ B_ih + scale D_ihᵀ Z_i W_h

∂A_h = ∂V_h B_hᵀ and ∂B_h = A_hᵀ ∂V_h of V_h = A_h B_h;

for tied factors ∂Q_h = (∂W_h + ∂W_hᵀ) Q_h.  ∂prompt = Σ_i ∂Z_i; where rows are tokens of the
sample, ∂Z_i is added to ∂X_i at these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .attention import of_entries, output_root, read_out, scores, softmax, weights
from .losses import Loss, loss_terms, loss_weights, real_targets
from .model import Array, Inputs, Model, Query, double, inputs
from .row_maps import with_zero
from .runs import over_runs

Wrt: TypeAlias = str | Iterable[str] | None
Gradient: TypeAlias = dict[str, Array]
Jacobian: TypeAlias = Callable[[Array, Array], Array]


def asked(model: Model, wrt: Wrt, also: tuple[str, ...] = ("X", "query")) -> tuple[str, ...]:
    """Names to differentiate by: those given, or for None all parameters of the model.

    Names are those of its parameters and those in `also`.

    Raises
    ------
    ValueError
        For another name.
    """
    own = tuple(model.parameters())
    if wrt is None:
        return own
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in own + also:
            raise ValueError(f"wrt: expected names from {', '.join(own + also)}, got {name!r}")
    return tuple(name for name in own + also if name in names)


def centre(A: Array, C: Array) -> tuple[Array, Any]:
    """c_s - Σ_t A_t c_t with c = C - C_m, m the row's largest weight; and m, shape (...,1)."""
    m = A.argmax(axis=-1)[..., None]
    c = C - np.take_along_axis(C, m, axis=-1)
    return c - (A * c).sum(axis=-1, keepdims=True), m


def balanced(A: Array, centred: Array, m: Any) -> Array:
    """D_s = A_s · centred_s for s ≠ m and D_m = -Σ_{s≠m} D_s, so that rows sum to zero."""
    D = A * centred
    np.put_along_axis(D, m, 0.0, axis=-1)
    np.put_along_axis(D, m, -D.sum(axis=-1, keepdims=True), axis=-1)
    return D


def softmax_tangent(A: Array, C: Array) -> Array:
    """A∘(C - rowsum(A∘C)): the Jacobian of softmax, which is symmetric, times C.

    Computed centred: c_s = C_s - C_m with m the row's largest weight, p = Σ_s A_s c_s,
    D_s = A_s (c_s - p) for s ≠ m and D_m = -Σ_{s≠m} D_s.  In exact arithmetic this is the formula
    above; in floating point it keeps its relative accuracy when one weight is nearly one, where
    the formula subtracts nearly equal numbers.
    """
    return balanced(A, *centre(A, C))


def textbook_softmax_tangent(A: Array, C: Array) -> Array:
    """A∘(C - rowsum(A∘C)), evaluated as written."""
    D: Array = A * (C - (A * C).sum(axis=-1, keepdims=True))
    return D


def weights_tangent(
    model: Model, data: Inputs, A: Array, C: Array, jacobian: Jacobian = softmax_tangent
) -> Array:
    """Multiply the Jacobian of the row map, which is symmetric, by C; `jacobian` for softmax."""
    if model.attention == "softmax":
        return jacobian(A, C)
    if model.attention == "softmax1":
        whole = softmax(scores(model, data))
        tangent: Array = jacobian(whole, with_zero(C))[..., 1:]
        return tangent
    if model.attention == "hardmax":
        return np.zeros_like(C)
    return of_entries(model, data, "derivative") * C


def cotangent_of_attended(model: Model, G: Array) -> Array:
    """B (n,H,q,d), linear in G (n,) or (n,q,p) and in U or V."""
    if model.U is not None:
        return np.multiply.outer(G, model.U) / output_root(model)
    B: Array = np.einsum("nqp,hdp->nhqd", G, model.readout())
    return B


def logit_gradient(X: Array, B: Array) -> Array:
    """C (n,H,q,T): what each key contributes."""
    C: Array = np.einsum("nhqd,ntd->nhqt", B, X)
    return C


def matrix_gradient(scale: float, Z: Array, D: Array, X: Array) -> Array:
    """∂W (H,d,d)."""
    DX = np.einsum("nhqt,nte->nhqe", D, X)
    dW: Array = np.einsum("nqd,nhqe->hde", Z, DX)
    return scale * dW


def query_gradient(scale: float, D: Array, X: Array, W: Array) -> Array:
    """∂Z (n,q,d)."""
    DX = np.einsum("nhqt,nte->nhqe", D, X)
    dZ: Array = np.einsum("nhqe,hde->nqd", DX, W)
    return scale * dZ


def readout_gradient(model: Model, A: Array, X: Array, G: Array) -> Gradient:
    """∂U (H,q,d), or ∂V (H,d,p), or ∂A and ∂B of V_h = A_h B_h."""
    if model.U is not None:
        GA = (G / output_root(model))[:, None, None, None] * A
        return {"U": np.einsum("nhqt,nte->hqe", GA, X)}
    return through_values(model, np.einsum("nhqd,nqp->hdp", np.einsum("nhqt,ntd->nhqd", A, X), G))


def through_values(model: Model, dV: Array) -> Gradient:
    """Turn ∂V (H,d,p) into the gradients of V or of its factors."""
    if model.A is None or model.B is None:
        return {"V": dV}
    return {"A": dV @ np.swapaxes(model.B, 1, 2), "B": np.swapaxes(model.A, 1, 2) @ dV}


def through_factors(model: Model, dW: Array) -> Gradient:
    """Turn ∂W (H,d,d) into the gradients of W or of its factors."""
    Q, K = model.Q, model.K
    if Q is None:
        return {"W": dW}
    if K is None:
        return {"Q": (dW + np.swapaxes(dW, 1, 2)) @ Q}
    return {"Q": dW @ K, "K": np.swapaxes(dW, 1, 2) @ Q}


def _pull_back(
    model: Model, data: Inputs, A: Array, G: Array, wrt: Wrt, jacobian: Jacobian
) -> Gradient:
    X, Z, W = data.X, data.Z, model.dense()
    B = cotangent_of_attended(model, G)
    D = weights_tangent(model, data, A, logit_gradient(X, B), jacobian)
    dZ = query_gradient(model.scale, D, X, W)
    dX = np.einsum("nhqt,nhqd->ntd", A, B)
    dX += model.scale * np.einsum("nhqt,nhqd->ntd", D, np.einsum("nqd,hde->nhqe", Z, W))
    if data.place is not None:
        is_row = data.place[..., None] == np.arange(X.shape[1])
        dX += np.einsum("nqt,nqd->ntd", is_row, dZ)
    found = through_factors(model, matrix_gradient(model.scale, Z, D, X))
    found |= readout_gradient(model, A, X, G)
    found |= {"prompt": dZ.sum(axis=0), "X": dX, "query": dZ}
    return {name: found[name] for name in asked(model, wrt)}


@over_runs
def backward(
    model: Any,
    X: ArrayLike,
    cotangent: ArrayLike,
    *,
    wrt: Wrt = None,
    query: Query = None,
    lengths: ArrayLike | None = None,
) -> Gradient:
    """Gradients of Σ cotangent · outputs, cotangent (n,) for a classifier, (n,q,p) for a layer.

    `wrt` None means all parameters; also "X", which includes its part as query rows, and "query"
    for external rows.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X = np.random.default_rng(0).standard_normal((20, 5, 9))
    >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=1.0, seed=0)
    >>> g = mh.reference.backward(model, X, np.ones(20))
    >>> bool(np.allclose(g["W"], mh.backward(model, X, np.ones(20)).W))
    True
    """
    model = Model.of(model)
    data = inputs(model, X, query, lengths)
    A = weights(model, data)
    return _pull_back(model, data, A, double(cotangent), wrt, softmax_tangent)


@over_runs
def value_and_grad(
    model: Any,
    X: ArrayLike,
    y: ArrayLike,
    *,
    loss: Loss = "logistic",
    wrt: Wrt = None,
    query: Query = None,
    weight: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    jacobian: Jacobian = softmax_tangent,
) -> tuple[float, Gradient]:
    """Loss Σ share · ℓ(F, y), see `shares`, and its gradients by name, see `backward`.

    y has the shape of the outputs; for cross_entropy, classes (n,q).

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=1.0, seed=0)
    >>> exact, g = mh.reference.value_and_grad(model, data.X, data.y)
    >>> loss, gradients = mh.value_and_grad(model, data)
    >>> abs(loss - exact) < 1e-14, bool(abs(gradients.W - g["W"]).max() < 1e-14)
    (True, True)
    """
    model = Model.of(model)
    data = inputs(model, X, query, lengths)
    A = weights(model, data)
    F = read_out(model, data.X, A)
    loss_weight = loss_weights(data, F, weight, loss)
    value, loss_derivative, _ = loss_terms(F, real_targets(data, y), loss)
    gradient = _pull_back(model, data, A, loss_weight * loss_derivative, wrt, jacobian)
    return float((loss_weight * value).sum()), gradient


def textbook_value_and_grad(model: Any, X: ArrayLike, y: ArrayLike, **options: Any) -> Any:
    """As `value_and_grad`, with D = A∘(C - rowsum(A∘C)) evaluated as written, for comparison.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> X, y = np.array([[[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]]), [1.0]
    >>> W, U = np.zeros((1, 3, 3)), np.array([[[0.0, 0.3, 0.7]]])
    >>> W[0, 0, 1] = 30.0  # the logits of the two tokens differ by 30
    >>> model = mh.Classifier(W, U, query=-1)
    >>> textbook = mh.reference.textbook_value_and_grad(model, X, y, loss="linear")[1]["W"]
    >>> g = mh.value_and_grad(model, X, y, loss="linear")[1].W
    >>> exact = 0.4 / (2 + 2 * np.cosh(30.0))  # the closed form
    >>> bool(abs(g[0, 0, 1] / exact - 1) < 1e-14), bool(abs(textbook[0, 0, 1] / exact - 1) > 1e-5)
    (True, True)
    """
    return value_and_grad(model, X, y, jacobian=textbook_softmax_tangent, **options)
