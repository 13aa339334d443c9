"""A model as the solvers of SciPy see it: a vector θ in float64, and a function of it.

The entries of all that is trained, one parameter after the other, are one vector. The function is
L(θ) + Σ_P λ_P/2 ‖P‖², the second part over the trained parameters P. A float32 model is evaluated
at θ rounded to float32, and its gradient converted to float64. Of a parameter with a constraint θ
has one coordinate for each group of m equal entries, sqrt(m) times their value, and none for fixed
ones: lengths and angles in the subspace are those of θ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments.losses import Loss
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..gradients import value_and_grad
from ..models import Model
from ..models.problem import with_arrays
from .partition import Partition

M = TypeVar("M", bound=Model)
Vector: TypeAlias = npt.NDArray[np.float64]


@dataclass
class Objective(Generic[M]):
    """The loss of a model with its l2 term, as a function of the vector θ.

    Attributes
    ----------
    model : Classifier or Layer
        Its parameters that are not trained are those of every θ.
    data, loss, wrt, num_threads : as in `mhfast.train`
    l2 : dict of float by parameter
    constraints : dict of partitions by parameter
    last : (θ, value, gradient)
        Of the last call: solvers ask again for what they have just seen.
    """

    model: M
    data: Dataset
    loss: Loss
    wrt: tuple[str, ...]
    l2: Mapping[str, float]
    num_threads: int | None
    constraints: Mapping[str, Partition]
    last: tuple[Vector, float, Vector] | None = field(default=None, init=False)

    def vector(self, model: Model) -> Vector:
        """Return θ of a model."""
        return np.concatenate(
            [self._inside(name, model.parameters[name]) for name in self.wrt], dtype=float
        )

    def _inside(self, name: str, array: Array) -> npt.NDArray[Any]:
        """Return the coordinates of a parameter, or of the projection of its gradient."""
        one = self.constraints.get(name)
        if one is None:
            return array.ravel()
        inside: Vector = one.means(array)[0] * np.sqrt(one.sizes)
        return inside

    def at(self, theta: Vector) -> M:
        """Return the model of θ."""
        arrays, first = {}, 0
        for name in self.wrt:
            like, one = self.model.parameters[name], self.constraints.get(name)
            size = like.size if one is None else len(one.sizes)
            entries = theta[first : first + size]
            if one is None:
                arrays[name] = entries.reshape(like.shape).astype(like.dtype)  # a copy
            else:
                arrays[name] = one.spread((entries / np.sqrt(one.sizes))[None], like)
            arrays[name].flags.writeable = False
            first += size
        return with_arrays(self.model, arrays)

    def __call__(self, theta: Vector) -> tuple[float, Vector]:
        """Return the value and the gradient at θ."""
        if self.last is not None and np.array_equal(theta, self.last[0]):
            return self.last[1:]
        model = self.at(theta)
        loss, gradients = value_and_grad(
            model, self.data, loss=self.loss, wrt=self.wrt, num_threads=self.num_threads
        )
        value, parts = float(loss), []
        for name in self.wrt:
            part = self._inside(name, getattr(gradients, name))
            if self.l2[name] > 0.0:
                parameter = model.parameters[name].ravel().astype(np.float64)
                part = part + self.l2[name] * self._inside(name, model.parameters[name])
                value += 0.5 * self.l2[name] * float(parameter @ parameter)
            parts.append(part)
        gradient = np.concatenate(parts, dtype=np.float64)
        self.last = (theta.copy(), value, gradient)
        return value, gradient
