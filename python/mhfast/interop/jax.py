"""Classifier and layer as functions of JAX arrays, differentiable in reverse mode.

JAX calls mhfast on the host by `jax.pure_callback`: the outputs are those of the model, the
gradients those of `mhfast.backward`. `jit`, `grad`, `vmap`, `lax.scan` and `checkpoint` work.
What `vmap` maps over becomes the run axis of one call, in which unmapped arrays are shared.

JAX raises an error for forward mode and second derivatives; for the latter use `mhfast.hvp`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import config
from .._arguments import checks
from .._arguments.names import AttentionName
from .._arguments.values import Array
from ..gradients import backward
from ..models import Classifier, Layer, Model
from ..models.problem import of_arrays, problem

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("mhfast.interop.jax needs jax: pip install jax") from error

__all__ = ["classifier", "layer"]

LETTERS = {
    "X": "n T d", "W": "H d d", "U": "H q d", "V": "H d p",
    "query": "n q d", "prompt": "q d", "lengths": "n",
}  # fmt: skip
"""The axes of each array without those that vmap adds."""


def classifier(
    X: Any,
    W: Any,
    U: Any,
    *,
    query: Any = None,
    prompt: Any = None,
    scale: float = 1.0,
    causal: bool = False,
    attention: AttentionName = "softmax",
    normalize: bool | None = None,
    lengths: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Compute the outputs of a `Classifier`.

        Φ(X) = H^(-1/2) Σ_h ⟨U_h, softmax(scale · Z W_h Xᵀ) X⟩

    Arrays are read as by `jax.numpy.asarray`, so float64 needs `jax_enable_x64`, set for the whole
    process, because the context manager has no effect in the threads in which JAX calls the host.
    Only those gradients by X, W, U, query and prompt are computed that JAX requests.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64
    W : array (H, d, d) of the same dtype, or None for the identity of every head
    U : array (H, q, d) of the same dtype
    query : None, int or array (n, q, d), optional
        The query side Z, as for a `Classifier`. An int is static.
    prompt : array (q, d), optional
        Query rows that all samples share, in place of a query.
    scale, causal, attention, normalize
        As for a `Classifier`; static.
    lengths : integers (n,), optional
        The number of tokens of each sample; not differentiated.
    num_threads : int, optional
        Threads for the call and its gradient; static. Under `jit` the value at the time of tracing
        is used.

    Returns
    -------
    array (n,) of the same dtype

    Raises
    ------
    TypeError, ValueError
        While tracing, if a dtype, a shape or a static argument does not fit. Lengths that are not
        in [0, T] are detected when the computation runs, and raise an error of JAX with this
        message.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> from mhfast.interop.jax import classifier
    >>> rng = np.random.default_rng(0)
    >>> shapes = (20, 5, 9), (3, 9, 9), (3, 5, 9)
    >>> X, W, U = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    >>> classifier(X, W, U).shape
    (20,)
    >>> gradient = jax.jit(jax.grad(lambda W: classifier(X, W, U).sum()))
    >>> gradient(W).shape
    (3, 9, 9)
    """
    arrays = {"X": X, "W": W, "U": U, "prompt": prompt, "lengths": lengths}
    settings = _Settings(scale, causal, attention, normalize, num_threads)
    return _apply(Classifier, arrays, query, settings)


def layer(
    X: Any,
    W: Any,
    V: Any,
    *,
    query: Any = None,
    prompt: Any = None,
    scale: float = 1.0,
    causal: bool = False,
    attention: AttentionName = "softmax",
    normalize: bool | None = None,
    lengths: Any = None,
    num_threads: int | None = None,
) -> Any:
    """Compute the outputs of a `Layer`.

        F(X) = Σ_h softmax(scale · Z W_h Xᵀ) X V_h

    Parameters
    ----------
    X : array (n, T, d), float32 or float64
    W : array (H, d, d) of the same dtype, or None for the identity of every head
    V : array (H, d, p) of the same dtype, or None likewise
    query, prompt, scale, causal, attention, normalize, lengths, num_threads
        As for `classifier`, and so are gradients and errors.

    Returns
    -------
    array (n, q, p) of the same dtype

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape or a value does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from mhfast.interop.jax import layer
    >>> rng = np.random.default_rng(0)
    >>> shapes = (20, 5, 9), (3, 9, 9), (3, 9, 2)
    >>> X, W, V = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    >>> layer(X, W, V).shape
    (20, 5, 2)
    >>> layer(X, W, V, query=-1).shape  # of the last token only
    (20, 1, 2)
    """
    arrays = {"X": X, "W": W, "V": V, "prompt": prompt, "lengths": lengths}
    settings = _Settings(scale, causal, attention, normalize, num_threads)
    return _apply(Layer, arrays, query, settings)


class _Settings(NamedTuple):
    scale: float
    causal: bool
    attention: AttentionName
    normalize: bool | None
    num_threads: int | None


@dataclass(frozen=True)
class _Outputs:
    """The host side of a call: a model without its arrays.

    To JAX equal ones are the same callback, which it compiles once.
    """

    kind: type[Classifier | Layer]
    query: int | None
    settings: _Settings
    shape: tuple[int, ...]

    def model(self, arrays: Mapping[str, Any]) -> Model:
        """Make the model from the arrays that are its parameters."""
        settings = {"query": self.query, **self.settings._asdict()}
        del settings["num_threads"]
        if "query" in arrays:
            settings["query"] = arrays["query"]
        own = {n: a for n, a in arrays.items() if n not in ("X", "query", "lengths")}
        return of_arrays(self.kind, own, **settings)

    def __call__(self, arrays: Mapping[str, Any]) -> Array:
        lead, given = _as_runs(arrays)
        outputs = self.model(given)(
            given["X"], lengths=given.get("lengths"), num_threads=self.settings.num_threads
        )
        return outputs.reshape(lead + self.shape)


@dataclass(frozen=True)
class _Gradients:
    """The host side of the gradients by the arrays `wrt`."""

    of: _Outputs
    wrt: tuple[str, ...]

    def __call__(self, arrays: Mapping[str, Any], cotangent: Any) -> dict[str, Array]:
        lead, given = _as_runs({**arrays, "cotangent": cotangent}, len(self.of.shape))
        upstream = given.pop("cotangent")
        gradients = backward(
            self.of.model(given), given["X"], upstream, wrt=self.wrt,
            lengths=given.get("lengths"), num_threads=self.of.settings.num_threads,
        )  # fmt: skip
        own = {name: given[name].shape[-_axes(name) :] for name in self.wrt}
        return {name: getattr(gradients, name).reshape(lead + own[name]) for name in self.wrt}


def _apply(
    kind: type[Classifier | Layer],
    given: Mapping[str, Any],
    query: Any,
    settings: _Settings,
) -> Any:
    """Check what can be checked without the entries of the arrays, then compute."""
    token: Any = None if np.ndim(query) else query
    given = {**given, "query": query if np.ndim(query) else None}
    arrays = {name: jnp.asarray(array) for name, array in given.items() if array is not None}
    for name, array in arrays.items():
        checks.shape(array, name, LETTERS[name], (None,) * _axes(name))
    # Zeros of the same dtypes and shapes give the same errors as the arrays.
    zeros = {name: np.zeros(array.shape, array.dtype) for name, array in arrays.items()}
    threads = config.threads(settings.num_threads) or None
    call = _Outputs(kind, token, settings._replace(num_threads=threads), ())
    model = call.model(zeros)
    problem(model, zeros["X"], lengths=zeros.get("lengths"))
    n, tokens, d = arrays["X"].shape
    _, shape = model._targets(n, model._query_rows(tokens), "squared")
    shape = tuple(d if length < 0 else length for length in shape)
    token = None if "query" in arrays else model.query
    settings = _Settings(model.scale, model.causal, settings.attention, settings.normalize, threads)
    call = replace(call, query=token, settings=settings, shape=shape)
    return _attend(call, arrays)


def _outputs(call: _Outputs, arrays: dict[str, Any]) -> Any:
    result = jax.ShapeDtypeStruct(call.shape, arrays["X"].dtype)
    return jax.pure_callback(call, result, arrays, vmap_method="expand_dims")


def _forward(call: _Outputs, primals: dict[str, Any]) -> tuple[Any, Any]:
    arrays = {name: primal.value for name, primal in primals.items()}
    # As keys the names are no data to JAX.
    wrt = {name: () for name, p in primals.items() if p.perturbed and name != "lengths"}
    return _outputs(call, arrays), (arrays, wrt)


def _backward(call: _Outputs, residuals: Any, cotangent: Any) -> tuple[dict[str, Any]]:
    arrays, wrt = residuals
    results = {name: jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in wrt}
    gradients = jax.pure_callback(
        _Gradients(call, tuple(wrt)), results, arrays, cotangent, vmap_method="expand_dims"
    )
    return ({name: gradients.get(name) for name in arrays},)


_attend = jax.custom_vjp(_outputs, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _axes(name: str, of_cotangent: int = 0) -> int:
    return of_cotangent if name == "cotangent" else len(LETTERS[name].split())


def _as_runs(
    arrays: Mapping[str, Any], of_cotangent: int = 0
) -> tuple[tuple[int, ...], dict[str, Array]]:
    """Return the lengths of the axes that vmap has added, and the arrays with these as a run axis.

    All arrays have the same number of additional axes, of length 1 where vmap does not map them. An
    array that is not mapped along any has no run axis.
    """
    # Do not use jax.numpy here: it could wait for the computation that waits for this call.
    read = {name: np.asarray(array) for name, array in arrays.items()}
    added = {name: array.ndim - _axes(name, of_cotangent) for name, array in read.items()}
    lead = np.broadcast_shapes(*(array.shape[: added[name]] for name, array in read.items()))

    def merged(array: Array, added: int) -> Array:
        own = array.shape[added:]
        if all(length == 1 for length in array.shape[:added]):
            return array.reshape(own)
        return np.broadcast_to(array, lead + own).reshape(math.prod(lead), *own)

    return lead, {name: merged(array, added[name]) for name, array in read.items()}
