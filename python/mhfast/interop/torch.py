"""The models in PyTorch: differentiable functions and modules that use the C++ core.

Tensors are on the CPU, of one dtype, float32 or float64, and are not copied. Autograd of `torch`
calls `mhfast.backward` once for everything that needs a gradient, so that gradients keep full
relative accuracy when attention saturates. There are no second derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..gradients import backward
from ..models import Classifier, Layer

try:
    import torch
except ImportError as error:
    raise ImportError("mhfast.interop.torch needs torch: pip install torch") from error

if TYPE_CHECKING:
    from typing_extensions import Self

Tensor: TypeAlias = Any  # a torch.Tensor; types of torch are not checked

_READOUT = {Classifier: "U", Layer: "V"}
_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def classifier(
    X: Tensor,
    W: Tensor,
    U: Tensor,
    *,
    query: int | Tensor | None = None,
    prompt: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
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
    W : tensor (H, d, d)
    U : tensor (H, q, d)
    query : None, int or tensor (n, q, d)
        None for Z_i = X_i, an integer for that token of each sample, or an external query.
    prompt : tensor (q, d), optional
        Query rows that all samples share; query must then be None.
    scale, causal
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
        If an argument is no dense CPU tensor of float32 or float64, or they are of two dtypes.
    ValueError
        If a shape or a value does not fit.
    RuntimeError
        When a second derivative is asked for, or a tensor was changed in place before its gradient
        is computed.
    """
    call = _Call(Classifier, query, scale, causal, lengths, num_threads)
    return call.applied(W, U, prompt, X)


def layer(
    X: Tensor,
    W: Tensor,
    V: Tensor,
    *,
    query: int | Tensor | None = None,
    prompt: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    lengths: npt.ArrayLike | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """Compute the outputs of an attention layer, differentiable by every tensor.

        F(X_i) = Σ_h softmax(scale · Z_i W_h X_iᵀ) X_i V_h

    Parameters
    ----------
    X, W, query, prompt, scale, causal, lengths, num_threads
        As for `classifier`, and so are errors and run axis.
    V : tensor (H, d, p)

    Returns
    -------
    tensor (n, q, p) of the dtype of X
    """
    call = _Call(Layer, query, scale, causal, lengths, num_threads)
    return call.applied(W, V, prompt, X)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call other than the tensors that it is differentiated by."""

    kind: type[Classifier | Layer]
    query: Any
    scale: float = 1.0
    causal: bool = False
    lengths: Any = None
    num_threads: int | None = None

    def applied(self, W: Tensor, readout: Tensor, prompt: Tensor | None, X: Tensor) -> Tensor:
        """Return the outputs; an external query is treated as one of the tensors."""
        external = self.query if isinstance(self.query, torch.Tensor) else None
        token: Any = None if external is not None else self.query
        if np.ndim(token):
            kind = type(token).__name__
            raise TypeError(f"query: expected None, an integer or a tensor (n, q, d), got {kind}")
        tensors = (W, readout, prompt, X, external)
        for name, tensor in zip(_names(self.kind), tensors, strict=True):
            if tensor is not None or name not in ("prompt", "query"):
                _check(name, tensor)
        lengths = self.lengths  # copied, since the caller may change them before the derivative
        if lengths is not None:
            lengths = checks.as_array(lengths, "lengths").copy()
        return _Attention.apply(replace(self, query=token, lengths=lengths), *tensors)

    def model(self, W: Tensor, readout: Tensor, prompt: Tensor | None) -> Classifier | Layer:
        """Make the model, which copies the tensors."""
        return self.kind(
            _array(W), _array(readout), self.query, _array(prompt),
            scale=self.scale, causal=self.causal,
        )  # fmt: skip

    def seen(self, query: Tensor | None) -> dict[str, Any]:
        return {
            "query": _array(query), "lengths": self.lengths, "num_threads": self.num_threads,
        }  # fmt: skip


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The outputs; the inputs are a `_Call` and tensors W, U or V, prompt, X, query."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> Tensor:
        *parameters, X, query = tensors
        return torch.from_numpy(call.model(*parameters)(_array(X), **call.seen(query)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        # Without create_graph no second derivative is possible, and apply costs more than a small
        # sample.
        derivative = _Derivative.apply if torch.is_grad_enabled() else _Derivative.forward
        wanted = ctx.needs_input_grad[1:]
        return None, *derivative(ctx.call, wanted, cotangent, *ctx.saved_tensors)


class _Derivative(torch.autograd.Function):  # type: ignore[misc]
    """The requested gradients for a cotangent, with a derivative that raises an error.

    `once_differentiable` of torch would raise only if the cotangent itself needs a gradient.
    """

    @staticmethod
    def forward(
        call: _Call, wanted: tuple[bool, ...], cotangent: Tensor, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        *parameters, X, query = tensors
        names = _names(call.kind)
        asked = [name for name, want in zip(names, wanted, strict=True) if want]
        found = backward(
            call.model(*parameters), _array(X), _array(cotangent), wrt=asked, **call.seen(query)
        )
        return tuple(
            _gradient(getattr(found, name), tensor.ndim) if name in asked else None
            for name, tensor in zip(names, tensors, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> None:  # noqa: ARG004
        raise RuntimeError("mhfast.interop.torch: expected first derivatives only, got a second")


def _names(kind: type[Classifier | Layer]) -> tuple[str, ...]:
    return "W", _READOUT[kind], "prompt", "X", "query"


def _gradient(gradient: Array, axes: int) -> Tensor:
    """Return a gradient as a tensor, summed over the runs that share the variable."""
    return torch.from_numpy(gradient if gradient.ndim == axes else gradient.sum(axis=0))


def _check(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise TypeError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {_short(tensor.layout)}")
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"{name}: expected dtype float32 or float64, got {_short(tensor.dtype)}")


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.numpy(force=True)  # on the CPU without a copy


class _Module(torch.nn.Module):  # type: ignore[misc]
    """Parameters of a model, their initializer, and conversion to the model and back."""

    _kind: ClassVar[type[Classifier | Layer]]

    def __init__(
        self,
        sizes: tuple[int, int, int],
        query: int | None,
        prompt_rows: int | None,
        scale: float,
        causal: bool,
        std: float | None,
        dtype: Any,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in _DTYPES:
            raise TypeError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
        model = self._kind.zeros(
            *sizes, query=query, prompt_rows=prompt_rows, scale=scale, causal=causal,
            dtype=_DTYPES[dtype],
        )  # fmt: skip
        self._take_over(model, 1 / model.dim if std is None else std)
        self.reset_parameters()

    def _take_over(self, model: Classifier | Layer, std: float) -> None:
        """Take over the options of `model` and its parameters."""
        if isinstance(model.query, np.ndarray):
            raise ValueError(
                "query: expected None or an integer, got an external query, which comes with the "
                "calls of a module"
            )
        self.query, self.scale, self.causal = model.query, model.scale, model.causal
        self.std = checks.finite(std, "std")
        if self.std < 0:
            raise ValueError(f"std: expected a number of at least 0, got {std}")
        for name in ("W", _READOUT[self._kind], "prompt"):
            array = model.parameters.get(name)
            parameter = None if array is None else torch.nn.Parameter(torch.tensor(array))
            self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Draw every entry of every parameter from N(0, std²), by the generator of torch."""
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=self.std)

    def forward(
        self, X: Tensor, query: Tensor | None = None, lengths: npt.ArrayLike | None = None
    ) -> Tensor:
        """Compute the outputs, differentiable by every tensor.

        Parameters
        ----------
        X : tensor (n, T, d) of the parameters' dtype, on the CPU
        query : tensor (n, q, d), optional
            An external query, in place of that of the module.
        lengths : integers (n,), optional
            The number of tokens of each sample; what is beyond has no influence.

        Returns
        -------
        tensor of the dtype of X
            (n,) of a classifier, (n, q, p) of a layer.

        Raises
        ------
        TypeError
            If an argument is no dense CPU tensor of float32 or float64, or they are of two dtypes.
        ValueError
            If a shape or a value does not fit.
        """
        asking = self.query if query is None else query
        call = _Call(self._kind, asking, self.scale, self.causal, lengths)
        return call.applied(*self._tensors, X)

    def model(self) -> Any:
        """Make the `mhfast` model that has a copy of the parameters as they are now.

        Returns
        -------
        Classifier or Layer
        """
        return _Call(self._kind, self.query, self.scale, self.causal).model(*self._tensors)

    @classmethod
    def from_model(cls, model: Classifier | Layer) -> Self:
        """Make the module that has a copy of the parameters of an `mhfast` model, and its dtype.

        A run axis is kept, so that one module trains R models.

        Parameters
        ----------
        model : Classifier or Layer
            Of the kind of the module, with a dense W.

        Returns
        -------
        The module.

        Raises
        ------
        TypeError
            If it is another kind of model, or W is a `LowRank`.
        ValueError
            If the model has an external query.
        """
        if not isinstance(model, cls._kind):
            raise TypeError(f"model: expected a {cls._kind.__name__}, got {type(model).__name__}")
        if model.Q is not None:
            raise TypeError("model: expected an array W, got a LowRank")
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        module._take_over(model, 1 / model.dim)
        return module

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.W, getattr(self, _READOUT[self._kind]), self.prompt

    def extra_repr(self) -> str:
        """Describe shapes and settings, for the repr of the module.

        Returns
        -------
        str
        """
        parts = [f"{name}={tuple(tensor.shape)}" for name, tensor in self.named_parameters()]
        parts += [] if self.query is None else [f"query={self.query}"]
        parts += [f"scale={self.scale}"] + ["causal=True"] * self.causal
        return ", ".join([*parts, f"dtype={_short(self.W.dtype)}"])


class MultiHeadClassifier(_Module):
    """A `torch.nn.Module` that computes `classifier`, with parameters W, U and, optionally, prompt.

    Parameters
    ----------
    heads, tokens, dim : int
        H, T and d. U is (H, q, d) with q = `tokens` without a query or prompt, else as many as
        that; for external queries, which come with the calls, `tokens` is their q and T is free.
    query : int, optional
        The token of each sample that is the query; None for all of them.
    prompt_rows : int, optional
        q, for a prompt.
    scale, causal
        As for an `mhfast.Classifier`.
    std : float, optional
        Initial standard deviation of all parameters, at least 0. The default 1/d gives logits of
        order 1 if the entries of tokens are of order 1.
    dtype : torch.float32 or torch.float64, optional
        None means torch.get_default_dtype().

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind or out of range.
    """

    _kind = Classifier

    def __init__(
        self,
        heads: int,
        tokens: int,
        dim: int,
        *,
        query: int | None = None,
        prompt_rows: int | None = None,
        scale: float = 1.0,
        causal: bool = False,
        std: float | None = None,
        dtype: Any = None,
    ) -> None:
        sizes = (heads, tokens, dim)
        super().__init__(sizes, query, prompt_rows, scale, causal, std, dtype)


class MultiHeadLayer(_Module):
    """A `torch.nn.Module` that computes `layer`, with parameters W, V and, optionally, prompt.

    Parameters
    ----------
    heads, dim, out_dim : int
        H, d and p.
    query, prompt_rows, scale, causal, std, dtype
        As for a `MultiHeadClassifier`, and so are errors.
    """

    _kind = Layer

    def __init__(
        self,
        heads: int,
        dim: int,
        out_dim: int,
        *,
        query: int | None = None,
        prompt_rows: int | None = None,
        scale: float = 1.0,
        causal: bool = False,
        std: float | None = None,
        dtype: Any = None,
    ) -> None:
        sizes = (heads, dim, out_dim)
        super().__init__(sizes, query, prompt_rows, scale, causal, std, dtype)
