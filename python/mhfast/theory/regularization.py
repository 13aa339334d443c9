"""The regularization path: minimizers of the loss over balls of growing radius."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import AXES
from .._arguments.losses import WITH_KINKS, Loss, name_of
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..gradients import Gradients
from ..models import Classifier, LowRank, Model, stack
from ..models import problem as arguments
from .alignment import alignment
from .inputs import softmax_only
from .projected import Descent, Point
from .separation import TokenSVM, token_svm
from .token_optimality import optimal_tokens


@dataclass(frozen=True, eq=False)
class RegularizationPath:
    """Stationary points of the loss over balls, one for each of K radii.

    With a run axis every array of K entries gains a leading R.

    Attributes
    ----------
    radii : float64 array (K,)
    models : tuple of K models
        The point found in each ball, with all other parameters as in the start.
    losses : array (K,)
    norms : array (K,)
        The norm of the trained parameter; below the radius the loss has a stationary point inside.
    stationarity : array (K,)
        ‖P(θ - R g/‖g‖) - θ‖ / R, with g the gradient and P the projection on the ball of radius R:
        0 exactly at stationary points on the boundary, at most 2.
    grad_norms : array (K,)
        ‖g‖_F, which is to be small for a point inside.
    converged : bool array (K,)
        Whether the stationarity, or inside the ball R ‖g‖ / L, is at most the tolerance.
    steps : int64 array (K,)
        Projected gradient steps taken.
    branches : int64 array (K,)
        Which of the starts led there.
    alignment : array (K, H) or None
        Cosine to `solution`, by head or row of the prompt; NaN where that does not separate.
    solution : TokenSVM or None
        The limit that the theory predicts.
    wrt : str
        The trained parameter.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> data = mh.Dataset(rng.standard_normal((3, 3, 6)), [1.0, -1.0, 1.0])
    >>> start = mh.Classifier(np.zeros((1, 6, 6)), rng.standard_normal((1, 1, 6)), query=-1)
    >>> path = mh.theory.regularization_path(data, [1.0, 10.0], start=start)
    >>> path.converged.tolist(), bool(np.allclose(path.norms, [1.0, 10.0]))
    ([True, True], True)
    >>> [round(float(mh.norm(direction)), 6) for direction in path.directions]
    [1.0, 1.0]
    """

    radii: Array
    models: tuple[Any, ...]
    losses: Array
    norms: Array
    stationarity: Array
    grad_norms: Array
    converged: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64]
    branches: npt.NDArray[np.int64]
    alignment: Array | None
    solution: TokenSVM | None
    wrt: str

    @property
    def directions(self) -> tuple[Gradients, ...]:
        """The trained parameter at each radius, divided by its Frobenius norm."""
        found = []
        for model in self.models:
            value = model.parameters[self.wrt]
            axes = tuple(range(-AXES[self.wrt], 0))
            length = np.sqrt(np.square(value).sum(axis=axes, keepdims=True))
            found.append(Gradients(**{self.wrt: value / np.where(length > 0.0, length, 1.0)}))
        return tuple(found)


def regularization_path(
    data: Dataset,
    radii: Sequence[float] | npt.NDArray[np.floating[Any]],
    *,
    start: Model | None = None,
    loss: Loss = "logistic",
    wrt: str = "W",
    norm: str = "fro",
    best: npt.ArrayLike | None = None,
    starts: int = 1,
    seed: int = 0,
    steps: int = 20_000,
    tolerance: float = 1e-6,
    num_threads: int | None = None,
) -> RegularizationPath:
    """Minimise the loss over ‖W‖ ≤ R for increasing R, each time from the previous minimizer.

        W_R = argmin L(W)   subject to   ‖W‖ ≤ R.

    Theory: with a fixed readout and optimal tokens that can be separated, W_R / R tends to the
    direction of `token_svm` for the optimal tokens as R grows.

    Parameters
    ----------
    data : Dataset
        With a run axis, R paths are followed side by side.
    radii : sequence of K floats
        Positive and increasing.
    start : Classifier or Layer, optional
        What is not trained (readout, query, scale, ...), and where the trained parameter begins;
        zero is natural.  By default a classifier with one head of W = 0, the readout
        ``data.truth["readout"]``, and the query of the data or else the last token.
    loss : str, or a loss with a parameter
        As in `mhfast.train`, with a continuous derivative: neither "hinge" nor "quantile", whose
        minimizers may lie at kinks, where gradients do not vanish.
    wrt : {"W", "prompt"}
        The parameter that is optimized; W must be dense.
    norm : {"fro", "nuclear"}
        The Frobenius norm over all heads, or the sum of the singular values of all heads; a
        prompt has the Frobenius norm only.
    best : integers (n,) or (n, q), optional
        The tokens whose `token_svm` the path is compared with.  By default, for a classifier with
        one head, the globally optimal ones (`optimal_tokens`); otherwise there is no comparison.
    starts : int
        How many paths to follow: the first from `start`, others from Gaussian directions at the
        first radius.  At each radius the point of the smallest loss is kept.
    seed : int
        Seed of these directions.
    steps : int
        The most steps at each radius.
    tolerance : float
        The stationarity to be reached.
    num_threads : int, optional
        Threads, as in `mhfast.train`.

    Returns
    -------
    RegularizationPath

    Raises
    ------
    TypeError
        An argument is of the wrong kind.
    ValueError
        A shape or a value does not fit.
    ImportError
        The comparison in the nuclear norm needs cvxpy, which is not installed.
    RuntimeError
        Clarabel found no solution.

    Notes
    -----
    L is not convex in W.  What is returned are stationary points, with how stationary they are;
    they need not be global minimizers, of which the theory speaks.  Several `starts` make a better
    one likelier but prove nothing.

    Projected gradient descent by `mhfast.train`, with normalized gradients, which stay accurate
    where attention is saturated and the loss no longer changes: the step size grows while the loss
    or the stationarity falls, and is halved where neither does.  About as many steps are needed as
    the radius is large.

    References
    ----------
    Tarzanagh, Li, Thrampoulidis, Oymak, "Transformers as Support Vector Machines" (2023), where the
    regularization path is defined and its limit is proved, in both norms.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> data = mh.Dataset(rng.standard_normal((3, 3, 6)), [1.0, -1.0, 1.0])
    >>> start = mh.Classifier(np.zeros((1, 6, 6)), rng.standard_normal((1, 1, 6)), query=-1)
    >>> path = mh.theory.regularization_path(data, [1.0, 10.0, 100.0], start=start)
    >>> path.alignment[:, 0].round(2)  # the minimizers turn towards the separation
    array([0.96, 1.  , 1.  ])
    """
    checks.instance(data, Dataset, "data")
    sizes = _radii(radii)
    if wrt not in ("W", "prompt"):
        raise ValueError(f"wrt: expected 'W' or 'prompt', got {wrt!r}")
    if norm not in (("fro", "nuclear") if wrt == "W" else ("fro",)):
        choices = "'fro' or 'nuclear'" if wrt == "W" else "'fro' for a prompt"
        raise ValueError(f"norm: expected {choices}, got {norm!r}")
    model = _default_start(data) if start is None else start
    _check_start(model, wrt)
    if name_of(arguments.loss(model, loss, data.y)) in (*WITH_KINKS, "own"):
        raise ValueError(f"loss: expected one with a continuous derivative, got {loss!r}")
    checks.count(starts, "starts")
    data = _with_query(model, data)
    if data.runs is not None and model.runs is None:
        model = stack([model] * data.runs)
    descent = Descent(data, loss, wrt, norm, checks.count(steps, "steps"), tolerance, num_threads)
    paths = [
        _follow(descent, _begun(model, wrt, norm, sizes[0], seed, branch), sizes)
        for branch in range(starts)
    ]
    chosen = np.array([[point.losses for point in path] for path in paths]).argmin(axis=0)
    points = [_chosen([p[k] for p in paths], chosen[k], wrt) for k in range(len(sizes))]
    solution = _solution(model, data, wrt, norm, best)
    models = tuple(point.model for point in points)
    aligned = None if solution is None else _aligned(models, solution)
    runs = model.runs is not None

    def together(name: str) -> Any:
        values = np.array([getattr(point, name) for point in points])  # (K, R)
        return values.T if runs else values[:, 0]

    return RegularizationPath(
        sizes, models, together("losses"), together("norms"), together("stationarity"),
        together("grad_norms"), together("converged"), together("steps"),
        chosen.T if runs else chosen[:, 0], aligned, solution, wrt,
    )  # fmt: skip


def _follow(descent: Descent, model: Model, radii: Array) -> list[Point]:
    """Return the stationary points of the balls, each from the one before."""
    points: list[Point] = []
    lr = np.full(model.runs or 1, radii[0] / 2.0)
    for k, radius in enumerate(radii):
        if points:
            model = descent.moved_out(points[-1].model, radii[k - 1], radius)
        point, lr = descent.descend(model, radius, lr)
        points.append(point)
    return points


def _radii(radii: Any) -> Array:
    sizes = np.asarray(radii, dtype=np.float64)
    if sizes.ndim != 1 or not sizes.size:
        raise ValueError(f"radii: expected a sequence of numbers, got shape {sizes.shape}")
    if not (np.isfinite(sizes).all() and sizes[0] > 0.0 and (np.diff(sizes) > 0.0).all()):
        raise ValueError(f"radii: expected increasing numbers above 0, got {sizes}")
    return sizes


def _default_start(data: Dataset) -> Classifier:
    readout = (data.truth or {}).get("readout")
    if readout is None:
        raise ValueError("start: expected a model for data without a readout in truth, got None")
    U = np.asarray(readout, data.dtype)[..., None, None, :]
    W = np.zeros((1, data.dim, data.dim), data.dtype)
    return Classifier(W, U, query=-1 if data.query is None else None)


def _check_start(model: object, wrt: str) -> None:
    if not isinstance(model, Model):
        raise TypeError(f"start: expected a Classifier or a Layer, got {type(model).__name__}")
    if isinstance(model.W, LowRank):
        raise TypeError("start: expected a dense W, got factors")
    if wrt == "W" and model.W is None:
        raise TypeError("start: expected a W to train, got None, an identity")
    if wrt == "prompt" and model.prompt is None:
        raise ValueError("start: expected a model with a prompt, got one without")


def _with_query(model: Model, data: Dataset) -> Dataset:
    """Return data that have the model's external query."""
    if isinstance(model.query, np.ndarray) and data.query is None:
        return replace(data, query=model.query)
    return data


def _begun(model: Model, wrt: str, norm: str, radius: float, seed: int, branch: int) -> Model:
    """Return the model from which a path begins, random except for the first."""
    if branch == 0:
        return model
    value = model.parameters[wrt]
    axes = tuple(range(-AXES[wrt], 0))
    drawn = np.random.default_rng([seed, branch]).standard_normal(value.shape[-AXES[wrt] :])
    drawn = np.broadcast_to(drawn, value.shape)
    if norm == "nuclear":
        length = np.linalg.svd(drawn, compute_uv=False).sum(axis=(-2, -1))[..., None, None, None]
    else:
        length = np.sqrt(np.square(drawn).sum(axis=axes, keepdims=True))
    scaled = (drawn * (radius / length)).astype(value.dtype)
    return arguments.with_arrays(model, {wrt: scaled})


def _chosen(branches: list[Point], which: npt.NDArray[np.int64], wrt: str) -> Point:
    """Return for each run the point of its branch."""
    if len(branches) == 1:
        return branches[0]
    runs = np.arange(len(which))

    def pick(name: str) -> Any:
        return np.array([getattr(point, name) for point in branches])[which, runs]

    first = branches[0].model
    if first.runs is None:
        model = branches[which[0]].model
    else:
        values = np.array([point.model.parameters[wrt] for point in branches])[which, runs]
        model = arguments.with_arrays(first, {wrt: values})
    return Point(model, *(pick(n) for n in Point.numbers))


def _solution(
    model: Model, data: Dataset, wrt: str, norm: str, best: npt.ArrayLike | None
) -> TokenSVM | None:
    query = model.query if isinstance(model.query, int) else None
    settings: dict[str, Any] = {"wrt": wrt, "query": query, "causal": model.causal}
    if wrt == "prompt":
        settings["query"] = None
    if model.attention != "softmax":
        if best is not None:
            softmax_only(model, "start")
        return None
    if best is None:
        if not isinstance(model, Classifier) or model.heads != 1:
            return None
        if wrt == "prompt" and model.U.shape[-2] != 1:
            return None
        parts = [data] if data.runs is None else [data.run(r) for r in range(data.runs)]
        readouts = model.U if model.U.ndim == 4 else model.U[None]
        found = [
            optimal_tokens(part, readouts[min(r, len(readouts) - 1), 0], **settings)
            for r, part in enumerate(parts)
        ]
        best = found[0] if data.runs is None else np.array(found)
    if wrt == "prompt" and model.W is not None:
        W = np.asarray(model.W)
        if W.ndim == 4 or len(W) != 1:
            return None
        settings["W"] = W[0]
    return token_svm(data, best, norm="nuclear" if norm == "nuclear" else "fro", **settings)


def _aligned(models: tuple[Any, ...], solution: TokenSVM) -> Array:
    cosines = np.array([alignment(m, solution) * math.copysign(1.0, m.scale) for m in models])
    separable = np.asarray(solution.separable)
    if cosines.ndim == 3:
        cosines = np.moveaxis(cosines, 0, 1)  # (R, K, H)
    separable = separable.reshape(-1, *[1] * (cosines.ndim - 1)) if separable.ndim else separable
    aligned: Array = np.where(separable, cosines, np.nan)
    return aligned
