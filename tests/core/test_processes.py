"""Training works in children of every kind and in several Python threads at once; all finish."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mhfast as mh

# A script, since a clean parent makes clean children. The parent has used its threads before the
# children come, which is when a forked child inherits a thread team that does not exist in it.
SCRIPT = """
import sys
import multiprocessing
import numpy as np
import mhfast as mh

def history(seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((101, 10, 7))
    y = rng.choice([-1, 1], 101)
    model = mh.Classifier.gaussian(3, 10, 7, std=0.1, seed=seed)
    mh.value_and_grad(model, X, y, num_threads=2)
    run = mh.train(
        model, X, y, steps=20, optimizer=mh.GradientDescent(0.1), record=("loss", "W"),
        num_threads=2,
    )
    return run

def runs_of_children(method):
    if method == "loky":
        from joblib import Parallel, delayed
        return Parallel(n_jobs=2, backend="loky")(delayed(history)(s) for s in range(4))
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(history, range(4))

if __name__ == "__main__":
    expected = [history(seed) for seed in range(4)]
    assert runs_of_children(sys.argv[1]) == expected
    # The parent still works after its children.
    assert history(0) == expected[0]
    print("done")
"""


@pytest.mark.parametrize("method", [*multiprocessing.get_all_start_methods(), "loky"])
def test_children_finish_with_the_same_runs(method, tmp_path):
    if method == "loky":
        pytest.importorskip("joblib")
    script = tmp_path / "children.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), method],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


NESTED_FORK = """
import os, sys
import numpy as np
import mhfast as mh

X = np.random.default_rng(0).standard_normal((101, 10, 7))
model = mh.Classifier.gaussian(3, 10, 7, std=0.1, seed=0)
optimizer = mh.GradientDescent(0.1)
expected = mh.train(model, X, np.ones(101), steps=20, optimizer=optimizer, num_threads=2)

def child(depth):
    pid = os.fork()
    if pid == 0:
        run = mh.train(model, X, np.ones(101), steps=20, optimizer=optimizer, num_threads=2)
        failed = run != expected or (depth > 0 and child(depth - 1))
        os._exit(int(failed))
    return os.waitpid(pid, 0)[1]

print("done" if child(2) == 0 else "failed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_children_of_forked_children():
    done = subprocess.run(
        [sys.executable, "-c", NESTED_FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "done\n", done.stderr


def history(seed, num_threads=1, callback=None):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((53, 10, 7))
    model = mh.Classifier.gaussian(3, 10, 7, std=0.1, seed=seed)
    return mh.train(
        model, X, rng.choice([-1, 1], 53), steps=100, optimizer=mh.GradientDescent(0.1),
        record=("loss", "W"), num_threads=num_threads, callback=callback,
    )  # fmt: skip


@pytest.mark.parametrize("callback", [None, lambda *_: None])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_calls_from_several_threads_at_once(num_threads, callback):
    expected = [history(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(history, seed, num_threads, callback) for seed in range(8)]
        assert [future.result(timeout=60) for future in futures] == expected


def test_training_inside_a_callback():
    inner = []
    outer = history(1, 2, lambda k, _: inner.append(history(2, 2)) if k % 40 == 0 else None)
    assert outer == history(1)
    assert inner == [history(2)] * 3


def test_the_interpreter_runs_while_training():
    """The interpreter lock is released: another thread counts while a long call trains."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((2000, 10, 20)), rng.choice([-1, 1], 2000)
    model = mh.Classifier.zeros(16, 10, 20)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            mh.train, model, X, y, steps=20, optimizer=mh.GradientDescent(0.1), num_threads=1
        )
        turns = 0
        while not future.done():
            turns += 1
    # With the lock held for the whole call the loop would turn a few times at its two ends.
    assert turns > 1000
