"""`gradient_flow`: the solution of θ' = -∇L(θ), by an adaptive solver with a stated tolerance."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import scipy.integrate

from .._arguments import checks
from .._arguments.checks import Wrt
from .._arguments.losses import Loss
from ..dataset.dataset import Dataset
from ..models import Model
from ..optimizers import GradientFlow, Method, Sizes
from .arguments import Directions, Tests
from .constraints import Constraints
from .iterates import Solved, begin
from .objective import Vector
from .quantities import Record
from .run import Run

M = TypeVar("M", bound=Model)

ROWS = 101
"""The number of times at which the flow is recorded, if none are given."""

TOLERANCES = {"float64": (1e-8, 1e-10), "float32": (1e-5, 1e-7)}
"""rtol and atol by the dtype of the model; gradients in float32 have errors of about 1e-7."""


def gradient_flow(
    model: M | Run[M],
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    until: float,
    times: npt.ArrayLike | None = None,
    method: Method = "DOP853",
    rtol: float | None = None,
    atol: float | None = None,
    l2: Sizes = 0.0,
    loss: Loss | None = None,
    wrt: Wrt = None,
    constraints: Constraints | None = None,
    test: Tests | None = None,
    record: Record | None = None,
    directions: Directions | None = None,
    num_threads: int | None = None,
) -> Run[M]:
    """Follow the gradient flow from time 0 to time ``until``.

    The flow is the limit of gradient descent with small steps, where t = lr k after k steps. It
    solves

        dP/dt = -∂L/∂P - λ_P P    for every trained parameter P

    by an adaptive Runge-Kutta method of `scipy.integrate`, which chooses its steps such that the
    estimated error of each is at most atol + rtol |θ|, in the root mean square over all entries.
    The error at time t is the sum of what the flow has made of these. SciPy works in float64; a
    float32 model is evaluated at θ rounded to float32.

    Parameters
    ----------
    model : Classifier, Layer or Run
        The initial model, without a run axis. A Run continues from its model, at the time that it
        has reached: it keeps loss, wrt and record unless they are given, and its history.
    X : array (n, T, d) of the model's dtype, or Dataset
    y : array
        Targets of the shape of model(X); None with a Dataset.
    until : float
        The time at which to end, counted from time 0 of the run.
    times : array of float (rows,), optional
        Increasing times at which to record; the first time and ``until`` are always among them. By
        default 101 equally spaced ones. Between steps of the solver θ is its interpolation, which
        is of order 7 for "DOP853" and 4 for "RK45".
    method : {"DOP853", "RK45", "RK23", "LSODA"}
        Explicit Runge-Kutta methods of order 8, 5 and 3, or LSODA, which switches to an implicit
        method where the flow is stiff; its Jacobian then takes a gradient for each entry of θ.
    rtol, atol : float, optional
        The tolerances, by default 1e-8 and 1e-10, for a float32 model 1e-5 and 1e-7.
    l2 : float or dict by parameter
        λ; the recorded loss does not contain the term λ/2 ‖P‖² that it stands for.
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
        What to record, as in `train`; a period counts the times, so that 10 is every tenth of them.
        Every record that is due takes a pass over the data.
    directions : Gradients, model, dict of arrays by parameter, or a dict or sequence of them
        Directions of the record "cosine".
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    Run
        θ_k, the values at k and ``steps`` belong to the k-th of the times, which are
        ``history["time"]``; `Run.plot` draws against them. Its ``optimizer`` holds method, rtol,
        atol and l2. Its ``reason`` is "steps" at the end; "solver" if the solver found no step
        within the tolerances, and "nonfinite" if the first gradient is not finite.

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
    A loss with kinks ("hinge", "quantile") has a flow only between them; the solver crosses them
    with many small steps.

    References
    ----------
    Hairer, Norsett, Wanner, "Solving Ordinary Differential Equations I", 1993.

    Examples
    --------
    The flow of a model with W = QKᵀ leaves every QᵀQ - KᵀK unchanged:

    >>> import mhfast as mh
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> W = mh.LowRank(rng.standard_normal((3, 9, 2)), rng.standard_normal((3, 9, 2)))
    >>> start = mh.Classifier(W, rng.standard_normal((3, 5, 9)))
    >>> def invariant(model):
    ...     Q, K = model.Q, model.K
    ...     return np.swapaxes(Q, 1, 2) @ Q - np.swapaxes(K, 1, 2) @ K
    >>> run = mh.gradient_flow(start, data, until=5.0, record=("loss", invariant))
    >>> run.history["time"][[0, 50, 100]].tolist()
    [0.0, 2.5, 5.0]
    >>> bool(np.ptp(run.history["invariant"], axis=0).max() < 1e-7)
    True
    """
    single = TOLERANCES[_dtype(model)]
    solver = GradientFlow(
        method=method,
        rtol=single[0] if rtol is None else rtol,
        atol=single[1] if atol is None else atol,
        l2=l2,
    )
    before = model.history["time"] if isinstance(model, Run) and "time" in model.history else [0.0]
    rows = _times(times, float(before[-1]), checks.finite(until, "until"))
    iterates = begin(
        "gradient_flow", model, X, y, solver, len(rows) - 1, loss=loss, wrt=wrt,
        constraints=constraints, test=test, record=record,
        directions=directions, num_threads=num_threads,
    )  # fmt: skip
    if any(entry.key == "time" for entry in iterates.entries):
        raise ValueError("record: expected no function named 'time', which is recorded anyway")
    return iterates.solved(partial(_followed, iterates, solver, rows), time=rows[0])


def _dtype(model: object) -> str:
    """Return the dtype of the model or the run; any for other objects, which are rejected later."""
    kept = model.model if isinstance(model, Run) else model
    return kept.dtype.name if isinstance(kept, Model) else "float64"


def _times(given: npt.ArrayLike | None, first: float, until: float) -> npt.NDArray[np.float64]:
    """Return the times of the rows, from ``first`` to ``until``."""
    if until < first:
        raise ValueError(f"until: expected at least {first:g}, the time of the run, got {until:g}")
    if given is None:
        return np.linspace(first, until, ROWS) if until > first else np.array([first])
    inner = checks.as_array(given, "times")
    if inner.dtype.kind not in "iuf":
        raise TypeError(f"times: expected real numbers, got dtype {inner.dtype}")
    inner = inner.astype(np.float64)
    if inner.ndim != 1 or not np.isfinite(inner).all() or np.any(np.diff(inner) <= 0):
        raise ValueError(f"times: expected increasing finite numbers (rows,), got {given!r:.80}")
    if inner.size and not (first <= inner[0] and inner[-1] <= until):
        raise ValueError(
            f"times: expected numbers from {first:g} to until = {until:g}, "
            f"got {inner[0]:g} to {inner[-1]:g}"
        )
    return np.unique(np.concatenate([[first], inner, [until]]))


def _followed(
    iterates: Solved[M],
    solver: GradientFlow,
    times: npt.NDArray[np.float64],
    theta: Vector,
    _: Vector,
) -> str:
    """Integrate from θ through the times, and return why it ended."""
    objective, first = iterates.objective, iterates.run.step

    def downhill(_: float, theta: Vector) -> Vector:
        return -objective(theta)[1]

    if len(times) == 1:
        return "steps"
    steps = getattr(scipy.integrate, solver.method)(
        downhill, times[0], theta, times[-1], rtol=solver.rtol, atol=solver.atol
    )
    row = 1
    while row < len(times):
        steps.step()
        if steps.status == "failed":
            return "solver"
        between = steps.dense_output()
        while row < len(times) and times[row] <= steps.t:
            theta = steps.y if times[row] == steps.t else between(times[row])
            iterates.take(first + row, theta, time=times[row])
            row += 1
    return "steps"
