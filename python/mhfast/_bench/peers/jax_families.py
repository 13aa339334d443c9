"""The model family in JAX: all steps of all runs in one compiled lax.scan.

Runs go side by side under vmap, or one after the other with lax.map. Each way is tried unchanged,
where XLA may use all cores for one operation, and with its runs, or the samples of a single run,
divided by hand among one device per core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..families import Trainees, Training
from ..problem import Answer
from . import Formulation
from . import jax_family_formulas as formulas
from .jax_config import configure
from .jax_family_formulas import Gradient, JaxArray, Parameters

DEVICES = configure()


# (theta, X, Z, y) -> (losses (steps,) or, of several runs, (steps,R), theta)
Train: TypeAlias = Callable[..., tuple[JaxArray, Parameters]]


def trainings(problem: Trainees, training: Training, _threads: int) -> list[Formulation]:
    """Every way of writing it."""
    parts = training.runs if training.runs > 1 else training.shape.n
    places = (1, DEVICES) if DEVICES > 1 and parts % DEVICES == 0 else (1,)
    return [
        _formulation(name, train, problem, devices)
        for name, train in _ways(training)
        for devices in places
    ]


def _ways(training: Training) -> Iterator[tuple[str, Train]]:
    gradients: dict[str, Gradient] = {
        "value_and_grad, queries first": jax.value_and_grad(formulas.queries_first),
        "written out, queries first": formulas.closed_queries_first,
        "written out, keys first": formulas.closed_keys_first,
    }
    for name, gradient in gradients.items():
        if training.runs == 1:
            yield name, _descent(gradient, training)
        else:
            yield f"vmap, {name}", _descent(jax.vmap(gradient), training)
            yield f"lax.map, {name}", _in_turn(_descent(gradient, training))


def _descent(gradient: Gradient, training: Training) -> Train:
    def stepped(a: JaxArray, g: JaxArray) -> JaxArray:
        if training.normalized:
            g = g / jnp.sqrt((g * g).sum((-3, -2, -1), keepdims=True))
        return a - training.lr * g

    def train(theta: Parameters, *data: JaxArray) -> tuple[JaxArray, Parameters]:
        def step(theta: Parameters, _: None) -> tuple[Parameters, JaxArray]:
            loss, loss_derivatives = gradient(theta, *data)
            return jax.tree.map(stepped, theta, loss_derivatives), loss

        theta, losses = jax.lax.scan(step, theta, None, length=training.steps)
        return losses, theta

    return train


def _in_turn(train: Train) -> Train:
    """Train the runs one after the other."""

    def trained(theta: Parameters, *data: JaxArray) -> tuple[JaxArray, Parameters]:
        losses, theta = jax.lax.map(lambda one: train(*one), (theta, *data))
        return losses.T, theta

    return trained


def _formulation(name: str, train: Train, problem: Trainees, devices: int) -> Formulation:
    theta, data = (problem.W, problem.readout), (problem.X, problem.Z, problem.y)
    several = len(problem.X) > 1
    mesh = Mesh(np.array(jax.devices()[:devices]), ("part",))
    whole, split = PartitionSpec(), PartitionSpec("part")
    if several and devices > 1:
        # Every device has runs of its own and never waits for another.
        results = (PartitionSpec(None, "part"), split)
        train = jax.shard_map(train, mesh=mesh, in_specs=split, out_specs=results)
    if not several:
        theta, data = jax.tree.map(lambda a: a[0], (theta, data))
    theta = jax.device_put(theta, NamedSharding(mesh, split if several else whole))
    data = jax.device_put(data, NamedSharding(mesh, split))
    compiled = jax.jit(train)

    def run() -> Any:
        return jax.block_until_ready(compiled(theta, *data))

    def answer(result: Any) -> Answer:
        losses, (W, readout) = result
        return Answer(
            np.asarray(losses)[-1].reshape(-1),
            np.asarray(W).reshape(problem.W.shape),
            np.asarray(readout).reshape(problem.readout.shape),
        )

    return Formulation(f"{name}, {devices} devices" if devices > 1 else name, run, answer)
