"""`MultiHeadAttentionClassifier`: `Classifier` and `train` as an estimator of scikit-learn."""

from __future__ import annotations

import math
import numbers
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from .._arguments import checks
from .._arguments.names import Loss
from .._arguments.values import Array
from ..dataset.dataset import Dataset, Seed
from ..models import Classifier
from ..optimizers import GradientDescent, Optimizer
from ..training.run import Stop
from ..training.train import train

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise ImportError(
        "mhfast.interop.sklearn needs scikit-learn: pip install scikit-learn"
    ) from error

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before scikit-learn 1.6 it is a method

    def validate_data(estimator: Any, X: Any, **settings: Any) -> Any:
        return estimator._validate_data(X, **settings)


if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MultiHeadAttentionClassifier"]

STARTS = ("random_step", "zeros", "gaussian")


def _has_probabilities(estimator: MultiHeadAttentionClassifier) -> bool:
    if estimator.loss != "logistic":
        raise AttributeError(f"loss: expected 'logistic' for predict_proba, got {estimator.loss!r}")
    return True


class MultiHeadAttentionClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Binary classification of sets of tokens by multi-head attention.

        Φ(X) = H^(-1/2) Σ_h ⟨U_h, softmax(Z W_h Xᵀ) X⟩,

    the `mhfast.Classifier`, trained on all samples at once by `mhfast.train`. The second of the two
    sorted classes has label 1 and is predicted where Φ(X) > 0.

    A sample X is T tokens of d numbers. Samples are (n, T, d), or with `tokens` = T rows (n, T d),
    token after token, as in pipelines.

    Parameters
    ----------
    heads : int
        H.
    steps : int
        Steps of full-batch gradient descent.
    optimizer : one of `mhfast.optimizers`, optional
        By default gradient descent with the step size sqrt(H) of the theory. Its fields can be set
        by name, as in ``set_params(optimizer__lr=0.1)`` and in grids of `GridSearchCV`.
    lr : float, optional
        The step size, in place of that of the optimizer.
    loss : "logistic", "exponential", "linear" or "squared"
    start : "random_step", "zeros" or "gaussian"
        The initializer, a classmethod of `mhfast.Classifier`.
    std : float
        Standard deviation of the entries of the "gaussian" initializer.
    query : int, optional
        The token that is the query, -1 for the last; by default all tokens are.
    tokens : int, optional
        T, required for samples (n, T d).
    dtype : float64 or float32
        The dtype of the computation; samples are converted to it.
    stop : dict or function, optional
        When to end before the last step, as in `mhfast.train`, such as {"loss": 0.01}.
    random_state : int, numpy.random.Generator, numpy.random.RandomState or None
        Seed of the initializer. Only an integer gives the same result in every fit.
    num_threads : int, optional
        Threads, in place of the default. The result is the same for every number.

    Attributes
    ----------
    classes_ : array (2,)
        The classes, sorted.
    model_ : mhfast.Classifier
        The trained model.
    run_ : mhfast.Run
        The run, which `mhfast.train` can resume; `history_` is its history.
    n_iter_ : int
        Steps taken.
    tokens_, n_features_in_ : int
        T and T d.

    Notes
    -----
    For scikit-learn 1.3 and later. Φ has no constant term: center the features, or append a
    constant to each token.

    References
    ----------
    Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
    Attention", TMLR 2024.

    Examples
    --------
    >>> import mhfast as mh
    >>> from mhfast.interop.sklearn import MultiHeadAttentionClassifier
    >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
    >>> estimator = MultiHeadAttentionClassifier(heads=3).fit(data.X, data.y)
    >>> accuracy = estimator.score(data.X, data.y)
    """

    def __init__(
        self,
        *,
        heads: int = 4,
        steps: int = 100,
        optimizer: Optimizer | None = None,
        lr: float | None = None,
        loss: Loss = "logistic",
        start: str = "random_step",
        std: float = 0.1,
        query: int | None = None,
        tokens: int | None = None,
        dtype: npt.DTypeLike = "float64",
        stop: Stop | None = None,
        random_state: int | np.random.Generator | np.random.RandomState | None = 0,
        num_threads: int | None = None,
    ) -> None:
        self.heads = heads
        self.steps = steps
        self.optimizer = optimizer
        self.lr = lr
        self.loss = loss
        self.start = start
        self.std = std
        self.query = query
        self.tokens = tokens
        self.dtype = dtype
        self.stop = stop
        self.random_state = random_state
        self.num_threads = num_threads

    def fit(
        self, X: npt.ArrayLike, y: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None
    ) -> Self:
        """Train on samples with two classes.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
        y : array (n,)
            Labels, of any kind.
        sample_weight : array (n,), optional
            Weights w >= 0 with a positive sum: the loss is Σ w ℓ / Σ w.

        Returns
        -------
        The estimator itself.

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
        """
        tokens = None if self.tokens is None else checks.count(self.tokens, "tokens")
        samples, labels = self._validated(X, checks.float_dtype(self.dtype), y=y)
        samples = _tokenized(samples, tokens)
        classes, index = _two_classes(labels)
        weight = None if sample_weight is None else _weights(sample_weight, samples)
        data = Dataset(samples, np.array([-1.0, 1.0], samples.dtype)[index], weight=weight)
        model = self._start(data)
        optimizer = self._optimizer(model.heads)
        run = train(
            model, data, steps=self.steps, optimizer=optimizer, loss=self.loss, stop=self.stop,
            num_threads=self.num_threads,
        )  # fmt: skip
        if run.reason == "nonfinite":
            message = f"training ended at step {run.step}: the loss or a gradient is not finite"
            warnings.warn(message, ConvergenceWarning, stacklevel=2)
        self.classes_, self.tokens_ = classes, data.tokens
        self.n_features_in_ = data.tokens * data.dim
        self.run_, self.model_, self.history_ = run, run.model, run.history
        self.n_iter_ = run.step
        return self

    def decision_function(self, X: npt.ArrayLike) -> Array:
        """Compute the outputs Φ; they are positive for the second class.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
            Samples as in `fit`.

        Returns
        -------
        array (n,)

        Raises
        ------
        NotFittedError
            If `fit` was not called before.
        TypeError
            If X does not hold real numbers.
        ValueError
            If a shape does not fit, or a number is not finite.
        """
        samples = self._seen(X)
        return self.model_(samples, num_threads=self.num_threads)

    def predict(self, X: npt.ArrayLike) -> npt.NDArray[Any]:
        """Predict the class of each sample.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
            Samples as in `fit`.

        Returns
        -------
        array (n,) of classes

        Raises
        ------
        NotFittedError
            If `fit` was not called before.
        TypeError
            If X does not hold real numbers.
        ValueError
            If a shape does not fit, or a number is not finite.
        """
        positive = self.decision_function(X) > 0
        return self.classes_[positive.astype(np.intp)]

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: npt.ArrayLike) -> Array:
        """Compute the probabilities of the classes, 1 / (1 + exp(±Φ)).

        They are the probabilities of the logistic loss; with another loss the method does not
        exist.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
            Samples as in `fit`.

        Returns
        -------
        array (n, 2)
            Rows sum to 1.

        Raises
        ------
        NotFittedError
            If `fit` was not called before.
        TypeError
            If X does not hold real numbers.
        ValueError
            If a shape does not fit, or a number is not finite.
        """
        outputs = self.decision_function(X)
        return np.stack([expit(-outputs), expit(outputs)], axis=1)

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

        Raises
        ------
        NotFittedError
            If `fit` was not called before.
        TypeError
            If X does not hold real numbers.
        ValueError
            If a shape does not fit, or a number is not finite.
        """
        samples = self._seen(X)
        return self.model_.attention(samples, num_threads=self.num_threads)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.two_d_array = self.tokens is not None
        tags.input_tags.three_d_array = True
        return tags

    def set_params(self, **params: Any) -> Self:
        """Set parameters of the estimator, and fields of its optimizer as ``optimizer__<field>``.

        Parameters
        ----------
        **params
            Values by name.

        Returns
        -------
        The estimator itself.

        Raises
        ------
        TypeError, ValueError
            If a name or the value of a field does not fit.
        """
        prefix = "optimizer__"
        fields = {n.removeprefix(prefix): v for n, v in params.items() if n.startswith(prefix)}
        super().set_params(**{n: v for n, v in params.items() if not n.startswith(prefix)})
        if fields:
            if self.optimizer is None:
                self.optimizer = GradientDescent(**fields)
            else:
                self.optimizer = replace(self.optimizer, **fields)
        return self

    def _optimizer(self, heads: int) -> Optimizer:
        """Return the optimizer with its step size."""
        if self.optimizer is None:
            return GradientDescent(math.sqrt(heads) if self.lr is None else self.lr)
        if self.lr is None:
            return self.optimizer
        if not hasattr(self.optimizer, "lr"):
            name = type(self.optimizer).__name__
            raise ValueError(f"lr: expected None with {name}, which has no lr, got {self.lr!r}")
        changes: dict[str, Any] = {"lr": self.lr}
        return replace(self.optimizer, **changes)

    def _start(self, data: Dataset) -> Classifier:
        """Return the initial model."""
        if self.start not in STARTS:
            raise ValueError(f"start: expected one of {', '.join(STARTS)}, got {self.start!r}")
        query = self.query
        if query is not None:
            query = checks.integer(query, "query", "None or an integer")
            checks.token_index(query, data.tokens)
        heads, seed = checks.count(self.heads, "heads"), _seed(self.random_state)
        if self.start == "random_step":
            return Classifier.random_step(data, heads, seed, query=query)
        sizes = heads, data.tokens, data.dim
        if self.start == "zeros":
            return Classifier.zeros(*sizes, dtype=data.dtype, query=query)
        return Classifier.gaussian(*sizes, std=self.std, seed=seed, dtype=data.dtype, query=query)

    def _validated(self, X: Any, dtype: np.dtype[Any], **y: Any) -> Any:
        """Return X, and y if it is given, as arrays validated by scikit-learn."""
        ndim = X.ndim if hasattr(X, "ndim") else np.asarray(X).ndim
        return validate_data(
            self, X, **y, reset=bool(y), dtype=dtype, allow_nd=True, ensure_2d=ndim < 3
        )

    def _seen(self, X: Any) -> Array:
        """Return samples of the shape of those of `fit` as (n, T, d)."""
        check_is_fitted(self, "model_")
        X = self._validated(X, self.model_.dtype)
        return _tokenized(X, self.tokens_, self.model_.dim)


def _tokenized(X: Array, tokens: int | None, dim: int | None = None) -> Array:
    """Return X as (n, T, d)."""
    if X.ndim != 2:
        checks.shape(X, "X", "n T d", (None, tokens, dim))
        return X
    if tokens is None:
        raise ValueError(f"tokens: expected T beside X of shape (n, T d) = {X.shape}, got None")
    if X.shape[1] % tokens:
        raise ValueError(
            f"X: expected a number of features divisible by tokens = {tokens}, got {X.shape[1]}"
        )
    return X.reshape(len(X), tokens, -1)


def _two_classes(y: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """Return the sorted classes (2,) and the index of each label's class (n,)."""
    check_classification_targets(y)
    kind = type_of_target(y)
    if kind != "binary":  # in the words that scikit-learn's checks require
        raise ValueError(
            "y: expected two classes. Only binary classification is supported. "
            f"The type of the target is {kind}."
        )
    classes, index = np.unique(y, return_inverse=True)
    if len(classes) != 2:
        raise ValueError(f"y: expected two classes, got one class, {classes[0]}")
    return classes, index


def _weights(sample_weight: npt.ArrayLike, samples: Array) -> Array:
    weight: Array = check_array(
        sample_weight, ensure_2d=False, dtype=samples.dtype, input_name="sample_weight"
    )
    checks.shape(weight, "sample_weight", "n", (len(samples),))
    if weight.min() < 0 or not weight.any():
        raise ValueError(
            "sample_weight: expected numbers >= 0 that are not all zero, "
            f"got {weight.min()} to {weight.max()}"
        )
    return weight


def _seed(random_state: Any) -> Seed:
    """Return an integer unchanged, otherwise draw one as scikit-learn does."""
    if isinstance(random_state, np.random.Generator):
        return random_state
    rng = check_random_state(random_state)
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(rng.randint(np.iinfo(np.int32).max))
