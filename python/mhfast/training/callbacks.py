"""`Callback`: a function that training calls from time to time, with the values it records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._arguments import checks
from .quantities import Record

Metrics: TypeAlias = dict[str, Any]
Plain: TypeAlias = Callable[[int, Any], object]


@dataclass(frozen=True)
class Callback:
    """A function that `mhfast.train` calls with values of recorded quantities.

    ``function(step, model, metrics)`` is called at θ_k for k = 0, every, 2 every, ..., and at the
    last k. ``metrics`` has a float for each quantity, or an array as in one row of the history; it
    is computed for the call, as by `mhfast.evaluate`. A true result ends training at θ_k.

    Parameters
    ----------
    function : function (step, model, metrics) -> object
    every : int
        The period in steps.
    record : str, function, or sequence of them, optional
        The quantities, as for `mhfast.train`; by default those that training records.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If `every` is below 1.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> def show(step, model, metrics):
    ...     print(step, round(metrics["loss"], 2))
    >>> run = mh.train(
    ...     start, data, steps=50, optimizer=mh.GradientDescent(0.1),
    ...     callback=mh.Callback(show, every=20),
    ... )
    0 0.69
    20 0.64
    40 0.59
    50 0.56
    """

    function: Callable[[int, Any, Metrics], object]
    every: int = 1
    record: Record | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function: expected a function, got {type(self.function).__name__}")
        object.__setattr__(self, "every", checks.count(self.every, "every"))


class Calls:
    """All callbacks of one call of `mhfast.train`.

    Parameters
    ----------
    callbacks : sequence of functions (step, model) and of `Callback`
    evaluate : function (model, record) -> dict
        Computes quantities of a model on the data of the training.
    record : what training records
    """

    def __init__(
        self,
        callbacks: Sequence[Plain | Callback],
        evaluate: Callable[[Any, Any], Metrics],
        record: Mapping[Any, int],
    ) -> None:
        self.callbacks, self.evaluate, self.record = callbacks, evaluate, tuple(record)
        self.every = math.gcd(*(_every(one) for one in callbacks))
        self.last = [-1] * len(callbacks)

    def due(self, k: int) -> bool:
        """Return whether one is due at θ_k."""
        return any(k % _every(one) == 0 for one in self.callbacks)

    def __call__(self, k: int, model: Any, at_end: bool = False) -> bool:
        """Call those that are due at θ_k; true ends training.

        At the end of training, those are due that were not called at θ_k before.
        """
        ends = False
        for i, one in enumerate(self.callbacks):
            if self.last[i] == k or (k % _every(one) and not at_end):
                continue
            self.last[i] = k
            if isinstance(one, Callback):
                record = self.record if one.record is None else one.record
                ends |= bool(one.function(k, model, self.evaluate(model, record)))
            else:
                ends |= bool(one(k, model))
        return ends


def prepared(
    callback: object, evaluate: Callable[[Any, Any], Metrics], record: Mapping[Any, int]
) -> Calls | None:
    """Return the callbacks that ``callback`` of `mhfast.train` stands for, None for none.

    Raises
    ------
    TypeError
        If one is not a function.
    """
    given = callback if isinstance(callback, list | tuple) else [callback]
    callbacks: list[Plain | Callback] = []
    for one in given:
        if isinstance(one, Callback) or callable(one):
            callbacks.append(one)
        elif one is not None:
            raise TypeError(
                "callback: expected a function, a Callback or a list of them, "
                f"got {type(one).__name__}"
            )
    return Calls(callbacks, evaluate, record) if callbacks else None


def _every(callback: Plain | Callback) -> int:
    return callback.every if isinstance(callback, Callback) else 1
