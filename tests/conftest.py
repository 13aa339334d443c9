"""What the tests share: forcing an instruction set and a plan for one test."""

import pytest

from mhfast import _core


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
