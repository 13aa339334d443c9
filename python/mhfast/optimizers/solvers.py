"""The settings of the solvers of `mhfast.minimize` and `mhfast.gradient_flow`, kept in a Run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

from .._arguments import checks
from ._by_parameter import each
from ._common import Sizes, at_least_zero, one_of, positive

Method: TypeAlias = Literal["DOP853", "RK45", "RK23", "LSODA"]


@dataclass(frozen=True, kw_only=True)
class Solver:
    """The field that all solvers have.

    Parameters
    ----------
    l2 : float or dict by parameter
        λ of the term λ/2 ‖θ‖² added to the loss; the recorded loss does not contain it.
    """

    name: ClassVar[str]
    slots: ClassVar[int] = 0
    """A resumed solver starts without state: no arrays are kept."""

    l2: Sizes = 0.0

    def __post_init__(self) -> None:
        self._set_field("l2", each("l2", self.l2, at_least_zero))

    def _set_field(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)  # the way to set a field when frozen


@dataclass(frozen=True, kw_only=True)
class LBFGS(Solver):
    """The settings of `mhfast.minimize`.

    Parameters
    ----------
    memory : int
        How many pairs of steps and differences of gradients approximate the Hessian.
    gtol : float
        The norm of the gradient, with that of the l2 term, at which it ends.
    """

    name: ClassVar[str] = "lbfgs"

    memory: int = 10
    gtol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("memory", checks.count(self.memory, "memory"))
        self._set_field("gtol", at_least_zero("gtol", self.gtol))


@dataclass(frozen=True, kw_only=True)
class GradientFlow(Solver):
    """The settings of `mhfast.gradient_flow`.

    Parameters
    ----------
    method : {"DOP853", "RK45", "RK23", "LSODA"}
        The solver of `scipy.integrate`.
    rtol, atol : float
        The estimated error of a step is at most atol + rtol |θ|: in the root mean square over
        entries.
    """

    name: ClassVar[str] = "gradient_flow"

    method: Method = "DOP853"
    rtol: float = 1e-8
    atol: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("method", self.method, get_args(Method))
        self._set_field("rtol", positive("rtol", self.rtol, finite=True))
        self._set_field("atol", positive("atol", self.atol, finite=True))


SOLVERS: tuple[type[Solver], ...] = (LBFGS, GradientFlow)
"""All of them."""
