"""`train`: full-batch gradient descent in C++, with records, stop conditions and checkpoints."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from . import _checks, _core, config, recording
from . import _training_arguments as arguments
from ._checks import PARAMETERS, Wrt
from ._training_arguments import Directions, Tests
from .dataset import Dataset
from .history import prepare
from .loop import Callback, Loop
from .models import Classifier
from .optimizers import Optimizer, core_settings
from .progress import progress_bar
from .recording import Record
from .run import Interrupted, Run, Stop


def train(
    model: Classifier | Run,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    steps: int,
    optimizer: Optimizer | None = None,
    loss: str | None = None,
    wrt: Wrt = None,
    test: Tests | None = None,
    record: Record | None = None,
    directions: Directions | None = None,
    callback: Callback | None = None,
    stop: Stop | None = None,
    checkpoint: tuple[str | os.PathLike[str], int] | None = None,
    progress: bool = False,
    num_threads: int | None = None,
) -> Run:
    """Train a model by full-batch gradient descent.

    The loop runs in C++; Python is entered for ``callback``, a ``stop`` function, functions in
    ``record`` and checkpoints only. The result is bitwise the same for every number of threads.

    Parameters
    ----------
    model : Classifier or Run
        Where to start. A Run goes on bitwise as if it had never stopped; it keeps its optimizer,
        loss, wrt, record and stop unless they are given. Data, test sets and directions are not
        part of a run and are given again.
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array (n,)
        Labels -1 and 1 (real targets for "squared"); None with a Dataset.
    steps : int
        How many steps to take, for a Run how many more.
    optimizer : GradientDescent or NormalizedGradientDescent
    loss : str
        "logistic" (the default), "exponential", "linear" or "squared", as in `value_and_grad`.
    wrt : str or tuple of str
        What to train, among W and U; both by default.
    test : Dataset, pair (X, y) or dict of them
        Test sets; one without a name is called "test".
    record : str, function, sequence of them, or dict of them to int
        What to record, by default the loss. Names are those of `mhfast.recording`: loss, accuracy,
        margin, grad_norm, param_norm, distance, cosine, W, U, attention, attention_max and
        attention_groups; behind ``test_`` or ``<name of the test set>_`` the first three. A
        function of the model returns a number or an array. In a dict the number says every how many
        steps, else it is every step. Values at k belong to θ_k, before step k + 1; they are taken
        at k = 0, every, 2 every, ..., and at the last k. All together they may take 2 GiB.
    directions : dict of Gradients (or Classifier)
        Directions of the record "cosine". A field that is None does not enter the cosine.
    callback : function (step, model) -> object
        Called with every θ_k, the first and the last included. Returning true ends training at θ_k.
    stop : dict or function (step, model) -> object
        Thresholds on the training data, checked at every θ_k: training ends at θ_k when "loss" or
        "grad_norm" is at most, "accuracy" or "margin" at least the number. Or a function that
        returns true to end training. An empty dict removes what a Run had.
    checkpoint : (path, int)
        Save the run so far every so many steps, and at the end. `Run.load` reads it.
    progress : bool
        Show a progress bar on stderr (that of tqdm where it is installed).
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    Run

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape, a name or a number does not fit, or the records would take too much room.
    Interrupted
        After Ctrl-C. It is a KeyboardInterrupt whose ``.run`` holds the run so far. Any other
        exception, such as one from the callback, gets an attribute ``run`` too.

    References
    ----------
    Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
    Attention", TMLR 2024.
    """
    run = model if isinstance(model, Run) else _fresh(model, optimizer)
    first, last = run.step, run.step + arguments.steps(steps)
    data = arguments.dataset(X, y, run.model)
    tests = arguments.tests(test, run.model)
    record = arguments.restored(run.record if record is None else record)
    entries = recording.parse(record, tuple(tests))
    run = replace(
        run,
        optimizer=run.optimizer if optimizer is None else optimizer,
        loss=run.loss if loss is None else _checks.loss(loss),
        wrt=run.wrt if wrt is None else arguments.wrt(wrt),
        stop=arguments.stop(run.stop if stop is None else stop),
        record={entry.function or entry.key: entry.every for entry in entries},
    )
    settings = core_settings(run.optimizer, last)
    sides = arguments.directions(directions, run.model)
    problem = arguments.arrays(data, run.model, run.loss)
    test_problems = [arguments.arrays(d, run.model, run.loss, name) for name, d in tests.items()]
    arguments.function(callback, "callback")
    named, functions = prepare(entries, run.model, data, tuple(sides), run.history, first, last)
    loop = Loop(
        run, run.model.W.copy(), run.model.U.copy(), named, functions,
        callback, arguments.checkpoint(checkpoint),
    )  # fmt: skip
    every = loop.every()
    with progress_bar(first, last) if progress else nullcontext() as tick:
        try:
            reached, reason = _core.train(
                *problem,
                loop.W, loop.U, run.start.W, run.start.U, run.model.scale, run.loss,
                "W" in run.wrt, "U" in run.wrt,
                settings, first, last,
                [arguments.core_record(rows, data) for rows in named],
                test_problems, list(sides.values()),
                {} if callable(run.stop) else dict(run.stop),
                every or 1, loop.at if every else None, tick,
                config.threads(num_threads),
            )  # fmt: skip
            if tick is not None:
                tick(reached)
            return loop.finish(reached, reason, settings["rows"])
        except KeyboardInterrupt:
            raise Interrupted(_rescued(loop, settings, "interrupted")) from None
        except Exception as error:
            if "reached" in settings:
                _carry(error, _rescued(loop, settings, "exception"))
            raise


def _fresh(model: Classifier, optimizer: Optimizer | None) -> Run:
    """Return a run that stands at step 0 with the default settings."""
    if not isinstance(model, Classifier):
        raise TypeError(f"model: expected a Classifier or a Run, got {type(model).__name__}")
    if optimizer is None:
        raise TypeError(
            "optimizer: expected GradientDescent or NormalizedGradientDescent, got None"
        )
    return Run(
        model=model,
        history={},
        steps={},
        step=0,
        reason="steps",
        optimizer=optimizer,
        loss="logistic",
        wrt=PARAMETERS,
        record={"loss": 1},
        stop={},
        start=model,
    )


def _rescued(loop: Loop, settings: dict[str, Any], reason: str) -> Run:
    """Return the run as it was when an exception left the core, or before it started."""
    rows = settings.get("rows", [0] * len(loop.named))
    return loop.so_far(settings.get("reached", loop.run.step), reason, rows)


def _carry(error: Exception, run: Run) -> None:
    """Hand the run to whoever catches the exception, so that nothing recorded is lost."""
    vars(error)["run"] = run
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"Training ended at step {run.step}; .run holds the run so far.")
