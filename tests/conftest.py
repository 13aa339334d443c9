"""What the tests share: an instruction set or a plan forced for one test; what skips say."""

import re

import pytest

from mhfast import _core
from mhfast.models import problem

# What is not among the packages of ".[test]". A test that needs one of these is marked `peers`, or
# `slow`, so that it is among those that CI runs where they are installed.
OTHERS = (
    "jax", "flatbuffers", "distributed", "equinox", "flax", "lightning", "loky", "mlflow", "mpi4py",
    "numba", "optax", "optuna", "ray", "skorch", "tensorboard", "tensorboardX", "wandb", "xarray",
)  # fmt: skip
PEERS = {"torch": '"torch==2.13.0"', **{name: name for name in OTHERS}}


def _missing(report):
    """The package whose absence led to a skip, or None."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return None
    found = re.search(r"could not import '(\w+)|pip install (?:dask )?(\w+)", report.longrepr[2])
    return found and (found[1] or found[2])


def _tell_what_to_install(report, package):
    path, line, reason = report.longrepr
    if "pip install" in reason:
        return
    what = PEERS.get(package, '".[test]"')
    report.longrepr = (path, line, f"Skipped: needs {package}: pip install {what}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    package = _missing(report)
    if package is None:
        return
    _tell_what_to_install(report, package)
    if package in PEERS and not any(item.get_closest_marker(n) for n in ("peers", "slow")):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} needs {package}: expected the mark peers or slow"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report():
    report = (yield).get_result()
    package = _missing(report)
    if package is not None:
        _tell_what_to_install(report, package)


@pytest.fixture
def use_isa():
    """Force an instruction set; the active one comes back afterwards."""
    before = _core.active_isa()
    yield _core.select_isa
    _core.select_isa(before)


@pytest.fixture
def use_plan():
    """Force a plan by name; plans are chosen again afterwards."""
    yield _core.force_plan
    _core.force_plan("auto")


@pytest.fixture
def use_words(monkeypatch):
    """Look up tokens of few dimensions too, which would be faster as an array."""
    monkeypatch.setattr(problem, "words_pay", lambda *_: True)


@pytest.fixture
def use_keys():
    """Force the keys of linear attention, "tokens" or "triangle"; then they are chosen again."""
    yield _core.force_keys
    _core.force_keys("auto")
