"""Constraints on trained parameters: entries that keep their values, and entries that stay equal.

A `Run` keeps them as a dict by parameter of tuples of parts, each a name or an array; a `Partition`
is what they say about the entries of one parameter. Here they are checked: against the model, its
start and the optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import AXES, LETTERS, PARAMETERS
from .._arguments.values import Array, frozen
from ..gradients import Gradients
from ..models import AnyModel, Model, Stack
from ..models.depth import with_arrays
from ..models.depth_parameters import by_layer, of_layer
from ..optimizers import MirrorDescent, NormalizedGradientDescent, Optimizer, SteepestDescent
from ..optimizers import of_parameter as setting_of
from .partition import FIXED, CoreConstraint, Labels, Partition, Parts, partition

M = TypeVar("M", bound=AnyModel)

Part: TypeAlias = str | npt.NDArray[np.bool_] | npt.NDArray[np.integer[Any]]
Constraints: TypeAlias = Mapping[str, Part | Sequence[Part]]

NAMES = ("symmetric", "heads", "rows")


def partitions(
    model: AnyModel, constraints: Mapping[str, Parts], names: Iterable[str]
) -> dict[str, Partition]:
    """Return the partitions of those parameters in `names` that have a constraint."""
    return {
        name: partition(constraints[name], _shape(model, name))
        for name in names
        if name in constraints
    }


def core(partitions: Mapping[str, Partition]) -> tuple[CoreConstraint, ...]:
    """Return an entry for each parameter, as the core expects it."""
    return tuple(partitions[n].core if n in partitions else None for n in PARAMETERS)


def checked(model: AnyModel, given: Constraints) -> dict[str, Parts]:
    """Return constraints as a `Run` keeps them; "W" of a stack is that of every layer.

    Raises
    ------
    TypeError
        If they are not a dict of names and arrays.
    ValueError
        If a parameter or a name is unknown, or an array does not fit.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"constraints: expected a dict by parameter, got {type(given).__name__}")
    found: dict[str, Parts] = {}
    short = {of_layer(name)[1] for name in model.parameters}
    for key in sorted(given, key=lambda key: key not in short):  # those of one layer last
        full = [
            name
            for name in model.parameters
            if name == key or (isinstance(model, Stack) and of_layer(name)[1] == key)
        ]
        if not full:
            raise ValueError(
                f"constraints: expected parameters among {', '.join(model.parameters)}, got {key!r}"
            )
        value: Any = given[key]
        several = isinstance(value, tuple) or (
            isinstance(value, list) and any(isinstance(part, str) for part in value)
        )
        parts = tuple(value) if several else (value,)
        if not parts:
            raise ValueError(f"constraints[{key!r}]: expected a name or an array, got ()")
        for name in full:
            found[name] = tuple(_part(f"constraints[{key!r}]", p, model, name) for p in parts)
    return {name: found[name] for name in model.parameters if name in found}


def _part(label: str, part: Any, model: AnyModel, name: str) -> Any:
    own, shape = of_layer(name)[1], _shape(model, name)
    if isinstance(part, str):
        if part not in NAMES:
            raise ValueError(f"{label}: expected {', '.join(map(repr, NAMES))}, got {part!r}")
        if part == "heads" and len(shape) < 3:
            raise ValueError(f"{label}: expected a constraint on a {own}, which has no heads")
        if part == "symmetric" and shape[-1] != shape[-2]:
            raise ValueError(
                f"{label}: expected square matrices for 'symmetric', got {own} of shape {shape}"
            )
        return part
    array = checks.as_array(part, label)
    if array.dtype.kind not in "biu":
        raise TypeError(
            f"{label}: expected a name, bools (True: trained) or integers (equal: tied, -1: "
            f"fixed), got dtype {array.dtype}"
        )
    checks.shape(array, label, LETTERS[own], shape)
    if array.dtype.kind == "b":
        return frozen(array)
    for extreme in (array.min(), array.max()):
        if not FIXED <= int(extreme) <= np.iinfo(np.int64).max:
            raise ValueError(f"{label}: expected int64 of at least -1, got {extreme}")
    return frozen(array.astype(np.int64))


def _shape(model: AnyModel, name: str) -> tuple[int, ...]:
    return model.parameters[name].shape[-AXES[of_layer(name)[1]] :]


def check_start(model: AnyModel, found: Mapping[str, Partition], trained: Collection[str]) -> None:
    """Raise ValueError unless tied entries are equal, and some entry is trained."""
    if trained and all(name in found and not len(found[name].sizes) for name in trained):
        raise ValueError("constraints: expected an entry that is trained, got only fixed ones")
    for name, one in found.items():
        array = model.parameters[name]
        places = one.unequal(array)
        if places is not None:
            first, second = places
            raise ValueError(
                f"constraints: expected equal entries of {name} where it ties them, got "
                f"{array[first]} at {first} and {array[second]} at {second}; "
                f"mhfast.tied(model, constraints) starts from their means"
            )


def refuse(rule: Optimizer, model: AnyModel, found: Mapping[str, Partition]) -> None:
    """Raise ValueError if steps of the rule, or its projection, would break a constraint."""
    for name, one in found.items():
        if one.is_trivial:
            continue
        what = type(rule).__name__
        norms_by_head = getattr(rule, "by", "") == "head" and (
            isinstance(rule, NormalizedGradientDescent)
            or (isinstance(rule, MirrorDescent) and rule.normalized)
            or (isinstance(rule, SteepestDescent) and (rule.scaled or rule.norm == "fro"))
        )
        if norms_by_head and one.is_uneven:
            raise ValueError(
                f"by: expected 'tensor' or 'all' beside ties between some entries of several heads "
                f"of {name}, which steps of different lengths by head would separate, got 'head'"
            )
        if isinstance(rule, SteepestDescent):
            if rule.norm == "spectral" and not one.of_names:
                raise ValueError(
                    f"norm: expected another than 'spectral' beside a constraint by an array on "
                    f"{name}, since {what} moves whole matrices; 'symmetric', 'heads' and 'rows' "
                    f"have steps of their own"
                )
            if rule.norm == "l1" and len(one.groups[1]):
                raise ValueError(
                    f"norm: expected another than 'l1' beside tied entries of {name}, since "
                    f"{what} moves one entry at a time"
                )
        _refuse_projection(rule, name, model.parameters[name], one)


def _refuse_projection(rule: Optimizer, name: str, array: Array, one: Partition) -> None:
    own = of_layer(name)[1]
    if rule.project is None or setting_of(rule.radius, own, None) is None:
        return
    if rule.project_norm in ("nuclear", "spectral") and not one.of_names:
        raise ValueError(
            f"project_norm: expected another than {rule.project_norm!r} beside a constraint by an "
            f"array on {name}, since the projection moves whole matrices"
        )
    if np.any(array.reshape(-1, len(one.labels))[:, one.fixed]):
        raise ValueError(
            f"project: expected None, or entries of {name} that are fixed at 0, since a "
            f"projection would move them; got {rule.project!r}"
        )
    if rule.project_by == "head" and one.is_uneven:
        raise ValueError(
            f"project_by: expected 'tensor' or 'all' beside ties between some entries of several "
            f"heads of {name}, got 'head'"
        )


def described(constraints: Mapping[str, Parts], names: Collection[str]) -> tuple[str, ...]:
    """Return the constraints on parameters in `names` as text: names, and digests of arrays."""
    return tuple(
        f"{name}: {' and '.join(map(_described, parts))}"
        for name, parts in constraints.items()
        if name in names
    )


def _described(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = "mask" if part.dtype == bool else "ties"
    return f"{kind} {hashlib.blake2b(part.tobytes(), digest_size=8).hexdigest()}"


def projected(gradients: Gradients, found: Mapping[str, Partition]) -> Gradients:
    """Return gradients, of a model or of a stack, with those of constrained parameters projected.

    Each is replaced by its orthogonal projection onto the subspace of the constraint.
    """
    if not found:
        return gradients
    if gradients.layers is None:
        changes: dict[str, Any] = {
            name: one.project(getattr(gradients, name)) for name, one in found.items()
        }
        return replace(gradients, **changes)
    layers = list(gradients.layers)
    parts = {
        name: one.project(getattr(layers[of_layer(name)[0]], of_layer(name)[1]))
        for name, one in found.items()
    }
    for j, own in by_layer(parts).items():
        changes = dict(own)
        layers[j] = replace(layers[j], **changes)
    return replace(gradients, layers=tuple(layers))


def tied(model: M, constraints: Constraints) -> M:
    """Return the model with the mean of tied entries in their place, for training to start from.

    Parameters
    ----------
    model : Classifier, Layer or Stack
    constraints : dict by parameter
        As for `train`.

    Returns
    -------
    model of the same kind
        The nearest one in the Euclidean norm that satisfies the constraints. Fixed entries, and
        those that are tied to none, keep their bits.

    Raises
    ------
    TypeError
        If the model or a constraint is of the wrong kind.
    ValueError
        If a parameter or a name is unknown, or an array does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> model = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.1, seed=0)
    >>> start = mh.tied(model, {"W": ("heads", "symmetric"), "U": "rows"})
    >>> bool((start.W[2].T == start.W[0]).all()), bool(np.ptp(start.U, axis=1).any())
    (True, False)
    """
    if not isinstance(model, Model | Stack):
        raise TypeError(f"model: expected a Classifier, Layer or Stack, got {type(model).__name__}")
    found = partitions(model, checked(model, constraints), tuple(model.parameters))
    arrays = {}
    for name, one in found.items():
        if not len(one.groups[1]):
            continue
        array = model.parameters[name]
        arrays[name] = one.spread(one.means(array), array)
        arrays[name].flags.writeable = False
    return with_arrays(model, arrays)


def position_ties(
    heads: int, dim: int, tokens: int, *, relative: bool = True, farthest: int | None = None
) -> Labels:
    """Return the constraint on W by which scores are x_tᵀ W_h x_s + b_h(t, s), without other terms.

    It is for tokens [x_t, e_t], whose last features are one-hot positions. W_h then is of two
    blocks, one for x and one of biases, and its other entries stay 0.

    Parameters
    ----------
    heads : int
        H.
    dim : int
        The number of features of x_t, in front of the positions; 0 for biases alone.
    tokens : int
        T, the number of positions.
    relative : bool
        Whether b_h(t, s) depends on the distance s - t alone. Otherwise each pair, or each row, has
        biases of its own.
    farthest : int, optional
        With ``relative``, the distance beyond which all in the same direction have one bias.

    Returns
    -------
    int64 array (H, dim + T, dim + T)
        -1 for the entries between x and positions, equal numbers for equal distances, another one
        for each other entry.

    Raises
    ------
    TypeError
        If a number is not an integer.
    ValueError
        If it is too small, or ``farthest`` is given without ``relative``.

    References
    ----------
    Shaw, Uszkoreit, Vaswani, "Self-Attention with Relative Position Representations", NAACL 2018.

    Examples
    --------
    >>> import mhfast as mh
    >>> mh.position_ties(heads=1, dim=1, tokens=3)[0]
    array([[ 0, -1, -1, -1],
           [-1,  3,  4,  5],
           [-1,  2,  3,  4],
           [-1,  1,  2,  3]])
    """
    heads, tokens = checks.count(heads, "heads"), checks.count(tokens, "tokens")
    dim = checks.integer(dim, "dim")
    if dim < 0:
        raise ValueError(f"dim: expected an integer of at least 0, got {dim}")
    place = np.arange(tokens)
    between = place - place[:, None]
    if farthest is not None:
        if not relative:
            raise ValueError(f"farthest: expected None without relative=True, got {farthest!r}")
        most = checks.count(farthest, "farthest")
        between = between.clip(-most, most)
    biases = between - between.min() if relative else place + tokens * place[:, None]
    of_head = np.full((dim + tokens, dim + tokens), FIXED, np.int64)
    of_head[:dim, :dim] = np.arange(dim * dim).reshape(dim, dim)
    of_head[dim:, dim:] = dim * dim + biases
    each = np.arange(heads)[:, None, None] * (of_head.max() + 1)
    return np.where(of_head == FIXED, FIXED, of_head + each)
