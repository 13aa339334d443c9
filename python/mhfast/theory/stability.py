"""On-average stability, measured exactly: train once on all samples and once without each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments.values import Array
from ..dataset.dataset import Dataset, as_dataset
from ..models import Classifier
from ..optimizers import GradientDescent
from ..training.train import train
from .inputs import classifier

DIVISORS = ("n-1", "n")


@dataclass(frozen=True, eq=False)
class Stability:
    """Losses along leave-one-out training; arrays are float64 (K,), one entry per recorded step.

    Attributes
    ----------
    steps : int64 array
    train_loss : array
        L(θ_k), of training on all samples.
    left_out_loss : array
        (1/n) Σ_i ℓ_i(θ_k^(-i)): the loss of each sample when it is left out. It is an unbiased
        estimate of the test loss of training on n - 1 samples.
    test_loss : array or None
        Loss of θ_k on the test set.
    left_out : array (K, n)
        ℓ_i(θ_k^(-i)).

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(8, 5, 8, noise=2.0, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> given = {"steps": 20, "lr": 1.0, "every": 10, "test": data.sample(300, seed=1)}
    >>> result = mh.theory.leave_one_out(start, data, **given)
    >>> result.steps.tolist(), bool((result.stability[1:] > 0).all()), bool(result.gap[-1] > 0)
    ([0, 10, 20], True, True)
    """

    steps: npt.NDArray[np.int64]
    train_loss: Array
    left_out_loss: Array
    test_loss: Array | None
    left_out: Array

    @property
    def stability(self) -> Array:
        """`left_out_loss` - `train_loss`, to compare with the gap and with `stability_bound`."""
        return self.left_out_loss - self.train_loss

    @property
    def gap(self) -> Array:
        """The generalization gap `test_loss` - `train_loss`; NaN without a test set."""
        if self.test_loss is None:
            return np.full_like(self.train_loss, np.nan)
        return self.test_loss - self.train_loss


def leave_one_out(
    model: Classifier,
    X: npt.ArrayLike | Dataset,
    y: npt.ArrayLike | None = None,
    *,
    steps: int,
    lr: float,
    every: int = 1,
    test: Dataset | None = None,
    divisor: str = "n-1",
    num_threads: int | None = None,
) -> Stability:
    """Train n + 1 classifiers by gradient descent on the logistic loss, one without each sample.

    Parameters
    ----------
    model : Classifier
        The initial model of all runs.
    X : array (n, T, d) of the model's dtype, or Dataset without weights, n at least 2
    y : array (n,) of -1 and 1, None with a Dataset
    steps : int
        The number of steps, at least 1.
    lr : float
        The constant step size.
    every : int
        The period in steps at which losses are recorded.
    test : Dataset, optional
        A test set on which the run with all samples is evaluated.
    divisor : {"n-1", "n"}
        Without sample i the loss is the sum over the others divided by this; "n" is the divisor in
        the theorem behind `stability_bound`.
    num_threads : int, optional
        Threads for this call, in place of the default.

    Returns
    -------
    Stability

    Raises
    ------
    TypeError
        If an argument is of the wrong kind or dtype.
    ValueError
        If a shape does not fit, samples are weighted, n is below 2, there is no such divisor, or
        training diverges.

    References
    ----------
    The stability analysis of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and
    Generalization of Multi-head Attention" (TMLR 2024).

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(8, 5, 8, noise=2.0, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=2, seed=0)
    >>> result = mh.theory.leave_one_out(start, data, steps=20, lr=1.0)
    >>> result.left_out.shape  # of each sample, by the training without it, at each step
    (21, 8)
    >>> bool(result.left_out_loss[-1] > result.train_loss[-1])
    True
    """
    model, data = classifier(model, any_map=True), as_dataset(X, y)
    if data.runs is not None:
        raise ValueError(f"X: expected one data set, as X.run(0) is, got {data.runs} runs")
    n = data.n
    if data.weight is not None:
        raise ValueError("weight: expected None, since leave-one-out has no weights, got an array")
    if n < 2:
        raise ValueError(f"X: expected at least 2 samples, got {n}")
    if divisor not in DIVISORS:
        raise ValueError(f"divisor: expected one of {', '.join(DIVISORS)}, got {divisor!r}")
    shrunk = lr * (n - 1) / n if divisor == "n" else lr
    common: dict[str, Any] = {"steps": steps, "num_threads": num_threads}
    tests = {} if test is None else {"test": test}
    whole = train(
        model,
        data,
        optimizer=GradientDescent(lr),
        test=tests,
        record={"loss": every, **{f"{name}_loss": every for name in tests}},
        **common,
    )
    own = np.eye(n)  # run i is trained without sample i, and evaluated on it
    without = train(
        model,
        replace(data, weight=1 - own),
        optimizer=GradientDescent(shrunk),
        test={"own": replace(data, weight=own)},
        record={"own_loss": every},
        **common,
    )
    ended = [run.step for run in (whole, *(without[i] for i in range(n))) if run.step < steps]
    if ended:
        raise ValueError(
            "lr: expected trainings whose numbers stay finite, got one that ends at step "
            f"{ended[0]}"
        )
    left_out = without.history["own_loss"].T
    return Stability(
        steps=whole.steps["loss"],
        train_loss=whole.history["loss"],
        left_out_loss=left_out.mean(axis=1),
        test_loss=whole.history.get("test_loss"),
        left_out=left_out,
    )
