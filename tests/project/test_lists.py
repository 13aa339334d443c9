"""What the core lists is what Python, its types and the reference name."""

import dataclasses
import inspect
from typing import get_args

import mhfast as mh
from mhfast import _core
from mhfast._arguments import lists, losses, names
from mhfast.optimizers import OPTIMIZERS
from mhfast.reference.model import PARAMETERS


def test_losses():
    others = ("derivatives", "own")  # what the caller differentiates, in part or all
    known = {name for name, kind in lists.TARGETS.items() if kind not in others}
    assert set(get_args(names.LossName)) == known
    assert set(mh.reference.LOSSES) == known
    assert set(mh.Layer.losses) == known
    assert set(mh.Classifier.losses) == known - set(mh.reference.losses.OF_ROWS)


def test_parameters_of_losses():
    given = {name: parameter for name, parameter in lists.LOSS_PARAMETERS.items() if parameter}
    assert set(given) == set(losses.CLASSES)
    for name, kind in losses.CLASSES.items():
        (field,) = dataclasses.fields(kind)
        assert (field.name, field.default) == given[name]
        signature = inspect.signature(mh.reference.LOSSES[name])
        assert signature.parameters[field.name].default == field.default
        assert getattr(mh, kind.__name__) is kind


def test_row_maps():
    assert get_args(names.AttentionName) == tuple(lists.ROW_MAPS)
    of_entries = {name for name, by_tokens in lists.ROW_MAPS.items() if by_tokens is not None}
    assert set(mh.reference.row_maps.ENTRIES) == of_entries
    for name in of_entries:
        assert mh.reference.row_maps.ENTRIES[name].by_tokens is lists.ROW_MAPS[name]


def test_optimizers():
    assert {kind.name for kind in OPTIMIZERS} == set(lists.SLOTS) == set(mh.reference.STEPS)
    assert all(getattr(mh, kind.__name__) is kind for kind in OPTIMIZERS)


def test_parameters_quantities_and_thresholds():
    # An embedding is a parameter of a stack alone.
    assert (*PARAMETERS, "embedding") == lists.PARAMETERS
    assert set(get_args(names.Threshold)) == set(lists.THRESHOLDS)
    of_sets = {f"test_{name}" for name, of in lists.QUANTITIES.items() if of == "data set"}
    averages = {f"{name}_average" for name in lists.PARAMETERS}
    known = {*lists.QUANTITIES, *lists.PARAMETERS, *averages, *of_sets}
    assert set(get_args(names.RecordName)) == known


def test_every_kernel_has_a_name_of_its_own():
    kernels = _core.lists()["kernels"]
    assert len(set(kernels)) == len(kernels)
    assert {f"step_{name}" for name in lists.SLOTS} <= set(kernels)
