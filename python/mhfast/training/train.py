"""`train`: gradient descent in C++, with records, stop conditions and checkpoints."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from .. import _core, config
from .._arguments.checks import Wrt
from .._arguments.losses import Loss
from ..dataset.dataset import Dataset
from ..models import AnyModel, Stack
from ..models import problem as _core_arguments
from ..optimizers import Optimizer, core_settings
from . import arguments, depth
from . import averages as averaging
from . import batches as batching
from . import quantities as recording
from .arguments import Directions, Tests
from .batches import Order, Size
from .batches import Seed as BatchSeed
from .callbacks import prepared
from .coefficients import of_call
from .constraints import Constraints, check_start, checked, core, described, partitions, refuse
from .evaluate import evaluate_together
from .history import of_merged, of_subspace, prepare
from .progress import progress_bar
from .quantities import Record
from .reduction import Function, Reduction, joined, refuse_batches, refuse_records
from .run import Interrupted, Run, Stop, fresh
from .run_axis import settled_steps, spread
from .segments import Segment, extended, fingerprint
from .session import Callbacks, Loop
from .streams import Draw, Stream, as_stream, draws
from .subspace import enter

M = TypeVar("M", bound=AnyModel)


def train(
    model: M | Run[M],
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    steps: int | None = None,
    until: int | None = None,
    optimizer: Optimizer | None = None,
    batch: Size | None = None,
    stream: Stream | Dataset | Draw | None = None,
    order: Order | None = None,
    seed: BatchSeed | None = None,
    loss: Loss | None = None,
    wrt: Wrt = None,
    constraints: Constraints | None = None,
    test: Tests | None = None,
    average: int | None = None,
    record: Record | None = None,
    directions: Directions | None = None,
    callback: Callbacks | None = None,
    stop: Stop | None = None,
    checkpoint: tuple[str | os.PathLike[str], int] | None = None,
    reduce: Function | Reduction | None = None,
    progress: bool = False,
    num_threads: int | None = None,
) -> Run[M]:
    """Train a model by gradient descent, on all samples or on batches of them.

    The loop runs in C++; it calls Python only for ``callback``, a ``stop`` function, functions in
    ``record`` and checkpoints. The result is bitwise the same for every number of threads.

    If the model, the data or the step sizes have a run axis of length R, R models are trained side
    by side. Trained parameters without the axis are repeated for each run, everything else without
    it is shared, and run r gives the same result as alone.

    Parameters
    ----------
    model : Classifier, Layer, Stack or Run
        The initial model. A Run is resumed bit for bit, as if it had never stopped; it keeps its
        optimizer and its state, loss, wrt, record and stop unless they are given. Data, test sets
        and directions are not part of a run and must be given again.
    X : array (n, T, d) or (R, n, T, d) of the model's dtype, or Dataset
    y : array
        Targets of the shape of model(X): labels -1 and 1, real targets for "squared", classes
        without the last axis for "cross_entropy"; None with a Dataset.
    steps : int
        The number of steps to take; for a Run, the number of further steps.
    until : int
        In place of ``steps``: the step at which to end, counted from step 0 of the run. A Run that
        has reached it takes no step.
    optimizer : one of `mhfast.optimizers`
        If it is of another kind than that of the Run, its state (momentum or moments) starts at
        zero. The same holds if nothing that trains now, by ``wrt``, was trained last, or if it
        has other constraints.
    batch : int or "all", optional
        The number B of samples that a step is taken on; "all", the default, for full-batch steps.
        The loss of a batch is (n / B) Σ wℓ / Σ w, the first sum over the batch and the second over
        all samples, for samples of equal weight the mean over the batch; its mean over batches is
        the loss.
    stream : function (n, seed) -> Dataset, Dataset, or `Stream`
        In place of batches of the data: the samples of each step are new ones, ``stream(B,
        seed=s)`` with another s at every step, and the step is one on all of them. A Dataset of
        `mhfast.data` stands for its population. `Stream` draws every few steps. B is
        ``batch``, by default the n of the data, which are then used only by records and
        thresholds. Samples have no weights.
    order : str
        "shuffle" (the default): an epoch, that is floor(n / B) steps, goes through a random
        permutation of the samples; where B does not divide n its last n mod B samples are left out
        of the epoch. "replace": samples of a batch are drawn independently, with replacement.
    seed : int, Generator or sequence of R of them
        Of the order, by default 0. From an integer all runs see the same samples, from a sequence
        each run its own. The samples of a step are a function of the seed and the number of the
        step, the same on every machine: `mhfast.reference.batches`. With ``stream`` the seed that
        is given to the function is `mhfast.reference.sample_seed`.
    loss : str, a loss with a parameter, or a function of outputs and targets
        "logistic" (the default), "squared", ``mh.Huber(0.5)``, ..., and for a Layer
        "cross_entropy", as in `value_and_grad`.
    wrt : str or tuple of str
        What to train, among the parameters of the model; all by default.
    constraints : dict by parameter, optional
        Entries that stay as they are, and entries that stay equal: an array of the parameter's
        shape, of bools (True: trained) or of integers (-1: fixed, equal numbers: tied);
        "symmetric" (W_h = W_hᵀ), "heads" (the same for all heads), "rows" (all rows of a head of
        U or of the prompt the same); or a tuple of these, which hold together. Tied entries must
        be equal at the start: `tied` makes them so. The gradient is replaced by its orthogonal
        projection onto the subspace, 0 at fixed entries and the mean over tied ones, before
        norms, clipping and the optimizer; grad_norm is that of the projection. An empty dict
        removes the constraints of a Run.
    test : Dataset, pair (X, y) or dict of them
        Test sets; one without a name is called "test".
    average : int
        The step from which on iterates are averaged: ``run.average`` is the model of the means of
        θ_average, ..., θ_k, and the records "W_average", "U_average", ... hold them, one for each
        trained parameter. A Run keeps it; it may be changed to a step from the one reached on. A
        record of an average without it averages from the step reached on.
    record : str, function, sequence of them, or dict of them to int
        What to record, by default the loss; with ``batch`` once an epoch. Names are those of
        `mhfast.training.quantities`: loss, accuracy, margin, grad_norm, param_norm, distance,
        cosine, the parameters, their averages, attention, attention_max and attention_groups; for
        test sets the first three with the prefix ``test_`` or ``<name of the test set>_``.
        A function of the model returns a number or an array, with R
        runs a number or an array (R, ...). In a dict the number is the period in steps, otherwise
        it is 1. Values at k belong to θ_k, before step k + 1; they are recorded at k = 0, every, 2
        every, ..., and at the last k. They are of all training samples with ``batch`` too, for
        which loss, accuracy, margin and grad_norm take a pass over all. All records together may
        take 2 GiB.
    directions : Gradients, model, dict of arrays by parameter, or a dict or sequence of them
        Directions of the record "cosine". Parameters that it lacks are left out of the cosine. A
        single one is recorded as ``cosine``, several as ``cosine_<name>``, or ``cosine_0``, ...
    callback : function (step, model) -> object, `Callback`, or list of them
        Called at every θ_k, including the first and the last. Returning true ends training at θ_k.
        A `Callback` has a period, and its function gets values of recorded quantities, too.
    stop : dict or function (step, model) -> object
        Thresholds on the training data, checked at every θ_k, with ``batch`` at those that begin an
        epoch: training ends at θ_k when "loss" or
        "grad_norm" is at most the number, or "accuracy" or "margin" at least the number. With R
        runs each run ends separately, and is frozen while the others continue. Or a function that
        returns true, with R runs true for all, to end training. An empty dict removes the
        thresholds of a Run; giving ``stop`` lets runs continue that a threshold had ended.
    checkpoint : (path, int)
        A file and a period in steps: save the run so far with that period, and at the end.
        `Run.load` reads the file.
    reduce : function (sums) -> array, or `Reduction`
        Train together with other processes, each of which has some of the samples and calls this
        function with ``mhfast.train``: it adds up numbers over all processes, once a step, and
        `mhfast.interop.reduce` has one for torch.distributed, mpi4py and dask. All processes get
        the same model and records, those of all samples together. Steps are on all samples; test
        sets and ``checkpoint`` are each process's own.
    progress : bool
        Show a progress bar on stderr (that of tqdm if it is installed).
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
        If a shape, a name or a number does not fit, the records would take too much memory, or
        processes have different settings.
    RuntimeError
        If ``reduce`` fails, or another process does.
    Interrupted
        After Ctrl-C. It is a KeyboardInterrupt whose ``.run`` holds the run so far. Any other
        exception, such as one from the callback, gets an attribute ``run`` too.

    Notes
    -----
    Few distinct tokens of an array are looked up as those of `Tokens`, and identical samples are
    merged into one with their weights, where steps are on all samples and that saves time; the
    result is the same up to rounding, and `mhfast.explain` reports it.

    If tokens have at least twice as many dimensions as there are distinct tokens, and the model is
    large, optimizers that use gradients only linearly and through norms train inside the span of
    the tokens, at a fraction of the cost. The result is the same up to rounding; ``run.subspace``
    is then set.

    If U of a classifier is all that is trained and there are fewer samples than features,
    `GradientDescent` and `Momentum` train coefficients of the samples, at a fraction of the cost;
    ``run.coefficients`` is then not empty.

    References
    ----------
    Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
    Attention", TMLR 2024.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> run = mh.train(
    ...     model, data, steps=20, optimizer=mh.GradientDescent([0.1, 0.2]), record={"loss": 10}
    ... )
    >>> run.steps["loss"].tolist(), run.history["loss"].shape
    ([0, 10, 20], (2, 3))
    >>> mh.train(run, data, until=50).step
    50
    """
    with joined(reduce) as group:
        run: Run[Any] = (
            model if isinstance(model, Run) else fresh(model, arguments.optimizer(optimizer))
        )
        first, last = run.step, arguments.last_step(run.step, steps, until)
        data = arguments.dataset(X, y, run.model)
        every = None if stream is None else as_stream(stream).every
        batches = batching.chosen(batch, order, seed, run.batches, data.n, every)
        if record is None and batches is not None and not isinstance(model, Run):
            record = {"loss": batches.epoch(data.n)}
        tests = arguments.tests(test, run.model)
        record = arguments.restored(run.record if record is None else record)
        entries = recording.parse(record, tuple(run.model.parameters), tuple(tests), averages=True)
        if group is not None:
            refuse_batches(batches)
            refuse_records(entries)
        held_before = run.constraints
        run = run._replace(
            **_new_optimizer(run, optimizer),
            loss=run.loss if loss is None else _core_arguments.loss(run.model, loss, data.y),
            wrt=run.wrt if wrt is None else arguments.wrt(run.model, wrt),
            stop=arguments.stop(run.stop if stop is None else stop),
            record={entry.function or entry.key: entry.every for entry in entries},
            batches=batches,
            constraints=run.constraints if constraints is None else checked(run.model, constraints),
        )
        held = described(run.constraints, run.wrt)
        # Nothing that trains now has moments, or those of other constraints.
        if run.state and not (
            run.state.keys() & set(run.wrt) and described(held_before, run.wrt) == held
        ):
            run = run._replace(state={}, since=_here(run))
        averages = averaging.chosen(run, average, entries)
        if averages is not run.averages:
            run = run._replace(averages=averages)
        rule = arguments.optimizer(run.optimizer)  # that of a solver is none
        arguments.settings_of_parameters(rule, run.model)
        ties = partitions(run.model, run.constraints, run.wrt)
        check_start(run.model, ties, run.wrt)
        refuse(rule, run.model, ties)
        if isinstance(run.model, Stack):
            if group is not None:
                raise ValueError("reduce: expected None for a Stack, which one process trains")
            stacked = depth.trained(
                run, data, tests, entries, rule, last, ties, stream=stream, directions=directions,
                callback=callback, checkpoint=arguments.checkpoint(checkpoint), progress=progress,
                num_threads=num_threads,
            )  # fmt: skip
            return cast("Run[M]", stacked)
        _core_arguments.differentiable(run.model, _core_arguments.bits(run.wrt))
        problem, test_problems = arguments.problems(run, data, tests, stream is None)
        drawn, axis = draws(stream, run, problem.runs, problem)
        if axis is not problem.runs:
            problem = problem._replace(runs=axis)
        run = spread(run, problem.runs.length)
        frozen = arguments.frozen(run, released=stop is not None)
        since = arguments.since(run, frozen)
        if since != run.since:
            run = run._replace(since=since)
        since_of_runs = np.full(len(frozen), since, np.int64)
        settings = core_settings(rule, last, run.runs, since_of_runs, run.wrt)
        sides = arguments.directions(directions, run.model, problem.runs)
        # New samples lie outside of the span of those that are there.
        # So may those of another process.
        # What is averaged is the whole model.
        alone = drawn is None and group is None and run.averages is None
        inside = enter(run, problem) if last > first and alone else None
        seen = arguments.compacted(
            run, data, tests, (problem, test_problems), inside=inside,
            together=batches is None and drawn is None and group is None,
        )  # fmt: skip
        whole = partial(
            evaluate_together, group, X=seen.train, loss=run.loss, wrt=run.wrt, test=seen.tests,
            directions=directions, constraints=run.constraints, num_threads=num_threads,
        )  # fmt: skip
        calls = prepared(
            callback, lambda at, what: whole(at, record=what, start=run.start), run.record
        )
        samples = fingerprint(data) if last > first or group is not None else ""
        if group is not None:
            samples = group.meet(run, last, frozen, calls, problem, samples)
        before, coefficients = run.segments[-1] if run.segments else None, None
        if last > first:
            now = Segment(first, rule, run.loss, run.wrt, samples, batches, held)
            run = run._replace(segments=extended(run.segments, now))
            if alone and inside is None and batches is None:
                coefficients = of_call(run, seen.problem, before, now)
        named, functions = prepare(
            entries, run.model, data, problem.data, tuple(sides), run.history, first, last
        )
        named = of_merged(named, seen.train)
        start, problem, test_problems = run.start, seen.problem, seen.test_problems
        if inside is not None:
            sees_tests = bool(tests) and inside.holds(start)
            test_problems = [inside.problem(test) for test in test_problems] if sees_tests else []
            named, others = of_subspace(named, inside, start, run.history, whole, sees_tests, sides)
            functions += others
            start, problem, sides = inside.start, inside.problem(problem), {}
        loop = Loop(
            run, named, functions, calls, arguments.checkpoint(checkpoint), inside, frozen,
            group=group, samples=data.n, constraints=core(ties), coefficients=coefficients,
        )  # fmt: skip
        end = None
        with progress_bar(first, last) if progress else nullcontext() as tick:
            try:
                end = loop.run_core(
                    problem, start, settings, last,
                    [arguments.core_record(rows, seen.train.data) for rows in named],
                    test_problems, list(sides.values()), arguments.thresholds(run.stop), tick,
                    config.threads(num_threads), drawn,
                )  # fmt: skip
                if end.error is not None:
                    raise end.error
                if tick is not None:
                    tick(end.reached)
                ended = cast("Run[M]", loop.finish(end))
                if group is not None:
                    group.close()
            except KeyboardInterrupt:
                raise Interrupted(_rescued(loop, end, "interrupted")) from None
            except Exception as error:
                if end is not None:
                    arguments.carry(error, _rescued(loop, end, "exception"))
                raise
        arguments.warn_of_nonfinite(ended, first, data)
        return ended


def _new_optimizer(run: Run[M], optimizer: Optimizer | None) -> dict[str, Any]:
    """Return what an optimizer changes of a run; it takes over the state of one of its kind."""
    if optimizer is None:
        return {}
    optimizer = arguments.optimizer(optimizer)
    if type(optimizer) is type(run.optimizer):
        return {"optimizer": optimizer}
    return {"optimizer": optimizer, "state": {}, "since": _here(run)}


def _here(run: Run[M]) -> int | tuple[int, ...]:
    """Return the step at which the run stands, that of each run side by side."""
    if isinstance(run.stopped, np.ndarray):
        return settled_steps(np.where(run.stopped < 0, run.step, run.stopped))
    return run.step


def _rescued(loop: Loop, end: _core.TrainingResult | None, reason: str) -> Run:
    """Return the run as it was when an exception ended training, or before it started."""
    if end is None:
        return loop.so_far(loop.run.step, reason, [0] * len(loop.named))
    return loop.so_far(end.reached, reason, end.rows)
