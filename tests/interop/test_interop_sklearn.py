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
from mhfast.interop.sklearn import MultiHeadClassifier, MultiHeadRegressor

n, T, d, H = 70, 5, 12, 3
DATA = mh.data.tokenized_mixture(n, T, d, noise=0.3, seed=0)
TEST = DATA.sample(200, seed=1)
ROWS = DATA.X.reshape(n, T * d)


def estimator(**changes):
    return MultiHeadClassifier(**{"heads": H, "steps": 40} | changes)


def by_hand(start, data=DATA, **changes):
    options = {"steps": 40, "optimizer": mh.GradientDescent(np.sqrt(H))} | changes
    return mh.train(start, data, **options)


@pytest.mark.parametrize("start", ["random_step", "zeros", "gaussian"])
def test_row_maps(start):
    fitted = estimator(start=start, row_map="sigmoid", normalize=True).fit(DATA.X, DATA.y)
    begun = fitted.run_.start
    assert (begun.attention, begun.normalize) == ("sigmoid", True)
    assert np.array_equal(by_hand(begun).model.U, fitted.model_.U)
    assert np.array_equal(fitted.decision_function(TEST.X), fitted.model_(TEST.X))
    assert clone(fitted).row_map == "sigmoid"


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
        "random_step": lambda: mh.Classifier.random_step(data, H, seed=4, query=query),
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
    assert fitted.run_ == by_hand(mh.Classifier.random_step(data, H, seed=0), data)
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
    start = mh.Classifier.random_step(DATA, H, seed=np.random.default_rng(3))
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
        {"multiheadclassifier__heads": [1, 2, 4]},
        cv=3,
        scoring="roc_auc",
    )
    search.fit(ROWS, DATA.y)
    best = search.best_estimator_[-1]
    assert best.model_.heads == search.best_params_["multiheadclassifier__heads"]
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
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        found = fitted.predict(ROWS)
    np.testing.assert_array_equal(found, fitted.predict(frame))


@pytest.mark.parametrize("rows", [False, True])
def test_arrays_to_predict_are_those_that_scikit_learn_takes(rows):
    """Most arrays need none of its checks, and go without them."""
    X = ROWS if rows else DATA.X
    fitted = estimator(tokens=T if rows else None).fit(X, DATA.y)
    want = fitted.decision_function(X)
    for same in (X.tolist(), np.asfortranarray(X), X.astype(">f8"), np.ma.array(X)):
        np.testing.assert_array_equal(fitted.decision_function(same), want)
    for bad, name in ((np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")):
        wrong = np.array(X)
        wrong[(3, *(2,) * (X.ndim - 1))] = bad
        with pytest.raises(ValueError, match=f"Input X contains {name}"):
            fitted.predict(wrong)
    huge = np.full_like(X, 1e308)  # whose sum is not finite
    assert np.isfinite(huge).all()
    assert len(fitted.predict(huge)) == len(X)
    with pytest.raises(ValueError, match=r"expected|features"):
        fitted.predict(X[..., :-1])
    with pytest.raises(ValueError, match="minimum of 1 is required"):
        fitted.predict(X[:0])


BLOBS = mh.data.tokenized_mixture(90, T, d, noise=0.3, seed=4)
CLASSES = np.array(["ash", "elm", "oak"])
KIND = np.arange(90) % 3
SETS = BLOBS.X + np.eye(d)[KIND][:, None]  # three kinds of sets: one feature is larger by 1


def targets(labels):
    return np.where(labels == CLASSES[:, None], 1.0, -1.0)


def test_several_classes_are_runs_side_by_side():
    fitted = estimator(lr=0.5).fit(SETS, CLASSES[KIND])
    start = mh.Classifier.random_step(mh.Dataset(SETS, targets(CLASSES[KIND])), H, seed=[0, 0, 0])
    optimizer = mh.GradientDescent(0.5)
    run = by_hand(start, mh.Dataset(SETS, targets(CLASSES[KIND])), optimizer=optimizer)
    assert fitted.run_ == run
    outputs = fitted.decision_function(SETS)
    assert np.array_equal(outputs, run.model(SETS).T)
    assert np.array_equal(fitted.predict(SETS), CLASSES[outputs.argmax(axis=1)])
    assert fitted.score(SETS, CLASSES[KIND]) > 0.95
    assert fitted.attention(SETS[:7]).shape == (3, 7, H, T, T)
    for k, name in enumerate(CLASSES):  # each is the problem of this class against the others
        alone = estimator(lr=0.5).fit(SETS, np.where(CLASSES[KIND] == name, "this", "other"))
        assert alone.classes_.tolist() == ["other", "this"]
        assert alone.run_.model == run.model[k]


def test_probabilities_of_several_classes():
    fitted = estimator(lr=0.5).fit(SETS, CLASSES[KIND])
    P, outputs = fitted.predict_proba(SETS), fitted.decision_function(SETS)
    sigmoids = 1 / (1 + np.exp(-outputs))
    # Logarithms of up to 1e2 in magnitude lose two of sixteen digits.
    np.testing.assert_allclose(P, sigmoids / sigmoids.sum(axis=1, keepdims=True), rtol=1e-13)
    far = fitted.predict_proba(-1e5 * SETS)  # sigmoids of 0 to all digits
    np.testing.assert_allclose(far.sum(axis=1), 1.0, rtol=1e-14)


def test_more_classes_than_samples_of_each():
    labels = np.arange(5)  # as many classes as samples, where runs and samples have one length
    fitted = estimator(lr=0.5, steps=200).fit(SETS[:5], labels)
    assert fitted.model_.runs == 5
    assert np.array_equal(fitted.predict(SETS[:5]), labels)


def test_class_weight_is_a_weight_of_samples():
    labels = CLASSES[KIND]
    weight = np.array([1.0, 2.0, 5.0])
    given = estimator(class_weight=dict(zip(CLASSES, weight, strict=True))).fit(SETS, labels)
    assert given.run_ == estimator().fit(SETS, labels, sample_weight=weight[KIND]).run_
    rare = np.flatnonzero((KIND != 2) | (np.arange(90) < 30))
    counts = np.bincount(KIND[rare])
    balanced = estimator(class_weight="balanced").fit(SETS[rare], labels[rare])
    by_class = (len(rare) / (3 * counts))[KIND[rare]]
    assert balanced.run_ == estimator().fit(SETS[rare], labels[rare], sample_weight=by_class).run_
    both = estimator(class_weight=dict(zip(CLASSES, weight, strict=True)))
    both.fit(SETS, labels, sample_weight=np.arange(90) % 2)
    product = weight[KIND] * (np.arange(90) % 2)
    assert both.run_ == estimator().fit(SETS, labels, sample_weight=product).run_


def test_intercept_appends_a_constant_to_each_token():
    shifted = DATA.X + 3.0
    fitted = estimator(intercept=True, lr=0.1).fit(shifted, DATA.y)
    data = mh.Dataset(np.concatenate([shifted, np.ones((n, T, 1))], axis=2), DATA.y)
    start = mh.Classifier.random_step(data, H, seed=0)
    assert fitted.run_ == by_hand(start, data, optimizer=mh.GradientDescent(0.1))
    assert (fitted.tokens_, fitted.dim_, fitted.n_features_in_) == (T, d, T * d)
    fitted.set_params(intercept=False)  # for the next fit
    assert np.array_equal(fitted.decision_function(shifted), fitted.model_(data.X))
    constant = MultiHeadRegressor(intercept=True, steps=500, lr=0.05)
    constant.fit(np.zeros((n, T, d)), np.full(n, 7.0))
    # The constant feature alone gives every constant; Adam's steps of 0.05 get this near.
    np.testing.assert_allclose(constant.predict(np.zeros((2, T, d))), 7.0, atol=0.01)


def test_warm_start_resumes_bitwise():
    for optimizer in (mh.Adam(0.02), mh.GradientDescent(0.3)):
        once = estimator(optimizer=optimizer).fit(DATA.X, DATA.y)
        twice = estimator(optimizer=optimizer, steps=15, warm_start=True).fit(DATA.X, DATA.y)
        assert twice.n_iter_ == 15
        twice.set_params(steps=25).fit(DATA.X, DATA.y)
        assert twice.run_ == once.run_
        assert twice.history_["loss"].shape == (41,)
    cold = estimator(steps=15).fit(DATA.X, DATA.y)
    assert cold.fit(DATA.X, DATA.y).n_iter_ == 15
    with pytest.raises(ValueError, match="y: expected labels among the classes"):
        twice.fit(DATA.X, NAMES)


def test_partial_fit_is_a_step_on_each_batch():
    settings = {"optimizer": mh.Momentum(0.2), "start": "gaussian"}
    fitted = estimator(**settings)
    run = mh.Classifier.gaussian(H, T, d, std=0.1, seed=0)
    for k in range(6):
        rows = slice(10 * k, 10 * k + 10)
        assert fitted.partial_fit(DATA.X[rows], DATA.y[rows], classes=[1, -1]) is fitted
        run = mh.train(run, DATA[rows], steps=1, optimizer=mh.Momentum(0.2))
    assert fitted.run_ == run
    assert fitted.n_iter_ == 6
    assert fitted.classes_.tolist() == [-1, 1]
    fitted.partial_fit(DATA.X[:1], DATA.y[:1])  # a batch without one of the classes
    several = estimator(**settings).partial_fit(SETS[:2], CLASSES[:2], classes=CLASSES)
    assert several.decision_function(SETS).shape == (90, 3)


def test_early_stopping_returns_the_best_model():
    noisy = mh.data.tokenized_mixture(80, T, d, noise=2.0, seed=5)
    fitted = estimator(
        early_stopping=True, validation_fraction=0.25, n_iter_no_change=7, tol=0.01, steps=900,
        record={"loss": 1, "validation_loss": 1, "validation_accuracy": 5},
    ).fit(noisy.X, noisy.y)  # fmt: skip
    losses = fitted.validation_loss_
    assert len(losses) == fitted.n_iter_ + 1 < 900
    assert fitted.run_.reason == "callback"
    assert np.array_equal(fitted.history_["validation_loss"], losses)
    assert "validation_accuracy" in fitted.history_
    # It ended after 7 steps without a loss below the best by more than 0.01, and not before.
    to_beat, waited, ended = np.inf, 0, []
    for loss in losses:
        to_beat, waited = (loss, 0) if loss < to_beat - 0.01 else (to_beat, waited + 1)
        ended.append(waited == 7)
    assert ended == [False] * fitted.n_iter_ + [True]
    # The same split and run by hand; the model is that of the smallest loss.
    rows, held_out = train_test_split(np.arange(80), test_size=0.25, stratify=noisy.y,
                                      random_state=0)  # fmt: skip
    best = int(losses.argmin())
    training = noisy[rows]
    start = mh.Classifier.random_step(training, H, seed=0)
    assert fitted.model_ == by_hand(start, training, steps=best).model
    value = mh.evaluate(fitted.model_, noisy[held_out])["loss"]
    assert value == losses.min()
    # Several classes: the mean of their losses decides.
    several = estimator(early_stopping=True, lr=0.5, steps=20, n_iter_no_change=20)
    several.fit(SETS, CLASSES[KIND])
    assert several.model_.runs == 3
    assert several.validation_loss_.shape == (21,)


def test_records_are_those_of_training():
    fitted = estimator(record={"loss": 1, "margin": 10}).fit(DATA.X, DATA.y)
    assert fitted.history_.keys() == {"loss", "margin"}
    assert fitted.run_.steps["margin"].tolist() == [0, 10, 20, 30, 40]


REAL = mh.data.tokenized_mixture(80, T, d, seed=6)
VALUES = REAL.X.mean(axis=1)[:, :2] @ np.array([[2.0, -1.0], [0.5, 3.0]])


def regressor(**changes):
    return MultiHeadRegressor(**{"heads": H, "steps": 60} | changes)


def test_regression_is_training_by_hand_bitwise():
    one = regressor(lr=0.02).fit(REAL.X, VALUES[:, 0])
    start = mh.Classifier.gaussian(H, T, d, std=0.1, seed=0)
    run = by_hand(
        start, mh.Dataset(REAL.X, VALUES[:, 0]), loss="squared", optimizer=mh.Adam(0.02), steps=60
    )
    assert one.run_ == run
    assert np.array_equal(one.predict(REAL.X), run.model(REAL.X))
    assert one.score(REAL.X, VALUES[:, 0]) > 0.9
    both = regressor(lr=0.02).fit(REAL.X, VALUES)
    assert both.predict(REAL.X).shape == (80, 2)
    assert np.array_equal(both.predict(REAL.X)[:, 0], one.predict(REAL.X))
    column = regressor(lr=0.02).fit(REAL.X, VALUES[:, :1])
    assert np.array_equal(column.predict(REAL.X)[:, 0], one.predict(REAL.X))
    assert np.array_equal(column.attention(REAL.X)[0], one.attention(REAL.X))


def test_regressor_in_a_grid_search_and_in_batches():
    search = GridSearchCV(regressor(), {"lr": [1e-9, 0.05], "optimizer__beta1": [0.8]}, cv=3)
    search.fit(REAL.X, VALUES)
    assert search.best_params_["lr"] == 0.05
    assert search.best_estimator_.run_.optimizer == mh.Adam(0.05, beta1=0.8)
    batches = regressor()
    run = mh.Classifier.gaussian(H, T, d, std=0.1, seed=[0, 0])
    for k in range(3):
        rows = slice(20 * k, 20 * k + 20)
        batches.partial_fit(REAL.X[rows], VALUES[rows])
        batch = mh.Dataset(REAL.X[rows], VALUES[rows].T)
        run = mh.train(run, batch, steps=1, optimizer=mh.Adam(0.01), loss="squared")
    assert batches.run_ == run
    stopped = regressor(early_stopping=True, lr=0.3, steps=500, warm_start=True)
    stopped.fit(REAL.X, VALUES)
    assert stopped.n_iter_ < 500
    np.testing.assert_array_equal(
        stopped.validation_loss_.min(), stopped.validation_loss_[stopped.best_step_]
    )


@pytest.mark.parametrize("kind", [MultiHeadClassifier, MultiHeadRegressor])
@pytest.mark.parametrize("intercept", [False, True])
def test_conventions_of_scikit_learn(kind, intercept):
    # 1.6 weights one pair of classes and repeats another; before it there is no generator.
    pytest.importorskip("sklearn", minversion="1.7", reason="install scikit-learn 1.7 or later")
    failed, passed = {}, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks provoke warnings of scikit-learn itself
        for each, check in estimator_checks.estimator_checks_generator(
            kind(tokens=1, intercept=intercept)
        ):
            try:
                check(each)
                passed += 1
            except Exception as error:
                if type(error).__name__ != "SkipTest":
                    failed[check.func.__name__] = str(error)
    assert failed == {}
    assert passed > 40  # that there were checks; 1.9 has 62 and 59


def test_tags():
    pytest.importorskip("sklearn", minversion="1.6", reason="install scikit-learn 1.6 or later")
    tags = utils.get_tags(estimator())
    assert tags.classifier_tags.multi_class
    assert tags.classifier_tags.poor_score
    assert not utils.get_tags(estimator(intercept=True)).classifier_tags.poor_score
    assert tags.input_tags.three_d_array
    assert not tags.input_tags.two_d_array
    assert tags.target_tags.required
    assert utils.get_tags(MultiHeadRegressor()).target_tags.multi_output


def test_the_old_name_is_deprecated():
    with pytest.warns(DeprecationWarning, match="now called MultiHeadClassifier"):
        assert interop.MultiHeadAttentionClassifier is MultiHeadClassifier
    with pytest.raises(AttributeError, match="no attribute 'MultiHead'"):
        interop.MultiHead  # noqa: B018


def fit(X=DATA.X, y=DATA.y, sample_weight=None, **changes):
    return estimator(**{"steps": 2} | changes).fit(X, y, sample_weight=sample_weight)


NAMES = np.where(DATA.y == 1, "spam", "ham")
ERRORS = [
    (
        lambda: fit(y=np.ones(n)),
        ValueError,
        "y: expected at least two classes, got one class, 1.0",
    ),
    (
        lambda: estimator().partial_fit(DATA.X, DATA.y),
        ValueError,
        "classes: expected all classes in the first call, got None",
    ),
    (
        lambda: estimator().partial_fit(DATA.X, DATA.y, classes=[0, 1]),
        ValueError,
        "y: expected labels among the classes [0 1], got -1.0",
    ),
    (
        lambda: fit().partial_fit(DATA.X, DATA.y, classes=[0, 1]),
        ValueError,
        "classes: expected those of the first call, [-1.  1.], got [0, 1]",
    ),
    (
        lambda: estimator(early_stopping=True).partial_fit(DATA.X, DATA.y, classes=[-1, 1]),
        ValueError,
        "early_stopping: expected False for partial_fit, got True",
    ),
    (
        lambda: fit(early_stopping=True, n_iter_no_change=0),
        ValueError,
        "n_iter_no_change: expected an integer of at least 1, got 0",
    ),
    (
        lambda: fit(early_stopping=True, tol=-0.5),
        ValueError,
        "tol: expected a number of at least 0, got -0.5",
    ),
    (
        lambda: regressor(loss="linear").fit(REAL.X, VALUES),
        ValueError,
        "loss: expected 'squared', got 'linear'",
    ),
    (
        lambda: regressor(start="random_step").fit(REAL.X, VALUES),
        ValueError,
        "start: expected one of gaussian, zeros, got 'random_step'",
    ),
    (lambda: fit(y=np.linspace(0, 1, n)), ValueError, "Unknown label type: continuous"),
    (lambda: fit(y=NAMES[:7]), ValueError, "inconsistent numbers of samples: [70, 7]"),
    (
        lambda: fit(ROWS),
        ValueError,
        "tokens: expected T for X of shape (n, T d) = (70, 60), got None",
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
        lambda: fit(loss="hunge"),
        ValueError,
        f"loss: expected one of {', '.join(mh.Classifier.losses)}, got 'hunge'",
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
