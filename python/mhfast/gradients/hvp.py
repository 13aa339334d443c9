"""`hvp`: Hessian-vector products of the loss."""

from __future__ import annotations

import numpy.typing as npt

from .. import _core, config
from .._arguments import checks, losses
from .._arguments.checks import Wrt
from .._arguments.deprecated import keyword_only
from .._arguments.lists import AXES, PARAMETERS
from .._arguments.losses import Loss
from .._arguments.own_losses import check_curvature, raise_error_of
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..models import Model
from ..models import problem as arguments
from .record import Gradients


@keyword_only("tangent", 3)
def hvp(
    model: Model,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    tangent: Gradients | Model,
    loss: Loss = "logistic",
    wrt: Wrt = None,
    query: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    num_threads: int | None = None,
) -> Gradients:
    """Compute a Hessian-vector product of the loss: d/dε of the gradient at θ + ε tangent.

    The formula is exact (forward over backward) and keeps full relative accuracy when attention
    saturates. The result does not depend on the number of threads. Where a loss has no second
    derivative, as "hinge" at margin 1, a one-sided one is used in its place (`docs/losses.md`).

    Parameters
    ----------
    model, X, y, loss, query, weight, lengths, num_threads
        As for `mhfast.value_and_grad`; a function returns second derivatives as a third array.
    tangent : Gradients
        The direction: an array of the shape of the parameter for each one that changes, else None.
        A model stands for all of its parameters.
    wrt : str or tuple of str, optional
        The parameters for which the product is computed; None means all.

    Returns
    -------
    Gradients
        Arrays of the model's dtype, with a leading run axis if an argument has one.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape or a value does not fit, or the direction has an array for a parameter that the
        model does not have.

    References
    ----------
    Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 1994. The Hessian of
    this loss is the object of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
    Generalization of Multi-head Attention", TMLR 2024.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> _, g = mh.value_and_grad(model, data)
    >>> mh.dot(g, mh.hvp(model, data, tangent=g)) > 0  # convex in U at W = 0
    True
    """
    if not isinstance(model, Model):
        raise TypeError(f"model: expected a Classifier or a Layer, got {type(model).__name__}")
    loss = arguments.loss(model, loss, X.y if isinstance(X, Dataset) else y)
    kind = losses.name_of(loss)
    problem = arguments.problem(model, X, y, loss=kind, query=query, weight=weight, lengths=lengths)
    if model._core.row_map_name == "hardmax":
        raise ValueError("model: expected a row map with derivatives, got attention 'hardmax'")
    tangents, runs = _tangents(model, tangent), problem.runs
    for name, array in tangents.items():
        runs = runs.meet(f"tangent.{name}", array.shape, AXES[name])
    core, of_loss = model._core, losses.core(loss)
    check_curvature(of_loss)
    bits = core.bits if wrt is None else arguments.bits(arguments.wrt(model, wrt))
    products = _core.hvp(
        problem.data, core.parameters, tuple(map(tangents.get, PARAMETERS)),
        runs=runs.length, scale=model.scale, causal=problem.causal, row_map=core.row_map,
        loss=of_loss, wrt=bits, threads=config.threads(num_threads),
    )  # fmt: skip
    raise_error_of(of_loss)
    return Gradients._of_core((*products, None, None))


def _tangents(model: Model, tangent: object) -> dict[str, Array]:
    """Return the arrays of a direction by name, checked against the parameters."""
    if isinstance(tangent, Model):
        given = dict(tangent.parameters)
    elif isinstance(tangent, Gradients):
        given = {name: array for name, array in vars(tangent).items() if array is not None}
    else:
        raise TypeError(f"tangent: expected Gradients, got {type(tangent).__name__}")
    parameters = model.parameters
    for name in given:
        if name not in parameters:
            raise ValueError(
                f"tangent: expected parameters of the model, {', '.join(parameters)}, got {name}"
            )
    dtype = model.dtype
    tangents = {}
    for name, value in given.items():
        array = checks.real(value, f"tangent.{name}", dtype)
        axes = AXES[name]
        want = parameters[name].shape[-axes:]
        if array.shape[-axes:] != want or array.ndim > axes + 1:
            raise ValueError(f"tangent.{name}: expected shape {want}, got {array.shape}")
        tangents[name] = array
    return tangents
