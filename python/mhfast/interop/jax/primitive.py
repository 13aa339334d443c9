"""The primitive of JAX that all calls of mhfast are, with its rules.

A `Call` is the one parameter. Its derivatives are calls with one more direction, its transposes
calls with a cotangent, and what vmap maps over becomes axes in front of the others, of length 1 in
arrays that are not mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ... import _core
from .calls import Call, serve
from .partition import mesh_of, partitioned, shardings

TARGET = "mhfast_call"
"""The name by which compiled and exported computations find the host's side."""

jax.ffi.register_ffi_target(TARGET, _core.xla_handler(serve), platform="cpu")

attention_p = Primitive("mhfast")
attention_p.multiple_results = True
with suppress(ImportError):  # JAX has no public name for what its own partitioned operations do
    from jax._src.dispatch import prim_requires_devices_during_lowering

    prim_requires_devices_during_lowering.add(attention_p)


def apply(call: Call, *operands: Any) -> list[Any]:
    """Apply a call to its operands, all with the same number of axes added by vmap."""
    results: list[Any] = attention_p.bind(*_placed(call, _alike(operands)), call=call)
    return results


def _placed(call: Call, operands: Sequence[Any]) -> Sequence[Any]:
    """Place operands as a call needs them, where types tell on which devices arrays are."""
    types = [jax.typeof(operand) for operand in operands]
    mesh = mesh_of(types)
    if mesh is None:
        return operands
    wanted, _, _ = shardings(call, mesh, types)
    return [jax.sharding.reshard(*pair) for pair in zip(operands, wanted, strict=True)]


def _alike(operands: Sequence[Any]) -> Sequence[Any]:
    """Let all operands vary over the same axes of a mesh where `jax.shard_map` keeps count."""
    varying = [_varying(jax.typeof(operand)) for operand in operands]
    everywhere = frozenset().union(*varying)
    return [
        _vary(operand, tuple(everywhere - axes)) if everywhere - axes else operand
        for operand, axes in zip(operands, varying, strict=True)
    ]


def _varying(type_: Any) -> frozenset[str]:
    manual = getattr(type_, "mat", None)
    axes: frozenset[str] = type_.vma if manual is None else manual.varying
    return axes


def _vary(operand: Any, axes: tuple[str, ...]) -> Any:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(operand, axes, to="varying")
    return jax.lax.pvary(operand, axes)


# ------------------------------------------------------------------------------- computation


def _results(*operands: Any, call: Call) -> list[Any]:
    X = operands[call.names.index("X")]
    mesh = mesh_of(operands)
    shapes = call.results([operand.shape for operand in operands])
    if mesh is None:
        return [X.update(shape=shape, weak_type=False) for shape in shapes]
    _, placed, _ = shardings(call, mesh, operands)
    return [
        X.update(shape=shape, weak_type=False, sharding=sharding)
        for shape, sharding in zip(shapes, placed, strict=True)
    ]


attention_p.def_abstract_eval(_results)


def _types(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Return the shapes and dtypes of the results."""
    dtype = operands[call.names.index("X")].dtype
    shapes = call.results([operand.shape for operand in operands])
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def _by_xla(call: Call, *operands: Any) -> list[Any]:
    """Apply a call where XLA calls the core."""
    results = _types(call, operands)
    found: list[Any] = list(jax.ffi.ffi_call(TARGET, results)(*operands, call=call.text))
    return found


@lru_cache(maxsize=1024)
def _compiled(call: Call) -> Any:
    return jax.jit(lambda *operands: attention_p.bind(*operands, call=call))


def _at_once(*operands: Any, call: Call) -> list[Any]:
    found: list[Any] = _compiled(call)(*operands)
    return found


attention_p.def_impl(_at_once)


def _by_callback(*operands: Any, call: Call) -> list[Any]:
    """Apply a call on the host of another device."""
    results = _types(call, operands)

    def on_host(*operands: Any) -> list[Any]:
        # Not by jax.numpy, which could wait for the computation that waits for this.
        found = call.compute([np.asarray(operand) for operand in operands])
        pairs = zip(found, results, strict=True)
        return [array.astype(result.dtype, copy=False) for array, result in pairs]

    found: list[Any] = jax.pure_callback(on_host, results, *operands)
    return found


def _lowered(ctx: Any, *operands: Any, call: Call) -> Any:
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is not None and set(manual) != set(context.mesh.axis_names):
        raise NotImplementedError(
            "mhfast.interop.jax: expected jax.shard_map over all axes of the mesh, "
            f"{', '.join(context.mesh.axis_names)}, got it over {', '.join(sorted(manual))} alone"
        )
    for_export = ctx.module_context.lowering_parameters.for_export
    if manual is None and for_export and context.num_devices > 1:
        raise NotImplementedError(
            "mhfast.interop.jax: expected jax.shard_map around what is exported for several "
            f"devices, got arrays on {context.num_devices} without it"
        )
    function = mlir.lower_fun(partitioned(_by_xla), multiple_results=True)
    return function(ctx, *operands, call=call)


mlir.register_lowering(attention_p, _lowered, platform="cpu")
mlir.register_lowering(attention_p, mlir.lower_fun(_by_callback, multiple_results=True))


# --------------------------------------------------------------------------------------- vmap


def _mapped(operands: Sequence[Any], axes: Sequence[Any], *, call: Call) -> tuple[list[Any], Any]:
    moved = [
        jnp.expand_dims(operand, 0) if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    found = apply(call, *moved)
    return found, [0] * len(found)


batching.primitive_batchers[attention_p] = _mapped


# -------------------------------------------------------------------------------- derivatives


def _grouped(call: Call, operands: Sequence[Any]) -> dict[str | int, dict[str, Any]]:
    """Return the operands by group and name, in the order of `Call.operands`."""
    groups: dict[str | int, dict[str, Any]] = {"arrays": {}}
    for (group, name), operand in zip(call.operands, operands, strict=True):
        groups.setdefault(group, {})[name] = operand
    return groups


def _call(
    call: Call,
    arrays: Mapping[str, Any],
    directions: Sequence[Mapping[str, Any]],
    cotangent: Any = None,
    wanted: Sequence[str] = (),
) -> list[Any]:
    """Apply another call to the same arrays."""
    made = replace(call, directions=tuple(map(tuple, directions)), wanted=tuple(wanted))
    moves = [array for direction in directions for array in direction.values()]
    return apply(made, *arrays.values(), *moves, *([cotangent] if made.wanted else []))


def _moved(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    found = apply(call, *primals)
    groups = _grouped(call, primals)
    arrays = groups["arrays"]
    directions = [groups[k] for k in range(len(call.directions))]
    cotangent = groups.get("cotangent", {}).get("outputs")
    parts = []
    for group, moves in _grouped(call, tangents).items():
        along = {name: move for name, move in moves.items() if _moves(move)}
        if not along:
            continue
        if group == "cotangent":
            parts.append(_call(call, arrays, directions, along["outputs"], call.wanted))
            continue
        if group == "arrays":
            _check_differentiable(call, along)
            changed = [*directions, along]
        else:
            changed = [along if k == group else d for k, d in enumerate(directions)]
        parts.append(_call(call, arrays, changed, cotangent, call.wanted))
    if not parts:
        return found, [jnp.zeros_like(result) for result in found]
    return found, [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]


def _moves(tangent: Any) -> bool:
    return not isinstance(tangent, ad.Zero) and tangent.dtype != jax.dtypes.float0


def _check_differentiable(call: Call, along: Mapping[str, Any]) -> None:
    if call.order == 2:
        raise NotImplementedError(
            "mhfast.interop.jax: expected derivatives up to the second, got a third; "
            "a formula in operations of jax.numpy has more"
        )
    readout = "V" if call.is_layer else "U"
    if call.attention == "hardmax" and along.keys() != {readout}:
        raise ValueError(
            f"attention: 'hardmax' has no derivative by the logits; expected a derivative by "
            f"{readout} alone, got one by {', '.join(along)}"
        )


def _transposed(cotangents: Sequence[Any], *operands: Any, call: Call) -> list[Any]:
    """Transpose a call, as a function of one of its directions or of its cotangent."""
    groups = _grouped(call, operands)
    ((linear, names),) = (
        (group, tuple(name for name, operand in members.items() if ad.is_undefined_primal(operand)))
        for group, members in groups.items()
        if any(map(ad.is_undefined_primal, members.values()))
    )
    directions = [groups[k] for k in range(len(call.directions)) if k != linear]
    cotangent = groups.get("cotangent", {}).get("outputs")
    if call.wanted:
        pairs = zip(call.wanted, cotangents, strict=True)
        directions.append({name: c for name, c in pairs if not isinstance(c, ad.Zero)})
    else:
        (cotangent,) = cotangents
    wanted = () if linear == "cotangent" else names
    found = iter(_call(call, groups["arrays"], directions, cotangent, wanted))
    return [
        _over_mapped(next(found), operand.aval.shape) if ad.is_undefined_primal(operand) else None
        for operand in operands
    ]


def _over_mapped(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum a gradient over what vmap maps where the array of this shape is not mapped."""
    pairs = enumerate(zip(gradient.shape, shape, strict=True))
    axes = tuple(axis for axis, (length, own) in pairs if length != own)
    return jnp.sum(gradient, axes, keepdims=True) if axes else gradient


ad.primitive_jvps[attention_p] = _moved
ad.primitive_transposes[attention_p] = _transposed
