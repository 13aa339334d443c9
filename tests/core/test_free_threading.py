"""Python threads that share models, data and optimizers, with the interpreter's lock or without.

Where the interpreter has a lock, it is released in the core only; without it (CPython 3.13t, 3.14t)
threads are in the bindings and in the Python code of mhfast together.
"""

import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mhfast as mh

THREADS, ROUNDS = 6, 3
n, T, d, H = 90, 7, 9, 3  # enough samples for the two threads of each call


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter has a global lock"
)
def test_the_lock_stays_off():
    code = "import sys, mhfast as mh; mh.learner, mh.theory; print(sys._is_gil_enabled())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "False\n", done.stderr


def residuals(outputs, targets):
    """The squared loss as a function of the caller's own."""
    return (outputs - targets) ** 2, 2 * (outputs - targets)


def broken(outputs, targets):
    raise ZeroDivisionError(f"{len(outputs)} outputs, {len(targets)} targets")


def calls():
    """Names of calls, and functions that make them with what they share."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, T + 1, n)
    labels = rng.choice([-1.0, 1.0], n)
    data = mh.Dataset(rng.standard_normal((n, T, d)), labels, lengths=lengths)
    classifier = mh.Classifier.gaussian(H, T, d, std=0.3, seed=0)
    other = mh.Classifier.gaussian(H, T, d, std=0.3, seed=3)
    layer = mh.Layer.gaussian(H, d, 4, std=0.3, seed=1)
    targets = mh.Dataset(data.X, rng.standard_normal((n, T, 4)))
    words = mh.Dataset(mh.Tokens(rng.integers(5, size=(n, T)), data.X[0, :5]), labels)
    rule = mh.Adam(0.01)

    def callback():
        seen = []
        run = mh.train(
            classifier, data, steps=10, optimizer=rule, record=("loss", "attention_max"),
            callback=lambda step, model: seen.append((step, float(model.W.sum()))), num_threads=2,
        )  # fmt: skip
        return run, seen

    def failing_loss():
        with pytest.raises(ZeroDivisionError, match=r"\d+ outputs"):
            mh.train(classifier, data, steps=2, optimizer=rule, loss=broken, num_threads=2)

    def bad_argument():
        with pytest.raises(ValueError, match="steps: expected"):
            mh.train(classifier, data, steps=-1, optimizer=rule)

    return {
        "outputs": lambda: classifier(data),
        "attention": lambda: layer.attention(targets),
        "gradient": lambda: mh.value_and_grad(classifier, data, wrt=("W", "U", "X"), num_threads=2),
        "hvp": lambda: mh.hvp(layer, targets, tangent=layer, loss="squared", num_threads=2),
        "words": lambda: mh.train(classifier, words, steps=10, optimizer=rule, num_threads=2),
        "own loss": lambda: mh.train(
            layer, targets, steps=5, optimizer=rule, loss=residuals, num_threads=2
        ),
        "runs": lambda: mh.train(
            mh.stack([classifier, other]), data, steps=10, num_threads=2,
            optimizer=mh.NormalizedGradientDescent(np.array([0.1, 0.2])),
        ),
        "stream": lambda: mh.train(
            layer, targets, steps=5, optimizer=rule, loss="squared", batch=40, seed=2,
            stream=lambda size, seed: targets[np.arange(size) * seed % n], num_threads=2,
        ),
        "callback": callback, "failing loss": failing_loss, "bad argument": bad_argument,
    }  # fmt: skip


def same(a, b):
    """Whether two results are equal to the last bit."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, mh.Gradients):
        pairs = ((getattr(a, name), getattr(b, name)) for name in ("W", "U", "V", "X"))
        return all(np.array_equal(x, y) if x is not None else y is None for x, y in pairs)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


def test_threads_that_share_what_they_compute_with():
    """Each call at once with each other and with itself gives what it gives alone."""
    shared = calls()
    expected = {name: call() for name, call in shared.items()}
    fresh = calls()  # nothing has been computed from these objects yet
    start = threading.Barrier(THREADS)

    def work(thread):
        names = list(fresh)
        for turn in range(ROUNDS):
            first = turn * thread  # all begin with the same, then with different ones
            start.wait(timeout=60)
            for name in names[first % len(names) :] + names[: first % len(names)]:
                assert same(fresh[name](), expected[name]), name

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, thread) for thread in range(THREADS)]:
            done.result(timeout=120)
