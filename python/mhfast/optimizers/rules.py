"""The optimizers. θ are the trained parameters, g their gradient after decay and clipping.

Plain gradient descent is the setting of Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization
and Generalization of Multi-head Attention"; normalized steps, Polyak's step and mirror descent
come from the work on the implicit bias of attention. Every class takes the keyword fields of
`StepRule`: ``schedule, l2, clip, project, radius, project_by``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ._common import (
    GROUPINGS,
    Rates,
    StepRule,
    at_least_zero,
    fraction,
    number,
    one_of,
    positive,
    rates,
    truth,
)

__all__ = [
    "Adam",
    "GradientDescent",
    "MirrorDescent",
    "Momentum",
    "NormalizedGradientDescent",
    "PolyakStep",
    "SignDescent",
]


@dataclass(frozen=True, repr=False)
class GradientDescent(StepRule):
    """Gradient descent: θ_{k+1} = θ_k - lr g.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, finite and at least 0, or one for each of R runs, or a dict with that of each
        parameter. Stored as a float, a tuple or a mapping.
    """

    name: ClassVar[str] = "gradient_descent"

    lr: Rates

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))


@dataclass(frozen=True, repr=False)
class NormalizedGradientDescent(StepRule):
    """Normalized gradient descent: θ_{k+1} = θ_k - lr g / (‖g‖ + eps).

    With a gradient of exactly zero no step is taken. The direction stays accurate even if attention
    is so saturated that the gradient itself underflows.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Length of a step, as in `GradientDescent`.
    eps : float
        Added to the norm, finite and at least 0.
    by : {"tensor", "head", "all"}
        Over what the norm is taken: each parameter, each head of each parameter, or all trained
        parameters together. A parameter without heads counts as one head.

    Notes
    -----
    Clipping comes before normalizing, so it has an effect only together with ``eps``.
    """

    name: ClassVar[str] = "normalized_gradient_descent"

    lr: Rates
    eps: float = 0.0
    by: str = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))
        self._set_field("eps", at_least_zero("eps", self.eps))
        one_of("by", self.by, GROUPINGS)


@dataclass(frozen=True, repr=False)
class PolyakStep(StepRule):
    """Gradient descent with Polyak's step size, capped.

        θ_{k+1} = θ_k - min(max_lr, factor (L - target) / ‖g‖²) g,   no step if L <= target.

    L is the recorded loss and ‖g‖ the norm over all trained parameters. A schedule multiplies the
    step size.

    Parameters
    ----------
    max_lr : float
        Largest step size, above 0.
    target : float
        The smallest attainable loss; 0 for separable data.
    factor : float
        1 is Polyak's own step size, 1/2 a more cautious one; finite and above 0.

    References
    ----------
    Polyak, "Introduction to Optimization", 1987.
    """

    name: ClassVar[str] = "polyak_step"

    max_lr: float = math.inf
    target: float = 0.0
    factor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("max_lr", positive("max_lr", self.max_lr))
        self._set_field("target", number("target", self.target))
        self._set_field("factor", positive("factor", self.factor, finite=True))
        if math.isinf(self.target):
            raise ValueError(f"target: expected a finite number, got {self.target}")


@dataclass(frozen=True, repr=False)
class Momentum(StepRule):
    """Gradient descent with momentum: v ← beta v + g from v = 0, θ_{k+1} = θ_k - lr v.

    With ``nesterov`` the step is lr (g + beta v). This is the form of torch.optim.SGD.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, as in `GradientDescent`.
    beta : float
        In [0, 1).
    nesterov : bool

    References
    ----------
    Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
    learning", ICML 2013, with lr outside of v.
    """

    name: ClassVar[str] = "momentum"

    lr: Rates
    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))
        self._set_field("beta", fraction("beta", self.beta))
        self._set_field("nesterov", truth("nesterov", self.nesterov))


@dataclass(frozen=True, repr=False)
class Adam(StepRule):
    """Adam, and AdamW with ``weight_decay``.

    Step k, from m = v = 0:

        m ← beta1 m + (1 - beta1) g,   v ← beta2 v + (1 - beta2) g²,
        θ_{k+1} = (1 - lr weight_decay) θ_k
                  - lr m / (1 - beta1^(k+1)) / (sqrt(v / (1 - beta2^(k+1))) + eps).

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, as in `GradientDescent`.
    beta1, beta2 : float
        In [0, 1).
    eps : float
        Finite and at least 0. Where v and eps are 0 there is no step: an entry whose gradient has
        always been 0, or so small that its square is, stays but for the decay.
    weight_decay : float
        The decoupled decay of AdamW, finite and at least 0; Adam's own is ``l2``.

    References
    ----------
    Kingma, Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; Loshchilov, Hutter,
    "Decoupled Weight Decay Regularization", ICLR 2019.
    """

    name: ClassVar[str] = "adam"

    lr: Rates
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))
        self._set_field("beta1", fraction("beta1", self.beta1))
        self._set_field("beta2", fraction("beta2", self.beta2))
        self._set_field("eps", at_least_zero("eps", self.eps))
        self._set_field("weight_decay", at_least_zero("weight_decay", self.weight_decay))


@dataclass(frozen=True, repr=False)
class MirrorDescent(StepRule):
    """Mirror descent with the potential ‖θ‖_p^p / p, entry by entry.

        s = sign(θ_k) |θ_k|^(p-1) - lr g,   θ_{k+1} = sign(s) |s|^(1/(p-1)).

    p = 2 is gradient descent.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, as in `GradientDescent`.
    p : float
        Finite and above 1.
    normalized : bool
        Divide g by its dual norm ‖g‖_{p/(p-1)} first; with a gradient of exactly zero no step is
        taken.
    by : {"tensor", "head", "all"}
        Over what the norm is taken, as in `NormalizedGradientDescent`.

    References
    ----------
    Sun, Gatmiry, Ahn, Azizan, "A Unified Approach to Controlling Implicit Regularization via Mirror
    Descent", JMLR 2023.
    """

    name: ClassVar[str] = "mirror_descent"

    lr: Rates
    p: float
    normalized: bool = False
    by: str = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))
        self._set_field("p", number("p", self.p))
        if not 1.0 < self.p < math.inf:
            raise ValueError(f"p: expected a finite number above 1, got {self.p}")
        self._set_field("normalized", truth("normalized", self.normalized))
        one_of("by", self.by, GROUPINGS)


@dataclass(frozen=True, repr=False)
class SignDescent(StepRule):
    """Sign descent: θ_{k+1} = θ_k - lr sign(g), entry by entry, with sign(0) = 0.

    The size of the gradient does not matter, so that ``clip`` changes nothing. It is the steepest
    descent in the norm max |θ_j|, up to the length of the step.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Change of an entry, as in `GradientDescent`.

    References
    ----------
    Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation for Non-Convex
    Problems", ICML 2018.
    """

    name: ClassVar[str] = "sign_descent"

    lr: Rates

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))


Optimizer: TypeAlias = StepRule

OPTIMIZERS = tuple(StepRule.__subclasses__())
"""All of them."""
