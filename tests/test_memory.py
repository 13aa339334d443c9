"""Memory: what a call needs beyond its arguments and results, and sizes beyond 32-bit indices."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mhfast import _core

MIB = 2**20
SCRATCH = 64 * MIB  # promised for any number of samples


def peak_growth(program):
    """Bytes by which a fresh process grows in `work` beyond its size after `setup(size)`."""
    measure = """
        import resource
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        work(*setup(2))  # libraries, threads
        state = setup(size)
        before = peak()
        work(*state)
        print(peak() - before)
    """
    code = textwrap.dedent(program) + textwrap.dedent(measure)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_scratch_does_not_grow_with_the_number_of_samples():
    growth = peak_growth(
        """
        import numpy as np
        from mhfast import _core
        size = 20000
        def setup(n):
            rng = np.random.default_rng(0)
            X = rng.standard_normal((n, 32, 8), dtype=np.float32)
            W = rng.standard_normal((16, 8, 8), dtype=np.float32) / 8
            U = rng.standard_normal((16, 32, 8), dtype=np.float32)
            y = np.where(rng.random(n) < 0.5, -1, 1).astype(np.float32)
            return X, y, W, U
        def work(X, y, W, U):
            _core.value_and_grad(X, None, y, None, W, U, 1.0, "logistic", True, True, 0)
        """
    )
    packed = 20000 * 32 * 8 * 4
    assert growth <= packed + SCRATCH


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_nothing_of_the_size_of_the_weights_is_kept():
    growth = peak_growth(
        """
        import numpy as np
        from mhfast import _core
        size = 6000
        def setup(tokens):
            rng = np.random.default_rng(0)
            X = rng.standard_normal((1, tokens, 4), dtype=np.float32)
            W = rng.standard_normal((3, 4, 4), dtype=np.float32) / 4
            U = rng.standard_normal((3, tokens, 4), dtype=np.float32)
            return X, np.ones(1, np.float32), W, U
        def work(X, y, W, U):
            _core.value_and_grad(X, None, y, None, W, U, 1.0, "logistic", True, True, 0)
        """
    )
    weights = 3 * 6000 * 6000 * 4
    assert growth < weights / 8


def available_memory():
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="needs Linux")
def test_more_than_two_to_the_31_numbers():
    tokens, dim = 8, 64
    n = 2**31 // (tokens * dim) + 3
    if available_memory() < 1.5 * n * tokens * dim * 4:
        pytest.skip("needs 13 GB of free memory")
    rng = np.random.default_rng(0)
    X = np.zeros((n, tokens, dim), dtype=np.float32)
    X[-5:] = rng.standard_normal((5, tokens, dim))
    query = np.ascontiguousarray(X[:, :1])
    W = (rng.standard_normal((1, dim, dim)) / dim).astype(np.float32)
    U = rng.standard_normal((1, 1, dim)).astype(np.float32)
    y = np.ones(n, dtype=np.float32)
    assert X.size > 2**31
    tail = _core.outputs(np.ascontiguousarray(X[-5:]), query[-5:].copy(), W, U, 1.0, 0)
    assert np.all(tail != 0)
    np.testing.assert_array_equal(_core.outputs(X, query, W, U, 1.0, 0)[-5:], tail)
    # All other samples are zero and have no gradient; sums are of float32 numbers.
    _, gW, gU = _core.value_and_grad(X, query, y, None, W, U, 1.0, "linear", True, True, 0)
    ones = np.ones(5, np.float32)
    _, eW, eU = _core.value_and_grad(
        X[-5:].copy(), query[-5:].copy(), ones, None, W, U, 1.0, "linear", True, True, 0
    )
    for result, expected in ((gW, eW), (gU, eU)):
        error = np.abs(result * (n / 5) - expected).max() / np.abs(expected).max()
        assert error < 1e-5
