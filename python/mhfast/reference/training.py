"""Training on all samples or on batches, with every optimizer of `mhfast.optimizers`.

Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
Attention" (TMLR 2024) train with plain gradient descent; normalized steps, Polyak's step and mirror
descent come from the work on the implicit bias of attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .attention import outputs
from .batches import batches
from .constraints import labels, project, project_scaled
from .gradients import Wrt, asked, value_and_grad
from .losses import Loss, counted_weights, loss_weights, margins, real_targets
from .model import Array, Model, Query, inputs
from .normalized import add_decay, groups, norm, normalized, scaled_gradients
from .optimizers import STEPS, At
from .projections import projected_in
from .runs import over_runs

RECORDS = ("loss", "accuracy", "margin", "grad_norm", "param_norm", "distance")
Parameters = dict[str, Array]
Samples = tuple[ArrayLike, ArrayLike, dict[str, Any]]  # X, y and the options of a loss


def train(
    model: Any, X: ArrayLike, y: ArrayLike, *, steps: int, optimizer: Any, **options: Any
) -> tuple[Model, dict[str, Array]]:
    """Take `steps` steps from `model`; options as in `value_and_grad`, lr a number or (R,).

    lr, its schedule, l2 and radius may be dicts by parameter: `of_parameter`.  `constraints` is a
    dict by parameter, see `reference.constraints`.

    Step k: g is the gradient of the loss in the parameters named by `wrt`, then

        g ← `project`(g + l2 θ),   g ← g min(1, clip / ‖g‖),
        g ← g / (‖g‖ + eps)   where it is normalized,
        θ ← the optimizer's step of θ and g, one of `STEPS`,   θ ← `projected`(θ),

    and fixed entries of θ as they were.

    With `batch`, g is the gradient of the loss of step k's batch among `batches`, with `order` and
    `seed`, an integer or (R,): (n / batch) Σ wℓ / Σ w, the first sum over the batch.

    With `average`, a step a, the history has W_average, ..., of each trained parameter: the mean of
    its θ_a, ..., θ_k, NaN before step a.

    Returns
    -------
    model : Model after the last step.
    history : dict of arrays (steps + 1,)
        Entry k belongs to θ_k, before step k + 1, and to all samples.  loss; accuracy, the weighted
        fraction of outputs (rows, for cross_entropy) whose margin is above 0; margin, the smallest
        one; both over rows of weight above 0.  grad_norm, of the loss with respect to the trained
        parameters; param_norm and distance (from the initial ones), of all parameters together.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=3, seed=0)
    >>> given = {"steps": 10, "optimizer": mh.Adam(0.01)}
    >>> exact = mh.reference.train(start, data.X, data.y, **given)
    >>> run = mh.train(start, data, **given)
    >>> bool(np.allclose(run.history["loss"], exact[1]["loss"]))
    True
    """
    lr = getattr(optimizer, "lr", 1.0)
    lr = dict(lr) if isinstance(lr, Mapping) else lr
    return _train(model, X, y, lr, steps=steps, optimizer=optimizer, **options)


@over_runs
def _train(
    model: Any,
    X: ArrayLike,
    y: ArrayLike,
    lr: Any,
    *,
    steps: int,
    optimizer: Any,
    loss: Loss = "logistic",
    wrt: Wrt = None,
    query: Query = None,
    weight: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    batch: int | None = None,
    order: str = "shuffle",
    seed: int = 0,
    constraints: Mapping[str, Any] | None = None,
    average: int | None = None,
) -> tuple[Model, dict[str, Array]]:
    model = start = Model.of(model)
    trained = asked(model, wrt, also=())
    held = {name: part for name, part in (constraints or {}).items() if name in trained}
    normalizes = getattr(optimizer, "normalized", "normalized" in optimizer.name)
    options: dict[str, Any] = {"loss": loss, "query": query, "weight": weight, "lengths": lengths}
    history: dict[str, list[Any]] = {name: [] for name in RECORDS}
    iterates: dict[str, list[Array]] = {name: [] for name in trained}
    kept = {
        name: [np.zeros_like(a)] * getattr(optimizer, "slots", 2)
        for name, a in model.parameters().items()
    }
    for k in range(steps + 1):
        value, g = value_and_grad(model, X, y, wrt=trained, **options)
        accuracy, margin = _accuracy_and_margin(model, X, y, **options)
        theta, origin = model.parameters(), start.parameters()
        distance = norm(theta[name] - origin[name] for name in theta)
        inside = {name: project(held[name], a) if name in held else a for name, a in g.items()}
        row = (value, accuracy, margin, norm(inside.values()), norm(theta.values()), distance)
        for name, number in zip(RECORDS, row, strict=True):
            history[name].append(number)
        for name in trained if average is not None else ():
            iterates[name].append(theta[name])
            of_mean = iterates[name][average:]
            averaged = np.mean(of_mean, axis=0) if of_mean else np.full_like(theta[name], np.nan)
            history.setdefault(f"{name}_average", []).append(averaged)
        if k == steps:
            break
        used: Samples = X, y, options
        share = 1.0
        if batch is not None:
            drawn = batches(len(np.asarray(X)), batch, 1, order=order, seed=int(seed), first=k)[0]
            used, share = _batch(model, X, y, options, drawn)
            value, g = value_and_grad(model, *used[:2], wrt=trained, **used[2])
            value, g = share * value, {name: share * array for name, array in g.items()}
        if normalizes:
            g = _unit_gradient(model, *used, trained, optimizer, share, held)
        else:
            g = {n: part + of_parameter(optimizer.l2, n, 0.0) * theta[n] for n, part in g.items()}
            g |= {name: project(held[name], g[name]) for name in held}
            shrink = min(1.0, optimizer.clip / max(norm(g.values()), np.finfo(float).tiny))
            g = {name: part * shrink for name, part in g.items()}
        length = norm(g.values())
        for name in trained:
            schedule = of_parameter(optimizer.schedule, name, None)
            factor = 1.0 if schedule is None else schedule[k]
            at = At(k, of_parameter(lr, name, None) * factor, value, length, factor)
            theta[name] = STEPS[optimizer.name](optimizer, theta[name], g[name], kept[name], at)
        theta |= projected(optimizer, {name: theta[name] for name in trained})
        for name, constraint in held.items():
            before = model.parameters()[name]
            theta[name] = np.where(labels(constraint, before.shape) < 0, before, theta[name])
        model = replace(model, **theta)
    return model, {name: np.array(values) for name, values in history.items()}


def of_parameter(setting: Any, name: str, default: Any) -> Any:
    """Return a setting of one parameter: its entry of a dict, or the common value."""
    return setting.get(name, default) if isinstance(setting, Mapping) else setting


def _batch(
    model: Model, X: ArrayLike, y: ArrayLike, options: dict[str, Any], drawn: Any
) -> tuple[Samples, float]:
    """Return the samples of a batch, and the loss of the batch over that of these samples alone."""
    part = dict(options)
    for name in ("query", "weight", "lengths"):
        if isinstance(part[name], np.ndarray):
            part[name] = part[name][drawn]
    data = inputs(model, X, options["query"], options["lengths"])
    F = outputs(model, X, query=options["query"], lengths=options["lengths"])
    counted = counted_weights(data, F, options["weight"], options["loss"])
    share = counted[drawn].sum() / counted.sum() * len(counted) / len(drawn)
    if share == 0.0:
        raise ValueError("batch: expected a sample of weight above 0 in every batch")
    return (np.asarray(X)[drawn], np.asarray(y)[drawn], part), float(share)


def _unit_gradient(
    model: Model,
    X: ArrayLike,
    y: ArrayLike,
    options: Any,
    wrt: Iterable[str],
    optimizer: Any,
    share: float,
    held: Mapping[str, Any],
) -> Parameters:
    """Return g / (‖g‖ + eps) after decay and clipping; for mirror descent g / its dual norm.

    g is `share` times the gradient.
    """
    theta = model.parameters()
    scaled = scaled_gradients(model, X, y, wrt=wrt, **options)
    scaled = {name: g._replace(log=g.log + math.log(share)) for name, g in scaled.items()}
    decay = {name: of_parameter(optimizer.l2, name, 0.0) for name in scaled}
    scaled = {
        name: add_decay(g, decay[name], theta[name]) if decay[name] > 0.0 else g
        for name, g in scaled.items()
    }
    for name, constraint in held.items():
        scaled[name] = project_scaled(constraint, scaled[name], theta[name].shape)
    if optimizer.name == "mirror_descent":
        unit = normalized(scaled, optimizer.by, order=optimizer.p / (optimizer.p - 1.0))
    else:
        unit = normalized(scaled, optimizer.by, optimizer.eps, optimizer.clip)
    return {name: part.reshape(theta[name].shape) for name, part in unit.items()}


def projected(optimizer: Any, theta: Parameters) -> Parameters:
    """Take parts with a norm above `radius` to the nearest point where it is not.

    For the sphere, scale all parts except zeros to it.
    """
    if optimizer.project is None:
        return theta
    heads = {name: np.array(a[None] if name == "prompt" else a) for name, a in theta.items()}
    parts = [(name, h) for name, array in heads.items() for h in range(len(array))]
    for group in groups(parts, optimizer.project_by):
        name, h = group[0]
        radius = of_parameter(optimizer.radius, name, None)
        if radius is None:
            continue
        if optimizer.project_norm != "fro":
            whole = heads[name] if optimizer.project_by == "tensor" else heads[name][h]
            whole[...] = projected_in(
                optimizer.project_norm, whole, radius, sphere=optimizer.project == "sphere"
            )
            continue
        length = norm(heads[name][h] for name, h in group)
        if length > radius or (optimizer.project == "sphere" and length > 0.0):
            for name, h in group:
                heads[name][h] *= radius / length
    return {name: array.reshape(theta[name].shape) for name, array in heads.items()}


def _accuracy_and_margin(
    model: Model, X: ArrayLike, y: ArrayLike, *, loss: Loss, query: Query, weight: Any, lengths: Any
) -> tuple[float, float]:
    data = inputs(model, X, query, lengths)
    F = outputs(model, X, query=query, lengths=lengths)
    margin = margins(F, real_targets(data, y), loss)
    loss_weight = np.broadcast_to(loss_weights(data, F, weight, loss), margin.shape)
    right = float((loss_weight * (margin > 0.0)).sum() / loss_weight.sum())
    return right, float(margin[loss_weight > 0.0].min(initial=math.inf))
