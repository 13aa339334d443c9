"""Trainings side by side that several tests share, and when two of them count as the same."""

import numpy as np

import mhfast as mh

# Alone and side by side may be computed by different plans, which round sums differently; tens of
# steps amplify that by about ten.
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}
R, n, T, d, H = 3, 7, 4, 5, 2


def draw(dtype, *shape, seed=0):
    return (0.5 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def starts(dtype=np.float64, query=None):
    rows = T if query is None else 1
    return mh.Classifier(
        draw(dtype, R, H, d, d), draw(dtype, R, H, rows, d, seed=1), query, scale=0.7
    )


def samples(dtype=np.float64, runs=None, size=n, seed=2):
    lead = () if runs is None else (runs,)
    X = 2 * draw(dtype, *lead, size, T, d, seed=seed)
    y = np.random.default_rng(seed).choice([-1, 1], (*lead, size))
    return mh.Dataset(X, y)


def one_data_set(data, r):
    """The data of run r."""
    return data if data.X.ndim == 3 else mh.Dataset(data.X[r], data.y[r])


def close(a, b, tolerance):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    # NaN is what a run that turned non-finite may have recorded.
    scale = max(1e-3, np.nanmax(abs(b), initial=0.0))
    assert np.array_equal(np.isfinite(a), np.isfinite(b))
    good = np.isfinite(b)
    assert not good.any() or abs(a - b)[good].max() <= tolerance * scale


def same_run(a, b, tolerance):
    """Two runs agree: settings and steps exactly, numbers within the tolerance."""
    for name in ("step", "reason", "stopped", "optimizer", "loss", "wrt", "record", "stop"):
        assert getattr(a, name) == getattr(b, name), name
    for x, y in ((a.model, b.model), (a.start, b.start)):
        assert x.runs is y.runs is None
        for name in x.parameters:
            close(x.parameters[name], y.parameters[name], tolerance)
    assert a.history.keys() == b.history.keys() == a.steps.keys()
    for name in a.history:
        assert a.steps[name].tolist() == b.steps[name].tolist()
        close(a.history[name], b.history[name], tolerance)
    assert a.state.keys() == b.state.keys()
    for name in a.state:
        for x, y in zip(a.state[name], b.state[name], strict=True):
            close(x, y, tolerance)
