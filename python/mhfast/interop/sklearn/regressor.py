"""`MultiHeadRegressor`: real numbers from sets of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from sklearn.base import RegressorMixin

from ..._arguments.names import AttentionName
from ..._arguments.values import Array
from ...optimizers import Adam, Optimizer
from ...training.quantities import Record
from ...training.run import Stop
from . import samples
from .estimator import MultiHeadEstimator, Training

if TYPE_CHECKING:
    from typing_extensions import Self


class MultiHeadRegressor(RegressorMixin, MultiHeadEstimator):  # type: ignore[misc]
    """Regression on sets of tokens by multi-head attention.

        Φ(X) = H^(-1/2) Σ_h ⟨U_h, softmax(Z W_h Xᵀ) X⟩,

    the `mhfast.Classifier`, trained with the squared loss on all samples at once by `mhfast.train`.
    For K outputs there are K models, trained side by side.

    A sample X is T tokens of d numbers. Samples are (n, T, d), or with `tokens` = T rows (n, T d),
    token after token, as in pipelines.

    Parameters
    ----------
    heads : int
        H.
    steps : int
        Steps of full-batch gradient descent.
    optimizer : one of `mhfast.optimizers`, optional
        By default Adam with the step size 0.01, which does not depend on the scale of the tokens.
        Its fields can be set by name, as in ``set_params(optimizer__lr=0.1)`` and in grids of
        `GridSearchCV`.
    lr : float, optional
        The step size, in place of that of the optimizer.
    loss : "squared"
        The mean of (Φ(X) - y)².
    start : "gaussian" or "zeros"
        The initializer, a classmethod of `mhfast.Classifier`.
    std : float
        Standard deviation of the entries of the "gaussian" initializer.
    query : int, optional
        The token that is the query, -1 for the last; by default all tokens are.
    intercept : bool
        Whether to append a constant 1 to each token, so that d + 1 numbers enter the model, which
        has no constant term of its own.
    tokens : int, optional
        T, required for samples (n, T d).
    dtype : float64 or float32
        The dtype of the computation; samples are converted to it.
    stop : dict or function, optional
        When `fit` ends before the last step, as in `mhfast.train`, such as {"loss": 0.01}.
    record : str, function, sequence of them, or dict of them to int
        What is recorded in `history_`, as in `mhfast.train`; with early stopping also the
        quantities of the held-out samples, such as "validation_accuracy".
    warm_start : bool
        Whether `fit` continues the run of the last fit, with the state of its optimizer, for
        `steps` more steps. Heads, start, query and dtype of the first fit are kept.
    early_stopping : bool
        Whether to hold out samples, to end when their loss no longer falls, and to return the
        model whose held-out loss is smallest.
    validation_fraction : float
        The fraction of the samples that early stopping holds out.
    n_iter_no_change : int
        Early stopping ends training after this many steps in a row whose held-out loss is not
        smaller by more than `tol` than the smallest before them.
    tol : float
        The smallest decrease that counts, at least 0.
    random_state : int, numpy.random.Generator, numpy.random.RandomState or None
        Seed of the initializer and of the choice of held-out samples. Only an integer gives the
        same result in every fit.
    num_threads : int, optional
        Threads, in place of the default. The result does not depend on it.
    row_map : str
        How logits become attention weights: the `attention` of an `mhfast.Classifier`.
    normalize : bool, optional
        Whether weights are divided by the number of tokens, as for an `mhfast.Classifier`.

    Attributes
    ----------
    model_ : mhfast.Classifier
        The trained model; for targets (n, K) it has a run axis of length K.
    run_ : mhfast.Run
        The run, which `mhfast.train` can resume; `history_` is its history.
    n_iter_ : int
        Steps taken, over all fits that continue one another.
    validation_loss_ : array (steps + 1,)
        With early stopping: the held-out loss at each step of the last fit.
    best_step_ : int
        With early stopping: the step with the smallest of them, at which `model_` was taken.
    tokens_, dim_, n_features_in_ : int
        T, d and T d.

    Notes
    -----
    For scikit-learn 1.3 and later. Without `intercept` center features and targets, the latter
    for instance by a `sklearn.compose.TransformedTargetRegressor`.

    Examples
    --------
    >>> import mhfast as mh
    >>> from mhfast.interop.sklearn import MultiHeadRegressor
    >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
    >>> y = data.X.mean(axis=1)[:, 0]
    >>> MultiHeadRegressor(heads=3).fit(data.X, y).score(data.X, y) > 0.9
    True
    """

    starts: ClassVar[tuple[str, ...]] = ("gaussian", "zeros")
    _of_targets: ClassVar[dict[str, Any]] = {"multi_output": True, "y_numeric": True}

    def __init__(
        self,
        *,
        heads: int = 4,
        steps: int = 200,
        optimizer: Optimizer | None = None,
        lr: float | None = None,
        loss: Literal["squared"] = "squared",
        start: str = "gaussian",
        std: float = 0.1,
        query: int | None = None,
        intercept: bool = False,
        tokens: int | None = None,
        dtype: npt.DTypeLike = "float64",
        stop: Stop | None = None,
        record: Record = ("loss",),
        warm_start: bool = False,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 1e-4,
        random_state: int | np.random.Generator | np.random.RandomState | None = 0,
        num_threads: int | None = None,
        row_map: AttentionName = "softmax",
        normalize: bool | None = None,
    ) -> None:
        self.heads = heads
        self.steps = steps
        self.optimizer = optimizer
        self.lr = lr
        self.loss = loss
        self.start = start
        self.std = std
        self.query = query
        self.intercept = intercept
        self.tokens = tokens
        self.dtype = dtype
        self.stop = stop
        self.record = record
        self.warm_start = warm_start
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.random_state = random_state
        self.num_threads = num_threads
        self.row_map = row_map
        self.normalize = normalize

    def fit(
        self, X: npt.ArrayLike, y: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None
    ) -> Self:
        """Train on samples with real targets.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
        y : array (n,) or (n, K)
            Real targets; each of several columns has a model of its own.
        sample_weight : array (n,), optional
            Weights w >= 0 with a positive sum: the loss is Σ w ℓ / Σ w.

        Returns
        -------
        self : MultiHeadRegressor

        Raises
        ------
        TypeError, ValueError
            If an argument or a parameter of the estimator does not fit.
        mhfast.Interrupted
            After Ctrl-C; its ``.run`` holds the training so far.

        Warns
        -----
        ConvergenceWarning
            If training ended at a loss or a gradient that is not finite.

        Examples
        --------
        >>> import mhfast as mh
        >>> from mhfast.interop.sklearn import MultiHeadRegressor
        >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
        >>> y = data.X.mean(axis=1)[:, :2]  # two outputs are two runs side by side
        >>> MultiHeadRegressor(heads=3).fit(data.X, y).model_.runs
        2
        """
        continued = self._continues(incremental=False)
        self._fit(self._training(*self._read(X, y, not continued), sample_weight), None)
        return self

    def partial_fit(
        self, X: npt.ArrayLike, y: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None
    ) -> Self:
        """Take one step on a batch of samples, from where the last call ended.

        `steps` and `stop` have no influence; the state of the optimizer is kept.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
        y : array (n,) or (n, K)
            Real targets.
        sample_weight : array (n,), optional
            Weights w >= 0 with a positive sum: the loss is Σ w ℓ / Σ w.

        Returns
        -------
        self : MultiHeadRegressor

        Raises
        ------
        TypeError, ValueError
            If an argument or a parameter of the estimator does not fit, such as
            ``early_stopping=True``.

        Examples
        --------
        >>> import mhfast as mh
        >>> from mhfast.interop.sklearn import MultiHeadRegressor
        >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
        >>> estimator = MultiHeadRegressor(heads=3)
        >>> for _ in range(3):
        ...     estimator = estimator.partial_fit(data.X, data.X.mean(axis=1)[:, 0])
        >>> estimator.n_iter_
        3
        """
        continued = self._continues(incremental=True)
        self._fit_step(self._training(*self._read(X, y, not continued), sample_weight))
        return self

    def predict(self, X: npt.ArrayLike) -> Array:
        """Compute the outputs Φ.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
            Samples as in `fit`.

        Returns
        -------
        array (n,) or (n, K), like the targets of `fit`

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
        >>> from mhfast.interop.sklearn import MultiHeadRegressor
        >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
        >>> y = data.X.mean(axis=1)[:, 0]
        >>> off = MultiHeadRegressor(heads=3).fit(data.X, y).predict(data.X) - y
        >>> bool((off**2).mean() < 0.1 * y.var())
        True
        """
        return self._outputs(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _default_optimizer(self) -> Optimizer:
        return Adam(0.01)

    def _training(self, X: Array, y: npt.NDArray[Any], sample_weight: Any) -> Training:
        """Return samples with targets (n,) or (K, n)."""
        if self.loss != "squared":
            raise ValueError(f"loss: expected 'squared', got {self.loss!r}")
        weight = None if sample_weight is None else samples.weights(sample_weight, X)
        return Training(X, np.ascontiguousarray(y.T, X.dtype), weight)
