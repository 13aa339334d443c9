"""How XLA divides a call among devices: by samples, and by what vmap maps over.

Each device computes its samples from all of the parameters; gradients by parameters are then summed
over the devices that hold samples. Anything else, such as heads on several devices, is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .calls import Call, Shape

SAMPLES = ("X", "query", "lengths", "outputs")
"""What has samples, along the first axis after those that vmap adds."""

Operator = Callable[..., list[Any]]


def partitioned(operator: Operator) -> Operator:
    """Return `operator(call, *operands)` as `(*operands, call=)`, divided among devices."""

    def apply(*operands: Any, call: Call) -> list[Any]:
        # A new object each time, since rules are kept with it.
        made = custom_partitioning(lambda *operands: tuple(operator(call, *operands)))

        def partition(mesh: Any, given: Any, results: Any) -> Any:  # noqa: ARG001
            return _partition(operator, call, mesh, given)

        def infer(mesh: Any, given: Any, results: Any) -> Any:  # noqa: ARG001
            return tuple(shardings(call, mesh, given)[1])

        made.def_partition(
            partition=partition,
            infer_sharding_from_operands=infer,
            sharding_rule=lambda mesh, operands, results: _rule(  # noqa: ARG005
                call, [tuple(operand.shape) for operand in operands]
            ),
        )
        mesh = mesh_of(map(jax.typeof, operands))
        if mesh is None:
            return list(made(*operands))
        _, placed, _ = shardings(call, mesh, [jax.typeof(operand) for operand in operands])
        return [jax.sharding.reshard(*pair) for pair in zip(made(*operands), placed, strict=True)]

    return apply


def mesh_of(types: Iterable[Any]) -> Any:
    """Return the mesh along which types of arrays say how these are divided, None without one."""
    meshes = (getattr(type_.sharding, "mesh", None) for type_ in types)
    return next((mesh for mesh in meshes if mesh and mesh.explicit_axes), None)


def _layout(call: Call, shapes: Sequence[Shape]) -> tuple[list[list[str]], list[list[str]]]:
    """Name the axes of operands and results: those that are divided alike have one name.

    "r0", "r1", ... are axes that vmap adds, "n" is that of samples; "z0", "z1", ... are whole on
    every device.
    """
    lead, number = call.lead(shapes), count()

    def named(name: str, shape: Shape) -> list[str]:
        axes = [
            f"r{k}" if k < len(lead) and length == lead[k] else f"z{next(number)}"
            for k, length in enumerate(shape)
        ]
        if name in SAMPLES:
            axes[len(lead)] = "n"
        return axes

    operands = [named(name, s) for (_, name), s in zip(call.operands, shapes, strict=True)]
    results = [named(name, s) for name, s in zip(_results(call), call.results(shapes), strict=True)]
    return operands, results


def _results(call: Call) -> tuple[str, ...]:
    return call.wanted or ("outputs",)


def _rule(call: Call, shapes: Sequence[Shape]) -> Any:
    """Return the same in the notation of Shardy."""
    operands, results = _layout(call, shapes)
    sides = [", ".join(" ".join(axes) for axes in side) for side in (operands, results)]
    factors = dict.fromkeys(axis for side in (operands, results) for axes in side for axis in axes)
    whole = tuple(axis for axis in factors if axis.startswith("z"))
    return " -> ".join(sides), {"need_replication_factors": whole}


def shardings(call: Call, mesh: Any, given: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """Return the shardings of operands and results, and the axes of the mesh for samples.

    They are those that operands have, where this is possible. XLA pads parts that are not equal,
    and sums over samples would count what it pads with, so that parts have to be equal.
    """
    operands, results = _layout(call, [tuple(operand.shape) for operand in given])
    over: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for axes, operand in zip(operands, given, strict=True):
        spec = getattr(operand.sharding, "spec", ())  # none where XLA has not decided
        for axis, along, length in zip(axes, spec, operand.shape, strict=False):
            names = (along,) if isinstance(along, str) else tuple(along or ())
            parts = math.prod(mesh.shape[name] for name in names)
            free = not axis.startswith("z") and axis not in over and not taken.intersection(names)
            if names and free and length % parts == 0:
                over[axis] = names
                taken.update(names)

    def sharding(axes: list[str]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*map(over.get, axes)))

    return [sharding(a) for a in operands], [sharding(a) for a in results], over.get("n")


def _partition(operator: Operator, call: Call, mesh: Any, given: Any) -> Any:
    """Return what a device computes of its part, and how operands and results are divided."""
    of_operands, of_results, over = shardings(call, mesh, given)

    def local(*operands: Any) -> tuple[Any, ...]:
        found = operator(call, *operands)
        return tuple(
            array if not over or name in SAMPLES else jax.lax.psum(array, over)
            for name, array in zip(_results(call), found, strict=True)
        )

    return mesh, local, tuple(of_results), tuple(of_operands)
