"""`LowRank`: key-query matrices in factored form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.runs import NO_RUNS
from .._arguments.values import Array, frozen
from .factors import Factors


@dataclass(frozen=True, init=False, eq=False, repr=False)
class LowRank(Factors):
    """Key-query matrices W_h = Q_h K_hᵀ of rank r or less, in place of the `W` of a model.

    Logits are computed as (Z Q_h) (X K_h)ᵀ, and the factors are trained. Each may have a leading
    run axis. The arrays are read-only, as those of a model.

    Parameters
    ----------
    Q : array (H, d, r), float32 or float64
        The query side.
    K : array (H, d, r) of the same dtype, optional
        The key side. None ties it to the query side: W_h = Q_h Q_hᵀ.

    Raises
    ------
    TypeError
        If Q and K are not of one dtype, float32 or float64.
    ValueError
        If their shapes do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> W = mh.LowRank(rng.standard_normal((3, 9, 2)), rng.standard_normal((3, 9, 2)))
    >>> W.rank, W.dtype.name
    (2, 'float64')
    >>> bool(np.allclose(W.dense()[0], W.Q[0] @ W.K[0].T))
    True
    """

    Q: Array
    K: Array | None = None

    def __init__(self, Q: npt.ArrayLike, K: npt.ArrayLike | None = None) -> None:
        Q = checks.real(Q, "Q")
        checks.shape(Q, "Q", "H d r", (None, None, None), runs=True)
        if Q.size == 0:
            raise ValueError(f"Q: expected no axis of length 0, got shape {Q.shape}")
        if K is not None:
            K = checks.real(K, "K", Q.dtype, "Q")
            checks.shape(K, "K", "H d r", Q.shape[-3:], runs=True)
            NO_RUNS.meet("Q", Q.shape, 3).meet("K", K.shape, 3)
        vars(self).update(Q=frozen(Q), K=None if K is None else frozen(K))

    def dense(self) -> Array:
        """Compute the matrices W_h = Q_h K_hᵀ themselves.

        Returns
        -------
        array (H, d, d) of the dtype of the factors
            With a leading R if a factor has a run axis.

        Examples
        --------
        >>> import mhfast as mh
        >>> import numpy as np
        >>> W = mh.LowRank(np.ones((3, 9, 2)))
        >>> W.dense().shape
        (3, 9, 9)
        """
        product: Array = self.Q @ np.swapaxes(self.Q if self.K is None else self.K, -1, -2)
        return product
