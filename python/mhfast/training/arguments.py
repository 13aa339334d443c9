"""The arguments of `mhfast.train`, checked and in the form that the core expects."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import checks, losses
from .._arguments.checks import Wrt
from .._arguments.lists import AXES, LETTERS, PARAMETERS, THRESHOLDS
from .._arguments.runs import NO_RUNS, RunAxis
from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..dataset.words import Tokens
from ..gradients import Gradients
from ..models import AnyModel, Model, Stack, depth_parameters
from ..models import problem as _core_arguments
from ..models.depth_parameters import of_layer
from ..models.depth_samples import words_apart
from ..models.distinct import Compact, compact
from ..models.problem import CoreParameters, CoreProblem
from ..optimizers import OPTIMIZERS, ByParameter, Optimizer, Solver, StepRule
from .history import NamedRows
from .quantities import MissingFunction, Record
from .run import Run, Stop
from .run_axis import settled_steps
from .subspace import Subspace

Pair: TypeAlias = tuple[npt.ArrayLike, npt.ArrayLike]
Tests: TypeAlias = Dataset | Pair | Mapping[str, Dataset | Pair]
Direction: TypeAlias = Gradients | Model | Mapping[str, npt.ArrayLike]
Directions: TypeAlias = Direction | Sequence[Direction] | Mapping[str, Direction]


_OTHERS = {"MirrorDescent": ", p", "SteepestDescent": ", norm"}  # what must be given beside lr


def optimizer(value: Optimizer | Solver | None) -> Optimizer:
    """Return the optimizer; TypeError if it is not one."""
    if not isinstance(value, StepRule):
        raise TypeError(f"optimizer: expected {_optimizers(value)}, got {value!r:.80}")
    return value


def _optimizers(value: object) -> str:
    """Return what to write in place of a name, a class or anything else."""
    known = {kind.__name__: kind for kind in OPTIMIZERS}
    name = getattr(value, "__name__", value)
    plain = {"".join(filter(str.isalpha, key)).lower(): key for key in known}
    plain |= {kind.name.replace("_", ""): key for key, kind in known.items()}
    plain |= {"sgd": "GradientDescent", "gd": "GradientDescent"}
    if isinstance(name, str):
        key = plain.get("".join(filter(str.isalpha, name)).lower())
        if key is not None:
            return f"a made one, such as mhfast.{key}(lr{_OTHERS.get(key, '')})"
    return f"one of {', '.join(known)}, such as GradientDescent(lr)"


def settings_of_parameters(optimizer: Optimizer | Solver, model: AnyModel) -> None:
    """Raise ValueError if a setting is given for a parameter that the model does not have.

    Or if it has none at all.
    """
    if not model.parameters:
        raise ValueError(f"model: expected a parameter to train, got {model!r}")
    names = dict.fromkeys(of_layer(name)[1] for name in model.parameters)
    for setting, value in vars(optimizer).items():
        if type(value) is not ByParameter:
            continue
        for name in value:
            if name not in names:
                known = ", ".join(names)
                raise ValueError(
                    f"{setting}: expected names of parameters of the model, {known}, got {name!r}"
                )


def dataset(X: npt.ArrayLike | Dataset, y: npt.ArrayLike | None, model: AnyModel) -> Dataset:
    """Return the training data; lists of numbers adapt to the dtype of the model."""
    if isinstance(model, Stack) and model.embedding is not None:
        if isinstance(X, Dataset):
            return as_dataset(X, y)._with(X=words_apart(model, X._given))
        return as_dataset(words_apart(model, X), y)
    if isinstance(X, Dataset):
        return as_dataset(X, y)
    dtype = model.dtype if isinstance(model, Stack) else model._sizes[2]
    if isinstance(X, Tokens):
        checks.real(X.embedding, "X", dtype)
        return as_dataset(X, y)
    return as_dataset(checks.real(X, "X", dtype), y)


def tests(test: Tests | None, model: AnyModel) -> dict[str, Dataset]:
    """Return the test sets by name.

    Raises
    ------
    TypeError
        If something is neither a Dataset nor a pair (X, y), or a name is not a str.
    """
    if test is None:
        return {}
    if not isinstance(test, Mapping):
        test = {"test": test}
    sets = {}
    for name, data in test.items():
        if not isinstance(name, str):
            raise TypeError(f"test: expected names of type str, got {name!r}")
        if isinstance(data, Dataset):
            sets[name] = data
        elif isinstance(data, tuple | list) and len(data) == 2:
            sets[name] = dataset(*data, model)
        else:
            raise TypeError(
                f"test: expected a Dataset, a pair (X, y) or a dict of them, "
                f"got {type(data).__name__}"
            )
    return sets


def problems(
    run: Run, data: Dataset, tests: Mapping[str, Dataset], words: bool = True
) -> tuple[CoreProblem, list[CoreProblem]]:
    """Return training data and test sets as the core reads them.

    Returns
    -------
    problem, test_problems
        The run axis of the first is that of the model, the step sizes and all data together.

    Raises
    ------
    TypeError, ValueError
        If data do not fit the model, or run axes differ; the message names the test set.
    """
    rates = getattr(run.optimizer, "lr", None)
    runs = NO_RUNS
    for part in rates.values() if isinstance(rates, Mapping) else (rates,):
        runs = runs.meet("lr", (len(part),), 0) if isinstance(part, tuple) else runs
    if run.batches is not None and isinstance(run.batches.seed, tuple):
        runs = runs.meet("seed", (len(run.batches.seed),), 0)
    for name, groups, axes in (
        ("token_groups", data.token_groups, 2),
        ("sample_groups", data.sample_groups, 1),
    ):
        runs = runs if groups is None else runs.meet(name, groups.index.shape, axes)
    loss = losses.name_of(run.loss)
    problem = _core_arguments.problem(run.model, data, loss=loss, runs=runs, words=words)
    runs = problem.runs
    test_problems = []
    for name, test in tests.items():
        try:
            checked = _core_arguments.problem(run.model, test, loss=loss, runs=runs, words=True)
            if checked.causal != problem.causal:
                raise ValueError("query: expected rows of the same kind as those of X in training")
        except (TypeError, ValueError) as error:
            raise type(error)(f"test set {name!r}: {error}") from error
        test_problems.append(checked)
        runs = checked.runs
    return problem._replace(runs=runs), test_problems


class Samples(NamedTuple):
    """Training data and test sets as training goes over them, see `mhfast.models.distinct`.

    Attributes
    ----------
    train : Compact
        The training data.
    tests : dict of Dataset by name
    problem, test_problems : the same as the core reads them
    """

    train: Compact
    tests: dict[str, Dataset]
    problem: CoreProblem
    test_problems: list[CoreProblem]


def compacted(
    run: Run,
    data: Dataset,
    tests: Mapping[str, Dataset],
    given: tuple[CoreProblem, list[CoreProblem]],
    *,
    inside: Subspace | None = None,
    together: bool = True,
) -> Samples:
    """Return data as training goes over them.

    Parameters
    ----------
    run : Run
    data, tests : the data that were given
    given : what `problems` returns of them, which has checked them
    inside : Subspace, optional
        The span of the tokens, if training goes on there.
    together : bool
        Whether steps are taken on all samples of the training data, so that these may be replaced.
    """
    model = run.model if inside is None else inside.model
    train = compact(model, data, run.loss) if together else Compact(data)
    if not tests and train.data is data:  # at once, since calls of few microseconds come here
        return Samples(train, {}, *given)
    sets = {name: compact(model, test, run.loss).data for name, test in tests.items()}
    if train.data is data and all(sets[name] is test for name, test in tests.items()):
        return Samples(train, sets, *given)
    problem, test_problems = problems(run, train.data, sets)
    problem = given[0] if train.data is data else problem._replace(runs=given[0].runs)
    return Samples(train, sets, problem, test_problems)


def core_record(rows: NamedRows, data: Dataset) -> _core.Record:
    """Return a record in the form that the core expects; ``data`` are the training data."""
    entry = rows.entry
    groups: dict[str, npt.NDArray[np.int64]] = {}
    if entry.name == "attention_groups":
        assert data.token_groups is not None  # or there would be no rows
        samples = data.sample_groups
        groups["sample_groups"] = np.zeros(data.n, np.int64) if samples is None else samples.index
        groups["token_groups"] = data.token_groups.index
    return _core.Record(
        name=entry.name, dataset=entry.dataset, every=entry.every, buffer=rows.buffer, **groups
    )


def directions(
    given: Directions | None, model: Model, runs: RunAxis = NO_RUNS
) -> dict[str, CoreParameters]:
    """Return directions in the form that the core expects, under the keys of their cosines.

    A single one is "cosine"; one of several is "cosine_<name>", without names "cosine_0", ...

    Raises
    ------
    TypeError
        If something is not a direction, or has another dtype than the model.
    ValueError
        If a name or a shape does not fit the model, or a direction has no entry other than zero.
    """
    if given is None:
        return {}
    if _is_direction(given):
        return {"cosine": _direction("directions", given, model, runs)}
    if isinstance(given, Mapping):
        several: dict[str, object] = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        several = {str(j): one for j, one in enumerate(given)}
    else:
        raise TypeError(
            f"directions: expected Gradients, or a dict or sequence of them, "
            f"got {type(given).__name__}"
        )
    return {
        f"cosine_{name}": _direction(f"directions[{name!r}]", one, model, runs)
        for name, one in several.items()
    }


def _is_direction(given: object) -> bool:
    """Return whether this is one direction, as a dict of arrays by parameter is, or several."""
    if isinstance(given, Gradients | Model):
        return True
    return isinstance(given, Mapping) and any(
        name in PARAMETERS and not _is_direction(value) for name, value in given.items()
    )


def _direction(label: str, given: object, model: Model, runs: RunAxis) -> CoreParameters:
    if isinstance(given, Model):
        parts: Mapping[str, npt.ArrayLike | None] = given.parameters
    elif isinstance(given, Gradients):
        parts = {name: getattr(given, name) for name in AXES}
    elif isinstance(given, Mapping):
        parts = given
    else:
        raise TypeError(f"{label}: expected Gradients, got {type(given).__name__}")
    arrays: dict[str, Array] = {}
    somewhere: Any = False
    for name, part in parts.items():
        if part is None:
            continue
        if name not in model.parameters:
            known = ", ".join(model.parameters)
            raise ValueError(f"{label}: expected parts among {known}, got {name!r}")
        axes = AXES[name]
        array = checks.real(part, f"{label}.{name}", model.dtype)
        shape = model.parameters[name].shape[-axes:]
        checks.shape(array, f"{label}.{name}", LETTERS[name], shape, runs=runs.length > 0)
        runs = runs.meet(f"{label}.{name}", array.shape, axes)
        arrays[name] = array
        somewhere = somewhere | array.any(axis=tuple(range(-axes, 0)))
    if not np.all(somewhere):
        raise ValueError(f"{label}: expected an entry other than zero, got none")
    return tuple(map(arrays.get, PARAMETERS))


def steps(value: object) -> int:
    """Return the number of steps, at least 0."""
    number = checks.integer(value, "steps")
    if number < 0:
        raise ValueError(f"steps: expected an integer of at least 0, got {number}")
    return number


def last_step(first: int, count: int | None, until: int | None) -> int:
    """Return the step at which to end, from ``steps`` or ``until`` of `mhfast.train`.

    Raises
    ------
    TypeError
        If neither or both are given.
    ValueError
        If there are fewer than 0 steps, or the run is beyond ``until``.
    """
    if (count is None) == (until is None):
        got = "neither" if until is None else "both"
        raise TypeError(f"steps, until: expected one of them, got {got}")
    if until is None:
        return first + steps(count)
    last = checks.integer(until, "until")
    if last < first:
        raise ValueError(f"until: expected at least {first}, the step of the run, got {last}")
    return last


def wrt(model: AnyModel, names: Wrt) -> tuple[str, ...]:
    """Return the names of the trained parameters, at least one."""
    if isinstance(model, Stack):
        asked = depth_parameters.wrt(model, names)
    else:
        asked = _core_arguments.wrt(model, names)
    if not asked:
        raise ValueError(f"wrt: expected at least one of {', '.join(model.parameters)}, got none")
    return asked


def stop(value: Stop) -> Stop:
    """Return thresholds as a dict of floats, or the function.

    Raises
    ------
    TypeError
        If it is neither a dict of numbers nor a function.
    ValueError
        If a threshold is unknown or not finite, or the function of a saved run is missing.
    """
    if isinstance(value, MissingFunction):
        value.refuse("stop")
    if callable(value):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"stop: expected a dict of thresholds or a function, got {value!r}")
    for name in value:
        if name not in THRESHOLDS:
            raise ValueError(f"stop: expected names from {', '.join(THRESHOLDS)}, got {name!r}")
    return {name: checks.finite(number, f"stop[{name!r}]") for name, number in value.items()}


def carry(error: Exception, run: Run[Any]) -> None:
    """Attach the run to the exception, so that nothing recorded is lost."""
    vars(error)["run"] = run
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"Training ended at step {run.step}; .run holds the run so far.")


def warn_of_nonfinite(run: Run[Any], first: int, data: Dataset) -> None:
    """Warn if the training that began at step ``first`` could not take one step from it."""
    if run.stopped is None or "nonfinite" not in run.reason:
        return
    reasons = np.atleast_1d(np.asarray(run.reason))
    if not np.any((reasons == "nonfinite") & (np.atleast_1d(run.stopped) == first)):
        return
    parts: dict[str, npt.NDArray[Any] | None] = {
        "X": data.X, "y": data.y, "query": data.query, **run.model.parameters
    }  # fmt: skip
    for name, array in parts.items():
        if array is not None and not np.isfinite(array).all():
            place = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
            cause = f"{name} holds {array[place]} at index {', '.join(map(str, place))}"
            break
    else:
        of_caller = losses.name_of(run.loss) == "own"
        cause = (
            "data and parameters are finite, so "
            + ("the function for the loss returned such values, or " if of_caller else "")
            + "it is too large for their dtype"
        )
    warnings.warn(
        f"no step was taken: the loss or its gradient is not finite at step {first}; {cause}",
        RuntimeWarning,
        stacklevel=3,
    )


def thresholds(value: Stop) -> dict[str, float]:
    """Return the thresholds as the core takes them: none for a function."""
    return {} if callable(value) else {str(name): number for name, number in value.items()}


def frozen(run: Run, *, released: bool) -> npt.NDArray[np.int64]:
    """Return the steps (max(R, 1),) at which runs were frozen, -1 for those that continue.

    Of R runs, those that became non-finite stay frozen, and so do those that a threshold had ended
    unless they are ``released``. A single run always continues from where it ended.
    """
    if not isinstance(run.stopped, np.ndarray):
        return np.full(1, -1, np.int64)
    lasting = ("nonfinite",) if released else ("nonfinite", *THRESHOLDS)
    return np.where([reason in lasting for reason in run.reason], run.stopped, -1)


def since(run: Run, frozen: npt.NDArray[np.int64]) -> int | tuple[int, ...]:
    """Return `Run.since` of a run that continues with those of its runs that are not ``frozen``.

    Such a run has the state of the step where it stopped; the steps that others took meanwhile are
    not its own.
    """
    if not isinstance(run.stopped, np.ndarray):
        return run.since
    missed = np.where((run.stopped >= 0) & (frozen < 0), run.step - run.stopped, 0)
    return settled_steps(run.since + missed)


def restored(record: Record) -> Record:
    """Return ``record``; ValueError if it comes from a saved run and its functions are missing."""
    if isinstance(record, Mapping):
        for what in record:
            if isinstance(what, MissingFunction):
                what.refuse("record")
    return record


def checkpoint(
    value: tuple[str | os.PathLike[str], int] | None,
) -> tuple[str | os.PathLike[str], int] | None:
    """Return the pair (path, every), with a path that can be written to.

    Raises
    ------
    TypeError
        If it is not a pair of a path and an integer.
    ValueError
        If the directory does not exist or "every" is below 1.
    """
    if value is None:
        return None
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise TypeError(f"checkpoint: expected a pair (path, every), got {value!r}")
    path, every = value
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"checkpoint: expected a path, got {type(path).__name__}")
    if not Path(path).parent.is_dir():
        raise ValueError(f"checkpoint: expected an existing directory, got {Path(path).parent}")
    return path, checks.count(every, "checkpoint every")
