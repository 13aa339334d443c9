"""`explain`: the plan that the core uses for a model and samples of a given shape."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import checks
from ..dataset.dataset import Dataset
from ..dataset.words import Tokens
from .distinct import compact
from .low_rank import LowRank
from .model import Model
from .problem import READOUTS, looks_up


def explain(
    model: Model,
    X: npt.ArrayLike | Tokens | Dataset | tuple[int, ...],
    *,
    runs: int | None = None,
) -> dict[str, object]:
    """Report how the core would compute this model on these samples: plan, chunks, workspace.

    Parameters
    ----------
    model : Classifier or Layer
    X : array (n, T, d), Tokens, Dataset, or the shape (n, T, d) alone
        A run axis may come first. The plan for Tokens is "words" where they are looked up.
    runs : int, optional
        The number of runs side by side, if neither model nor X has a run axis.

    Returns
    -------
    dict of plain values, for reading; its entries may change between versions. "keys" and
    "training_keys" are the keys that each row attends to in a loss and gradient and in the steps of
    training: T, or d where linear attention is computed by the triangular factor of the tokens.
    "training_plan" is the plan of full-batch steps of training: "products" where they are from the
    products XᵀX of the tokens of each sample, which are computed once, before the first step, and
    kept in "product_bytes" (at most 256 MB; beyond, steps are by these keys). Both count as many
    runs as there are side by side.
    "training_words" are the words that training on all samples looks up, 0 for none, and
    "training_samples" the samples that it goes over: of a Dataset the different ones where that
    saves time.
    "readout_plan" is the plan of full-batch steps of training that change U or V alone: "attended"
    where the attended tokens are computed once, before the first step, and kept in
    "attended_bytes", which count as many runs as there are side by side.

    Raises
    ------
    TypeError
        If it is not a Classifier or a Layer.
    ValueError
        If the shape does not fit the model, or run axes differ.

    Examples
    --------
    >>> import mhfast as mh
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> mh.explain(model, (20, 5, 9))["plan"] in ("samples", "hybrid", "rows", "tiles")
    True
    >>> mh.explain(model, (20, 5, 9))["readout_plan"]
    'attended'
    >>> linear = mh.Layer.gaussian(3, 4, 1, std=0.1, seed=0, query=-1, attention="linear")
    >>> mh.explain(linear, (20, 50, 4))["training_keys"]
    4
    >>> mh.explain(linear.replace(query=None), (20, 50, 4))["training_plan"]
    'products'
    """
    if not isinstance(model, Model):
        raise TypeError(f"model: expected a Classifier or a Layer, got {type(model).__name__}")
    query = X.query if isinstance(X, Dataset) else None
    given = X._given if isinstance(X, Dataset) else X
    shape = given if isinstance(given, tuple) else np.shape(given)
    words = isinstance(given, Tokens) and looks_up(model, given, query)
    side_by_side = model._core.runs
    if runs is not None:
        side_by_side = side_by_side.meet("runs", (checks.count(runs, "runs"),), 0)
    if isinstance(X, Dataset):
        side_by_side = side_by_side.join(X._runs)
    if len(shape) == 4:
        side_by_side = side_by_side.meet("X", shape, 3)
        shape = shape[1:]
    itself = query is None and model.query is None and model.prompt is None
    rows = model._rows if itself else None
    if len(shape) != 3 or model._sizes[1] not in (None, shape[2]) or (rows not in (None, shape[1])):
        T = "T" if rows is None else rows
        d = "d" if model._sizes[1] is None else model.dim
        raise ValueError(f"X: expected shape (n, T, d) = (n, {T}, {d}), got {shape}")
    n, tokens, d = (checks.count(length, "X") for length in shape)
    q = model._query_rows(tokens) if query is None else query.shape[-2]
    report = _core.explain(
        n=n, T=tokens, q=q, d=d, H=model.heads, p=d if model._out_dim < 0 else model._out_dim,
        identity_w=model.W is None, identity_v=not set(READOUTS) & set(model.parameters),
        shared_query=model.prompt is not None,
        words=given.words if isinstance(given, Tokens) and words else 0,
        rank=model.W.rank if isinstance(model.W, LowRank) else 0,
        row_map=model._core.row_map,
        causal=model.causal and (query is not None or not isinstance(model.query, int)),
        runs=side_by_side.length, dtype_name=(model._sizes[2] or np.dtype(np.float64)).name,
    )  # fmt: skip
    seen = _in_training(model, X)
    found = None if seen is None else seen.words
    is_used = found is not None and looks_up(model, found, query)
    report["training_words"] = found.words if found is not None and is_used else 0
    report["training_samples"] = n if seen is None else seen.n
    return report


def _in_training(
    model: Model, X: npt.ArrayLike | Tokens | Dataset | tuple[int, ...]
) -> Dataset | None:
    """Return the data set as training goes over it; None where X has no numbers."""
    if isinstance(X, Dataset):
        return compact(model, X).data
    given = X if isinstance(X, Tokens | tuple) else np.asarray(X)
    if isinstance(given, tuple) or given.dtype not in (np.float32, np.float64):
        return None
    different = np.arange(float(given.shape[-3]))  # targets, so that no samples are merged
    return compact(model, Dataset(given, different)).data
