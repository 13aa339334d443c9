"""`classifier` and `layer`: the models as differentiable functions of JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from ... import config
from ..._arguments import checks
from ..._arguments.names import AttentionName
from ...models import Classifier, Layer
from ...models.problem import problem
from .calls import LETTERS, Call
from .primitive import apply


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

    Arrays are read as by `jax.numpy.asarray`, so that float64 needs `jax.enable_x64`. Only those
    derivatives by X, W, U, query and prompt are computed that JAX requests, up to the second; those
    of forward mode and second ones in NumPy, in float64. Samples, and what `jax.vmap` maps over,
    may be on several devices; each device computes its own.

    Parameters
    ----------
    X : array (n, T, d), float32 or float64
    W : array (H, d, d) of the same dtype
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
        Threads for the call and its gradient on each device; static. Under `jit` the value at the
        time of tracing is used.

    Returns
    -------
    array (n,) of the same dtype

    Raises
    ------
    TypeError, ValueError
        While tracing, if a dtype, a shape or a static argument does not fit. Lengths that are not
        in [0, T] are detected when the computation runs, and raise an error of JAX with this
        message.
    NotImplementedError
        While tracing, for a third derivative, and while compiling, for a `jax.shard_map` over some
        of the axes of a mesh, and for a computation exported for several devices without it. The
        message names what works.

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
    settings = (scale, causal, attention, normalize, num_threads)
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
    W : array (H, d, d) of the same dtype
    V : array (H, d, p) of the same dtype
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
    settings = (scale, causal, attention, normalize, num_threads)
    return _apply(Layer, arrays, query, settings)


def _apply(
    kind: Any,
    given: Mapping[str, Any],
    query: Any,
    settings: tuple[Any, ...],
) -> Any:
    """Check what can be checked without the entries of the arrays, then compute."""
    token: Any = None if np.ndim(query) else query
    given = {**given, "query": query if np.ndim(query) else None}
    arrays = {name: jnp.asarray(array) for name, array in given.items() if array is not None}
    for name, array in arrays.items():
        checks.shape(array, name, LETTERS[name], (None,) * len(LETTERS[name].split()))
    lengths = _Lengths()
    kept = tuple((name, lengths.of(array.shape), array.dtype) for name, array in arrays.items())
    *others, num_threads = settings
    others.append(config.threads(num_threads) or None)
    try:
        call = _checked(kind, kept, token, *others)
    except TypeError:  # of what is not hashable, such as a tracer, this says what it should be
        call = _checked.__wrapped__(kind, kept, token, *others)
    (outputs,) = apply(call, *arrays.values())
    return outputs


FIRST = 101  # of the numbers in place of unknown lengths, one that few arrays have


class _Lengths:
    """Numbers in place of lengths that `jax.export` leaves open, different ones for each."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def of(self, shape: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(n if isinstance(n, int) else self._number(n) for n in shape)

    def _number(self, length: Any) -> int:
        return self.known.setdefault(length, FIRST + len(self.known))


@lru_cache(maxsize=1024, typed=True)
def _checked(
    kind: Any,
    kept: tuple[tuple[str, Any, Any], ...],
    token: Any,
    scale: Any,
    causal: Any,
    attention: Any,
    normalize: Any,
    num_threads: int | None,
) -> Call:
    """Return the call of arrays of these names, shapes and dtypes."""
    # Zeros of the same dtypes and shapes give the same errors as the arrays.
    zeros = {name: np.zeros(shape, dtype) for name, shape, dtype in kept}
    own = {name: array for name, array in zeros.items() if name not in ("X", "lengths")}
    options = {"scale": scale, "causal": causal, "attention": attention, "normalize": normalize}
    model = kind(**{"query": token, **own}, **options)
    problem(model, zeros["X"], lengths=zeros.get("lengths"))
    return Call(
        is_layer=kind is Layer,
        names=tuple(zeros),
        query=None if "query" in zeros else model.query,
        scale=model.scale,
        causal=model.causal,
        attention=attention,
        normalize=normalize,
        num_threads=num_threads,
    )
