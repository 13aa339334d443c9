"""Models in the specification: float64 parameters, and which query row sees which key.

Symbols: n samples, T tokens (keys), q query rows, d token dimension, H heads, p outputs, r rank, R
runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
Query: TypeAlias = ArrayLike | None

PARAMETERS = ("W", "Q", "K", "U", "V", "A", "B", "prompt")


def double(values: ArrayLike) -> Array:
    """Return the values as a float64 array."""
    return np.asarray(values, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Model:
    """A classifier (it has U) or a layer (it has V) with parameters in float64.

    W (H,d,d); or factors Q (H,d,r) and K (H,d,r), W_h = Q_h K_hᵀ, where K None means K = Q.
    U (H,q,d), V (H,d,p) or its factors A (H,d,r) and B (H,r,p), V_h = A_h B_h; prompt (q,d).
    attention, normalize: the row map, see `row_maps`.
    identities: which of W and V are identities I_d, and so no parameters.
    """

    W: Array | None = None
    Q: Array | None = None
    K: Array | None = None
    U: Array | None = None
    V: Array | None = None
    A: Array | None = None
    B: Array | None = None
    prompt: Array | None = None
    query: int | Array | None = None
    scale: float = 1.0
    causal: bool = False
    attention: str = "softmax"
    normalize: bool | None = None
    identities: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, dim: int | None = None) -> Model:
        """Convert any object with the attributes of `mhfast.Classifier` or `mhfast.Layer`.

        dim: the d of identities; None: that of the model.
        """
        if isinstance(model, cls):
            return model
        arrays: dict[str, Any] = {n: getattr(model, n, None) for n in ("U", "V", "prompt")}
        factors = model.W if hasattr(model.W, "Q") else None
        arrays |= {"W": model.W} if factors is None else {"Q": factors.Q, "K": factors.K}
        if hasattr(arrays["V"], "A"):
            arrays |= {"V": None, "A": model.V.A, "B": model.V.B}
        identities = identities_of(arrays)
        for name in identities:
            d = model.dim if dim is None else dim
            arrays[name] = np.broadcast_to(np.eye(d), (model.heads, d, d))
        return cls(
            **{name: double(array) for name, array in arrays.items() if array is not None},
            query=model.query,
            scale=model.scale,
            causal=model.causal,
            attention=str(getattr(model, "attention", "softmax")),
            normalize=getattr(model, "normalize", None),
            identities=identities,
        )

    def parameters(self) -> dict[str, Array]:
        """Return the parameters of the model by name, in the order of `PARAMETERS`."""
        arrays = self.arrays()
        return {name: array for name, array in arrays.items() if name not in self.identities}

    def arrays(self) -> dict[str, Array]:
        """Return the parameters and the identities by name."""
        arrays = ((name, getattr(self, name)) for name in PARAMETERS)
        return {name: array for name, array in arrays if array is not None}

    def moving(self, along: Mapping[str, ArrayLike]) -> Model:
        """Return the direction `along`, with zeros in the place of parts that are missing."""
        arrays: dict[str, Any] = {name: np.zeros_like(a) for name, a in self.arrays().items()}
        return replace(self, **arrays | {n: double(a) for n, a in along.items() if n in arrays})

    def dense(self) -> Array:
        """W (H,d,d), also for factors."""
        arrays = self.arrays()
        if "W" in arrays:
            return arrays["W"]
        W: Array = np.einsum("hdr,her->hde", arrays["Q"], arrays.get("K", arrays["Q"]))
        return W

    def readout(self) -> Array:
        """U (H,q,d) of a classifier, V (H,d,p) of a layer."""
        arrays = self.arrays()
        if "A" in arrays:
            V: Array = np.einsum("hdr,hrp->hdp", arrays["A"], arrays["B"])
            return V
        return arrays["U"] if "U" in arrays else arrays["V"]


def identities_of(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which of W and V are identities: those that nothing else is in the place of."""
    names = (("W", "Q"), ("V", "U", "A"))
    return tuple(
        name for name, *others in names if all(arrays.get(n) is None for n in (name, *others))
    )


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a model.

    X (n,T,d): tokens, 0 beyond `lengths`.  Z (n,q,d): query rows.  visible (n,q,T): row sees key.
    real (n,q): the row is not padding; None unless self-attention has lengths. place (n,q): the
    token that the row is, if rows are tokens of the sample; outside of 0 .. T-1 where there is no
    such token.
    """

    X: Array
    Z: Array
    visible: NDArray[np.bool_]
    real: NDArray[np.bool_] | None
    place: NDArray[np.int64] | None


def inputs(
    model: Model, X: ArrayLike, query: Query = None, lengths: ArrayLike | None = None
) -> Inputs:
    """Query rows and visible keys of tokens X (n,T,d).

    The query side Z is the prompt, the same for all samples, or `query` if given, else the model's
    own.  None: all tokens, q = T. An integer j: token j of each sample, q = 1; -1 is the last token
    of the sample, and for a token that does not exist Z = 0.  An array (n,q,d): those rows.

    Keys at and beyond lengths (n,) are invisible, and so are, with `causal`, keys after the row:
    after the query token, or after key t for row t of an external query.  In self-attention a row
    at or beyond the length sees nothing.
    """
    X = double(X)
    n, T, _ = X.shape
    keys = np.arange(T)
    length = np.full(n, T) if lengths is None else np.asarray(lengths, dtype=np.int64)
    inside = keys < length[:, None]
    X = np.where(inside[..., None], X, 0.0)
    query = model.query if query is None else query
    if model.prompt is not None and (query is not None or model.causal):
        raise ValueError("prompt: expected neither query nor causal with it")

    place = None
    if model.prompt is not None:
        Z = np.broadcast_to(model.prompt, (n, *model.prompt.shape))
    elif query is None:
        Z, place = X, np.broadcast_to(keys, (n, T))
    elif isinstance(query, int | np.integer):
        place = (np.full(n, query) if query >= 0 else length + query)[:, None]
        Z = np.where((place == keys)[..., None], X, 0.0).sum(axis=1, keepdims=True)
    else:
        Z = double(query)

    visible = np.broadcast_to(inside[:, None, :], (n, Z.shape[1], T))
    if model.causal:
        row = np.arange(Z.shape[1])[None, :] if place is None else place
        visible = visible & (keys <= row[..., None])
    if Z is not X or lengths is None:
        return Inputs(X, Z, visible, None, place)
    return Inputs(X, Z, visible & inside[..., None], inside, place)
