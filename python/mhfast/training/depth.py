"""The training of a `Stack`: the gradients of `mhfast.value_and_grad`, and steps of the core.

The loop is in Python, since a step is a call of the core for each layer forward and each layer
back, and one for the step of the optimizer on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import losses
from .._arguments.lists import OF_ROWS, PARAMETERS
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..gradients import Gradients, norm, value_and_grad
from ..models import Stack
from ..models.depth import with_arrays
from ..models.depth_parameters import by_layer, of_layer
from ..models.problem import bits as bits_of
from ..models.problem import differentiable
from ..optimizers import Optimizer, core_settings
from ..reference.batches import batches as rows_of_batches
from . import arguments
from .callbacks import Calls, prepared
from .constraints import described, projected
from .evaluate import evaluate, of_stack, refuse_of_stack
from .iterates import Iterates
from .partition import Partition
from .progress import progress_bar
from .quantities import Entry, real_value
from .run import Run
from .segments import Segment, extended, fingerprint
from .session import Callbacks
from .streams import Draw, Stream, as_stream, drawn

State = dict[str, tuple[Array, ...]]
THRESHOLDS_BELOW = ("loss", "grad_norm")


def trained(
    run: Run[Stack],
    data: Dataset,
    tests: Mapping[str, Dataset],
    entries: Sequence[Entry],
    rule: Optimizer,
    last: int,
    ties: Mapping[str, Partition],
    *,
    stream: Stream | Dataset | Draw | None,
    directions: Any,
    callback: Callbacks | None,
    checkpoint: tuple[str | os.PathLike[str], int] | None,
    progress: bool,
    num_threads: int | None,
) -> Run[Stack]:
    """Return the run at step `last`, with the arguments that `mhfast.train` has checked."""
    refuse_of_stack(entries, data, tests, directions)
    _refuse_runs(run, rule)
    for j, own in by_layer({name: run.model.parameters[name] for name in run.wrt}).items():
        differentiable(run.model.layers[j], bits_of(own))
    _check_fit(run, data)
    for name, test in tests.items():
        try:
            _check_fit(run, test)
        except (TypeError, ValueError) as error:
            raise type(error)(f"test set {name!r}: {error}") from error
    if last > run.step:
        held = described(run.constraints, run.wrt)
        now = Segment(run.step, rule, run.loss, run.wrt, fingerprint(data), run.batches, held)
        run = run._replace(segments=extended(run.segments, now))
    of_run = partial(
        evaluate, X=data, loss=run.loss, wrt=run.wrt, test=tests, start=run.start,
        constraints=run.constraints, num_threads=num_threads,
    )  # fmt: skip
    calls = prepared(callback, lambda at, what: of_run(at, record=what), run.record)
    since = np.array([run.since], np.int64)
    names = tuple(name for name in PARAMETERS if name in {of_layer(one)[1] for one in run.wrt})
    loop = _Loop(
        run, tuple(entries), of_run, last - run.step, data, tests,
        core_settings(rule, last, None, since, names),
        None if stream is None else as_stream(stream), calls, checkpoint, num_threads, ties,
    )  # fmt: skip
    with loop.rescued(), progress_bar(run.step, last) if progress else nullcontext() as tick:
        ended = loop.go(last, tick)
    arguments.warn_of_nonfinite(ended, run.step, data)
    return ended


def _check_fit(run: Run[Stack], data: Dataset) -> None:
    """Raise what the loss of the first sample raises, before there is a run to lose."""
    run.model.loss(data.subset(slice(0, 1))._with(weight=None), loss=run.loss)


def _refuse_runs(run: Run[Stack], rule: Optimizer) -> None:
    lr = getattr(rule, "lr", None)
    for part in lr.values() if isinstance(lr, Mapping) else (lr,):
        if isinstance(part, tuple):
            raise ValueError(f"lr: expected one number beside a Stack, got {len(part)}")
    if run.batches is not None and isinstance(run.batches.seed, tuple):
        raise ValueError(
            f"seed: expected one integer beside a Stack, got {len(run.batches.seed)} of them"
        )


@dataclass
class _Loop(Iterates[Stack]):
    """One call of `mhfast.train` for a stack.

    Attributes
    ----------
    data, tests : the training data, the test sets
    settings : the optimizer as the core takes it
    stream, calls, checkpoint, num_threads : as in `mhfast.train`
    ties : the constraints on what is trained
    state : what the optimizer keeps of each trained parameter at θ_k
    known : quantities of the training data at θ_k
    epoch : (number, samples) of the epoch whose batches are taken
    """

    data: Dataset
    tests: Mapping[str, Dataset]
    settings: _core.Optimizer
    stream: Stream | None
    calls: Calls | None
    checkpoint: tuple[str | os.PathLike[str], int] | None
    num_threads: int | None
    ties: Mapping[str, Partition]
    state: State = field(init=False)
    known: dict[str, float] = field(default_factory=dict, init=False)
    epoch: tuple[int, npt.NDArray[np.int64]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        run = self.run
        self.state = {
            name: run.state.get(name)
            or tuple(np.zeros_like(run.model.parameters[name]) for _ in range(run.optimizer.slots))
            for name in run.wrt
        }

    def go(self, last: int, tick: Any) -> Run[Stack]:
        """Take the steps up to `last`, or to what ends training before."""
        while True:
            loss, gradients = self._pass(last)
            reason = self._ends(loss, gradients) or ("steps" if self.step == last else "")
            self.record_due()
            if reason:
                ended = self.ended(reason)
                if self.calls is not None:
                    self.calls(self.step, self.model, at_end=True)
                if self.checkpoint is not None:
                    ended.save(self.checkpoint[0])
                return ended
            path = self.checkpoint
            if path is not None and self.step > self.run.step and self.step % path[1] == 0:
                self.ended("checkpoint").save(path[0])
            assert gradients is not None  # there are steps to take
            self._step(loss, gradients)
            if tick is not None:
                tick(self.step)

    def ended(self, reason: str) -> Run[Stack]:
        """Return the run up to θ_k, with the state of the optimizer."""
        state = {name: slots for name, slots in self.state.items() if slots}
        return replace(super().ended(reason), state=state)

    def _record(self, due: list[Entry]) -> None:
        found = of_stack(
            self.run, self.model, self.data, self.tests, due, self.known, self.ties,
            self.num_threads,
        )  # fmt: skip
        for entry in due:
            self._add(entry.key, entry.every, _real(entry, found[entry.key]))

    def _pass(self, last: int) -> tuple[float, Gradients | None]:
        """Return loss and gradient that the step from θ_k is taken on; at the last no gradient."""
        run, at = self.run, self.step
        self.known = {}
        if at == last:
            loss = self.model.loss(self.data, loss=run.loss, num_threads=self.num_threads)
            self.known = {"loss": loss}
            return loss, None
        samples, share = (self.data, 1.0) if run.batches is None else self._batch()
        value, gradients = value_and_grad(
            self.model, samples, loss=run.loss, wrt=run.wrt, num_threads=self.num_threads
        )
        loss = float(value)
        if run.batches is None:
            self.known = {"loss": loss}
            if "grad_norm" in {entry.name for entry in self.entries} | _limits(run).keys():
                self.known["grad_norm"] = float(norm(projected(gradients, self.ties)))
        return share * loss, gradients if share == 1.0 else share * gradients

    def _batch(self) -> tuple[Dataset, float]:
        """Return the samples of the step from θ_k, and what their loss is to be multiplied by."""
        batches, k = self.run.batches, self.step
        assert batches is not None
        if self.stream is not None:
            return drawn(self.stream, batches, k), 1.0
        n, size, of_epoch = self.data.n, batches.size, self.data.n // batches.size
        seed = batches.seeds[0]
        if batches.order == "replace":
            rows = rows_of_batches(n, size, 1, order="replace", seed=seed, first=k)[0]
        else:
            number = k // of_epoch
            if self.epoch is None or self.epoch[0] != number:
                # The batches of an epoch together are the only one of that many samples.
                whole = rows_of_batches(n, of_epoch * size, 1, seed=seed, first=number)[0]
                self.epoch = number, whole.reshape(of_epoch, size)
            rows = self.epoch[1][k % of_epoch]
        counted = self._counted
        part = float(counted[rows].sum())
        if part == 0.0:
            raise ValueError("batch: expected a sample of weight above 0 in every batch")
        return self.data.subset(rows), part / float(counted.sum()) * n / size

    @cached_property
    def _counted(self) -> npt.NDArray[np.float64]:
        """What the loss is divided by the sum of, of each sample."""
        data, of_rows = self.data, losses.name_of(self.run.loss) in OF_ROWS
        weight = np.ones(data.n) if data.weight is None else np.asarray(data.weight, np.float64)
        if weight.ndim == 1 and not of_rows:
            return weight
        tokens = data.tokens if self.run.model.layers[-1].query is None else 1
        rows = np.broadcast_to(weight if weight.ndim == 2 else weight[:, None], (data.n, tokens))
        if data.lengths is not None and self.run.model.layers[-1].query is None:
            rows = rows * (np.arange(tokens) < np.asarray(data.lengths)[:, None])
        counted: npt.NDArray[np.float64] = rows.sum(axis=1)
        return counted

    def _ends(self, loss: float, gradients: Gradients | None) -> str:
        """Return why training ends at θ_k, "" where it goes on."""
        if not np.isfinite(loss) or not _is_finite(gradients):
            return "nonfinite"
        run, k = self.run, self.step
        epoch = 1 if run.batches is None else run.batches.epoch(self.data.n)
        limits = _limits(run) if k % epoch == 0 else {}
        for name, limit in limits.items():
            entry = Entry(name, name, 1)
            value = of_stack(
                run, self.model, self.data, self.tests, (entry,), self.known, self.ties,
                self.num_threads,
            )[name]  # fmt: skip
            if value <= limit if name in THRESHOLDS_BELOW else value >= limit:
                return name
        if self.calls is not None and self.calls.due(k) and self.calls(k, self.model):
            return "callback"
        if callable(run.stop) and run.stop(k, self.model):
            return "stop"
        return ""

    def _step(self, loss: float, gradients: Gradients) -> None:
        """Go from θ_k to θ_{k+1}."""
        names = self.run.wrt
        theta = {name: self.model.parameters[name].copy() for name in names}
        state = {name: tuple(slot.copy() for slot in self.state[name]) for name in names}
        by_name = [
            np.ascontiguousarray(getattr(gradients if j < 0 else gradients.layers[j], own))
            for j, own in map(of_layer, names)
        ]
        _core.step(
            self.settings, names=[PARAMETERS.index(of_layer(name)[1]) for name in names],
            parameters=list(map(_with_heads, theta.values())),
            gradients=list(map(_with_heads, by_name)),
            state=[tuple(map(_with_heads, slots)) for slots in state.values()],
            constraints=[self.ties[name].core if name in self.ties else None for name in names],
            step=self.step, loss=loss,
        )  # fmt: skip
        for array in theta.values():
            array.flags.writeable = False
        self.model, self.state, self.step = with_arrays(self.model, theta), state, self.step + 1


def _limits(run: Run[Stack]) -> Mapping[str, float]:
    return arguments.thresholds(run.stop)


def _is_finite(gradients: Gradients | None) -> bool:
    if gradients is None:
        return True
    parts = (gradients, *gradients.layers)
    arrays = (a for part in parts for a in vars(part).values() if isinstance(a, np.ndarray))
    return all(np.isfinite(array).all() for array in arrays)


def _with_heads(array: Array) -> Array:
    """Return a parameter with the axis of heads: an embedding has one."""
    return array if array.ndim == 3 else array[None]


def _real(entry: Entry, value: Any) -> npt.NDArray[Any]:
    array = real_value(entry.key, value)
    return array if array.dtype == np.float32 and array.ndim > 0 else array.astype(np.float64)
