"""Wrong use of data, gradients and settings gets one clear sentence."""

from __future__ import annotations

import inspect
import re
from unittest import mock

import numpy as np
import pytest

import mhfast as mh
from mhfast import Gradients

n, T, d, H, q, p = 2, 3, 5, 7, 4, 6

W = np.zeros((H, d, d))
U = np.zeros((H, T, d))
X = np.zeros((n, T, d))
Z = np.zeros((n, q, d))
y = np.array([1.0, -1.0])
model = mh.Classifier(W, U)
last = mh.Classifier.zeros(H, T, d, query=-1)
layer = mh.Layer.zeros(H, d, p)
data = mh.Dataset(X, y)


def dataset(**changes):
    return mh.Dataset(**{"X": X, "y": y, **changes})


DATASET = [
    (
        lambda: dataset(X=X[0]),
        ValueError,
        "X: expected shape (n, T, d), got (3, 5); X.reshape(n, T, d) has the "
        "tokens of rows of length T d",
    ),
    (
        lambda: dataset(X=X[:, :0]),
        ValueError,
        "X: expected at least one sample, token and feature, got shape (2, 0, 5)",
    ),
    (
        lambda: dataset(X=X.astype(int)),
        TypeError,
        "X: expected dtype float32 or float64, got int64; X.astype(np.float64) converts it",
    ),
    (
        lambda: dataset(X=[[1.0, 2.0], [3.0]]),
        ValueError,
        "X: cannot read list as an array: setting an array element with a sequence. The requested "
        "array has an inhomogeneous shape after 1 dimensions. The detected shape was (2,) + "
        "inhomogeneous part.",
    ),
    (lambda: dataset(y=y[:1]), ValueError, "y: expected shape (n,) = (2,), got (1,)"),
    (
        lambda: dataset(y=y > 0),
        TypeError,
        "y: expected a real or integer dtype, got bool",
    ),
    (
        lambda: dataset(y=np.ones((4, 5))),
        ValueError,
        "y: expected shape (n, ...) or (R, n, ...) of at most 4 axes with n = 2, got (4, 5)",
    ),
    (
        lambda: dataset(lengths=[1, 4]),
        ValueError,
        "lengths: expected integers in [0, 3], got 4 at index 1",
    ),
    (
        lambda: dataset(weight=[0, 0]),
        ValueError,
        "weight: expected at least one positive number, got none",
    ),
    (
        lambda: dataset(weight=np.ones((4, 5))),
        ValueError,
        "weight: expected shape (n, ...) or (R, n, ...) of at most 3 axes with n = 2, got (4, 5)",
    ),
    (
        lambda: dataset(query=Z[:1]),
        ValueError,
        "query: expected shape (n, q, d) = (2, q, 5), got (1, 4, 5)",
    ),
    (
        lambda: dataset(query=-1),
        ValueError,
        "query: expected shape (n, q, d) = (2, q, 5), got ()",
    ),
    (
        lambda: dataset(query=Z.astype(np.float32)),
        TypeError,
        "query: expected dtype float64, that of X, got float32; "
        "query.astype(np.float64) converts it",
    ),
    (
        lambda: dataset(weight=[1.0, np.inf]),
        ValueError,
        "weight: expected finite numbers >= 0, got inf at index 1",
    ),
    (
        lambda: dataset(sample_groups=[0.0, 1.0]),
        TypeError,
        "sample_groups: expected integers, got dtype float64",
    ),
    (
        lambda: dataset(sample_groups=[0, -1]),
        ValueError,
        "sample_groups: expected groups in [0, 1), got -1",
    ),
    (
        lambda: dataset(sample_groups=([0, 2], ["a", "b"])),
        ValueError,
        "sample_groups: expected groups in [0, 2), got 2",
    ),
    (
        lambda: dataset(token_groups=([0, 1], [2, 3])),
        TypeError,
        "token_groups: expected integers or a pair (integers, names), got ([0, 1], [2, 3])",
    ),
    (
        lambda: dataset(token_groups=[0, 1]),
        ValueError,
        "token_groups: expected shape (n, T) = (2, 3), got (2,)",
    ),
    (
        lambda: dataset(truth="teacher"),
        TypeError,
        "truth: expected a mapping, got str",
    ),
    (
        lambda: data.sample(3, seed=0),
        ValueError,
        "sample: expected a Dataset made by a generator of mhfast.data, "
        "got one without a generator",
    ),
    (
        lambda: data.subset([2]),
        IndexError,
        "index: cannot select from 2 samples: index 2 is out of bounds for axis 0 with size 2",
    ),
    (
        lambda: data.subset(0),
        IndexError,
        "index: cannot select from 2 samples: it must run along one axis",
    ),
    (
        lambda: data.subset([False, False]),
        ValueError,
        "X: expected at least one sample, token and feature, got shape (0, 3, 5)",
    ),
    (lambda: mh.as_dataset(X), TypeError, "y: expected labels with the array X, got None"),
    (
        lambda: mh.as_dataset(data, y),
        TypeError,
        "y: expected None with a Dataset, which holds its own",
    ),
]

GRADIENTS = [
    (
        lambda: Gradients(W=W) + Gradients(U=U),
        ValueError,
        "W: expected in both or in neither, got it in the first only",
    ),
    (
        lambda: mh.dot(Gradients(W=W), Gradients(W=W[:1])),
        ValueError,
        "W: expected one shape, got (7, 5, 5) and (1, 5, 5)",
    ),
    (
        lambda: model + Gradients(W=W.astype(np.float32)),
        TypeError,
        "W: expected one dtype, got float64 and float32",
    ),
    (
        lambda: model + Gradients(U=U[:, :1]),
        ValueError,
        "U: expected one shape, got (7, 3, 5) and (7, 1, 5)",
    ),
    (
        lambda: Gradients(W=W) + 1.0,
        TypeError,
        "expected Gradients to combine with Gradients, got float",
    ),
    (
        lambda: 1.0 + Gradients(W=W),
        TypeError,
        "expected a model to move by Gradients, got float",
    ),
    (
        lambda: Gradients(W=W) * "2",
        TypeError,
        "expected a real number to scale Gradients, got str",
    ),
    (
        lambda: np.ones((2, 1)) * Gradients(W=W),
        ValueError,
        "expected one factor for each run, of shape (R,), got (2, 1)",
    ),
    (
        lambda: np.ones(2, complex) * Gradients(W=W),
        TypeError,
        "expected a real number to scale Gradients, got ndarray",
    ),
    (
        lambda: model + Gradients(V=W),
        ValueError,
        "V: expected gradients by parameters of the model, W, U",
    ),
    (
        lambda: layer - Gradients(X=X),
        ValueError,
        "X: expected gradients by parameters of the model, W, V",
    ),
    (lambda: mh.norm(W), TypeError, "expected Gradients or a model, got ndarray"),
]

CONFIG = [
    (lambda: mh.set_num_threads(0), ValueError, "k: expected an integer of at least 1, got 0"),
    (lambda: mh.set_num_threads("2"), TypeError, "k: expected an integer, got str"),
    (
        lambda: mh.num_threads(-1).__enter__(),
        ValueError,
        "k: expected an integer of at least 1, got -1",
    ),
    (
        lambda: mh.show_config(mode="json"),
        ValueError,
        "mode: expected 'text' or 'dict', got 'json'",
    ),
    (
        lambda: mh.explain(model, (n, T + 1, d)),
        ValueError,
        "X: expected shape (n, T, d) = (n, 3, 5), got (2, 4, 5)",
    ),
    (
        lambda: mh.explain(last, X[0]),
        ValueError,
        "X: expected shape (n, T, d) = (n, T, 5), got (3, 5)",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), [*DATASET, *GRADIENTS, *CONFIG])
def test_the_error_says_what_is_wrong(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


KINDS = {
    kind.__name__: kind
    for kind in (
        mh.Dataset, mh.Run, mh.learner.Body, mh.learner.Examples, mh.learner.Facts,
        mh.learner.SumEstimate,
    )
}  # fmt: skip


def asked_for():
    """The public functions and their arguments that have to be of one of the kinds."""
    for module in (mh, mh.data, mh.theory, mh.learner):
        for function in map(vars(module).get, module.__all__):
            if inspect.isfunction(function):
                for name, parameter in inspect.signature(function).parameters.items():
                    if parameter.annotation in KINDS:
                        yield function, name


@pytest.mark.parametrize(
    ("function", "name"), list(asked_for()), ids=lambda each: getattr(each, "__name__", each)
)
def test_an_object_of_another_kind_is_named(function, name):
    arguments = {}
    for other, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation in KINDS:
            arguments[other] = mock.Mock(spec=KINDS[parameter.annotation])
        elif parameter.default is parameter.empty:
            arguments[other] = None
    with pytest.raises(TypeError) as caught:
        function(**arguments | {name: np.zeros((2, 3, 5))})
    kind = inspect.signature(function).parameters[name].annotation
    assert re.fullmatch(rf"{name}: expected an? {kind}, got ndarray", str(caught.value))


def test_all_kinds_are_asked_for():
    found = {(f.__name__, name) for f, name in asked_for()}
    assert {("token_svm", "data"), ("certify", "examples"), ("search_net", "body")} <= found
    assert len(found) > 12
