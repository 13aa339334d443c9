"""What the classifier and the regressor share: parameters, training, early stopping."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted

from ..._arguments import checks
from ..._arguments.losses import Loss
from ..._arguments.names import AttentionName
from ..._arguments.values import Array
from ...dataset.dataset import Dataset, Seed
from ...dataset.seeds import integer_seed
from ...models import Classifier
from ...optimizers import Optimizer
from ...training.quantities import Record
from ...training.run import Run, Stop
from ...training.train import train
from . import samples
from .stopping import EarlyStopping

if TYPE_CHECKING:
    from typing_extensions import Self

STARTS = ("random_step", "zeros", "gaussian")
OPTIMIZER = "optimizer__"
VALIDATION = "validation"


class Training(NamedTuple):
    """What is trained on: samples (n, T, d), targets (n,) or (K, n), weights (n,) or None."""

    X: Array
    targets: Array
    weight: Array | None

    def dataset(self, rows: npt.NDArray[np.intp] | slice = slice(None)) -> Dataset:
        """Return the samples of `rows`."""
        weight = None if self.weight is None else self.weight[rows]
        return Dataset(self.X[rows], self.targets[..., rows], weight=weight)


class MultiHeadEstimator(BaseEstimator):  # type: ignore[misc]
    """Common to `MultiHeadClassifier` and `MultiHeadRegressor`."""

    starts: ClassVar[tuple[str, ...]] = STARTS

    heads: int
    steps: int
    optimizer: Optimizer | None
    lr: float | None
    loss: Loss
    start: str
    std: float
    query: int | None
    intercept: bool
    tokens: int | None
    dtype: npt.DTypeLike
    stop: Stop | None
    record: Record
    warm_start: bool
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    tol: float
    random_state: int | np.random.Generator | np.random.RandomState | None
    num_threads: int | None
    row_map: AttentionName
    normalize: bool | None

    model_: Classifier
    run_: Run[Classifier]
    tokens_: int
    dim_: int
    _constant: bool

    def attention(self, X: npt.ArrayLike) -> Array:
        """Compute the attention weights.

        Row i has the weights with which token i, or the token `query`, attends to each token.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
            Samples as in `fit`.

        Returns
        -------
        array (n, H, q, T)
            With one model for each of K classes or outputs (K, n, H, q, T).

        Raises
        ------
        NotFittedError
            If `fit` was not called before.
        TypeError
            If X does not hold real numbers.
        ValueError
            If a shape does not fit, or a number is not finite.

        Examples
        --------
        >>> import mhfast as mh
        >>> from mhfast.interop.sklearn import MultiHeadClassifier
        >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
        >>> MultiHeadClassifier(heads=3).fit(data.X, data.y).attention(data.X).shape  # (n, H, q, T)
        (60, 3, 5, 5)
        """
        X = self._seen(X)
        return self.model_.attention(X, num_threads=self.num_threads)

    def set_params(self, **params: Any) -> Self:
        """Set parameters of the estimator, and fields of its optimizer as ``optimizer__<field>``.

        Parameters
        ----------
        **params
            Values by name.

        Returns
        -------
        self : MultiHeadClassifier or MultiHeadRegressor

        Raises
        ------
        TypeError, ValueError
            If a name or the value of a field does not fit.

        Examples
        --------
        >>> import mhfast as mh
        >>> from mhfast.interop.sklearn import MultiHeadClassifier
        >>> estimator = MultiHeadClassifier(optimizer=mh.Adam(0.1))
        >>> estimator.set_params(heads=2, optimizer__lr=0.01).optimizer
        Adam(lr=0.01)
        """
        fields = {
            name.removeprefix(OPTIMIZER): value
            for name, value in params.items()
            if name.startswith(OPTIMIZER)
        }
        super().set_params(**{n: v for n, v in params.items() if not n.startswith(OPTIMIZER)})
        if fields:
            base = self._default_optimizer() if self.optimizer is None else self.optimizer
            self.optimizer = replace(base, **fields)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = self.tokens is not None
        tags.input_tags.three_d_array = True
        return tags

    def _default_optimizer(self) -> Optimizer:
        """Return the optimizer for `optimizer` None."""
        raise NotImplementedError

    def _optimizer(self) -> Optimizer:
        """Return the optimizer with its step size."""
        optimizer = self._default_optimizer() if self.optimizer is None else self.optimizer
        if self.lr is None:
            return optimizer
        if not hasattr(optimizer, "lr"):
            name = type(optimizer).__name__
            raise ValueError(f"lr: expected None with {name}, which has no lr, got {self.lr!r}")
        changes: dict[str, Any] = {"lr": self.lr}
        return replace(optimizer, **changes)

    def _read(self, X: Any, y: Any, reset: bool) -> tuple[Array, Any]:
        """Return samples (n, T, d) and targets as scikit-learn validates them."""
        tokens = None if self.tokens is None else checks.count(self.tokens, "tokens")
        dtype, dim, constant = checks.float_dtype(self.dtype), None, bool(self.intercept)
        if not reset:
            tokens, dim, constant = self.tokens_, self.dim_, self._constant
        X, y = samples.validated(self, X, dtype, reset, y=y, **self._of_targets)
        X = samples.tokenized(X, tokens, dim)
        if reset:
            self.tokens_, self.dim_, self._constant = X.shape[1], X.shape[2], constant
            self.n_features_in_ = X.shape[1] * X.shape[2]
        return samples.with_constant(X) if constant else X, y

    _of_targets: ClassVar[dict[str, Any]] = {}

    def _seen(self, X: Any) -> Array:
        """Return samples of the shape of those of `fit` as (n, T, d)."""
        if not hasattr(self, "model_"):
            check_is_fitted(self, "model_")  # which raises
        X = samples.validated(self, X, self.model_.dtype, reset=False)
        X = samples.tokenized(X, self.tokens_, self.dim_)
        return samples.with_constant(X) if self._constant else X

    def _outputs(self, X: Any) -> Array:
        """Return the outputs Φ (n,), or (n, K) with K models."""
        X = self._seen(X)
        return self.model_(X, num_threads=self.num_threads).T

    def _continues(self, incremental: bool) -> bool:
        """Return whether training continues the run of an earlier call."""
        return (incremental or self.warm_start) and hasattr(self, "run_")

    def _fit(self, data: Training, strata: npt.NDArray[Any] | None) -> None:
        """Train on all samples except those that early stopping holds out."""
        stopping, test, training = None, None, data.dataset()
        seed = samples.seed(self.random_state)
        if self.early_stopping:
            rows, held_out = train_test_split(
                np.arange(len(data.X)), test_size=self.validation_fraction, stratify=strata,
                random_state=integer_seed(seed) % 2**32,
            )  # fmt: skip
            training, validation = data.dataset(rows), data.dataset(held_out)
            test = {VALIDATION: validation}
            stopping = EarlyStopping(
                validation, self.loss, self.n_iter_no_change, self.tol, self.num_threads
            )
        model = self.run_ if self._continues(False) else self._start(training, seed)
        optimizer = self._optimizer()
        run = train(
            model, training, steps=self.steps, optimizer=optimizer, loss=self.loss,
            stop=self.stop or {}, record=self.record, test=test, callback=stopping,
            num_threads=self.num_threads,
        )  # fmt: skip
        _warn_of_divergence(run)
        self._take(run)
        if stopping is not None and stopping.best is not None:
            self.model_ = stopping.best
            self.validation_loss_ = np.array(stopping.losses)
            self.best_step_ = run.step - len(stopping.losses) + 1 + stopping.best_index

    def _fit_step(self, data: Training) -> None:
        """Take one step on the samples, from where the last call ended."""
        if self.early_stopping:
            raise ValueError("early_stopping: expected False for partial_fit, got True")
        batch = data.dataset()
        continued = self._continues(True)
        model = self.run_ if continued else self._start(batch, samples.seed(self.random_state))
        run = train(
            model, batch, steps=1, optimizer=self._optimizer(), loss=self.loss, stop={},
            record=self.record, num_threads=self.num_threads,
        )  # fmt: skip
        self._take(run)

    def _take(self, run: Run[Classifier]) -> None:
        """Store the result of training."""
        self.run_, self.model_, self.history_ = run, run.model, run.history
        self.n_iter_ = run.step

    def _start(self, data: Dataset, seed: Seed) -> Classifier:
        """Return the initial model; those of several classes or outputs have the same draws."""
        if self.start not in self.starts:
            raise ValueError(f"start: expected one of {', '.join(self.starts)}, got {self.start!r}")
        query, runs = self.query, data.runs
        if query is not None:
            query = checks.integer(query, "query", "None or an integer")
            checks.token_index(query, data.tokens)
        heads = checks.count(self.heads, "heads")
        seeds = seed if runs is None else [integer_seed(seed)] * runs
        if self.start == "random_step":
            made = Classifier.random_step(data, heads, seed=seeds, query=query)
            return made.replace(attention=self.row_map, normalize=self.normalize)
        sizes = heads, data.tokens, data.dim
        if self.start == "zeros":
            made = Classifier.zeros(*sizes, runs=runs, dtype=data.dtype, query=query)
        else:
            made = Classifier.gaussian(
                *sizes, std=self.std, seed=seeds, dtype=data.dtype, query=query
            )
        return made.replace(attention=self.row_map, normalize=self.normalize)


def _warn_of_divergence(run: Run[Classifier]) -> None:
    reasons = [run.reason] if isinstance(run.reason, str) else run.reason
    if "nonfinite" in reasons:
        message = f"training ended at step {run.step}: the loss or a gradient is not finite"
        warnings.warn(message, ConvergenceWarning, stacklevel=4)
