"""Ctrl-C keeps the finished phases; memory is bounded whatever the number of examples."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from interruption import interrupted
from learner_instances import data

import mhfast as mh
from mhfast.learner import LearningInterrupted, learning

INSTANCE = (3000, 2, 7, 2)
NAMES = ["crude sum", "sculpting", "refined sum", "second sculpting", "net", "values", "refinement"]


@pytest.fixture(scope="module")
def whole():
    return mh.learn_layer(data(*INSTANCE), heads=2)


def interrupt(*_args, **_settings):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "finished"),
    [
        ("crude_sum", 0),
        ("certify", 1),
        ("one_hot_sum", 2),
        ("with_support", 3),
        ("search_net", 4),
        ("solve_values", 5),
        ("without_surplus", 6),
    ],
)
def test_finished_phases_are_kept(monkeypatch, whole, function, finished):
    monkeypatch.setattr(learning, function, interrupt)
    with pytest.raises(LearningInterrupted) as caught:
        mh.learn_layer(data(*INSTANCE), heads=2)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert f"after {finished} phases" in str(caught.value)
    found = caught.value.learning
    assert [phase.name for phase in found.phases] == NAMES[:finished]
    for phase, same in zip(found.phases, whole.phases[:finished], strict=True):
        assert phase.numbers == same.numbers
    assert not found.learnt
    assert found.verdict == "not learnt: interrupted by Ctrl-C"
    assert str(found).startswith(found.verdict)
    # Six phases make a layer.
    assert (found.layer is not None) == (finished == 6)
    if finished == 6:
        assert np.array_equal(found.layer.W, whole.unrefined.W)
        assert 0.0 < found.held_out < 1.0


def test_an_interruption_while_progress_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(learning, "search_net", interrupt)
    with pytest.raises(LearningInterrupted) as caught:
        mh.learn_layer(data(*INSTANCE), heads=2, progress=True)
    assert len(caught.value.learning.phases) == 4
    assert capsys.readouterr().err.endswith("\n")


def test_interruptions_pickle(monkeypatch):
    monkeypatch.setattr(learning, "search_net", interrupt)
    with pytest.raises(LearningInterrupted) as caught:
        mh.learn_layer(data(*INSTANCE), heads=2)
    same = pickle.loads(pickle.dumps(caught.value))
    assert [phase.name for phase in same.learning.phases] == NAMES[:4]


def test_mistakes_pass_through(monkeypatch):
    """Only Ctrl-C is an interruption."""

    def mistake(*_args, **_settings):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(learning, "search_net", mistake)
    with pytest.raises(RuntimeError, match="a mistake"):
        mh.learn_layer(data(*INSTANCE), heads=2)


# SciPy is imported before: CPython ends with SIGINT, even if the exception is caught, where a
# module that is being imported runs code from strings.  Learning takes several seconds.
CHILD = """
import time
import scipy.linalg, scipy.optimize
import mhfast as mh
from mhfast.learner import LearningInterrupted

data = mh.data.boolean_layer(800_000, 3, 8, 3, seed=0)
print("ready", flush=True)
try:
    mh.learn_layer(data, heads=3, num_threads=2)
except LearningInterrupted as error:
    print(time.time(), len(error.learning.phases), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is for POSIX")
@pytest.mark.parametrize("after", [0.8, 1.6], ids="after {} s".format)
def test_ctrl_c_ends_learning_soon(after):
    seconds, _ = interrupted(CHILD, after)
    # The core answers between portions, SciPy between its calls.
    assert seconds < 2.0


MILLION = """
import resource, sys
import numpy as np
import mhfast as mh

X, Y = (np.load(name, mmap_mode="r") for name in sys.argv[1:])
result = mh.learn_layer(X, Y, 2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(result.phases), result.verdict)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_memory_of_a_million_examples(tmp_path):
    n = 10**6
    layer = mh.Layer.gaussian(2, 6, 5, std=0.4, seed=0)
    rng = np.random.default_rng(0)
    files = [str(tmp_path / name) for name in ("X.npy", "Y.npy")]
    X, Y = (
        np.lib.format.open_memmap(file, "w+", np.float32, (n, 2, size))
        for file, size in zip(files, (6, 5), strict=True)
    )
    for begin in range(0, n, 100_000):
        part = rng.standard_normal((100_000, 2, 6))
        X[begin : begin + 100_000] = part
        Y[begin : begin + 100_000] = layer(X[begin : begin + 100_000].astype(np.float64))
    X.flush()
    Y.flush()
    done = subprocess.run(
        [sys.executable, "-c", MILLION, *files], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    peak, phases, *_ = done.stdout.split()
    assert int(phases) == 7
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(peak) * unit < 2 * 10**9
