"""`Classifier`: multi-head attention read out to one number per sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._arguments import checks
from .._arguments.deprecated import keyword_only
from .._arguments.lists import OF_OUTPUTS
from .._arguments.names import AttentionName
from .._arguments.values import Array, Optional, frozen
from ..dataset.dataset import Dataset, Seed, Seeds
from . import initializers, validation
from .attention import Attention
from .low_rank import LowRank
from .model import Model
from .random_step import random_step

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Classifier(Model):
    """The multi-head attention classifier.

        Φ(X) = H^(-1/2) Σ_h ⟨U_h, softmax(scale · Z W_h Xᵀ) X⟩,

    a scalar for each sample X (T, d). softmax, or another map, acts on every row; ⟨,⟩ sums the
    products of all entries. The query side Z (q, d) is X itself, one of its tokens, external or a
    prompt.

    The arrays are read-only, and copied if the caller could write to them. A model therefore never
    changes; `model + s * gradients` and `dataclasses.replace` make new ones.

    W, U, prompt and an external query may each have a leading run axis of one common length R: R
    models side by side, which share the arrays without it. Results then have it too.

    Parameters
    ----------
    W : array (H, d, d), float32 or float64, `LowRank`, or None
        Key-query matrices. None: the identity for every head, which is not a parameter; all heads
        then have the attention softmax(scale · Z Xᵀ), and each its own U.
    U : array (H, q, d) of the same dtype
        Readout matrices.
    query : None, int or array (n, q, d)
        None: Z = X, so that q = T. An integer: that token of each sample, counted from the end of
        the sample if negative, so that q = 1; zeros in a sample that is too short. An array: an
        external query for each of n samples. A `query` that comes with the data overrides it.
    prompt : array (q, d) of the same dtype, optional
        Trained query rows that all samples share; query must then be None.
    scale : float
        Factor of the logits; the default is 1.0, not 1/sqrt(d).
    causal : bool
        Whether a row sees only the tokens up to its own: row t of Z the tokens 0 ... t, the row of
        an integer query those up to that token. A prompt cannot be causal.
    attention : str
        The row map, which makes attention weights A of the logits S of a row: "softmax";
        "softmax1", exp(S) / (1 + Σ exp(S)); "linear", S; "relu", max(S, 0); "sigmoid",
        1 / (1 + exp(-S)); "hardmax", all weight on the largest logit, shared equally among equal
        ones, which has no derivative by the logits.
    normalize : bool, optional
        Whether the weights of linear, relu and sigmoid are divided by the number of tokens that the
        row sees. None: those of linear and relu are, those of sigmoid are not. None for the other
        maps.

    Raises
    ------
    TypeError
        If W, U, query or prompt are not of one dtype, float32 or float64.
    ValueError
        If their shapes do not fit together, scale is not finite, there is no such row map, or it
        has no choice of `normalize`.

    References
    ----------
    Deora, Ghaderi, Taheri, Thrampoulidis, "On the Optimization and Generalization of Multi-head
    Attention", TMLR 2024.

    Examples
    --------
    >>> import numpy as np
    >>> import mhfast as mh
    >>> rng = np.random.default_rng(0)
    >>> model = mh.Classifier(rng.standard_normal((3, 9, 9)), rng.standard_normal((3, 5, 9)))
    >>> X = rng.standard_normal((20, 5, 9))
    >>> model(X).shape  # one output for each sample
    (20,)
    >>> model.heads, model.dim, model.dtype.name, model.runs
    (3, 9, 'float64', None)
    >>> half = model.replace(U=0.5 * model.U)
    >>> bool(np.allclose(half(X), 0.5 * model(X)))
    True
    >>> factored = mh.Classifier(mh.LowRank(rng.standard_normal((3, 9, 2))), model.U)
    >>> factored.Q.shape, factored.K is None  # tied
    ((3, 9, 2), True)
    >>> fixed = mh.Classifier(None, model.U)  # W_h is the identity
    >>> list(fixed.parameters), bool(np.allclose(fixed(X), model.replace(W=[np.eye(9)] * 3)(X)))
    (['U'], True)
    """

    losses: ClassVar[tuple[str, ...]] = OF_OUTPUTS

    W: Any  # Array, LowRank or None for identities; which one, callers know
    U: Array
    query: int | Array | None = None
    prompt: Optional = None
    scale: float = 1.0
    causal: bool = False
    attention: Attention = field(kw_only=True, repr=False)
    normalize: bool | None = field(kw_only=True, repr=False)

    def __init__(
        self,
        W: npt.ArrayLike | LowRank | None,
        U: npt.ArrayLike,
        query: int | npt.ArrayLike | None = None,
        prompt: npt.ArrayLike | None = None,
        *,
        scale: float = 1.0,
        causal: bool = False,
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
    ) -> None:
        W, heads, dim, dtype = validation.key_query(W)
        U, dim = validation.readout(U, "U", dtype, dim, axis=-1)
        like = "U" if W is None else "W"
        query, prompt = validation.query_side(query, prompt, dim, U.dtype, like)
        rows = validation.rows(query, prompt)
        checks.shape(U, "U", "H q d", (heads, rows, dim), runs=True)
        validation.no_empty_axis(W=W, U=U)
        vars(self).update(
            W=W,
            U=frozen(U),
            query=query,
            prompt=prompt,
            scale=validation.scale(scale, U.dtype),
            causal=validation.causal(causal, prompt),
            _row_map=validation.row_map(attention, normalize),
            _sizes=(int(U.shape[-3]), int(U.shape[-1]), U.dtype),
        )
        self._core  # noqa: B018  (checks that the run axes agree)

    @classmethod
    def pooled(
        cls,
        W: npt.ArrayLike | LowRank | None,
        u: npt.ArrayLike,
        tokens: int | None = None,
        *,
        query: int | npt.ArrayLike | None = None,
        prompt: npt.ArrayLike | None = None,
        scale: float = 1.0,
        causal: bool = False,
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
    ) -> Self:
        """Create the classifier with one readout vector for each head, of the mean over its rows.

            Φ(X) = H^(-1/2) Σ_h ⟨u_h, mean over rows of softmax(scale · Z W_h Xᵀ) X⟩

        It is the classifier with all q rows of U_h equal to u_h / q, and ``model.U.sum(axis=-2)``
        is u. Training keeps it one if the rows are tied: ``constraints={"U": "rows"}`` of `train`.

        Parameters
        ----------
        W : array (H, d, d), float32 or float64, `LowRank`, or None
            As for the class.
        u : array (H, d) of the same dtype
            The readout vectors, with a leading R for a run axis.
        tokens : int, optional
            T, where the rows are the tokens of a sample: query and prompt are None.
        query : None, int or array (n, q, d)
            The query side, as for the class; the mean over one row is that row.
        prompt : array (q, d), optional
            As for the class.
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
        Classifier
            W and the prompt as they are, and U (H, q, d) with equal rows.

        Raises
        ------
        TypeError
            If dtypes differ, or nothing says how many rows there are.
        ValueError
            If shapes do not fit together.

        Examples
        --------
        >>> import numpy as np
        >>> import mhfast as mh
        >>> rng = np.random.default_rng(0)
        >>> W, u = rng.standard_normal((3, 9, 9)), rng.standard_normal((3, 9))
        >>> model = mh.Classifier.pooled(W, u, tokens=5)
        >>> X = rng.standard_normal((20, 5, 9))
        >>> means = (model.attention(X) @ X[:, None]).mean(axis=2)  # (n, H, d)
        >>> bool(np.allclose(model(X), (means * u).sum(axis=(1, 2)) / np.sqrt(3)))
        True
        """
        _, heads, dim, dtype = validation.key_query(W)
        u, dim = validation.readout(u, "u", dtype, dim, axis=-1)
        checks.shape(u, "u", "H d", (heads, dim), runs=True)
        which, rows = validation.query_side(query, prompt, dim, u.dtype, "u")
        q = validation.rows(which, rows)
        q = checks.count(tokens, "tokens") if q is None else q
        return cls(
            W, np.repeat(u[..., None, :] / u.dtype.type(q), q, axis=-2), which, rows, scale=scale,
            causal=causal, attention=attention, normalize=normalize,
        )  # fmt: skip

    @classmethod
    def zeros(
        cls,
        heads: int,
        tokens: int,
        dim: int,
        *,
        runs: int | None = None,
        rank: int | None = None,
        tied: bool = False,
        prompt_rows: int | None = None,
        dtype: npt.DTypeLike = np.float64,
        query: int | npt.ArrayLike | None = None,
        scale: float = 1.0,
        causal: bool = False,
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
    ) -> Self:
        """Create the classifier with all parameters zero, for samples of `tokens` tokens.

        Parameters
        ----------
        heads, tokens, dim : int
            H, T and d, each at least 1.
        runs : int, optional
            R, for parameters with a run axis.
        rank : int, optional
            r, for a `LowRank` W.
        tied : bool
            With `rank`: whether W has one factor, Q (K is None).
        prompt_rows : int, optional
            q, for a trained prompt of that many rows.
        dtype : float32 or float64
        query : None, int or array (n, q, d)
            The query side, as for the class. U has as many rows as the query side.
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
        Classifier
            W (H, d, d) or its factors, U (H, q, d) and the prompt, with a leading R if `runs` is
            given.

        Raises
        ------
        TypeError
            If a size, `query` or `dtype` is of the wrong kind.
        ValueError
            If a size is below 1, or `query` and `prompt_rows` are both given.

        Examples
        --------
        >>> import mhfast as mh
        >>> mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        Classifier(W=<float64 (3, 9, 9)>, U=<float64 (3, 5, 9)>, scale=1.0)
        """
        shapes = _shapes(heads, tokens, dim, rank, tied, prompt_rows, query, dtype)
        arrays = initializers.zeros(shapes, runs, dtype)
        return cls(
            **arrays, query=query, scale=scale, causal=causal, attention=attention,
            normalize=normalize,
        )  # fmt: skip

    @classmethod
    def gaussian(
        cls,
        heads: int,
        tokens: int,
        dim: int,
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
        attention: AttentionName = "softmax",
        normalize: bool | None = None,
    ) -> Self:
        """Draw a classifier with independent entries N(0, std²), for samples of `tokens` tokens.

        Parameters are drawn in the order W (or Q, K), U, prompt and in float64, so that a float32
        model is the float64 model of the same seed rounded.

        Parameters
        ----------
        heads, tokens, dim : int
            H, T and d, each at least 1.
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
        prompt_rows : int, optional
            q, for a trained prompt of that many rows.
        dtype : float32 or float64
        query : None, int or array (n, q, d)
            The query side, as for the class. U has as many rows as the query side.
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
        Classifier
            W (H, d, d) or its factors, U (H, q, d) and the prompt, with a leading R if `runs` is
            given.

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
        >>> mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.1, seed=0)
        Classifier(W=<float64 (3, 9, 9)>, U=<float64 (3, 5, 9)>, scale=1.0)
        """
        shapes = _shapes(heads, tokens, dim, rank, tied, prompt_rows, query, dtype)
        arrays = initializers.gaussian(shapes, std, seed, runs, dtype)
        return cls(
            **arrays, query=query, scale=scale, causal=causal, attention=attention,
            normalize=normalize,
        )  # fmt: skip

    @classmethod
    @keyword_only("seed", 3)
    def random_step(
        cls,
        data: Dataset,
        heads: int,
        *,
        seed: Seed | Seeds,
        balanced: bool = False,
        query: int | None = None,
        scale: float = 1.0,
    ) -> Self:
        """Create the classifier one gradient step from zero, with a random sign for each head.

            W_h = 0,   U_h = α_h / 2 · 1_q (Σ_i w_i y_i x̄_i / Σ w)ᵀ

        with independent random signs α_h and x̄_i the mean token of sample i; see
        `mhfast.models.random_step`.

        Parameters
        ----------
        data : Dataset
            X (n, T, d), y (n,) of -1 and 1, weights w or None for ones.
        heads : int
            H, at least 1.
        seed : int, numpy.random.Generator, or a sequence of them
            A sequence gives a run axis.
        balanced : bool
            Whether half of the signs are 1 and half -1, in random order, in place of independent
            ones. All outputs are then 0, and what the heads compute together does not depend on the
            draw. H must be even.
        query : int, optional
            A token of each sample as the query, as for the class.
        scale : float
            The factor of the logits.

        Returns
        -------
        Classifier
            W (H, d, d) and U (H, q, d) of the dtype of the data.

        Raises
        ------
        TypeError
            If `data` is not a Dataset, or a seed is neither an integer nor a generator.
        ValueError
            If a label is neither -1 nor 1, the number of seeds is not R, or an odd number of heads
            is to be balanced.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> mh.Classifier.random_step(data, 3, seed=0)
        Classifier(W=<float64 (3, 9, 9)>, U=<float64 (3, 5, 9)>, scale=1.0)
        """
        arrays = random_step(data, heads, seed, query, balanced=balanced)
        return cls(**arrays, query=query, scale=scale)

    @property
    def _rows(self) -> int:
        return int(self.U.shape[-2])

    @property
    def _out_dim(self) -> int:
        return 0

    def _targets(self, n: int, *_: object) -> tuple[str, tuple[int, ...]]:
        return "n", (n,)


def _shapes(
    heads: int,
    tokens: int,
    dim: int,
    rank: int | None,
    tied: bool,
    prompt_rows: int | None,
    query: int | npt.ArrayLike | None,
    dtype: npt.DTypeLike,
) -> initializers.Shapes:
    H, T, d = (
        checks.count(heads, "heads"),
        checks.count(tokens, "tokens"),
        checks.count(dim, "dim"),
    )
    q = validation.query_rows(query, prompt_rows, T, d, checks.float_dtype(dtype))
    return initializers.shapes(H, d, {"U": (H, q, d)}, rank, tied, prompt_rows)
