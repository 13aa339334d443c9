"""What there is, by name, as the lists of the core have it: parameters, losses, quantities."""

from __future__ import annotations

from .. import _core

_LISTS = _core.lists()

PARAMETERS = tuple(_LISTS["parameters"])
"""The parameters in their order; a model has some of them."""

LETTERS = {**_LISTS["parameters"], "X": "n T d", "query": "n q d"}
"""The axes of each array, and of its gradient, without the run axis."""

AXES = {name: len(letters.split()) for name, letters in LETTERS.items()}
"""How many these are."""

BITS = {name: 1 << j for j, name in enumerate(AXES)}
"""How the core is told the names of `wrt`."""

LOSSES = dict(_core.Loss.__members__)
"""What the core takes for a loss; among them "cotangent", whose targets are derivatives."""

TARGETS = _LISTS["losses"]
"""The targets of each loss: "signs" -1 and 1, "reals", "classes" of a row, or "derivatives"."""

OF_OUTPUTS = tuple(name for name, kind in TARGETS.items() if kind in ("signs", "reals"))
"""The losses of single outputs, which every model may have."""

OF_ROWS = tuple(name for name, kind in TARGETS.items() if kind == "classes")
"""The losses of a row's outputs together."""

QUANTITIES = _LISTS["quantities"]
"""What each quantity is of: any "data set", the "gradient", the "parameters", the "attention"."""

THRESHOLDS = _LISTS["thresholds"]
"""The quantities at which training can stop."""

SLOTS = _LISTS["optimizers"]
"""How many arrays of a parameter's shape each optimizer carries from step to step, by name."""
