"""`evaluate`: every quantity that training can record, for one model, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import config
from .._arguments.checks import Wrt
from .._arguments.losses import Loss
from ..dataset.dataset import Dataset
from ..gradients import Gradients, norm, value_and_grad
from ..models import AnyModel, Stack
from ..models.distinct import Compact
from ..models.problem import loss as checked_loss
from ..optimizers import GradientDescent, core_settings
from . import arguments, quantities
from .arguments import Directions, Tests
from .constraints import Constraints, checked, core, partitions, projected
from .history import of_merged, prepare
from .partition import Partition
from .quantities import OF_ANY_SET, OF_ATTENTION, Entry, Record
from .reduction import Group, refuse_records
from .run import Run, fresh
from .run_axis import spread
from .session import Loop


def evaluate(
    model: AnyModel,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    record: Record = ("loss",),
    loss: Loss | None = None,
    wrt: Wrt = None,
    test: Tests | None = None,
    directions: Directions | None = None,
    start: AnyModel | None = None,
    constraints: Constraints | None = None,
    num_threads: int | None = None,
) -> dict[str, Any]:
    """Compute what training can record of a model, without training.

    The values are bitwise those that `train` on all samples records at step 0 of this model; in
    batches, or in the span of the tokens, it may add them in another order.

    Parameters
    ----------
    model : Classifier, Layer or Stack
    X : array (n, T, d) or (R, n, T, d) of the model's dtype, or Dataset
    y : array
        Targets of the shape that model and loss require; None with a Dataset.
    record : str, function of the model, or sequence of them
        As in `train`: loss, accuracy, margin, grad_norm, param_norm, distance, cosine, the
        parameters, attention, attention_max, attention_groups, and ``test_loss`` and the like.
    loss : str, a loss with a parameter, or a function of outputs and targets
        As in `train`; "logistic" by default.
    wrt : str or tuple of str
        The parameters whose gradient grad_norm is the norm of; all by default.
    test : Dataset, pair (X, y) or dict of them
        Test sets; one without a name is called "test".
    directions : Gradients, model, dict of arrays by parameter, or a dict or sequence of them
        Directions for the record "cosine".
    start : Classifier, Layer or Stack, optional
        The model that distance is measured from; by default ``model`` itself.
    constraints : dict by parameter, optional
        As in `train`: grad_norm is then the norm of the projected gradient.
    num_threads : int, optional
        Number of threads for this call, instead of the default.

    Returns
    -------
    dict
        For each record its value: a float, or an array of the shape that one row of the history of
        `train` has, with a leading R if there is a run axis.

    Raises
    ------
    TypeError
        If an argument has the wrong kind or dtype.
    ValueError
        If a shape, a name or a number does not fit, or ``start`` has other parameters.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.planted_attention(20, 5, 4, 2, seed=0)
    >>> model = mh.Classifier.zeros(3, 5, 4)
    >>> round(mh.evaluate(model, data)["loss"], 6)
    0.693147
    """
    return evaluate_together(
        None, model, X, y, record=record, loss=loss, wrt=wrt, test=test, directions=directions,
        start=start, constraints=constraints, num_threads=num_threads,
    )  # fmt: skip


def evaluate_together(
    group: Group | None,
    model: AnyModel,
    X: npt.ArrayLike | Dataset | Compact,
    y: npt.ArrayLike | None = None,
    *,
    record: Record,
    loss: Loss | None,
    wrt: Wrt,
    test: Tests | None,
    directions: Directions | None,
    start: AnyModel | None = None,
    constraints: Constraints | None = None,
    num_threads: int | None = None,
) -> dict[str, Any]:
    """Do `evaluate` on the samples of all processes of a group, if there is one.

    Training gives data as it goes over them, test sets too.
    """
    rule = GradientDescent(0.0)
    run: Run[Any] = fresh(model, rule)
    data = X.data if isinstance(X, Compact) else arguments.dataset(X, y, model)
    tests = arguments.tests(test, model)
    entries = quantities.parse(record, tuple(model.parameters), tuple(tests))
    if group is not None:
        refuse_records(entries)
    run = run._replace(
        loss=run.loss if loss is None else checked_loss(model, loss, data.y),
        wrt=run.wrt if wrt is None else arguments.wrt(model, wrt),
        start=model if start is None else _like(model, start),
        constraints={} if constraints is None else checked(model, constraints),
    )
    found = partitions(model, run.constraints, run.wrt)
    if isinstance(model, Stack):
        refuse_of_stack(entries, data, tests, directions)
        return of_stack(run, model, data, tests, entries, {}, found, num_threads)
    problem, test_problems = arguments.problems(run, data, tests)
    if isinstance(X, Compact):
        seen = arguments.Samples(X, tests, problem, test_problems)
    else:
        seen = arguments.compacted(run, data, tests, (problem, test_problems))
    run = spread(run, problem.runs.length)
    given = arguments.directions(directions, run.model, problem.runs)
    named, functions = prepare(entries, run.model, data, problem.data, tuple(given), {}, 0, 0)
    named = of_merged(named, seen.train)
    stopped = np.full(run.runs or 1, -1, np.int64)
    loop = Loop(
        run, named, functions, None, None, None, stopped, group=group, samples=data.n,
        constraints=core(found),
    )  # fmt: skip
    settings = core_settings(rule, 0, run.runs, np.zeros(len(stopped), np.int64))
    end = loop.run_core(
        seen.problem, run.start, settings, 0,
        [arguments.core_record(rows, seen.train.data) for rows in named],
        seen.test_problems, list(given.values()), {}, None, config.threads(num_threads),
    )  # fmt: skip
    if end.error is not None:
        raise end.error
    return {
        name: rows[:, 0] if run.runs else _plain(rows[0])
        for name, rows in loop.finish(end).history.items()
    }


def refuse_of_stack(
    entries: Sequence[Entry],
    data: Dataset,
    tests: Mapping[str, Dataset],
    directions: Directions | None,
) -> None:
    """Raise ValueError for records and data that a `Stack` does not have."""
    if directions is not None:
        raise ValueError("directions: expected None beside a Stack, got some")
    for entry in entries:
        if entry.function is None and entry.name in (*OF_ATTENTION, "cosine"):
            raise ValueError(
                f"record: a Stack has no record {entry.key!r}; record a function of the model, "
                "which can call model.attention(X)"
            )
    for name, one in {"the data": data, **tests}.items():
        if one.runs is not None:
            raise ValueError(
                f"X: expected {name} without a run axis beside a Stack, got R = {one.runs}"
            )


def of_stack(
    run: Run[Stack],
    model: Stack,
    data: Dataset,
    tests: Mapping[str, Dataset],
    entries: Sequence[Entry],
    known: Mapping[str, float],
    constraints: Mapping[str, Partition],
    num_threads: int | None,
) -> dict[str, Any]:
    """Return what is to be recorded of a stack, by key.

    Parameters
    ----------
    run : its loss, wrt and start
    model : the stack
    data, tests, entries : the training data, the test sets, what to record
    known : quantities of the training data that need not be computed
    constraints : partitions of trained parameters
    num_threads : int, optional
    """
    sets = [*tests.values(), data]  # the training data have the number -1
    whole: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for entry in entries:
        name, j = entry.name, entry.dataset
        if entry.function is not None:
            found[entry.key] = entry.function(model)
        elif j < 0 and name in known:
            found[entry.key] = known[name]
        elif name in OF_ANY_SET:
            if j not in whole:
                whole[j] = _of_set(model, sets[j], run.loss, num_threads)
            found[entry.key] = whole[j][name]
        elif name == "grad_norm":
            _, g = value_and_grad(model, data, loss=run.loss, wrt=run.wrt, num_threads=num_threads)
            found[entry.key] = norm(projected(g, constraints))
        elif name in model.parameters:
            found[entry.key] = model.parameters[name].copy()
        else:
            start = run.start if name == "distance" else None
            found[entry.key] = norm(model if start is None else _minus(model, start))
    return found


def _minus(model: Stack, start: Stack) -> Gradients:
    parts = []
    for layer, before in zip(model.layers, start.layers, strict=True):
        pairs = layer.parameters.items()
        parts.append(Gradients(**{name: a - before.parameters[name] for name, a in pairs}))
    if model.embedding is None or start.embedding is None:
        return Gradients(layers=tuple(parts))
    return Gradients(layers=tuple(parts), embedding=model.embedding - start.embedding)


def _of_set(model: Stack, data: Dataset, loss: Loss, num_threads: int | None) -> dict[str, Any]:
    """Return loss, accuracy and margin of a stack: those of its end."""
    end, _ = model._end(data, None, loss, None, None, num_threads)
    rows = Dataset(end.X, end.y, weight=end.weight, lengths=end.lengths)
    record: Any = OF_ANY_SET
    found = evaluate_together(
        None, end.layer, Compact(rows), record=record, loss=loss, wrt=None, test=None,
        directions=None, num_threads=num_threads,
    )  # fmt: skip
    return {**found, "loss": end.factor * found["loss"]}


def _like(model: AnyModel, start: AnyModel) -> AnyModel:
    """Return ``start``, whose parameters must be those of ``model`` with other values."""
    if type(start) is not type(model):
        raise TypeError(
            f"start: expected a {type(model).__name__} like the model, got {type(start).__name__}"
        )
    for name, array in model.parameters.items():
        other = start.parameters.get(name)
        if other is None or other.shape != array.shape or other.dtype != array.dtype:
            got = "none" if other is None else f"{other.dtype} of shape {other.shape}"
            raise ValueError(
                f"start: expected {name} of dtype {array.dtype} and shape {array.shape}, got {got}"
            )
    return start


def _plain(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value
