"""The operators ``torch.ops.mhfast``: outputs, gradients, and their derivatives along a direction.

    attention            the outputs
    attention_backward   the gradients of Σ cotangent · outputs, those that `wanted` names
    attention_tangents   derivatives of both along a direction: jvp and second derivatives
    attention_weights    the attention weights; they have no derivative

Each has a kernel for the CPU, one for fake tensors (shapes only), and a rule for `vmap` (what is
mapped becomes the run axis); the first three have rules for autograd in reverse and forward mode.
To tracers, compilers and dispatch modes they are single nodes of a graph, whose values are never
constants.

In the signatures `readout` is U or V, and `wanted` has a bit for each entry of `NAMES`. A W or V
that is None is the identity of every head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ...gradients import backward
from ...models import Classifier, Layer
from ..borrowed import borrowed
from ..tangents import directional

Tensor: TypeAlias = Any  # a torch.Tensor; types of torch are not checked

NAMES = ("W", "readout", "prompt", "X", "query")
"""The tensors that have gradients, in the order of the signatures."""

AXES = (3, 3, 2, 3, 3)
"""Their axes without the run axis."""

READOUT = {Classifier: "U", Layer: "V"}

_TENSORS = "Tensor? W, Tensor? readout, Tensor? prompt, Tensor X, Tensor? query, Tensor? lengths"
_SETTINGS = (
    "bool is_layer, int? token, float scale, bool causal, str attention, bool? normalize, "
    "int? num_threads"
)
_OUTPUTS = 1 << len(NAMES)  # the bit of the outputs themselves in `wanted` of attention_tangents

library = torch.library.Library("mhfast", "DEF")
library.define(f"attention({_TENSORS}, {_SETTINGS}) -> Tensor")
library.define(
    f"attention_backward(Tensor cotangent, {_TENSORS}, {_SETTINGS}, int wanted) -> Tensor[]"
)
library.define(
    "attention_tangents(Tensor? dW, Tensor? dreadout, Tensor? dprompt, Tensor? dX, Tensor? dquery, "
    f"Tensor? cotangent, {_TENSORS}, {_SETTINGS}, int wanted) -> Tensor[]"
)
library.define(f"attention_weights({_TENSORS}, {_SETTINGS}) -> Tensor")
outputs_op = torch.ops.mhfast.attention.default
backward_op = torch.ops.mhfast.attention_backward.default
tangents_op = torch.ops.mhfast.attention_tangents.default

weights_op = torch.ops.mhfast.attention_weights.default


def array(tensor: Tensor | None) -> Any:
    """Return a tensor as an array, on the CPU without a copy."""
    return None if tensor is None else tensor.numpy(force=True)


def names_of(kind: type[Classifier | Layer]) -> tuple[str, ...]:
    """Return the names of the tensors as those of `mhfast.backward`."""
    return "W", READOUT[kind], "prompt", "X", "query"


def chosen(wanted: int) -> tuple[int, ...]:
    """Return the indices into `NAMES` of the bits of `wanted`."""
    return tuple(i for i in range(len(NAMES)) if wanted >> i & 1)


# ------------------------------------------------------------------------------- on the CPU


def _model(
    W: Tensor | None, readout: Tensor | None, prompt: Tensor | None, settings: Sequence[Any]
) -> Any:
    """Make the model that borrows the memory of the tensors for one call."""
    is_layer, token, *others, _ = settings
    kind: Any = Layer if is_layer else Classifier
    arrays = {}
    for name, tensor in (("W", W), (READOUT[kind], readout), ("prompt", prompt)):
        if tensor is not None:
            arrays[name] = array(tensor)
    return borrowed(kind, arrays, token, *others)


def _outputs(*inputs: Any) -> Tensor:
    W, readout, prompt, X, query, lengths, *settings = inputs
    model = _model(W, readout, prompt, settings)
    found = model(
        array(X), query=array(query), lengths=array(lengths), num_threads=settings[-1]
    )  # fmt: skip
    return torch.from_numpy(found)


def _weights(*inputs: Any) -> Tensor:
    W, readout, prompt, X, query, lengths, *settings = inputs
    model = _model(W, readout, prompt, settings)
    found = model.attention(
        array(X), query=array(query), lengths=array(lengths), num_threads=settings[-1]
    )
    return torch.from_numpy(found)


def _gradients(cotangent: Tensor, *inputs: Any) -> list[Tensor]:
    W, readout, prompt, X, query, lengths, *settings, wanted = inputs
    model = _model(W, readout, prompt, settings)
    names = [names_of(type(model))[i] for i in chosen(wanted)]
    found = backward(
        model, array(X), array(cotangent), wrt=names, query=array(query), lengths=array(lengths),
        num_threads=settings[-1],
    )  # fmt: skip
    tensors = (W, readout, prompt, X, query)
    return [
        _of_variable(getattr(found, name), tensors[i])
        for i, name in zip(chosen(wanted), names, strict=True)
    ]


def _tangents(*inputs: Any) -> list[Tensor]:
    *given, cotangent, W, readout, prompt, X, query, lengths = inputs[:12]
    *settings, wanted = inputs[12:]
    model = _model(W, readout, prompt, settings)
    names = names_of(type(model))
    along = {n: array(t) for n, t in zip(names, given, strict=True) if t is not None}
    outputs, gradients = directional(
        model, array(X), along, array(cotangent), query=array(query), lengths=array(lengths)
    )
    tensors = (W, readout, prompt, X, query)
    results = [_of_variable(gradients[names[i]], tensors[i]) for i in chosen(wanted)]
    if wanted & _OUTPUTS:
        results.insert(0, torch.from_numpy(np.asarray(outputs)).to(X.dtype))
    return results


def _of_variable(gradient: Any, variable: Tensor) -> Tensor:
    """Return a gradient as a tensor, summed over the runs that share the variable."""
    if gradient.ndim > variable.ndim:
        gradient = gradient.sum(axis=0)
    return torch.from_numpy(np.asarray(gradient)).to(variable.dtype)


# --------------------------------------------------------------------------- of fake tensors


def _fake_outputs(*inputs: Any) -> Tensor:
    _, readout, prompt, X, query, _, is_layer, token = inputs[:8]
    lead = runs(inputs[:6], (*AXES, 1))
    n = X.shape[-3]
    if not is_layer:
        return X.new_empty([*lead, n])
    p = X.shape[-1] if readout is None else readout.shape[-1]
    return X.new_empty([*lead, n, _rows(prompt, X, query, token), p])


def _fake_weights(*inputs: Any) -> Tensor:
    W, readout, prompt, X, query, _, _, token = inputs[:8]
    lead, (n, tokens) = runs(inputs[:6], (*AXES, 1)), X.shape[-3:-1]
    heads = next((tensor.shape[-3] for tensor in (W, readout) if tensor is not None), 1)
    return X.new_empty([*lead, n, heads, _rows(prompt, X, query, token), tokens])


def _rows(prompt: Tensor | None, X: Tensor, query: Tensor | None, token: int | None) -> Any:
    """Return the number of query rows."""
    if query is None and prompt is None and token is not None:
        return 1
    side = query if query is not None else prompt if prompt is not None else X
    return side.shape[-2]


def runs(tensors: Sequence[Tensor | None], axes: Sequence[int]) -> list[Any]:
    """Return the shape of the run axis, [R] or []."""
    for tensor, own in zip(tensors, axes, strict=True):
        if tensor is not None and tensor.dim() > own:
            return [tensor.shape[0]]
    return []


def _fake_gradients(cotangent: Tensor, *inputs: Any) -> list[Tensor]:  # noqa: ARG001
    return [inputs[i].new_empty(inputs[i].shape) for i in chosen(inputs[-1])]


def _fake_tangents(*inputs: Any) -> list[Tensor]:
    wanted = inputs[-1]
    results = _fake_gradients(None, *inputs[6:])
    if wanted & _OUTPUTS:
        outputs = _fake_outputs(*inputs[6:-1])
        own = 3 if inputs[12] else 1
        if outputs.dim() == own:  # a direction or the cotangent alone may have the run axis
            lead = runs(inputs[:6], (*AXES, own))
            outputs = outputs.new_empty([*lead, *outputs.shape])
        results.insert(0, outputs)
    return results


# ---------------------------------------------------------------------------------- autograd


def _wanted(needs: Sequence[bool], tensors: Sequence[Tensor | None]) -> int:
    return sum(
        1 << i
        for i, (need, tensor) in enumerate(zip(needs, tensors, strict=True))
        if need and tensor is not None
    )


def _placed(found: Sequence[Tensor], wanted: int) -> list[Tensor | None]:
    """Return results in the places of `NAMES`, None where none was wanted."""
    place: list[Tensor | None] = [None] * len(NAMES)
    for i, tensor in zip(chosen(wanted), found, strict=True):
        place[i] = tensor
    return place


class _Outputs(torch.autograd.function._SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> Tensor:
        ctx.settings = inputs[6:]
        ctx.save_for_backward(*inputs[:6])
        ctx.save_for_forward(*inputs[:6])
        return _below(outputs_op, keyset, inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        *tensors, lengths = ctx.saved_tensors
        wanted = _wanted(ctx.needs_input_grad[1:6], tensors)
        found = backward_op(cotangent, *tensors, lengths, *ctx.settings, wanted)
        return None, *_placed(found, wanted), None, *[None] * len(ctx.settings)

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Tensor:
        (moved,) = tangents_op(*moves[1:6], None, *ctx.saved_tensors, *ctx.settings, _OUTPUTS)
        return moved


class _Gradients(torch.autograd.function._SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.settings = inputs[7:]
        ctx.save_for_backward(*inputs[:7])
        ctx.save_for_forward(*inputs[:7])
        ctx.set_materialize_grads(False)
        return tuple(_below(backward_op, keyset, inputs))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        *settings, wanted = ctx.settings
        upstream, *tensors, lengths = ctx.saved_tensors
        along = _placed(cotangents, wanted)
        second = _wanted(ctx.needs_input_grad[2:7], tensors)
        by_cotangent = _OUTPUTS if ctx.needs_input_grad[1] else 0
        if all(part is None for part in along) or not second | by_cotangent:
            return (None,) * (8 + len(ctx.settings))
        found = list(
            tangents_op(*along, upstream, *tensors, lengths, *settings, second | by_cotangent)
        )
        outputs = found.pop(0) if by_cotangent else None
        return None, outputs, *_placed(found, second), None, *[None] * len(ctx.settings)

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> tuple[Tensor, ...]:
        *settings, wanted = ctx.settings
        upstream, *inputs = ctx.saved_tensors
        along, linear = moves[2:7], moves[1]
        found: list[Any] = [0] * len(chosen(wanted))
        if any(part is not None for part in along):
            found = list(tangents_op(*along, upstream, *inputs, *settings, wanted))
        if linear is not None:
            more = backward_op(linear, *inputs, *settings, wanted)
            found = [a + b for a, b in zip(found, more, strict=True)]
        return tuple(found)


class _Tangents(torch.autograd.function._SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.settings = inputs[12:]
        ctx.save_for_backward(*inputs[:12])
        return tuple(_below(tangents_op, keyset, inputs))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        *settings, wanted = ctx.settings
        if wanted != _OUTPUTS:
            raise RuntimeError(
                "mhfast.interop.torch: expected derivatives up to the second, got a third; "
                "a formula in operations of torch has more"
            )
        along, tensors, lengths = (
            ctx.saved_tensors[:5], ctx.saved_tensors[6:11], ctx.saved_tensors[11]
        )  # fmt: skip
        (cotangent,) = cotangents
        first = _wanted(ctx.needs_input_grad[1:6], along)
        second = _wanted(ctx.needs_input_grad[7:12], tensors)
        linear = backward_op(cotangent, *tensors, lengths, *settings, first)
        found = tangents_op(*along, cotangent, *tensors, lengths, *settings, second)
        return (
            None, *_placed(linear, first), None, *_placed(found, second), None,
            *[None] * len(ctx.settings),
        )  # fmt: skip

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> None:  # noqa: ARG004
        raise RuntimeError(
            "mhfast.interop.torch: expected forward mode at most once, got it twice; "
            "torch.func.hessian is forward over reverse mode"
        )


def _below(op: Any, keyset: Any, inputs: Sequence[Any]) -> Any:
    """Call the kernel behind autograd."""
    if torch._C._are_functorch_transforms_active():
        # The forward of a Function has gradients switched off; the outer transforms need them.
        with (
            torch.enable_grad(),
            forward_ad._set_fwd_grad_enabled(True),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)


def _differentiable(op: Any, cpu: Callable[..., Any], function: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *inputs: Any) -> Any:
        recorded = torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)
        if not recorded and forward_ad._current_level < 0:
            below = keyset & torch._C._after_autograd_keyset
            if below.highestPriorityTypeId() == torch._C.DispatchKey.CPU:
                return cpu(*inputs)  # which a dispatch would call, with all arguments converted
            return _below(op, keyset, inputs)
        if torch._C._are_functorch_transforms_active():
            with enable_single_level_autograd_function():
                found = function.apply(keyset, *inputs)
        else:
            found = function.apply(keyset, *inputs)
        return list(found) if isinstance(found, tuple) else found

    return kernel


# -------------------------------------------------------------------------------------- vmap


def _mapped(op: Any, first: int, info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
    """Call an operator once for all entries of the axis that `vmap` maps, which becomes the runs.

    Parameters
    ----------
    op : operator
    first : int
        The index of W among its arguments.
    info, in_dims, inputs
        As torch gives them to a rule.
    """
    B, count = info.batch_size, first + 6
    gradients = op in (backward_op, tangents_op)
    wanted = inputs[-1] if gradients else 0
    of_outputs = 3 if inputs[count] else 1
    axes = {0: [], 1: [of_outputs], 6: [*AXES, of_outputs]}[first] + [*AXES, 1]
    mapped = [dim is not None for dim in in_dims[:count]]
    tensors = [
        tensor if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(inputs[:count], in_dims[:count], strict=True)
    ]
    has_runs = [
        t is not None and t.dim() - m > own for t, m, own in zip(tensors, mapped, axes, strict=True)
    ]
    R = next((t.shape[m] for t, m, r in zip(tensors, mapped, has_runs, strict=True) if r), None)
    for k, tensor in enumerate(tensors):
        # A variable that is not mapped gets a gradient for each entry, not their sum.
        alone = k >= first and wanted >> (k - first) & 1 and k - first < len(NAMES)
        if tensor is None or not (mapped[k] or (has_runs[k] and R is not None) or alone):
            continue
        if not mapped[k]:
            tensor = tensor.expand(B, *tensor.shape)
        if R is not None:
            if not has_runs[k]:
                tensor = tensor.unsqueeze(1).expand(B, R, *tensor.shape[1:])
            tensor = tensor.reshape(B * R, *tensor.shape[2:])
        tensors[k] = tensor
    found = op(*tensors, *inputs[count:])
    results = list(found) if gradients else [found]
    if R is not None:
        with_runs = [has_runs[first + i] for i in chosen(wanted)]
        if not gradients or wanted & _OUTPUTS:
            with_runs.insert(0, True)
        results = [
            t.unflatten(0, (B, R)) if keep else t.unflatten(0, (B, R)).sum(1)
            for t, keep in zip(results, with_runs, strict=True)
        ]
    return (results, [0] * len(results)) if gradients else (results[0], 0)


# ------------------------------------------------------------------------------ registration

for _op, _first, _cpu, _fake, _function in (
    (outputs_op, 0, _outputs, _fake_outputs, _Outputs),
    (backward_op, 1, _gradients, _fake_gradients, _Gradients),
    (tangents_op, 6, _tangents, _fake_tangents, _Tangents),
    (weights_op, 0, _weights, _fake_weights, None),
):
    _name = _op._schema.name
    library.impl(_name, _cpu, "CPU")
    if _function is not None:
        library.impl(_name, _differentiable(_op, _cpu, _function), "Autograd", with_keyset=True)
    torch.library.register_fake(_name, _fake, lib=library)
    torch.library.register_vmap(_name, partial(_mapped, _op, _first), lib=library)
