"""The token-separation support vector machine, the limit that implicit-bias theory predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.values import Array
from ..dataset.dataset import Dataset
from ..gradients import Gradients
from .constraints import TokenConstraints, problems_of_runs, token_constraints
from .hull import CertifiedMargin
from .inputs import in_units
from .norms import Norm, checked_norm
from .programs import solve
from .runs import stacked


@dataclass(frozen=True, eq=False)
class TokenSVM(CertifiedMargin):
    """The least-norm parameters with which the best tokens win by a margin of 1.

    Attributes
    ----------
    direction : Gradients
        W (1, d, d), or prompt (1, d), for the `directions` of `mhfast.train`.  If the tokens are
        not separable, the hull point itself, which is zero up to rounding.
    margin : float
        1/‖direction‖, the margin of the unit direction; 0 if the tokens are not separable.
    dual : float
        Dual norm of the hull point Σ λ_i f_i: no unit direction has a larger margin.
    weights : float64 array (n, q, T)
        Convex weights of the constraints, 0 where there is none, as at the best tokens.
    resolution : float
        A margin of this size is indistinguishable from 0: see `token_svm`.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> data = mh.Dataset(rng.standard_normal((4, 3, 6)), [1.0, -1.0, 1.0, -1.0])
    >>> svm = mh.theory.token_svm(data, [0, 1, 2, 0], query=-1)
    >>> svm.separable, bool(svm.gap < 1e-6)
    (True, True)
    >>> round(float(mh.norm(svm.direction) * svm.margin), 6)
    1.0
    """

    direction: Gradients
    margin: float
    dual: float
    weights: Array
    resolution: float


def token_svm(
    data: Dataset,
    best: npt.ArrayLike,
    *,
    wrt: str = "W",
    norm: Norm = "fro",
    query: int | None = None,
    W: npt.ArrayLike | None = None,
    causal: bool = False,
) -> TokenSVM:
    """Find the least-norm parameters that separate the best token of each query row from others.

        minimise ‖W‖   subject to   zᵀ W (x_best - x_t) ≥ 1   for all rows z, all x_t ≠ x_best.

    Parameters
    ----------
    data : Dataset
        X (n, T, d); labels play no role.  Tokens beyond `lengths` are neither rivals nor queries,
        and samples (or rows) of weight 0 are not constraints; other weights do not matter.  With a
        run axis, R problems are solved; numbers of the result become arrays (R,), and arrays gain a
        leading R.
    best : integers (n,) or (n, q), with a leading R for each run its own
        The token that each query row is to select, among those that it sees.  Its copies, which
        get the same weight from any W, are not rivals; a copy may differ by 4 units in the last
        place of the largest number of the sample.  Entries of rows that are not constraints do not
        matter.
    wrt : {"W", "prompt"}
        What to optimize: W (d, d), or one prompt z (d,) for all samples with a fixed `W`.
    norm : "fro", "nuclear" or a number p above 1
        Frobenius, to which gradient descent on a dense W converges; the nuclear norm, the sum of
        the singular values, for factored W; the entrywise p-norm for `MirrorDescent` with p.  A
        prompt has no nuclear norm.  All but Frobenius need the extra ``mhfast[programs]``.
    query : int, optional
        The query token of each sample, as in `Classifier`; a query of the data set overrides it.
        None: every token is a query.
    W : array (d, d), optional
        For wrt="prompt"; the identity by default.
    causal : bool
        Whether row t sees the tokens up to its own only, as in `Classifier`; not for a prompt.

    Returns
    -------
    TokenSVM

    Raises
    ------
    TypeError
        `best` does not hold integers.
    ValueError
        A shape or a value does not fit.
    ImportError
        The norm needs cvxpy, which is not installed.
    RuntimeError
        Clarabel found no solution.

    Notes
    -----
    The Frobenius norm is solved from the inner products of up to N = n q (T-1) constraints, by
    `nearest_point`; a float64 array (N, N) must fit in memory.  The others are solved by Clarabel,
    an interior-point method, through cvxpy, with an array (N, d, d), the nuclear norm in the spans
    of queries and tokens.  Tokens and queries enter in units of their own size.

    The gap is that of the returned numbers, whatever the solver: `margin` is what `direction`
    attains, `dual` the dual norm of the weighted sum of constraints.  Typically it is 1e-12 of
    the margin in the Frobenius norm and 1e-10 in the others.

    Rounding hides a margin below r times the longest constraint, r² = 10 (N + d) 2⁻⁵² c, where c is
    by how much the longest difference x_best - x_t is shorter than the longest token; in float32
    that is at least 16 · 2⁻²³ c.  Tokens count as separable where W has a margin of twice that, and
    as inseparable where the hull point is shorter.

    References
    ----------
    Tarzanagh, Li, Thrampoulidis, Oymak, "Transformers as Support Vector Machines" (2023), and
    Vasudeva, Deora, Thrampoulidis, "Implicit Bias and Fast Convergence Rates for Self-attention"
    (2024).  p-norms: Julistiono, Tarzanagh, Azizan, "Optimizing Attention with Mirror Descent:
    Generalized Max-Margin Token Selection" (2024).

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> data = mh.Dataset(rng.standard_normal((4, 3, 6)), [1.0] * 4)
    >>> svm = mh.theory.token_svm(data, [0, 1, 2, 0], query=-1)
    >>> model = mh.Classifier(50 * svm.direction.W, np.ones((1, 1, 6)), query=-1)
    >>> model.attention(data)[:, 0, 0].argmax(axis=-1)  # the tokens that were named
    array([0, 1, 2, 0])
    """
    checks.instance(data, Dataset, "data")
    checked = checked_norm(norm, vector=wrt == "prompt")
    if data.runs is not None:
        problems = [
            token_svm(of_run, part, wrt=wrt, norm=norm, query=query, W=W, causal=causal)
            for of_run, part in problems_of_runs(data, best)
        ]
        return cast(TokenSVM, stacked(problems))
    given = token_constraints(data, best, wrt=wrt, query=query, W=W, causal=causal)
    return solved(given, wrt, checked)


def solved(
    given: TokenConstraints,
    wrt: str,
    norm: Norm,
    strict: npt.NDArray[np.bool_] | None = None,
) -> TokenSVM:
    """Solve the program of these constraints, of which those that are not strict require ≥ 0.

    Raises
    ------
    ImportError
        The norm needs cvxpy, which is not installed.
    RuntimeError
        Clarabel found no solution.
    """
    found = solve(given.left, given.right, norm, size=given.size, eps=given.eps, strict=strict)
    unit = given.x + given.z
    direction = in_units(found.direction, unit if found.separable else -unit)[None]
    named = Gradients(prompt=direction) if wrt == "prompt" else Gradients(W=direction)
    numbers = in_units(np.array([found.margin, found.dual, found.hidden]), -unit).tolist()
    return TokenSVM(named, numbers[0], numbers[1], given.spread(found.weights), numbers[2])
