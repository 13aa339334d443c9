"""Wrong use of models gets one clear sentence: which argument, what was expected, what came."""

from __future__ import annotations

import numpy as np
import pytest
from lists import OF_OUTPUTS, OF_ROWS, OPTIMIZERS

import mhfast as mh

n, T, d, H, q, p = 2, 3, 5, 7, 4, 6

W = np.zeros((H, d, d))
U = np.zeros((H, T, d))
X = np.zeros((n, T, d))
Z = np.zeros((n, q, d))
y = np.array([1.0, -1.0])
model = mh.Classifier(W, U)
last = mh.Classifier.zeros(H, T, d, query=-1)
external = mh.Classifier.zeros(H, T, d, query=Z)
layer = mh.Layer.zeros(H, d, p)
one_row = mh.Layer.zeros(H, d, p, query=-1)
prompted = mh.Layer.zeros(H, d, p, prompt_rows=q)
data = mh.Dataset(X, y)


def value_and_grad(**changes):
    return mh.value_and_grad(**{"model": model, "X": X, "y": y, **changes})


CLASSIFIER = [
    (
        lambda: mh.Classifier(W, np.zeros((H, d, T))),
        ValueError,
        "U: expected shape (H, q, d) = (7, q, 5), got (7, 5, 3)",
    ),
    (
        lambda: mh.Classifier(W, np.zeros((T, d))),
        ValueError,
        "U: expected shape (H, q, d) = (7, q, 5), got (3, 5)",
    ),
    (
        lambda: mh.Classifier(W, U, query=0),
        ValueError,
        "U: expected shape (H, q, d) = (7, 1, 5), got (7, 3, 5)",
    ),
    (
        lambda: mh.Classifier(W, U, query=Z),
        ValueError,
        "U: expected shape (H, q, d) = (7, 4, 5), got (7, 3, 5)",
    ),
    (
        lambda: mh.Classifier(np.zeros((H, d, T)), U),
        ValueError,
        "W: expected shape (H, d, d) = (H, 3, 3), got (7, 5, 3)",
    ),
    (
        lambda: mh.Classifier(np.zeros((d, d)), U),
        ValueError,
        "W: expected shape (H, d, d) = (H, 5, 5), got (5, 5)",
    ),
    (
        lambda: mh.Classifier(1.0, U),
        ValueError,
        "W: expected shape (H, d, d), got ()",
    ),
    (
        lambda: mh.Classifier(W[:0], U[:0]),
        ValueError,
        "W, U: expected no axis of length 0, got shapes (0, 5, 5) and (0, 3, 5)",
    ),
    (
        lambda: mh.Classifier(W, U.astype(np.float32)),
        TypeError,
        "U: expected dtype float64, that of W, got float32; U.astype(np.float64) converts it",
    ),
    (
        lambda: mh.Classifier(W.astype(int), U),
        TypeError,
        "W: expected dtype float32 or float64, got int64; W.astype(np.float64) converts it",
    ),
    (
        lambda: mh.Classifier(W.astype(np.float16), U),
        TypeError,
        "W: expected dtype float32 or float64, got float16; W.astype(np.float64) converts it",
    ),
    (
        lambda: mh.Classifier(W + 1j, U),
        TypeError,
        "W: expected dtype float32 or float64, got complex128; W.real has the real parts",
    ),
    (lambda: mh.Classifier(W, None), TypeError, "U: expected an array of numbers, got NoneType"),
    (
        lambda: mh.Classifier("weights", U),
        TypeError,
        "W: expected an array of numbers, got str",
    ),
    (
        lambda: mh.Classifier(np.ma.array(W, mask=W == 0), U),
        TypeError,
        "W: expected an array without a mask, which would be ignored",
    ),
    (
        lambda: mh.Classifier(W, U, query=1.0),
        TypeError,
        "query: expected an integer or an array (n, q, d), got float",
    ),
    (
        lambda: mh.Classifier(W, U, query="first"),
        TypeError,
        "query: expected an integer or an array (n, q, d), got str",
    ),
    (
        lambda: mh.Classifier(W, U, query=True),
        TypeError,
        "query: expected an integer or an array (n, q, d), got bool",
    ),
    (
        lambda: mh.Classifier(W, U, query=Z[0]),
        ValueError,
        "query: expected shape (n, q, d) = (n, q, 5), got (4, 5)",
    ),
    (
        lambda: mh.Classifier(W, U, query=Z.astype(np.float32)),
        TypeError,
        "query: expected dtype float64, that of W, got float32; "
        "query.astype(np.float64) converts it",
    ),
    (
        lambda: mh.Classifier(W, U, scale=np.inf),
        ValueError,
        "scale: expected a finite number, got inf",
    ),
    (
        lambda: mh.Classifier(W, U, scale="1"),
        TypeError,
        "scale: expected a real number, got str",
    ),
    (
        lambda: mh.Classifier.zeros(0, T, d),
        ValueError,
        "heads: expected an integer of at least 1, got 0",
    ),
    (
        lambda: mh.Classifier.zeros(H, 3.0, d),
        TypeError,
        "tokens: expected an integer, got float",
    ),
    (
        lambda: mh.Classifier.zeros(H, T, -d),
        ValueError,
        "dim: expected an integer of at least 1, got -5",
    ),
    (
        lambda: mh.Classifier.zeros(H, T, d, dtype=np.float16),
        TypeError,
        "dtype: expected float32 or float64, got float16",
    ),
    (
        lambda: mh.Classifier.zeros(H, T, d, dtype="real"),
        TypeError,
        "dtype: expected float32 or float64, got 'real'",
    ),
    (
        lambda: mh.Classifier.zeros(H, T, d, query=T),
        ValueError,
        "query: expected a token in [-3, 3), got 3",
    ),
    (
        lambda: mh.Classifier.zeros(H, T, d, query=Z[0]),
        ValueError,
        "query: expected shape (n, q, d) = (n, q, 5), got (4, 5)",
    ),
    (
        lambda: mh.Classifier.gaussian(H, T, d, std=-1.0, seed=0),
        ValueError,
        "std: expected a number of at least 0, got -1.0",
    ),
    (
        lambda: mh.Classifier.gaussian(H, T, d, std=1.0, seed=-1),
        ValueError,
        "seed: expected an integer of at least 0, got -1",
    ),
    (
        lambda: mh.Classifier.gaussian(H, T, d, std=1.0, seed=None),
        TypeError,
        "seed: expected an integer, got NoneType",
    ),
]

LAYER = [
    (
        lambda: mh.Layer(W, np.zeros((H, T, p))),
        ValueError,
        "V: expected shape (H, d, p) = (7, 5, p), got (7, 3, 6)",
    ),
    (
        lambda: mh.Layer(W, W.astype(np.float32)),
        TypeError,
        "V: expected dtype float64, that of W, got float32; V.astype(np.float64) converts it",
    ),
    (
        lambda: mh.Layer(W, W[..., :0]),
        ValueError,
        "W, V: expected no axis of length 0, got shapes (7, 5, 5) and (7, 5, 0)",
    ),
    (
        lambda: mh.Layer(W, W, 0, Z[0]),
        ValueError,
        "query: expected None with a prompt, got both",
    ),
    (
        lambda: mh.Layer(W, W, prompt=Z[..., :3]),
        ValueError,
        "prompt: expected shape (R, q, d) = (R, q, 5), got (2, 4, 3)",
    ),
    (
        lambda: mh.Layer(W, W, prompt=Z[0, :0]),
        ValueError,
        "prompt: expected at least one row, got shape (0, 5)",
    ),
    (
        lambda: mh.Layer(W, W, prompt=Z[0].astype(np.float32)),
        TypeError,
        "prompt: expected dtype float64, that of W, got float32; "
        "prompt.astype(np.float64) converts it",
    ),
    (
        lambda: mh.Layer(W, W, prompt=Z[0], causal=True),
        ValueError,
        "causal: expected False with a prompt, whose rows have no place among the tokens, got True",
    ),
    (
        lambda: mh.Layer(W, W, causal=1),
        TypeError,
        "causal: expected True or False, got int",
    ),
    (
        lambda: mh.Layer.zeros(H, d, 0),
        ValueError,
        "out_dim: expected an integer of at least 1, got 0",
    ),
    (
        lambda: mh.Layer.zeros(H, d, p, rank=0),
        ValueError,
        "rank: expected an integer of at least 1, got 0",
    ),
    (
        lambda: mh.Layer.zeros(H, d, p, tied=True),
        ValueError,
        "tied: expected False without a rank, got True",
    ),
    (
        lambda: mh.Layer.zeros(H, d, p, prompt_rows=0),
        ValueError,
        "prompt_rows: expected an integer of at least 1, got 0",
    ),
    (
        lambda: mh.Layer.zeros(H, d, p, runs=0),
        ValueError,
        "runs: expected an integer of at least 1, got 0",
    ),
    (
        lambda: mh.LowRank(W, U),
        ValueError,
        "K: expected shape (H, d, r) = (7, 5, 5), got (7, 3, 5)",
    ),
    (
        lambda: mh.LowRank(W, W.astype(np.float32)),
        TypeError,
        "K: expected dtype float64, that of Q, got float32; K.astype(np.float64) converts it",
    ),
    (
        lambda: mh.LowRank(W[..., :0]),
        ValueError,
        "Q: expected no axis of length 0, got shape (7, 5, 0)",
    ),
    (
        lambda: layer(X[..., :2]),
        ValueError,
        "X: expected shape (n, T, d) = (n, T, 5), got (2, 3, 2)",
    ),
    (
        lambda: prompted(X, query=Z),
        ValueError,
        "query: expected None for a model with a prompt, got an array",
    ),
]

CALL = [
    (
        lambda: model(X[:, :2]),
        ValueError,
        "X: expected shape (n, T, d) = (n, 3, 5), got (2, 2, 5)",
    ),
    (
        lambda: model(X[0]),
        ValueError,
        "X: expected shape (n, T, d) = (n, 3, 5), got (3, 5); X[None] is one sample",
    ),
    (
        lambda: model(X.astype(np.float32)),
        TypeError,
        "X: expected dtype float64, that of the model, got float32; "
        "X.astype(np.float64) converts it",
    ),
    (
        lambda: model(X.astype(int)),
        TypeError,
        "X: expected dtype float64, that of the model, got int64; X.astype(np.float64) converts it",
    ),
    (lambda: model(None), TypeError, "X: expected an array of numbers, got NoneType"),
    (
        lambda: model(np.full((n, T, d), None)),
        TypeError,
        "X: expected an array of numbers, got dtype object",
    ),
    (
        lambda: model.attention(X[..., :2]),
        ValueError,
        "X: expected shape (n, T, d) = (n, 3, 5), got (2, 3, 2)",
    ),
    (
        lambda: last(X[..., :2]),
        ValueError,
        "X: expected shape (n, T, d) = (n, T, 5), got (2, 3, 2)",
    ),
    (lambda: last(X[:, :0]), ValueError, "query: expected a token in [-0, 0), got -1"),
    (
        lambda: mh.Classifier.zeros(H, T, d, query=2)(X[:, :2]),
        ValueError,
        "query: expected a token in [-2, 2), got 2",
    ),
    (lambda: external(X[:, :0]), ValueError, "X: expected at least one token, got shape (2, 0, 5)"),
    (
        lambda: external(X[:1]),
        ValueError,
        "query: expected shape (n, q, d) = (1, 4, 5), got (2, 4, 5)",
    ),
    (
        lambda: model(X, query=Z),
        ValueError,
        "query: expected shape (n, q, d) = (2, 3, 5), got (2, 4, 5)",
    ),
    (
        lambda: external(X, query=Z.astype(np.float32)),
        TypeError,
        "query: expected dtype float64, that of the model, got float32; "
        "query.astype(np.float64) converts it",
    ),
    (
        lambda: model(X, query=0),
        ValueError,
        "query: expected shape (n, q, d) = (2, 3, 5), got ()",
    ),
    (
        lambda: model(data, query=X),
        TypeError,
        "query: expected None with a Dataset, which holds its own",
    ),
    (
        lambda: model(X, num_threads=0),
        ValueError,
        "num_threads: expected an integer of at least 1, got 0",
    ),
    (
        lambda: model(X, num_threads=2.0),
        TypeError,
        "num_threads: expected an integer, got float",
    ),
]

VALUE_AND_GRAD = [
    (
        lambda: value_and_grad(model="model"),
        TypeError,
        "model: expected a Classifier, a Layer or a Stack, got str",
    ),
    (
        lambda: value_and_grad(X=X[:0], y=y[:0]),
        ValueError,
        "X: expected at least one sample, got none",
    ),
    (
        lambda: value_and_grad(y=None),
        TypeError,
        "y: expected labels with the array X, got None",
    ),
    (
        lambda: value_and_grad(y=np.ones(3)),
        ValueError,
        "y: expected shape (n,) = (2,), got (3,)",
    ),
    (
        lambda: value_and_grad(y=np.ones((n, 1))),
        ValueError,
        "y: expected shape (n,) = (2,), got (2, 1); y[..., 0] has this shape",
    ),
    (
        lambda: value_and_grad(y=np.array([1.0, 0.5])),
        ValueError,
        "y: expected labels +1 or -1, got 0.5 at index 1",
    ),
    (
        lambda: value_and_grad(y=np.array([1, 0])),
        ValueError,
        "y: expected labels +1 or -1, got 0.0 at index 1; 2 * y - 1 makes them of 0 and 1",
    ),
    (
        lambda: value_and_grad(y=np.array([1.0, np.nan])),
        ValueError,
        "y: expected labels +1 or -1, got nan at index 1",
    ),
    (
        lambda: value_and_grad(y=np.array([-128, 1], np.int8)),
        ValueError,
        "y: expected labels +1 or -1, got -128.0 at index 0",
    ),
    (
        lambda: value_and_grad(y=np.array([True, False])),
        TypeError,
        "y: expected a real or integer dtype, got bool; np.where(y, 1, -1) has labels",
    ),
    (
        lambda: value_and_grad(y=["yes", "no"]),
        TypeError,
        "y: expected an array of numbers, got list",
    ),
    (
        lambda: value_and_grad(loss="squared", y=y.astype(np.float32)),
        TypeError,
        "y: expected dtype float64, that of X, got float32; y.astype(np.float64) converts it",
    ),
    (
        lambda: value_and_grad(loss="hunge"),
        ValueError,
        f"loss: expected one of {', '.join(OF_OUTPUTS)}, got 'hunge'",
    ),
    (
        lambda: value_and_grad(loss=None),
        ValueError,
        f"loss: expected one of {', '.join(OF_OUTPUTS)}, got None",
    ),
    (
        lambda: value_and_grad(wrt="V"),
        ValueError,
        "wrt: expected names from W, U, X, query, embedding, got 'V'",
    ),
    (
        lambda: value_and_grad(wrt=("W", "query")),
        ValueError,
        "wrt: expected an external query to differentiate by, got none",
    ),
    (
        lambda: value_and_grad(wrt=3),
        TypeError,
        "wrt: expected names from W, U, X, query, embedding, got int",
    ),
    (
        lambda: value_and_grad(model=last, wrt="query"),
        ValueError,
        "wrt: expected an external query to differentiate by, got none",
    ),
    (
        lambda: value_and_grad(loss="cross_entropy"),
        ValueError,
        f"loss: expected one of {', '.join(OF_OUTPUTS)}, got "
        "'cross_entropy', a loss of layers; of two classes labelled -1 and 1 it is 'logistic'",
    ),
    (
        lambda: value_and_grad(model=layer, loss="hunge"),
        ValueError,
        f"loss: expected one of {', '.join((*OF_OUTPUTS, *OF_ROWS))}, got 'hunge'",
    ),
    (
        lambda: value_and_grad(model=layer),
        ValueError,
        "y: expected shape (n, q, p) = (2, 3, 6), got (2,)",
    ),
    (
        lambda: value_and_grad(model=layer, y=np.ones((n, T)), loss="cross_entropy"),
        TypeError,
        "y: expected integer classes, got dtype float64; y.astype(int) makes them integers",
    ),
    (
        lambda: value_and_grad(model=layer, y=np.full((n, T), p), loss="cross_entropy"),
        ValueError,
        "y: expected classes from 0 to 5, got 6 at index 0, 0",
    ),
    (
        lambda: value_and_grad(model=layer, y=[[0, 1, 2], [0, -1, 2]], loss="cross_entropy"),
        ValueError,
        "y: expected classes from 0 to 5, got -1 at index 1, 1",
    ),
    (
        lambda: value_and_grad(weight=[[1.0, 2.0], [-1.0, 2.0]]),
        ValueError,
        "weight: expected finite numbers >= 0, got -1.0 at index 1, 0",
    ),
    (
        lambda: value_and_grad(model=one_row, y=np.ones((n, p)), loss="cross_entropy"),
        ValueError,
        "y: expected shape (n, q) = (2, 1), got (2, 6); y.argmax(axis=-1)[:, None] "
        "has the class numbers of one-hot targets",
    ),
    (
        lambda: value_and_grad(model=one_row, y=np.ones(n, int), loss="cross_entropy"),
        ValueError,
        "y: expected shape (n, q) = (2, 1), got (2,); y[:, None] has this shape",
    ),
    (
        lambda: value_and_grad(model=one_row, y=np.ones((n, p)), loss="squared"),
        ValueError,
        "y: expected shape (n, q, p) = (2, 1, 6), got (2, 6); y[:, None] has this shape",
    ),
    (
        lambda: value_and_grad(model=one_row, y=np.full((n, 1), p), loss="cross_entropy"),
        ValueError,
        "y: expected classes from 0 to 5, got 6 at index 0",
    ),
    (
        lambda: value_and_grad(model=layer, y=np.ones((n, T, p), int), loss="cross_entropy"),
        ValueError,
        "y: expected shape (n, q) = (2, 3), got (2, 3, 6); y.argmax(axis=-1) "
        "has the class numbers of one-hot targets",
    ),
    (
        lambda: value_and_grad(model=layer, y=np.ones((n, T, p)), weight=np.ones((n, T, p))),
        ValueError,
        "weight: expected shape (R, n, q) = (R, 2, 3), got (2, 3, 6)",
    ),
    (
        lambda: value_and_grad(weight=np.ones((n, T))),
        ValueError,
        "weight: expected shape (R, n) = (R, 2), got (2, 3)",
    ),
    (
        lambda: value_and_grad(lengths=[1.0, 2.0]),
        TypeError,
        "lengths: expected integers, got dtype float64",
    ),
    (
        lambda: value_and_grad(lengths=[1, 4]),
        ValueError,
        "lengths: expected integers in [0, 3], got 4 at index 1",
    ),
    (
        lambda: value_and_grad(lengths=[1, -1]),
        ValueError,
        "lengths: expected integers in [0, 3], got -1 at index 1",
    ),
    (
        lambda: value_and_grad(lengths=3),
        ValueError,
        "lengths: expected shape (n,) = (2,), got ()",
    ),
    (
        lambda: value_and_grad(
            model=layer, y=np.zeros((n, T), int), loss="cross_entropy", lengths=[0, 0]
        ),
        ValueError,
        "lengths: expected a row with a positive weight within them, got none",
    ),
    (
        lambda: value_and_grad(weight=[1.0, -2.0]),
        ValueError,
        "weight: expected finite numbers >= 0, got -2.0 at index 1",
    ),
    (
        lambda: value_and_grad(weight=[np.nan, 1.0]),
        ValueError,
        "weight: expected finite numbers >= 0, got nan at index 0",
    ),
    (
        lambda: value_and_grad(weight=[0, 0]),
        ValueError,
        "weight: expected at least one positive number, got none",
    ),
    (
        lambda: value_and_grad(weight=1.0),
        ValueError,
        "weight: expected shape (n,) = (2,), got ()",
    ),
    (
        lambda: value_and_grad(weight=[1j, 1.0]),
        TypeError,
        "weight: expected a real or integer dtype, got complex128",
    ),
    (
        lambda: value_and_grad(X=data),
        TypeError,
        "y: expected None with a Dataset, which holds its own",
    ),
    (
        lambda: value_and_grad(X=data, y=None, weight=y),
        TypeError,
        "weight: expected None with a Dataset, which holds its own",
    ),
]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [*CLASSIFIER, *LAYER, *CALL, *VALUE_AND_GRAD],
)
def test_the_error_says_what_is_wrong(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_a_label_does_not_become_valid_by_rounding():
    single = mh.Classifier.zeros(H, T, d, dtype=np.float32)
    with pytest.raises(ValueError, match=r"^y: expected labels .*, got 1\.000000001 at index 0$"):
        mh.value_and_grad(single, X.astype(np.float32), np.array([1 + 1e-9, -1.0]))


SINGLE = mh.Classifier.zeros(H, T, d, dtype=np.float32)
ODD = 2**24 + 1  # float32 has no such number


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: mh.LowRank([[[1.0], [2j]]]),
            TypeError,
            "Q: expected dtype float32 or float64, got complex128; Q.real has the real parts",
        ),
        (
            lambda: mh.LowRank([[[1.0], [True]]]),
            TypeError,
            "Q: expected numbers, got a list with a bool",
        ),
        (
            lambda: mh.LowRank(np.ones((1, 1, 2), "f4"), [[[1.0, np.float64(0.1)]]]),
            TypeError,
            "K: expected dtype float32, that of Q, got float64; K.astype(np.float32) converts it",
        ),
        (
            lambda: mh.LowRank(np.ones((1, 1, 2), "f4"), [[[1.0, 1e300]]]),
            ValueError,
            "K: expected numbers in the range of float32, got 1e+300 at index 0, 0, 1",
        ),
        (
            lambda: mh.LowRank(np.ones((1, 1, 2), "f4"), [[[1, ODD]]]),
            ValueError,
            "K: expected numbers that float32 holds exactly, got 16777217 at index 0, 0, 1; "
            "K.astype(np.float32) rounds them",
        ),
        (
            lambda: mh.LowRank([[[1, 2**53 + 1]]]),
            ValueError,
            "Q: expected numbers that float64 holds exactly, got 9007199254740993 at index "
            "0, 0, 1; Q.astype(np.float64) rounds them",
        ),
        (
            lambda: mh.value_and_grad(SINGLE, X.astype("f4"), np.array([1, ODD]), loss="squared"),
            ValueError,
            "y: expected numbers that float32 holds exactly, got 16777217 at index 1; "
            "y.astype(np.float32) rounds them",
        ),
        (
            lambda: mh.value_and_grad(SINGLE, X.astype("f4"), y, weight=np.array([0.5, 0.1])),
            ValueError,
            "weight: expected numbers that float32 holds exactly, got 0.1 at index 1; "
            "weight.astype(np.float32) rounds them",
        ),
        (
            lambda: mh.Dataset(X.astype("f4"), y, weight=np.array([1, 1e300])),
            ValueError,
            "weight: expected numbers that float32 holds exactly, got 1e+300 at index 1; "
            "weight.astype(np.float32) rounds them",
        ),
        (
            lambda: mh.Classifier(SINGLE.W, SINGLE.U, scale=1e300),
            ValueError,
            "scale: expected 0 or a number between 1.4e-45 and 3.4e+38, the range of float32, "
            "got 1e+300",
        ),
        (
            lambda: mh.Layer.zeros(1, 2, 2, dtype="f4", scale=-1e-60),
            ValueError,
            "scale: expected 0 or a number between 1.4e-45 and 3.4e+38, the range of float32, "
            "got -1e-60",
        ),
    ],
)
def test_nothing_is_converted_silently(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_python_numbers_and_exact_weights_adapt():
    K = mh.LowRank(np.ones((1, 1, 2), "f4"), [[[0.1, 3]]]).K
    assert K.tolist() == [[[np.float32(0.1), 3.0]]]
    single = X.astype("f4")
    value, _ = mh.value_and_grad(SINGLE, single, y, weight=[0.1, 0.3])
    assert value == mh.value_and_grad(SINGLE, single, y, weight=np.array([0.1, 0.3], "f4"))[0]
    value, _ = mh.value_and_grad(SINGLE, single, y, weight=np.array([0.5, 2.0]))
    assert value == mh.value_and_grad(SINGLE, single, y, weight=np.array([0.5, 2.0], "f4"))[0]
    assert mh.Classifier(SINGLE.W, SINGLE.U, scale=0.0).scale == 0.0


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adam", "optimizer: expected a made one, such as mhfast.Adam(lr), got 'adam'"),
        ("sgd", "optimizer: expected a made one, such as mhfast.GradientDescent(lr), got 'sgd'"),
        (
            "Mirror-Descent",
            "optimizer: expected a made one, such as mhfast.MirrorDescent(lr, p), got "
            "'Mirror-Descent'",
        ),
        (
            "lion",
            f"optimizer: expected one of {', '.join(kind.__name__ for kind in OPTIMIZERS)}, "
            "such as GradientDescent(lr), got 'lion'",
        ),
    ],
)
def test_another_optimizer_is_told_what_there_is(optimizer, message):
    with pytest.raises(TypeError) as caught:
        mh.train(model, X, y, steps=1, optimizer=optimizer)
    assert str(caught.value) == message


def test_a_misspelt_record_is_told_what_there_is():
    options = {"steps": 1, "optimizer": mh.Adam(0.1)}
    with pytest.raises(ValueError, match=r"; got 'los', did you mean 'loss'\?$"):
        mh.train(model, X, y, record="los", **options)
    run = mh.train(model, X, y, record=("loss", "grad_norm"), **options)
    for rows in (run.history, run.steps):
        with pytest.raises(KeyError, match=r"'gradnorm' is not .* which has loss, grad_norm, did"):
            rows["gradnorm"]
        assert rows.get("gradnorm") is None


@pytest.mark.peers
def test_a_tensor_that_tracks_gradients_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^X: cannot read Tensor as an array: Can't call numpy"):
        model(torch.zeros((n, T, d), dtype=torch.float64, requires_grad=True))


@pytest.mark.peers
def test_a_tensor_of_another_format_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"^X: cannot read Tensor as an array: .*BFloat16"):
        model(torch.zeros((n, T, d), dtype=torch.bfloat16))


@pytest.mark.peers
def test_a_jax_array_of_another_format_is_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"^X: expected .* float64.*, got .*bfloat16$"):
        model(jax.numpy.zeros((n, T, d), dtype=jax.numpy.bfloat16))


def test_a_sparse_matrix_is_refused():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match=r"^X: expected an array of numbers, got csr_array$"):
        model(sparse.csr_array(X[0]))


def test_a_dataset_of_another_dtype_is_refused():
    single = mh.Dataset(X.astype(np.float32), y)
    for call in (model, model.attention, lambda data: mh.value_and_grad(model, data)):
        with pytest.raises(TypeError, match=r"^X: expected dtype float64, .* got float32; "):
            call(single)
