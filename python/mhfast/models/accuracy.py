"""The weighted share of correct outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments.lists import OF_CLASSES, OF_ROWS
from .._arguments.values import Array, Value


def accuracy(
    outputs: Array,
    targets: npt.NDArray[Any],
    weight: Array | None,
    lengths: npt.NDArray[np.int64] | None,
    loss: str,
    *,
    is_layer: bool,
    runs: bool,
) -> Value:
    """Return Σ w [margin > 0] / Σ w, for each run where there is a run axis.

    The margin of an output F is y F, that of a row of classes F_y - max_{o ≠ y} F_o; of a row of
    probabilities y is the first of the likeliest classes.

    Parameters
    ----------
    outputs : array (n,) or (n, q, p)
    targets : array of the same shape, (n, q) for classes
    weight : array (n,), or (n, q) for a layer, optional
    lengths : int array (n,), optional
        Rows from there on do not count.
    loss : str
    is_layer, runs : bool
        Whether outputs have axes q and p; whether they have a leading R. All arrays may have it.
    """
    if loss in OF_ROWS:
        classes = targets if loss in OF_CLASSES else targets.argmax(axis=-1)
        right = _of_classes(outputs, classes)
    else:
        right = outputs * np.sign(targets) > 0
    counted = np.ones(right.shape[: runs + 1 + is_layer])  # ([R], n) or ([R], n, q)
    n_q = counted.shape[runs:]
    if weight is not None:
        of_rows = is_layer and (weight.shape == n_q or weight.ndim == 3)
        counted *= weight[..., None] if is_layer and not of_rows else weight
    if lengths is not None:
        counted *= np.arange(n_q[-1]) < lengths[..., None]
    share = right if right.ndim == counted.ndim else right.mean(axis=-1)
    axes = tuple(range(runs, counted.ndim))
    found: npt.NDArray[np.float64] = (counted * share).sum(axis=axes) / counted.sum(axis=axes)
    return found if runs else float(found)


def _of_classes(outputs: Array, classes: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each row whether its class alone has the largest output."""
    at = np.broadcast_to(classes, outputs.shape[:-1])[..., None]
    others = outputs.copy()
    of_class = np.take_along_axis(others, at, axis=-1)[..., 0]
    np.put_along_axis(others, at, -np.inf, axis=-1)
    return np.asarray(of_class > others.max(axis=-1))
