"""Memory: what a call needs beyond its arguments and results, and sizes beyond 32-bit indices."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mhfast import _core
from mhfast._arguments.lists import LOSSES

OPTIONS = {"runs": 0, "scale": 1.0, "causal": False, "threads": 0}
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


# What `setup` makes of a model and its targets.
MODELS = {
    "classifier": "parameters = W, None, None, normal(H, T, d), None, None; y = sign(n)",
    "layer": "parameters = W, None, None, None, normal(H, d, 2), None; y = sign(n, T, 2)",
}
PROGRAM = """
    import numpy as np
    from mhfast import _core
    from mhfast._arguments.lists import LOSSES
    options = dict(runs=0, scale=1.0, causal=False, threads=0)
    size, T, d, H = {sizes}
    def setup(size):
        n, T = {shape}
        rng = np.random.default_rng(0)
        def normal(*shape):
            return rng.standard_normal(shape, dtype=np.float32) / d
        def sign(*shape):
            return np.where(rng.random(shape, dtype=np.float32) < 0.5, np.float32(-1), 1)
        W = normal(H, d, d)
        {model}
        return (normal(n, T, d), None, y.astype(np.float32), None, None), parameters
    def work(data, parameters):
        wrt = sum(1 << j for j, array in enumerate(parameters) if array is not None)
        _core.value_and_grad(data, parameters, **options, loss=LOSSES["logistic"], wrt=wrt)
"""
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")


@needs_linux
@pytest.mark.parametrize("model", MODELS)
def test_scratch_does_not_grow_with_the_number_of_samples(model):
    growth = peak_growth(
        PROGRAM.format(sizes="20000, 32, 8, 16", shape="size, 32", model=MODELS[model])
    )
    packed = 20000 * 32 * 8 * 4
    assert growth <= packed + SCRATCH


@needs_linux
@pytest.mark.parametrize("model", MODELS)
def test_nothing_of_the_size_of_the_weights_is_kept(model):
    growth = peak_growth(
        PROGRAM.format(sizes="6000, 0, 4, 3", shape="1, size", model=MODELS[model])
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
    parameters = (W, None, None, U, None, None)

    def outputs(X, query):
        return _core.outputs((X, query, None, None, None), parameters, **OPTIONS)

    def gradients(X, query, y):
        data = (X, query, y, None, None)
        _, found = _core.value_and_grad(
            data, parameters, **OPTIONS, loss=LOSSES["linear"], wrt=1 + 8
        )
        return found[0], found[3]

    end = X[-5:].copy(), query[-5:].copy()
    tail = outputs(*end)
    assert np.all(tail != 0)
    np.testing.assert_array_equal(outputs(X, query)[-5:], tail)
    # All other samples are zero and have no gradient; sums are of float32 numbers.
    pairs = zip(gradients(X, query, y), gradients(*end, y[-5:].copy()), strict=True)
    for result, expected in pairs:
        error = np.abs(result * (n / 5) - expected).max() / np.abs(expected).max()
        assert error < 1e-5
