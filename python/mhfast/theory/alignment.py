"""How well trained parameters are aligned with the limit of training that a program predicts."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._arguments.lists import AXES
from .._arguments.values import Array
from ..gradients import Gradients
from ..models import LowRank, Model
from ..training.run import Run

OF_HEADS = ("W", "U", "V")


class HasDirection(Protocol):
    """The result of a program, such as `TokenSVM`."""

    @property
    def direction(self) -> Gradients:
        """The solution by parameter."""


def alignment(
    trained: Run[Any] | Model, solution: HasDirection | Gradients, *, wrt: str | None = None
) -> npt.NDArray[np.float64]:
    """Compute the cosine of trained parameters, head by head, to the solution of a program.

    Parameters
    ----------
    trained : model or Run
        Of a Run that recorded snapshots of the parameter (``record={"W": 10}``, or Q and K of
        factored W), the cosine at each of them; of another Run that of its model.
    solution : TokenSVM, NextTokenSVM, JointSVM or Gradients
        The direction, with one head for all heads of the model or with as many; with or without
        a run axis.
    wrt : {"W", "U", "V", "prompt"}, optional
        The parameter to compare; the only one of the solution by default.

    Returns
    -------
    float64 array (H,) or (rows, H)
        rows are the steps ``run.steps[wrt]`` of a Run.  For a prompt its rows q take the place of
        heads.  With a run axis a leading R; NaN where one of the two is zero.

    Raises
    ------
    TypeError
        An argument is of another kind.
    ValueError
        The parameter is missing in one of them, or the shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> data = mh.Dataset(rng.standard_normal((4, 3, 6)), [1.0] * 4)
    >>> svm = mh.theory.token_svm(data, [0, 1, 2, 0], query=-1)
    >>> model = mh.Classifier(100 * svm.direction.W, np.ones((1, 1, 6)), query=-1)
    >>> mh.theory.alignment(model, svm).round(6)  # one cosine for each head
    array([1.])
    """
    named = solution if isinstance(solution, Gradients) else getattr(solution, "direction", None)
    if not isinstance(named, Gradients):
        raise TypeError(
            f"solution: expected the solution of a program, got {type(solution).__name__}"
        )
    has = [name for name in (*OF_HEADS, "prompt") if getattr(named, name) is not None]
    if wrt is None and len(has) != 1:
        raise ValueError(f"wrt: expected one of {', '.join(has)}, got None")
    name = has[0] if wrt is None else wrt
    if name not in has:
        raise ValueError(f"wrt: expected one of {', '.join(has)}, got {name!r}")
    target: Array = np.asarray(getattr(named, name), dtype=np.float64)
    values, rows = _trained(trained, name)  # (R?, rows?, H, ...)
    axes = AXES[name]
    runs = values.ndim - axes - rows
    if target.shape[-axes + 1 :] != values.shape[-axes + 1 :]:
        raise ValueError(
            f"solution: expected heads of {name} of shape {values.shape[-axes + 1 :]}, "
            f"got {target.shape[-axes + 1 :]}"
        )
    if target.shape[-axes] not in (1, values.shape[-axes]):
        raise ValueError(
            f"solution: expected 1 or {values.shape[-axes]} heads, got {target.shape[-axes]}"
        )
    if target.ndim > axes:
        if runs and len(target) != len(values):
            raise ValueError(f"solution: expected {len(values)} runs, got {len(target)}")
        values = values if runs else values[None]
        target = target.reshape(len(target), *[1] * rows, *target.shape[1:])
    return _cosine(_flat(values, axes - 1), _flat(target, axes - 1))


def _trained(trained: Run[Any] | Model, name: str) -> tuple[Array, int]:
    """Return the parameter of a model, or its snapshots, and how many axes these add."""
    if isinstance(trained, Run):
        history: dict[str, Array] = trained.history
        if name in history:
            return history[name].astype(np.float64), 1
        if name == "W" and isinstance(trained.model.W, LowRank) and "Q" in history:
            tied = trained.model.W.K is None
            Q, K = history["Q"], history["Q" if tied or "K" not in history else "K"]
            if tied or ("K" in history and Q.shape[-4] == K.shape[-4]):
                return (Q @ np.swapaxes(K, -1, -2)).astype(np.float64), 1
        return _trained(trained.model, name)
    if not isinstance(trained, Model):
        raise TypeError(f"trained: expected a model or a Run, got {type(trained).__name__}")
    value = getattr(trained, name, None)
    if value is None:
        raise ValueError(f"wrt: expected a parameter of the model, got {name!r}")
    array: Array = value.dense() if isinstance(value, LowRank) else value
    return array.astype(np.float64), 0


def _flat(array: Array, inner: int) -> Array:
    """Return (..., H, numbers of a head), each head in units of its own size."""
    flat = array.reshape(*array.shape[:-inner], -1)
    largest = np.abs(flat).max(axis=-1, keepdims=True)
    scaled: Array = flat / np.where(largest > 0.0, largest, 1.0)
    return scaled


def _cosine(a: Array, b: Array) -> npt.NDArray[np.float64]:
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    products = (a * b).sum(axis=-1)
    return np.where(lengths > 0.0, products / np.where(lengths > 0.0, lengths, 1.0), np.nan)
