"""Training inside the span of the tokens, where that has far fewer dimensions than the tokens have.

The gradients by W, by its factors, by U and by V are sums of outer products of tokens. With B
(d, r) an orthonormal basis of all tokens of the training data, whatever the loss, steps along
gradients and their sums give

    W_k = W_0 + B (S_k - S_0) Bᵀ,    S_0 = Bᵀ W_0 B,

where S_k are the key-query matrices of a model of r-dimensional tokens, trained on X B from S_0 on;
in the same way U_k = U_0 + (Ũ_k - Ũ_0) Bᵀ, and B from the left for V and the factors. The gradient
by a prompt is a sum of rows x W_kᵀ, which stay in the span if that holds the prompt and x W_0ᵀ of
every token. An identity in the place of W is one inside too, Bᵀ I B = I. Loss, outputs and norms of
gradients equal those of the whole model. So do the steps of every optimizer that uses gradients
only linearly and through norms; coordinatewise optimizers such as Adam cannot be treated this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments.lists import AXES
from .._arguments.values import Array, frozen, same_fields
from ..models import Model
from ..models.problem import (
    READOUTS,
    CoreParameters,
    CoreProblem,
    CoreTokens,
    CoreWords,
    with_arrays,
)
from ..models.problem import named as by_name
from ..optimizers import GradientDescent, Momentum, NormalizedGradientDescent, PolyakStep, StepRule

MIN_SIZE = 1 << 18
"""Least size of the parameters of a run, in numbers, a factored W counted as the product; below it
a step is fast in any dimension."""

MIN_RATIO = 2
"""Least number of dimensions of a token per distinct token."""

BASIS_COST = 4.0
"""How many times longer an operation of the basis takes than one of a step: measured on tokens 240
by 512, which take 4.4 ms where 4 steps outside, of two factored heads, take 1.2."""

STEPS = 100
"""Steps that have to save the cost of the basis. Not those of a call: a run that is made by several
calls has the bits of one made by a single call."""

FIRST = 8
"""Coordinates of tokens that are compared first."""

MAX_TOKENS = 1 << 24
"""Largest size of X or the queries, in numbers; beyond it finding distinct tokens takes too
long."""

WITHIN = 1e-12
"""Relative size of the part of a token that may lie outside a span that contains it: rounding of
the basis."""

LEFT = 0.01
"""Part of the square of the initial parameters' norm that the part outside must be for it to be
the difference of two squares."""

ROUNDING = 16.0
"""Size, in units of the last place, of the part of the initial parameters outside that counts as
zero."""

_EQUIVARIANT = (GradientDescent, NormalizedGradientDescent, PolyakStep, Momentum)
_LEFT = ("W", "Q", "K", "V", "A")
_RIGHT = ("W", "U", "prompt", "query")


@dataclass(frozen=True, eq=False, repr=False)
class Subspace:
    """The span of the tokens of a run, and the run inside it.

    Attributes
    ----------
    basis : float64 array (d, r) or (R, d, r)
        B, orthonormal columns.
    start, model : Classifier or Layer
        The parameters inside, of dimension r, at step 0 and at the step reached.
    state : dict of tuples of arrays
        The state of the optimizer, inside.
    """

    basis: npt.NDArray[np.float64]
    start: Model
    model: Model
    state: dict[str, tuple[Array, ...]]

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    def problem(self, problem: CoreProblem) -> CoreProblem:
        """Return the data inside: tokens and queries in coordinates of the span."""
        X, Z, y, weight, lengths = problem.data
        Z = None if Z is None else self._tokens_inside(Z)
        return problem._replace(data=(self._tokens_inside(X), Z, y, weight, lengths))

    def __getitem__(self, which: Any) -> Subspace:
        """Select one run, or several."""
        return Subspace(
            frozen(self.basis[which]) if self.basis.ndim == 3 else self.basis,
            self.start[which],
            self.model[which],
            {name: tuple(slot[which] for slot in slots) for name, slots in self.state.items()},
        )

    def whole(
        self, start: Model, names: Iterable[str], parameters: CoreParameters
    ) -> dict[str, Array]:
        """Compute the parameters in `names` of the whole model from those inside.

        Parameters
        ----------
        start : Classifier or Layer
            The whole model at step 0.
        names : names of parameters
        parameters : tuple of the core
            The parameters inside, at some step.
        """
        now = by_name(parameters)
        arrays: dict[str, Array] = {}
        for name in names:
            array = self._outside(name, now[name] - self.start.parameters[name])
            array += start.parameters[name]
            array.flags.writeable = False
            arrays[name] = array
        return arrays

    def whole_state(self, state: Mapping[str, tuple[Array, ...]]) -> dict[str, tuple[Array, ...]]:
        """Return the state of the optimizer for the whole model, which lies in the span."""
        return {
            name: tuple(self._outside(name, slot) for slot in slots)
            for name, slots in state.items()
        }

    def rest(self, start: Model) -> npt.NDArray[np.float64]:
        """Return the norm of the part of the initial parameters outside the span, or (R,) norms.

        Its square is ‖θ_0‖² - ‖S_0‖²; where little of that is left, it is the sum of the squares
        of θ_0 - B S_0 Bᵀ.
        """
        whole: Any = sum(_squares(name, array) for name, array in start.parameters.items())
        inside = sum(_squares(name, array) for name, array in self.start.parameters.items())
        if np.all(whole - inside >= LEFT * whole):
            return np.asarray(np.sqrt(whole - inside))
        total: Any = 0.0
        for name, array in start.parameters.items():
            left = array - self._outside(name, self.start.parameters[name], np.float64)
            total = total + _squares(name, left)
        return np.asarray(np.sqrt(total))

    def holds(self, start: Model) -> bool:
        """Return whether the initial parameters lie in the span: nothing outside matters then."""
        size: Any = 0.0
        for name, array in start.parameters.items():
            size = size + _squares(name, array)
        unit = ROUNDING * float(np.finfo(start.dtype).eps)
        return bool(np.all(self.rest(start) <= unit * np.sqrt(size)))

    def cosine(
        self, start: Model, direction: CoreParameters
    ) -> Callable[[CoreParameters], npt.NDArray[np.float64]]:
        """Return the cosine of the whole parameters and a direction, of the parameters inside.

        With E = S_k - S_0 and D the direction, ⟨θ_k, D⟩ = ⟨θ_0, D⟩ + ⟨E, Bᵀ D B⟩ and
        ‖θ_k‖² = ‖θ_0‖² + ⟨E, S_k + S_0⟩, over the tensors that the direction has. Where either
        norm is zero the cosine is zero.

        Parameters
        ----------
        start : Classifier or Layer
            The whole model at step 0.
        direction : tuple of the core
            With the run axis or without.
        """
        along = by_name(direction)
        unit = _largest(along)
        parts = {name: _over(part, unit, AXES[name]) for name, part in along.items()}
        length = np.sqrt(_inner(parts, parts))
        parts_inside = {
            name: _over(self._inside(name, part), unit, AXES[name]) for name, part in along.items()
        }
        begin = {name: start.parameters[name] for name in along}
        first_scale = _largest(begin)
        first = {name: _over(array, first_scale, AXES[name]) for name, array in begin.items()}
        first_dot, first_square = _inner(first, parts), _inner(first, first)

        def value(parameters: CoreParameters) -> npt.NDArray[np.float64]:
            now = {name: by_name(parameters)[name] for name in along}
            scale = np.maximum(first_scale, _largest(now))
            moved, twice_the_mean = {}, {}
            for name in along:
                s = _over(now[name], scale, AXES[name])
                old = _over(self.start.parameters[name], scale, AXES[name])
                moved[name], twice_the_mean[name] = s - old, s + old
            part = first_scale / scale
            dot = part * first_dot + _inner(moved, parts_inside)
            square = part * part * first_square + _inner(moved, twice_the_mean)
            sizes = np.sqrt(np.maximum(square, 0.0)) * length
            return np.asarray(np.divide(dot, sizes, out=np.zeros_like(sizes), where=sizes > 0))

        return value

    def spans(self, tokens: npt.NDArray[np.float64]) -> bool:
        """Return whether tokens (tokens, d) or (R, tokens, d) are in the span."""
        left = tokens - tokens @ self.basis @ np.swapaxes(self.basis, -1, -2)
        sizes = np.linalg.norm(tokens, axis=-1)
        return bool(np.all(np.linalg.norm(left, axis=-1) <= WITHIN * sizes))

    def _tokens_inside(self, tokens: CoreTokens) -> CoreTokens:
        if isinstance(tokens, CoreWords):
            embedding = self._inside("query", tokens.embedding[..., None, :, :])[..., 0, :, :]
            return tokens._replace(embedding=np.ascontiguousarray(embedding))
        return self._inside("query", tokens)

    def _inside(self, name: str, array: Array) -> Array:
        """Project an array into the span; tokens in float64, large products in their dtype."""
        B = _beside(self.basis, AXES[name])
        if name in _LEFT:
            array = np.swapaxes(B.astype(array.dtype, copy=False), -1, -2) @ array
        if name in _LEFT and name in _RIGHT:
            array = array @ B.astype(array.dtype, copy=False)
        elif name in _RIGHT:
            rows = array.astype(np.float64, copy=False)
            if B.ndim == 2:  # one product, not one for each of many matrices of few rows
                inside = rows.reshape(-1, rows.shape[-1]) @ B
                inside = inside.reshape(*rows.shape[:-1], B.shape[-1])
            else:
                inside = rows @ B
            array = inside.astype(array.dtype, copy=False)
        return np.ascontiguousarray(array)

    def _outside(self, name: str, array: Array, dtype: npt.DTypeLike | None = None) -> Array:
        dtype = array.dtype if dtype is None else dtype
        B = _beside(self.basis.astype(dtype, copy=False), AXES[name])
        if name in _LEFT:
            array = B @ array
        if name in _RIGHT:
            array = array @ np.swapaxes(B, -1, -2)
        return array


def enter(run: Any, problem: CoreProblem) -> Subspace | None:
    """Return the span in which a run trains on these data; None if it trains the whole model.

    A run that is already in the span of its data stays there. A run at step 0 enters it if the
    parameters are large, there are few tokens compared with their dimensions, and `STEPS` steps are
    shorter inside by more than it takes to enter.
    """
    optimizer: StepRule = run.optimizer
    if not isinstance(optimizer, _EQUIVARIANT) or optimizer.l2 != 0.0 or optimizer.project:
        return None
    if not run.constraints.keys().isdisjoint(run.wrt):
        return None  # they are about coordinates of the whole space
    model: Model = run.start
    if run.subspace is None and (run.step > 0 or _size(model) < MIN_SIZE):
        return None
    if not set(READOUTS) & set(model.parameters):
        return None  # outputs are tokens, whose coordinates the loss and the targets are about
    for side in problem.data[:2]:
        if isinstance(side, CoreWords):
            return None  # the cost of a sample does not grow with the dimension of tokens
        if side is not None and side.size > MAX_TOKENS:
            return None
    if run.subspace is None and _has_many_products(problem, model, run.wrt):
        return None
    tokens = _tokens(problem, model, run.wrt)
    if run.subspace is not None:
        entered: Subspace = run.subspace
        return entered if entered.spans(tokens) else None

    def pays(distinct: int) -> bool:
        few = MIN_RATIO * distinct <= tokens.shape[-1]
        return few and _pays(run, problem, distinct)

    if not pays(_at_least(tokens)) or not np.isfinite(tokens).all():
        return None
    tokens = _distinct(tokens)
    if not pays(tokens.shape[-2]):
        return None
    # Tokens that depend on others, zeros included, get arbitrary further directions, which is
    # harmless.
    basis = np.linalg.qr(np.swapaxes(tokens, -1, -2))[0]
    inside = Subspace(frozen(basis), model, model, {})
    arrays = {name: inside._inside(name, array) for name, array in model.parameters.items()}
    if not all(np.isfinite(array).all() for array in arrays.values()):
        return None
    if isinstance(model.query, np.ndarray):
        arrays["query"] = inside._inside("query", model.query)
    for array in arrays.values():
        array.flags.writeable = False
    start = with_arrays(model, arrays)
    return replace(inside, start=start, model=start)


def _distinct(tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return every distinct token of each run once, padded with zeros if other runs have more."""
    runs = []
    for rows in tokens.reshape(-1, *tokens.shape[-2:]):
        places = {row.tobytes(): j for j, row in enumerate(rows)}
        runs.append(rows[list(places.values())])
    found = np.zeros((len(runs), max(map(len, runs)), tokens.shape[-1]))
    for rows, distinct in zip(found, runs, strict=True):
        rows[: len(distinct)] = distinct
    return found.reshape(*tokens.shape[:-2], *found.shape[1:])


def _at_least(tokens: Array) -> int:
    """Return a number of tokens that differ, found in a moment: in their first coordinates."""
    return int(_distinct(tokens[..., :FIRST].astype(np.float64)).shape[-2])


def _has_many_products(problem: CoreProblem, start: Model, names: Iterable[str]) -> bool:
    """Whether a run has too many of the products x W_0ᵀ that `_tokens` would compute.

    Products of distinct tokens with a W that is not zero are distinct, but for chance.
    """
    X, W = problem.data[0], start.parameters.get("W")
    if start.prompt is None or "prompt" not in names or W is None or W.ndim > 3 or X.ndim > 3:
        return False
    assert not isinstance(X, CoreWords)
    tokens, heads = X.reshape(-1, X.shape[-1]), np.count_nonzero(W.any(axis=(1, 2)))
    if MIN_RATIO * _at_least(tokens) * (1 + heads) > X.shape[-1]:
        return True
    distinct = _distinct(tokens.astype(np.float64, copy=False))
    return bool(MIN_RATIO * len(distinct) * (1 + heads) > X.shape[-1])


def _tokens(problem: CoreProblem, start: Model, names: Iterable[str]) -> npt.NDArray[np.float64]:
    """Return rows (rows, d) or (R, rows, d) whose span the gradients by `names` never leave."""
    X, Z = problem.data[:2]
    assert not isinstance(X, CoreWords)
    assert not isinstance(Z, CoreWords)
    spanning = [X]
    if Z is not None and problem.token is None:
        spanning.append(Z)
    if start.prompt is not None:
        spanning.append(start.prompt[..., None, :, :])
        if "prompt" in names and "Q" in start.parameters:
            spanning.append(np.swapaxes(start.parameters["Q"], -1, -2))
        elif "prompt" in names and "W" in start.parameters:
            keys = X.reshape(*X.shape[:-3], 1, -1, X.shape[-1])
            spanning.append(keys @ np.swapaxes(start.parameters["W"], -1, -2))
    lead = max((side.shape[:-3] for side in spanning), key=len)
    rows = [
        np.broadcast_to(side, (*lead, *side.shape[-3:])).reshape(*lead, -1, side.shape[-1])
        for side in spanning
    ]
    return np.concatenate(rows, axis=-2, dtype=np.float64)


def _pays(run: Any, problem: CoreProblem, r: int) -> bool:
    """Whether `STEPS` steps in the span of r tokens save more operations than it takes.

    A step multiplies each query row with W or its factors and with the keys, three times as often
    as the outputs do; entering factors the tokens, and multiplies W with the basis.
    """
    model: Model = run.start
    X, Z = problem.data[:2]
    assert not isinstance(X, CoreWords)
    n, T, d = X.shape[-3:]
    n = n if run.batches is None else min(n, run.batches.size)
    rows = n * (T if Z is None else Z.shape[-2])
    rank = model.Q.shape[-1] if model.Q is not None else 0
    identity = not {"W", "Q"} & set(model.parameters)

    def of_step(dim: int) -> float:
        columns = 0 if identity else 4 * rank or dim
        of_products = (1 if model.prompt is not None else rows) * columns * dim
        return float(6.0 * model.heads * (of_products + 2 * rows * T * dim))

    of_basis = 4.0 * d * r * r
    of_W = 0.0 if identity else 2.0 * model.heads * r * d * (2 * rank or d)
    return bool(STEPS * (of_step(d) - of_step(r)) > BASIS_COST * of_basis + of_W)


def _size(model: Model) -> int:
    """Return the size of the parameters of one run, in numbers, of factors that of the product.

    Their own size would say how long the update of a step takes, and the rest of it grows with the
    dimension of the tokens as it does with a full W.
    """
    product = model.heads * model.dim**2 if model.Q is not None else 0
    return product + sum(
        math.prod(array.shape[-AXES[name] :])
        for name, array in model.parameters.items()
        if name not in ("Q", "K")
    )


def _squares(name: str, array: Array) -> Array:
    """Return the sum of the squares of a parameter, or (R,) of them."""
    total: Array = np.square(array, dtype=np.float64).sum(axis=tuple(range(-AXES[name], 0)))
    return total


def _inner(a: Mapping[str, Array], b: Mapping[str, Array]) -> Any:
    """Return the inner product of arrays of parameters, or (R,) of them."""
    total: Any = 0.0
    for name, array in a.items():
        axes = "abc"[: AXES[name]]
        total = total + np.einsum(f"...{axes},...{axes}->...", array, b[name])
    return total


def _largest(arrays: Mapping[str, Array]) -> Any:
    """Return the largest absolute value of all arrays, or (R,) of them; 1 where all are zero."""
    found: Any = 0.0
    for name, array in arrays.items():
        axes = tuple(range(-AXES[name], 0))
        found = np.maximum(found, np.maximum(array.max(axis=axes), -array.min(axis=axes)))
    return np.where(found > 0, found, 1.0)


def _over(array: Array, unit: Any, axes: int) -> Array:
    """Return an array, or that of each run, in float64 and divided by a number."""
    quotient: Array = np.divide(
        array, np.expand_dims(unit, tuple(range(-axes, 0))), dtype=np.float64
    )
    return quotient


def _beside(basis: Array, axes: int) -> Array:
    """Return the basis with axes of length 1 inserted between the run axis and the matrix."""
    return basis[:, None] if basis.ndim == 3 and axes == 3 else basis
