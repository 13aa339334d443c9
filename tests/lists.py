"""What the tests of losses and optimizers iterate over: all that there is, whoever added it."""

import dataclasses

import numpy as np

import mhfast as mh
from mhfast._arguments.lists import OF_OUTPUTS, OF_ROWS, TARGETS
from mhfast._arguments.losses import CLASSES, name_of
from mhfast.optimizers import OPTIMIZERS

WITH_PARAMETER = (
    mh.PolynomialTail(2.5), mh.Huber(0.4), mh.Quantile(0.8), mh.CrossEntropy(0.3)
)  # fmt: skip
assert {type(loss) for loss in WITH_PARAMETER} == set(CLASSES.values())

# By name, which stands for the default of a parameter, and with another value of it.
LOSSES = {
    mh.Classifier: (*OF_OUTPUTS, *(a for a in WITH_PARAMETER if a.name in OF_OUTPUTS)),
    mh.Layer: (*OF_OUTPUTS, *OF_ROWS, *WITH_PARAMETER),
}

# Of fields without a default.
NEEDED = {"lr": 0.02, "p": 3.0, "norm": "max"}


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
    kind = kind_of_targets(loss)
    if kind == "classes":
        return rng.integers(0, outputs, shape[:-1])
    if kind == "probabilities":
        return rng.dirichlet(np.ones(outputs), shape[:-1]).astype(dtype)
    signs = rng.choice([-1.0, 1.0], shape).astype(dtype)
    if kind == "signs":
        return signs
    reals = signs + rng.standard_normal(shape).astype(dtype)
    return np.abs(reals) if kind == "nonnegative" else reals


def kind_of_targets(loss):
    return TARGETS[name_of(loss)]


def within_domain(loss, model, X):
    """Model and tokens, of entries at least 0 if the loss is one of outputs above 0."""
    if kind_of_targets(loss) != "nonnegative":
        return model, X
    readout = "U" if isinstance(model, mh.Classifier) else "V"
    changes = {name: np.abs(a) for name, a in model.parameters.items() if name == readout}
    return dataclasses.replace(model, **changes), np.abs(X)
