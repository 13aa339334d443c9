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
    "AdaGrad",
    "Adam",
    "AdamW",
    "ExponentiatedGradient",
    "GradientDescent",
    "MirrorDescent",
    "Momentum",
    "NormalizedGradientDescent",
    "PolyakStep",
    "RMSProp",
    "SignDescent",
    "SteepestDescent",
]

NORMS = ("max", "l1", "fro", "spectral")
POLARS = ("exact", "newton_schulz")


@dataclass(frozen=True, repr=False)
class GradientDescent(StepRule):
    """Gradient descent: θ_{k+1} = θ_k - lr g.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, finite and at least 0, or one for each of R runs, or a dict with that of each
        parameter. Stored as a float, a tuple or a mapping.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> by_name = mh.GradientDescent(lr={"W": 0.1, "U": 0.0})  # U stays as it is
    >>> run = mh.train(start, data, steps=10, optimizer=by_name)
    >>> bool((run.model.U == start.U).all())
    True
    >>> bool(run.history["loss"][-1] < run.history["loss"][0])
    True
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

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> optimizer = mh.NormalizedGradientDescent(0.5, by="all")
    >>> run = mh.train(start, data, steps=1, optimizer=optimizer, record="distance")
    >>> run.history["distance"].round(9)  # the length of the step
    array([0. , 0.5])
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

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> run = mh.train(start, data, steps=30, optimizer=mh.PolyakStep(max_lr=100.0))
    >>> bool(run.history["loss"][-1] < 0.01)  # no step size was chosen by hand
    True
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

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> rules = mh.Momentum(0.1, beta=0.0), mh.Momentum(0.1, beta=0.9)
    >>> plain, heavy = (mh.train(start, data, steps=50, optimizer=rule).model for rule in rules)
    >>> heavy.loss(data) < 0.5 * plain.loss(data)
    True
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
        always been 0, or so small that its square is, changes by the decay only.
    weight_decay : float
        The decoupled decay of AdamW, finite and at least 0; Adam's own is ``l2``.

    References
    ----------
    Kingma, Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; Loshchilov, Hutter,
    "Decoupled Weight Decay Regularization", ICLR 2019.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> run = mh.train(start, data, steps=1, optimizer=mh.Adam(0.01))
    >>> round(float(abs(run.model.U - start.U).max()), 6)  # the first step is lr in each entry
    0.01
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

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> rules = mh.GradientDescent(0.1), mh.MirrorDescent(0.1, p=2.0)
    >>> plain, mirror = (mh.train(start, data, steps=10, optimizer=rule).model for rule in rules)
    >>> bool(abs(plain.U - mirror.U).max() < 1e-12)  # p = 2 is gradient descent
    True
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

    The size of the gradient does not matter, so that ``clip`` changes nothing. It is
    `SteepestDescent` in the norm "max", without momentum.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Change of an entry, as in `GradientDescent`.

    References
    ----------
    Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation for Non-Convex
    Problems", ICML 2018.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> g = mh.value_and_grad(start, data)[1]
    >>> run = mh.train(start, data, steps=1, optimizer=mh.SignDescent(0.01))
    >>> bool(np.allclose(run.model.U, start.U - 0.01 * np.sign(g.U)))
    True
    """

    name: ClassVar[str] = "sign_descent"

    lr: Rates

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))


@dataclass(frozen=True, repr=False)
class AdamW(Adam):
    """AdamW: Adam with decoupled weight decay, the step of `Adam` and the defaults of torch.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, as in `GradientDescent`.
    beta1, beta2, eps
        As in `Adam`.
    weight_decay : float
        Each step subtracts lr · weight_decay · θ; finite and at least 0.

    References
    ----------
    Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> rules = mh.AdamW(0.01, weight_decay=0.0), mh.AdamW(0.01, weight_decay=1.0)
    >>> weak, strong = (mh.train(start, data, steps=50, optimizer=rule).model for rule in rules)
    >>> bool(abs(strong.U).max() < abs(weak.U).max())
    True
    """

    name: ClassVar[str] = "adamw"

    weight_decay: float = 0.01


@dataclass(frozen=True, repr=False)
class AdaGrad(StepRule):
    """AdaGrad: v ← v + g² from v = 0, θ_{k+1} = θ_k - lr g / (sqrt(v) + eps), entry by entry.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, as in `GradientDescent`.
    eps : float
        Finite and at least 0. Where v and eps are 0 there is no step.

    References
    ----------
    Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", JMLR 2011.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> run = mh.train(start, data, steps=20, optimizer=mh.AdaGrad(0.1), record="distance")
    >>> moved = run.history["distance"]
    >>> bool(moved[20] - moved[19] < moved[1] / 2)  # steps become shorter
    True
    """

    name: ClassVar[str] = "adagrad"

    lr: Rates
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))
        self._set_field("eps", at_least_zero("eps", self.eps))


@dataclass(frozen=True, repr=False)
class RMSProp(StepRule):
    """RMSProp: steps divided by a running mean of g², entry by entry.

    Step k, from v = b = 0:

        v ← beta v + (1 - beta) g²,   b ← momentum b + g / (sqrt(v) + eps),   θ_{k+1} = θ_k - lr b.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, as in `GradientDescent`.
    beta : float
        In [0, 1); torch calls it alpha.
    eps : float
        Finite and at least 0. Where v and eps are 0, g adds nothing to b.
    momentum : float
        In [0, 1).

    References
    ----------
    Tieleman, Hinton, "Lecture 6.5 - RMSProp", COURSERA: Neural Networks for Machine Learning, 2012.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.random_step(data, heads=4, seed=0)
    >>> run = mh.train(start, data, steps=20, optimizer=mh.RMSProp(0.01))
    >>> bool(run.history["loss"][-1] < 0.5 * run.history["loss"][0])
    True
    """

    name: ClassVar[str] = "rmsprop"

    lr: Rates
    beta: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))
        self._set_field("beta", fraction("beta", self.beta))
        self._set_field("eps", at_least_zero("eps", self.eps))
        self._set_field("momentum", fraction("momentum", self.momentum))


@dataclass(frozen=True, repr=False)
class ExponentiatedGradient(StepRule):
    """Exponentiated gradient for entries of any sign: steps are factors.

        θ_{k+1} = θ_k exp(-sign(θ_k) lr g),   entry by entry.

    An entry keeps its sign, and one of exactly zero stays. With a ``scale`` β it is mirror descent
    with the hyperbolic entropy,

        θ_{k+1} = β sinh(arcsinh(θ_k / β) - lr g),

    which is multiplicative for entries far above β, gradient descent of step size lr β for those
    far below, and lets signs change. The first formula is the limit for β → 0.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Step size, as in `GradientDescent`.
    scale : float
        β, finite and at least 0.

    References
    ----------
    Kivinen, Warmuth, "Exponentiated Gradient versus Gradient Descent for Linear Predictors",
    Information and Computation 1997; Ghai, Hazan, Singer, "Exponentiated Gradient Meets Gradient
    Descent", ALT 2020.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier(np.full((1, 9, 9), 0.1), np.full((1, 5, 9), 0.1))
    >>> run = mh.train(start, data, steps=20, optimizer=mh.ExponentiatedGradient(0.5))
    >>> bool((run.model.U > 0).all()), bool(run.history["loss"][-1] < run.history["loss"][0])
    (True, True)
    """

    name: ClassVar[str] = "exponentiated_gradient"

    lr: Rates
    scale: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))
        self._set_field("scale", at_least_zero("scale", self.scale))


@dataclass(frozen=True, repr=False)
class SteepestDescent(StepRule):
    """Steepest descent in a norm, with momentum; in the spectral norm it is Muon.

    Step k, from v = 0:

        v ← beta v + g,   m = v, or g + beta v with ``nesterov``,   θ_{k+1} = θ_k - lr D,

    D the point of norm 1 with the largest ⟨D, m⟩:

    ========== ======================================= =================================
    norm       D                                       dual norm ‖m‖_* = ⟨D, m⟩
    ========== ======================================= =================================
    "max"      sign(m), entry by entry, sign(0) = 0    Σ |m_j|
    "l1"       sign of the largest entry, zero else    max |m_j|
    "fro"      m / ‖m‖                                 ‖m‖
    "spectral" U Vᵀ of each head's matrix m = U S Vᵀ   sum of the singular values
    ========== ======================================= =================================

    Steps are normalized, of length lr in the norm, unless ``scaled``: then they are lr ‖m‖_* D. A
    gradient of exactly zero makes no step. "max" without momentum is `SignDescent`, "fro"
    `NormalizedGradientDescent`, or `GradientDescent` if scaled.

    Parameters
    ----------
    lr : float or (R,) or dict of them
        Length of a step, as in `GradientDescent`.
    norm : {"max", "l1", "fro", "spectral"}
    beta : float
        In [0, 1).
    nesterov : bool
    scaled : bool
        Multiply steps by the dual norm.
    by : {"tensor", "head"}
        Over what the norm is taken: each parameter or each head of each parameter. A parameter
        without heads counts as one head. The spectral norm of a parameter is the largest of those
        of its heads, its dual norm their sum.
    polar : {"exact", "newton_schulz"}
        How U Vᵀ is computed: from singular vectors, by one-sided Jacobi rotations, or by five
        Newton-Schulz steps with the coefficients of Muon, which bring the singular values near 1,
        most of them within 0.3. Both compute in float64.

    Notes
    -----
    For "exact" singular values up to 32 max(rows, columns) ε of the largest one count as zero, with
    ε that of the dtype: in these directions there is no step. Of equal entries "l1" takes the
    first. Clipping comes before normalizing, so it has an effect only with ``scaled`` or momentum.

    References
    ----------
    Bernstein, Newhouse, "Old Optimizer, New Norm: An Anthology", 2024; Jordan et al., "Muon: An
    optimizer for hidden layers in neural networks", 2024.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.gaussian(heads=2, tokens=5, dim=9, std=0.1, seed=0)
    >>> run = mh.train(start, data, steps=1, optimizer=mh.SteepestDescent(0.1, norm="spectral"))
    >>> sizes = np.linalg.svd(run.model.U - start.U, compute_uv=False)
    >>> sizes[:, :2].round(6)  # all directions of a head move alike
    array([[0.1, 0.1],
           [0.1, 0.1]])
    """

    name: ClassVar[str] = "steepest_descent"

    lr: Rates
    norm: str
    beta: float = 0.0
    nesterov: bool = False
    scaled: bool = False
    by: str = "tensor"
    polar: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_field("lr", rates(self.lr))
        one_of("norm", self.norm, NORMS)
        self._set_field("beta", fraction("beta", self.beta))
        self._set_field("nesterov", truth("nesterov", self.nesterov))
        self._set_field("scaled", truth("scaled", self.scaled))
        one_of("by", self.by, GROUPINGS[:2])
        one_of("polar", self.polar, POLARS)
        if self.polar != "exact" and self.norm != "spectral":
            raise ValueError(f"polar: expected 'exact' with norm={self.norm!r}, got {self.polar!r}")


Optimizer: TypeAlias = StepRule

OPTIMIZERS = tuple(StepRule.kinds)
"""All of them."""
