"""Projected gradient descent to stationary points of the loss over a ball."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._arguments.lists import AXES
from .._arguments.losses import Loss
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Model
from ..models import problem as arguments
from ..optimizers import NormalizedGradientDescent
from ..training.train import train

CHUNK = 50  # steps between two evaluations of the loss: 20 to 100 need about equally many in all
GROWTH = 1.3  # of the step size after a chunk that was kept; 1.1 to 2 need about equally many steps


@dataclass(frozen=True, eq=False)
class Point:
    """A point of a ball; its numbers are arrays (R,), of length 1 without a run axis."""

    numbers: ClassVar[tuple[str, ...]] = (
        "losses", "norms", "stationarity", "grad_norms", "converged", "steps",
    )  # fmt: skip

    model: Model
    losses: Array
    norms: Array
    stationarity: Array
    grad_norms: Array
    converged: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64]
    pull: Array | None = None
    """g/‖g‖ of the gradient at the point, of the shape of the parameter."""


@dataclass(frozen=True, eq=False)
class Descent:
    """What is minimised over which parameter in which norm, and for how long."""

    data: Dataset
    loss: Loss
    wrt: str
    norm: str
    steps: int
    tolerance: float
    num_threads: int | None

    def descend(self, model: Model, radius: float, lr: Array) -> tuple[Point, Array]:
        """Descend inside the ball from `model` until stationary; return the step sizes, too.

        A chunk of steps is kept if the loss does not rise, and it falls, or the point became more
        stationary, or the loss would fall if the descent continued.  The last two are judged by the
        gradient, which has full relative accuracy also where attention is so saturated that the
        loss changes by less than its rounding.
        """
        point = self._measured(model, radius, np.zeros(len(lr), np.int64))
        lr = np.minimum(lr, radius)
        taken = 0
        while taken < self.steps and not point.converged.all() and lr.max() > 1e-14 * radius:
            count = min(CHUNK, self.steps - taken)
            going = ~point.converged
            moved = self._advanced(point.model, radius, np.where(going, lr, 0.0), count)
            taken += count
            tried = self._measured(moved, radius, point.steps + count)
            rounding = 1e-13 * np.abs(point.losses)
            falls = tried.losses < point.losses - rounding
            falls |= tried.stationarity < point.stationarity
            falls |= self._falls_beyond(point, tried)
            kept = going & falls & (tried.losses <= point.losses + rounding)
            lr = np.where(going, np.where(kept, np.minimum(GROWTH * lr, radius), lr / 2.0), lr)
            tried_steps = np.where(going, point.steps + count, point.steps)
            point = self._mixed(kept, tried, point, tried_steps)
        return point, lr

    def moved_out(self, model: Model, before: float, after: float) -> Model:
        """Return the model with a parameter on the boundary of the ball `before` scaled up."""
        value = model.parameters[self.wrt]
        outside = self._norms(value) >= before * (1.0 - 1e-9)
        factor = np.where(outside, after / before, 1.0)
        return self._with(model, value * self._by_run(factor, value).astype(value.dtype))

    def _measured(self, model: Model, radius: float, steps: npt.NDArray[np.int64]) -> Point:
        """Measure a point with one long step."""
        runs = model.runs or 1
        probe, history = self._step(model, None, np.full(runs, radius), 1)
        value, far = model.parameters[self.wrt], probe.parameters[self.wrt]
        change = np.sqrt(np.square(self._rows(self._projected(far, radius) - value)).sum(axis=1))
        norms = self._norms(value)
        losses = np.reshape(history["loss"], (runs, -1))[:, 0]
        grads = np.reshape(history["grad_norm"], (runs, -1))[:, 0]
        stationarity = change / radius
        inside = (norms < radius * (1.0 - 1e-9)) & (
            grads * radius <= self.tolerance * np.abs(losses)
        )
        converged = (stationarity <= self.tolerance) | inside
        pull = (value - far) / radius
        return Point(model, losses, norms, stationarity, grads, converged, steps, pull)

    def _falls_beyond(self, a: Point, b: Point) -> npt.NDArray[np.bool_]:
        """Return whether the loss falls at b in the direction from a to b."""
        change = b.model.parameters[self.wrt] - a.model.parameters[self.wrt]
        assert b.pull is not None
        below: npt.NDArray[np.bool_] = self._rows(b.pull * change).sum(axis=1) < 0.0
        return below

    def _advanced(self, model: Model, radius: float, lr: Array, count: int) -> Model:
        if self.norm == "fro":
            return self._step(model, radius, lr, count)[0]
        for _ in range(count):
            model = self._step(model, radius, lr, 1)[0]
        return model

    def _step(self, model: Model, radius: float | None, lr: Array, count: int) -> tuple[Model, Any]:
        """Take steps, inside the ball if there is a radius."""
        inside = radius is not None and self.norm == "fro"
        ball: dict[str, Any] = {"project": "ball", "radius": radius} if inside else {}
        rate = lr if model.runs is not None else float(lr[0])
        run = train(
            model, self.data, steps=count, optimizer=NormalizedGradientDescent(rate, **ball),
            loss=self.loss, wrt=self.wrt, record={"loss": count, "grad_norm": count},
            num_threads=self.num_threads,
        )  # fmt: skip
        ended: Model = run.model
        if radius is not None and not inside:
            value = ended.parameters[self.wrt]
            ended = self._with(ended, self._projected(value, radius))
        return ended, run.history

    def _projected(self, value: Array, radius: float) -> Array:
        if self.norm == "nuclear":
            return nearest_in_ball(value, radius)
        factor = radius / np.maximum(self._norms(value), radius)
        projected: Array = value * self._by_run(factor, value).astype(value.dtype)
        return projected

    def _mixed(
        self, first: npt.NDArray[np.bool_], a: Point, b: Point, steps: npt.NDArray[np.int64]
    ) -> Point:
        """Return the point `a` for the runs where `first` is true, and `b` for others."""
        value = a.model.parameters[self.wrt]
        parameter = np.where(self._by_run(first, value), value, b.model.parameters[self.wrt])
        numbers = {n: np.where(first, getattr(a, n), getattr(b, n)) for n in Point.numbers}
        return Point(self._with(a.model, parameter), **{**numbers, "steps": steps})

    def _with(self, model: Model, value: Array) -> Model:
        return arguments.with_arrays(model, {self.wrt: value})

    def _rows(self, value: Array) -> Array:
        lead = value.shape[0] if value.ndim > AXES[self.wrt] else 1
        return value.reshape(lead, -1).astype(np.float64)

    def _norms(self, value: Array) -> Array:
        if self.norm == "nuclear":
            singular = np.linalg.svd(value.astype(np.float64), compute_uv=False)
            nuclear: Array = self._rows(value)[:, 0] * 0.0 + singular.sum(axis=(-2, -1))
            return nuclear
        lengths: Array = np.sqrt(np.square(self._rows(value)).sum(axis=1))
        return lengths

    def _by_run(self, factors: npt.NDArray[Any], value: Array) -> npt.NDArray[Any]:
        return (
            factors.reshape(-1, *[1] * AXES[self.wrt]) if value.ndim > AXES[self.wrt] else factors
        )


def nearest_in_ball(W: Array, radius: float) -> Array:
    """Project W (..., H, d, d) on the ball of the nuclear norm, the sum over all heads.

    The singular values are projected on the simplex of that size: each loses the same, down to 0
    (Duchi, Shalev-Shwartz, Singer, Chandra, "Efficient Projections onto the l1-Ball", 2008).
    """
    left, values, right = np.linalg.svd(W.astype(np.float64), full_matrices=False)
    flat = values.reshape(*values.shape[:-2], -1)
    descending = -np.sort(-flat, axis=-1)
    excess = (np.cumsum(descending, axis=-1) - radius) / np.arange(1, flat.shape[-1] + 1)
    count = (descending > excess).sum(axis=-1, keepdims=True)
    threshold = np.maximum(np.take_along_axis(excess, np.maximum(count, 1) - 1, axis=-1), 0.0)
    shrunk = np.maximum(flat - threshold, 0.0).reshape(values.shape)
    near: Array = ((left * shrunk[..., None, :]) @ right).astype(W.dtype)
    return np.where((flat.sum(axis=-1) <= radius)[..., None, None, None], W, near)
