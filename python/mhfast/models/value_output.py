"""`ValueOutput`: value matrices in factored form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from .._arguments import checks
from .._arguments.runs import NO_RUNS
from .._arguments.values import Array, frozen
from .factors import Factors


@dataclass(frozen=True, init=False, eq=False, repr=False)
class ValueOutput(Factors):
    """Value and output matrices, V_h = A_h B_h of rank r or less, in place of the `V` of a `Layer`.

    The parameters of the layer are then A and B: both train, or one of them by ``wrt``. Each may
    have a leading run axis. The arrays are read-only, as those of a model.

    Parameters
    ----------
    A : array (H, d, r), float32 or float64
        What a head reads of the tokens that it attends to, often called W_V.
    B : array (H, r, p) of the same dtype
        What it writes, often called W_O.

    Raises
    ------
    TypeError
        If A and B are not of one dtype, float32 or float64.
    ValueError
        If their shapes do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> V = mh.ValueOutput(rng.standard_normal((3, 9, 2)), rng.standard_normal((3, 2, 4)))
    >>> layer = mh.Layer(rng.standard_normal((3, 9, 9)), V)
    >>> V.rank, V.dtype.name, layer.out_dim, list(layer.parameters)
    (2, 'float64', 4, ['W', 'A', 'B'])
    >>> X = rng.standard_normal((20, 5, 9))
    >>> bool(np.allclose(layer(X), mh.Layer(layer.W, V.dense())(X)))
    True
    """

    A: Array
    B: Array

    def __init__(self, A: npt.ArrayLike, B: npt.ArrayLike) -> None:
        A = checks.real(A, "A")
        checks.shape(A, "A", "H d r", (None, None, None), runs=True)
        B = checks.real(B, "B", A.dtype, "A")
        checks.shape(B, "B", "H r p", (A.shape[-3], A.shape[-1], None), runs=True)
        for name, array in (("A", A), ("B", B)):
            if array.size == 0:
                raise ValueError(f"{name}: expected no axis of length 0, got shape {array.shape}")
        NO_RUNS.meet("A", A.shape, 3).meet("B", B.shape, 3)
        vars(self).update(A=frozen(A), B=frozen(B))

    def dense(self) -> Array:
        """Compute the matrices V_h = A_h B_h themselves.

        Returns
        -------
        array (H, d, p) of the dtype of the factors
            With a leading R if a factor has a run axis.

        Examples
        --------
        >>> import mhfast as mh
        >>> import numpy as np
        >>> V = mh.ValueOutput(np.ones((3, 9, 2)), np.ones((3, 2, 4)))
        >>> V.dense().shape
        (3, 9, 4)
        """
        product: Array = self.A @ self.B
        return product
