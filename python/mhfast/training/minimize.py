"""`minimize`: L-BFGS with a line search, for convex problems and near minima."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import scipy.optimize

from .._arguments.checks import Wrt
from .._arguments.losses import Loss
from ..dataset.dataset import Dataset
from ..models import Model
from ..optimizers import LBFGS, Sizes
from . import arguments
from .arguments import Directions, Tests
from .constraints import Constraints
from .iterates import Solved, begin
from .objective import Vector
from .quantities import Record
from .run import Run

M = TypeVar("M", bound=Model)

LINE_SEARCH = 20
"""The most gradients of the line search of one step, SciPy's default."""


def minimize(
    model: M | Run[M],
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    steps: int = 1000,
    gtol: float = 1e-6,
    memory: int = 10,
    l2: Sizes = 0.0,
    loss: Loss | None = None,
    wrt: Wrt = None,
    constraints: Constraints | None = None,
    test: Tests | None = None,
    record: Record | None = None,
    directions: Directions | None = None,
    num_threads: int | None = None,
) -> Run[M]:
    r"""Minimize the loss by L-BFGS with a line search, until the gradient is small.

    For convex problems, such as the readouts of a model whose W is fixed, and near a minimum, where
    gradient descent needs many steps. It minimizes

        f(θ) = L(θ) + Σ_P λ_P/2 ‖P‖²

    with the sum over the trained parameters P, and ends at the first θ_k with ‖∇f(θ_k)‖ ≤ gtol.
    A step is one iteration of L-BFGS-B of `scipy.optimize.minimize`: a line search along
    -B ∇f(θ_k), with B the approximation of the inverse Hessian from the last ``memory`` steps.
    SciPy works in float64; a float32 model is evaluated at θ rounded to float32.

    Parameters
    ----------
    model : Classifier, Layer or Run
        The initial model, without a run axis. A Run continues from its model: it keeps loss, wrt
        and record unless they are given, and its history. Its thresholds ``stop`` are not checked,
        and L-BFGS starts with an empty memory.
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array
        Targets of the shape of model(X); None with a Dataset.
    steps : int
        The largest number of steps, each of which takes several gradients.
    gtol : float
        The norm of the gradient of f at which to end, at least 0. Its lowest value is set by the
        rounding of values, which a line search compares: see Notes.
    memory : int
        The number of steps from which the Hessian is approximated.
    l2 : float or dict by parameter
        λ; the recorded loss and grad_norm do not contain the term.
    loss : str, a loss with a parameter, or a function of outputs and targets
        As in `train`; "logistic" by default.
    wrt : str or tuple of str
        What to train, among the parameters of the model; all by default.
    constraints : dict by parameter, optional
        Entries that stay as they are or stay equal, as in `train`: the rest is a problem of fewer
        unknowns, and gradients are projected.
    test : Dataset, pair (X, y) or dict of them
        Test sets; one without a name is called "test".
    record : str, function, sequence of them, or dict of them to int
        What to record, and the period in steps, as in `train`. Every record that is due takes a
        pass over the data.
    directions : Gradients, model, dict of arrays by parameter, or a dict or sequence of them
        Directions of the record "cosine".
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    Run
        Its ``optimizer`` holds memory, gtol and l2. Its ``reason`` is "gtol"; "steps";
        "line_search" if no lower value was found along the last direction, as happens at the
        precision of f; or "nonfinite". `train` continues it with an optimizer.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape, a name or a number does not fit, or the model or the data have a run axis.
    Interrupted
        After Ctrl-C, with the run so far. Other exceptions get an attribute ``run`` too.

    Notes
    -----
    Values of f differ by about ‖∇f‖²/(2c) from the minimum where c is the curvature. Where this is
    less than the rounding of f, of about 1e-16 f, a line search sees noise: gtol below 1e-8 √(f c)
    may not be reached, and the run then ends as "line_search". In float32 it is 3e-4 √(f c).

    References
    ----------
    Zhu, Byrd, Lu, Nocedal, "Algorithm 778: L-BFGS-B", ACM TOMS 1997.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> run = mh.minimize(model, data, wrt="U", l2=0.01, gtol=1e-7)
    >>> run.reason
    'gtol'
    >>> _, g = mh.value_and_grad(run.model, data, wrt="U")
    >>> mh.norm(g + 0.01 * mh.Gradients(U=run.model.U)) <= 1e-7
    True
    """
    solver = LBFGS(memory=memory, gtol=gtol, l2=l2)
    most = arguments.steps(steps)
    iterates = begin(
        "minimize", model, X, y, solver, most, loss=loss, wrt=wrt,
        constraints=constraints, test=test, record=record,
        directions=directions, num_threads=num_threads,
    )  # fmt: skip
    return iterates.solved(partial(_minimized, iterates, solver, most))


def _minimized(
    iterates: Solved[M], solver: LBFGS, most: int, theta: Vector, gradient: Vector
) -> str:
    """Take the steps from θ on, and return why they ended."""
    objective, first = iterates.objective, iterates.run.step
    if np.linalg.norm(gradient) <= solver.gtol:
        return "gtol"
    if most == 0:
        return "steps"

    def step_taken(theta: Vector) -> None:
        iterates.take(iterates.step + 1, theta)
        if np.linalg.norm(objective(theta)[1]) <= solver.gtol:
            raise StopIteration

    # SciPy before 1.11 lets the exception through.
    with suppress(StopIteration):
        scipy.optimize.minimize(
            objective,
            theta,
            method="L-BFGS-B",
            jac=True,
            callback=step_taken,
            options={
                "maxiter": most,
                "maxfun": (LINE_SEARCH + 2) * (most + 1),
                "maxls": LINE_SEARCH,
                "maxcor": solver.memory,
                # It ends by these only where no lower value is found.
                "ftol": 0.0,
                "gtol": 0.0,
            },
        )
    if np.linalg.norm(objective(objective.vector(iterates.model))[1]) <= solver.gtol:
        return "gtol"
    return "steps" if iterates.step - first >= most else "line_search"
