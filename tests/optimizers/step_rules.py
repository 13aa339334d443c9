"""Training in NumPy on gradients of `mh.value_and_grad`, with the steps of the reference."""

import numpy as np

import mhfast as mh
from mhfast.models.problem import with_arrays
from mhfast.reference.optimizers import STEPS, At


def length(arrays):
    return np.sqrt(sum((np.asarray(a, np.float64) ** 2).sum() for a in arrays))


def groups(arrays, by):
    """Lists of views of what has a norm of its own. A prompt has no heads."""
    if by == "all":
        return [list(arrays.values())]
    if by == "tensor":
        return [[a] for a in arrays.values()]
    return [[part] for name, a in arrays.items() for part in ([a] if name == "prompt" else a)]


def project(o, theta):
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
        g = {name: getattr(gradients, name) + o.l2 * theta[name] for name in names}
        size = length(g.values())
        if size > o.clip:
            g = {name: part * (o.clip / size) for name, part in g.items()}
        if getattr(o, "normalized", isinstance(o, mh.NormalizedGradientDescent)):
            normalized(o, g)
        factor = 1.0 if o.schedule is None else o.schedule[k]
        at = At(k, getattr(o, "lr", 1.0) * factor, value, length(g.values()), factor)
        for name in names:
            slots = kept.setdefault(name, [np.zeros_like(theta[name])] * o.slots)
            theta[name] = STEPS[o.name](o, theta[name], g[name], slots, at)
        project(o, theta)
        model = with_arrays(model, {name: part.copy() for name, part in theta.items()})
    return model
