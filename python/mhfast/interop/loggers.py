"""Callbacks that send what training records to TensorBoard, Weights & Biases or MLflow.

Each function returns a `mhfast.Callback`, to be given to `mhfast.train`. An entry of an array has
the name of the quantity followed by its index: ``loss/3`` is the loss of run 3.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np

from ..training.callbacks import Callback, Metrics
from ..training.quantities import Record

__all__ = ["mlflow", "tensorboard", "wandb"]

Log = Callable[[dict[str, float], int], object]


def tensorboard(
    writer: str | os.PathLike[str] | Any, *, every: int = 1, record: Record | None = None
) -> Callback:
    """Write recorded quantities as scalars for TensorBoard.

    Parameters
    ----------
    writer : path, or an object with ``add_scalar(name, value, step)``
        A folder for a ``SummaryWriter`` of `torch.utils.tensorboard` or, without torch, of
        `tensorboardX`, which is closed when the callback is deleted, or when Python ends; or a
        writer, which the caller has to close.
    every : int
        The period in steps.
    record : str, function, or sequence of them, optional
        The quantities; by default those that training records.

    Returns
    -------
    Callback

    Raises
    ------
    ImportError
        If a path is given and neither package is installed.
    TypeError
        If `writer` is neither, or an argument is of the wrong kind.
    ValueError
        If `every` is below 1.

    Examples
    --------
    >>> import mhfast as mh
    >>> from mhfast.interop.loggers import tensorboard
    >>> class Printer:
    ...     def add_scalar(self, name, value, step):
    ...         print(name, step, round(value, 3))
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> log = tensorboard(Printer(), every=10)
    >>> run = mh.train(start, data, steps=10, optimizer=mh.GradientDescent(0.1), callback=log)
    loss 0 0.693
    loss 10 0.663
    """
    own = isinstance(writer, str | os.PathLike)
    target: Any = _summary_writer(os.fspath(writer)) if own else writer
    if not hasattr(target, "add_scalar"):
        raise TypeError(
            "writer: expected a path or an object with add_scalar(name, value, step), "
            f"got {type(target).__name__}"
        )

    def log(numbers: dict[str, float], step: int) -> None:
        for name, number in numbers.items():
            target.add_scalar(name, number, step)
        if hasattr(target, "flush"):
            target.flush()

    if own:  # tensorboardX writes in a thread, for which its `flush` does not wait
        weakref.finalize(log, target.close)
    return _callback(log, every, record)


def wandb(run: Any = None, *, every: int = 1, record: Record | None = None) -> Callback:
    """Log recorded quantities to a run of Weights & Biases.

    Parameters
    ----------
    run : run of wandb, optional
        What ``wandb.init()`` returned, ``wandb.init(mode="offline")`` on a machine without network;
        by default the active run.
    every : int
        The period in steps.
    record : str, function, or sequence of them, optional
        The quantities; by default those that training records.

    Returns
    -------
    Callback

    Raises
    ------
    ImportError
        If no run is given and wandb is not installed.
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If there is no active run, or `every` is below 1.

    Examples
    --------
    >>> import mhfast as mh
    >>> from mhfast.interop.loggers import wandb
    >>> class Printer:  # in place of wandb.init(mode="offline")
    ...     def log(self, numbers, step):
    ...         print(step, numbers)
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> log = wandb(Printer(), every=10, record="accuracy")
    >>> run = mh.train(start, data, steps=10, optimizer=mh.GradientDescent(0.1), callback=log)
    0 {'accuracy': 0.0}
    10 {'accuracy': 1.0}
    """
    if run is None:
        run = _installed("wandb").run
        if run is None:
            raise ValueError("run: expected an active run, as after wandb.init(), got none")
    if not hasattr(run, "log"):
        raise TypeError(f"run: expected a run of wandb, got {type(run).__name__}")
    return _callback(lambda numbers, step: run.log(numbers, step=step), every, record)


def mlflow(run_id: str | None = None, *, every: int = 1, record: Record | None = None) -> Callback:
    """Log recorded quantities to MLflow.

    Parameters
    ----------
    run_id : str, optional
        The run; by default the active one, which MLflow starts if there is none.
    every : int
        The period in steps.
    record : str, function, or sequence of them, optional
        The quantities; by default those that training records.

    Returns
    -------
    Callback

    Raises
    ------
    ImportError
        If mlflow is not installed.
    TypeError
        If an argument is of the wrong kind.
    ValueError
        If `every` is below 1.

    Examples
    --------
    >>> from mhfast.interop.loggers import mlflow
    >>> log = mlflow(every=100, record=("loss", "accuracy"))  # doctest: +SKIP
    """
    module = _installed("mlflow")
    chosen = {} if run_id is None else {"run_id": run_id}

    def log(numbers: dict[str, float], step: int) -> None:
        module.log_metrics(numbers, step=step, **chosen)

    return _callback(log, every, record)


def _callback(log: Log, every: int, record: Record | None) -> Callback:
    def function(step: int, _: Any, metrics: Metrics) -> None:
        log(dict(_scalars(metrics)), step)

    return Callback(function, every, record)


def _scalars(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Yield all numbers; the name of an entry of an array ends with its index."""
    for name, value in metrics.items():
        for index, number in np.ndenumerate(np.asarray(value, np.float64)):
            yield "/".join([name, *map(str, index)]), float(number)


def _summary_writer(folder: str) -> Any:
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return import_module(module).SummaryWriter(folder)
        except ImportError:
            continue
    raise ImportError("tensorboard needs torch with tensorboard, or: pip install tensorboardX")


def _installed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f"mhfast.interop.loggers.{package} needs {package}: pip install {package}"
        ) from error
