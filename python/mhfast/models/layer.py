"""`Layer`: multi-head attention with a value matrix for each head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.lists import OF_CLASSES, OF_OUTPUTS, OF_ROWS
from .._arguments.names import AttentionName
from .._arguments.values import Array, Optional, frozen
from ..dataset.dataset import Seed, Seeds
from . import initializers, validation
from .attention import Attention
from .low_rank import LowRank
from .model import Model
from .value_output import ValueOutput

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Layer(Model):
    """The multi-head attention layer.

        F(X) = Σ_h softmax(scale · Z W_h Xᵀ) X V_h,

    a (q, p) matrix for each sample X (T, d). softmax acts on every row. The query side Z (q, d) is
    X itself, one of its tokens, external or a prompt; T may be any number.

    The arrays are read-only and may have a run axis, as those of a `Classifier`.

    Parameters
    ----------
    W : array (H, d, d), float32 or float64, `LowRank`, or None
        Key-query matrices. None: the identity for every head, which is not a parameter, so that all
        heads have the attention softmax(scale · Z Xᵀ).
    V : array (H, d, p) of the same dtype, `ValueOutput`, or None
        Value matrices, or their factors. None: the identity for every head, which is not a
        parameter, so that p = d. Where W is None too there is one head, F(X) =
        softmax(scale · Z Xᵀ) X, of tokens of any dimension and dtype unless a prompt or an array
        as query says them.
    query : None, int or array (n, q, d)
        None: Z = X. An integer: that token of each sample. An array: an external query. As for a
        `Classifier`.
    prompt : array (q, d) of the same dtype, optional
        Trained query rows that all samples share; query must then be None.
    scale : float
        Factor of the logits; the default is 1.0, not 1/sqrt(d).
    causal : bool
        Whether a row sees only the tokens up to its own.
    attention, normalize
        The row map, softmax by default, as for a `Classifier`.

    Raises
    ------
    TypeError
        If W, V, query or prompt are not of one dtype, float32 or float64.
    ValueError
        If their shapes do not fit together, scale is not finite, there is no such row map, or it
        has no choice of `normalize`.

    References
    ----------
    Chen, Li, "Provably learning a multi-head attention layer", whose Θ_i is W_h here and whose W_i
    is V_h.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> layer = mh.Layer(rng.standard_normal((3, 9, 9)), rng.standard_normal((3, 9, 2)))
    >>> X = rng.standard_normal((20, 5, 9))
    >>> layer(X).shape, layer.out_dim  # (n, q, p): one row for each token
    ((20, 5, 2), 2)
    >>> last = layer.replace(query=-1)
    >>> bool(np.allclose(last(X)[:, 0], layer(X)[:, -1]))
    True
    >>> mixing = mh.Layer(layer.W, None)  # F(X) = Σ_h softmax(X W_h Xᵀ) X
    >>> mixing, bool(np.allclose(mixing(X), layer.attention(X).sum(axis=1) @ X))
    (Layer(W=<float64 (3, 9, 9)>, V=None, scale=1.0), True)
    """

    losses: ClassVar[tuple[str, ...]] = (*OF_OUTPUTS, *OF_ROWS)

    W: Any  # Array, LowRank or None for identities; which one, callers know
    V: Any  # Array, ValueOutput or None for identities; which one, callers know
    query: int | Array | None = None
    prompt: Optional = None
    scale: float = 1.0
    causal: bool = False
    attention: Attention = field(kw_only=True, repr=False)
    normalize: bool | None = field(kw_only=True, repr=False)

    def __init__(
        self,
        W: npt.ArrayLike | LowRank | None,
        V: npt.ArrayLike | ValueOutput | None,
        query: int | npt.ArrayLike | None = None,
        prompt: npt.ArrayLike | None = None,
        *,
        scale: float = 1.0,
        causal: bool = False,
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
    ) -> None:
        W, heads, dim, dtype = validation.key_query(W)
        like = "W" if W is not None else "V" if V is not None else "the model"
        values = V.A if isinstance(V, ValueOutput) else V
        if values is not None:
            values, dim = validation.readout(values, "V", dtype, dim, axis=-2)
            dtype = values.dtype
        query, prompt = validation.query_side(query, prompt, dim, dtype, like)
        if values is not None:
            name, letters = ("A", "H d r") if isinstance(V, ValueOutput) else ("V", "H d p")
            checks.shape(values, name, letters, (heads, dim, None), runs=True)
            heads = values.shape[-3]
        validation.no_empty_axis(W=W, V=values)
        sizes = validation.sizes(heads, dim, dtype, query, prompt)
        vars(self).update(
            W=W,
            V=V if isinstance(V, ValueOutput) or values is None else frozen(values),
            query=query,
            prompt=prompt,
            scale=validation.scale(scale, sizes[2]),
            causal=validation.causal(causal, prompt),
            _row_map=validation.row_map(attention, normalize),
            _sizes=sizes,
        )
        self._core  # noqa: B018  (checks that the run axes agree)

    @property
    def out_dim(self) -> int:
        """The dimension p of an output row."""
        if self.V is None:
            return self.dim
        return int((self.V if self.B is None else self.B).shape[-1])

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
        value_rank: int | None = None,
        prompt_rows: int | None = None,
        dtype: npt.DTypeLike = np.float64,
        query: int | npt.ArrayLike | None = None,
        scale: float = 1.0,
        causal: bool = False,
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
    ) -> Self:
        """Create the layer with all parameters zero.

        Parameters
        ----------
        heads, dim, out_dim : int
            H, d and p, each at least 1.
        runs : int, optional
            R, for parameters with a run axis.
        rank : int, optional
            r, for a `LowRank` W.
        tied : bool
            With `rank`: whether W has one factor, Q (K is None).
        value_rank : int, optional
            The r of a V that is a `ValueOutput`.
        prompt_rows : int, optional
            q, for a trained prompt of that many rows.
        dtype : float32 or float64
        query : None, int or array (n, q, d)
            The query side, as for the class.
        scale : float
            The factor of the logits.
        causal : bool
            Whether a row sees only the tokens up to its own.
        attention : str
            The row map, as for the class.
        normalize : bool, optional
            As for the class.

        Returns
        -------
        Layer
            W (H, d, d) and V (H, d, p), or their factors, and the prompt, with a leading R if
            `runs` is given.

        Raises
        ------
        TypeError
            If a size, `query` or `dtype` is of the wrong kind.
        ValueError
            If a size is below 1, or `query` and `prompt_rows` are both given.

        Examples
        --------
        >>> import mhfast as mh
        >>> mh.Layer.zeros(heads=3, dim=9, out_dim=2)
        Layer(W=<float64 (3, 9, 9)>, V=<float64 (3, 9, 2)>, scale=1.0)
        """
        shapes = _shapes(heads, dim, out_dim, rank, tied, value_rank, prompt_rows)
        arrays = initializers.zeros(shapes, runs, dtype)
        return cls(
            **arrays, query=query, scale=scale, causal=causal, attention=attention,
            normalize=normalize,
        )  # fmt: skip

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
        value_rank: int | None = None,
        prompt_rows: int | None = None,
        dtype: npt.DTypeLike = np.float64,
        query: int | npt.ArrayLike | None = None,
        scale: float = 1.0,
        causal: bool = False,
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
    ) -> Self:
        """Draw a layer with independent entries N(0, std²).

        Parameters are drawn in the order W (or Q, K), V (or A, B), prompt and in float64, so that a
        float32 model is the float64 model of the same seed rounded.

        Parameters
        ----------
        heads, dim, out_dim : int
            H, d and p, each at least 1.
        std : float
            Standard deviation of every entry, at least 0.
        seed : int, numpy.random.Generator, or a sequence of them
            The draw of run r of a sequence is that of its entry r. The runs of one seed are
            independent.
        runs : int, optional
            R, for parameters with a run axis.
        rank : int, optional
            r, for a `LowRank` W.
        tied : bool
            With `rank`: whether W has one factor, Q (K is None).
        value_rank : int, optional
            The r of a V that is a `ValueOutput`.
        prompt_rows : int, optional
            q, for a trained prompt of that many rows.
        dtype : float32 or float64
        query : None, int or array (n, q, d)
            The query side, as for the class.
        scale : float
            The factor of the logits.
        causal : bool
            Whether a row sees only the tokens up to its own.
        attention : str
            The row map, as for the class.
        normalize : bool, optional
            As for the class.

        Returns
        -------
        Layer
            W (H, d, d) and V (H, d, p), or their factors, and the prompt, with a leading R if
            `runs` is given.

        Raises
        ------
        TypeError
            If a size, a seed, `query` or `dtype` is of the wrong kind.
        ValueError
            If a size is below 1, `std` is negative, the number of seeds is not `runs`, or `query`
            and `prompt_rows` are both given.

        Examples
        --------
        >>> import mhfast as mh
        >>> mh.Layer.gaussian(heads=3, dim=9, out_dim=2, std=0.1, seed=0)
        Layer(W=<float64 (3, 9, 9)>, V=<float64 (3, 9, 2)>, scale=1.0)
        """
        shapes = _shapes(heads, dim, out_dim, rank, tied, value_rank, prompt_rows)
        arrays = initializers.gaussian(shapes, std, seed, runs, dtype)
        return cls(
            **arrays, query=query, scale=scale, causal=causal, attention=attention,
            normalize=normalize,
        )  # fmt: skip

    @property
    def _rows(self) -> None:
        return None

    @property
    def _out_dim(self) -> int:
        if self.V is not None:
            return self.out_dim
        return -1 if self._sizes[1] is None else self.dim

    def _targets(self, n: int, q: int, loss: str) -> tuple[str, tuple[int, ...]]:
        return ("n q", (n, q)) if loss in OF_CLASSES else ("n q p", (n, q, self._out_dim))


def _shapes(
    heads: int,
    dim: int,
    out_dim: int,
    rank: int | None,
    tied: bool,
    value_rank: int | None,
    prompt_rows: int | None,
) -> initializers.Shapes:
    H, d = checks.count(heads, "heads"), checks.count(dim, "dim")
    p = checks.count(out_dim, "out_dim")
    values = {"V": (H, d, p)}
    if value_rank is not None:
        r = checks.count(value_rank, "value_rank")
        values = {"A": (H, d, r), "B": (H, r, p)}
    return initializers.shapes(H, d, values, rank, tied, prompt_rows)
