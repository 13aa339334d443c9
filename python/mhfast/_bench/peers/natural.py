"""Models as a user of PyTorch or JAX writes them: one text, for arrays of either library.

Operators of Python and methods that both libraries have; what differs is in a `Library`.  A leading
run axis R of X and the parameters is broadcast.  Gradients are left to automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Tensor: TypeAlias = Any
Theta: TypeAlias = Mapping[str, Tensor]


class Library(Protocol):
    """What the formulas need beside operators; `axis` counts from the end."""

    def softmax(self, S: Tensor, axis: int) -> Tensor:
        """Return the softmax; S may be overwritten."""

    def softmax_derivative(self, A: Tensor, C: Tensor, axis: int) -> Tensor:
        """Return A∘(C - Σ A∘C); C may be overwritten."""

    def softplus(self, x: Tensor) -> Tensor:
        """Return log(1 + exp(x))."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return 1 / (1 + exp(-x))."""

    def concatenate(self, parts: list[Tensor], axis: int) -> Tensor:
        """Join arrays."""

    def add_rows(self, gX: Tensor, rows: tuple[Tensor, Tensor], gZ: Tensor) -> Tensor:
        """Add gZ (...,n,1,d) to a row of each sample of gX (...,n,T,d), which may be changed."""

    def added(self, parts: list[Tensor], axis: int) -> Tensor:
        """Return the sum of arrays of different lengths along an axis, as long as the longest."""

    def repeated(self, x: Tensor, heads: int) -> Tensor:
        """Return x (...,1,a,b) for each head, (...,H,a,b), which need not be in memory."""

    def identity(self, size: int, like: Tensor) -> Tensor:
        """Return the identity matrix, of the dtype of an array."""

    def sqrt(self, x: Tensor) -> Tensor:
        """Return the square root."""

    def largest(self, x: Tensor, axis: int) -> Tensor:
        """Return the largest entries along an axis."""

    def least(self, x: Tensor, axis: int) -> Tensor:
        """Return the smallest entries along an axis."""


@dataclass(frozen=True)
class Data:
    """What is not a parameter.

    X (n,T,d), targets y, the number of samples in a mean, an external query (n,q,d) or None.
    `hidden` is 0 for what a row sees and -inf for the rest, (n or 1, q or 1, T), `real` (n,q,1) is
    1 for rows and 0 for padding; None where there is nothing to hide.  `places` are the samples and
    their last tokens, if these are the queries.  `share` (n,q,1) is that of a row in a mean over
    rows, `groups` (n,T,2) are zeros and ones.
    """

    X: Tensor
    y: Tensor
    total: int
    query: Tensor = None
    hidden: Tensor = None
    real: Tensor = None
    places: tuple[Tensor, Tensor] | None = None
    share: Tensor = None
    groups: Tensor = None


def queries(theta: Theta, data: Data) -> Tensor:
    """Return the query side Z (n,q,d); a prompt is (1,q,d)."""
    if "prompt" in theta:
        return theta["prompt"][..., None, :, :]
    if data.query is not None:
        return data.query
    if data.places is not None:
        samples, tokens = data.places
        return data.X[..., samples, tokens, :][..., None, :]
    return data.X


def attention(library: Library, theta: Theta, data: Data) -> Tensor:
    """Return the weights (n,H,q,T); where W is an identity (n,1,q,T)."""
    Q, K = projected(theta, data)
    S = Q @ K.swapaxes(-1, -2)
    if data.hidden is not None:
        S = S + data.hidden[:, None]
    A = library.softmax(S, -1)
    return A if data.real is None else A * data.real[:, None]


def projected(theta: Theta, data: Data) -> tuple[Tensor, Tensor]:
    """Return queries (n,H,q,.) and keys (n,H,T,.), whose products are the logits."""
    X, Z = data.X[..., None, :, :], queries(theta, data)[..., None, :, :]
    if "W" in theta:
        return Z @ theta["W"][..., None, :, :, :], X
    if "Q" in theta:
        K = theta.get("K", theta["Q"])
        return Z @ theta["Q"][..., None, :, :, :], X @ K[..., None, :, :, :]
    return Z, X


def values(theta: Theta, data: Data) -> Tensor:
    """Return what is attended to.

    Of a layer X V_h (n,H,T,p), or X A_h (n,H,T,r) of factors; of a classifier X (n,1,T,d).
    """
    X = data.X[..., None, :, :]
    if "U" in theta:
        return X
    return X @ theta["A" if "A" in theta else "V"][..., None, :, :, :]


def read_out(theta: Theta, attended: Tensor) -> Tensor:
    """Return the outputs, Φ (n,) or F (n,q,p), from what the heads attended to."""
    if "V" in theta:
        return attended.sum(-3)
    if "A" in theta:
        return (attended @ theta["B"][..., None, :, :, :]).sum(-3)
    U = theta["U"]
    return (attended * U[..., None, :, :, :]).sum((-3, -2, -1)) / U.shape[-3] ** 0.5


def outputs(library: Library, theta: Theta, data: Data) -> tuple[Tensor, Tensor]:
    """Return the outputs and the weights."""
    A = attention(library, theta, data)
    return read_out(theta, A @ values(theta, data)), A


def loss(library: Library, theta: Theta, data: Data, found: Tensor) -> Tensor:
    """Return the loss of outputs, logistic of a classifier and squared of a layer; (R,) of runs."""
    if "U" in theta:
        return library.softplus(-data.y * found).sum(-1) / data.total
    residual = found - data.y
    if data.real is not None:
        residual = residual * data.real
    return (residual**2).sum((-3, -2, -1)) / data.total


def extras(data: Data) -> tuple[Tensor, ...]:
    """Return what samples have beside tokens, each with the axis of samples first."""
    n = data.X.shape[-3]
    found = []
    if data.hidden is not None and data.hidden.shape[0] == n:
        found.append(data.hidden)
    if data.real is not None:
        found.append(data.real)
    if data.places is not None:
        found.append(data.places[1])
    return tuple(found)


def of_sample(data: Data, x: Tensor, parts: tuple[Tensor, ...]) -> Data:
    """Return the data of one sample (T,d), with its parts of `extras`; nothing is averaged."""
    left = list(parts)
    hidden, real, places = data.hidden, data.real, data.places
    if hidden is not None and hidden.shape[0] == data.X.shape[-3]:
        hidden = left.pop(0)[None]
    if real is not None:
        real = left.pop(0)[None]
    if places is not None:
        places = places[0][:1], left.pop(0)[None]
    return Data(x[None], None, 1, None, hidden, real, places)
