"""Names of parameters, losses, row maps, quantities and optimizers, from the lists of the core."""

from __future__ import annotations

from .. import _core

_LISTS = _core.lists()

PARAMETERS = tuple(_LISTS["parameters"])
"""The parameters in their order; a model has some of them."""

LETTERS = {**_LISTS["parameters"], "X": "n T d", "query": "n q d"}
"""The axes of each array, and of its gradient, without the run axis."""

AXES = {name: len(letters.split()) for name, letters in LETTERS.items()}
"""The number of axes of each array, without the run axis."""

BITS = {name: 1 << j for j, name in enumerate(AXES)}
"""The bit that stands for each name of `wrt` in the argument of the core."""

LOSS_PARAMETERS = _LISTS["loss_parameters"]
"""Name and default of the parameter of each loss; None for a loss without one."""

LOSSES = {
    name: _core.Loss(member, (LOSS_PARAMETERS[name] or ("", 0.0))[1])
    for name, member in _core.LossName.__members__.items()
}
"""The object that the core takes for each loss, with the default of its parameter; among them
"cotangent", whose targets are derivatives, and "own", which has a function."""

TARGETS = _LISTS["losses"]
"""The targets of each loss: "signs" -1 and 1, "reals", "nonnegative" numbers, "classes" of a row,
their "probabilities", "derivatives", or what the "own" function takes."""

OF_ROWS = tuple(name for name, kind in TARGETS.items() if kind in ("classes", "probabilities"))
"""The losses of all outputs of a row together."""

OF_CLASSES = tuple(name for name, kind in TARGETS.items() if kind == "classes")
"""The losses whose target is a class."""

OF_OUTPUTS = tuple(
    name
    for name, kind in TARGETS.items()
    if name not in OF_ROWS and kind not in ("derivatives", "own")
)
"""The losses of single outputs, which every model may have."""

ROW_MAPS = _LISTS["row_maps"]
"""Every row map and whether it divides by the tokens by default; None where that is not an option,
because rows sum to at most one."""

QUANTITIES = _LISTS["quantities"]
"""What each quantity is of: any "data set", the "gradient", the "parameters", the "attention"."""

THRESHOLDS = _LISTS["thresholds"]
"""The quantities at which training can stop."""

SLOTS = _LISTS["optimizers"]
"""How many arrays of a parameter's shape each optimizer carries from step to step, by name."""
