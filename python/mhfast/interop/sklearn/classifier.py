"""`MultiHeadClassifier`: classes of sets of tokens, two or several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets

from ..._arguments.losses import Loss
from ..._arguments.names import AttentionName
from ..._arguments.values import Array
from ...optimizers import GradientDescent, Optimizer
from ...training.quantities import Record
from ...training.run import Stop
from . import samples
from .estimator import MultiHeadEstimator, Training

if TYPE_CHECKING:
    from typing_extensions import Self


def _has_probabilities(estimator: MultiHeadClassifier) -> bool:
    if estimator.loss != "logistic":
        raise AttributeError(f"loss: expected 'logistic' for predict_proba, got {estimator.loss!r}")
    return True


class MultiHeadClassifier(ClassifierMixin, MultiHeadEstimator):  # type: ignore[misc]
    """Classification of sets of tokens by multi-head attention.

        Φ(X) = H^(-1/2) Σ_h ⟨U_h, softmax(Z W_h Xᵀ) X⟩,

    the `mhfast.Classifier`, trained on all samples at once by `mhfast.train`. With two classes the
    second in sorted order has label 1, and is predicted where Φ(X) > 0. For K > 2 classes there are
    K models, trained side by side, each on one class against the others; the class with the largest
    output is predicted.

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
    loss : str, or a loss with a parameter
        A loss of margins, such as "logistic" or "hinge", or one of real targets, such as "squared",
        whose targets are then the labels ±1.
    class_weight : dict of weights by class, or "balanced", optional
        Factors of the weights of the samples of each class; "balanced" stands for n / (K n_k), as
        everywhere in scikit-learn. They weigh samples in the same way in each of the K problems.
    start : "random_step", "zeros" or "gaussian"
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
        The fraction of the samples that early stopping holds out, the same of each class.
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
    classes_ : array (K,)
        The classes, sorted.
    model_ : mhfast.Classifier
        The trained model; for K > 2 classes it has a run axis of length K.
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
    For scikit-learn 1.3 and later. Without `intercept` center the features: outputs of centered
    tokens are 0, whatever the parameters.

    One-vs-rest works with every query side and needs no readout of its own. With the logistic
    loss the minimizer over all functions is Φ_k = log p_k / (1 - p_k) for the probability p_k of
    class k given X, so that the largest output is the most probable class, and the sigmoids of the
    outputs, divided by their sum, are its probability; "exponential" (half of that), "squared"
    (2 p_k - 1) and "squared_hinge" (the same) are increasing in p_k, too, whereas "linear" has no
    minimizer. For the cross-entropy of a `mhfast.Layer`, call `mhfast.train`.

    References
    ----------
    Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
    Attention", TMLR 2024.

    Rifkin, Klautau, "In Defense of One-Vs-All Classification", JMLR 5, 2004.

    Examples
    --------
    >>> import mhfast as mh
    >>> from mhfast.interop.sklearn import MultiHeadClassifier
    >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
    >>> estimator = MultiHeadClassifier(heads=3).fit(data.X, data.y)
    >>> estimator.score(data.X, data.y)
    1.0
    """

    classes_: npt.NDArray[Any]

    def __init__(
        self,
        *,
        heads: int = 4,
        steps: int = 100,
        optimizer: Optimizer | None = None,
        lr: float | None = None,
        loss: Loss = "logistic",
        class_weight: Mapping[Any, float] | str | None = None,
        start: str = "random_step",
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
        self.class_weight = class_weight
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
        """Train on labelled samples.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
        y : array (n,)
            Labels of at least two classes, of any kind.
        sample_weight : array (n,), optional
            Weights w >= 0 with a positive sum: the loss is Σ w ℓ / Σ w.

        Returns
        -------
        self : MultiHeadClassifier

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
        >>> from mhfast.interop.sklearn import MultiHeadClassifier
        >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
        >>> estimator = MultiHeadClassifier(heads=3, stop={"loss": 0.1}).fit(data.X, data.y)
        >>> bool(estimator.history_["loss"][-1] <= 0.1), estimator.n_iter_ < 100
        (True, True)
        """
        continued = self._continues(incremental=False)
        X, labels = self._read(X, y, reset=not continued)
        check_classification_targets(labels)
        classes = self.classes_ if continued else np.unique(labels)
        data, index = self._training(X, labels, classes, sample_weight)
        self._fit(data, index)
        self.classes_ = classes
        return self

    def partial_fit(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        classes: npt.ArrayLike | None = None,
        sample_weight: npt.ArrayLike | None = None,
    ) -> Self:
        """Take one step on a batch of samples, from where the last call ended.

        `steps` and `stop` have no influence; the state of the optimizer is kept. The initializer
        "random_step" uses the first batch.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
        y : array (n,)
            Labels.
        classes : array (K,), optional
            All classes, required in the first call.
        sample_weight : array (n,), optional
            Weights w >= 0 with a positive sum: the loss is Σ w ℓ / Σ w.

        Returns
        -------
        self : MultiHeadClassifier

        Raises
        ------
        TypeError, ValueError
            If an argument or a parameter of the estimator does not fit, such as
            ``early_stopping=True``.

        Examples
        --------
        >>> import mhfast as mh
        >>> from mhfast.interop.sklearn import MultiHeadClassifier
        >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
        >>> estimator = MultiHeadClassifier(heads=3)
        >>> for rows in (slice(0, 20), slice(20, 40), slice(40, 60)):
        ...     estimator = estimator.partial_fit(data.X[rows], data.y[rows], classes=[-1, 1])
        >>> estimator.n_iter_
        3
        """
        continued = self._continues(incremental=True)
        if classes is None and not continued:
            raise ValueError("classes: expected all classes in the first call, got None")
        X, labels = self._read(X, y, reset=not continued)
        check_classification_targets(labels)
        known = self.classes_ if continued else np.unique(np.asarray(classes))
        if continued and classes is not None and not np.array_equal(np.unique(classes), known):
            raise ValueError(f"classes: expected those of the first call, {known}, got {classes}")
        data, _ = self._training(X, labels, known, sample_weight)
        self._fit_step(data)
        self.classes_ = known
        return self

    def decision_function(self, X: npt.ArrayLike) -> Array:
        """Compute the outputs Φ.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
            Samples as in `fit`.

        Returns
        -------
        array (n,), or (n, K) for K > 2 classes
            Positive for the second of two classes; one output for each of several.

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
        >>> estimator = MultiHeadClassifier(heads=3).fit(data.X, data.y)
        >>> bool(((estimator.decision_function(data.X) > 0) == (data.y > 0)).all())
        True
        """
        return self._outputs(X)

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

        Examples
        --------
        >>> import mhfast as mh
        >>> from mhfast.interop.sklearn import MultiHeadClassifier
        >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
        >>> names = ["below" if y < 0 else "above" for y in data.y]
        >>> estimator = MultiHeadClassifier(heads=3).fit(data.X, names)
        >>> estimator.predict(data.X[:3]).tolist() == names[:3], estimator.classes_.tolist()
        (True, ['above', 'below'])
        """
        outputs = self._outputs(X)
        chosen = (outputs > 0).astype(np.intp) if outputs.ndim == 1 else outputs.argmax(axis=1)
        predicted: npt.NDArray[Any] = self.classes_[chosen]
        return predicted

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: npt.ArrayLike) -> Array:
        """Compute the probabilities of the classes.

        For two classes they are 1 / (1 + exp(±Φ)); for more, these numbers of all classes divided
        by their sum, computed from their logarithms. They are the probabilities of the logistic
        loss; with another loss the method does not exist.

        Parameters
        ----------
        X : array (n, T, d), or (n, T d) with `tokens`
            Samples as in `fit`.

        Returns
        -------
        array (n, K)
            Rows sum to 1.

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
        >>> import numpy as np
        >>> import mhfast as mh
        >>> from mhfast.interop.sklearn import MultiHeadClassifier
        >>> data = mh.data.tokenized_mixture(60, 5, 12, seed=0)
        >>> p = MultiHeadClassifier(heads=3).fit(data.X, data.y).predict_proba(data.X)
        >>> p.shape, bool(np.allclose(p.sum(axis=1), 1.0))
        ((60, 2), True)
        """
        outputs = self._outputs(X)
        if outputs.ndim == 1:
            return np.stack([expit(-outputs), expit(outputs)], axis=1)
        probabilities: Array = softmax(log_expit(outputs), axis=1)
        return probabilities

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # Without a constant term one class cannot be predicted everywhere, whatever its weight,
        # which a check of class_weight requires under this tag.
        tags.classifier_tags.poor_score = not self.intercept
        return tags

    def _default_optimizer(self) -> Optimizer:
        return GradientDescent(math.sqrt(self.heads))

    def _training(
        self, X: Array, y: npt.NDArray[Any], classes: npt.NDArray[Any], sample_weight: Any
    ) -> tuple[Training, npt.NDArray[np.intp]]:
        """Return samples with labels ±1, (n,) or (K, n), and the index of each label's class."""
        if len(classes) < 2:
            raise ValueError(f"y: expected at least two classes, got one class, {classes[0]}")
        unknown = np.setdiff1d(y, classes)
        if len(unknown):
            raise ValueError(f"y: expected labels among the classes {classes}, got {unknown[0]}")
        index = np.searchsorted(classes, y)
        chosen = np.arange(1, 2) if len(classes) == 2 else np.arange(len(classes))
        labels = np.where(index == chosen[:, None], 1.0, -1.0).astype(X.dtype)
        weight = None if sample_weight is None else samples.weights(sample_weight, X)
        if self.class_weight is not None:
            factors = compute_sample_weight(self.class_weight, y).astype(X.dtype)
            weight = factors if weight is None else weight * factors
        return Training(X, labels[0] if len(classes) == 2 else labels, weight), index
