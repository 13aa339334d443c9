"""Losses of the caller's own: functions of Python, or compiled ones by their address.

A compiled one has the signature

    void (intptr_t count, const double *outputs, const double *targets, double *values,
          double *derivatives, [double *second_derivatives,] void *user_data)

and comes as a numba `cfunc`, a function of ctypes or a `scipy.LowLevelCallable` of one of these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

from .. import _core

Function: TypeAlias = Callable[[Any, Any], tuple[Any, Any] | tuple[Any, Any, Any]]
"""From outputs and targets to values, derivatives and perhaps second derivatives."""


class NumbaFunction(Protocol):
    """The attributes by which a numba `cfunc` is recognized."""

    @property
    def native_name(self) -> str:
        """The name of its code."""

    @property
    def ctypes(self) -> Any:
        """The same as a function of ctypes."""


_FunctionPointer: type[Any] = ctypes.CFUNCTYPE(None).__mro__[1]  # which ctypes does not name
_ARGUMENTS = (6, 7)  # of a compiled loss, without and with second derivatives
_FLOATS = ctypes.POINTER(ctypes.c_float)


@dataclass(frozen=True)
class MissingLoss:
    """A placeholder for the loss of a saved or pickled run, whose code is not stored."""

    name: str

    def __call__(self, *_: object) -> NoReturn:
        """Raise, because the function cannot be called."""
        raise ValueError(
            f"loss: the function {self.name!r} is not kept in a saved or pickled run; "
            "give loss= again to resume"
        )


def is_own(loss: object) -> bool:
    """Return whether this is a function, of Python or compiled."""
    return (callable(loss) and not isinstance(loss, type)) or _is_low_level(loss)


def name_of_function(loss: object) -> str:
    """Return the name under which a function is stored in files."""
    if isinstance(loss, MissingLoss):
        return loss.name
    return str(getattr(loss, "__name__", None) or type(loss).__name__)


def core_own(loss: Any) -> _core.OwnLoss:
    """Return a function as the core takes it.

    Raises
    ------
    TypeError
        If a compiled one has another signature.
    ValueError
        If it is a placeholder.
    """
    if isinstance(loss, MissingLoss):
        loss()
    return _compiled(loss) or _core.PythonLoss(loss)


def raise_error_of(loss: _core.Loss) -> None:
    """Raise again what a function raised when the core called it."""
    if isinstance(loss.own, _core.PythonLoss) and loss.own.error is not None:
        raise loss.own.error


def check_curvature(loss: _core.Loss) -> None:
    """Reject a compiled function without second derivatives; a Python one is checked when called.

    Raises
    ------
    ValueError
        If it has none.
    """
    if isinstance(loss.own, _core.CompiledLoss) and not loss.own.has_curvature:
        raise ValueError(
            "loss: expected a compiled function with seven arguments, second derivatives before "
            "user_data, where a Hessian is computed, got one with six"
        )


def _is_low_level(loss: object) -> bool:
    """Return whether this is a `scipy.LowLevelCallable`, without importing SciPy for it."""
    return type(loss).__name__ == "LowLevelCallable" and isinstance(loss, tuple)


def _compiled(loss: Any) -> _core.CompiledLoss | None:
    user_data = 0
    if _is_low_level(loss):
        given = loss.user_data
        if given is not None and not isinstance(given, ctypes.c_void_p):
            raise TypeError(
                "loss: expected user_data of a LowLevelCallable that is None or a ctypes.c_void_p, "
                f"got {type(given).__name__}"
            )
        user_data = (given.value or 0) if given is not None else 0
        loss = loss.function
    if hasattr(loss, "ctypes") and hasattr(loss, "native_name"):  # a cfunc of numba
        loss = loss.ctypes
    if not isinstance(loss, _FunctionPointer):
        return None
    arguments = loss.argtypes or ()
    if len(arguments) not in _ARGUMENTS or loss.restype is not None or _FLOATS in arguments:
        names = ", ".join(kind.__name__ for kind in arguments)
        raise TypeError(
            "loss: expected a compiled function (intptr_t count, double *outputs, *targets, "
            "*values, *derivatives, perhaps *second_derivatives, void *user_data) without a "
            f"result, got ({names}) with the result {getattr(loss.restype, '__name__', 'None')}"
        )
    address = ctypes.cast(loss, ctypes.c_void_p).value or 0
    return _core.CompiledLoss(address, user_data, has_curvature=len(arguments) == _ARGUMENTS[1])
