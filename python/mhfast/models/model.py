"""Common to the models: query side, parameters by name, calls and run axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from .. import _core, config
from .._arguments import checks, losses
from .._arguments.lists import AXES, PARAMETERS
from .._arguments.losses import Loss
from .._arguments.own_losses import raise_error_of
from .._arguments.values import Array, Optional, Value, describe, field_values, same_fields
from ..dataset.dataset import Dataset
from . import problem as arguments
from . import validation
from .accuracy import accuracy
from .attention import Attention
from .low_rank import LowRank
from .problem import CoreModel
from .value_output import ValueOutput

if TYPE_CHECKING:
    from typing_extensions import Self


class Model:
    """Multi-head attention with a readout: the base class of `Classifier` and `Layer`."""

    losses: ClassVar[tuple[str, ...]]
    """The names of the losses that are defined for the outputs of the model."""

    W: Any  # Array, LowRank or None for identities; which one, callers know
    query: int | Array | None
    prompt: Optional
    scale: float
    causal: bool

    _sizes: tuple[int, int | None, np.dtype[Any] | None]  # H; d and the dtype, None for any

    @property
    def heads(self) -> int:
        """The number H of heads."""
        return self._sizes[0]

    @property
    def dim(self) -> int:
        """The dimension d of a token.

        Raises
        ------
        AttributeError
            If the model has no array: such a layer takes tokens of any dimension.
        """
        dim = self._sizes[1]
        if dim is None:
            raise AttributeError(f"dim: expected a model with an array, got {self!r}")
        return dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of parameters, data and results: float32 or float64.

        Raises
        ------
        AttributeError
            If the model has no array: such a layer takes both.
        """
        dtype = self._sizes[2]
        if dtype is None:
            raise AttributeError(f"dtype: expected a model with an array, got {self!r}")
        return dtype

    @property
    def Q(self) -> Optional:  # noqa: N802  (the name of the parameter)
        """The query factor (H, d, r) of a `LowRank` W, else None."""
        return self.W.Q if isinstance(self.W, LowRank) else None

    @property
    def K(self) -> Optional:  # noqa: N802
        """The key factor (H, d, r) of a `LowRank` W that is not tied, else None."""
        return self.W.K if isinstance(self.W, LowRank) else None

    @property
    def A(self) -> Optional:  # noqa: N802
        """The value factor (H, d, r) of a V that is a `ValueOutput`, else None.

        Examples
        --------
        >>> import mhfast as mh
        >>> layer = mh.Layer.zeros(heads=3, dim=9, out_dim=4, value_rank=2)
        >>> layer.A.shape, layer.B.shape
        ((3, 9, 2), (3, 2, 4))
        """
        return V.A if isinstance(V := getattr(self, "V", None), ValueOutput) else None

    @property
    def B(self) -> Optional:  # noqa: N802
        """The output factor (H, r, p) of a V that is a `ValueOutput`, else None.

        Examples
        --------
        >>> import mhfast as mh
        >>> mh.Layer.zeros(heads=3, dim=9, out_dim=4).B is None
        True
        """
        return V.B if isinstance(V := getattr(self, "V", None), ValueOutput) else None

    @property
    def runs(self) -> int | None:
        """The length R of the run axis, None if neither a parameter nor the query has one."""
        return self._core.runs.length or None

    @cached_property
    def parameters(self) -> Mapping[str, Array]:
        """The arrays that can be trained, by name: W or Q and K, U, V or A and B, any prompt.

        A W or V that is None, an identity, is not among them.
        """
        arrays = ((name, getattr(self, name, None)) for name in PARAMETERS)
        return MappingProxyType(
            {
                name: array
                for name, array in arrays
                if not (array is None or isinstance(array, LowRank | ValueOutput))
            }
        )

    @cached_property
    def _core(self) -> CoreModel:
        return arguments.core_model(self)

    @property
    def _rows(self) -> int | None:
        """The number q of query rows, None if the parameters do not determine it."""
        raise NotImplementedError

    @property
    def _out_dim(self) -> int:
        """The length p of an output row, 0 if the output is a number, -1 if it is any d."""
        raise NotImplementedError

    def _query_rows(self, tokens: int) -> int:
        """Return the number q of query rows for samples of T = `tokens`."""
        q = validation.rows(self.query, self.prompt) if self._rows is None else self._rows
        return tokens if q is None else q

    def _targets(self, n: int, q: int, loss: str) -> tuple[str, tuple[int, ...]]:
        """Return the shape of targets without a run axis, as letters and as lengths."""
        raise NotImplementedError

    def __call__(
        self,
        X: npt.ArrayLike | Dataset,
        *,
        query: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> Array:
        """Compute the outputs of the model.

        Parameters
        ----------
        X : array (n, T, d) of the model's dtype, or Dataset
        query : array (n, q, d), optional
            An external query, in place of the model's own.
        lengths : integers (n,), optional
            The number of tokens of each sample; what is beyond has no influence.
        num_threads : int, optional
            Threads for this call, in place of the default.

        Returns
        -------
        array of the model's dtype
            (n,) of a `Classifier`, (n, q, p) of a `Layer`; with a leading R if the model or an
            argument has a run axis. The result of a sample does not depend on the others. In
            self-attention the rows of a layer at and beyond `lengths` are 0.

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit the model.
        """
        seen = arguments.problem(self, X, query=query, lengths=lengths, words=True)
        return self._outputs(seen, num_threads)

    def _outputs(self, seen: arguments.CoreProblem, num_threads: int | None) -> Array:
        return _core.outputs(
            seen.data, self._core.parameters, runs=seen.runs.length, scale=self.scale,
            causal=seen.causal, row_map=self._core.row_map, threads=config.threads(num_threads),
        )  # fmt: skip

    @property
    def attention(self) -> Attention:
        """The name of the row map, which can be called: ``model.attention(X)`` are the weights.

        Called with X (n, T, d) or a Dataset, and as keywords with query, lengths and num_threads as
        the model is, it returns the weights (n, H, q, T) of the model's dtype, with a leading R
        where there is a run axis. Rows of softmax sum to one; a row that sees no token is 0, and so
        is every weight of an unseen token.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> model.attention(data).shape  # (n, H, q, T)
        (20, 3, 5, 5)
        >>> model.attention == "softmax"
        True
        """
        return Attention(self)

    @property
    def normalize(self) -> bool | None:
        """Whether weights are divided by the tokens of the row; None: by the default of the map.

        Examples
        --------
        >>> import mhfast as mh
        >>> linear = mh.Layer.zeros(heads=3, dim=9, out_dim=2, attention="linear", normalize=False)
        >>> linear.normalize
        False
        """
        normalize: bool | None = vars(self)["_row_map"][1]
        return normalize

    def loss(
        self,
        X: npt.ArrayLike | Dataset,
        y: npt.ArrayLike | None = None,
        *,
        loss: Loss = "logistic",
        query: npt.ArrayLike | None = None,
        weight: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> Value:
        """Compute the mean loss, the value of `mhfast.value_and_grad`.

        Parameters
        ----------
        X : array (n, T, d) of the model's dtype, or Dataset
            With a Dataset, y, query, weight and lengths are its own.
        y : array of the shape of the outputs, optional
            Targets, as for `mhfast.value_and_grad`.
        loss : str
            The name of the loss, as for `mhfast.value_and_grad`.
        query : array (n, q, d), optional
            An external query, in place of the model's own.
        weight : array (n,), or (n, q) for the rows of a layer, optional
            Weights, finite and >= 0; None means ones.
        lengths : integers (n,), optional
            The number of tokens of each sample; what is beyond has no influence.
        num_threads : int, optional
            Threads for this call, in place of the default.

        Returns
        -------
        float, or float64 array (R,) with a run axis

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> round(model.loss(data), 6)
        0.693147
        """
        loss = arguments.loss(self, loss, X.y if isinstance(X, Dataset) else y)
        kind = losses.name_of(loss)
        seen = arguments.problem(
            self, X, y, loss=kind, query=query, weight=weight, lengths=lengths, words=True
        )
        of_loss = losses.core(loss)
        value, _ = _core.value_and_grad(
            seen.data, self._core.parameters, runs=seen.runs.length, scale=self.scale,
            causal=seen.causal, row_map=self._core.row_map, loss=of_loss, wrt=0,
            threads=config.threads(num_threads),
        )  # fmt: skip
        raise_error_of(of_loss)
        return value

    def accuracy(
        self,
        X: npt.ArrayLike | Dataset,
        y: npt.ArrayLike | None = None,
        *,
        loss: Loss = "logistic",
        query: npt.ArrayLike | None = None,
        weight: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> Value:
        """Compute the weighted share of outputs of the right sign, or of rows of the right class.

        Parameters
        ----------
        X : array (n, T, d) of the model's dtype, or Dataset
            With a Dataset, y, query, weight and lengths are its own.
        y : array of the shape of the outputs, optional
            Targets, as for `mhfast.value_and_grad`.
        loss : str
            "cross_entropy" for classes; any other for labels -1 and 1.
        query : array (n, q, d), optional
            An external query, in place of the model's own.
        weight : array (n,), or (n, q) for the rows of a layer, optional
            Weights, finite and >= 0; None means ones.
        lengths : integers (n,), optional
            The number of tokens of each sample; what is beyond has no influence.
        num_threads : int, optional
            Threads for this call, in place of the default.

        Returns
        -------
        float, or float64 array (R,) with a run axis

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> model.accuracy(data)  # an output of zero has no sign
        0.0
        """
        loss = arguments.loss(self, loss, X.y if isinstance(X, Dataset) else y)
        kind = losses.name_of(loss)
        seen = arguments.problem(
            self, X, y, loss=kind, query=query, weight=weight, lengths=lengths, words=True
        )
        outputs = self._outputs(seen, num_threads)
        _, Z, targets, weights, visible = seen.data
        assert targets is not None
        itself = Z is None and self.prompt is None  # whose rows end with the tokens
        return accuracy(
            outputs, targets, weights, visible if itself and self._out_dim else None, kind,
            is_layer=self._out_dim != 0, runs=seen.runs.length > 0,
        )  # fmt: skip

    def replace(self, **changes: Any) -> Self:
        """Return the model with other fields, checked as in its constructor.

        Parameters
        ----------
        **changes
            Arguments of the constructor by name, such as ``U=``, ``query=`` or ``scale=``.

        Returns
        -------
        Classifier or Layer
            Of the same kind; fields that are not given are kept.

        Raises
        ------
        TypeError, ValueError
            As the constructor.

        Examples
        --------
        >>> import mhfast as mh
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> model.replace(scale=0.5).scale
        0.5
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def __getitem__(self, index: int | slice | npt.ArrayLike) -> Self:
        """Select a run by an integer, or runs by a slice, integers or a mask.

        Raises
        ------
        TypeError
            If the model has no run axis.
        IndexError
            If the index is out of range, does not select along one axis or selects nothing.
        """
        if self.runs is None:
            raise TypeError(f"expected a {type(self).__name__} with a run axis, got one without")
        chosen = checks.run_index(index, self.runs)
        arrays = dict(self.parameters)
        if isinstance(self.query, np.ndarray):
            arrays["query"] = self.query
        return arguments.with_arrays(
            self,
            {
                name: array[chosen] if array.ndim > AXES[name] else array
                for name, array in arrays.items()
            },
        )

    def __getstate__(self) -> dict[str, Any]:
        return field_values(self) | {"attention": str(self.attention)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    def __repr__(self) -> str:
        text = describe(self, always=("W", "V"))
        if self.attention != "softmax":
            text = f"{text[:-1]}, attention={str(self.attention)!r})"
        if self.normalize is not None:
            text = f"{text[:-1]}, normalize={self.normalize})"
        return text
