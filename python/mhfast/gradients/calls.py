"""`value_and_grad` and `backward`: gradients with respect to parameters and inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .. import _core, config
from .._arguments import losses
from .._arguments.checks import Wrt
from .._arguments.lists import BITS, LOSSES, OF_OUTPUTS
from .._arguments.losses import Loss
from .._arguments.own_losses import raise_error_of
from .._arguments.values import Value
from ..dataset.dataset import Dataset, no_second_source
from ..models import Model
from ..models import problem as arguments
from ..models.problem import CoreGradients, CoreProblem
from .record import Gradients


def value_and_grad(
    model: Model,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    loss: Loss = "logistic",
    wrt: Wrt = None,
    query: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    num_threads: int | None = None,
) -> tuple[Value, Gradients]:
    """Compute a loss L and its gradients.

    With Φ_i the output of a `Classifier`, F_it the row t of the output of a `Layer` and ℓ its loss
    summed over the outputs p:

        L = Σ_i w_i ℓ(Φ_i, y_i) / Σ_i w_i             Classifier, w (n,)
        L = Σ_i w_i Σ_t ℓ(F_it, y_it) / Σ_i w_i       Layer, w (n,): a mean of sums over rows
        L = Σ_it w_it ℓ(F_it, y_it) / Σ_it w_it       Layer, w (n, q): the loss at chosen rows

    Cross entropy is always a mean over rows: it has the last form, with w_it = w_i for w (n,). In
    self-attention with `lengths` the sums are over the rows of a layer within them.

    Gradients keep full relative accuracy when attention saturates, and are bitwise equal for every
    number of threads.

    Every array may have a leading run axis of one common length R. Results then have it too, and
    run r equals the call on run r alone.

    Parameters
    ----------
    model : Classifier or Layer
    X : array (n, T, d) of the model's dtype, or Dataset
        With a Dataset, y, query, weight and lengths are its own.
    y : array of the shape of the outputs, (n,) or (n, q, p)
        Labels -1 and 1 of any real dtype, or real targets of the model's dtype, by the loss. For
        "cross_entropy" of a Layer, integer classes (n, q) in [0, p), or probabilities (n, q, p) of
        the model's dtype.
    loss : str, a loss with a parameter, or a function
        With Φ for the output and labels y: "logistic" log(1 + exp(-yΦ)), "exponential" exp(-yΦ),
        "linear" -yΦ, "hinge" max(0, 1 - yΦ), "squared_hinge" max(0, 1 - yΦ)²,
        `mhfast.PolynomialTail`. With real targets y: "squared" (Φ - y)², "correlation" -yΦ,
        `mhfast.Huber`, `mhfast.Quantile`; with y >= 0 "negative_log" -y log Φ. For a Layer also
        "cross_entropy" log Σ_o exp(F_o) - F_y, `mhfast.CrossEntropy` with smoothed labels, and of
        probabilities "soft_cross_entropy" log Σ_o exp(F_o) - Σ_o y_o F_o. The name of a loss with a
        parameter, such as "huber", stands for its default. Or a function of your own, in Python or
        compiled, from outputs and targets, arrays (k,) of any samples or (k, p) of any rows, to
        values and derivatives of the same shape. `docs/losses.md` defines what is used in place of
        derivatives that do not exist.
    wrt : str or tuple of str, optional
        What to differentiate by: parameters of the model, "X", "query" if there is an external one.
        None means all parameters.
    query : array (n, q, d), optional
        An external query, in place of the model's own.
    weight : array (n,) or (n, q), optional
        The weights w, finite and >= 0; None means ones.
    lengths : integers (n,), optional
        The number of tokens of each sample; what is beyond has no influence.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    value : float, or float64 array (R,)
    gradients : Gradients
        Arrays of the model's dtype. The gradient with respect to X includes the query side if that
        consists of tokens of X.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape or a value does not fit.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> value, g = mh.value_and_grad(model, data)
    >>> round(value, 6), g.W.shape, g.U.shape
    (0.693147, (3, 9, 9), (3, 5, 9))
    """
    if not isinstance(model, Model):
        raise TypeError(f"model: expected a Classifier or a Layer, got {type(model).__name__}")
    name: str
    if isinstance(loss, str) and loss in OF_OUTPUTS:
        name, of_loss = loss, LOSSES[loss]
    else:
        loss = arguments.loss(model, loss, X.y if isinstance(X, Dataset) else y)
        name, of_loss = losses.name_of(loss), losses.core(loss)
    problem = arguments.problem(
        model, X, y, loss=name, query=query, weight=weight, lengths=lengths,
        words=wrt is None or _of_parameters(wrt),
    )  # fmt: skip
    result = _differentiated(model, problem, of_loss, wrt, num_threads)
    if name == "own":
        raise_error_of(of_loss)
    return result


def backward(
    model: Model,
    X: npt.ArrayLike | Dataset,
    cotangent: npt.ArrayLike,
    *,
    wrt: Wrt = None,
    query: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    num_threads: int | None = None,
) -> Gradients:
    """Compute the gradients of Σ cotangent · model(X), for a caller's own loss.

    Parameters
    ----------
    model : Classifier or Layer
    X : array (n, T, d) of the model's dtype, or Dataset
        With a Dataset, query and lengths are its own; its y and weight do not matter.
    cotangent : array of the shape and dtype of model(X)
        The gradient of the loss with respect to the outputs, with any strides.  A row whose
        entries are all 0 (a classifier's sample) contributes exactly nothing, even where its
        tokens are not finite.
    wrt : str or tuple of str, optional
        What to differentiate by, as for `value_and_grad`; None means all parameters.
    query : array (n, q, d), optional
        An external query, in place of the model's own.
    lengths : integers (n,), optional
        The number of tokens of each sample; what is beyond has no influence.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    Gradients
        Arrays of the model's dtype, with a leading run axis if an argument has one.

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape or a value does not fit.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> g = mh.backward(model, data, data.y / data.n)
    >>> g.U.shape
    (3, 5, 9)
    """
    if not isinstance(model, Model):
        raise TypeError(f"model: expected a Classifier or a Layer, got {type(model).__name__}")
    if cotangent is None:
        raise TypeError("cotangent: expected an array of the shape of the outputs, got None")
    if isinstance(X, Dataset):
        no_second_source(query=query, lengths=lengths)
        data = X
        X, query, lengths = data._given, data.query, data.lengths
    problem = arguments.problem(
        model, X, cotangent, loss="cotangent", query=query, lengths=lengths,
        words=wrt is None or _of_parameters(wrt),
    )  # fmt: skip
    _, gradients = _differentiated(model, problem, LOSSES["cotangent"], wrt, num_threads)
    return gradients


def _of_parameters(wrt: object) -> bool:
    """Return whether neither X nor a query is among the requested gradients."""
    if isinstance(wrt, str) or not isinstance(wrt, Sequence):
        return wrt not in ("X", "query")
    return "X" not in wrt and "query" not in wrt


def _differentiated(
    model: Model, problem: CoreProblem, loss: _core.Loss, wrt: Wrt, num_threads: int | None
) -> tuple[Value, Gradients]:
    core = model._core
    bits = core.bits if wrt is None else _bits(model, problem, wrt)
    if core.row_map_name == "hardmax":
        arguments.differentiable(model, bits)
    value, gradients = _core.value_and_grad(
        problem.data, core.parameters, problem.runs.length, model.scale, problem.causal,
        core.row_map, loss, bits, config.threads(num_threads),
    )  # fmt: skip
    if problem.token is not None and bits & BITS["X"]:
        gradients = _gathered(gradients, problem.token)
    return value, Gradients._of_core(gradients)


def _bits(model: Model, problem: CoreProblem, wrt: Wrt) -> int:
    names = arguments.wrt(model, wrt, inputs=True)
    if "query" in names and (problem.token is not None or problem.data[1] is None):
        raise ValueError("wrt: expected an external query to differentiate by, got none")
    if "X" in names and problem.token is not None:  # the core treats the token as an external query
        names = (*names, "query")
    return arguments.bits(names)


def _gathered(gradients: CoreGradients, token: int | npt.NDArray[np.int64]) -> CoreGradients:
    """Add the gradient of the query token to the gradient of X, at the position of that token."""
    *by_parameters, by_X, by_query = gradients
    assert by_X is not None
    assert by_query is not None
    place = np.broadcast_to(token, by_X.shape[:-2])[..., None, None]
    here = np.take_along_axis(by_X, np.maximum(place, 0), axis=-2)
    np.put_along_axis(
        by_X, np.maximum(place, 0), np.where(place < 0, here, here + by_query), axis=-2
    )
    return (*by_parameters, by_X, None)
