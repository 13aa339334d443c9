"""What a training step records, from the arrays that the step has; one text for all libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .natural import Data, Library, Tensor, Theta


@dataclass(frozen=True)
class Step:
    """What a step has: parameters, now and at the start, gradients, outputs, weights (n,H,q,T)."""

    theta: Theta
    start: Theta
    gradients: Mapping[str, Tensor]
    outputs: Tensor
    A: Tensor


def recorded(
    library: Library, name: str, step: Step, data: Data, direction: Mapping[str, Tensor]
) -> Tensor:
    """Return the quantity of that name; see `mhfast.training.quantities`.

    Raises
    ------
    ValueError
        There is no such quantity.
    """
    theta = step.theta
    match name:
        case "accuracy":
            right = data.y * step.outputs > 0
            if "U" in theta:
                return (right + 0.0 * data.y).mean(-1)
            return (right * data.share).sum((-3, -2, -1)) / data.y.shape[-1]
        case "margin":
            return _margin(library, data.y * step.outputs, data, "U" in theta)
        case "grad_norm":
            return _norm(library, step.gradients)
        case "param_norm":
            return _norm(library, theta)
        case "distance":
            return _norm(library, {key: theta[key] - step.start[key] for key in theta})
        case "cosine":
            product = sum(_sum(key, theta[key] * direction[key]) for key in theta)
            return product / (_norm(library, theta) * _norm(library, direction))
        case "snapshot":
            return next(theta[key] for key in "UVA" if key in theta)
        case "attention":
            return step.A
        case "attention_max":
            largest = library.largest(step.A, -1)
            return (largest * data.share[..., None, :, 0]).sum((-3, -1))
        case "attention_groups":
            tokens = (step.A * data.share[:, None]).sum(-2)
            return (tokens @ data.groups).sum(-3)
    raise ValueError(f"record: there is no {name}")


def _margin(library: Library, margins: Tensor, data: Data, classifier: bool) -> Tensor:
    if classifier:
        return library.least(margins, -1)
    if data.real is not None:  # rows of padding do not count
        margins = margins + (1.0 - data.real) * 1e30
    return library.least(margins.reshape(*margins.shape[:-3], -1), -1)


def _norm(library: Library, arrays: Mapping[str, Tensor]) -> Tensor:
    return library.sqrt(sum(_sum(name, array * array) for name, array in arrays.items()))


def _sum(name: str, array: Tensor) -> Tensor:
    """Return the sum over all axes but that of runs."""
    return array.sum((-2, -1) if name == "prompt" else (-3, -2, -1))
