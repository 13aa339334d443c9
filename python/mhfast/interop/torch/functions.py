"""`classifier` and `layer`: the models as differentiable functions of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..._arguments import checks
from ..._arguments.names import AttentionName
from ...models import Classifier, Layer, validation
from .operators import Tensor, names_of, outputs_op

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
LOW_PRECISION = (torch.bfloat16, torch.float16)


def classifier(
    X: Tensor,
    W: Tensor | None,
    U: Tensor,
    *,
    query: int | Tensor | None = None,
    prompt: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    attention: AttentionName = "softmax",
    normalize: bool | None = None,
    lengths: npt.ArrayLike | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Compute the outputs of a classifier, differentiable by every tensor.

        Φ(X_i) = H^(-1/2) Σ_h ⟨U_h, softmax(scale · Z_i W_h X_iᵀ) X_i⟩

    The query side Z_i (q, d) is X_i, one of its tokens, external or the prompt. Every tensor may
    have a leading run axis of one common length R, and results then have it too. The gradient by a
    tensor without it, which the runs share, is the sum over the runs.

    Parameters
    ----------
    X : tensor (n, T, d), float32 or float64, on the CPU
    W : tensor (H, d, d), or None for the identity of every head
    U : tensor (H, q, d)
    query : None, int or tensor (n, q, d)
        None for Z_i = X_i, an integer for that token of each sample, or an external query.
    prompt : tensor (q, d), optional
        Query rows that all samples share; query must then be None.
    scale, causal, attention, normalize
        As for an `mhfast.Classifier`.
    lengths : integers (n,), optional
        The number of tokens of each sample; what is beyond has no influence. An array or a tensor.
    num_threads : int, optional
        Threads for this call and its derivative, in place of the default.

    Returns
    -------
    tensor (n,) of the dtype of X

    Raises
    ------
    TypeError
        If an argument is not a dense CPU tensor of float32 or float64, or dtypes differ.
    ValueError
        If a shape or a value does not fit.
    RuntimeError
        When a third derivative is requested, or a tensor was changed in place before its gradient
        is computed.

    Notes
    -----
    In a region of `torch.autocast` tensors of lower precision are converted to the dtype of the
    others, or float32; the result has that dtype.

    Examples
    --------
    >>> import torch
    >>> from mhfast.interop.torch import classifier
    >>> X, U = torch.randn(20, 5, 9), torch.randn(3, 5, 9)
    >>> W = torch.randn(3, 9, 9, requires_grad=True)
    >>> classifier(X, W, U).sum().backward()
    >>> W.grad.shape
    torch.Size([3, 9, 9])
    """
    settings = Settings(Classifier, query, scale, causal, attention, normalize, num_threads)
    return applied(outputs_op, settings, W, U, prompt, X, lengths)


def layer(
    X: Tensor,
    W: Tensor | None,
    V: Tensor | None,
    *,
    query: int | Tensor | None = None,
    prompt: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    attention: AttentionName = "softmax",
    normalize: bool | None = None,
    lengths: npt.ArrayLike | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Compute the outputs of an attention layer, differentiable by every tensor.

        F(X_i) = Σ_h softmax(scale · Z_i W_h X_iᵀ) X_i V_h

    Parameters
    ----------
    X, W, query, prompt, scale, causal, attention, normalize, lengths, num_threads
        As for `classifier`, and so is the run axis.
    V : tensor (H, d, p), or None for the identity of every head

    Returns
    -------
    tensor (n, q, p) of the dtype of X

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As for `classifier`.

    Examples
    --------
    >>> import torch
    >>> from mhfast.interop.torch import layer
    >>> X, W, V = torch.randn(20, 5, 9), torch.randn(3, 9, 9), torch.randn(3, 9, 2)
    >>> layer(X, W, V).shape
    torch.Size([20, 5, 2])
    >>> outputs = layer(X, W, V, lengths=[5] * 19 + [3], query=0)
    >>> outputs.shape  # of the first token only
    torch.Size([20, 1, 2])
    """
    settings = Settings(Layer, query, scale, causal, attention, normalize, num_threads)
    return applied(outputs_op, settings, W, V, prompt, X, lengths)


class Settings(NamedTuple):
    """The arguments of a call that are not tensors, except an external query."""

    kind: type[Classifier | Layer]
    query: Any
    scale: float = 1.0
    causal: bool = False
    attention: str = "softmax"
    normalize: bool | None = None
    num_threads: int | None = None


def applied(
    op: Any,
    settings: Settings,
    W: Tensor | None,
    readout: Tensor | None,
    prompt: Tensor | None,
    X: Tensor,
    lengths: Any,
) -> Tensor:
    """Check what the kernel of an operator cannot check, and call it.

    Shapes and values are checked by the kernel. An external query is one of the tensors.
    """
    kind, query, scale, causal, attention, normalize, num_threads = settings
    validation.row_map(attention, normalize)
    external = query if isinstance(query, torch.Tensor) else None
    token = None
    if query is not None and external is None:
        if np.ndim(query):
            got = type(query).__name__
            raise TypeError(f"query: expected None, an integer or a tensor (n, q, d), got {got}")
        token = checks.integer(query, "query", "an integer or an array (n, q, d)")
    tensors = W, readout, prompt, X, external
    if torch.is_autocast_enabled("cpu"):
        tensors = _wide(tensors)
    for name, tensor in zip(names_of(kind), tensors, strict=True):
        if tensor is not None or name in ("U", "X"):
            _check(name, tensor)
    if lengths is not None:  # copied, since the caller may change them before the derivative
        lengths = lengths.clone() if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)
    if num_threads is not None:
        num_threads = checks.count(num_threads, "num_threads")
    return op(
        *tensors, lengths, kind is Layer, token, checks.finite(scale, "scale"), causal, attention,
        normalize, num_threads,
    )  # fmt: skip


def _wide(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return tensors of low precision in that of the parameters, at least float32."""
    dtypes = [t.dtype for t in tensors if isinstance(t, torch.Tensor)]
    wide = next((dtype for dtype in dtypes if dtype in DTYPES), torch.float32)
    return tuple(
        t.to(wide) if isinstance(t, torch.Tensor) and t.dtype in LOW_PRECISION else t
        for t in tensors
    )


def _check(name: str, tensor: Any) -> None:
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPES
    ):
        return
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise TypeError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {short(tensor.layout)}")
    raise TypeError(f"{name}: expected dtype float32 or float64, got {short(tensor.dtype)}")


def short(value: object) -> str:
    """Return the name of a dtype or a layout without that of torch."""
    return str(value).removeprefix("torch.")
