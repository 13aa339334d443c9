"""What `mhfast.train` records: the names, when a record is due and the memory it takes.

| name             | one row of the history                                                        |
|------------------|-------------------------------------------------------------------------------|
| loss             | mean loss, without the l2 term                                                |
| accuracy         | weighted share of outputs with y F > 0; for cross_entropy of rows whose class |
|                  | has the largest output                                                        |
| margin           | smallest y F; for cross_entropy the smallest lead of the class over the others|
| grad_norm        | norm of the gradient of the loss in all that is trained                       |
| param_norm       | norm of all parameters together                                               |
| distance         | norm of all parameters minus those at step 0                                  |
| cosine           | cosine between the parameters and each of `directions`                        |
| W, Q, K, U, V,   | a snapshot of the parameter, of those that the model has                      |
| A, B, prompt,    |                                                                               |
| embedding        |                                                                               |
| W_average, ...   | the mean of a trained parameter over steps: `mhfast.training.averages`        |
| attention        | the weights (n,H,q,T)                                                         |
| attention_max    | (H,), the largest weight of a row, mean over the rows that see a key, each    |
|                  | with the weight that the loss gives it                                        |
| attention_groups | (H, sample groups, token groups), the weight that a row gives to the tokens   |
|                  | of a group, the same mean over the rows of a group's samples                  |

loss, accuracy and margin exist for test sets too, with the name of the set as a prefix:
``test_loss``. All other quantities refer to the training data; anything else can be recorded by a
function of the model. With R runs side by side a row holds R of these, and the history of a record
is an array (R, rows, ...). These are the quantities that Deora, Ghaderi, Taheri, Thrampoulidis, "On
the Optimization and Generalization of Multi-head Attention" and the work on the implicit bias of
attention are about.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import AXES, PARAMETERS, QUANTITIES
from .._arguments.names import RecordName
from ..dataset.dataset import Dataset
from ..models import Model
from ..models.problem import CoreData

Metric: TypeAlias = Callable[[Any], npt.ArrayLike]
Record: TypeAlias = (
    RecordName
    | Metric
    | Sequence[RecordName | Metric]
    | Mapping[Any, int]  # of names and functions; also of test sets, whose names the call knows
)

LIMIT = 2 * 1024**3
"""Bytes that the records of one call of `mhfast.train` may take."""

OF_ANY_SET = tuple(name for name, of in QUANTITIES.items() if of == "data set")
OF_ATTENTION = tuple(name for name, of in QUANTITIES.items() if of == "attention")
AVERAGE = "_average"
"""The end of the name of a record of a parameter's mean over steps."""

SCALARS = tuple(name for name in QUANTITIES if name not in OF_ATTENTION)


def names(parameters: Sequence[str] = PARAMETERS) -> tuple[str, ...]:
    """Return the vocabulary for a model with these parameters."""
    return (*SCALARS, *parameters, *OF_ATTENTION)


@dataclass(frozen=True)
class MissingFunction:
    """A placeholder for a function of a saved or pickled run, whose code is not stored."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *_: object) -> bool:
        """Raise, because the function cannot be called."""
        self.refuse("record or stop")

    def refuse(self, argument: str) -> NoReturn:
        """Raise the ValueError for resuming without the function."""
        raise ValueError(
            f"{argument}: the function {self.name!r} is not kept in a saved or pickled run; "
            f"give {argument}= again to resume"
        )


@dataclass(frozen=True)
class Entry:
    """One record: its key in the history, what it is, how often, and on which data."""

    key: str
    name: str
    every: int
    dataset: int = -1  # -1 the training data, j the j-th test set
    function: Metric | None = None


def parse(
    record: Record,
    parameters: Sequence[str],
    tests: Sequence[str] = (),
    *,
    averages: bool = False,
) -> tuple[Entry, ...]:
    """Turn the argument ``record`` of `mhfast.train` into entries.

    Parameters
    ----------
    record : str, function, sequence of them, or dict of them to int
        Names of quantities, for a test set with the prefix ``<its name>_``, or functions of the
        model. The number is the period in steps; without a dict it is 1.
    parameters : sequence of str
        The names of the parameters of the model.
    tests : sequence of str
        The names of the test sets.
    averages : bool
        Whether means of parameters over steps can be recorded.

    Raises
    ------
    TypeError
        If something is neither a name nor a function, or "every" is not an integer.
    ValueError
        If a name is unknown or given twice, or "every" is below 1.
    """
    if type(record) is str:  # the most frequent records, at once
        record = {record: 1}
    if type(record) is dict and all(map(_is_plain, record.items())):
        return _of_names(tuple(record.items()), tuple(parameters), tuple(tests), averages)
    return _parsed(_pairs(record), parameters, tests, averages)


def _is_plain(pair: tuple[object, object]) -> bool:
    what, every = pair
    return type(what) is str and type(every) is int


@lru_cache(maxsize=64)
def _of_names(
    pairs: tuple[tuple[str, int], ...],
    parameters: tuple[str, ...],
    tests: tuple[str, ...],
    averages: bool,
) -> tuple[Entry, ...]:
    return _parsed(_pairs(dict(pairs)), parameters, tests, averages)


def _parsed(
    pairs: Sequence[tuple[str | Metric, int]],
    parameters: Sequence[str],
    tests: Sequence[str],
    averages: bool,
) -> tuple[Entry, ...]:
    known = _known(tuple(parameters), tuple(tests), averages)
    entries: dict[str, Entry] = {}
    for what, every in pairs:
        if isinstance(what, str):
            if what not in known:
                raise ValueError(_unknown(what, _vocabulary(parameters, averages), tests))
            name, dataset = known[what]
            entry = Entry(what, name, every, dataset)
        else:
            key = getattr(what, "__name__", None)
            if not isinstance(key, str):
                raise TypeError(f"record: expected a function with a __name__, got {what!r}")
            entry = Entry(key, key, every, function=what)
        if entry.key in entries or (entry.function is not None and entry.key in known):
            raise ValueError(f"record: expected different names, got {entry.key!r} twice")
        entries[entry.key] = entry
    return tuple(entries.values())


def _vocabulary(parameters: Sequence[str], averages: bool) -> tuple[str, ...]:
    means = tuple(name + AVERAGE for name in parameters) if averages else ()
    return names(parameters) + means


@cache
def _known(
    parameters: tuple[str, ...], tests: tuple[str, ...], averages: bool
) -> dict[str, tuple[str, int]]:
    """Return the quantity and the data set, -1 those of training, of each key there may be."""
    known = {name: (name, -1) for name in _vocabulary(parameters, averages)}
    for j, test in enumerate(tests):
        known |= {f"{test}_{name}": (name, j) for name in OF_ANY_SET}
    return known


def _pairs(record: Record) -> list[tuple[str | Metric, int]]:
    if isinstance(record, str) or callable(record):
        record = (record,)
    if not isinstance(record, Mapping | Sequence):
        raise TypeError(f"record: expected names or a dict of names to int, got {record!r}")
    pairs = list(record.items()) if isinstance(record, Mapping) else [(w, 1) for w in record]
    for what, _ in pairs:
        if not isinstance(what, str) and not callable(what):
            raise TypeError(f"record: expected a name or a function, got {what!r}")
    return [(what, checks.count(every, f"record {what!r}")) for what, every in pairs]


def _unknown(what: str, vocabulary: Sequence[str], tests: Sequence[str]) -> str:
    message = f"record: expected one of {', '.join(vocabulary)} or a function"
    for test in tests:
        message += f", after '{test}_' also {', '.join(OF_ANY_SET)}"
    if not tests:
        if what in {f"test_{name}" for name in OF_ANY_SET}:
            return f"record: expected test= with {what!r}, got no test set"
        message += ", with test= also names after 'test_'"
    return f"{message}; got {what!r}{close_to(what, vocabulary)}"


def close_to(what: object, known: Iterable[str]) -> str:
    """Return the names that a misspelt one may have meant, as the end of a message."""
    close = difflib.get_close_matches(what, list(known)) if isinstance(what, str) else []
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""


def due_steps(first: int, last: int, every: int) -> npt.NDArray[np.int64]:
    """Return the multiples of ``every`` in [first, last], and ``last``."""
    due = np.arange(-(-first // every) * every, last + 1, every, dtype=np.int64)
    return np.append(due, np.int64(last)) if last % every else due


def count_due(first: int, last: int, every: int) -> int:
    """Count the multiples of ``every`` in [first, last]."""
    return last // every - -(-first // every) + 1


def row_of(
    entry: Entry, model: Model, data: Dataset, core_data: CoreData, directions: int
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of one row, of one run, of a record of the vocabulary.

    Parameters
    ----------
    entry : Entry
    model : Classifier or Layer
    data, core_data : Dataset, tuple
        The training data, and the arrays that the core gets of them.
    directions : int
        How many directions there are.

    Returns
    -------
    shape, dtype
        Parameters and attention have the dtype of model and data, everything else is float64.

    Raises
    ------
    ValueError
        If the record needs directions or token groups and there are none.
    """
    double = np.dtype(np.float64)
    match entry.name:
        case name if name in PARAMETERS:
            return model.parameters[name].shape[-AXES[name] :], model.dtype
        case name if name.endswith(AVERAGE):
            name = name.removesuffix(AVERAGE)
            return model.parameters[name].shape[-AXES[name] :], double
        case "attention":
            X, Z = core_data[:2]
            n, tokens = X.shape[-3:-1]
            rows = next(side for side in (model.prompt, Z, X) if side is not None)
            return (n, model.heads, rows.shape[-2], tokens), X.dtype
        case "attention_max":
            return (model.heads,), double
        case "attention_groups":
            if data.token_groups is None:
                raise ValueError(f"record {entry.key!r}: expected a Dataset with token_groups")
            samples = 1 if data.sample_groups is None else len(data.sample_groups.names)
            return (model.heads, samples, len(data.token_groups.names)), double
        case "cosine":
            if not directions:
                raise ValueError(f"record {entry.key!r}: expected directions=, got none")
            return (directions,), double
        case _:
            return (), double


def check_room(sizes: Mapping[str, int]) -> None:
    """Raise ValueError if records of these sizes, in bytes, take more than `LIMIT` together."""
    total = sum(sizes.values())
    if total > LIMIT:
        largest = max(sizes, key=lambda key: sizes[key])
        raise ValueError(
            f"record: the limit is {_gib(LIMIT)}, these records take {_gib(total)}, of which "
            f"{largest!r} takes {_gib(sizes[largest])}; record it less often, with "
            f"record={{{largest!r}: every}}"
        )


def size_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the bytes of a buffer, as a Python int, which cannot overflow."""
    return math.prod(shape) * dtype.itemsize


def real_value(key: str, value: Any) -> npt.NDArray[Any]:
    """Return what a function has returned for a record as an array; TypeError if it is not real."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"record {key!r}: expected real values, got {value!r:.80}")
    return array


def _gib(size: int) -> str:
    return f"{size / 1024**3:.3g} GiB"
