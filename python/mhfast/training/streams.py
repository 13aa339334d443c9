"""`Stream`: new samples of a population for the steps of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .._arguments import checks, losses
from .._arguments.runs import RunAxis
from ..data.population import Population
from ..data.runs import Populations, side_by_side
from ..dataset.dataset import Dataset
from ..models import Model
from ..models import problem as _core_arguments
from ..models.problem import CoreData, CoreProblem
from ..reference.batches import sample_seed
from .batches import Batches
from .run import Run

Draw: TypeAlias = Callable[..., Dataset]


@dataclass(frozen=True)
class Stream:
    r"""A population that `mhfast.train` draws new samples from, every step or every few steps.

    The samples of steps k = j every, ..., j every + every - 1 are ``function(B, seed=s)``, with
    s = `mhfast.reference.sample_seed`\ (seed, j) for the ``seed`` of `mhfast.train`. From the
    populations of `tokenized_mixture`, `sphere_tokens` and `icl_regression` of `mhfast.data` the
    core draws itself, in the dtype of the model: samples 0 to B - 1 of block j of
    `mhfast.reference.mixture_samples`, `sphere_samples` and `regression_samples`.

    Parameters
    ----------
    function : function (n, seed) -> Dataset, or Dataset
        Draws n samples; the same seed, an integer, must give the same samples. A Dataset stands
        for the population that a generator of `mhfast.data` drew it from.
    every : int
        The number of steps that are taken on the same samples.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If `every` is below 1, or the Dataset does not know its population.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(200, 5, 9, seed=0)
    >>> start = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> run = mh.train(
    ...     start, data, steps=40, optimizer=mh.GradientDescent(0.1), batch=20,
    ...     stream=mh.Stream(data, every=4),
    ... )
    >>> run.batches.size, run.batches.fresh
    (20, 4)
    >>> mh.Stream(data).draw(3, seed=0).n
    3
    """

    function: Draw | Dataset
    every: int = 1

    def __post_init__(self) -> None:
        given = self.function
        if isinstance(given, Dataset):
            if given.generator is None:
                raise ValueError(
                    "stream: expected a Dataset made by a generator of mhfast.data, or a function "
                    "(n, seed) -> Dataset, got a Dataset without a generator"
                )
        elif not callable(given):
            raise TypeError(
                f"stream: expected a function (n, seed) -> Dataset, or a Dataset with a generator, "
                f"got {type(given).__name__}"
            )
        object.__setattr__(self, "every", checks.count(self.every, "every"))

    @property
    def draw(self) -> Draw:
        """The function that draws."""
        if isinstance(self.function, Dataset):
            assert self.function.generator is not None  # checked when made
            return self.function.generator
        return self.function


@dataclass
class Draws:
    """The samples of the steps of one call of `mhfast.train`.

    Attributes
    ----------
    stream : Stream
    batches : Batches
    model : Classifier or Layer
    loss : str
        Its name in the core.
    first : CoreProblem
        The samples of the first step requested, which determine the shapes of all later ones.
    """

    stream: Stream
    batches: Batches
    model: Model
    loss: str
    first: CoreProblem

    def __call__(self, step: int) -> CoreData:
        """Return the samples from `step` on, in the form that the core expects."""
        now = _checked(self.stream, self.batches, step, self.model, self.loss, self.first.runs)
        expected, got = _shapes(self.first), _shapes(now)
        if expected != got:
            names = ("X", "query", "y", "weight", "lengths")
            name, a, b = next(
                row for row in zip(names, expected, got, strict=True) if row[1] != row[2]
            )
            raise ValueError(
                f"stream: expected samples like the first ones, with {name} of shape {a}, "
                f"got {b} at step {step}"
            )
        return now.data

    def in_core(self) -> tuple[int, list[tuple[Any, ...]]] | None:
        """Return what the core takes to draw the samples itself; None where it cannot."""
        token = self.first.token
        X, _, _, _, lengths = self.first.data
        if lengths is not None or not (token is None or isinstance(token, int)):
            return None
        draw = self.stream.draw
        owner = getattr(draw, "__self__", None)
        if isinstance(owner, Dataset) and draw == owner.sample:
            draw = owner.generator or draw
        parts = draw.of_run if isinstance(draw, Populations) else (draw,)
        known = [part.core(X.dtype) for part in parts if isinstance(part, Population)]
        if len(known) < len(parts) or None in known:
            return None
        place = -1 if token is None else token % X.shape[-2]
        return place, [settings for settings in known if settings is not None]


def draws(
    stream: Stream | Dataset | Draw | None, run: Run, runs: RunAxis, problem: CoreProblem
) -> tuple[Draws | None, RunAxis]:
    """Draw the samples of the step of the run; None without a stream.

    Parameters
    ----------
    stream : the argument of `mhfast.train`
    run : Run
    runs : RunAxis
        That of model, step sizes and data.
    problem : CoreProblem
        The data of the training, which have the same shape except for the number of samples.

    Raises
    ------
    TypeError, ValueError
        If what is drawn does not fit the model and the data.
    """
    if stream is None or run.batches is None:
        return None, runs
    stream = as_stream(stream)
    loss = losses.name_of(run.loss)
    first = _checked(stream, run.batches, run.step, run.model, loss, runs)
    for name, mine, theirs in zip(("X", "query"), _shapes(first), _shapes(problem), strict=False):
        if mine[-2:] != theirs[-2:]:
            raise ValueError(
                f"stream: expected {name} with the axes {theirs[-2:]} of the data, got {mine}"
            )
    if first.causal != problem.causal:
        raise ValueError("stream: expected a query of the same kind as that of the data")
    return Draws(stream, run.batches, run.model, loss, first), first.runs


def as_stream(stream: Stream | Dataset | Draw) -> Stream:
    """Return a population as a `Stream`."""
    return stream if isinstance(stream, Stream) else Stream(stream)


def _shapes(problem: CoreProblem) -> list[tuple[int, ...]]:
    return [() if array is None else array.shape for array in problem.data]


def _checked(
    stream: Stream, batches: Batches, step: int, model: Model, loss: str, runs: RunAxis
) -> CoreProblem:
    data = drawn(stream, batches, step)
    if data.weight is not None:
        raise ValueError("stream: expected samples without weights, got a Dataset with weight")
    for name in ("X", "query"):
        array = getattr(data, name)
        if array is not None and not np.isfinite(array).all():
            where = f"{name} at {step=}"
            raise ValueError(f"stream: expected finite numbers, got NaN or inf in {where}")
    try:
        return _core_arguments.problem(model, data, loss=loss, runs=runs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"stream: {error}") from error


def drawn(stream: Stream, batches: Batches, step: int) -> Dataset:
    """Draw the samples of a step."""
    draw, block = stream.draw, step // stream.every
    seeds = [sample_seed(seed, block) for seed in batches.seeds]
    if isinstance(batches.seed, int):
        return _one(draw, batches.size, seeds[0])
    if isinstance(draw, Populations):
        return _one(draw, batches.size, seeds)
    return side_by_side([_one(draw, batches.size, seed) for seed in seeds])


def _one(draw: Draw, size: int, seed: int | list[int]) -> Dataset:
    data = draw(size, seed=seed)
    if not isinstance(data, Dataset):
        raise TypeError(f"stream: expected a function that returns a Dataset, got {data!r:.80}")
    if data.n != size:
        raise ValueError(f"stream: expected a Dataset of n = {size} samples, got {data.n}")
    return data
