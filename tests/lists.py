"""What the tests of losses and optimizers iterate over: all that there is, whoever added it."""

import dataclasses

import numpy as np

import mhfast as mh
from mhfast._arguments.lists import OF_OUTPUTS, OF_ROWS, TARGETS
from mhfast.optimizers import OPTIMIZERS

LOSSES = {mh.Classifier: OF_OUTPUTS, mh.Layer: (*OF_OUTPUTS, *OF_ROWS)}

# Of fields without a default.
NEEDED = {"lr": 0.02, "p": 3.0}


def plain(kind, **fields):
    """An optimizer of the kind with what it must have."""
    needed = {f.name: NEEDED[f.name] for f in dataclasses.fields(kind) if f.name in NEEDED}
    return kind(**needed | fields)


def with_every(optimizers):
    """The optimizers, and a plain one of each kind that is not among them."""
    kinds = {type(optimizer) for optimizer in optimizers}
    return [*optimizers, *(plain(kind) for kind in OPTIMIZERS if kind not in kinds)]


def targets(loss, shape, rng, dtype=np.float64, outputs=None):
    """Targets of the kind that the loss takes; `outputs` is p where these may be classes."""
    kind = TARGETS[loss]
    if kind == "classes":
        return rng.integers(0, outputs, shape[:-1])
    signs = rng.choice([-1.0, 1.0], shape).astype(dtype)
    if kind == "reals":
        signs += rng.standard_normal(shape).astype(dtype)
    return signs
