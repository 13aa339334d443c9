"""`value_and_grad` and `backward`: gradients with respect to parameters and inputs."""

from __future__ import annotations

import numpy.typing as npt

from .._arguments.checks import Wrt
from .._arguments.losses import Loss
from .._arguments.values import Value
from ..dataset.dataset import Dataset
from ..models import AnyModel, Stack
from ..models.depth_samples import no_query
from . import depth, single
from .record import Gradients


def value_and_grad(
    model: AnyModel,
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
    model : Classifier, Layer or Stack
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
        What to differentiate by: parameters of the model, "X", "query" if there is an external one,
        "embedding" if X is `Tokens`: their dictionary. None means all parameters.
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
    if isinstance(model, Stack):
        no_query(query)
        return depth.of_loss(model, X, y, loss, wrt, weight, lengths, num_threads)
    return single.of_loss(model, X, y, loss, wrt, query, weight, lengths, num_threads)


def backward(
    model: AnyModel,
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
    model : Classifier, Layer or Stack
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
    if isinstance(model, Stack):
        no_query(query)
        return depth.of_outputs(model, X, cotangent, wrt, lengths, num_threads)
    return single.of_outputs(model, X, cotangent, wrt, query, lengths, num_threads)
