"""Kinds of training, as lists to draw from: kinds of parameters, optimizers, projections, plans.

`tests/core/test_threads.py` compares their bits on several numbers of threads,
`tests/core/races.py` watches them with the thread sanitizer.
"""

import functools

import numpy as np
from lists import plain

import mhfast as mh
from mhfast.models.problem import with_arrays
from mhfast.optimizers import OPTIMIZERS as KINDS

MODELS = (mh.Classifier, mh.Layer)
PARAMETERS = (
    "dense", "low rank", "tied", "identity", "prompt", "prompt and factors", "prompt and identity",
    "token", "query", "value factors",
)  # fmt: skip
OPTIMIZERS = {
    "gradient descent": lambda **rest: mh.GradientDescent(0.1, **rest),
    "normalized by tensor": lambda **rest: mh.NormalizedGradientDescent(0.1, **rest),
    "normalized by head": lambda **rest: mh.NormalizedGradientDescent(0.1, by="head", **rest),
    "normalized as one": lambda **rest: mh.NormalizedGradientDescent(0.1, by="all", **rest),
    "Polyak": lambda **rest: mh.PolyakStep(max_lr=0.5, **rest),
    "momentum": lambda **rest: mh.Momentum(0.1, **rest),
    "Nesterov": lambda **rest: mh.Momentum(0.1, nesterov=True, **rest),
    "Adam": lambda **rest: mh.Adam(0.01, **rest),
    "mirror": lambda **rest: mh.MirrorDescent(0.05, p=3.0, **rest),
    "mirror normalized": lambda **rest: mh.MirrorDescent(0.05, p=3.0, normalized=True, **rest),
    "steepest in max": lambda **rest: mh.SteepestDescent(0.05, "max", 0.5, scaled=True, **rest),
    "steepest in l1": lambda **rest: mh.SteepestDescent(0.05, "l1", **rest),
    "steepest in fro": lambda **rest: mh.SteepestDescent(0.05, "fro", by="head", **rest),
    "spectral": lambda **rest: mh.SteepestDescent(0.05, "spectral", **rest),
    "Muon": lambda **rest: mh.SteepestDescent(
        0.05, "spectral", 0.9, True, polar="newton_schulz", **rest
    ),
}
OPTIMIZERS |= {
    kind.__name__: functools.partial(plain, kind)
    for kind in KINDS
    if not any(type(rule()) is kind for rule in OPTIMIZERS.values())
}
PROJECTIONS = (
    {},
    {"project": "ball", "radius": 1.5, "project_by": "tensor"},
    {"project": "sphere", "radius": 1.0, "project_by": "head"},
    {"project": "ball", "radius": 2.0, "project_by": "all"},
    {"project": "ball", "radius": 1.5, "project_norm": 1.0},
    {"project": "ball", "radius": 0.7, "project_by": "head", "project_norm": "spectral"},
    {"project": "ball", "radius": 0.9, "project_by": "head", "project_norm": "nuclear"},
)
PLANS = ("samples", "hybrid", "rows", "tiles", "auto")


def draw(kind, parameter, dtype, n, T, d, H, *, runs=None, size=0.3, seed=0):
    """A model of `kind` whose parameters are of kind `parameter`, and data for it.

    Prompts and external queries have 3 rows, a layer 4 outputs, factors rank 2; identities are W,
    and V where that leaves a parameter; value factors, of a layer, have rank 2; `runs` models are
    stacked.
    """
    rng = np.random.default_rng(seed)

    def new(*shape, factor=1.0):
        return (factor * rng.standard_normal(shape)).astype(dtype)

    def model():
        factors = {"low rank": 2, "prompt and factors": 2, "tied": 1}.get(parameter, 0)
        W = new(H, d, d, factor=size)
        if factors:
            Q, K = (new(H, d, 2, factor=size) for _ in range(2))
            W = mh.LowRank(Q, K if factors == 2 else None)
        if parameter.endswith("identity"):
            W = None
        rest = {"prompt": new(3, d)} if parameter.startswith("prompt") else {}
        if parameter == "token":
            rest["query"] = T - 1
        if kind is mh.Classifier:
            return mh.Classifier(W, new(H, rows, d), **rest)
        V = None if parameter == "prompt and identity" else new(H, d, 4)
        if parameter == "value factors":
            V = mh.ValueOutput(new(H, d, 2), new(H, 2, 4))
        return mh.Layer(W, V, **rest)

    rows = 1 if parameter == "token" else 3 if parameter.startswith(("prompt", "query")) else T
    outputs = d if parameter == "prompt and identity" else 4
    X = new(n, T, d)
    shape = (n,) if kind is mh.Classifier else (n, rows, outputs)
    y = rng.choice([-1.0, 1.0], shape).astype(dtype)
    query = {"query": new(n, 3, d)} if parameter == "query" else {}
    stacked = model() if runs is None else mh.stack([model() for _ in range(runs)])
    return stacked, mh.Dataset(X, y, **query)


def constrained(model, rule, rng):
    """Constraints that the rule can keep, one of a kind drawn for each parameter or none.

    With the model that starts in their subspace, and entries that projections may not move at 0.
    """
    spectral = getattr(rule, "norm", "") == "spectral" or rule.project_norm in (
        "spectral",
        "nuclear",
    )
    by_head = "head" in (getattr(rule, "by", ""), rule.project_by if rule.project else "")
    found, arrays = {}, {}
    for name, array in model.parameters.items():
        shape = array.shape[-(2 if name == "prompt" else 3) :]
        names = ["rows"]
        if name != "prompt":
            names += ["heads", ("heads", "rows")]
        if shape[-1] == shape[-2]:
            names += ["symmetric", ("symmetric", "heads"), ("rows", "symmetric")]
        mask = rng.random(shape) < 0.6
        of_head = rng.integers(-1, 4, shape[-2:])
        ties = np.broadcast_to(of_head, shape) if by_head else rng.integers(-1, 9, shape)
        arrays_only = [mask, ties, ("rows", mask)]
        kinds = names if spectral else [*names, *arrays_only]
        if getattr(rule, "norm", "") == "l1":
            kinds = [] if spectral else [mask]
        if not kinds or rng.random() < 0.25:
            continue
        kind = kinds[rng.integers(len(kinds))]
        fixed = mh.reference.labels(kind, shape) < 0
        if fixed.all():
            continue
        found[name] = kind
        if rule.project:
            arrays[name] = np.where(fixed, array.dtype.type(0), array)
    return mh.tied(with_arrays(model, arrays), found), found
