"""Modules of torch whose parameters are those of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..._arguments import checks
from ..._arguments.names import AttentionName
from ...models import Classifier, Layer
from .functions import DTYPES, Settings, applied, short
from .operators import READOUT, Tensor, array, outputs_op, weights_op

if TYPE_CHECKING:
    from typing_extensions import Self


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
        row_map: tuple[AttentionName, bool | None],
        std: float | None,
        dtype: Any,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            raise TypeError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
        model = self._kind.zeros(
            *sizes, query=query, prompt_rows=prompt_rows, scale=scale, causal=causal,
            attention=row_map[0], normalize=row_map[1], dtype=DTYPES[dtype],
        )  # fmt: skip
        self._take_over(model, 1 / model.dim if std is None else std)
        self.reset_parameters()

    def _take_over(self, model: Classifier | Layer, std: float) -> None:
        """Take over the options of `model` and its parameters."""
        if isinstance(model.query, np.ndarray):
            raise ValueError(
                "query: expected None or an integer, got an external query, which is passed to "
                "each call of a module"
            )
        self.query, self.scale, self.causal = model.query, model.scale, model.causal
        self.row_map, self.normalize = str(model.attention), model.normalize
        self.std = checks.finite(std, "std")
        if self.std < 0:
            raise ValueError(f"std: expected a number of at least 0, got {std}")
        for name in ("W", READOUT[self._kind], "prompt"):
            array = model.parameters.get(name)
            parameter = None if array is None else torch.nn.Parameter(torch.tensor(array))
            self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Draw every entry of every parameter from N(0, std²), by the generator of torch.

        Examples
        --------
        >>> import torch
        >>> from mhfast.interop.torch import MultiHeadClassifier
        >>> module = MultiHeadClassifier(heads=3, tokens=5, dim=9)
        >>> before = module.W.clone()
        >>> module.reset_parameters()
        >>> bool((module.W == before).any())
        False
        """
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
            If an argument is not a dense CPU tensor of float32 or float64, or dtypes differ.
        ValueError
            If a shape or a value does not fit.

        Examples
        --------
        >>> import torch
        >>> from mhfast.interop.torch import MultiHeadClassifier
        >>> module = MultiHeadClassifier(heads=3, tokens=5, dim=9)
        >>> X = torch.randn(20, 5, 9, requires_grad=True)
        >>> module(X).sum().backward()
        >>> X.grad.shape, module.W.grad.shape
        (torch.Size([20, 5, 9]), torch.Size([3, 9, 9]))
        """
        return applied(outputs_op, self._settings(query), *self._tensors, X, lengths)

    def attention(
        self, X: Tensor, query: Tensor | None = None, lengths: npt.ArrayLike | None = None
    ) -> Tensor:
        """Compute the attention weights, of softmax(scale · Z_i W_h X_iᵀ), without gradients.

        Parameters
        ----------
        X, query, lengths
            As for a call of the module.

        Returns
        -------
        tensor (n, H, q, T) of the dtype of X
            With a leading run axis if the module or an argument has one.

        Raises
        ------
        TypeError, ValueError
            As for a call of the module.

        Examples
        --------
        >>> import torch
        >>> from mhfast.interop.torch import MultiHeadClassifier
        >>> module = MultiHeadClassifier(heads=3, tokens=5, dim=9)
        >>> A = module.attention(torch.randn(20, 5, 9))
        >>> A.shape, torch.allclose(A.sum(-1), torch.ones(20, 3, 5))
        (torch.Size([20, 3, 5, 5]), True)
        """
        with torch.no_grad():
            return applied(weights_op, self._settings(query), *self._tensors, X, lengths)

    def _settings(self, query: Tensor | None) -> Settings:
        asking = self.query if query is None else query
        return Settings(self._kind, asking, self.scale, self.causal, self.row_map, self.normalize)

    def model(self) -> Any:
        """Return an `mhfast` model with a copy of the current parameters.

        Returns
        -------
        Classifier or Layer

        Examples
        --------
        >>> from mhfast.interop.torch import MultiHeadClassifier
        >>> MultiHeadClassifier(heads=3, tokens=5, dim=9).model()
        Classifier(W=<float32 (3, 9, 9)>, U=<float32 (3, 5, 9)>, scale=1.0)
        """
        W, readout, prompt = map(array, self._tensors)
        settings: Any = {"attention": self.row_map, "normalize": self.normalize}
        return self._kind(
            W, readout, self.query, prompt, scale=self.scale, causal=self.causal, **settings
        )

    @classmethod
    def from_model(cls, model: Classifier | Layer) -> Self:
        """Create a module with a copy of the parameters of an `mhfast` model, of the same dtype.

        A run axis is kept, so that one module trains R models.

        Parameters
        ----------
        model : Classifier or Layer
            Of the kind of the module, with a dense W.

        Returns
        -------
        MultiHeadClassifier or MultiHeadLayer

        Raises
        ------
        TypeError
            If it is another kind of model, W is a `LowRank` or V a `ValueOutput`.
        ValueError
            If the model has an external query.

        Examples
        --------
        >>> import mhfast as mh
        >>> from mhfast.interop.torch import MultiHeadClassifier
        >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.1, seed=0)
        >>> module = MultiHeadClassifier.from_model(model)
        >>> bool((module.model().W == model.W).all())
        True
        """
        if not isinstance(model, cls._kind):
            raise TypeError(f"model: expected a {cls._kind.__name__}, got {type(model).__name__}")
        if model.Q is not None:
            raise TypeError("model: expected an array W, got a LowRank")
        if model.A is not None:
            raise TypeError("model: expected an array V, got a ValueOutput")
        module = cls.__new__(cls)
        torch.nn.Module.__init__(module)
        module._take_over(model, 1 / model.dim if model.parameters else 0.0)
        return module

    @property
    def _tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.W, getattr(self, READOUT[self._kind]), self.prompt

    def extra_repr(self) -> str:
        """Describe shapes and settings, for the repr of the module.

        Returns
        -------
        str

        Examples
        --------
        >>> from mhfast.interop.torch import MultiHeadClassifier
        >>> MultiHeadClassifier(heads=3, tokens=5, dim=9)
        MultiHeadClassifier(W=(3, 9, 9), U=(3, 5, 9), scale=1.0, dtype=float32)
        """
        parts = [f"{name}={tuple(tensor.shape)}" for name, tensor in self.named_parameters()]
        parts += [] if self.query is None else [f"query={self.query}"]
        parts += [f"scale={self.scale}"] + ["causal=True"] * self.causal
        parts += [f"attention={self.row_map!r}"] * (self.row_map != "softmax")
        parts += [] if self.normalize is None else [f"normalize={self.normalize}"]
        parts += [f"dtype={short(parameter.dtype)}" for parameter in self.parameters()][:1]
        return ", ".join(parts)


class MultiHeadClassifier(_Module):
    """A `torch.nn.Module` that computes `classifier`, with parameters W, U and, optionally, prompt.

    Parameters
    ----------
    heads, tokens, dim : int
        H, T and d. U is (H, q, d), where q = `tokens` without a query or prompt, else the number of
        their rows; for external queries, which are passed to each call, `tokens` is their q and T
        may vary.
    query : int, optional
        The token of each sample that is the query; None for all of them.
    prompt_rows : int, optional
        q, for a prompt.
    scale, causal, attention, normalize
        As for an `mhfast.Classifier`. The name of the row map is kept as `row_map`.
    std : float, optional
        Initial standard deviation of all parameters, at least 0. The default 1/d gives logits of
        order 1 if the entries of tokens are of order 1.
    dtype : torch.float32 or torch.float64, optional
        None means torch.get_default_dtype().

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind or out of range.

    Examples
    --------
    >>> import torch
    >>> from mhfast.interop.torch import MultiHeadClassifier
    >>> _ = torch.manual_seed(0)
    >>> X = torch.randn(50, 5, 9)
    >>> y = X[:, 0, 0].sign()
    >>> module = MultiHeadClassifier(heads=3, tokens=5, dim=9)
    >>> optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    >>> losses = []
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     loss = torch.nn.functional.softplus(-y * module(X)).mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     losses.append(loss.item())
    >>> losses[-1] < 0.5 * losses[0]
    True
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
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
        std: float | None = None,
        dtype: Any = None,
    ) -> None:
        sizes = (heads, tokens, dim)
        row_map = (attention, normalize)
        super().__init__(sizes, query, prompt_rows, scale, causal, row_map, std, dtype)


class MultiHeadLayer(_Module):
    """A `torch.nn.Module` that computes `layer`, with parameters W, V and, optionally, prompt.

    Parameters
    ----------
    heads, dim, out_dim : int
        H, d and p.
    query, prompt_rows, scale, causal, attention, normalize, std, dtype
        As for a `MultiHeadClassifier`, and so are errors.

    Examples
    --------
    >>> import torch
    >>> from mhfast.interop.torch import MultiHeadLayer
    >>> attention = MultiHeadLayer(heads=3, dim=9, out_dim=2)
    >>> block = torch.nn.Sequential(attention, torch.nn.Linear(2, 4))
    >>> block(torch.randn(20, 5, 9)).shape
    torch.Size([20, 5, 4])
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
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
        std: float | None = None,
        dtype: Any = None,
    ) -> None:
        sizes = (heads, dim, out_dim)
        row_map = (attention, normalize)
        super().__init__(sizes, query, prompt_rows, scale, causal, row_map, std, dtype)
