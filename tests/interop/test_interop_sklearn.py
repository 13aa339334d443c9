"""The estimator for scikit-learn: the training of `mh.train`, by the conventions of the library."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
import warnings

import numpy as np
import pytest

import mhfast as mh

pytest.importorskip("sklearn")

from sklearn import utils
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

from mhfast.interop import sklearn as interop
from mhfast.interop.sklearn import MultiHeadAttentionClassifier

n, T, d, H = 70, 5, 12, 3
DATA = mh.data.tokenized_mixture(n, T, d, noise=0.3, seed=0)
TEST = DATA.sample(200, seed=1)
ROWS = DATA.X.reshape(n, T * d)


def estimator(**changes):
    return MultiHeadAttentionClassifier(**{"heads": H, "steps": 40} | changes)


def by_hand(start, data=DATA, **changes):
    options = {"steps": 40, "optimizer": mh.GradientDescent(np.sqrt(H))} | changes
    return mh.train(start, data, **options)


def test_learns_the_mixture():
    fitted = estimator().fit(DATA.X, DATA.y)
    # Without noise of labels the classes are separable with a wide margin; all 200 are right.
    assert fitted.score(TEST.X, TEST.y) >= 0.99
    assert fitted.classes_.tolist() == [-1, 1]
    assert fitted.n_features_in_ == T * d
    assert fitted.n_iter_ == 40
    assert fitted.history_["loss"].shape == (41,)
    assert fitted.attention(TEST.X[:7]).shape == (7, H, T, T)
    assert np.array_equal(fitted.attention(TEST.X[:7]), fitted.model_.attention(TEST.X[:7]))
    assert np.array_equal(fitted.decision_function(TEST.X), fitted.model_(TEST.X))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("query", [None, -1])
@pytest.mark.parametrize("start", ["random_step", "zeros", "gaussian"])
def test_is_training_by_hand_bitwise(start, query, dtype):
    data = mh.Dataset(DATA.X.astype(dtype), DATA.y.astype(dtype))
    model = {
        "random_step": lambda: mh.Classifier.random_step(data, H, 4, query=query),
        "zeros": lambda: mh.Classifier.zeros(H, T, d, dtype=dtype, query=query),
        "gaussian": lambda: mh.Classifier.gaussian(
            H, T, d, std=0.2, seed=4, dtype=dtype, query=query
        ),
    }[start]()
    fitted = estimator(start=start, std=0.2, query=query, dtype=dtype, random_state=4)
    fitted.fit(DATA.X, DATA.y)
    assert fitted.run_ == by_hand(model, data)
    assert fitted.model_ == fitted.run_.model
    assert fitted.decision_function(TEST.X).dtype == dtype
    assert fitted.attention(TEST.X[:7]).shape == (7, H, T if query is None else 1, T)


def test_settings_of_training():
    settings = {
        "optimizer": mh.Momentum(0.2), "loss": "squared", "stop": {"loss": 0.1}, "num_threads": 1,
    }  # fmt: skip
    fitted = estimator(start="zeros", **settings).fit(DATA.X, DATA.y)
    assert fitted.run_ == by_hand(mh.Classifier.zeros(H, T, d), **settings)
    assert 0 < fitted.n_iter_ < 40
    assert fitted.run_.reason == "loss"


def test_labels_of_any_kind():
    numbers = estimator().fit(DATA.X, DATA.y)
    names = np.where(DATA.y == 1, "spam", "ham")
    strings = estimator().fit(DATA.X, names)
    assert strings.classes_.tolist() == ["ham", "spam"]
    assert strings.run_ == numbers.run_
    expected = np.where(numbers.predict(TEST.X) == 1, "spam", "ham")
    assert np.array_equal(strings.predict(TEST.X), expected)
    booleans = estimator().fit(DATA.X, DATA.y == 1)
    assert booleans.run_ == numbers.run_
    assert booleans.predict(TEST.X).dtype == bool


def test_sample_weight_is_that_of_the_data():
    weight = np.random.default_rng(2).integers(0, 4, n)
    fitted = estimator().fit(DATA.X, DATA.y, sample_weight=weight)
    data = mh.Dataset(DATA.X, DATA.y, weight=weight)
    assert fitted.run_ == by_hand(mh.Classifier.random_step(data, H, 0), data)
    assert fitted.run_ != estimator().fit(DATA.X, DATA.y).run_


def test_rows_are_tokens_one_after_the_other():
    samples, rows = estimator().fit(DATA.X, DATA.y), estimator(tokens=T).fit(ROWS, DATA.y)
    assert rows.run_ == samples.run_
    assert rows.tokens_ == T
    flat = TEST.X.reshape(TEST.n, -1)
    for fitted in (samples, rows):
        assert np.array_equal(fitted.predict(flat), samples.predict(TEST.X))
        assert np.array_equal(fitted.predict(TEST.X), samples.predict(TEST.X))


def test_probabilities_are_stable():
    fitted = estimator().fit(DATA.X, DATA.y)
    far = TEST.X * np.array([1.0, 1e3, 1e5])[np.arange(TEST.n) % 3, None, None]
    outputs, P = fitted.decision_function(far), fitted.predict_proba(far)
    assert abs(outputs).max() > 1e3
    assert P.shape == (TEST.n, 2)
    # Two roundings of exp and one of the sum; rows sum to one up to one more.
    np.testing.assert_allclose(P.sum(axis=1), 1.0, rtol=1e-15)
    small = abs(outputs) < 700
    for sign, p in ((1, P[:, 1]), (-1, P[:, 0])):
        exact = 1 / (1 + np.exp(-sign * outputs[small]))
        np.testing.assert_allclose(p[small], exact, rtol=1e-14)
    # From 37 on the larger probability rounds to one.
    assert np.array_equal(P.argmax(axis=1)[small] == 1, outputs[small] > 0)


def test_probabilities_belong_to_the_logistic_loss():
    assert hasattr(estimator(), "predict_proba")
    for loss in ("exponential", "linear", "squared"):
        assert not hasattr(estimator(loss=loss), "predict_proba")
    with pytest.raises(AttributeError) as caught:
        estimator(loss="squared").predict_proba  # noqa: B018
    text = "loss: expected 'logistic' for predict_proba, got 'squared'"
    assert text in f"{caught.value} {caught.value.__cause__}"


def test_random_state():
    integer = estimator(random_state=np.int64(3)).fit(DATA.X, DATA.y)
    assert integer.run_ == estimator(random_state=3).fit(DATA.X, DATA.y).run_
    generator = estimator(random_state=np.random.default_rng(3)).fit(DATA.X, DATA.y)
    start = mh.Classifier.random_step(DATA, H, np.random.default_rng(3))
    assert generator.run_ == by_hand(start)
    gaussian = {"start": "gaussian", "steps": 1}
    legacy = [
        estimator(random_state=np.random.RandomState(3), **gaussian).fit(DATA.X, DATA.y)
        for _ in range(2)
    ]
    assert legacy[0].run_ == legacy[1].run_
    fresh = [estimator(random_state=None, **gaussian).fit(DATA.X, DATA.y) for _ in range(2)]
    assert fresh[0].run_ != fresh[1].run_


def test_pipeline_grid_search_and_cross_validation():
    pipeline = make_pipeline(StandardScaler(), estimator(tokens=T))
    assert cross_val_score(pipeline, ROWS, DATA.y, cv=3).min() > 0.9
    assert cross_val_score(estimator(), DATA.X, DATA.y, cv=3).min() > 0.9
    search = GridSearchCV(
        pipeline,
        {"multiheadattentionclassifier__heads": [1, 2, 4]},
        cv=3,
        scoring="roc_auc",
    )
    search.fit(ROWS, DATA.y)
    best = search.best_estimator_[-1]
    assert best.model_.heads == search.best_params_["multiheadattentionclassifier__heads"]
    alone = estimator(tokens=T, heads=best.heads)
    alone.fit(StandardScaler().fit_transform(ROWS), DATA.y)
    assert alone.run_ == best.run_


def test_step_sizes_are_searched_by_name():
    for name, optimizer in (
        ("lr", None), ("lr", mh.Momentum(9.0)), ("optimizer__lr", mh.Momentum(9.0)),
        ("optimizer__lr", None),
    ):  # fmt: skip
        of = estimator(optimizer=optimizer, start="zeros")
        search = GridSearchCV(of, {name: [0.0, 0.5]}, cv=3, refit=True)
        search.fit(DATA.X, DATA.y)
        assert search.best_params_ == {name: 0.5}  # without steps all outputs are 0
        kind = mh.GradientDescent if optimizer is None else mh.Momentum
        expected = by_hand(mh.Classifier.zeros(H, T, d), optimizer=kind(0.5))
        assert search.best_estimator_.run_ == expected
    with pytest.raises(ValueError, match="lr: expected None with PolyakStep, which has no lr"):
        estimator(optimizer=mh.PolyakStep(), lr=0.1).fit(DATA.X, DATA.y)


def test_clone_and_pickle():
    settings = {"optimizer": mh.Adam(0.01), "stop": {"loss": 0.2}, "dtype": "float32"}
    fitted = estimator(**settings).fit(DATA.X, DATA.y)
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    assert not hasattr(copy, "model_")
    assert clone(fitted).set_params(heads=7).heads == 7
    assert copy.fit(DATA.X, DATA.y).run_ == fitted.run_
    restored = pickle.loads(pickle.dumps(fitted))
    assert restored.run_ == fitted.run_
    assert np.array_equal(restored.predict(TEST.X), fitted.predict(TEST.X))


def test_parameters_changed_after_the_fit_wait_for_the_next():
    fitted = estimator().fit(DATA.X, DATA.y)
    outputs = fitted.decision_function(TEST.X)
    fitted.set_params(dtype="float32", tokens=7, heads=2)
    assert np.array_equal(fitted.decision_function(TEST.X), outputs)


def test_digits_as_rows_of_tokens():
    images, labels = load_digits(return_X_y=True)
    chosen = (labels == 3) | (labels == 8)
    pipeline = make_pipeline(StandardScaler(), estimator(tokens=8, steps=60))
    X, X_test, y, y_test = train_test_split(images[chosen], labels[chosen], random_state=0)
    pipeline.fit(X, y)
    assert set(pipeline.predict(X_test)) == {3, 8}
    assert pipeline.score(X_test, y_test) > 0.95
    assert pipeline[-1].attention(X_test[:7]).shape == (7, H, 8, 8)


def test_warns_where_training_diverged():
    diverging = estimator(loss="squared", optimizer=mh.GradientDescent(1e3), steps=500)
    with pytest.warns(ConvergenceWarning, match="the loss or a gradient is not finite"):
        diverging.fit(DATA.X, DATA.y)
    assert diverging.n_iter_ == diverging.run_.step < 500


def test_data_frames_keep_their_names():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS, columns=[f"t{i // d}_{i % d}" for i in range(T * d)])
    fitted = estimator(tokens=T).fit(frame, DATA.y)
    assert fitted.feature_names_in_.tolist() == list(frame.columns)
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(frame[frame.columns[::-1]])


def test_conventions_of_scikit_learn():
    # 1.6 weights one pair of classes and repeats another; before it there is no generator.
    pytest.importorskip("sklearn", minversion="1.7")
    failed, passed = {}, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks provoke warnings of scikit-learn itself
        for each, check in estimator_checks.estimator_checks_generator(
            MultiHeadAttentionClassifier(tokens=1)
        ):
            try:
                check(each)
                passed += 1
            except Exception as error:
                if type(error).__name__ != "SkipTest":
                    failed[check.func.__name__] = str(error)
    assert failed == {}
    assert passed > 40  # that there were checks; 1.9 has 63


def test_tags():
    pytest.importorskip("sklearn", minversion="1.6")
    tags = utils.get_tags(estimator())
    assert not tags.classifier_tags.multi_class
    assert tags.input_tags.three_d_array
    assert not tags.input_tags.two_d_array
    assert tags.target_tags.required


def fit(X=DATA.X, y=DATA.y, sample_weight=None, **changes):
    return estimator(**{"steps": 2} | changes).fit(X, y, sample_weight=sample_weight)


NAMES = np.where(DATA.y == 1, "spam", "ham")
ERRORS = [
    (
        lambda: fit(y=np.arange(n) % 3),
        ValueError,
        "y: expected two classes. Only binary classification is supported. "
        "The type of the target is multiclass.",
    ),
    (lambda: fit(y=np.ones(n)), ValueError, "y: expected two classes, got one class, 1.0"),
    (lambda: fit(y=np.linspace(0, 1, n)), ValueError, "Unknown label type: continuous"),
    (lambda: fit(y=NAMES[:7]), ValueError, "inconsistent numbers of samples: [70, 7]"),
    (
        lambda: fit(ROWS),
        ValueError,
        "tokens: expected T beside X of shape (n, T d) = (70, 60), got None",
    ),
    (
        lambda: fit(ROWS, tokens=7),
        ValueError,
        "X: expected a number of features divisible by tokens = 7, got 60",
    ),
    (
        lambda: fit(tokens=4),
        ValueError,
        "X: expected shape (n, T, d) = (n, 4, d), got (70, 5, 12)",
    ),
    (
        lambda: fit(DATA.X[None], y=DATA.y[:1]),
        ValueError,
        "X: expected shape (n, T, d), got (1, 70, 5, 12)",
    ),
    (
        lambda: fit(DATA.X[:, :0]),
        ValueError,
        "X: expected at least one sample, token and feature, got shape (70, 0, 12)",
    ),
    (lambda: fit(DATA.X * np.nan), ValueError, "Input X contains NaN"),
    (lambda: fit(tokens=0), ValueError, "tokens: expected an integer of at least 1, got 0"),
    (lambda: fit(heads=0), ValueError, "heads: expected an integer of at least 1, got 0"),
    (lambda: fit(heads=2.0), TypeError, "heads: expected an integer, got float"),
    (lambda: fit(steps=-1), ValueError, "steps: expected an integer of at least 0, got -1"),
    (lambda: fit(dtype="int32"), TypeError, "dtype: expected float32 or float64, got int32"),
    (
        lambda: fit(start="ones"),
        ValueError,
        "start: expected one of random_step, zeros, gaussian, got 'ones'",
    ),
    (lambda: fit(query=5), ValueError, "query: expected a token in [-5, 5), got 5"),
    (
        lambda: fit(query=DATA.X),
        TypeError,
        "query: expected None or an integer, got ndarray",
    ),
    (
        lambda: fit(loss="hinge"),
        ValueError,
        f"loss: expected one of {', '.join(mh.Classifier.losses)}, got 'hinge'",
    ),
    (
        lambda: fit(optimizer=0.1),
        TypeError,
        "such as GradientDescent(lr), got 0.1",
    ),
    (lambda: fit(random_state="a"), ValueError, "'a' cannot be used to seed"),
    (
        lambda: fit(sample_weight=np.ones((n, 2))),
        ValueError,
        "sample_weight: expected shape (n,) = (70,), got (70, 2)",
    ),
    (
        lambda: fit(sample_weight=np.linspace(-1, 2, n)),
        ValueError,
        "sample_weight: expected numbers >= 0 that are not all zero, got -1.0 to 2.0",
    ),
    (lambda: fit().predict(ROWS[:, 1:]), ValueError, "X has 59 features"),
    (
        lambda: fit().predict(DATA.X[:, 1:]),
        ValueError,
        "X: expected shape (n, T, d) = (n, 5, 12), got (70, 4, 12)",
    ),
    (
        lambda: fit().attention(DATA.X[:, :, 1:]),
        ValueError,
        "X: expected shape (n, T, d) = (n, 5, 12), got (70, 5, 11)",
    ),
    (lambda: estimator().predict(DATA.X), NotFittedError, "is not fitted yet"),
    (lambda: estimator().attention(DATA.X), NotFittedError, "is not fitted yet"),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[text for *_, text in ERRORS])
def test_wrong_use_gets_one_clear_sentence(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, interop.__name__)
    text = "mhfast.interop.sklearn needs scikit-learn: pip install scikit-learn"
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        importlib.import_module(interop.__name__)
