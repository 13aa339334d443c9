"""One thread for BLAS where the learner alternates small products with the core's threads."""

import threading

import numpy as np
import pytest

import mhfast as mh
from mhfast import _blas
from mhfast.learner import learning


def counts() -> list[int]:
    return [get() for get, _ in _blas._openblas()]


@pytest.fixture(autouse=True)
def two_threads():
    """BLAS begins with two threads, and ends with what it had."""
    if not _blas._openblas():
        pytest.skip("needs NumPy and SciPy with OpenBLAS, as in their wheels")
    before = counts()
    for _, set_threads in _blas._openblas():
        set_threads(2)
    yield
    for (_, set_threads), count in zip(_blas._openblas(), before, strict=True):
        set_threads(count)


def test_both_libraries_have_one_thread_within_the_block():
    """Also in an inner block, after it, and after an error."""

    @_blas.one_blas_thread()
    def fail():
        with _blas.one_blas_thread():
            assert set(counts()) == {1}
        assert set(counts()) == {1}
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert set(counts()) == {2}


def test_the_last_python_thread_sets_the_number_again():
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with _blas.one_blas_thread():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=stay)
    other.start()
    entered.wait(60)
    with _blas.one_blas_thread():
        pass
    assert set(counts()) == {1}
    leave.set()
    other.join()
    assert set(counts()) == {2}


def test_the_learner_uses_it(monkeypatch):
    met = []
    as_examples = learning.as_examples

    def watched(*args, **kwargs):
        met.append(set(counts()))
        return as_examples(*args, **kwargs)

    monkeypatch.setattr(learning, "as_examples", watched)
    X = np.random.default_rng(0).choice([-1.0, 1.0], size=(400, 2, 4))
    layer = mh.Layer.gaussian(1, 4, 3, std=0.5, seed=0)
    assert mh.learn_layer(X, layer(X), 1).learnt
    assert met == [{1}]
    assert set(counts()) == {2}
