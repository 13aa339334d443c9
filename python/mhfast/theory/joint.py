"""The program for the readout together with attention: margins of labels, then of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..gradients import Gradients
from .constraints import problems_of_runs, token_constraints
from .hull import resolution
from .inputs import exponent, in_units
from .norms import Norm, checked_norm
from .programs import from_products
from .runs import stacked
from .separation import TokenSVM, solved


@dataclass(frozen=True, eq=False)
class JointSVM:
    """The max-margin readout of the best tokens, and the attention that selects them.

    Attributes
    ----------
    readout : array (d,)
        v, of least norm with y_i ⟨v, x_i,best⟩ ≥ 1; if the labels are not separable, the hull
        point, which is zero up to rounding.
    margin : float
        1/‖v‖, the margin of labels; 0 if they are not separable.
    dual : float
        Norm of the hull point: no unit readout has a larger margin.
    resolution : float
        A margin of labels of this size is indistinguishable from 0.
    weights : array (n,)
        Convex weights of the labels, NaN for samples that do not count.
    support : bool array (n,)
        The samples whose label has the margin: those with y_i ⟨v, x_i,best⟩ ≤ 1 + tolerance.
    attention : TokenSVM
        W or prompt that separates the best token of support samples from others by 1, and of the
        other samples by 0.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> data = mh.Dataset(rng.standard_normal((4, 3, 6)), [1.0, -1.0, 1.0, -1.0])
    >>> joint = mh.theory.joint_svm(data, [0, 1, 2, 0], query=-1)
    >>> joint.separable, bool(joint.gap < 1e-6), joint.support.tolist()
    (True, True, [True, True, True, True])
    >>> joint.direction.W.shape, joint.direction.U.shape
    ((1, 6, 6), (1, 1, 6))
    """

    readout: Array
    margin: float
    dual: float
    resolution: float
    weights: Array
    support: npt.NDArray[np.bool_]
    attention: TokenSVM

    @property
    def gap(self) -> float:
        """The primal-dual gap `dual` - `margin` of the labels; `attention` has its own."""
        return self.dual - self.margin

    @property
    def separable(self) -> bool:
        """Whether the readout separates the labels, and attention the tokens."""
        return self.margin > 0.0 and self.attention.separable

    @property
    def direction(self) -> Gradients:
        """W (1, d, d) or prompt (1, d), with U (1, 1, d) = v, for `directions` of training."""
        U = self.readout[..., None, None, :]
        return Gradients(W=self.attention.direction.W, U=U, prompt=self.attention.direction.prompt)


def joint_svm(
    data: Dataset,
    best: npt.ArrayLike,
    *,
    wrt: str = "W",
    norm: Norm = "fro",
    query: int | None = None,
    W: npt.ArrayLike | None = None,
    causal: bool = False,
    tolerance: float = 1e-6,
) -> JointSVM:
    """Find where readout and attention end if they are trained together.

    Two programs, of which the second takes the support from the first:

        minimise ‖v‖_2   subject to   y_i ⟨v, x_i,best⟩ ≥ 1                for all samples i,
        minimise ‖W‖     subject to   zᵀ W (x_i,best - x_i,t) ≥ 1          for i in the support,
                                      zᵀ W (x_i,best - x_i,t) ≥ 0          for other samples.

    Only samples in the support of v limit the margin of the labels, and so only in these must the
    best token win by as much as possible.

    Parameters
    ----------
    data : Dataset
        X (n, T, d), labels y (n,), one query row for each sample.  As in `token_svm`, with
        samples of weight 0 left out; with a run axis, R problems are solved.
    best : integers (n,) or (n, 1), with a leading R for each run its own
        The token that each sample selects.
    wrt : {"W", "prompt"}
        Attention with W, or with one prompt for all samples and a fixed `W`.
    norm : "fro", "nuclear" or a number above 1
        Of W or the prompt, as in `token_svm`.
    query : int, optional
        The query token; a query of the data set overrides it.
    W : array (d, d), optional
        For wrt="prompt"; the identity by default.
    causal : bool
        As in `token_svm`.
    tolerance : float
        How far above 1 the margin of a support sample may be; of the order of the accuracy of v,
        whose margins are typically accurate to 1e-12.

    Returns
    -------
    JointSVM

    Raises
    ------
    TypeError
        `best` does not hold integers.
    ValueError
        A shape or a value does not fit, or samples have several query rows.
    ImportError
        The norm needs cvxpy, which is not installed.
    RuntimeError
        Clarabel found no solution.

    Notes
    -----
    If the labels are not separable, all samples are taken for the support.  The tokens `best` are
    given; the theory assumes those whose margin of labels is the largest, and finding them is a
    combinatorial problem that is not solved here.

    References
    ----------
    Tarzanagh, Li, Zhang, Oymak, "Max-Margin Token Selection in Attention Mechanism" (NeurIPS
    2023), for (v, prompt): the regularization path of both, with the relaxed constraints for
    samples outside of the support; for (v, W) in p-norms Julistiono, Tarzanagh, Azizan (2024).
    The form given here is the one above.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> data = mh.Dataset(rng.standard_normal((4, 3, 6)), [1.0, -1.0, 1.0, -1.0])
    >>> joint = mh.theory.joint_svm(data, [0, 1, 2, 0], query=-1)
    >>> attended = data.X[range(4), [0, 1, 2, 0]] @ joint.readout
    >>> bool((data.y * attended).min() > 1 - 1e-6)  # the readout separates the labels
    True
    """
    checks.instance(data, Dataset, "data")
    checked = checked_norm(norm, vector=wrt == "prompt")
    if data.runs is not None:
        problems = [
            joint_svm(of_run, part, wrt=wrt, norm=norm, query=query, W=W, causal=causal,
                      tolerance=tolerance)
            for of_run, part in problems_of_runs(data, best)
        ]  # fmt: skip
        return cast(JointSVM, stacked(problems))
    given = token_constraints(data, best, wrt=wrt, query=query, W=W, causal=causal)
    if given.rivals.shape[1] != 1:
        raise ValueError(f"query: expected one row for each sample, got {given.rivals.shape[1]}")
    n = data.n
    counts = np.ones(n, bool) if data.weight is None else data.weight.reshape(n, -1)[:, 0] > 0
    if data.lengths is not None:
        counts &= data.lengths > 0
    checks.shape(data.y, "y", "n", (n,))
    index = np.where(counts, np.asarray(best).reshape(n), 0)
    chosen = data.X[np.arange(n), index].astype(np.float64)[counts]
    y = data.y.astype(np.float64)[counts]
    if not np.isin(y, (-1.0, 1.0)).all():
        raise ValueError(f"y: expected labels -1 and 1, got {y[~np.isin(y, (-1.0, 1.0))][0]}")
    unit = exponent(chosen)
    F = y[:, None] * in_units(chosen, unit)
    least = resolution(len(F), data.dim, given.eps)
    labels = from_products(None, F, least, np.ones(len(F), bool))
    support = np.zeros(n, bool)
    support[counts] = F @ labels.direction <= 1.0 + tolerance if labels.separable else True
    strict = np.broadcast_to(support[:, None, None], given.rivals.shape)[given.rivals]
    if not strict.any():
        raise ValueError("data: expected a support sample with two different tokens, got none")
    numbers = in_units(np.array([labels.margin, labels.dual, labels.hidden]), -unit).tolist()
    of_labels = np.full(n, np.nan)
    of_labels[counts] = labels.weights
    readout = in_units(labels.direction, unit if labels.separable else -unit)
    attention = solved(given, wrt, checked, strict)
    return JointSVM(readout, numbers[0], numbers[1], numbers[2], of_labels, support, attention)
