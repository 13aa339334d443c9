"""The C++ core.

Arrays are C-contiguous, aligned, in native byte order and of one real dtype, float32 or float64,
which the callers in this package ensure.

`parameters` is W, Q, K, U, V, A, B, prompt, None for those that a model does not have: a classifier
has U, a layer V; a factored W is Q and K, K None if it is tied, a factored V is A and B. `samples`
is X, query, y, weight, lengths. Without a query it is self-attention, or the prompt is the query if
there is one. y is (n,) for a classifier, (n, q, p) for a layer and int64 (n, q) for its classes;
weight (n,), for a layer also (n, q); lengths int64 (n,), and X is zero beyond them.

`runs` is 0 for none, else R: then every array may have a leading R or not. `causal`: row t of the
query side sees the keys 0 ... t. `row_map` maps logits to weights. `wrt` has bits, W 1, Q 2, K 4, U
8, V 16, A 32, B 64, prompt 128, X 256, query 512, embedding 1024. `threads` 0 is the default.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, TypedDict, overload

import numpy as np
import numpy.typing as npt

from ._arguments.values import Array
from .models.problem import CoreData, CoreGradients, CoreParameters
from .training.averages import CoreAverages
from .training.partition import CoreConstraint

State: TypeAlias = Sequence[tuple[Array, ...] | None]

# This class and those of the other names are enum.IntEnum, with members from the core's lists.
class LossName(int):
    __members__: ClassVar[dict[str, LossName]]
    @property
    def name(self) -> str: ...

class OwnLoss: ...

class PythonLoss(OwnLoss):
    def __init__(self, function: Callable[..., Any]) -> None: ...
    @property
    def error(self) -> BaseException | None: ...

class CompiledLoss(OwnLoss):
    def __init__(self, address: int, user_data: int, has_curvature: bool) -> None: ...
    @property
    def has_curvature(self) -> bool: ...

class Loss:
    @overload
    def __init__(self, name: LossName, parameter: float = 0.0) -> None: ...
    @overload
    def __init__(self, own: OwnLoss) -> None: ...
    @property
    def name(self) -> LossName: ...
    @property
    def parameter(self) -> float: ...
    @property
    def own(self) -> OwnLoss | None: ...

class RowMapName(int):
    __members__: ClassVar[dict[str, RowMapName]]
    @property
    def name(self) -> str: ...

class RowMap:
    def __init__(self, name: RowMapName, by_tokens: bool = False) -> None: ...
    @property
    def name(self) -> RowMapName: ...
    @property
    def by_tokens(self) -> bool: ...

class StopReason(int):
    __members__: ClassVar[dict[str, StopReason]]
    @property
    def name(self) -> str: ...

class Order(int):
    __members__: ClassVar[dict[str, Order]]
    @property
    def name(self) -> str: ...

class Scope(int):
    __members__: ClassVar[dict[str, Scope]]
    @property
    def name(self) -> str: ...

class Norm(int):
    __members__: ClassVar[dict[str, Norm]]
    @property
    def name(self) -> str: ...

class Polar(int):
    __members__: ClassVar[dict[str, Polar]]
    @property
    def name(self) -> str: ...

class BallNorm(int):
    __members__: ClassVar[dict[str, BallNorm]]
    @property
    def name(self) -> str: ...

class Projection(int):
    __members__: ClassVar[dict[str, Projection]]
    @property
    def name(self) -> str: ...

class Lists(TypedDict):
    parameters: dict[str, str]  # name: letters of the axes
    losses: dict[str, str]  # name: kind of targets
    loss_parameters: dict[str, tuple[str, float] | None]  # name: its parameter and the default
    row_maps: dict[str, bool | None]  # name: divides by the tokens; None: no choice
    quantities: dict[str, str]  # name: what it describes
    optimizers: dict[str, int]  # name: arrays kept of each parameter
    thresholds: tuple[str, ...]
    kernels: tuple[str, ...]

WORDS_OF_TOKEN: int

def lists() -> Lists: ...
def config() -> dict[str, object]: ...
def available_isas() -> list[str]: ...
def compiled_isas() -> list[str]: ...
def select_isa(name: str) -> None: ...
def force_plan(name: str) -> None: ...
def force_keys(name: str) -> None: ...
def active_isa() -> str: ...
def set_num_threads(k: int) -> None: ...
def get_num_threads() -> int: ...

# Of arrays of one length, bitwise: which of the different rows each is, and where each comes first;
# None if there are more than most, or some probe rows are all different (0: no such look).
def distinct_rows(
    arrays: Sequence[npt.NDArray[Any]], *, most: int, probe: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]] | None: ...

# Tokens (..., T, d) with zeros beyond the lengths (...) of samples; None if they have them.
def with_padding(
    tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[Any] | None: ...
def explain(
    *,
    n: int,
    T: int,
    q: int,
    d: int,
    H: int,
    p: int,
    identity_w: bool,
    identity_v: bool,
    shared_query: bool,
    words: int,
    rank: int,
    row_map: RowMap,
    causal: bool,
    runs: int,
    dtype_name: str,
) -> dict[str, object]: ...
def outputs(
    samples: CoreData,
    parameters: CoreParameters,
    *,
    runs: int,
    scale: float,
    causal: bool,
    row_map: RowMap,
    threads: int,
) -> Array: ...
def attention(
    samples: CoreData,
    parameters: CoreParameters,
    *,
    runs: int,
    scale: float,
    causal: bool,
    row_map: RowMap,
    threads: int,
) -> Array: ...

# The loss cotangent: y is the upstream gradient, weight None, and the value is 0.
def value_and_grad(
    samples: CoreData,
    parameters: CoreParameters,
    runs: int,
    scale: float,
    causal: bool,
    row_map: RowMap,
    loss: Loss,
    wrt: int,
    threads: int,
) -> tuple[float | npt.NDArray[np.float64], CoreGradients]: ...

# Of a range of g heads A X (n, q, g, d) and, if the derivative is asked for, scale D X, of a layer
# (n, q, p, g, d), in units of 2^unit with one for each run; heads of an identity are one. None if
# numbers are not finite, or so far from 1 that products might leave their range.
def tangent_rows(
    samples: CoreData,
    parameters: CoreParameters,
    runs: int,
    scale: float,
    causal: bool,
    row_map: RowMap,
    first_head: int,
    last_head: int,
    derivative: bool,
    threads: int,
) -> tuple[Array, Array | None, npt.NDArray[np.int64]] | None: ...

# Whether integers (n,) are in least ... most.
def all_within(x: npt.NDArray[np.int64], least: int, most: int) -> bool: ...

# K (rows, p, columns, p) becomes K alike, and where outputs are the same + of_rows, in place; both
# (rows, columns), None: 1 and 0.
def join_outputs(K: Array, alike: Array | None, of_rows: Array | None) -> None: ...

# tangent: as parameters, None for those that are zero.
def hvp(
    samples: CoreData,
    parameters: CoreParameters,
    tangent: tuple[Array | None, ...],
    *,
    runs: int,
    scale: float,
    causal: bool,
    row_map: RowMap,
    loss: Loss,
    wrt: int,
    threads: int,
) -> CoreGradients: ...

# The name of an optimizer's class, and its own fields except lr, by name.
class Rule:
    def __init__(self, type: str, **fields: Any) -> None: ...  # noqa: A002
    @property
    def type(self) -> str: ...
    @property
    def fields(self) -> dict[str, Any]: ...

# What differs by parameter is given for each of them, in their order; arrays only for those that
# are trained.
class Optimizer:
    @property
    def rule(self) -> Rule: ...
    @property
    def lr(self) -> tuple[npt.NDArray[np.float64] | None, ...]: ...
    @property
    def schedule(self) -> tuple[npt.NDArray[np.float64] | None, ...]: ...
    def __init__(
        self,
        *,
        rule: Rule,
        lr: tuple[npt.NDArray[np.float64] | None, ...],
        schedule: tuple[npt.NDArray[np.float64] | None, ...],
        l2: Sequence[float],
        clip: float,
        project: Projection | None,
        radius: Sequence[float],
        project_by: Scope,
        project_norm: BallNorm,
        project_power: float,
        since: npt.NDArray[np.int64],
    ) -> None: ...

class Record:
    def __init__(
        self,
        *,
        name: str,
        dataset: int,
        every: int,
        buffer: npt.NDArray[Any],
        sample_groups: npt.NDArray[np.int64] | None = None,
        token_groups: npt.NDArray[np.int64] | None = None,
    ) -> None: ...

class TrainingResult:
    @property
    def reached(self) -> int: ...
    @property
    def reasons(self) -> list[StopReason]: ...
    @property
    def rows(self) -> list[int]: ...
    @property
    def error(self) -> BaseException | None: ...

# What wrt names is overwritten in place, and has the run axis; so have state and buffers. stopped
# and reasons (max(R, 1),) say where and why runs were frozen, and are kept up to date.
# The query token, -1 for none; then a name and settings, for one run or for each.
CorePopulations: TypeAlias = tuple[int, Sequence[tuple[Any, ...]]]

# A function of an array and a step to the sums over processes and whether training ends; the number
# of this process, and of all; how much of an array is the function's; samples of each shard.
CoreProcesses: TypeAlias = tuple[
    Callable[[Float64, int], tuple[Float64, bool]], int, int, int, Sequence[int]
]

def train(
    *,
    samples: CoreData,
    parameters: CoreParameters,
    runs: int,
    scale: float,
    causal: bool,
    row_map: RowMap,
    loss: Loss,
    wrt: int,
    starts: CoreParameters,
    optimizer: Optimizer,
    state: State,
    batch: int,
    order: Order,
    seeds: Sequence[int],
    fresh: int,
    constraints: tuple[CoreConstraint, ...],
    stream: tuple[CoreData, Callable[[int], CoreData], CorePopulations | None] | None,
    first: int,
    last: int,
    records: Sequence[Record],
    tests: Sequence[CoreData],
    directions: Sequence[CoreParameters],
    averages: CoreAverages | None,
    coefficients: tuple[npt.NDArray[np.bool_] | npt.NDArray[np.float64], ...] | None,
    thresholds: dict[str, float],
    stopped: npt.NDArray[np.int64],
    reasons: npt.NDArray[np.int64],
    hook_every: int,
    hook: Callable[[int], bool] | None,
    on_progress: Callable[[int], None] | None,
    processes: CoreProcesses | None,
    threads: int,
) -> TrainingResult: ...

# Parameters and state (H, rows, columns) are stepped in place, gradients are overwritten; names are
# places among the parameters, and several parameters may have one.
def step(
    optimizer: Optimizer,
    *,
    names: Sequence[int],
    parameters: list[Array],
    gradients: list[Array],
    state: list[tuple[Array, ...]],
    constraints: Sequence[CoreConstraint],
    step: int,
    loss: float,
) -> None: ...

# Learning a layer: float64 only; rows are sample * T + query, None for all of them.
Float64: TypeAlias = npt.NDArray[np.float64]
Int64: TypeAlias = npt.NDArray[np.int64]

def fit_rows(
    X: Float64, Y: Float64, rows: Int64 | None, V_sum: Float64, support: int, threads: int
) -> tuple[Float64, Float64]: ...
def sum_equations(
    X: Float64,
    Y: Float64,
    rows: Int64 | None,
    V_sum: Float64,
    support: int,
    scale: float,
    threads: int,
) -> tuple[Float64, Float64]: ...
def fact_moment(
    X: Float64,
    rows: Int64,
    first: Int64,
    second: Int64,
    value: Float64,
    weight: Float64,
    threads: int,
) -> Float64: ...
def layer_equations(X: Float64, Y: Float64, W: Float64, V: Float64, threads: int) -> Float64: ...
def xla_handler(function: Callable[[str, tuple[Any, ...], tuple[Any, ...]], None]) -> object: ...
def exp(x: Array) -> Array: ...
def peak_flops(*, dtype_name: str, threads: int, seconds: float) -> float: ...
