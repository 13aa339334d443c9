"""Training of a readout in coefficients of the samples, where these are fewer than its features.

While attention stays as it is, outputs are linear in U, and gradients by U are sums of the samples'
features. Steps that are sums of gradients then are steps of n coefficients; the core takes these
where they are shorter (csrc/training/coefficients.hpp). U has less digits than they have, so that a
run keeps them beside it, to be resumed bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..models.problem import CoreProblem
from ..optimizers import GradientDescent, Momentum

if TYPE_CHECKING:
    from .run import Run
    from .segments import Segment

CoreCoefficients: TypeAlias = tuple[npt.NDArray[np.bool_] | npt.NDArray[np.float64], ...]
"""Whether training starts from them, and ended with them, those of U, and of the optimizer's."""


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of a call, which the core overwrites.

    Attributes
    ----------
    core : tuple of the core
    """

    core: CoreCoefficients

    def copy(self) -> tuple[Array, ...]:
        """Return those that were reached; none where the core has trained U itself."""
        taken, *arrays = self.core
        return tuple(np.array(array, np.float64) for array in arrays) if taken[0] else ()


def of_call(
    run: Run, problem: CoreProblem, before: Segment | None, now: Segment
) -> Coefficients | None:
    """Return where a call of `mhfast.train` may have its coefficients, None if it may not.

    Parameters
    ----------
    run : Run
    problem : the training data in the form that the core expects
    before, now : Segment
        The last steps that the run has taken, and those of this call.
    """
    optimizer = run.optimizer
    if run.wrt != ("U",) or not isinstance(optimizer, GradientDescent | Momentum):
        return None
    lead = (run.runs,) if run.runs else ()
    shape = (*lead, problem.data[0].shape[-3])
    arrays = [np.zeros(shape) for _ in range(1 + optimizer.slots)]
    goes_on = run.step > 0
    if goes_on:
        given = run.coefficients
        same_data = before is not None and (before.data, before.wrt) == (now.data, now.wrt)
        if not given or given[0].shape != shape or not same_data:
            return None
        for array, old in zip(arrays, given if run.state else given[:1], strict=False):
            array[...] = old
    return Coefficients((np.array([goes_on]), *arrays))
