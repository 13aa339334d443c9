"""`Layer`: multi-head softmax attention with a value matrix for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from .. import _checks
from .._values import Array, Optional, frozen
from ..dataset import Seed, Seeds
from ..low_rank import LowRank
from . import settling, starting
from .model import Model

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Layer(Model):
    """The multi-head attention layer.

        F(X) = Σ_h softmax(scale · Z W_h Xᵀ) X V_h,

    a (q, p) matrix for each sample X (T, d). softmax acts on every row. The query side Z (q, d) is
    X itself, one of its tokens, external or a prompt; T is free.

    The arrays are read-only and may have a run axis, as those of a `Classifier`.

    Parameters
    ----------
    W : array (H, d, d), float32 or float64, or `LowRank`
        Key-query matrices.
    V : array (H, d, p) of the same dtype
        Value matrices.
    query, prompt, scale, causal
        As for a `Classifier`.

    Raises
    ------
    TypeError
        If W, V, query or prompt are not of one dtype, float32 or float64.
    ValueError
        If their shapes do not fit together, or scale is not finite.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", whose Θ_i is W_h here and whose W_i
    is V_h.
    """

    losses: ClassVar[tuple[str, ...]] = (
        "logistic", "exponential", "linear", "squared", "cross_entropy",
    )  # fmt: skip

    W: Any  # Array or LowRank; which one, callers know
    V: Array
    query: int | Array | None = None
    prompt: Optional = None
    scale: float = 1.0
    causal: bool = False

    def __init__(
        self,
        W: npt.ArrayLike | LowRank,
        V: npt.ArrayLike,
        query: int | npt.ArrayLike | None = None,
        prompt: npt.ArrayLike | None = None,
        *,
        scale: float = 1.0,
        causal: bool = False,
    ) -> None:
        W, heads, dim = settling.key_query(W)
        V = _checks.real(V, "V", W.dtype, "W")
        query, prompt = settling.query_side(query, prompt, dim, W.dtype)
        _checks.shape(V, "V", "H d p", (heads, dim, None), runs=True)
        settling.no_empty_axis("W", W, "V", V)
        vars(self).update(
            W=W,
            V=frozen(V),
            query=query,
            prompt=prompt,
            scale=settling.scale(scale, W.dtype),
            causal=settling.causal(causal, prompt),
        )
        self._core  # noqa: B018  (checks that the run axes agree)

    @property
    def out_dim(self) -> int:
        """The dimension p of an output row."""
        return int(self.V.shape[-1])

    @classmethod
    def zeros(
        cls,
        heads: int,
        dim: int,
        out_dim: int,
        *,
        runs: int | None = None,
        rank: int | None = None,
        tied: bool = False,
        prompt_rows: int | None = None,
        dtype: npt.DTypeLike = np.float64,
        query: int | npt.ArrayLike | None = None,
        scale: float = 1.0,
        causal: bool = False,
    ) -> Self:
        """Make the layer with all parameters zero.

        Parameters
        ----------
        heads, dim, out_dim : int
            H, d and p, each at least 1.
        runs : int, optional
            R, for parameters with a run axis.
        rank : int, optional
            r, for a `LowRank` W; with `tied` its K is None.
        prompt_rows : int, optional
            q, for a prompt.
        dtype : float32 or float64
        query, scale, causal
            As for the class.
        """
        shapes = _shapes(heads, dim, out_dim, rank, tied, prompt_rows)
        arrays = starting.zeros(shapes, runs, dtype)
        return cls(**arrays, query=query, scale=scale, causal=causal)

    @classmethod
    def gaussian(
        cls,
        heads: int,
        dim: int,
        out_dim: int,
        *,
        std: float,
        seed: Seed | Seeds,
        runs: int | None = None,
        rank: int | None = None,
        tied: bool = False,
        prompt_rows: int | None = None,
        dtype: npt.DTypeLike = np.float64,
        query: int | npt.ArrayLike | None = None,
        scale: float = 1.0,
        causal: bool = False,
    ) -> Self:
        """Draw a layer with independent entries N(0, std²).

        Parameters are drawn in the order W (or Q, K), V, prompt and in float64, so that a float32
        model is the float64 model of the same seed rounded.

        Parameters
        ----------
        heads, dim, out_dim : int
            H, d and p, each at least 1.
        std : float
            Standard deviation of every entry, at least 0.
        seed : int, numpy.random.Generator, or a sequence of them
            Run r of a sequence is the draw of its entry r. The runs of one seed are independent.
        runs, rank, tied, prompt_rows, dtype, query, scale, causal
            As for `zeros`.
        """
        shapes = _shapes(heads, dim, out_dim, rank, tied, prompt_rows)
        arrays = starting.gaussian(shapes, std, seed, runs, dtype)
        return cls(**arrays, query=query, scale=scale, causal=causal)

    @property
    def _rows(self) -> None:
        return None

    @property
    def _out_dim(self) -> int:
        return self.out_dim

    def _targets(self, n: int, q: int, loss: str) -> tuple[str, tuple[int, ...]]:
        return ("n q", (n, q)) if loss == "cross_entropy" else ("n q p", (n, q, self.out_dim))


def _shapes(
    heads: int, dim: int, out_dim: int, rank: int | None, tied: bool, prompt_rows: int | None
) -> starting.Shapes:
    H, d = _checks.count(heads, "heads"), _checks.count(dim, "dim")
    p = _checks.count(out_dim, "out_dim")
    return starting.shapes(H, d, {"V": (H, d, p)}, rank, tied, prompt_rows)
