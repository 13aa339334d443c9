"""Samples of a `Stack`: what goes from layer to layer, and what its end computes the loss of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments import checks, losses, sample_checks
from .._arguments.lists import OF_ROWS
from .._arguments.losses import Loss
from .._arguments.values import Array
from ..dataset.dataset import Dataset, no_second_source
from ..dataset.words import Tokens, word_numbers
from .layer import Layer

if TYPE_CHECKING:
    from .depth import Stack

Lengths: TypeAlias = npt.NDArray[np.int64] | None


class End(NamedTuple):
    """The end of a stack: a layer whose loss on these samples, times `factor`, is the stack's.

    Where the rows of the last layer are not joined to what it was given, it is that layer.
    Otherwise it is one that returns each row, a sample of one token, as it is.
    """

    layer: Layer
    X: Array | Tokens
    y: npt.NDArray[Any]
    weight: Array | None
    lengths: Lengths
    factor: float = 1.0


def labelled(
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None,
    weight: npt.ArrayLike | None,
    lengths: npt.ArrayLike | None,
) -> tuple[npt.ArrayLike | Tokens, npt.ArrayLike, npt.ArrayLike | None, npt.ArrayLike | None]:
    """Return X, y, weight and lengths, those of a Dataset where X is one."""
    if isinstance(X, Dataset):
        no_second_source(y=y, weight=weight, lengths=lengths)
        no_query(X.query)
        return X._given, X.y, X.weight, X.lengths
    if y is None:
        raise TypeError("y: expected labels beside the array X, got None")
    return X, y, weight, lengths


def samples(
    stack: Stack, X: npt.ArrayLike | Tokens | Dataset, lengths: npt.ArrayLike | None
) -> tuple[Array | Tokens, Lengths]:
    """Check tokens and lengths, and return x_0, with zeros beyond the lengths, and the lengths.

    With an embedding, x_0 are `Tokens`, whatever is beyond the lengths.
    """
    if isinstance(X, Dataset):
        no_second_source(lengths=lengths)
        data = X
        no_query(data.query)
        X, lengths = data._given, data.lengths
    x: Array | Tokens
    if stack.embedding is None:
        x = checks.real(np.asarray(X) if isinstance(X, Tokens) else X, "X", stack.dtype)
        checks.shape(x, "X", "n T d", (None, None, stack.dim))
    else:
        x = Tokens(_words(stack.embedding, X), stack.embedding)
    n, tokens, _ = x.shape
    if tokens == 0:
        raise ValueError(f"X: expected at least one token, got shape {x.shape}")
    if lengths is None:
        return x, None
    visible = sample_checks.lengths(lengths, n, tokens)
    checks.shape(visible, "lengths", "n", (n,))
    return x if isinstance(x, Tokens) else sample_checks.padded(x, visible), visible


def words_apart(stack: Stack, X: npt.ArrayLike | Tokens) -> Tokens:
    """Return the words of a stack's embedding as `Tokens` of other rows, which are never used.

    These differ from word to word and do not depend on the embedding, as a `Dataset` has them while
    the embedding is trained.
    """
    assert stack.embedding is not None
    ids = _words(stack.embedding, X)
    rows = np.arange(len(stack.embedding), dtype=stack.dtype)
    return Tokens(ids, np.repeat(rows[:, None], stack.dim, axis=1))


def _words(embedding: Array, X: npt.ArrayLike | Tokens) -> npt.NDArray[np.int32]:
    words = len(embedding)
    if isinstance(X, Tokens):
        if X.words != words:
            raise ValueError(f"X: expected the {words} words of the embedding, got {X.words}")
        ids = X.ids  # checked when they were made
    else:
        ids = word_numbers(X, "X", words)
    checks.shape(ids, "X", "n T", (None, None))
    return ids


def rows_of(x: Array | Tokens, lengths: Lengths) -> Array:
    """Return x_0 as an array, with zeros beyond the lengths."""
    if not isinstance(x, Tokens):
        return x
    rows = np.asarray(x)
    return rows if lengths is None else sample_checks.padded(rows, lengths)


def after(
    stack: Stack, j: int, x: Array | Tokens, lengths: Lengths, num_threads: int | None
) -> Array:
    """Return x_{j+1} from x_j."""
    rows = stack.layers[j](x, lengths=lengths, num_threads=num_threads)
    kind = stack._residuals[j]
    if kind is False:
        return rows
    before = rows_of(x, lengths)
    return np.concatenate([before, rows], axis=-1) if kind == "concatenate" else before + rows


def end_of(
    stack: Stack,
    x: Array | Tokens,
    y: npt.ArrayLike,
    loss: Loss,
    weight: npt.ArrayLike | None,
    lengths: Lengths,
) -> End:
    """Return the end of a stack, of x_L, or of x_{L-1} where the last residual is False."""
    last = stack.layers[-1]
    if stack._residuals[-1] is False:
        y, weights = np.asarray(y), None if weight is None else np.asarray(weight)
        return End(last, x, y, weights, lengths)
    assert not isinstance(x, Tokens)  # rows are joined to those of a layer
    n, tokens, dim = x.shape
    itself = Layer(np.zeros((1, dim, dim), x.dtype), np.eye(dim, dtype=x.dtype)[None])
    name = losses.name_of(loss)
    letters, shape = itself._targets(n, tokens, name)
    targets = sample_checks.targets(y, name, letters, shape, x.dtype)
    checks.shape(targets, sample_checks.name(name), letters, shape)
    visible, of_rows = None, name in OF_ROWS
    counts: npt.NDArray[Any] = np.ones(n)
    if weight is not None:
        counts, axes = sample_checks.weights(weight, (n, tokens), x.dtype)
        of_rows |= axes == 2
    rows = np.broadcast_to(counts if counts.ndim == 2 else counts[:, None], (n, tokens))
    if lengths is not None:
        visible = np.arange(tokens) < lengths[:, None]
        targets = sample_checks.filled(targets, lengths, name)
        rows = rows * visible
    every = visible is None and weight is None
    return End(
        itself,
        x.reshape(n * tokens, 1, dim),
        targets.reshape(n * tokens, 1, *targets.shape[2:]),
        None if every else rows.astype(x.dtype).ravel(),
        None,
        1.0 if of_rows else float(rows.sum(dtype=np.float64) / counts.sum(dtype=np.float64)),
    )


def no_query(query: object) -> None:
    """Raise ValueError where there is an external query, which a stack does not take."""
    if query is not None:
        raise ValueError("query: expected None, since a Stack is self-attention, got an array")
