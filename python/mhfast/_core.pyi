"""The C++ core.

Arrays are C-contiguous, aligned, in native byte order and of one real dtype, float32 or float64,
which the callers in this package see to. Z None means self-attention, `threads` 0 the default.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ._values import Array

def config() -> dict[str, object]: ...
def available_isas() -> list[str]: ...
def compiled_isas() -> list[str]: ...
def select_isa(name: str) -> None: ...
def force_plan(name: str) -> None: ...
def active_isa() -> str: ...
def set_num_threads(k: int) -> None: ...
def get_num_threads() -> int: ...
def explain(n: int, T: int, q: int, d: int, H: int, dtype_name: str) -> dict[str, object]: ...
def outputs(X: Array, Z: Array | None, W: Array, U: Array, scale: float, threads: int) -> Array: ...
def attention(X: Array, Z: Array | None, W: Array, scale: float, threads: int) -> Array: ...
def value_and_grad(
    X: Array,
    Z: Array | None,
    y: Array,
    weight: Array | None,
    W: Array,
    U: Array,
    scale: float,
    loss: str,
    wrt_W: bool,
    wrt_U: bool,
    threads: int,
) -> tuple[float, Array | None, Array | None]: ...
def train(
    X: Array,
    Z: Array | None,
    y: Array,
    weight: Array | None,
    W: Array,
    U: Array,
    W0: Array,
    U0: Array,
    scale: float,
    loss: str,
    wrt_W: bool,
    wrt_U: bool,
    optimizer: dict[str, object],
    first: int,
    last: int,
    records: Sequence[tuple[Any, ...]],
    tests: Sequence[tuple[Array, Array | None, Array, Array | None]],
    directions: Sequence[tuple[Array | None, Array | None]],
    thresholds: dict[str, float],
    hook_every: int,
    hook: Callable[[int], bool] | None,
    tick: Callable[[int], None] | None,
    threads: int,
) -> tuple[int, str]: ...
def exp(x: Array) -> Array: ...
def peak_flops(dtype_name: str, threads: int, seconds: float) -> float: ...
