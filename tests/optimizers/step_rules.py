"""Training in NumPy on gradients of `mh.value_and_grad`, with the steps of the reference."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import mhfast as mh
from mhfast.models.problem import with_arrays
from mhfast.reference.optimizers import STEPS, At
from mhfast.reference.projections import projected_in


def length(arrays):
    return np.sqrt(sum((np.asarray(a, np.float64) ** 2).sum() for a in arrays))


def groups(arrays, by):
    """Lists of views of what has a norm of its own. A prompt has no heads."""
    if by == "all":
        return [list(arrays.values())]
    if by == "tensor":
        return [[a] for a in arrays.values()]
    return [[part] for name, a in arrays.items() for part in ([a] if name == "prompt" else a)]


def of_parameter(setting, name, default=None):
    return setting.get(name, default) if isinstance(setting, Mapping) else setting


def project(o, theta):
    if isinstance(o.radius, Mapping):
        for name, radius in o.radius.items():
            project(replace(o, radius=radius), {name: theta[name]})
        return
    if o.project_norm != "fro":
        for group in groups(theta, o.project_by):
            for part in group:
                part[...] = projected_in(
                    o.project_norm, part, o.radius, sphere=o.project == "sphere"
                )
        return
    for group in groups(theta, o.project_by) if o.project else []:
        size = length(group)
        if size > o.radius or (o.project == "sphere" and size > 0):
            for part in group:
                part *= o.radius / size


def normalized(o, g):
    """g divided by the norm of its group, in place; for mirror descent by the dual norm."""
    power = o.p / (o.p - 1) if isinstance(o, mh.MirrorDescent) else 2
    for group in groups(g, o.by):
        size = sum((abs(part) ** power).sum() for part in group) ** (1 / power)
        for part in group:
            part *= 0.0 if size == 0.0 else 1.0 / (size + getattr(o, "eps", 0.0))


def transcribed(optimizer, model, data, steps, wrt=None, loss="logistic"):
    """The model after `steps` steps."""
    o, kept = optimizer, {}
    names = tuple(model.parameters) if wrt is None else (wrt,) if isinstance(wrt, str) else wrt
    theta = {name: model.parameters[name].copy() for name in names}
    for k in range(steps):
        value, gradients = mh.value_and_grad(model, data, loss=loss, wrt=names)
        g = {
            name: getattr(gradients, name) + of_parameter(o.l2, name, 0.0) * theta[name]
            for name in names
        }
        size = length(g.values())
        if size > o.clip:
            g = {name: part * (o.clip / size) for name, part in g.items()}
        if getattr(o, "normalized", isinstance(o, mh.NormalizedGradientDescent)):
            normalized(o, g)
        size = length(g.values())
        for name in names:
            schedule = of_parameter(o.schedule, name)
            factor = 1.0 if schedule is None else schedule[k]
            lr = of_parameter(getattr(o, "lr", 1.0), name)
            at = At(k, lr * factor, value, size, factor)
            slots = kept.setdefault(name, [np.zeros_like(theta[name])] * o.slots)
            theta[name] = STEPS[o.name](o, theta[name], g[name], slots, at)
        project(o, theta)
        model = with_arrays(model, {name: part.copy() for name, part in theta.items()})
    return model
