"""The C++ core.

Arrays are C-contiguous, aligned, in native byte order and of one real dtype, float32 or float64,
which the callers in this package see to.

`parameters` is W, Q, K, U, V, prompt, None for what a model has not: a classifier has U, a layer V;
a factored W is Q and K, K None if it is tied. `data` is X, Z, y, weight, lengths. Z None means
self-attention, or the prompt if there is one. y is (n,) for a classifier, (n, q, p) for a layer and
int64 (n, q) for its "cross_entropy"; weight (n,), for a layer also (n, q); lengths int64 (n,), and
X is zero beyond them.

`runs` is 0 for none, else R: then every array may have a leading R or not. `causal`: row t of the
query side sees the keys 0 ... t. `wrt` has bits, W 1, Q 2, K 4, U 8, V 16, prompt 32, X 64,
query 128. `threads` 0 is the default.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._arguments.values import Array
from .models.problem import CoreData, CoreGradients, CoreParameters

State: TypeAlias = Sequence[tuple[Array | None, Array | None] | None]

def config() -> dict[str, object]: ...
def available_isas() -> list[str]: ...
def compiled_isas() -> list[str]: ...
def select_isa(name: str) -> None: ...
def force_plan(name: str) -> None: ...
def active_isa() -> str: ...
def set_num_threads(k: int) -> None: ...
def get_num_threads() -> int: ...
def explain(
    n: int, T: int, q: int, d: int, H: int, p: int, runs: int, dtype_name: str
) -> dict[str, object]: ...
def outputs(
    data: CoreData,
    parameters: CoreParameters,
    runs: int,
    scale: float,
    causal: bool,
    threads: int,
) -> Array: ...
def attention(
    data: CoreData,
    parameters: CoreParameters,
    runs: int,
    scale: float,
    causal: bool,
    threads: int,
) -> Array: ...

# loss "cotangent": y is the upstream gradient, weight None, and the value is 0.
def value_and_grad(
    data: CoreData,
    parameters: CoreParameters,
    runs: int,
    scale: float,
    causal: bool,
    loss: str,
    wrt: int,
    threads: int,
) -> tuple[float | npt.NDArray[np.float64], CoreGradients]: ...

# tangent: as parameters, None for what does not move.
def hvp(
    data: CoreData,
    parameters: CoreParameters,
    tangent: tuple[Array | None, ...],
    runs: int,
    scale: float,
    causal: bool,
    loss: str,
    wrt: int,
    threads: int,
) -> CoreGradients: ...

# What wrt names is overwritten in place, and has the run axis; so have state and buffers.
def train(
    data: CoreData,
    parameters: CoreParameters,
    starts: CoreParameters,
    runs: int,
    scale: float,
    causal: bool,
    loss: str,
    wrt: int,
    optimizer: dict[str, Any],
    state: State,
    first: int,
    last: int,
    records: Sequence[tuple[Any, ...]],
    tests: Sequence[CoreData],
    directions: Sequence[CoreParameters],
    thresholds: dict[str, float],
    stopped: npt.NDArray[np.int64],
    hook_every: int,
    hook: Callable[[int], bool] | None,
    tick: Callable[[int], None] | None,
    threads: int,
) -> tuple[int, list[str]]: ...

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
def exp(x: Array) -> Array: ...
def peak_flops(dtype_name: str, threads: int, seconds: float) -> float: ...
