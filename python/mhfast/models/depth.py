"""`Stack`: layers of attention one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import LETTERS
from .._arguments.losses import Loss
from .._arguments.values import Array, field_values, frozen, same_fields, shown
from ..dataset.dataset import Dataset
from . import problem as arguments
from .depth_parameters import by_layer
from .depth_samples import End, after, end_of, labelled, rows_of, samples
from .layer import Layer
from .model import Model

if TYPE_CHECKING:
    from typing_extensions import Self

Residual: TypeAlias = bool | Literal["concatenate"]

RESIDUALS = (True, False, "concatenate")


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Stack:
    """Layers of attention one after the other.

    x_0 = X, or the rows of an embedding whose numbers X holds, and for each layer F_l

        x_{l+1} = x_l + F_l(x_l)        residual=True
        x_{l+1} = [x_l, F_l(x_l)]       residual="concatenate"
        x_{l+1} = F_l(x_l)              residual=False.

    The output is x_L (n, T, p), a row for each token. A layer by itself knows no positions:
    `causal` tells it what came before, and positions are features of the tokens, such as one-hot
    vectors beside them, for which W holds a score for each pair of positions, so for each distance.

    Parameters
    ----------
    layers : sequence of Layer
        At least one, of one dtype, without a run axis, in self-attention: query and prompt None. A
        last layer whose residual is False may have an integer query; the output is then (n, 1, p).
        A layer has the dimension d of the rows that it is given, and p = d where they are added.
    residual : True, False, "concatenate", or a sequence of one of these for each layer
        What is done with the rows of a layer. ``(True, False)`` is a residual layer and one that
        reads out.
    embedding : array (V, d), optional
        A row for each of V words, a parameter as those of the layers are. X then are words,
        integers (n, T) from 0 to V - 1, or `Tokens`, of which the ids are taken.

    Raises
    ------
    TypeError
        If a layer is no `Layer` or has another dtype than the first, as the embedding, or residual
        is of another kind.
    ValueError
        If there is no layer, or one does not fit what it is given.

    Notes
    -----
    A parameter is named by the number of its layer and its name there, "0.W", "1.V"; "W" among
    ``wrt`` stands for that of every layer, and so it does in settings of an optimizer. "embedding"
    belongs to no layer.

    Gradients keep what each layer is given, n T (d_0 + ... + d_{L-1}) numbers, and n T p more of
    the output and its derivative; attention weights are computed again, layer by layer.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> first = mh.Layer.gaussian(2, 6, 6, std=0.5, seed=0, causal=True)
    >>> last = mh.Layer.gaussian(1, 12, 4, std=0.5, seed=1, causal=True)
    >>> stack = mh.Stack([first, last], residual=("concatenate", False))
    >>> X = np.random.default_rng(0).standard_normal((20, 5, 6))
    >>> stack(X).shape, [weights.shape for weights in stack.attention(X)]
    ((20, 5, 4), [(20, 2, 5, 5), (20, 1, 5, 5)])
    >>> x = np.concatenate([X, first(X)], axis=-1)
    >>> bool((stack(X) == last(x)).all())
    True
    >>> stack.depth, stack.dim, stack.out_dim, stack.dtype.name, stack.runs
    (2, 6, 4, 'float64', None)
    >>> list(stack.parameters)
    ['0.W', '0.V', '1.W', '1.V']

    Words whose embedding is trained:

    >>> E = np.random.default_rng(0).standard_normal((7, 6))
    >>> of_words = mh.Stack([first, last], residual=("concatenate", False), embedding=E)
    >>> ids = np.random.default_rng(1).integers(7, size=(20, 5))
    >>> bool(np.allclose(of_words(ids), stack(E[ids])))
    True
    >>> value, g = mh.value_and_grad(of_words, ids, ids % 4, loss="cross_entropy")
    >>> g.embedding.shape, of_words.words
    ((7, 6), 7)
    """

    losses: ClassVar[tuple[str, ...]] = Layer.losses

    layers: tuple[Layer, ...]
    residual: Residual | tuple[Residual, ...] = True
    embedding: Array | None = None

    def __init__(
        self,
        layers: Sequence[Layer],
        residual: Residual | Sequence[Residual] = True,
        *,
        embedding: npt.ArrayLike | None = None,
    ) -> None:
        if isinstance(layers, Model) or not isinstance(layers, Sequence):
            raise TypeError(f"layers: expected a sequence of Layer, got {type(layers).__name__}")
        if not layers:
            raise ValueError("layers: expected at least one, got none")
        kinds = _residuals(residual, len(layers))
        dim = None
        for j, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            _check_layer(f"layers[{j}]", layer, layers[0], kind, dim, is_last=j + 1 == len(layers))
            dim = _next_dim(layer, kind)
        if embedding is not None:
            rows = checks.real(embedding, "embedding", layers[0].dtype, "the layers")
            checks.shape(rows, "embedding", LETTERS["embedding"], (None, layers[0].dim))
            if len(rows) == 0:
                raise ValueError(f"embedding: expected at least one word, got shape {rows.shape}")
            embedding = frozen(rows)
        one = isinstance(residual, bool | np.bool_ | str)
        vars(self).update(
            layers=tuple(layers), residual=kinds[0] if one else kinds, embedding=embedding
        )

    @property
    def depth(self) -> int:
        """The number L of layers."""
        return len(self.layers)

    @property
    def dim(self) -> int:
        """The dimension d of a token."""
        return self.layers[0].dim

    @property
    def out_dim(self) -> int:
        """The dimension p of an output row."""
        return _next_dim(self.layers[-1], self._residuals[-1])

    @property
    def words(self) -> int | None:
        """The number V of words, None where X are tokens."""
        return None if self.embedding is None else len(self.embedding)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of parameters, data and results: float32 or float64."""
        return self.layers[0].dtype

    @property
    def runs(self) -> None:
        """None: a stack has no run axis."""
        return

    @cached_property
    def parameters(self) -> Mapping[str, Array]:
        """The arrays that can be trained, by name: "0.W", "0.V", "1.W", ..., "embedding"."""
        arrays = {
            f"{j}.{name}": array
            for j, layer in enumerate(self.layers)
            for name, array in layer.parameters.items()
        }
        if self.embedding is not None:
            arrays["embedding"] = self.embedding
        return MappingProxyType(arrays)

    @property
    def _residuals(self) -> tuple[Residual, ...]:
        """What is done with the rows of each layer."""
        return _residuals(self.residual, len(self.layers))

    def __call__(
        self,
        X: npt.ArrayLike | Dataset,
        *,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> Array:
        """Compute the outputs x_L.

        Parameters
        ----------
        X : array (n, T, d) of the model's dtype, words (n, T) of its embedding, or Dataset
        lengths : integers (n,), optional
            The number of tokens of each sample; what is beyond has no influence, and its rows are
            0.
        num_threads : int, optional
            Threads for this call, in place of the default.

        Returns
        -------
        array (n, T, p) of the model's dtype
            The result of a sample does not depend on the others.

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit the model.
        """
        return self.activations(X, lengths=lengths, num_threads=num_threads)[-1]

    def activations(
        self,
        X: npt.ArrayLike | Dataset,
        *,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> tuple[Array, ...]:
        """Compute x_0, what every further layer is given, and the output x_L.

        Parameters
        ----------
        X, lengths, num_threads
            As for a call of the stack.

        Returns
        -------
        tuple of L + 1 arrays (n, T, d_l)

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> layers = [mh.Layer.zeros(1, 4, 3), mh.Layer.zeros(2, 7, 3)]
        >>> stack = mh.Stack(layers, residual="concatenate")
        >>> [x.shape for x in stack.activations(np.ones((20, 5, 4)))]
        [(20, 5, 4), (20, 5, 7), (20, 5, 10)]
        """
        x, visible = samples(self, X, lengths)
        found = [rows_of(x, visible)]
        for j in range(self.depth):
            x = after(self, j, x, visible, num_threads)
            found.append(x)
        return tuple(found)

    def attention(
        self,
        X: npt.ArrayLike | Dataset,
        *,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> tuple[Array, ...]:
        """Compute the attention weights of each layer.

        Parameters
        ----------
        X, lengths, num_threads
            As for a call of the stack.

        Returns
        -------
        tuple of L arrays (n, H_l, q, T)
            Of the model's dtype; as those of a `Layer` that is given x_l.

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> stack = mh.Stack([mh.Layer.zeros(3, 4, 4, causal=True)] * 2)
        >>> first, second = stack.attention(np.ones((20, 5, 4)))
        >>> second.shape, second[0, 0, 1].tolist()
        ((20, 3, 5, 5), [0.5, 0.5, 0.0, 0.0, 0.0])
        """
        x, visible = samples(self, X, lengths)
        found = []
        for j, layer in enumerate(self.layers):
            found.append(layer.attention(x, lengths=visible, num_threads=num_threads))
            if j + 1 < self.depth:
                x = after(self, j, x, visible, num_threads)
        return tuple(found)

    def loss(
        self,
        X: npt.ArrayLike | Dataset,
        y: npt.ArrayLike | None = None,
        *,
        loss: Loss = "logistic",
        weight: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> float:
        """Compute the mean loss, the value of `mhfast.value_and_grad`.

        Parameters
        ----------
        X : array (n, T, d) of the model's dtype, words (n, T) of its embedding, or Dataset
            With a Dataset, y, weight and lengths are its own.
        y : array of the shape of the outputs, optional
            Targets, as for `mhfast.value_and_grad`.
        loss : str, a loss with a parameter, or a function of outputs and targets
            As for `mhfast.value_and_grad`.
        weight : array (n,) or (n, T), optional
            Weights of samples or of rows, finite and >= 0; None means ones.
        lengths, num_threads
            As for a call of the stack.

        Returns
        -------
        float

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> stack = mh.Stack([mh.Layer.zeros(1, 4, 4)] * 2)
        >>> value = stack.loss(np.ones((20, 5, 4)), np.zeros((20, 5), int), loss="cross_entropy")
        >>> round(value, 6)  # log 4
        1.386294
        """
        end, name = self._end(X, y, loss, weight, lengths, num_threads)
        value = end.layer.loss(
            end.X, end.y, loss=name, weight=end.weight, lengths=end.lengths,
            num_threads=num_threads,
        )  # fmt: skip
        return end.factor * float(value)

    def accuracy(
        self,
        X: npt.ArrayLike | Dataset,
        y: npt.ArrayLike | None = None,
        *,
        loss: Loss = "logistic",
        weight: npt.ArrayLike | None = None,
        lengths: npt.ArrayLike | None = None,
        num_threads: int | None = None,
    ) -> float:
        """Compute the weighted share of outputs of the right sign, or of rows of the right class.

        Parameters
        ----------
        X, y, loss, weight, lengths, num_threads
            As for `loss`: "cross_entropy" for classes; any other for labels -1 and 1.

        Returns
        -------
        float

        Raises
        ------
        TypeError
            If an argument is of the wrong kind or dtype.
        ValueError
            If a shape or a value does not fit.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> stack = mh.Stack([mh.Layer.zeros(1, 4, 4)] * 2)
        >>> X = np.random.default_rng(0).standard_normal((20, 5, 4))
        >>> stack.accuracy(X, X.argmax(axis=-1), loss="cross_entropy")
        1.0
        """
        end, name = self._end(X, y, loss, weight, lengths, num_threads)
        return float(
            end.layer.accuracy(
                end.X, end.y, loss=name, weight=end.weight, lengths=end.lengths,
                num_threads=num_threads,
            )
        )  # fmt: skip

    def _end(
        self,
        X: npt.ArrayLike | Dataset,
        y: npt.ArrayLike | None,
        loss: object,
        weight: npt.ArrayLike | None,
        lengths: npt.ArrayLike | None,
        num_threads: int | None,
    ) -> tuple[End, Loss]:
        X, y, weight, lengths = labelled(X, y, weight, lengths)
        checked = arguments.loss(self, loss, y)
        x, visible = samples(self, X, lengths)
        for j in range(self.depth - (self._residuals[-1] is False)):
            x = after(self, j, x, visible, num_threads)
        return end_of(self, x, y, checked, weight, visible), checked

    def replace(self, **changes: Any) -> Self:
        """Return the stack with other layers, residual or embedding, checked as when it is made.

        Parameters
        ----------
        **changes
            `layers`, `residual` and `embedding`; what is not given stays.

        Returns
        -------
        Stack

        Raises
        ------
        TypeError, ValueError
            As the constructor.

        Examples
        --------
        >>> import mhfast as mh
        >>> stack = mh.Stack([mh.Layer.zeros(1, 4, 4)] * 2)
        >>> stack.replace(residual=False).residual
        False
        """
        return dataclasses.replace(self, **changes)

    def __getstate__(self) -> dict[str, Any]:
        return field_values(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self, **state)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    def __repr__(self) -> str:
        words = "" if self.embedding is None else f", embedding={shown(self.embedding)}"
        return f"Stack(layers={list(self.layers)}, residual={self.residual!r}{words})"


AnyModel: TypeAlias = Model | Stack
M = TypeVar("M", bound=AnyModel)


def with_arrays(model: M, arrays: Mapping[str, Array], *, borrowed: bool = False) -> M:
    """Return a model or a stack with some parameters replaced by name.

    As `problem.with_arrays`; `borrowed` as `problem.borrowing`.
    """
    change: Any = arguments.borrowing if borrowed else arguments.with_arrays
    if not isinstance(model, Stack):
        changed: M = change(model, arrays)
        return changed
    layers = list(model.layers)
    for j, own in by_layer(arrays).items():
        layers[j] = change(layers[j], own)
    embedding = arrays.get("embedding", model.embedding)
    return dataclasses.replace(model, layers=tuple(layers), embedding=embedding)


def _residuals(residual: object, depth: int) -> tuple[Residual, ...]:
    """Return what is done with the rows of each layer."""
    several = isinstance(residual, Sequence) and not isinstance(residual, str)
    kinds: Any = residual if several else (residual,) * depth
    for kind in kinds:
        if not isinstance(kind, bool | np.bool_ | str):
            raise TypeError(
                "residual: expected True, False, 'concatenate' or one of them for each layer, "
                f"got {type(kind).__name__}"
            )
        if isinstance(kind, str) and kind != "concatenate":
            raise ValueError(f"residual: expected True, False or 'concatenate', got {kind!r}")
    if len(kinds) != depth:
        raise ValueError(f"residual: expected one for each of the {depth} layers, got {len(kinds)}")
    return tuple("concatenate" if isinstance(kind, str) else bool(kind) for kind in kinds)


def _check_layer(
    name: str, layer: object, first: Layer, kind: Residual, dim: int | None, *, is_last: bool
) -> None:
    if not isinstance(layer, Layer):
        raise TypeError(f"{name}: expected a Layer, got {type(layer).__name__}")
    if layer.dtype != first.dtype:
        raise TypeError(f"{name}: expected dtype {first.dtype} like the first, got {layer.dtype}")
    if layer.runs is not None:
        raise ValueError(f"{name}: expected a layer without a run axis, got R = {layer.runs}")
    reads_out = is_last and kind is False
    if layer.prompt is not None or isinstance(layer.query, np.ndarray):
        got = "a prompt" if layer.prompt is not None else "an external query"
        raise ValueError(f"{name}: expected self-attention, query and prompt None, got {got}")
    if layer.query is not None and not reads_out:
        raise ValueError(
            f"{name}: expected query None but for a last layer with residual False, "
            f"got {layer.query}"
        )
    if dim is not None and layer.dim != dim:
        raise ValueError(
            f"{name}: expected dimension d = {dim} of the rows that it is given, got {layer.dim}"
        )
    if kind is True and layer.out_dim != layer.dim:
        raise ValueError(
            f"{name}: expected p = d = {layer.dim} where rows are added, got p = {layer.out_dim}"
        )


def _next_dim(layer: Layer, kind: Residual) -> int:
    return layer.dim + layer.out_dim if kind == "concatenate" else layer.out_dim
