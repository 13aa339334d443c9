"""Memory: what a call needs beyond its arguments and results, and sizes beyond 32-bit indices."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core
from mhfast._arguments.lists import LOSSES, PARAMETERS

SOFTMAX = _core.RowMap(_core.RowMapName.softmax)
OPTIONS = {"runs": 0, "scale": 1.0, "causal": False, "row_map": SOFTMAX, "threads": 0}
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
    "classifier": "given = {'W': W, 'U': normal(H, T, d)}; y = sign(n)",
    "layer": "given = {'W': W, 'V': normal(H, d, 2)}; y = sign(n, T, 2)",
}
PROGRAM = """
    import numpy as np
    from mhfast import _core
    from mhfast._arguments.lists import LOSSES, PARAMETERS
    softmax = _core.RowMap(_core.RowMapName.softmax)
    options = dict(runs=0, scale=1.0, causal=False, row_map=softmax, threads=0)
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
        parameters = tuple(map(given.get, PARAMETERS))
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


@pytest.mark.verdict
@pytest.mark.skipif(sys.platform != "linux", reason="faults of a thread are counted on Linux")
def test_the_workspace_of_a_wide_model_is_kept():
    """A second call touches no new pages for its partial gradients, 2 H d^2 numbers or more."""
    import resource  # not on Windows

    def faults():
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    n, tokens, dim, heads = 600, 4, 512, 2  # with fewer, chunks would have no gradient by W
    random = np.random.default_rng(0)
    X, y = random.standard_normal((n, tokens, dim)), random.choice([-1.0, 1.0], n)
    model = mh.Classifier.gaussian(heads, tokens, dim, std=0.01, seed=0)
    mh.value_and_grad(model, X, y, num_threads=1)
    gradient_bytes = mh.explain(model, mh.as_dataset(X, y))["gradient_bytes"]
    assert gradient_bytes > 3 * model.W.nbytes  # what is not to be allotted again, by far
    before = faults()
    mh.value_and_grad(model, X, y, num_threads=1)
    # The gradients that the caller gets, and as much again for the rest.
    assert (faults() - before) * resource.getpagesize() <= 2 * model.W.nbytes


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
    parameters = tuple({"W": W, "U": U}.get(name) for name in PARAMETERS)

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


MAPPED = """
    import resource, sys
    import numpy as np
    import mhfast as mh

    def in_use():
        status = open("/proc/self/status").read()
        return 1024 * int(status.split("VmData:")[1].split()[0])

    X = np.memmap(sys.argv[1], np.float32, "r").reshape(-1, 64, 60)
    y = np.where(np.arange(len(X)) % 3 == 0, np.float32(1), np.float32(-1))
    model = mh.Classifier.gaussian(2, 1, 60, std=0.1, seed=0, query=0, dtype=np.float32)
    def train(X, y):
        return mh.train(
            model, X, y, steps=20, optimizer=mh.GradientDescent(0.1), batch=32, num_threads=2,
            record={"loss": 10, "grad_norm": 20},
        )
    train(X[:99], y[:99])  # libraries, threads
    limit = in_use() + int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if sys.argv[2] == "copy":
        X = X.copy()
    print(train(X, y).history["loss"][-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits private memory")
def test_mapped_data_go_by_in_batches(tmp_path):
    """Training may take a fifth of what X does in private memory, which a copy cannot."""
    size = 160 * MIB
    block = np.random.default_rng(0).standard_normal(64 * 60 * 273, dtype=np.float32)
    with open(tmp_path / "X", "wb") as file:
        for _ in range(size // block.nbytes):
            file.write(block)

    def trained(way):
        code = textwrap.dedent(MAPPED)
        return subprocess.run(
            [sys.executable, "-c", code, tmp_path / "X", way, str(size // 5)],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    done = trained("mapped")
    assert done.returncode == 0, done.stderr
    assert np.isfinite(float(done.stdout))
    assert "MemoryError" in trained("copy").stderr
