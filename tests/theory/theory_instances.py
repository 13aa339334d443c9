"""Instances for the tests of the theory, and derivatives that share nothing with the library.

Gradients of the classifier are written once more, analytically in complex numbers, so that the
derivative of a gradient along v is Im g(θ + iεv)/ε to the last digit: complex steps do not cancel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import mhfast as mh

STEP = 1e-40  # its square vanishes beside anything


def classifier(
    rng: np.random.Generator, H: int, d: int, q: int, size: float, **keywords: Any
) -> mh.Classifier:
    W, U = rng.standard_normal((H, d, d)), rng.standard_normal((H, q, d))
    return mh.Classifier(size * W / d, size * U / np.sqrt(q * d), **keywords)


def labels(rng: np.random.Generator, n: int) -> Any:
    return np.where(rng.random(n) < 0.5, -1.0, 1.0)


def query_side(rng: np.random.Generator, kind: int, n: int, T: int, d: int) -> Any:
    """Return (query, external, q): the tokens themselves, one of them, or external rows."""
    if kind == 1:
        return int(rng.integers(-T, T)), None, 1
    q = int(rng.integers(1, 5)) if kind == 2 else T
    return None, 2 * rng.standard_normal((n, q, d)) if kind == 2 else None, q


def side(model: mh.Classifier, data: mh.Dataset) -> Any:
    query = model.query if data.query is None else data.query
    if query is None:
        return data.X
    return data.X[:, [query]] if isinstance(query, int) else query


def outputs_and_jacobian(W: Any, U: Any, X: Any, Z: Any, scale: float) -> tuple[Any, Any]:
    """Φ (n,) and its gradients (n, P) by W then U, for complex W and U."""
    n, H = len(X), len(W)
    S = scale * np.einsum("nqd,hde,nte->nhqt", Z, W, X, optimize=True)
    E = np.exp(S - S.real.max(axis=-1, keepdims=True))
    A = E / E.sum(axis=-1, keepdims=True)
    C = np.einsum("hqd,ntd->nhqt", U, X)
    D = A * (C - (A * C).sum(axis=-1, keepdims=True))
    root = np.sqrt(H)
    gW = scale * np.einsum("nqd,nhqt,nte->nhde", Z, D, X, optimize=True) / root
    gU = np.einsum("nhqt,nte->nhqe", A, X) / root
    phi = (A * C).sum(axis=(1, 2, 3)) / root
    return phi, np.concatenate([gW.reshape(n, -1), gU.reshape(n, -1)], axis=1)


def loss_gradient(W: Any, U: Any, X: Any, y: Any, Z: Any, scale: float, loss: str) -> Any:
    phi, jacobian = outputs_and_jacobian(W, U, X, Z, scale)
    slope = -y / (1 + np.exp(y * phi)) if loss == "logistic" else -y
    return slope @ jacobian / len(X)


def hvp(
    model: Any, X: Any, y: Any, tangent: Any, *, loss: str = "logistic", wrt: Any = None, **_: Any
) -> mh.Gradients:
    """What `mhfast.hvp` computes; for other models than dense classifiers by the reference."""
    if not isinstance(model, mh.Classifier) or not isinstance(model.W, np.ndarray):
        return mh.Gradients(**mh.reference.hvp(model, X.X, X.y, tangent, loss=loss))
    data = X if isinstance(X, mh.Dataset) else mh.Dataset(X, y)
    W, U = (
        x if v is None else x + 1j * STEP * v
        for x, v in ((model.W, tangent.W), (model.U, tangent.U))
    )
    Z = side(model, data)
    g = loss_gradient(W, U, data.X, data.y, Z, model.scale, loss).imag / STEP
    parts = {"W": g[: W.size].reshape(W.shape), "U": g[W.size :].reshape(U.shape)}
    return mh.Gradients(**{name: parts[name] for name in (wrt or parts)})


def dense_hessian(model: mh.Classifier, data: mh.Dataset, loss: str = "logistic") -> Any:
    P = model.W.size + model.U.size
    columns = []
    for e in np.eye(P):
        W = e[: model.W.size].reshape(model.W.shape)
        tangent = mh.Gradients(W, U=e[model.W.size :].reshape(model.U.shape))
        g = hvp(model, data, None, tangent, loss=loss)
        columns.append(np.concatenate([g.W.ravel(), g.U.ravel()]))
    return np.array(columns)
