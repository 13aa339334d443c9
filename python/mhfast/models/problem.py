"""Models and data in the form that the core expects, for single calls and for training.

A model becomes the tuple `parameters`, samples become a `Problem` with the tuple `data`. Query
tokens, lengths and causal order are resolved here: the core supports an external query side,
lengths and causal rows only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import checks, sample_checks
from .._arguments.checks import Wrt
from .._arguments.lists import AXES, BITS, PARAMETERS, ROW_MAPS
from .._arguments.losses import CLASSES, CrossEntropy, Loss
from .._arguments.own_losses import is_own
from .._arguments.runs import NO_RUNS, RunAxis, repeated
from .._arguments.values import Array, frozen
from ..dataset.dataset import Dataset, no_second_source
from ..dataset.words import Tokens, shape_of
from .low_rank import LowRank
from .value_output import ValueOutput

if TYPE_CHECKING:
    from .depth import Stack
    from .model import Model

M = TypeVar("M", bound="Model")
CoreParameters: TypeAlias = tuple[Array | None, ...]


class CoreWords(NamedTuple):
    """Tokens, or query rows, that are words of a dictionary.

    Parameters
    ----------
    embedding : array (V, d)
    ids : int32 array (n, T), or (n, q)
        Each of the two may have a leading run axis.
    """

    embedding: Array
    ids: npt.NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that an array of these rows has."""
        return shape_of(self.ids, self.embedding)

    @property
    def ndim(self) -> int:
        """The number of axes of that array."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the dictionary."""
        return self.embedding.dtype


CoreTokens: TypeAlias = Array | CoreWords
CoreData: TypeAlias = tuple[
    CoreTokens,
    CoreTokens | None,
    npt.NDArray[Any] | None,
    Array | None,
    npt.NDArray[np.int64] | None,
]
CoreGradients: TypeAlias = tuple[Array | None, ...]


FACTORS = frozenset("QKAB")
"""The parameters that are parts of a W or V."""

READOUTS = ("U", "V", "A", "B")
"""The parameters of readouts: without any of them V is the identity."""

# Measured: tables of all pairs of words, of all heads, that fit into the cache are looked up in
# less time than the products take.
MAX_TABLES = 1 << 22
# Chosen: tables may take this part of the multiply-adds of the samples.
WORDS_PAY = 0.5
# Measured (python -m benchmarks.words, and of one query row): looking up a sample of a head, and
# the gradients of its tables, take as long as so many multiply-adds of float32: in all, for each
# token, for each query row and, of a classifier, for each query row and word up to the most.
LOOKED_UP = {"classifier": (4000, 150, 0, 12), "layer": (6000, 400, 2200, 0)}
MOST_WORDS = 64


class CoreModel(NamedTuple):
    """A model in the form that the core expects, computed once for each model.

    Parameters
    ----------
    parameters : tuple
        The arrays in the order of `PARAMETERS`, None for those that the model does not have.
    runs : Runs
        The run axis of the parameters and of an external query of the model.
    bits : int
        `wrt` for all parameters.
    plain : (q or None, d) or None
        Shape of a sample in self-attention without a run axis, of any number of tokens for a layer;
        such calls take a shorter path.
    row_map_name : str
        How logits become attention weights.
    row_map : RowMap
        The same for the core.
    """

    parameters: CoreParameters
    runs: RunAxis
    bits: int
    plain: tuple[int | None, int] | None
    row_map_name: str
    row_map: _core.RowMap


class CoreProblem(NamedTuple):
    """Samples in the form that the core expects for one model.

    Parameters
    ----------
    data : tuple
        X, Z, y, weight, lengths. Each may have a leading run axis.
    runs : Runs
        The run axis of model and data together; `runs.length` is the `runs` of the core.
    causal : bool
        Whether row t of the query side sees the keys 0 ... t only.
    token : int or int64 array (n,) or (R, n), optional
        The token of each sample that is the query, -1 for none, if an integer query picks it.
    """

    data: CoreData
    runs: RunAxis
    causal: bool
    token: int | npt.NDArray[np.int64] | None = None


def core_model(model: Model) -> CoreModel:
    """Convert a model to the form that the core expects. Models cache the result as ``_core``."""
    arrays = model.parameters
    row_map, normalize = vars(model)["_row_map"]
    by_tokens = ROW_MAPS[row_map] if normalize is None else normalize
    runs = NO_RUNS
    for name, array in arrays.items():
        runs = runs.meet(name, array.shape, AXES[name])
    if isinstance(model.query, np.ndarray):
        runs = runs.meet("query", model.query.shape, AXES["query"])
    simple = model.query is None and model.prompt is None and not runs.length
    rows, dim = model._rows, model._sizes[1]
    return CoreModel(
        _core_parameters(arrays),
        runs,
        sum(BITS[name] for name in arrays),
        (rows, dim) if simple and dim is not None else None,
        row_map,
        _core_row_map(row_map, bool(by_tokens)),
    )


@cache
def _core_row_map(name: str, by_tokens: bool) -> _core.RowMap:
    return _core.RowMap(_core.RowMapName.__members__[name], by_tokens)


def _core_parameters(arrays: Mapping[str, Array]) -> CoreParameters:
    return tuple(map(arrays.get, PARAMETERS))


def named(parameters: CoreParameters) -> dict[str, Array]:
    """Return the arrays of a tuple `parameters` by name, without those that are None."""
    pairs = zip(PARAMETERS, parameters, strict=True)
    return {name: array for name, array in pairs if array is not None}


def with_arrays(model: M, arrays: Mapping[str, Array]) -> M:
    """Return `model` with some parameters, or the query, replaced by name.

    Arrays that are read-only and own their memory are kept, others are copied.
    """
    old = model.parameters
    for name, array in arrays.items():
        before = old.get(name)
        if before is None or array.shape != before.shape or array.dtype != before.dtype:
            return dataclasses.replace(model, **_fields(model, arrays))  # type: ignore[type-var]
    return borrowing(model, {name: frozen(array) for name, array in arrays.items()})


def borrowing(model: M, arrays: Mapping[str, Array]) -> M:
    """Return `model` with parameters replaced by arrays that are neither checked nor copied.

    Shapes and dtypes must be those of the parameters, and arrays C-contiguous. Results of
    validation are reused, since calls and steps of microseconds create models.
    """
    new = {**model.parameters, **arrays}
    made = object.__new__(type(model))
    fields = vars(made)
    fields.update(vars(model))
    fields.update(arrays if FACTORS.isdisjoint(arrays) else _fields(model, arrays))
    fields["parameters"] = MappingProxyType(new)
    _, runs, bits, plain, row_map_name, row_map = model._core
    fields["_core"] = CoreModel(_core_parameters(new), runs, bits, plain, row_map_name, row_map)
    return made


def of_arrays(kind: type[M], arrays: Mapping[str, Any], **settings: Any) -> M:
    """Make a model of its parameters by name; a W or V that is not there is an identity."""
    given = dict(arrays)
    if "Q" in given:
        given["W"] = LowRank(given.pop("Q"), given.pop("K", None))
    if "A" in given:
        given["V"] = ValueOutput(given.pop("A"), given.pop("B"))
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in ("W", "V"):
            given.setdefault(field.name, None)
    return kind(**given, **settings)


def _fields(model: Model, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return the fields of `model` for arrays by name; factors make a W."""
    fields: dict[str, Any] = dict(arrays)
    factors = {name: fields.pop(name) for name in ("Q", "K") if name in fields}
    if factors:
        fields["W"] = LowRank(**{"Q": model.Q, "K": model.K, **factors})
    values = {name: fields.pop(name) for name in ("A", "B") if name in fields}
    if values:
        fields["V"] = ValueOutput(**{"A": model.A, "B": model.B, **values})
    return fields


def trainable(parameters: CoreParameters, names: Iterable[str], runs: int) -> CoreParameters:
    """Return `parameters` for training: those in `names` as writable copies, one for each run.

    With `runs` above 0 these have the leading axis of that length. The others are unchanged.
    """
    trained = set(names)
    return tuple(
        repeated(array, AXES[name], runs) if array is not None and name in trained else array
        for name, array in zip(PARAMETERS, parameters, strict=True)
    )


def wrt(model: Model, names: Wrt, *, inputs: bool = False) -> tuple[str, ...]:
    """Return the names of what to differentiate by, in the order of `AXES`; None means parameters.

    Parameters
    ----------
    inputs : bool
        Whether X, query and embedding may be among the names.

    Raises
    ------
    TypeError
        If `names` is neither a name nor a sequence of names.
    ValueError
        If a name is not one of the model's.
    """
    if names is None:
        return tuple(model.parameters)
    of_inputs = ("X", "query", "embedding") if inputs else ()
    known = (*model.parameters, *of_inputs)
    asked = names_from(names, known, ", ".join(known))
    return tuple(name for name in known if name in asked)


def names_from(names: str | Sequence[str], known: Collection[str], expected: str) -> Sequence[str]:
    """Return the names of a `wrt`, each of which must be among `known`; errors list `expected`."""
    asked = (names,) if isinstance(names, str) else names
    if not isinstance(asked, tuple | Sequence):
        raise TypeError(f"wrt: expected names from {expected}, got {type(names).__name__}")
    for name in asked:
        if name not in known:
            raise ValueError(f"wrt: expected names from {expected}, got {name!r}")
    return asked


def bits(names: Iterable[str]) -> int:
    """Return the names of `wrt` as the bits that the core expects."""
    return sum(BITS[name] for name in names)


def loss(model: Model | Stack, loss: object, y: npt.ArrayLike | None = None) -> Loss:
    """Check a loss of the model; "cross_entropy" of probabilities y becomes that of soft labels.

    Raises
    ------
    ValueError
        If the model does not have this loss, and the message lists its losses; or if labels that
        are probabilities were to be smoothed.
    """
    if is_own(loss):
        return cast(Loss, loss)
    name = loss if type(loss) not in CLASSES.values() else cast(CrossEntropy, loss).name
    if not isinstance(name, str) or name not in model.losses:
        message = f"loss: expected one of {', '.join(model.losses)}, got {loss!r}"
        if name == "cross_entropy":
            message += ", a loss of layers; of two classes labelled -1 and 1 it is 'logistic'"
        raise ValueError(message)
    if name == "cross_entropy" and y is not None and _are_probabilities(model, y):
        if isinstance(loss, CrossEntropy) and loss.smoothing > 0.0:
            raise ValueError(
                f"loss: expected no smoothing of targets that are probabilities, got {loss!r}; "
                "(1 - s) * y + s / p smooths them"
            )
        return "soft_cross_entropy"
    return cast(Loss, loss)


def _are_probabilities(model: Model | Stack, y: npt.ArrayLike) -> bool:
    """Tell whether y has a number for each output of a row, (n, q, p), rather than classes."""
    array = checks.as_array(y, "y")
    outputs = getattr(model, "_out_dim", None)  # -1: as many as features
    if outputs is None:
        outputs = getattr(model, "out_dim")  # noqa: B009  (of a stack)
    return array.dtype.kind == "f" and array.ndim >= 3 and outputs in (-1, array.shape[-1])


def differentiable(model: Model, bits: int) -> None:
    """Raise ValueError if the weights of the model have no derivative by one of the arrays.

    Parameters
    ----------
    model : Classifier or Layer
    bits : int
        `wrt` as bits.
    """
    if model._core.row_map_name == "hardmax" and bits & ~sum(BITS[name] for name in READOUTS):
        readouts = [f"wrt={name!r}, or " for name in READOUTS if name in model.parameters]
        raise ValueError(
            f"attention: 'hardmax' has no derivative by the logits; expected {''.join(readouts)}a "
            "model with another row map"
        )


def problem(
    model: Model,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    loss: str | None = None,
    query: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    runs: RunAxis = NO_RUNS,
    words: bool = False,
    embedding: bool = False,
) -> CoreProblem:
    """Check samples and convert them to the form that the core expects.

    Parameters
    ----------
    model : Classifier or Layer
    X : array (n, T, d), Tokens or Dataset, which then holds y, query, weight and lengths
    y : array, optional
        Targets of the shape that model and loss require.
    loss : str, optional
        A loss of the model; "cotangent" for a real y that is an upstream gradient; None for outputs
        and attention, where y and weight do not matter.
    runs : Runs
        A run axis from another argument, such as lr or the training data.
    embedding : bool
        Whether gradients by the embedding of Tokens are asked for, which change what is cheaper.
    words : bool
        Whether the caller's part of the core looks up Tokens in their dictionary. It then gets them
        as `CoreWords` where that is cheaper than the array of tokens.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape or a value does not fit.
    """
    if isinstance(X, Dataset):
        if not (y is query is weight is lengths is None):
            no_second_source(y=y, query=query, weight=weight, lengths=lengths)
        data = X
        X = data._given
        y, query, weight, lengths = data.y, data.query, data.weight, data.lengths
    core = model._core
    if isinstance(X, Tokens):
        checks.real(X.embedding, "X", model._sizes[2])
        looked_up = words and looks_up(model, X, query, embedding=embedding)
        X = CoreWords(X.embedding, X.ids) if looked_up else np.asarray(X)
    else:
        X = checks.real(X, "X", model._sizes[2])
    if loss is None:
        y = weight = None
    elif y is None:
        raise TypeError("y: expected labels with the array X, got None")
    shape = X.shape
    if query is weight is lengths is None and _is_plain(shape, core.plain) and not runs.length:
        if y is None or loss is None:
            return CoreProblem((X, None, None, None, None), NO_RUNS, model.causal)
        if "U" in model.parameters:
            targets = sample_checks.targets(y, loss, "n", shape[:1], X.dtype)
            if targets.ndim == 1:
                return CoreProblem((X, None, targets, None, None), NO_RUNS, model.causal)

    seen = _seen(model, X, query, lengths, core.runs.join(runs))
    if y is None or loss is None:
        return seen
    return _labelled(model, seen, y, weight, loss)


def _is_plain(shape: tuple[int, ...], plain: tuple[int | None, int] | None) -> bool:
    """Return whether samples of this shape are those of `CoreModel.plain`."""
    if plain is None or len(shape) != 3 or shape[2] != plain[1]:
        return False
    return shape[1] == plain[0] if plain[0] is not None else shape[1] > 0


def looks_up(
    model: Model, X: Tokens, query: npt.ArrayLike | None = None, *, embedding: bool = False
) -> bool:
    """Return whether the core can look up tokens in their dictionary, and that is cheaper.

    Counted are multiply-adds for a head: of the tables of all pairs of words against those of the
    samples, and of a sample against looking it up, which a gradient by the `embedding` always
    gains from. A word that is not finite would spoil what does not see it.
    """
    asking = model.query if query is None else query
    if asking is not None and not isinstance(asking, int):
        return False
    if model.W is None or not set(READOUTS) & set(model.parameters):
        return False  # the core has no tables of identities
    (n, T, d), V = X.shape[-3:], X.words
    if model.heads * V * V * X.dtype.itemsize > MAX_TABLES or not X.is_finite:
        return False
    if not (embedding or words_pay(model, X, asking)):
        return False
    if _looks_up_weights(model, asking, T, V):
        return True
    tables = V * d * (V + d)
    samples = n * T * (d * d + 2.0 * T * d)
    return tables <= WORDS_PAY * samples


def words_pay(model: Model, X: Tokens, asking: object) -> bool:
    """Return whether a sample's products take longer than looking it up; n does not matter."""
    (T, d), has_prompt = X.shape[-2:], model.prompt is not None
    rows = 1 if asking is not None else model._query_rows(T)
    by_W = 0 if has_prompt else 2.0 * rows * d * d  # once for all samples that share a prompt
    products = (by_W + 4.0 * rows * T * d) * X.dtype.itemsize / 4
    kind = "classifier" if "U" in model.parameters else "layer"
    once, of_token, of_row, of_word = LOOKED_UP[kind]
    return products >= once + of_token * T + rows * (of_row + of_word * min(X.words, MOST_WORDS))


def _looks_up_weights(model: Model, asking: object, T: int, V: int) -> bool:
    """Return whether the core looks up weights, not only logits, so that n must not matter."""
    itself = asking is None and model.prompt is None
    softmax = model._core.row_map_name == "softmax"
    return itself and softmax and "U" in model.parameters and V <= _core.WORDS_OF_TOKEN * T


def _seen(
    model: Model,
    X: Array | CoreWords,
    query: npt.ArrayLike | None,
    lengths: npt.ArrayLike | None,
    runs: RunAxis,
) -> CoreProblem:
    """Resolve the query side and the visible keys: a problem without y and weight."""
    if query is not None and model.prompt is not None:
        raise ValueError("query: expected None for a model with a prompt, got an array")
    asking = model.query if query is None else query
    rows = model._rows
    itself = asking is None and model.prompt is None
    checks.shape(X, "X", "n T d", (None, rows if itself else None, model._sizes[1]), runs=True)
    runs = runs.meet("X", X.shape, 3)
    n, tokens, dim = X.shape[-3:]
    visible = None
    if lengths is not None:
        visible = sample_checks.lengths(lengths, n, tokens)
        runs = runs.meet("lengths", visible.shape, 1)

    Z, token, causal = None, None, model.causal
    if query is None and isinstance(asking, int):
        token, prefix = sample_checks.token(asking, tokens, visible)
        if isinstance(X, CoreWords) and np.less(token, 0).any():
            X = np.asarray(Tokens(X.ids, X.embedding))  # a query of zeros is no word
        Z = _picked(X, token)
        if causal:  # one row sees the keys up to its token, as it does with shorter samples
            causal = False
            if np.less(prefix, tokens).any():
                visible = np.full(n, prefix) if isinstance(prefix, int) else prefix
    elif asking is not None:
        Z = checks.real(asking, "query", X.dtype)
        checks.shape(Z, "query", "n q d", (n, rows, dim), runs=True)
        runs = runs.meet("query", Z.shape, 3)
    if tokens == 0:
        raise ValueError(f"X: expected at least one token, got shape {X.shape}")
    if visible is not None and not isinstance(X, CoreWords):
        X = sample_checks.padded(X, visible)
    return CoreProblem((X, Z, None, None, visible), runs, causal, token)


def _picked(X: Array | CoreWords, token: int | npt.NDArray[np.int64]) -> Array | CoreWords:
    """Return the token of each sample as a query side."""
    if isinstance(X, CoreWords):
        ids = sample_checks.picked(X.ids[..., None], token)[..., 0]
        return CoreWords(X.embedding, np.ascontiguousarray(ids))
    return sample_checks.picked(X, token)


def _labelled(
    model: Model, seen: CoreProblem, y: npt.ArrayLike, weight: npt.ArrayLike | None, loss: str
) -> CoreProblem:
    """Add y and weight to a problem without them."""
    X, Z, _, _, lengths = seen.data
    n, tokens = X.shape[-3:-1]
    itself = Z is None and model.prompt is None
    q = tokens if Z is None else Z.shape[-2]
    if model.prompt is not None:
        q = model.prompt.shape[-2]
    letters, shape = model._targets(n, q, loss)
    shape = tuple(X.shape[-1] if length < 0 else length for length in shape)
    targets = sample_checks.targets(y, loss, letters, shape, X.dtype)
    runs = seen.runs.meet(sample_checks.name(loss), targets.shape, len(shape))
    weights = None
    if weight is not None:
        weights, axes = sample_checks.weights(weight, shape[:2], X.dtype)
        runs = runs.meet("weight", weights.shape, axes)
    if lengths is not None and itself and letters != "n":
        targets = sample_checks.filled(targets, lengths, loss)
    return seen._replace(data=(X, Z, targets, weights, lengths), runs=runs)
