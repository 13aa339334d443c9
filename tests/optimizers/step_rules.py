"""Every optimizer of mhfast in NumPy, about ten lines each, on gradients of `mh.value_and_grad`.

A rule gets the optimizer, `at` with the step k, its step size lr, the loss and what the rule
remembers, and θ and g, dicts of arrays by parameter. It changes θ in place.
"""

from types import SimpleNamespace

import numpy as np

import mhfast as mh
from mhfast.models.problem import with_arrays


def length(arrays):
    return np.sqrt(sum((np.asarray(a, np.float64) ** 2).sum() for a in arrays))


def groups(arrays, by):
    """Lists of views of what has a norm of its own. A prompt has no heads."""
    if by == "all":
        return [list(arrays.values())]
    if by == "tensor":
        return [[a] for a in arrays.values()]
    return [[part] for name, a in arrays.items() for part in ([a] if name == "prompt" else a)]


def gradient_descent(_, at, theta, g):
    for name in theta:
        theta[name] -= at.lr * g[name]


def normalized(o, at, theta, g):
    for group in groups(g, o.by):
        size = length(group)
        for part in group:
            part *= 0.0 if size == 0.0 else 1.0 / (size + o.eps)
    gradient_descent(o, at, theta, g)


def polyak(o, at, theta, g):
    size = length(g.values())
    excess = max(at.loss - o.target, 0.0)
    at.lr *= min(o.max_lr, o.factor * excess / size**2)
    gradient_descent(o, at, theta, g)


def momentum(o, at, theta, g):
    for name in theta:
        at.memory[name] = v = o.beta * at.memory.get(name, 0.0) + g[name]
        theta[name] -= at.lr * (g[name] + o.beta * v if o.nesterov else v)


def adam(o, at, theta, g):
    for name in theta:
        m, v = at.memory.get(name, (0.0, 0.0))
        m = o.beta1 * m + (1 - o.beta1) * g[name]
        v = o.beta2 * v + (1 - o.beta2) * g[name] ** 2
        at.memory[name] = m, v
        m, v = m / (1 - o.beta1 ** (at.k + 1)), v / (1 - o.beta2 ** (at.k + 1))
        theta[name] *= 1 - at.lr * o.weight_decay
        size = np.sqrt(v) + o.eps
        theta[name] -= np.where(size == 0, 0.0, at.lr * m / np.where(size == 0, 1.0, size))


def mirror(o, at, theta, g):
    dual = o.p / (o.p - 1)
    for group in groups(g, o.by) if o.normalized else []:
        size = sum((abs(part) ** dual).sum() for part in group) ** (1 / dual)
        for part in group:
            part *= 0.0 if size == 0.0 else 1.0 / size
    for name in theta:
        s = np.sign(theta[name]) * abs(theta[name]) ** (o.p - 1) - at.lr * g[name]
        theta[name][...] = np.sign(s) * abs(s) ** (1 / (o.p - 1))


RULES = {
    mh.GradientDescent: gradient_descent,
    mh.NormalizedGradientDescent: normalized,
    mh.PolyakStep: polyak,
    mh.Momentum: momentum,
    mh.Adam: adam,
    mh.MirrorDescent: mirror,
}


def project(o, theta):
    for group in groups(theta, o.project_by) if o.project else []:
        size = length(group)
        if size > o.radius or (o.project == "sphere" and size > 0):
            for part in group:
                part *= o.radius / size


def transcribed(optimizer, model, data, steps, wrt=None, loss="logistic"):
    """The model after `steps` steps."""
    o, memory = optimizer, {}
    names = tuple(model.parameters) if wrt is None else (wrt,) if isinstance(wrt, str) else wrt
    theta = {name: model.parameters[name].copy() for name in names}
    for k in range(steps):
        value, gradients = mh.value_and_grad(model, data, loss=loss, wrt=names)
        g = {name: getattr(gradients, name) + o.l2 * theta[name] for name in names}
        size = length(g.values())
        if size > o.clip:
            g = {name: part * (o.clip / size) for name, part in g.items()}
        lr = getattr(o, "lr", 1.0) * (1.0 if o.schedule is None else o.schedule[k])
        at = SimpleNamespace(k=k, lr=lr, loss=value, memory=memory)
        RULES[type(o)](o, at, theta, g)
        project(o, theta)
        model = with_arrays(model, {name: part.copy() for name, part in theta.items()})
    return model
